# Small vectors beside the scales, on the byte model, after results/demo_bytes/run.sh: three seeds, every method
# tuned with the same 120 steps of 8 windows of 4L = 512 tokens. Run it from the project's root.
set -e
. "$(dirname "$0")/../train.sh"
for seed in 1337 1338 1339; do
    out=out/vectors_demo/$seed
    for method in none rope; do
        train $out/$method --position=$method --seed=$seed
    done
    python tune_scale.py --out_dir=$out/none --method=uniform --target_length=512 --n_samples=32
    for tune in scale out scale,out norm scale,out,norm; do
        python tune_scale.py --out_dir=$out/none --target_length=512 --max_iters=120 --tune=$tune --label=$tune --n_samples=32
    done
    for lr in 2.5e-4 5e-4 1e-3 2e-3; do
        train $out/full_$lr config/finetune_demo.py --init_from=$out/none/last.pt --learning_rate=$lr --min_lr=0
    done
    for method in pi yarn; do
        train $out/$method config/finetune_demo.py config/$method.py --init_from=$out/rope/last.pt
    done
done
for method in ntk dynamic_ntk; do  # one seed
    train out/vectors_demo/1337/$method config/finetune_demo.py --rope_scaling=$method \
        --init_from=out/vectors_demo/1337/rope/last.pt
done
python -m results.vectors_demo.table
# attention's entropy in windows of 4L
for seed in 1337 1338 1339; do
    out=out/vectors_demo/$seed/none
    entropy="python entropy.py --init_from=$out/last.pt --length=512 --n_samples=32 --out_dir=out/vectors_demo/entropy"
    $entropy --label=${seed}_none
    for tune in scale scale,out,norm; do $entropy --scale=$out/scale_head_512_$tune.json --label=${seed}_$tune; done
done
