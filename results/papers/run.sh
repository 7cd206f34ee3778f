# Table 2 of the head-scale paper on published checkpoints; not run by us. First the two fine-tunings
# of RoPE in this page, and
#   python data/pg19/prepare.py --repo=emozilla/pg19-test
#   python data/pg19/prepare.py --repo=emozilla/pg19-test --tokenizer=hf:bigscience/bloom-1b1 \
#       --out_dir=data/pg19_bloom
#   python data/pg19/prepare.py --repo=emozilla/pg19-test --tokenizer=hf:mosaicml/mpt-7b \
#       --out_dir=data/pg19_mpt
#   LAUNCH="torchrun --nproc_per_node=8" bash results/papers/run.sh
#   python results/tables.py out/table_1b
. results/common.sh
rope=hf:TinyLlama/tinyLlama-intermediate-checkpoints@step-50k-token-105B
nope=hf:AntNLP/TinyLlama-NoPE-1.1B

row() {  # NAME MODEL ARGUMENTS...
    once out/table_1b/eval_ppl_$1.json ${LAUNCH:-python} eval_ppl.py --init_from=$2 --label=$1 \
        --out_dir=out/table_1b --dataset=pg19 --lengths=[2048,4096,8192,16384] --rule=paper \
        --max_windows=8192 "${@:3}"
}

row rope $rope
for method in dynamic_ntk yarn; do for factor in 2 4 8 16; do
    row rope_$method$factor $rope --rope_scaling=$method:$factor
done; done
for method in pi yarn; do row $method out/${method}_8k/last.pt; done
row nope $nope --position=none
for scale in 1.2 1.5 1.8; do row nope_$scale $nope --position=none --scale=$scale; done
row nope_head hf:AntNLP/TinyLlama-NoPE-HeadScale8k --position=none
row bloom hf:bigscience/bloom-1b1 --dataset=pg19_bloom
row mpt hf:mosaicml/mpt-7b --dataset=pg19_mpt
