# Table 4 of the head-scale paper on the small passkey model (L = 256, tuned at 3L): no concentration constraint, start
# at 1 instead of the best uniform scale. After results/passkey_demo/run.sh, from the project's root.
set -e
nope=out/passkey/nope
tune="python tune_scale.py --out_dir=$nope --target_length=768 --max_iters=100 --n_samples=16"
$tune --label=full
$tune --label=no_min --min_scale=None
$tune --label=from_1 --init_scale=1.0
$tune --label=neither --min_scale=None --init_scale=1.0
python eval_ppl.py config/table_ablation.py
for label in full no_min from_1 neither; do
    python passkey.py --out_dir=$nope --max_length=768 --n_lengths=3 --n_keys=5 \
        --scale=$nope/scale_head_768_$label.json
done
python passkey.py --out_dir=$nope --max_length=768 --n_lengths=3 --n_keys=5 --label=768
python passkey.py --out_dir=$nope --max_length=768 --n_lengths=3 --n_keys=5 --scale=1.2 --label=768_scale1.2
