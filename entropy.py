"""
Exact attention entropy per layer, head and position, computed without the T x T matrix. Section 2.3
and Appendix D of "Length Generalization of Causal Transformers without Position Encoding".

$ python entropy.py                                              # the demo model, windows of 8L
$ python entropy.py --scale=out/demo/nope/scale_head_640.json    # with tuned scales

Writes out_dir/entropy[_LABEL].json and .png (Figures 1, 3 and 10 to 12)
"""

import math
from functools import partial

from configurator import UserError, configure, settings

import numpy as np
import torch

from common import setup
from data import Windows
from position import in_rows, repeat_heads
from stage import (
    bin_means,
    cut_curve,
    doublings,
    open_model,
    print_rows,
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
dtype = 'float32'            # auto, float32, bfloat16, float16; half precision rounds q and k
# what to measure
length: int | None = None    # tokens in a window; None: 8 times block_size
n_samples = 64               # windows, evenly spaced over the split
tail = 64                    # the loss with only the last L tokens is a mean over this many tokens
batch_tokens = 16384         # tokens in one forward pass; lower it when memory runs out


# ---------------------------------------------------------------------- the formula

# The kernels behind F.scaled_dot_product_attention, which also return what it drops. Given q, k and
# k as v, (B, H, T, D) float32, each returns sum_j a_ij k_j, (B, H, T, D), and ln sum_j exp(s_ij),
# (B, H, T). Their names are private; the tests try them with each version of torch.
FUSED_KERNEL = {
    'cpu': torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    'cuda': partial(torch.ops.aten._scaled_dot_product_efficient_attention, attn_bias=None,
                    compute_log_sumexp=True),
}


def entropy_without_matrix(q, k):
    """
    Entropy of each query's causal attention over s = q.k / sqrt(D), in nats, without the T x T
    matrix. Eq. (2) of arXiv:2404.12224 is H_i = ln sum_j exp(s_ij) - sum_j a_ij s_ij. The last sum
    is q_i . (sum_j a_ij k_j) / sqrt(D). So one fused attention call with the keys as values gives
    both terms, because the kernel also returns its log-sum-exp, which has no gradient.
    q: (B, H, T, D) scaled queries; k: (B, n_kv_head, T, D). Returns (B, H, T) float32, from 0 to
    ln(i + 1).
    """
    H, T, D = q.shape[1:]
    # float32, because the two terms nearly cancel; contiguous, because the kernel assumes it
    q, k = q.float().contiguous(), repeat_heads(k.float(), H).contiguous()
    mean_k, log_sum_exp, *_ = FUSED_KERNEL[q.device.type](q, k, k, is_causal=True)
    mean_score = (q * mean_k).sum(-1) / math.sqrt(D)
    return (log_sum_exp[..., :T] - mean_score).clamp(min=0)  # the CUDA kernel pads rows


def attention_entropy(method, q, k, place):
    """
    Entropy of each query's attention in nats, (B, H, T) float32, for any position method: by
    entropy_without_matrix() where it can, otherwise from the weights of some rows at a time, which
    has a gradient. If a row's weights sum to less than 1, as with a sink, it is first divided by
    its sum. q, k: as entropy_without_matrix() takes them.
    """
    wants_gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)

    def of_rows(q, k, v, i, j):
        weights = method.softmax(method.scores(q, k, i, j))
        smallest = torch.finfo(weights.dtype).tiny  # so that 0 ln 0 is 0 and has a gradient
        terms = weights * weights.clamp(min=smallest).log()
        total = weights.sum(-1).clamp(min=smallest)
        return (total.log() - terms.sum(-1) / total).clamp(min=0)  # of p = weights / total

    # NoPE and RoPE: a softmax of q.k / sqrt(D). CUDA's kernel wants heads of 4, 8, 12 ... channels.
    is_plain = method.changed <= {'prepare', 'encode'} and q.shape[-1] % 4 == 0
    with torch.autocast(q.device.type, enabled=False):
        if is_plain and q.device.type in FUSED_KERNEL and not wants_gradient:
            return entropy_without_matrix(q, k)
        return in_rows(of_rows, q.float(), k.float(), k.float(), place)  # no values: k again


def has_entropy(model):
    """False if a position method has its own attend(), whose attention weights are not known."""
    return not any('attend' in block.attn.position.changed for block in model.blocks)


def require_weights(model):
    """Raise UserError unless has_entropy(model)."""
    if not has_entropy(model):
        raise UserError(f'{model.config.position} has its own attend(), so its attention weights '
                        'are not known. Override scores() or softmax() instead.')


def entropies(model, inputs, targets):
    """
    The entropy of every head at each position, (n_layer, B, H, T) float32, and the loss of each
    target, (B, T), both in nats. inputs, targets: (B, T) ids.
    """
    require_weights(model)
    found, checkpoints = [], model.checkpoint_activations
    model.checkpoint_activations = False  # backward would compute the blocks again without probes

    def measure(attention, q, k, place):
        found.append(attention_entropy(attention.position, q, k, place))

    for block in model.blocks:
        block.attn.probe = measure
    # as Python, because compiled code would not call the probes
    with torch.compiler.set_stance('force_eager'):
        losses = model(inputs, targets)
    for block in model.blocks:
        block.attn.probe = None
    model.checkpoint_activations = checkpoints
    return torch.stack(found), losses


# ---------------------------------------------------------------------- over a text

def main(given):
    runtime = setup(device, dtype)
    model, info = open_model(init_from, out_dir, runtime, position, rope_scaling, scale)
    folder = results_folder(out_dir, init_from, given)
    path = result_path(folder, 'entropy', label, info, dataset, split)
    block_size = model.config.block_size
    T, width = length or 8 * block_size, max(1, block_size // 16)
    windows = Windows(dataset or info['dataset'], split, T, info=info)
    samples = windows.evenly_spaced(n_samples)

    def measure(inputs, targets):
        """The loss, then the entropy of each head, in bins: (B, 1 + n_layer * n_head, bins)."""
        heads, losses = entropies(model, inputs, targets)         # (n_layer, B, H, T), (B, T)
        rows = torch.cat((losses[:, None], heads.transpose(0, 1).flatten(1, 2)), dim=1)
        return bin_means(rows, width)[1]

    means = runtime.over_windows(samples, batch_tokens, measure, f'{T} tokens').mean(0)
    # row 0 is the loss; the others are the heads, layer by layer: (n_layer, H, bins)
    loss, heads = means[0], means[1:].reshape(len(model.blocks), -1, means.shape[1])
    positions, _ = bin_means(np.arange(T), width)
    mean, bound = heads.mean((0, 1)), np.log(positions)

    rows = []
    for end in doublings(block_size // 2, T):
        i = end // width - 1  # the last bin up to `end`
        rows.append({'position': positions[i], 'mean entropy (nats)': mean[i], 'bound': bound[i]})
    print_rows(runtime.print, rows)
    result = {'dataset': windows.dataset, 'samples': len(samples), 'crossing': windows.crossing,
              'position': positions, 'loss': loss, 'mean_entropy': mean, 'bound': bound,
              'entropy': heads, 'cut': cut_curve(model, samples, tail, batch_tokens, runtime)}
    write_result(path, result, settings(globals()), runtime, info)


if __name__ == '__main__':
    main(configure(globals()))
