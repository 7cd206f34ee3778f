"""
Solutions of lessons/exercises.py, as a student may write them: tests/test_lessons.py shows that the
grader takes them, and that it refuses each of them after one usual mistake.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

import position


def causal_attention(q, k, v, scale):
    scores = q @ k.mT / math.sqrt(q.shape[2]) * scale[:, None, None]
    later = torch.ones_like(scores).triu(1).bool()
    scores = scores.masked_fill(later, -math.inf)
    return scores.softmax(-1) @ v


def scale_queries(q, scale):
    return q * scale[:, None, None]


def fold_scale(weight, scale):
    D = len(weight) // len(scale)
    return weight * scale.repeat_interleave(D)[:, None]


def fit_scale(position, best, L):
    far = position > L
    x, y = (position / L).log()[far], best[far]
    return x @ (y - 1) / (x @ x)


def entropy(attention):
    return torch.special.entr(attention).sum(-1)


def entropy_without_matrix(q, k):
    rows = []
    for i in range(q.shape[1]):
        scores = (k[:, :i + 1] @ q[:, i, :, None])[..., 0] / math.sqrt(q.shape[2])
        mean = (scores.softmax(-1) * scores).sum(-1)
        rows.append(scores.logsumexp(-1) - mean)
    return torch.stack(rows, dim=1)


def rotate(x, place, base=10000.0):
    D = x.shape[2]
    angle = place[:, None] * base ** (-torch.arange(0, D, 2) / D)
    cos, sin = angle.cos(), angle.sin()
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def yarn_frequencies(D, base, s, L):
    def n(r):
        return D * math.log(L / (2 * math.pi * r)) / (2 * math.log(base))

    low, high = n(32), n(1)
    low, high = max(0, math.floor(low)), min(D - 1, math.ceil(high))
    pair = torch.arange(D // 2).double()
    share = (pair - low) / max(high - low, 0.001)
    share = share.clamp(0, 1)
    return base ** (-2 * pair / D) * (1 - share + share / s)


def alibi(n_head, i, j):
    slopes = 2.0 ** (-8 * torch.arange(1, n_head + 1) / n_head)
    return -slopes[:, None, None] * (i[:, None] - j)


class OwnBias(position.NoPE):
    """-p_h ln(1 + i - j), p_h learned."""

    def __init__(self, config):
        super().__init__(config)
        self.p = nn.Parameter(torch.ones(config.n_head))

    def bias(self, i, j):
        distance = position.distances(i, j)
        return -self.p[:, None, None] * torch.log1p(distance)


def tune_scales(model, batches, rate, per_channel=False):
    model.requires_grad_(False)
    if per_channel:
        model.head_scale = model.head_scale[..., None].expand(-1, -1, model.config.head_dim)
    scales = [block.attn.head_scale.requires_grad_() for block in model.blocks]
    optimizer = torch.optim.Adam(scales, rate)
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = model(inputs, targets).mean()
        loss.backward()
        optimizer.step()
        if not per_channel:
            for scale in scales:
                scale.data.clamp_(min=1)


def dape(scores, bias, first, second):
    T, K = scores.shape[1], first.shape[2]
    later = torch.ones(T, T).triu(1).bool()
    x = torch.cat((scores, bias)).tril().transpose(0, 1)
    x = F.conv1d(x, first, padding=K - 1)        # from key -(K - 1) / 2 on
    x = F.leaky_relu(x)
    x[..., :K // 2] = 0
    f = F.conv1d(x, second).transpose(0, 1)
    return (scores + bias + f).masked_fill(later, -math.inf)


def leaks(f, T):
    scores = torch.randn(T, T).double()
    found = torch.zeros(T, T).bool()
    for i, j in torch.ones(T, T).triu(1).nonzero():
        changed = scores.clone()
        changed[i, j] += 0.1
        moved = f(changed) != f(scores)
        found[i, j] = moved[i, :i + 1].any()
    return found


def sliding_windows(n, length, stride):
    end = min(n, length)
    windows = [(0, end, end - 1)]
    while end < n:
        before = end
        end = min(n, end + stride)
        windows.append((end - length, end, end - before))
    return windows


def far_repeat_gain(tokens, losses, cut_losses, g, L):
    counted = []
    for t in range(2 * L, len(tokens)):
        places = [s for s in range(g, t) if torch.equal(tokens[s - g:s], tokens[t - g:t])]
        if places and places[-1] < t - L:
            counted.append(t)
    return (cut_losses - losses)[counted].mean()


def gain_and_headroom(losses, own_cut, cut, same, val_cut, val_same):
    def mixed(loss, copy, w):
        p = (1 - w) * (-loss).exp() + w * copy
        return -p.log()

    weights = torch.arange(10000) / 10000
    means = torch.stack([mixed(val_cut, val_same, w).mean() for w in weights])
    w = weights[means.argmin()]
    gain = cut - losses
    room = cut - mixed(cut, same, w)
    return gain.mean(), room.mean(), gain.mean() / room.mean()


def short_conv(x, w, before=None):
    taps, C = w.shape
    if before is None:
        before = x.new_zeros(len(x), taps - 1, C)
    x_and_before = torch.cat((before, x), dim=1)
    kernel = w.flip(0).mT[:, None]
    y = F.conv1d(x_and_before.mT, kernel, groups=C)
    return x + y.mT
