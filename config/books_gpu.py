# The books study on one GPU: 32M parameters, BPE of 8,192, L = 512. The series books_32M of
# results/past_L trains it for 1,000 steps.
# python data/books/prepare.py FOLDER --tokenizer=bpe:8192 --out_dir=data/books_bpe
# python train.py config/books_gpu.py
# python train.py config/books_gpu.py --position=rope --out_dir=out/books_gpu/rope
out_dir = 'out/books_gpu/none'
dataset = 'books_bpe'
block_size = 512
batch_size = 64              # 32,768 tokens
micro_batch_size = 64
n_layer = 8
n_head = 8
n_kv_head = 4
n_embd = 512
n_hidden = 1408
learning_rate = 1e-3
min_lr = 1e-4
max_iters = 1500             # 49M tokens
