"""
More position methods: the others that "DAPE V2" compares (FIRE, T5's bias, CoPE, Transformer-XL),
and others. Each is one class over those of position.py, and an entry in METHODS at the end of
this file.

Shapes are as in position.py. The source of each formula stands in its class.
"""

import math

import torch
import torch.nn as nn

from position import METHODS, NoPE, Place, RoPE, distances, later

# ---------------------------------------------------------------------- positions

class RandomRoPE(RoPE):
    """
    RoPE whose tokens have a sorted random subset of 0 ... 2047 as positions, so that short texts
    train the rotations of long ones (Ruoss et al. 2023, arXiv:2305.16843). Each layer draws anew in
    each pass of training; evaluation keeps one draw, the same in all layers. Texts of more than
    2,048 tokens raise RuntimeError.
    """

    def __init__(self, config):
        super().__init__(config)
        self.depends_on_length = True
        draws = torch.rand(2048, generator=torch.Generator().manual_seed(0))
        self.register_buffer('draws', draws, persistent=False)

    def prepare(self, place):
        draws = torch.rand_like(self.draws) if self.training else self.draws
        # The places of the largest draws are a random subset: sorted, they are positions.
        positions = draws.topk(place.total).indices.sort().values            # (total,)
        return super().prepare(Place(positions[place.i], positions[place.j], place.total))


# ---------------------------------------------------------------------- factors of the query

class QueryFactor(NoPE):
    """
    A method that multiplies the query at position i by factor(i) and changes nothing else. A class
    derived from this has factor(i), i: (T,) float. It returns factors, (T,) or (H, T).
    """

    def __init__(self, config):
        super().__init__(config)
        self.L = config.pretrained_length

    def encode(self, q, k, place):
        factor = self.factor(place.i.float())
        return (q * factor[..., None]).to(q.dtype), k


class LogN(QueryFactor):
    """
    Multiplies the query that sees n keys by ln n / ln L (Chiang 2022). The factor is 1 at n = L.
    Beyond L it grows, so that attention does not spread over the additional keys.
    """

    def factor(self, i):
        return (i + 1).log() / math.log(self.L)


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


class Llama4(QueryFactor):
    """
    Multiplies query i by 1 + 0.1 ln(1 + floor((i + 1) / L)). Llama 4 reads long texts this way in
    its layers without RoPE. The method has no weights, so a trained NoPE model can use it.
    """

    def factor(self, i):
        return 1 + 0.1 * torch.log1p(((i + 1) / self.L).floor())


# ---------------------------------------------------------------------- biases

class FIRE(NoPE):
    """
    Bias f(ln(1 + c (i - j)) / ln(1 + c max(i, mu M)))_h (Li et al. 2024). f is a network that maps
    one number to one number per head. c and mu are learned. M is L / 2, as in DAPE's released code.
    The input of f is at most 1 at any length, so f sees no larger input than in training.
    """

    def __init__(self, config):
        super().__init__(config)
        self.c, self.mu = nn.Parameter(torch.tensor(0.1)), nn.Parameter(torch.tensor(1.0))
        self.M = config.pretrained_length // 2
        self.f = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, config.n_head))

    def bias(self, i, j):
        longest = torch.maximum(i.float(), (self.mu * self.M).abs())[:, None]
        near = torch.log1p((self.c * distances(i, j)).abs())
        far = torch.log1p((self.c * longest).abs())
        share = near / (far + 1e-6)                                          # (T, S)
        return self.f(share[..., None]).movedim(-1, 0)


class T5Bias(NoPE):
    """
    Bias sqrt(D) table[bucket(i - j), h] (Raffel et al. 2020). The factor sqrt(D) is from DAPE's
    released code. There are 32 buckets. Each distance up to 15 has its own bucket. The next buckets
    grow wider, up to distance 128. The last bucket also holds all longer distances.
    """
    tied = ('table',)

    def __init__(self, config):
        super().__init__(config)
        self.table = nn.Parameter(nn.init.xavier_normal_(torch.empty(32, config.n_head)))
        self.factor = math.sqrt(config.head_dim)

    def bias(self, i, j):
        distance = distances(i, j)
        wider = torch.log(distance.clamp(min=1) / 16) / math.log(128 / 16)
        wider = 16 + (16 * wider).long()
        bucket = torch.where(distance < 16, distance, wider.clamp(max=31))
        return self.factor * self.table[bucket].movedim(-1, 0)


