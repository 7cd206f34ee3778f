"""
Tables on the pages of results/ are what their JSON gives.

$ python -m pytest tests/test_page_tables.py
"""

from statistics import mean, stdev
from types import SimpleNamespace

import pytest
from conftest import ROOT, read

from results import study
from results.past_L import table as past_table
from results.scoreboard import table as scoreboard_table
from results.table import line_of


def page_of(name):
    """The page beside a JSON, with signs as programs print them."""
    page = (ROOT / 'results' / name.split('/')[0] / 'README.md').read_text(encoding='utf-8')
    return page.replace('−', '-').replace('> 10³', '>10^3').replace('*', '')


# ---------------------------------------------------------------------- whole rows

# {page and JSON: what prints the table from the rows of the JSON}
PRINTED = {
    'past_L/past_L': past_table.print_table,
    'past_L/size_5M/past_L': past_table.print_table,
    'past_L/code_86M/past_L': past_table.print_table,
    'past_L/books_32M/past_L': past_table.print_table,
    'past_L/tokens_40M/past_L': past_table.print_table,
    'past_L/parts/past_L': past_table.print_table,
    'past_L/code_on_books/past_L': past_table.print_table,
    'past_L/mix/past_L': past_table.print_table,
    'past_L/mix_20M/past_L': past_table.print_table,
    'past_L/mix_20M_on_books/past_L': past_table.print_table,
    'past_L/mix_on_books/past_L': past_table.print_table,
    'past_L/mix_5M/past_L': past_table.print_table,
    'past_L/mix_5M_on_books/past_L': past_table.print_table,
    'past_L/books/past_L': past_table.print_table,
    'past_L/books_40M/past_L': past_table.print_table,
    'past_L/rates': study.print_table,
    'scoreboard/small': lambda rows: study.print_table(scoreboard_table.lines(rows)),
    'scoreboard/books': lambda rows: study.print_table(scoreboard_table.lines(rows)),
    'begin/begin': lambda rows: study.print_table(rows, digits=2),
    'demo/seeds': lambda rows: study.print_table(rows, digits=2),
}


@pytest.mark.parametrize('name', PRINTED)
def test_table_of_page_is_what_its_program_prints(name, capsys):
    PRINTED[name](read(ROOT / f'results/{name}.json')['rows'])
    rows = capsys.readouterr().out.splitlines()[2:]  # without headings, which are longer on pages
    lines = page_of(name).splitlines()
    assert rows and [row for row in rows if row not in lines] == []


# {row of the overview of past_L: its series}
OVERVIEW = {
    'code, 10M tokens | code | 1.05M': '.',
    'code, 40M tokens | code | 1.05M': 'tokens_40M',
    'code, 10M tokens | code | 5M': 'size_5M',
    'code, 10M tokens | books | 1.05M': 'code_on_books',
    'books, 10M tokens | books | 1.05M': 'books',
    'books, 40M tokens | books | 1.05M': 'books_40M',
    'half code, half books, 10M tokens | code | 1.05M': 'mix',
    'half code, half books, 10M tokens | books | 1.05M': 'mix_on_books',
    'half code, half books, 20M tokens | code | 1.05M': 'mix_20M',
    'half code, half books, 20M tokens | books | 1.05M': 'mix_20M_on_books',
    'half code, half books, 20M tokens | code | 5M': 'mix_5M',
    'half code, half books, 20M tokens | books | 5M': 'mix_5M_on_books',
}


def test_overview_of_past_L_has_each_series(capsys):
    rows = []
    for name, series in OVERVIEW.items():
        found = {row['reading']: row for row in
                 read(ROOT / f'results/past_L/{series}/past_L.json')['rows']
                 if row['model'] == 'conv'}
        untuned, head = found['untuned'], found['head']
        rows.append({'': name, 'seeds': len(head['seeds']), 'untuned': untuned['gain, all'],
                     'head scales': head['gain, all'], 'R': head['R']})
    study.print_table(rows, digits=2)
    printed, lines = capsys.readouterr().out.splitlines()[2:], page_of('past_L').splitlines()
    assert len(printed) == len(OVERVIEW) and [row for row in printed if row not in lines] == []


# ---------------------------------------------------------------------- cells side by side

