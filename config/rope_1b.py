# The twin of config/nope_1b.py with RoPE: TinyLlama itself, 50K steps. Give it after nope_1b.py:
# torchrun --nproc_per_node=8 train.py config/nope_1b.py config/rope_1b.py
out_dir = 'out/rope_1b'
position = 'rope'
learning_rate = 4e-4
min_lr = 4e-5
