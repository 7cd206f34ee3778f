"""
Repeats and the copy cache, by plain searches and hand calculations.

$ python -m pytest tests/test_repeats.py
"""

import math

import numpy as np
import pytest
from conftest import near, plain_copy_loss

from lib.repeats import (
    copy_losses,
    find_targets,
    fit_copy_weight,
    last_repeats,
    ratio_over_windows,
)


@pytest.mark.parametrize('g, n_symbols', [(1, 3), (2, 3), (5, 2), (8, 1)])
def test_last_repeats_equal_a_plain_search(g, n_symbols):
    tokens = np.random.default_rng(g).integers(0, n_symbols, (4, 60)) + 50_000
    found = last_repeats(tokens, g)
    for x, of_row in zip(tokens.tolist(), found.tolist(), strict=True):
        for t, latest in enumerate(of_row):
            places = [s for s in range(g, t) if x[s - g:s] == x[t - g:t]]
            assert latest == max(places, default=-1)
    assert (found >= 0).any() and (found < 0).any()


def test_targets_are_drawn_from_those_found():
    samples = np.random.default_rng(0).integers(0, 3, (4, 60))
    every, some = (find_targets(samples, 8, 2, most) for most in (9999, 7))
    drawn, found = ({*zip(one.window, one.t)} for one in (some, every))
    assert len(drawn) == 7 and drawn < found and some.found == every.found == len(found)


def test_standard_error_of_a_gain_is_over_windows():
    # Of windows of equal size it is that of their means; targets of a window may be alike.
    of_window, one = np.random.default_rng(0).normal(size=5), np.ones(100)
    _, error = ratio_over_windows(np.repeat(of_window, 20), one, np.repeat(np.arange(5), 20))
    near(error, of_window.std(ddof=1) / 5 ** 0.5, rtol=1e-9)
    # Of unequal ones: the mean is 1/4, deviations sum to 3/4 and -3/4; (2 (9/16 + 9/16))^(1/2) / 4.
    found = ratio_over_windows(np.eye(4)[0], np.ones(4), np.array([0, 1, 1, 1]))
    assert found == (0.25, 0.375)
    # Of a ratio: 6 / 3 = 2, and 2 - 2 · 2 = -2, 4 - 2 · 1 = 2; (2 (4 + 4))^(1/2) / 3.
    found = ratio_over_windows(np.array([2., 4]), np.array([2., 1]), np.arange(2))
    assert found == (2, pytest.approx(4 / 3))
    none = ratio_over_windows(np.ones(2), np.zeros(2), np.arange(2))  # no headroom, no share of it
    assert np.isnan(none).all()


@pytest.mark.parametrize('share', [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize('spread', [0.1, 3.0])
def test_weight_of_the_copy_is_the_best_of_a_grid(share, spread):
    random = np.random.default_rng(int(10 * share))
    losses, same = random.exponential(spread, 200), random.random(200) < share
    weight = fit_copy_weight(losses, same)
    near(copy_losses(losses, same, weight).mean(), plain_copy_loss(losses, same, weight),
         rtol=1e-9, atol=1e-15)
    grid = np.linspace(0, 1, 1000, endpoint=False)
    values = [plain_copy_loss(losses, same, each) for each in grid]
    best = grid[np.argmin(values)]
    assert abs(weight - best) <= 1e-3 + 1e-9
    assert copy_losses(losses, same, weight).mean() <= min(values) + 1e-12
    assert 0 <= weight < 1 and (weight == 0) == (best == 0)


def test_copy_cache_takes_probabilities_that_no_float_holds():
    losses, same = np.array([800.0, 800.0, 0.0]), np.array([True, False, False])
    assert np.isfinite(fit_copy_weight(losses, same))
    near(copy_losses(losses, same, 0.25), [math.log(4), 800 + math.log(4 / 3), math.log(4 / 3)],
         rtol=1e-12)
    near(copy_losses(losses, same, 0.0), losses)
