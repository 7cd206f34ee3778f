# make demo: trains and tunes the models that demo.py reads, then reads them; 10 minutes on two cores.
# Started again, it goes on where it was stopped. Another seed, in a folder of its own:
#   SEED=1338 bash results/past_L/demo.sh
# To save time, only the model with the convolution, which must learn to copy, is trained for 4,000
# steps; the other two fail past L after fewer. run.sh trains all alike.
. results/common.sh
python() { command "${PYTHON:-python}" "$@"; }
out=out/demo_code${SEED:+_$SEED} T=512

model() {  # NAME ARGUMENTS...
    train $out/$1 config/code.py --batch_size=8 --micro_batch_size=8 --seed=${SEED:-1337} "${@:2}"
}

head_scales() {  # MODEL
    once $out/$1/scale_head_$T.json python tune_scale.py --out_dir=$out/$1 --target_length=$T \
        --tune=head_scale:0.1 --init_scale=1.0 --min_scale=None --max_iters=60 --warmup_iters=10
}

conv() {
    model conv --short_conv=4 --max_iters=4000
    head_scales conv
}

others() {
    model none --max_iters=2400
    once $out/none/scale_uniform_$T.json python tune_scale.py --out_dir=$out/none --label=$T \
        --method=uniform --target_length=$T --n_samples=32 --candidate_range=[0.6,2.4,0.1]
    head_scales none
    model rope --position=rope --max_iters=1200
}

once data/code/meta.json python data/code/prepare.py
mkdir -p $out
# Side by side, each with half of the cores, because models this small use two cores badly: one after
# the other takes 18 % longer.
half=$(python -c 'import torch; print(max(1, torch.get_num_threads() // 2))')
OMP_NUM_THREADS=$half others > $out/others.log 2>&1 &
trap 'kill $! 2> /dev/null || true' EXIT  # Ctrl-C reaches both trainings, which save
echo "Two models are trained beside the one that you see, and $out/others.log shows their steps."
OMP_NUM_THREADS=$half conv
wait $! || { tail $out/others.log; exit 1; }
python demo.py --models=$out --out_dir=$out
