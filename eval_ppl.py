"""
Perplexity of a checkpoint at and beyond its training length L, with any softmax scale. Section 4.2
and Table 2 of "Length Generalization of Causal Transformers without Position Encoding". The stage
also scores the last tokens of each length and measures the gain of a longer context, as Figures 1
to 6 and Table 1 of "DAPE V2" do. And it scores far repeats: tokens that follow a repeated piece of
text, if its latest copy is more than L0 tokens back.

L is block_size, the length of the last training. L0 is the length of pretraining, before any
fine-tuning. A model that was not fine-tuned has L0 = L. The cut context and far repeats use L0.
Lengths, strides and Delta P use L.

For each length T above L0, except in protocol tail, the result also has the loss in the cut
context. There the same tokens are scored again, in short windows of L0 tokens. Each short window
scores only its last L0 / 8 tokens, at far repeats only its last token. `cut_loss` is the loss of
the same model, with its scales, in the cut context. `gain` is cut_loss minus the loss in windows of
T tokens, in nats. A gain above 0 means that the tokens beyond L0 help, a gain below 0 that they
harm. A file of scale sets has sets only for lengths above L. Passes of at most L tokens, such as
those of the cut context if L0 = L, use the model's own scales.

At far repeats two models are compared, and `gain` is another: the loss of the untuned model in the
cut context, minus the loss of the evaluated model in the whole window. The untuned model is the
checkpoint --baseline. Without --baseline it is the run's own checkpoint, without --scale,
--position and --rope_scaling. `own_gain` is the same with the evaluated model in both places.
`headroom` is the gain of the copy cache, a simple rule that copies (lib/repeats.py). R = gain /
headroom.

$ python eval_ppl.py                                             # sliding windows of L ... 8L
$ python eval_ppl.py --scale=out/demo/nope/scale_head_640.json   # the same with tuned scales
$ python eval_ppl.py --protocol=position                         # the loss at each position to 8L
$ python eval_ppl.py --protocol=tail                             # last tokens of each length
$ python eval_ppl.py --protocol=repeat                           # far repeats in windows of 8L
$ python eval_ppl.py --protocol=repeat "--controls=['near','other','token']"   # and the controls
$ torchrun --nproc_per_node=8 eval_ppl.py --out_dir=out/nope_1b --dataset=pg19 --rule=paper

Writes out_dir/eval_ppl[_PROTOCOL][_LABEL].json, and a .png for each protocol but repeat
"""

import functools
import itertools
import math

import numpy as np

from configurator import between, configure, ignored_settings, settings
from lib.answers import bin_means, note, print_rows
from lib.checkpoints import Run, dataset_of, load_model, require_tokenizer
from lib.errors import UserError
from lib.generate import require_positions
from lib.losses import by_position, cut_losses, cut_windows
from lib.repeats import (
    cut_context_losses,
    distance_rows,
    find_targets,
    other_windows,
    repeat_rows,
    targets_of_val,
)
from lib.scales import vectors_for
from lib.tokens import documents

# which model, text and device
out_dir = 'out/demo/nope'    # folder of the run to read; results go there, too
init_from = 'last'           # last, best (of out_dir), a checkpoint file, a folder, hf:ORG/NAME
position: str | None = None  # position method; None: the checkpoint's
rope_scaling: str | None = None   # extension of RoPE, such as yarn:4; None: the checkpoint's
scale: float | str | None = None  # softmax scale: a number for all heads, or a scale file
label = ''                   # name of the result; '': named after the scale
dataset: str | None = None   # a folder of data/; None: the text that the model was trained on
split = 'test'               # split of the dataset to read
device = 'auto'              # auto, cpu, cuda, mps
dtype = 'auto'               # auto, float32, bfloat16, float16
# how to read it
protocol = 'sliding'         # sliding: sliding windows; position: every position of one pass; tail:
                             # last tokens of each length; repeat: far repeats, at longest length
lengths: list[int] | None = None  # window lengths in tokens; None: L, 2L, 4L and 8L
rule = 'same'                # sliding: same, paper or classic; see sliding_windows()
stride: int | None = None    # sliding: tokens scored per window; None: 256, or L/8 if L < 2048
max_windows = 1024           # sliding: windows per length; rule same spaces them evenly, the other
                             # rules take the first ones
n_samples = 256              # other protocols: windows of the longest length, evenly spaced
tail: int | None = None      # tokens scored at the end of each length; None: 64 with
                             # protocol=position, min(256, L) with protocol=tail
