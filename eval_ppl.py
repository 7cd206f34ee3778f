"""
Perplexity of a checkpoint at and beyond its training length L, with any softmax scale. Section 4.2
and Table 2 of "Length Generalization of Causal Transformers without Position Encoding"; the last
tokens of each length and Delta P as in Figures 1 to 6 and Table 1 of "DAPE V2".

L is the length of pretraining. Beside each loss past L stands the loss of the same tokens if the
same model sees only the last L tokens (cut_loss, in short windows that score L / 8 tokens each).
gain = cut_loss - loss, in nats: above 0 the tokens beyond L help, below 0 they harm. With a number
or a file of one set the model keeps its scales there, although scales for long texts cost something
at L; with several sets, these short windows are read with the model's own vectors. repeats.py
compares with the untuned model instead.
If a model was fine-tuned at another length, block_size, the default lengths are multiples of it.

$ python eval_ppl.py                                             # sliding windows of L ... 8L
$ python eval_ppl.py --scale=out/demo/nope/scale_head_640.json   # the same with tuned scales
$ python eval_ppl.py --protocol=position                         # the loss at each position to 8L
$ python eval_ppl.py --protocol=tail                             # last tokens of each length
$ torchrun --nproc_per_node=8 eval_ppl.py --out_dir=out/nope_1b --dataset=pg19 --rule=paper

Writes out_dir/eval_ppl[_PROTOCOL][_LABEL].json and .png
"""

import math

from configurator import UserError, configure, settings

import numpy as np
import torch

from common import can_compile, setup
from data import Windows
from stage import (
    cut_losses,
    doublings,
    open_model,
    print_rows,
    read_lengths,
    result_path,
    results_folder,
    write_result,
)

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
# how to read it
protocol = 'sliding'         # sliding: sliding windows; position: every position of one pass; tail:
                             # last tokens of each length. repeats.py reads far repeats
lengths: list[int] = []      # window lengths in tokens; []: 1, 2, 4 and 8 times block_size
rule = 'same'                # sliding: same or paper; see sliding()
stride: int | None = None    # sliding: tokens scored per window; None: L / 8, at most 256
max_windows = 1024           # sliding: windows per length; rule same spaces them evenly, rule paper
                             # takes the first ones
n_samples = 256              # position, tail: windows of the longest length, evenly spaced
tail: int | None = None      # position, tail: tokens scored at the end of each length; None: 64 for
                             # position, min(256, block_size) for tail
batch_tokens = 16384         # tokens in one forward pass; lower it when memory runs out
compile = False              # torch.compile the model: takes minutes, pays if reading takes an hour


def summary(losses):
    """
    The mean loss, its perplexity, and the standard error of the mean over windows. losses: (n,),
    the mean loss of each window.
    """
    mean, n = losses.mean(), len(losses)
    error = losses.std(ddof=1) / math.sqrt(n) if n > 1 else math.nan
    return {'ppl': math.exp(mean), 'loss': mean, 'standard_error': error, 'windows': n}


def gain_of(losses, cut):
    """The loss with the cut context, and the paired gain over it with its standard error."""
    gain = summary(cut - losses)
    return {'cut_loss': cut.mean(), 'gain': gain['loss'], 'gain_error': gain['standard_error']}


# ---------------------------------------------------------------------- sliding windows

def window_ends(starts, n_tokens, first, stride):
    """
    Where sliding windows end, (n,): in each document the first one `first` tokens after its start,
    and each later one `stride` tokens after the one before. starts: of the documents, whose last
    token is end-of-text and is not scored. A window with the end e scores tokens[e - stride:e].
    """
    ends, borders = [], [*starts.tolist(), n_tokens]
    for start, end in zip(borders, borders[1:]):
        # end - 1: a sample also holds tokens[e], unscored, which shall not be end-of-text
        ends += range(start + first, end - 1, stride)
    return np.array(ends)


