# A small model that can retrieve a passkey, for Figure 6 on a laptop: it reads half text, half
# passkey documents of up to L tokens
# python data/stdlib/prepare.py --tokenizer=bpe:1024 --out_dir=data/stdlib_bpe
# python data/passkey/prepare.py
# python train.py config/passkey_nope.py                           # half an hour on one core
# python passkey.py --out_dir=out/passkey/nope --max_length=1024 --n_lengths=8
out_dir = 'out/passkey/nope'
dataset = 'stdlib_bpe:0.5,passkey:0.5'
block_size = 256
max_iters = 3000             # 12M tokens
