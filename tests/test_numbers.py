"""
Every number of the first page's results is what a JSON in results/ gives.

$ python -m pytest tests/test_numbers.py

A place is a part of a page, and the list of its numbers in their order: as the page prints each
one, the JSON, and a formula of what that JSON holds. The printed text says how the value is
rounded: '1.42' has two decimals, '37%' is 100 times a share without decimals. To cover another part
of a page, add a place.
"""

import copy
import functools
import itertools
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import pytest

ROOT = Path(__file__).resolve().parents[1]
WORDS = {'one': 1, 'two': 2, 'three': 3, 'four': 4, 'five': 5}
# What has digits and is no number: links, the numbers of a list's items, lengths as multiples of
# L, kernels such as 1×3, sizes of models such as 5M.
NAMES = r'\]\([^)]*\)|^\d+\. |\b\d+L\b|\b\d×\d|\b[\d.]+M\b'
# A number is written in digits, or it is a word before one of the things that are counted.
COUNTED = r'(?= (?:seeds?|windows|processors|CPU)\b)'
NUMBER = rf"[−-]?\d[\d,]*(?:\.\d+)?%?|\b(?:{'|'.join(WORDS)}){COUNTED}"


@dataclass
class Place:
    page: str
    first: str      # the part begins with this text
    after: str      # and ends before this one
    numbers: list   # (as printed, JSON or JSONs in results/, formula), in the order of the page


# ---------------------------------------------------------------------- formulas

SEEDS = '1337', '1338', '1339'


def spread(values):
    """Mean and standard deviation."""
    return mean(values), stdev(values)


def span(values):
    """Lowest and highest."""
    return min(values), max(values)


def demo_losses(found, method, T):
    """The loss of each seed of results/demo."""
    if method not in ('NoPE', 'cut'):
        method = f'{method} {T}'
    return [run['methods'][method][str(T)]['loss'] for run in found['seeds'].values()]


def demo(printed, method, T):
    """A cell of the demo's table."""
    return printed, 'demo/seeds.json', lambda found: spread(demo_losses(found, method, T))


def heads_over_uniform(*files):
    """By how much head scales beat the uniform scale at 4L, in the seeds of all files."""
    both = [zip(demo_losses(found, 'uniform', 512), demo_losses(found, 'head', 512))
            for found in files]
    return span([uniform - head for uniform, head in itertools.chain(*both)])


def row(table, name):
    """The row of that name in a table of perplexities."""
    found, = [row for row in table['rows'] if row['name'] == name]
    return found


def ppl(name, i):
    """A formula: the perplexity of a row at the i-th length."""
    return lambda table: row(table, name)['ppl'][i]


def behind_cut(name, formula=span):
    """
    A formula: by how many nats a row is at 4L behind the untuned NoPE with its context cut to L,
    which reads at any length what it reads at L. Over seeds.
    """
    def losses(table):
        pairs = zip(row(table, name)['runs'], row(table, 'NoPE')['runs'], strict=True)
        return formula([math.log(run['ppl'][2] / untuned['ppl'][0]) for run, untuned in pairs])
    return losses


def n_seeds(name):
    """A formula: the number of seeds of a row."""
    return lambda table: len(row(table, name).get('runs', ['the row itself']))


def attention_to_last_8(length):
    """A formula: a head's share, over the queries of the second half. Bins: 0, 1, 2-3, 4-7 ..."""
    def share(found):
        at, = [one for one in found['lengths'] if one['length'] == length]
        return sum(at['by_distance'][:4])
    return share


def dape_lead(table):
    """By how much DAPE 1x3 on Kerple leads the best other row, from 2L on."""
    best = row(table, 'DAPE 1x3-Kerple')
    others = [row['ppl'] for row in table['rows'] if row is not best]
    return span([min(other[i] for other in others) - best['ppl'][i]
                 for i in range(1, len(best['ppl']))])


def lower_by(name):
    """A formula: the share by which head scales lower the perplexity of a row at 4L."""
    def share(table):
        return 1 - row(table, f'{name}, head scale')['ppl'][2] / row(table, name)['ppl'][2]
    return share


