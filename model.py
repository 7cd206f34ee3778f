"""
A causal transformer with no position encoding (NoPE), and one softmax scale per attention head.

The architecture is TinyLlama's less its rotary embedding: RMSNorm, grouped-query attention, SwiGLU, no biases,
untied output. With position='rope' it is TinyLlama itself, so the two are twins in everything else; position.py has
the other methods.
Sources: Wang et al. 2024, "Length Generalization of Causal Transformers without Position Encoding" (the paper),
and the TinyLlama code for sizes and initialisation. Plain PyTorch; of the project it imports only position.py.

Shapes: B sequences, T tokens in this call, C = n_embd, H = n_head, D = head_dim = C / H, V = vocab_size.
"""

import contextlib
import math
import warnings
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from position import BIASES, POSITIONS, QUERY_KEY, parse_scaling


@dataclass
class ModelConfig:
    vocab_size: int
    block_size: int           # L: tokens in a training window; a longer input is what the project studies
    n_layer: int
    n_head: int
    n_kv_head: int            # key/value heads; each serves n_head / n_kv_head query heads
    n_embd: int
    n_hidden: int             # inner width of SwiGLU
    position: str = 'none'    # a name in position.py
    rope_base: float = 10000.0
    rope_scaling: str = ''    # extension of RoPE, such as yarn:4
    rope_length: int | None = None  # the L that the extension starts from; None: block_size
    tied: bool = False        # one matrix for embedding and output
    norm_eps: float = 1e-5

    def __post_init__(self):
        if self.position not in POSITIONS:
            raise ValueError(f"position is '{self.position}', which is unknown. Choose one of: {', '.join(POSITIONS)}.")
        for name in ('vocab_size', 'block_size', 'n_layer', 'n_head', 'n_kv_head', 'n_embd', 'n_hidden'):
            if getattr(self, name) < 1:
                raise ValueError(f'{name} is {getattr(self, name)}; it must be at least 1.')
        if self.n_embd % self.n_head or (self.n_embd // self.n_head) % 2:
            raise ValueError(f'n_embd {self.n_embd} over n_head {self.n_head} must give an even whole head size.')
        if self.n_head % self.n_kv_head:
            raise ValueError(f'n_head {self.n_head} must be a multiple of n_kv_head {self.n_kv_head}.')
        if parse_scaling(self.rope_scaling)[0] and self.position != 'rope':
            raise ValueError(f"rope_scaling {self.rope_scaling} extends RoPE, but position is '{self.position}'.")


class Attention(nn.Module):
    """Grouped-query attention whose softmax has one scale per head: Eq. (4) of the paper."""

    def __init__(self, config):
        super().__init__()
        self.n_head, self.n_kv_head = config.n_head, config.n_kv_head
        self.head_dim = config.n_embd // config.n_head
        self.qkv = nn.Linear(config.n_embd, (config.n_head + 2 * config.n_kv_head) * self.head_dim, bias=False)
        self.out = nn.Linear(config.n_embd, config.n_embd, bias=False)
        # units of 1 / sqrt(D). Always float32: 1.6 + 0.001 is still 1.6 in bfloat16. Frozen until tune_scale.py
        self.head_scale = nn.Parameter(torch.ones(config.n_head), requires_grad=False)
        self.head_gain = nn.Parameter(torch.ones(config.n_head), requires_grad=False)  # on the head's output, as frozen
        self.bias = BIASES[config.position](config) if config.position in BIASES else None

    def project(self, x, query_key):
        """x: (B, T, C). Returns scaled queries (B, H, T, D), and keys and values (B, n_kv_head, T, D)."""
        B, T, _ = x.shape
        heads = self.qkv(x).view(B, T, -1, self.head_dim).transpose(1, 2)        # (B, H + 2 n_kv_head, T, D)
        q, k, v = heads.split([self.n_head, self.n_kv_head, self.n_kv_head], dim=1)
        q, k = query_key(q, k)
        # Eq. (4): scores become head_scale_h * q.k / sqrt(D). Scaling q, not the scores, keeps every fused kernel
        q = (q * self.head_scale[:, None, None]).to(k.dtype)
        return q, k, v

    def attend(self, q, k, v, i, j):
        """
        Softmax attention over the keys that are not later than the query. i, j: positions of the T queries and S keys,
        (T,) and (S,), or (B, T) and (B, S) where they differ between sequences. Returns (B, T, C).
        """
        B, H, T, _ = q.shape
        S = k.shape[2]
        # training on a CPU, while the scores are few the T x T matrix is faster than the fused kernel's slow backward
        plain = q.device.type == 'cpu' and torch.is_grad_enabled() and B * H * T * S <= 2 ** 25
        with sdpa_kernel(SDPBackend.MATH) if plain else contextlib.nullcontext():
            if self.bias is not None:
                y = self.attend_with_bias(q, k, v, i, j)
            else:
                sees_all = T == 1 and i.dim() == 1
                mask = None if T == S or sees_all else (j[..., None, None, :] <= i[..., None, :, None])
                y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=T == S,
                                                   enable_gqa=self.n_head != self.n_kv_head)
        y = (y * self.head_gain[:, None, None]).to(y.dtype)
        return y.transpose(1, 2).reshape(B, T, -1)

    def attend_with_bias(self, q, k, v, i, j):
        """As attend(), (B, H, T, D), in chunks of rows: no mask of H x T x S, and no keys after a chunk's last row."""
        y = []
        for rows, end in row_chunks(q.shape[2], k.shape[2], self.n_head):
            bias = masked(self.bias(i[..., rows], j[..., :end]), i[..., rows], j[..., :end]).to(q.dtype)
            bias = bias if bias.dim() == 4 else bias[None]  # or no fused kernel takes it
            y.append(F.scaled_dot_product_attention(q[:, :, rows], k[:, :, :end], v[:, :, :end], attn_mask=bias,
                                                    enable_gqa=self.n_head != self.n_kv_head))
        return torch.cat(y, dim=2)

    def forward(self, x, query_key, i, j, cache=None, layer=None):
        q, k, v = self.project(x, query_key)
        if cache is not None:
            k, v = cache.append(layer, k, v)
        return self.out(self.attend(q, k, v, i, j))


