# Two Chomsky-hierarchy tasks at a small budget, DAPE 1x3-Kerple and RoPE: one to four minutes of one CPU core each.
# Lengths to 60 in steps of 3, then 41 to 500 in steps of 51. From the project's root.
set -e
for method in '--position=kerple --dape_kernel=3' --position=rope; do
    for task in even_pairs:300 missing_duplicate:800; do
        run="python che.py $method --tasks=['${task%:*}'] --max_iters=${task#*:} --eval_interval=100"
        $run --test_length=500 --eval_every=51 --n_test=64 --label=${task%:*}
        $run --test_length=60 --eval_every=3 --n_test=128 --label=${task%:*}_near
    done
done
