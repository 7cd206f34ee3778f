# The study on long books: 5M parameters, bytes, L = 256, seeds 1337, 1338 and 1339 (SEEDS=1337 for
# one: about two and a half hours on one CPU core). Every method is tuned with the same 150 steps of
# 8 windows of 4L = 1,024 tokens. Run it from the project's root, after python data/books/prepare.py
# FOLDER. What is there is kept.
set -e
tune() { test -f $out/none/$1 || { shift; python tune_scale.py --out_dir=$out/none --n_samples=16 "$@"; }; }
. "$(dirname "$0")/../train.sh"
for seed in ${SEEDS:-1337 1338 1339}; do
    out=out/books/$seed
    train $out/none config/books_nope.py --seed=$seed --keep_steps=[560]
    train $out/rope config/books_nope.py --position=rope --seed=$seed
    # finer steps, other vectors and other rates with the first seed only
    test $seed = 1337 && range=[1.0,2.4,0.02] more='scale,out norm' rates='1e-4 4e-4 2e-3' || range=[1.0,3.2,0.1] more= rates=
    # over L ... 8L: Figures 2 and 7
    tune scale_uniform.json --method=uniform --candidate_range=$range
    for vectors in scale scale,out,norm $more; do
        tune scale_head_1024_$vectors.json --target_length=1024 --max_iters=150 --tune=$vectors --label=$vectors
    done
    for lr in 1e-3 $rates; do
        train $out/full_$lr config/finetune_books.py --init_from=$out/none/last.pt --learning_rate=$lr --min_lr=0
    done
    for method in yarn pi; do
        train $out/$method config/finetune_books.py config/$method.py --init_from=$out/rope/last.pt
    done
    for method in ntk dynamic_ntk; do
        train $out/$method config/finetune_books.py --rope_scaling=$method --init_from=$out/rope/last.pt
    done
done
# further comparisons, with one seed: a longer target, a set for 8L, and one for each length
out=out/books/1337
tune scale_head_1280.json --target_length=1280 --max_iters=120
tune scale_head_2048.json --target_length=2048 --max_iters=75
tune scale_sets.json --target_lengths=[512,1024,2048] --max_iters=75
# position methods that a model has from training on
train $out/alibi config/books_nope.py --position=alibi
train $out/logn config/books_nope.py --position=logn
python -m results.books.table
# Figure 7: the best scale by position at a fifth of training and at its end
tune scale_uniform_fig7.json --method=uniform --candidate_range=[1.0,3.2,0.02] --label=fig7 \
    --compare="['$out/none/step_560.pt']"
# Figure 2, right: uniform scales do not extend RoPE
test -f $out/rope/scale_uniform.json || python tune_scale.py --out_dir=$out/rope --n_samples=16 --method=uniform \
    --candidate_range=[0.8,1.4,0.1]
# Figures 1, 3, 5: loss and entropy by position, of the plain models, RoPE with NTK, and NoPE with
# scales
entropy() { test -f "$1" || { shift; python entropy.py --n_samples=32 "$@"; }; }
entropy $out/none/entropy.json --out_dir=$out/none
entropy $out/none/entropy_scale_uniform_fit.json --out_dir=$out/none --scale=$out/none/scale_uniform_fit.json
entropy $out/none/entropy_scale_head_1280.json --out_dir=$out/none --scale=$out/none/scale_head_1280.json
entropy $out/rope/entropy.json --out_dir=$out/rope
python entropy.py --n_samples=32 --out_dir=$out/rope --rope_scaling=dynamic_ntk:2 --compare="['$out/none/entropy.json',
    '$out/none/entropy_scale_uniform_fit.json','$out/none/entropy_scale_head_1280.json','$out/rope/entropy.json']"
# Attention's entropy in windows of 4L, of every way to extend a model
for run in none rope full_1e-3 yarn pi; do
    entropy out/books/entropy/entropy_$run.json --init_from=$out/$run/last.pt --length=1024 --n_samples=16 \
        --label=$run --out_dir=out/books/entropy
done
for vectors in scale scale,out,norm; do
    entropy out/books/entropy/entropy_$vectors.json --init_from=$out/none/last.pt --length=1024 --n_samples=16 \
        --scale=$out/none/scale_head_1024_$vectors.json --label=$vectors --out_dir=out/books/entropy
done
