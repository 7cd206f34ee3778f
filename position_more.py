"""
More position methods: those that came after the methods of the two papers. Each is one class over
those of position.py, and an entry in METHODS at the end of this file.

Shapes are as in position.py. The source of each formula stands in its class.
"""

import math

import torch
import torch.nn as nn

from position import METHODS, ALiBi, NoPE, QueryFactor, Vector, later

# ---------------------------------------------------------------------- factors of the query

class SSMax(QueryFactor):
    """
    Scalable-Softmax (Nakanishi 2025): multiplies the query that sees n keys by s_h ln n. s_h is
    learned. It starts at 1 / ln L, so that the last query of a window starts as in NoPE.
    """

    def __init__(self, config):
        super().__init__(config)
        self.s = nn.Parameter(torch.full((config.n_head,), 1 / math.log(config.pretrained_length)))

    def factor(self, i):
        return self.s[:, None] * (i + 1).log()


class LogBeta(QueryFactor):
    """
    Multiplies query i by 1 + beta_h ln(i + 2)^gamma_h (arXiv:2506.16640). beta and gamma are
    learned. They start as in the paper's released code.
    """

    def __init__(self, config):
        super().__init__(config)
        self.beta = nn.Parameter(torch.empty(config.n_head).uniform_(0.1, 1))
        self.gamma = nn.Parameter(0.1 * torch.randn(config.n_head))

    def factor(self, i):
        return 1 + self.beta[:, None] * (i + 2).log() ** self.gamma[:, None]


class Llama4(QueryFactor):
    """
    Multiplies query i by 1 + 0.1 ln(1 + floor((i + 1) / L)). Llama 4 reads long texts this way in
    its layers without RoPE. The method has no weights, so a trained NoPE model can use it.
    """

    def factor(self, i):
        return 1 + 0.1 * torch.log1p(((i + 1) / self.L).floor())


class Adaptive(NoPE):
    """
    Multiplies a row of scores by max(1, P(H)) if the entropy H of its attention is above 0.5 nats
    (arXiv:2410.01104). The authors of the paper fitted the polynomial P. Above 5.9 nats P is below
    1, so the row does not change. The method has no weights, so a trained NoPE model can use it.
    """
    P = -0.037, 0.481, -2.3, 4.917, -1.791  # coefficients, highest power first

    def similarity(self, q, k, i, j):
        scores = super().similarity(q, k, i, j)
        mask = later(i, j)
        log_a = scores.float().masked_fill(mask, -math.inf).log_softmax(-1)
        terms = log_a.exp() * log_a.masked_fill(mask, 0)
        H = -terms.sum(-1, keepdim=True)
        beta = 0
        for coefficient in self.P:
            beta = beta * H + coefficient
        factor = beta.clamp(min=1).where(H > 0.5, 1)
        return (scores * factor).to(scores.dtype)


# ---------------------------------------------------------------------- biases

class NAPE(ALiBi):
    """
    ALiBi with slopes 1, 1/2, 1/3 ... on half of the heads (arXiv:2506.16640). The other heads are
    plain NoPE.
    """

    def slopes_of(self, n_head):
        half = n_head // 2
        return [1 / (h + 1) for h in range(half)] + [0.0] * (n_head - half)


class NAPESSMax(NAPE):
    """NAPE with SSMax on the heads without a slope (arXiv:2506.16640)."""
    settings = ()  # no random positions, because a query counts its keys by its position

    def __init__(self, config):
        super().__init__(config)
        self.first = config.n_head // 2  # first head without a slope
        rest = config.n_head - self.first
        self.s = nn.Parameter(torch.full((rest,), 1 / math.log(config.pretrained_length)))

    def encode(self, q, k, place):
        log_n = (place.i.float() + 1).log()[..., None, :, None]              # (1, T, 1)
        with_slope, without = q.split([self.first, len(self.s)], dim=1)
        without = without * self.s[:, None, None] * log_n
        return torch.cat((with_slope, without.to(q.dtype)), dim=1), k


# ---------------------------------------------------------------------- mask and softmax

class Window(NoPE):
    """
    A query sees only the newest L keys and the first 4 keys of the text (StreamingLLM, Xiao et al.
    2023). The method has no weights, so a trained NoPE model can use it, in one pass of any length.
    """

    def __init__(self, config):
        super().__init__(config)
        self.window, self.sinks = config.pretrained_length, 4


class Sink(NoPE):
    """
    Adds exp(s_h) to the denominator of each head's softmax (gpt-oss, 2025). s_h is learned and
    starts at 0. The sink takes the attention that a head has no use for. At 0 it already takes
    some, so it changes a model that was trained without it.
    """
    vectors = {'sink': Vector(neutral=0.0, pretrained=True)}

    def __init__(self, config):
        super().__init__(config)
        self.sink = nn.Parameter(torch.zeros(config.n_head, 1))

    def softmax(self, scores):
        sink = self.sink[:, :, None].expand(*scores.shape[:-1], 1)           # (B, H, T, 1)
        return super().softmax(torch.cat((scores, sink.to(scores.dtype)), dim=-1))[..., :-1]


METHODS.update({
    'ssmax': SSMax,
    'logbeta': LogBeta,
    'llama4': Llama4,
    'adaptive': Adaptive,
    'nape': NAPE,
    'nape_ssmax': NAPESSMax,
    'window': Window,
    'sink': Sink,
})