def perplexities(result):
    """{row: its perplexities by length}, of a table that results/table.py wrote."""
    s = SimpleNamespace(lengths=result['lengths'], protocol=result['protocol'])
    lines = [line_of(row, [], s) for row in result['rows']]
    return {line['row']: [line[str(T)] for T in s.lengths] for line in lines}


def of_lists(cells, digits=3, share=1, percent=''):
    """{row: its cells}, of lists over seeds. Shares are printed in percent."""
    return {name: [f'{share * mean:.{digits}f} ± {share * sd:.{digits}f}{percent}'
                   for mean, sd in zip(cell['mean'], cell['sd'])] for name, cell in cells.items()}


def of_byte_models(result):
    """{method: at 2L and at 4L its loss, gain and own gain}."""
    cells = {}
    for row in result['rows']:
        if row['length'] > 128 and row['method'] != 'cut':
            pairs = ('mean', 'sd'), ('gain', 'gain_sd'), ('own_gain', 'own_gain_sd')
            cells[row['method']] = cells.get(row['method'], []) + [
                f'{row[key]:.3f} ± {row[sd]:.3f}' for key, sd in pairs]
    return cells


def of_gpu(result):
    """{task and model: milliseconds, tokens a second, share of the limit, memory}."""
    cells = {}
    for task, found in result['results'].items():
        for who in found['limit_seconds']:
            one, new = found[who], result['settings']['n_decode'] if task == 'decode' else 1
            ms = 1000 * one['seconds'] / new
            cells[f'{task}, {who}'] = row = [
                f'{ms:.1f} ms' if new > 1 else f'{ms:.0f} ms', f"{one['tokens_per_second']:,.0f}"]
            if new == 1:
                row += [f"{one['of_limit']:.0%}", f"{one['peak_memory'] / 1e9:.1f} GB"]
            if task == 'entropy':
                row[1] = ''
    return cells


def of_peer(result):
    """{task: our time, theirs, their time divided by ours}, for decoding in tokens a second."""
    cells = {}
    for task, found in result['results'].items():
        pair = found['ours'], found['transformers']
        cells[task] = [f"{one['tokens_per_second']:.0f} tokens/s" if task == 'decode' else
                       f"{1000 * one['seconds']:.1f} ms" for one in pair]
        cells[task].append(f"{pair[1]['times_ours']:.2f} times")
    return cells


def of_growth(result):
    """{tokens: time of a head-scale step and of a whole step, their ratio, memory of both}."""
    cells = {}
    for found in result['results']['growth']:
        ours, whole = found['ours'], found['whole step']
        cells[found['tokens']] = [
            *(f"{1000 * one['seconds']:.0f} ms" for one in (ours, whole)),
            f"{ours['seconds'] / whole['seconds']:.2f}",
            *(f"{one['peak_memory'] / 1e9:.1f} GB" for one in (ours, whole))]
    return cells


def of_time_cost(result):
    """{method: its ratio, and the paper's}."""
    return {row['method']: [f'{ratio:.2f}' for ratio in (row['ratio'], row['paper_ratio']) if ratio]
            for row in result['results']['time_cost']}


CELLS = {
    **{f'gpu/{name}_1b': of_gpu for name in ('train', 'eval', 'decode', 'entropy')},
    'gpu/growth_1b': of_growth,
    'gpu/peer_125m': of_peer,
    'gpu/time_cost_125m': of_time_cost,
    'ablation_passkey/eval_ppl_table': perplexities,
    'books/eval_ppl_table': perplexities,
    **{f'dape_small/eval_ppl_table{label}': perplexities
       for label in ('', '_bases', '_equal_tokens', '_head_scale', '_kernels')},
    'extension_demo/eval_ppl_table': perplexities,
    'vectors_demo/eval_ppl_table': perplexities,
    'demo_bytes/seeds': of_byte_models,
    'demo_bytes/seeds_epyc': of_byte_models,
    'channel_scale/channel_scale': lambda result: of_lists(result['losses']),
    'channel_scale/recall': lambda result: of_lists(result['right'], 0, 100, '%'),
}
# Rows that stand on no page. The page has each scale of the first instead, and one of several rates
# of the others.
LEFT_OUT = {
    'ablation_passkey/eval_ppl_table': {'NoPE, uniform scale (grid)'},
    'vectors_demo/eval_ppl_table': {f'NoPE, every weight, lr {rate}'
                                    for rate in ('2.5e-4', '5e-4', '2e-3')},
    'channel_scale/recall': {'scale per head, rate 0.03'},
    'gpu/time_cost_125m': {'DAPE 1x3-Kerple'},  # beside itself
}


