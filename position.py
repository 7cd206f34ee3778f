"""
Position methods: what a transformer adds to NoPE so that attention knows the positions of tokens.

NoPE adds nothing: only the causal mask tells positions apart. Every other method here is NoPE with
one or a few of its steps changed. A step is a function of the class NoPE:

  prepare     runs before the first layer, once for each layer. RoPE computes its angles in the
              first of these calls, and all layers share them.
  encode      puts positions into q and k. RoPE rotates both by an angle that grows with the
              position, so that q_i . k_j depends on i - j. Log-n multiplies later queries by more.
  similarity  makes the scores q_i . k_j / sqrt(D). CoPE and Transformer-XL add terms to them.
  bias        is a function of the positions that is added to the scores: ALiBi, Kerple, FIRE, T5.
  mask        hides more keys than the later ones: a sliding window hides the old ones.
  scores      puts similarity, bias, DAPE and mask together: the input of the softmax.
  softmax     turns scores into attention weights.
  attend      is the whole attention, from q, k and v to its output.

attend() looks which steps a class changes, and takes the fastest way that still runs them all.
A new method is a class and an entry in METHODS. A new setting of a method is a line in Settings,
and its name in the class's `settings`. This file holds NoPE, RoPE with its extensions, two biases,
and DAPE of "DAPE V2" (Zheng et al. 2024, arXiv:2410.04798). All other methods stand in
position_more.py, which is read only if one of them is named.

Shapes: B sequences, T queries, S keys, H heads, D = head size. i is the position of a query and
j <= i that of a key; both start at 0. L is the number of tokens in a window of pretraining.
Formulas are from DAPE V2, section 3 and appendix, unless another source is named.
"""

import difflib
import math
from dataclasses import dataclass, field, fields

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


@dataclass(kw_only=True)
class Settings:
    """The settings of all position methods. Stages that make a model take them, too."""
    position: str = 'none'      # none (NoPE), rope ...: a key of METHODS; a,b: layers alternate
    rope_base: float = 10000.0  # RoPE: pair k of a head rotates by rope_base^(-2k/D) per token
    rope_scaling: str = ''      # RoPE: extension to longer texts, such as yarn:4; '': none
    dape_kernel: int = 0        # DAPE on top of the method: 1, 3, 5 ... keys wide; 0: no DAPE
    dape_width: int = 32        # DAPE: channels between its two convolutions
    dape_residual: bool = True  # DAPE: also add the bias itself, Eq. (3) of DAPE V2; False: Eq. (2)

    def __post_init__(self):
        self.methods = self.position.split(',')  # layer n has methods[n % len(methods)]
        for name in self.methods:
            if method_class(name) is None:
                raise ValueError(f"position is '{name}', which is unknown. Choose from "
                                 f'{", ".join(METHODS)}, or several with commas.')
        for name, default in unused_settings(vars(self)).items():
            raise ValueError(f'{name} is {getattr(self, name)!r}, but position {self.position} '
                             f'does not use it. Leave it at {default!r}, or choose a method that '
                             'has it.')
        if self.rope_scaling:
            split_scaling(self.rope_scaling)


def unused_settings(settings):
    """
    {name: default} of each setting that differs from its default although no chosen method has it.
    settings: {name: value}, with an entry `position`.
    """
    used = {'position', 'dape_kernel'}
    for name in settings['position'].split(','):
        used.update((method_class(name) or NoPE).settings)
    if settings.get('dape_kernel'):
        used.update(DAPE.settings)
    return {f.name: f.default for f in fields(Settings)
            if f.name not in used and settings.get(f.name, f.default) != f.default}


STEPS = 'prepare', 'encode', 'similarity', 'bias', 'mask', 'scores', 'softmax', 'attend'


@dataclass
class Place:
    """The positions of the tokens of a pass."""
    i: torch.Tensor  # positions of queries, (T,)
    j: torch.Tensor  # positions of keys, (S,)
    total: int       # tokens in the text, with those that are still to be generated
    sees_all: bool = False  # True: the one query is the newest token, so it sees every key
    tables: dict = field(default_factory=dict)  # what prepare() computes once for all layers


# ---------------------------------------------------------------------- no position encoding

