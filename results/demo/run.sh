# make demo with five seeds: an hour on two cores
#   python results/tables.py out/demo_code_seeds/*    # what it has measured
. results/common.sh
for seed in ${SEEDS:-1337 1338 1339 1340 1341}; do
    out=out/demo_code_seeds/$seed
    once $out/report.json python demo.py --out_dir=$out --train_args=--seed=$seed
done
