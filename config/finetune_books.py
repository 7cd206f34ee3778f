# Fine-tune the 5M RoPE model of results/head_scale at 4L, with as many tokens as the vectors of its
# NoPE twin are tuned with
out_dir = 'out/books/1337/rope_4L'
init_from = 'out/books/1337/rope/last.pt'
dataset = 'books'
block_size = 1024
batch_size = 8
micro_batch_size = 8
learning_rate = 4e-4         # a quarter of pretraining's peak, as in config/finetune_8k.py
min_lr = 4e-5
warmup_iters = 0.1
weight_decay = 0.0
max_iters = 150
log_interval = 25
eval_windows = 32
seed = 42