class NoPE(nn.Module):
    """No position encoding. Every other method is derived from this class."""
    settings = ()                # names of its settings in Settings
    vectors = {}                 # {parameter that tune_scale.py can tune: its learning rate}
    tied = ()                    # names of parameters that all layers of this method share
    depends_on_length = False    # True: more tokens after a token change how it is read

    def __init__(self, config):
        super().__init__()
        self.dape = None  # a DAPE on top of the method

    @property
    def changed(self):
        """The steps in which this method differs from NoPE, by its class or by a DAPE on top."""
        changed = {step for step in STEPS
                   if getattr(type(self), step) is not getattr(NoPE, step)}
        return changed | {'scores'} if self.dape else changed

    def prepare(self, place):
        """The Place that this layer uses, with what can be computed once for all layers."""
        return place

    def encode(self, q, k, place):
        """Put positions into q, (B, H, T, D), and k, (B, n_kv_head, T, D). Returns both."""
        return q, k

    def similarity(self, q, k, i, j):
        """The scores before any bias, q.k / sqrt(D): (B, H, T, S). q: times head_scale already."""
        return q @ repeat_heads(k, q.shape[1]).mT / math.sqrt(q.shape[-1])

    def bias(self, i, j):
        """What to add to the scores, (H, T, S)."""
        return None  # no bias

    def mask(self, i, j):
        """
        True for each key that a query does not see, (T, S). If a class forgets the later keys here,
        attention hides them all the same.
        """
        return later(i, j)

    def scores(self, q, k, i, j):
        """The input of softmax, (B, H, T, S): -inf at keys that the query does not see."""
        hidden = self.mask(i, j) | later(i, j)
        scores, bias = self.similarity(q, k, i, j), self.bias(i, j)
        if self.dape:
            scores = self.dape(scores, bias, hidden)
        elif bias is not None:
            scores = scores + bias
        return scores.masked_fill(hidden, -math.inf)

    def softmax(self, scores):
        """Attention weights, (B, H, T, S) float32. A row of a subclass may sum to less than 1."""
        return scores.softmax(-1, dtype=torch.float32)

    def attend(self, q, k, v, place):
        """
        Attention, (B, H, T, D). q: (B, H, T, D), times head_scale already; k, v: (B, n_kv_head, S,
        D), with a cache of more keys than queries.
        """
        if self.changed <= {'prepare', 'encode'}:  # those steps are done
            return fused_attention(q, k, v, place)
        if self.changed & {'similarity', 'scores', 'softmax'}:
            return in_rows(self.attend_by_scores, q, k, v, place)
        return in_rows(self.attend_by_bias, q, k, v, place)

    def attend_by_scores(self, q, k, v, i, j):
        """attend() for some query rows by the weights of softmax(scores)."""
        weights = self.softmax(self.scores(q, k, i, j))
        return weights.to(v.dtype) @ repeat_heads(v, q.shape[1])

    def attend_by_bias(self, q, k, v, i, j):
        """attend() for some query rows by a fused kernel, which adds the bias and the mask."""
        bias = self.bias(i, j)
        if bias is None:
            bias = torch.zeros(1, 1, 1, device=i.device)
        bias = bias.masked_fill(self.mask(i, j) | later(i, j), -math.inf)[None]  # (1, H, T, S)
        return F.scaled_dot_product_attention(q, *for_kernel(q, k, v), bias.to(q.dtype),
                                              enable_gqa=not q.is_cuda)


def later(i, j):
    """True where the key at position j comes after the query at position i: (T, S)."""
    return j > i[:, None]


def distances(i, j):
    """i - j, or 0 if the key is later: (T, S)."""
    return (i[:, None] - j).clamp(min=0)


