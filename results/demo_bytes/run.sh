# The byte models, NoPE and RoPE by train.py's defaults, and what extends NoPE, on the standard
# library; other studies go on from seed 1337. After python data/stdlib/prepare.py.
#   python results/tables.py out/demo_seeds/????    # what it has measured of five seeds, in an hour
. results/common.sh
train out/demo/nope
train out/demo/rope config/demo_rope.py
once out/demo/nope/scale_uniform.json python tune_scale.py --method=uniform --n_samples=32
for T in 320 640; do
    once out/demo/nope/scale_head_$T.json python tune_scale.py --target_length=$T --max_iters=120
done
entropy() {  # RUN NAME ARGUMENTS...
    once out/demo/$1/entropy_demo_$2.json python entropy.py --out_dir=out/demo/$1 --n_samples=64 \
        --label=demo_$2 "${@:3}"
}
entropy nope NoPE
entropy nope uniform_512 --scale=1.8  # the best at 4L
entropy rope RoPE

row() {  # NAME ARGUMENTS...: the loss by length
    once $out/eval_ppl_position_$1.json python eval_ppl.py --init_from=$out/nope/last.pt \
        --out_dir=$out --label=$1 --protocol=position --lengths=[128,256,512] --n_samples=600 \
        --dtype=float32 "${@:2}"
}

best_at() {  # LENGTH: the best uniform scale
    python -c "import json; found = json.load(open('$out/nope/scale_uniform.json'))
print(dict(zip(found['lengths'], found['best_by_length']))[$1])"
}

for seed in ${SEEDS:-1337 1338 1339 1340 1341}; do
    out=out/demo_seeds/$seed
    train $out/nope --seed=$seed
    row NoPE
    once $out/nope/scale_uniform.json python tune_scale.py --out_dir=$out/nope --method=uniform \
        --n_samples=32 --dtype=float32
    for T in 256 512; do
        row uniform_$T --scale=$(best_at $T)
        for tune in head_scale channel,norm; do  # at 1.25 times T
            scales=$out/nope/scale_head_$((T * 5 / 4))_$tune.json
            once $scales python tune_scale.py --out_dir=$out/nope --target_length=$((T * 5 / 4)) \
                --tune=$tune --label=$tune --max_iters=120 --dtype=float32
            row ${tune}_$T --scale=$scales
        done
    done
done
