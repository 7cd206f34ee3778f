"""
Perplexity: which tokens are scored in which context, counted by hand, and their losses against a
second transformer.

$ python -m pytest tests/test_eval_ppl.py
"""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from conftest import (
    as_run,
    near,
    on,
    plain_copy_loss,
    plain_losses,
    random_model,
    read,
    refuses,
    scale_set,
    stage_here,
    tokens,
)

import eval_ppl
from eval_ppl import (
    score_windows,
    sliding,
    sliding_windows,
    tail_tokens,
)
from lib import checkpoints, devices
from lib.repeats import ratio_over_windows
from lib.scales import save_scale
from lib.tokenizers import get_tokenizer
from lib.tokens import TokenFile, Windows, open_tokens, write_corpus


def evaluate_sliding(model, data, lengths, stride, rule, max_windows, batch_tokens, runtime):
    found = sliding(as_run(model, runtime, data=data, stride=stride, rule=rule,
                           max_windows=max_windows, batch_tokens=batch_tokens), lengths)
    return found['rows'], found['loss_by_window']


def evaluate_tail(model, samples, lengths, K, L, batch_tokens, runtime):
    return tail_tokens(as_run(model, runtime, L, samples=samples, tail=K, n_samples=1,
                              batch_tokens=batch_tokens), lengths)['rows']


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
    found = [(target, target - lo) for lo, hi, n in windows for target in range(hi - n, hi)]
    assert len(dict(found)) == len(found)
    return dict(found)


@pytest.mark.parametrize('length, stride', [(2, 1), (4, 3), (16, 5)])
def test_each_rule_scores_the_targets_that_it_describes(length, stride):
    for n in 0, 1, 2, 15, 16, 17, 63:
        found = scored(sliding_windows(30, 30 + n, length, None, stride, 'classic'))
        assert sorted(found) == list(range(31, 30 + n))  # each but the first, once
        assert all(found[t] >= min(t - 30, length - stride) for t in found)

        longest, found = (scored(sliding_windows(30, 30 + n, T, 16, stride, 'same'))
                          for T in (16, length))
        assert found.keys() == longest.keys()
        assert all(length - stride <= context < length for context in found.values())


