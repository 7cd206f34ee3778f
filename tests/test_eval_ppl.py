"""
Perplexity: which tokens are scored in which context, counted by hand, and their losses against a second transformer.

$ python -m pytest tests/test_eval_ppl.py
"""

import base64
import json
import math

import numpy as np
import pytest
import torch
from conftest import ROOT, mistake, plain_losses, random_model, scale_set, stage

import checkpoint
import eval_ppl
from corpus import TokenFile, Windows, documents, get_tokenizer, open_tokens, write_corpus
from eval_ppl import evaluate_sliding, score_windows, sliding_windows
from runtime import Progress


def scored(windows):
    """{target position: its context in tokens, itself left out} over the windows; a position twice is an error."""
    found = {}
    for lo, hi, n in windows:
        for target in range(hi - n, hi):
            assert target not in found, f'{target} is scored twice'
            found[target] = target - lo
    return found


# ----------------------------------------------------------------------------- which tokens

def test_paper_windows_end_at_length_and_every_stride_before_the_end():
    # tokens 100 ... 119: ends 8, 12, 16 of the document; 20 is its end, which "while e < n" leaves out
    assert sliding_windows(100, 120, 8, None, 4, 'paper') == [(100, 108, 4), (104, 112, 4), (108, 116, 4)]
    assert sliding_windows(100, 121, 8, None, 4, 'paper') [-1] == (112, 120, 4)


def test_same_windows_end_where_the_longest_ends():
    # two lengths, 8 and 16, on tokens 0 ... 25: ends 16, 20, 24 for both
    assert sliding_windows(0, 26, 16, 16, 4, 'same') == [(0, 16, 4), (4, 20, 4), (8, 24, 4)]
    assert sliding_windows(0, 26, 8, 16, 4, 'same') == [(8, 16, 4), (12, 20, 4), (16, 24, 4)]


def test_classic_windows_score_all_of_the_first_window_and_the_tail():
    assert sliding_windows(50, 71, 8, None, 5, 'classic') == [(50, 58, 7), (55, 63, 5), (60, 68, 5), (63, 71, 3)]
    assert sliding_windows(50, 55, 8, None, 5, 'classic') == [(50, 55, 4)]  # shorter than a window


CASES = [(n, length, stride) for n in [0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 40, 63] for length, stride in
         [(2, 1), (4, 1), (4, 3), (8, 4), (8, 7), (16, 5)]]


def test_classic_scores_each_target_but_the_first_once_in_as_much_context_as_it_can():
    for n, length, stride in CASES:
        windows = sliding_windows(30, 30 + n, length, None, stride, 'classic')
        found = scored(windows)
        assert sorted(found) == list(range(31, 30 + n))
        assert all(30 <= lo and hi - lo == min(n, length) for lo, hi, _ in windows)
        assert all(found[t] >= min(t - 30, length - stride) for t in found)


def test_same_scores_the_same_targets_at_every_length():
    for n, longest, stride in CASES:
        lengths = [length for length in (2, 3, 4, 8, 16) if stride < length <= longest]
        found = {length: scored(sliding_windows(30, 30 + n, length, longest, stride, 'same')) for length in lengths}
        for length in lengths:
            assert found[length].keys() == found[longest].keys()
            assert all(length - stride <= context < length for context in found[length].values())


def test_paper_scores_what_its_description_says():
    for n, length, stride in CASES:
        expected, e = [], length
        while e < n:
            expected.append((30 + e - length, 30 + e, stride))
            e += stride
        assert sliding_windows(30, 30 + n, length, None, stride, 'paper') == expected
        if n <= length:
            assert expected == []


def test_document_no_longer_than_the_longest_window_contributes_nothing():
    for n in range(17):
        assert sliding_windows(0, n, 8, 16, 4, 'same') == []
    assert len(sliding_windows(0, 17, 8, 16, 4, 'same')) == 1


def test_an_unknown_rule_is_refused_by_name():
    with pytest.raises(ValueError, match="'published'"):
        sliding_windows(0, 26, 8, 16, 4, 'published')


# ----------------------------------------------------------------------------- their losses

