# What results/passkey_demo shows: a small NoPE model that retrieves passkeys, its RoPE twin, and
# the scales. Run it from the project's root; each training took half an hour on one busy CPU core.
set -e
. "$(dirname "$0")/../train.sh"
python data/stdlib/prepare.py --tokenizer=bpe:1024 --out_dir=data/stdlib_bpe
python data/passkey/prepare.py
python data/passkey/prepare.py --min_length=700 --max_length=1000 --n_documents=2500 --seed=2 --out_dir=data/passkey_long
nope=out/passkey/nope
train $nope config/passkey_nope.py
train out/passkey/rope config/passkey_nope.py --position=rope
python tune_scale.py --out_dir=$nope --method=uniform --target_length=2048 --n_samples=16 --candidate_range=[1.0,2.0,0.2]
python tune_scale.py --out_dir=$nope --target_length=1024 --max_iters=100 --n_samples=16
python tune_scale.py --out_dir=$nope --target_length=1024 --dataset=passkey_long --init_scale=1.2 --tune=scale:0.05 \
    --max_iters=60 --n_samples=8 --label=long
for lr in 0.01 0.003; do
    python tune_scale.py --out_dir=$nope --target_length=1024 --dataset=passkey_long --init_scale=1.2 --tune=scale:$lr \
        --max_iters=60 --n_samples=4 --label=long_lr$lr
done
tune='python tune_scale.py --out_dir=out/passkey/nope --target_length=1024 --dataset=passkey_long --init_scale=1.2
    --max_iters=60 --n_samples=4'
$tune --tune=scale:0.01,out:0.002,norm:0.001 --label=long_vectors
$tune --tune=scale,out,norm --label=long_vectors_fast
# as many tokens for every weight, of the NoPE model and of RoPE under YaRN and PI
long='--dataset=passkey_long --block_size=1024 --batch_size=8 --micro_batch_size=8 --weight_decay=0
    --warmup_iters=6 --max_iters=60 --min_lr=0 --log_interval=20 --eval_windows=16 --seed=42'
for lr in 4e-4 1e-3; do
    train out/passkey/nope_full_$lr $long --init_from=$nope/last.pt --learning_rate=$lr
done
extend_rope() {
    for method in yarn pi; do
        for lr in 1e-3 2e-3; do
            run=$1_${method}_$lr
            train $run $long --init_from=$1/last.pt --rope_scaling=$method --learning_rate=$lr
            python passkey.py --out_dir=$run $options
        done
    done
}
options='--max_length=2048 --n_lengths=8 --n_keys=5'
extend_rope out/passkey/rope
for run in rope nope nope_full_4e-4 nope_full_1e-3; do python passkey.py --out_dir=out/passkey/$run $options; done
for scale in 1.2 $nope/scale_head_1024{,_long,_long_lr0.01,_long_lr0.003,_long_vectors,_long_vectors_fast}.json; do
    python passkey.py --out_dir=$nope $options --scale=$scale
done
# two more seeds, for what the table gives of three
for seed in 1338 1339; do
    nope=out/passkey/$seed/nope full=out/passkey/$seed/nope_full_1e-3
    train $nope config/passkey_nope.py --seed=$seed
    tune="python tune_scale.py --out_dir=$nope --target_length=1024 --dataset=passkey_long --init_scale=1.2 --max_iters=60
        --n_samples=4"
    for lr in 0.01 0.003; do $tune --tune=scale:$lr --label=long_lr$lr; done
    $tune --tune=scale,out,norm --label=long_vectors_fast
    train $full $long --init_from=$nope/last.pt --learning_rate=1e-3
    python passkey.py --out_dir=$nope $options
    for scale in 1.2 $nope/scale_head_1024_long_{lr0.01,lr0.003,vectors_fast}.json; do
        python passkey.py --out_dir=$nope $options --scale=$scale
    done
    rope=out/passkey/$seed/rope
    train $rope config/passkey_nope.py --position=rope --seed=$seed
    extend_rope $rope
    for run in $full $rope; do python passkey.py --out_dir=$run $options; done
done
