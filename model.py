"""
A causal transformer without position encoding (NoPE), with one softmax scale per attention head.

The architecture is TinyLlama's minus the rotary embedding: RMSNorm, grouped-query attention,
SwiGLU, no biases, and an output matrix that is not tied to the embedding. With position='rope' the
model is TinyLlama itself, so a NoPE model and its RoPE twin differ only in position encoding.
position.py and position_more.py hold the position methods.

Sources: Wang et al. 2024, "Length Generalization of Causal Transformers without Position Encoding"
(arXiv:2404.12224, "the paper" in this file), and the TinyLlama code for sizes and initialization.

Shapes: B sequences, T tokens in this call, S keys (T, or more with a cache), C = n_embd,
H = n_head, D = head_dim = C / H, V = vocab_size.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from position import METHODS, Place, Settings, position_method, repeat_heads


@dataclass(kw_only=True)
class ModelConfig(Settings):
    """Sizes of a model, and the settings of its position method (the fields of Settings)."""
    vocab_size: int
    block_size: int      # tokens in a training window; experiments read longer inputs
    n_layer: int
    n_head: int
    n_kv_head: int       # key/value heads; each is shared by n_head / n_kv_head query heads
    n_embd: int
    n_hidden: int        # inner width of SwiGLU
    pretrained_length: int | None = None  # L, block_size in pretraining; None: as block_size
    tied: bool = False   # True: embedding and output share one matrix
    short_conv: int = 0  # tokens that each short convolution reads, such as 4; 0: no convolution
    norm_eps: float = 1e-5

    def __post_init__(self):
        super().__post_init__()
        self.pretrained_length = self.pretrained_length or self.block_size
        self.head_dim = self.n_embd // self.n_head
        # twice, because RoPE rotates pairs of channels
        if self.n_embd % (2 * self.n_head) or self.n_head % self.n_kv_head:
            raise ValueError(f'n_embd {self.n_embd} must be a multiple of twice n_head '
                             f'{self.n_head}, and this of n_kv_head {self.n_kv_head}.')


class Attention(nn.Module):
    """Grouped-query attention. Its softmax has one scale per head: Eq. (4) of the paper."""

    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.head_counts = [config.n_head, config.n_kv_head, config.n_kv_head]  # of q, k, v
        self.qkv = nn.Linear(config.n_embd, sum(self.head_counts) * self.head_dim, bias=False)
        self.out = nn.Linear(config.n_embd, config.n_embd, bias=False)
        # head_scale is lambda in the paper. It multiplies the scores q.k / sqrt(D) of each head;
        # tuned per channel, its shape is (H, D). head_gain multiplies the output of each head.
        # Both are always float32, because 1.6 + 0.001 is still 1.6 in bfloat16, and frozen until
        # they are tuned.
        self.head_scale = nn.Parameter(torch.ones(config.n_head, 1), requires_grad=False)
        self.head_gain = nn.Parameter(torch.ones(config.n_head, 1), requires_grad=False)
        self.position = position_method(config, layer)
        self.probe = None  # a function of (attention, q, k, place) that looks at each pass

    def forward(self, x, place, cache=None):
        """x: (B, T, C). cache: the keys and values of earlier tokens, a KVCache of generate.py."""
        B, T, C = x.shape
        # one matrix makes the heads of q, then of k, then of v: (B, H + 2 n_kv_head, T, D)
        qkv = self.qkv(x).view(B, T, -1, self.head_dim).transpose(1, 2)
        q, k, v = qkv.split(self.head_counts, dim=1)   # (B, H, T, D), k and v with n_kv_head heads
        q, k = self.position.encode(q, k, place)
        # Eq. (4): scores become head_scale_h * q.k / sqrt(D). Multiply q instead of the scores,
        # because the fused kernels of attention never show the scores.
        q = (q * self.head_scale[:, None]).to(k.dtype)
        if self.probe:
            self.probe(self, q, k, place)
        # NoPE changes no step and RoPE only steps that are done by now, so this is the whole
        # attention. With a bias, another mask or a cache, attend() of position.py does it.
        if cache is None and self.position.changed <= {'prepare', 'encode'}:
            if q.is_cuda:  # only some of its fused kernels let query heads share a key head
                k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not q.is_cuda)
        else:
            if cache is not None:
                k, v = cache.append(self.layer, k, v)        # (B, n_kv_head, S, D)
            y = self.position.attend(q, k, v, place)
        y = (y * self.head_gain[:, None]).to(y.dtype)        # (B, H, T, D)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class ShortConv(nn.Module):
    """
    A causal convolution over the last `short_conv` tokens, added to its input:
    y_t = x_t + sum_tau w_tau x_(t - tau), tau = 0 ... short_conv - 1.
    It is depthwise: each channel has its own weights. Before the first token it reads zeros.
    It tells attention which tokens come just before each token. Without it, NoPE must infer them
    from the causal mask. Source: Canon layers, arXiv:2512.17351.
    """

    def __init__(self, config, name):
        super().__init__()
        self.name = name  # the cache stores the inputs of this convolution under this name
        # Fork the random state, so that all other weights start as in a model without convolutions.
        # As a consequence the two convolutions of a layer start with the same weights.
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
    A layer: attention, then the MLP, each after a norm and added to x. Short convolutions may come
    before both.
    """

    def __init__(self, config, layer):
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.n_embd, eps=config.norm_eps)
        self.attn = Attention(config, layer)
        self.mlp_norm = nn.RMSNorm(config.n_embd, eps=config.norm_eps)
        self.mlp = SwiGLU(config)
        self.attn_conv = ShortConv(config, f'{layer}A') if config.short_conv else None
        self.mlp_conv = ShortConv(config, f'{layer}C') if config.short_conv else None

    def forward(self, x, place, cache=None):
        h = self.attn_norm(x)
        if self.attn_conv:
            h = self.attn_conv(h, cache)
        x = x + self.attn(h, place, cache)
        h = self.mlp_norm(x)
        if self.mlp_conv:
            h = self.mlp_conv(h, cache)
        return x + self.mlp(h)


