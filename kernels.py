"""
Attention that is fast or needs little memory. It computes the plain formula in other ways.

At first read only attention(): softmax(q k^T / sqrt(D)) v, where each query sees the keys up to its
own position. The rest of this file avoids the whole T x T matrix. Nothing here changes a result
beyond rounding. The file is plain PyTorch and imports nothing from the project.

Shapes: B sequences, T queries, S keys, H query heads, D = head_dim. Keys and values have n_kv_head
heads, and H / n_kv_head query heads share each. Positions i of queries are (T,), positions j of
keys are (S,). If positions differ between sequences, they are (B, T) and (B, S).
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

SCORES_AT_ONCE = 2 ** 22  # scores in one chunk of rows; 16 times as many on a GPU
LOGITS_AT_ONCE = 2 ** 23  # float32 logits in one chunk, 32 MB; 16 times as many on a GPU
LOGITS_KEPT = 2 ** 28     # logits of a compiled loss; if there are more, backward recomputes them
CHUNKS_IN_A_GRAPH = 16    # most per layer in a compiled graph; 22 layers at 16K tokens have 2,816


def at_once(n, device):
    """A GPU takes microseconds to start each piece of work, so its pieces are 16 times as large."""
    return n if device.type == 'cpu' else 16 * n


def later(i, j):
    """True where the key at position j comes after the query at position i: (1 or B, 1, T, S)."""
    i = torch.atleast_2d(i)[:, None, :, None]
    j = torch.atleast_2d(j)[:, None, None, :]
    return j > i


def repeat_heads(x, n_head):
    """
    x: keys or values, (B, n_kv_head, S, D). Returns (B, H, S, D): each head is repeated once for
    each query head that shares it.
    """
    n_kv_head = x.shape[1]
    return x.repeat_interleave(n_head // n_kv_head, dim=1)


# ---------------------------------------------------------------------- softmax attention

def attention(q, k, v, i, j, bias=None):
    """
    Softmax attention of each query over the keys up to its own position, (B, H, T, D), by PyTorch's
    scaled_dot_product_attention. bias: (1 or B, 1 or H, T, S) is added to the scores, and is -inf
    at each key that the query does not see. None adds nothing; the query then sees no later key.
    """
    B, H, T, D = q.shape
    n_kv_head, S = k.shape[1:3]
    is_causal = bias is None and T == S
    newest = T == 1 and i.dim() == 1  # a query at the end of the text sees every key
    mask = bias
    if bias is None and not is_causal and not newest:
        mask = ~later(i, j)  # PyTorch also takes booleans: True where the query sees the key

    shares_keys = H > n_kv_head
    if T == 1 and shares_keys and (mask is None or mask.shape[1] == 1):
        # Each head has one query. Turn the query heads that share a key into rows of one head, so
        # that each key is read once. Use reshape(), because the kernel may return heads transposed
        # and view() would then fail.
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
    True if FlashAttention can run. Of the fused kernels, only FlashAttention handles grouped
    queries, and only on newer GPUs, in half precision and without a mask. For the other kernels,
    repeat keys and values, because PyTorch would otherwise compute the whole matrix.
    """
    gpu = torch.cuda.get_device_properties(q.device)
    half_precision = q.dtype != torch.float32
    return mask is None and half_precision and gpu.major >= 8


# ---------------------------------------------------------------------- some rows at a time

