"""
Position methods: what a transformer adds to NoPE so that attention knows where a token stands.

NoPE adds nothing: the causal mask alone tells positions apart. Every other method here is NoPE with
one or a few of its verbs changed:
  prepare     what is computed once before the first layer: RoPE's angles.
  turn        changes q and k before they meet: RoPE turns both by an angle that grows with the
              position, so that q_i . k_j depends on i - j; log-n scaling, SSMax, log-beta and
              Llama 4's temperature lengthen later queries.
  bias        a function of the positions, added to the scores: ALiBi, NAPE, Kerple, FIRE, T5.
  similarity  the scores before any bias: CoPE and Transformer-XL add what depends on the query too;
              the adaptive temperature sharpens the rows that spread out.
  mask        which keys a query does not see: later ones; with a sliding window, old ones too.
  scores      what softmax sees, made of the last three: DAPE reads them as a feature map and adds
              what a small network makes of it.
  softmax     the weights of attention, from the scores: a sink takes a part of them.
  attend      attention with these weights: by a fused kernel where a method changes nothing but q
              and k, the mask and the bias; else some rows of the matrix at a time.

A new method is a class and an entry in METHODS; a new setting of a method is a line in Settings,
and its name in the class's `settings`.
Each layer may have a method of its own, a sliding window, and random positions: see Settings.
Plain PyTorch; of the project it imports kernels.py alone.

Shapes: B sequences, T queries, S keys, H heads, D = head_dim; L is the context that the model was
first trained on; i is the position of a query, j <= i that of a key, both from 0 on. Formulas:
"DAPE V2" (2024), section 2 and Appendix, where not said otherwise.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.nn as nn

import kernels
from kernels import later


@dataclass(kw_only=True)
class Settings:
    """The settings of all methods; every stage that trains has them, too."""
    position: str = 'none'      # none (NoPE), rope ...: a key of METHODS; a,b: for layers in turn
    rope_base: float = 10000.0  # of RoPE: the slowest pair turns once in 2 pi rope_base tokens
    rope_scaling: str = ''      # extension of RoPE, such as yarn:4; '' for none
    rope_share: float = 1.0     # share of the pairs that RoPE turns, the fastest ones
    rope_window: int = 0        # newest keys that a query sees in layers with RoPE; 0 for all
    random_positions: int = 0   # N: tokens stand at random ones of 0 ... N - 1; 0: at 0, 1, 2 ...
    dape_kernel: int = 0        # DAPE on top of the method: 1, 3, 5 ... keys wide; 0 for none
    dape_width: int = 32        # channels between its two convolutions
    dape_residual: bool = True  # add the bias itself too: Eq. (3) of DAPE V2, not (2)
    dape_cheat: bool = False    # let DAPE see later keys (section 4.5): what a leak looks like

    def __post_init__(self):
        names = self.position.split(',')
        for name in names:
            if name not in METHODS:
                raise ValueError(f"position is '{name}', which is unknown. Choose one of: "
                                 f"{', '.join(METHODS)}; or several, with commas. A bias of "
                                 'lessons/exercises.py needs python -m lessons.exercises STAGE.')
        for name in unused_settings(vars(self)):
            owners = [f'position {key}' for key in METHODS if name in METHODS[key].settings]
            raise ValueError(f"{name} is {getattr(self, name)!r}, a setting of "
                             f"{' or '.join(owners) or 'DAPE, which needs a dape_kernel'}; but "
                             f"position is '{self.position}' and dape_kernel {self.dape_kernel}. "
                             'Leave it out, or choose what has it.')
        if not 1 < self.rope_base < math.inf:
            raise ValueError(f'rope_base is {self.rope_base}; it must be above 1, such as 10000.')
        if not 0 <= self.rope_share <= 1:
            raise ValueError(f'rope_share is {self.rope_share}; it must be from 0 to 1.')
        if self.rope_window < 0:
            raise ValueError(f'rope_window is {self.rope_window}; it must be at least 1, or 0 for '
                             'all keys.')
        parse_scaling(self.rope_scaling)
        if not 0 <= self.random_positions <= 2 ** 24:
            raise ValueError(f'random_positions is {self.random_positions}; it must be at most '
                             '2^24, or 0 for positions in order.')
        if self.random_positions:
            read = {name for name in names if issubclass(METHODS[name], RoPE)
                    or 'bias' in METHODS[name].overrides}
            if not read or set(names) - read - {'none'} or self.rope_scaling or self.rope_window:
                raise ValueError(f'random_positions {self.random_positions} is for biases and for '
                                 'RoPE without rope_scaling or rope_window, beside layers of none '
                                 f"at most; position is '{self.position}'.")
        if self.dape_kernel < 0 or self.dape_kernel > 0 and self.dape_kernel % 2 == 0:
            raise ValueError(f'dape_kernel is {self.dape_kernel}; it must be odd, or 0 for none.')
        if self.dape_width < 1:
            raise ValueError(f'dape_width is {self.dape_width}; it must be at least 1.')

    def method_of(self, layer):
        """The name in METHODS of a layer's method."""
        names = self.position.split(',')
        return names[layer % len(names)]


