"""
Position methods: what a transformer adds to NoPE so that attention knows the positions of tokens.

NoPE adds nothing: only the causal mask tells positions apart. Every other method here is NoPE with
one or a few of its steps changed. Each step is a function of the class NoPE. One step runs for
every layer before the first layer starts:
  prepare     computes what depends only on the positions. RoPE stores its angles in the Place.
Then each layer calls these steps:
  turn        changes q and k before they meet. RoPE turns both by an angle that grows with the
              position, so that q_i . k_j depends on i - j. Log-n scaling multiplies later
              queries by larger factors.
  attend      runs the attention, in one of three ways. A method that changes only q and k uses
              one fused kernel. With a bias or its own mask, the fused kernel runs on some query
              rows at a time. All other methods compute scores, softmax and the weighted sum of
              the values, also some rows at a time.
The third way calls all of the steps below. The second way calls only bias and mask, the first none:
  similarity  makes the scores before any bias. CoPE and Transformer-XL add a term that also depends
              on the query.
  bias        is a function of the positions, which is added to the scores: ALiBi, Kerple, FIRE, T5.
  mask        says which keys a query does not see: later keys; with a sliding window also old keys.
  scores      makes the input of softmax from similarity, bias and mask. DAPE reads similarity and
              bias as a feature map and adds the output of a small network.
  softmax     turns scores into attention weights.

A new method is a class and an entry in METHODS. A new setting of a method is a line in Settings,
and its name in the class's `settings`.
Layers can alternate between methods. RoPE layers can have a sliding window. Random positions are
for the whole model, and each layer draws its own: see Settings.
This file holds the methods that "DAPE V2" compares, and log-n scaling; position_more.py holds later
ones. The file is plain PyTorch. From the project it imports only kernels.py.

Shapes: B sequences, T queries, S keys, H heads, D = head_dim. L is config.L0, the tokens in a
window of pretraining: block_size, unless the model was fine-tuned. i is the position of a query and
j <= i the position of a key; both start at 0. Formulas are from "DAPE V2" (2024), section 3 and
Appendix, unless another source is named.
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
    """The settings of all position methods. Stages that make a model take them, too."""
    position: str = 'none'      # none (NoPE), rope ...: a key of METHODS; a,b: layers alternate
    rope_base: float = 10000.0  # RoPE: pair k of a head turns by rope_base^(-2k/D) rad per token
    rope_scaling: str = ''      # RoPE: extension to longer texts, such as yarn:4; '': none
    rope_share: float = 1.0     # RoPE: share of the pairs that turn; the slowest stand still
    rope_window: int = 0        # RoPE layers: newest keys that a query sees; 0: all
    random_positions: int = 0   # N: draw positions from 0 ... N - 1; 0: positions 0, 1, 2 ...
    dape_kernel: int = 0        # DAPE on top of the method: 1, 3, 5 ... keys wide; 0: no DAPE
    dape_width: int = 32        # DAPE: channels between its two convolutions
    dape_residual: bool = True  # DAPE: also add the bias itself, Eq. (3) of DAPE V2; False: Eq. (2)
    dape_cheat: bool = False    # DAPE: see later keys (section 4.5), to show what a leak does

    def __post_init__(self):
        names = self.position.split(',')
        for name in names:
            if name not in METHODS:
                raise ValueError(f"position is '{name}', which is unknown. Choose one of: "
                                 f"{', '.join(METHODS)}; or several, with commas. To use a bias "
                                 'of lessons/exercises.py, run python -m lessons.exercises '
                                 f'train.py --position={name}')
        unused = [*defaults_of_unused(vars(self))]
        if unused:
            name = unused[0]
            owners = [f'position {key}' for key in METHODS if name in METHODS[key].settings]
            raise ValueError(f"{name} is {getattr(self, name)!r}, a setting of "
                             f"{' or '.join(owners) or 'DAPE, which needs a dape_kernel'}; but "
                             f"position is '{self.position}' and dape_kernel {self.dape_kernel}. "
                             'Leave the setting out, or choose a method that has it.')
        self.require('rope_base', 1 < self.rope_base < math.inf, 'above 1, such as 10000')
        self.require('rope_share', 0 <= self.rope_share <= 1, 'from 0 to 1')
        self.require('rope_window', self.rope_window >= 0, 'at least 1, or 0 for all keys')
        parse_scaling(self.rope_scaling)
        self.require('random_positions', 0 <= self.random_positions <= 2 ** 24,
                     'from 1 to 2^24, or 0 for positions 0, 1, 2 ...')
        if self.random_positions:
            takes_random = {name: takes_random_positions(METHODS[name]) for name in names}
            others = [name for name in names if name != 'none' and not takes_random[name]]
            works = any(takes_random.values()) and not others
            works = works and not self.rope_scaling and not self.rope_window
            self.require('random_positions', works, f"0 with position '{self.position}'. Random "
                         'positions need a bias other than nape_ssmax, or RoPE with neither '
                         'rope_scaling nor rope_window. Layers with neither a bias nor RoPE must '
                         "be 'none'")
        self.require('dape_kernel', self.dape_kernel == 0 or
                     self.dape_kernel > 0 and self.dape_kernel % 2,
                     'odd and above 0, or 0 for none')
        self.require('dape_width', self.dape_width >= 1, 'at least 1')

    def require(self, name, is_right, what):
        """Raise ValueError unless the setting is right. what: what its value must be."""
        if not is_right:
            raise ValueError(f'{name} is {getattr(self, name)!r}; it must be {what}.')

    def method_of(self, layer):
        """Name in METHODS of the method of this layer."""
        names = self.position.split(',')
        return names[layer % len(names)]


def settings_of(position):
    """The names of the settings of the methods in a setting `position`, such as 'rope,none'."""
    return {name for method in position.split(',') for name in METHODS.get(method, NoPE).settings}


def takes_random_positions(method):
    """
    True if a method's class can read random positions. Log-n and its relatives cannot: they compute
    the number of keys from the position of a query.
    """
    only_adds_bias = 'bias' in method.overrides and method.turn is NoPE.turn
    return only_adds_bias or issubclass(method, RoPE)


def defaults_of_unused(settings):
    """
    {name: default} of each setting in Settings that differs from its default although none of the
    chosen methods has it. settings: {name: value}; names outside Settings are ignored.
    """
    used = {'position', 'random_positions', 'dape_kernel'}
    used |= settings_of(settings['position'])  # Settings refuses unknown names
    if settings.get('dape_kernel'):
        used |= set(DAPE.settings)
    return {field.name: field.default for field in fields(Settings) if field.name not in used
            and settings.get(field.name, field.default) != field.default}


@dataclass(frozen=True)
class Vector:
    """
    A small vector of a model. tune_scale.py can tune it while every matrix stays fixed.
    A method lists its vectors in `vectors`, {name: Vector}. VECTORS in model.py has these and all
    others. Scale files store the vector under its name. The setting `tune` of tune_scale.py also
    takes this name. Two vectors have other names there: `scale` or `channel` is head_scale, and
    `out` is head_gain (KINDS of tune_scale.py).
    """
    ending: str           # last part of the names of its parameters
    neutral: float        # a checkpoint that lacks the vector gets this value; changes nothing
    rate: float = 0.02    # learning rate in tuning; tune=NAME:RATE sets another
    pretrained: bool = False  # True: pretraining trains it, too
    matrix: str = ''      # ending of the matrix that can absorb it; '': none
    fold: Callable | None = None  # fold(matrix, vector, D): the matrix with the vector in it


@dataclass
class Place:
    """The positions of the tokens of a pass."""
    i: torch.Tensor  # positions of queries, (T,); (B, T) if prompts differ in length
    j: torch.Tensor  # positions of keys, (S,) or (B, S)
    total: int       # tokens in the text, including those that are still to be generated
    rotation: tuple | None = None  # RoPE's cos and sin for i, shared by all layers with this Place


def random_places(place, draws):
    """
    Randomized positions (Ruoss et al. 2023): a list with one Place per layer. In each
    layer, the place.total tokens have a sorted random subset of 0 ... N - 1 as positions, instead
    of 0, 1, 2 ... So short texts train the distances of long texts. draws: (n_layer, N) random
    numbers, one row per layer. The column numbers of the place.total largest entries of a row,
    sorted, are the positions in its layer. Raises ValueError if there are more tokens than N.
    """
    N = draws.shape[1]
    if place.total > N:
        raise ValueError(f'random_positions is {N}, so {place.total} tokens cannot be read. '
                         'Read fewer tokens, or train with more random_positions.')
    positions = draws.topk(place.total).indices.sort().values            # (n_layer, total)
    return [Place(row[place.i], row[place.j], place.total) for row in positions]


# ---------------------------------------------------------------------- no position encoding

class NoPE(nn.Module):
    """No position encoding. Every other method is derived from this class."""
    overrides = frozenset()      # which of the steps from similarity to softmax a class changes
    settings = ()                # names of its settings in Settings
    vectors = {}                 # its parameters that tune_scale.py can tune
    window, sinks = 0, 0         # see mask()
    needs_equal_lengths = False  # True: prompts of different lengths cannot share a pass
    needs_all_keys = False       # True: a row of scores depends on later keys, too

    def __init__(self, config):
        super().__init__()

    def __init_subclass__(cls):
        """
        Python calls this when a subclass is defined. It records which steps the subclass changes.
        attend() chooses the kernel by them.
        """
        if 'is_plain' in vars(cls):
            raise TypeError(f'{cls.__name__} sets is_plain. is_plain follows from the window and '
                            'from the functions that a class overrides. Leave it out.')
        cls.overrides = {step for step in ('similarity', 'bias', 'mask', 'scores', 'softmax')
                         if getattr(cls, step) is not getattr(NoPE, step)}

    @property
    def is_plain(self):
        """True if the weights are only a causal softmax of q.k / sqrt(D)."""
        return not self.overrides and not self.window

    def prepare(self, place):
        """Compute what depends only on the positions, and store it in `place`. NoPE: nothing."""

    def share_weights(self, first):
        """
        Use the weights of `first`, the same method in the first layer that has it. NoPE: none.
        """

    def turn(self, q, k, place):
        """Change q, (B, H, T, D), and k, (B, n_kv_head, T, D), of the new tokens. Returns both."""
        return q, k

    def bias(self, i, j):
        """
        The term to add to the scores: (H, T, S), or (B, H, T, S) if i and j have a B axis. NoPE
        returns None, which adds nothing.
        """

    def similarity_inputs(self, k):
        """
        More inputs of similarity(), a tuple. A layer calls similarity() many times, for some query
        rows each time. What is the same for all rows is computed once, here.
        """
        return ()

    def similarity(self, q, k, i, j):
        """The scores before any bias, q.k / sqrt(D): (B, H, T, S)."""
        keys = kernels.repeat_heads(k, q.shape[1])
        return q @ keys.transpose(-1, -2) / math.sqrt(q.shape[-1])

    def mask(self, i, j):
        """
        True for each key that the query does not see, (1 or B, 1, T, S): each later key. With a
        window, the query sees only the newest `window` keys and the first `sinks` keys of the text.
        """
        hidden = later(i, j)
        if self.window:
            old = distances(i, j) >= self.window
            hidden = hidden | old & (j[..., None, None, :] >= self.sinks)
        return hidden

    def scores(self, q, k, i, j, *more):
        """
        The input of softmax, (B, H, T, S): -inf at masked keys. q: already multiplied by
        head_scale, see Attention.forward() in model.py.
        """
        scores = self.similarity(q, k, i, j, *more)
        bias = self.bias(i, j)
        if bias is not None:
            scores = scores + bias
        return scores.masked_fill(self.mask(i, j), -math.inf)

    def softmax(self, scores):
        """
        The attention weights for these scores, (B, H, T, S) float32. In a subclass, such as Sink of
        position_more.py, a row may sum to less than 1.
        """
        return scores.softmax(-1, dtype=torch.float32)

    def attend(self, q, k, v, i, j):
        """
        Softmax attention, (B, H, T, D). q: already multiplied by head_scale; k, v: (B, n_kv_head,
        S, D).
        """
        if self.overrides - {'mask', 'bias'}:
            return kernels.attention_over_scores(self, q, k, v, i, j)
        if self.overrides or self.window:
            return kernels.attention_with_bias(self.masked_bias, q, k, v, i, j)
        return kernels.attention(q, k, v, i, j)

    def masked_bias(self, i, j):
        """The bias, -inf at masked keys: (1 or B, 1 or H, T, S)."""
        bias = self.bias(i, j)
        if bias is None:
            bias = torch.zeros((), device=i.device)
        return bias.masked_fill(self.mask(i, j), -math.inf)


# ---------------------------------------------------------------------- changes of q and k

SCALINGS = ('pi', 'ntk', 'dynamic_ntk', 'yarn')


def parse_scaling(text):
    """
    Split METHOD:FACTOR, such as 'yarn:4', into ('yarn', 4.0). '' gives ('', 1.0). Raises ValueError
    if the method is unknown or the factor is not a number from 1 to 10^6.
    """
    kind, _, factor = text.partition(':')
    try:
        if text == '' or kind in SCALINGS and 1 <= float(factor) <= 1e6:
            return kind, float(factor or 1)
    except ValueError:
        pass
    raise ValueError(f"rope_scaling is '{text}'. Write METHOD:FACTOR, such as yarn:4, or '' for "
                     f"plain RoPE. METHOD is one of {', '.join(SCALINGS)}. FACTOR is 1 to 10^6.")


def rope_frequencies(D, base, scaling, L, total, device='cpu'):
    """
    Returns two things. The first is the angle by which each pair of a head turns from one position
    to the next, (D/2,) float64, in radians. The second is a factor on cos and sin: 1, except for
    YaRN.
    Raises ValueError if scaling is unknown.
    total: tokens in the text, including those still to be generated; only dynamic NTK uses it.
    RoPE is Eq. (15) of Su et al. 2021. Extensions by a factor s, for a model trained at length L:
    pi           Divide positions by s (Chen et al. 2023).
    ntk          Use a larger base. The slowest pair turns s times slower; the fastest turns as
                 before.
    dynamic_ntk  For texts longer than L, use ntk with the factor s total / L - (s - 1).
    yarn         Treat pairs that turn less than once in L tokens as pi does. Treat pairs that turn
                 more than 32 times as plain RoPE does. Blend linearly between the two. Multiply
                 scores by (1 + 0.1 ln s)^2 (Peng et al. 2024, section 3).
    """
    kind, s = parse_scaling(scaling)
    if kind == 'dynamic_ntk':
        s = max(1.0, s * total / L - (s - 1))
    if kind in ('ntk', 'dynamic_ntk'):
        base = base * s ** (D / (D - 2))

    # base^(-2k/D), written with exp(). torch.compile counts a power as cheap and would compute cos
    # and sin again in every layer. It counts exp as costly, so it computes them once.
    k = torch.arange(D // 2, dtype=torch.float64, device=device)
    frequency = torch.exp(-2 * math.log(base) / D * k)
    if kind == 'pi':
        frequency = frequency / s
    if kind == 'yarn':
        # the index of the pair that makes this many full turns in L tokens; it may be fractional
        def pair_that_turns(times):
            return D * math.log(L / (times * 2 * math.pi)) / (2 * math.log(base))

        low = max(0, math.floor(pair_that_turns(32)))
        high = min(D - 1, math.ceil(pair_that_turns(1)))
        ramp = (torch.arange(D // 2, device=device) - low) / max(high - low, 0.001)
        ramp = ramp.clamp(0, 1)
        frequency = frequency * (1 - ramp + ramp / s)
    factor = 1 + 0.1 * math.log(s) if kind == 'yarn' else 1.0
    return frequency, factor


def rotate(x, cos, sin):
    """
    Turn each pair (x[k], x[k + D/2]) of a head by its angle: Llama's half-split layout.
    x: (B, H, T, D); cos, sin: (1, T, D/2) or (B, 1, T, D/2). Computes in float32, returns x.dtype.
    """
    a, b = x.float().chunk(2, dim=-1)
    turned = a * cos - b * sin, b * cos + a * sin
    return torch.cat(turned, dim=-1).to(x.dtype)


class RoPE(NoPE):
    """
    Turns q_i and k_j by angles proportional to i and j, so that q_i . k_j depends on i - j.
    With rope_share below 1, the slowest pairs do not turn: p-RoPE (Barbero et al. 2024).
    With rope_window, query i sees only the keys j > i - rope_window. If layers of NoPE, which see
    all keys, alternate with such layers, the model is RNoPE-SWA (Yang et al. 2025).
    """
    settings = 'rope_base', 'rope_scaling', 'rope_share', 'rope_window'

    def __init__(self, config):
        super().__init__(config)
        self.D, self.L0 = config.head_dim, config.L0
        self.base, self.scaling = config.rope_base, config.rope_scaling
        self.n_turned = round(config.rope_share * (self.D // 2))  # number of pairs that turn
        self.window = config.rope_window
        self.needs_equal_lengths = self.scaling.startswith('dynamic')

    def prepare(self, place):
        if place.rotation is not None:  # an earlier layer computed it
            return
        device = place.i.device if place.i.device.type != 'mps' else 'cpu'  # mps has no float64
        frequency, factor = rope_frequencies(self.D, self.base, self.scaling, self.L0, place.total,
                                             device)
        frequency[self.n_turned:] = 0
        frequency = frequency.to(device=place.i.device, dtype=torch.float32)
        angle = place.i.float()[..., None, :, None] * frequency   # (1, T, D/2) or (B, 1, T, D/2)
        place.rotation = angle.cos() * factor, angle.sin() * factor

    def turn(self, q, k, place):
        return rotate(q, *place.rotation), rotate(k, *place.rotation)


class QueryFactor(NoPE):
    """A method that multiplies the query at position i by factor(i) and changes nothing else."""

    def __init__(self, config):
        super().__init__(config)
        self.L0 = config.L0

    def factor(self, i):
        """
        i: (1, T), or (B, 1, T) if prompts differ in length. Returns factors of the same shape, or
        with one factor per head, (H, T) or (B, H, T).
        """
        raise NotImplementedError

    def turn(self, q, k, place):
        factor = self.factor(place.i[..., None, :].float())
        return (q * factor[..., None]).to(q.dtype), k


class LogN(QueryFactor):
    """
    Multiplies the query that sees n keys by ln n / ln L (Chiang 2022). The factor is 1 at n = L.
    Beyond L it grows, so that attention does not spread over the additional keys.
    """

    def factor(self, i):
        return (i + 1).log() / math.log(self.L0)


# ---------------------------------------------------------------------- biases

class Bias(NoPE):
    """A method that adds bias(i, j) to the scores and changes nothing else."""

    def bias(self, i, j):
        raise NotImplementedError


def differences(i, j):
    """i - j for each query and key: (1, T, S), or (B, 1, T, S) if i and j have a B axis."""
    return i[..., None, :, None] - j[..., None, None, :]


def distances(i, j):
    """differences(), but 0 if the key is later."""
    return differences(i, j).clamp(min=0)


def alibi_slopes(n_head):
    """
    A list of H slopes. If H is a power of two: 2^(-8/H), 2^(-16/H) ... 2^-8. For any other H: all
    slopes of the next lower power of two, then every second slope of the next higher power.
    Source: Press et al. 2022, section 3 and its code.
    """
    below = 2 ** int(math.log2(n_head))
    first = 2 ** (-8 / below)
    slopes = [first ** (h + 1) for h in range(below)]
    between = [first ** (h + 0.5) for h in range(n_head - below)]
    return slopes + between


class ALiBi(Bias):
    """Bias -slope_h (i - j): distant keys count less. Each head has one fixed slope."""

    def __init__(self, config):
        super().__init__(config)
        # The slopes are a buffer: they move to the GPU with the model, so bias() copies nothing.
        # They are made on the CPU, even if the model is made on the device `meta`.
        slopes = torch.tensor(self.slopes_of(config.n_head), device='cpu')
        self.register_buffer('slopes', slopes, persistent=False)

    def slopes_of(self, n_head):
        return alibi_slopes(n_head)

    def bias(self, i, j):
        return -self.slopes[:, None, None] * differences(i, j)


class Kerple(Bias):
    """Logarithmic Kerple (Chi et al. 2022): bias -p_h ln(1 + a_h (i - j)), p, a > 0 learned."""

    def __init__(self, config):
        super().__init__(config)
        self.p = nn.Parameter(2 * torch.rand(config.n_head))
        self.a = nn.Parameter(torch.rand(config.n_head))

    def bias(self, i, j):
        p, a = at_least(self.p, 0.01), at_least(self.a, 0.01)
        return -p * torch.log1p(a * distances(i, j))


def at_least(x, least):
    """
    Clamp x, (H,), with a straight-through gradient, so that x < least can recover. Returns
    (H, 1, 1).
    """
    clamped = x + (x.clamp(min=least) - x).detach()
    return clamped[:, None, None]


def over_heads(x):
    """Turn one number per head, (..., 1, T, S, H), into a bias: (..., H, T, S)."""
    return x.movedim(-1, -4).squeeze(-3)


class FIRE(Bias):
    """
    Bias f(ln(1 + c (i - j)) / ln(1 + c max(i, mu M)))_h (Li et al. 2024). f is a network that maps
    one number to one number per head. c and mu are learned. M is L / 2, as in DAPE's released code.
    The input of f is at most 1 at any length, so f sees no larger input than in training.
    """

    def __init__(self, config):
        super().__init__(config)
        self.c, self.mu = nn.Parameter(torch.tensor(0.1)), nn.Parameter(torch.tensor(1.0))
        self.M = config.L0 // 2
        self.f = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, config.n_head))

    def bias(self, i, j):
        least = (self.mu * self.M).abs()
        longest = torch.maximum(i.float(), least)[..., None, :, None]
        near = torch.log1p((self.c * distances(i, j)).abs())
        far = torch.log1p((self.c * longest).abs())
        share = near / (far + 1e-6)                                          # (1, T, S)
        return over_heads(self.f(share[..., None]))


class T5Bias(Bias):
    """
    Bias sqrt(D) table[bucket(i - j), h] (Raffel et al. 2020). The factor sqrt(D) is from DAPE's
    released code. There are 32 buckets. Each distance up to 15 has its own bucket. The next buckets
    grow wider, up to distance 128. The last bucket also holds all longer distances. All layers
    share one table.
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
        count = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=most)           # (B, H, T, S)
        below = count.floor().long()
        at_count = q @ self.e.to(q.dtype).T                                  # (B, H, T, 64)
        low = at_count.gather(-1, below)
        high = at_count.gather(-1, (below + 1).clamp(max=most))
        between = (high - low) * (count - below).to(low.dtype)
        return scores + (low + between)


