# What results/passkey_demo shows: a small NoPE model that retrieves passkeys, its RoPE twin, and the scales. About 40
# minutes on 2 CPU cores. Run it from the project's root.
set -e
python data/stdlib/prepare.py --tokenizer=bpe:1024 --out_dir=data/stdlib_bpe
python data/passkey/prepare.py
for method in nope rope; do
    test -f out/passkey/$method/last.pt || python train.py config/passkey_nope.py \
        $([ $method = rope ] && echo config/passkey_rope.py)
done
python tune_scale.py --out_dir=out/passkey/nope --method=uniform --target_length=2048 --n_samples=16
python tune_scale.py --out_dir=out/passkey/nope --target_length=1024 --max_iters=100 --n_samples=16
options='--max_length=2048 --n_lengths=8 --n_keys=5'
python passkey.py --out_dir=out/passkey/nope $options
python passkey.py --out_dir=out/passkey/rope $options
python passkey.py --out_dir=out/passkey/nope $options --scale=out/passkey/nope/scale_head_1024.json
