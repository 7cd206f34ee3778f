"""
What one attention head sees, in pictures: its scores, the position bias, what DAPE adds and the attention itself, by
length: Figures 8-22 of "DAPE V2"; and how much each head attends to the first key, the sink that Appendix K speaks of.

$ python attention.py                                                   # the demo model, windows of L, 4L and 16L
$ python attention.py --out_dir=out/dape/kerple_1x3 --layer=2 --head=3 --lengths=[128,512,2048]

Writes out_dir/attention[_LABEL].json and .png
"""

import copy
import time

import numpy as np
import torch

import checkpoint
from configurator import configure, settings
from runtime import method_name, new_figure, provenance, result_path, save_json, save_png, setup

out_dir = 'out/demo/nope'    # the run to read; results go there too
init_from = 'last'           # last or best (of out_dir), a checkpoint file, a Hugging Face folder, or hf:ORG/NAME
position: str | None = None  # read the checkpoint with this position method; None: as it says
rope_scaling: str | None = None  # extend RoPE, such as yarn:4; None: as the checkpoint says
scale: float | str | None = None  # softmax scale: a number for all heads, or a scale file
dataset: str | None = None   # a folder of data/; None: the one the model was trained on
split = 'test'
layer: int | None = None     # counted from 0; None: the middle one
head = 0                     # counted from 0
lengths: list[int] | None = None  # tokens in a window, a row of the picture each; None: L, 4L, 16L
n_samples = 4                # windows of each length, evenly spaced over the split; the pictures show their mean
label = ''                   # name of the result; empty: the scale's
device = 'auto'              # auto, cpu, cuda, mps
dtype = 'float32'            # auto, float32, bfloat16, float16; half precision rounds q and k

CELLS = 64  # a map has at most 64 x 64 cells: the JSON of three lengths stays below 300 KB