class TransformerXL(NoPE):
    """
    Scores ((q_i + u) . k_j + (q_i + v) . W r_{i-j}) / sqrt(D) (Dai et al. 2019). r is sinusoidal in
    the distance i - j. u, v and W are learned.
    """

    def __init__(self, config):
        super().__init__(config)
        shape = config.n_head, config.head_dim
        self.u = nn.Parameter(0.02 * torch.randn(shape))
        self.v = nn.Parameter(0.02 * torch.randn(shape))
        self.W = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def similarity_inputs(self, k):
        """A tuple of one: W r for each distance from 0 to S - 1, (H, D, S), with S keys."""
        S = k.shape[2]
        H, D = self.u.shape
        pair = torch.arange(0, H * D, 2, device=k.device)
        frequency = 10000 ** (-pair / (H * D))
        angle = torch.arange(S, device=k.device)[:, None] * frequency
        r = torch.cat((angle.sin(), angle.cos()), dim=-1)
        projected = self.W(r).view(S, H, D).permute(1, 2, 0)
        return (projected.to(k.dtype),)

    def similarity(self, q, k, i, j, projected=None):
        scores = super().similarity(q, k, i, j)
        H, D = self.u.shape
        if projected is None:
            projected, = self.similarity_inputs(k)
        projected = projected[..., :k.shape[2]]
        by_distance = (q + self.v[:, None].to(q.dtype)) @ projected          # (B, H, T, S)
        distance = distances(i, j).expand(scores.shape)
        position_term = by_distance.gather(-1, distance)                     # (B, H, T, S)
        keys = kernels.repeat_heads(k, H)
        key_term = keys @ self.u[..., None].to(k.dtype)                      # (B, H, S, 1)
        return scores + (position_term + key_term.transpose(-1, -2)) / math.sqrt(D)


