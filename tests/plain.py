"""
The whole transformer and every position method a second time: in float64 and NumPy, one text at a
time, with the whole matrix of scores, by the formulas of the papers. It imports nothing of the
project.

Shapes: T tokens, C channels, H heads, D = head size, V = vocabulary. c: the model's config; own:
{name: weight} of a part of the model; at: the positions of the tokens, (T,).
"""

import math

import numpy as np


def weights_of(module):
    return {name: weight.double().numpy() for name, weight in module.state_dict().items()}


# ---------------------------------------------------------------------- whole model

def plain_transformer(model, ids, head_scale=None):
    """
    ids: (B, T). head_scale: (n_layer, H) or (n_layer, H, D), the model's own by default. Returns
    logits, (B, T, V), and attention weights, (B, n_layer, H, T, T).
    """
    scales = np.asarray(model.head_scale if head_scale is None else head_scale, float)
    texts = [plain_text(model, row, scales) for row in np.asarray(ids)]
    return [np.stack(parts) for parts in zip(*texts)]


def plain_text(model, ids, scales):
    c, own, attention = model.config, weights_of(model), []
    x = own['embed.weight'][ids]
    for layer, block in enumerate(model.blocks):
        its = weights_of(block)
        y = plain_conv(plain_norm(c, x, its['attn_norm.weight']), its.get('attn_conv.w'))
        method = c.methods[layer % len(c.methods)]
        y, weights = plain_attention(c, method, block.attn, y, scales[layer])
        attention.append(weights)
        x = x + y
        y = plain_conv(plain_norm(c, x, its['mlp_norm.weight']), its.get('mlp_conv.w'))
        gate, up = np.split(y @ its['mlp.gate_up.weight'].T, 2, axis=-1)
        x = x + (gate * sigmoid(gate) * up) @ its['mlp.out.weight'].T
    return plain_norm(c, x, own['norm.weight']) @ own['head.weight'].T, attention


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def plain_norm(c, x, gain):
    return x / np.sqrt((x ** 2).mean(-1, keepdims=True) + c.norm_eps) * gain


def plain_conv(x, w):
    """y_t = x_t + sum_tau w_tau x_(t - tau). x: (T, C); w: (taps, C), or None."""
    y = x.copy()
    for tau in range(0 if w is None else len(w)):
        y[tau:] += w[tau] * x[:len(x) - tau]
    return y


def plain_attention(c, method, attn, x, scale):
    """x: (T, C), normed; scale: (H,) or (H, D). Returns (T, C) and the weights, (H, T, T)."""
    own, H, K, T, D = weights_of(attn), c.n_head, c.n_kv_head, len(x), c.head_dim
    at = np.arange(T)
    if method == 'rope_random':  # the places of the T largest draws
        at = np.sort(np.argsort(-attn.position.draws.numpy())[:T])
    d = at[:, None] - at
    hidden = d < 0
    if method == 'window':
        hidden = hidden | (d >= c.pretrained_length) & (at >= 4)

    rows, heads = own['qkv.weight'].reshape(-1, D, c.n_embd), []
    for h in range(H):
        shared = h * K // H  # the key head of this query head
        q, k, v = (x @ rows[place].T for place in (h, H + shared, H + K + shared))
        if method in ('rope', 'rope_random'):
            q, k = plain_rotated(c, q, at), plain_rotated(c, k, at)
        scored = plain_scores(c, method, weights_of(attn.position), h, q * scale[h], k, at)
        heads.append((*scored, v))
    scores, bias, values = map(np.stack, zip(*heads))
    total = scores + bias
    if c.dape_kernel:
        maps = np.concatenate((scores, bias)) if bias.any() else scores
        f = plain_dape(c, own, np.where(hidden, 0, maps))
        total = scores + f + c.dape_residual * bias
    e = np.where(hidden, 0, np.exp(total))
    sink = np.exp(own['position.sink'])[:, None] if method == 'sink' else 0
    weights = e / (e.sum(-1, keepdims=True) + sink)
    y = weights @ values * own['head_gain'][:, None]
    return y.swapaxes(0, 1).reshape(T, -1) @ own['out.weight'].T, weights


def plain_dape(c, own, maps):
    """DAPE's two convolutions of each row over the keys. maps: (H or 2H, T, T), 0 if hidden."""
    def convolve(x, name, *padding):
        w, b = (own[f'position.dape.{name}.{part}'] for part in ('weight', 'bias'))
        x = np.pad(x, ((0, 0), (0, 0), padding))
        taps = np.lib.stride_tricks.sliding_window_view(x, c.dape_kernel, axis=-1)
        return np.einsum('ock,cijk->oij', w[:, :, 0], taps, optimize=True) + b[:, None, None]

    p = c.dape_kernel // 2
    middle = convolve(maps, 'first', p, 2 * p)  # from key 0 to key T - 1 + p
    return convolve(np.where(middle > 0, middle, 0.01 * middle), 'second', p, 0)


