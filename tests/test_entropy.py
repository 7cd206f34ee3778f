"""
Attention entropy of a whole model against the matrix in float64, and rank correlation against its
definition. The formula of one layer is tested in test_kernels.py.

$ python -m pytest tests/test_entropy.py
"""

import json
import math

import numpy as np
import pytest
import torch
from conftest import mistake, plain_losses, plain_transformer, scale_set, stage, stage_here

from entropy import measure_entropy, spearman
from lib import checkpoints
from lib.scales import save_scale
from lib.tokens import Windows

SCALES = [[0.5, 1, 2, 4], [1, 1, 1, 1]]


def plain_entropy(model, tokens):
    """Of every query, a mean over samples: (n_layer, H, T) float64."""
    attention = plain_transformer(model, tokens[:, :-1])[1]  # (n_layer, B, H, T, T)
    return torch.special.entr(attention).sum(-1).mean(1)


def test_measure_entropy_equals_the_plain_model_bin_by_bin(cpu, tiny_run, corpus_dir):
    model, _ = checkpoints.load_model('last', tiny_run, 'cpu')
    model.head_scale = torch.linspace(0.5, 6, 8).view(2, 4)
    windows = Windows(str(corpus_dir), 'test', 90)
    tokens = torch.from_numpy(windows.evenly_spaced(5))
    losses = plain_losses(model, tokens).mean(0)[:88].view(22, 4)  # the last two fill no bin
    expected = plain_entropy(model, tokens)[..., :88].unflatten(-1, (22, 4)).mean(-1)
    position, loss, entropy = measure_entropy(model, windows, 5, 200, 4, cpu)
    np.testing.assert_allclose(position, np.arange(1, 89).reshape(22, 4).mean(1))
    np.testing.assert_allclose(loss, losses.mean(1), atol=1e-4)
    np.testing.assert_allclose(entropy, expected, atol=1e-4)


def test_spearman_of_hand_worked_examples():
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert spearman([1, 2, 3], [9, 4, 1]) == pytest.approx(-1)
    # ranks 1 2 3 4 5 and 2 1 4 3 5: 1 - 6 * (1 + 1 + 1 + 1 + 0) / (5 * 24) = 0.8
    assert spearman([1, 2, 3, 4, 5], [20, 10, 40, 30, 50]) == pytest.approx(0.8)
    # ties: ranks 1.5 1.5 3 and 1 2 3: deviations (-.5 -.5 1) . (-1 0 1) = 1.5, over sqrt(1.5 * 2)
    assert spearman([7, 7, 9], [1, 2, 3]) == pytest.approx(1.5 / math.sqrt(3))
    assert math.isnan(spearman([1, 2, 3], [5, 5, 5]))


# ---------------------------------------------------------------------- as run

def arguments(tiny_run, out_dir, command=''):
    where = f'--init_from={tiny_run}/last.pt --out_dir={out_dir} --device=cpu --n_samples=3 '
    return (where + command).split()


def read(path):
    return json.loads(path.read_text())


def test_run_in_bits_reports_the_float64_matrix_over_ln_2(tiny_run, corpus_dir, tmp_path):
    """In float32 where no dtype is given: bfloat16 would be tenths of a nat off."""
    model, info = checkpoints.load_model('last', tiny_run, 'cpu')
    save_scale(tmp_path / 'mine.json', info, {256: scale_set(SCALES)}, 'head')
    command = f'--scale={tmp_path}/mine.json --bits=True --length=128'
    out = stage_here('entropy', *arguments(tiny_run, tmp_path, command))
    result = read(tmp_path / 'entropy_mine.json')
    for name in ('entropy', 'entropy_heads'):
        assert (tmp_path / f'{name}_mine.png').stat().st_size > 1000

    model.head_scale = SCALES
    tokens = torch.from_numpy(Windows(str(corpus_dir), 'test', 128).evenly_spaced(3))
    bits = (plain_entropy(model, tokens).unflatten(-1, (64, 2)).mean(-1) / math.log(2)).numpy()
    np.testing.assert_allclose(result['entropy'], bits, atol=1e-4)
    np.testing.assert_allclose(result['mean_entropy'], bits.mean((0, 1)), atol=1e-4)
    np.testing.assert_allclose(result['bound'], np.log2(result['position']), rtol=1e-5)
    loss = plain_losses(model, tokens).mean(0).view(64, 2).mean(1)
    np.testing.assert_allclose(result['loss'], loss, rtol=1e-4)  # this stays in nats
    assert (result['unit'], result['head_scale']) == ('bits', SCALES)
    assert result['weights_digest'] == info['digest']
    expected = spearman(SCALES[0], bits[0, :, -1])
    assert result['spearman'] == [pytest.approx(expected), None]
    row = next(line.split() for line in out.splitlines() if line.split()[0] == '64')
    assert float(row[1]) == pytest.approx(result['mean_entropy'][31], abs=6e-4)  # to 64


def test_run_without_a_scale_has_no_correlation_and_no_label(tiny_run, tmp_path):
    stage_here('entropy', *arguments(tiny_run, tmp_path))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ['entropy.json', 'entropy.png', 'entropy_heads.png']
    result = read(tmp_path / 'entropy.json')
    assert result['unit'] == 'nats' and 'spearman' not in result
    assert 8 * 32 - 8 < result['position'][-1] <= 8 * 32
    command = f"--compare=['{tmp_path}/entropy.json'] --label=two --length=64"
    stage_here('entropy', *arguments(tiny_run, tmp_path, command))
    other, = read(tmp_path / 'entropy_two.json')['compare']
    assert other['mean_entropy'] == result['mean_entropy']


@pytest.mark.slow
def test_two_ranks_measure_what_one_does(tiny_run, tmp_path):
    stage_here('entropy', *arguments(tiny_run, tmp_path, '--length=64'))
    stage('entropy', *arguments(tiny_run, tmp_path, '--length=64 --label=two'), ranks=2)
    one, two = read(tmp_path / 'entropy.json'), read(tmp_path / 'entropy_two.json')
    for key in ('entropy', 'loss'):
        np.testing.assert_allclose(two[key], one[key], rtol=1e-5)


def test_mistakes_are_one_line_before_any_work(tiny_run, tmp_path):
    (tmp_path / 'other.json').write_text('{"stage": "passkey"}')
    gap = {'stage': 'entropy', 'position': [1, 2], 'loss': [3, None], 'mean_entropy': [1, 2]}
    (tmp_path / 'gap.json').write_text(json.dumps(gap))
    for argument, named in (('--n_samples=0', 'n_samples'), ('--length=100000', '100,000'),
                            (f"--compare=['{tmp_path}/other.json']", 'other.json'),
                            (f"--compare=['{tmp_path}/gap.json']", 'gap.json has null in loss')):
        assert named in mistake('entropy', *arguments(tiny_run, tmp_path / 'out', argument))
