# The paper's model (Section 4.1): TinyLlama 1.1B without position encoding, 50K steps of 2M tokens,
# 105B in all. First:
# python data/hub/prepare.py data/hub/slimpajama.py
# python data/hub/prepare.py data/hub/starcoder.py
# torchrun --nproc_per_node=8 train.py config/nope_1b.py
out_dir = 'out/nope_1b'
dataset = 'slimpajama:0.693584,starcoder:0.306416'
block_size = 2048
batch_size = 1024            # 2,097,152 tokens
micro_batch_size = 8
n_layer = 22
n_head = 32
n_kv_head = 4
n_embd = 2048
n_hidden = 5632
learning_rate = 3.5e-4       # NoPE's; its twin with RoPE takes 4e-4
min_lr = 3.5e-5
warmup_iters = 2000
# TinyLlama's cosine is over 3T tokens: at 50K steps the rate is still 99.7% of its peak.
lr_decay_iters = 1430512
max_iters = 50000            # Figure 7 also fits the scale at 10,000: train with --max_iters=10000,
                             # copy last.pt, and go on with --init_from=resume --max_iters=50000
eval_interval = 1000
eval_windows = 1024
# Ranks agree to stop at these steps, then save. torchrun kills them 30 s after SIGTERM, when the
# 13 GB of last.pt may not be written: from torch 2.12 on, torchrun --shutdown-timeout=300 allows
# more. Killed while they save, they go on from the last.pt before, of the last validation.
log_interval = 5
seed = 3407
