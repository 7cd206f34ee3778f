"""
Write the tables of the studies' pages and of README.md from the JSON in results/.

A page marks the place of a table by <!-- NAME --> before it and <!-- end --> after it. NAME is a
key of TABLES. A number is a mean over seeds ± their standard deviation; without ± it is one seed.
Of SmolLM2 ± is the standard error over windows.

$ python results/tables.py            # write all tables into their pages
$ python results/tables.py --check    # only name the pages whose tables are not what the JSON says
$ python results/tables.py out/past_L/code/*    # print the losses that stages wrote into these
                                                # folders; files of one name are seeds
"""

import json
import re
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from statistics import mean, stdev

RESULTS = Path(__file__).parent


def read(path):
    return json.loads((RESULTS / path).read_text(encoding='utf-8'))


def number(value, spread=None):
    """The text of a number, for example 0.59±0.02."""
    after = '' if spread is None else f'±{spread:.2f}'
    return f'{value:z.2f}{after}'  # z: not -0.00


def cell(found):
    """The text of a cell: the mean over seeds, or the only text; empty if there is none."""
    if not found:
        return ''
    if isinstance(found[0], str):
        return found[0]
    return number(mean(found), stdev(found) if len(found) > 1 else None)


def markdown(rows):
    """
    The table of rows (name, [{column: number or text}]). Each dict is of one seed; a seed may have
    several. A cell gathers its column from all of them, and what they lack stays empty.
    """
    rows, columns = list(rows), {}
    for _, seeds in rows:
        for one in seeds:
            columns |= one
    lines = [f"| | {' | '.join(columns)} |", '|---' * (len(columns) + 1) + '|']
    for name, seeds in rows:
        cells = []
        for column in columns:
            found = [one.get(column) for one in seeds]
            cells.append(cell([value for value in found if value is not None]))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return '\n'.join(lines)


# Each function below yields the rows of a table.
# ---------------------------------------------------------------------- past_L

MODELS = {'none': 'NoPE', 'rope': 'RoPE', 'alibi': 'ALiBi', 'conv': 'NoPE + conv',
          'conv_8L': 'NoPE + conv, trained at 8L', 'rope_conv': 'RoPE + conv',
          'alibi_conv': 'ALiBi + conv'}
READINGS = {  # {how a model was read: what this adds to its name}
    'untuned': '',
    'uniform': ', one scale',
    'head': ', head scales',
    'head_clamped': ', head scales of at least 1',
    'vectors': ', channel scales and norms',
    'yarn': ', YaRN',
    'yarn_weights': ', YaRN, every weight',
}
SERIES = {  # {folder of past_L: what its models were trained and read on}
    'size_5M': 'code, 5M parameters',
    'tokens_40M': 'code, 40M tokens',
    'code_86M': 'code, 86M parameters, L = 512',
    'code_on_books': 'code, read on books',
    'books': 'books',
    'books_32M': 'books, 32M parameters, L = 512',
    'mix_20M': 'both, 20M tokens, read on code',
    'mix_20M_on_books': 'both, 20M tokens, read on books',
    'mix_5M': 'both, 20M tokens, 5M parameters, read on code',
    'mix_5M_on_books': 'both, 20M tokens, 5M parameters, read on books',
}


def of_seed(text, repeats, untuned):
    """
    The numbers of one seed, from rows of eval_ppl.py and repeats.py. Gains are over the untuned
    model, or its twin that was trained at L, with only the last L tokens.
    """
    gains = {row['kind']: row['gain'] for row in repeats}
    # text has rows for L, 2L, 4L, 8L ...: 3 is 8L
    return {
        'loss at L': text[0]['loss'],
        'loss at 8L': text[3]['loss'],
        'gain, all tokens': untuned[3]['cut_loss'] - text[3]['loss'],
        'gain, far repeats': gains.get('all'),
        'gain, other text': gains.get('other document', gains.get('other document, all')),
    }


def read_new(model, reading):
    """The numbers of each seed, from what the stages wrote by seed; windows lie in one document."""
    seeds = []
    for path in sorted((RESULTS / 'past_L/code').glob(f'*/repeats_{model}_{reading}.json')):
        text = read(path.with_name(f'eval_ppl_position_{model}_{reading}.json'))
        untuned = read(path.with_name(f'eval_ppl_position_{model}_untuned.json'))
        seeds.append(of_seed(text['rows'], read(path)['rows'], untuned['rows']))
    return seeds


