# Appendix A: 704 scales of the 1.1B NoPE model for 8K tokens (13.1M tokens of tuning). First, the
# uniform search:
# python tune_scale.py config/tune_8k.py --method=uniform --target_length=16384 \
#     --candidate_range=[1.0,2.0,0.01] --n_samples=64
# torchrun --nproc_per_node=8 tune_scale.py config/tune_8k.py
out_dir = 'out/nope_1b'
target_length = 8192
init_scale = 1.6                  # the released script's; by the paper's text 1.5, by its fit 1.55
tune = 'head_scale:0.1'
micro_batch_size = 1
checkpoint_activations = True
batch_tokens = 32768
