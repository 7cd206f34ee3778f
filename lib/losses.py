"""
Losses by position: with the whole context, and with the context cut to the last L0 tokens, as many
as a window of pretraining has. The cut context is the baseline of every model that reads past L0.
"""

import contextlib

import torch

from kernels import attention_entropy
from lib.scales import vectors_for


def by_position(model, inputs, targets, probe=None):
    """
    Losses (B, T) in nats, and what a probe returns for each layer, (n_layer, B, H, T), or None
    without a probe. inputs, targets: (B, T) ids. With scale sets, each position is read by the
    shortest pass that contains it. Without them, one pass reads all positions.
    """
    T, losses, seen, first = inputs.shape[1], [], [], 0
    lengths = list(model.scale_sets.sets) if model.scale_sets else []
    for end in [*(length for length in lengths if length < T), T]:
        probing = model.probe(probe) if probe else contextlib.nullcontext()
        with vectors_for(model, end), probing as of_layers:
            losses.append(model(inputs[:, :end], targets[:, first:end]))
        if probe:
            seen.append(torch.stack(of_layers)[..., first:])
        first = end
    return torch.cat(losses, dim=1), torch.cat(seen, dim=-1) if seen else None


def loss_and_entropy(model, samples, width, batch_tokens, runtime, label=None):
    """
    Means over samples, in nats: the loss by position, (T,), and the entropy of every head in bins
    of `width` positions, (n_layer, n_head, bins). samples: (n, T + 1) ids. In half precision, q and
    k are rounded before the entropy is computed.
    """
    T, width = samples.shape[1] - 1, max(1, width)
    bins = T // width

    def losses_and_entropies(inputs, targets):
        losses, entropy = by_position(model, inputs, targets, attention_entropy)
        heads = entropy[..., :bins * width].unflatten(-1, (bins, width)).mean(-1)
        return torch.cat((losses, heads.transpose(0, 1).flatten(1)), dim=1)

    means = runtime.over_windows(samples, batch_tokens, losses_and_entropies, label).mean(0)
    return means[:T], means[T:].reshape(-1, model.config.n_head, bins)


def cut_windows(windows, L):
    """
    Split the tokens that each window scores into pieces of at most L / 8 tokens. Each piece is read
    with at most L tokens of context. windows: (start, end, number of tokens scored at the end).
    Returns a list of such windows for each window.
    """
    cut = []
    for lo, hi, n in windows:
        first, stride = hi - n, min(n, max(1, L // 8))
        ends = range(hi, first, -stride)
        cut.append([(max(lo, end - L), end, min(stride, end - first)) for end in ends])
    return cut


def cut_losses(model, samples, end, tail, batch_tokens, runtime):
    """
    The mean loss of each sample over the last `tail` targets up to position `end`, (n,). The
    context is cut to L0 tokens by cut_windows(). samples: (n, T + 1) ids.
    """
    def of_piece(lo, hi, n):
        with vectors_for(model, hi - lo):
            return runtime.over_windows(
                samples[:, lo:hi + 1], batch_tokens,
                lambda inputs, targets: model(inputs, targets[:, -n:]).sum(1))

    n_scored = min(tail, end)
    [pieces] = cut_windows([(0, end, n_scored)], model.config.L0)
    return sum(of_piece(*piece) for piece in pieces) / n_scored


def doubled_lengths(L, T):
    """The lengths L, 2L, 4L ... below T, and T."""
    return [L * 2 ** k for k in range(T.bit_length()) if L * 2 ** k < T] + [T]


def cut_curve(model, samples, L, tail, batch_tokens, runtime):
    """
    The baseline for a picture of losses by position. Positions: L, 2L, 4L ... and the end of the
    samples, where L is the model's block_size. The loss at each is the mean of cut_losses() over
    the samples. Context: the number of tokens that the context is cut to.
    """
    lengths = doubled_lengths(L, samples.shape[1] - 1)
    losses = [cut_losses(model, samples, T, tail, batch_tokens, runtime).mean() for T in lengths]
    return {'context': model.config.L0, 'position': lengths, 'loss': losses}
