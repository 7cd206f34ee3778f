# DAPE V2, Figure 3: 32,768 tokens a step and 1.6B in all at every training length. Give it after config/dape/125m.py:
# train.py config/dape/125m.py config/dape/equal_tokens.py --block_size=128 --batch_size=256 (256 x 128, 512 x 64,
# 1024 x 32, 2048 x 16, 4096 x 8): the product is to stay the same. On 8 GPUs also --micro_batch_size=1
block_size = 128
batch_size = 256
micro_batch_size = 8