def read_old(model, reading, series=''):
    """The same of an older measurement, which has a file for each model and seed."""
    seeds = []
    for path in sorted((RESULTS / 'past_L' / series).glob(f'{model}_????.json')):
        readings = read(path)['readings']
        twin = read(path.with_name(path.name.replace('_8L', '')))['readings']
        if one := readings.get(reading):
            seeds.append(of_seed(one['text'], one.get('repeats', ()), twin['untuned']['text']))
    return seeds


def past_L(read_seeds):
    for model, name in MODELS.items():
        for reading, how in READINGS.items():
            if seeds := read_seeds(model, reading):
                yield name + how, seeds


def series():
    for folder, title in SERIES.items():
        gains = []
        for column, model, reading in (('untuned', 'conv', 'untuned'),
                                       ('head scales', 'conv', 'head'),
                                       ('RoPE, YaRN', 'rope', 'yarn')):
            for one in read_old(model, reading, folder):
                gains.append({column: one['gain, far repeats']})
        yield title, gains


def demo():
    reports = [*read('past_L/demo_seeds.json')['reports'].values()]
    for name in reports[0]['readings']:
        ones = [report['readings'][name] for report in reports]
        yield name, [{'loss at 4L': one['at']['512']['loss'],
                      'gain, far repeats': one['far']['gain']} for one in ones]


# ---------------------------------------------------------------------- other studies

SCOREBOARD = """none uniform head vectors weights conv rope_conv alibi_conv logn rope yarn yarn_8l
    drope100 alibi kerple dape3 kerple_dape3"""


def scoreboard():
    """Its two files hold means and standard deviations over seeds, which are None for one seed."""
    larger = {row['row']: row for row in read('scoreboard/books.json')['rows']}
    for row in read('scoreboard/small.json')['rows']:
        if row['row'] in SCOREBOARD.split():
            numbers = {name: row.get(name) for name in (
                'loss at L', 'gain at 8L', 'gain at far repeats', 'recall at 64L')}
            numbers['5M: gain at 8L'] = larger.get(row['row'], {}).get('gain at 8L')
            yield row['title'], [{name: number(one['mean'], one['sd'])
                                  for name, one in numbers.items() if one}]


# ---------------------------------------------------------------------- head_scale

def text():
    seeds = [seed['methods'] for seed in read('head_scale/text.json')['seeds'].values()]
    for name, key in {'NoPE': 'NoPE', 'one scale': 'uniform 512', 'head scales': 'head 512',
                      'channel scales and norms': 'vectors 512',
                      'only the last L tokens': 'cut'}.items():
        yield name, [{
            'loss at L': seed[key]['128']['loss'],
            'at 2L': seed[key]['256']['loss'],
            'at 4L': seed[key]['512']['loss'],
            'gain at 4L': seed['NoPE']['512']['cut_loss'] - seed[key]['512']['loss'],
        } for seed in seeds]


def tasks():
    recall = read('head_scale/recall.json')['right']
    for name, keys in read('head_scale/passkey.json')['found'].items():
        if name in recall:
            # by length: 2 is 4L in recall, 3 in passkeys
            recalled = [{'recall at 4L': seed[2]} for seed in recall[name]['each']]
            yield name, recalled + [{'keys at 4L': seed[3]} for seed in keys['each']]


def perplexity(file, lengths):
    """Perplexity by length, of all rows of a file."""
    result = read(file)
    for row in result['rows']:
        seeds = []
        for run in row.get('runs', [row]):
            ppl = dict(zip(result['lengths'], run['ppl']))
            seeds.append({str(T): ppl[T] for T in lengths})
        yield row['name'], seeds


# ---------------------------------------------------------------------- dape, speed

def che():
    methods = defaultdict(list)
    for path in sorted((RESULTS / 'dape/che').iterdir()):
        result = read(path)
        for task, found in result['tasks'].items():
            column = f"{task}, 41 to {result['lengths'][-1]}"
            methods[result['method']].append({column: found['outside']})
    return methods.items()


GPU = {'train_1b': '1.1B', 'growth_1b': '1.1B', 'eval_1b': '1.1B', 'entropy_1b': '1.1B',
       'peer_125m': '125M'}  # {file of speed/: the model}
CPU = {'steps': '39M', 'methods': '39M', 'windows': '39M', 'decode': '39M', 'entropy': '39M',
       'start': '0.85M', 'smollm2_windows': '135M', 'smollm2_prefill': '135M',
       'smollm2_decode': '135M', 'smollm2_scale': '135M'}
BESIDE = {  # {what was timed: what it may be compared with}; theirs is no faster when compiled
    'ours': ('transformers', 'whole step', 'matrix'),
    'ours, compiled': ('transformers',),
    'Kerple': ('NoPE',),
    'DAPE 1x3 Kerple': ('NoPE',),
    'first line of training': ('import torch',),
}


