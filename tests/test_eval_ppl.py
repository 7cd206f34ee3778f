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

from eval_ppl import (
    cut_windows,
    evaluate_last,
    evaluate_sliding,
    last_repeats,
    repeat_summary,
    score_windows,
    sliding_windows,
)
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
    # two lengths of sliding windows, L alone and 200 whole, cut contexts of L and at a start
    assert graphs() == before + 6
    model.head_scale = 1.7  # as a search for scales changes them
    changed = losses()
    assert graphs() == before + 6
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
        assert path.with_suffix('.png').exists() == ('=repeat' not in command)
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


# ---------------------------------------------------------------------- the cut context

@pytest.mark.parametrize('windows, L, expected', [
    ([(0, 64, 8), (10, 74, 8)], 32, [[(32, 64, 4), (28, 60, 4)], [(42, 74, 4), (38, 70, 4)]]),
    ([(0, 20, 10)], 32, [[(0, 20, 4), (0, 16, 4), (0, 12, 2)]]),  # within the window
    ([(0, 64, 2)], 32, [[(32, 64, 2)]]),
    ([(0, 9, 2)], 4, [[(5, 9, 1), (4, 8, 1)]]),
])
def test_cut_windows_are_those_counted_by_hand(windows, L, expected):
    assert cut_windows(windows, L) == expected


