# The position methods of DAPE V2 on long books at small size: 0.9M parameters, bytes, L = 128, 3M
# tokens each, one seed. Run it from the project's root, after python data/books/prepare.py FOLDER.
# A run that was stopped goes on; trained models are skipped. About 4 minutes for each method on one
# CPU core, 8 where there is DAPE, whose convolutions gain nothing from a compiler there.
set -e
. "$(dirname "$0")/../train.sh"
small() { name=$1; shift; train out/dape/$name config/dape/small.py "$@"; }
small kerple --position=kerple
small kerple_1x3 --position=kerple --dape_kernel=3 --compile=False
small none
small rope --position=rope
small kerple_1x1 --position=kerple --dape_kernel=1 --compile=False
small alibi --position=alibi
small t5 --position=t5
small fire --position=fire
small none_1x3 --dape_kernel=3 --compile=False
small rope_1x3 --position=rope --dape_kernel=3 --compile=False
small xl --position=xl
small cope --position=cope
small none_1x1 --dape_kernel=1 --compile=False
small rope_1x1 --position=rope --dape_kernel=1 --compile=False
python -m results.dape_small.table

# kernel sizes and widths (Tables 4 and 5, Appendix E), more biases (Figure 5), the leak (Figure 6)
dape='--position=kerple --compile=False'
small kerple_1x1_w64 $dape --dape_kernel=1 --dape_width=64
small kerple_1x5 $dape --dape_kernel=5
small kerple_1x7 $dape --dape_kernel=7
for width in 10 64 21; do small kerple_1x3_w$width $dape --dape_kernel=3 --dape_width=$width; done
python -m results.dape_small.table kernels
for bias in alibi fire; do small ${bias}_1x3 --position=$bias --dape_kernel=3 --compile=False; done
for bias in kerple alibi fire; do
    small ${bias}_1x3_cheat --position=$bias --dape_kernel=3 --dape_cheat=True --compile=False
done
python -m results.dape_small.table bases

# as many tokens in longer training windows (Figure 3)
small kerple_1x3_256 $dape --dape_kernel=3 --block_size=256 --batch_size=8 --micro_batch_size=8
small kerple_1x3_512 $dape --dape_kernel=3 --block_size=512 --batch_size=4 --micro_batch_size=4
small kerple_256 --position=kerple --block_size=256 --batch_size=8 --micro_batch_size=8
small kerple_512 --position=kerple --block_size=512 --batch_size=4 --micro_batch_size=4
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
