# Appendix A for 4K tokens (6.6M tokens of tuning): give it after tune_8k.py
# torchrun --nproc_per_node=8 tune_scale.py config/tune_8k.py config/tune_4k.py
target_length = 4096
init_scale = 1.2
