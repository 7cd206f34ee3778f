"""
Tables of many runs: a row has the numbers that eval_ppl.py gives for its checkpoint, and stands
beside the paper's where it asks for them.

$ python -m pytest tests/test_table.py
"""

import dataclasses
import importlib
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT

from eval_ppl import evaluate_last, evaluate_sliding
from lib.checkpoints import load_model
from lib.errors import UserError
from lib.tokens import Windows, open_tokens
from results.table import Settings, merge_seeds, paper_rows, run_table


@pytest.fixture
def run(tiny_run, tmp_path):
    """Runs a table of rows that all read tiny_run, where they name no other. Returns its JSON."""
    def run(rows, **chosen):
        settings = dataclasses.asdict(Settings(device='cpu', dtype='float32', **chosen))
        rows = [{'init_from': f'{tiny_run}/last.pt'} | row for row in rows]
        try:
            run_table(settings | {'out_dir': str(tmp_path)}, rows)
        finally:
            torch.use_deterministic_algorithms(False)  # setup() had set it
        assert (tmp_path / 'eval_ppl_table.png').stat().st_size > 1000
        return json.loads((tmp_path / 'eval_ppl_table.json').read_text())
    return run


def test_row_shows_the_best_of_its_candidates(run, tiny_run, corpus_dir, cpu, capsys):
    result = run([{'name': 'NoPE'}, {'name': 'asked', 'paper': 'NoPE'},
                  {'name': 'grid', 'scale': [1.0, 3.0]},
                  {'name': 'pi', 'position': 'rope', 'rope_scaling': ['', 'pi:2']}],
                 lengths=[32, 128], max_windows=20)
    data = open_tokens(str(corpus_dir), 'test')

    def measure(scale, *method):
        model, _ = load_model('last', tiny_run, 'cpu', *method)
        model.head_scale = scale
        rows, _ = evaluate_sliding(model, data, [32, 128], 4, 'same', 20, 16384, cpu)
        return [(row['loss'], row['standard_error']) for row in rows]

    tried = {'NoPE': {'plain': measure(1)}, 'asked': {'plain': measure(1)},
             'grid': {'scale1': measure(1), 'scale3': measure(3)},
             'pi': {'plain': measure(1, 'rope', ''), 'pi2': measure(1, 'rope', 'pi:2')}}
    for row in result['rows']:
        names = list(tried[row['name']])
        losses, errors = np.moveaxis(np.array(list(tried[row['name']].values())), 2, 0)
        best = losses.argmin(0)
        assert list(row['losses']) == names
        np.testing.assert_allclose(list(row['losses'].values()), losses, rtol=1e-5)
        np.testing.assert_allclose(row['ppl'], np.exp(losses.min(0)), rtol=1e-5)
        np.testing.assert_allclose(row['standard_error'], errors[best, [0, 1]], rtol=1e-5)
        assert row['best'] == [names[i] for i in best]
        assert row['best_single'] == names[losses.mean(1).argmin()]
        assert row['windows'] == 20 and row['checkpoint'] == f'{tiny_run}/last.pt'
        assert row['position_method'] == ('rope' if row['name'] == 'pi' else 'none')
    assert 'position_method' not in result and result['block_size'] == 32

    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    numbers = '14.6  326.9  >10^3  >10^3'  # of NoPE in Table 2 of the paper
    assert numbers in lines['asked'] and numbers not in lines['NoPE']


def test_table_of_last_tokens(run, tiny_run, corpus_dir, cpu, capsys):
    result = run([{'name': 'asked', 'paper': 'Kerple'}, {'name': 'wide', 'scale': 2.0}],
                 protocol='last', n_samples=7, lengths=[32, 128])
    samples = Windows(str(corpus_dir), 'test', 128).fixed(7, spacing=32)
    for row, scale in zip(result['rows'], (1, 2), strict=True):
        model, _ = load_model('last', tiny_run, 'cpu')
        model.head_scale = scale
        expected = evaluate_last(model, samples, [32, 128], 32, 32, 16384, cpu)
        assert row['ppl'] == pytest.approx([one['ppl'] for one in expected], rel=1e-5)
        assert row['delta_p'] == [None, pytest.approx(expected[1]['delta_p'], rel=1e-4)]
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith('asked '))
    assert '32.1   29.1   28.1' in line and 'Delta P at 128' in out
    assert f"{result['rows'][0]['delta_p'][1]:+.2f} " in line


