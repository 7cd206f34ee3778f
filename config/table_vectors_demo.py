# Small vectors beside the scales, at the demo's size: first the commands in results/vectors_demo/run.sh
# python eval_ppl.py config/table_vectors_demo.py
out_dir = 'out/vectors_demo'
lengths = [128, 256, 512, 768]  # tuned at 512
max_windows = 512
batch_tokens = 32768
table = []


def _rows(name, run, seeds=(1337, 1338, 1339), **more):
    for seed in seeds:
        _out = f'out/vectors_demo/{seed}'
        table.append({'name': name, 'init_from': f'{_out}/{run}/last.pt'}
                     | {key: value.format(out=_out) for key, value in more.items()})


_rows('NoPE', 'none')
_rows('RoPE', 'rope')
_rows('NoPE, uniform scale', 'none', scale='{out}/none/scale_uniform.json')
for _tune in ('scale', 'out', 'scale,out', 'norm', 'scale,out,norm'):
    _rows(f'NoPE, {_tune}', 'none', scale='{out}/none/scale_head_512_' + _tune + '.json')
for _lr in ('2.5e-4', '5e-4', '1e-3', '2e-3'):
    _rows(f'NoPE, every weight, lr {_lr}', f'full_{_lr}')
_rows('RoPE, PI fair', 'pi')
_rows('RoPE, YaRN fair', 'yarn')
for _kind in ('ntk', 'dynamic_ntk'):
    _rows(f'RoPE, {_kind} fair', _kind, [1337])
