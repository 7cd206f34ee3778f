# Speed and memory: PARTS=cpu bash results/speed/run.sh, or on one GPU PARTS=gpu. The most important
# comes first, so a time limit may end it: timeout 60m bash results/speed/run.sh
. results/common.sh
set +e  # if a task fails, for example because memory runs out, the next one begins
out=out/speed
big='--n_layer=22 --n_head=32 --n_kv_head=4 --n_embd=2048 --n_hidden=5632 --position=none --peer='
small='--n_layer=12 --n_head=12 --n_kv_head=12 --n_embd=768 --n_hidden=2048 --vocab_size=50257'

bench() {  # NAME ARGUMENTS...
    once $out/$1.json python -m extras.bench --out_dir=$out --name=$1 "${@:2}"
}

gpu() {
    python -m pytest -m '' tests/test_gpu.py
    bench train_1b $big "--tasks=['train']" --context=2048 --batch_size=8
    for T in 2048 8192 18432; do
        bench scale_1b_$T $big "--tasks=['scale']" --context=$T --batch_size=1 --compile=False
    done
    bench entropy_1b $big "--tasks=['entropy']" --read_context=16384
    bench eval_1b $big "--tasks=['eval']" --context=2048 --batch_size=1  # windows of 16,384
    bench peer_125m $small "--tasks=['train','prefill','decode']" --context=512 \
        --batch_size=32
}

cpu() {
    bench steps --dtype=float32 --rounds=7 "--tasks=['train','scale']"
    bench windows --dtype=float32 --rounds=7 "--tasks=['eval']"
    bench decode --rounds=7 "--tasks=['prefill','decode']"
    bench entropy --rounds=7 "--tasks=['entropy']"
    bench methods --dtype=float32 --rounds=7 "--tasks=['methods','start']"
}

for part in ${PARTS:-cpu gpu}; do $part; done
