# The position methods of DAPE V2 on long books at small size: 0.9M parameters, bytes, L = 128, 3M
# tokens each, one seed. Run it from the project's root, after python data/books/prepare.py FOLDER.
# A run that was stopped goes on; trained models are skipped. About 4 minutes for each method on one
# CPU core, 8 where there is DAPE, whose convolutions gain nothing from a compiler there.
set -e
train() {
    out=out/dape/$1; shift
    test -f $out/loss.png && return
    test -f $out/last.pt && set -- "$@" --init_from=resume
    python train.py config/dape/small.py --out_dir=$out "$@"
}
train kerple --position=kerple
train kerple_1x3 --position=kerple --dape_kernel=3 --compile=False
train none
train rope --position=rope
train kerple_1x1 --position=kerple --dape_kernel=1 --compile=False
train alibi --position=alibi
train t5 --position=t5
train fire --position=fire
train none_1x3 --dape_kernel=3 --compile=False
train rope_1x3 --position=rope --dape_kernel=3 --compile=False
train xl --position=xl
train cope --position=cope
train none_1x1 --dape_kernel=1 --compile=False
train rope_1x1 --position=rope --dape_kernel=1 --compile=False
python -m results.dape_small.table

# kernel sizes and widths (Tables 4 and 5, Appendix E), more biases (Figure 5), the leak (Figure 6)
dape='--position=kerple --compile=False'
train kerple_1x1_w64 $dape --dape_kernel=1 --dape_width=64
train kerple_1x5 $dape --dape_kernel=5
train kerple_1x7 $dape --dape_kernel=7
for width in 10 64 21; do train kerple_1x3_w$width $dape --dape_kernel=3 --dape_width=$width; done
python -m results.dape_small.table kernels
for bias in alibi fire; do train ${bias}_1x3 --position=$bias --dape_kernel=3 --compile=False; done
for bias in kerple alibi fire; do
    train ${bias}_1x3_cheat --position=$bias --dape_kernel=3 --dape_cheat=True --compile=False
done
python -m results.dape_small.table bases

# as many tokens in longer training windows (Figure 3)
train kerple_1x3_256 $dape --dape_kernel=3 --block_size=256 --batch_size=8 --micro_batch_size=8
train kerple_1x3_512 $dape --dape_kernel=3 --block_size=512 --batch_size=4 --micro_batch_size=4
train kerple_256 --position=kerple --block_size=256 --batch_size=8 --micro_batch_size=8
train kerple_512 --position=kerple --block_size=512 --batch_size=4 --micro_batch_size=4
python -m results.dape_small.table equal_tokens

# head scales on top of other methods: does tuning them help there, too? Scales for 4L, 100 steps of
# 8 windows
for run in none alibi kerple rope; do
    test -f out/dape/$run/scale_head_512.json && continue
    test $run = rope && more=--rope_scaling=yarn:4 || more=
    python tune_scale.py --out_dir=out/dape/$run --target_length=512 --init_scale=1.0 --min_scale=None \
        --max_iters=100 --n_samples=32 $more
done
python -m results.dape_small.table head_scale
