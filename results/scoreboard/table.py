"""
The scoreboard compares ways to read past L under one protocol, with three seeds.

$ bash results/scoreboard/run.sh                 # measures what is missing
$ METHODS=nape bash results/scoreboard/run.sh    # one row
$ python -m results.scoreboard.table --work=False   # table and picture of what was measured

A row is a model and a way to read it: the arguments of train.py, tune_scale.py and eval_ppl.py.
Each row and seed is one file in results/scoreboard/SIZE. To add a method, add an entry to ROWS.
Writes results/scoreboard/SIZE.json and .png
"""

import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from configurator import configure
from demo import read
from lib import figures
from lib.figures import BLACK, BLUE, ORANGE
from results import study
from results.channel_scale import recall

size = 'small'               # a key of SIZES
methods: list[str] = []      # keys of ROWS; []: all
seeds: list[int] = []        # of SEEDS, to measure; []: all. The table shows all measured ones
work = True                  # False: only show what was measured


# ---------------------------------------------------------------------- what is compared

SEEDS = [1337, 1338, 1339]   # of a row that has fewer: the first ones


@dataclass
class Size:
    title: str               # of the picture
    config: str              # of train.py
    L: int
    max_iters: int           # of training
    tune_iters: int          # of tuning, each with 8 windows of 8L tokens, whatever is tuned
    gram: int                # tokens that repeat before a target; 0.5 to 4% of all then count


SIZES = {
    'small': Size('0.9M parameters, books as bytes', 'config/scoreboard.py', 128, 2200, 60, 8),
    'books': Size('5M parameters, books as bytes', 'config/books_nope.py', 256, 2800, 75, 8),
    'books_gpu': Size('32M parameters, books', 'config/books_gpu.py', 512, 1500, 150, 4),
}


@dataclass
class Row:
    title: str
    family: str              # the color of its point; see FAMILIES
    model: str = 'none'      # the run that is read; rows may share one
    train: str = ''          # arguments of train.py
    init: str = ''           # the run whose weights training starts from; '' for none
    tune: str = ''           # arguments of tune_scale.py
    read: str = ''           # arguments of eval_ppl.py
    recalls: bool = False    # train one on recall and copy, too
    seeds: int = 3
    sizes: tuple = ('small',)

    def __post_init__(self):
        if self.train and self.model == 'none':
            raise ValueError(f"The row '{self.title}' trains a model. Name its run: model='mine'. "
                             "The run 'none' is that of NoPE.")


ALL = tuple(SIZES)
# At SIZE=small the rate is a quarter of pretraining's peak, as in config/finetune_8k.py; at books a
# third, at books_gpu a half.
TUNE_8L = ('--block_size={T} --batch_size=8 --micro_batch_size=8 --max_iters={tune_iters} '
           '--warmup_iters=0.1 --learning_rate=5e-4 --min_lr=5e-5 --weight_decay=0.0')
