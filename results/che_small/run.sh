# Two Chomsky-hierarchy tasks at a small budget: 1 to 11 minutes of one core a run. Lengths to 60 in
# steps of 3, then 41 to 500 in steps of 51.
. results/common.sh

both() {  # METHOD ARGUMENTS...: both tasks
    for task in even_pairs:300 missing_duplicate:800; do
        name=${task%:*} out=out/che/$1_$seed
        run="python -m extras.che --seed=$seed --out_dir=$out --tasks=['$name'] ${*:2}
            --max_iters=${task#*:} --eval_interval=100"
        once $out/che_$name.json $run --test_length=500 --eval_every=51 --n_test=64 --label=$name
        once $out/che_${name}_near.json $run --test_length=60 --eval_every=3 --n_test=128 \
            --label=${name}_near
    done
}

for seed in ${SEEDS:-1337 1338 1339}; do
    both rope_random --position=rope --random_positions=2048
    both rope --position=rope
    both kerple --position=kerple
    both kerple_dape3 --position=kerple --dape_kernel=3
done
