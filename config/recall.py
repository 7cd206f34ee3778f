# Associative recall and copying: one NoPE model of 0.8M parameters that learns both from inputs of
# up to 16 symbols, tested at 1 to 64 times that.
# python -m extras.che config/recall.py
# python -m extras.che config/recall.py --position=alibi
tasks = ['recall+copy']
label = 'recall'
n_layer = 4
n_head = 8
n_embd = 128
n_hidden = 344
train_length = 16
batch_size = 64
max_iters = 6000
learning_rate = 2e-3
eval_interval = 500
lengths = [16, 32, 64, 256, 1024]
n_test = 64
