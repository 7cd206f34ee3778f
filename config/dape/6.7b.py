# The 6.7B shape of DAPE V2, Table 7 (time only). Give it after config/dape/125m.py. No recipe is
# published. Weights, gradients and AdamW's moments take 110 GB, so training needs --fsdp=True
n_layer = 32
n_head = 32
n_kv_head = 32
n_embd = 4096
n_hidden = 10928
learning_rate = 1.2e-4
min_lr = 1.2e-5
checkpoint_activations = True
