# What reads past L: each model is trained at L, tuned at 8L and read up to 16L. After
# python data/code/prepare.py, 25 to 90 minutes of one core for a model and seed.
#   MODELS="conv none rope rope_conv alibi alibi_conv conv_8L" bash results/past_L/run.sh
#   READINGS="untuned uniform head head_clamped vectors weights yarn yarn_weights"
#       bash results/past_L/run.sh                       # all rows of the page's second table
#   SERIES=size_5M bash results/past_L/run.sh            # a row of its third table
#   SERIES=demo bash results/past_L/run.sh               # make demo with five seeds
#   python results/tables.py out/past_L/code/*           # what it has measured
# Other texts, by python data/books/prepare.py FOLDER: for books* --tokenizer=bpe:1024
# --out_dir=data/books_1024 (on a GPU bpe:8192, data/books_bpe), for mix* and code_on_books
# --tokenizer=data/code/bpe_1024.tiktoken --out_dir=data/books_code
. results/common.sh
series=${SERIES:-code} L=128 recipe= tune_as=--dtype=float32 read_with=--dtype=float32
mix=--dataset=code:0.5,books_code:0.5 size_5M='--n_layer=6 --n_embd=256 --n_hidden=704'
case $series in
    demo)
        for seed in ${SEEDS:-1337 1338 1339 1340 1341}; do
            SEED=$seed once out/demo_code_$seed/report.json bash results/past_L/demo.sh
        done
        exit ;;
    books) recipe=--dataset=books_1024 ;;
    books_40M) recipe='--dataset=books_1024 --max_iters=19532' ;;
    tokens_40M) recipe=--max_iters=19532 ;;
    size_5M) recipe=$size_5M ;;
    mix | mix_on_books) recipe=$mix ;;                                # 10M tokens
    mix_20M*) recipe="$mix --max_iters=9766" ;;
    mix_5M*) recipe="$mix --max_iters=9766 $size_5M --dtype=bfloat16" ;;
    code_86M) recipe='config/dape/125m.py --dataset=code --dtype=bfloat16 --batch_size=16
        --micro_batch_size=16 --max_iters=2500 --learning_rate=1e-3 --min_lr=0.0
        --warmup_iters=100 --eval_interval=1250' ;;
    books_32M) recipe='config/books_gpu.py --dtype=bfloat16 --micro_batch_size=32
        --max_iters=1000 --eval_interval=500' ;;
esac
case $series in
    code_86M | books_32M)  # a GPU tunes for seconds, and would compile for longer
        L=512 tune_as='--dtype=bfloat16 --micro_batch_size=4 --compile=False'
        read_with=--dtype=bfloat16 ;;
    *_on_books) read_with="$read_with --dataset=books_code" ;;
esac
far=$((8 * L)) lengths=[$L,$((2 * L)),$((4 * L)),$((8 * L)),$((16 * L))]

read_as() {  # READING BASELINE ARGUMENTS...: losses by length, gains at far repeats
    label=${model}_$1
    as="--init_from=$run/last.pt --out_dir=$out --label=$label $read_with ${*:3}"
    once $out/eval_ppl_position_$label.json python eval_ppl.py $as --protocol=position \
        --lengths=$lengths
    once $out/repeats_$label.json python repeats.py $as $2 --length=$far --gram=4 --targets=1000 \
        --control=True
}

tune() {  # READING ARGUMENTS...: tune at 8L, then read with what was tuned
    scales=$run/scale_head_${far}_$1.json
    once $scales python tune_scale.py --out_dir=$run --label=$1 --target_length=$far \
        --max_iters=80 --warmup_iters=10 --init_scale=1.0 $tune_as "${@:2}"
    read_as $1 '' --scale=$scales
}

for seed in ${SEEDS:-1337 1338 1339}; do for model in ${MODELS:-conv none rope}; do
    run=out/past_L/${series%_on_books}/$seed/$model out=out/past_L/$series/$seed
    kind=nope
    case $model in
        none) how= ;;
        conv | conv_8L) how=--short_conv=4 ;;
        rope) how=--position=rope kind=rope ;;
        rope_conv) how='--position=rope --short_conv=4' kind=rope ;;
        alibi) how=--position=alibi kind=alibi ;;
        alibi_conv) how='--position=alibi --short_conv=4' kind=alibi ;;
    esac
    how="config/code.py $how $recipe --seed=$seed"
    if test $model = conv_8L; then
        # One step at L, so that the checkpoint says that L is the training length of its twin.
        train ${run}_start $how --max_iters=1
        train $run $how --block_size=$far --batch_size=2 --micro_batch_size=2 \
            --init_from=${run}_start/last.pt
        read_as untuned --baseline=${run%_8L}/last.pt
        continue
    fi
    train $run $how
    for name in ${READINGS:-untuned head yarn}; do case $kind:$name in
        *:untuned) read_as $name ;;
        rope:yarn) read_as $name '' --rope_scaling=yarn:8 ;;
        nope:uniform)
            once $run/scale_uniform.json python tune_scale.py --out_dir=$run --method=uniform \
                --target_length=$far --n_samples=32 --candidate_range=[0.6,2.4,0.1] $tune_as
            read_as $name '' --scale=$run/scale_uniform.json ;;
        nope:head) tune $name --tune=head_scale:0.1 --min_scale=None ;;
        nope:head_clamped) tune $name --tune=head_scale:0.1 ;;
        nope:vectors) tune $name --tune=channel:0.1,norm ;;
        nope:weights | rope:yarn_weights)  # as many windows as the vectors are tuned with
            extend=
            test $kind != rope || extend=--rope_scaling=yarn
            train ${run}_$name $how --init_from=$run/last.pt --block_size=$far --batch_size=8 \
                --micro_batch_size=8 --max_iters=80 --warmup_iters=10 --learning_rate=1e-3 \
                --min_lr=1e-4 --weight_decay=0.0 $extend
            read_as $name --baseline=$run/last.pt --init_from=${run}_$name/last.pt ;;
    esac; done
done; done