def plain_sums(model, tokens, windows):
    """One window at a time, all logits in float64."""
    sums = []
    for lo, hi, n in windows:
        window = torch.from_numpy(tokens[lo:hi].astype(np.int64))[None]
        sums.append(plain_losses(model, window)[0, -n:].sum().item())
    return sums


@pytest.mark.parametrize('batch_tokens', [1, 40, 10_000])
@pytest.mark.parametrize('position', ['none', 'rope'])
def test_scores_equal_a_plain_computation_one_window_at_a_time(cpu, position, batch_tokens):
    model = random_model(position=position)
    tokens = np.random.default_rng(0).integers(61, size=200).astype(np.uint16)
    windows = [w for start, end in [(0, 90), (91, 100), (110, 200)] for length in (12, 30)
               for w in sliding_windows(start, end, length, None, 7, 'classic')]
    assert len({(hi - lo, n) for lo, hi, n in windows}) > 4  # of several shapes, some in turn
    sums = score_windows(model, tokens, windows, batch_tokens, cpu, Progress(1, '', enabled=False))
    np.testing.assert_allclose(sums, plain_sums(model, tokens, windows), rtol=1e-5)


def test_windows_of_T_tokens_are_read_with_the_scales_for_T(cpu):
    model, tokens = random_model(), np.random.default_rng(0).integers(61, size=200).astype(np.uint16)
    windows = sliding_windows(0, 200, 64, 64, 7, 'same')

    def sums():
        return score_windows(model, tokens, windows, 10_000, cpu, Progress(1, '', enabled=False))

    model.head_scale = 1.7
    expected, scales = sums(), {name: p.clone() for name, p in model.named_parameters() if name.endswith('head_scale')}
    model.sets = {32: {name: p / 1.7 for name, p in scales.items()}, 64: scales}
    assert np.array_equal(sums(), expected)


@pytest.mark.parametrize('rule, expected', [  # (length, documents, windows, scored tokens), stride 10
    # ends 64, 74, 84, 94 | 64
    ('same', [(16, 2, 5, 50), (64, 2, 5, 50)]),
    # at 16: 16 ... 96 | none | 16, 26, 36 | 16 ... 56 | 16 ... 56;  at 64 as above
    ('paper', [(16, 4, 9 + 3 + 5 + 5, 220), (64, 2, 5, 50)]),
    # all but the first token of each of the five; at 16: 16 ... 96, 100 | 12 | 16 ... 36, 40 | 16 ... 56, 65 | ... 64
    ('classic', [(16, 5, 10 + 1 + 4 + 6 + 6, 276), (64, 5, 5 + 1 + 1 + 2 + 1, 276)]),
])
def test_documents_windows_and_scored_tokens_are_counted_right(cpu, rule, expected):
    sizes = [100, 12, 40, 65, 64]
    starts = np.cumsum([0] + [n + 1 for n in sizes])  # each is followed by end-of-text
    data = TokenFile(np.arange(starts[-1]) % 61, starts[:-1], {}, {})
    assert [end - start for start, end in documents(data)] == sizes
    rows = evaluate_sliding(random_model(), data, [16, 64], 10, rule, 1000, 500, cpu)
    assert [(r['length'], r['documents'], r['windows'], r['scored_tokens']) for r in rows] == expected
    assert all(r['ppl'] == pytest.approx(math.exp(r['loss'])) for r in rows)


