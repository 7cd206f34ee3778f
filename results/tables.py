"""
Print the tables of the studies' pages from the JSON in results/. A number is a mean over seeds, ±
their standard deviation.

$ python results/tables.py                      # all tables
$ python results/tables.py past_L scoreboard    # those of two studies
$ python results/tables.py out/books/*/none     # what stages wrote into these folders; files of one
                                                # name are seeds
"""

import json
import re
import sys
from collections import defaultdict
from functools import partial
from glob import glob
from itertools import chain
from pathlib import Path
from statistics import mean, stdev

RESULTS = Path(__file__).parent


def read(path):
    return json.loads((RESULTS / path).read_text(encoding='utf-8'))


def files(*patterns):
    """The files of patterns such as past_L/*.json, in order."""
    return [Path(name) for pattern in patterns for name in sorted(glob(f'{RESULTS / pattern}'))]


def cell(seeds, digits=3):
    """The text of a number, given for each seed. It is empty if a seed lacks it."""
    if None in seeds:
        return ''
    if not isinstance(seeds[0], float):
        return str(seeds[0])
    spread = f' ± {stdev(seeds):.{digits}f}' if len(seeds) > 1 else ''
    return f'{mean(seeds):.{digits}f}{spread}'


def percent(seeds):
    """The mean of shares, and in brackets that of each seed."""
    each = ', '.join(f'{share:.0%}' for share in seeds)
    return f'{mean(seeds):.0%} ({each})'


def print_tables(measured, text=cell):
    """measured: (table, row, {column: number}) for each seed. text(seeds): the text of a cell."""
    tables = {}
    for table, row, numbers in measured:
        tables.setdefault(table, {}).setdefault(row, []).append(numbers)
    for table, rows in tables.items():
        head = dict.fromkeys(chain(*chain(*rows.values())))
        print(f"\n| {table} | seeds | {' | '.join(head)} |\n{'|---' * (len(head) + 2)}|")
        for row, seeds in rows.items():
            cells = [text([one.get(name) for one in seeds]) for name in head]
            print(f"| {row} | {len(seeds)} | {' | '.join(cells)} |")


# Each function below yields (table, row, {column: number}), once for each seed.
# ---------------------------------------------------------------------- what stages write

def plain(table, rows):
    """Rows of a JSON as they are. What has no decimals names a row."""
    for row in rows:
        numbers = {name: value for name, value in row.items() if isinstance(value, float)}
        yield table, ', '.join(str(row[name]) for name in row if name not in numbers), numbers


TIMED = 'seconds', 'tokens_per_second', 'of_limit', 'times_ours', 'peak_memory'


def timed(table, one):
    if 'limit_seconds' not in one:
        yield from plain(table, [one])
    for who in one.get('limit_seconds', ()):
        yield table, f"{one['task']}, {who}", {name: one[who].get(name) for name in TIMED}


def demo_rows(table, report):
    for row, one in report['readings'].items():
        losses = {f'loss at {T}': at['loss'] for T, at in one['at'].items()}
        yield table, row, losses | {'gain, far repeats': one['far']['gain']}