def speed(files):
    """A row for each function that was timed; in brackets what took turns with it."""
    for file, model in files.items():
        for one in sum(read(f'speed/{file}.json')['results'].values(), []):
            for name, others in BESIDE.items():
                if name not in one:
                    continue
                own, title = one[name], f"{model}: {one['task']}, {name}"
                row = {'seconds': f"{own['seconds']:.3g}"}
                if 'of_limit' in own:
                    row |= {'of the limit': f"{own['of_limit']:.0%}",
                            'GB': own['peak_memory'] / 1e9}
                for who in others:
                    if who in one:
                        title += f' ({who})'
                        row['times ours'] = one[who]['ratio'] / own['ratio']
                        if 'of_limit' in own:
                            row['GB, theirs'] = one[who]['peak_memory'] / 1e9
                yield title, [row]


SMOLLM2 = {'plain': 'as it is', 'pi': 'PI, factor 4', 'ntk': 'NTK, factor 4',
           'dynamic_ntk': 'dynamic NTK, factor 4',
           'yarn2': 'YaRN, factor 2', 'yarn': 'YaRN, factor 4',
           'scaled': 'YaRN, factor 4, one scale of 0.9',
           'tuned': 'YaRN, factor 4, head scales', 'none': 'without RoPE'}


def smollm2(T, text=''):
    """
    Losses before 8,192 and T tokens, and the gain over the same reading with only the last 8,192.
    ± is its standard error over windows.
    """
    for how, name in SMOLLM2.items():
        path = RESULTS / f'smollm2/eval_ppl_position_{text}{how}_{T}.json'
        if path.exists():
            at_L, at_T = read(path)['rows']
            yield name, [{'loss at 8,192': at_L['loss'],
                          f'loss at {T:,}': at_T['loss'],
                          'with only the last 8,192': at_T['cut_loss'],
                          'gain from the rest': number(at_T['gain'], at_T['gain_error'])}]


def keys():
    """How many of 10 passkeys were found in texts of each length, also if the space is given."""
    for how in 'plain', 'yarn', 'scaled', 'tuned':
        for hint, given in ('', ''), ('_hint', ', space given'):
            row = {}
            for part in '_short', '':
                found = read(f'smollm2/passkey_{how}{hint}{part}.json')
                for length, cells in zip(found['lengths'], found['accuracy']):  # by depth
                    row[f'{length:,}'] = f'{10 * mean(cells):.0f}'
            yield SMOLLM2[how] + given, [row]


# ---------------------------------------------------------------------- pages

TABLES = {
    'inside': partial(past_L, read_new), 'code': partial(past_L, read_old),
    'series': series, 'demo': demo, 'scoreboard': scoreboard, 'text': text, 'tasks': tasks,
    'books': partial(perplexity, 'head_scale/books.json', (256, 512, 1024, 2048)),
    'methods': partial(perplexity, 'dape/methods.json', (128, 512, 2048, 8192)),
    'scaled': partial(perplexity, 'dape/head_scales.json', (128, 512, 2048)),
    'che': che, 'keys': keys,
    'gpu': partial(speed, GPU), 'cpu': partial(speed, CPU),
    'smollm2': partial(smollm2, 16384), 'further': partial(smollm2, 32768),
    'source': partial(smollm2, 16384, 'code_'),
}


def update(page):
    """The text of a page with the tables that the JSON in results/ gives."""
    return re.sub(r'(<!-- (\w+) -->).*?(<!-- end -->)', flags=re.DOTALL, string=page,
                  repl=lambda part: f'{part[1]}\n{markdown(TABLES[part[2]]())}\n{part[3]}')


def stages(folders):
    """The losses that stages wrote into folders, as rows of {length or kind: number}."""
    rows = defaultdict(list)
    for folder in folders:
        for path in sorted(Path(folder).glob('*.json')):
            for row in read(path.absolute()).get('rows', ()):
                at = str(row.get('length') or row.get('kind'))
                for key in 'loss', 'cut_loss', 'gain':
                    rows[f'{path.stem}: {key}'].append({at: row.get(key)})
    return rows.items()


def main(arguments):
    if arguments not in ([], ['--check']):
        for row in stages(arguments):
            print(markdown([row]), end='\n\n')
        return
    for path in RESULTS.parent / 'README.md', *sorted(RESULTS.glob('**/README.md')):
        page = path.read_text(encoding='utf-8')
        if page != update(page):
            print(path)
            if not arguments:
                path.write_text(update(page), encoding='utf-8')


if __name__ == '__main__':
    main(sys.argv[1:])
