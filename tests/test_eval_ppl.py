"""
Perplexity: which tokens are scored in which context, counted by hand, and their losses against a
second transformer.

$ python -m pytest tests/test_eval_ppl.py
"""

import math
import shutil

import numpy as np
import pytest
import torch
from conftest import near, on, plain_losses, random_model, read, scale_set, stage_here

from eval_ppl import evaluate_last, evaluate_sliding, score_windows, sliding_windows
from lib import devices
from lib.scales import save_scale
from lib.tokens import TokenFile, documents, open_tokens

# ---------------------------------------------------------------------- which tokens


@pytest.mark.parametrize('line', '''
100 120  8 None 4 paper   | 100:108 4, 104:112 4, 108:116 4         the end, 120, is left out
  0  26 16   16 4 same    | 0:16 4, 4:20 4, 8:24 4                  two lengths, the same ends
  0  26  8   16 4 same    | 8:16 4, 12:20 4, 16:24 4
  0  16  8   16 4 same    |
 50  71  8 None 5 classic | 50:58 7, 55:63 5, 60:68 5, 63:71 3
 50  55  8 None 5 classic | 50:55 4                                 shorter than a window
'''.splitlines()[1:])
def test_windows_are_those_counted_by_hand(line):
    """First and last token, length, longest length, stride and rule; each window, and its count."""
    arguments, _, expected = line.partition(' |')
    *numbers, rule = arguments.split()
    found = sliding_windows(*map(eval, numbers), rule)
    windows = ', '.join(f'{lo}:{hi} {n}' for lo, hi, n in found)
    assert expected.split('  ')[0].strip() == windows


def scored(windows):
    """{target position: tokens before it in its window}; no target may be there twice."""
    found = {}
    for lo, hi, n in windows:
        for target in range(hi - n, hi):
            assert target not in found
            found[target] = target - lo
    return found


@pytest.mark.parametrize('length, stride', [(2, 1), (4, 3), (8, 4), (16, 5)])
def test_each_rule_scores_the_targets_that_it_describes(length, stride):
    start = 30
    for n in (0, 1, 2, 7, 8, 9, 16, 17, 40, 63):
        windows = sliding_windows(start, start + n, length, None, stride, 'classic')
        found = scored(windows)
        assert sorted(found) == list(range(31, 30 + n))  # each but the first, once
        assert all(found[t] >= min(t - start, length - stride) for t in found)
        assert all(hi - lo == min(n, length) for lo, hi, _ in windows)

        longest, found = (scored(sliding_windows(start, start + n, T, 16, stride, 'same'))
                          for T in (16, length))
        assert found.keys() == longest.keys()
        assert all(length - stride <= context < length for context in found.values())


def plain_sums(model, tokens, windows):
    """One window at a time, all logits in float64."""
    tokens = torch.from_numpy(tokens.astype(np.int64))[None]
    return [plain_losses(model, tokens[:, lo:hi])[0, -n:].sum() for lo, hi, n in windows]


# ---------------------------------------------------------------------- their losses

@pytest.mark.parametrize('position, batch_tokens', [('none', 1), ('rope', 40), ('none', 10_000)])
def test_scores_equal_a_plain_computation_one_window_at_a_time(cpu, position, batch_tokens):
    model, windows = random_model(position=position), []
    tokens = np.random.default_rng(0).integers(61, size=200).astype(np.uint16)
    for start, end in [(0, 90), (91, 100), (110, 200)]:  # so windows of several shapes, in turn
        for length in (12, 30):
            windows += sliding_windows(start, end, length, None, 7, 'classic')
    sums = score_windows(model, tokens, windows, batch_tokens, cpu)
    near(sums, plain_sums(model, tokens, windows), rtol=1e-5)