def sliding(model, data, sizes, runtime):
    """
    A row per length. A window of `length` tokens scores its last `stride` ones, and the next window
    ends `stride` tokens later.
    same:    the first window of a document ends where the longest one would, so that all lengths
             score the same tokens; only the context differs.
    paper:   the first window is the first `length` tokens, as in the released code (run_ppl.py of
             AntNLP/nope_head_scale): each length scores its own tokens.
    """
    L = model.config.pretrained_length
    step = stride or min(256, max(1, L // 8))
    if not 0 < step < sizes[0] or rule not in ('same', 'paper'):
        raise UserError(f'stride is {step} and rule {rule}. Give a stride below the shortest '
                        f'length, {sizes[0]}, and rule same or paper.')

    def last_losses(inputs, targets):
        """
        The losses of the last `step` tokens of each window, (B, step). The model reads the whole
        window, because some position methods depend on the number of tokens. So its last target
        lies past the window, and is dropped.
        """
        return model(inputs, targets[:, -step - 1:])[:, :-1]

    rows, cuts = [], {}  # cuts: losses with the cut context; one for all lengths by rule same
    for length in sizes:
        first = sizes[-1] if rule == 'same' else length
        ends = window_ends(data.starts, len(data.tokens), first, step)
        if len(ends) == 0:
            raise UserError(f'No document of {data.dataset}, {split} is longer than {first} '
                            'tokens. Choose shorter --lengths= or other text.')
        n = min(max_windows, len(ends))
        ends = ends[np.arange(n) * len(ends) // n] if rule == 'same' else ends[:n]
        samples = data.tokens[ends[:, None] + np.arange(-first, 1)].astype(np.int64)
        losses = runtime.over_windows(samples[:, -length - 1:], batch_tokens, last_losses,
                                      f'{n} of {length}').mean(1)
        row = {'length': length, **summary(losses)}
        if length > L:
            if first not in cuts:
                # tokens[e] stands at `first` in a sample, so the last scored one at first - 1
                cuts[first] = cut_losses(model, samples, first - 1, step, batch_tokens, runtime)
            row |= gain_of(losses, cuts[first])
        rows.append(row)
    return {'rule': rule, 'stride': step, 'rows': rows}


# ---------------------------------------------------------------------- each position, the tail

def by_position(model, data, sizes, runtime):
    """The loss at each position of a pass of the longest length, and of the tail of each length."""
    n_tail = tail or 64  # tokens scored at the end of each length
    # Windows may overlap, but their tails do not, so no row scores a token twice.
    samples = data.evenly_spaced(n_samples, spacing=min(n_tail, sizes[-1]))
    position, binned, at_length = read_lengths(model, samples, sizes, n_tail, batch_tokens, runtime)
    rows = []
    for length, losses in at_length.items():
        row = {'length': length, **summary(losses)}
        if length > model.config.pretrained_length:
            cut = cut_losses(model, samples, length, n_tail, batch_tokens, runtime)
            row |= gain_of(losses, cut)
        rows.append(row)
    return {'rows': rows, 'tail': n_tail, 'crossing': data.crossing, 'position': position,
            'loss': binned, 'loss_at_by_window': at_length}


def tails(model, data, sizes, runtime):
    """
    The protocol of DAPE V2: the perplexity of the last K tokens of windows of each length, which
    all end at the same tokens. Past block_size the row also has Delta P, Eq. (6): the perplexity of
    the last block_size tokens read alone, minus that of the same tokens read after the rest of the
    window. Above 0, the earlier tokens help.
    """
    block_size = model.config.block_size
    K = tail or min(256, block_size)
    samples = data.evenly_spaced(n_samples, spacing=min(K, sizes[-1]))

    def read(length):
        """The losses of the last max(K, block_size) tokens of each window, read from its end."""
        windows = samples[:, -length - 1:]
        return runtime.over_windows(
            windows, batch_tokens, lambda inputs, targets:
            model(inputs, targets[:, -max(K, block_size):]), f'{length} tokens')

    ppl_alone, rows = math.exp(read(block_size).mean()), []
    for length in sizes:
        losses = read(length)
        row = {'length': length, **summary(losses[:, -K:].mean(1))}
        if length > block_size:
            row['delta_p'] = ppl_alone - math.exp(losses[:, -block_size:].mean())
        rows.append(row)
    return {'rows': rows, 'tail': K, 'crossing': data.crossing}


PROTOCOLS = {'sliding': sliding, 'position': by_position, 'tail': tails}


def main(given):
    measure, runtime = PROTOCOLS[protocol], setup(device, dtype)
    model, info = open_model(init_from, out_dir, runtime, position, rope_scaling, scale)
    folder = results_folder(out_dir, init_from, given)
    name = 'eval_ppl' if protocol == 'sliding' else f'eval_ppl_{protocol}'
    path = result_path(folder, name, label, info, dataset, split)
    sizes = sorted(lengths) or doublings(model.config.block_size, 8 * model.config.block_size)
    data = Windows(dataset or info['dataset'], split, sizes[-1], info=info)
    # scale sets change the model from pass to pass; models of others are left as they are
    if can_compile(runtime, compile and getattr(model, 'scale_sets', None) == {}):
        model = torch.compile(model, dynamic=False)
    result = measure(model, data, sizes, runtime)
    print_rows(runtime.print, result['rows'])
    result |= {'protocol': protocol, 'dataset': data.dataset, 'lengths': sizes}
    write_result(path, result, settings(globals()), runtime, info)


if __name__ == '__main__':
    main(configure(globals()))