def unused_settings(settings):
    """
    {name: default} of the settings that are not at their default, though none of the chosen methods
    has them. settings: {name: value} with those of Settings.
    """
    used = {'position', 'random_positions', 'dape_kernel'}
    for name in settings['position'].split(','):
        used |= set(METHODS.get(name, NoPE).settings)  # an unknown one is refused elsewhere
    if settings.get('dape_kernel'):
        used |= set(DAPE.settings)
    return {field.name: field.default for field in fields(Settings) if field.name not in used
            and settings.get(field.name, field.default) != field.default}


@dataclass(frozen=True)
class Vector:
    """
    A small vector of a model that tune_scale.py can tune while every matrix stays as it is. A
    method lists its own in `vectors`, model.py the others in VECTORS: {name: Vector}. Scale files
    have it under that name, and `tune=NAME` tunes it.
    """
    ending: str           # how the names of its parameters end
    neutral: float        # the value that changes nothing, which older checkpoints stand for
    rate: float = 0.02    # learning rate of its tuning; tune=NAME:RATE takes another
    pretrained: bool = False  # True: it is trained with the matrices, too
    matrix: str = ''      # ending of the matrix that it can be folded into; '' for none
    fold: Callable | None = None  # fold(matrix, vector, D), the matrix that does the work of both


@dataclass
class Place:
    """Where the tokens of a pass stand."""
    i: torch.Tensor  # positions of the queries, (T,), or (B, T) where prompts differ in length
    j: torch.Tensor  # positions of the keys, (S,) or (B, S)
    total: int       # tokens that the pass will hold, those still to be generated included
    rotation: tuple | None = None  # RoPE's cos and sin for i, of all layers that share this place


def random_places(place, draws):
    """
    Randomised positions (Ruoss et al. 2023): a Place for each layer, where the place.total tokens
    of a pass stand at a sorted random subset of 0 ... N - 1 instead of at 0, 1, 2 ... So a short
    pass trains the distances of a long one. draws: (n_layer, N) random numbers, of which the
    largest place.total say where. Raises ValueError if there are more tokens than N.
    """
    N = draws.shape[1]
    if place.total > N:
        raise ValueError(f'random_positions is {N}, so {place.total} tokens cannot be read. '
                         'Read fewer, or train with more.')
    positions = draws.topk(place.total).indices.sort().values            # (n_layer, total)
    return [Place(row[place.i], row[place.j], place.total) for row in positions]


# ---------------------------------------------------------------------- no position encoding

