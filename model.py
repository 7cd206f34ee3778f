"""
A causal transformer with no position encoding (NoPE), and one softmax scale per attention head.

The architecture is TinyLlama's less its rotary embedding: RMSNorm, grouped-query attention, SwiGLU, no biases,
untied output. With position='rope' it is TinyLlama itself, so the two are twins in everything else; position.py has
the other methods.
Sources: Wang et al. 2024, "Length Generalization of Causal Transformers without Position Encoding" (the paper),
and the TinyLlama code for sizes and initialisation. Plain PyTorch; of the project it imports only position.py.

Shapes: B sequences, T tokens in this call, C = n_embd, H = n_head, D = head_dim = C / H, V = vocab_size.
"""

import math
import warnings
from dataclasses import dataclass, fields

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from position import BIASES, CONTENT, DAPE, POSITIONS, QUERY_KEY, later, parse_scaling


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
    rope_length: int | None = None  # the L of its first training, where it was fine-tuned at another; None: block_size
    dape_kernel: int = 0      # DAPE on top of the position method: 1, 3, 5 ... keys wide; 0 for none
    dape_width: int = 32      # channels between its two convolutions
    dape_residual: bool = True  # add the bias itself too: Eq. (3) of DAPE V2, not (2)
    dape_cheat: bool = False  # let it see later keys (section 4.5): a warning of what a leak looks like
    tied: bool = False        # one matrix for embedding and output
    norm_eps: float = 1e-5

    def __post_init__(self):
        for field in fields(self):
            value, kind = getattr(self, field.name), field.type
            if not isinstance(value, int | float if kind is float else kind):
                kind = getattr(kind, '__name__', kind)  # int | None has no name
                raise ValueError(f'{field.name} is {value!r}; it must be of type {kind}.')
        if self.position not in POSITIONS:
            raise ValueError(f"position is '{self.position}', which is unknown. Choose one of: {', '.join(POSITIONS)}.")
        for name in ('vocab_size', 'block_size', 'n_layer', 'n_head', 'n_kv_head', 'n_embd', 'n_hidden'):
            if getattr(self, name) < 1:
                raise ValueError(f'{name} is {getattr(self, name)}; it must be at least 1.')
        if self.n_embd % self.n_head or (self.n_embd // self.n_head) % 2:
            raise ValueError(f'n_embd {self.n_embd} over n_head {self.n_head} must give an even whole head size.')
        if not 1 < self.rope_base < math.inf:
            raise ValueError(f'rope_base is {self.rope_base}; it must be above 1, such as 10000.')
        if self.n_head % self.n_kv_head:
            raise ValueError(f'n_head {self.n_head} must be a multiple of n_kv_head {self.n_kv_head}.')
        if self.dape_kernel < 0 or self.dape_kernel and self.dape_kernel % 2 == 0:
            raise ValueError(f'dape_kernel is {self.dape_kernel}; it must be odd, or 0 for no DAPE.')
        if self.dape_cheat and not self.dape_kernel:
            raise ValueError('dape_cheat is a variant of DAPE. Give a --dape_kernel=, such as 3.')
        if self.dape_width < 1:
            raise ValueError(f'dape_width is {self.dape_width}; it must be at least 1.')
        if parse_scaling(self.rope_scaling)[0] and self.position != 'rope':
            raise ValueError(f"rope_scaling {self.rope_scaling} extends RoPE, but position is '{self.position}'.")


    def least_params(self):
        """Parameters that a model of these sizes has at least: norms and positions add more."""
        C, kv = self.n_embd, self.n_embd // self.n_head * self.n_kv_head
        layer = 2 * C * (C + kv) + 3 * C * self.n_hidden
        layer += 2 * self.dape_kernel * self.dape_width * self.n_head
        return self.n_layer * layer + (1 if self.tied else 2) * self.vocab_size * C


CHUNK = 2 ** 22  # scores computed at a time, where they are computed some rows at a time; on a GPU 16 times as many


class Attention(nn.Module):
    """Grouped-query attention whose softmax has one scale per head: Eq. (4) of the paper."""

    def __init__(self, config):
        super().__init__()
        self.n_head, self.n_kv_head = config.n_head, config.n_kv_head
        self.head_dim = config.n_embd // config.n_head
        self.qkv = nn.Linear(config.n_embd, (config.n_head + 2 * config.n_kv_head) * self.head_dim, bias=False)
        self.out = nn.Linear(config.n_embd, config.n_embd, bias=False)
        # lambda of each head, on its scores q.k / sqrt(D). Always float32: 1.6 + 0.001 is still 1.6 in bfloat16. It has
        # no gradient until tune_scale.py asks for one; nor has the gain, which multiplies what the head puts out
        self.head_scale = nn.Parameter(torch.ones(config.n_head), requires_grad=False)
        self.head_gain = nn.Parameter(torch.ones(config.n_head), requires_grad=False)
        with torch.random.fork_rng(devices=[]):  # so that under one seed all else starts the same with every method
            self.bias = BIASES[config.position](config) if config.position in BIASES else None
            self.content = CONTENT[config.position](config) if config.position in CONTENT else None
            self.dape = DAPE(config, self.bias is not None) if config.dape_kernel else None

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
        B, _, T, _ = q.shape
        S = k.shape[2]
        if self.bias or self.content or self.dape:
            y = self.attend_in_rows(q, k, v, i, j)
        else:
            sees_all = T == 1 and i.dim() == 1
            mask = None if T == S or sees_all else ~later(i, j)
            y = fused_attention(q, k, v, mask, is_causal=T == S)
        y = (y * self.head_gain[:, None, None]).to(y.dtype)
        return y.transpose(1, 2).reshape(B, T, -1)

    @property
    def chunk(self):
        return CHUNK if self.out.weight.device.type == 'cpu' else 16 * CHUNK

    def attend_in_rows(self, q, k, v, i, j):
        """
        As attend(), (B, H, T, D), some query rows at a time, each chunk with no keys long after its last row. Where
        all scores are too many, backward computes each chunk again: so memory grows with T, not T^2.
        """
        def rows_of(q, k, v, i, j):
            if self.content or self.dape:
                a = self.scores(q, k, i, j).softmax(-1, dtype=torch.float32).to(v.dtype)
                return a @ v.repeat_interleave(self.n_head // self.n_kv_head, dim=1)
            bias = self.bias(i, j).masked_fill(later(i, j), -math.inf).to(q.dtype)  # 4-D, or no fused kernel takes it
            return fused_attention(q, k, v, bias)

        T, S, y = q.shape[2], k.shape[2], []
        # a matrix of scores for each sequence, as in fused_attention() in training on a CPU; a bias serves them all
        matrix = self.content or self.dape or torch.is_grad_enabled() and q.device.type == 'cpu'
        n_maps = len(q) * self.n_head if matrix else self.n_head
        again = torch.is_grad_enabled() and n_maps * T * S > 4 * self.chunk
        # the longest rows first: shorter ones then fit into the memory that they free, where a heap would grow
        for rows, end in reversed(list(self.row_chunks(T, S, n_maps))):
            parts = q[:, :, rows], k[:, :, :end], v[:, :, :end], i[..., rows], j[..., :end]
            y.append(checkpoint(rows_of, *parts, use_reentrant=False) if again else rows_of(*parts))
        return torch.cat(y[::-1], dim=2)

    def row_chunks(self, T, S, n_maps):
        """
        Cut T queries, the last of S tokens, into chunks: yields (rows, a slice, and how many keys they need). A chunk
        has at most `chunk` scores in n_maps maps, and an eighth of the rows (or 32), as early rows need no late keys.
        Keys come in whole eighths, as a convolution makes a plan for each new shape.
        """
        eighth = -(-S // 8)                                    # of the keys, rounded up
        n_rows = max(1, min(self.chunk // (n_maps * S), max(32, T // 8)))
        for start in range(0, T, n_rows):
            stop = min(start + n_rows, T)
            seen = -(-(S - T + stop) // eighth) * eighth       # keys up to row stop - 1, in whole eighths
            yield slice(start, stop), S if self.dape and self.dape.cheat else min(S, seen)

    def scores(self, q, k, i, j):
        """What softmax sees, (B, H, T, S): q.k / sqrt(D), the position method and DAPE over it, -inf at later keys."""
        k = k.repeat_interleave(self.n_head // self.n_kv_head, dim=1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)
        if self.content:
            scores = scores + self.content(scores, q, k, i, j)
        bias = self.bias(i, j) if self.bias else None
        if self.dape:
            scores = self.dape(scores, bias, i, j)
        elif bias is not None:
            scores = scores + bias
        return scores.masked_fill(later(i, j), -math.inf)

    def entropy(self, q, k):
        """
        Entropy of each query's attention, in nats, without the T x T matrix: Eq. (2) of the paper as
        H_i = ln sum_j exp(s_ij) - sum_j a_ij s_ij, where the last sum is q_i . (sum_j a_ij k_j) / sqrt(D). So one fused
        attention call with the keys as values, and its log-sum-exp, are enough. Where the scores are more than that, or
        no kernel gives its log-sum-exp, some rows of the matrix at a time; so too where a gradient
        is wanted, as the log-sum-exp of these kernels has none.
        q: (B, H, T, D) scaled queries; k: (B, n_kv_head, T, D). Returns (B, H, T) float32, between 0 and ln(i + 1).
        """
        (B, H, T, D), entropy = q.shape, []
        q, k = q.float(), k.float()  # float32: the two terms nearly cancel
        wants_gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
        more_than_qk = self.bias or self.content or self.dape
        if q.device.type in ENTROPY_KERNELS and not more_than_qk and not wants_gradient:
            mean_k, lse = ENTROPY_KERNELS[q.device.type](q, k.repeat_interleave(H // k.shape[1], dim=1))
            return (lse - (q * mean_k).sum(-1) / math.sqrt(D)).clamp(min=0)
        position = torch.arange(T, device=q.device)
        for rows, end in self.row_chunks(T, T, B * H):
            with torch.autocast(q.device.type, enabled=False):
                log_a = self.scores(q[:, :, rows], k[:, :, :end], position[rows], position[:end]).log_softmax(-1)
            finite = log_a.masked_fill(log_a.isneginf(), 0)  # as 0 ln 0 is 0
            entropy.append(-(log_a.exp() * finite).sum(-1))
        return torch.cat(entropy, dim=2).clamp(min=0)

    def forward(self, x, query_key, i, j, cache=None, layer=None, last=0, entropy=None):
        """
        x: (B, T, C). Returns (B, T, C), or (B, last, C) where only the last positions are wanted. To a list `entropy`
        adds what entropy() gives.
        """
        q, k, v = self.project(x, query_key)
        if entropy is not None:
            entropy.append(self.entropy(q, k))
        if cache is not None:
            k, v = cache.append(layer, k, v)
        return self.out(self.attend(q[:, :, -last:], k, v, i[..., -last:], j))


def fused_attention(q, k, v, mask=None, is_causal=False):
    """Softmax attention with grouped queries, (B, H, T, D). mask: (1 or B, 1 or H, T, S), to add, or what is seen."""
    few = q[..., 0].numel() * k.shape[2] <= 2 ** 26
    if q.device.type == 'cpu' and torch.is_grad_enabled() and few and (is_causal or mask is not None):
        return matrix_attention(q, k, v, mask)
    shared = q.shape[1] // k.shape[1]  # query heads of one key head
    if q.device.type == 'cuda' and shared > 1 and (mask is not None or q.dtype == torch.float32
                                                   or torch.cuda.get_device_properties(q.device).major < 8):
        # flash alone of the fused kernels shares keys, on newer GPUs, without mask or float32; otherwise PyTorch would
        # compute the whole matrix
        if q.shape[2] == 1 and mask is not None and mask.shape[1] == 1:  # heads of one key, one under the other
            groups = q.reshape(len(q), -1, shared, q.shape[3])
            # not view(): the memory-efficient kernel may return its heads transposed
            return F.scaled_dot_product_attention(groups, k, v, mask).reshape(q.shape)
        k, v = (x.repeat_interleave(shared, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal,
                                          enable_gqa=q.shape[1] != k.shape[1])


def matrix_attention(q, k, v, mask):
    """
    fused_attention() by its formula, sum_j e_ij v_j / sum_j e_ij; mask None: causal. For training on a CPU while the
    scores are few, as the fused kernel's backward is slow there: compiled, a step of bench.py's shape took 1.35 s with
    this and 1.45 s with that on two cores with AMX. Scores have the precision of q and k, as where matrices are
    multiplied one by one; the fused kernel has float32.
    """
    (B, H, T, D), (n_kv_head, S) = q.shape, k.shape[1:3]
    if mask is None:  # 128 query rows at a time, each time without the keys after the last of them
        y, i = [], torch.arange(T, dtype=torch.int32)  # twice as many to a register as of int64
        for start in range(0, T, 128):
            end = min(start + 128, T)
            seen = i[:end] <= i[start:end, None]
            y.append(matrix_attention(q[:, :, start:end], k[:, :, :end], v[:, :, :end], seen))
        return torch.cat(y, dim=2)
    scores = q.reshape(B, n_kv_head, -1, D) @ k.transpose(-1, -2)  # the queries that share a key, one under the other
    scores = scores.view(B, H, T, S).to(torch.promote_types(q.dtype, torch.float32)) * (1 / math.sqrt(D))
    if mask.dtype == torch.bool:  # to add -inf, unlike to fill it in, leaves backward nothing to do
        mask = torch.zeros(mask.shape, device=q.device).masked_fill(~mask, -math.inf)
    scores = scores + mask
    e = (scores - scores.detach().amax(-1, keepdim=True)).exp().to(v.dtype)
    y = (e.view(B, n_kv_head, -1, S) @ v).view(B, H, T, D)
    return (y / e.sum(-1, keepdim=True, dtype=scores.dtype)).to(v.dtype)


# each: q, k (B, H, T, D) float32 -> sum_j a_ij k_j, (B, H, T, D), and ln sum_j exp(s_ij), (B, H, T)
def mean_key_cpu(q, k):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, k, 0.0, True)


def mean_key_cuda(q, k):
    mean_k, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, k, None, True, 0.0, True)
    return mean_k, lse[..., :q.shape[2]]  # the kernel pads rows


ENTROPY_KERNELS = {'cpu': mean_key_cpu, 'cuda': mean_key_cuda}


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

    def forward(self, x, query_key, i, j, cache=None, layer=None, last=0, entropy=None):
        x = x[:, -last:] + self.attn(self.attn_norm(x), query_key, i, j, cache, layer, last, entropy)
        return x + self.mlp(self.mlp_norm(x))


def matrices(model):
    """
    {name: weight} of the products that half precision may do; the model may be compiled or DDP's. All else stays
    float32: vectors, and the embedding, where the sum over layers starts, with an output that is tied to it.
    """
    names = 'qkv.weight', 'out.weight', 'gate_up.weight', 'head.weight'
    return {name: p for name, p in model.named_parameters() if name.endswith(names)}


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
        # a prompt of 3 in 5 slots, then two tokens: slots 0 1 2 3 4 5 6 are positions 0 1 2 PADDING PADDING 3 4
        if self.prompt_lengths is not None:
            after = torch.where(j < self.padded, self.PADDING, j - self.padded + self.prompt_lengths)
            j = torch.where(j < self.prompt_lengths, j, after)
        return j[..., self.length:], j


class Transformer(nn.Module):
    logits_per_chunk = 2 ** 23  # the loss makes no more float32 logits than this at once: 32 MB

    def __init__(self, config):
        super().__init__()
        self.config = config
        if config.dape_cheat and config.dape_kernel:
            warnings.warn('dape_cheat: this model sees the tokens that it is to predict; its losses mean nothing',
                          stacklevel=2)
        self.checkpoint_activations = False  # True: keep only block inputs, recompute the rest in backward
        self.sets = {}  # scale sets: {tokens: {name of a parameter: its value in passes of so many tokens}}
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.RMSNorm(config.n_embd, eps=config.norm_eps)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        if config.position == 't5':
            for block in self.blocks:
                block.attn.bias = self.blocks[0].attn.bias  # one table for all layers

    def init_weights(self, generator=None):
        """TinyLlama's initialisation: small embeddings, and smaller outputs the deeper the model."""
        C, n_layer = self.config.n_embd, self.config.n_layer
        for name, p in self.named_parameters():
            if '.bias.' in name or '.content.' in name or '.dape.' in name:
                continue  # as their own papers have them
            if p.dim() == 2:
                std = 1 / (math.sqrt(C) * n_layer) if name.endswith('out.weight') else math.sqrt(2 / (5 * C))
                nn.init.normal_(p, std=std, generator=generator)
            else:
                nn.init.ones_(p)  # norms, head scales and gains
        return self

    def where(self, T, device, cache=None):
        """
        What attention needs to know of the T tokens of this pass: the change of q and k, and positions i, j. Of scale
        sets it also puts the one for this pass into the parameters.
        """
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
        """
        True where prompts of unequal length cannot share a pass: a token is read otherwise in one that will hold more
        tokens, or slots of the cache next to each other must hold tokens next to each other.
        """
        c = self.config
        return bool(self.sets) or c.rope_scaling.startswith('dynamic') or c.dape_kernel > 1

    def passes(self, T):
        """
        How to see each position of T tokens as in a pass that ends near it: [(first, end), ...], positions first to
        end - 1 being those to take from a pass over `end` tokens. One pass where there are no scale sets.
        """
        ends = [length for length in sorted(self.sets) if length < T] + [T]
        return list(zip([0, *ends], ends))

    def hidden(self, idx, cache=None, last=0, entropy=None):
        """
        idx: (B, T) token ids. Returns (B, T, C), normed and ready for the output matrix, or the last `last` positions,
        (B, last, C), which alone the last layer then computes. To a list `entropy` each layer adds its own, (B, H, T).
        """
        where = self.where(idx.shape[1], idx.device, cache)
        x = self.embed(idx).to(self.norm.weight.dtype)  # (B, T, C), float32 even where matrices are in half precision
        for layer, block in enumerate(self.blocks):
            if self.checkpoint_activations and torch.is_grad_enabled():
                x = checkpoint(block, x, *where, use_reentrant=False)
            else:
                x = block(x, *where, cache, layer, last if block is self.blocks[-1] else 0, entropy)
        if cache:
            cache.length += idx.shape[1]
        return self.norm(x)

    def forward(self, idx, targets=None, last=0, cache=None):
        """
        idx: (B, T) token ids; cache: from new_cache(), idx then continues it.
        Without targets: logits of the last `last` positions (0: all), (B, last, V).
        With targets (B, K), the tokens that follow the last K positions: their losses in nats, (B, K) float32.
        """
        K = targets.shape[1] if targets is not None else last  # 0: all, as [:, -0:] is everything
        x = self.hidden(idx, cache, K if K < idx.shape[1] else 0)[:, -K:]
        return self.head(x) if targets is None else self.losses(x, targets)

    def losses(self, x, targets):
        """Cross-entropy -ln p(target), (B, K) float32, in chunks: float32 logits of a whole batch never exist."""
        def chunk_losses(x, targets):
            return F.cross_entropy(self.head(x).float(), targets, reduction='none')

        if torch.compiler.is_compiling() and torch.is_autocast_enabled(x.device.type):
            # the logits stay in half precision, float32 is only in registers. Not F.cross_entropy, whose backward sums
            # over all of them once more; int32, as a register holds twice as many
            logits = self.head(x).float()
            at_target = torch.arange(logits.shape[-1], dtype=torch.int32, device=x.device) == targets[..., None].int()
            return logits.logsumexp(-1) - logits.where(at_target, 0).sum(-1)
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
        Losses (B, T) and attention entropy (n_layer, B, H, T), both in nats, float32, each position as in the pass that
        ends nearest after it: passes(). idx, targets: (B, T).
        """
        losses, entropy = [], []
        for first, end in self.passes(idx.shape[1]):
            of_layers = []
            x = self.hidden(idx[:, :end], entropy=of_layers)
            losses.append(self.losses(x[:, first:], targets[:, first:end]))
            entropy.append(torch.stack(of_layers)[..., first:])
        return torch.cat(losses, dim=1), torch.cat(entropy, dim=-1)

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
        embedding being a look-up; causal attention reads length / 2 keys on average, for q.k and for the sum of v, and
        for each of them DAPE multiplies with all its weights.
        """
        c = self.config
        look_up = 0 if c.tied else self.embed.weight.numel()
        dape = sum(p.numel() for block in self.blocks if block.attn.dape for p in block.attn.dape.parameters())
        return 2 * (self.n_params() - look_up - dape), (2 * c.n_layer * c.n_embd + dape) * length
