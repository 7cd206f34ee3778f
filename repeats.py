"""
What does a model gain from text beyond L? Look at far repeats: places where the text repeats
something from more than L tokens ago, and ask how much the loss falls when the model may see that
far. In "... def parse(text): ... 500 other lines ... def parse(" the next token, `text`, can be
copied, but only by a model that sees the first definition.

A target is a token x_t, t >= 2L, whose `gram` tokens before it also stand before an earlier token
x_s, with s < t - L, and before no s in [t - L, t). So x_s is not among the last L tokens. The cut
context is the L tokens before the target. L is the untuned model's length of pretraining.

gain = loss of the untuned model in the cut context - loss of this model in the whole window. Above
0 a model reads past L.
headroom is the gain of the copy cache (Grave et al. 2017, arXiv:1612.04426, in its simplest form):
it gives the target the probability (1 - w) p + w c, where p is the untuned model's in the cut
context, and c is 1 if x_s equals the target, else 0. The weight w is fitted on the split val.
R = gain / headroom.
For a Hugging Face folder --position= says how its model was trained, and the untuned model is read
so, too. If it shall only say how to read it now, name the folder as --baseline=, too.

$ python repeats.py                                              # windows of 8L
$ python repeats.py --scale=out/demo/nope/scale_head_640.json    # with tuned scales
$ python repeats.py --control=True   # also with another document's text before the last L tokens

Writes out_dir/repeats[_LABEL].json
"""

from configurator import UserError, configure, settings

import numpy as np

from common import setup
from data import Windows
from stage import open_model, print_rows, result_path, results_folder, write_result

# which model, text and device
out_dir = 'out/demo/nope'    # folder of the run to read; results go there, too
init_from = 'last'           # last, best (of out_dir), a checkpoint file, a folder, hf:ORG/NAME
position: str | None = None  # position method; None: the checkpoint's
rope_scaling: str | None = None   # extension of RoPE, such as yarn:4; None: the checkpoint's
scale: float | str | None = None  # softmax scale: a number for all heads, or a scale file
label = ''                   # name of the result; '': named after scale and text
dataset = ''                 # a folder of data/; '': the text that the model was trained on
split = 'test'               # split of the dataset to read
device = 'auto'              # auto, cpu, cuda, mps
dtype = 'auto'               # auto, float32, bfloat16, float16
# what to read
length: int | None = None    # tokens in a window; None: 8 times block_size
n_samples = 256              # windows, evenly spaced over the split
gram = 8                     # this many tokens before a target also occur earlier
targets = 1500               # targets to score, drawn at random from those found
baseline = ''                # checkpoint of the untuned model; '': this one, without its scales
control = False              # also replace all but the last L tokens by another document's: without
                             # the text that a target repeats, a gain must vanish
batch_tokens = 16384         # tokens in one forward pass; lower it when memory runs out


def last_repeats(tokens, g):
    """
    For each position t the latest s < t with tokens[s-g:s] equal to tokens[t-g:t], or -1 if there
    is none. tokens: (n, T) ids; each row is a separate window. Returns (n, T).
    """
    found = np.full(tokens.shape, -1)
    for row, of_row in zip(tokens, found):
        latest = {}  # {g tokens: the position after their latest occurrence}
        for t in range(g, len(row)):
            before = row[t - g:t].tobytes()
            of_row[t] = latest.get(before, -1)
            latest[before] = t
    return found


def find_targets(samples, L, g, most):
    """
    Targets t >= 2L in windows (n, W + 1): window, t, whether x_s equals the target, each (n,), and
    how many were found. If these are more than `most`, the same random ones are always drawn.
    """
    s = last_repeats(samples, g)
    t = np.arange(samples.shape[1])
    window, at = np.nonzero((s >= 0) & (s < t - L) & (t >= 2 * L))
    n_found = len(at)
    if n_found == 0:
        raise UserError(f'No token of {len(samples)} windows is a far repeat of {g} tokens. Give '
                        'longer windows, other text, or a lower --gram=.')
    drawn = np.random.default_rng(0).choice(n_found, min(most, n_found), replace=False)
    window, at = window[np.sort(drawn)], at[np.sort(drawn)]
    same = samples[window, at] == samples[window, s[window, at]]
    return window, at, same, n_found


def cut_target_losses(model, samples, window, t, batch_tokens, runtime):
    """The losses of targets, (n,), if the model sees only the L tokens before each."""
    L = model.config.pretrained_length
    contexts = samples[window[:, None], t[:, None] + np.arange(-L, 1)]
    return runtime.over_windows(contexts, batch_tokens, lambda inputs, targets:
                                model(inputs, targets[:, -1:])[:, 0], f'only the last {L}')


