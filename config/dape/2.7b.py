# The 2.7B shape of DAPE V2, Table 3. Give it after config/dape/125m.py. No recipe is published: the
# rate is that of the released stock config, steps and batch are the 125M model's
n_layer = 32
n_head = 32
n_kv_head = 32
n_embd = 2560
n_hidden = 6832
learning_rate = 1.6e-4
min_lr = 1.6e-5
checkpoint_activations = True
