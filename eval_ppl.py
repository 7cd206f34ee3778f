"""
Perplexity of a checkpoint at and beyond its training length, with any softmax scale. Section 4.2
and Table 2 of "Length Generalization of Causal Transformers without Position Encoding"; the last
tokens of each length, and what a longer context gains, as in Figures 1 to 6 and Table 1 of "DAPE
V2". And far repeats: tokens whose like was last seen before the last L tokens.

What a length T beyond L is worth is told by `gain`, in nats: the loss of the same tokens, by the
same model with the same scales, in a context cut to the last L tokens (cut_loss), less that in T
tokens. Above 0 the model reads past L; below 0 it had better not see what is there. L is the
context of its first training, also where it was fine-tuned at another. The cut context is windows
of L tokens at most that score their last L / 8, so it holds 7L/8 to L tokens; at far repeats, L.

$ python eval_ppl.py                                             # sliding windows of L ... 8L
$ python eval_ppl.py --scale=out/demo/nope/scale_head_640.json   # the same with tuned scales
$ python eval_ppl.py --protocol=position                         # the loss at each position to 8L
$ python eval_ppl.py --protocol=last                             # last tokens of each length
$ python eval_ppl.py --protocol=repeat                           # far repeats in windows of 8L
$ torchrun --nproc_per_node=8 eval_ppl.py --out_dir=out/nope_1b --dataset=pg19 --rule=paper

Writes out_dir/eval_ppl[_PROTOCOL][_LABEL].json and .png
"""

import itertools
import math
from functools import partial

import numpy as np
import torch

from configurator import between, configure, settings
from lib.checkpoints import Run, TextReading, dataset_of, require_tokenizer
from lib.devices import reader
from lib.errors import UserError
from lib.generate import require_positions
from lib.results import bin_means
from lib.scales import by_position
from lib.tokens import documents, open_tokens

# how to read it
protocol = 'sliding'         # sliding windows, position (each of one pass), last (last tokens), or
                             # repeat (far repeats, in windows of the longest length)
lengths: list[int] | None = None  # window lengths in tokens; None: L, 2L, 4L and 8L
rule = 'same'                # sliding windows: same, paper or classic; see sliding_windows()
stride: int | None = None    # tokens scored per sliding window; None: 256, or L/8 where L < 2048
max_windows = 1024           # sliding: windows per length; rule same: evenly spaced, else the first
n_samples = 256              # all but sliding: windows of the longest length, evenly spaced
last: int | None = None      # tokens at the end of a length; None: position 64, last 256 or L
gram = 8                     # repeat: so many tokens before a target occurred before
targets = 1500               # repeat: targets to score, drawn at random from those found
batch_tokens = 16384         # tokens in one forward pass; lower it when memory runs out
compile = True               # torch.compile the model, where it reads so much that this pays

RULES = ('same', 'paper', 'classic')


def perplexity(loss):
    """exp of a loss in nats per token; of 700 where it is more, as a float holds no exp(710)."""
    return math.exp(min(loss, 700))


def summary(losses):
    """Of the mean loss of each window, (n,): mean, perplexity and standard error over windows."""
    error = losses.std(ddof=1) / len(losses) ** 0.5 if len(losses) > 1 else math.nan
    return {'ppl': perplexity(losses.mean()), 'loss': losses.mean(), 'standard_error': error,
            'windows': len(losses)}


def gain_of(losses, cut_losses):
    """
    Of the mean losses of each window (n,), read whole and cut: the loss when cut, the gain from
    what lies beyond, and its standard error over windows, each paired with itself.
    """
    gain = summary(cut_losses - losses)
    return {'cut_loss': cut_losses.mean(), 'gain': gain['loss'],
            'gain_error': gain['standard_error']}


def gain_text(row):
    return f"{row['gain']:+.4f} ± {row['gain_error']:.4f}" if 'gain' in row else ''


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


