"""
A causal transformer without position encoding (NoPE), with one softmax scale per attention head.

The architecture is TinyLlama's minus the rotary embedding: RMSNorm, grouped-query attention,
SwiGLU, no biases, and an output matrix that is not tied to the embedding. With position='rope' the
model is TinyLlama itself, so a NoPE model and its RoPE twin differ only in position encoding.

Read Transformer.hidden(), then Block.forward() and Attention.forward(). position.py and
position_more.py hold the position methods. kernels.py makes attention fast.

Sources: Wang et al. 2024, "Length Generalization of Causal Transformers without Position Encoding"
("the paper" in this file), and the TinyLlama code for sizes and initialization.

Shapes: B sequences, T tokens in this call, S keys (T, or more with a cache), C = n_embd,
H = n_head, D = head_dim = C / H, V = vocab_size.

Four arguments go through all layers:
  place  the positions of the queries and keys of a pass, a position.Place
  cache  the keys and values of the tokens read before, a KVCache of lib/generate.py; None: no cache
  tail   how many of the last positions the layer shall return; 0: all of them, because x[:, -0:]
         is all of x
  probe  a function that measures q and k in each layer: see Transformer.probe(); None: no probe
"""

import contextlib
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import kernels
import position_more  # noqa: F401, adds its methods to METHODS
from position import METHODS, Place, Settings, Vector, position_method, random_places


@dataclass(kw_only=True)
class ModelConfig(Settings):
    """Sizes of a model, and the settings of its position method."""
    vocab_size: int
    block_size: int      # L: tokens in a training window; experiments read longer inputs
    n_layer: int
    n_head: int
    n_kv_head: int       # key/value heads; each is shared by n_head / n_kv_head query heads
    n_embd: int
    n_hidden: int        # inner width of SwiGLU
    pretrained_length: int | None = None  # L0: block_size in pretraining; None: as block_size
    tied: bool = False   # True: embedding and output share one matrix
    short_conv: int = 0  # tokens that each short convolution reads, such as 4; 0: no convolution
    short_conv_at: str = 'AC'  # A: before attention; C: before the MLP; AC: both
    norm_eps: float = 1e-5

    def __post_init__(self):
        super().__post_init__()
        for name in ('vocab_size', 'n_layer', 'n_head', 'n_kv_head', 'n_hidden'):
            self.require(name, getattr(self, name) >= 1, 'at least 1')
        self.require('block_size', self.block_size >= 2, 'at least 2')
        length = self.pretrained_length
        self.require('pretrained_length', length is None or length >= 2, 'at least 2, or None')
        self.require('norm_eps', 0 <= self.norm_eps < math.inf, '0 or more, such as 1e-5')
        self.require('n_embd', self.n_embd >= 1 and self.n_embd % (2 * self.n_head) == 0,
                     f'a multiple of twice n_head {self.n_head}, because the size of a head must '
                     'be even')
        self.require('rope_scaling', self.head_dim > 2 or 'ntk' not in self.rope_scaling,
                     'pi or yarn, because ntk needs heads of more than 2 channels')
        self.require('n_head', self.n_head % self.n_kv_head == 0,
                     f'a multiple of n_kv_head {self.n_kv_head}')
        self.require('short_conv', 0 <= self.short_conv <= 1024,
                     'from 1 to 1024 tokens, such as 4, or 0 for none')
        self.require('short_conv_at', self.short_conv_at in ('A', 'C', 'AC'), 'A, C or AC')
        self.require('short_conv_at', self.short_conv or self.short_conv_at == 'AC',
                     'left out, because short_conv is 0: the model has no convolutions. Or add '
                     '--short_conv=4')
        self.require('random_positions', not 0 < self.random_positions < self.block_size,
                     f'at least block_size {self.block_size}, or 0 for positions 0, 1, 2 ...')
        self.require('position', self.position.count(',') < self.n_layer,
                     f'at most {self.n_layer} methods, one for each layer. Leave some out')

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    @property
    def L0(self):
        """Tokens in a window of pretraining. Fine-tuning changes block_size, and not L0."""
        return self.pretrained_length or self.block_size


