# Long books: 5M parameters, bytes, L = 256. Everything is tuned with 150 steps of 8 windows of 4L =
# 1,024 tokens, if its name says nothing else. After python data/books/prepare.py FOLDER, 1.5 to 2.5
# hours of one core for a seed.
#   SEEDS=1338 bash results/books/run.sh
#   python results/tables.py out/books/????    # what it has measured
. results/common.sh

row() {  # NAME MODEL ARGUMENTS...: perplexity in sliding windows
    once $out/eval_ppl_$1.json python eval_ppl.py --init_from=$out/$2/last.pt --out_dir=$out \
        --label=$1 --lengths=[256,512,1024,2048] --stride=64 --max_windows=32 \
        --batch_tokens=32768 "${@:3}"
}

tune() {  # FILE ARGUMENTS...: tune the scales of NoPE
    once $out/none/$1 python tune_scale.py --out_dir=$out/none --n_samples=16 "${@:2}"
}

heads() {  # TARGET STEPS WHAT: head scales or vectors
    tune scale_head_$1_$3.json --target_length=$1 --max_iters=$2 --tune=$3 --label=$3
    row $3_$1 none --scale=$out/none/scale_head_$1_$3.json
}

weights() {  # RATE: every weight
    train $out/full_$1 config/finetune_books.py --init_from=$out/none/last.pt \
        --learning_rate=$1 --min_lr=0
    row full_$1 full_$1
}

entropy() {  # NAME MODEL ARGUMENTS...
    once $out/entropy_$1.json python entropy.py --init_from=$out/$2/last.pt --out_dir=$out \
        --label=$1 "${@:3}"
}

for seed in ${SEEDS:-1337 1338 1339}; do
    out=out/books/$seed range=[1.0,3.2,0.1]
    train $out/none config/books_nope.py --seed=$seed --keep_steps=[560]
    train $out/rope config/books_nope.py --position=rope --seed=$seed
    for run in none rope; do row $run $run; done
    test $seed != 1337 || range=[1.0,2.4,0.02]
    tune scale_uniform.json --method=uniform --candidate_range=$range
    row fit none --scale=$out/none/scale_uniform_fit.json
    heads 1024 150 head_scale
    heads 1024 150 head_scale,head_gain,norm
    weights 1e-3
    for method in yarn pi; do
        train $out/$method config/finetune_books.py config/$method.py --init_from=$out/rope/last.pt
        row $method $method
    done
    for method in ntk dynamic_ntk; do
        train $out/$method config/finetune_books.py --rope_scaling=$method \
            --init_from=$out/rope/last.pt
        row $method $method
    done
done

# one seed: other rates, vectors, targets, scales and factors; other methods from training on
out=out/books/1337
for rate in 1e-4 4e-4 2e-3; do weights $rate; done
for vectors in head_scale,head_gain norm; do heads 1024 150 $vectors; done
heads 1280 120 head_scale
heads 2048 75 head_scale
tune scale_sets.json --target_lengths=[512,1024,2048] --max_iters=75
row sets none --scale=$out/none/scale_sets.json
for scale in 1.2 1.5 1.8 2.1 2.4 2.7; do row uniform_$scale none --scale=$scale; done
for method in pi ntk dynamic_ntk yarn; do for factor in 2 4 8 16; do
    row $method$factor rope --rope_scaling=$method:$factor
done; done
for method in alibi logn; do
    train $out/$method config/books_nope.py --position=$method
    row $method $method
done

# Figure 7: the best scale by position at a fifth of training and at its end
for at in step_560 last; do
    tune scale_uniform_$at.json --method=uniform --candidate_range=[1.0,3.2,0.02] --label=$at \
        --init_from=$out/none/$at.pt
done
python plots.py $out/none/scale_uniform_step_560.json $out/none/scale_uniform_last.json
# Figure 2, right: uniform scales do not extend RoPE
once $out/rope/scale_uniform.json python tune_scale.py --out_dir=$out/rope --n_samples=16 \
    --method=uniform --candidate_range=[0.8,1.4,0.1]
# Figure 1: loss and entropy by position, of RoPE with NTK, NoPE, NoPE with scales, and RoPE
entropy ntk_8L rope --rope_scaling=dynamic_ntk:2 --n_samples=32
entropy none_8L none --n_samples=32
entropy fit_8L none --scale=$out/none/scale_uniform_fit.json --n_samples=32
entropy head_8L none --scale=$out/none/scale_head_1280_head_scale.json --n_samples=32
entropy rope_8L rope --n_samples=32
python plots.py $out/entropy_{ntk,none,fit,head,rope}_8L.json
# the entropy of attention in windows of 4L
for run in none rope full_1e-3 yarn pi; do entropy $run $run --length=1024 --n_samples=16; done
for vectors in head_scale head_scale,head_gain,norm; do
    entropy $vectors none --length=1024 --n_samples=16 \
        --scale=$out/none/scale_head_1024_$vectors.json
done