@pytest.mark.parametrize('name', CELLS)
def test_cells_of_each_row_stand_side_by_side_on_the_page(name):
    page, rows = page_of(name), CELLS[name](read(ROOT / f'results/{name}.json'))
    missing = {row for row, cells in rows.items()
               if f"| {' | '.join(cells)} |".replace('|  |', '| |') not in page}
    assert rows and missing == LEFT_OUT.get(name, set())


# ---------------------------------------------------------------------- a file for each cell

SEEDS = 1337, 1338, 1339
CHE = {'DAPE 1×3-Kerple': 'kerple_dape3', 'Kerple': 'kerple', 'RoPE': 'rope',
       'RoPE at random positions': 'rope_random'}
PASSKEY = {
    'NoPE': 'nope',
    'NoPE, uniform scale 1.2': 'nope_uniform_1.2',
    'NoPE, head scales, rate 0.01': 'nope_head_1024_long_lr0.01',
    'NoPE, head scales, rate 0.003': 'nope_head_1024_long_lr0.003',
    'NoPE, small vectors, usual rates': 'nope_head_1024_long_vectors_fast',
    'NoPE, every weight, rate 1e-3': 'nope_full_1e-3',
    'RoPE': 'rope',
    'RoPE with YaRN, every weight, rate 2e-3': 'rope_yarn_2e-3',
    'RoPE with PI, every weight, rate 2e-3': 'rope_pi_2e-3',
}
PASSKEY_ONE_SEED = {
    'NoPE, head scales, on the training mixture, rate 0.1, 100 steps': 'nope_head_1024',
    'NoPE, head scales, rate 0.05': 'nope_head_1024_long',
    'NoPE, small vectors, a tenth of the usual rates': 'nope_head_1024_long_vectors',
}


def rows_of_che():
    """{row: steps, accuracies by length, accuracy of the paper}."""
    rows = {}
    for task in ('even_pairs', 'missing_duplicate'):
        for name, method in CHE.items():
            near, far = ([read(ROOT / f'results/che_small/{method}_{seed}_{task}{kind}.json')
                          for seed in SEEDS] for kind in ('_near', ''))
            shares = [[100 * x['tasks'][task][part] for x in xs] for xs, part in
                      ((near, 'inside'), (near, 'outside'), (far, 'outside'))]
            cells = [f'{mean(each):.1f} ± {stdev(each):.1f}' for each in shares]
            rows[f'{task}, {name}'] = [far[0]['settings']['max_iters'], *cells,
                                       far[0]['tasks'][task].get('paper') or '–']
    return rows


def found(file, folder=''):
    """The percentage of passkeys found at each of the four lengths of the page."""
    accuracy = read(ROOT / f'results/passkey_demo/{folder}{file}.json')['accuracy']
    return [100 * mean(row) for row in accuracy[:4]]


def counted():
    """The percentage of keys whose line starts in the last L tokens, at the same lengths."""
    answers = read(ROOT / 'results/passkey_demo/nope.json')['answers']
    rows = [dict(zip(answers['columns'], row)) for row in answers['rows']]
    return [100 * mean(row['key_at'] >= row['tokens'] - 256 for row in rows
                       if row['length'] == length) for length in (256, 512, 768, 1024)]


def rows_of_passkey():
    """{row: keys found by length}, with those of each seed in brackets."""
    rows = {name: [f'{each:.0f}%' for each in found(file)]
            for name, file in PASSKEY_ONE_SEED.items()}
    rows['share of keys whose line starts in the last L tokens'] = [
        f'{each:.0f}%' for each in counted()]
    for name, file in PASSKEY.items():
        by_length = zip(*(found(file, folder) for folder in ('', '1338/', '1339/')))
        rows[name] = [f"{mean(each):.0f}% ({', '.join(f'{one:.0f}' for one in each)})"
                      for each in by_length]
    return rows


@pytest.mark.parametrize(('page', 'rows_of'),
                         [('che_small', rows_of_che), ('passkey_demo', rows_of_passkey)])
def test_a_row_is_what_the_files_of_its_seeds_give(page, rows_of):
    rows, lines = rows_of(), page_of(page).splitlines()
    assert [name for name, cells in rows.items()
            if f"| {name} | {' | '.join(map(str, cells))} |" not in lines] == []
