# Fine-tune the demo's RoPE model at 4L, with about as many tokens as head scales are tuned with.
# The method is given after it:
# python train.py config/finetune_demo.py config/yarn.py --out_dir=out/demo/rope_yarn
init_from = 'out/demo/rope/last.pt'
block_size = 512
batch_size = 8
micro_batch_size = 8
learning_rate = 5e-4         # a quarter of pretraining's peak, as in config/finetune_8k.py
min_lr = 5e-5
warmup_iters = 0.1
weight_decay = 0.0
max_iters = 120
log_interval = 20
seed = 42