def row_chunks(T, S, n_maps, device, all_keys=False):
    """
    Cut the T queries, which are the last T of S tokens, into chunks. Yields (rows, n_keys): a slice
    of the queries, and how many keys they need. n_maps: matrices of scores per chunk. All maps of a
    chunk have at most at_once(SCORES_AT_ONCE) scores together. A chunk has at most an eighth of the
    rows (or 32), because early rows need no late keys. On a GPU few scores are one chunk. The
    number of keys is rounded up to whole eighths of S, because a convolution makes a plan for each
    new shape.
    """
    eighth = math.ceil(S / 8)
    most = at_once(SCORES_AT_ONCE, device)
    most_rows = max(32, T // 8)
    if device.type == 'cuda' and n_maps * T * S <= SCORES_AT_ONCE:
        most_rows = T  # a GPU computes so few scores in less time than it starts eight chunks
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
    Call f on each chunk. Returns the results as a list. recompute: backward calls f again instead
    of keeping intermediate results. apart: keep the loop out of the model's compiled graph, because
    the graph would hold every chunk. Recomputed chunks then run uncompiled, because checkpoint()
    is not compiled.
    """
    y = []
    for chunk in chunks:
        if apart and torch.compiler.is_compiling():
            torch._dynamo.graph_break()  # because of this line Python runs the whole loop
        if recompute and torch.is_grad_enabled():
            y.append(checkpoint(f, *chunk, use_reentrant=False))
        else:
            y.append(f(*chunk))
    return y


def in_rows(rows_of, inputs, n_maps, all_keys=False):
    """
    Call rows_of(q, k, v, i, j) -> (B, H, rows, ...) for some query rows at a time, and join the
    results. inputs: q, k, v, i, j for all rows. A chunk of rows leaves out the keys long after its
    last row. If there are many scores, backward computes each chunk again, so memory grows with T
    rather than T^2. This limit is the same on a GPU, because all layers keep so many at once for
    backward. n_maps: matrices of scores that one call makes.
    """
    q, k, v, i, j = inputs
    T, S = q.shape[2], k.shape[2]
    # Process the longest rows first: later, shorter chunks can reuse the memory that they free.
    chunks = [*row_chunks(T, S, n_maps, q.device, all_keys)][::-1]

    def of_chunk(rows, end):
        # Slice here and not before: backward then adds up the gradients of this chunk's slices
        # before it reaches the next chunk. Otherwise it would hold those of all chunks at once.
        return rows_of(q[:, :, rows], k[:, :, :end], v[:, :, :end], i[..., rows], j[..., :end])

    recompute = n_maps * T * S > 4 * SCORES_AT_ONCE
    most_in_graph = CHUNKS_IN_A_GRAPH
    if q.device.type == 'cpu':  # a CPU is slow without compilation
        most_in_graph *= 8
    y = each(of_chunk, chunks, recompute, apart=len(chunks) > most_in_graph)
    return torch.cat(y[::-1], dim=2)


def attention_with_bias(bias_of, q, k, v, i, j):
    """
    Softmax attention, (B, H, T, D), with bias_of(i, j) added to the scores. It is
    (1 or B, 1 or H, T, S), and -inf at each key that the query does not see.
    """
    def rows_of(q, k, v, i, j):
        return attention(q, k, v, i, j, bias_of(i, j).to(q.dtype))

    B, H = q.shape[:2]
    n_maps = H  # one bias serves all sequences
    if torch.is_grad_enabled() and q.device.type == 'cpu':
        n_maps = B * H  # backward of a bias makes scores for each sequence
    return in_rows(rows_of, (q, k, v, i, j), n_maps)


def attention_over_scores(method, q, k, v, i, j):
    """
    Attention, (B, H, T, D), by a position method's own scores(q, k, i, j) and softmax(scores).
    The scores are (B, H, T, S), and -inf at later keys.
    """
    B, H = q.shape[:2]
    inputs = method.similarity_inputs(k)

    def rows_of(q, k, v, i, j):
        scores = method.scores(q, k, i, j, *inputs)
        weights = method.softmax(scores)
        return weights.to(v.dtype) @ repeat_heads(v, H)

    n_maps = B * H
    return in_rows(rows_of, (q, k, v, i, j), n_maps, method.needs_all_keys)


# ---------------------------------------------------------------------- entropy

# Each kernel takes q, k, v: (B, H, T, D) float32. Given k as v, it returns sum_j a_ij k_j,
# (B, H, T, D), and ln sum_j exp(s_ij), (B, H, T).
MEAN_KEY = {
    'cpu': torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    'cuda': partial(torch.ops.aten._scaled_dot_product_efficient_attention, attn_bias=None,
                    compute_log_sumexp=True),
}


def wants_gradient(q, k):
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)


def entropy_without_matrix(q, k):
    """
    Entropy of each query's causal attention over s = q.k / sqrt(D), in nats, without the T x T
    matrix. Eq. (2) of arXiv:2404.12224 is H_i = ln sum_j exp(s_ij) - sum_j a_ij s_ij. The last sum
    is q_i . (sum_j a_ij k_j) / sqrt(D). So one fused attention call with the keys as values gives
    both terms, because the kernel also returns its log-sum-exp.
    q: (B, H, T, D) scaled queries; k: (B, n_kv_head, T, D). Returns (B, H, T) float32, from 0 to
    ln(i + 1). Raises ValueError if a gradient is wanted, because the kernel's log-sum-exp has no
    gradient. attention_entropy() has one.
    """
    if wants_gradient(q, k):
        raise ValueError('entropy_without_matrix() has no gradient: use attention_entropy(), or '
                         'torch.no_grad().')
    H, T, D = q.shape[1:]
    q = q.float()  # float32, because the two terms nearly cancel
    k = repeat_heads(k.float(), H)
    fused = MEAN_KEY[q.device.type]
    mean_k, log_sum_exp, *_ = fused(q, k, k, is_causal=True)
    log_sum_exp = log_sum_exp[..., :T]  # the CUDA kernel pads rows
    mean_score = (q * mean_k).sum(-1) / math.sqrt(D)
    return (log_sum_exp - mean_score).clamp(min=0)


def attention_entropy(layer, attention, q, k, place):
    """
    Entropy of each query's attention in nats, (B, H, T) float32: a probe for Transformer.probe().
    It handles every position method, and gradients. It calls entropy_without_matrix() if that is
    possible; otherwise it computes rows of the matrix. If the weights of a row sum to less than 1,
    as with a sink, the row is first divided by its sum. Raises ValueError if the pass has a cache,
    because a probe sees only the new keys.
    """
    if place.j.shape[-1] != k.shape[2]:
        raise ValueError('entropy needs a pass without a cache')
    method, (B, H) = attention.position, q.shape[:2]
    has_kernel = method.is_plain and q.device.type in MEAN_KEY
    with torch.autocast(q.device.type, enabled=False):  # entropy is always float32
        if has_kernel and not wants_gradient(q, k):
            return entropy_without_matrix(q, k)
        q, k = q.float(), k.float()
        more = method.similarity_inputs(k)

        def rows_of(q, k, v, i, j):
            weights = method.softmax(method.scores(q, k, i, j, *more))
            smallest = torch.finfo(weights.dtype).tiny  # so that 0 ln 0 is 0 and has a gradient
            terms = weights * weights.clamp(min=smallest).log()
            total = weights.sum(-1).clamp(min=smallest)
            # -sum p ln p for p = weights / total
            return (total.log() - terms.sum(-1) / total).clamp(min=0)

        inputs = q, k, k, place.i, place.j
        return in_rows(rows_of, inputs, B * H, method.needs_all_keys)


# ---------------------------------------------------------------------- loss

def cross_entropy(x, head, targets):
    """
    Loss of each target, -ln p(target) in nats, (B, K) float32. Needs at most 1 GB of float32
    logits. x: (B, K, C), input of the output matrix; head: the output matrix, a module;
    targets: (B, K) token ids.
    """
    n_logits = targets.numel() * head.weight.shape[0]
    few = n_logits <= LOGITS_KEPT or torch.is_autocast_enabled(x.device.type)
    if torch.compiler.is_compiling() and few:
        return compiled_cross_entropy(head(x), targets)
    if n_logits > LOGITS_AT_ONCE:
        return cross_entropy_in_chunks(x, head, targets)
    logits = head(x).float().flatten(0, 1)                                   # (B * K, V)
    losses = F.cross_entropy(logits, targets.flatten(), reduction='none')
    return losses.view(targets.shape)


def compiled_cross_entropy(logits, targets):
    """
    cross_entropy() for a compiled graph. The backward of F.cross_entropy sums over all logits once
    more; without that sum, a training step with a vocabulary of 32,000 took 0.7 of the time on a
    CPU. Under autocast the logits in memory stay in half precision; only registers hold float32.
    """
    logits = logits.float()
    # int32, because a register holds twice as many of these ids as int64
    ids = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    is_target = ids == targets[..., None].int()
    at_target = logits.where(is_target, 0).sum(-1)
    return logits.logsumexp(-1) - at_target


def cross_entropy_in_chunks(x, head, targets):
    """cross_entropy() for some rows at a time. Backward computes their logits again."""
    def of_chunk(x, targets):
        return F.cross_entropy(head(x).float(), targets, reduction='none')

    most = at_once(LOGITS_AT_ONCE, x.device)
    n_rows = max(1, most // head.weight.shape[0])
    x = x.flatten(0, 1).split(n_rows)
    ids = targets.flatten().split(n_rows)
    several = len(x) > 1
    losses = each(of_chunk, zip(x, ids), recompute=several)
    return torch.cat(losses).view(targets.shape)