# ---------------------------------------------------------------------- position methods

def plain_rotated(c, x, at):
    """RoPE in complex numbers: (x[k] + i x[k + D/2]) times e^(i angle). x: (T, D)."""
    D, L, base = c.head_dim, c.pretrained_length, c.rope_base
    kind, _, s = c.rope_scaling.partition(':')
    s, factor, k = float(s or 1), 1, np.arange(D // 2)
    if kind == 'dynamic_ntk':
        s = max(1, s * len(x) / L - (s - 1))
    if kind.endswith('ntk'):
        base *= s ** (D / (D - 2))
    frequency = base ** (-2 * k / D)
    if kind == 'pi':
        frequency /= s
    if kind == 'yarn':
        low, high = (D * math.log(L / (turns * 2 * math.pi)) / (2 * math.log(base))
                     for turns in (32, 1))
        low, high = max(0, math.floor(low)), min(D - 1, math.ceil(high))
        ramp = ((k - low) / (high - low)).clip(0, 1)
        frequency, factor = frequency * (1 - ramp + ramp / s), 1 + 0.1 * math.log(s)
    x = (x[:, :D // 2] + 1j * x[:, D // 2:]) * factor * np.exp(1j * np.outer(at, frequency))
    return np.concatenate((x.real, x.imag), axis=1)


def plain_scores(c, method, own, h, q, k, at):
    """
    The scores of head h, (T, T), without its bias, and its bias. q, k: (T, D). Slopes are those of
    four heads. A new method needs lines here.
    """
    (T, D), L, log = q.shape, c.pretrained_length, np.log
    s, bias, d = q @ k.T / math.sqrt(D), np.zeros((T, T)), np.maximum(at[:, None] - at, 0)
    n = np.arange(1, T + 1)[:, None]  # keys that each query sees
    if method == 'logn':
        s *= log(n) / log(L)
    if method == 'llama4':
        s *= 1 + 0.1 * log(1 + n // L)
    if method == 'ssmax':
        s *= own['s'][h] * log(n)
    if method == 'alibi':
        bias = -d / 4 ** (h + 1)
    if method == 'kerple':
        bias = -own['p'][h] * log(1 + own['a'][h] * d)
    if method == 'fire':
        longest = np.maximum(at, own['mu'] * (L // 2))[:, None]
        share = log(1 + own['c'] * d) / (log(1 + own['c'] * longest) + 1e-6)
        inner = share[..., None] * own['f.0.weight'][:, 0] + own['f.0.bias']
        bias = np.maximum(0, inner) @ own['f.2.weight'][h] + own['f.2.bias'][h]
    if method == 't5':
        wide = 16 + np.floor(log(np.maximum(d, 1) / 16) / log(8) * 16)
        bucket = np.where(d < 16, d, np.minimum(wide, 31)).astype(int)
        bias = math.sqrt(D) * own['table'][bucket, h]
    if method == 'cope':
        for i in range(T):  # count[j]: of the keys from j to i, at most 63
            count = sigmoid(s[i, i::-1]).cumsum()[::-1]
            s[i, :i + 1] += np.interp(count, range(64), own['e'] @ q[i])
    if method == 'xl':
        u, v = own['u'][h], own['v'][h]
        angle = np.outer(range(T), 10000 ** (-np.arange(0, c.n_embd, 2) / c.n_embd))
        r = np.concatenate((np.sin(angle), np.cos(angle)), axis=1) @ own['W.weight'].T
        r = r[d, h * D:(h + 1) * D]  # (T, T, D)
        s = (np.einsum('id,ijd->ij', q + v, r) + (q + u) @ k.T) / math.sqrt(D)
    return s, bias


# ---------------------------------------------------------------------- what stages measure

def plain_entropy(model, ids, head_scale=None):
    """Entropy of each query's attention in nats, (n_layer, B, H, T)."""
    a = plain_transformer(model, ids, head_scale)[1].swapaxes(0, 1)
    a = a / a.sum(-1, keepdims=True)
    return -(a * np.log(np.where(a > 0, a, 1))).sum(-1)


def plain_losses(model, tokens, head_scale=None):
    """The loss of each token after the first in nats, (B, T). tokens: (B, T + 1) ids."""
    logits = plain_transformer(model, tokens[:, :-1], head_scale)[0]
    target = np.take_along_axis(logits, np.asarray(tokens)[:, 1:, None], axis=-1)[..., 0]
    return np.log(np.exp(logits).sum(-1)) - target
