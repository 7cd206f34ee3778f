"""
Write the tables of the studies' pages and of README.md from the JSON in results/.

A page marks the place of a table by <!-- NAME --> before it and <!-- end --> after it. NAME is a
key of TABLES. A number is a mean over seeds ± their standard deviation; without ± it is one seed.

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
    return f'{round(value, 2) + 0:.2f}{after}'  # + 0: -0.0 becomes 0.0


def cell(seeds):
    """The text of a cell from the numbers of its seeds. It is empty if a seed lacks it."""
    if not seeds or None in seeds:
        return ''
    return number(mean(seeds), stdev(seeds) if len(seeds) > 1 else None)


def markdown(rows):
    """
    The table of rows (name, {column: text, or a list with the number of each seed}). Its columns
    are those of the longest row; what another row lacks stays empty.
    """
    rows = list(rows)
    columns = max((row for _, row in rows), key=len)
    lines = [f"| | {' | '.join(columns)} |", '|---' * (len(columns) + 1) + '|']
    for name, row in rows:
        cells = [row.get(column, '') for column in columns]
        texts = [one if isinstance(one, str) else cell(one) for one in cells]
        lines.append(f"| {name} | {' | '.join(texts)} |")
    return '\n'.join(lines)


# Each function below yields the rows of a table.
# ---------------------------------------------------------------------- past_L

MODELS = {'none': 'NoPE', 'rope': 'RoPE', 'alibi': 'ALiBi', 'conv': 'NoPE + conv',
          'conv_8L': 'NoPE + conv, trained at 8L', 'rope_conv': 'RoPE + conv',
          'alibi_conv': 'ALiBi + conv'}
READINGS = {  # {reading: (what the row adds to the model's name, models that have this row)}
    'untuned': ('', 'conv alibi_conv conv_8L'),
    'uniform': (', one scale', 'conv'),
    'head': (', head scales', 'none conv'),
    'head_clamped': (', head scales of at least 1', 'none'),
    'vectors': (', channel scales and norms', 'none conv'),
    'yarn': (', YaRN', 'rope_conv'),
    'yarn_weights': (', YaRN, every weight', 'rope_conv'),
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


def read_model(series, model, reading):
    """
    {column: [the number of each seed]} of a model of past_L. Gains are over the untuned model, or
    its twin that was trained at L, with only the last L tokens.
    """
    seeds = []
    for path in sorted((RESULTS / 'past_L' / series).glob(f'{model}_????.json')):
        one = read(path)['readings'].get(reading)
        if one is None:
            continue
        twin = read(path.with_name(path.name.replace('_8L', '')))
        cut_loss = twin['readings']['untuned']['text'][3]['cut_loss']
        at_L, _, _, at_8L, _ = one['text']
        gains = {row['kind']: row['gain'] for row in one.get('repeats', ())}
        seeds.append({
            'loss at L': at_L['loss'],
            'loss at 8L': at_8L['loss'],
            'gain, all tokens': cut_loss - at_8L['loss'],
            'gain, far repeats': gains.get('all'),
            'gain, other text': gains.get('other document, all'),
        })
    columns = seeds[0] if seeds else {}
    return {name: [one[name] for one in seeds] for name in columns}


def code():
    for model, title in MODELS.items():
        for reading, (what, models) in READINGS.items():
            if model in models.split():
                yield title + what, read_model('', model, reading)


def inside():
    """The main rows, of windows that lie in one document: what the stages wrote by seed."""
    for model, reading in (('none', 'untuned'), ('none', 'head'), ('rope', 'untuned'),
                           ('rope', 'yarn'), ('alibi', 'untuned'), ('conv', 'untuned'),
                           ('conv', 'head')):
        seeds = defaultdict(list)
        for folder in sorted((RESULTS / 'past_L/code').iterdir()):
            untuned, own = (read(folder / f'eval_ppl_position_{model}_{how}.json')['rows']
                            for how in ('untuned', reading))
            repeats = read(folder / f'repeats_{model}_{reading}.json')['rows']
            gains = {row['kind']: row['gain'] for row in repeats}
            seeds['loss at L'].append(own[0]['loss'])
            seeds['loss at 8L'].append(own[3]['loss'])
            seeds['only the last L'].append(untuned[3]['cut_loss'])
            seeds['gain, far repeats'].append(gains['all'])
            seeds['gain, other text'].append(gains['other document'])
        yield MODELS[model] + READINGS[reading][0], seeds


def series():
    for folder, title in SERIES.items():
        readings = {'untuned': ('conv', 'untuned'), 'head scales': ('conv', 'head'),
                    'RoPE, YaRN': ('rope', 'yarn')}
        yield title, {name: read_model(folder, *which).get('gain, far repeats', '')
                      for name, which in readings.items()}


def demo():
    reports = read('past_L/demo_seeds.json')['reports'].values()
    for name in 'NoPE, head scales', 'NoPE + conv', 'NoPE + conv, head scales':
        ones = [report['readings'][name] for report in reports]
        yield name, {'loss at 4L': [one['at']['512']['loss'] for one in ones],
                     'gain, far repeats': [one['far']['gain'] for one in ones]}


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
            yield row['title'], {name: number(one['mean'], one['sd']) if one else ''
                                 for name, one in numbers.items()}


# ---------------------------------------------------------------------- head_scale

BOOKS = {  # {name in the file: name in the table}; of these rows there are three seeds
    'NoPE': 'NoPE',
    'NoPE, uniform scale by the fit': 'NoPE, one scale',
    'NoPE, scale': 'NoPE, head scales',
    'NoPE, scale,out,norm': 'NoPE, head scales, head gains, norms',
    'NoPE, every weight, lr 1e-3': 'NoPE, every weight',
    'RoPE': 'RoPE',
    'RoPE, YaRN fair': 'RoPE, YaRN',
    'RoPE, ntk fair': 'RoPE, NTK',
}
TASKS = {  # {name in the table: names in recall.json and passkey.json}
    'NoPE': ('nothing', 'nothing'),
    'one scale': ('uniform scale', 'uniform scale'),
    'head scales': ('scale per head', 'scale per head, rate 0.01'),
    'channel scales': ('scale per channel', 'scale per channel'),
    'head scales, head gains, norms': ('scale per head, gains of heads and norms',) * 2,
    'every weight': ('every weight', 'every weight'),
    'only the last tokens': ('nothing, context cut', 'nothing, context cut to L'),
}


def text():
    seeds = [seed['methods'] for seed in read('head_scale/text.json')['seeds'].values()]
    for name, key in {'NoPE': 'NoPE', 'one scale': 'uniform 512', 'head scales': 'head 512',
                      'channel scales and norms': 'vectors 512',
                      'only the last L tokens': 'cut'}.items():
        yield name, {
            'loss at L': [seed[key]['128']['loss'] for seed in seeds],
            'at 2L': [seed[key]['256']['loss'] for seed in seeds],
            'at 4L': [seed[key]['512']['loss'] for seed in seeds],
            'gain at 4L': [seed['NoPE']['512']['cut_loss'] - seed[key]['512']['loss']
                           for seed in seeds],
        }


def tasks():
    recall, passkey = read('head_scale/recall.json'), read('head_scale/passkey.json')
    for name, (in_recall, in_passkey) in TASKS.items():
        yield name, {'recall at 4L': [seed[2] for seed in recall['right'][in_recall]['each']],
                     'keys at 4L': [seed[3] for seed in passkey['found'][in_passkey]['each']]}


def perplexity(file, lengths, names=None):
    """Perplexity by length, of all rows of a file, or of those in names, {old: new name}."""
    result = read(file)
    columns = [result['lengths'].index(T) for T in lengths]
    for row in result['rows']:
        if names is None or row['name'] in names:
            runs = row.get('runs', [row])  # the seeds
            name = names[row['name']] if names else row['name']
            yield name, {str(T): [run['ppl'][i] for run in runs] for T, i in zip(lengths, columns)}


# ---------------------------------------------------------------------- dape, speed

def che():
    for name, method in {'RoPE': 'rope', 'RoPE, random positions': 'rope_random',
                         'Kerple': 'kerple', 'DAPE 1x3-Kerple': 'kerple_dape3'}.items():
        columns = {}
        for task, lengths in {'even_pairs': '41 to 500', 'missing_duplicate': '41 to 60'}.items():
            files = sorted((RESULTS / 'dape/che').glob(f'{method}_????_{task}*.json'))
            found = [read(file)['tasks'][task] for file in files]
            if task != 'even_pairs':  # which was read at no length from 2 to 40
                columns[f'{task}, 1 to 40'] = [one['inside'] for one in found]
            columns[f'{task}, {lengths}'] = [one['outside'] for one in found]
        yield name, columns


GPU = {'train_1b': '1.1B', 'growth_1b': '1.1B', 'eval_1b': '1.1B', 'entropy_1b': '1.1B',
       'peer_125m': '125M'}  # {file of speed/: the model}
CPU = {'steps': '39M', 'methods': '39M', 'windows': '39M', 'decode': '39M', 'entropy': '39M',
       'start': '0.85M', 'smollm2_windows': '135M', 'smollm2_prefill': '135M',
       'smollm2_decode': '135M', 'smollm2_scale': '135M'}


BESIDE = 'transformers', 'whole step', 'matrix', 'NoPE', 'import torch'


def times(who, name, one):
    """
    The time of a function over that of ours. New files have its range over the rounds, its
    arithmetic over ours where that differs, and how long the faster of theirs, compiled or not,
    takes beside ours compiled.
    """
    other, own = one[who], one[name]
    if 'ratio' not in own:
        return number(other['seconds'] / own['seconds'])
    low, high = other['from'], other['to']
    if own['ratio'] != 1:  # then all are compared with the other one
        low, high = 1 / own['to'], 1 / own['from']
    text = f"{other['ratio'] / own['ratio']:.2f} ({low:.2f}–{high:.2f})"
    if other.get('by_flop') != own.get('by_flop'):
        text += f", by FLOP {other['by_flop'] / own['by_flop']:.2f}"
    if compiled := one.get(f'{name}, compiled'):
        fastest = min(row['seconds'] for key, row in one.items() if key.startswith(who))
        text += f", compiled {fastest / compiled['seconds']:.2f}"
    return text


def speed(files):
    """A row for each function that was timed; in brackets what took turns with it."""
    found = [(model, read(f'speed/{file}.json')['results']) for file, model in files.items()]
    for model, task in ((model, task) for model, tasks in found for task in tasks.values()):
        for one in task if isinstance(task, list) else [task]:
            if files is CPU and 'bfloat16' in one['task']:
                continue
            beside = [who for who in BESIDE if who in one]
            ours = ['ours'] if 'ours' in one else [
                name for name, row in one.items() if isinstance(row, dict) and name not in beside]
            for name in ours:
                own, title = one[name], re.sub(', b?float[0-9]+', '', one['task'])
                title += '' if name == 'ours' else f', {name}'
                title += f' ({beside[0]})' if beside else ''
                columns = {'seconds': f"{own['seconds']:.3g}",
                           'of the limit': f"{own['of_limit']:.0%}" if 'of_limit' in own else '',
                           'GB': '/'.join(number(one[who]['peak_memory'] / 1e9)
                                          for who in (name, *beside) if 'peak_memory' in one[who])}
                for who in beside:
                    columns['times ours'] = times(who, name, one)
                yield f'{model}: {title}', columns


SMOLLM2 = {'plain': 'as it is', 'pi': 'PI, factor 4', 'ntk': 'NTK, factor 4',
           'dynamic_ntk': 'dynamic NTK, factor 4',
           'yarn2': 'YaRN, factor 2', 'yarn': 'YaRN, factor 4',
           'scaled': 'YaRN, factor 4, one scale of 0.9',
           'tuned': 'YaRN, factor 4, head scales', 'none': 'without RoPE'}


def smollm2(T, yarn, text=''):
    """
    Losses before 8,192 and T tokens, the gain over the same reading with only the last 8,192, and
    how far the loss is below YaRN's with the factor for T. ± is the standard error over windows of
    a difference.
    """
    files = {how: RESULTS / f'smollm2/eval_ppl_position_{text}{how}_{T}.json' for how in SMOLLM2}
    found = {how: read(path) for how, path in files.items() if path.is_file()}
    base = found[yarn]['loss_at_by_window'][str(T)]
    for how, result in found.items():
        at_L, at_T = result['rows']
        below = [b - a for a, b in zip(result['loss_at_by_window'][str(T)], base)]
        yield SMOLLM2[how], {
            'loss at 8,192': number(at_L['loss']),
            f'loss at {T:,}': number(at_T['loss']),
            'with only the last 8,192': number(at_T['cut_loss']),
            'gain from the rest': number(at_T['gain'], at_T['gain_error']),
            f'below {SMOLLM2[yarn]}': number(mean(below), stdev(below) / len(below) ** 0.5)}


def keys():
    """How many of 10 passkeys were found in texts of each length, also if the space is given."""
    for how in ('plain', 'plain_hint', 'yarn', 'yarn_hint', 'scaled', 'scaled_hint', 'tuned',
                'tuned_hint'):
        row = {}
        for part in '_short', '':
            found = read(f'smollm2/passkey_{how}{part}.json')
            for length, cells in zip(found['lengths'], found['accuracy']):  # by depth
                row[f'{length:,}'] = f'{10 * mean(cells):.0f}'
        name, _, hint = how.partition('_')
        yield SMOLLM2[name] + (', space given' if hint else ''), row


def paper():
    """The rows of Table 2 that are compared on a page: perplexity on PG19, 1000 for over 1000."""
    rows = read('papers/tables.json')['nope_table2']['rows']
    for name in ('RoPE', 'NoPE', 'RoPE YaRN zero-shot', 'RoPE YaRN fair 16K', 'NoPE uniform 1.5',
                 'NoPE head scale 8K', 'NoPE head scale 18K'):
        yield name, dict(zip(('2K', '4K', '8K', '16K'), map(str, rows[name])))


# ---------------------------------------------------------------------- pages

TABLES = {
    'inside': inside, 'code': code, 'series': series, 'demo': demo,
    'scoreboard': scoreboard,
    'text': text, 'tasks': tasks,
    'books': partial(perplexity, 'head_scale/books.json', (256, 512, 1024, 2048), BOOKS),
    'methods': partial(perplexity, 'dape/methods.json', (128, 512, 2048, 8192)),
    'scaled': partial(perplexity, 'dape/head_scales.json', (128, 512, 2048)),
    'che': che,
    'gpu': partial(speed, GPU), 'cpu': partial(speed, CPU),
    'smollm2': partial(smollm2, 16384, 'yarn2'), 'further': partial(smollm2, 32768, 'yarn'),
    'source': partial(smollm2, 16384, 'yarn', 'code_'),
    'keys': keys, 'paper': paper,
}


def update(page):
    """The text of a page with the tables that the JSON in results/ gives."""
    return re.sub(r'(<!-- (\w+) -->).*?(<!-- end -->)', flags=re.DOTALL, string=page,
                  repl=lambda part: f'{part[1]}\n{markdown(TABLES[part[2]]())}\n{part[3]}')


def stages(folders):
    """The losses that stages wrote into folders, as rows of {length or kind: numbers of seeds}."""
    seeds = defaultdict(lambda: defaultdict(list))
    for folder in folders:
        for path in sorted(Path(folder).glob('*.json')):
            for row in read(path.absolute()).get('rows', ()):
                at = str(row.get('length') or row.get('kind'))
                for key in 'loss', 'cut_loss', 'gain':
                    seeds[f'{path.stem}: {key}'][at].append(row.get(key))
    return seeds.items()


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