class NoPE(nn.Module):
    """No position encoding, and what every other method is made from."""
    overrides = frozenset()      # the verbs behind the weights that differ from those here
    settings = ()                # the names of the Settings that it has
    vectors = {}                 # those of its parameters that tune_scale.py can tune
    window, sinks = 0, 0         # see mask()
    needs_equal_lengths = False  # True: prompts of different lengths cannot share a pass
    needs_all_keys = False       # True: a row of scores depends on later keys, too

    def __init__(self, config):
        super().__init__()

    def __init_subclass__(cls):
        if 'is_plain' in vars(cls):
            raise TypeError(f'{cls.__name__} sets is_plain, which follows from the verbs that a '
                            'class overrides. Leave it out.')
        cls.overrides = {verb for verb in ('similarity', 'bias', 'mask', 'scores', 'softmax')
                         if getattr(cls, verb) is not getattr(NoPE, verb)}

    @property
    def is_plain(self):
        """True where the weights are a causal softmax of q.k / sqrt(D) and nothing else."""
        return not self.overrides and not self.window

    def prepare(self, place):
        """Put into `place` what all layers share."""

    def share_weights(self, first):
        """Take from `first`, the first layer's of this kind, the weights that they share."""

    def turn(self, q, k, place):
        """q: (B, H, T, D), k: (B, n_kv_head, T, D), of the new tokens. Returns both, changed."""
        return q, k

    def bias(self, i, j):
        """
        What is added to the scores: (H, T, S), or (B, H, T, S) where i and j have a B; or None.
        """

    def shared(self, k):
        """What similarity() of some rows needs besides, made once for all of a layer's: a tuple."""
        return ()

    def similarity(self, q, k, i, j):
        """The scores before any bias, q.k / sqrt(D): (B, H, T, S)."""
        keys = kernels.repeat_heads(k, q.shape[1])
        return q @ keys.transpose(-1, -2) / math.sqrt(q.shape[-1])

    def mask(self, i, j):
        """
        Which keys a query does not see, (1 or B, 1, T, S): later ones, and with a window all but
        the newest `window` keys and the first `sinks` of the text.
        """
        hidden = later(i, j)
        if self.window:
            old = distances(i, j) >= self.window
            hidden = hidden | old & (j[..., None, None, :] >= self.sinks)
        return hidden

    def scores(self, q, k, i, j, *shared):
        """What softmax sees, (B, H, T, S): -inf at masked keys. q: scaled by Eq. (4)."""
        scores = self.similarity(q, k, i, j, *shared)
        bias = self.bias(i, j)
        if bias is not None:
            scores = scores + bias
        return scores.masked_fill(self.mask(i, j), -math.inf)

    def softmax(self, scores):
        """
        The weights of attention from the scores, (B, H, T, S), in float32. A row may sum to less
        than 1.
        """
        return scores.softmax(-1, dtype=torch.float32)

    def attend(self, q, k, v, i, j):
        """Softmax attention, (B, H, T, D). q: scaled by Eq. (4); k, v: (B, n_kv_head, S, D)."""
        if self.is_plain:
            return kernels.causal_attention(q, k, v, i, j)
        if self.overrides <= {'mask', 'bias'}:
            return kernels.attention_with_bias(self.masked_bias, q, k, v, i, j)
        return kernels.attention_over_scores(self, q, k, v, i, j)

    def masked_bias(self, i, j):
        """The bias, -inf at masked keys: (1, 1, T, S), (H, T, S) or (B, H, T, S)."""
        bias = self.bias(i, j)
        if bias is None:
            bias = torch.zeros((), device=i.device)
        return bias.masked_fill(self.mask(i, j), -math.inf)


# ---------------------------------------------------------------------- changes of q and k

SCALINGS = ('pi', 'ntk', 'dynamic_ntk', 'yarn')


def parse_scaling(text):
    """('yarn', 4.0) from 'yarn:4', and ('', 1.0) from ''. Raises ValueError if it is neither."""
    kind, _, factor = text.partition(':')
    try:
        if text == '' or kind in SCALINGS and 1 <= float(factor) < math.inf:
            return kind, float(factor or 1)
    except ValueError:
        pass
    raise ValueError(f"rope_scaling is '{text}'. Write METHOD:FACTOR, such as yarn:4, the method "
                     f"one of {', '.join(SCALINGS)}, the factor 1 or more, or '' for plain RoPE.")


