"""
Position methods: what a transformer adds to NoPE so that attention knows where a token stands.

NoPE ('none') adds nothing: the causal mask alone tells positions apart. The others are of two kinds, a dict each:
  QUERY_KEY  changes q and k before they meet: RoPE turns both by an angle that grows with the position, so that
             q_i . k_j depends on i - j; log-n scaling lengthens later queries.
  BIASES     adds a function of the positions to the scores: ALiBi.
This file is plain PyTorch and imports nothing of the project, so that it can be lifted out and read alone.

Shapes: T queries, S keys, H heads, D = head_dim; L is the context that the model was first trained on.
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


def rope_frequencies(head_dim, base, scaling, L, total):
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
    D = head_dim
    if kind == 'ntk':
        base = base * s ** (D / (D - 2))
    if kind == 'dynamic_ntk':
        base = base * max(1.0, s * total / L - (s - 1)) ** (D / (D - 2))
    frequency = base ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    if kind == 'pi':
        frequency = frequency / s
    if kind == 'yarn':
        def pair_that_turns(times):  # in L tokens; a fraction
            return D * math.log(L / (times * 2 * math.pi)) / (2 * math.log(base))

        low, high = max(0, math.floor(pair_that_turns(32))), min(D - 1, math.ceil(pair_that_turns(1)))
        ramp = ((torch.arange(D // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
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
    L, head_dim = config.rope_length or config.block_size, config.n_embd // config.n_head
    frequency, factor = rope_frequencies(head_dim, config.rope_base, config.rope_scaling, L, total)
    angle = position.float()[..., None, :, None] * frequency.to(device=position.device, dtype=torch.float32)
    cos, sin = angle.cos() * factor, angle.sin() * factor
    return lambda q, k: (rotate(q, cos, sin), rotate(k, cos, sin))


def logn(config, position, total):
    """The query that sees i keys, times ln i / ln L: attention spreads less in long contexts (Chiang & Cholak 2022)."""
    growth = ((position + 1).float().log() / math.log(config.block_size))[..., None, :, None]  # (1, T, 1)
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


BIASES = {'alibi': ALiBi}
POSITIONS = [*QUERY_KEY, *BIASES]
