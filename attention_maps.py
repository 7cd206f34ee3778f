"""
Pictures of one attention head: its scores, the position bias, what DAPE adds, and the attention, at
several lengths. Figures 8-22 of "DAPE V2". The stage also measures how much each head attends to
the first key, which Appendix K calls the sink.

$ python attention_maps.py                              # the demo model, windows of L, 4L and 16L
$ python attention_maps.py --out_dir=out/dape/kerple_1x3 --layer=2 --head=3 --lengths=[128,512,2048]

Writes out_dir/attention[_LABEL].json and .png
"""

import math

import torch
import torch.nn.functional as F

from configurator import between, configure, settings
from kernels import row_chunks
from lib.checkpoints import Run
from lib.scales import vectors_for

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
dtype = 'float32'            # auto, float32, bfloat16, float16; half precision rounds q and k
# what to draw
layer: int | None = None     # counted from 0; None: the middle layer
head = 0                     # counted from 0
lengths: list[int] | None = None  # tokens in a window; one row of pictures each; None: L, 4L, 16L
n_samples = 4                # windows of each length, evenly spaced; the pictures show their mean

CELLS = 64  # most cells per side of a map, so that the JSON of three lengths is below 300 KB


def parts_of(method, q, k, i, j, head):
    """
    {part: (rows, keys)} of one head. The parts are score: q.k / sqrt(D), plus what CoPE or
    Transformer-XL add; bias: B; dape: f([S; B]) of Eq. (3); attention: the weights after softmax.
    """
    score, scores = method.similarity(q, k, i, j), method.scores(q, k, i, j)
    bias, parts = method.bias(i, j), {'score': score[0, head]}
    if bias is not None:
        parts['bias'] = bias[head]
    if hasattr(method, 'method'):  # DAPE
        added = (scores - score)[0, head]
        if bias is not None and method.residual:
            added = added - bias[head]
        parts['dape'] = added
    parts['attention'] = method.softmax(scores)[0, head]
    return parts


def head_maps(attention, q, k, place, head):
    """
    Maps of the parts of one head's attention over a window. q: (1, H, T, D) scaled queries; k: (1,
    n_kv_head, T, D). Returns {part: (n, n) map}. A map has one row per cell of queries and one
    column per cell of keys. Each number is the mean over the pairs of query and key that the method
    does not mask. For attention it is the sum over a cell's keys instead, because a single weight
    shrinks with T. The result also has by_distance, (bins,): the share of attention that queries of
    the second half give to keys at distances i - j of 0, 1, 2-3, 4-7 ... tokens.
    """
    H, T = q.shape[1:3]
    # in_cell (T, n) is 1 where a token lies in a cell. in_cell.T @ x @ in_cell sums x over cells.
    token = torch.arange(T, device=q.device)
    in_cell = F.one_hot(token // math.ceil(T / CELLS)).float()
    edges = 2 ** token[:(T - 1).bit_length()]  # 1, 2, 4 ...: first distance of each bin after 0
    sums, by_distance = 0, 0
    for rows, end in row_chunks(T, T, H, q.device, attention.position.needs_all_keys):
        i, j = place.i[rows], place.j[:end]
        mask = attention.position.mask(i, j)[0, 0]
        with torch.autocast(q.device.type, enabled=False):  # sums, too, need float32
            queries, keys = q[:, :, rows].float(), k[:, :, :end].float()
            parts = parts_of(attention.position, queries, keys, i, j, head)
            values = torch.stack([*parts.values()]).masked_fill(mask, 0)
            # The last map counts the pairs in each cell that the head sees.
            seen = torch.cat((values, ~mask[None]))
            sums += in_cell[rows].T @ seen @ in_cell[:end]  # (parts + 1, n, n)
        # Keys after the query fall into the first bin. They add nothing: their attention is 0.
        distance = token[rows, None] - token[:end]
        bins = torch.bucketize(distance, edges, right=True).flatten()
        late = values[-1] * (token[rows] >= T // 2)[:, None]
        by_distance += torch.bincount(bins, late.flatten(), len(edges) + 1)

    means = dict(zip(parts, sums / sums[-1].clamp(min=1)))
    means['attention'] = sums[-2] / in_cell.sum(0)[:, None]
    return means | {'by_distance': by_distance / (T - T // 2)}


def window_maps(model, tokens, layer, head):
    """
    One pass over a window. tokens: (1, T) ids. Returns head_maps() of one head, and first_key
    (n_layer, H): the share of attention that each head gives to the first key, as the mean over the
    queries of the second half.
    """
    found = {}

    def look(number, attention, q, k, place):
        if number == layer:
            found.update(head_maps(attention, q, k, place, head))
        first = torch.zeros_like(k)
        first[:, :, 0] = 1  # with these values, attention returns the share of the first key
        share = attention.position.attend(q, k, first, place.i, place.j)
        late = share[0, :, share.shape[2] // 2:, 0]
        return late.float().mean(1)  # (H,)

    with model.probe(look) as shares:
        model(tokens, tail=1)
    return found | {'first_key': torch.stack(shares)}


def entry_of_length(run, windows, n_samples, layer, head):
    """The result's entry for one length: means over its windows."""
    samples = torch.from_numpy(windows.evenly_spaced(n_samples)[:, None, :-1])
    chosen = vectors_for(run.model, windows.block_size)
    with torch.no_grad(), run.runtime.autocast(), chosen:
        found = [window_maps(run.model, window.to(run.runtime.device), layer, head)
                 for window in samples]
    mean = {}
    for name in found[0]:
        mean[name] = torch.stack([one[name] for one in found]).mean(0).numpy(force=True)
    T, share, by_distance = windows.block_size, mean.pop('first_key'), mean.pop('by_distance')
    run.runtime.print(f'{T:8,d} tokens: {share[layer, head]:.1%} on the first key; '
                      f'mean of all heads {share.mean():.1%}')
    maps = {}
    for part, rows in mean.items():  # keep 3 digits, and leave out keys after the query
        maps[part] = [[float(f'{x:.3g}') for x in row[:r + 1]] for r, row in enumerate(rows)]
    return {'length': T, 'n_windows': len(found), 'first_key': share, 'by_distance': by_distance,
            'maps': maps}


def main():
    between(globals(), 2, 'lengths')
    between(globals(), 1, 'n_samples')
    run = Run(settings(globals()), 'attention')
    L, (n_layer, H) = run.L, run.model.head_scale.shape
    at = n_layer // 2 if layer is None else layer
    between({'layer': at}, 0, 'layer', most=n_layer - 1)
    between(globals(), 0, 'head', most=H - 1)
    # Open the text at all lengths before the work, so that a text that is too short fails at once.
    opened = [run.windows(T) for T in lengths or [L, 4 * L, 16 * L]]
    run.write('attention', {
        'dataset': opened[0].dataset, 'layer': at,
        'head': head,
        'lengths': [entry_of_length(run, windows, n_samples, at, head) for windows in opened]})
    run.close()


if __name__ == '__main__':
    configure(globals())
    main()
