"""
Perplexity: which tokens are scored in which context, counted by hand, and their losses against a
second transformer.

$ python -m pytest tests/test_eval_ppl.py
"""

import dataclasses
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    as_run,
    near,
    on,
    plain_copy_loss,
    random_model,
    read,
    refuses,
    stage_here,
    tokens,
)
from plain import plain_cut, plain_losses

import eval_ppl
from lib import checkpoints, devices
from lib.exports import save_folder
from lib.repeats import ratio_over_windows
from lib.tokenizers import get_tokenizer
from lib.tokens import TokenFile, Windows, open_tokens, write_corpus
from model import Transformer


def evaluate_sliding(model, runtime, data, lengths, **changes):
    """The rows and loss_by_window of sliding windows. data: a TokenFile."""
    settings = {'stride': 4, 'rule': 'same', 'max_windows': 20, 'batch_tokens': 16384} | changes
    found = eval_ppl.sliding(as_run(model, runtime, data=data, **settings), lengths)
    return found['rows'], found['loss_by_window']


# ---------------------------------------------------------------------- which tokens


@pytest.mark.parametrize('line', '''
100 120  8 None 4 paper   | 100:108 4, 104:112 4, 108:116 4         the end, 120, is left out
  0  26 16   16 4 same    | 0:16 4, 4:20 4, 8:24 4                  two lengths, the same ends
  0  26  8   16 4 same    | 8:16 4, 12:20 4, 16:24 4
  0  17 16   16 5 same    | 0:16 5
  0  17  2   16 1 same    | 14:16 1
  0  16  8   16 4 same    |
 50  71  8 None 5 classic | 50:58 7, 55:63 5, 60:68 5, 63:71 3
 50  54  2 None 1 classic | 50:52 1, 51:53 1, 52:54 1
 50  58  8 None 5 classic | 50:58 7
 50  55  8 None 5 classic | 50:55 4                                 shorter than a window
 50  52  8 None 5 classic | 50:52 1
 50  51  8 None 5 classic |                                         no token before the first
 50  50  8 None 5 classic |
'''.splitlines()[1:])
def test_windows_are_those_counted_by_hand(line):
    """First token, end, length, longest length, stride and rule | each window and its count."""
    arguments, _, expected = line.partition(' |')
    *numbers, rule = arguments.split()
    found = eval_ppl.sliding_windows(*map(eval, numbers), rule)
    windows = ', '.join(f'{lo}:{hi} {n}' for lo, hi, n in found)
    assert expected.split('  ')[0].strip() == windows


def test_strides_and_tails_have_the_papers_256_tokens_at_most():
    assert [eval_ppl.checked_stride(None, L, [L]) for L in (128, 2048, 8192)] == [16, 256, 256]
    assert [eval_ppl.checked_tail(None, L, [L]) for L in (128, 256, 512)] == [128, 256, 256]


