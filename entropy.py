"""
Attention entropy per layer, head and position, exact, without the T x T matrix. Section 2.3 and
Appendix D of "Length Generalization of Causal Transformers without Position Encoding"; the formula
is entropy() in kernels.py.

$ python entropy.py                                              # the demo model, windows of 8L
$ python entropy.py --scale=out/demo/nope/scale_head_640.json    # with tuned scales

Writes out_dir/entropy[_LABEL].json and .png (Figures 1, 5), entropy_heads[_LABEL].png (3, 10-12)
"""

import math

import numpy as np
import torch

from configurator import between, configure, settings
from kernels import attention_entropy
from lib.checkpoints import Run, TextSettings
from lib.errors import UserError
from lib.losses import by_position, cut_curve
from lib.results import bin_means, print_rows, read_json

length: int | None = None    # tokens in a window; None: 8L
n_samples = 64               # windows, evenly spaced over the split
compare: list[str] = []      # other results of this stage (their JSON), drawn in the same picture
bits = False                 # report bits, as the paper's code does, instead of nats
tail = 64                    # positions behind each point of the loss with the context cut to L
batch_tokens = 16384         # tokens in one forward pass; lower it when memory runs out
dtype = 'float32'            # auto, float32, bfloat16, float16; half precision rounds q and k


def spearman(x, y):
    """
    Rank correlation of two sequences, ties sharing their mean rank; nan where one is constant.
    """
    ranks = []
    for values in (x, y):
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[inverse])
    with np.errstate(invalid='ignore'):
        return float(np.corrcoef(*ranks)[0, 1])


def measure_entropy(model, windows, n_samples, batch_tokens, bin_width, runtime):
    """
    Means over samples, in bins of `bin_width` positions: the positions (bins,), the loss (bins,)
    and the entropy of every head (n_layer, n_head, bins), in nats.
    """
    def measure(inputs, targets):
        losses, entropy = by_position(model, inputs, targets, attention_entropy)
        heads = entropy.transpose(0, 1).flatten(1, 2)          # (B, n_layer * H, T)
        both = torch.cat((losses[:, None], heads), dim=1)
        return bin_means(both.cpu().numpy(), bin_width)[1]

    T = windows.block_size
    samples = windows.evenly_spaced(n_samples)
    rows = runtime.over_windows(samples, batch_tokens, measure, f'entropy at {T}')
    loss, *heads = rows.mean(0)
    positions, _ = bin_means(np.zeros(T), bin_width)
    return positions, loss, np.reshape(heads, (-1, model.config.n_head, len(positions)))


def what_is_drawn(path):
    """The curves and names that a picture needs of another result of this stage."""
    curves, names = ['position', 'loss', 'mean_entropy'], ['position_method', 'label', 'unit']
    result = read_json(path, 'entropy', *curves)
    if result.get('unit') in ('bits', 'nats') and bits != (result['unit'] == 'bits'):
        raise UserError(f"{path} is in {result['unit']}. Give --bits={not bits}, or measure it "
                        'again.')
    if not all(isinstance(result.get(name), str) for name in names):
        raise UserError(f"{path} lacks one of {', '.join(names)}. Give the .json that entropy.py "
                        'wrote.')
    return {key: result[key] for key in curves + names}


def main():
    between(globals(), 1, 'length', 'n_samples', 'tail', 'batch_tokens')
    others = [what_is_drawn(path) for path in compare]
    run = Run(settings(globals()))
    model, L = run.model, run.L
    between(globals(), L // 16, 'length')  # the width of a bin
    windows = run.windows(length or 8 * L)
    positions, loss, entropy = measure_entropy(model, windows, n_samples, batch_tokens, L // 16,
                                               run.runtime)
    unit = math.log(2) if bits else 1.0
    mean, bound = entropy.mean((0, 1)) / unit, np.log(positions) / unit
    scales = model.head_scale.numpy(force=True)
    result = {'dataset': windows.dataset, 'split': windows.split,
              'unit': 'bits' if bits else 'nats', 'position': positions,
              'loss': loss, 'mean_entropy': mean, 'bound': bound, 'head_scale': scales,
              'entropy': entropy / unit}

    rows = []
    for T in (L // 2, L, 2 * L, 4 * L, 8 * L):
        if T <= windows.block_size:
            i = np.searchsorted(positions, T, side='right') - 1  # the last bin up to T
            rows.append({'position': T, f"mean entropy ({result['unit']})": mean[i],
                         'bound': bound[i]})
    print_rows(run.runtime.print, rows)
    if len(np.unique(scales)) > 1:
        result['spearman'] = [spearman(s, e) for s, e in zip(scales, entropy[:, :, -1])]
        for layer, value in enumerate(result['spearman']):
            run.runtime.print(f'layer {layer}: Spearman correlation of scale and entropy '
                              f'{value:+.2f}')
    if windows.block_size > L:
        result['cut'] = cut_curve(model, windows.evenly_spaced(n_samples), L, tail, batch_tokens,
                                  run.runtime)
    result['compare'] = others
    run.write('entropy', result)


if __name__ == '__main__':
    configure(globals(), TextSettings)
    main()
