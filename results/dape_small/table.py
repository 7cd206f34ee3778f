"""
The position methods of "DAPE V2" at small size, in the layout of its Figure 2. First the commands
in results/dape_small/run.sh:

$ python -m results.dape_small.table                # the methods
$ python -m results.dape_small.table kernels        # Tables 4 and 5, Appendix E: on Kerple
$ python -m results.dape_small.table bases          # Figures 5 and 6: other biases, and a leak
$ python -m results.dape_small.table equal_tokens   # Figure 3: training windows of 128 to 512
$ python -m results.dape_small.table head_scale     # head scales on top of other methods
"""

from configurator import configure, settings
from results import study
from results.table import Settings, run_table

table = 'small'              # small, kernels, bases, equal_tokens or head_scale; or the word alone
out_dir = 'out/dape'
protocol = 'tail'
lengths: list[int] | None = None  # None: doubled from 128 to 8192 for small, else to 2048
n_samples: int | None = None  # windows; None: 16 for small, 96 for head_scale, else 32
tail: int | None = None      # tokens scored; None: 128 for head_scale, else 256
label: str | None = None     # name of the result; None: the table's, but none for small

SMALL = {
    'none': 'NoPE',
    'rope': 'RoPE',
    't5': 'T5 bias',
    'alibi': 'ALiBi',
    'kerple': 'Kerple',
    'fire': 'FIRE',
    'cope': 'CoPE',
    'xl': 'Transformer-XL',
    'none_1x1': 'DAPE-NoPE',
    'none_1x3': 'DAPE 1x3-NoPE',
    'rope_1x1': 'DAPE-RoPE',
    'rope_1x3': 'DAPE 1x3-RoPE',
    'kerple_1x1': 'DAPE-Kerple',
    'kerple_1x3': 'DAPE 1x3-Kerple',
}
KERNELS = {
    'kerple': 'Kerple',
    'kerple_1x1': 'DAPE-Kerple',
    'kerple_1x1_w64': 'DAPE-Kerple, 64 channels',
    'kerple_1x3': 'DAPE 1x3-Kerple',
    'kerple_1x5': 'DAPE 1x5-Kerple',
    'kerple_1x7': 'DAPE 1x7-Kerple',
    'kerple_1x3_w10': 'DAPE 1x3-Kerple, 10 channels',
    'kerple_1x3_w21': 'DAPE 1x3-Kerple, 21 channels',
    'kerple_1x3_w64': 'DAPE 1x3-Kerple, 64 channels',
}
BASES = {'alibi': 'ALiBi', 'fire': 'FIRE', 'kerple': 'Kerple'}

# The rows that the paper's Tables 4 and 9 have, too.
PAPER = ('Transformer-XL', 'CoPE', 'Kerple', 'DAPE-Kerple', 'DAPE 1x3-Kerple', 'DAPE 1x5-Kerple',
         'DAPE 1x7-Kerple')


def row_of(name, run, **more):
    return {'name': name, 'init_from': f'out/dape/{run}/last.pt'} | more


def beside_paper(names):
    rows = []
    for run, name in names.items():
        paper = name if name in PAPER else None
        rows.append(row_of(name, run, paper=paper))
    return rows


def bases():
    rows = []
    for run, name in BASES.items():
        rows += [row_of(name, run), row_of(f'DAPE 1x3-{name}', f'{run}_1x3'),
                 row_of(f'DAPE 1x3-{name} that cheats', f'{run}_1x3_cheat')]
    return rows


def equal_tokens():
    rows = []
    for run, name in (('kerple', 'Kerple'), ('kerple_1x3', 'DAPE 1x3-Kerple')):
        for T, ending in ((128, ''), (256, '_256'), (512, '_512')):
            rows.append(row_of(f'{name}, trained at {T}', run + ending))
    return rows


def head_scale():
    rows = []
    for run, name, scaling in (('none', 'NoPE', None), ('rope', 'RoPE + YaRN', 'yarn:4'),
                               ('alibi', 'ALiBi', None), ('kerple', 'Kerple', None)):
        plain = row_of(name, run, rope_scaling=scaling)
        scale = f'out/dape/{run}/scale_head_512.json'
        rows += [plain, plain | {'name': f'{name}, head scale', 'scale': scale}]
    return rows


TABLES = {'small': beside_paper(SMALL), 'kernels': beside_paper(KERNELS), 'bases': bases(),
          'equal_tokens': equal_tokens(), 'head_scale': head_scale()}


def defaults(table):
    """What None stands for in each table."""
    chosen = {'lengths': [128, 256, 512, 1024, 2048], 'n_samples': 32, 'tail': 256, 'label': table}
    if table == 'small':
        chosen |= {'lengths': chosen['lengths'] + [4096, 8192], 'n_samples': 16, 'label': ''}
    if table == 'head_scale':
        chosen |= {'n_samples': 96, 'tail': 128}
    return chosen


def main():
    study.require_known([table], TABLES)
    chosen = settings(globals())
    for name, value in defaults(table).items():
        if chosen[name] is None:
            chosen[name] = value
    run_table(chosen, TABLES[table])


if __name__ == '__main__':
    study.take_table(TABLES)
    configure(globals(), Settings)
    main()
