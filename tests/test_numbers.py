"""
Every number of the first page's results, and of the tables that studies print, is what a JSON in
results/ gives.

$ python -m pytest tests/test_numbers.py

PLACES lists parts of a page. Each has one line per number, in the order of the page: the number as
printed | the JSON files | a Python expression. In the expression, x is what the first file holds,
and xs is a list of what all files hold. SEED in a file's name stands for each of SEEDS, and FILES
has short names. The printed
text says how the value is rounded: '1.42' has two decimals, '37%' is 100 times a share without
decimals. To cover another part of a page, add a place.
"""

import functools
import math
import re
from dataclasses import dataclass
from statistics import mean, stdev

import pytest
from conftest import ROOT
from conftest import read as read_json

from results import study
from results.past_L import table as past_table
from results.scoreboard import table as scoreboard_table

SEEDS = '1337', '1338', '1339'
FILES = {
    'BOTH': 'demo_bytes/seeds.json demo_bytes/seeds_epyc.json',
    'CPUS': 'bench/cpu_sdpa.json',
    'BOOKS': 'scoreboard/books/channel_SEED.json scoreboard/books/head_SEED.json',
    'SMALL': 'scoreboard/small/channel_SEED.json scoreboard/small/head_SEED.json',
}
CHANNEL = 'scale per channel'
WORDS = {'one': 1, 'two': 2, 'three': 3, 'four': 4, 'five': 5}
# What has digits and is not a number: links, the numbers of a list's items, lengths as multiples of
# L, kernels such as 1×3, sizes of models such as 5M.
NAMES = r'\]\([^)]*\)|^\d+\. |\b\d+L\b|\b\d×\d|\b[\d.]+M\b'
# A number is written in digits, or it is a word before one of the things that are counted.
COUNTED = r'(?= (?:seeds?|windows|processors|CPU)\b)'
NUMBER = rf"[−-]?\d[\d,]*(?:\.\d+)?%?|\b(?:{'|'.join(WORDS)}){COUNTED}"


@dataclass
class Place:
    page: str
    first: str    # the part begins with this text
    after: str    # and ends before this text
    numbers: str  # PRINTED | FILES | EXPRESSION, one line per number


# ---------------------------------------------------------------------- what expressions call

def spread(values):
    """Mean and standard deviation."""
    return mean(values), stdev(values)


def span(values):
    """Lowest and highest."""
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


def behind_cut(table, name):
    """
    By how many nats each seed of a row is at 4L behind the untuned NoPE with its context cut to L,
    which reads at any length what it reads at L.
    """
    pairs = zip(row(table, name)['runs'], row(table, 'NoPE')['runs'], strict=True)
    return [math.log(run['ppl'][2] / untuned['ppl'][0]) for run, untuned in pairs]


def past(x, name, key=None):
    """A row of past_L.json, such as 'conv head' of model and reading, or its values over seeds."""
    found, = [row for row in x['rows'] if f"{row['model']} {row['reading']}" == name]
    if key is None:
        return found
    return found[key]['values'] if isinstance(found[key], dict) else found[key]


def board(x, key):
    """A row of the scoreboard."""
    found, = [row for row in x['rows'] if row['row'] == key]
    return found


def largest_error(x):
    """Of the gains of the convolution, untuned and with head scales."""
    return max(past(x, 'conv untuned', 'errors, all') + past(x, 'conv head', 'errors, all'))


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


def held_by_cut(x):
    """The share of the keys at 4L whose line begins in the last L tokens."""
    rows = [dict(zip(x['answers']['columns'], row)) for row in x['answers']['rows']]
    return mean(row['key_at'] >= row['tokens'] - 256 for row in rows if row['length'] == 1024)


def lead(x, better, worse):
    """By how much less loss `better` has than `worse` at 4L, for each seed."""
    return differences(*([each[2] for each in x['losses'][name]['each']]
                         for name in (better, worse)))


def at_8L(xs):
    """By how much less loss each of the first three files has at 8L than the other three."""
    losses = [x['text'][2]['loss'] for x in xs]
    return differences(losses[:3], losses[3:])


def steps(xs, task, slow, fast):
    """The time of a step beside that of another, in the files that have the task."""
    found = [x['results'][task] for x in xs if task in x['results']]
    return [times[slow]['seconds'] / times[fast]['seconds'] for times in found]


def threads(x):
    return int(re.search(r'(\d+) threads', x['device'])[1])


# ---------------------------------------------------------------------- the numbers