def che_files(method, task):
    return [f'che_small/{method}_{seed}_{task}.json' for seed in SEEDS]


def che(printed, method, task):
    """Accuracy past the length of training, a file for each seed."""
    def accuracies(*found):
        shares = [one['tasks'][task.removesuffix('_near')]['outside'] for one in found]
        return spread(shares) if '±' in printed else mean(shares)
    return printed, che_files(method, task), accuracies


def passkeys(printed, name, length, formula=mean):
    """Keys that passkey.py found, of three seeds."""
    def found_at(*runs):
        return formula([mean(run['accuracy'][run['lengths'].index(length)]) for run in runs])
    return printed, [f'passkey_demo/{seed}{name}.json' for seed in ('', '1338/', '1339/')], found_at


def held_by_cut(found):
    """The share of the keys at 4L whose line begins in the last L tokens."""
    rows = [dict(zip(found['answers']['columns'], row)) for row in found['answers']['rows']]
    return mean(row['key_at'] >= row['tokens'] - 256 for row in rows if row['length'] == 1024)


def lead(better, worse, i=2):
    """A formula: the span over seeds of what `better` has less loss than `worse`."""
    def leads(found):
        pairs = zip(found['losses'][better]['each'], found['losses'][worse]['each'])
        return span([other[i] - one[i] for one, other in pairs])
    return leads


def board(size, *rows):
    """The files of rows of the scoreboard, three seeds of each."""
    return [f'scoreboard/{size}/{row}_{seed}.json' for row in rows for seed in SEEDS]


def first_over_second(*found):
    """By how much less loss the first row has at 8L than the second, in each seed."""
    at_8L = [one['text'][2]['loss'] for one in found]
    return [second - first for first, second in zip(at_8L[:3], at_8L[3:], strict=True)]


def recall(name):
    """A formula: the mean share of recall's answers that are right at 4L."""
    return lambda found: found['right'][name]['mean'][2]


def times_as_fast(*found):
    """Training steps of ours beside those of transformers."""
    return span([one['results']['train']['transformers']['seconds']
                 / one['results']['train']['ours']['seconds'] for one in found])


def of_a_whole_step(*found):
    """The time of a head-scale step beside that of a whole one, where it was measured."""
    steps = [one['results']['scale'] for one in found if 'scale' in one['results']]
    return span([step['ours']['seconds'] / step['whole step']['seconds'] for step in steps])


def threads(found):
    return int(re.search(r'(\d+) threads', found['device'])[1])


def one_value(values):
    """The value that all have in common."""
    value, = set(values)
    return value


# ---------------------------------------------------------------------- the numbers

BOTH = ['demo/seeds.json', 'demo/seeds_epyc.json']
EXTENSION = 'extension_demo/eval_ppl_table.json'
ATTENTION = 'attention_demo/attention.json'
VECTORS = 'vectors_demo/eval_ppl_table.json'
BOOKS = 'books/eval_ppl_table.json'
DAPE = 'dape_small/eval_ppl_table.json'
HEADS_ON = 'dape_small/eval_ppl_table_head_scale.json'
CHANNELS = 'channel_scale/channel_scale.json'
RECALL = 'channel_scale/recall.json'
PASSKEYS = 'channel_scale/passkey.json'
VECTORS_FAST = 'nope_head_1024_long_vectors_fast'
BENCH = ['bench/cpu_sdpa.json']

