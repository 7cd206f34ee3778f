# "raw": 1000 steps instead of the 200 of "fair". Give it after config/finetune_8k.py
max_iters = 1000
