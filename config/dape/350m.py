# DAPE V2, Table 8: 350M. Give it after config/dape/125m.py
n_layer = 24
n_head = 16
n_kv_head = 16
n_embd = 1024
n_hidden = 2736              # 405M parameters untied, as the paper's GELU block
learning_rate = 3e-4
min_lr = 3e-5
