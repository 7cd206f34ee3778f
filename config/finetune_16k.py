# 16K tokens instead of 8K: give it after finetune_8k.py
# (Table 2 has 30M tokens of tuning for its fair 16K rows, which is 18,432 x 8 x 200; this is 26M)
block_size = 16384