# length, documents, windows and scored tokens, of documents of 100, 12, 40, 65 and 64 tokens
@pytest.mark.parametrize('rule, expected', [
    # ends 64, 74, 84, 94 | 64
    ('same', [(16, 2, 5, 50), (64, 2, 5, 50)]),
    # at 16: 16 ... 96 | none | 16, 26, 36 | 16 ... 56 | 16 ... 56;  at 64 as above
    ('paper', [(16, 4, 9 + 3 + 5 + 5, 220), (64, 2, 5, 50)]),
    # all but the first token of each of the five;
    # at 16: 16 ... 96, 100 | 12 | 16 ... 36, 40 | 16 ... 56, 65 | 16 ... 56, 64
    ('classic', [(16, 5, 10 + 1 + 4 + 6 + 6, 276), (64, 5, 5 + 1 + 1 + 2 + 1, 276)]),
])
def test_documents_windows_and_scored_tokens_are_counted_right(cpu, rule, expected):
    starts = np.cumsum([0, 101, 13, 41, 66, 65])  # each is followed by end-of-text
    data = TokenFile(np.arange(starts[-1]) % 61, starts[:-1], {}, {})
    rows, by_window = evaluate_sliding(random_model(), data, [16, 64], 10, rule, 1000, 500, cpu)
    found = [tuple(row[key] for key in ('length', 'documents', 'windows', 'scored_tokens'))
             for row in rows]
    assert found == expected
    assert [len(losses) for losses in by_window.values()] == [row['windows'] for row in rows]
    assert all(row['ppl'] == pytest.approx(math.exp(row['loss'])) for row in rows)


