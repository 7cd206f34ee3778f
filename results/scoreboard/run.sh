# The scoreboard: many ways to read past L under one protocol. After
# python data/books/prepare.py FOLDER, 25 hours of one core.
#   SEEDS=1337 bash results/scoreboard/run.sh
#   SIZE=books bash results/scoreboard/run.sh           # 5M parameters, 14 hours
#   python results/tables.py out/scoreboard/small/*     # what it has measured
. results/common.sh
size=${SIZE:-small}
case $size in
    small) config=config/scoreboard.py L=128 steps=60 ;;
    books) config=config/books_nope.py L=256 steps=75 ;;
esac
far=$((8 * L))

row() {  # NAME MODEL ARGUMENTS...: losses by length and far repeats of a model, read in one way
    as="--init_from=$out/$2/last.pt --out_dir=$out --label=$1 --n_samples=96 --dtype=float32"
    once $out/eval_ppl_position_$1.json python eval_ppl.py $as --protocol=position \
        --lengths=[$L,$((4 * L)),$far,$((16 * L))] "${@:3}"
    once $out/repeats_$1.json python repeats.py $as --length=$far $baseline "${@:3}"
}

model() {  # NAME ARGUMENTS...: train a model and read it
    train $out/$1 $config "${@:2}" --seed=$seed
    row $1 $1
}

recalls() {  # NAME ARGUMENTS...: the same, and train another one for recall and copy
    model "$@"
    test $size = small || return 0
    once $out/$1_recall/che_recall.json python -m extras.che config/recall.py "${@:2}" \
        --seed=$seed --out_dir=$out/$1_recall
}

tune() {  # NAME WHAT MODEL: a set for 8L, which passes of up to L tokens do not use
    once $out/$3/scale_sets_$1.json python tune_scale.py --out_dir=$out/$3 --tune=$2 \
        --target_lengths=[$far] --max_iters=$steps --label=$1 --dtype=float32
    row $1 $3 --scale=$out/$3/scale_sets_$1.json
}

search() {  # MODEL: its best uniform scales, from which head scales start
    once $out/$1/scale_uniform.json python tune_scale.py --out_dir=$out/$1 --method=uniform \
        --n_samples=32 --dtype=float32
}

uniform() {  # NAME MODEL: with the uniform scales by the fit of Appendix B
    search $2
    row $1 $2 --scale=$out/$2/scale_uniform_fit.json
}

tuned() {  # NAME MODEL ARGUMENTS...: tune every weight at 8L
    baseline=--baseline=$out/$2/last.pt
    train $out/$1 $config --init_from=$out/$2/last.pt --block_size=$far --batch_size=8 \
        --micro_batch_size=8 --max_iters=$steps --warmup_iters=0.1 --learning_rate=5e-4 \
        --min_lr=5e-5 --weight_decay=0.0 --seed=$seed "${@:3}"
    row $1 $1
    baseline=
}

for seed in ${SEEDS:-1337 1338 1339}; do
    out=out/scoreboard/$size/$seed baseline=
    recalls none
    recalls rope --position=rope
    recalls alibi --position=alibi
    recalls kerple_dape3 --position=kerple --dape_kernel=3
    uniform uniform none
    tune head head_scale none
    tune channel channel none
    tune vectors head_scale,head_gain,norm none
    tuned weights none
    row yarn rope --rope_scaling=yarn:8
    tuned yarn_8l rope --rope_scaling=yarn
    test $size = small || continue
    for method in logn ssmax kerple; do recalls $method --position=$method; done
    for method in t5 fire cope xl; do model $method --position=$method; done
    row llama4 none --position=llama4
    for method in pi ntk; do
        row $method rope --rope_scaling=$method:8
        tuned ${method}_8l rope --rope_scaling=$method
    done
    recalls conv --short_conv=4
    recalls rope_conv --position=rope --short_conv=4
    recalls alibi_conv --position=alibi --short_conv=4
    search conv
    tune conv_head head_scale conv
    recalls dape3 --dape_kernel=3
    model kerple_dape1 --position=kerple --dape_kernel=1
    model rope_none --position=rope,none
    # DroPE goes on without RoPE, on the text in another order.
    baseline=--baseline=$out/rope/last.pt
    drope="$config --init_from=$out/rope/last.pt --position=none --seed=$((seed + 1000))"
    train $out/drope15 $drope --max_iters=330 --warmup_iters=0.1
    train $out/drope100 $drope
    for run in drope15 drope100; do uniform $run $run; done
    baseline=
done