gram = 8                     # repeat: this many tokens before a target also occur earlier
targets = 1500               # repeat: targets to score, drawn at random from those found
baseline: str | None = None  # repeat: checkpoint file of the untuned model; None: that of this run
controls: list[str] = []     # repeat: near (repeats within the last L0 tokens), other (all but
                             # the L0 tokens before a target come from another document), token
                             # (only the token after the earlier occurrence is replaced)
batch_tokens = 16384         # tokens in one forward pass; lower it when memory runs out
compile = True               # torch.compile the model, if the stage reads enough for this to pay;
                             # never with protocol=repeat

RULES = ('same', 'paper', 'classic')


def perplexity(loss):
    """exp of a loss in nats per token. A loss above 700 counts as 700: exp(710) overflows."""
    return math.exp(min(loss, 700))


def summary(losses, n_scored=None):
    """
    Returns the mean loss over all scored tokens, its perplexity, the standard error of the mean
    loss over windows, and the number of windows. losses: (n,), the mean loss of each window.
    n_scored: (n,), the number of tokens that each window scores; None: all score equally many.
    """
    mean = np.average(losses, weights=n_scored)
    n, error = len(losses), math.nan
    if n > 1:  # windows that score more tokens weigh more
        weights = 1 if n_scored is None else n_scored / n_scored.mean()
        error = (((weights * (losses - mean)) ** 2).sum() / (n - 1) / n) ** 0.5
    return {'ppl': perplexity(mean), 'loss': mean, 'standard_error': error, 'windows': n}


def gain_of(losses, cut_losses, n_scored=None):
    """
    Returns the loss in the cut context, the gain from the tokens beyond it, and the gain's standard
    error over windows. losses, cut_losses: (n,), the mean loss of each window with its whole
    context, and with the cut context. The error is that of cut_losses - losses.
    """
    gain = summary(cut_losses - losses, n_scored)
    return {'cut_loss': np.average(cut_losses, weights=n_scored), 'gain': gain['loss'],
            'gain_error': gain['standard_error']}


# ---------------------------------------------------------------------- sliding windows

