"""
Tables of many runs. A row has the numbers that eval_ppl.py gives for its checkpoint, and those of
the paper next to them if it asks for them.

$ python -m pytest tests/test_table.py
"""

import dataclasses
import importlib

import numpy as np
import pytest
from conftest import ROOT, as_run, as_stage, near, read, refuses, stage
from test_eval_ppl import evaluate_sliding

from eval_ppl import tail_tokens
from lib.checkpoints import load_model
from lib.tokenizers import get_tokenizer
from lib.tokens import open_tokens, write_corpus
from results.table import Settings, merge_seeds, paper_rows, run_table, tuning_tokens


@pytest.fixture
def run(tiny_run, tmp_path):
    """Run a table; its rows read tiny_run where they name no other. Returns the rows written."""
    def run(*rows, **chosen):
        settings = {'device': 'cpu', 'dtype': 'float32', 'lengths': [32, 128]} | chosen
        settings = dataclasses.asdict(Settings(**settings)) | {'out_dir': str(tmp_path)}
        with as_stage('table', []):
            run_table(settings, [{'init_from': f'{tiny_run}/last.pt'} | row for row in rows])
        assert (tmp_path / 'eval_ppl_table.png').stat().st_size > 1000
        return read(tmp_path / 'eval_ppl_table.json')['rows']

    return run


@pytest.mark.slow
def test_two_ranks_write_the_table_of_one(run, tiny_run, tmp_path):
    row, chosen = {'name': 'NoPE'}, {'max_windows': 13, 'lengths': [32, 128]}
    one, two = run(row, **chosen), tmp_path / 'two'
    settings = dataclasses.asdict(Settings(device='cpu', dtype='float32', **chosen))
    (tmp_path / 'program.py').write_text(
        f'import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom results.table import run_table\n'
        f"run_table({settings | {'out_dir': str(two)}},"
        f" [{row | {'init_from': f'{tiny_run}/last.pt'}}])\n")
    stage(tmp_path / 'program', ranks=2)
    for key in 'ppl', 'cut_loss':
        near(read(two / 'eval_ppl_table.json')['rows'][0][key][1], one[0][key][1], rtol=1e-5)


def test_row_shows_the_best_of_its_candidates(run, tiny_run, corpus_dir, cpu, capsys):
    data = open_tokens(str(corpus_dir), 'test')

    def measured(scale, *method):
        model, _ = load_model('last', tiny_run, 'cpu', *method)
        model.head_scale = scale
        return evaluate_sliding(model, cpu, data, [32, 128])[0]

    expected = {'asked': {'scale1': measured(1), 'scale3': measured(3)},
                'pi': {'rope': measured(1, 'rope', ''), 'rope_pi2': measured(1, 'rope', 'pi:2')}}
    rows = run({'name': 'asked', 'scale': [1.0, 3.0], 'paper': 'NoPE'},
               {'name': 'pi', 'position': 'rope', 'rope_scaling': ['', 'pi:2']}, max_windows=20)
    for row, candidates in zip(rows, expected.values(), strict=True):
        losses = {name: [at['loss'] for at in found] for name, found in candidates.items()}
        near(row['losses'], losses, rtol=1e-5)
        assert row['best'] == [min(losses, key=lambda name: losses[name][at]) for at in (0, 1)]
        best = [candidates[name][at] for at, name in enumerate(row['best'])]
        for key in 'ppl', 'standard_error':
            near(row[key], [at[key] for at in best], rtol=1e-5)
        cut = min(found[1]['cut_loss'] for found in candidates.values())
        near([row['cut_loss'][1], row['gain'][1]], [cut, cut - best[1]['loss']], atol=1e-4)
        assert row['best_single'] == min(losses, key=lambda name: sum(losses[name]))
        assert row['windows'] == 20 and row['checkpoint'] == f'{tiny_run}/last.pt'
    out = ' '.join(capsys.readouterr().out.split())
    assert 'gain at 128' in out and f"{rows[0]['gain'][1]:+.3f}" in out
    assert out.count('14.6 326.9 >10^3 >10^3') == 1  # the paper's, only where asked for


