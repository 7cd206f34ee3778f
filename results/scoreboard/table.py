"""
The scoreboard: ways to read past L side by side, under one protocol, with three seeds.

$ bash results/scoreboard/run.sh                 # whatever is not there yet
$ METHODS=nape bash results/scoreboard/run.sh    # one row alone
$ python -m results.scoreboard.table --work=False   # the table and the picture of what is there

A row is a model and a way to read it: the arguments of train.py, tune_scale.py and eval_ppl.py.
What a row and seed gave is one file in results/scoreboard/SIZE, so that a stopped run goes on where
it was; started twice, two processes share the work. A method of your own is an entry in ROWS.
Writes results/scoreboard/SIZE.json and .png
"""

import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import demo
from configurator import configure, settings
from demo import read
from lib import plots
from lib.answers import OnlyWriter, save_json
from lib.devices import setup
from lib.errors import UserError

size = 'small'               # a key of SIZES
methods: list[str] = []      # keys of ROWS; []: all
seeds = [1337, 1338, 1339]   # a row may have fewer
work = True                  # False: show what is there


# ---------------------------------------------------------------------- what is compared

@dataclass
class Size:
    config: str              # of train.py
    L: int
    max_iters: int           # of training
    tune_iters: int          # of tuning, each with 8 windows of 8L tokens, whatever is tuned
    gram: int                # tokens that repeat before a target; 0.5 to 4% of all then count


SIZES = {
    'small': Size('config/scoreboard.py', 128, 2200, 60, 8),         # 0.9M parameters
    'books': Size('config/books_nope.py', 256, 2800, 75, 8),         # 5M
    'books_gpu': Size('config/books_gpu.py', 512, 1500, 150, 4),     # 32M, on a GPU
}


@dataclass
class Row:
    title: str
    family: str              # the colour of its point
    model: str = 'none'      # the run that is read; rows may share one
    train: str = ''          # arguments of train.py
    init: str = ''           # the run whose weights training starts from; '' for none
    tune: str = ''           # arguments of tune_scale.py
    read: str = ''           # arguments of eval_ppl.py
    recalls: bool = False    # train one on recall and copy, too
    seeds: int = 3
    sizes: tuple = ('small',)


ALL = tuple(SIZES)
# The rate is a quarter of pretraining's peak, as in config/finetune_8k.py.
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

def run(command):
    """Run a stage of this project as a user would. The work ends where a stage fails."""
    demo.run(*command.split())


def folder_of(model, seed):
    return f'out/scoreboard/{size}/{seed}/{model}'


def require_model(row, seed, values):
    """Train the model of a row, or go on with it, unless it is there."""
    folder, first = folder_of(row.model, seed), ''
    if Path(folder, 'loss.png').exists():
        return
    if row.init:
        require_model(ROWS[row.init], seed, values)
        first = f' --init_from={folder_of(row.init, seed)}/last.pt'
    if Path(folder, 'last.pt').exists():
        first = ' --init_from=resume'
    run(f'train.py {SIZES[size].config} {row.train.format(**values)} --seed={seed} '
        f'--out_dir={folder}{first}')


def measure(key, seed):
    """What the file of one row and seed holds. Trains and tunes what it needs."""
    row, s, began = ROWS[key], SIZES[size], time.perf_counter()
    folder, L = folder_of(row.model, seed), s.L
    values = {'run': folder, 'T': 8 * L, 'tune_iters': s.tune_iters,
              'short_iters': round(0.15 * s.max_iters)}
    require_model(row, seed, values)

    reading, numbers = row.read.format(**values), 0
    if row.tune:
        if not Path(folder, 'scale_uniform_fit.json').exists():
            run(f'tune_scale.py --out_dir={folder} --method=uniform --n_samples=32')
        numbers = 1
        if '--tune' in row.tune:  # a set for 8L, which leaves passes of L tokens as they are
            run(f'tune_scale.py --out_dir={folder} {row.tune} --target_lengths=[{8 * L}] '
                f'--max_iters={s.tune_iters} --label={key} --n_samples=16')
            reading = f'--scale={folder}/scale_sets_{key}.json'
            numbers = read(f'{folder}/scale_sets_{key}.json')['tuned_numbers']

    common = f'eval_ppl.py --out_dir={folder} {reading} --label={key} --n_samples=96'
    run(f'{common} --protocol=position --lengths=[{L},{4 * L},{8 * L},{16 * L}]')
    untuned = f'--baseline={folder_of(row.init, seed)}/last.pt' if row.init else ''
    run(f'{common} --protocol=repeat --lengths=[{8 * L}] --gram={s.gram} {untuned}')
    text, repeats = [read(f'{folder}/eval_ppl_{protocol}_{key}.json')
                     for protocol in ('position', 'repeat')]
    found = {'row': key, 'seed': seed, **asdict(row), 'tuned_numbers': numbers,
             'text': text['rows'], 'repeats': repeats['rows'], 'share': repeats['share']}
    if row.recalls and size == 'small':
        run(f'che.py config/recall.py {row.train} --seed={seed} --out_dir={folder}_recall')
        result = read(f'{folder}_recall/che.json')
        for task, shares in result['tasks'].items():
            found[task] = {'lengths': result['lengths'], 'exact': shares['exact'],
                           'accuracy': shares['accuracy']}
    return found | demo.made_with(text, began)


