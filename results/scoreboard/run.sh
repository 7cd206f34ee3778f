# The scoreboard, from the project's root; first: python data/books/prepare.py FOLDER
# It goes on where it was stopped. Start it in two shells for two cores, with OMP_NUM_THREADS=1 each.
#   METHODS=nape,alibi   only these rows         SIZE=books   5M parameters
set -e
python -m results.scoreboard.table --size=${SIZE:-small} \
    --methods="[$(echo "$METHODS" | sed "s/[^,]\{1,\}/'&'/g")]"
