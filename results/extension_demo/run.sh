# Every extension of RoPE, ALiBi, log-n and head scales on the byte models. Head scales, PI and YaRN
# are tuned with the same tokens: 120 steps of 8 windows of T. After results/demo_bytes/run.sh.
#   python results/tables.py out/demo/table    # what it has measured
. results/common.sh
out=out/demo

row() {  # NAME MODEL ARGUMENTS...: perplexity in sliding windows
    once $out/table/eval_ppl_$1.json python eval_ppl.py --init_from=$out/$2/last.pt \
        --out_dir=$out/table --label=$1 --max_windows=512 --batch_tokens=32768 "${@:3}"
}

tune() {  # RUN FILE ARGUMENTS...: tune the scales of a model
    once $out/$1/$2 python tune_scale.py --out_dir=$out/$1 "${@:3}"
}

for method in alibi logn; do train $out/$method --position=$method; done
for run in nope rope alibi logn; do row $run $run; done
tune nope scale_uniform.json --method=uniform --n_samples=32
tune rope scale_uniform.json --method=uniform --n_samples=32 --candidate_range=[0.8,1.4,0.1]
row nope_fit nope --scale=$out/nope/scale_uniform_fit.json
for scale in 0.8 1.2 1.4; do row rope_$scale rope --scale=$scale; done
for scale in 1.2 1.4 1.6 1.8 2.0 2.2; do row nope_$scale nope --scale=$scale; done
for method in pi ntk dynamic_ntk yarn; do for factor in 2 4 8 16; do
    row rope_$method$factor rope --rope_scaling=$method:$factor
done; done
for T in 256 512 1024; do
    tune nope scale_head_$T.json --target_length=$T --max_iters=120
    row nope_head_$T nope --scale=$out/nope/scale_head_$T.json
    for method in pi yarn; do
        train $out/${method}_$T config/finetune_demo.py config/$method.py --block_size=$T
        row ${method}_$T ${method}_$T
    done
done
tune nope scale_sets.json --target_lengths=[256,512,1024] --max_iters=120
row nope_sets nope --scale=$out/nope/scale_sets.json
# Figure 1, beside what results/demo_bytes/run.sh has measured on the same windows
once $out/rope/entropy_dynamic_ntk2.json python entropy.py --out_dir=$out/rope \
    --rope_scaling=dynamic_ntk:2 --n_samples=64
python plots.py $out/rope/entropy_dynamic_ntk2.json $out/nope/entropy_demo_NoPE.json \
    $out/nope/entropy_demo_uniform_512.json $out/rope/entropy_demo_RoPE.json