SHORT = '--position=none --max_iters={short_iters} --warmup_iters=0.1'
UNIFORM = {'tune': '--method=uniform', 'read': '--scale={run}/scale_uniform_fit.json'}
KERPLE_DAPE = '--position=kerple --dape_kernel={width}'
ROWS = {
    'none': Row('NoPE', 'NoPE', recalls=True, sizes=ALL),
    'uniform': Row('uniform scale, fit', 'NoPE, tuned', sizes=ALL, **UNIFORM),
    'head': Row('head scale', 'NoPE, tuned', tune='--tune=scale', sizes=ALL),
    'channel': Row('channel scale', 'NoPE, tuned', tune='--tune=channel', sizes=ALL),
    'vectors': Row('small vectors', 'NoPE, tuned', tune='--tune=scale,out,norm', sizes=ALL),
    'weights': Row('every weight', 'NoPE, tuned', 'none_8l', TUNE_8L, 'none', sizes=ALL),
    'conv': Row('NoPE + conv', 'convolution', 'conv', '--short_conv=4', recalls=True),
    'conv_head': Row('NoPE + conv, head scale', 'convolution', 'conv', '--short_conv=4',
                     tune='--tune=scale'),
    'rope_conv': Row('RoPE + conv', 'convolution', 'rope_conv', '--position=rope --short_conv=4',
                     recalls=True),
    'alibi_conv': Row('ALiBi + conv', 'convolution', 'alibi_conv',
                      '--position=alibi --short_conv=4', recalls=True),
    'llama4': Row('Llama-4 temperature', 'temperature', read='--position=llama4'),
    'adaptive': Row('adaptive temperature', 'temperature', read='--position=adaptive'),
    'logn': Row('log-n', 'temperature', 'logn', '--position=logn', recalls=True),
    'ssmax': Row('SSMax', 'temperature', 'ssmax', '--position=ssmax', recalls=True),
    'logbeta': Row('log-beta', 'temperature', 'logbeta', '--position=logbeta', recalls=True),
    'rope': Row('RoPE', 'RoPE', 'rope', '--position=rope', recalls=True, sizes=ALL),
    'pi': Row('PI', 'RoPE', 'rope', '--position=rope', read='--rope_scaling=pi:8'),
    'ntk': Row('NTK', 'RoPE', 'rope', '--position=rope', read='--rope_scaling=ntk:8'),
    'yarn': Row('YaRN', 'RoPE', 'rope', '--position=rope', read='--rope_scaling=yarn:8',
                sizes=ALL),
    'pi_8l': Row('PI, tuned', 'RoPE', 'pi_8l', TUNE_8L + ' --rope_scaling=pi', 'rope'),
    'ntk_8l': Row('NTK, tuned', 'RoPE', 'ntk_8l', TUNE_8L + ' --rope_scaling=ntk', 'rope'),
    'yarn_8l': Row('YaRN, tuned', 'RoPE', 'yarn_8l', TUNE_8L + ' --rope_scaling=yarn', 'rope',
                   sizes=ALL),
    'prope': Row('p-RoPE, 1/4', 'RoPE', 'prope', '--position=rope --rope_share=0.25', recalls=True),
    'drope15': Row('DroPE, 15%', 'RoPE', 'drope15', SHORT, 'rope', **UNIFORM),
    'drope100': Row('DroPE, 100%', 'RoPE', 'drope100', '--position=none', 'rope', **UNIFORM),
    'alibi': Row('ALiBi', 'bias', 'alibi', '--position=alibi', recalls=True, sizes=ALL),
    'nape': Row('NAPE', 'bias', 'nape', '--position=nape', recalls=True),
    'kerple': Row('Kerple', 'bias', 'kerple', '--position=kerple', recalls=True),
    'dape3': Row('DAPE 1x3', 'DAPE', 'dape3', '--dape_kernel=3', recalls=True),
    'kerple_dape3': Row('DAPE 1x3-Kerple', 'DAPE', 'kerple_dape3', KERPLE_DAPE.format(width=3),
                        recalls=True, sizes=ALL),
    't5': Row('T5 bias', 'bias', 't5', '--position=t5', seeds=1),
    'fire': Row('FIRE', 'bias', 'fire', '--position=fire', seeds=1),
    'cope': Row('CoPE', 'bias', 'cope', '--position=cope', seeds=1),
    'xl': Row('Transformer-XL', 'bias', 'xl', '--position=xl', seeds=1),
    'kerple_dape1': Row('DAPE 1x1-Kerple', 'DAPE', 'kerple_dape1', KERPLE_DAPE.format(width=1),
                        seeds=1),
    'rope_none': Row('RoPE, NoPE layers', 'RoPE', 'rope_none', '--position=rope,none', seeds=1),
    'swa_none': Row('RoPE window, NoPE layers', 'RoPE', 'swa_none',
                    '--position=rope,none --rope_window=64', seeds=1),
}


# ---------------------------------------------------------------------- one row and seed

def folder_of(model, seed):
    return f'out/scoreboard/{size}/{seed}/{model}'


def untuned(key):
    """The model that a row starts from, before it is tuned or rescaled."""
    return ROWS[key].init or ROWS[key].model


