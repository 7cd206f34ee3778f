"""
Exact attention entropy per layer, head and position, computed without the T x T matrix. Section 2.3
and Appendix D of "Length Generalization of Causal Transformers without Position Encoding".
entropy_without_matrix() in kernels.py holds the formula.

$ python entropy.py                                              # the demo model, windows of 8L
$ python entropy.py --scale=out/demo/nope/scale_head_640.json    # with tuned scales

Writes out_dir/entropy[_LABEL].json and .png (Figures 1 and 5), and entropy_heads[_LABEL].png
(Figures 3 and 10 to 12)
"""

import math

import numpy as np

from configurator import between, configure, settings
from lib.answers import bin_means, print_rows, read_json
from lib.checkpoints import Run
from lib.errors import UserError, fault_of
from lib.losses import cut_curve, loss_and_entropy
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
# what to measure
length: int | None = None    # tokens in a window; None: 8L
n_samples = 64               # windows, evenly spaced over the split
compare: list[str] = []      # JSON files of other results of this stage, drawn in the same picture
bits = False                 # True: report entropies in bits, as the code of the paper does;
                             # False: in nats. Losses are always in nats
tail = 64                    # the loss in the cut context is a mean over this many tokens
batch_tokens = 16384         # tokens in one forward pass; lower it when memory runs out


def spearman(x, y):
    """
    Rank correlation of two sequences. Ties share their mean rank. It is nan if a sequence is
    constant.
    """
    ranks = []
    for values in (x, y):
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[inverse])
    with np.errstate(invalid='ignore'):
        return float(np.corrcoef(*ranks)[0, 1])


def curves_of(path, unit):
    """
    The curves and names of another result, for the picture. Raises UserError if it is not in this
    unit.
    """
    result = read_json(path, 'entropy')
    curves, names = ['position', 'loss', 'mean_entropy'], ['position_method', 'label', 'unit']
    with fault_of(path, 'a result of entropy.py', 'Give the .json that it wrote.'):
        numbers = np.array([result[key] for key in curves], float)  # fails if lengths differ
        for key, curve in zip(curves, numbers):
            if not np.isfinite(curve).all():
                raise UserError(f'{path} has null in {key}, because a number was not finite. '
                                'Measure it again, or leave it out.')
        found = {key: result[key] for key in curves + names}
    if found['unit'] != unit:
        raise UserError(f"{path} is in {found['unit']}. Give --bits={unit == 'nats'}, or measure "
                        'that result again.')
    return found


def main():
    between(globals(), 1, 'length', 'n_samples', 'tail', 'batch_tokens')
    unit = 'bits' if bits else 'nats'
    others = [curves_of(path, unit) for path in compare]
    run = Run(settings(globals()), 'entropy')
    L, nats_per_unit = run.L, math.log(2) if bits else 1.0
    between(globals(), L // 16, 'length', why='the width of a bin, L / 16')
    windows = run.windows(length or 8 * L)
    samples, T = windows.evenly_spaced(n_samples), windows.block_size

    losses, entropy = loss_and_entropy(run.model, samples, L // 16, batch_tokens, run.runtime,
                                       f'entropy at {T}')
    positions, loss = bin_means(losses, L // 16)
    mean, bound = entropy.mean((0, 1)) / nats_per_unit, np.log(positions) / nats_per_unit
    with vectors_for(run.model, T):
        scales = run.model.head_scale.numpy(force=True)
    result = {'dataset': windows.dataset, 'split': windows.split, 'unit': unit,
              'position': positions, 'samples': len(samples), 'loss': loss, 'mean_entropy': mean,
              'bound': bound, 'head_scale': scales, 'entropy': entropy / nats_per_unit}

    rows = []
    for end in (L // 2, L, 2 * L, 4 * L, 8 * L):
        if end <= T:
            i = np.searchsorted(positions, end, side='right') - 1  # the last bin up to `end`
            rows.append({'position': positions[i], f'mean entropy ({unit})': mean[i],
                         'bound': bound[i]})
    print_rows(run.runtime.print, rows)
    if len(np.unique(scales)) > 1:
        result['spearman'] = [spearman(*layer) for layer in zip(scales, entropy[:, :, -1])]
        for layer, correlation in enumerate(result['spearman']):
            run.runtime.print(f'layer {layer}: Spearman correlation of scale and entropy '
                              f'{correlation:+.2f}')
    if T > L:
        result['cut'] = cut_curve(run.model, samples, L, tail, batch_tokens, run.runtime)
    run.write('entropy', result | {'compare': others})
    run.close()


if __name__ == '__main__':
    configure(globals())
    main()