def stages(*folders):
    """Of stages, and of older tables of perplexities. Files of one name are seeds."""
    for path in files(*(f'{folder}/*.json' for folder in folders)):
        result, name = read(path), path.stem
        rows, lengths = result.get('rows', []), [str(T) for T in result.get('lengths', ())]
        for row in rows:
            for run in row.get('runs', [row]) if 'name' in row else ():
                yield name, row['name'], dict(zip(lengths, run['ppl'])) | {
                    'delta P': run.get('delta_p', [None])[-1]}
        at = 'length' if rows and 'length' in rows[0] else 'kind'
        for key in 'loss', 'ppl', 'cut_loss', 'gain', 'own_gain', 'R':
            numbers = {str(row[at]): row[key] for row in rows if {at, key} <= row.keys()}
            if numbers:
                yield f'{key} by {at}', name, numbers
        if 'accuracy' in result:  # of passkey.py
            yield 'keys found', name, dict(zip(lengths, map(mean, result['accuracy'])))
        for found in result.get('results', {}).values():  # of extras/bench.py
            for one in found if isinstance(found, list) else [found]:
                yield from timed(f'{path.parent.name}/{name}', one)
        if result.get('stage') == 'demo':
            yield from demo_rows(name, result)
        if 'mean_entropy' in result:  # in bins of block_size / 16 positions
            last = result['mean_entropy'][-1024 // result['block_size']:]
            yield 'entropy', name, {'last 64 positions': mean(last)}


def rows_of(*names):
    for name in names:
        yield from plain(name, read(f'{name}.json')['rows'])


# ---------------------------------------------------------------------- studies

def past_L():
    """Gains are over the untuned model, or its twin trained at L, with only the last L tokens."""
    for path in files('past_L/*_????.json', 'past_L/*/*_????.json'):
        twin = path.with_name(path.name.replace('_8L', ''))
        cut = read(twin)['readings']['untuned']['text'][3]['cut_loss']
        for name, reading in read(path)['readings'].items():
            at_L, _, _, at_8L, _ = reading['text']
            far = defaultdict(dict)
            for row in reading.get('repeats', ()):
                far[row['kind'].removesuffix(', all')] = row
            yield path.parent.name, f'{path.stem[:-5]}, {name}', {
                'loss at L': at_L['loss'],
                'loss at 8L': at_8L['loss'],
                'gain, all tokens': cut - at_8L['loss'],
                'gain, far repeats': far['all'].get('gain'),
                'R': far['all'].get('R'),
                'left within L': far['near'].get('headroom'),
                'gain, far part of another document': far['other document'].get('gain'),
            }


def scoreboard():
    """Gains are over the cut context of the untuned model, own gains over that of the row."""
    for path in files('scoreboard/small/*.json', 'scoreboard/books/*.json'):
        run, size = read(path), path.parent.name
        untuned = read(path.with_name(f"{run['init'] or run['model']}_{run['seed']}.json"))
        at_L, at_4L, at_8L, at_16L = run['text']
        far = run['repeats'][0]
        # Tuning may make the cut context of a model worse.
        worse_at_8L = untuned['text'][2]['cut_loss'] - at_8L['cut_loss']
        worse_far = untuned['repeats'][0]['own_cut_loss'] - far['own_cut_loss']
        numbers = {
            'tuned': 'all' if run['init'] else run['tuned_numbers'],
            'loss at L': at_L['loss'],
            'loss at 4L': at_4L['loss'],
            'loss at 16L': at_16L['loss'],
            'cut at 8L': at_8L['cut_loss'],
            'gain at 8L': at_8L['gain'] + worse_at_8L,
            'own gain at 8L': at_8L['gain'],
            'gain, far repeats': far['own_gain'] + worse_far,
            'own gain, far repeats': far['own_gain'],
            'R': far.get('R'),
        }
        recalled = RESULTS / 'scoreboard/recall' / path.name
        run |= read(recalled) if size == 'small' and recalled.exists() else {}
        for task, share in ('recall', 'accuracy'), ('copy', 'exact'):
            right = (run.get(task) or {}).get(share, ())
            for length, number in zip(('L', '2L', '4L', '16L', '64L'), right):
                numbers[f'{task} at {length}'] = number
        yield size, path.stem[:-5], numbers
    for row, ratio in read('scoreboard/small_steps.json')['ratios'].items():
        yield 'time of a training step', row, {"of NoPE's": ratio}


def demo():
    for name in 'seeds', 'seeds_3000':
        for report in read(f'demo/{name}.json')['reports'].values():
            yield from demo_rows(name, report)


def losses_of(at, untuned):
    """Columns of {length: loss and own gain}. Gains are over the cut context of `untuned`."""
    row = {}
    for T, one in at.items():
        row[f'loss at {T}'] = one['loss']
        if 'gain' in one:
            cut = untuned[T]['loss'] + untuned[T]['gain']
            row |= {f'gain at {T}': cut - one['loss'], f'own gain at {T}': one['gain']}
    return row


def demo_bytes():
    for name in 'seeds', 'seeds_epyc':
        for seed in read(f'demo_bytes/{name}.json')['seeds'].values():
            for row, at in seed['methods'].items():
                yield name, row, losses_of(at, seed['methods']['NoPE'])
    methods = read('demo_bytes/report.json')['methods']
    for row, one in methods.items():
        yield 'report', row, losses_of(one['at'], methods['NoPE']['at'])


def channel_scale():
    result = read('channel_scale/channel_scale.json')
    for n in range(len(result['seeds'])):
        rows = {}
        for row, losses in result['losses'].items():
            numbers = zip(result['lengths'], losses['each'][n], result['gains'][row]['each'][n])
            rows[row] = {T: {'loss': loss, 'gain': gain} for T, loss, gain in numbers}
        for row, at in rows.items():
            yield 'text', row, losses_of(at, rows['NoPE'])


def channel_task(task, key):
    result = read(f'channel_scale/{task}.json')
    for row, seeds in result[key].items():
        for shares in seeds['each']:
            yield task, row, dict(zip(map(str, result['lengths']), shares))


def che_small():
    for path in files('che_small/*.json'):
        method, task = re.split(r'_\d{4}_', path.stem)
        one, = read(path)['tasks'].values()
        yield task, method, {'% up to 40': 100 * one['inside'], '% beyond': 100 * one['outside']}


def main(names):
    tenths, hundredths = partial(cell, digits=1), partial(cell, digits=2)
    studies = {  # {study: its tables, each with the text of a cell}
        'past_L': [(past_L(), hundredths), (rows_of('past_L/rates', 'past_L/repeats'), cell)],
        'scoreboard': [(scoreboard(), cell)],
        'begin': [(rows_of('begin/begin'), hundredths)],
        'demo': [(demo(), hundredths), (stages('demo'), hundredths)],
        'demo_bytes': [(demo_bytes(), cell)],
        'extension_demo': [(stages('extension_demo'), hundredths)],
        'vectors_demo': [(stages('vectors_demo', 'vectors_demo/entropy'), hundredths)],
        'channel_scale': [(channel_scale(), cell), (channel_task('recall', 'right'), hundredths),
                          (channel_task('passkey', 'found'), percent)],
        'books': [(stages('books', 'books/entropy_4L'), hundredths)],
        'dape_small': [(stages('dape_small'), hundredths)],
        'che_small': [(che_small(), tenths)],
        'passkey_demo': [(stages('passkey_demo', 'passkey_demo/*'), percent)],
        'ablation_passkey': [(stages('ablation_passkey'), hundredths)],
        'speed': [(stages('bench', 'gpu'), cell)],
    }
    for name in names or studies:
        for measured, text in studies.get(name, ()):
            print_tables(measured, text)
    print_tables(stages(*(Path(name).absolute() for name in names if name not in studies)))


if __name__ == '__main__':
    main(sys.argv[1:])