def rope_frequencies(D, base, scaling, L, total, device='cpu'):
    """
    The angle that each pair of a head turns by from one position to the next: (D/2,) float64,
    radians; and a factor on cos and sin, which is YaRN's attention temperature. total: tokens that
    the pass will hold, for dynamic NTK. RoPE: Su et al. 2021, Eq. (15). Its extensions by a factor
    s, for a model trained at L:
    pi           positions divided by s (Chen et al. 2023)
    ntk          a larger base: the slowest pair turns s times slower, the fastest hardly changes
    dynamic_ntk  the same by s total / L - (s - 1), once the pass is longer than L
    yarn         as pi for pairs that turn less than once in L, as RoPE for more than 32 times, a
                 ramp between; and scores times (1 + 0.1 ln s)^2 (Peng et al. 2024, section 3)
    """
    kind, s = parse_scaling(scaling)
    if kind == 'dynamic_ntk':
        s = max(1.0, s * total / L - (s - 1))
    if kind in ('ntk', 'dynamic_ntk'):
        base = base * s ** (D / (D - 2))

    # base^(-2k/D). Inductor treats exp as costly, so cos and sin are computed once and kept.
    pair = torch.arange(0, D, 2, dtype=torch.float64, device=device)
    frequency = torch.exp(-math.log(base) / D * pair)
    if kind == 'pi':
        frequency = frequency / s
    if kind == 'yarn':
        def pair_that_turns(times):  # in L tokens; a fraction
            return D * math.log(L / (times * 2 * math.pi)) / (2 * math.log(base))

        low = max(0, math.floor(pair_that_turns(32)))
        high = min(D - 1, math.ceil(pair_that_turns(1)))
        ramp = (torch.arange(D // 2, device=device) - low) / max(high - low, 0.001)
        ramp = ramp.clamp(0, 1)
        frequency = frequency * (1 - ramp + ramp / s)
    return frequency, 1 + 0.1 * math.log(s) if kind == 'yarn' else 1.0


def rotate(x, cos, sin):
    """
    Turn each pair (x[k], x[k + D/2]) of a head by its angle: the half-split layout of Llama.
    x: (B, H, T, D); cos, sin: (1, T, D/2) or (B, 1, T, D/2). Computed in float32.
    """
    a, b = x.float().chunk(2, dim=-1)
    turned = a * cos - b * sin, b * cos + a * sin
    return torch.cat(turned, dim=-1).to(x.dtype)


class RoPE(NoPE):
    """
    Turns q_i and k_j by angles proportional to i and j, so that q_i . k_j depends on i - j. With a
    rope_share below 1 the slowest pairs stay as they are: p-RoPE (Barbero et al. 2024). With a
    rope_window query i sees the keys j > i - rope_window alone; beside layers of NoPE, which see
    all, this is RNoPE-SWA (Yang et al. 2025).
    """
    settings = 'rope_base', 'rope_scaling', 'rope_share', 'rope_window'

    def __init__(self, config):
        super().__init__(config)
        self.D, self.L = config.head_dim, config.trained_length
        self.base, self.scaling = config.rope_base, config.rope_scaling
        self.n_turned = round(config.rope_share * (self.D // 2))  # pairs
        self.window = config.rope_window
        self.needs_equal_lengths = self.scaling.startswith('dynamic')

    def prepare(self, place):
        if place.rotation is not None:  # an earlier layer's is the same
            return
        device = place.i.device if place.i.device.type != 'mps' else 'cpu'  # mps has no float64
        frequency, factor = rope_frequencies(self.D, self.base, self.scaling, self.L, place.total,
                                             device)
        frequency[self.n_turned:] = 0
        frequency = frequency.to(device=place.i.device, dtype=torch.float32)
        angle = place.i.float()[..., None, :, None] * frequency              # (1, T, D/2)
        place.rotation = angle.cos() * factor, angle.sin() * factor

    def turn(self, q, k, place):
        return rotate(q, *place.rotation), rotate(k, *place.rotation)


class QueryFactor(NoPE):
    """A method that multiplies the query at position i by factor(i) and changes nothing else."""

    def factor(self, i):
        """
        i: (1, T), or (B, 1, T) where prompts differ in length. Returns as many factors, or for
        each head its own, (H, T) or (B, H, T).
        """
        raise NotImplementedError

    def turn(self, q, k, place):
        factor = self.factor(place.i[..., None, :].float())
        return (q * factor[..., None]).to(q.dtype), k


class LogN(QueryFactor):
    """The query that sees n keys, times ln n / ln L: attention spreads less (Chiang 2022)."""

    def __init__(self, config):
        super().__init__(config)
        self.L = config.trained_length

    def factor(self, i):
        return (i + 1).log() / math.log(self.L)


class SSMax(QueryFactor):
    """
    The query that sees n keys, times s_h ln n, s_h learned: Scalable-Softmax (Nakanishi 2025). It
    starts at 1 / ln L, so that the last query of a window begins as NoPE's does.
    """

    def __init__(self, config):
        super().__init__(config)
        self.s = nn.Parameter(torch.full((config.n_head,), 1 / math.log(config.trained_length)))

    def factor(self, i):
        return self.s[:, None] * (i + 1).log()


class LogBeta(QueryFactor):
    """
    The query times 1 + beta_h ln(i + 2)^gamma_h, beta and gamma learned (arXiv:2506.16640, with the
    start of its released code).
    """

    def __init__(self, config):
        super().__init__(config)
        self.beta = nn.Parameter(torch.empty(config.n_head).uniform_(0.1, 1))
        self.gamma = nn.Parameter(0.1 * torch.randn(config.n_head))

    def factor(self, i):
        return 1 + self.beta[:, None] * (i + 2).log() ** self.gamma[:, None]


class Llama4(QueryFactor):
    """
    The query times 1 + 0.1 ln(1 + floor((i + 1) / L)), as Llama 4 reads long texts in its layers
    without RoPE. It has no weights: a trained NoPE model can be read with it.
    """

    def __init__(self, config):
        super().__init__(config)
        self.L = config.trained_length

    def factor(self, i):
        return 1 + 0.1 * torch.log1p(((i + 1) / self.L).floor())


# ---------------------------------------------------------------------- mask and softmax

class Window(NoPE):
    """
    The newest L keys and the first 4 of the text (StreamingLLM, Xiao et al. 2023). It has no
    weights: a trained NoPE model can be read with it, in one pass of any length.
    """

    def __init__(self, config):
        super().__init__(config)
        self.window, self.sinks = config.trained_length, 4


class Sink(NoPE):
    """
    One more term in the denominator of each head's softmax, exp(s_h), s_h learned from 0. It takes
    the attention that a head has no use for (gpt-oss, 2025).
    """
    vectors = {'sink': Vector('position.sink', neutral=0.0, pretrained=True)}

    def __init__(self, config):
        super().__init__(config)
        self.sink = nn.Parameter(torch.zeros(config.n_head, 1))

    def softmax(self, scores):
        sink = self.sink[:, :, None].expand(*scores.shape[:-1], 1)           # (B, H, T, 1)
        return super().softmax(torch.cat((scores, sink.to(scores.dtype)), dim=-1))[..., :-1]


# ---------------------------------------------------------------------- biases

class Bias(NoPE):
    """A method that adds bias(i, j) to the scores and changes nothing else."""

    def bias(self, i, j):
        raise NotImplementedError


def distances(i, j):
    """i - j of every query and key, 0 where the key is later: (1, T, S), or (B, 1, T, S)."""
    distance = i[..., None, :, None] - j[..., None, None, :]
    return distance.clamp(min=0)


def alibi_slopes(n_head):
    """
    (H,) slopes: 2^(-8/H), 2^(-16/H) ... 2^-8 for a power of two; for other H those of the power of
    two below, then every second one of the power above. Press et al. 2022, section 3 and its code.
    """
    below = 2 ** int(math.log2(n_head))
    first = 2 ** (-8 / below)
    slopes = [first ** (h + 1) for h in range(below)]
    between = [first ** (h + 0.5) for h in range(n_head - below)]
    return slopes + between


class ALiBi(Bias):
    """-slope_h (i - j): the further back a key, the less it counts. Fixed slopes, one per head."""

    def __init__(self, config):
        super().__init__(config)
        # A buffer, as a GPU would wait for each copy; on the CPU even in a model made on `meta`.
        slopes = torch.tensor(self.slopes_of(config.n_head), device='cpu')
        self.register_buffer('slopes', slopes, persistent=False)

    def slopes_of(self, n_head):
        return alibi_slopes(n_head)

    def bias(self, i, j):
        i, j = i[..., None, :, None], j[..., None, None, :]
        return -self.slopes[:, None, None] * (i - j)


class NAPE(ALiBi):
    """
    ALiBi with slopes 1, 1/2, 1/3 ... on half of the heads, the others plain NoPE
    (arXiv:2506.16640).
    """

    def slopes_of(self, n_head):
        half = n_head // 2
        return [1 / (h + 1) for h in range(half)] + [0.0] * (n_head - half)


class NAPESSMax(NAPE):
    """NAPE whose heads without a slope have the query of SSMax (arXiv:2506.16640)."""

    def __init__(self, config):
        super().__init__(config)
        self.first = config.n_head // 2  # of the heads without a slope
        rest = config.n_head - self.first
        self.s = nn.Parameter(torch.full((rest,), 1 / math.log(config.trained_length)))

    def turn(self, q, k, place):
        log_n = (place.i.float() + 1).log()[..., None, :, None]              # (1, T, 1)
        with_slope, without = q.split([self.first, len(self.s)], dim=1)
        without = without * self.s[:, None, None] * log_n
        return torch.cat((with_slope, without.to(q.dtype)), dim=1), k


class Kerple(Bias):
    """-p_h ln(1 + a_h (i - j)), the logarithmic Kerple (Chi et al. 2022): p, a > 0 learned."""

    def __init__(self, config):
        super().__init__(config)
        self.p = nn.Parameter(2 * torch.rand(config.n_head))
        self.a = nn.Parameter(torch.rand(config.n_head))

    def bias(self, i, j):
        p, a = at_least(self.p, 0.01), at_least(self.a, 0.01)
        return -p * torch.log1p(a * distances(i, j))


def at_least(x, least):
    """Clamp (H,) with a straight-through gradient, so that x < least can recover: (H, 1, 1)."""
    clamped = x + (x.clamp(min=least) - x).detach()
    return clamped[:, None, None]


def over_heads(x):
    """What has a number for each head, (..., 1, T, S, H), as a bias: (..., H, T, S)."""
    return x.movedim(-1, -4).squeeze(-3)


class FIRE(Bias):
    """
    f(ln(1 + c (i - j)) / ln(1 + c max(i, mu L0)))_h (Li et al. 2024): f is a network from one
    number to one per head, c and mu are learned, L0 = L / 2 as in the released code of DAPE. So f
    sees no larger input than it was trained on.
    """

    def __init__(self, config):
        super().__init__(config)
        self.c, self.mu = nn.Parameter(torch.tensor(0.1)), nn.Parameter(torch.tensor(1.0))
        self.L0 = config.trained_length // 2
        self.f = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, config.n_head))

    def bias(self, i, j):
        least = (self.mu * self.L0).abs()
        longest = torch.maximum(i.float(), least)[..., None, :, None]
        near = torch.log1p((self.c * distances(i, j)).abs())
        far = torch.log1p((self.c * longest).abs())
        share = near / (far + 1e-6)                                          # (1, T, S)
        return over_heads(self.f(share[..., None]))


class T5Bias(Bias):
    """
    sqrt(D) table[bucket(i - j), h] (Raffel et al. 2020; the factor is the released code's of DAPE):
    32 buckets, one each for distances up to 15, then ever wider ones up to 128, the last for all
    beyond. One table serves all layers.
    """

    def __init__(self, config):
        super().__init__(config)
        self.table = nn.Parameter(nn.init.xavier_normal_(torch.empty(32, config.n_head)))
        self.factor = math.sqrt(config.head_dim)

    def share_weights(self, first):
        self.table = first.table

    def bias(self, i, j):
        distance = distances(i, j)
        wider = torch.log(distance.clamp(min=1) / 16) / math.log(128 / 16)
        wider = 16 + (16 * wider).long()
        bucket = torch.where(distance < 16, distance, wider.clamp(max=31))
        return self.factor * over_heads(self.table[bucket])


# ---------------------------------------------------------------------- from rows of scores

class CoPE(NoPE):
    """
    Contextual position encoding (Golovneva et al. 2024): adds q_i . e[p_ij] to the scores, where
    p_ij = sum_{k=j..i} sigmoid(s_ik) counts the keys from j to i that the query cares for, at most
    63; between whole counts, linear. e is shared by the heads.
    """

    def __init__(self, config):
        super().__init__(config)
        self.e = nn.Parameter(torch.zeros(64, config.head_dim))

    def similarity(self, q, k, i, j):
        scores = super().similarity(q, k, i, j)
        most = len(self.e) - 1
        # float32, as bfloat16 counts in quarters from 32 on
        gates = scores.float().sigmoid().masked_fill(later(i, j), 0)
        count = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=most)           # (B, H, T, S)
        below = count.floor().long()
        at_count = q @ self.e.to(q.dtype).T                                  # (B, H, T, 64)
        low = at_count.gather(-1, below)
        high = at_count.gather(-1, (below + 1).clamp(max=most))
        between = (high - low) * (count - below).to(low.dtype)
        return scores + (low + between)


class TransformerXL(NoPE):
    """
    ((q_i + u) . k_j + (q_i + v) . W r_{i-j}) / sqrt(D) (Dai et al. 2019): r is sinusoidal in the
    distance, u and v are learned.
    """

    def __init__(self, config):
        super().__init__(config)
        shape = config.n_head, config.head_dim
        self.u = nn.Parameter(0.02 * torch.randn(shape))
        self.v = nn.Parameter(0.02 * torch.randn(shape))
        self.W = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def shared(self, k):
        """W r of every distance, shorter than the keys are many: (H, D, S)."""
        S = k.shape[2]
        H, D = self.u.shape
        pair = torch.arange(0, H * D, 2, device=k.device)
        frequency = 10000 ** (-pair / (H * D))
        angle = torch.arange(S, device=k.device)[:, None] * frequency
        r = self.W(torch.cat((angle.sin(), angle.cos()), dim=-1))
        r = r.view(S, H, D).permute(1, 2, 0)
        return r.to(k.dtype),

    def similarity(self, q, k, i, j, r=None):
        scores = super().similarity(q, k, i, j)
        H, D = self.u.shape
        r = self.shared(k)[0] if r is None else r[..., :k.shape[2]]
        by_distance = (q + self.v[:, None].to(q.dtype)) @ r                  # (B, H, T, S)
        distance = distances(i, j).expand(scores.shape)
        by_place = by_distance.gather(-1, distance)
        keys = kernels.repeat_heads(k, H)
        by_key = keys @ self.u[..., None].to(k.dtype)                        # (B, H, S, 1)
        return scores + (by_place + by_key.transpose(-1, -2)) / math.sqrt(D)


class Adaptive(NoPE):
    """
    Each row of scores times max(1, P(H)) where its attention's entropy H is above 0.5 nats, P being
    a polynomial that its authors fitted (arXiv:2410.01104). It has no weights: a trained NoPE model
    can be read with it. Above 5.9 nats P is below 1, so that nothing changes there.
    """
    P = -0.037, 0.481, -2.3, 4.917, -1.791  # the highest power first

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


# ---------------------------------------------------------------------- DAPE

class DAPE(NoPE):
    """
    S + B + f([S; B]), Eq. (3): the scores S and the bias B of all heads are the channels of a
    feature map, and f is two convolutions of 1 x kernel over the keys with a LeakyReLU between;
    kernel 1 is DAPE (the first), 3 and more DAPE V2. Without the residual bias S + f([S; B]),
    Eq. (2); without a bias S + f(S), Eq. (4), of H channels (the released class asks for 2H and
    cannot run).
    Keys that the query does not see, such as later ones, are 0 in the map, so that no convolution
    sees them. `cheat` leaves them in (section 4.5). Unlike the released code, every row goes on in
    zeros at its right, where that code ends at the last key: so a row is the same in a longer
    sequence, and cached decoding equals a full pass.
    """
    settings = 'dape_width', 'dape_residual', 'dape_cheat'

    def __init__(self, config, method):
        super().__init__(config)
        for verb in 'scores', 'attend':
            if getattr(type(method), verb) is not getattr(NoPE, verb):
                raise ValueError(f'{type(method).__name__} has {verb}() of its own, which DAPE '
                                 'replaces. Leave dape_kernel out.')
        self.method, H, width = method, config.n_head, config.dape_width
        self.kernel, self.cheat = config.dape_kernel, config.dape_cheat
        self.needs_all_keys = self.cheat
        self.residual = config.dape_residual
        if self.cheat:
            warnings.warn('dape_cheat: this model sees the tokens that it is to predict; its '
                          'losses mean nothing', stacklevel=2)
        self.prepare, self.turn = method.prepare, method.turn
        self.bias, self.similarity, self.mask = method.bias, method.similarity, method.mask
        self.shared, self.softmax = method.shared, method.softmax
        # Cache slots next to each other must hold tokens next to each other.
        self.needs_equal_lengths = method.needs_equal_lengths or self.kernel > 1
        channels, pad = 2 * H if 'bias' in method.overrides else H, self.kernel // 2
        self.first = nn.Conv2d(channels, width, (1, self.kernel), padding=(0, 2 * pad))
        self.second = nn.Conv2d(width, H, (1, self.kernel))

    def share_weights(self, first):
        self.method.share_weights(first.method)

    def scores(self, q, k, i, j, *shared):
        scores = self.similarity(q, k, i, j, *shared)
        bias, mask = self.bias(i, j), self.mask(i, j)
        x, pad = scores, self.kernel // 2
        if bias is not None:
            bias = bias.to(scores.dtype)
            x = torch.cat((scores, bias.expand(scores.shape)), dim=1)        # (B, 2H, T, S)
        if not self.cheat:
            x = x.masked_fill(mask, 0)
        x = self.first(x)                           # (B, width, T, S + 2 pad), from key -pad on
        x = x.masked_fill(torch.arange(x.shape[-1], device=x.device) < pad, 0)
        # In place: backward then needs only the result, and PyTorch does not store a mask, which is
        # slow on a CPU.
        x = self.second(nn.functional.leaky_relu(x, inplace=True))
        if bias is not None and self.residual:
            scores = scores + bias
        return (scores + x).masked_fill(mask, -math.inf)


# ---------------------------------------------------------------------- all of them

METHODS = {
    'none': NoPE,
    'rope': RoPE,
    'logn': LogN,
    'ssmax': SSMax,
    'logbeta': LogBeta,
    'llama4': Llama4,
    'window': Window,
    'sink': Sink,
    'alibi': ALiBi,
    'nape': NAPE,
    'nape_ssmax': NAPESSMax,
    'kerple': Kerple,
    'fire': FIRE,
    't5': T5Bias,
    'cope': CoPE,
    'xl': TransformerXL,
    'adaptive': Adaptive,
}


def position_method(config, layer):
    """The method of one layer. All weights but its own start the same with every method."""
    with torch.random.fork_rng(devices=[]):
        method = METHODS[config.method_of(layer)](config)
        return DAPE(config, method) if config.dape_kernel else method
