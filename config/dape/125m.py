# DAPE V2, Table 8: 125M on Pile ArXiv at L = 512, 6.6B tokens. The position method is given after
# it:
# python data/hub/prepare.py data/hub/arxiv.py
# torchrun --nproc_per_node=8 train.py config/dape/125m.py --position=kerple --dape_kernel=3 \
#     --out_dir=out/dape/125m_1x3
# python eval_ppl.py --protocol=tail --out_dir=out/dape/125m_1x3 --lengths=[512,1024,2048,4096,8192]
dataset = 'arxiv'
block_size = 512
batch_size = 256
micro_batch_size = 32
n_layer = 12
n_head = 12
n_kv_head = 12
n_embd = 768
n_hidden = 2048              # as many parameters as with the paper's GELU block, 162M untied
learning_rate = 6e-4
min_lr = 6e-5
warmup_iters = 500
max_iters = 50000
eval_interval = 5000
seed = 1234
