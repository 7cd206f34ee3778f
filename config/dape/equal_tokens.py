# DAPE V2, Figure 3: 32,768 tokens a step and 1.6B in all at every training length. The product of
# block_size and batch_size stays the same: 128 x 256, 256 x 128, 512 x 64, 1024 x 32, 2048 x 16 or
# 4096 x 8. On 8 GPUs also --micro_batch_size=1. Give it after config/dape/125m.py:
# python train.py config/dape/125m.py config/dape/equal_tokens.py --block_size=256 \
#     --batch_size=128 --position=kerple --dape_kernel=3 --out_dir=out/dape/equal_256
block_size = 128
batch_size = 256
micro_batch_size = 8
