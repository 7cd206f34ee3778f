"""
Attention entropy of a whole model against the matrix in float64, and rank correlation against its
definition. The formula of one layer is tested in test_kernels.py.

$ python -m pytest tests/test_entropy.py
"""

import math

import numpy as np
import pytest
from conftest import mistake, near, on, read, scale_set, stage_here
from plain import plain_cut, plain_entropy, plain_losses

from entropy import spearman
from lib.scales import save_scale

SCALES = [[0.5, 1, 2, 4], [1, 1, 1, 1]]


def test_spearman_of_hand_worked_examples():
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert spearman([1, 2, 3], [9, 4, 1]) == pytest.approx(-1)
    # ranks 1 2 3 4 5 and 2 1 4 3 5: 1 - 6 * (1 + 1 + 1 + 1 + 0) / (5 * 24) = 0.8
    assert spearman([1, 2, 3, 4, 5], [20, 10, 40, 30, 50]) == pytest.approx(0.8)
    # ties: ranks 1.5 1.5 3 and 1 2 3: deviations (-.5 -.5 1) . (-1 0 1) = 1.5, over sqrt(1.5 * 2)
    assert spearman([7, 7, 9], [1, 2, 3]) == pytest.approx(1.5 / math.sqrt(3))
    assert math.isnan(spearman([1, 2, 3], [5, 5, 5]))


# ---------------------------------------------------------------------- as run

def test_run_in_bits_reports_the_float64_matrix_over_ln_2(tiny_run, tiny, windows, tmp_path):
    """In float32 where no dtype is given: bfloat16 would be tenths of a nat off."""
    model, info = tiny
    save_scale(tmp_path / 'mine.json', info, {256: scale_set(SCALES)}, 'head')
    command = f'--scale={tmp_path}/mine.json --bits=True --length=128 --n_samples=3 --tail=16'
    command = [word for word in on(tiny_run, tmp_path, command) if '--dtype' not in word]
    out, result = stage_here('entropy', *command), read(tmp_path / 'entropy_mine.json')

    model.head_scale, tokens = SCALES, windows(3, 128)
    bits = plain_entropy(model, tokens[:, :-1]).mean(1).unflatten(-1, (64, 2)).mean(-1)
    bits = bits / math.log(2)
    losses = plain_losses(model, tokens).mean(0).view(64, 2).mean(1)  # in nats
    for key, expected in {'entropy': bits, 'mean_entropy': bits.mean((0, 1)), 'loss': losses,
                          'bound': np.log2(result['position'])}.items():
        near(result[key], expected, rtol=1e-4, atol=1e-4)
    cut = [plain_cut(model, tokens, T, 16).mean() for T in (32, 64, 128)]
    assert result['cut']['position'] == [32, 64, 128]
    near(result['cut']['loss'], cut, rtol=1e-5)
    assert (result['unit'], result['head_scale']) == ('bits', SCALES)
    assert result['weights_digest'] == info['digest']
    assert result['spearman'] == [pytest.approx(spearman(SCALES[0], bits[0, :, -1])), None]
    row = next(line.split() for line in out.splitlines() if line.split()[0][:4] == '63.5')
    near(float(row[1]), result['mean_entropy'][31], atol=6e-4)  # of positions 63 and 64


def test_run_without_a_scale_reads_8L_in_nats_and_another_run_may_show_its_curve(tiny_run,
                                                                                 tmp_path):
    stage_here('entropy', *on(tiny_run, tmp_path, '--n_samples=3'))
    result = read(tmp_path / 'entropy.json')
    assert result['unit'] == 'nats' and 'spearman' not in result
    assert 8 * 32 - 8 < result['position'][-1] <= 8 * 32
    command = f'--compare=["{tmp_path}/entropy.json"] --label=two --length=64'
    stage_here('entropy', *on(tiny_run, tmp_path, command))
    other, = read(tmp_path / 'entropy_two.json')['compare']
    assert other['mean_entropy'] == result['mean_entropy']
    line = mistake('entropy', *on(tiny_run, tmp_path, f'{command} --bits=True'))
    assert f'{tmp_path}/entropy.json is in nats' in line