def train(row, seed, values):
    """Train the model of a row, and first the model whose weights it starts from."""
    folder, init = folder_of(row.model, seed), ''
    if row.init:
        if not Path(folder, 'loss.png').exists():
            train(ROWS[row.init], seed, values)
        init = f'--init_from={folder_of(row.init, seed)}/last.pt'
        # At the length of `init`, the same seed would read the same text in the same order. The
        # published rows of DroPE did so.
        seed += 0 if '--block_size' in row.train else 1000
    study.train(folder, f'{SIZES[size].config} {row.train.format(**values)} --seed={seed} {init}')


def tune(key, folder, s):
    """Tune what a row tunes. Returns how many numbers, and the arguments that use them."""
    row, tuning = ROWS[key], f'tune_scale.py --out_dir={folder} {study.PRECISION}'
    if not row.tune:
        return 0, ''
    study.made(f'{folder}/scale_uniform.json', f'{tuning} --method=uniform --n_samples=32')
    if '--tune' not in row.tune:
        return 1, ''
    # Tune a set for 8L. Passes of up to L tokens do not use it.
    path = f'{folder}/scale_sets_{key}.json'
    tuned = study.made(path, f'{tuning} {row.tune} --target_lengths=[{8 * s.L}] '
                             f'--max_iters={s.tune_iters} --label={key} --n_samples=16')
    return tuned['tuned_numbers'], f'--scale={path}'


def result_of(key, seed):
    """The content of the file of one row and seed. Trains and tunes what is missing."""
    row, s, began = ROWS[key], SIZES[size], time.perf_counter()
    folder, L = folder_of(row.model, seed), s.L
    values = {'run': folder, 'T': 8 * L, 'tune_iters': s.tune_iters,
              'short_iters': round(0.15 * s.max_iters)}
    train(row, seed, values)
    numbers, reading = tune(key, folder, s)
    reading += f' {row.read.format(**values)} --n_samples=96 {study.PRECISION}'
    text = study.evaluated(folder, 'position', key,
                           f'{reading} --lengths=[{L},{4 * L},{8 * L},{16 * L}]')
    baseline = f'--baseline={folder_of(row.init, seed)}/last.pt' if row.init else ''
    repeats = study.evaluated(folder, 'repeat', key,
                              f'{reading} --lengths=[{8 * L}] --gram={s.gram} {baseline}')
    return {'row': key, 'seed': seed, **asdict(row), 'tuned_numbers': numbers,
            'text': text['rows'], 'repeats': repeats['rows'], 'share': repeats['share'],
            } | study.made_with(text, began)


def recall_of(key, seed):
    """
    The content of the file of recall and copy of one row and seed: {task: shares of right answers
    by length}. Trains a model for both tasks, unless this is done.
    """
    began, folder = time.perf_counter(), f'{folder_of(ROWS[key].model, seed)}_recall'
    result = study.made(f'{folder}/che_recall.json',
                        f'che.py config/recall.py {ROWS[key].train} --seed={seed} '
                        f'--out_dir={folder}')
    found = {task: {'lengths': result['lengths'], 'exact': shares['exact'],
                    'accuracy': shares['accuracy']} for task, shares in result['tasks'].items()}
    return {'row': key, 'seed': seed, **found} | study.made_with(result, began)


def result_file(key, seed):
    return Path(f'results/scoreboard/{size}/{key}_{seed}.json')


def recall_file(key, seed):
    return Path(f'results/scoreboard/recall/{key}_{seed}.json')


def units():
    """
    What to measure. Rows that start from one model have one folder, because each of them may train
    that model.
    """
    chosen, found = [key for key in methods or ROWS if size in ROWS[key].sizes], {}
    for i, seed in enumerate(SEEDS):
        for key in chosen:
            if i < ROWS[key].seeds and seed in (seeds or SEEDS):
                folder = folder_of(untuned(key), seed)
                found[result_file(key, seed)] = (f'{folder}/scoreboard',
                                                 partial(result_of, key, seed))
                if ROWS[key].recalls and size == 'small':
                    found[recall_file(key, seed)] = (f'{folder}_recall/scoreboard',
                                                     partial(recall_of, key, seed))
    return found


