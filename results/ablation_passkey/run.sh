# Table 4 of the head-scale paper on the small passkey model: head scales for 3L = 768 tokens, tuned
# on text alone, without the constraint, or from 1 instead of the best uniform scale. After
# results/passkey_demo/run.sh.
#   python results/tables.py out/passkey/ablation    # what it has measured
. results/common.sh
nope=out/passkey/1337/nope out=out/passkey/ablation

row() {  # NAME ARGUMENTS...: perplexity, and keys found
    as="--init_from=$nope/last.pt --out_dir=$out --label=$1 ${*:2}"
    once $out/eval_ppl_$1.json python eval_ppl.py $as --dataset=stdlib_bpe \
        --lengths=[256,512,768] --max_windows=256
    once $out/passkey_$1.json python passkey.py $as --max_length=768 --n_lengths=6 --n_keys=3
}

tune() {  # NAME ARGUMENTS...
    once $nope/scale_head_768_$1.json python tune_scale.py --out_dir=$nope --dataset=stdlib_bpe \
        --target_length=768 --max_iters=100 --n_samples=4 --label=$1 "${@:2}"
    row $1 --scale=$nope/scale_head_768_$1.json
}

row none
for scale in 1.2 1.6; do row $scale --scale=$scale; done
tune full --init_scale=1.6
tune no_min --init_scale=1.6 --min_scale=None
tune from_1 --init_scale=1.0
