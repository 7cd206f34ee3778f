# SlimPajama, the larger part of the paper's pretraining data (Section 4.1). Its GitHub rows are
# left out, as TinyLlama does, because StarCoder has them. Sources: Soboleva et al. 2023;
# scripts/prepare_slimpajama.py of jzhang38/TinyLlama.
# python data/hub/prepare.py data/hub/slimpajama.py     # all of it
# python data/hub/prepare.py data/hub/slimpajama.py --repo=DKYoon/SlimPajama-6B \
#     --revision=b5f90f419b7489cdba26fdbc8c022fcb5562f968   # a sample, enough to tune scales with
repo = 'gmongaras/SlimPajama-627B_Reupload'  # the publisher's copy is gone
revision = 'c34c22dbb10ae6b264a2f357a909d1a537141b36'
without = 'RedPajamaGithub'
out_dir = 'data/slimpajama'
