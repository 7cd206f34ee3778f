# Two Chomsky-hierarchy tasks at a small budget, with DAPE 1x3-Kerple, with RoPE, and with RoPE at random positions: a
# run takes one to four minutes of one CPU core. Lengths to 60 in steps of 3, then 41 to 500 in steps of 51. From the
# project's root: bash results/che_small/run.sh, or with some seeds: SEEDS='1337 1338' bash ...
set -e
for seed in ${SEEDS:-1337 1338 1339}; do
    for method in 'rope_random --position=rope --random_positions=2048' 'rope --position=rope' \
                  'kerple_dape3 --position=kerple --dape_kernel=3'; do
        for task in even_pairs:300 missing_duplicate:800; do
            run="python che.py ${method#* } --seed=$seed --out_dir=out/che/${method%% *}_$seed"
            run="$run --tasks=['${task%:*}'] --max_iters=${task#*:} --eval_interval=100"
            $run --test_length=500 --eval_every=51 --n_test=64 --label=${task%:*}
            $run --test_length=60 --eval_every=3 --n_test=128 --label=${task%:*}_near
        done
    done
done
