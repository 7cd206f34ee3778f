# Table 2 at the demo's size: first make demo, then the commands in results/extension_demo/run.sh
# python eval_ppl.py config/table_demo.py
out_dir = 'out/demo'
max_windows = 512
batch_tokens = 32768
_nope, _rope = 'out/demo/nope/last.pt', 'out/demo/rope/last.pt'


def _factors(method):
    return [f'{method}:{s}' for s in (1, 2, 4, 8, 16)]


table = [
    {'name': 'RoPE', 'init_from': _rope},
    {'name': 'NoPE', 'init_from': _nope},
    {'name': 'ALiBi', 'init_from': 'out/demo/alibi/last.pt', 'paper': 'BLOOM 1.1B (ALiBi)'},
    {'name': 'NoPE trained with log-n queries', 'init_from': 'out/demo/logn/last.pt'},
    {'name': 'RoPE, uniform scale 0.8 to 1.4', 'init_from': _rope, 'scale': [0.8, 1.0, 1.2, 1.4]},
    {'name': 'RoPE, PI zero-shot', 'init_from': _rope, 'rope_scaling': _factors('pi')},
    {'name': 'RoPE, NTK zero-shot', 'init_from': _rope, 'rope_scaling': _factors('ntk')},
    {'name': 'RoPE, dynamic NTK zero-shot', 'init_from': _rope, 'rope_scaling': _factors('dynamic_ntk'),
     'paper': 'RoPE NTK zero-shot'},
    {'name': 'RoPE, YaRN zero-shot', 'init_from': _rope, 'rope_scaling': _factors('yarn'),
     'paper': 'RoPE YaRN zero-shot'},
]
for _T, _paper in ((256, '4K'), (512, '8K'), (1024, '16K')):
    table.append({'name': f'RoPE, PI fair {_T}', 'init_from': f'out/demo/pi_{_T}/last.pt',
                  'paper': f'RoPE PI fair {_paper}'})
for _T, _paper in ((256, '4K'), (512, '8K'), (1024, '16K')):
    table.append({'name': f'RoPE, YaRN fair {_T}', 'init_from': f'out/demo/yarn_{_T}/last.pt',
                  'paper': f'RoPE YaRN fair {_paper}'})
table += [
    {'name': 'NoPE, uniform scale (grid)', 'init_from': _nope, 'scale': [1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2]},
    {'name': 'NoPE, uniform scale by the fit', 'init_from': _nope, 'scale': 'out/demo/nope/scale_uniform_fit.json'},
]
for _T, _paper in ((256, '4K'), (512, '8K'), (1024, '18K')):
    table.append({'name': f'NoPE, head scale {_T}', 'init_from': _nope, 'scale': f'out/demo/nope/scale_head_{_T}.json',
                  'paper': f'NoPE head scale {_paper}'})
table.append({'name': 'NoPE, head scale sets', 'init_from': _nope, 'scale': 'out/demo/nope/scale_sets.json'})