class Attention(nn.Module):
    """Grouped-query attention. Its softmax has one scale per head: Eq. (4) of the paper."""

    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.head_counts = [config.n_head, config.n_kv_head, config.n_kv_head]  # of q, k, v
        self.qkv = nn.Linear(config.n_embd, sum(self.head_counts) * self.head_dim, bias=False)
        self.out = nn.Linear(config.n_embd, config.n_embd, bias=False)
        # head_scale is lambda in the paper. It multiplies the scores q.k / sqrt(D) of each head.
        # Its shape is (H, 1), one scale per head. If it is tuned per channel, its shape is (H, D).
        # head_gain multiplies the output of each head. Both are always float32, because 1.6 + 0.001
        # is still 1.6 in bfloat16. Both are frozen until tuning.
        self.head_scale = nn.Parameter(torch.ones(config.n_head, 1), requires_grad=False)
        self.head_gain = nn.Parameter(torch.ones(config.n_head, 1), requires_grad=False)
        self.position = position_method(config, layer)

    def forward(self, x, place, cache=None, tail=0, probe=None):
        """
        x: (B, T, C). Returns (y, probed). y is (B, T, C). With tail > 0, y has only the last `tail`
        positions, (B, tail, C). probed is what the probe returned, None without a probe.
        """
        B, T, C = x.shape
        qkv = self.qkv(x).view(B, T, -1, self.head_dim).transpose(1, 2)
        q, k, v = qkv.split(self.head_counts, dim=1)         # (B, H or n_kv_head, T, D)
        q, k = self.position.turn(q, k, place)

        # Eq. (4): scores become head_scale_h * q.k / sqrt(D). Multiply q instead of the scores,
        # because the fused kernels of attention never show the scores.
        q = (q * self.head_scale[:, None]).to(k.dtype)
        probed = probe(self.layer, self, q, k, place) if probe else None
        if cache is not None:
            k, v = cache.append(self.layer, k, v)            # (B, n_kv_head, S, D)

        y = self.position.attend(q[:, :, -tail:], k, v, place.i[..., -tail:], place.j)
        y = (y * self.head_gain[:, None]).to(y.dtype)
        return self.out(y.transpose(1, 2).reshape(B, -1, C)), probed


class ShortConv(nn.Module):
    """
    A causal convolution over the last `short_conv` tokens, added to its input:
    y_t = x_t + sum_tau w_tau x_(t - tau), tau = 0 ... short_conv - 1.
    It is depthwise: each channel has its own weights. Before the first token it reads zeros.
    It tells attention which tokens come just before each token. Without it, NoPE must infer them
    from the causal mask. Source: Canon layers, arXiv:2512.17351. The two convolutions of a layer
    start with the same weights.
    """

    def __init__(self, config, name):
        super().__init__()
        self.name = name  # the cache stores the inputs of this convolution under this name
        # Fork the random state, so that all other weights start as in a model without convolutions.
        with torch.random.fork_rng(devices=[]):
            self.w = nn.Parameter(torch.empty(config.short_conv, config.n_embd).uniform_(-0.5, 0.5))

    def forward(self, x, cache=None):
        """x: (B, T, C), the tokens of this call, after those in the cache. Returns (B, T, C)."""
        T, before = x.shape[1], len(self.w) - 1
        if cache is None:
            padded = F.pad(x, (0, 0, before, 0))             # (B, before + T, C)
        else:
            padded = cache.preceded(self.name, x, before)
        y = x
        for tau, w in enumerate(self.w.unbind()):
            y = y + w * padded[:, before - tau:before - tau + T]
        return y


class SwiGLU(nn.Module):
    """The MLP: down(silu(gate x) * up x), each token by itself."""

    def __init__(self, config):
        super().__init__()
        self.gate_up = nn.Linear(config.n_embd, 2 * config.n_hidden, bias=False)  # gate and up
        self.out = nn.Linear(config.n_hidden, config.n_embd, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.out(F.silu(gate) * up)


class Block(nn.Module):
    """
    A layer: attention, then the MLP, each after a norm and added to x. A short convolution may come
    before either.
    """

    def __init__(self, config, layer):
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.n_embd, eps=config.norm_eps)
        self.attn = Attention(config, layer)
        self.mlp_norm = nn.RMSNorm(config.n_embd, eps=config.norm_eps)
        self.mlp = SwiGLU(config)
        at = config.short_conv_at if config.short_conv else ''
        self.attn_conv = ShortConv(config, f'{layer}A') if 'A' in at else None
        self.mlp_conv = ShortConv(config, f'{layer}C') if 'C' in at else None
        # mlp_conv also reads this many tokens before each position
        self.n_before = config.short_conv - 1 if self.mlp_conv else 0

    def forward(self, x, place, cache=None, tail=0, probe=None):
        h = self.attn_norm(x)
        if self.attn_conv:
            h = self.attn_conv(h, cache)
        # Attention returns the tail, and the n_before positions before it that mlp_conv reads.
        n_attended = tail + self.n_before if tail else 0
        y, probed = self.attn(h, place, cache, n_attended, probe)
        x = x[:, -n_attended:] + y

        h = self.mlp_norm(x)
        if self.mlp_conv:
            h = self.mlp_conv(h, cache)
        return x[:, -tail:] + self.mlp(h[:, -tail:]), probed