@pytest.mark.parametrize('lengths, rule, stride, passes', [
    ([32, 64, 128], 'same', 4, 3),  # at stride L / 8 those of L are the cut ones
    ([64, 128], 'same', 4, 3),      # and without L they are read once
    ([32, 64, 128], 'same', 9, 4),  # at a longer stride, too
    ([32, 64], 'paper', 4, 3),      # each length scores tokens of its own
    ([32, 64], 'classic', 9, 3),
])
def test_gain_of_sliding_windows_equals_a_plain_loop(cpu, corpus_dir, monkeypatch, lengths, rule,
                                                     stride, passes):
    import eval_ppl
    model, data = random_model(vocab_size=257), open_tokens(str(corpus_dir), 'test')
    called = []
    monkeypatch.setattr(eval_ppl, 'score_windows',
                        lambda *arguments: called.append(0) or score_windows(*arguments))
    rows, _ = evaluate_sliding(model, data, lengths, stride, rule, 6, 5000, cpu)
    assert len(called) == passes
    for row in rows:
        T = row['length']
        assert ('gain' in row) == (T > 32)
        if T <= 32:
            continue
        windows = []
        for start, end in documents(data):
            windows += sliding_windows(start, end, T, max(lengths), stride, rule)
        windows = windows[:6] if rule != 'same' else [windows[len(windows) * i // 6]
                                                      for i in range(6)]
        means, total, n_scored = [], 0, sum(n for _, _, n in windows)
        for lo, hi, n in windows:
            one_by_one = []
            for token in range(hi - n, hi):
                block_end = hi - (hi - 1 - token) // 4 * 4  # blocks of L / 8 from the end on
                before = data.tokens[max(lo, block_end - 32):token + 1].astype(np.int64)
                one_by_one.append(plain_losses(model, torch.from_numpy(before)[None])[0, -1].item())
            whole = plain_losses(model, torch.from_numpy(
                data.tokens[lo:hi].astype(np.int64))[None])[0, -n:].numpy()
            means.append(np.mean(one_by_one - whole))
            total += sum(one_by_one)
        assert row['cut_loss'] == pytest.approx(total / n_scored, rel=1e-5)
        assert row['gain'] == pytest.approx(row['cut_loss'] - row['loss'], abs=1e-9)
        assert row['gain_error'] == pytest.approx(np.std(means, ddof=1) / 6 ** 0.5, rel=1e-3)


def test_gain_at_a_position_equals_a_plain_loop(run, tiny, windows):
    result, out = run('--protocol=position --n_samples=10 --lengths=[32,64,128] --last=10')
    # blocks of 4 from the end on: of positions 118 ... 127, 126 and 127 are read alike
    cut = []
    for first, end, n in ((96, 128, 4), (92, 124, 4), (88, 120, 2)):
        cut.append(plain_losses(tiny[0], windows(10, 128, 10)[:, first:end + 1]).numpy()[:, -n:])
    cut = np.concatenate(cut, axis=1).mean(1)
    whole = plain_losses(tiny[0], windows(10, 128, 10)).numpy()[:, 118:128].mean(1)
    row = result['rows'][-1]
    assert ['gain' in row for row in result['rows']] == [False, True, True]
    assert row['cut_loss'] == pytest.approx(cut.mean(), rel=1e-4)
    assert row['gain'] == pytest.approx((cut - whole).mean(), rel=1e-2)
    assert row['gain_error'] == pytest.approx((cut - whole).std(ddof=1) / 10 ** 0.5, rel=1e-2)
    assert f"{row['gain']:+.4f} ± {row['gain_error']:.4f}" in out


# ---------------------------------------------------------------------- far repeats

def slow_repeat(x, t, g):
    for s in range(t - 1, g - 1, -1):
        if x[s - g:s] == x[t - g:t]:
            return s
    return -1


@pytest.mark.parametrize('g, n_symbols', [(1, 3), (2, 3), (3, 2), (5, 2), (8, 1)])
def test_last_repeats_equal_a_plain_search(g, n_symbols):
    tokens = np.random.default_rng(g).integers(0, n_symbols, (4, 60)) + 50_000
    found = last_repeats(tokens, g)
    for x, of_row in zip(tokens.tolist(), found.tolist(), strict=True):
        expected = [slow_repeat(x, t, g) if t >= g else -1 for t in range(60)]
        assert of_row == expected
    assert (found >= 0).any() and (found < 0).any()


def test_standard_error_of_a_gain_is_over_windows():
    # Of windows of equal size it is that of their means; targets of a window may be alike.
    rng = np.random.default_rng(0)
    of_window = rng.normal(size=5)
    cut = np.repeat(of_window, 20) + 3
    row = repeat_summary(np.full(100, 2.0), cut, np.repeat(np.arange(5), 20))
    assert row['gain_error'] == pytest.approx(of_window.std(ddof=1) / 5 ** 0.5)
    found = row['loss'], row['cut_loss'], row['gain'], row['targets'], row['windows']
    assert found == pytest.approx((2, cut.mean(), of_window.mean() + 1, 100, 5))


def test_a_model_that_looks_up_a_far_repeat_gains_what_it_should(cpu):
    """
    One window of 0s that holds 1 2 3 4 5 at its start and again, as the only far repeat, near its
    end. The model gives the token that followed the two before p = 0.9, if it sees it, else 1/10.
    """
    from types import SimpleNamespace

    import eval_ppl

    L, W, V = 8, 64, 10
    x = np.zeros((2, W + 1), np.int64)
    x[0] = np.arange(W + 1) % 2 + 8       # 8 9 8 9 ...: repeats that are all near
    x[1] = [1, 2, 3] + [8, 9] * 15 + [1, 2, 3] + [8, 9] * 14 + [0]

    def model(inputs, targets):
        n, p = targets.shape[1], torch.full((*targets.shape,), 1 / V)
        for b, row in enumerate(inputs.tolist()):
            for k in range(n):
                t = len(row) - n + k + 1      # this target, were it in the row
                s = slow_repeat(row[:t], t, 2)
                if s >= 0:
                    right = row[s] == targets[b, k]
                    p[b, k] = 0.9 if right else 0.1 / (V - 1)
        return -p.log()

    model.scale_sets = None
    windows = SimpleNamespace(evenly_spaced=lambda n: x)
    model.config = SimpleNamespace(trained_length=L)
    run = SimpleNamespace(model=model, runtime=cpu, windows=lambda T: windows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eval_ppl, 'gram', 2)
        result = eval_ppl.far_repeats(run, [W])
    # Far repeats of 2 tokens in window 1: 1 2 -> 3, and 2 3 -> 8, 3 8 -> 9.
    # 9 8 after 9 -> is near. 9 1 never stood before.
    assert (result['found'], result['share']) == (3, 3 / (2 * (W + 1 - 2 * L)))
    everything, same = result['rows']
    assert everything['targets'] == same['targets'] == 3 and same['kind'] == 'same token'
    assert everything['loss'] == pytest.approx(-math.log(0.9))
    assert everything['cut_loss'] == pytest.approx(math.log(10))
    assert everything['gain'] == pytest.approx(math.log(9))


def test_far_repeats_equal_a_plain_loop(run, windows, tiny):
    result, out = run('--protocol=repeat --n_samples=12 --lengths=[128] --gram=3 --targets=9999')
    model, rows = tiny[0], []
    for w, x in enumerate(windows(12, 128).tolist()):
        whole = plain_losses(model, torch.tensor([x]))[0]
        for t in range(64, 129):
            near = [s for s in range(t - 32, t) if x[s - 3:s] == x[t - 3:t]]
            far = [s for s in range(3, t - 32) if x[s - 3:s] == x[t - 3:t]]
            if far and not near:
                cut = plain_losses(model, torch.tensor([x[t - 32:t + 1]]))[0, -1]
                rows.append((w, whole[t - 1].item(), cut.item(), x[far[-1]] == x[t]))
    rows = np.array(rows)
    assert (result['found'], result['share']) == (len(rows), len(rows) / (12 * 65))
    for found, of_kind in zip(result['rows'], (rows, rows[rows[:, 3] == 1]), strict=True):
        w, whole, cut = of_kind.T[:3]
        gains = [(cut - whole)[w == i] for i in np.unique(w)]
        n, mean = len(gains), (cut - whole).mean()
        variance = sum((of_one - mean).sum() ** 2 for of_one in gains) * n / (n - 1)
        assert (found['targets'], found['windows']) == (len(whole), n)
        assert found['loss'] == pytest.approx(whole.mean(), rel=1e-4)
        assert found['cut_loss'] == pytest.approx(cut.mean(), rel=1e-4)
        assert found['gain'] == pytest.approx(mean, rel=1e-2)
        assert found['gain_error'] == pytest.approx(variance ** 0.5 / len(whole), rel=1e-3)
        assert f"{found['gain']:+.4f}" in out

    some, _ = run('--protocol=repeat --n_samples=12 --lengths=[128] --gram=3 --targets=7')
    assert some['rows'][0]['targets'] == 7 and some['found'] == len(rows)
