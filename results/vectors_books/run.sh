# Small vectors beside the scales, on the books at 5M parameters, L = 256: one seed, every method tuned with the same 150
# steps of 8 windows of 4L = 1,024 tokens. Not run yet. Run it from the project's root, after
#   python data/books/prepare.py FOLDER && python train.py config/books_nope.py
#   python train.py config/books_nope.py config/books_rope.py
set -e
out=out/books
python tune_scale.py --out_dir=$out/nope --method=uniform --target_length=1024 --n_samples=16 --candidate_range=[1.0,2.0,0.2]
for tune in scale norm scale,out scale,out,norm; do
    python tune_scale.py --out_dir=$out/nope --target_length=1024 --max_iters=150 --tune=$tune --label=$tune --n_samples=16
done
for lr in 1e-4 4e-4 1e-3; do
    test -f $out/full_$lr/last.pt || python train.py config/finetune_books.py --init_from=$out/nope/last.pt \
        --learning_rate=$lr --min_lr=0 --out_dir=$out/full_$lr
done
for method in pi yarn; do
    test -f $out/$method/last.pt || python train.py config/finetune_books.py config/$method.py --out_dir=$out/$method
done
python eval_ppl.py config/table_vectors_books.py
