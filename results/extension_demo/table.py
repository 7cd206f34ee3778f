"""
Table 2 at the size of the byte models. First results/demo_bytes/run.sh, then the commands in
results/extension_demo/run.sh:

$ python -m results.extension_demo.table
"""

from configurator import configure, settings
from results.table import Settings, run_table

out_dir = 'out/demo'
max_windows = 512
batch_tokens = 32768

NOPE = 'out/demo/nope/last.pt'
ROPE = 'out/demo/rope/last.pt'


def table():
    rows = [
        {'name': 'RoPE', 'init_from': ROPE, 'paper': 'RoPE'},
        {'name': 'NoPE', 'init_from': NOPE, 'paper': 'NoPE'},
        {'name': 'ALiBi', 'init_from': 'out/demo/alibi/last.pt', 'paper': 'BLOOM 1.1B (ALiBi)'},
        {'name': 'NoPE trained with log-n queries', 'init_from': 'out/demo/logn/last.pt'},
        {'name': 'RoPE, uniform scale 0.8 to 1.4', 'init_from': ROPE,
         'scale': [0.8, 1.0, 1.2, 1.4]},
    ]
    for name, method, paper in (('PI', 'pi', None), ('NTK', 'ntk', None),
                                ('dynamic NTK', 'dynamic_ntk', 'RoPE NTK zero-shot'),
                                ('YaRN', 'yarn', 'RoPE YaRN zero-shot')):
        factors = [f'{method}:{s}' for s in (1, 2, 4, 8, 16)]
        rows.append({'name': f'RoPE, {name} zero-shot', 'init_from': ROPE, 'rope_scaling': factors,
                     'paper': paper})
    for name in ('PI', 'YaRN'):
        for T, paper in ((256, '4K'), (512, '8K'), (1024, '16K')):
            rows.append({'name': f'RoPE, {name} fair {T}', 'paper': f'RoPE {name} fair {paper}',
                         'init_from': f'out/demo/{name.lower()}_{T}/last.pt'})
    rows += [
        {'name': 'NoPE, uniform scale (grid)', 'init_from': NOPE,
         'scale': [1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2]},
        {'name': 'NoPE, uniform scale by the fit', 'init_from': NOPE,
         'scale': 'out/demo/nope/scale_uniform_fit.json'},
    ]
    for T, paper in ((256, '4K'), (512, '8K'), (1024, '18K')):
        rows.append({'name': f'NoPE, head scale {T}', 'init_from': NOPE,
                     'scale': f'out/demo/nope/scale_head_{T}.json',
                     'paper': f'NoPE head scale {paper}'})
    rows.append({'name': 'NoPE, head scale sets', 'init_from': NOPE,
                 'scale': 'out/demo/nope/scale_sets.json'})
    return rows


if __name__ == '__main__':
    configure(globals(), Settings)
    run_table(settings(globals()), table())
