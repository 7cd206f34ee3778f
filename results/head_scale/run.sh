# Softmax scales at small size. Some parts: PARTS="text books" bash results/head_scale/run.sh
#   text       an hour on two cores; after python data/stdlib/prepare.py
#   books      1.5 to 2.5 hours of one core a seed; after python data/books/prepare.py FOLDER
#   passkey    half an hour of one core for a model, and its tunings; makes its data
#   attention  what one head sees
#   python results/tables.py out/books/????    # what it has measured
. results/common.sh

text() {  # 0.85M parameters, bytes of the standard library, L = 128
    out=out/demo_seeds/$1
    row() {  # NAME ARGUMENTS...: the loss by length
        once $out/eval_ppl_position_$1.json python eval_ppl.py --init_from=$out/nope/last.pt \
            --out_dir=$out --label=$1 --protocol=position --lengths=[128,256,512] \
            --n_samples=600 --dtype=float32 "${@:2}"
    }
    train $out/nope --seed=$1
    row NoPE
    once $out/nope/scale_uniform.json python tune_scale.py --out_dir=$out/nope --method=uniform \
        --n_samples=32 --dtype=float32
    best=$(python -c "import json; found = json.load(open('$out/nope/scale_uniform.json'))
print(dict(zip(found['lengths'], found['best_by_length']))[512])")
    row uniform --scale=$best
    for tune in head_scale channel,norm; do  # at 1.25 times 4L
        scales=$out/nope/scale_head_640_$tune.json
        once $scales python tune_scale.py --out_dir=$out/nope --target_length=640 --tune=$tune \
            --label=$tune --max_iters=120 --dtype=float32
        row $tune --scale=$scales
    done
}

books() {  # 5M parameters, bytes, L = 256; tuned with 150 steps of 8 windows of 4L
    out=out/books/$1
    row() {  # NAME MODEL ARGUMENTS...: perplexity in sliding windows
        once $out/eval_ppl_$1.json python eval_ppl.py --init_from=$out/$2/last.pt --out_dir=$out \
            --label=$1 --lengths=[256,512,1024,2048] --stride=64 --max_windows=32 \
            --batch_tokens=32768 --dtype=bfloat16 "${@:3}"
    }
    train $out/none config/books_nope.py --seed=$1
    train $out/rope config/books_nope.py --position=rope --seed=$1
    for run in none rope; do row $run $run; done
    once $out/none/scale_uniform.json python tune_scale.py --out_dir=$out/none --n_samples=16 \
        --method=uniform --candidate_range=[1.0,3.2,0.1]
    row fit none --scale=$out/none/scale_uniform_fit.json
    for tune in head_scale head_scale,head_gain,norm; do
        scales=$out/none/scale_head_1024_$tune.json
        once $scales python tune_scale.py --out_dir=$out/none --max_iters=150 \
            --target_length=1024 --tune=$tune --label=$tune
        row $tune none --scale=$scales
    done
    train $out/weights config/finetune_books.py --init_from=$out/none/last.pt \
        --learning_rate=1e-3 --min_lr=0
    row weights weights
    for scaling in pi yarn ntk dynamic_ntk; do
        train $out/$scaling config/finetune_books.py --rope_scaling=$scaling \
            --init_from=$out/rope/last.pt
        row $scaling $scaling
    done
}

passkey() {  # 1M parameters, L = 256; tuned with 60 steps of 8 documents of 4L
    once data/stdlib_bpe/meta.json python data/stdlib/prepare.py --tokenizer=bpe:1024 \
        --out_dir=data/stdlib_bpe
    once data/passkey/meta.json python data/passkey/prepare.py
    once data/passkey_long/meta.json python data/passkey/prepare.py --min_length=700 \
        --max_length=1000 --n_documents=2500 --seed=2 --out_dir=data/passkey_long
    out=out/passkey/$1
    row() {  # NAME MODEL ARGUMENTS...: keys found
        once $out/passkey_$1.json python passkey.py --init_from=$out/$2/last.pt --out_dir=$out \
            --label=$1 --max_length=1024 --n_lengths=4 --n_keys=10 "${@:3}"
    }
    train $out/nope config/passkey_nope.py --seed=$1
    row nope nope
    row uniform nope --scale=1.2
    for tune in head_scale:0.01 channel head_scale,head_gain,norm; do
        scales=$out/nope/scale_head_1024_$tune.json
        once $scales python tune_scale.py --out_dir=$out/nope --target_length=1024 --tune=$tune \
            --label=$tune --dataset=passkey_long --init_scale=1.2 --max_iters=60
        row $tune nope --scale=$scales
    done
    train $out/weights --init_from=$out/nope/last.pt --dataset=passkey_long --block_size=1024 \
        --batch_size=8 --micro_batch_size=8 --weight_decay=0.0 --warmup_iters=6 --max_iters=60 \
        --learning_rate=1e-3 --min_lr=0 --log_interval=20 --eval_windows=16 --seed=42
    row weights weights
}

attention() {
    once out/demo_seeds/1337/nope/attention.json python -m extras.attention_maps \
        --out_dir=out/demo_seeds/1337/nope --lengths=[128,512,2048]
}

for part in ${PARTS:-text books passkey attention}; do case $part in
    text) for seed in ${SEEDS:-1337 1338 1339 1340 1341}; do text $seed; done ;;
    books | passkey) for seed in ${SEEDS:-1337 1338 1339}; do $part $seed; done ;;
    *) $part ;;
esac; done
