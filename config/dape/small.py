# A DAPE study on two CPU cores: 0.9M parameters on long books, L = 128, 3M bytes for each method
# python data/books/prepare.py FOLDER
# python train.py config/dape/small.py --position=kerple --dape_kernel=3 \
#     --out_dir=out/dape/small_1x3
dataset = 'books'
block_size = 128
batch_size = 16
n_layer = 4
n_head = 8
n_kv_head = 8
n_embd = 128
n_hidden = 384
learning_rate = 2e-3
min_lr = 2e-4
max_iters = 1500
