# Table 2 of the paper on published checkpoints; not run by us. On 8 GPUs, BLOOM and MPT with their own tokenizers:
# python data/pg19/prepare.py --repo=emozilla/pg19-test
# python data/pg19/prepare.py --repo=emozilla/pg19-test --tokenizer=hf:bigscience/bloom-1b1 --out_dir=data/pg19_bloom
# python data/pg19/prepare.py --repo=emozilla/pg19-test --tokenizer=hf:mosaicml/mpt-7b --out_dir=data/pg19_mpt
# torchrun --nproc_per_node=8 eval_ppl.py config/table_1b.py
out_dir = 'out/table_1b'
dataset = 'pg19'
lengths = [2048, 4096, 8192, 16384]
rule = 'paper'
max_windows = 8192           # of 256 scored tokens: 2M
_rope = {'init_from': 'hf:TinyLlama/tinyLlama-intermediate-checkpoints@step-50k-token-105B'}
_nope = {'init_from': 'hf:AntNLP/TinyLlama-NoPE-1.1B', 'position': 'none'}
table = [
    _rope | {'name': 'RoPE'},
    _rope | {'name': 'RoPE, dynamic NTK', 'rope_scaling': [f'dynamic_ntk:{s}' for s in (2, 4, 8, 16)],
             'paper': 'RoPE NTK zero-shot'},
    _rope | {'name': 'RoPE, YaRN', 'rope_scaling': [f'yarn:{s}' for s in (2, 4, 8, 16)],
             'paper': 'RoPE YaRN zero-shot'},
    {'name': 'RoPE, PI fair', 'init_from': 'out/pi_8k/last.pt', 'paper': 'RoPE PI fair 8K'},  # config/finetune_8k.py
    {'name': 'RoPE, YaRN fair', 'init_from': 'out/yarn_8k/last.pt', 'paper': 'RoPE YaRN fair 8K'},
    _nope | {'name': 'NoPE'},
    *(_nope | {'name': f'NoPE, scale {s}', 'scale': s, 'paper': f'NoPE uniform {s}'} for s in (1.2, 1.5, 1.8)),
    _nope | {'name': 'NoPE, head scale 8K', 'init_from': 'hf:AntNLP/TinyLlama-NoPE-HeadScale8k',
             'paper': 'NoPE head scale 8K'},
    {'name': 'BLOOM 1.1B', 'init_from': 'hf:bigscience/bloom-1b1', 'dataset': 'pg19_bloom',
     'paper': 'BLOOM 1.1B (ALiBi)'},
    {'name': 'MPT 7B', 'init_from': 'hf:mosaicml/mpt-7b', 'dataset': 'pg19_mpt', 'paper': 'MPT 7B (ALiBi)'},
]
