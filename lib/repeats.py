"""
Repeats: tokens that follow a piece of text which occurred before in the same window. A model that
reads the earlier occurrence can predict them. A far repeat is out of reach of a context cut to L.
In this file L is the model's L0, the tokens in a window of pretraining.

Also the copy cache, which says how much there is to gain at repeats: the gain of a model that reads
the cut context and copies (Grave et al. 2017, arXiv:1612.04426, in its simplest form). The cache
gives the target the probability (1 - w) p + w c. p is the target's probability by the model. c is 1
if the token after the earlier occurrence equals the target, else 0. The weight w is fitted on the
split val.
"""

import math
from dataclasses import dataclass

import numpy as np

from lib.answers import note
from lib.errors import UserError
from lib.scales import vectors_for


def last_repeats(tokens, g):
    """
    For each target t: the latest s < t with tokens[s-g:s] equal to tokens[t-g:t], or -1 if there is
    none. The g tokens before t also stand before s. tokens: (n, T) ids; each row is a separate
    window. Returns (n, T).
    """
    found = np.full(tokens.shape, -1)
    for row, of_row in zip(tokens, found):
        latest = {}  # {g tokens: the position after their latest occurrence}
        for t in range(g, len(row)):
            gram = row[t - g:t].tobytes()
            of_row[t] = latest.get(gram, -1)
            latest[gram] = t
    return found


@dataclass
class Targets:
    """Tokens to predict. The tokens before each target also occur earlier in its window."""
    window: np.ndarray   # (n,), the window of each target
    t: np.ndarray        # (n,), the position of each target in its window
    s: np.ndarray        # (n,), the position of the token after the earlier occurrence
    same: np.ndarray     # (n,), whether the token after the earlier occurrence is the target
    found: int           # how many targets were found; n of them are drawn


def find_targets(samples, L, gram, most, near=False):
    """
    Targets t >= 2L in windows (n, W + 1). The `gram` tokens before a target t also stand before a
    token s < t - L, and before no s in [t - L, t). So token s is outside the cut context, which is
    tokens t - L ... t - 1. near: find targets with s inside the cut context instead, t - L <= s. If
    there are several s, the latest one counts. If there are more than `most` targets, `most` of
    them are drawn at random, always the same ones. Raises UserError if there are none.
    """
    t, s = np.arange(samples.shape[1]), last_repeats(samples, gram)
    is_near = s >= t - L
    is_wanted = is_near if near else (s >= 0) & ~is_near
    window, position = np.nonzero(is_wanted & (t >= 2 * L))
    n_found = len(position)
    if n_found == 0:
        raise UserError(f'no token of {len(samples)} windows of {samples.shape[1] - 1} tokens is a '
                        f'{"near" if near else "far"} repeat of {gram} tokens. Give '
                        'other text. In eval_ppl.py you may also lower --gram=.')
    if n_found > most:
        drawn = np.sort(np.random.default_rng(0).choice(n_found, most, replace=False))
        window, position = window[drawn], position[drawn]
    s = s[window, position]
    same = samples[window, position] == samples[window, s]
    return Targets(window, position, s, same, n_found)


def copy_losses(losses, same, weight):
    """
    The losses of targets, (n,), with the copy cache: -ln((1 - weight) e^-loss + weight [same]). The
    cache mixes the model's prediction with the token after the earlier occurrence.
    """
    with np.errstate(divide='ignore'):  # ln 0 is -inf, where the copied token is wrong
        return -np.logaddexp(np.log1p(-weight) - losses, np.log(weight * same))


def fit_copy_weight(losses, same):
    """
    The weight in [0, 1) with the smallest mean of copy_losses(). The mean is convex in the weight,
    so bisection finds where its slope is 0.
    """
    p, low, high = np.exp(-losses), 0.0, 1.0
    for _ in range(50):
        weight = (low + high) / 2
        # The derivative of each target's log probability
        rise = np.where(same, (1 - p) / (p + weight * (1 - p)), -1 / (1 - weight))
        low, high = (weight, high) if rise.sum() > 0 else (low, weight)
    return low


def ratio_over_windows(a, b, window):
    """
    Returns sum(a) / sum(b) and its standard error. a, b: (n,), one number per target. window: (n,),
    the window of each target. Targets of one window, such as those of a long repeat, are not
    independent. So the error is that of a ratio estimate over windows.
    """
    total, n_windows = b.sum() or math.nan, len(np.unique(window))
    ratio = a.sum() / total
    sums = np.bincount(window, a - ratio * b)  # one sum per window; 0 if it has no target
    variance = (sums ** 2).sum() * n_windows / (n_windows - 1) if n_windows > 1 else math.nan
    return ratio, variance ** 0.5 / abs(total)