def copy_losses(losses, same, weight):
    """The losses with the copy cache, -ln((1 - weight) e^-loss + weight [same]), (n,)."""
    with np.errstate(divide='ignore'):  # ln 0 is -inf, where the copied token is wrong
        return -np.logaddexp(np.log1p(-weight) - losses, np.log(weight * same))


def fit_copy_weight(losses, same):
    """The weight of 0, 0.001 ... 0.999 with the smallest mean of copy_losses()."""
    return min(np.arange(1000) / 1000, key=lambda w: copy_losses(losses, same, w).mean())


def ratio_over_windows(a, b, window):
    """
    sum(a) / sum(b) and its standard error. a, b: one number per target. Targets of one window, such
    as those of a long repeat, are not independent, so the error is that of a ratio over windows.
    """
    n = len(np.unique(window))
    ratio = a.sum() / b.sum()
    sums = np.bincount(window, a - ratio * b)  # one per window; 0 if it has no target
    variance = (sums ** 2).sum() * n / (n - 1) if n > 1 else np.nan
    return ratio, variance ** 0.5 / abs(b.sum())


def row_of(kind, window, losses, cut, copied):
    """
    A row of the result. window, losses, cut, and the losses of the copy cache, `copied`: one number
    per target. The gain is cut - losses.
    """
    gain, gain_error = ratio_over_windows(cut - losses, np.ones(len(cut)), window)
    R, R_error = ratio_over_windows(cut - losses, cut - copied, window)
    return {'kind': kind, 'loss': losses.mean(), 'cut_loss': cut.mean(), 'gain': gain,
            'gain_error': gain_error, 'targets': len(window), 'windows': len(np.unique(window)),
            'headroom': (cut - copied).mean(), 'R': R, 'R_error': R_error}


def other_windows(first, last):
    """
    For each window the one half the text away, (n,). first, last: (n,), the number of the document
    in which each window starts and ends. Raises UserError if two such windows share a document.
    """
    others = np.roll(np.arange(len(first)), -(len(first) // 2))
    if ((last[others] >= first) & (first[others] <= last)).any():
        raise UserError('A window shares its document with the one half the text away, so there is '
                        'no other text for a control. Give more --n_samples= or other text.')
    return others


def main(given):
    runtime = setup(device, dtype)
    model, info = open_model(init_from, out_dir, runtime, position, rope_scaling, scale)
    folder = results_folder(out_dir, init_from, given)
    path = result_path(folder, 'repeats', label, info, dataset, split)
    name, W = dataset or info['dataset'], length or 8 * model.config.block_size

    # The untuned model: another checkpoint, or this one as it was trained, without its scales.
    trained = None if baseline else info.get('trained_position')
    untuned, untuned_info = open_model(baseline or init_from, out_dir, runtime, trained)
    L = untuned.config.pretrained_length

    # Find the targets, and others in the split val, on which the copy cache is fitted.
    data = Windows(name, split, W, info=info)
    samples = data.evenly_spaced(n_samples)
    window, t, same, n_found = find_targets(samples, L, gram, targets)
    others = other_windows(*data.documents) if control else None
    # untuned_info: the baseline, too, must have the tokenizer of the text
    val = Windows(name, 'val', W, info=untuned_info).evenly_spaced(n_samples)
    val_window, val_t, val_same, _ = find_targets(val, L, gram, targets)

    # Read them in the whole window, and with only the last L tokens.
    losses = runtime.over_windows(samples, batch_tokens, model, f'{W} tokens')
    losses = losses[window, t - 1]  # the first loss is that of token 1
    cut = cut_target_losses(untuned, samples, window, t, batch_tokens, runtime)

    # Fit the copy cache.
    val_cut = cut_target_losses(untuned, val, val_window, val_t, batch_tokens, runtime)
    weight = fit_copy_weight(val_cut, val_same)
    copied = copy_losses(cut, same, weight)

    rows = [row_of('all', window, losses, cut, copied)]
    if control:  # the last L tokens of each target after another document's text
        # a copy of the window for each target, in which only the tokens from t - L on stay its own
        is_far = np.arange(W + 1) < t[:, None] - L
        texts = np.where(is_far, samples[others[window]], samples[window])
        with_other = runtime.over_windows(texts, batch_tokens, model, 'other document')
        with_other = with_other[np.arange(len(t)), t - 1]
        rows.append(row_of('other document', window, with_other, cut, copied))

    runtime.print(f'found {n_found:,} far repeats of {gram} tokens, scored {len(t):,} of them')
    print_rows(runtime.print, rows)
    result = {'dataset': name, 'length': W, 'samples': len(samples), 'crossing': data.crossing,
              'found': n_found, 'copy_weight': weight, 'rows': rows}
    write_result(path, result, settings(globals()), runtime, info)


if __name__ == '__main__':
    main(configure(globals()))
