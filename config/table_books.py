# The study on long books at 5M parameters, in Table 2's layout: first the commands in results/books/run.sh
# python eval_ppl.py config/table_books.py
out_dir = 'out/books'
lengths = [256, 512, 1024, 2048]  # tuned at 1024
stride = 64
max_windows = 32
batch_tokens = 32768
table = []


def _rows(name, run, seeds=(1337, 1338, 1339), scale_file=None, **more):
    """A row for each seed."""
    for seed in seeds:
        scale = {'scale': f'out/books/{seed}/none/{scale_file}'} if scale_file else {}
        table.append({'name': name, 'init_from': f'out/books/{seed}/{run}/last.pt'} | scale | more)


_rows('RoPE', 'rope')
_rows('NoPE', 'none')
_rows('ALiBi, trained so', 'alibi', [1337], paper='BLOOM 1.1B (ALiBi)')
_rows('NoPE with log-n queries, trained so', 'logn', [1337])
for _kind, _paper in (('pi', ''), ('ntk', ''), ('dynamic_ntk', 'RoPE NTK zero-shot'), ('yarn', 'RoPE YaRN zero-shot')):
    _grid = [f'{_kind}:{_s}' for _s in (2, 4, 8, 16)]
    _rows(f'RoPE, {_kind} zero-shot', 'rope', [1337], rope_scaling=_grid, paper=_paper)
_rows('RoPE, PI fair', 'pi', paper='RoPE PI fair 8K')
_rows('RoPE, YaRN fair', 'yarn', paper='RoPE YaRN fair 8K')
_rows('RoPE, ntk fair', 'ntk')
_rows('RoPE, dynamic_ntk fair', 'dynamic_ntk')
_rows('NoPE, uniform scale (grid)', 'none', [1337], scale=[1.2, 1.5, 1.8, 2.1, 2.4, 2.7])
_rows('NoPE, uniform scale by the fit', 'none', scale_file='scale_uniform_fit.json')
_rows('NoPE, scale', 'none', scale_file='scale_head_1024_scale.json', paper='NoPE head scale 8K')
_rows('NoPE, scale, at 5L', 'none', [1337], scale_file='scale_head_1280.json')
_rows('NoPE, scale, at 8L', 'none', [1337], scale_file='scale_head_2048.json', paper='NoPE head scale 18K')
_rows('NoPE, scale, sets for 2L, 4L, 8L', 'none', [1337], scale_file='scale_sets.json')
for _vectors in ('scale,out', 'norm'):
    _rows(f'NoPE, {_vectors}', 'none', [1337], scale_file=f'scale_head_1024_{_vectors}.json')
_rows('NoPE, scale,out,norm', 'none', scale_file='scale_head_1024_scale,out,norm.json')
for _lr in ('1e-4', '4e-4', '2e-3'):
    _rows(f'NoPE, every weight, lr {_lr}', f'full_{_lr}', [1337])
_rows('NoPE, every weight, lr 1e-3', 'full_1e-3')
