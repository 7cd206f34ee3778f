"""
Table 2 of "Length Generalization of Causal Transformers without Position Encoding" on published
checkpoints; not run by us. First, BLOOM and MPT with their own tokenizers:

$ python data/pg19/prepare.py --repo=emozilla/pg19-test
$ python data/pg19/prepare.py --repo=emozilla/pg19-test --tokenizer=hf:bigscience/bloom-1b1 \\
      --out_dir=data/pg19_bloom
$ python data/pg19/prepare.py --repo=emozilla/pg19-test --tokenizer=hf:mosaicml/mpt-7b \\
      --out_dir=data/pg19_mpt
$ torchrun --nproc_per_node=8 -m results.papers.table
"""

from configurator import configure, settings
from results.table import Settings, run_table

out_dir = 'out/table_1b'
dataset = 'pg19'
lengths = [2048, 4096, 8192, 16384]
rule = 'paper'
max_windows = 8192           # of 256 scored tokens: 2M

TINYLLAMA = 'hf:TinyLlama/tinyLlama-intermediate-checkpoints@step-50k-token-105B'
NOPE = {'init_from': 'hf:AntNLP/TinyLlama-NoPE-1.1B', 'position': 'none'}


def table():
    dynamic_ntk = [f'dynamic_ntk:{s}' for s in (1, 2, 4, 8, 16)]
    yarn = [f'yarn:{s}' for s in (1, 2, 4, 8, 16)]
    rows = [
        {'name': 'RoPE', 'init_from': TINYLLAMA, 'paper': 'RoPE'},
        {'name': 'RoPE, dynamic NTK', 'init_from': TINYLLAMA, 'rope_scaling': dynamic_ntk,
         'paper': 'RoPE NTK zero-shot'},
        {'name': 'RoPE, YaRN', 'init_from': TINYLLAMA, 'rope_scaling': yarn,
         'paper': 'RoPE YaRN zero-shot'},
        # of config/finetune_8k.py
        {'name': 'RoPE, PI fair', 'init_from': 'out/pi_8k/last.pt', 'paper': 'RoPE PI fair 8K'},
        {'name': 'RoPE, YaRN fair', 'init_from': 'out/yarn_8k/last.pt',
         'paper': 'RoPE YaRN fair 8K'},
        NOPE | {'name': 'NoPE', 'paper': 'NoPE'},
    ]
    for scale in (1.2, 1.5, 1.8):
        rows.append(NOPE | {'name': f'NoPE, scale {scale}', 'scale': scale,
                            'paper': f'NoPE uniform {scale}'})
    return rows + [
        {'name': 'NoPE, head scale 8K', 'init_from': 'hf:AntNLP/TinyLlama-NoPE-HeadScale8k',
         'position': 'none', 'paper': 'NoPE head scale 8K'},
        {'name': 'BLOOM 1.1B', 'init_from': 'hf:bigscience/bloom-1b1', 'dataset': 'pg19_bloom',
         'paper': 'BLOOM 1.1B (ALiBi)'},
        {'name': 'MPT 7B', 'init_from': 'hf:mosaicml/mpt-7b', 'dataset': 'pg19_mpt',
         'paper': 'MPT 7B (ALiBi)'},
    ]


if __name__ == '__main__':
    configure(globals(), Settings)
    run_table(settings(globals()), table())
