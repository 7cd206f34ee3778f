"""
Table 4's ablations of head-scale tuning on the small passkey model: perplexity. The tuning and the
passkey side are in results/ablation_passkey/run.sh:

$ python -m results.ablation_passkey.table
"""

from configurator import configure, settings
from results.table import Settings, run_table

out_dir = 'out/passkey/ablation'
dataset = 'stdlib_bpe'
lengths = [256, 512, 768]
max_windows = 256

NOPE = 'out/passkey/nope'


def table():
    model = f'{NOPE}/last.pt'
    rows = [{'name': 'NoPE', 'init_from': model},
            {'name': 'NoPE, uniform scale (grid)', 'init_from': model,
             'scale': [1.0, 1.2, 1.4, 1.6]}]
    for name, label in (('head scale', 'full'), ('without concentration constraint', 'no_min'),
                        ('without initialization', 'from_1')):
        rows.append({'name': name, 'init_from': model,
                     'scale': f'{NOPE}/scale_head_768_{label}.json'})
    return rows


if __name__ == '__main__':
    configure(globals(), Settings)
    run_table(settings(globals()), table())
