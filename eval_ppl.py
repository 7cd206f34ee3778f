"""
Perplexity of a checkpoint at and beyond its training length, with any softmax scale. Section 4.2
and Table 2 of "Length Generalization of Causal Transformers without Position Encoding"; the last
tokens of each length, and what a longer context gains, as in Figures 1 to 6 and Table 1 of "DAPE
V2". And far repeats: tokens whose like was last seen before the last L tokens.

`gain` tells what a length T beyond L is worth, in nats: the loss when the model sees only the last
L tokens (cut_loss), minus the loss when it sees T tokens; the same tokens, model and scales. Above
0 the model reads past L. Below 0, the tokens beyond L do harm. The cut context is windows of at
most L tokens that score their last L / 8, so it holds 7L/8 to L tokens; at far repeats, L. A file
of sets for several lengths does not change how the cut context is read. If a model was fine-tuned
at another length, then lengths, strides and Delta P follow the new L, and the context is cut to the
old one.

At far repeats `gain` is against the cut context of the untuned model, the checkpoint without the
scales and the position method that are asked for, or --baseline; `own_gain` is against the model's
own. `headroom` is how much there is to gain: what a copy cache gains (Grave et al. 2017,
arXiv:1612.04426, in its simplest form). The cache gives the target the probability (1 - w) p + w c.
p is that of the untuned model in the cut context; c is 1 where the token that followed the repeat
is the target, else 0; the split val chooses the weight w. R = gain / headroom.

$ python eval_ppl.py                                             # sliding windows of L ... 8L
$ python eval_ppl.py --scale=out/demo/nope/scale_head_640.json   # the same with tuned scales
$ python eval_ppl.py --protocol=position                         # the loss at each position to 8L
$ python eval_ppl.py --protocol=tail                             # last tokens of each length
$ python eval_ppl.py --protocol=repeat                           # far repeats in windows of 8L
$ python eval_ppl.py --protocol=repeat "--controls=['near','other']"   # and the controls
$ torchrun --nproc_per_node=8 eval_ppl.py --out_dir=out/nope_1b --dataset=pg19 --rule=paper

Writes out_dir/eval_ppl[_PROTOCOL][_LABEL].json and, but for far repeats, .png
"""

import functools
import itertools
import math
from dataclasses import dataclass

import numpy as np

from configurator import between, configure, settings
from lib.checkpoints import Run, TextSettings, dataset_of, load_model, require_tokenizer
from lib.devices import compiled_for
from lib.errors import UserError
from lib.generate import require_positions
from lib.losses import by_position, cut_losses, cut_windows
from lib.results import bin_means, note, print_rows
from lib.tokens import documents

# how to read it
protocol = 'sliding'         # sliding windows, position (each of one pass), tail (last tokens), or
                             # repeat (far repeats, in windows of the longest length)
lengths: list[int] | None = None  # window lengths in tokens; None: L, 2L, 4L and 8L
rule = 'same'                # sliding windows: same, paper or classic; see sliding_windows()
stride: int | None = None    # tokens scored per sliding window; None: 256, or L/8 where L < 2048
max_windows = 1024           # sliding: windows per length; rule same: evenly spaced, else the first
n_samples = 256              # all but sliding: windows of the longest length, evenly spaced
tail: int | None = None      # tokens at the end of a length; None: position 64, tail 256 or L
gram = 8                     # repeat: so many tokens before a target occurred before
targets = 1500               # repeat: targets to score, drawn at random from those found
baseline: str | None = None  # repeat: the untuned model's checkpoint file; None: the one it reads
controls: list[str] = []     # repeat: near (repeats in the last L), other (another document's text
                             # before the last L)
batch_tokens = 16384         # tokens in one forward pass; lower it when memory runs out
compile = True               # torch.compile the model, where it reads so much that this pays

RULES = ('same', 'paper', 'classic')


def perplexity(loss):
    """exp of a loss in nats per token; of 700 where it is more, as a float holds no exp(710)."""
    return math.exp(min(loss, 700))