class Transformer(nn.Module):
    """The whole model: embedding, blocks, norm, output matrix."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.checkpoint_activations = False  # True: backward recomputes what is inside a block
        self.scale_sets = {}  # {length: small vectors for texts of this length}: see take_set()
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = nn.RMSNorm(config.n_embd, eps=config.norm_eps)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        first = {}  # {class of a position method: its instance in the first layer that has it}
        for block in self.blocks:
            method = block.attn.position
            leader = first.setdefault(type(method), method)
            for name in method.tied:  # such as T5's table
                setattr(method, name, getattr(leader, name))

    def init_weights(self, generator=None):
        """
        TinyLlama's initialization. All matrices start small. The output matrices of attention and
        MLP start smaller in deeper models. Other weights stay as their classes made them. Returns
        the model.
        """
        C, n_layer = self.config.n_embd, self.config.n_layer
        for name, p in self.named_parameters():
            if name.endswith(('embed.weight', 'qkv.weight', 'gate_up.weight', 'head.weight')):
                nn.init.normal_(p, std=math.sqrt(2 / (5 * C)), generator=generator)
            elif name.endswith('out.weight'):
                nn.init.normal_(p, std=1 / (math.sqrt(C) * n_layer), generator=generator)
        return self

    def forward(self, idx, targets=None, cache=None, tail=0):
        """
        idx: (B, T) token ids.
        targets: (B, K), the id of the next token for each of the last K positions. With them,
        returns the loss of each target: -ln p in nats, (B, K) float32.
        Without targets, returns the logits of the last `tail` positions, (B, tail, V); 0: of all.
        With a cache (generate.py), idx continues the cached tokens.
        """
        if cache is None:
            i = torch.arange(idx.shape[1], device=idx.device)
            place = Place(i, i, total=len(i))
        else:
            place = cache.place(idx.shape[1])
        if self.scale_sets:
            self.take_set(place.total)
        places = [block.attn.position.prepare(place) for block in self.blocks]
        x = self.embed(idx)                                   # (B, T, C), float32 in bfloat16, too
        for block, its_place in zip(self.blocks, places):
            if self.checkpoint_activations and torch.is_grad_enabled():
                x = checkpoint(block, x, its_place, cache, use_reentrant=False)
            else:
                x = block(x, its_place, cache)
        x = self.norm(x)
        if cache is not None:
            cache.length += idx.shape[1]
        if targets is None:
            return self.head(x[:, -tail:])                    # [-0:] is all of them
        x = x[:, -targets.shape[1]:].flatten(0, 1)            # (B K, C)
        return token_losses(x, self.head.weight, targets.flatten()).view(targets.shape)

    def take_set(self, total):
        """
        Give the model the small vectors for a text of `total` tokens: of the scale set of this
        length, or between two lengths interpolated linearly in ln T. With sets for 128 and 512
        tokens, a text of 256 gets their mean, because ln 256 is the mean of ln 128 and ln 512. A
        text below the first or above the last length gets the nearest set.
        """
        lengths = list(self.scale_sets)  # block_size, then the tuned ones
        below = max((n for n in lengths if n <= total), default=lengths[0])
        above = min((n for n in lengths if n >= total), default=lengths[-1])
        share = math.log(total / below) / math.log(above / below) if below < above else 0
        for name, vector in self.scale_sets[below].items():
            self.get_parameter(name).data = vector.lerp(self.scale_sets[above][name], share)

    @property
    def depends_on_length(self):
        """True if it reads a token in another way when more tokens follow."""
        methods = [block.attn.position for block in self.blocks]
        return bool(self.scale_sets) or any(method.depends_on_length for method in methods)

    @property
    def head_scale(self):
        """All softmax scales in units of 1 / sqrt(D), (n_layer, H); of channels (n_layer, H, D)."""
        return torch.stack([block.attn.head_scale.detach() for block in self.blocks]).squeeze(-1)

    @head_scale.setter
    def head_scale(self, scale):
        """scale: a number, (n_layer, H) or (n_layer, H, D)."""
        scale = torch.as_tensor(scale, dtype=torch.float32, device=self.norm.weight.device)
        if scale.dim() < 3:
            scale = scale.expand(len(self.blocks), self.config.n_head)[..., None]
        for block, row in zip(self.blocks, scale):
            block.attn.head_scale.data = row.clone()

    def n_params(self):
        """Number of weights that pretraining changes: without head scales and head gains."""
        return sum(p.numel() for name, p in self.named_parameters()
                   if not name.endswith(('head_scale', 'head_gain')))


# ---------------------------------------------------------------------- loss

LOGITS_AT_ONCE = 2 ** 23  # in one chunk; a GPU takes 16 times, compiled code 64 times as many

def token_losses(x, weight, targets):
    """
    The loss -ln p of each target in nats, (N,) float32. x: (N, C), inputs of the output matrix
    `weight`, (V, C); targets: (N,) ids. Logits are made for some tokens at a time, and in training
    backward makes them again: those of 16,384 tokens and a vocabulary of 32,000 would take 2 GB.
    """
    is_compiling = torch.compiler.is_compiling()
    chunk = LOGITS_AT_ONCE * (64 if is_compiling else 16 if x.is_cuda else 1) // len(weight)
    if len(x) > chunk:
        parts = zip(x.split(chunk), targets.split(chunk))
        return torch.cat([checkpoint(token_losses, part, weight, ids, use_reentrant=False)
                          for part, ids in parts])
    logits = F.linear(x, weight).float()                      # (N, V)
    if not is_compiling:
        return F.cross_entropy(logits, targets, reduction='none')
    # The backward of cross_entropy sums over all logits once more. Without that sum, a compiled
    # training step with a vocabulary of 32,000 took 0.7 of the time on a CPU. int32, because a
    # register holds twice as many of these ids as int64.
    ids = torch.arange(len(weight), dtype=torch.int32, device=logits.device)
    return logits.logsumexp(-1) - logits.where(ids == targets[:, None].int(), 0).sum(-1)


# ---------------------------------------------------------------------- small vectors

# Kinds of vectors that tune_scale.py can tune while every matrix stays fixed, and the learning rate
# of each. Position methods add their own. All other weights are matrices, which stay fixed.
VECTORS = {'head_scale': 0.1, 'head_gain': 0.02, 'norm': 0.01}


def vector_kind(name):
    """
    Which kind of small vector the parameter of this name is, or None if it is none:
    blocks.0.attn.head_scale is a head_scale, blocks.0.attn_norm.weight a norm, and
    blocks.0.attn.position.sink a sink, because a position method lists it in `vectors`.
    """
    owner, _, kind = name.rpartition('.')
    if owner.endswith('.position'):
        return kind if any(kind in method.vectors for method in METHODS.values()) else None
    kind = 'norm' if name.endswith('norm.weight') else kind
    return kind if kind in VECTORS else None


def small_vectors(model, kind=None):
    """{name: parameter} of the model's small vectors, or only of those of one kind."""
    found = {}
    for name, p in model.named_parameters():
        own_kind = vector_kind(name)
        if own_kind and kind in (None, own_kind):
            found[name] = p
    return found
