"""
Attention entropy per layer, head and position, exact, without the T x T matrix. Section 2.3 and Appendix D of
"Length Generalization of Causal Transformers without Position Encoding"; the formula is Attention.entropy in model.py.

$ python entropy.py                                              # the demo model, windows of 8L
$ python entropy.py --scale=out/demo/nope/scale_head_640.json    # with tuned scales: also their rank correlation

Writes out_dir/entropy[_LABEL].json, .png (Figures 1, 5), and entropy_heads[_LABEL].png (Figures 3, 10-12)
"""

import math
import time

import numpy as np
import torch

import checkpoint
from configurator import at_least, configure, settings
from runtime import (
    bin_means,
    mark_length,
    method_name,
    new_figure,
    provenance,
    read_json,
    result_path,
    running_mean,
    save_json,
    save_png,
    setup,
)

out_dir = 'out/demo/nope'    # the run to read; results go there too
init_from = 'last'           # last or best (of out_dir), a checkpoint file, a Hugging Face folder, or hf:ORG/NAME
position: str | None = None  # read the checkpoint with this position method; None: as it says
rope_scaling: str | None = None  # extend RoPE, such as yarn:4; None: as the checkpoint says
scale: float | str | None = None  # softmax scale: a number for all heads, or a scale file
dataset: str | None = None   # a folder of data/; None: the one the model was trained on
split = 'test'
length: int | None = None    # tokens in a window; None: 8L
n_samples = 64               # windows, evenly spaced over the split
compare: list[str] = []      # other results of this stage (their JSON), drawn in the same picture
bits = False                 # report bits, as the paper's code does, instead of nats
batch_tokens = 16384         # tokens in one forward pass; lower it when memory runs out
label = ''                   # name of the result; empty: the scale's
device = 'auto'              # auto, cpu, cuda, mps
dtype = 'float32'            # auto, float32, bfloat16, float16; half precision rounds q and k


def spearman(x, y):
    """Rank correlation of two sequences, ties sharing their mean rank; nan where one of them is constant."""
    ranks = []
    for values in (x, y):
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[inverse])
    a, b = (r - r.mean() for r in ranks)
    norm = math.sqrt((a * a).sum() * (b * b).sum())
    return float((a * b).sum() / norm) if norm else math.nan


def measure_entropy(model, windows, n_samples, batch_tokens, bin_width, runtime):
    """
    Means over samples, in bins of `bin_width` positions: the positions (bins,), the loss (bins,) and the entropy of
    every head (n_layer, n_head, bins), in nats.
    """
    positions = bin_means(np.zeros(windows.block_size), bin_width)[0]

    def measure(inputs, targets):
        losses, entropy = model.losses_and_entropy(inputs, targets)                        # (B, T), (n_layer, B, H, T)
        both = torch.cat((losses[:, None], entropy.transpose(0, 1).flatten(1, 2)), dim=1)  # (B, 1 + n_layer * H, T)
        return bin_means(both.cpu().numpy(), bin_width)[1]

    rows = runtime.over_windows(windows.fixed(n_samples), batch_tokens, measure, f'entropy at {windows.block_size}')
    means = rows.mean(0)
    return positions, means[0], means[1:].reshape(-1, model.config.n_head, len(positions))


def draw_mean(result, path):
    """Figure 1: loss and mean entropy by position. Figure 5, for tuned scales: scale against entropy, by layer."""
    L, unit, position = result['block_size'], result['unit'], result['position']
    tuned = 'spearman' in result
    figure, axes = new_figure(1, 2 + tuned, width=5.2)
    for i, curve in enumerate([result, *result['compare']]):
        name = f"{method_name(curve['position_method'])} {curve['label']}".strip()
        axes[0].plot(running_mean(curve['position']), running_mean(curve['loss']), color=f'C{i}', label=name)
        axes[1].plot(curve['position'], curve['mean_entropy'], color=f'C{i}')
    axes[0].set(ylabel='loss (nats per token)', title='Loss')
    axes[0].legend()
    axes[1].plot(position, result['bound'], color='black', ls='--', lw=1, label='upper bound, ln i' if unit == 'nats'
                 else 'upper bound, log2 i')
    axes[1].set(ylabel=f'attention entropy ({unit})', title='Mean attention entropy')
    axes[1].legend()
    ticks = [T for k in range(-3, 20) if L / 8 <= (T := int(L * 2.0 ** k)) <= position[-1] + L]
    for axis in axes[:2]:
        axis.set(xscale='log', xlabel='position i (tokens)', xlim=(L / 8, max(ticks)))
        axis.set_xticks(ticks, [str(T) for T in ticks])
        axis.minorticks_off()
        mark_length(axis, L)
    if tuned:
        last = np.array(result['entropy'])[:, :, -1]
        for layer, (x, y) in enumerate(zip(result['head_scale'], last)):
            if len(last) <= 8 or layer % 3 == 1:  # the paper shows layers 1, 4, 7 ... 19 of 22
                value = result['spearman'][layer]
                axes[2].scatter(x, y, s=18, label=f'layer {layer}: {math.nan if value is None else value:+.2f}')
        axes[2].set(xlabel=r'scale ($1/\sqrt{d}$)', ylabel=f'entropy at position {position[-1]:.0f} ({unit})',
                    title='Scale and entropy of each head (Figure 5)')
        axes[2].legend(title='Spearman', fontsize=8)
    save_png(figure, path)


