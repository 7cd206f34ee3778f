"""
The study on long books at 5M parameters, in Table 2's layout, three seeds. First the commands in
results/books/run.sh:

$ python -m results.books.table
"""

from functools import partial

from configurator import configure, settings
from results.table import Settings, rows_of_seeds, run_table

out_dir = 'out/books'
lengths = [256, 512, 1024, 2048]  # tuned at 1024
stride = 64
max_windows = 32
batch_tokens = 32768

seeds_of = partial(rows_of_seeds, 'out/books')


def trained_so():
    rows = seeds_of('RoPE', 'rope', paper='RoPE') + seeds_of('NoPE', 'none', paper='NoPE')
    rows += seeds_of('ALiBi, trained so', 'alibi', [1337], paper='BLOOM 1.1B (ALiBi)')
    return rows + seeds_of('NoPE with log-n queries, trained so', 'logn', [1337])


def rope_extended():
    rows = []
    for method, paper in (('pi', None), ('ntk', None), ('dynamic_ntk', 'RoPE NTK zero-shot'),
                          ('yarn', 'RoPE YaRN zero-shot')):
        factors = [f'{method}:{s}' for s in (2, 4, 8, 16)]
        rows += seeds_of(f'RoPE, {method} zero-shot', 'rope', [1337], rope_scaling=factors,
                         paper=paper)
    rows += seeds_of('RoPE, PI fair', 'pi', paper='RoPE PI fair 8K')
    rows += seeds_of('RoPE, YaRN fair', 'yarn', paper='RoPE YaRN fair 8K')
    for method in ('ntk', 'dynamic_ntk'):
        rows += seeds_of(f'RoPE, {method} fair', method)
    return rows


def nope_scaled():
    rows = seeds_of('NoPE, uniform scale (grid)', 'none', [1337],
                    scale=[1.2, 1.5, 1.8, 2.1, 2.4, 2.7])
    rows += seeds_of('NoPE, uniform scale by the fit', 'none', scale_file='scale_uniform_fit.json')
    rows += seeds_of('NoPE, scale', 'none', scale_file='scale_head_1024_scale.json',
                     paper='NoPE head scale 8K')
    rows += seeds_of('NoPE, scale, at 5L', 'none', [1337], 'scale_head_1280.json')
    rows += seeds_of('NoPE, scale, at 8L', 'none', [1337], 'scale_head_2048.json',
                     paper='NoPE head scale 18K')
    return rows + seeds_of('NoPE, scale, sets for 2L, 4L, 8L', 'none', [1337], 'scale_sets.json')


def nope_tuned():
    rows = []
    for vectors in ('scale,out', 'norm'):
        rows += seeds_of(f'NoPE, {vectors}', 'none', [1337], f'scale_head_1024_{vectors}.json')
    rows += seeds_of('NoPE, scale,out,norm', 'none',
                     scale_file='scale_head_1024_scale,out,norm.json')
    for lr in ('1e-4', '4e-4', '2e-3'):
        rows += seeds_of(f'NoPE, every weight, lr {lr}', f'full_{lr}', [1337])
    return rows + seeds_of('NoPE, every weight, lr 1e-3', 'full_1e-3')


def table():
    return trained_so() + rope_extended() + nope_scaled() + nope_tuned()


if __name__ == '__main__':
    configure(globals(), Settings)
    run_table(settings(globals()), table())
