"""
Position methods: what a transformer adds to NoPE so that attention knows where a token stands.

NoPE ('none') adds nothing: the causal mask alone tells positions apart. The others are of three kinds, a dict each:
  QUERY_KEY  changes q and k before they meet: RoPE turns both by an angle that grows with the position, so that
             q_i . k_j depends on i - j; log-n scaling lengthens later queries.
  BIASES     adds a function of the positions to the scores: ALiBi, Kerple, FIRE, T5.
  CONTENT    adds a function of the positions and the query: CoPE, Transformer-XL.
On top of any of them DAPE reads the scores and the bias as a feature map and adds what a small network makes of it.
This file is plain PyTorch and imports nothing of the project, so that it can be lifted out and read alone.

Shapes: B sequences, T queries, S keys, H heads, D = head_dim; L is the context that the model was first trained on.
Formulas of the last three kinds: "DAPE V2" (2024), section 2 and Appendix, where not said otherwise; i is the position
of a query, j <= i that of a key, both from 0 on.
"""

import math

import torch
import torch.nn as nn

# ----------------------------------------------------------------------------- RoPE and its extensions

SCALINGS = ('pi', 'ntk', 'dynamic_ntk', 'yarn')


def parse_scaling(text):
    """('yarn', 4.0) from 'yarn:4', and ('', 1.0) from ''. Raises ValueError if it is neither."""
    kind, _, factor = text.partition(':')
    try:
        if text == '' or kind in SCALINGS and 1 <= float(factor) < math.inf:
            return kind, float(factor or 1)
    except ValueError:
        pass
    raise ValueError(f"rope_scaling is '{text}'. Write METHOD:FACTOR, such as yarn:4, the method one of "
                     f"{', '.join(SCALINGS)} and the factor 1 or more, or '' for plain RoPE.")