def summary(losses, n_scored=None):
    """
    Of the mean loss of each window, (n,): the mean over all tokens scored, its perplexity, and the
    standard error over windows. n_scored: tokens that each window scores; None: all the same.
    """
    mean = np.average(losses, weights=n_scored)
    n, error = len(losses), math.nan
    if n > 1:  # windows that score more tokens weigh more
        weights = 1 if n_scored is None else n_scored / n_scored.mean()
        error = (((weights * (losses - mean)) ** 2).sum() / (n - 1) / n) ** 0.5
    return {'ppl': perplexity(mean), 'loss': mean, 'standard_error': error, 'windows': n}


def gain_of(losses, cut_losses, n_scored=None):
    """
    Of the mean losses of each window (n,), read whole and cut: the loss when cut, the gain from
    what lies beyond, and its standard error over windows, each paired with itself.
    """
    gain = summary(cut_losses - losses, n_scored)
    return {'cut_loss': np.average(cut_losses, weights=n_scored), 'gain': gain['loss'],
            'gain_error': gain['standard_error']}


# ---------------------------------------------------------------------- sliding windows

def sliding_windows(start, end, length, first_end, stride, rule):
    """
    The windows of one document, tokens[start:end]: a list of (lo, hi, n). A window reads
    tokens[lo:hi], `length` of them, and scores its last n; it moves on by `stride`.
    same:    windows end at start + first_end, + stride ... before end. first_end is the longest
             length compared, so every length scores the same tokens: only the context differs.
    paper:   windows end at start + length, + stride ... before end: the released code, where each
             length scores its own tokens (run_ppl.py of AntNLP/nope_head_scale). The first
             length - stride tokens are never scored.
    classic: every token but the first scored once, the first window whole (Press et al. 2022).
    """
    if rule not in RULES:
        raise UserError(f"rule is '{rule}'. Choose {', '.join(RULES)}.")
    if rule != 'classic':
        first = start + (first_end if rule == 'same' else length)
        return [(hi - length, hi, stride) for hi in range(first, end, stride)]
    if end - start < 2:
        return []
    hi = min(start + length, end)
    windows = [(start, hi, hi - start - 1)]
    while hi < end:
        before, hi = hi, min(hi + stride, end)
        windows.append((hi - length, hi, hi - before))
    return windows


def score_windows(model, tokens, windows, batch_tokens, runtime, label=None):
    """
    Sum of the losses of each window's scored tokens, in nats: (len(windows),) float64, in order, on
    every rank. tokens: (n,) array of ids; windows: from sliding_windows(); label: of the progress
    bar; None: no bar. Logits are computed for scored tokens only.
    """
    groups, sums = {}, np.empty(len(windows))
    for i, (lo, hi, n_scored) in enumerate(windows):
        groups.setdefault((hi - lo, n_scored), []).append(i)
    for (T, n_scored), group in groups.items():
        read = compiled_for(model, runtime, compile, len(group), T)

        def measure(inputs, targets, read=read, n_scored=n_scored):
            losses = read(inputs, targets[:, -n_scored - 1:])[:, :-1]
            return losses.cpu().double().sum(1)

        # All tokens of a window are read, as what a method does may depend on their number. What
        # follows the last one is not known: any token stands for it, and its loss is left out.
        texts = np.zeros((len(group), T + 1), np.int64)
        for text, i in zip(texts, group):
            lo, hi, _ = windows[i]
            text[:T] = tokens[lo:hi]
        has_bar = label is not None and 2 * len(group) > len(windows)
        bar = f'{label} of {T}' if has_bar else None
        sums[group] = runtime.over_windows(texts, batch_tokens, measure, bar)
    return sums


