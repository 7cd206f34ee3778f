# What reads past L, from the project's root. First: python data/code/prepare.py
# It goes on where it was stopped. Start it in two shells for two cores, with OMP_NUM_THREADS=1 each.
#   MODELS=conv,none   some models alone
set -e
python -m results.past_L.table --models="[$(echo "$MODELS" | sed "s/[^,]\{1,\}/'&'/g")]"
