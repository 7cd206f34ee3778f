"""
Pictures of one attention head: its scores, the position bias, what DAPE adds, and the attention, at
several lengths. Figures 8-22 of "DAPE V2". The stage also measures how much each head attends to
the first key, which Appendix K calls the sink.

$ python -m extras.attention_maps                 # the demo model, windows of L, 4L and 16L
$ python -m extras.attention_maps --out_dir=out/dape/kerple_1x3 --layer=2 --head=3

Writes out_dir/attention[_LABEL].json and .png
"""

import math

from configurator import configure, settings

import torch

from common import setup
from data import Windows
from entropy import require_weights
from stage import open_model, result_path, results_folder, write_result

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
# what to draw
layer: int | None = None     # counted from 0; None: the middle layer
head = 0                     # counted from 0
lengths: list[int] = []      # tokens in a window; one row of pictures each; []: L, 4L, 16L
n_samples = 4                # windows of each length, evenly spaced; the pictures show their mean

CELLS = 64  # most cells per side of a map, so that the JSON of three lengths is below 300 KB


def parts_of(method, q, k, i, j):
    """
    {part: (windows, H, rows, keys)} of some query rows, and True where a query sees a key. The
    parts are
    score      q.k / sqrt(D), plus what CoPE or Transformer-XL add: S of Eq. (3)
    bias       the position bias: B of Eq. (3)
    dape       f([S; B]) of Eq. (3)
    attention  the weights
    """
    parts = {'score': method.similarity(q, k, i, j)}
    scores, bias = method.scores(q, k, i, j), method.bias(i, j)
    if bias is not None:
        parts['bias'] = bias.expand(scores.shape)
    if method.dape:  # its output is what is left without the parts that it was added to
        others = sum(parts.values()) if method.dape.residual else parts['score']
        parts['dape'] = scores - others
    parts['attention'] = method.softmax(scores)
    return parts, scores.isfinite()


def head_maps(method, q, k, place, head):
    """
    {part: map} of one head. A cell is `width` queries by `width` keys. A map is a triangle of
    cells, because later keys are not seen:

    queries 0 ...           [x]
    queries width ...       [x, x]
    queries 2 width ...     [x, x, x]

    Each number is the mean over windows, and over the pairs of query and key that the method does
    not mask. For attention it is the sum over a cell's keys, because a single weight shrinks with
    T. q: (windows, H, T, D), scaled queries; k: (windows, n_kv_head, T, D).
    """
    T, maps = q.shape[2], {}
    width = math.ceil(T / CELLS)  # tokens in a cell
    for start in range(0, T, width):
        rows, keys = slice(start, start + width), slice(start + width)
        parts, seen = parts_of(method, q[:, :, rows], k[:, :, keys], place.i[rows], place.j[keys])
        for part, numbers in parts.items():
            numbers = numbers.where(seen, math.nan)[:, head]                 # (windows, rows, keys)
            cells = numbers.split(width, dim=2)
            if part == 'attention':
                means = [cell.nansum(2).mean() for cell in cells]  # a hidden key adds nothing
            else:
                means = [cell.nanmean() for cell in cells]
            maps.setdefault(part, []).append(torch.stack(means).nan_to_num())  # 0: sees no key
    return maps


def maps_and_first_key(model, tokens, layer, head):
    """
    head_maps() of one head over windows, (windows, T) ids, and the share of attention that each
    head gives to the first key, (n_layer, H): the mean over windows and the queries of the second
    half. For the shares a probe attends once more in each layer, with values that are 1 at the
    first key and 0 elsewhere, so the output is the first weight.
    """
    require_weights(model)
    drawn, maps, shares = model.blocks[layer].attn, {}, []

    def look(attention, q, k, place):
        first = torch.zeros_like(k)  # values, (windows, n_kv_head, T, D): 1 at key 0
        first[:, :, 0] = 1
        share = attention.position.attend(q, k, first, place)[:, :, q.shape[2] // 2:, 0]
        shares.append(share.mean((0, 2)))
        if attention is drawn:
            maps.update(head_maps(attention.position, q, k, place, head))

    for block in model.blocks:
        block.attn.probe = look
    model(tokens, tail=1)
    for block in model.blocks:
        block.attn.probe = None
    return maps, torch.stack(shares)


def main(given):
    runtime = setup(device, 'float32')
    model, info = open_model(init_from, out_dir, runtime, position, rope_scaling, scale)
    into = results_folder(out_dir, init_from, given)
    path = result_path(into, 'attention', label, info, dataset, split)
    L, found = model.config.block_size, []
    drawn = len(model.blocks) // 2 if layer is None else layer
    for T in lengths or [L, 4 * L, 16 * L]:
        windows = Windows(dataset or info['dataset'], split, T, info=info)
        samples = torch.from_numpy(windows.evenly_spaced(n_samples)[:, :-1]).to(runtime.device)
        maps, share = maps_and_first_key(model, samples, drawn, head)
        runtime.print(f'{T:8,d} tokens: {share[drawn, head]:.1%} on the first key; '
                      f'mean of all heads {share.mean():.1%}')
        found.append({'length': T, 'n_windows': len(samples), 'first_key': share, 'maps': maps})
    write_result(path, {'stage': 'attention', 'dataset': windows.dataset, 'layer': drawn,
                        'head': head, 'crossing': windows.crossing, 'lengths': found},
                 settings(globals()), runtime, info)


if __name__ == '__main__':
    main(configure(globals()))
