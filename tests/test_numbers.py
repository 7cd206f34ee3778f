"""
Numbers in the text of pages are what a JSON in results/ gives: those of the places in
tests/numbers/. Tables of pages: test_page_tables.py.

$ python -m pytest tests/test_numbers.py

A place is a part of a page. Its file says where the part is, then has one line per number, in the
order of the page: the number as printed | the JSON files | a Python expression. In the expression,
x is what the first file holds, and xs is a list of what all files hold. SEED in a file's name
stands for each of SEEDS, and FILES has short names. The printed text says how the value is
rounded: '1.42' has two decimals, '37%' is 100 times a share without decimals. To cover another
part of a page, add a place.
"""

import functools
import itertools
import math
import re
from dataclasses import dataclass
from statistics import correlation, mean, stdev
from unittest import mock

import pytest
import torch
from conftest import ROOT
from conftest import read as read_json

from lib.checkpoints import config_of
from lib.tasks import N_SYMBOLS  # noqa: F401 (an expression uses it)
from model import Transformer
from results.gpu.table import usual_flops  # noqa: F401 (an expression uses it)
from results.scoreboard import table as scoreboard_table

SEEDS = '1337', '1338', '1339'
FILES = {
    'BOTH': 'demo_bytes/seeds.json demo_bytes/seeds_epyc.json',
    'CPUS': 'bench/cpu_sdpa.json bench/cpu_sdpa_earlier.json',
    'BOOKS': 'scoreboard/books/channel_SEED.json scoreboard/books/head_SEED.json',
    'BRANCHES': ' '.join(f'begin/{n}M_1337.json' for n in (5, 10, 20, 40)),
    'ALL_BRANCHES': ' '.join(f'begin/{n}M_1337.json' for n in (2, 5, 10, 20, 40)),
    'UNTUNED': 'past_L/code_86M/conv_1337.json past_L/code_86M/conv_1338_untuned.json '
               'past_L/code_86M/conv_1339_untuned.json',
    'GPU': ' '.join(f'gpu/{name}.json' for name in (
        'train_1b', 'eval_1b', 'decode_1b', 'entropy_1b', 'growth_1b', 'peer_125m',
        'time_cost_125m')),
    'SMALL': 'scoreboard/small/channel_SEED.json scoreboard/small/head_SEED.json',
}
CHANNEL = 'scale per channel'
WORDS = {'one': 1, 'two': 2, 'three': 3, 'four': 4, 'five': 5}
# What has digits and is not a number: links, the numbers of a list's items, lengths as multiples of
# L, kernels such as 1×3, sizes of models such as 5M, files, commits, rates.
NAMES = r'\]\([^)]*\)|^\d+\. |\b\d+L\b|\b\d×\d|\b[\d.]+M\b|\w+\.json|commit \w+|[\d.]+e-\d'
# A number is written in digits, or it is a word before one of the things that are counted.
COUNTED = r'(?= (?:seeds?|windows|processors|CPU)\b)'
NUMBER = rf"[−-]?\d[\d,]*(?:\.\d+)?%?|\b(?:{'|'.join(WORDS)}){COUNTED}"


@dataclass
class Place:
    page: str
    first: str  # the part begins with this text
    after: str  # and ends before this text, or with the page
    numbers: list  # lines PRINTED | FILES | EXPRESSION, and headings


# ---------------------------------------------------------------------- what expressions call

def spread(values):
    """Mean and standard deviation."""
    return mean(values), stdev(values)


def span(values):
    """Lowest and highest."""
    values = list(values)
    return min(values), max(values)


def one_value(values):
    """The value that all have in common."""
    value, = set(values)
    return value


def demo(x, method, T):
    """The loss of each seed of results/demo_bytes."""
    if method not in ('NoPE', 'cut'):
        method = f'{method} {T}'
    return [run['methods'][method][str(T)]['loss'] for run in x['seeds'].values()]


def differences(better, worse):
    """By how much each number of `better` is below that of `worse`."""
    return [high - low for low, high in zip(better, worse, strict=True)]


