# What results/extension_demo shows, after results/demo_bytes/run.sh. Run it from the project's root.
# Head scales, PI and YaRN read the same number of tokens: 120 steps of 8 windows of T.
set -e
. "$(dirname "$0")/../train.sh"
test -f out/demo/nope/loss.png && test -f out/demo/rope/loss.png || { echo 'First: bash results/demo_bytes/run.sh'; exit 1; }
for method in alibi logn; do
    train out/demo/$method --position=$method
done
python tune_scale.py --method=uniform --n_samples=32
python tune_scale.py --method=uniform --n_samples=32 --out_dir=out/demo/rope --candidate_range=[0.8,1.4,0.1]
for T in 256 512 1024; do
    python tune_scale.py --target_length=$T --max_iters=120
    for method in pi yarn; do
        train out/demo/${method}_$T config/finetune_demo.py config/$method.py --block_size=$T
    done
done
python tune_scale.py --target_lengths=[256,512,1024] --max_iters=120
python -m results.extension_demo.table
# Figure 1, beside what results/demo_bytes/run.sh has measured on the same windows
demo=out/demo/nope/entropy_demo
python entropy.py --out_dir=out/demo/rope --rope_scaling=dynamic_ntk:2 --n_samples=64 \
    --compare="['${demo}_NoPE.json','${demo}_uniform_512.json','out/demo/rope/entropy_demo_RoPE.json']"