def head_maps(attn, q, k, head):
    """
    What one head's attention over a window is made of. q: (1, H, T, D) scaled queries; k: (1, n_kv_head, T, D). Returns
    {part: (n, n) map} of what the layer has: score, q.k / sqrt(D) and what CoPE or Transformer-XL add; bias, B; dape,
    f([S; B]) of Eq. (3); attention, after softmax. A row for each cell of queries, a column for one of keys: the mean
    over keys j <= i, but of attention the sum over a cell's keys, as a single weight shrinks with T. Also by_distance,
    (bins,): the share that queries of the second half give to keys at distances i - j of 0, 1, 2-3, 4-7 ... tokens.
    """
    (H, T), position, bare = q.shape[1:3], torch.arange(q.shape[2], device=q.device), copy.deepcopy(attn)
    bare.bias = bare.dape = None
    # (T, n), 1 where a token lies in a cell: so in_cell.T @ map @ in_cell sums a map over its cells
    in_cell = torch.nn.functional.one_hot(position // -(-T // CELLS)).float()
    edges = 2 ** position[:(T - 1).bit_length()]  # 1, 2, 4 ...: the first distance of each bin but the one of 0
    size, maps, by_distance = in_cell.sum(0), 0, 0
    for rows, end in attn.row_chunks(T, T, H):
        i, j = position[rows], position[:end]
        with torch.autocast(q.device.type, enabled=False):
            these = q[:, :, rows].float(), k[:, :, :end].float(), i, j
            score, seen = bare.scores(*these)[0, head], attn.scores(*these)[0, head]  # (rows, end)
            parts = {'score': score} | ({'bias': attn.bias(i, j)[head]} if attn.bias else {})
            if attn.dape:
                parts['dape'] = seen - score - (parts.get('bias', 0) if attn.dape.residual else 0)
            parts['attention'] = seen.softmax(-1)
            values = torch.stack(list(parts.values())).masked_fill(j > i[:, None], 0)
            maps += in_cell[rows].T @ values @ in_cell[:end]  # sums, (parts, n, n)
        bins = torch.bucketize(i[:, None] - j, edges, right=True)  # later keys fall into the first, with no attention
        by_distance += torch.bincount(bins.flatten(), (values[-1] * (i >= T // 2)[:, None]).flatten(), len(edges) + 1)
    # how many keys not after their query a cell has: all, and on the diagonal half
    pairs = (size[:, None] * size).tril() - (size * (size - 1) / 2).diag()
    maps = {part: x / (size[:, None] if part == 'attention' else pairs) for part, x in zip(parts, maps)}
    return maps | {'by_distance': by_distance / (T - T // 2)}


def measure(model, tokens, layer, head):
    """
    A pass over one window, tokens: (1, T). Returns head_maps() of one head, and first_key (n_layer, H): how much of its
    attention each head gives to the window's first key, a mean over the queries of the second half.
    """
    T, x, first_key = tokens.shape[1], model.embed(tokens).to(model.norm.weight.dtype), []
    query_key, i, j = model.where(T, tokens.device)
    for number, block in enumerate(model.blocks):
        q, k, v = block.attn.project(block.attn_norm(x), query_key)
        if number == layer:
            found = head_maps(block.attn, q, k, head)
        is_first = torch.zeros_like(v).index_fill(2, i[:1], 1)  # attention over these values is the share itself
        share = block.attn.attend(q, k, is_first, i, j).view(T, block.attn.n_head, -1)[T // 2:, :, 0]
        first_key.append(share.float().mean(0) / block.attn.head_gain)
        x = block(x, query_key, i, j)
    return found | {'first_key': torch.stack(first_key)}


def draw(result, path):
    """A row for each length, a column with one colour scale for each part; later keys white, a dotted line at L."""
    rows, L, parts = result['lengths'], result['block_size'], list(result['lengths'][0]['maps'])
    figure, axes = new_figure(len(rows), len(parts), width=3.4, height=3.3)
    for part, column in zip(parts, np.reshape(axes, (len(rows), -1)).T):
        values, shared = [x for row in rows for line in row['maps'][part] for x in line], part == 'attention'
        # attention spans powers of ten; its scale is the same in every picture, so that two models compare
        norm, low, high = ('log', 1e-4, 1) if shared else ('linear', *np.percentile(values, [1, 99]))
        for axis, row in zip(column, rows):
            lines, T, share = row['maps'][part], row['length'], row['first_key'][result['layer']][result['head']]
            cells = np.array([line + [np.nan] * (len(lines) - len(line)) for line in lines]).clip(min=low)
            image = axis.imshow(cells, norm=norm, clim=(low, high), extent=(0, T, T, 0), interpolation='nearest')
            axis.plot([0, min(L, T)], [min(L, T)] * 2, color='black', ls=':', lw=1)
            axis.grid(False)
            axis.set(xlabel='key', ylabel='query', title=f'{part}, {T} tokens' + f'\n{share:.1%} on first key' * shared)
        figure.colorbar(image, ax=column, location='bottom', label='share of a cell' if shared else 'mean of a cell')
    method = method_name(result['position_method']) + ' + DAPE' * ('dape' in parts)
    figure.suptitle(f'{method} {result["label"]}'.strip() + f': layer {result["layer"]}, head {result["head"]}')
    save_png(figure, path)


def main():
    began, runtime = time.perf_counter(), setup(device, dtype)
    model, info = checkpoint.load_model(init_from, out_dir, runtime.device, position, rope_scaling, runtime.dtype)
    name = checkpoint.apply_scale(model, scale, info)
    name, L, (n_layer, H) = label or name, model.config.block_size, model.head_scale.shape
    at, sizes = n_layer // 2 if layer is None else layer, [L, 4 * L, 16 * L] if lengths is None else lengths
    for what, number, n in (('layer', at, n_layer), ('head', head, H)):
        if not 0 <= number < n:
            raise ValueError(f'{what} is {number}, but {info["path"]} has {n}. Choose one of 0 to {n - 1}.')
    if min(sizes, default=0) < 2 or n_samples < 1:
        raise ValueError(f'lengths is {sizes}, n_samples {n_samples}. Give lengths of 2 tokens or more, and 1 sample.')
    # all at once: a text too short shows before the work
    sources = [checkpoint.open_windows(info, dataset, split, T) for T in sizes]
    result = {'stage': 'attention', 'label': name, 'position_method': model.config.position, 'block_size': L,
              'dape_kernel': model.config.dape_kernel, 'dataset': sources[0].dataset, 'checkpoint': info['path'],
              'weights_digest': info['digest'], 'layer': at, 'head': head, 'lengths': []}
    for T, source in zip(sizes, sources):
        windows = torch.from_numpy(source.fixed(n_samples)[:, None, :-1]).to(runtime.device)
        with torch.no_grad(), runtime.autocast():
            found = [measure(model, window, at, head) for window in windows]
        mean = {part: np.mean([one[part].numpy(force=True) for one in found], axis=0) for part in found[0]}
        share, near = mean.pop('first_key'), mean.pop('by_distance')
        maps = {part: [[float(f'{x:.3g}') for x in row[:r + 1]] for r, row in enumerate(m)] for part, m in mean.items()}
        result['lengths'].append(dict(length=T, n_windows=len(found), first_key=share, by_distance=near, maps=maps))
        runtime.print(f'{T:8,d} tokens: {share[at, head]:.1%} on the first key; mean of all heads {share.mean():.1%}')
    if runtime.is_main:
        stem = result_path(out_dir, 'attention', name)
        result |= provenance(settings(globals()), runtime, time.perf_counter() - began)
        draw(save_json(f'{stem}.json', result), f'{stem}.png')
        print(f'wrote {stem}.json and .png')
    runtime.close()


if __name__ == '__main__':
    configure(globals())
    main()
