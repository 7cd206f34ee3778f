# What is measured on one GPU, in order of worth, in 32 minutes:
#   bash results/speed/gpu.sh            # a run that was stopped goes on where it was; a bench
#                                        # whose time was over keeps the tasks that it finished
#   SIZE=toy bash results/speed/gpu.sh   # small models, on a CPU too, to try the script
# It needs pip install ".[dev]" and, for the last two parts, data/code and the model and the text of
# results/smollm2/run.sh.
. results/common.sh
set +e  # if a part fails, for example because memory runs out, the next one begins
export LAUNCH='timeout 240 python'  # of a training, which saves when its time is over
out=out/speed L=2048 far=16384 model=out/real/SmolLM2-135M-Instruct.Q4_1.gguf
code='config/dape/125m.py --dataset=code --batch_size=64 --max_iters=600 --warmup_iters=50'
big='--n_layer=22 --n_head=32 --n_kv_head=4 --n_embd=2048 --n_hidden=5632 --position=none'
small='--n_layer=12 --n_head=12 --n_kv_head=12 --n_embd=768 --n_hidden=2048 --vocab_size=50257'
if test "$SIZE" = toy; then
    tiny='--n_layer=2 --n_head=4 --n_kv_head=2 --n_embd=64 --n_hidden=128'
    out=out/speed_toy L=64 far=512 big="$tiny --rounds=1 --compile=False" small=$big model=
    code="$tiny --dataset=code --block_size=64 --batch_size=8 --micro_batch_size=8 --max_iters=20"
    code="$code --warmup_iters=2 --compile=False"
fi

bench() {  # SECONDS NAME ARGUMENTS...
    once $out/$2.json timeout $1 python -m extras.bench --out_dir=$out --name=$2 "${@:3}"
}

code() {  # NoPE with the convolution: far repeats of code, with head scales and without
    run=$out/code
    train $run $code --short_conv=4
    once $run/scale_head_$((far / 4)).json timeout 90 python tune_scale.py --out_dir=$run \
        --target_length=$((far / 4)) --micro_batch_size=2 --init_scale=1.0 --max_iters=80
    for scale in None $run/scale_head_$((far / 4)).json; do
        label=$(basename $scale .json)
        once $run/repeats_$label.json timeout 90 python repeats.py --out_dir=$run \
            --length=$((far / 4)) --gram=4 --control=True --scale=$scale --label=$label
    done
}

without_rope() {  # SmolLM2 recalibrated without position encoding (DroPE, arXiv:2512.12167)
    run=$out/drope
    train $run --init_from=$model --position=none --dataset=books_smollm2 --block_size=$L \
        --batch_size=32 --micro_batch_size=8 --learning_rate=3e-4 --max_iters=2000
    once $run/eval_ppl_position.json timeout 90 python eval_ppl.py --out_dir=$run \
        --protocol=position --lengths=[$L,$far]
}

timeout -s INT 240 python -m pytest -q -m '' tests/test_gpu.py
bench 180 train_1b $big --peer= "--tasks=['train']" --context=$L --batch_size=8
for T in $L $((far / 2)); do
    bench 90 scale_1b_$T $big --peer= "--tasks=['scale']" --context=$T --batch_size=1 \
        --compile=False
done
bench 90 read_1b $big "--tasks=['prefill','decode']" --read_context=$far
bench 90 eval_1b $big --peer= "--tasks=['eval','entropy']" --context=$L --batch_size=1 \
    --read_context=$far
bench 180 peer_125m $small "--tasks=['train','prefill','decode']" --context=$((L / 4)) \
    --batch_size=32
bench 120 methods_125m $small "--tasks=['methods']" --context=$((L / 4))
code
test -z "$model" || without_rope
