# DAPE V2 at small size. Some parts: PARTS=methods bash results/dape/run.sh
#   methods      0.9M parameters on books as bytes, L = 128, 3M tokens, one seed; 4 to 20 minutes a
#                method on one core; after python data/books/prepare.py FOLDER
#   head_scales  on top of four of them, tuned for 4L
#   che          two Chomsky-hierarchy tasks, three seeds; 1 to 11 minutes of one core a run
. results/common.sh

row() {  # TABLE LABEL RUN ARGUMENTS...: perplexity of the last tokens of each length
    once out/dape/$1/eval_ppl_tail_$2.json python eval_ppl.py --protocol=tail \
        --init_from=out/dape/$3/last.pt --out_dir=out/dape/$1 --label=$2 --dtype=bfloat16 "${@:4}"
}

methods() {
    small() {  # RUN ARGUMENTS...
        train out/dape/$1 config/dape/small.py "${@:2}"
        row methods $1 $1 --n_samples=16 --lengths=[128,256,512,1024,2048,4096,8192] --tail=256
    }
    small none
    for method in rope alibi t5 fire kerple xl cope; do small $method --position=$method; done
    for method in none rope kerple; do for kernel in 1 3; do
        small ${method}_1x$kernel --position=$method --dape_kernel=$kernel --compile=False
    done; done
}

head_scales() {
    for run in none rope alibi kerple; do
        test $run = rope && extend=--rope_scaling=yarn:4 || extend=
        scales=out/dape/$run/scale_head_512_own.json
        once $scales python tune_scale.py --out_dir=out/dape/$run --target_length=512 \
            --label=own --init_scale=1.0 --min_scale=None --max_iters=100 $extend
        as="--n_samples=96 --lengths=[128,256,512,1024,2048] --tail=128 $extend"
        row head_scales $run $run $as
        row head_scales ${run}_head_scale $run $as --scale=$scales
    done
}

che() {
    for seed in ${SEEDS:-1337 1338 1339}; do
        task() {  # METHOD TASK ARGUMENTS...
            out=out/che/$1_$seed
            once $out/che_$2.json python -m extras.che --seed=$seed --out_dir=$out --label=$2 \
                "--tasks=['$2']" --eval_interval=100 "${@:3}"
        }
        both() {  # METHOD ARGUMENTS...
            task $1 even_pairs --max_iters=300 --lengths=[1,$(seq -s, 41 51 500)] --n_test=64 \
                "${@:2}"
            task $1 missing_duplicate --max_iters=800 --n_test=128 \
                --lengths=[$(seq -s, 1 3 40),$(seq -s, 41 3 60)] "${@:2}"
        }
        both rope --position=rope
        both rope_random --position=rope_random
        both kerple --position=kerple
        both kerple_dape3 --position=kerple --dape_kernel=3
    done
}

for part in ${PARTS:-methods head_scales che}; do $part; done