PLACES = {
    'the table': Place('README.md', '| nats per token', '[More]', """
128 | past_L/past_L.json | x['L']
3 | past_L/past_L.json | len(past(x, 'none untuned')['seeds'])
3.18 ± 0.01 | past_L/past_L.json | spread(past(x, 'none untuned', 'loss at 128'))
5.50 ± 0.13 | past_L/past_L.json | spread(past(x, 'none untuned', 'loss at 1024'))
3.17 ± 0.01 | past_L/past_L.json | spread(past(x, 'none untuned', 'cut at 1024'))
−1.84 ± 0.04 | past_L/past_L.json | spread(past(x, 'none untuned', 'gain, all'))
3 | past_L/past_L.json | len(past(x, 'none head')['seeds'])
3.31 ± 0.01 | past_L/past_L.json | spread(past(x, 'none head', 'loss at 128'))
4.17 ± 0.09 | past_L/past_L.json | spread(past(x, 'none head', 'loss at 1024'))
3.17 ± 0.01 | past_L/past_L.json | spread(past(x, 'none head', 'cut at 1024'))
−0.76 ± 0.06 | past_L/past_L.json | spread(past(x, 'none head', 'gain, all'))
3 | past_L/past_L.json | len(past(x, 'rope untuned')['seeds'])
2.88 ± 0.14 | past_L/past_L.json | spread(past(x, 'rope untuned', 'loss at 128'))
5.03 ± 0.06 | past_L/past_L.json | spread(past(x, 'rope untuned', 'loss at 1024'))
2.85 ± 0.14 | past_L/past_L.json | spread(past(x, 'rope untuned', 'cut at 1024'))
−2.08 ± 0.07 | past_L/past_L.json | spread(past(x, 'rope untuned', 'gain, all'))
3 | past_L/past_L.json | len(past(x, 'rope yarn')['seeds'])
3.10 ± 0.15 | past_L/past_L.json | spread(past(x, 'rope yarn', 'loss at 128'))
3.30 ± 0.18 | past_L/past_L.json | spread(past(x, 'rope yarn', 'loss at 1024'))
2.85 ± 0.14 | past_L/past_L.json | spread(past(x, 'rope yarn', 'cut at 1024'))
−0.34 ± 0.20 | past_L/past_L.json | spread(past(x, 'rope yarn', 'gain, all'))
5 | past_L/past_L.json | len(past(x, 'conv untuned')['seeds'])
2.54 ± 0.01 | past_L/past_L.json | spread(past(x, 'conv untuned', 'loss at 128'))
2.77 ± 0.02 | past_L/past_L.json | spread(past(x, 'conv untuned', 'loss at 1024'))
2.50 ± 0.01 | past_L/past_L.json | spread(past(x, 'conv untuned', 'cut at 1024'))
0.34 ± 0.02 | past_L/past_L.json | spread(past(x, 'conv untuned', 'gain, all'))
5 | past_L/past_L.json | len(past(x, 'conv head')['seeds'])
2.54 ± 0.01 | past_L/past_L.json | spread(past(x, 'conv head', 'loss at 128'))
2.62 ± 0.01 | past_L/past_L.json | spread(past(x, 'conv head', 'loss at 1024'))
2.50 ± 0.01 | past_L/past_L.json | spread(past(x, 'conv head', 'cut at 1024'))
0.59 ± 0.02 | past_L/past_L.json | spread(past(x, 'conv head', 'gain, all'))
0.33 to 0.37 | past_L/past_L.json | span(past(x, 'conv untuned', 'gain, all'))
32 | past_L/conv_1337.json | 4 * 8
0.57 to 0.62 | past_L/past_L.json | span(past(x, 'conv head', 'gain, all'))
0.30 to 0.38 | past_L/past_L.json | span(below(past(x, 'conv head', 'gain, other document, all')))
five | past_L/past_L.json | len(past(x, 'conv head', 'gain, all'))
0.05 | past_L/past_L.json | largest_error(x)
three | past_L/past_L.json | len(past(x, 'none head', 'gain, all'))
0.26 | past_L/past_L.json | mean(past(x, 'rope_conv yarn', 'gain, all'))
0.28 | past_L/past_L.json | mean(past(x, 'alibi_conv untuned', 'gain, all'))
one | past_L/past_L.json | len(past(x, 'rope_conv yarn')['seeds'])
0.10 to 0.13 | past_L/past_L.json | span(below(past(x, 'conv head', 'gain at 1024')))
−0.02 | past_L/books/past_L.json | mean(past(x, 'conv head', 'gain, all'))
−0.07 | past_L/books_40M/past_L.json | mean(past(x, 'conv head', 'gain, all'))
one | past_L/books/past_L.json | len(past(x, 'conv head')['seeds'])
92% | scoreboard/small.json | board(x, 'conv')['recall at 64L']['mean']
64 | scoreboard/small.json | 1024 / 16
one | scoreboard/small.json | len(board(x, 'conv')['seeds'])
"""),
    'ten results': Place('results/README.md', '## Ten results', '## What has been run', """
1
2.88 | demo_bytes/seeds.json | mean(demo(x, 'NoPE', 512))
1.75 | demo_bytes/seeds.json | mean(demo(x, 'vectors', 512))
1.42 | demo_bytes/seeds.json | mean(demo(x, 'cut', 512))
five | demo_bytes/seeds.json | len(x['seeds'])
1.47 | demo_bytes/report.json | x['entropy_slope_past_L']
0.69 | demo_bytes/report.json | x['entropy_slope_before_L']
one  | demo_bytes/report.json | len({x['seeds']['train']})
2
28   | extension_demo/eval_ppl_table.json | row(x, 'NoPE')['ppl'][3]
32   | extension_demo/eval_ppl_table.json | row(x, 'RoPE')['ppl'][3]
15   | extension_demo/eval_ppl_table.json | row(x, 'NoPE, head scale 1024')['ppl'][3]
4.5  | extension_demo/eval_ppl_table.json | row(x, 'RoPE, PI fair 1024')['ppl'][3]
2.98 | extension_demo/eval_ppl_table.json | row(x, 'RoPE, YaRN fair 1024')['ppl'][3]
2.90 | extension_demo/eval_ppl_table.json | row(x, 'ALiBi')['ppl'][3]
2.92 | extension_demo/eval_ppl_table.json | row(x, 'RoPE')['ppl'][0]
one  | extension_demo/eval_ppl_table.json | n_seeds(x, 'NoPE')
3
32   | attention_demo/attention.json | sum(map(len, x['lengths'][0]['first_key']))
8    | attention_demo/attention.json | 1 + 1 + 2 + 4
74%  | attention_demo/attention.json | attention_to_last_8(x, 128)
1%   | attention_demo/attention.json | attention_to_last_8(x, 2048)
four | attention_demo/attention.json | x['lengths'][0]['n_windows']
one  | attention_demo/attention.json | len({x['weights_digest']})
4
0.95 | vectors_demo/eval_ppl_table.json | mean(behind_cut(x, 'NoPE, scale'))
0.45 | vectors_demo/eval_ppl_table.json | mean(behind_cut(x, 'NoPE, scale,out,norm'))
0.23 | vectors_demo/eval_ppl_table.json | mean(behind_cut(x, 'NoPE, every weight, lr 1e-3'))
1.51 | vectors_demo/eval_ppl_table.json | mean(behind_cut(x, 'NoPE'))
three | vectors_demo/eval_ppl_table.json | n_seeds(x, 'NoPE, scale')
5
0.88 to 1.38 | books/eval_ppl_table.json | span(behind_cut(x, 'NoPE, uniform scale by the fit'))
0.66 to 0.90 | books/eval_ppl_table.json | span(behind_cut(x, 'NoPE, scale'))
0.09 to 0.11 | books/eval_ppl_table.json | span(behind_cut(x, 'NoPE, scale,out,norm'))
0.06 to 0.08 | books/eval_ppl_table.json | span(behind_cut(x, 'NoPE, every weight, lr 1e-3'))
2.44 to 4.59 | books/eval_ppl_table.json | span(behind_cut(x, 'NoPE'))
3.50  | books/eval_ppl_table.json | row(x, 'RoPE, YaRN fair')['ppl'][2]
4.75  | books/eval_ppl_table.json | row(x, 'NoPE, every weight, lr 1e-3')['ppl'][2]
three | books/eval_ppl_table.json | n_seeds(x, 'NoPE, scale')
6
0.004 to 0.035 | dape_small/eval_ppl_table.json | span(dape_lead(x))
20.3 | dape_small/eval_ppl_table_head_scale.json | row(x, 'NoPE')['ppl'][2]
11.5 | dape_small/eval_ppl_table_head_scale.json | row(x, 'NoPE, head scale')['ppl'][2]
2%   | dape_small/eval_ppl_table_head_scale.json | lower_by(x, 'RoPE + YaRN')
0.1% | dape_small/eval_ppl_table_head_scale.json | max(lower_by(x, 'ALiBi'), lower_by(x, 'Kerple'))
one  | dape_small/eval_ppl_table_head_scale.json | n_seeds(x, 'NoPE')
7
100% | che_small/kerple_dape3_SEED_even_pairs.json | mean(accuracies(xs))
55%  | che_small/rope_SEED_even_pairs.json | mean(accuracies(xs))
78 ± 5%  | che_small/kerple_dape3_SEED_missing_duplicate_near.json | spread(accuracies(xs))
64 ± 2%  | che_small/rope_SEED_missing_duplicate_near.json | spread(accuracies(xs))
67 ± 17% | che_small/kerple_SEED_missing_duplicate_near.json | spread(accuracies(xs))
three | che_small/rope_SEED_even_pairs.json | len({x['settings']['seed'] for x in xs})
8
1%  | passkey_demo/SEED/nope.json | mean(keys_found(xs, 1024))
75% | passkey_demo/SEED/nope_head_1024_long_vectors_fast.json | mean(keys_found(xs, 1024))
50 to 98% | passkey_demo/SEED/nope_head_1024_long_vectors_fast.json | span(keys_found(xs, 1024))
93% | passkey_demo/SEED/nope_full_1e-3.json | mean(keys_found(xs, 1024))
24% | passkey_demo/nope.json | held_by_cut(x)
25% | passkey_demo/SEED/rope_yarn_2e-3.json | mean(keys_found(xs, 256))
98% | passkey_demo/SEED/rope.json | mean(keys_found(xs, 256))
three | passkey_demo/SEED/nope.json | len(xs)
9
0.20 to 0.26 | channel_scale/channel_scale.json | span(lead(x, CHANNEL, 'scale per head'))
0.08 to 0.12 | BOOKS | span(at_8L(xs))
one | SMALL | sum(d < 0 for d in at_8L(xs))
74% | channel_scale/recall.json | x['right']['scale per channel']['mean'][2]
61% | channel_scale/recall.json | x['right']['scale per head']['mean'][2]
57% | channel_scale/recall.json | x['right']['nothing']['mean'][2]
44% | channel_scale/recall.json | x['right']['nothing, context cut']['mean'][2]
75% | channel_scale/passkey.json | x['found']['scale per channel']['mean'][3]
58% | channel_scale/passkey.json | x['found']['scale per head, rate 0.01']['mean'][3]
0.03 to 0.07 | channel_scale/channel_scale.json | span(lead(x, 'gains of attention norms', CHANNEL))
85% | channel_scale/recall.json | x['right']['gains of attention norms']['mean'][2]
three | channel_scale/channel_scale.json | len(x['seeds'])
10
two | CPUS | one_value(map(threads, xs))
1.13 | CPUS | one_value(steps(xs, 'train', 'transformers', 'ours'))
0.74 | CPUS | one_value(steps(xs, 'scale', 'ours', 'whole step'))
5 | CPUS | one_value(x['settings']['rounds'] for x in xs)
"""),
}