# Rule, lengths, stride, tokens in a pass, and the number of calls of score_windows()
@pytest.mark.parametrize('position, row', [
    ('none', 'same 32,64,128 4 5000 3'),  # at stride L / 8 the windows of L are the cut ones
    ('rope', 'same 64,128 4 1 3'),        # without length L the cut windows are read once
    ('none', 'same 32,64 9 300 3'),       # and once at a longer stride
    ('none', 'paper 24,64 4 5000 3'),     # each length scores its own tokens
    ('none', 'classic 32,64 9 5000 3'),
])
def test_losses_and_gains_of_sliding_windows_equal_a_plain_loop(cpu, monkeypatch, position, row):
    rule, lengths, *numbers = row.split()
    lengths, (stride, batch_tokens, passes) = eval(f'[{lengths}]'), map(int, numbers)
    model, calls, score_windows = random_model(position=position), [], eval_ppl.score_windows
    starts = np.cumsum([0, 101, 13, 141, 66, 165])  # end-of-text follows each document
    data = TokenFile(tokens(starts[-1]).numpy().astype(np.uint16), starts[:-1], {}, {})
    monkeypatch.setattr(eval_ppl, 'score_windows',
                        lambda *given: calls.append(0) or score_windows(*given))
    rows, by_window = evaluate_sliding(model, cpu, data, lengths, stride=stride, rule=rule,
                                       max_windows=6, batch_tokens=batch_tokens)
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
            windows += eval_ppl.sliding_windows(start, start + n, T, max(lengths), stride, rule)
        n = len(windows) if rule == 'same' else 6  # six spaced evenly, or the first six
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


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which('g++'), reason='torch.compile on a CPU needs g++')
@pytest.mark.parametrize('position', ['none', 'kerple'])
def test_long_evaluations_are_compiled_once_per_length_and_their_losses_are_equal(
        monkeypatch, cpu, position):
    model, stats = random_model(position=position), torch._dynamo.utils.counters['stats']
    data = TokenFile(tokens(600).numpy().astype(np.uint16), np.array([0]), {}, {})

    def losses(worth):
        """The loss of each window, and the number of graphs that were compiled for them."""
        monkeypatch.setattr(devices, 'WORTH_COMPILING', {'cpu': worth})
        before = stats['unique_graphs']
        # 200 tokens are more than the 128 queries of a block of attention.
        _, by_window = evaluate_sliding(model, cpu, data, [64, 200], stride=40, max_windows=11,
                                        batch_tokens=400)
        return np.concatenate([*by_window.values()]), stats['unique_graphs'] - before

    # One graph each for windows of 64 and of 200 tokens, for cut contexts of L tokens, and for the
    # shorter cut contexts at the start of a window. New scales, as in a search, compile nothing.
    for scale, n_graphs in (1.0, 4), (1.7, 0):
        model.head_scale = scale
        (expected, none), (found, n) = losses(math.inf), losses(0)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert (none, n) == (0, n_graphs)


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
    lengths = [32, 64, 128, 256]  # L, 2L, 4L, 8L
    rows, _ = evaluate_sliding(model, cpu, open_tokens(str(corpus_dir), 'test'), lengths)
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
    near(result['loss'], losses.mean(0).view(len(result['loss']), -1).mean(1), rtol=1e-4)

    cut = plain_cut(tiny[0], windows, 128, 12)[:, 2:].mean(1)  # its blocks of 4 begin at the end
    near(row['cut_loss'], cut.mean(), rtol=1e-4)
    near(row['gain'], (cut - expected).mean(), rtol=1e-2)
    near(row['gain_error'], (cut - expected).std() / 10 ** 0.5, rtol=1e-2)
    assert f"{row['gain']:.4f}" in out and f"{row['gain_error']:.4f}" in out


@pytest.mark.parametrize('tail', [40, 16])  # L has fewer tokens than the tail, or more
def test_tails_and_the_gain_from_context_equal_a_plain_computation(run, tiny, windows, tail):
    result, out = run(f'--protocol=tail --n_samples=7 --lengths=[32,64,128] --tail={tail}')

    def ppl(T, n):
        text = windows(7, 128, tail)[:, -T - 1:]
        return math.exp(plain_losses(tiny[0], text)[:, -n:].mean())

    expected = [ppl(32, min(32, tail)), ppl(64, tail), ppl(128, tail)]
    near([row['ppl'] for row in result['rows']], expected, rtol=1e-4)
    of_L, _, row = result['rows']
    near(row['delta_p'], ppl(32, 32) - ppl(128, 32), rtol=1e-2)
    assert 'delta_p' not in of_L and f"{row['delta_p']:.4f}" in out


def test_rule_classic_scores_every_target_of_text_shorter_than_a_window(run, tmp_path):
    write_corpus(tmp_path / 'text', get_tokenizer('bytes'), {'test': ['x' * 900, 'y' * 600]})
    result, _ = run('--rule=classic --lengths=[64,2048] --max_windows=9999 '
                    f'--dataset={tmp_path}/text')
    assert [row['scored_tokens'] for row in result['rows']] == [899 + 599] * 2


@pytest.fixture
def tuned(tiny_run, tmp_path):
    """tuned(L): the option that names a checkpoint of tiny_run, fine-tuned at 2L after L."""
    def tuned(L, factor=1.0):
        state = checkpoints.load(tiny_run / 'last.pt')
        state['model']['head.weight'] *= factor
        state['model_config'] |= {'block_size': 64, 'pretrained_length': L}
        checkpoints.save(tmp_path / f'tuned{L}.pt', **state)
        return f'{tmp_path}/tuned{L}.pt'

    return tuned


