# Speed and memory on a CPU, about an hour on two idle cores; gpu.sh is for a GPU
. results/common.sh
out=out/speed
smollm2='--n_layer=30 --n_head=9 --n_kv_head=3 --n_embd=576 --n_hidden=1536 --vocab_size=49152'
full='--dtype=float32 --rounds=7'

bench() {  # NAME ARGUMENTS...
    once $out/$1.json python -m extras.bench --out_dir=$out --name=$1 "${@:2}"
}

bench steps $full "--tasks=['train','scale']"
bench windows $full "--tasks=['eval']"
bench entropy --rounds=7 "--tasks=['entropy']"
bench methods $full "--tasks=['methods']"
bench smollm2_windows $smollm2 --dtype=float32 "--tasks=['eval']" --context=256  # of 2,048 tokens
bench smollm2_scale $smollm2 --dtype=float32 "--tasks=['scale']" --context=2048 --batch_size=1
for dtype in float32 bfloat16; do
    name=$(test $dtype = float32 || echo _$dtype)
    bench decode$name --dtype=$dtype --rounds=7 "--tasks=['prefill','decode']"
    bench smollm2_prefill$name $smollm2 --dtype=$dtype "--tasks=['prefill']"
    bench smollm2_decode$name $smollm2 --dtype=$dtype "--tasks=['decode']" --read_context=2048 \
        --n_decode=128
done
