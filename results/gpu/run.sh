# One GPU: tests, speed at 1.1B and 125M parameters, and what reads past L at 86M and 32M. The
# most important comes first, so a time limit may end it: timeout 60m bash results/gpu/run.sh
#   BOOKS=FOLDER bash results/gpu/run.sh    # also the books of data/books/manifest.json
#   python results/tables.py out/gpu        # what it has measured
. results/common.sh
set +e  # if a part fails, for example because memory runs out, the next one begins
out=out/gpu
big='--n_layer=22 --n_head=32 --n_kv_head=4 --n_embd=2048 --n_hidden=5632 --position=none'
small='--n_layer=12 --n_head=12 --n_kv_head=12 --n_embd=768 --n_hidden=2048 --vocab_size=50257'

bench() {  # NAME ARGUMENTS...
    once $out/$1.json python -m extras.bench --out_dir=$out --name=$1 "${@:2}"
}

python -m pytest -m '' tests/test_gpu.py
bench train_1b $big "--tasks=['train']" --context=2048 --batch_size=8
for T in 2048 8192 18432; do
    bench scale_1b_$T $big "--tasks=['scale']" --context=$T --batch_size=1 --compile=False
done
bench entropy_1b $big "--tasks=['entropy']" --read_context=16384
bench eval_1b $big "--tasks=['eval']" --context=16384 --batch_size=1
bench peer_125m $small --peer=hf "--tasks=['train','prefill','decode']" --context=512 --batch_size=32
bench decode_1b $big "--tasks=['prefill','decode']" --read_context=4096
# Table 7 of DAPE V2: the time of a training step on one sequence of 512 tokens
step="$small --tasks=['train'] --context=512 --batch_size=1 --compile=False"
for method in rope t5 alibi kerple fire cope; do
    bench step_125m_$method $step --position=$method
done
for kernel in 1 3; do
    bench step_125m_kerple_1x$kernel $step --position=kerple --dape_kernel=$kernel
done
once data/code/meta.json python data/code/prepare.py
SERIES=code_86M bash results/past_L/run.sh
if test -n "$BOOKS"; then
    once data/books_bpe/meta.json python data/books/prepare.py "$BOOKS" --tokenizer=bpe:8192 \
        --out_dir=data/books_bpe
    SERIES=books_32M SEEDS=1337 bash results/past_L/run.sh
fi
