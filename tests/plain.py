"""
The whole transformer and every position method a second time: in float64, with the whole matrix of
scores, from the formulas of the papers. Tests compare the project with it.
"""

import copy
import math

import torch
import torch.nn.functional as F

from position import Place, random_places

# ---------------------------------------------------------------------- the plain transformer

def plain_transformer(model, idx, head_scale=None):
    """
    The architecture written a second time, in float64, with the whole matrix of scores.
    idx: (B, T) ids; head_scale: (n_layer, n_head), the model's own by default. Returns logits
    (B, T, V) and attention weights (n_layer, B, H, T, T).
    """
    state = {name: weight.detach().double() for name, weight in model.state_dict().items()}
    scales = model.head_scale if head_scale is None else head_scale
    scales = torch.as_tensor(scales, dtype=torch.float64)
    i = torch.arange(idx.shape[1])
    x, attention = state['embed.weight'][idx], []
    places = [Place(i, i, len(i))] * model.config.n_layer
    if model.config.random_positions:
        places = random_places(places[0], model.draws)
    for layer, place in enumerate(places):
        c = copy.copy(model.config)
        c.position, c.positions = c.method_of(layer), place.i.double()
        own = {}
        for name, weight in state.items():
            name = name.removeprefix(f'blocks.{layer}.').removeprefix('attn.')
            own[name.replace('position.method.', 'position.')] = weight

        y = plain_conv(plain_norm(c, x, own['attn_norm.weight']), own.get('attn_conv.w'))
        y, weights = plain_attention(c, own, y, scales[layer])
        attention.append(weights)
        x = x + y
        y = plain_conv(plain_norm(c, x, own['mlp_norm.weight']), own.get('mlp_conv.w'))
        gate, up = (y @ own['mlp.gate_up.weight'].T).chunk(2, dim=-1)
        x = x + (gate * gate.sigmoid() * up) @ own['mlp.out.weight'].T
    return plain_norm(c, x, state['norm.weight']) @ state['head.weight'].T, torch.stack(attention)


def plain_norm(c, x, gain):
    return x / (x.pow(2).mean(-1, keepdim=True) + c.norm_eps).sqrt() * gain


def plain_conv(x, w):
    """x_t + sum_tau w_tau x_(t - tau). x: (B, T, C); w: (taps, C), or None for no convolution."""
    if w is None:
        return x
    return x + sum(w[tau] * F.pad(x, (0, 0, tau, 0))[:, :x.shape[1]] for tau in range(len(w)))