def test_rows_of_one_name_become_their_mean():
    of_one = {'checkpoint': '', 'weights_digest': '', 'standard_error': []}
    rows = [{'name': 'a', 'ppl': np.array([2.0, 4.0]), 'delta_p': [None, -5.0]},
            {'name': 'a', 'ppl': np.array([3.0, 8.0]), 'delta_p': [None, 7.0]},
            {'name': 'b', 'ppl': np.array([1.0, 1.0])},
            {'name': 'c', 'ppl': np.array([1.0, 1.0]), 'delta_p': [None, 1.0]},
            {'name': 'c', 'ppl': np.array([1.0, 1.0])}]
    rows = [row | of_one for row in rows]
    a, b, c = merge_seeds(rows)
    assert a['ppl'].tolist() == [2.5, 6.0] and a['runs'] == rows[:2] and b is rows[2]
    assert a['sd'].tolist() == pytest.approx([0.5 ** 0.5, 8 ** 0.5])
    assert np.isnan(a['delta_p'][0]) and a['delta_p'][1] == 1
    assert not of_one.keys() & a.keys() and 'delta_p' not in c  # one seed has none


def test_rows_without_their_files_are_left_out(run, capsys):
    untrained = {'name': 'untrained', 'init_from': 'nowhere/last.pt'}
    result = run([untrained, {'name': 'there'}, {'name': 'untuned', 'scale': 'nowhere/scale.json'}],
                 max_windows=4, lengths=[32, 64])
    out = capsys.readouterr().out
    assert [row['name'] for row in result['rows']] == ['there']
    assert 'untrained is left out: nowhere/last.pt' in out
    assert 'untuned is left out: nowhere/scale.json' in out
    with pytest.raises(UserError, match='no row'):
        run([untrained])


def test_rows_may_have_data_sets_of_their_own(run, corpus_dir, tmp_path):
    other = tmp_path / 'other'
    shutil.copytree(corpus_dir, other)
    np.fromfile(other / 'test.bin', np.uint16)[::-1].tofile(other / 'test.bin')
    small = {'max_windows': 4, 'lengths': [32, 64]}
    both = run([{'name': 'here'}, {'name': 'there', 'dataset': str(other)}], **small)
    here, there = (row['ppl'] for row in both['rows'])
    alone = run([{'name': 'alone'}], dataset=str(other), **small)
    assert there == alone['rows'][0]['ppl'] and abs(there[0] - here[0]) > 1


@pytest.mark.parametrize('key, value', [('protocol', 'position'), ('rule', 'none'), ('stride', 64),
                                        ('lengths', [0]), ('max_windows', 0)])
def test_a_mistake_is_named(run, key, value):
    with pytest.raises(UserError, match=key):
        run([{'name': 'row'}], **{'lengths': [64, 128], key: value})


@pytest.mark.parametrize('path', sorted(ROOT.glob('results/*/table.py')), ids=lambda p: p.parent.name)
def test_rows_of_every_table_have_what_a_row_may_have(path):
    module = importlib.import_module(f'results.{path.parent.name}.table')
    tables = module.TABLES.values() if hasattr(module, 'TABLES') else [module.table()]
    known = {'name', 'init_from', 'scale', 'position', 'rope_scaling', 'dataset', 'paper'}
    paper = paper_rows(getattr(module, 'protocol', 'sliding'))
    for row in (row for rows in tables for row in rows):
        assert {'name', 'init_from'} <= row.keys() <= known
        assert row.get('paper') is None or row['paper'] in paper


def test_table_of_dape_is_chosen_by_its_name(tmp_path):
    command = [sys.executable, '-m', 'results.dape_small.table', 'kernels', '--batch_tokens=0']
    one = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert one.returncode == 1 and 'batch_tokens is 0' in one.stderr.splitlines()[-1]