def rope_frequencies(D, base, scaling, L, total, device='cpu'):
    """
    The angle that each pair of a head turns by from one position to the next: (D/2,) float64, radians; and a factor on
    cos and sin, which is YaRN's attention temperature. total: tokens that the pass will hold, for dynamic NTK.
    RoPE: Su et al. 2021, Eq. (15). Its extensions by a factor s, for a model trained at L:
    pi           positions divided by s (Chen et al. 2023)
    ntk          a larger base, so that the slowest pair turns s times slower and the fastest hardly changes
    dynamic_ntk  the same by s total / L - (s - 1), once the pass is longer than L
    yarn         as pi for pairs that turn less than once in L, as RoPE for more than 32 times, a ramp between; and
                 scores multiplied by (1 + 0.1 ln s)^2 (Peng et al. 2024, section 3)
    """
    kind, s = parse_scaling(scaling)
    if kind == 'ntk':
        base = base * s ** (D / (D - 2))
    if kind == 'dynamic_ntk':
        base = base * max(1.0, s * total / L - (s - 1)) ** (D / (D - 2))
    # base^(-2k/D); of exp the compiler knows that it is slow, and keeps the angles' cos and sin for all layers
    frequency = torch.exp(-math.log(base) / D * torch.arange(0, D, 2, dtype=torch.float64, device=device))
    if kind == 'pi':
        frequency = frequency / s
    if kind == 'yarn':
        def pair_that_turns(times):  # in L tokens; a fraction
            return D * math.log(L / (times * 2 * math.pi)) / (2 * math.log(base))

        low, high = max(0, math.floor(pair_that_turns(32))), min(D - 1, math.ceil(pair_that_turns(1)))
        ramp = ((torch.arange(D // 2, device=device) - low) / max(high - low, 0.001)).clamp(0, 1)
        frequency = frequency * (1 - ramp + ramp / s)
    return frequency, 1 + 0.1 * math.log(s) if kind == 'yarn' else 1.0


def rotate(x, cos, sin):
    """
    Turn each pair (x[k], x[k + D/2]) of a head by its angle: the half-split layout of Llama checkpoints.
    x: (B, H, T, D); cos, sin: (1, T, D/2) or (B, 1, T, D/2). Returns (B, H, T, D) in x's dtype, computed in float32.
    """
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


# ----------------------------------------------------------------------------- changes of q and k

def unchanged(config, position, total):
    return lambda q, k: (q, k)


def rope(config, position, total):
    L, D = config.rope_length or config.block_size, config.n_embd // config.n_head
    device = position.device if position.device.type != 'mps' else 'cpu'  # mps has no float64
    frequency, factor = rope_frequencies(D, config.rope_base, config.rope_scaling, L, total, device)
    angle = position.float()[..., None, :, None] * frequency.to(device=position.device, dtype=torch.float32)
    cos, sin = angle.cos() * factor, angle.sin() * factor
    return lambda q, k: (rotate(q, cos, sin), rotate(k, cos, sin))


def logn(config, position, total):
    """The query that sees i keys, times ln i / ln L: attention spreads less in long contexts (Chiang & Cholak 2022)."""
    growth = (position + 1).float().log() / math.log(config.rope_length or config.block_size)
    growth = growth[..., None, :, None]                                      # (1, T, 1)
    return lambda q, k: ((q * growth).to(q.dtype), k)


# name -> f(config, position, total), which returns a function of q and k, (B, H or n_kv_head, T, D), whose tokens stand
# at `position`, (T,) or (B, T) from 0 on, of a pass that will hold `total` tokens
QUERY_KEY = {'none': unchanged, 'rope': rope, 'logn': logn}


# ----------------------------------------------------------------------------- biases

def alibi_slopes(n_head):
    """
    (H,) slopes: 2^(-8/H), 2^(-16/H) ... 2^-8 for a power of two; for other H those of the power of two below, then
    every second one of the power above. Press et al. 2022, section 3 and its code.
    """
    below = 2 ** int(math.log2(n_head))
    slopes = [2 ** (-8 * (h + 1) / below) for h in range(below)]
    return slopes + [2 ** (-4 * (2 * h + 1) / below) for h in range(n_head - below)]


class ALiBi(nn.Module):
    """-slope_h (i - j): the further back a key, the less it counts. Fixed slopes, one per head."""

    def __init__(self, config):
        super().__init__()
        self.slopes = alibi_slopes(config.n_head)

    def forward(self, i, j):
        """i: (T,) positions of queries, j: (S,) of keys, or (B, T) and (B, S). Returns (H, T, S) or (B, H, T, S)."""
        slopes = torch.tensor(self.slopes, device=i.device)
        return -slopes[:, None, None] * (i[..., None, :, None] - j[..., None, None, :])


class Kerple(nn.Module):
    """-p_h ln(1 + a_h (i - j)), the logarithmic Kerple (Chi et al. 2022): p, a > 0 learned for each head."""

    def __init__(self, config):
        super().__init__()
        self.p = nn.Parameter(2 * torch.rand(config.n_head))
        self.a = nn.Parameter(torch.rand(config.n_head))

    def forward(self, i, j):
        # at least 0.01, but with the gradient of x itself: or what is below would never come back
        p, a = ((x + (x.clamp(min=0.01) - x).detach())[:, None, None] for x in (self.p, self.a))
        distance = (i[..., None, :, None] - j[..., None, None, :]).clamp(min=0)
        return -p * torch.log1p(a * distance)


class FIRE(nn.Module):
    """
    f(ln(1 + c (i - j)) / ln(1 + c max(i, mu L0)))_h (Li et al. 2024): f is a network from one number to one per head, c
    and mu are learned, L0 = L / 2 as in the released code of DAPE. So f sees no larger input than it was trained on.
    """

    def __init__(self, config):
        super().__init__()
        self.c, self.mu = nn.Parameter(torch.tensor(0.1)), nn.Parameter(torch.tensor(1.0))
        self.L0 = (config.rope_length or config.block_size) // 2
        self.f = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, config.n_head))

    def forward(self, i, j):
        distance = (i[..., :, None] - j[..., None, :]).clamp(min=0)
        longest = torch.maximum(i.float(), (self.mu * self.L0).abs())[..., None]
        share = torch.log1p((self.c * distance).abs()) / (torch.log1p((self.c * longest).abs()) + 1e-6)  # (..., T, S)
        return self.f(share[..., None]).movedim(-1, -3)


class T5Bias(nn.Module):
    """
    sqrt(D) table[bucket(i - j), h] (Raffel et al. 2020): 32 buckets, one each for distances up to 15, then ever wider
    ones up to 128, the last for all beyond. One table serves all layers.
    """

    def __init__(self, config):
        super().__init__()
        self.table = nn.Parameter(nn.init.xavier_normal_(torch.empty(32, config.n_head)))
        self.factor = math.sqrt(config.n_embd // config.n_head)

    def forward(self, i, j):
        distance = (i[..., :, None] - j[..., None, :]).clamp(min=0)
        log_bucket = 16 + (torch.log(distance.clamp(min=1) / 16) / math.log(128 / 16) * 16).long()
        bucket = torch.where(distance < 16, distance, log_bucket.clamp(max=31))
        return self.factor * self.table[bucket].movedim(-1, -3)


BIASES = {'alibi': ALiBi, 'kerple': Kerple, 'fire': FIRE, 't5': T5Bias}


# ----------------------------------------------------------------------------- what depends on the query too

class CoPE(nn.Module):
    """
    Contextual position encoding (Golovneva et al. 2024): q_i . e[p_ij], where p_ij = sum_{k=j..i} sigmoid(s_ik) counts
    the keys from j to i that the query cares for, at most 63; between whole counts, linear. e is shared by the heads.
    """

    def __init__(self, config):
        super().__init__()
        self.e = nn.Parameter(torch.zeros(64, config.n_embd // config.n_head))

    def forward(self, scores, q, k, i, j):
        """scores: (B, H, T, S) = q.k / sqrt(D), q: (B, H, T, D). Returns what to add to the scores."""
        gates = scores.float().sigmoid().masked_fill(later(i, j), 0)  # bfloat16 counts in quarters from 32 on
        count = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=len(self.e) - 1)
        below = count.floor().long()
        at = q @ self.e.to(q.dtype).T                                        # (B, H, T, 64)
        low, high = at.gather(-1, below), at.gather(-1, (below + 1).clamp(max=len(self.e) - 1))
        return low + (high - low) * (count - below).to(low.dtype)


class TransformerXL(nn.Module):
    """
    (u . k_j + (q_i + v) . W r_{i-j}) / sqrt(D) (Dai et al. 2019): r is sinusoidal in the distance, u and v are learned.
    """

    def __init__(self, config):
        super().__init__()
        C, H = config.n_embd, config.n_head
        self.u, self.v = (nn.Parameter(0.02 * torch.randn(H, C // H)) for _ in range(2))
        self.W = nn.Linear(C, C, bias=False)

    def forward(self, scores, q, k, i, j):
        """As CoPE's; k: (B, H, S, D)."""
        H, D = self.u.shape
        distance = (i[..., :, None] - j[..., None, :]).clamp(min=0)          # (T, S) or (B, T, S)
        n = scores.shape[-1]                                                 # distances are shorter than the keys
        frequency = 10000 ** (-torch.arange(0, H * D, 2, device=i.device) / (H * D))
        angle = torch.arange(n, device=i.device)[:, None] * frequency
        r = self.W(torch.cat((angle.sin(), angle.cos()), dim=-1)).view(n, H, D).transpose(0, 1)  # (H, n, D)
        by_distance = (q + self.v[:, None].to(q.dtype)) @ r.transpose(-1, -2).to(q.dtype)        # (B, H, T, n)
        index = distance[..., None, :, :].expand(scores.shape)
        return (by_distance.gather(-1, index) + (k @ self.u[..., None].to(k.dtype)).transpose(-1, -2)) / math.sqrt(D)


CONTENT = {'cope': CoPE, 'xl': TransformerXL}
POSITIONS = [*QUERY_KEY, *BIASES, *CONTENT]


def later(i, j):
    """Which keys at positions j come after the queries at positions i: (1 or B, 1, T, S)."""
    hidden = j[..., None, None, :] > i[..., None, :, None]
    return hidden if hidden.dim() == 4 else hidden[None]


# ----------------------------------------------------------------------------- DAPE

class DAPE(nn.Module):
    """
    S + B + f([S; B]), Eq. (3): the scores S and the bias B of all heads are the channels of a feature map, and f is two
    convolutions of 1 x kernel over the keys with a LeakyReLU between; kernel 1 is DAPE (the first), 3 and more DAPE V2.
    Without the residual bias S + f([S; B]), Eq. (2); without a bias S + f(S), Eq. (4), of H channels (the released
    class asks for 2H and cannot run).
    Keys later than the query are 0 in the map, so that no convolution sees them. `cheat` leaves them in (section 4.5).
    Unlike the released code, every row goes on in zeros at its right, where that code ends at the last key: so a row is
    the same in a longer sequence, and cached decoding equals a full pass.
    """

    def __init__(self, config, has_bias):
        super().__init__()
        H, self.kernel = config.n_head, config.dape_kernel
        self.residual, self.cheat = config.dape_residual, config.dape_cheat
        k = self.kernel // 2
        self.first = nn.Conv2d(2 * H if has_bias else H, config.dape_width, (1, self.kernel), padding=(0, 2 * k))
        self.second = nn.Conv2d(config.dape_width, H, (1, self.kernel), padding=(0, k))

    def forward(self, scores, bias, i, j):
        """scores: (B, H, T, S); bias: (H, T, S), (B, H, T, S) or None; i, j: positions. Returns (B, H, T, S)."""
        x, pad = scores, self.kernel // 2
        if bias is not None:
            bias = bias.to(scores.dtype)
            x = torch.cat((scores, bias.expand(scores.shape)), dim=1)        # (B, 2H, T, S)
        if not self.cheat:
            x = x.masked_fill(later(i, j), 0)
        x = nn.functional.leaky_relu(self.first(x)[..., pad:])               # (B, width, T, S + pad)
        x = self.second(x)[..., :scores.shape[-1]]
        return scores + x if bias is None or not self.residual else scores + bias + x