def row_chunks(T, S, n_head):
    """
    Cut T queries, the last of S tokens, into chunks with at most 2^24 scores. Yields the rows of a chunk, a slice, and
    the number of keys up to its last row.
    """
    n_rows = max(1, 2 ** 24 // (n_head * S))
    for start in range(0, T, n_rows):
        stop = min(start + n_rows, T)
        yield slice(start, stop), S - T + stop


def masked(scores, i, j):
    """scores: (..., T, S) of queries at positions i on keys at j, those later than the query being -inf."""
    return scores.masked_fill(j[..., None, None, :] > i[..., None, :, None], -math.inf)


def attention_entropy(q, k, bias=None):
    """
    Entropy of each query's attention, in nats, without the T x T matrix: Eq. (2) of the paper as
    H_i = ln sum_j exp(s_ij) - sum_j a_ij s_ij, where the last sum is q_i . (sum_j a_ij k_j) / sqrt(D). So one fused
    attention call with the keys as values, and its log-sum-exp, are enough. With a bias, some rows of it at a time.
    q: (B, H, T, D) scaled queries; k: (B, n_kv_head, T, D). Returns (B, H, T) float32, between 0 and ln(i + 1).
    """
    H, D = q.shape[1], q.shape[3]
    q, k = q.float(), k.float().repeat_interleave(H // k.shape[1], dim=1)  # float32: the two terms nearly cancel
    if bias is not None or q.device.type not in ENTROPY_KERNELS:
        return entropy_in_chunks(q, k, bias)
    mean_k, lse = ENTROPY_KERNELS[q.device.type](q, k)
    return (lse - (q * mean_k).sum(-1) / math.sqrt(D)).clamp(min=0)


# each: q, k (B, H, T, D) float32 -> sum_j a_ij k_j, (B, H, T, D), and ln sum_j exp(s_ij), (B, H, T)
def mean_key_cpu(q, k):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, k, 0.0, True)


def mean_key_cuda(q, k):
    mean_k, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, k, None, True, 0.0, True)
    return mean_k, lse[..., :q.shape[2]]  # the kernel pads rows


ENTROPY_KERNELS = {'cpu': mean_key_cpu, 'cuda': mean_key_cuda}


def entropy_in_chunks(q, k, bias):
    """Entropy where there is a bias, or no fused kernel that gives its log-sum-exp. q, k: (B, H, T, D) float32."""
    (B, H, T, D), position, entropy = q.shape, torch.arange(q.shape[2], device=q.device), []
    for rows, end in row_chunks(T, T, B * H):
        i, j = position[rows], position[:end]
        with torch.autocast(q.device.type, enabled=False):
            scores = q[:, :, rows] @ k[:, :, :end].transpose(-1, -2) / math.sqrt(D)
        log_a = masked(scores if bias is None else scores + bias(i, j), i, j).log_softmax(-1)
        entropy.append(-(log_a.exp() * log_a.clamp(min=torch.finfo(log_a.dtype).min)).sum(-1))  # 0 ln 0 is 0
    return torch.cat(entropy, dim=2).clamp(min=0)


