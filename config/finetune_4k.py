# 4K tokens instead of 8K: give it after finetune_8k.py
block_size = 4096