def draw_heads(result, path):
    """Figures 3, 10-12: the entropy of every head by position, one panel a layer, below the bound ln i."""
    L, position = result['block_size'], result['position']
    layers = np.array(result['entropy'])
    columns = min(4, len(layers))
    rows = -(-len(layers) // columns)
    figure, axes = new_figure(rows, columns, width=3.4, height=2.6)
    axes = np.atleast_1d(axes).flatten()
    for axis in axes[len(layers):]:
        axis.axis('off')
    for layer, heads in enumerate(layers):
        for head in heads:
            axes[layer].plot(position, head, lw=1)
        axes[layer].plot(position, result['bound'], color='black', ls='--', lw=1)
        axes[layer].axvline(L, color='black', ls=':', lw=1)
        axes[layer].set(title=f'layer {layer}', ylim=(0, max(result['bound']) * 1.03))
        axes[layer].set_xlabel('position (tokens)' if layer >= len(layers) - columns else '')
        axes[layer].set_ylabel(f'entropy ({result["unit"]})' if layer % columns == 0 else '')
    save_png(figure, path)


def main():
    began, runtime = time.perf_counter(), setup(device, dtype)
    at_least(1, globals(), 'length', 'n_samples')
    others = [read_json(path, 'entropy', 'position', 'loss', 'mean_entropy') for path in compare]
    model, info = checkpoint.load_model(init_from, out_dir, runtime.device, position, rope_scaling, runtime.dtype)
    name = checkpoint.apply_scale(model, scale, info)
    name = label or name
    L = model.config.block_size
    at_least(L // 16, globals(), 'length')  # the width of a bin
    windows = checkpoint.open_windows(info, dataset, split, length or 8 * L)
    positions, loss, entropy = measure_entropy(model, windows, n_samples, batch_tokens, L // 16, runtime)
    unit = math.log(2) if bits else 1.0
    result = {'stage': 'entropy', 'label': name, 'position_method': model.config.position, 'block_size': L,
              'dataset': windows.dataset, 'split': split, 'checkpoint': info['path'], 'weights_digest': info['digest'],
              'scale': scale, 'unit': 'bits' if bits else 'nats', 'position': positions, 'loss': loss,
              'mean_entropy': entropy.mean((0, 1)) / unit, 'bound': np.log(positions) / unit,
              'head_scale': model.head_scale.numpy(force=True), 'entropy': entropy / unit}
    if len(np.unique(result['head_scale'])) > 1:
        result['spearman'] = [spearman(s, e) for s, e in zip(result['head_scale'], entropy[:, :, -1])]
    runtime.print(f'    position   mean entropy ({result["unit"]})   bound')
    for T in (L // 2, L, 2 * L, 4 * L, 8 * L):
        if T <= windows.block_size:
            i = np.searchsorted(positions, T, side='right') - 1  # the last bin up to T
            runtime.print(f'{T:12d} {result["mean_entropy"][i]:21.3f} {result["bound"][i]:7.3f}')
    for layer, value in enumerate(result.get('spearman', [])):
        runtime.print(f'layer {layer}: Spearman correlation of scale and entropy {value:+.2f}')
    shown = ('position_method', 'label', 'unit', 'position', 'loss', 'mean_entropy')
    result['compare'] = [{key: other[key] for key in shown} for other in others]
    if runtime.is_main:
        result |= provenance(settings(globals()), runtime, time.perf_counter() - began)
        stem, heads = result_path(out_dir, 'entropy', name), result_path(out_dir, 'entropy_heads', name)
        result = save_json(f'{stem}.json', result)
        draw_mean(result, f'{stem}.png')
        draw_heads(result, f'{heads}.png')
        print(f'wrote {stem}.json and .png, {heads}.png')
    runtime.close()


if __name__ == '__main__':
    configure(globals())
    main()
