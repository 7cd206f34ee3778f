# Passkey retrieval: a small NoPE model, its RoPE twin, and what extends them, all tuned with 60 steps
# of 8 passkey documents of 4L = 1,024 tokens. Half an hour of training for each model on one core.
#   python results/tables.py out/passkey/????    # what it has measured
. results/common.sh
once data/stdlib_bpe/meta.json python data/stdlib/prepare.py --tokenizer=bpe:1024 \
    --out_dir=data/stdlib_bpe
once data/passkey/meta.json python data/passkey/prepare.py
once data/passkey_long/meta.json python data/passkey/prepare.py --min_length=700 \
    --max_length=1000 --n_documents=2500 --seed=2 --out_dir=data/passkey_long

row() {  # NAME MODEL ARGUMENTS...: keys found
    once $out/passkey_$1.json python passkey.py --init_from=$out/$2/last.pt --out_dir=$out \
        --label=$1 --max_length=2048 --n_lengths=8 --n_keys=5 "${@:3}"
}

tune() {  # NAME WHAT
    once $out/nope/scale_head_1024_$1.json python tune_scale.py --out_dir=$out/nope \
        --target_length=1024 --dataset=passkey_long --init_scale=1.2 --max_iters=60 \
        --n_samples=4 --tune=$2 --label=$1
    row $1 nope --scale=$out/nope/scale_head_1024_$1.json
}

weights() {  # RUN MODEL RATE ARGUMENTS...: every weight
    train $out/$1 --init_from=$out/$2/last.pt --dataset=passkey_long --block_size=1024 \
        --batch_size=8 --micro_batch_size=8 --weight_decay=0.0 --warmup_iters=6 --max_iters=60 \
        --learning_rate=$3 --min_lr=0 --log_interval=20 --eval_windows=16 --seed=42 "${@:4}"
    row $1 $1
}

for seed in ${SEEDS:-1337 1338 1339}; do
    out=out/passkey/$seed
    train $out/nope config/passkey_nope.py --seed=$seed
    train $out/rope config/passkey_nope.py --position=rope --seed=$seed
    for run in nope rope; do row $run $run; done
    row uniform nope --scale=1.2
    tune lr0.01 head_scale:0.01
    tune lr0.003 head_scale:0.003
    tune vectors head_scale,head_gain,norm
    weights nope_full nope 1e-3
    for method in yarn pi; do for rate in 1e-3 2e-3; do
        weights rope_${method}_$rate rope $rate --rope_scaling=$method
    done; done
done

# one seed: other rates, and head scales on the training mixture
out=out/passkey/1337
tune lr0.05 head_scale:0.05
tune slow_vectors head_scale:0.01,head_gain:0.002,norm:0.001
weights nope_full_4e-4 nope 4e-4
once $out/nope/scale_uniform.json python tune_scale.py --out_dir=$out/nope --method=uniform \
    --target_length=2048 --n_samples=16 --candidate_range=[1.0,2.0,0.2]
once $out/nope/scale_head_1024.json python tune_scale.py --out_dir=$out/nope \
    --target_length=1024 --max_iters=100 --n_samples=16
row mixture nope --scale=$out/nope/scale_head_1024.json