# ---------------------------------------------------------------------- the table

def with_gains(key, seed):
    """
    The content of the file of a row and seed, with `gain_over_untuned`: the loss of the untuned
    model with its context cut to L, minus the loss of the row with the whole context. It is None if
    the untuned model was not measured.
    """
    found, file = read(result_file(key, seed)), result_file(untuned(key), seed)
    if size == 'small' and recall_file(key, seed).exists():  # older files hold recall themselves
        recalled = read(recall_file(key, seed))
        found |= {task: recalled[task] for task in ('recall', 'copy')}
    first = read(file) if file.exists() else None
    for part, gain, cut in (('text', 'gain', 'cut_loss'), ('repeats', 'own_gain', 'own_cut_loss')):
        for k, row in enumerate(found[part]):
            if cut in row:
                row['gain_over_untuned'] = first and row[gain] + first[part][k][cut] - row[cut]
    return found


def column(found, *path):
    """A number of what with_gains() returns. None if an older file does not have it."""
    for key in path:
        try:
            found = found[key]
        except (KeyError, IndexError):
            return None
    return found


# {heading: where the number stands in what with_gains() returns}
COLUMNS = {
    'loss at L': ('text', 0, 'loss'),
    'loss at 4L': ('text', 1, 'loss'),
    'loss at 16L': ('text', 3, 'loss'),
    'cut at 8L': ('text', 2, 'cut_loss'),
    'gain at 8L': ('text', 2, 'gain_over_untuned'),
    'own gain at 8L': ('text', 2, 'gain'),
    'gain at far repeats': ('repeats', 0, 'gain_over_untuned'),
    'own gain at far repeats': ('repeats', 0, 'own_gain'),
    'R': ('repeats', 0, 'R'),
    'recall at L': ('recall', 'accuracy', 0),
    'recall at 4L': ('recall', 'accuracy', 2),
    'recall at 16L': ('recall', 'accuracy', 3),
    'recall at 64L': ('recall', 'accuracy', 4),
    'copy at L': ('copy', 'exact', 0),
    'copy at 2L': ('copy', 'exact', 1),
}


def collect():
    """A row for each method that was measured: mean and standard deviation over its seeds."""
    rows, steps = [], Path(f'results/scoreboard/{size}_steps.json')
    ratios = read(steps)['ratios'] if steps.exists() else {}
    for key, row in ROWS.items():
        runs = [with_gains(key, seed) for seed in SEEDS if result_file(key, seed).exists()]
        if not runs:
            continue
        found = {'row': key, 'title': row.title, 'family': row.family,
                 'tuned_numbers': 'all' if row.init else runs[0]['tuned_numbers'],
                 'seeds': [run['seed'] for run in runs],
                 'step': ratios.get(row.model)}
        for heading, path in COLUMNS.items():
            values = [column(one, *path) for one in runs if one.get(path[0])]
            if values and None not in values:
                found[heading] = study.over_seeds(values)
        rows.append(found)
    if any('recall at L' in row for row in rows):
        rows.append(cut_row())
    return rows


def cut_row():
    """
    The share of recall's answers that the last 2L tokens hold: the longest input of training, a
    copy of L symbols. A model with its context cut to them can at best recall so many, beyond luck.
    """
    lengths = [recall.L, 4 * recall.L, 16 * recall.L, 64 * recall.L]
    held = [recall.share_held(seed, 2 * recall.L, lengths) for seed in SEEDS]
    row = {'row': 'cut', 'title': 'what the last 2L tokens hold', 'family': 'NoPE',
           'tuned_numbers': None, 'seeds': SEEDS, 'step': None}
    for heading, *values in zip((f'recall at {n}L' if n > 1 else 'recall at L'
                                 for n in (1, 4, 16, 64)), *held):
        row[heading] = study.over_seeds(values)
    return row