PLACES = {
    'the table': Place('README.md', '| nats per byte', '[More]', [
        ('128', 'demo/report.json', lambda report: report['block_size']),
        demo('1.364 ± 0.015', 'NoPE', 128),
        demo('1.986 ± 0.058', 'NoPE', 256),
        demo('2.882 ± 0.127', 'NoPE', 512),
        demo('1.623 ± 0.034', 'uniform', 256),
        demo('2.343 ± 0.049', 'uniform', 512),
        demo('1.568 ± 0.014', 'head', 256),
        demo('2.236 ± 0.031', 'head', 512),
        demo('1.425 ± 0.016', 'vectors', 256),
        demo('1.753 ± 0.027', 'vectors', 512),
        demo('1.366 ± 0.014', 'cut', 256),
        demo('1.424 ± 0.017', 'cut', 512),
        ('5', BOTH, lambda *found: min(sum(one['in_order'].values()) for one in found)),
        ('two', BOTH, lambda *found: sum(all(one['in_order'].values()) for one in found)),
        ('0.057 to 0.207', BOTH, heads_over_uniform),
    ]),
    'ten results': Place('README.md', '## Ten results', '[All studies]', [
        # 1
        ('2.88', 'demo/seeds.json', lambda found: mean(demo_losses(found, 'NoPE', 512))),
        ('1.75', 'demo/seeds.json', lambda found: mean(demo_losses(found, 'vectors', 512))),
        ('1.42', 'demo/seeds.json', lambda found: mean(demo_losses(found, 'cut', 512))),
        ('five', 'demo/seeds.json', lambda found: len(found['seeds'])),
        ('1.47', 'demo/report.json', lambda report: report['entropy_slope_past_L']),
        ('0.69', 'demo/report.json', lambda report: report['entropy_slope_before_L']),
        ('one', 'demo/report.json', lambda report: len({report['seeds']['train']})),
        # 2
        ('28', EXTENSION, ppl('NoPE', 3)),
        ('32', EXTENSION, ppl('RoPE', 3)),
        ('15', EXTENSION, ppl('NoPE, head scale 1024', 3)),
        ('4.5', EXTENSION, ppl('RoPE, PI fair 1024', 3)),
        ('2.98', EXTENSION, ppl('RoPE, YaRN fair 1024', 3)),
        ('2.90', EXTENSION, ppl('ALiBi', 3)),
        ('2.92', EXTENSION, ppl('RoPE', 0)),
        ('one', EXTENSION, n_seeds('NoPE')),
        # 3
        ('32', ATTENTION, lambda found: sum(map(len, found['lengths'][0]['first_key']))),
        ('8', ATTENTION, lambda found: 1 + 1 + 2 + 4),  # distances in the first four bins
        ('74%', ATTENTION, attention_to_last_8(128)),
        ('1%', ATTENTION, attention_to_last_8(2048)),
        ('four', ATTENTION, lambda found: found['lengths'][0]['n_windows']),
        ('one', ATTENTION, lambda found: len({found['weights_digest']})),
        # 4
        ('0.95', VECTORS, behind_cut('NoPE, scale', mean)),
        ('0.45', VECTORS, behind_cut('NoPE, scale,out,norm', mean)),
        ('0.23', VECTORS, behind_cut('NoPE, every weight, lr 1e-3', mean)),
        ('1.51', VECTORS, behind_cut('NoPE', mean)),
        ('three', VECTORS, n_seeds('NoPE, scale')),
        # 5
        ('0.88 to 1.38', BOOKS, behind_cut('NoPE, uniform scale by the fit')),
        ('0.66 to 0.90', BOOKS, behind_cut('NoPE, scale')),
        ('0.09 to 0.11', BOOKS, behind_cut('NoPE, scale,out,norm')),
        ('0.06 to 0.08', BOOKS, behind_cut('NoPE, every weight, lr 1e-3')),
        ('2.44 to 4.59', BOOKS, behind_cut('NoPE')),
        ('3.50', BOOKS, ppl('RoPE, YaRN fair', 2)),
        ('4.75', BOOKS, ppl('NoPE, every weight, lr 1e-3', 2)),
        ('three', BOOKS, n_seeds('NoPE, scale')),
        # 6
        ('0.004 to 0.035', DAPE, dape_lead),
        ('20.3', HEADS_ON, ppl('NoPE', 2)),
        ('11.5', HEADS_ON, ppl('NoPE, head scale', 2)),
        ('2%', HEADS_ON, lower_by('RoPE + YaRN')),
        ('0.1%', HEADS_ON, lambda table: max(lower_by('ALiBi')(table), lower_by('Kerple')(table))),
        ('one', HEADS_ON, n_seeds('NoPE')),
        # 7
        che('100%', 'kerple_dape3', 'even_pairs'),
        che('55%', 'rope', 'even_pairs'),
        che('78 ± 5%', 'kerple_dape3', 'missing_duplicate_near'),
        che('64 ± 2%', 'rope', 'missing_duplicate_near'),
        che('67 ± 17%', 'kerple', 'missing_duplicate_near'),
        ('three', che_files('rope', 'even_pairs'),
         lambda *found: len({one['settings']['seed'] for one in found})),
        # 8
        passkeys('1%', 'nope', 1024),
        passkeys('75%', VECTORS_FAST, 1024),
        passkeys('50 to 98%', VECTORS_FAST, 1024, span),
        passkeys('93%', 'nope_full_1e-3', 1024),
        ('24%', 'passkey_demo/nope.json', held_by_cut),
        passkeys('25%', 'rope_yarn_2e-3', 256),
        passkeys('98%', 'rope', 256),
        passkeys('three', 'nope', 256, len),
        # 9
        ('0.20 to 0.26', CHANNELS, lead('scale per channel', 'scale per head')),
        ('0.08 to 0.12', board('books', 'channel', 'head'), lambda *f: span(first_over_second(*f))),
        ('one', board('small', 'channel', 'head'),
         lambda *found: sum(lead < 0 for lead in first_over_second(*found))),
        ('74%', RECALL, recall('scale per channel')),
        ('61%', RECALL, recall('scale per head')),
        ('57%', RECALL, recall('nothing')),
        ('44%', RECALL, recall('nothing, context cut')),
        ('75%', PASSKEYS, lambda found: found['found']['scale per channel']['mean'][3]),
        ('58%', PASSKEYS, lambda found: found['found']['scale per head, rate 0.01']['mean'][3]),
        ('0.03 to 0.07', CHANNELS, lead('gains of attention norms', 'scale per channel')),
        ('85%', RECALL, recall('gains of attention norms')),
        ('three', CHANNELS, lambda found: len(found['seeds'])),
        # 10
        ('two', BENCH, lambda *found: one_value(threads(one) for one in found)),
        ('1.13', BENCH, times_as_fast),
        ('0.74', BENCH, of_a_whole_step),
        ('5', BENCH, lambda *found: one_value(one['settings']['rounds'] for one in found)),
    ]),
}