@pytest.mark.parametrize('command', [
    '--max_windows=9 --stride=4 --lengths=[64,128]',
    '--protocol=position --n_samples=4 --tail=16 --lengths=[64,128]',
    '--protocol=repeat --n_samples=9 --gram=3 --lengths=[128]'])
def test_the_context_of_a_fine_tuned_model_is_cut_to_its_first_length(run, tuned, command):
    """Otherwise its gain would hide what it learned from fine-tuning at 2L."""
    one, other = (run(command + more)[0] for more in ('', f' --init_from={tuned(32)}'))
    assert one['rows'] == other['rows'] and 'cut_loss' in one['rows'][-1]
    assert (one['block_size'], other['block_size']) == (32, 64)
    assert one['pretrained_length'] == other['pretrained_length'] == 32


# ---------------------------------------------------------------------- far repeats

def plain_repeats(x, g, L, is_near):
    """The targets of a window of ids, [(t, s)], by a search for each of them."""
    found = []
    for t in range(2 * L, len(x)):
        places = [s for s in range(g, t) if x[s - g:s] == x[t - g:t]]
        if places and (places[-1] >= t - L) == is_near:
            found.append((t, places[-1]))
    return found


def plain_repeat_losses(model, texts, scale=None, is_near=False, others=None, is_swapped=False):
    """
    A row for each repeat of 3 tokens, where L is 32: its window, the loss in the whole window, the
    losses in the cut context without and with the scale, whether token s is the target, and t - s.
    others: windows whose tokens replace those before t - L in the whole window. is_swapped: token s
    is replaced there by that of the target half of all targets before.
    """
    rows, texts = [], texts.tolist()
    places = [(w, t, s) for w, x in enumerate(texts) for t, s in plain_repeats(x, 3, 32, is_near)]
    for k, (w, t, s) in enumerate(places):
        x = texts[w]
        before = (x if others is None else others[w].tolist())[:t - 32]
        if is_swapped:
            v, _, other = places[k - len(places) // 2]
            before[s] = texts[v][other]
        whole = torch.tensor([before + x[t - 32:t + 1]])
        losses = [plain_losses(model, text, head_scale)[0, -1].item() for text, head_scale
                  in ((whole, scale), (whole[:, -33:], None), (whole[:, -33:], scale))]
        rows.append((w, *losses, x[s] == x[t], t - s))
    return np.array(rows)


def matches(found, rows, weight):
    """Raise AssertionError unless a row of the result is that of these targets."""
    w, whole, cut, own_cut, same, _ = rows.T
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


REPEAT = '--protocol=repeat --n_samples=12 --lengths=[128] --gram=3 --targets=9999 '


def plain_others(windows):
    """For each of 12 windows, the first one from the sixth after it on in another document."""
    is_end = windows.data.tokens == windows.data.tokens[-1]  # end-of-text is in its document
    document = np.cumsum(is_end) - is_end
    documents = [{*document[start:start + 129]} for start in windows.evenly_spaced_starts(12)]
    others = []
    for w in range(12):
        further = [(w + 6 + k) % 12 for k in range(12)]
        others.append(next(v for v in further if not documents[v] & documents[w]))
    return others


@pytest.mark.parametrize('split, scale', [('test', None), ('val', 3.0)])
def test_repeats_their_controls_and_their_headroom_equal_plain_loops(run, tiny, corpus_dir, split,
                                                                     scale):
    result, out = run(REPEAT + f"--controls=['near','other','token'] --split={split}"
                      + (f' --scale={scale}' if scale else ''))
    windows = Windows(str(corpus_dir), split, 128)
    others = plain_others(windows)
    # Most of val is one document, so the search looks further.
    assert (others == [*range(6, 12), *range(6)]) == (split == 'test')
    texts, val = (torch.from_numpy(Windows(str(corpus_dir), name, 128).evenly_spaced(12))
                  for name in (split, 'val'))
    found, scales = iter(result['rows']), scale and torch.full((2, 4), scale)
    for control in '', 'other document, ', 'other token, ', 'near, ':
        is_near = control == 'near, '
        weight = result['copy_weight']['near' if is_near else 'far']
        rows = plain_repeat_losses(tiny[0], texts, scales, is_near,
                                   texts[others] if 'document' in control else None,
                                   'token' in control)
        kinds = {f'{control}all': rows, f'{control}same token': rows[rows[:, 4] == 1]}
        if not control:
            kinds |= {f'{n + 1} to {2 * n} back': rows[(n < rows[:, 5]) & (rows[:, 5] <= 2 * n)]
                      for n in (32, 64)}
        for kind, those in kinds.items():
            row = next(found)
            assert row['kind'] == kind
            matches(row, those, weight)
        if control in ('', 'near, '):
            of_val = plain_repeat_losses(tiny[0], val, is_near=is_near)
            grid = np.linspace(0, 1, 500, endpoint=False)
            best = min(grid, key=lambda w: plain_copy_loss(of_val[:, 2], of_val[:, 4], w))
            assert abs(weight - best) <= 2e-3
    assert not [*found]
    assert result['found'] == result['rows'][0]['targets']
    assert result['share'] == result['found'] / (12 * 65)
    for row in result['rows']:
        assert (row['own_gain'] == row['gain']) == (scale is None)
        assert f"{row['gain']:.4f}" in out and f"{row['R']:.4f}" in out


def test_gain_is_against_the_cut_context_of_the_untuned_checkpoint(run, tiny_run, tuned):
    command, untuned = f'{REPEAT} --init_from={tuned(32, 1.5)}', run(REPEAT)[0]
    (own, _), (found, _) = (run(command + more) for more in ('', f' --baseline={tiny_run}/last.pt'))
    for row, before, alone in zip(found['rows'], untuned['rows'], own['rows'], strict=True):
        for name in 'cut_loss', 'copy_loss', 'headroom':
            assert row[name] == before[name] != alone[name]
        assert row['loss'] == alone['loss'] and row['own_gain'] == alone['gain']
        near(row['gain'], before['cut_loss'] - alone['loss'], atol=2e-5)  # as JSON rounds
    assert found['untuned']['weights_digest'] == untuned['weights_digest']
    refuses('tuned64.pt was pretrained at 64', run, f'{REPEAT} --baseline={tuned(64)}')


def test_the_untuned_model_of_a_folder_is_read_with_the_position_that_it_was_trained_with(
        run, tiny, tmp_path, corpus_dir):
    """The config.json of a NoPE model may say Llama, which has RoPE."""
    model, info = tiny
    llama = Transformer(dataclasses.replace(model.config, position='rope'))
    llama.load_state_dict(model.state_dict())
    save_folder(tmp_path, llama, info['tokenizer'], torch.float32)
    (tmp_path / 'tokenizer.json').unlink()  # then the data's tokenizer is the model's
    found, expected = (run(f'{REPEAT} --scale=1.5 {source}')[0]['rows'] for source in
                       (f'--init_from={tmp_path} --position=none --dataset={corpus_dir}', ''))
    for row, other in zip(found, expected, strict=True):
        near([row[key] for key in ('loss', 'cut_loss', 'own_cut_loss', 'R')],
             [other[key] for key in ('loss', 'cut_loss', 'own_cut_loss', 'R')], rtol=1e-4)


def test_the_untuned_model_has_no_rope_scaling(run, tiny_run, tmp_path):
    state = checkpoints.load(tiny_run / 'last.pt')
    state['model_config'] |= {'position': 'rope'}
    checkpoints.save(tmp_path / 'rope.pt', **state)
    rope, yarn = (run(f'{REPEAT} --init_from={tmp_path}/rope.pt --label=one {more}')[0]['rows'][0]
                  for more in ('', '--rope_scaling=yarn:4'))
    assert yarn['cut_loss'] == rope['cut_loss'] == rope['own_cut_loss'] != yarn['own_cut_loss']


def test_text_without_a_split_val_has_gains_but_no_headroom(run, tmp_path):
    text = Path(eval_ppl.__file__).read_text(encoding='utf-8')
    write_corpus(tmp_path / 'text', get_tokenizer('bytes'), {'test': [text]})
    result, out = run(REPEAT + f'--dataset={tmp_path}/text')
    row = result['rows'][0]
    assert 'no split val' in out and 'gain' in row and 'R' not in row
