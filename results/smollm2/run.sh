# SmolLM2-135M beyond its 8,192 tokens, in bfloat16: about 20 hours of one core, and 12 GB to tune.
# It goes on where it was stopped, and some parts alone are PARTS="tune loss" bash ...
#   make real                                 # the model
#   model=out/real/SmolLM2-135M-Instruct.Q4_1.gguf
#   python data/books/prepare.py FOLDER --tokenizer=$model --out_dir=data/books_smollm2
#   python data/code/prepare.py --tokenizer=$model --out_dir=data/code_smollm2
. results/common.sh
model=out/real/SmolLM2-135M-Instruct.Q4_1.gguf out=out/smollm2 T=16384
scales=$out/scale_head_${T}_yarn4.json
reads="--init_from=$model --out_dir=$out --dtype=bfloat16"
books="--dataset=books_smollm2 --batch_tokens=8192"
code="--dataset=code_smollm2 --batch_tokens=8192"

# How it is read. Scales stand on top of YaRN's own temperature, (1 + 0.1 ln 4)^2 = 1.30
as() {
    case $1 in
        plain) ;;
        yarn2) echo --rope_scaling=yarn:2 ;;
        none) echo --position=none ;;
        cool) echo --scale=0.9 ;;
        scaled) echo --rope_scaling=yarn:4 --scale=0.9 ;;  # about the mean of the tuned ones
        tuned) echo --rope_scaling=yarn:4 --scale=$scales ;;
        *) echo --rope_scaling=$1:4 ;;
    esac
}

tune() {  # 270 head scales from YaRN, on 20 windows of the train split
    once $scales python tune_scale.py $reads $books --rope_scaling=yarn:4 --target_length=$T \
        --init_scale=1.0 --min_scale=None --batch_size=1 --micro_batch_size=1 --max_iters=20 \
        --warmup_iters=3 --compile=False --label=yarn4
}

loss() {  # the last 1,024 tokens of 8 windows of 16,384, or with LONG=2 of 4 of 32,768
    for how in ${HOW:-plain yarn yarn2 scaled tuned dynamic_ntk ntk pi none}; do
        length=$((T * ${LONG:-1}))
        once $out/eval_ppl_position_${how}_$length.json python eval_ppl.py $reads $books \
            $(as $how) --protocol=position --lengths=[8192,$length] --tail=1024 \
            --n_samples=$((8 / ${LONG:-1})) --label=${how}_$length
    done
}

code() {  # the same of Python source, in 4 windows of one file each
    for how in ${HOW:-plain yarn tuned dynamic_ntk ntk pi none}; do
        once $out/eval_ppl_position_code_${how}_$T.json python eval_ppl.py $reads $code \
            $(as $how) --protocol=position --lengths=[8192,$T] --tail=1024 --n_samples=4 \
            --label=code_${how}_$T
    done
}

control() {  # is 0.9 better without YaRN, too?
    for how in plain cool; do
        once $out/eval_ppl_position_${how}_8192.json python eval_ppl.py $reads $books $(as $how) \
            --protocol=position --lengths=[8192] --tail=1024 --n_samples=8 --label=${how}_8192
    done
}

entropy() {  # of each head by position
    for how in plain yarn tuned none; do
        once $out/entropy_$how.json python entropy.py $reads $books $(as $how) --length=$T \
            --n_samples=1 --tail=1024 --label=$how
    done
}

uniform() {  # one scale on top of YaRN
    once $out/scale_uniform_yarn4.json python tune_scale.py $reads $books --rope_scaling=yarn:4 \
        --method=uniform --target_length=$T --candidate_range=[0.6,1.1,0.1] --n_samples=4 \
        --tail=1024 --label=yarn4
}

passkey() {  # with HINT=1 the space before the digits stands in the prompt
    for how in ${HOW:-plain yarn scaled tuned}; do
        name=$how${HINT:+_hint}
        keys="$(as $how) ${HINT:+--hint=1} --n_depths=5 --n_keys=2"
        once $out/passkey_${name}_short.json python passkey.py $reads $keys \
            --label=${name}_short --max_length=2048 --n_lengths=2
        once $out/passkey_$name.json python passkey.py $reads $keys --label=$name \
            --max_length=$T --n_lengths=4 --batch_tokens=8192
    done
}

repeats() {  # in code, of several files; each of few targets takes two windows of its own
    for how in ${HOW:-yarn tuned}; do
        once $out/repeats_$how.json python repeats.py $reads $code $(as $how) --label=$how \
            --length=24576 --n_samples=8 --targets=20
    done
}

for part in ${PARTS:-tune loss code control entropy uniform passkey repeats}; do $part; done
