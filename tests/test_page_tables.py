"""
Tables on the pages of results/ are what their JSON gives.

$ python -m pytest tests/test_page_tables.py
"""

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
    'past_L/books/past_L': past_table.print_table,
    'past_L/books_40M/past_L': past_table.print_table,
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


CELLS = {
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
}


@pytest.mark.parametrize('name', CELLS)
def test_cells_of_each_row_stand_side_by_side_on_the_page(name):
    page, rows = page_of(name), CELLS[name](read(ROOT / f'results/{name}.json'))
    missing = {row for row, cells in rows.items() if f"| {' | '.join(cells)} |" not in page}
    assert rows and missing == LEFT_OUT.get(name, set())
