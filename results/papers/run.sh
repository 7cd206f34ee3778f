# The papers' experiments at full size, never run by us. First pip install '.[hf,tasks]' and the data:
#   corpus() { python data/hub/prepare.py data/hub/$1.py "${@:2}"; }
#   for name in slimpajama starcoder proof_pile arxiv; do corpus $name; done
#   corpus pg19 --repo=emozilla/pg19-test
#   corpus pg19 --repo=emozilla/pg19-test --tokenizer=hf:bigscience/bloom-1b1 \
#       --out_dir=data/pg19_bloom
#   python data/longbench/prepare.py
#   LAUNCH="torchrun --nproc_per_node=8" PARTS="pretrain tune" bash results/papers/run.sh
. results/common.sh
launch=${LAUNCH:-python}

pretrain() {  # Section 4.1: NoPE and its RoPE twin
    train out/nope_1b config/nope_1b.py  # --fsdp=True splits the model over ranks
    train out/rope_1b config/nope_1b.py config/rope_1b.py
}

tune() {  # Figures 2 and 7, then 704 scales for 4K, 8K and 18K, and Table 4's ablations
    scales() {  # FILE ARGUMENTS...
        once out/nope_1b/$1.json $launch tune_scale.py config/tune_8k.py "${@:2}"
    }
    scales scale_uniform --method=uniform --target_length=16384 --candidate_range=[1.0,2.0,0.01] \
        --n_samples=64
    scales scale_head_4096 config/tune_4k.py
    scales scale_head_8192
    scales scale_head_18432 config/tune_18k.py
    scales scale_head_18432_no_constraint config/tune_18k.py --min_scale=None --label=no_constraint
    scales scale_head_18432_start_at_1 config/tune_18k.py --init_scale=1.0 --label=start_at_1
}

perplexity() {  # Table 2 on published checkpoints, and RoPE fine-tuned here ("fair")
    row() {  # NAME MODEL ARGUMENTS...
        once out/table_1b/eval_ppl_$1.json $launch eval_ppl.py --init_from=$2 --label=$1 \
            --out_dir=out/table_1b --dataset=pg19 --lengths=[2048,4096,8192,16384] --rule=paper \
            --max_windows=8192 --compile=True "${@:3}"
    }
    rope=hf:TinyLlama/tinyLlama-intermediate-checkpoints@step-50k-token-105B
    nope=hf:AntNLP/TinyLlama-NoPE-1.1B
    row rope $rope
    for method in dynamic_ntk yarn; do for factor in 2 4 8 16; do
        row rope_$method$factor $rope --rope_scaling=$method:$factor
    done; done
    for method in pi yarn; do
        train out/${method}_8k config/finetune_8k.py config/$method.py  # config/raw.py: 1,000 steps
        row $method out/${method}_8k/last.pt
    done
    row nope $nope --position=none
    for scale in 1.2 1.5 1.8; do row nope_$scale $nope --position=none --scale=$scale; done
    row nope_head hf:AntNLP/TinyLlama-NoPE-HeadScale8k --position=none
    row bloom hf:bigscience/bloom-1b1 --dataset=pg19_bloom
}

tasks() {  # Figures 6, 8 and 9; Table 3: 16 tasks, 5 beams; Table 1, by EleutherAI's harness
    scales=out/nope_1b/scale_head_8192.json
    $launch passkey.py --out_dir=out/nope_1b --scale=$scales
    $launch longbench.py --out_dir=out/nope_1b
    $launch longbench.py --out_dir=out/nope_1b --scale=$scales
    $launch -m extras.commonsense --out_dir=out/nope_1b
}

dape() {  # 125M (config/dape/ has 350M, 2.7B, 6.7B, given after it); a column of Table 6
    train out/dape/125m_1x3 config/dape/125m.py --position=kerple --dape_kernel=3
    once out/dape/125m_1x3/eval_ppl_tail.json $launch eval_ppl.py --compile=True --protocol=tail \
        --out_dir=out/dape/125m_1x3 --lengths=[512,1024,2048,4096,8192]
    python -m extras.che --tasks=[] --position=kerple --dape_kernel=3 --max_iters=200000
}

for part in ${PARTS:-pretrain tune perplexity tasks dape}; do $part; done
