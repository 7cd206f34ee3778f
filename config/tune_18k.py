# Appendix A for 16K tokens, tuned at 18K so that the end of the window is good too (30M tokens):
# give it after tune_8k.py
# torchrun --nproc_per_node=8 tune_scale.py config/tune_8k.py config/tune_18k.py
# Table 4's ablations: --min_scale=None --label=no_constraint; --init_scale=1.0 --label=start_at_1
target_length = 18432
init_scale = 1.7