# rule, lengths, stride, tokens in a pass, and in how many calls all is read
@pytest.mark.parametrize('position, row', [
    ('none', 'same 32,64,128 4 5000 3'),  # at stride L / 8 those of L are the cut ones
    ('rope', 'same 64,128 4 1 3'),        # and without L they are read once
    ('none', 'same 32,64 9 300 3'),       # at a longer stride, too
    ('none', 'paper 24,64 4 5000 3'),     # each length scores tokens of its own
    ('none', 'classic 32,64 9 5000 3'),
])
def test_losses_and_gains_of_sliding_windows_equal_a_plain_loop(cpu, monkeypatch, position, row):
    rule, lengths, *numbers = row.split()
    lengths, (stride, batch_tokens, passes) = eval(f'[{lengths}]'), map(int, numbers)
    model, calls = random_model(position=position), []
    starts = np.cumsum([0, 101, 13, 141, 66, 165])  # each document is followed by end-of-text
    data = TokenFile(tokens(starts[-1]).numpy().astype(np.uint16), starts[:-1], {}, {})
    monkeypatch.setattr(eval_ppl, 'score_windows',
                        lambda *given: calls.append(0) or score_windows(*given))
    rows, by_window = evaluate_sliding(model, data, lengths, stride, rule, 6, batch_tokens, cpu)
    assert len(calls) == passes

    def losses(first, end):
        ids = torch.from_numpy(data.tokens[first:end].astype(np.int64))
        return plain_losses(model, ids[None])[0]

    def whole_and_cut(lo, hi, n):
        """The losses of a window's targets; cut ones are read in blocks of L / 8."""
        ends = [hi - (hi - 1 - t) // 4 * 4 for t in range(hi - n, hi)]
        cut = [losses(max(lo, end - 32), t + 1)[-1] for t, end in zip(range(hi - n, hi), ends)]
        return losses(lo, hi)[-n:], torch.stack(cut)

    for row in rows:
        windows, T = [], row['length']
        for start, n in zip(starts, np.diff(starts) - 1):
            windows += sliding_windows(start, start + n, T, max(lengths), stride, rule)
        n = len(windows) if rule == 'same' else 6  # six from all over, or the first six
        windows = [windows[n * i // 6] for i in range(6)]
        whole, cut = zip(*(whole_and_cut(*window) for window in windows))
        n_documents = len({starts.searchsorted(hi) for _, hi, _ in windows})
        loss = torch.cat(whole).mean()
        near([row['loss'], row['ppl']], [loss, loss.exp()], rtol=1e-5)
        near(by_window[str(T)], [part.mean() for part in whole], rtol=1e-5)
        counts = row['windows'], row['scored_tokens'], row['documents']
        assert counts == (6, len(torch.cat(whole)), n_documents)
        assert ('gain' in row) == (T > 32)
        if T > 32:
            near(row['cut_loss'], torch.cat(cut).mean(), rtol=1e-5)
            near(row['gain'], row['cut_loss'] - row['loss'], atol=1e-9)
            sums = torch.stack([(b - a - row['gain']).sum() for a, b in zip(whole, cut)])
            error = (sums.square().sum() * 6 / 5) ** 0.5 / row['scored_tokens']
            near(row['gain_error'], error, rtol=1e-3)


# ---------------------------------------------------------------------- their losses

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

    def losses(worth):
        """And of how many graphs they were made."""
        stats = torch._dynamo.utils.counters['stats']
        monkeypatch.setattr(devices, 'WORTH_COMPILING', (worth, worth))
        before = stats['unique_graphs']
        _, by_window = evaluate_sliding(model, data, [64, 200], 40, 'same', 11, 400, cpu)
        rows = evaluate_tail(model, samples, [200], 9, 64, 600, cpu)
        found = np.concatenate([*by_window.values(), [row['loss'] for row in rows]])
        return found, stats['unique_graphs'] - before

    # Two lengths of sliding windows, L alone and 200 whole, cut contexts of L and at a start; and
    # none under other scales, as a search changes them.
    for scale, n_graphs in (1.0, 6), (1.7, 0):
        model.head_scale = scale
        (expected, none), (found, n) = losses(math.inf), losses(0)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert (none, n) == (0, n_graphs)


def test_windows_are_scored_without_a_bar_where_no_label_asks_for_one(cpu, capsys):
    run = as_run(random_model(), cpu, batch_tokens=128)
    given = run, tokens(200).numpy(), [(0, 64, 8), (8, 72, 8)]
    score_windows(*given)
    assert capsys.readouterr().err == ''
    score_windows(*given, label='windows')
    assert 'windows of 64' in capsys.readouterr().err


def test_lengths_beyond_the_random_positions_are_refused(cpu):
    model, text = random_model(position='rope', random_positions=63), np.arange(130) % 61
    data = TokenFile(text, np.array([0]), {}, {})
    refuses('below 63', evaluate_sliding, model, data, [32, 64], 4, 'same', 9, 500, cpu)
    refuses('below 63', evaluate_tail, model, text[None], [32, 64], 4, 32, 500, cpu)


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
        assert f"{row['ppl']:.4f}" in out and f"{row['loss']:.4f}" in out
    assert (result['rule'], result['stride'], result['label']) == ('same', 4, 'scale1.3')
    assert result['weights_digest'] == info['digest'] and result['block_size'] == 32
    assert {'command', 'commit', 'versions', 'device', 'seconds', 'split'} <= result.keys()


def test_position_run_and_its_gains_equal_a_plain_computation(run, tiny, windows):
    result, out = run('--protocol=position --n_samples=10 --lengths=[64,128,30] --tail=10 '
                      '--batch_tokens=300')
    windows = windows(10, 128, 10)
    losses = plain_losses(tiny[0], windows)
    for T, row in zip((30, 64, 128), result['rows'], strict=True):
        expected = losses[:, T - 10:T].mean(1)
        near(result['loss_at_by_window'][str(T)], expected, rtol=1e-4)
        mean, error = expected.mean(), expected.std() / math.sqrt(10)
        near([row['loss'], row['standard_error'], row['ppl']], [mean, error, mean.exp()], rtol=1e-3)
        assert (row['length'], row['windows'], row['scored_tokens']) == (T, 10, 100)
        assert ('gain' in row) == (T > 32)
    bins = losses.mean(0).reshape(len(result['loss']), -1).mean(1)
    near(result['loss'], bins, rtol=1e-4)

    # blocks of 4 from the end on: of positions 118 ... 127, 126 and 127 are read alike
    cut = [plain_losses(tiny[0], windows[:, first:end + 1])[:, -n:]
           for first, end, n in ((96, 128, 4), (92, 124, 4), (88, 120, 2))]
    cut = torch.cat(cut, dim=1).mean(1)
    near(row['cut_loss'], cut.mean(), rtol=1e-4)
    near(row['gain'], (cut - expected).mean(), rtol=1e-2)
    near(row['gain_error'], (cut - expected).std() / 10 ** 0.5, rtol=1e-2)
    assert f"{row['gain']:.4f}" in out and f"{row['gain_error']:.4f}" in out


def test_each_position_is_read_by_the_scale_set_of_the_pass_that_ends_nearest(run, tiny, windows,
                                                                             tmp_path):
    model, info = tiny
    sets = {64: scale_set([[1.5] * 4] * 2), 128: scale_set([[3.0] * 4] * 2)}
    save_scale(tmp_path / 'sets.jsn', info, sets, 'head')
    result, _ = run('--protocol=position --n_samples=4 --tail=16 --lengths=[32,64,128] '
                    f'--scale={tmp_path}/sets.jsn')
    for T, scale in ((32, 1.0), (64, 1.5), (128, 3.0)):
        losses = plain_losses(model, windows(4, 128, 16)[:, :T + 1], torch.full((2, 4), scale))
        near(result['loss_at_by_window'][str(T)], losses[:, -16:].mean(1), rtol=1e-4)


def test_tails_and_the_gain_from_context_equal_a_plain_computation(run, tiny, windows):
    result, out = run('--protocol=tail --n_samples=7 --lengths=[32,64,128] --tail=40')

    def ppl(T, n):
        text = windows(7, 128, 40)[:, -T - 1:]
        return math.exp(plain_losses(tiny[0], text)[:, -n:].mean())

    expected = [ppl(32, 32), ppl(64, 40), ppl(128, 40)]  # of L, all, as that is less than the tail
    near([row['ppl'] for row in result['rows']], expected, rtol=1e-4)
    assert 'delta_p' not in result['rows'][0] and 'delta_p' in result['rows'][1]
    row = result['rows'][2]
    near(row['delta_p'], ppl(32, 32) - ppl(128, 32), rtol=1e-2)
    assert f"{row['delta_p']:.4f}" in out


def test_rule_classic_reads_text_shorter_than_a_window_and_refuses_only_text_without_a_target(
        tiny_run, tmp_path):
    def score(documents, rule):
        write_corpus(tmp_path / 'text', get_tokenizer('bytes'), {'test': documents})
        stage_here('eval_ppl', *on(tiny_run, tmp_path, f'--rule={rule} --lengths=[64,2048] '
                                   f'--max_windows=9999 --dataset={tmp_path}/text'))
        return [row['scored_tokens'] for row in read(tmp_path / 'eval_ppl.json')['rows']]

    # 1,833 tokens, of which the first of each document and end-of-text are no targets.
    documents = ['x' * 900, 'y' * 600, 'z' * 330]
    assert score(documents, 'classic') == [1827, 1827]
    for rule in 'same', 'paper':
        refuses('2048', score, documents, rule)
    refuses('longer than 1 tokens', score, ['x', 'y'], 'classic')


# ---------------------------------------------------------------------- the cut context

@pytest.mark.parametrize('command', [
    '--max_windows=9 --stride=4 --lengths=[64,128]',
    '--protocol=position --n_samples=4 --tail=16 --lengths=[64,128]',
    '--protocol=repeat --n_samples=9 --gram=3 --lengths=[128]'])
def test_model_that_was_tuned_at_another_length_is_cut_to_its_first(tiny_run, tmp_path, command):
    """So that what it gains from tuning at 2L is not hidden."""
    state, found = checkpoints.load(tiny_run / 'last.pt'), []
    state['model_config'] |= {'block_size': 64, 'rope_length': 32}
    checkpoints.save(tmp_path / 'tuned/last.pt', **state)
    for run in tiny_run, tmp_path / 'tuned':
        stage_here('eval_ppl', *on(run, tmp_path / 'out', command))
        path, = (tmp_path / 'out').glob('*.json')
        found.append(read(path))
    one, other = found
    assert one['rows'] == other['rows'] and 'cut_loss' in one['rows'][-1]
    assert (one['block_size'], other['block_size']) == (32, 64)
    assert one['trained_length'] == other['trained_length'] == 32


# ---------------------------------------------------------------------- far repeats

def plain_repeats(x, g, L, is_near):
    """The targets of a window of ids, [(t, s)], by a search for each of them."""
    found = []
    for t in range(2 * L, len(x)):
        places = [s for s in range(g, t) if x[s - g:s] == x[t - g:t]]
        if places and (places[-1] >= t - L) == is_near:
            found.append((t, places[-1]))
    return found


def plain_repeat_losses(model, untuned, texts, is_near=False, others=None):
    """
    A row for each repeat of 3 tokens, L being 32: window, loss read whole, cut by `untuned`, cut by
    the model itself, whether token s is the target. model, untuned: (model, head scale). others:
    windows whose tokens stand before t - L when the target is read whole.
    """
    rows = []
    for w, x in enumerate(texts.tolist()):
        for t, s in plain_repeats(x, 3, 32, is_near):
            before = x[:t - 32] if others is None else others[w].tolist()[:t - 32]
            whole = torch.tensor([before + x[t - 32:t + 1]])
            cut = whole[:, -33:]
            losses = [plain_losses(one, text, head_scale)[0, -1].item() for (one, head_scale), text
                      in ((model, whole), (untuned, cut), (model, cut))]
            rows.append((w, *losses, x[s] == x[t]))
    return np.array(rows)


def matches(found, rows, weight):
    """Raise AssertionError unless a row of the result is that of these targets."""
    w, whole, cut, own_cut, same = rows.T
    copied = np.array([plain_copy_loss([loss], [is_same], weight)
                       for loss, is_same in zip(cut, same)])
    assert (found['targets'], found['windows']) == (len(w), len(set(w)))
    gains = {'gain': cut - whole, 'own_gain': own_cut - whole}
    losses = {'loss': whole, 'cut_loss': cut, 'own_cut_loss': own_cut, 'copy_loss': copied}
    for name, values in losses.items():
        near(found[name], values.mean(), rtol=1e-4)
    for name, values in gains.items():
        near(found[name], values.mean(), rtol=1e-2)
        _, error = ratio_over_windows(values, np.ones(len(w)), w.astype(int))
        near(found[f'{name}_error'], error, rtol=1e-2)
    near(found['headroom'], (cut - copied).mean(), rtol=1e-3)
    R, error = ratio_over_windows(cut - whole, cut - copied, w.astype(int))
    near([found['R'], found['R_error']], [R, error], rtol=1e-2)


def scaled(scale):
    return None if scale is None else torch.full((2, 4), scale)


REPEAT = '--protocol=repeat --n_samples=12 --lengths=[128] --gram=3 --targets=9999 '


@pytest.mark.parametrize('scale', [None, 3.0])
def test_far_and_near_repeats_and_their_headroom_equal_plain_loops(run, windows, tiny, corpus_dir,
                                                                   scale):
    command = REPEAT + "--controls=['near']" + ('' if scale is None else f' --scale={scale}')
    result, out = run(command)
    val = torch.from_numpy(Windows(str(corpus_dir), 'val', 128).evenly_spaced(12))
    model, untuned = (tiny[0], scaled(scale)), (tiny[0], None)
    found = iter(result['rows'])
    for kind, is_near in ('far', False), ('near', True):
        rows = plain_repeat_losses(model, untuned, windows(12, 128), is_near)
        of_val = plain_repeat_losses(untuned, untuned, val, is_near)
        grid = np.linspace(0, 1, 500, endpoint=False)
        weight = min(grid, key=lambda w: plain_copy_loss(of_val[:, 2], of_val[:, 4], w))
        assert abs(result['copy_weight'][kind] - weight) <= 2e-3
        weight = result['copy_weight'][kind]
        matches(next(found), rows, weight)
        matches(next(found), rows[rows[:, 4] == 1], weight)
        if not is_near:
            assert (result['found'], result['share']) == (len(rows), len(rows) / (12 * 65))
    kinds = [row['kind'] for row in result['rows']]
    assert kinds == ['all', 'same token', 'near, all', 'near, same token']
    for row in result['rows']:
        assert (row['own_gain'] == row['gain']) == (scale is None)
        assert f"{row['gain']:.4f}" in out and f"{row['R']:.4f}" in out


@pytest.mark.parametrize('split', ['test', 'val'])  # val: most of it is one document
def test_far_part_of_another_document_equals_a_plain_loop(run, tiny, corpus_dir, split):
    result, _ = run(REPEAT + f"--controls=['other'] --split={split}")
    data = open_tokens(str(corpus_dir), split)
    texts = torch.from_numpy(Windows(str(corpus_dir), split, 128).evenly_spaced(12))
    whole = data.tokens.astype(np.int64)
    starts = [next(i for i in range(len(whole)) if (whole[i:i + 129] == text.numpy()).all())
              for text in texts]
    document = np.searchsorted(data.starts, np.arange(len(whole)), side='right')
    of_window = [set(document[start:start + 129]) for start in starts]
    look_further = any(of_window[w] & of_window[(w + 6) % 12] for w in range(12))
    assert look_further == (split == 'val')
    others = []
    for w in range(12):
        further = [(w + 6 + k) % 12 for k in range(12)]
        others.append(texts[next(v for v in further if not of_window[v] & of_window[w])])
    rows = plain_repeat_losses((tiny[0], None), (tiny[0], None), texts, others=others)
    weight, (every, same) = result['copy_weight']['far'], result['rows'][2:]
    matches(every, rows, weight)
    matches(same, rows[rows[:, 4] == 1], weight)
    assert every['kind'] == 'other document, all'
    assert every['loss'] != result['rows'][0]['loss']
    assert every['cut_loss'] == result['rows'][0]['cut_loss']


def test_targets_are_drawn_from_those_found(run):
    every, _ = run(REPEAT)
    some, _ = run(REPEAT.replace('9999', '7'))
    assert some['rows'][0]['targets'] == 7 and some['found'] == every['found']
    assert some['rows'][0]['loss'] != every['rows'][0]['loss']


def test_gain_is_against_the_cut_context_of_the_untuned_checkpoint(run, tiny_run, tmp_path):
    state = checkpoints.load(tiny_run / 'last.pt')
    state['model']['head.weight'] *= 1.5
    state['model_config'] |= {'block_size': 64, 'rope_length': 32}  # it was tuned at 2L
    checkpoints.save(tmp_path / 'tuned.pt', **state)
    untuned, _ = run(REPEAT)
    tuned, _ = run(REPEAT + f'--init_from={tmp_path}/tuned.pt')
    found, _ = run(REPEAT + f'--init_from={tmp_path}/tuned.pt --baseline={tiny_run}/last.pt')
    for row, before, own in zip(found['rows'], untuned['rows'], tuned['rows'], strict=True):
        for name in 'cut_loss', 'copy_loss', 'headroom':
            assert row[name] == before[name] != own[name]
        assert row['loss'] == own['loss'] and row['own_gain'] == own['gain']
        near(row['gain'], before['cut_loss'] - own['loss'], atol=2e-5)  # as JSON rounds
    assert found['untuned']['weights_digest'] == untuned['weights_digest']

    state['model_config']['rope_length'] = 64  # trained at 2L from the start
    checkpoints.save(tmp_path / 'longer.pt', **state)
    refuses('longer.pt was trained at 64', run, REPEAT + f'--baseline={tmp_path}/longer.pt')


def test_text_without_a_split_val_has_gains_but_no_headroom(run, corpus_dir, tmp_path):
    folder = tmp_path / 'test_alone'
    shutil.copytree(corpus_dir, folder)
    meta = read(folder / 'meta.json')
    del meta['splits']['val']
    (folder / 'meta.json').write_text(json.dumps(meta))
    (whole, _), (found, out) = run(REPEAT), run(REPEAT + f'--dataset={folder}')
    assert 'no split val' in out
    assert found['rows'][0].items() < whole['rows'][0].items()
    assert 'gain' in found['rows'][0] and 'R' not in found['rows'][0]
