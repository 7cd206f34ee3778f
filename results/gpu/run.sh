# As many of the GPU measurements as fit into the minutes given, the most important first. What is
# there is kept, so the same command goes on where an earlier one stopped.
#   bash results/gpu/run.sh 60                   # one GPU; JSON into results/gpu
#   BOOKS=FOLDER bash results/gpu/run.sh 120     # the last part reads the books of results/books
#   SIZE=toy bash results/gpu/run.sh 60          # the same path on a CPU, into out/gpu_toy
set -u
end=$(($(date +%s) + 60 * ${1:-60}))
if [ "${SIZE:-full}" = toy ]; then
    out=out/gpu_toy models=out/gpu_toy/models L=64 batches='2 1' peers=2 steps=2 samples=4 short=32 least=1 every=tests/test_gpu.py vocab=
    bench='--n_layer=2 --n_head=4 --n_kv_head=2 --n_embd=64 --n_hidden=128 --vocab_size=300 --rounds=2 --n_decode=4'
    train='--n_layer=2 --n_head=4 --n_kv_head=2 --n_embd=32 --n_hidden=64 --block_size=32 --max_iters=6 --eval_interval=3
        --eval_windows=4 --batch_size=4 --micro_batch_size=4'
else
    out=results/gpu models=out/gpu L=2048 batches='16 8 4 2 1' peers=32 steps=150 samples=64 short=512 least=60 every=tests bench= train= vocab=--vocab_size=50257
fi
mkdir -p $out/log

# part NAME COMMAND...: runs it unless it is done; what it prints goes into $out/log/NAME.txt, too.
part() {
    part=$1; shift
    test -f $out/log/$part.done && return
    left=$((end - $(date +%s)))
    test $left -ge $least || { echo "$part: no time is left"; return 1; }
    echo "== $part, $left s left: $*"
    timeout --foreground $left "$@" 2>&1 | tee $out/log/$part.txt
    test ${PIPESTATUS[0]} -eq 0 && touch $out/log/$part.done || { echo "$part: failed, see $out/log/$part.txt"; return 1; }
}
bench() { name=$1; shift; part $name python bench.py $bench --out_dir=$out --name=$name "$@"; }
table() { kind=$1 name=$2; shift 2; part $name python -m results.bench.table $kind $bench --out_dir=$out --name=$name "$@"; }
largest() { for B in $batches; do bench "$@" --batch_size=$B && return; done; }  # batch that fits into memory

big="--like=['config/nope_1b.py']" small="--like=['config/dape/125m.py']"
middle="--like=['config/dape/125m.py','config/dape/350m.py']"
part gpu_tests python -m pytest -m '' tests/test_gpu.py
largest train_1b "$big" "--tasks=['train']" --context=$L
table growth growth_1b "$big" "--contexts=[$L,$((4 * L)),$((9 * L))]" --compile=False
bench entropy_1b "$big" "--tasks=['entropy']" --read_context=$((8 * L))
bench eval_1b "$big" "--tasks=['eval']" --context=$((8 * L)) --batch_size=1
bench peer_125m "$small" $vocab --position=rope --peer=hf "--tasks=['train','prefill','decode']" --batch_size=$peers
bench decode_1b "$big" "--tasks=['prefill','decode']" --read_context=$((2 * L))
table time_cost time_cost_125m "$small" $vocab --compile=False
table time_cost time_cost_350m "$middle" $vocab --compile=False
largest train_350m_1x3 "$middle" $vocab "--tasks=['train']" --position=kerple --dape_kernel=3
part tests python -m pytest -m '' $every
if [ "${SIZE:-full}" != toy ]; then
    part data_code python data/code/prepare.py
    part code_86M env SERIES=code_86M bash results/past_L/run.sh
fi

# A model of 32M parameters on long books, its scales for 4L, and all of it read up to 8L.
# The text is part of each name, so that a start with BOOKS trains models of its own.
if test -n "${BOOKS:-}"; then
    text=books_bpe
    part data_$text python data/books/prepare.py "$BOOKS" --tokenizer=bpe:8192 --out_dir=data/books_bpe
    test "${SIZE:-full}" = toy || part books_32M env SERIES=books_32M bash results/past_L/run.sh
else
    text=stdlib
    part data_$text python data/stdlib/prepare.py
fi
models=$models/$text
train() {
    run=$models/$1; shift
    test -f $run/last.pt && set -- "$@" --init_from=resume
    part train_${text}_$(basename $run) python train.py config/books_gpu.py $train --dataset=$text --out_dir=$run "$@"
}
tune() { name=${text}_$1; shift; part $name python tune_scale.py --out_dir=$models/none --n_samples=$samples "$@"; }
loss() {  # of a model at each position
    run=$models/$1 name=${text}_$2; shift 2
    part loss_$name python eval_ppl.py --protocol=position --init_from=$run/last.pt --n_samples=$samples --label=$name \
        --out_dir=$out "$@"
}
train none && loss none none
train rope --position=rope && loss rope rope
tune uniform --method=uniform && loss none uniform --scale=$models/none/scale_uniform.json
tune head --target_length=$((4 * short)) --max_iters=$steps &&
    loss none head --scale=$models/none/scale_head_$((4 * short)).json
train 1x3 --position=kerple --dape_kernel=3 && loss 1x3 1x3
python -m results.gpu.table --out_dir=$out
