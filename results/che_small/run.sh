# Two Chomsky-hierarchy tasks at a small budget, with DAPE 1x3-Kerple, Kerple, RoPE, and RoPE at
# random positions: 1 to 11 minutes of one CPU core each. Lengths to 60 in steps of 3, then 41 to
# 500 in steps of 51. From the project's root.
set -e

train() {  # NAME SEED METHOD: both tasks
    for task in even_pairs:300 missing_duplicate:800; do
        run="python che.py ${*:3} --seed=$2 --out_dir=out/che/$1 --tasks=['${task%:*}']"
        run="$run --max_iters=${task#*:} --eval_interval=100"
        $run --test_length=500 --eval_every=51 --n_test=64 --label=${task%:*}
        $run --test_length=60 --eval_every=3 --n_test=128 --label=${task%:*}_near
    done
}

for seed in ${SEEDS:-1337 1338 1339}; do
    train rope_random_$seed $seed --position=rope --random_positions=2048
    train rope_$seed $seed --position=rope
    train kerple_$seed $seed --position=kerple
    train kerple_dape3_$seed $seed --position=kerple --dape_kernel=3
done
