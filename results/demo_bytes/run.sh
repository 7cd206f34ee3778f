# The byte models: NoPE and its RoPE twin by train.py's defaults, and their scales, on the standard
# library. Other studies go on from them. Run it from the project's root: 30 minutes of two cores.
set -e
. "$(dirname "$0")/../train.sh"
python data/stdlib/prepare.py
train out/demo/nope
train out/demo/rope config/demo_rope.py
python tune_scale.py --method=uniform --n_samples=32
for T in 320 640; do
    python tune_scale.py --target_length=$T --max_iters=120
done
python entropy.py --n_samples=64 --label=demo_NoPE
python entropy.py --n_samples=64 --label=demo_uniform_512 --scale=1.8  # the best at 4L
python entropy.py --n_samples=64 --label=demo_RoPE --out_dir=out/demo/rope