class SwiGLU(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_up = nn.Linear(config.n_embd, 2 * config.n_hidden, bias=False)  # two matrices, one product
        self.out = nn.Linear(config.n_hidden, config.n_embd, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.out(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.n_embd, eps=config.norm_eps)
        self.attn = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.n_embd, eps=config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x, *where):
        x = x + self.attn(self.attn_norm(x), *where)
        return x + self.mlp(self.mlp_norm(x))


class KVCache:
    """
    Keys and values of the tokens read so far, in each layer (B, n_kv_head, max_length, D), for a pass that will hold
    max_length tokens.
    """
    PADDING = 2 ** 30  # the position of padding: later than any query, so that none sees it

    def __init__(self, n_layer, shape, device, dtype):
        self.k = [torch.empty(shape, device=device, dtype=dtype) for _ in range(n_layer)]
        self.v = [torch.empty(shape, device=device, dtype=dtype) for _ in range(n_layer)]
        self.length, self.max_length = 0, shape[2]  # slots used, slots
        self.prompt_lengths = self.padded = None

    def append(self, layer, k, v):
        end = self.length + k.shape[2]
        if end > self.max_length:
            raise ValueError(f'the KV cache holds {self.max_length} tokens but {end} are needed. Make it longer.')
        self.k[layer][:, :, self.length:end] = k
        self.v[layer][:, :, self.length:end] = v
        return self.k[layer][:, :, :end], self.v[layer][:, :, :end]

    def set_prompt_lengths(self, lengths):
        """After prompts of unequal length, padded on the right, were read: how many tokens of each are real, (B,)."""
        self.prompt_lengths, self.padded = lengths[:, None], self.length

    def repeat(self, n):
        """Each sequence n times, one copy after the other."""
        self.k, self.v = ([x.repeat_interleave(n, dim=0) for x in layers] for layers in (self.k, self.v))
        if self.prompt_lengths is not None:
            self.prompt_lengths = self.prompt_lengths.repeat_interleave(n, dim=0)

    def reorder(self, source, start):
        """Sequence b becomes a copy of source[b] from slot `start` on; before that both must be the same."""
        for x in (*self.k, *self.v):
            x[:, :, start:self.length] = x[source, :, start:self.length]

    def positions(self, T, device):
        """Positions of the next T tokens and of all keys with them: (T,), (S,), or by sequence (B, T), (B, S)."""
        j = torch.arange(self.length + T, device=device)
        if self.prompt_lengths is not None:
            after = torch.where(j < self.padded, self.PADDING, j - self.padded + self.prompt_lengths)
            j = torch.where(j < self.prompt_lengths, j, after)
        return j[..., self.length:], j


class Transformer(nn.Module):
    logits_per_chunk = 2 ** 26  # the loss never holds more logits than this at once: 256 MB in float32

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.checkpoint_activations = False  # True: keep only block inputs, recompute the rest in backward
        self.sets = {}  # scale sets: {tokens: {name of a parameter: its value in passes of so many tokens}}
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.RMSNorm(config.n_embd, eps=config.norm_eps)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight

    def init_weights(self, generator=None):
        """TinyLlama's initialisation: small embeddings, and smaller outputs the deeper the model."""
        C, n_layer = self.config.n_embd, self.config.n_layer
        for name, p in self.named_parameters():
            if p.dim() == 2:
                std = 1 / (math.sqrt(C) * n_layer) if name.endswith('out.weight') else math.sqrt(2 / (5 * C))
                nn.init.normal_(p, std=std, generator=generator)
            else:
                nn.init.ones_(p)  # norms, head scales and gains
        return self

    def where(self, T, device, cache=None):
        """What attention needs to know of the T tokens of this pass: the change of q and k, and positions i, j."""
        i, j = cache.positions(T, device) if cache else [torch.arange(T, device=device)] * 2
        total = cache.max_length if cache else T
        if self.sets:
            self.use_set(total)
        return QUERY_KEY.get(self.config.position, QUERY_KEY['none'])(self.config, i, total), i, j

    @torch.no_grad()
    def use_set(self, total):
        """Take the vectors tuned for passes of `total` tokens: between two lengths linear in ln T, then the last."""
        lengths = sorted(self.sets)
        if total > lengths[-1]:
            warnings.warn(f'no scales for more than {lengths[-1]} tokens: those serve beyond, too', stacklevel=2)
        total = min(max(total, lengths[0]), lengths[-1])
        after = next(length for length in lengths if length >= total)
        before = max((length for length in lengths if length < after), default=after)
        share = math.log(total / before) / math.log(after / before) if before < after else 1.0
        for name, vector in self.sets[after].items():
            self.get_parameter(name).copy_(vector if share == 1 else torch.lerp(self.sets[before][name], vector, share))

    @property
    def length_matters(self):
        """True where a token is read otherwise in a pass that will hold more tokens."""
        return bool(self.sets) or self.config.rope_scaling.startswith('dynamic')

    def passes(self, T):
        """
        How to see each position of T tokens as in a pass that ends near it: [(first, end), ...], positions first to
        end - 1 being those to take from a pass over `end` tokens. One pass where there are no scale sets.
        """
        ends = [length for length in sorted(self.sets) if length < T] + [T]
        return list(zip([0, *ends], ends))

    def hidden(self, idx, cache=None):
        """idx: (B, T) token ids. Returns (B, T, C), normed and ready for the output matrix."""
        where = self.where(idx.shape[1], idx.device, cache)
        x = self.embed(idx).to(self.norm.weight.dtype)  # (B, T, C), float32 even where matrices are in half precision
        for layer, block in enumerate(self.blocks):
            if self.checkpoint_activations and torch.is_grad_enabled():
                x = checkpoint(block, x, *where, use_reentrant=False)
            else:
                x = block(x, *where, cache, layer)
        if cache:
            cache.length += idx.shape[1]
        return self.norm(x)

    def forward(self, idx, targets=None, last=None, cache=None):
        """
        idx: (B, T) token ids; cache: from new_cache(), idx then continues it.
        Without targets: logits of the last `last` positions (None: all), (B, last, V).
        With targets (B, K), the tokens that follow the last K positions: their losses in nats, (B, K) float32.
        """
        K = last if targets is None else targets.shape[1]
        x = self.hidden(idx, cache)
        x = x if K is None else x[:, -K:]
        return self.head(x) if targets is None else self.losses(x, targets)

    def losses(self, x, targets):
        """Cross-entropy -ln p(target), (B, K) float32, in chunks: float32 logits of a whole batch never exist."""
        def chunk_losses(x, targets):
            return F.cross_entropy(self.head(x).float(), targets, reduction='none')

        rows = max(1, self.logits_per_chunk // self.config.vocab_size)
        chunks = list(zip(x.flatten(0, 1).split(rows), targets.flatten().split(rows)))
        if len(chunks) > 1 and torch.is_grad_enabled():  # backward computes each chunk's logits again
            losses = [checkpoint(chunk_losses, *chunk, use_reentrant=False) for chunk in chunks]
        else:
            losses = [chunk_losses(*chunk) for chunk in chunks]
        return torch.cat(losses).view(targets.shape)

    @torch.no_grad()
    def losses_and_entropy(self, idx, targets):
        """
        One pass that also measures each head. idx, targets: (B, T).
        Returns losses (B, T) and attention entropy (n_layer, B, H, T), both in nats, float32.
        """
        x, entropy = self.embed(idx).to(self.norm.weight.dtype), []
        query_key, i, j = self.where(idx.shape[1], idx.device)
        for block in self.blocks:
            q, k, v = block.attn.project(block.attn_norm(x), query_key)
            entropy.append(attention_entropy(q, k, block.attn.bias))
            x = x + block.attn.out(block.attn.attend(q, k, v, i, j))
            x = x + block.mlp(block.mlp_norm(x))
        return self.losses(self.norm(x), targets), torch.stack(entropy)

    def new_cache(self, batch_size, max_length, dtype=None):
        """A cache for `batch_size` sequences of up to `max_length` tokens."""
        config, weight = self.config, self.head.weight
        shape = (batch_size, config.n_kv_head, max_length, config.n_embd // config.n_head)
        return KVCache(len(self.blocks), shape, weight.device, dtype or weight.dtype)

    @property
    def head_scale(self):
        """All softmax scales, (n_layer, n_head) float32, in units of 1 / sqrt(D). Assign a number or an array."""
        return torch.stack([block.attn.head_scale.detach() for block in self.blocks])

    @head_scale.setter
    def head_scale(self, scale):
        scale = torch.as_tensor(scale, dtype=torch.float32).expand(len(self.blocks), self.config.n_head)
        for block, row in zip(self.blocks, scale):
            block.attn.head_scale.data.copy_(row)

    def n_params(self):
        """Number of weights, head scales and gains left out."""
        return sum(p.numel() for name, p in self.named_parameters() if not name.endswith(('head_scale', 'head_gain')))

    def flops_per_token(self, length):
        """
        Forward FLOP per token in windows of `length` tokens: (matmuls, attention). 2 per matmul weight, the input
        embedding being a look-up; causal attention reads length / 2 keys on average, for q.k and for the sum of v.
        """
        c = self.config
        look_up = 0 if c.tied else self.embed.weight.numel()
        return 2 * (self.n_params() - look_up), 2 * c.n_layer * c.n_embd * length