def heads_over_uniform(xs):
    """By how much head scales beat the uniform scale at 4L, in the seeds of all files."""
    return [lead for x in xs for lead in differences(demo(x, 'head', 512), demo(x, 'uniform', 512))]


def row(table, name):
    """The row of that name in a table of perplexities."""
    found, = [row for row in table['rows'] if row['name'] == name]
    return found


def behind_cut(table, name, untuned='NoPE', at=2):
    """
    By how many nats each seed of a row is at 4L behind the untuned model with its context cut to L,
    which reads at any length what it reads at L. at: 1 for 2L.
    """
    pairs = zip(row(table, name)['runs'], row(table, untuned)['runs'], strict=True)
    return [math.log(run['ppl'][at] / first['ppl'][0]) for run, first in pairs]


def won_back_at_4L(table, name):
    """The share of what untuned NoPE loses at 4L that a row wins back, for each seed."""
    pairs = zip(behind_cut(table, name), behind_cut(table, 'NoPE'), strict=True)
    return [1 - still / lost for still, lost in pairs]


def own_gains(table, but):
    """The gains of the rows of a table over their own cut context, without one row."""
    return [math.log(row['ppl'][0] / ppl) for row in table['rows'] if row['name'] != but
            for ppl in row['ppl'][1:]]


