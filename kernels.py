"""
Attention made fast or small: the same numbers as the plain formula, computed in other ways.

Whoever reads the code for the first time may skip this file and take causal_attention() for what it
says: softmax(q k^T / sqrt(D)) v, each query seeing the keys up to its own position. Everything here
is about how to get that without the whole T x T matrix, or without slow backward kernels. Nothing
here changes a result beyond rounding. Plain PyTorch; imports nothing of the project.

Shapes: B sequences, T queries, S keys, H heads of queries, D their size; keys and values may have
fewer heads, each shared by H / n_kv_head queries. Positions i of queries and j of keys are (T,) and
(S,), or (B, T) and (B, S) where they differ between sequences.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

SCORES_AT_ONCE = 2 ** 22  # where scores are made some rows at a time; on a GPU 16 times as many
LOGITS_AT_ONCE = 2 ** 23  # float32 logits of the loss, 32 MB; on a GPU 16 times as many
LOGITS_KEPT = 2 ** 28     # of a compiled loss: above it, backward computes float32 logits again
CHUNKS_IN_A_GRAPH = 16    # of a layer's attention; at 16K tokens, 22 layers would have 2,816


def at_once(n, device):
    """A GPU is given larger pieces of work, as each takes it some microseconds to begin."""
    return n if device.type == 'cpu' else 16 * n


def later(i, j):
    """Which keys at positions j come after the queries at positions i: (1 or B, 1, T, S)."""
    i = torch.atleast_2d(i)[:, None, :, None]
    j = torch.atleast_2d(j)[:, None, None, :]
    return j > i


def repeat_heads(x, n_head):
    """
    Keys or values (B, n_kv_head, S, D), each head once for every query head that shares it: (B, H,
    S, D).
    """
    n_kv_head = x.shape[1]
    return x.repeat_interleave(n_head // n_kv_head, dim=1)


# ---------------------------------------------------------------------- softmax attention

def causal_attention(q, k, v, i, j):
    """Softmax attention over the keys that are not later than the query, (B, H, T, D)."""
    T, S = q.shape[2], k.shape[2]
    if T == S:
        return attention(q, k, v, is_causal=True)
    if T == 1 and i.dim() == 1:  # the newest token sees every key
        return attention(q, k, v)
    return attention(q, k, v, mask=~later(i, j))


def attention(q, k, v, mask=None, is_causal=False):
    """
    Softmax attention with grouped queries, (B, H, T, D), by the fastest kernel that does not need
    the whole matrix. mask: (1 or B, 1 or H, T, S), a bias to add to the scores, or True where a key
    is seen.
    """
    B, H, T, D = q.shape
    n_kv_head, S = k.shape[1:3]

    in_training = torch.is_grad_enabled() or torch.compiler.is_compiling()
    few_scores = B * H * T * S <= 2 ** 26
    if q.device.type == 'cpu' and in_training and few_scores:
        if is_causal:
            return causal_matrix_attention(q, k, v)
        if mask is not None:
            return matrix_attention(q, k, v, mask)

    shares_keys = H > n_kv_head
    if T == 1 and shares_keys and (mask is None or mask.shape[1] == 1):
        # One query a head: the heads that share a key become rows of one head, and each key is read
        # once. The kernel may return heads transposed, which a view() would refuse.
        rows = q.reshape(B, n_kv_head, -1, D)
        y = F.scaled_dot_product_attention(rows, k, v, mask)
        return y.reshape(q.shape)

    if shares_keys and q.device.type == 'cuda' and not flash_can_share_heads(q, mask):
        k = repeat_heads(k, H)
        v = repeat_heads(v, H)
        shares_keys = False
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal,
                                          enable_gqa=shares_keys)


def flash_can_share_heads(q, mask):
    """
    Only FlashAttention handles grouped queries, and only on newer GPUs, in half precision and
    without a mask; with any other kernel PyTorch would compute the whole matrix, so there keys and
    values are repeated.
    """
    gpu = torch.cuda.get_device_properties(q.device)
    half_precision = q.dtype != torch.float32
    return mask is None and half_precision and gpu.major >= 8


def matrix_attention(q, k, v, mask):
    """
    attention() by its formula, sum_j e_ij v_j / sum_j e_ij. For training on a CPU while the scores
    are few, as the fused kernel's backward is slow there: compiled, a training step of bench.py's
    shape took 1.35 s with this and 1.45 s with the fused kernel on two cores with AMX. Scores have
    the precision of q and k.
    """
    B, H, T, D = q.shape
    n_kv_head, S = k.shape[1:3]
    at_least_float32 = torch.promote_types(q.dtype, torch.float32)

    # The queries that share a key stand one under the other, so that each key head is one matrix
    # product.
    rows = q.reshape(B, n_kv_head, -1, D)
    scores = rows @ k.transpose(-1, -2)
    scores = scores.view(B, H, T, S).to(at_least_float32)
    scores = scores * (1 / math.sqrt(D))
    if mask.dtype == torch.bool:  # adding -inf has a trivial backward, unlike masked_fill
        zeros = torch.zeros(mask.shape, device=q.device)
        mask = zeros.masked_fill(~mask, -math.inf)
    scores = scores + mask

    largest = scores.detach().amax(-1, keepdim=True)
    e = (scores - largest).exp().to(v.dtype)
    total = e.sum(-1, keepdim=True, dtype=scores.dtype)
    y = e.view(B, n_kv_head, -1, S) @ v
    y = y.view(B, H, T, D) / total
    return y.to(v.dtype)


def causal_matrix_attention(q, k, v):
    """matrix_attention() for 128 queries at a time, without the keys after the last of them."""
    y, end = [], 0
    i = torch.arange(q.shape[2], dtype=torch.int32)  # a vector register holds twice as many
    for rows in q.split(128, dim=2):
        start = end
        end = start + rows.shape[2]
        seen = i[:end] <= i[start:end, None]
        keys = k[:, :, :end]
        values = v[:, :, :end]
        y.append(matrix_attention(rows, keys, values, mask=seen))
    return torch.cat(y, dim=2)


# ---------------------------------------------------------------------- some rows at a time

def row_chunks(T, S, n_maps, device, all_keys=False):
    """
    Cut T queries, the last of S tokens, into chunks: yields (rows, a slice, and how many keys they
    need). A chunk has at most at_once(SCORES_AT_ONCE) scores in n_maps maps, and at most an eighth
    of the rows (or 32), as early rows need no late keys. Keys come in whole eighths, as a
    convolution makes a plan for each new shape.
    """
    eighth = math.ceil(S / 8)
    most = at_once(SCORES_AT_ONCE, device)
    most_rows = max(32, T // 8)
    n_rows = min(most_rows, most // (n_maps * S))
    n_rows = max(1, n_rows)
    for start in range(0, T, n_rows):
        stop = min(start + n_rows, T)
        last_query = S - T + stop
        n_keys = math.ceil(last_query / eighth) * eighth
        rows = slice(start, stop)
        yield rows, S if all_keys else min(S, n_keys)


def each(f, chunks, recompute, apart=False):
    """
    Call f on each chunk; returns the results as a list. recompute: backward calls f again instead
    of keeping what it made. apart: leave the loop out of the model's compiled graph, which would
    hold every chunk; what is recomputed then stays uncompiled, as checkpoint() is.
    """
    y = []
    for chunk in chunks:
        if apart and torch.compiler.is_compiling():
            torch._dynamo.graph_break()  # in a loop: Python then does all of it
        if recompute and torch.is_grad_enabled():
            y.append(checkpoint(f, *chunk, use_reentrant=False))
        else:
            y.append(f(*chunk))
    return y


def in_rows(rows_of, q, k, v, i, j, n_maps, all_keys=False):
    """
    rows_of(q, k, v, i, j) -> (B, H, rows, ...), called for some query rows at a time, each chunk
    without the keys long after its last row. Where the scores are many, backward computes each
    chunk again, so that memory grows with T and not with T^2. Use the same limit on a GPU, because
    every layer keeps this much for backward. n_maps: matrices of scores that a call makes.
    """
    T, S = q.shape[2], k.shape[2]
    chunks = []
    for rows, end in row_chunks(T, S, n_maps, q.device, all_keys):
        queries = q[:, :, rows]
        keys = k[:, :, :end]
        values = v[:, :, :end]
        places = i[..., rows], j[..., :end]
        chunks.append((queries, keys, values, *places))
    # Process the longest rows first: later, shorter chunks can reuse the memory that they free.
    chunks.reverse()

    recompute = n_maps * T * S > 4 * SCORES_AT_ONCE
    most_in_graph = CHUNKS_IN_A_GRAPH
    if q.device.type == 'cpu':  # which is slow uncompiled
        most_in_graph *= 8
    y = each(rows_of, chunks, recompute, apart=len(chunks) > most_in_graph)
    return torch.cat(y[::-1], dim=2)


def attention_with_bias(bias, q, k, v, i, j):
    """
    Softmax attention with bias(i, j), (1 or B, 1 or H, T, S), added to the scores: -inf at keys
    that a query does not see. Returns (B, H, T, D).
    """
    def rows_of(q, k, v, i, j):
        return attention(q, k, v, mask=bias(i, j).to(q.dtype))

    B, H = q.shape[:2]
    n_maps = H  # one bias serves all sequences
    if torch.is_grad_enabled() and q.device.type == 'cpu':
        n_maps = B * H  # matrix_attention() makes scores for each of them
    return in_rows(rows_of, q, k, v, i, j, n_maps)


def attention_over_scores(method, q, k, v, i, j):
    """
    Attention by a position method's scores(q, k, i, j), (B, H, T, S), -inf at later keys, and its
    softmax(scores): (B, H, T, D).
    """
    B, H = q.shape[:2]
    shared = method.shared(k)

    def rows_of(q, k, v, i, j):
        scores = method.scores(q, k, i, j, *shared)
        weights = method.softmax(scores)
        return weights.to(v.dtype) @ repeat_heads(v, H)

    n_maps = B * H
    return in_rows(rows_of, q, k, v, i, j, n_maps, method.needs_all_keys)


# ---------------------------------------------------------------------- entropy

# each: q, k (B, H, T, D) float32 -> sum_j a_ij k_j, (B, H, T, D), and ln sum_j exp(s_ij), (B, H, T)
MEAN_KEY = {
    'cpu': torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    'cuda': partial(torch.ops.aten._scaled_dot_product_efficient_attention, attn_bias=None,
                    compute_log_sumexp=True),
}


def wants_gradient(q, k):
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)


def entropy(q, k):
    """
    Entropy of each query's causal attention over q.k / sqrt(D), in nats, without the T x T matrix.
    Eq. (2) of arXiv:2404.12224 is H_i = ln sum_j exp(s_ij) - sum_j a_ij s_ij, and its last sum is
    q_i . (sum_j a_ij k_j) / sqrt(D): so one fused attention call with the keys as values, and its
    log-sum-exp, are enough. q: (B, H, T, D) scaled queries; k: (B, n_kv_head, T, D). Returns (B, H,
    T) float32, from 0 to ln(i + 1). Raises ValueError where a gradient is wanted: the kernel's
    log-sum-exp has none. attention_entropy() has one.
    """
    if wants_gradient(q, k):
        raise ValueError('entropy() has no gradient: use attention_entropy(), or torch.no_grad().')
    H, T, D = q.shape[1:]
    q = q.float()  # as the two terms nearly cancel
    k = repeat_heads(k.float(), H)
    fused = MEAN_KEY[q.device.type]
    mean_k, log_sum_exp, *_ = fused(q, k, k, is_causal=True)
    log_sum_exp = log_sum_exp[..., :T]  # CUDA's kernel pads rows
    mean_score = (q * mean_k).sum(-1) / math.sqrt(D)
    return (log_sum_exp - mean_score).clamp(min=0)


def attention_entropy(layer, attention, q, k, place):
    """
    A probe of Transformer.probe(): the entropy of each query's attention in nats, (B, H, T)
    float32, for every position method, with the right gradient where one is wanted: by entropy()
    where that can, else by rows of the matrix. Where the weights of a row sum to less than 1, as
    beside a sink, it is that of their shares of the sum.
    """
    method, (B, H) = attention.position, q.shape[:2]
    has_kernel = method.is_plain and q.device.type in MEAN_KEY
    with torch.autocast(q.device.type, enabled=False):  # entropy is float32 always
        if has_kernel and not wants_gradient(q, k):
            return entropy(q, k)
        q, k = q.float(), k.float()
        shared = method.shared(k)

        def rows_of(q, k, v, i, j):
            weights = method.softmax(method.scores(q, k, i, j, *shared))
            smallest = torch.finfo(weights.dtype).tiny  # so that 0 ln 0 is 0, and has a gradient
            terms = weights * weights.clamp(min=smallest).log()
            total = weights.sum(-1).clamp(min=smallest)
            return (total.log() - terms.sum(-1) / total).clamp(min=0)

        i, j, n_maps = place.i, place.j, B * H
        return in_rows(rows_of, q, k, k, i, j, n_maps, method.needs_all_keys)


# ---------------------------------------------------------------------- loss

def cross_entropy(x, head, targets):
    """
    Loss of each target, -ln p(target) in nats, (B, K) float32, with at most 1 GB of float32 logits.
    x: (B, K, C), ready for the output matrix; head: that matrix, a module; targets: (B, K) ids.
    """
    V = head.weight.shape[0]
    small = targets.numel() * V <= LOGITS_KEPT
    if torch.compiler.is_compiling() and (small or torch.is_autocast_enabled(x.device.type)):
        # Under autocast the logits stay in half precision, float32 is only in registers.
        # F.cross_entropy is not used, as its backward sums over all logits once more; int32, as a
        # register holds twice as many.
        logits = head(x).float()
        ids = torch.arange(V, dtype=torch.int32, device=x.device)
        is_target = ids == targets[..., None].int()
        at_target = logits.where(is_target, 0).sum(-1)
        return logits.logsumexp(-1) - at_target

    def of_chunk(x, targets):
        return F.cross_entropy(head(x).float(), targets, reduction='none')

    most = at_once(LOGITS_AT_ONCE, x.device)
    n_rows = max(1, most // V)
    x = x.flatten(0, 1).split(n_rows)
    ids = targets.flatten().split(n_rows)
    several = len(x) > 1
    losses = each(of_chunk, zip(x, ids), recompute=several)
    return torch.cat(losses).view(targets.shape)
