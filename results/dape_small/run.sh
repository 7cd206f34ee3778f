# The position methods of DAPE V2 on long books: 0.9M parameters, bytes, L = 128, 3M tokens each, one
# seed. After python data/books/prepare.py FOLDER. 4 minutes for each method on one core, 8 where
# there is DAPE, whose convolutions gain nothing from a compiler there.
#   python results/tables.py out/dape/methods    # a table; also kernels, bases, equal_tokens ...
. results/common.sh

small() {  # RUN ARGUMENTS...
    train out/dape/$1 config/dape/small.py "${@:2}"
}

row() {  # TABLE RUN WINDOWS ARGUMENTS...: perplexity of the last tokens of each length
    once out/dape/$1/eval_ppl_tail_$2.json python eval_ppl.py --protocol=tail \
        --init_from=out/dape/$2/last.pt --out_dir=out/dape/$1 --label=$2 --n_samples=$3 "${@:4}"
}

to_2048=--lengths=[128,256,512,1024,2048]
tail_256="32 $to_2048 --tail=256"

# the methods
small none
for method in rope alibi t5 fire kerple xl cope; do small $method --position=$method; done
for method in none rope kerple; do for kernel in 1 3; do
    small ${method}_1x$kernel --position=$method --dape_kernel=$kernel --compile=False
done; done
for run in none rope t5 alibi fire cope xl kerple {none,rope,kerple}_1x{1,3}; do
    row methods $run 16 --lengths=[128,256,512,1024,2048,4096,8192] --tail=256
done

# kernel sizes and widths: Tables 4 and 5, Appendix E
dape='--position=kerple --compile=False'
small kerple_1x1_w64 $dape --dape_kernel=1 --dape_width=64
for kernel in 5 7; do small kerple_1x$kernel $dape --dape_kernel=$kernel; done
for width in 10 21 64; do small kerple_1x3_w$width $dape --dape_kernel=3 --dape_width=$width; done
for run in kerple kerple_1x{1,1_w64,3,5,7,3_w10,3_w21,3_w64}; do row kernels $run $tail_256; done

# other biases: Figure 5
for bias in alibi fire; do
    small ${bias}_1x3 --position=$bias --dape_kernel=3 --compile=False
done
for run in {alibi,fire,kerple}{,_1x3}; do row bases $run $tail_256; done

# as many tokens in longer training windows: Figure 3
for T in 256 512; do
    size="--block_size=$T --batch_size=$((2048 / T)) --micro_batch_size=$((2048 / T))"
    small kerple_1x3_$T $dape --dape_kernel=3 $size
    small kerple_$T --position=kerple $size
done
for run in kerple{,_1x3}{,_256,_512}; do row equal_tokens $run $tail_256; done

# head scales for 4L on top of other methods
for run in none rope alibi kerple; do
    test $run = rope && extend=--rope_scaling=yarn:4 || extend=
    scales=out/dape/$run/scale_head_512_own.json
    once $scales python tune_scale.py --out_dir=out/dape/$run --target_length=512 --label=own \
        --init_scale=1.0 --min_scale=None --max_iters=100 --n_samples=32 $extend
    row untuned $run 96 $to_2048 --tail=128 $extend
    row head_scale $run 96 $to_2048 --tail=128 $extend --scale=$scales
done