def before(x, key, T):
    """The mean of a curve of entropy.py over the 64 positions before T; it has one value for 8."""
    return mean(x[key][T // 8 - 8:T // 8])


def last_entropy(xs):
    """The mean over heads and the last 64 positions, for each file of entropy.py."""
    return [before(x, 'mean_entropy', 8 * len(x['mean_entropy'])) for x in xs]


def paper(x, name, column):
    """A perplexity of the paper's Table 2."""
    table = x['nope_table2']
    return table['rows'][name][table['columns'].index(column)]


def past(x, name, key=None):
    """A row of past_L.json, such as 'conv head' of model and reading, or its values over seeds."""
    found, = [row for row in x['rows'] if f"{row['model']} {row['reading']}" == name]
    if key is None:
        return found
    return found[key]['values'] if isinstance(found[key], dict) else found[key]


def gains(x, name, at='all'):
    """The gains at far repeats of a row of past_L.json, for each seed."""
    return past(x, name, f'gain, {at}')


def gap_closed(x, name, key):
    """In the first seed, how far a reading is on the way from untuned to trained at 8L."""
    low, at, high = (past(x, one, key)[0] for one in ('conv untuned', name, 'conv_8L untuned'))
    return (at - low) / (high - low)


def share_copied(x, dataset):
    """The share of tokens that copying predicts in windows of L tokens of a text."""
    return one_value(row['copied'] for row in x['rows']
                     if (row['dataset'], row['length']) == (dataset, 128))


def board(x, key):
    """A row of the scoreboard."""
    found, = [row for row in x['rows'] if row['row'] == key]
    return found


def demo_far(x, name, key='gain'):
    """What make demo measured at far repeats, for each seed of results/demo."""
    return [report['readings'][name]['far'][key] for report in x['reports'].values()]


def demo_claim(x, text):
    """In how many seeds of results/demo a claim holds."""
    return sum(claims[text] for claims in x['claims'].values())


def demo_loss(x, name):
    """The loss at 4L, for each seed of results/demo."""
    return [report['readings'][name]['at']['512']['loss'] for report in x['reports'].values()]


def begins(x, tokens, key):
    """What begin.json has in the row of a branch after this many millions of tokens."""
    return one_value(row[key] for row in x['rows'] if row['tokens (M)'] == tokens)


def copied(xs, kind):
    """The largest share of attention that a head gives to the copy, in each file of a branch."""
    return [max(map(max, x['copying'][kind]['share'])) for x in xs]


def copying_heads(xs, layer):
    """The two heads of a layer that copy most, which are the same in all files."""
    shares = [x['copying']['near']['share'][layer] for x in xs]
    return one_value(tuple(sorted(sorted(range(8), key=share.__getitem__)[-2:]))
                     for share in shares)


def copying_scales(xs):
    """The head scales of the two heads of layer 1 that copy."""
    return [x['head_scale'][1][head] for x in xs for head in copying_heads(xs, 1)]


def scale_and_share(x):
    """The correlation over all heads of head scale and share of attention to a far copy."""
    scales, shares = x['head_scale'], x['copying']['far']['share']
    return correlation(*(list(itertools.chain(*table)) for table in (scales, shares)))


def cache_share(x):
    """The gain with head scales, divided by that of the copy cache, in a branch's file."""
    return x['repeats']['head'][0]['R']


@functools.cache
def board_runs(size):
    """{row: what with_gains() of the scoreboard returns for each seed}."""
    with mock.patch.object(scoreboard_table, 'size', size):
        return {key: [scoreboard_table.with_gains(key, int(seed)) for seed in SEEDS
                      if scoreboard_table.result_file(key, seed).exists()]
                for key in scoreboard_table.ROWS}


def each(key, heading, size='small'):
    """A column of the scoreboard, for each seed of a row, or of several rows."""
    return [scoreboard_table.column(run, *scoreboard_table.COLUMNS[heading])
            for one in key.split() for run in board_runs(size)[one]]


def all_gains(but):
    """Every gain of the small scoreboard, without some rows."""
    rows = ' '.join(board_runs('small').keys() - set(but.split()))
    return each(rows, 'gain at 8L') + each(rows, 'gain at far repeats')


def won_back(key):
    """The share of NoPE's rise from L to 4L that a tuning takes away, for each seed."""
    pairs = zip(leads(key, 'none', 'loss at 4L'),
                differences(each('none', 'loss at L'), each('none', 'loss at 4L')), strict=True)
    return [lower / rise for lower, rise in pairs]


def leads(better, worse, *headings, size='small'):
    """By how much a row is below others, at each heading, for each seed."""
    return [lead for key in worse.split() for heading in headings
            for lead in differences(each(better, heading, size), each(key, heading, size))]


def means(rows, heading):
    """The lowest and highest mean over seeds among rows."""
    return span([mean(each(key, heading)) for key in rows.split()])


def other_losses(x):
    """What the rows that the scoreboard's findings do not name lose at 8L."""
    named = ('conv_head', 'dape3', 'kerple_dape1', 'ntk_8l', 'cope', 'alibi', 'nape', 'kerple',
             'kerple_dape3', 'xl', 'yarn_8l', 'conv', 'swa_none', 'rope_conv', 'alibi_conv')
    return span(-row['gain at 8L']['mean'] for row in x['rows']
                if 'gain at 8L' in row and row['row'] not in named)


def min_errors(x, name):
    """The least whole number of standard errors by which a gain at far repeats is above 0."""
    return math.floor(min(a / b for a, b in zip(gains(x, name), past(x, name, 'errors, all'))))


def below(values):
    """How far numbers are below 0."""
    return [-value for value in values]


def n_seeds(table, name):
    """The number of seeds of a row."""
    return len(row(table, name).get('runs', ['the row itself']))


def attention_to_last_8(x, length):
    """A head's share, over the queries of the second half. Bins: 0, 1, 2-3, 4-7 ..."""
    return one_value(sum(at['by_distance'][:4]) for at in x['lengths'] if at['length'] == length)


def dape_lead(table):
    """By how much DAPE 1x3 on Kerple leads the best other row, from 2L on."""
    best = row(table, 'DAPE 1x3-Kerple')['ppl'][1:]
    others = [row['ppl'][1:] for row in table['rows'] if row['name'] != 'DAPE 1x3-Kerple']
    return differences(best, map(min, *others))


def lower_by(table, name):
    """The share by which head scales lower the perplexity of a row at 4L."""
    return 1 - row(table, f'{name}, head scale')['ppl'][2] / row(table, name)['ppl'][2]


def accuracies(xs):
    """Accuracy past the length of training, of a file of che.py for each seed."""
    return [task['outside'] for x in xs for task in x['tasks'].values()]


def keys_found(xs, length):
    """The share of keys that passkey.py found, for each seed."""
    return [mean(x['accuracy'][x['lengths'].index(length)]) for x in xs]


def more_found(x, better, worse):
    """How many more keys of 100 a row of passkey.json finds at 4L than another, for each seed."""
    return [100 * more for more in differences(*([each[3] for each in x['found'][name]['each']]
                                                 for name in (worse, better)))]


def points(x, *rows):
    """By how many points rows of recall.json are above the uniform scale at 4L, in all seeds."""
    uniform = [each[2] for each in x['right']['uniform scale']['each']]
    return [100 * more for name in rows
            for more in differences(uniform, [each[2] for each in x['right'][name]['each']])]


def held_by_cut(x):
    """The share of the keys at 4L whose line begins in the last L tokens."""
    rows = [dict(zip(x['answers']['columns'], row)) for row in x['answers']['rows']]
    return mean(row['key_at'] >= row['tokens'] - 256 for row in rows if row['length'] == 1024)


def lead(x, better, worse, at=2):
    """By how much less loss `better` has than `worse` at 4L, for each seed. at: 1 for 2L."""
    return differences(*([each[at] for each in x['losses'][name]['each']]
                         for name in (better, worse)))


def at_8L(xs):
    """By how much less loss each of the first three files has at 8L than the other three."""
    losses = [x['text' if 'text' in x else 'rows'][2]['loss'] for x in xs]
    return differences(losses[:3], losses[3:])


def search(x, at=0):
    """The search for a uniform scale with a file's first checkpoint. at: 1 for the second."""
    return list(x['searches'].values())[at]


def seed_of(x):
    """The seed in the folder of a file's model."""
    return int(re.search(r'/(\d+)/', x['checkpoint'])[1])


def steps(xs, task, slow, fast):
    """The time of a step beside that of another, in the files that have the task."""
    found = [x['results'][task] for x in xs if task in x['results']]
    return [times[slow]['seconds'] / times[fast]['seconds'] for times in found]


def decoding_bytes(x):
    """Bytes of bfloat16 weights and keys that decoding reads for a token, on the average."""
    s = x['settings']
    with torch.device('meta'):
        model = Transformer(config_of(s, block_size=s['read_context']))
    weights, c = model.n_params() - model.embed.weight.numel(), model.config
    keys = 2 * c.n_layer * c.n_kv_head * c.head_dim * (s['read_context'] + s['n_decode'] / 2)
    return 2 * (weights + keys)


def measured_bandwidth(x):
    """Bytes per second that the limit of decoding rests on."""
    limit = x['results']['decode']['limit_seconds']['ours']
    return x['settings']['n_decode'] * decoding_bytes(x) / limit


def threads(x):
    return int(re.search(r'(\d+) threads', x['device'])[1])


def above(values):
    """In how many seeds the first half of a list is above the second half."""
    half = len(values) // 2
    return sum(a > b for a, b in zip(values[:half], values[half:], strict=True))


def behind_uniform(x):
    """The seeds of results/demo_bytes whose head scales have less own gain at 4L than uniform."""
    gains = {seed: [run['methods'][f'{name} 512']['512']['gain'] for name in ('head', 'uniform')]
             for seed, run in x['seeds'].items()}
    return [int(seed) for seed, (head, uniform) in gains.items() if head < uniform]


def undone(x, name, T):
    """The share of what NoPE loses from L to T that a row of report.json wins back."""
    at_L, at_T = (x['methods']['NoPE']['at'][length] for length in ('128', str(T)))
    loss = at_T['cut_loss'] if name == 'cut' else x['methods'][f'{name} {T}']['at'][str(T)]['loss']
    return (at_T['loss'] - loss) / (at_T['loss'] - at_L['loss'])


def paired(x, a, b):
    """The paired difference of two methods of report.json at 4L, and its standard error."""
    return one_value((row['difference'], row['standard_error']) for row in x['paired_differences']
                     if (row['length'], row['a'], row['b']) == (512, a, b))


def timed(x, name):
    """The row of a method in time_cost_125m.json."""
    found, = [row for row in x['results']['time_cost'] if row['method'] == name]
    return found


# ---------------------------------------------------------------------- what is compared

def read_place(path):
    """The place of a file, whose first lines are page: PAGE, from: FIRST, to: AFTER."""
    page, first, after, *numbers = path.read_text(encoding='utf-8').splitlines()
    return Place(page.removeprefix('page: '), first.removeprefix('from: '),
                 after.removeprefix('to:').strip(), numbers)


PLACES = {path.stem: read_place(path) for path in sorted((ROOT / 'tests/numbers').glob('*.txt'))}


@functools.cache
def read(file):
    file = file.replace('passkey_demo/1337/', 'passkey_demo/')
    return read_json(ROOT / 'results' / file)


def numbers_of(place):
    """(as printed, files, value) of each line of a place. A line without | is a heading."""
    for line in place.numbers:
        if '|' in line:
            printed, files, expression = (part.strip() for part in line.split('|'))
            xs = [read(file.replace('SEED', seed)) for file in FILES.get(files, files).split()
                  for seed in (SEEDS if 'SEED' in file else SEEDS[:1])]
            yield printed, files, eval(expression, globals() | {'x': xs[0], 'xs': xs})


def text_of(place):
    """Its part of the page, on one line, without names that have digits."""
    page = (ROOT / place.page).read_text(encoding='utf-8')
    start = page.index(place.first)
    part = page[start:page.index(place.after, start) if place.after else None]
    return ' '.join(re.sub(NAMES, ' ', part, flags=re.MULTILINE).split())


def as_printed(value, number, is_share):
    """A value as the page would print it, with the decimals of a number that stands there."""
    if number in WORDS:
        return {count: word for word, count in WORDS.items()}.get(value, value)
    decimals = len(re.sub(r'[^.\d]', '', number).partition('.')[2])
    comma = ',' if ',' in number else ''
    text = f'{100 * value if is_share else value:{comma}.{decimals}f}'.replace('-', '−')
    return text + '%' * number.endswith('%')


def faults(place, text):
    """What is wrong with the numbers of a text: one line for each."""
    at, found = 0, []
    for printed, files, values in numbers_of(place):
        ends = COUNTED if printed in WORDS else r'(?![\d%]|[.,]\d)'
        there = re.compile(rf'(?<![\w.,]){re.escape(printed)}{ends}').search(text, at)
        if there is None:
            found.append(f'{printed} is not there, or not in this order')
            continue
        found += [f'{number} has no entry' for number in re.findall(NUMBER, text[at:there.start()])]
        at = there.end()

        numbers = re.findall(NUMBER, printed) or [printed]
        values = values if len(numbers) > 1 else [values]
        for number, value in zip(numbers, values, strict=True):
            value = as_printed(value, number, printed.endswith('%'))
            if value != number:
                found.append(f'{printed}: {files} gives {value}, not {number}')
    return found + [f'{number} has no entry' for number in re.findall(NUMBER, text[at:])]


@pytest.mark.parametrize('name', PLACES)
def test_every_number_of_a_page_is_what_its_json_gives(name):
    assert faults(PLACES[name], text_of(PLACES[name])) == []


@pytest.mark.parametrize('name', PLACES)
def test_a_number_that_is_changed_or_has_no_entry_is_a_fault(name):
    place, text = PLACES[name], text_of(PLACES[name])
    for number in re.finditer(NUMBER, text):
        other = {'one': 'four'}.get(number[0], 'one')
        if number[0] not in WORDS:
            other = re.sub(r'\d(?=\D*$)', lambda digit: str((int(digit[0]) + 1) % 10), number[0])
        assert faults(place, text[:number.start()] + other + text[number.end():]), number
        assert faults(place, f'{text[:number.start()]}0.7 {text[number.start():]}'), number
    assert faults(place, text + ' 0.7') == ['0.7 has no entry']