def test_table_of_tails(run, tiny, windows, cpu, capsys):
    rows = run({'name': 'asked', 'paper': 'Kerple'}, {'name': 'wide', 'scale': 2.0},
               protocol='tail', n_samples=7)
    model, _ = tiny
    one = as_run(model, cpu, samples=windows(7, 128, 32).numpy(), tail=32, n_samples=7,
                 batch_tokens=16384)
    for row, scale in zip(rows, (1, 2)):
        model.head_scale = scale
        short, long = tail_tokens(one, [32, 128])['rows']
        near([*row['ppl'], row['delta_p'][1]], [short['ppl'], long['ppl'], long['delta_p']],
             rtol=1e-4)
        assert row['delta_p'][0] is None
    out = capsys.readouterr().out
    assert '32.1 29.1 28.1' in ' '.join(out.split()) and f"{rows[0]['delta_p'][1]:+.2f}" in out


def test_rows_of_one_name_become_their_mean():
    grid = {'name': 'a', 'checkpoint': '', 'weights_digest': '', 'standard_error': [],
            'ppl': np.array([1.0, 1.0])}
    first, second = (grid | {'ppl': np.array([2.0, last]), 'delta_p': [None, last - 5],
                             'gain': np.array([np.nan, last])} for last in (4.0, 8.0))
    merged, alone = merge_seeds([first, second, grid | {'name': 'b'}])
    assert merged['ppl'].tolist() == [2, 6] and merged['runs'] == [first, second]
    assert merged['delta_p'][1] == 1 and 'standard_error' not in merged and 'sd' not in alone
    found = merged['sd'][1], merged['gain'][1], merged['gain_sd'][1]
    near(found, (8 ** 0.5, 6, 8 ** 0.5), atol=1e-9)
    assert not {'delta_p', 'gain'} & merge_seeds([first, grid])[0].keys()


def test_rows_without_their_files_are_left_out(run, capsys):
    untrained = {'name': 'untrained', 'init_from': 'nowhere/last.pt'}
    rows = run(untrained, {'name': 'there'}, {'name': 'untuned', 'scale': 'nowhere/scale.json'})
    out = capsys.readouterr().out
    assert [row['name'] for row in rows] == ['there']
    assert 'nowhere/last.pt' in out and 'nowhere/scale.json' in out
    refuses('no row', run, untrained)


def test_rows_may_have_data_sets_of_their_own(run, tmp_path):
    other = str(tmp_path / 'other')
    write_corpus(other, get_tokenizer('bytes'), {'test': ['0123456789' * 100]})
    here, there = run({'name': 'here'}, {'name': 'there', 'dataset': other})
    alone, = run({'name': 'alone'}, dataset=other)
    assert here['ppl'] != there['ppl'] == alone['ppl']


def test_a_row_says_on_how_many_tokens_it_was_tuned(tmp_path):
    made = {'init_from': 'x.pt', 'batch_size': 4, 'block_size': 64}
    assert tuning_tokens({'step': 7, 'settings': made}, None) == 7 * 4 * 64
    assert tuning_tokens({'step': 7, 'settings': made | {'init_from': 'scratch'}}, 1.2) == 0
    (tmp_path / 's.json').write_text('{"tuning_tokens": 99}')
    assert tuning_tokens({'step': 7, 'settings': made}, str(tmp_path / 's.json')) == 99


def asked(rows):
    """What each row of a table reads."""
    return [[one.get(key) for key in ('name', 'init_from', 'scale', 'rope_scaling')]
            for row in rows for one in row.get('runs', [row])]


@pytest.mark.parametrize('study', ['ablation_passkey', 'books', 'dape_small', 'extension_demo',
                                   'vectors_demo'])
def test_stored_rows_read_what_the_program_names(study):
    module = importlib.import_module(f'results.{study}.table')
    tables = getattr(module, 'TABLES', None) or {'': module.table()}
    for name, rows in tables.items():
        path = f'eval_ppl_table_{name}.json' if name not in ('', 'small') else 'eval_ppl_table.json'
        assert asked(read(ROOT / f'results/{study}/{path}')['rows']) == asked(rows)


@pytest.mark.parametrize('study', [path.parent.name for path in ROOT.glob('results/*/table.py')
                                   if 'run_table' in path.read_text()])
def test_paper_has_the_rows_that_are_to_stand_beside_ours(study):
    module = importlib.import_module(f'results.{study}.table')
    tables = module.TABLES.values() if hasattr(module, 'TABLES') else [module.table()]
    wanted = {row.get('paper') for rows in tables for row in rows} - {None}
    assert wanted <= paper_rows(getattr(module, 'protocol', 'sliding')).keys()
