# 0.9M parameters on long books, for results/scoreboard: the whole recipe, so that no default of
# train.py changes it. First: python data/books/prepare.py FOLDER
out_dir = 'out/scoreboard/nope'
dataset = 'books'
block_size = 128             # L, in bytes
batch_size = 16
micro_batch_size = 16
n_layer = 4
n_head = 8
n_kv_head = 4
n_embd = 128
n_hidden = 384
max_iters = 2200
learning_rate = 2e-3
min_lr = 2e-4
warmup_iters = 200
lr_decay_iters = None
weight_decay = 0.1
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0
dtype = 'float32'            # the rows of NoPE + conv are older than this line
