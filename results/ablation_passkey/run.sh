# Table 4 of the head-scale paper on the small passkey model (L = 256, tuned at 3L on text alone):
# no concentration constraint, start at 1 instead of the best uniform scale. After
# results/passkey_demo/run.sh, from the project's root.
set -e
nope=out/passkey/nope
tune="python tune_scale.py --out_dir=$nope --dataset=stdlib_bpe --target_length=768 --max_iters=100 --n_samples=4"
$tune --label=full --init_scale=1.6
$tune --label=no_min --init_scale=1.6 --min_scale=None
$tune --label=from_1 --init_scale=1.0
python -m results.ablation_passkey.table
read="python passkey.py --out_dir=$nope --max_length=768 --n_lengths=6 --n_keys=3"
for label in full no_min from_1; do
    $read --scale=$nope/scale_head_768_$label.json
done
$read --label=768
for scale in 1.2 1.6; do
    $read --scale=$scale --label=768_scale$scale
done