# ---------------------------------------------------------------------- scores of other kinds

class CoPE(NoPE):
    """
    Contextual position encoding (Golovneva et al. 2024): adds q_i . e[p_ij] to the scores.
    p_ij = sum_{k=j..i} sigmoid(s_ik), where s is the score, counts the keys from j to i that
    matter to the query, up to 63. Between whole counts, q_i . e[p_ij] is interpolated linearly.
    All heads share e.
    """

    def __init__(self, config):
        super().__init__(config)
        self.e = nn.Parameter(torch.zeros(64, config.head_dim))

    def similarity(self, q, k, i, j):
        scores = super().similarity(q, k, i, j)
        most = len(self.e) - 1
        # float32, because bfloat16 counts only in quarters from 32 on
        gates = scores.float().sigmoid().masked_fill(later(i, j), 0)
        # the sum over keys k >= j is a cumulative sum from the right
        count = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=most)           # (B, H, T, S)
        below = count.floor().long()
        at_count = q @ self.e.to(q.dtype).T                                  # (B, H, T, 64)
        low = at_count.gather(-1, below)
        high = at_count.gather(-1, (below + 1).clamp(max=most))
        return scores + (low + (high - low) * (count - below).to(low.dtype))


class TransformerXL(NoPE):
    """
    Scores ((q_i + u) . k_j + (q_i + v) . W r_{i-j}) / sqrt(D) (Dai et al. 2019). r is sinusoidal in
    the distance i - j. u, v and W are learned. Head scales multiply q only, not u and v.
    """

    def __init__(self, config):
        super().__init__(config)
        shape = config.n_head, config.head_dim
        self.u = nn.Parameter(0.02 * torch.randn(shape))
        self.v = nn.Parameter(0.02 * torch.randn(shape))
        self.W = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def similarity(self, q, k, i, j):
        S, (H, D) = k.shape[2], self.u.shape
        pair = torch.arange(0, H * D, 2, device=k.device)
        angle = torch.arange(S, device=k.device)[:, None] * 10000 ** (-pair / (H * D))
        r = torch.cat((angle.sin(), angle.cos()), dim=-1)                    # (S, C)
        projected = self.W(r).view(S, H, D).permute(1, 2, 0).to(k.dtype)     # (H, D, distance)
        by_distance = (q + self.v[:, None].to(q.dtype)) @ projected          # (B, H, T, distance)
        scores = super().similarity(q + self.u[:, None].to(q.dtype), k, i, j)
        return scores + by_distance.gather(-1, distances(i, j).expand(scores.shape)) / math.sqrt(D)


# ---------------------------------------------------------------------- mask and softmax

class Window(NoPE):
    """
    A query sees only the newest L keys and the first 4 keys of the text (StreamingLLM, Xiao et al.
    2023). The method has no weights, so a trained NoPE model can use it, in one pass of any length.
    """

    def __init__(self, config):
        super().__init__(config)
        self.L = config.pretrained_length

    def mask(self, i, j):
        is_old = (distances(i, j) >= self.L) & (j >= 4)
        return later(i, j) | is_old


class Sink(NoPE):
    """
    Adds exp(s_h) to the denominator of each head's softmax (gpt-oss, 2025). s_h is learned and
    starts at 0. The sink takes the attention that a head has no use for. At 0 it already takes
    some, so it changes a model that was trained without it.
    """
    vectors = {'sink': 0.02}

    def __init__(self, config):
        super().__init__(config)
        self.sink = nn.Parameter(torch.zeros(config.n_head, 1))

    def softmax(self, scores):
        sink = self.sink[:, :, None].expand(*scores.shape[:-1], 1)           # (B, H, T, 1)
        return super().softmax(torch.cat((scores, sink.to(scores.dtype)), dim=-1))[..., :-1]


METHODS.update({
    'rope_random': RandomRoPE,
    'logn': LogN,
    'fire': FIRE,
    't5': T5Bias,
    'cope': CoPE,
    'xl': TransformerXL,
    'ssmax': SSMax,
    'llama4': Llama4,
    'window': Window,
    'sink': Sink,
})
