"""
Small vectors beside the scales, at the demo's size, three seeds. First the commands in
results/vectors_demo/run.sh:

$ python -m results.vectors_demo.table
"""

from functools import partial

from configurator import configure, settings
from results.table import Settings, rows_of_seeds, run_table

out_dir = 'out/vectors_demo'
lengths = [128, 256, 512, 768]  # tuned at 512
max_windows = 512
batch_tokens = 32768

seeds_of = partial(rows_of_seeds, 'out/vectors_demo')


def table():
    rows = seeds_of('NoPE', 'none') + seeds_of('RoPE', 'rope')
    rows += seeds_of('NoPE, uniform scale', 'none', scale_file='scale_uniform.json')
    for tune in ('scale', 'out', 'scale,out', 'norm', 'scale,out,norm'):
        rows += seeds_of(f'NoPE, {tune}', 'none', scale_file=f'scale_head_512_{tune}.json')
    for lr in ('2.5e-4', '5e-4', '1e-3', '2e-3'):
        rows += seeds_of(f'NoPE, every weight, lr {lr}', f'full_{lr}')
    rows += seeds_of('RoPE, PI fair', 'pi') + seeds_of('RoPE, YaRN fair', 'yarn')
    for method in ('ntk', 'dynamic_ntk'):
        rows += seeds_of(f'RoPE, {method} fair', method, seeds=[1337])
    return rows


if __name__ == '__main__':
    configure(globals(), Settings)
    run_table(settings(globals()), table())