def repeat_summary(window, losses, cut, own_cut=None, copied=None):
    """
    A row of the result. Each argument has one number per target, (n,). losses: the model reads the
    whole window. cut: the untuned model reads the cut context. own_cut: the model itself reads the
    cut context. copied: cut, with the copy cache. Without own_cut or copied, the row lacks their
    entries. The error of R treats the weight of the copy as known.
    """
    one, row = np.ones(len(window)), {'loss': losses.mean(), 'cut_loss': cut.mean()}
    row['gain'], row['gain_error'] = ratio_over_windows(cut - losses, one, window)
    if own_cut is not None:
        row['own_cut_loss'] = own_cut.mean()
        row['own_gain'], row['own_gain_error'] = ratio_over_windows(own_cut - losses, one, window)
    if copied is not None:
        row |= {'copy_loss': copied.mean(), 'headroom': (cut - copied).mean()}
        row['R'], row['R_error'] = ratio_over_windows(cut - losses, cut - copied, window)
    return row | {'targets': len(window), 'windows': len(np.unique(window))}


def other_windows(windows, n):
    """
    For each of n evenly spaced windows: the index of a window that shares no document with it. The
    search begins n / 2 windows after it.
    """
    starts, others = windows.evenly_spaced_starts(n), []
    n = len(starts)
    first, last = (np.searchsorted(windows.data.starts, place, side='right')
                   for place in (starts, starts + windows.block_size))
    for window in range(n):
        further = (window + n // 2 + np.arange(n)) % n
        is_other = (last[further] < first[window]) | (first[further] > last[window])
        if not is_other.any():
            raise UserError("controls has 'other', but every window shares a document with "
                            f'window {window}. Raise --n_samples=, or give other text.')
        others.append(further[is_other.argmax()])
    return np.array(others)


# ---------------------------------------------------------------------- of a run

def losses_when_cut(model, samples, chosen, batch_tokens, runtime, label=None):
    """
    The losses of targets, (n,). The model sees only the L tokens before each target. label: text of
    the progress bar; None: no bar.
    """
    L = model.config.L0
    contexts = samples[chosen.window[:, None], chosen.t[:, None] + np.arange(-L, 1)]
    with vectors_for(model, L):
        return runtime.over_windows(contexts, batch_tokens,
                                    lambda inputs, after: model(inputs, after[:, -1:])[:, 0], label)


def targets_of_val(run, W, near=False):
    """
    Windows of W tokens of the split val, and the targets in them. Returns None, and says why, if
    there are none.
    """
    s = run.settings
    try:
        samples = run.windows(W, 'val').evenly_spaced(s['n_samples'])
        return samples, find_targets(samples, run.model.config.L0, s['gram'], s['targets'], near)
    except UserError as error:
        note('headroom and R are left out, because the copy cache cannot be fitted on the split '
             f'val: {error}')


def cut_context_losses(run, untuned, samples, chosen, fitted_on):
    """
    The losses of targets, (n,) each, with the context cut to L: by the untuned model, by the model
    itself, and by the untuned model with the copy cache. Also returns the weight of the copy.
    fitted_on: what targets_of_val() returns. The weight is fitted on it. If it is None, there is no
    copy cache, and the weight is None.
    """
    L = run.model.config.L0
    how = run.settings['batch_tokens'], run.runtime, f'cut to {L} tokens'
    cut = losses_when_cut(untuned, samples, chosen, *how)
    own_cut = cut
    if untuned is not run.model:
        own_cut = losses_when_cut(run.model, samples, chosen, *how)
    if fitted_on is None:
        return [cut, own_cut], None
    weight = fit_copy_weight(losses_when_cut(untuned, *fitted_on, *how), fitted_on[1].same)
    return [cut, own_cut, copy_losses(cut, chosen.same, weight)], weight


def repeat_rows(kind, chosen, *losses):
    """One row for all targets, and one for those that equal the token after the repeat."""
    kinds = {'all': np.full(len(chosen.t), True), 'same token': chosen.same}
    return rows_of_kinds({f'{kind}{name}': which for name, which in kinds.items()}, chosen, *losses)


def distance_rows(L, W, chosen, *losses):
    """Rows of far repeats by the distance t - s: L < t - s <= 2L, then to 4L, to 8L ... to W."""
    kinds, far, back = {}, L, chosen.t - chosen.s
    while far < W:
        near, far = far, min(2 * far, W)
        kinds[f'{near + 1} to {far} back'] = (near < back) & (back <= far)
    return rows_of_kinds(kinds, chosen, *losses)


def rows_of_kinds(kinds, chosen, *losses):
    """A row for each kind that has targets. kinds: {name: which targets, (n,) bool}."""
    return [{'kind': name} | repeat_summary(*(array[which] for array in (chosen.window, *losses)))
            for name, which in kinds.items() if which.any()]
