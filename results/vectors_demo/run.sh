# Small vectors beside the scales, on byte models: everything is tuned with the same 120 steps of 8
# windows of 4L = 512 tokens. After python data/stdlib/prepare.py, 20 minutes of one core for a seed.
#   python results/tables.py out/vectors_demo/????    # what it has measured
. results/common.sh

row() {  # NAME MODEL ARGUMENTS...: perplexity in sliding windows
    once $out/eval_ppl_$1.json python eval_ppl.py --init_from=$out/$2/last.pt --out_dir=$out \
        --label=$1 --lengths=[128,256,512,768] --max_windows=512 --batch_tokens=32768 "${@:3}"
}

entropy() {  # NAME ARGUMENTS...
    once $out/entropy_$1.json python entropy.py --init_from=$out/none/last.pt --out_dir=$out \
        --label=$1 --length=512 --n_samples=32 "${@:2}"
}

for seed in ${SEEDS:-1337 1338 1339}; do
    out=out/vectors_demo/$seed
    for method in none rope; do
        train $out/$method --position=$method --seed=$seed
        row $method $method
    done
    once $out/none/scale_uniform.json python tune_scale.py --out_dir=$out/none --method=uniform \
        --target_length=512 --n_samples=32
    row uniform none --scale=$out/none/scale_uniform.json
    entropy none
    for tune in head_scale head_gain norm head_scale,head_gain head_scale,head_gain,norm; do
        scales=$out/none/scale_head_512_$tune.json
        once $scales python tune_scale.py --out_dir=$out/none --target_length=512 --max_iters=120 \
            --tune=$tune --label=$tune --n_samples=32
        row $tune none --scale=$scales
        entropy $tune --scale=$scales
    done
    for lr in 2.5e-4 5e-4 1e-3 2e-3; do
        train $out/full_$lr config/finetune_demo.py --init_from=$out/none/last.pt \
            --learning_rate=$lr --min_lr=0
        row full_$lr full_$lr
    done
    for method in pi yarn; do
        train $out/$method config/finetune_demo.py config/$method.py --init_from=$out/rope/last.pt
        row $method $method
    done
    for method in ntk dynamic_ntk; do
        train $out/$method config/finetune_demo.py --rope_scaling=$method \
            --init_from=$out/rope/last.pt
        row $method $method
    done
done