# ---------------------------------------------------------------------- what is compared

@functools.cache
def read(file):
    file = file.replace('passkey_demo/1337/', 'passkey_demo/')
    return read_json(ROOT / 'results' / file)


def numbers_of(place):
    """(as printed, files, value) of each line of a place. A line without | is a heading."""
    for line in place.numbers.splitlines():
        if '|' in line:
            printed, files, expression = (part.strip() for part in line.split('|'))
            xs = [read(file.replace('SEED', seed)) for file in FILES.get(files, files).split()
                  for seed in (SEEDS if 'SEED' in file else SEEDS[:1])]
            yield printed, files, eval(expression, globals() | {'x': xs[0], 'xs': xs})


def text_of(place):
    """Its part of the page, on one line, without names that have digits."""
    page = (ROOT / place.page).read_text(encoding='utf-8')
    start = page.index(place.first)
    part = page[start:page.index(place.after, start)]
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


# ---------------------------------------------------------------------- tables of pages

# {page and JSON: what prints the table from the rows of the JSON}
PRINTED = {
    'past_L/past_L': past_table.print_table,
    'past_L/books/past_L': past_table.print_table,
    'past_L/books_40M/past_L': past_table.print_table,
    'scoreboard/small': lambda rows: study.print_table(scoreboard_table.lines(rows)),
    'scoreboard/books': lambda rows: study.print_table(scoreboard_table.lines(rows)),
    'begin/begin': lambda rows: study.print_table(rows, digits=2),
    'demo/seeds': lambda rows: study.print_table(rows, digits=2),
}


@pytest.mark.parametrize('name', PRINTED)
def test_table_of_page_is_what_its_program_prints(name, capsys):
    page = ROOT / 'results' / name.split('/')[0] / 'README.md'
    PRINTED[name](read_json(ROOT / f'results/{name}.json')['rows'])
    rows = capsys.readouterr().out.splitlines()[2:]  # without headings, which are longer on pages
    lines = page.read_text().replace('−', '-').splitlines()
    assert rows and [row for row in rows if row not in lines] == []
