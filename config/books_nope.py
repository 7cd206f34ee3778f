# 5M parameters on long books, for results/head_scale. First: python data/books/prepare.py FOLDER
out_dir = 'out/books/1337/none'
dataset = 'books'
block_size = 256
batch_size = 8
micro_batch_size = 8
n_layer = 6
n_head = 8
n_kv_head = 4
n_embd = 256
n_hidden = 768
learning_rate = 1.5e-3
min_lr = 1.5e-4
max_iters = 2800             # 5.7M bytes