def windows_of(data, length, longest, stride, rule, max_windows):
    """The windows of all documents, at most so many: spread over them, or the first (see rule)."""
    windows = []
    for start, end in documents(data):
        windows += sliding_windows(start, end, length, longest, stride, rule)
    if not windows:
        needed = {'same': longest, 'paper': length, 'classic': 1}[rule]
        raise UserError(f'no document of this split is longer than {needed} tokens. '
                        'Choose shorter --lengths= or other text.')
    n = min(max_windows, len(windows))
    among = len(windows) if rule == 'same' else n
    return [windows[i * among // n] for i in range(n)]


def sliding(run, sizes):
    """
    One row a length: loss, perplexity, past L the gain over the context cut to L, and how many
    documents, windows and tokens it was measured on; and {length: mean loss of each window}.
    """
    s, rows, by_window, L = run.settings, [], {}, run.model.config.trained_length
    S = checked_stride(s['stride'], run.L, sizes)
    require_positions(run.model, sizes[-1])
    data = run.windows(1).data  # all: rule classic also reads documents shorter than a window
    to_score = [windows_of(data, length, sizes[-1], S, s['rule'], s['max_windows'])
                for length in sizes]

    @functools.cache  # by rule same the windows of L, and the cut ones of each length, are the same
    def sums_of(windows):
        return score_windows(run.model, data.tokens, windows, s['batch_tokens'], run.runtime,
                             'windows')

    for length, windows in zip(sizes, to_score):
        n_scored = np.array([n for _, _, n in windows])
        losses = sums_of(tuple(windows)) / n_scored
        first_tokens = [lo for lo, _, _ in windows]
        used = np.unique(np.searchsorted(data.starts, first_tokens, side='right'))
        row = {'length': length} | summary(losses, n_scored)
        row |= {'documents': len(used), 'scored_tokens': n_scored.sum()}
        if length > L:
            pieces = cut_windows(windows, L)
            window = np.repeat(range(len(windows)), [len(of_one) for of_one in pieces])
            cut = np.bincount(window, sums_of(tuple(itertools.chain(*pieces))))
            row |= gain_of(losses, cut / n_scored, n_scored)
        rows.append(row)
        by_window[str(length)] = losses
    return {'rule': s['rule'], 'stride': S, 'lengths': sizes, 'rows': rows,
            'loss_by_window': by_window}


def checked_stride(stride, L, sizes):
    """The stride, None standing for 256, or L / 8 where that is less. Refuses one too long."""
    S = min(256, L // 8) if stride is None else stride
    if not 0 < S < sizes[0]:
        raise UserError(f'stride is {S}; it must be at least 1 and below the shortest length, '
                        f'{sizes[0]}.')
    return S


# ---------------------------------------------------------------------- each position

def positions(run, sizes):
    n_tail, L = tail or 64, run.L
    between({'lengths': sizes[-1]}, L // 16, 'lengths', why='the width of a bin, L / 16')
    windows = run.windows(sizes[-1])
    # They may overlap, but no token is scored twice at one length.
    samples = windows.evenly_spaced(n_samples, spacing=n_tail)
    model = compiled_for(run.model, run.runtime, compile, len(samples), sizes[-1])
    losses = run.runtime.over_windows(
        samples, batch_tokens, lambda inputs, targets: by_position(model, inputs, targets)[0],
        f'{sizes[-1]} positions')
    rows, by_window = [], {}
    for T in sizes:
        first = max(0, T - n_tail)
        of_windows = by_window[str(T)] = losses[:, first:T].mean(1)
        row = {'length': T} | summary(of_windows)
        row['scored_tokens'] = len(samples) * (T - first)
        if T > run.model.config.trained_length:
            cut = cut_losses(run.model, samples, T, n_tail, batch_tokens, run.runtime)
            row |= gain_of(of_windows, cut)
        rows.append(row)
    middle, binned = bin_means(losses.mean(0), L // 16)
    return {'rows': rows, 'tail': n_tail, 'samples': len(losses), 'scored_tokens': losses.size,
            'position': middle, 'loss': binned, 'loss_at_by_window': by_window}


# ---------------------------------------------------------------------- the tail of each length

def tail_tokens(run, sizes):
    """
    DAPE V2's protocol: one row a length T, the perplexity of the last K tokens of windows of T, the
    same K at every length; and for T > L its Eq. (6), Delta P = P(x[-L:], L) - P(x, L): how much
    better the last L tokens are read with all of x than alone.
    """
    K, L = checked_tail(run.settings['tail'], run.L, sizes), run.L
    tokens = run.windows(sizes[-1]).evenly_spaced(run.settings['n_samples'], spacing=K)

    def losses_in(T):
        """Losses of the last tokens of each window of T."""
        read = compiled_for(run.model, run.runtime, compile, len(tokens), T)
        return run.runtime.over_windows(
            tokens[:, -T - 1:], run.settings['batch_tokens'],
            lambda inputs, targets: read(inputs, targets[:, -max(K, L):]), f'length {T}')

    rows, alone = [], losses_in(L)
    for T in sizes:
        losses = alone if T == L else losses_in(T)
        row = {'length': T} | summary(losses[:, -K:].mean(1))
        row['scored_tokens'] = len(tokens) * min(K, T)
        if T > L:
            row['ppl_alone'] = perplexity(alone[:, -L:].mean())
            row['ppl_with_all'] = perplexity(losses[:, -L:].mean())
            row['delta_p'] = row['ppl_alone'] - row['ppl_with_all']
        rows.append(row)
    return {'tail': K, 'lengths': sizes, 'rows': rows, 'samples': len(tokens)}


def checked_tail(tail, L, sizes):
    """The tokens to score, None standing for 256, or L where that is less. Refuses too many."""
    K = tail or min(256, L)
    short = [T for T in sizes if T < K and T != L]  # L itself is the least that a model reads
    if short:
        raise UserError(f'tail is {K}, but lengths has {short[0]}, a window of fewer tokens. '
                        'Choose longer ones, or a smaller tail.')
    return K


# ---------------------------------------------------------------------- far repeats

def last_repeats(tokens, g):
    """
    For each target t the latest s < t with tokens[s-g:s] equal to tokens[t-g:t], that is the latest
    place where the g tokens before the target stood before; -1 where there is none. tokens: (n, T)
    ids, each row a window of its own. Returns (n, T).
    """
    found = np.full(tokens.shape, -1)
    for row, of_row in zip(tokens, found):
        latest = {}  # of each gram: where it last ended
        for t in range(g, len(row)):
            gram = row[t - g:t].tobytes()
            of_row[t] = latest.get(gram, -1)
            latest[gram] = t
    return found


@dataclass
class Targets:
    """Tokens of windows to predict. The tokens before each of them stood earlier, too."""
    window: np.ndarray   # (n,), the window of each target
    t: np.ndarray        # (n,), its position in that window
    same: np.ndarray     # (n,), whether the same token followed earlier
    found: int           # so many were found, and n of them drawn


def find_targets(samples, L, near=False):
    """
    Targets t >= 2L of windows (n, W + 1) whose `gram` tokens before them occurred before s < t - L,
    and at no s in [t - L, t): what followed, token s, is not in the cut context, tokens t - L ...
    t - 1. near: those where it is, t - L <= s. Where there are several s, the latest is looked at.
    """
    t, s = np.arange(samples.shape[1]), last_repeats(samples, gram)
    is_near = s >= t - L
    window, place = np.nonzero((t >= 2 * L) & (is_near if near else (s >= 0) & ~is_near))
    n_found = len(place)
    if n_found == 0:
        raise UserError(f'no token of {len(samples)} windows of {samples.shape[1] - 1} tokens is a '
                        f'{"near" if near else "far"} repeat of {gram} tokens. Lower --gram=, or '
                        'give other text.')
    if n_found > targets:
        drawn = np.sort(np.random.default_rng(0).choice(n_found, targets, replace=False))
        window, place = window[drawn], place[drawn]
    same = samples[window, place] == samples[window, s[window, place]]
    return Targets(window, place, same, n_found)


def losses_when_cut(model, samples, chosen, L, runtime):
    """The losses of targets, (n,), each after the L tokens before it."""
    contexts = samples[chosen.window[:, None], chosen.t[:, None] + np.arange(-L, 1)]
    return runtime.over_windows(
        contexts, batch_tokens, lambda inputs, after: model(inputs, after[:, -1:])[:, 0],
        f'cut to {L} tokens')


def copy_losses(losses, same, weight):
    """
    The losses of targets, (n,), by the mixture of the model and the copy of the token that followed
    earlier: -ln((1 - weight) e^-loss + weight [same]).
    """
    with np.errstate(divide='ignore'):  # ln 0, where the copy is wrong
        return -np.logaddexp(np.log1p(-weight) - losses, np.log(weight * same))


def fit_copy_weight(losses, same):
    """
    The weight in [0, 1) with the smallest mean of copy_losses(). The mean is convex in the weight,
    so bisect for the place where its slope is 0.
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
    Of single targets, (n,) each: the sum of a over the sum of b, and its standard error. Targets of
    one window, such as those of a long repeat, are not independent, so the error is that of a ratio
    estimate, over windows. window: (n,), the one that each target is in.
    """
    total, n_windows = b.sum() or math.nan, len(np.unique(window))
    ratio = a.sum() / total
    sums = np.bincount(window, a - ratio * b)  # of each window; 0 where it has no target
    variance = (sums ** 2).sum() * n_windows / (n_windows - 1) if n_windows > 1 else math.nan
    return ratio, variance ** 0.5 / abs(total)


def repeat_summary(window, losses, cut, own_cut, copied=None):
    """
    A row of the result, from the losses of single targets, (n,) each: with the whole window, with
    the context cut by the untuned model, cut by the model itself, and cut with the copy cache. The
    error of R takes the weight of the copy for known.
    """
    one, row = np.ones(len(window)), {'loss': losses.mean(), 'cut_loss': cut.mean()}
    row['gain'], row['gain_error'] = ratio_over_windows(cut - losses, one, window)
    row['own_cut_loss'] = own_cut.mean()
    row['own_gain'], row['own_gain_error'] = ratio_over_windows(own_cut - losses, one, window)
    if copied is not None:
        row |= {'copy_loss': copied.mean(), 'headroom': (cut - copied).mean()}
        row['R'], row['R_error'] = ratio_over_windows(cut - losses, cut - copied, window)
    return row | {'targets': len(window), 'windows': len(np.unique(window))}


def untuned_model(run, windows):
    """The model whose cut context all gains are against, and its checkpoint's entries."""
    s = run.settings
    if all(s[name] is None for name in ('baseline', 'scale', 'position', 'rope_scaling')):
        return run.model, run.info
    model, info = load_model(s['baseline'] or s['init_from'], s['out_dir'], run.runtime.device,
                             dtype=run.runtime.dtype)
    require_tokenizer(info, windows.tokenizer_state, windows.dataset)
    theirs, L = model.config.trained_length, run.model.config.trained_length
    if theirs != L:
        raise UserError(f"baseline {info['path']} was trained at {theirs} tokens, the model that "
                        f'is read at {L}. Name the checkpoint that its training started from.')
    return model, info


def other_windows(windows, n):
    """
    For each of n evenly spaced windows the index of a window that shares no document with it. The
    search begins half of the windows further on.
    """
    starts, others = windows.evenly_spaced_starts(n), []
    n = len(starts)
    first, last = (np.searchsorted(windows.data.starts, place, side='right')
                   for place in (starts, starts + windows.block_size))
    for window in range(n):
        further = (window + n // 2 + np.arange(n)) % n
        is_other = (last[further] < first[window]) | (first[further] > last[window])
        if not is_other.any():
            raise UserError("controls has 'other', but no window is of another document than "
                            f'window {window}. Raise --n_samples=, or give other text.')
        others.append(further[is_other.argmax()])
    return np.array(others)


def losses_in_ways(run, untuned, windows, samples, chosen, near=False):
    """
    The losses of targets, (n,) each, with the context cut to L: by the untuned model, by the model
    itself and, if the data has a split val, by the untuned model with the copy cache. And the
    weight of the copy.
    """
    L, runtime = run.model.config.trained_length, run.runtime
    cut = losses_when_cut(untuned, samples, chosen, L, runtime)
    own_cut = cut
    if untuned is not run.model:
        own_cut = losses_when_cut(run.model, samples, chosen, L, runtime)
    if 'val' not in windows.data.meta['splits']:
        note('There is no split val to fit the copy cache on: headroom and R are left out.')
        return [cut, own_cut], None
    samples = run.windows(windows.block_size, 'val').evenly_spaced(n_samples)
    fitted_on = find_targets(samples, L, near)
    val_cut = losses_when_cut(untuned, samples, fitted_on, L, runtime)
    weight = fit_copy_weight(val_cut, fitted_on.same)
    return [cut, own_cut, copy_losses(cut, chosen.same, weight)], weight


def repeat_rows(kind, chosen, *losses):
    """A row for all targets, and one for those that the token after the repeat predicts."""
    rows = [{'kind': f'{kind}all'} | repeat_summary(chosen.window, *losses)]
    if chosen.same.any():
        of_same = [array[chosen.same] for array in (chosen.window, *losses)]
        rows.append({'kind': f'{kind}same token'} | repeat_summary(*of_same))
    return rows


def far_repeats(run, sizes):
    """
    Far repeats, see find_targets(), in windows of W tokens, W being the longest length. Each
    control has rows of its own. other: the same targets, but the tokens before t - L are those of
    another document's window, so that no gain should be left. near: near repeats, whose cut context
    holds what to copy.
    """
    W, L = sizes[-1], run.model.config.trained_length
    between({'lengths': W}, 2 * L, 'lengths')
    if gram > L:
        raise UserError(f'gram is {gram}; it must be at most L = {L}, for the cut context to hold '
                        'it.')
    for control in set(controls) - {'near', 'other'}:
        raise UserError(f"controls has '{control}'. Choose from near, other.")
    windows = run.windows(W)
    samples = windows.evenly_spaced(n_samples)
    others = other_windows(windows, n_samples) if 'other' in controls else None
    untuned, untuned_info = untuned_model(run, windows)

    def losses_of(texts):
        return run.runtime.over_windows(
            texts, batch_tokens, lambda inputs, after: by_position(run.model, inputs, after)[0],
            f'{W} tokens')

    far, whole = find_targets(samples, L), losses_of(samples)
    cut, weight = losses_in_ways(run, untuned, windows, samples, far)
    rows, weights = repeat_rows('', far, whole[far.window, far.t - 1], *cut), {'far': weight}
    if 'other' in controls:
        is_far = np.arange(W + 1) < far.t[:, None] - L
        texts = np.where(is_far, samples[others[far.window]], samples[far.window])
        losses = losses_of(texts)[np.arange(len(texts)), far.t - 1]
        rows += repeat_rows('other document, ', far, losses, *cut)
    if 'near' in controls:
        near = find_targets(samples, L, near=True)
        cut, weights['near'] = losses_in_ways(run, untuned, windows, samples, near, near=True)
        rows += repeat_rows('near, ', near, whole[near.window, near.t - 1], *cut)

    share = far.found / (len(samples) * (W + 1 - 2 * L))
    run.runtime.print(f'{far.found:,} far repeats of {gram} tokens, {share:.1%} of the targets, '
                      f'read whole and cut to {L}')
    return {'length': W, 'gram': gram, 'rows': rows, 'samples': len(samples), 'found': far.found,
            'share': share, 'copy_weight': weights, 'untuned': {
                'checkpoint': untuned_info['path'], 'weights_digest': untuned_info['digest']}}


PROTOCOLS = {'sliding': sliding, 'position': positions, 'tail': tail_tokens, 'repeat': far_repeats}


def main():
    if protocol not in PROTOCOLS:
        raise UserError(f"protocol is '{protocol}'. Choose {', '.join(PROTOCOLS)}.")
    between(globals(), 1, 'lengths', 'max_windows', 'n_samples', 'tail', 'gram', 'targets',
            'batch_tokens')
    kind = '' if protocol == 'sliding' else protocol
    run = Run(settings(globals()), 'eval_ppl', kind)
    sizes = sorted(lengths or [run.L, 2 * run.L, 4 * run.L, 8 * run.L])
    result = {'protocol': protocol, 'dataset': dataset_of(run.info, run.settings['dataset']),
              'split': run.settings['split']} | PROTOCOLS[protocol](run, sizes)
    print_rows(run.runtime.print, result['rows'])
    run.write('eval_ppl', result, kind)
    run.close()


if __name__ == '__main__':
    configure(globals(), TextSettings)
    main()
