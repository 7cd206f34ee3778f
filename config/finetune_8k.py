# Fine-tune TinyLlama at 50K steps for 8K tokens, as the paper does ("fair": 200 steps, 13M tokens).
# --block_size=4096 and 16384 are the other lengths of Table 2 (its fair 16K rows had 30M tokens of
# tuning, 18,432 x 8 x 200; ours have 26M). The text is that of config/nope_1b.py. The method is
# given after it:
# torchrun --nproc_per_node=8 train.py config/finetune_8k.py config/yarn.py --out_dir=out/yarn_8k
# torchrun --nproc_per_node=8 train.py config/finetune_8k.py config/pi.py config/raw.py \
#     --out_dir=out/pi_8k_raw
out_dir = 'out/finetune_8k'
init_from = 'hf:TinyLlama/tinyLlama-intermediate-checkpoints@step-50k-token-105B'
dataset = 'slimpajama:0.693584,starcoder:0.306416'
block_size = 8192
batch_size = 8
micro_batch_size = 1
checkpoint_activations = True
learning_rate = 1e-4         # the released scripts'
min_lr = 1e-5
warmup_iters = 0.1           # of the steps
weight_decay = 0.0
max_iters = 200
eval_interval = 100
log_interval = 10
seed = 42
