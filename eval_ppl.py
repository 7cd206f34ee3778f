"""
Perplexity of a checkpoint at and beyond its training length, with any softmax scale. Section 4.2
and Table 2 of "Length Generalization of Causal Transformers without Position Encoding"; the last
tokens of each length, and what a longer context gains, as in Figures 1 to 6 and Table 1 of "DAPE
V2". And far repeats: tokens whose like was last seen before the last L tokens.

What a length T beyond L is worth is told by `gain`, in nats: the loss of the same tokens, by the
same model with the same scales, in a context cut to the last L tokens (cut_loss), less that in T
tokens. Above 0 the model reads past L; below 0 it had better not see what is there. The cut context
is windows of L tokens at most that score their last L / 8, so it holds 7L/8 to L tokens; at far
repeats, L. A file of sets for several lengths leaves it to the untuned model. Of a model that was
fine-tuned at another length, lengths, strides and Delta P follow the new L, and the context is cut
to the old one.

$ python eval_ppl.py                                             # sliding windows of L ... 8L
$ python eval_ppl.py --scale=out/demo/nope/scale_head_640.json   # the same with tuned scales
$ python eval_ppl.py --protocol=position                         # the loss at each position to 8L
$ python eval_ppl.py --protocol=tail                             # last tokens of each length
$ python eval_ppl.py --protocol=repeat                           # far repeats in windows of 8L
$ torchrun --nproc_per_node=8 eval_ppl.py --out_dir=out/nope_1b --dataset=pg19 --rule=paper

Writes out_dir/eval_ppl[_PROTOCOL][_LABEL].json and, but for far repeats, .png
"""

import functools
import itertools
import math

import numpy as np

from configurator import between, configure, settings
from lib.checkpoints import Run, TextSettings, dataset_of
from lib.devices import compiled_for
from lib.errors import UserError
from lib.losses import by_position, cut_losses, cut_windows
from lib.results import bin_means, print_rows
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


def score_windows(model, tokens, windows, batch_tokens, runtime):
    """
    Sum of the losses of each window's scored tokens, in nats: (len(windows),) float64, in order, on
    every rank. tokens: (n,) array of ids; windows: from sliding_windows(). Logits are computed for
    scored tokens only.
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
        label = f'windows of {T}' if 2 * len(group) > len(windows) else None
        sums[group] = runtime.over_windows(texts, batch_tokens, measure, label)
    return sums


def windows_of(data, length, longest, stride, rule, max_windows):
    """The windows of all documents, at most so many: spread over them, or the first (see rule)."""
    windows = []
    for start, end in documents(data):
        windows += sliding_windows(start, end, length, longest, stride, rule)
    if not windows:
        raise UserError(f'no document of this split is longer than {longest} tokens. '
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
    data = run.windows(sizes[-1]).data

    @functools.cache  # by rule same the windows of L, and the cut ones of each length, are the same
    def sums_of(windows):
        return score_windows(run.model, data.tokens, windows, s['batch_tokens'], run.runtime)

    for length in sizes:
        windows = windows_of(data, length, sizes[-1], S, s['rule'], s['max_windows'])
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
    between({'lengths': sizes[-1]}, L // 16, 'lengths')  # the width of a bin
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


def repeat_summary(losses, cut_losses, window):
    """
    Of single targets, read whole and cut, (n,) each: both losses and the gain. Targets of one
    window, such as those of a long repeat, are not independent, so the standard error of the gain
    is that of a ratio estimate, over windows. window: (n,), the one that each target is in.
    """
    gains, n_windows = cut_losses - losses, len(np.unique(window))
    sums = np.bincount(window, gains - gains.mean())  # of each window; 0 where it has no target
    variance = (sums ** 2).sum() * n_windows / (n_windows - 1) if n_windows > 1 else math.nan
    return {'loss': losses.mean(), 'cut_loss': cut_losses.mean(), 'gain': gains.mean(),
            'gain_error': variance ** 0.5 / len(gains), 'targets': len(gains),
            'windows': n_windows}


def far_repeats(run, sizes):
    """
    Targets t >= 2L of windows of W tokens, W being the longest length, whose `gram` tokens before
    them occurred before s < t - L, and at no s in [t - L, t): what followed, token s, is not in the
    cut context, tokens t - L ... t - 1. Where there are several s, the latest is looked at.
    """
    W, L = sizes[-1], run.model.config.trained_length
    between({'lengths': W}, 2 * L, 'lengths')
    if gram > L:
        raise UserError(f'gram is {gram}; it must be at most L = {L}, for the cut context to hold '
                        'it.')
    samples = run.windows(W).evenly_spaced(n_samples)
    t, s = np.arange(W + 1), last_repeats(samples, gram)
    window, place = np.nonzero((t >= 2 * L) & (s >= 0) & (s < t - L))
    if len(place) == 0:
        raise UserError(f'no token of {len(samples)} windows of {W} tokens is a far repeat of '
                        f'{gram} tokens. Lower --gram=, or give other text.')
    n_found, n_possible = len(place), len(samples) * (W + 1 - 2 * L)
    if n_found > targets:
        drawn = np.sort(np.random.default_rng(0).choice(n_found, targets, replace=False))
        window, place = window[drawn], place[drawn]

    whole = run.runtime.over_windows(
        samples, batch_tokens, lambda inputs, after: by_position(run.model, inputs, after)[0],
        f'{W} tokens')[window, place - 1]
    contexts = samples[window[:, None], place[:, None] + np.arange(-L, 1)]  # and the target
    cut = run.runtime.over_windows(
        contexts, batch_tokens, lambda inputs, after: run.model(inputs, after[:, -1:])[:, 0],
        f'cut to {L} tokens')
    rows = [{'kind': 'all'} | repeat_summary(whole, cut, window)]
    same = samples[window, place] == samples[window, s[window, place]]
    if same.any():
        rows.append({'kind': 'same token'} | repeat_summary(whole[same], cut[same], window[same]))
    run.runtime.print(f'{n_found:,} far repeats of {gram} tokens, {n_found / n_possible:.1%} of '
                      f'the targets, read whole and cut to {L}')
    return {'length': W, 'gram': gram, 'rows': rows, 'samples': len(samples), 'found': n_found,
            'share': n_found / n_possible}


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


if __name__ == '__main__':
    configure(globals(), TextSettings)
    main()