class Transformer(nn.Module):
    """The whole model: embedding, blocks, norm, output matrix."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.checkpoint_activations = False  # True: backward recomputes what is inside a block
        self.probe_with, self.probed = None, []  # set by probe()
        # See lib/scales.py: small vectors for several lengths, and what a scale file replaced.
        self.scale_sets, self.replaced = None, {}
        # The random numbers that choose the random positions in evaluation. In training each step
        # draws others; train.py sets the seed, so that the micro-batches of a step draw the same.
        if config.random_positions:
            draws = torch.rand(config.n_layer, config.random_positions, device='cpu',
                               generator=torch.Generator().manual_seed(0))
            self.register_buffer('draws', draws, persistent=False)
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = nn.RMSNorm(config.n_embd, eps=config.norm_eps)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.share_weights()

    def share_weights(self):
        """Make one weight of those that are shared: a tied output matrix, T5's table."""
        if self.config.tied:
            self.head.weight = self.embed.weight
        first = {}  # {name of a method: its instance in the first layer that uses this name}
        for layer, block in enumerate(self.blocks):
            name, method = self.config.method_of(layer), block.attn.position
            first.setdefault(name, method)
            method.share_weights(first[name])

    def init_weights(self, generator=None):
        """
        TinyLlama's initialization. All matrices start small. The output matrices of attention and
        MLP start smaller in deeper models. Returns the model.
        """
        C, n_layer = self.config.n_embd, self.config.n_layer
        for name, p in self.named_parameters():
            if p.dim() != 2 or vector_of(name) or '.position.' in name or name.endswith('conv.w'):
                continue  # norms and scales start at 1; the others have set their own weights
            std = math.sqrt(2 / (5 * C))
            if name.endswith('out.weight'):
                std = 1 / (math.sqrt(C) * n_layer)
            nn.init.normal_(p, std=std, generator=generator)
        return self

    def forward(self, idx, targets=None, tail=0, cache=None):
        """
        idx: (B, T) token ids. With a cache (lib/generate.py), they continue the cached tokens.
        Without targets, returns the logits of the last `tail` positions, (B, tail, V). With a tail
        of 0, returns the logits of all positions.
        targets: (B, K), the id of the next token for each of the last K positions. With them,
        returns the loss of each target: -ln p in nats, (B, K) float32.
        """
        if targets is not None:
            tail = targets.shape[1]
        x = self.hidden(idx, cache, tail)
        if targets is None:
            return self.head(x)
        return kernels.cross_entropy(x, self.head, targets)

    def hidden(self, idx, cache=None, tail=0):
        """
        The input of the output matrix, (B, T, C). With tail > 0, returns only the last `tail`
        positions, (B, tail, C). The last layer computes queries, keys and values for all positions,
        but attention and the MLP only for the last `tail`. If the MLP has a short convolution,
        attention also runs at the few positions before them that this convolution reads.
        """
        T = idx.shape[1]
        if cache is None:
            i = torch.arange(T, device=idx.device)
            place = Place(i, i, total=T)
        else:
            place = cache.place(T)
        # All layers share one Place, so RoPE's angles are computed once. Only random positions
        # differ from layer to layer.
        places = [place] * len(self.blocks)
        if self.config.random_positions:
            draws = torch.rand_like(self.draws) if self.training else self.draws
            places = random_places(place, draws)
        for block, of_layer in zip(self.blocks, places):
            block.attn.position.prepare(of_layer)

        # float32 even if matrices are in half precision, because the layers' outputs add up in x
        x = self.embed(idx).to(self.norm.weight.dtype)        # (B, T, C)
        for block, of_layer in zip(self.blocks, places):
            n_last = tail if block is self.blocks[-1] else 0
            rest = of_layer, cache, n_last, self.probe_with
            if self.checkpoint_activations and torch.is_grad_enabled():
                x, probed = checkpoint(block, x, *rest, use_reentrant=False)
            else:
                x, probed = block(x, *rest)
            if self.probe_with:
                self.probed.append(probed)
        if cache is not None:
            cache.length += T
        return self.norm(x)

    @contextlib.contextmanager
    def probe(self, f):
        """
        Inside the `with` block, each layer calls f(layer, attention, q, k, place) with its scaled
        queries (B, H, T, D) and keys (B, n_kv_head, T, D). Yields a list of what f returned, one
        entry per layer:
        with model.probe(kernels.attention_entropy) as entropy: model(idx)
        """
        self.probe_with, self.probed = f, []
        try:
            yield self.probed
        finally:
            self.probe_with = None

    @property
    def needs_equal_lengths(self):
        """True if prompts of different lengths cannot share a pass."""
        if self.scale_sets or self.config.random_positions:
            return True
        return any(block.attn.position.needs_equal_lengths for block in self.blocks)

    @property
    def head_scale(self):
        """
        All softmax scales, (n_layer, H) float32, in units of 1 / sqrt(D). With one scale per
        channel, each entry is the mean over the channels of a head. To write it back replaces their
        scales by this mean. The setter takes a number, or an array of shape (n_layer, H) or
        (n_layer, H, D).
        """
        return torch.stack([block.attn.head_scale.detach().mean(1) for block in self.blocks])

    @head_scale.setter
    def head_scale(self, scale):
        scale = torch.as_tensor(scale, dtype=torch.float32, device=self.norm.weight.device)
        if scale.dim() < 3:
            scale = scale.expand(len(self.blocks), self.config.n_head)[..., None]
        for block, row in zip(self.blocks, scale.expand(len(self.blocks), self.config.n_head, -1)):
            block.attn.head_scale.data = row.clone()

    def n_params(self):
        """Number of weights that pretraining changes: without head scales and head gains."""
        return sum(p.numel() for name, p in self.named_parameters()
                   if not vector_of(name) or VECTORS[vector_of(name)].pretrained)

    def flops_per_token(self, length):
        """
        Forward FLOP per token in windows of `length` tokens: (matmuls, attention).
        Each weight counts 2, as in a matmul. The input embedding is a look-up and costs nothing.
        Causal attention reads length / 2 keys on average, once for q.k and once for the sum of v.
        DAPE applies all its weights to each of these keys. What other methods compute for each key,
        such as FIRE's network, is left out. Keys outside a sliding window count, because their
        scores are computed and then masked.
        """
        c, look_up = self.config, self.embed.weight.numel()
        dape = sum(p.numel() for name, p in self.named_parameters()
                   if '.position.first.' in name or '.position.second.' in name)
        weights = self.n_params() - dape - (0 if c.tied else look_up)
        return 2 * weights, (2 * c.n_layer * c.n_embd + dape) * length