def result_file(key, seed):
    return Path(f'results/scoreboard/{size}/{key}_{seed}.json')


def work_on(todo):
    """Measure these rows and seeds; what another process works on now comes last."""
    while todo:
        for key, seed in list(todo):
            base = ROWS[key].init or ROWS[key].model  # which several rows may start from
            try:
                lock = OnlyWriter(Path(folder_of(base, seed), 'scoreboard'))
            except UserError:
                continue
            if not result_file(key, seed).exists():
                print(f'\n{len(todo)} rows and seeds are left; {key}, seed {seed}', flush=True)
                result_file(key, seed).parent.mkdir(parents=True, exist_ok=True)
                save_json(result_file(key, seed), measure(key, seed))
            lock.close()
            todo.remove((key, seed))
        time.sleep(5 if todo else 0)


# ---------------------------------------------------------------------- the table

def untuned(key):
    """The row of the model that a row began from: as it was trained, nothing tuned or rescaled."""
    return ROWS[key].init or ROWS[key].model


def read_row(key, seed):
    """What the file of a row and seed holds. Each `gain` is over the row's own cut context."""
    found = read(result_file(key, seed))
    for row in found['repeats']:
        row |= {'gain': row['own_gain'], 'cut_loss': row['own_cut_loss']}
    return found


def with_gains(key, seed):
    """
    What the file of a row and seed holds, and beside each `gain` a `gain_over_untuned`: the loss of
    the untuned model with its context cut to L, minus the row's loss with all of it. None where the
    untuned model was not measured.
    """
    found, file = read_row(key, seed), result_file(untuned(key), seed)
    first = read_row(untuned(key), seed) if file.exists() else None
    for part in 'text', 'repeats':
        for k, row in enumerate(found[part]):
            if 'cut_loss' in row:
                cut_worse = first and row['cut_loss'] - first[part][k]['cut_loss']
                row['gain_over_untuned'] = first and row['gain'] - cut_worse
    return found


def column(found, *path):
    for key in path:
        found = found[key]
    return found


# Headings, and where in what with_gains() returns the number stands.
COLUMNS = {
    'loss at L': ('text', 0, 'loss'),
    'loss at 4L': ('text', 1, 'loss'),
    'loss at 16L': ('text', 3, 'loss'),
    'cut at 8L': ('text', 2, 'cut_loss'),
    'gain at 8L': ('text', 2, 'gain_over_untuned'),
    'own gain at 8L': ('text', 2, 'gain'),
    'gain at far repeats': ('repeats', 0, 'gain_over_untuned'),
    'own gain at far repeats': ('repeats', 0, 'gain'),
    'recall at L': ('recall', 'accuracy', 0),
    'recall at 4L': ('recall', 'accuracy', 2),
    'recall at 16L': ('recall', 'accuracy', 3),
    'copy at L': ('copy', 'exact', 0),
    'copy at 2L': ('copy', 'exact', 1),
}


def collect():
    """A row for each method that has been measured: mean and standard deviation over its seeds."""
    rows, steps = [], Path(f'results/scoreboard/{size}_steps.json')
    ratios = read(steps)['ratios'] if steps.exists() else {}
    for key, row in ROWS.items():
        runs = [with_gains(key, seed) for seed in seeds if result_file(key, seed).exists()]
        if not runs:
            continue
        found = {'row': key, 'title': row.title, 'family': row.family,
                 'tuned_numbers': 'all' if row.init else runs[0]['tuned_numbers'],
                 'seeds': [run['seed'] for run in runs],
                 'step': ratios.get(row.model)}
        for heading, path in COLUMNS.items():
            values = [column(one, *path) for one in runs if one.get(path[0])]
            if values and None not in values:
                sd = statistics.stdev(values) if len(values) > 1 else None
                found[heading] = {'mean': statistics.mean(values), 'sd': sd}
        rows.append(found)
    return rows


def print_table(rows):
    """As Markdown, as the page has it."""
    head = ['', 'tuned', 'step', 'seeds', *COLUMNS]
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
    for row in rows:
        cells = [row['title'], row['tuned_numbers'], row['step'] or '', len(row['seeds'])]
        for name in COLUMNS:
            mean, sd = row.get(name, {}).get('mean', ''), row.get(name, {}).get('sd')
            cells.append(mean if sd is None else f'{mean:.3f} ± {sd:.3f}')
        cells = [f'{cell:.3f}' if isinstance(cell, float) else str(cell) for cell in cells]
        print(f"| {' | '.join(cells)} |")


def main():
    began = time.perf_counter()
    for name, known in [(size, SIZES), *((method, ROWS) for method in methods)]:
        if name not in known:
            raise UserError(f"'{name}' is not one of {', '.join(known)}.")
    if work:
        chosen = [key for key in methods or ROWS if size in ROWS[key].sizes]
        todo = [(key, seed) for i, seed in enumerate(seeds) for key in chosen
                if i < ROWS[key].seeds and not result_file(key, seed).exists()]
        work_on(todo)
    rows = collect()
    print_table(rows)
    result = {'stage': 'scoreboard', 'label': size, 'L': SIZES[size].L, 'rows': rows}
    plots.write_result(f'results/scoreboard/{size}', result, settings(globals()),
                       setup('cpu', 'float32'), began)


if __name__ == '__main__':
    configure(globals())
    main()