def cut_windows(windows, L):
    """
    The tokens that each window scores, in windows of L tokens at most, within it, that score L / 8
    or fewer: a list of windows for each.
    """
    cut = []
    for lo, hi, n in windows:
        stride = min(n, max(1, L // 8))
        ends = range(hi, hi - n, -stride)
        cut.append([(max(lo, end - L), end, min(stride, end - hi + n)) for end in ends])
    return cut


def score_windows(model, tokens, windows, batch_tokens, runtime, label=None):
    """
    Sum of the losses of each window's scored tokens, in nats: (len(windows),) float64, in order, on
    every rank. tokens: (n,) array of ids; windows: from sliding_windows(). Logits are computed for
    scored tokens only.
    """
    def shape(i):
        lo, hi, n_scored = windows[i]
        return hi - lo, n_scored

    def measure(model, n_scored, inputs, targets):
        losses = model(inputs, targets[:, -n_scored - 1:])[:, :-1]
        return losses.cpu().double().sum(1)

    sums = np.empty(len(windows))
    for (T, n_scored), group in itertools.groupby(sorted(range(len(windows)), key=shape), shape):
        group = list(group)
        # All tokens of a window are read, as what a method does may depend on their number. What
        # follows the last one is not known: any token stands for it, and its loss is left out.
        texts = [np.append(tokens[lo:hi], 0) for lo, hi, _ in (windows[i] for i in group)]
        texts = np.stack(texts).astype(np.int64)
        read = partial(measure, reader(model, runtime, compile, len(group), T), n_scored)
        shown = label if 2 * len(group) > len(windows) else None  # a bar for most of them is enough
        sums[group] = runtime.over_windows(texts, batch_tokens, read, shown)
    return sums


def evaluate_sliding(model, data, lengths, stride, rule, max_windows, batch_tokens, runtime):
    """
    One row a length: loss, perplexity, past L the gain over the context cut to L, and how many
    documents, windows and tokens it was measured on; and {length: mean loss of each window}.
    """
    rows, by_window, measured, L = [], {}, {}, model.config.trained_length

    def sums_of(windows, label):
        """As score_windows(), each list of windows once: with rule same, L's are the cut ones."""
        key = tuple(windows)
        if key not in measured:
            measured[key] = score_windows(model, data.tokens, windows, batch_tokens, runtime, label)
        return measured[key]

    for length in lengths:
        windows = []
        for document, (start, end) in enumerate(documents(data)):
            of_one = sliding_windows(start, end, length, max(lengths), stride, rule)
            windows += [(document, window) for window in of_one]
        if not windows:
            raise UserError(f'no document of this split is longer than {max(lengths)} tokens. '
                            'Choose shorter --lengths= or other text.')
        n = min(max_windows, len(windows))
        among = len(windows) if rule == 'same' else n  # spread over all of them, or the first n
        windows = [windows[i * among // n] for i in range(n)]
        used = len({document for document, _ in windows})
        windows = [window for _, window in windows]
        sums = sums_of(windows, f'length {length}')
        n_scored = np.array([n for _, _, n in windows])
        row = {'length': length} | summary(sums / n_scored)
        loss = sums.sum() / n_scored.sum()  # of tokens; windows may score unequally many
        row |= {'loss': loss, 'ppl': perplexity(loss), 'documents': used,
                'scored_tokens': n_scored.sum()}
        if length > L:
            pieces = cut_windows(windows, L)
            cut = sums_of(list(itertools.chain(*pieces)), f'length {length}, cut to {L}')
            first = np.cumsum([0] + [len(of_one) for of_one in pieces[:-1]])
            cut = np.add.reduceat(cut, first)  # of each window
            row |= gain_of(sums / n_scored, cut / n_scored)
            row['cut_loss'] = cut.sum() / n_scored.sum()
            row['gain'] = row['cut_loss'] - loss
        rows.append(row)
        by_window[str(length)] = sums / n_scored
    return rows, by_window


def open_data(info, wanted, split):
    """The token file to read with the model of `info`: of a mixture, its first source."""
    name = dataset_of(info, wanted).split(',')[0].split(':')[0]
    data = open_tokens(name, split)
    require_tokenizer(info, data.tokenizer_state, name)
    return data


def checked_stride(stride, L, sizes):
    """The stride, None standing for 256, or L / 8 where that is less. Refuses one too long."""
    S = min(256, L // 8) if stride is None else stride
    if not 0 < S < sizes[0]:
        raise UserError(f'stride is {S}; it must be at least 1 and below the shortest length, '
                        f'{sizes[0]}.')
    return S


def sliding(run, sizes):
    S = checked_stride(stride, run.L, sizes)
    data = open_data(run.info, run.settings['dataset'], run.settings['split'])
    rows, by_window = evaluate_sliding(run.model, data, sizes, S, rule, max_windows, batch_tokens,
                                       run.runtime)
    run.runtime.print('  length        ppl      loss    +-    windows   scored tokens   documents'
                      '   gain over L')
    for r in rows:
        run.runtime.print(f"{r['length']:8d} {r['ppl']:10.3f} {r['loss']:9.4f} "
                          f"{r['standard_error']:7.4f} {r['windows']:9,d} "
                          f"{r['scored_tokens']:15,d} {r['documents']:11,d}   {gain_text(r)}")
    return {'rule': rule, 'stride': S, 'lengths': sizes, 'rows': rows, 'loss_by_window': by_window}


# ---------------------------------------------------------------------- each position

def cut_losses(run, samples, first, end):
    """
    Of each sample, the mean loss of the targets that follow tokens first ... end - 1, read by
    cut_windows(). samples: (n, T + 1) ids. Returns (n,).
    """
    def of_piece(lo, hi, n):
        return run.runtime.over_windows(
            samples[:, lo:hi + 1], batch_tokens,
            lambda inputs, targets: run.model(inputs, targets[:, -n:]).sum(1))

    [pieces] = cut_windows([(0, end, end - first)], run.model.config.trained_length)
    return sum(of_piece(*piece) for piece in pieces) / (end - first)


def positions(run, sizes):
    n_last, L = last or 64, run.L
    between({'lengths': sizes[-1]}, L // 16, 'lengths')  # the width of a bin
    windows = run.windows(sizes[-1])
    # They may overlap, but no token is scored twice at one length.
    samples = windows.evenly_spaced(n_samples, spacing=n_last)
    model = reader(run.model, run.runtime, compile, len(samples), sizes[-1])
    losses = run.runtime.over_windows(
        samples, batch_tokens, lambda inputs, targets: by_position(model, inputs, targets)[0],
        f'{sizes[-1]} positions')
    at = {T: losses[:, max(0, T - n_last):T].mean(1) for T in sizes}
    rows = [{'length': T} | summary(at[T]) | {'scored_tokens': len(at[T]) * min(T, n_last)}
            for T in sizes]
    run.runtime.print(f'  at T (last {n_last} positions)      loss    +-          ppl   windows'
                      '   gain over L')
    for r in rows:
        T = r['length']
        if T > run.model.config.trained_length:
            r |= gain_of(at[T], cut_losses(run, samples, max(0, T - n_last), T))
        run.runtime.print(f"{T:8d} {r['loss']:25.4f} {r['standard_error']:8.4f} "
                          f"{r['ppl']:10.3f} {r['windows']:9,d}   {gain_text(r)}")
    middle, binned = bin_means(losses.mean(0), L // 16)
    return {'rows': rows, 'last': n_last, 'samples': len(losses), 'scored_tokens': losses.size,
            'position': middle, 'loss': binned,
            'loss_at_by_window': {str(T): values for T, values in at.items()}}


# ---------------------------------------------------------------------- the last tokens

def evaluate_last(model, tokens, lengths, K, L, batch_tokens, runtime):
    """
    DAPE V2's protocol: one row a length T, the perplexity of the last K tokens of windows of T, the
    same K at every length; and for T > L its Eq. (6), Delta P = P(x[-L:], L) - P(x, L): how much
    better the last L tokens are read with all of x than alone. tokens: (n, max(lengths) + 1) ids.
    """
    def mean_losses(T):
        """Of each window of T: the mean over its last K and its last L tokens, (n, 2)."""
        read = reader(model, runtime, compile, len(tokens), T)

        def measure(inputs, targets):
            losses = read(inputs, targets[:, -max(K, L):])
            return torch.stack([losses[:, -K:].mean(1), losses[:, -L:].mean(1)], dim=1)
        return runtime.over_windows(tokens[:, -T - 1:], batch_tokens, measure, f'length {T}')

    rows, alone = [], mean_losses(L)[:, 1].mean() if max(lengths) > L else None
    for T in lengths:
        losses = mean_losses(T)
        row = {'length': T} | summary(losses[:, 0]) | {'scored_tokens': len(tokens) * min(K, T)}
        if T > L:
            row['ppl_alone'] = perplexity(alone)
            row['ppl_with_all'] = perplexity(losses[:, 1].mean())
            row['delta_p'] = row['ppl_alone'] - row['ppl_with_all']
            row['reading'] = what_context_does(row['delta_p'])
        rows.append(row)
    return rows


def what_context_does(delta_p):
    if delta_p == 0:
        return 'makes no difference'
    return 'helps' if delta_p > 0 else 'hurts'


def checked_last(last, L, sizes):
    """The tokens to score, None standing for 256, or L where that is less. Refuses too many."""
    K = last or min(256, L)
    short = [T for T in sizes if T < K and T != L]  # L itself is the least that a model reads
    if short:
        raise UserError(f'last is {K}, but lengths has {short[0]}, a window of fewer tokens. '
                        'Choose longer ones, or a smaller last.')
    return K


def last_tokens(run, sizes):
    K, L = checked_last(last, run.L, sizes), run.L
    samples = run.windows(sizes[-1]).evenly_spaced(n_samples, spacing=K)
    rows = evaluate_last(run.model, samples, sizes, K, L, batch_tokens, run.runtime)
    say = run.runtime.print
    say(f'  length   ppl of the last {K}    Delta P of the last {L}: the context before them')
    for r in rows:
        delta = f"{r['delta_p']:+20.3f}   {r['reading']}" if 'delta_p' in r else ''
        say(f"{r['length']:8d} {r['ppl']:19.3f} {delta}")
    return {'last': K, 'lengths': sizes, 'rows': rows, 'samples': len(samples)}


# ---------------------------------------------------------------------- far repeats

def last_repeats(tokens, g):
    """
    For each target t the latest s < t with tokens[s-g:s] equal to tokens[t-g:t], that is the latest
    place where the g tokens before the target stood before; -1 where there is none. tokens: (n, T)
    ids, each row a window of its own. Returns (n, T).
    """
    n, T = tokens.shape
    # Number the grams of each row, token by token: equal numbers, equal grams of the same row.
    grams = np.arange(n)[:, None]
    for i in range(g):
        longer = grams * (int(tokens.max()) + 1) + tokens[:, i:T - g + i]
        grams = np.unique(longer, return_inverse=True)[1].reshape(n, T - g)
    # A stable sort brings equal ones together, in their order in the row.
    order = grams.ravel().argsort(kind='stable')
    before, after = order[:-1], order[1:]
    repeated = grams.ravel()[before] == grams.ravel()[after]
    found = np.full(n * (T - g), -1)
    found[after[repeated]] = before[repeated] % (T - g) + g
    return np.concatenate((np.full((n, g), -1), found.reshape(n, T - g)), axis=1)


def repeat_summary(losses, cut_losses, window):
    """
    Of single targets, read whole and cut, (n,) each: both losses and the gain. Targets of one
    window, such as those of a long repeat, are not independent, so the standard error of the gain
    is that of a ratio estimate, over windows. window: (n,), the one that each target is in.
    """
    gains = cut_losses - losses
    sums = np.bincount(window, gains - gains.mean())
    n_windows = len(np.unique(window))
    error = math.nan
    if n_windows > 1:
        error = ((sums ** 2).sum() * n_windows / (n_windows - 1)) ** 0.5 / len(gains)
    return {'loss': losses.mean(), 'cut_loss': cut_losses.mean(), 'gain': gains.mean(),
            'gain_error': error, 'targets': len(gains), 'windows': n_windows}


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
    same = samples[window, place] == samples[window, s[window, place]]
    rows = [{'kind': 'all'} | repeat_summary(whole, cut, window)]
    if same.any():
        rows.append({'kind': 'same token'} | repeat_summary(whole[same], cut[same], window[same]))
    say = run.runtime.print
    say(f'{n_found:,} far repeats of {gram} tokens, {n_found / n_possible:.1%} of the targets')
    say(f'  what followed    targets   whole loss   cut to {L}   gain')
    for r in rows:
        say(f"  {r['kind']:16} {r['targets']:7d} {r['loss']:12.4f} {r['cut_loss']:11.4f}   "
            f"{gain_text(r)}")
    return {'length': W, 'gram': gram, 'rows': rows, 'samples': len(samples), 'found': n_found,
            'share': n_found / n_possible}


PROTOCOLS = {'sliding': sliding, 'position': positions, 'last': last_tokens, 'repeat': far_repeats}


def main():
    if protocol not in PROTOCOLS:
        raise UserError(f"protocol is '{protocol}'. Choose {', '.join(PROTOCOLS)}.")
    between(globals(), 1, 'lengths', 'max_windows', 'n_samples', 'last', 'gram', 'targets',
            'batch_tokens')
    run = Run(settings(globals()))
    sizes = sorted(lengths or [run.L, 2 * run.L, 4 * run.L, 8 * run.L])
    read = {key: run.settings[key] for key in ('dataset', 'split')}
    read['dataset'] = dataset_of(run.info, read['dataset'])
    require_positions(run.model, sizes[-1])
    result = {'protocol': protocol} | read
    result |= PROTOCOLS[protocol](run, sizes)
    run.write('eval_ppl', result, '' if protocol == 'sliding' else protocol)


if __name__ == '__main__':
    configure(globals(), TextReading)
    main()