def lines(rows):
    """The rows as the page has them. A column that no row has is left out."""
    columns, found = ('tuned', 'step', 'seeds', *COLUMNS), []
    for row in rows:
        tuned, step = row['tuned_numbers'], row['step']
        cells = row | {'tuned': f'{tuned:,}' if isinstance(tuned, int) else tuned,
                       'step': step and f'{step:.2f}', 'seeds': len(row['seeds'])}
        found.append({'': row['title']} | {name: cells.get(name) for name in columns})
    used = {name for row in found for name, cell in row.items() if cell is not None}
    return [{name: cell for name, cell in row.items() if name in used} for row in found]


# ---------------------------------------------------------------------- the picture

FAMILIES = {'NoPE': BLACK, 'NoPE, tuned': BLUE, 'temperature': ORANGE, 'RoPE': '#D55E00',
            'bias': '#117733', 'DAPE': '#AA4499', 'convolution': '#56B4E9'}


def family_color(row):
    return FAMILIES.get(row['family'], '#777777')


def draw_rows(axis, rows, key, edge):
    """Draw one point for each row. A row with a loss above `edge` is drawn there."""
    for row in rows:
        x, y, color, title = row['loss at L'], row[key], family_color(row), row['title']
        if x['mean'] > edge:
            title, x = f"{title}  ← {x['mean']:.2f}", {'mean': edge, 'sd': None}
        figures.curve(axis, [x['mean']], [y['mean']], title, color=color)
        axis.errorbar(x['mean'], y['mean'], y['sd'], x['sd'], fmt='none', ecolor=color, lw=1)
    axis.axhline(0, color=BLACK, lw=1)
    axis.invert_xaxis()


def draw(result):
    """What each method gains from tokens beyond L, and recalls at 4L, against its loss at L."""
    rows = result['rows']
    views = {'gain at far repeats': 'gain from beyond L at far repeats (nats, log-like scale)',
             'recall at 4L': 'recall at 4L, L = 16 symbols (share right; a second model)'}
    measured = {key: [row for row in rows if key in row and 'loss at L' in row]
                for key in views}
    views = {key: name for key, name in views.items() if measured[key]}
    figure, axes = figures.panels(
        f"{SIZES[result['label']].title} ({result['label']}), L = {result['L']} "
        '(bars: standard deviation of seeds)',
        len(views), 2, width=6.2, height=7)
    edge = 1.4 * min(row['loss at L']['mean'] for row in rows if 'loss at L' in row)
    for axis, (key, name) in zip(axes, views.items()):
        draw_rows(axis, measured[key], key, edge)
        axis.set(xlabel='loss at L (nats per token), better to the right; ←: beyond the axis',
                 ylabel=name)
        if 'gain' in key:  # gains span 0.01 nats to several nats
            axis.set_yscale('asinh', linear_width=0.1)
            low, ticks = axis.get_ylim()[0], [3, 1, 0.3, 0.1, 0, -0.1, -0.3, -1, -3, -10]
            best = max(row[key]['mean'] for row in measured[key])
            axis.set_yticks(ticks, [f'{tick:g}' for tick in ticks])
            axis.minorticks_off()
            axis.set_ylim(1.2 * low, max(0.1, 1.5 * best))
        figures.label_ends(axis, gap=0.03)
    families = {row['family']: family_color(row) for row in rows}
    handles = [axes[0].plot([], 'o', color=color, label=family)[0]
               for family, color in families.items()]
    figure.legend(handles=handles, loc='outside lower center', ncols=len(handles), frameon=False)
    return figure


def main():
    began = time.perf_counter()
    study.require_known([size], SIZES)
    study.require_known(methods, ROWS)
    study.require_known(seeds, SEEDS)
    if work:
        study.measure_units(units())
    rows = collect()
    study.print_table(lines(rows))
    result = {'stage': 'scoreboard', 'label': size, 'L': SIZES[size].L, 'rows': rows}
    study.write(f'results/scoreboard/{size}', result, globals(), began, rows and draw)


if __name__ == '__main__':
    configure(globals())
    main()
