# "raw": 1000 steps instead of 200. Give it last. The warm-up is PI's, 10% of them; YaRN's is 2%: --warmup_iters=20
max_iters = 1000
warmup_iters = 100
