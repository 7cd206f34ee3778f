"""Perplexity: every number again by a plain loop over windows."""

import json
import math

import numpy as np
import pytest
import torch
from conftest import mistake, on, read, stage

from common import setup
from data import Windows
from eval_ppl import window_ends
from stage import cut_windows, open_model


@pytest.fixture(scope='module')
def losses_of(tiny_run):
    """losses_of(ids): the loss of each token of one text but the first, (T - 1,) float64."""
    model, _ = open_model('last', str(tiny_run), setup('cpu', 'float32'))

    def losses_of(ids):
        x = torch.tensor(np.array(ids, np.int64))[None]
        return model(x[:, :-1], x[:, 1:])[0].double().numpy()

    return losses_of


def measured(tiny_run, out_dir, *more):
    """The JSON of eval_ppl.py on tiny_run (L = 32)."""
    stage('eval_ppl', *on(tiny_run, out_dir), '--label=x', *more)
    return read(next(out_dir.glob('eval_ppl*.json')))


def test_where_sliding_windows_end_by_hand():
    starts = np.array([10, 31])  # two documents, the second shorter than a window; tokens to 36
    assert window_ends(starts, 36, 12, 4).tolist() == [22, 26]
    assert window_ends(starts, 36, 8, 4).tolist() == [18, 22, 26]


def test_the_cut_context_reads_at_most_L_tokens_and_scores_each_token_once():
    pieces = cut_windows(100, 164, 20, 32)
    assert all(hi - lo == 32 and n <= 4 for lo, hi, n in pieces)
    assert sorted(t for _, hi, n in pieces for t in range(hi - n, hi)) == list(range(144, 164))
    assert cut_windows(0, 10, 10, 32) == [(0, 10, 4), (0, 6, 4), (0, 2, 2)]  # no text before it


@pytest.mark.parametrize('rule', ['same', 'paper'])
def test_sliding_windows_score_what_a_loop_scores(tiny_run, losses_of, corpus_dir, tmp_path, rule):
    found = measured(tiny_run, tmp_path, f'--rule={rule}', '--lengths=[32,48,64]', '--stride=20',
                     '--max_windows=7')
    data = Windows(str(corpus_dir), 'test', 1)
    for row in found['rows']:
        T = row['length']
        ends = window_ends(data.starts, len(data.tokens), 64 if rule == 'same' else T, 20)
        windows = [(hi - T, hi, 20) for hi in ends]
        n = len(windows)
        chosen = [windows[i * n // 7] for i in range(7)] if rule == 'same' else windows[:7]
        own = [losses_of(data.tokens[lo:hi])[-k:] for lo, hi, k in chosen]
        # by rule same the baseline of all lengths is that of the longest
        cut = [np.concatenate([losses_of(data.tokens[a:b + 1])[-c:] for a, b, c in
                               cut_windows(hi - 64 if rule == 'same' else lo, hi - 1, k, 32)])
               for lo, hi, k in chosen]
        assert row['loss'] == pytest.approx(np.concatenate(own).mean(), abs=1e-5)
        of_windows = np.mean(own, axis=1)
        assert row['standard_error'] == pytest.approx(of_windows.std(ddof=1) / 7 ** 0.5, abs=1e-5)
        assert row['ppl'] == pytest.approx(math.exp(row['loss']))
        if T > 32:
            assert row['cut_loss'] == pytest.approx(np.concatenate(cut).mean(), abs=1e-5)
            assert row['gain'] == pytest.approx(row['cut_loss'] - row['loss'], abs=1e-5)


def test_position_and_tail_are_means_over_passes(tiny_run, losses_of, corpus_dir, tmp_path):
    found = measured(tiny_run, tmp_path / 'position', '--protocol=position', '--n_samples=5',
                     '--lengths=[32,128]')
    x = Windows(str(corpus_dir), 'test', 128).evenly_spaced(5, spacing=64)
    losses = np.array([losses_of(ids) for ids in x])
    assert found['loss'] == pytest.approx(losses.mean(0).reshape(-1, 2).mean(1), abs=1e-5)
    own, cut = losses[:, 64:128].mean(1), np.array([np.mean([
        losses_of(ids[hi - 32:hi + 1])[-4:] for hi in range(68, 129, 4)]) for ids in x])
    assert found['rows'][0]['loss'] == pytest.approx(losses[:, :32].mean(), abs=1e-5)
    row = found['rows'][1]
    assert (row['loss'], row['cut_loss']) == pytest.approx((own.mean(), cut.mean()), abs=1e-5)
    paired = (cut - own).std(ddof=1) / 5 ** 0.5
    assert row['gain_error'] == pytest.approx(paired, abs=1e-5)

    sharp = {'target_length': 128, 'head_scale': [[9.0] * 4] * 2}
    (tmp_path / 'sets.json').write_text(json.dumps({
        'weights_digest': found['weights_digest'], 'position_method': 'none', 'rope_scaling': '',
        'sets': [sharp]}))
    sets = measured(tiny_run, tmp_path / 'sets', '--protocol=position', '--n_samples=5',
                    '--lengths=[32,64,128]', f'--scale={tmp_path}/sets.json')
    model, _ = open_model('last', str(tiny_run), setup('cpu', 'float32'),
                          scale=tmp_path / 'sets.json')
    x = torch.from_numpy(x)
    for row, T in zip(sets['rows'], (32, 64, 128)):
        losses = model(x[:, :T], x[:, 1:T + 1])[:, -64:]
        assert row['loss'] == pytest.approx(losses.mean().item(), abs=1e-5)

    found = measured(tiny_run, tmp_path / 'tail', '--protocol=tail', '--n_samples=5', '--tail=16',
                     '--lengths=[16,128]')
    x = Windows(str(corpus_dir), 'test', 128).evenly_spaced(5, spacing=16)
    whole, alone = (np.array([losses_of(ids[-T - 1:])[-32:] for ids in x]) for T in (128, 32))
    short = np.array([losses_of(ids[-17:]) for ids in x])
    rows = found['rows']
    assert [row['loss'] for row in rows] == pytest.approx(
        [short.mean(), whole[:, -16:].mean()], abs=1e-5)
    delta = math.exp(alone.mean()) - math.exp(whole.mean())
    assert rows[1]['delta_p'] == pytest.approx(delta, abs=1e-4)


@pytest.mark.parametrize('words, named', [
    ('--rule=best', 'rule'), ('--stride=64', 'stride'), ('--lengths=[100000]', 'tokens'),
    ('--scale=none.json', 'none.json')])
def test_a_mistake_ends_in_one_line(tiny_run, tmp_path, words, named):
    assert named in mistake('eval_ppl', *on(tiny_run, tmp_path), *words.split())