@pytest.mark.parametrize('rule', ['same', 'paper'])
def test_a_cap_takes_windows_spread_evenly_or_the_first(cpu, corpus_dir, rule):
    model, data = random_model(vocab_size=257), open_tokens(str(corpus_dir), 'test')
    (row, _), _ = evaluate_sliding(model, data, [24, 40], 9, rule, 12, 500, cpu)
    first, windows = {'same': 40, 'paper': 24}[rule], []
    for start, end in documents(data):
        windows += [(hi - 24, hi, 9) for hi in range(start + first, end, 9)]
    n = len(windows) if rule == 'same' else 12
    windows = [windows[n * i // 12] for i in range(12)]
    used = {np.searchsorted(data.starts, hi) for _, hi, _ in windows}
    assert (row['windows'], row['scored_tokens'], row['documents']) == (12, 108, len(used))
    assert (len(used) > 1) == (rule == 'same')
    near(row['loss'], sum(plain_sums(model, data.tokens, windows)) / 108, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which('g++'), reason='torch.compile on a CPU needs g++')
@pytest.mark.parametrize('position', ['none', 'kerple'])
def test_what_reads_much_is_compiled_once_for_a_length_and_its_losses_are_equal(
        monkeypatch, cpu, position):
    model = random_model(position=position)
    tokens = np.random.default_rng(0).integers(61, size=600).astype(np.uint16)
    data = TokenFile(tokens, np.array([0]), {}, {})
    # 200: more than the 128 queries of a block
    samples = np.stack([tokens[i:i + 201].astype(int) for i in range(7)])

    def losses():
        _, by_window = evaluate_sliding(model, data, [64, 200], 40, 'same', 11, 400, cpu)
        rows = evaluate_last(model, samples, [200], 9, 64, 600, cpu)
        return [*by_window['64'], *by_window['200'], *(row['loss'] for row in rows)]

    def graphs():
        return torch._dynamo.utils.counters['stats']['unique_graphs']

    monkeypatch.setattr(devices, 'WORTH_COMPILING', (math.inf, math.inf))
    before, expected = graphs(), losses()
    assert graphs() == before
    monkeypatch.setattr(devices, 'WORTH_COMPILING', (0, 0))
    np.testing.assert_allclose(losses(), expected, rtol=1e-6)
    assert graphs() == before + 4  # two lengths of sliding windows, L alone and 200 whole
    model.head_scale = 1.7  # as a search for scales changes them
    changed = losses()
    assert graphs() == before + 4
    monkeypatch.setattr(devices, 'WORTH_COMPILING', (math.inf, math.inf))
    np.testing.assert_allclose(changed, losses(), rtol=1e-6)
    assert abs(changed[0] - expected[0]) > 1e-3


# ---------------------------------------------------------------------- as run

@pytest.fixture
def run(tiny_run, tmp_path):
    """run(command): the stage on tiny_run. Returns its JSON and what it printed."""
    def run(command):
        out = stage_here('eval_ppl', *on(tiny_run, tmp_path, command))
        path, = tmp_path.glob('eval_ppl*.json')
        assert path.with_suffix('.png').stat().st_size > 1000
        return read(path), out

    return run


def test_sliding_run_writes_what_it_prints_and_all_it_takes_to_repeat_it(run, corpus_dir, tiny,
                                                                         cpu):
    (result, out), (model, info) = run('--scale=1.3 --max_windows=20'), tiny
    model.head_scale = 1.3
    data, lengths = open_tokens(str(corpus_dir), 'test'), [32, 64, 128, 256]  # L, 2L, 4L, 8L
    rows, _ = evaluate_sliding(model, data, lengths, 4, 'same', 20, 16384, cpu)
    for row, expected in zip(result['rows'], rows, strict=True):
        assert row == pytest.approx(expected, rel=1e-4)
        assert f"{row['ppl']:.3f}" in out and f"{row['loss']:.4f}" in out
    assert (result['rule'], result['stride'], result['label']) == ('same', 4, 'scale1.3')
    assert result['weights_digest'] == info['digest'] and result['block_size'] == 32
    assert {'command', 'commit', 'versions', 'device', 'seconds', 'split'} <= result.keys()


def test_position_run_equals_a_plain_computation(run, tiny, windows):
    result, _ = run('--protocol=position --n_samples=10 --lengths=[64,128,30] --last=16 '
                    '--batch_tokens=300')
    losses = plain_losses(tiny[0], windows(10, 128, 16))
    for T, row in zip((30, 64, 128), result['rows'], strict=True):
        expected = losses[:, T - 16:T].mean(1)
        near(result['loss_at_by_window'][str(T)], expected, rtol=1e-4)
        mean, error = expected.mean(), expected.std() / math.sqrt(10)
        near([row['loss'], row['standard_error'], row['ppl']], [mean, error, mean.exp()], rtol=1e-3)
        assert (row['length'], row['windows'], row['scored_tokens']) == (T, 10, 160)
    bins = losses.mean(0).reshape(len(result['loss']), -1).mean(1)
    near(result['loss'], bins, rtol=1e-4)


def test_each_position_is_read_by_the_scale_set_of_the_pass_that_ends_nearest(run, tiny, windows,
                                                                             tmp_path):
    model, info = tiny
    sets = {64: scale_set([[1.5] * 4] * 2), 128: scale_set([[3.0] * 4] * 2)}
    save_scale(tmp_path / 'sets.jsn', info, sets, 'head')
    result, _ = run('--protocol=position --n_samples=4 --last=16 --lengths=[32,64,128] '
                    f'--scale={tmp_path}/sets.jsn')
    for T, scale in ((32, 1.0), (64, 1.5), (128, 3.0)):
        losses = plain_losses(model, windows(4, 128, 16)[:, :T + 1], torch.full((2, 4), scale))
        near(result['loss_at_by_window'][str(T)], losses[:, -16:].mean(1), rtol=1e-4)


def test_last_tokens_and_the_gain_from_context_equal_a_plain_computation(run, tiny, windows):
    result, out = run('--protocol=last --n_samples=7 --lengths=[32,64,128] --last=40')

    def ppl(T, n):
        text = windows(7, 128, 40)[:, -T - 1:]
        return math.exp(plain_losses(tiny[0], text)[:, -n:].mean())

    expected = [ppl(32, 32), ppl(64, 40), ppl(128, 40)]  # of L, all, as that is less than `last`
    near([row['ppl'] for row in result['rows']], expected, rtol=1e-4)
    assert ['delta_p' in row for row in result['rows']] == [False, True, True]
    found = result['rows'][2]['delta_p']
    assert found == pytest.approx(ppl(32, 32) - ppl(128, 32), rel=1e-2)
    assert result['rows'][2]['reading'] == ('helps' if found > 0 else 'hurts')
    assert f'{found:+.3f}' in out