def plain_attention(c, own, x, head_scale):
    """
    One layer's attention. c: the config, with the layer's own method and the tokens' positions;
    own: the layer's parameters in float64; x: (B, T, C), normed. Returns (B, T, C) and the weights
    (B, H, T, T).
    """
    H, K = c.n_head, c.n_kv_head
    y = (x @ own['qkv.weight'].T).unflatten(-1, (-1, c.head_dim)).transpose(1, 2)
    q, k, v = y.split([H, K, K], dim=1)
    shared = [h * K // H for h in range(H)]  # the key head of each query head
    q = plain_turn(c, q) * head_scale.view(H, 1, -1)
    k, v = plain_turn(c, k)[:, shared], v[:, shared]

    scores = plain_position(c, own, q @ k.mT / math.sqrt(c.head_dim), q, k)
    e = scores.masked_fill(plain_hidden(c), -math.inf).exp()
    sink = own['position.sink'].exp()[:, None] if c.position == 'sink' else 0
    weights = e / (e.sum(-1, keepdim=True) + sink)
    y = weights @ v * own['head_gain'][:, None]
    return y.transpose(1, 2).flatten(2) @ own['out.weight'].T, weights


def plain_hidden(c):
    """The keys that each query does not see, (T, T)."""
    i = torch.arange(len(c.positions))
    window, sinks = len(i), 0
    if c.position == 'rope' and c.rope_window:
        window = c.rope_window
    if c.position == 'window':
        window, sinks = c.block_size, 4
    return (i > i[:, None]) | (i <= i[:, None] - window) & (i >= sinks)


def plain_turn(c, x):
    """RoPE in complex numbers: (x[n] + i x[n + D/2]) times e^(i angle)."""
    if c.position != 'rope':
        return x
    D = c.head_dim
    frequency = c.rope_base ** -(torch.arange(0, D, 2).double() / D)
    frequency[round(c.rope_share * D / 2):] = 0
    turned = torch.complex(*x.chunk(2, -1)) * torch.exp(1j * c.positions[:, None] * frequency)
    return torch.cat((turned.real, turned.imag), dim=-1)


def plain_entropy(model, idx, head_scale=None):
    """The entropy of each query's attention, in nats: (n_layer, B, H, T) float64."""
    p = plain_transformer(model, idx, head_scale)[1]
    p = p / p.sum(-1, keepdim=True)
    return -(p * p.clamp(min=1e-300).log()).sum(-1)  # torch's entr() has no gradient at 0


def plain_losses(model, tokens, head_scale=None):
    """The loss of each token after the first, (B, T) float64, in nats. tokens: (B, T + 1) ids."""
    logits, _ = plain_transformer(model, tokens[:, :-1], head_scale)
    return -logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


def plain_cut(model, tokens, T, tail, head_scale=None):
    """
    The losses of the `tail` targets up to position T, (B, tail). Each block of L / 8 targets is
    read from the L tokens before its end. tokens: (B, T + 1) ids or more.
    """
    L, blocks = model.config.L0, []
    for end in range(T - tail + L // 8, T + 1, L // 8):
        piece = tokens[:, max(0, end - L):end + 1]
        blocks.append(plain_losses(model, piece, head_scale)[:, -L // 8:])
    return torch.cat(blocks, dim=1)


# ---------------------------------------------------------------------- plain position methods
# From the papers' formulas. A new method needs an entry in PLAIN_BIASES, PLAIN_FACTORS or
# PLAIN_SCORES.

def plain_nape(c, own, d):
    return -d * torch.tensor([1, 1 / 2, 0, 0])[:, None, None]


def plain_kerple(c, own, d):
    p, a = (own[f'position.{name}'][:, None, None] for name in 'pa')
    return -p * (1 + a * d).log()


def plain_fire(c, own, d):
    longest = c.positions.clamp(min=abs(own['position.mu'].item()) * (c.block_size // 2))[:, None]
    log_d, log_longest = ((1 + own['position.c'] * x).log() for x in (d, longest))
    x = (log_d / (log_longest + 1e-6))[..., None]
    hidden = torch.relu(x @ own['position.f.0.weight'].T + own['position.f.0.bias'])
    return (hidden @ own['position.f.2.weight'].T + own['position.f.2.bias']).movedim(-1, 0)


def plain_t5(c, own, d):
    wide = 16 + ((d / 16).log() / math.log(8) * 16).floor()
    bucket = torch.where(d < 16, d, wide.clamp(max=31)).long()
    return math.sqrt(c.head_dim) * own['position.table'][bucket].movedim(-1, 0)


def plain_one(c, own, n):
    return n ** 0


def plain_ssmax(c, own, n):
    return own['position.s'][:, None] * n.log()


def plain_logbeta(c, own, n):
    beta, gamma = own['position.beta'][:, None], own['position.gamma'][:, None]
    return 1 + beta * (n + 1).log() ** gamma


def plain_adaptive(c, own, scores, q, k):
    a = scores.masked_fill(plain_hidden(c), -math.inf).softmax(-1)
    H = torch.special.entr(a).sum(-1, keepdim=True)
    P = -0.037 * H ** 4 + 0.481 * H ** 3 - 2.3 * H ** 2 + 4.917 * H - 1.791
    return scores * torch.where(H > 0.5, P.clamp(min=1), 1)


def plain_cope(c, own, scores, q, k):
    changed, at_count = scores.clone(), q @ own['position.e'].T
    gates = scores.sigmoid().tril()
    for j in range(scores.shape[-1]):
        count = gates[..., j:].sum(-1, keepdim=True).clamp(max=63)  # keys from j to the query's own
        low, high = (at_count.gather(-1, n.long()) for n in (count.floor(), count.ceil()))
        changed[..., j:j + 1] += low + count.frac() * (high - low)
    return changed


def plain_xl(c, own, scores, q, k):
    i = torch.arange(scores.shape[-1])
    angle = i[:, None] * torch.tensor([10000 ** (-n / c.n_embd) for n in range(0, c.n_embd, 2)])
    r = torch.cat((angle.sin(), angle.cos()), dim=-1).double() @ own['position.W.weight'].T
    r = r.unflatten(-1, (-1, c.head_dim))[(i[:, None] - i).clamp(min=0)]  # (T, T, H, D)
    by_place = torch.einsum('bhid,ijhd->bhij', q + own['position.v'][:, None], r)
    by_key = torch.einsum('bhjd,hd->bhj', k, own['position.u'])[:, :, None]
    return scores + (by_place + by_key) / math.sqrt(c.head_dim)


# A bias (H, T, T) from the distances d, (T, T). ALiBi's and NAPE's slopes are those of 4 heads.
PLAIN_BIASES = {
    'alibi': lambda c, own, d: -d * 4.0 ** -torch.arange(1, 5)[:, None, None],
    'nape': plain_nape,
    'nape_ssmax': plain_nape,
    'kerple': plain_kerple,
    'fire': plain_fire,
    't5': plain_t5,
}

# A factor on the scores of each query, (T,) or (H, T), from the number n of keys that it sees, (T,)
PLAIN_FACTORS = {
    'none': plain_one,
    'rope': plain_one,    # see plain_turn()
    'window': plain_one,  # see plain_hidden()
    'sink': plain_one,    # see plain_attention()
    'logn': lambda c, own, n: n.log() / math.log(c.block_size),
    'ssmax': plain_ssmax,
    'logbeta': plain_logbeta,
    'llama4': lambda c, own, n: 1 + 0.1 * (1 + n // c.block_size).log(),
    'nape_ssmax': lambda c, own, n: torch.cat((n.expand(2, -1) ** 0, plain_ssmax(c, own, n))),
}

# New scores (B, H, T, T)
PLAIN_SCORES = {'adaptive': plain_adaptive, 'cope': plain_cope, 'xl': plain_xl}


def plain_position(c, own, scores, q, k):
    """Scores (B, H, T, T) as a position method and DAPE change them. q, k: (B, H, T, D)."""
    if c.position in PLAIN_FACTORS:
        n = torch.arange(1, scores.shape[-1] + 1).double()
        scores = scores * PLAIN_FACTORS[c.position](c, own, n)[..., None]
    if c.position in PLAIN_SCORES:
        scores = PLAIN_SCORES[c.position](c, own, scores, q, k)
    bias, maps = 0, scores
    if c.position in PLAIN_BIASES:
        distances = (c.positions[:, None] - c.positions).clamp(min=0)
        bias = PLAIN_BIASES[c.position](c, own, distances)
        maps = torch.cat((scores, bias.expand(scores.shape)), dim=1)
    if c.dape_kernel:
        scores = scores + plain_dape(c, own, maps.masked_fill(plain_hidden(c), 0))
    return scores + bias if c.dape_residual or not c.dape_kernel else scores


def plain_dape(c, own, maps):
    """DAPE's two convolutions of each row over the keys. maps: (B, H or 2H, T, T), 0 if hidden."""
    first, second = ((own[f'position.{name}.weight'][:, :, 0], own[f'position.{name}.bias'])
                     for name in ('first', 'second'))
    rows, p = maps.transpose(1, 2), c.dape_kernel // 2
    middle = F.conv1d(F.pad(rows.flatten(0, 1), (p, 2 * p)), *first)  # from key 0 to key T - 1 + p
    y = F.conv1d(F.pad(F.leaky_relu(middle, 0.01), (p, 0)), *second)
    return y.unflatten(0, rows.shape[:2]).transpose(1, 2)
