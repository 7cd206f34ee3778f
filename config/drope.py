# DroPE (arXiv:2512.12167): the demo's RoPE model goes on without position encoding, at the same L,
# and is then read as a NoPE model, past L with a uniform scale. 330 steps are 15 % of its training;
# the paper's recalibrations are longer. First: python train.py config/demo_rope.py
init_from = 'out/demo/rope/last.pt'
out_dir = 'out/demo/drope'
position = 'none'
max_iters = 330
warmup_iters = 0.1
seed = 42  # another order of the text than that of the RoPE model, which has seed 1337