# ---------------------------------------------------------------------- small vectors

def fold_scale(qkv, scale, D):
    """Fold head scales, (H, 1) or (H, D), into the rows of q. Returns the new matrix qkv."""
    factors = torch.ones(len(qkv), 1, device=qkv.device)
    factors[:len(scale) * D] = scale.expand(-1, D).reshape(-1, 1)
    return qkv * factors


def fold_gain(out, gain, D):
    """Fold head gains, (H, 1), into the columns of attention's output matrix. Returns a new one."""
    return out * gain.expand(-1, D).flatten()


# The vectors that can be tuned while every matrix stays fixed. The loop after this dict adds those
# of the position methods. When export.py writes a checkpoint for other programs, it folds a vector
# into a matrix, and `matrix` is the ending of that matrix's name. The gains of norms need no
# matrix, because the exported checkpoint has norms itself.
VECTORS = {
    'head_scale': Vector('head_scale', 1.0, rate=0.1, matrix='qkv.weight', fold=fold_scale),
    'head_gain': Vector('head_gain', 1.0, matrix='out.weight', fold=fold_gain),
    'norm': Vector('norm.weight', 1.0, 0.01, pretrained=True),
}
for method in METHODS.values():
    VECTORS |= method.vectors


def vector_of(name):
    """The key in VECTORS of the parameter with this name; None if it is not a small vector."""
    return next((key for key, vector in VECTORS.items() if name.endswith(vector.ending)), None)


def small_vectors(model):
    """{name: parameter} of all vectors in VECTORS, in the order of the model."""
    return {name: p for name, p in model.named_parameters() if vector_of(name)}


def matrices(model):
    """
    {name: weight} of the matrices that may be cast to half precision. All other weights stay
    float32: the embedding, norms, scales, short convolutions and weights of position methods. The
    embedding stays float32, because the output of every layer is added to the embedded tokens. An
    output matrix tied to the embedding also stays float32.
    """
    names = 'qkv.weight', 'out.weight', 'gate_up.weight', 'head.weight'
    return {name: p for name, p in model.named_parameters() if name.endswith(names)}