# ---------------------------------------------------------------------- DAPE

class DAPE(NoPE):
    """
    Scores S + B + f([S; B]), Eq. (3). In these formulas S is the scores and B the bias. The scores
    and biases of all heads are the 2H channels of one feature map. f is two convolutions of
    1 x kernel over the keys, with a LeakyReLU in between. Kernel 1 is the first DAPE; kernel 3 and
    more is DAPE V2.
    Without the residual bias, the scores are S + f([S; B]), Eq. (2). A method without a bias has
    S + f(S), Eq. (4), and f has H input channels. The released class expects 2H in this case and
    cannot run.
    Keys that the query does not see, such as later keys, are 0 in the map, so that no convolution
    sees them. `cheat` leaves them in (section 4.5).
    The scores of a query must not depend on how many tokens follow it, or cached decoding would
    differ from a full pass. In the columns of later keys the map is 0, but the output of the first
    convolution there is not, as it has a bias and also sees the keys beside them. The second
    convolution reads this output. A query at the end of a pass would lack these columns. So the map
    gets columns of zeros on the right, and the scores are those of a longer pass. The released code
    does not pad. With `cheat`, scores do depend on later keys.
    """
    settings = 'dape_width', 'dape_residual', 'dape_cheat'

    def __init__(self, config, method):
        super().__init__(config)
        for step in 'scores', 'attend':
            if getattr(type(method), step) is not getattr(NoPE, step):
                raise ValueError(f'{type(method).__name__} has its own {step}(), and DAPE would '
                                 'replace it. Leave dape_kernel out.')
        self.method, H, width = method, config.n_head, config.dape_width
        self.kernel, self.cheat = config.dape_kernel, config.dape_cheat
        self.needs_all_keys = self.cheat
        self.residual = config.dape_residual
        if self.cheat:
            warnings.warn('dape_cheat: this model sees the tokens that it must predict; its '
                          'losses mean nothing', stacklevel=2)
        # DAPE changes only scores(). All other steps are those of the wrapped method: an attribute
        # of an object comes before a method of its class.
        self.prepare, self.turn = method.prepare, method.turn
        self.bias, self.mask, self.softmax = method.bias, method.mask, method.softmax
        self.similarity, self.similarity_inputs = method.similarity, method.similarity_inputs
        # A kernel wider than 1 reads neighboring slots of the cache. If prompts differ in length,
        # empty slots lie between a short prompt and its new tokens.
        self.needs_equal_lengths = method.needs_equal_lengths or self.kernel > 1
        channels, pad = 2 * H if 'bias' in method.overrides else H, self.kernel // 2
        self.first = nn.Conv2d(channels, width, (1, self.kernel), padding=(0, 2 * pad))
        self.second = nn.Conv2d(width, H, (1, self.kernel))

    def share_weights(self, first):
        self.method.share_weights(first.method)

    def scores(self, q, k, i, j, *more):
        scores = self.similarity(q, k, i, j, *more)
        bias, mask = self.bias(i, j), self.mask(i, j)
        x, pad = scores, self.kernel // 2
        if bias is not None:
            bias = bias.to(scores.dtype)
            x = torch.cat((scores, bias.expand(scores.shape)), dim=1)        # (B, 2H, T, S)
        if not self.cheat:
            x = x.masked_fill(mask, 0)
        x = self.first(x)            # (B, width, T, S + 2 pad): column p belongs to key p - pad
        # The columns left of key 0 are set to 0, so that the second convolution sees zeros there.
        x = x.masked_fill(torch.arange(x.shape[-1], device=x.device) < pad, 0)
        # In place, so that backward reads the signs from the result. Otherwise compiled code stores
        # a boolean per number, which is slow on a CPU.
        x = self.second(nn.functional.leaky_relu(x, inplace=True))
        if bias is not None and self.residual:
            scores = scores + bias
        return (scores + x).masked_fill(mask, -math.inf)


# ---------------------------------------------------------------------- all of them

METHODS = {
    'none': NoPE,
    'rope': RoPE,
    'logn': LogN,
    'alibi': ALiBi,
    'kerple': Kerple,
    'fire': FIRE,
    't5': T5Bias,
    'cope': CoPE,
    'xl': TransformerXL,
}


def position_method(config, layer):
    """The method of one layer. All other weights start the same, whichever method is chosen."""
    with torch.random.fork_rng(devices=[]):
        method = METHODS[config.method_of(layer)](config)
        return DAPE(config, method) if config.dape_kernel else method