def sliding_windows(start, end, length, first_end, stride, rule):
    """
    The windows of one document, tokens[start:end]: a list of (lo, hi, n). A window reads
    tokens[lo:hi] and scores the last n of them. It has `length` tokens, except in rule classic,
    where a shorter document is one shorter window. Each window ends `stride` tokens after the
    window before it; in rule classic the last one may end earlier. With rules same and paper, each
    window ends before `end`.
    same:    the first window ends at start + first_end. first_end is the longest length compared.
             So all lengths score the same tokens; only the context differs.
    paper:   the first window ends at start + length, as in the released code (run_ppl.py of
             AntNLP/nope_head_scale). Each length scores its own tokens, and the first
             length - stride tokens are never scored.
    classic: every token but the first is scored once. The first window scores all its tokens but
             the first, and the last window ends at `end` (Press et al. 2022).
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


def score_windows(run, tokens, windows, label=None):
    """
    The sum of the losses of each window's scored tokens, in nats. Returns (len(windows),) float64,
    in the order of windows, on every rank. tokens: (n,) array of ids. windows: from
    sliding_windows(). label: text of the progress bar; None: no bar. Windows of the same size are
    read together. A bar is shown only for a group that has more than half of all windows. Logits
    are computed only for scored tokens and for the one after them.
    """
    groups, sums = {}, np.empty(len(windows))
    for i, (lo, hi, n_scored) in enumerate(windows):
        groups.setdefault((hi - lo, n_scored), []).append(i)
    for (T, n_scored), group in groups.items():
        called = run.compiled_for(len(group), T)

        def sums_of(inputs, targets, called=called, n_scored=n_scored):
            losses = called(inputs, targets[:, -n_scored - 1:])[:, :-1]
            return losses.cpu().double().sum(1)

        # The last token of a window has no target in the window. Read it all the same, because a
        # position method may depend on the number of tokens. Its target is 0; its loss is dropped.
        # If the last 2 of tokens a b c d are scored, the targets are b c d 0, and the losses of
        # c d 0 are computed.
        texts = np.zeros((len(group), T + 1), np.int64)
        for text, i in zip(texts, group):
            lo, hi, _ = windows[i]
            text[:T] = tokens[lo:hi]
        has_bar = label is not None and 2 * len(group) > len(windows)
        bar = f'{label} of {T}' if has_bar else None
        with vectors_for(run.model, T):
            sums[group] = run.runtime.over_windows(texts, run.settings['batch_tokens'], sums_of,
                                                   bar)
    return sums


def windows_of(data, length, longest, stride, rule, max_windows):
    """
    At most max_windows windows from all documents. Rule same spaces them evenly; the other rules
    take the first ones.
    """
    windows = []
    for start, end in documents(data):
        windows += sliding_windows(start, end, length, longest, stride, rule)
    if not windows:
        needed = {'same': longest, 'paper': length, 'classic': 1}[rule]
        raise UserError(f'no document of this split is longer than {needed} tokens. '
                        'Choose shorter --lengths= or other text.')
    if rule != 'same':
        return windows[:max_windows]
    n = min(max_windows, len(windows))
    return [windows[i * len(windows) // n] for i in range(n)]


def sliding(run, sizes):
    """
    Sliding windows. Returns the result's entries: one row per length, and the mean loss of each
    window. A row holds the loss with its standard error, the perplexity and the numbers of
    documents, windows and scored tokens. The row of a length above L0 also holds the gain.
    """
    s, rows, by_window = run.settings, [], {}
    cut_length = run.model.config.L0
    S = checked_stride(s['stride'], run.L, sizes)
    require_positions(run.model, sizes[-1])
    data = run.windows(1).data  # the whole split, because rule classic reads short documents, too
    to_score = [windows_of(data, length, sizes[-1], S, s['rule'], s['max_windows'])
                for length in sizes]

    # Keep the sums, because the same windows come again. With rule same, all lengths score the same
    # tokens, so their cut windows are equal. If also stride <= L0 / 8, the cut context of a window
    # is one window of L0 tokens. The row of length L0 has scored this window already.
    @functools.cache
    def sums_of(windows):
        return score_windows(run, data.tokens, windows, 'windows')

    for length, windows in zip(sizes, to_score):
        n_scored = np.array([n for _, _, n in windows])
        losses = sums_of(tuple(windows)) / n_scored
        # The document of a window is the last one that starts at or before its first token.
        first_tokens = [lo for lo, _, _ in windows]
        used = np.unique(np.searchsorted(data.starts, first_tokens, side='right'))
        row = {'length': length} | summary(losses, n_scored)
        row |= {'documents': len(used), 'scored_tokens': n_scored.sum()}
        if length > cut_length:
            pieces = cut_windows(windows, cut_length)
            # window[p] is the window that piece p belongs to. Add up the losses of its pieces.
            window = np.repeat(range(len(windows)), [len(of_one) for of_one in pieces])
            cut = np.bincount(window, sums_of(tuple(itertools.chain(*pieces))))
            row |= gain_of(losses, cut / n_scored, n_scored)
        rows.append(row)
        by_window[str(length)] = losses
    return {'rule': s['rule'], 'stride': S, 'lengths': sizes, 'rows': rows,
            'loss_by_window': by_window}


def checked_stride(stride, L, sizes):
    """The stride; None: 256, or L / 8 if that is less. UserError if it is 0 or too long."""
    S = min(256, L // 8) if stride is None else stride
    if not 0 < S < sizes[0]:
        raise UserError(f'stride is {S}; it must be at least 1 and below the shortest length, '
                        f'{sizes[0]}.')
    return S


# ---------------------------------------------------------------------- each position

def losses_by_position(run, sizes):
    """The loss at every position of the longest windows, and of the tail of each length."""
    s, L = run.settings, run.L
    n_tail, batch_tokens = s['tail'] or 64, s['batch_tokens']
    if sizes[-1] < L // 16:
        raise UserError(f'lengths is {sizes}; the longest must be at least {L // 16}, the width of '
                        'a bin of the curve, L / 16.')
    windows = run.windows(sizes[-1])
    # Windows may overlap, but their tails do not, so no row scores a token twice. The curve by
    # position may read a token more than once.
    samples = windows.evenly_spaced(s['n_samples'], spacing=min(n_tail, sizes[-1]))
    called = run.compiled_for(len(samples), sizes[-1])
    losses = run.runtime.over_windows(
        samples, batch_tokens, lambda inputs, targets: by_position(called, inputs, targets)[0],
        f'{sizes[-1]} positions')
    rows, by_window = [], {}
    for T in sizes:
        first = max(0, T - n_tail)
        of_windows = losses[:, first:T].mean(1)
        by_window[str(T)] = of_windows
        row = {'length': T} | summary(of_windows)
        row['scored_tokens'] = len(samples) * (T - first)
        if T > run.model.config.L0:
            cut = cut_losses(run.model, samples, T, n_tail, batch_tokens, run.runtime)
            row |= gain_of(of_windows, cut)
        rows.append(row)
    middle, binned = bin_means(losses.mean(0), L // 16)
    return {'rows': rows, 'tail': n_tail, 'samples': len(losses), 'scored_tokens': losses.size,
            'position': middle, 'loss': binned, 'loss_at_by_window': by_window}


# ---------------------------------------------------------------------- the tail of each length

def tail_tokens(run, sizes):
    """
    The protocol of DAPE V2. Each length T has one row: the perplexity of the last K tokens of
    windows of T tokens. If K is larger, windows of up to L tokens score all of them. For T > L
    the row also has Delta P, Eq. (6): the perplexity of the last L tokens read alone, minus their
    perplexity read after the rest of the window. Above 0, the earlier tokens help.
    """
    K, L = checked_tail(run.settings['tail'], run.L, sizes), run.L
    tokens = run.windows(sizes[-1]).evenly_spaced(run.settings['n_samples'],
                                                  spacing=min(K, sizes[-1]))

    def losses_in(T):
        """Losses of the last max(K, L) tokens of each window of T, or of all if T is less."""
        called = run.compiled_for(len(tokens), T)
        with vectors_for(run.model, T):
            return run.runtime.over_windows(
                tokens[:, -T - 1:], run.settings['batch_tokens'],
                lambda inputs, targets: called(inputs, targets[:, -max(K, L):]), f'length {T}')

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
    """How many tokens to score: `tail`, or min(256, L). Raises UserError if that is too many."""
    K = tail or min(256, L)
    short = [T for T in sizes if L < T < K]  # windows of up to L may score all their tokens
    if short:
        raise UserError(f'tail is {K}, but lengths has {short[0]}, which is fewer tokens. Choose '
                        'longer lengths, or a smaller tail.')
    return K


# ---------------------------------------------------------------------- far repeats

def check_repeats(s, W, L0):
    """Refuse wrong settings of far repeats. s: {name: value}; W: tokens in a window."""
    if W < 2 * L0:
        raise UserError(f'lengths is {W}; far repeats need windows of at least 2 L0 = {2 * L0} '
                        'tokens, where L0 is the length of pretraining.')
    if s['gram'] > L0:
        raise UserError(f"gram is {s['gram']}; it must be at most L0 = {L0}, because the cut "
                        'context must hold the repeated tokens.')
    unknown = set(s['controls']) - {'near', 'other', 'token'}
    if unknown:
        raise UserError(f"controls has '{min(unknown)}'. Choose from near, other, token.")


def untuned_model(run, windows):
    """The model whose cut_loss defines `gain`, and the entries of its checkpoint: see the top."""
    s = run.settings
    if all(s[name] is None for name in ('baseline', 'scale', 'position', 'rope_scaling')):
        return run.model, run.info
    # A Hugging Face folder may not say that its model is NoPE; then --position= said so.
    trained = None if s['baseline'] else run.info.get('trained_position')
    model, info = load_model(s['baseline'] or s['init_from'], s['out_dir'], run.runtime.device,
                             trained, dtype=run.runtime.dtype)
    require_tokenizer(info, windows.tokenizer_state, windows.dataset)
    theirs, L0 = model.config.L0, run.model.config.L0
    if theirs != L0:
        raise UserError(f"baseline {info['path']} was pretrained at {theirs} tokens, but the model "
                        f'of {s["out_dir"]} was pretrained at {L0}. Set --baseline= to the '
                        'checkpoint that this model was fine-tuned from.')
    return model, info


def control_texts(controls, samples, far, others, L0):
    """
    {title of a control: (n, W + 1) ids, a changed window for each of n targets}. samples: the
    windows; far: their Targets; others: for each window the number of one of another document.
    """
    texts, n = {}, len(far.t)
    if 'other' in controls:
        is_far = np.arange(samples.shape[1]) < far.t[:, None] - L0
        texts['other document, '] = np.where(is_far, samples[others[far.window]],
                                             samples[far.window])
    if 'token' in controls:
        changed = texts['other token, '] = samples[far.window]
        to_copy = np.arange(n), far.s  # of each target the token after the earlier occurrence
        changed[to_copy] = np.roll(changed[to_copy], n // 2)
    return texts


def far_repeats(run, sizes):
    """
    Far repeats in windows of W tokens: the length given, or the longest of the default lengths.
    find_targets() of lib/repeats.py defines the targets; t is the position of a target in its
    window. Each control adds rows. other: all tokens before t - L0 are replaced by those of another
    document; the gain should then be 0 or below. token: only the token after the earlier occurrence
    is replaced, by that of another target, which may by chance be the same; what is left of the
    gain does not come from copying this token. near: near repeats, whose cut context holds the
    token to copy.
    """
    s, W, L0 = run.settings, sizes[-1], run.model.config.L0
    check_repeats(s, W, L0)
    windows = run.windows(W)
    samples = windows.evenly_spaced(s['n_samples'])
    others = other_windows(windows, s['n_samples']) if 'other' in s['controls'] else None
    untuned, untuned_info = untuned_model(run, windows)
    if s['split'] == 'val':
        note('the copy cache is fitted on the windows that are scored, so R is a little too low')
    # Find all targets before the work starts, because a text may have none.
    kinds = ['far', 'near'] if 'near' in s['controls'] else ['far']
    chosen = {kind: find_targets(samples, L0, s['gram'], s['targets'], kind == 'near')
              for kind in kinds}
    of_val = {kind: targets_of_val(run, W, kind == 'near') for kind in kinds}
    if 'token' in s['controls'] and len(chosen['far'].t) < 2:
        raise UserError("controls has 'token', which needs two far repeats. Raise --targets=, "
                        'lower --gram=, or give more text.')

    def losses_of(texts):
        return run.runtime.over_windows(
            texts, s['batch_tokens'],
            lambda inputs, after: by_position(run.model, inputs, after)[0], f'{W} tokens')

    far, whole = chosen['far'], losses_of(samples)
    cut, weight = cut_context_losses(run, untuned, samples, far, of_val['far'])
    losses, weights = whole[far.window, far.t - 1], {'far': weight}
    rows = repeat_rows('', far, losses, *cut) + distance_rows(L0, W, far, losses, *cut)
    for name, texts in control_texts(s['controls'], samples, far, others, L0).items():
        at_target = losses_of(texts)[np.arange(len(far.t)), far.t - 1]
        rows += repeat_rows(name, far, at_target, *cut)
    if 'near' in s['controls']:
        near = chosen['near']
        cut, weights['near'] = cut_context_losses(run, untuned, samples, near, of_val['near'])
        rows += repeat_rows('near, ', near, whole[near.window, near.t - 1], *cut)

    share = far.found / (len(samples) * (W + 1 - 2 * L0))
    run.runtime.print(f"found {far.found:,} far repeats of {s['gram']} tokens, {share:.1%} of the "
                      f'tokens from position {2 * L0} on; scored {len(far.t):,} of these repeats')
    return {'length': W, 'gram': s['gram'], 'rows': rows, 'samples': len(samples),
            'found': far.found, 'share': share, 'copy_weight': weights, 'untuned': {
                'checkpoint': untuned_info['path'], 'weights_digest': untuned_info['digest']}}


PROTOCOLS = {'sliding': sliding, 'position': losses_by_position, 'tail': tail_tokens,
             'repeat': far_repeats}
# {protocol: its settings that some other protocol does not have}
OWN_SETTINGS = {
    'sliding': {'rule', 'stride', 'max_windows'}, 'position': {'n_samples', 'tail'},
    'tail': {'n_samples', 'tail'},
    'repeat': {'n_samples', 'gram', 'targets', 'baseline', 'controls'}}


def main(given=()):
    """given: names of the settings that the user set."""
    if protocol not in PROTOCOLS:
        raise UserError(f"protocol is '{protocol}'. Choose {', '.join(PROTOCOLS)}.")
    for name in ignored_settings(given, OWN_SETTINGS, protocol):
        raise UserError(f'protocol {protocol} does not read {name}. Leave {name} out, or choose a '
                        'protocol that has it: see --help.')
    if protocol == 'repeat' and lengths and len(lengths) > 1:
        raise UserError(f'lengths is {lengths}, but protocol repeat reads windows of one length.')
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
    main(configure(globals()))