# ---------------------------------------------------------------------- what is compared

@functools.cache
def read(file):
    return json.loads((ROOT / 'results' / file).read_text(encoding='utf-8'))


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


def faults(place, text, read=read):
    """What is wrong with the numbers of a text: one line for each."""
    at, found = 0, []
    for printed, files, formula in place.numbers:
        ends = COUNTED if printed in WORDS else r'(?![\d%]|[.,]\d)'
        there = re.compile(rf'(?<![\w.,]){re.escape(printed)}{ends}').search(text, at)
        if there is None:
            found.append(f'{printed} is not there, or not in this order')
            continue
        found += [f'{number} has no entry' for number in re.findall(NUMBER, text[at:there.start()])]
        at = there.end()

        files = [files] if isinstance(files, str) else files
        values = formula(*[read(file) for file in files])
        numbers = re.findall(NUMBER, printed) or [printed]
        values = values if len(numbers) > 1 else [values]
        is_share = printed.endswith('%')
        for number, value in zip(numbers, values, strict=True):
            value = as_printed(value, number, is_share)
            if value != number:
                found.append(f"{printed}: {', '.join(files)} gives {value}, not {number}")
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


def test_a_changed_json_is_a_fault():
    place, changed = PLACES['the table'], copy.deepcopy(read('demo/seeds.json'))
    changed['seeds']['1339']['methods']['vectors 256']['256']['loss'] += 0.01

    def read_changed(file):
        return changed if file == 'demo/seeds.json' else read(file)

    assert faults(place, text_of(place), read_changed) == [
        '1.425 ± 0.016: demo/seeds.json gives 1.427, not 1.425',
        '1.425 ± 0.016: demo/seeds.json gives 0.020, not 0.016']