def repeat_heads(x, n_head):
    """Keys or values, (B, n_kv_head, S, D), once for each query head: (B, H, S, D)."""
    return x.repeat_interleave(n_head // x.shape[1], dim=1)


# ---------------------------------------------------------------------- changes of q and k

SCALINGS = ('pi', 'ntk', 'dynamic_ntk', 'yarn', 'llama3')


def split_scaling(text):
    """('yarn', 4.0) from 'yarn:4'; ('', 1.0) from ''. Raises ValueError if it is neither."""
    kind, _, factor = text.partition(':')
    try:
        if text == '' or kind in SCALINGS and 1 <= float(factor) < math.inf:
            return kind, float(factor or 1)
    except ValueError:
        pass
    raise ValueError(f"rope_scaling is '{text}'. Write METHOD:FACTOR, such as yarn:4: a METHOD of "
                     f'{", ".join(SCALINGS)} and a FACTOR of at least 1.')


def rope_frequencies(D, base, scaling, L, total):
    """
    The angle in radians by which each pair of a head rotates from one position to the next, (D/2,)
    float64, and a factor on cos and sin that is 1 except for YaRN. Eq. (15) of Su et al. 2021.
    total: tokens in the text; only dynamic NTK reads it. Extensions by a factor s:
    pi           divides positions by s (Chen et al. 2023).
    ntk          enlarges the base: the slowest pair rotates s times slower, the fastest as before.
    dynamic_ntk  is ntk with the factor s total / L - (s - 1), in texts longer than L.
    yarn         treats pairs that rotate less than once in L tokens as pi does, pairs that rotate
                 more than 32 times as plain RoPE, and blends linearly between them, with a ramp in
                 float32. It multiplies scores by (1 + 0.1 ln s)^2 (Peng et al. 2024, section 3).
    llama3       treats pairs that rotate less than once in L tokens as pi does, pairs that rotate
                 more than 4 times as plain RoPE, and blends linearly in the number of rotations
                 between them (Llama 3.1; its s is 8, that of Llama 3.2 is 32, and L is 8192).
    """
    kind, s = split_scaling(scaling)
    if kind == 'dynamic_ntk':
        s = max(1.0, s * total / L - (s - 1))
    if kind.endswith('ntk'):
        base = base * s ** (D / (D - 2))
    k = torch.arange(D // 2, dtype=torch.float64)
    frequency = torch.exp(-2 * math.log(base) / D * k)
    if kind == 'pi':
        frequency = frequency / s
    if kind == 'yarn':
        def pair_that_rotates(times):
            """The index of the pair that makes so many turns in L tokens; a fraction."""
            return D * math.log(L / (times * 2 * math.pi)) / (2 * math.log(base))

        low = max(0, math.floor(pair_that_rotates(32)))
        high = min(D - 1, math.ceil(pair_that_rotates(1)))
        ramp = (k.float() - low) / max(high - low, 0.001)
        ramp = ramp.clamp(0, 1)
        frequency = frequency * (1 - ramp + ramp / s)
    if kind == 'llama3':
        rotations = L * frequency / (2 * math.pi)
        kept = ((rotations - 1) / (4 - 1)).clamp(0, 1)
        frequency = frequency * (kept + (1 - kept) / s)
    # The factor goes on both q and k, so scores get its square.
    return frequency, 1 + 0.1 * math.log(s) if kind == 'yarn' else 1.0


def rotate(x, cos, sin):
    """
    Rotate each pair (x[k], x[k + D/2]) of a head by its angle: Llama's half-split layout.
    x: (B, H, T, D); cos, sin: (T, D/2). Computes in float32, returns x.dtype.
    """
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class RoPE(NoPE):
    """Rotates q_i and k_j by angles proportional to i and j: q_i . k_j depends on i - j."""
    settings = 'rope_base', 'rope_scaling'

    def __init__(self, config):
        super().__init__(config)
        self.D, self.L = config.head_dim, config.pretrained_length
        self.base, self.scaling = config.rope_base, config.rope_scaling
        self.depends_on_length = self.scaling.startswith('dynamic')

    def prepare(self, place):
        place = super().prepare(place)
        if type(self) not in place.tables:  # all layers of this class share one
            frequency, factor = rope_frequencies(self.D, self.base, self.scaling, self.L,
                                                 place.total)
            angle = place.i.float()[:, None] * frequency.float().to(place.i.device)
            cos, sin = angle.cos() * factor, angle.sin() * factor            # (T, D/2)
            place.tables[type(self)] = cos, sin
        return place

    def encode(self, q, k, place):
        cos, sin = place.tables[type(self)]
        return rotate(q, cos, sin), rotate(k, cos, sin)


# ---------------------------------------------------------------------- biases

def alibi_slopes(n_head):
    """
    A list of H slopes. If H is a power of two: 2^(-8/H), 2^(-16/H) ... 2^-8. For any other H: all
    slopes of the next lower power of two, then every second slope of the next higher power: of 6
    heads 1/4, 1/16, 1/64, 1/256, then 1/2, 1/8. Source: Press et al. 2022, section 3 and its code.
    """
    below = 2 ** int(math.log2(n_head))
    first = 2 ** (-8 / below)
    slopes = [first ** (h + 1) for h in range(below)]
    return slopes + [first ** (h + 0.5) for h in range(n_head - below)]


class ALiBi(NoPE):
    """Bias -slope_h (i - j): distant keys count less. Each head has one fixed slope."""

    def __init__(self, config):
        super().__init__(config)
        # A buffer, so that it moves to the GPU with the model
        slopes = torch.tensor(alibi_slopes(config.n_head))
        self.register_buffer('slopes', slopes, persistent=False)

    def bias(self, i, j):
        return -self.slopes[:, None, None] * distances(i, j)


class Kerple(NoPE):
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


# ---------------------------------------------------------------------- DAPE

class DAPE(nn.Module):
    """
    Scores S + B + f([S; B]), Eq. (3): S are the scores of a method and B is its bias. The scores
    and biases of all heads are the 2H channels of one feature map, and f is two convolutions of
    1 x kernel over the keys, Eq. (5), with a LeakyReLU in between. Kernel 1 is the first DAPE;
    kernel 3 and more is DAPE V2. Without the residual the scores are S + f([S; B]), Eq. (2). A
    method without a bias has S + f(S), Eq. (4), and f has H input channels; the released class
    expects 2H in this case and cannot run.

    Keys that the query does not see are 0 in the map, so that no convolution sees them. But what
    the first convolution returns at those places is not 0, and the second reads it. Query 2 and a
    kernel of 3, with 5 keys in the pass:

        map      S_20  S_21  S_22   0     0
        first     x     x     x     y     z       y also sees S_22; z is the convolution's bias
        second    s     s     s                   the last s reads y

    If query 2 were the last of its pass, as in cached decoding, there would be no y. So zeros are
    added at the right of the map (the released code does not), and y exists in each pass.
    """
    settings = 'dape_width', 'dape_residual'

    def __init__(self, config, has_bias):
        super().__init__()
        channels = 2 * config.n_head if has_bias else config.n_head
        self.residual, self.pad = config.dape_residual, config.dape_kernel // 2
        kernel = 1, config.dape_kernel
        self.first = nn.Conv2d(channels, config.dape_width, kernel, padding=(0, 2 * self.pad))
        self.second = nn.Conv2d(config.dape_width, config.n_head, kernel)

    def forward(self, scores, bias, hidden):
        """scores: (B, H, T, S); bias: as a method's, or None; hidden: (T, S)."""
        parts = [scores]
        if bias is not None:
            bias = bias.to(scores.dtype)
            parts.append(bias.expand(scores.shape))
        # Each part is masked before cat: of a mask after it, torch.compile (2.13, one window, with
        # gradients) makes code that overwrites the weights of attention while it reads them.
        x = torch.cat([part.masked_fill(hidden, 0) for part in parts], dim=1)  # (B, H or 2H, T, S)
        x = self.first(x)                         # S + 2 pad columns; column p is key p - pad
        # Before key 0 the second convolution sees zeros.
        x = x.masked_fill(torch.arange(x.shape[-1], device=x.device) < self.pad, 0)
        # In place, so that backward reads the signs from the result. Otherwise compiled code stores
        # a boolean per number, which is slow on a CPU.
        x = self.second(F.leaky_relu(x, inplace=True))
        if bias is not None and self.residual:
            scores = scores + bias
        return scores + x


# ---------------------------------------------------------------------- all of them

METHODS = {
    'none': NoPE,
    'rope': RoPE,
    'alibi': ALiBi,
    'kerple': Kerple,
}


def method_class(name):
    """The class of a method, or None. Those that are not in this file are in position_more.py."""
    if name not in METHODS:
        import position_more  # noqa: F401, adds its methods to METHODS
    return METHODS.get(name)


def position_method(config, layer):
    """
    The method of one layer. All other weights of the model start the same, whichever it is. Raises
    ValueError for a class whose steps would not all be used: see CONTRIBUTING.md.
    """
    method_type = method_class(config.methods[layer % len(config.methods)])
    with torch.random.fork_rng(devices=[]):
        method = method_type(config)
        changed = method.changed
        if config.dape_kernel:
            method.dape = DAPE(config, 'bias' in changed)

    name = method_type.__name__
    for step in STEPS:
        if step in vars(method):
            raise ValueError(f'{name} sets {step} on the object. Make it a method of the class.')
    for function in vars(method_type):
        near = difflib.get_close_matches(function, STEPS, n=1, cutoff=0.8)
        if near and function not in STEPS:
            raise ValueError(f'{name} has {function}(): did you mean {near[0]}()?')
    if method.dape and changed & {'scores', 'attend'}:
        raise ValueError(f'{name} has its own scores() or attend(), so DAPE would not be used. '
                         'Leave dape_kernel out.')
    return method


# ---------------------------------------------------------------------- attention, rows at a time

SCORES_AT_ONCE = 2 ** 22  # in one chunk of rows; a GPU takes 16 times as many
CHUNKS_IN_A_GRAPH = 128   # compiled; of more chunks the graph would take minutes to compile


def for_kernel(q, k, v):
    """k and v, on a GPU repeated: only some of its kernels let query heads share a key head."""
    return [repeat_heads(x, q.shape[1]) if q.is_cuda else x for x in (k, v)]


def fused_attention(q, k, v, place):
    """Causal attention without a bias, (B, H, T, D), with or without a cache."""
    B, H, T, D = q.shape
    mask = None
    if T < k.shape[2] and not place.sees_all:  # if T == S, is_causal does it
        mask = ~later(place.i, place.j)  # for PyTorch True is a key that the query sees
    if T == 1:
        # The query heads that share a key become rows of one head, so that each key is read once.
        rows = q.reshape(B, k.shape[1], -1, D)
        return F.scaled_dot_product_attention(rows, k, v, mask).reshape(q.shape)
    return F.scaled_dot_product_attention(q, *for_kernel(q, k, v), mask, is_causal=mask is None,
                                          enable_gqa=not q.is_cuda)


def in_rows(f, q, k, v, place):
    """
    f(q, k, v, i, j) -> (B, H, rows, ...) for some query rows at a time, joined: so the whole
    (T, S) matrix of scores never exists. In training, if the scores are many, backward computes
    those of each chunk again instead of storing them, so that memory grows with T instead of T^2.
    """
    (B, H, T), S = q.shape[:3], k.shape[2]
    many = B * H * T * S > 4 * SCORES_AT_ONCE
    n_rows = (16 if q.is_cuda else 1) * SCORES_AT_ONCE // (B * H * S)
    if many or not q.is_cuda:
        n_rows = min(n_rows, max(32, T // 8))  # several chunks, because early rows need few keys
    n_rows, eighth = max(1, n_rows), math.ceil(S / 8)
    starts = range(0, T, n_rows)

    def of_chunk(start):
        stop = start + n_rows  # of the last chunk this may lie past T: slices end there
        # The last of these rows sees S - T + stop keys. Rounded up to whole eighths of S, because
        # convolutions plan for each new shape.
        end = min(S, math.ceil((S - T + stop) / eighth) * eighth)
        return f(q[:, :, start:stop], k[:, :, :end], v[:, :, :end], place.i[start:stop],
                 place.j[:end])

    y = []
    for start in reversed(starts):  # the longest first: shorter ones reuse the memory they free
        if len(starts) > CHUNKS_IN_A_GRAPH and torch.compiler.is_compiling():
            torch._dynamo.graph_break()  # Python runs the whole loop
        if many and torch.is_grad_enabled():
            y.append(checkpoint(of_chunk, start, use_reentrant=False))
        else:
            y.append(of_chunk(start))
    return torch.cat(y[::-1], dim=2)