@pytest.mark.parametrize('rule', ['same', 'paper'])
def test_loss_is_the_mean_over_scored_tokens_of_windows_spread_evenly_or_the_first(cpu, corpus_dir, rule):
    model, data = random_model(vocab_size=257), open_tokens(str(corpus_dir), 'test')
    capped = evaluate_sliding(model, data, [24, 40], 9, rule, 12, 500, cpu)
    for row, length in zip(capped, (24, 40), strict=True):
        first = 40 if rule == 'same' else length
        windows = [(start + e - length, start + e, 9) for start, end in documents(data)
                   for e in range(first, end - start, 9)]
        windows = [windows[len(windows) * i // 12] for i in range(12)] if rule == 'same' else windows[:12]
        assert (row['windows'], row['scored_tokens']) == (12, 108)
        assert row['documents'] == len({np.searchsorted(data.starts, hi) for _, hi, _ in windows})
        assert row['loss'] == pytest.approx(sum(plain_sums(model, data.tokens, windows)) / 108, rel=1e-5)
    assert capped[0]['documents'] > 1 if rule == 'same' else capped[0]['documents'] == 1


def test_no_document_that_is_long_enough_is_said(cpu, corpus_dir):
    model, data = random_model(vocab_size=257), open_tokens(str(corpus_dir), 'test')
    with pytest.raises(ValueError, match='no document of the test split is longer than 50000 tokens'):
        evaluate_sliding(model, data, [32, 50_000], 8, 'same', 10, 500, cpu)


# ----------------------------------------------------------------------------- as run

def run(tiny_run, tmp_path, *arguments):
    """Run the stage on tiny_run, its results into tmp_path; returns the JSON it wrote, and what it printed."""
    out, _ = stage('eval_ppl', f'--init_from={tiny_run}/last.pt', f'--out_dir={tmp_path}', '--device=cpu',
                   '--dtype=float32', *arguments)
    path, = tmp_path.glob('*.json')
    assert path.with_suffix('.png').stat().st_size > 1000
    return path, json.loads(path.read_text()), out


def test_sliding_run_writes_the_numbers_it_prints_with_all_it_takes_to_repeat_them(tiny_run, corpus_dir, cpu, tmp_path):
    path, result, out = run(tiny_run, tmp_path, '--scale=1.3', '--max_windows=40')
    assert path.name == 'eval_ppl_scale1.3.json'
    model, info = checkpoint.load_model('last', tiny_run, 'cpu')
    model.head_scale = 1.3
    rows = evaluate_sliding(model, open_tokens(str(corpus_dir), 'test'), [32, 64, 128, 256], 4, 'same', 40, 16384, cpu)
    assert [row['length'] for row in result['rows']] == [32, 64, 128, 256]  # L, 2L, 4L, 8L
    for row, expected in zip(result['rows'], rows, strict=True):
        assert row == {key: pytest.approx(value, rel=1e-4) for key, value in expected.items()}
        assert f"{row['ppl']:.3f}" in out and f"{row['loss']:.4f}" in out
    assert (result['rule'], result['stride'], result['scale']) == ('same', 4, 1.3)
    assert result['weights_digest'] == info['digest'] and result['block_size'] == 32
    assert result['settings']['max_windows'] == 40 and result['versions']['torch'] == torch.__version__
    assert {'command', 'commit', 'device', 'seconds', 'dataset', 'split', 'checkpoint'} <= result.keys()


def test_position_run_equals_an_independent_computation(tiny_run, corpus_dir, tmp_path):
    path, result, out = run(tiny_run, tmp_path, '--protocol=position', '--n_samples=10', '--lengths=[64,128,30]',
                            '--last=16', '--batch_tokens=300')
    assert path.name == 'eval_ppl_position.json'
    windows = torch.from_numpy(Windows(str(corpus_dir), 'test', 128, 0).fixed(10, spacing=16))
    model, _ = checkpoint.load_model('last', tiny_run, 'cpu')
    losses = plain_losses(model, windows).numpy()
    assert [row['length'] for row in result['rows']] == [30, 64, 128]
    for row in result['rows']:
        T = row['length']
        expected = losses[:, T - 16:T].mean(1)
        by_window = result['loss_at_by_window'][str(T)]
        np.testing.assert_allclose(by_window, expected, rtol=1e-4)
        assert row['loss'] == pytest.approx(np.mean(by_window), rel=1e-5)
        assert row['standard_error'] == pytest.approx(np.std(expected, ddof=1) / math.sqrt(10), rel=1e-3)
        assert row['ppl'] == pytest.approx(math.exp(row['loss']), rel=1e-5)
        assert (row['windows'], row['scored_tokens']) == (10, 160)
        printed = next(line.split() for line in out.splitlines() if line.split()[0] == str(T))
        assert float(printed[1]) == pytest.approx(row['loss'], abs=1e-4)
    width = 128 // len(result['loss'])  # of the picture's bins
    np.testing.assert_allclose(result['loss'], losses.mean(0).reshape(-1, width).mean(1), rtol=1e-4)
    np.testing.assert_allclose(result['position'], np.arange(1, 129).reshape(-1, width).mean(1))
    assert result['samples'] == 10 and result['scored_tokens'] == 10 * 128


def test_table_shows_the_best_of_each_grid_on_the_same_tokens_as_the_stage_alone(tiny_run, tmp_path):
    last = f'{tiny_run}/last.pt'
    table = [{'name': 'one', 'init_from': last, 'paper': 'NoPE'},
             {'name': 'grid', 'init_from': last, 'scale': [1.0, 3.0]},
             {'name': 'pi', 'init_from': last, 'position': 'rope', 'rope_scaling': ['', 'pi:2']}]
    (tmp_path / 'table.py').write_text(f'table = {table}')
    path, result, out = run(tiny_run, tmp_path, str(tmp_path / 'table.py'), '--max_windows=20', '--lengths=[32,128]')
    assert path.name == 'eval_ppl_table.json' and result['lengths'] == [32, 128]
    path.unlink()
    for row, arguments in zip(result['rows'], ([['--scale=1.0']], [['--scale=1.0'], ['--scale=3.0']], [
            ['--position=rope'], ['--position=rope', '--rope_scaling=pi:2']]), strict=True):
        alone = []
        for i, more in enumerate(arguments):
            folder = tmp_path / f"{row['name']}{i}"
            folder.mkdir()
            alone.append(run(tiny_run, folder, '--max_windows=20', '--lengths=[32,128]', *more)[1])
        losses = np.array([[r['loss'] for r in one['rows']] for one in alone])
        np.testing.assert_allclose(list(row['losses'].values()), losses, rtol=1e-6)
        np.testing.assert_allclose(row['ppl'], np.exp(losses.min(0)), rtol=1e-5)
        assert row['best'] == [list(row['losses'])[i] for i in losses.argmin(0)]
        assert row['best_single'] == list(row['losses'])[losses.mean(1).argmin()] and row['windows'] == 20
    line = next(line for line in out.splitlines() if line.startswith('one '))
    assert f"{result['rows'][0]['ppl'][0]:.2f}" in line and '14.6  326.9  >10^3  >10^3' in line  # the paper's NoPE


def test_curve_under_scale_sets_takes_each_position_from_the_pass_that_ends_nearest(tiny_run, corpus_dir, tmp_path):
    model, info = checkpoint.load_model('last', tiny_run, 'cpu')
    sets = {64: scale_set(torch.full((2, 4), 1.5).tolist()), 128: scale_set(torch.full((2, 4), 3.0).tolist())}
    checkpoint.save_scale(tmp_path / 'sets.jsn', info, sets, 'head')
    _, result, _ = run(tiny_run, tmp_path, '--protocol=position', '--n_samples=6', '--lengths=[32,64,128]', '--last=16',
                       f'--scale={tmp_path}/sets.jsn')
    windows = torch.from_numpy(Windows(str(corpus_dir), 'test', 128, 0).fixed(6, spacing=16))
    for T, scale in ((32, 1.0), (64, 1.5), (128, 3.0)):
        losses = plain_losses(model, windows[:, :T + 1], torch.full((2, 4), scale)).numpy()[:, T - 16:]
        np.testing.assert_allclose(result['loss_at_by_window'][str(T)], losses.mean(1), rtol=1e-4)


def test_last_tokens_and_the_gain_from_context_equal_a_plain_computation(tiny_run, corpus_dir, tmp_path):
    _, result, out = run(tiny_run, tmp_path, '--protocol=last', '--n_samples=7',
                         '--lengths=[32,64,128]', '--last=40')
    windows = torch.from_numpy(Windows(str(corpus_dir), 'test', 128, 0).fixed(7, spacing=40))
    model, _ = checkpoint.load_model('last', tiny_run, 'cpu')

    def ppl(T, n):
        return math.exp(plain_losses(model, windows[:, -T - 1:])[:, -n:].mean())

    expected = [ppl(32, 32), ppl(64, 40), ppl(128, 40)]  # all of L, where it is shorter than `last`
    assert [row['ppl'] for row in result['rows']] == pytest.approx(expected, rel=1e-4)
    assert ['delta_p' in row for row in result['rows']] == [False, True, True]
    delta = ppl(32, 32) - ppl(128, 32)
    assert result['rows'][2]['delta_p'] == pytest.approx(delta, rel=1e-2)
    assert result['rows'][2]['reading'] == ('helps' if delta > 0 else 'hurts')
    assert f"{result['rows'][2]['delta_p']:+.3f}" in out


def test_table_of_last_tokens_has_the_rows_of_the_stage_alone_beside_the_paper(tiny_run, tmp_path):
    last = f'{tiny_run}/last.pt'
    table = [{'name': 'Kerple', 'init_from': last, 'paper': 'Kerple'},
             {'name': 'wide', 'init_from': last, 'scale': 2.0}]
    (tmp_path / 'table.py').write_text(f'table = {table}')
    arguments = ['--protocol=last', '--n_samples=7', '--lengths=[16,32,128]', '--last=16']
    _, result, out = run(tiny_run, tmp_path, str(tmp_path / 'table.py'), *arguments)
    (tmp_path / 'eval_ppl_table.json').unlink()
    for row, more in zip(result['rows'], ([], ['--scale=2.0']), strict=True):
        folder = tmp_path / row['name']
        folder.mkdir()
        _, alone, _ = run(tiny_run, folder, *arguments, *more)
        assert row['ppl'] == pytest.approx([r['ppl'] for r in alone['rows']], rel=1e-5)
        assert row['delta_p'][:2] == [None, None]  # no longer than L
        assert row['delta_p'][2] == pytest.approx(alone['rows'][2]['delta_p'], rel=1e-3)
    line = next(line for line in out.splitlines() if line.startswith('Kerple '))
    assert f"{result['rows'][0]['ppl'][0]:.2f}" in line and '32.1   29.1   28.1' in line  # Table 4 on Books3
    delta = result['rows'][0]['delta_p'][2]
    assert 'Delta P at 128' in out and line.endswith(f"{delta:+.2f} {'helps' if delta > 0 else 'hurts'}")


def test_rows_of_one_name_become_their_mean():
    rows = [{'name': 'a', 'ppl': np.array([2.0, 4.0]), 'delta_p': [None, -5.0]},
            {'name': 'a', 'ppl': np.array([3.0, 8.0]), 'delta_p': [None, 7.0]},
            {'name': 'b', 'ppl': np.array([1.0, 1.0])},
            {'name': 'c', 'ppl': np.array([1.0, 1.0]), 'delta_p': [None, 1.0]},
            {'name': 'c', 'ppl': np.array([1.0, 1.0])}]
    a, b, c = eval_ppl.merge_seeds(rows)
    assert a['ppl'].tolist() == [2.5, 6.0] and a['sd'].tolist() == pytest.approx([0.5 ** 0.5, 8 ** 0.5])
    assert np.isnan(a['delta_p'][0]) and a['delta_p'][1] == 1 and a['runs'] == rows[:2] and b is rows[2]
    assert 'delta_p' not in c  # one of its seeds is a grid


def test_table_leaves_out_rows_whose_files_are_missing_and_says_so(tiny_run, tmp_path):
    last = f'{tiny_run}/last.pt'
    table = [{'name': 'untrained', 'init_from': 'nowhere/last.pt'}, {'name': 'there', 'init_from': last},
             {'name': 'untuned', 'init_from': last, 'scale': 'nowhere/scale.json'}]
    (tmp_path / 'table.py').write_text(f'table = {table}')
    _, result, out = run(tiny_run, tmp_path, str(tmp_path / 'table.py'), '--max_windows=4', '--lengths=[32,64]')
    assert [row['name'] for row in result['rows']] == ['there']
    assert 'untrained is left out: nowhere/last.pt' in out and 'untuned is left out: nowhere/scale.json' in out


def test_rows_may_have_data_sets_of_their_own(tiny_run, corpus_dir, tmp_path):
    data = open_tokens(str(corpus_dir), 'test')
    backwards = [bytes(data.tokens[start:end][::-1].tolist()).decode('latin-1')
                 for start, end in documents(data)]
    write_corpus(tmp_path / 'other', get_tokenizer('bytes'), {'test': backwards})
    row = {'name': 'here', 'init_from': f'{tiny_run}/last.pt'}
    (tmp_path / 'table.py').write_text(f"table = {[row, row | {'name': 'there', 'dataset': f'{tmp_path}/other'}]}")
    (tmp_path / 'out').mkdir()
    _, result, _ = run(tiny_run, tmp_path / 'out', str(tmp_path / 'table.py'), '--max_windows=4', '--lengths=[32,64]')
    here, there = (row['ppl'] for row in result['rows'])
    (tmp_path / 'alone').mkdir()
    _, alone, _ = run(tiny_run, tmp_path / 'alone', f'--dataset={tmp_path}/other', '--max_windows=4',
                      '--lengths=[32,64]')
    assert there == pytest.approx([row['ppl'] for row in alone['rows']], rel=1e-5) and abs(there[0] - here[0]) > 1


def test_two_ranks_measure_what_one_does(tiny_run, tmp_path):
    results = []
    for ranks in (1, 2):
        out_dir = tmp_path / str(ranks)
        stage('eval_ppl', f'--init_from={tiny_run}/last.pt', f'--out_dir={out_dir}', '--device=cpu', '--dtype=float32',
              '--max_windows=13', ranks=ranks)
        results.append(json.loads((out_dir / 'eval_ppl.json').read_text()))
    one, two = results
    assert '2 ranks' in two['device'] and '1 ranks' in one['device']
    assert [row['loss'] for row in two['rows']] == pytest.approx([row['loss'] for row in one['rows']], rel=1e-5)


@pytest.mark.parametrize('arguments, message', [
    (["--table=[{'name':'a','init_from':'nowhere/last.pt'}]"], 'no row of the table has its files'),
    (["--table=[{'name':'a','init_from':'nowhere/last.pt','scales':1.4}]"], 'may have scale, position'),
    (["--table=[{'name':'a'}]"], 'It needs name and init_from'),
    (['--rule=press'], "rule is 'press'"),
    (['--stride=32'], 'stride is 32'),
    (['--stride=0'], 'stride is 0'),
    (['--lengths=[32,40000]'], 'longer than 40000 tokens'),
    (['--protocol=position', '--lengths=[32,50000]'], '50,000'),
    (['--protocol=first'], "protocol is 'first'"),
    (['--protocol=last', '--lengths=[-3,32]'], 'lengths is [-3, 32]; it must be at least 1'),
    (['--protocol=last', '--last=0'], 'last is 0; it must be'),
    (['--n_samples=0'], 'n_samples is 0; it must be'),
    (['--protocol=position', "--table=[{'name':'a'}]"], 'one model at a time'),
    (["--table=[{'name':'a'}]", '--scale=1.2'], 'a table has scale, position and rope_scaling in its rows'),
    (["--table=[{'name':'a','init_from':'b','paper':'Mamba'}]"], 'the row Mamba of the paper, which has: RoPE, NoPE'),
    (['--scale=0'], 'scale is 0'),
], ids=str)
def test_mistakes_are_one_line(tiny_run, tmp_path, arguments, message):
    assert message in mistake('eval_ppl', f'--init_from={tiny_run}/last.pt', f'--out_dir={tmp_path}',
                              '--max_windows=8', *arguments)
    assert not any(tmp_path.iterdir())


def test_model_is_not_measured_on_text_of_another_tokenizer(tiny_run, tmp_path):
    ranks = '\n'.join(f'{base64.b64encode(bytes([255 - byte])).decode()} {byte}' for byte in range(256))
    (tmp_path / 'other.tiktoken').write_text(ranks)
    text = (ROOT / 'model.py').read_text()
    write_corpus(tmp_path / 'data', get_tokenizer(str(tmp_path / 'other.tiktoken')), {'test': [text]}, workers=1)
    line = mistake('eval_ppl', f'--init_from={tiny_run}/last.pt', f'--out_dir={tmp_path}', f'--dataset={tmp_path}/data')
    assert 'tokenizer' in line and 'other.tiktoken' in line
