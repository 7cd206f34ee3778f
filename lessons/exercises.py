"""
Exercises on length generalization. Each docstring gives the formula and its source. Replace the
`raise` by your own code, in PyTorch. Then let the grader check it:

$ make lessons                                                # all exercises
$ python -m pytest lessons/test_exercises.py -k entropy       # those with this in their names

lessons/README.md says how long an exercise may take, and in which file the project solves it.
Exercise 10 is your own position bias. Each program then knows it as --position=own, if it is run
so (the `command` in its results leaves `-m lessons.exercises` out):

$ python -m lessons.exercises train.py --position=own --out_dir=out/demo/own --max_iters=800
$ python -m lessons.exercises eval_ppl.py --out_dir=out/demo/own --protocol=position

Shapes: H heads of size D, T tokens. q, k and v are (H, T, D). Scores s_ij and attention weights
a_ij are (H, T, T), with a row for each query i and a column for each key j, both from 0. The grader
calls your code with float64 numbers (token ids and most positions are int64), so make new tensors
in the dtype of the inputs.
"""

import math
import runpy
import sys

from configurator import ROOT

import torch
import torch.nn.functional as F
from torch import nn

import position

# ---------------------------------------------------------------------- the softmax scale

def causal_attention(q, k, v, scale):
    """
    1. Attention with one softmax scale per head, Eq. (4) of arXiv:2404.12224 ("the paper"):
    s_ij = scale_h q_i . k_j / sqrt(D)
    a_ij = exp(s_ij) / sum_{m <= i} exp(s_im) for j <= i, and 0 for j > i
    y_i = sum_j a_ij v_j
    q, k, v: (H, T, D); scale: (H,). Returns y, (H, T, D).
    """
    raise NotImplementedError('Begin with the scores, q @ k.mT, and hide the keys j > i.')


def scale_queries(q, scale):
    """
    2. Get the result of exercise 1 from any fused kernel. Change only the queries, so that
    causal_attention(new_q, k, v, ones) equals causal_attention(q, k, v, scale).
    q: (H, T, D); scale: (H,). Returns new_q, (H, T, D).
    """
    raise NotImplementedError('Scores are linear in q. What does a multiple of q do to them?')


def fold_scale(weight, scale):
    """
    3. Get this result by a change of the weights, which costs no time and works in any engine.
    Queries are W x. Row h D + d of W gives channel d of head h. Change W so that the queries come
    out scaled.
    weight: W, (H D, C); scale: (H,). Returns the new W, (H D, C).
    """
    raise NotImplementedError('Which rows of W belong to head h?')


def fit_scale(position, best, L):
    """
    4. How the best uniform scale grows with the position. Fit best = 1 + a ln(position / L) by
    least squares, over only the positions beyond L. At L the model needs no scale, so the 1 is
    fixed. Source: Appendix B of the paper.
    position, best: (n,); L: training length in tokens. Returns a.
    """
    raise NotImplementedError('Let x = ln(position / L). Set the derivative of '
                              'sum (best - 1 - a x)^2 with respect to a to 0.')


# ---------------------------------------------------------------------- attention entropy

def entropy(attention):
    """
    5. How widely each query spreads its attention: H_i = -sum_j a_ij ln a_ij in nats, with
    0 ln 0 = 0. Eq. (2) of the paper.
    attention: (H, T, T). Returns (H, T), from 0 to ln(i + 1).
    """
    raise NotImplementedError('Begin with a * ln a. What does it give where a is 0?')


def entropy_without_matrix(q, k):
    """
    6. The entropy from q and k, without ever holding T x T numbers. Insert
    ln a_ij = s_ij - ln sum_m exp(s_im) into the formula of exercise 5. This gives
    H_i = ln sum_{j <= i} exp(s_ij) - sum_j a_ij s_ij.
    Compute one row at a time.
    Here s_ij = q_i . k_j / sqrt(D). q, k: (H, T, D). Returns (H, T).
    """
    raise NotImplementedError('Begin with one query: torch.logsumexp of its scores, minus the mean '
                              'of its scores under its attention.')


# ---------------------------------------------------------------------- where a token stands

def rotate(x, place, base=10000.0):
    """
    7. RoPE (Su et al. 2021) in Llama's layout. Pair n of a head is (x[n], x[n + D/2]), n = 0 ...
    D/2 - 1. Turn it counterclockwise by the angle place * base^(-2n/D). Then q_i . k_j depends only
    on i - j.
    x: (H, T, D); place: (T,), the positions of the tokens. Returns (H, T, D).
    """
    raise NotImplementedError('Begin with the angles, (T, D/2). (a, b) turned by t is '
                              '(a cos t - b sin t, b cos t + a sin t).')


def yarn_frequencies(D, base, s, L):
    """
    8. YaRN (Peng et al. 2023, section 3.2) extends RoPE by a factor s. Compute the angle by which
    each pair turns per position.
    RoPE turns pair n by base^(-2n/D) per position, so L / (2 pi base^(2n/D)) times in L tokens. The
    pair that turns r times in L tokens is n(r) = D ln(L / (2 pi r)) / (2 ln base).
    Let low = floor(n(32)), at least 0, and high = ceil(n(1)), at most D - 1. Pairs up to low keep
    RoPE's angle. Pairs from high on get RoPE's angle / s. In between, the share of the second angle
    grows linearly from 0 to 1. If high <= low, all pairs after low get RoPE's angle / s.
    Returns (D/2,) float64. (Leave out YaRN's temperature.)
    """
    raise NotImplementedError("Begin with RoPE's angles. The share is a straight line that is 0 at "
                              'low and 1 at high, clamped to 0 ... 1.')


def alibi(n_head, i, j):
    """
    9. ALiBi (Press et al. 2022) adds -m_h (i - j) to the scores. The slopes are m_h = 2^(-8h/H),
    h = 1 ... H.
    n_head: H, a power of two; i: (T,), positions of queries; j: (S,), positions of keys. Returns
    (H, T, S). Values at j > i do not matter.
    """
    raise NotImplementedError('Begin with the distances, i[:, None] - j.')


class OwnBias(position.NoPE):
    """
    10. Your own position bias: bias() returns what is added to the scores. Make learned numbers in
    __init__, as nn.Parameters. The bias must
    - depend only on i - j,
    - give a far key no more than a near key,
    - differ between keys from the start,
    - be finite for all positions below 64 L, where L = config.block_size,
    - pass a gradient to each of its parameters.
    A learned slope may change its sign in training; F.softplus keeps it above 0.
    Values at j > i do not matter, but must be finite. Then train it by the command above, and
    compare it with NoPE: see lessons/README.md.
    """

    def __init__(self, config):
        super().__init__(config)
        self.n_head = config.n_head  # H

    def bias(self, i, j):
        """
        i: (T,), positions of queries; j: (S,), positions of keys. Returns (H, T, S).
        position.distances(i, j) returns i - j, or 0 if j > i: (T, S).
        """
        raise NotImplementedError('Begin with -slope * position.distances(i, j), then bend the '
                                  'line: a logarithm, a square root, a horizon ...')


# ---------------------------------------------------------------------- tuning

def tune_scales(model, batches, rate, per_channel=False):
    """
    11. HeadScale, section 3 of the paper, in about 15 lines. Freeze all weights. Train only the
    head scales: block.attn.head_scale, (H, 1), of each block in model.blocks. Take one step for
    each batch, down the gradient of the mean loss, model(inputs, targets).mean(). Use any
    optimizer. After each step raise every scale below 1 to 1, Eq. (6).
    batches: a list of (inputs, targets), (B, T) token ids each; rate: the learning rate. Return
    nothing: the result is the scales in the model.
    per_channel=True (beyond the paper): one scale for each channel of a head, (H, D). It starts at
    the scale of its head, and may fall below 1. D is model.config.head_dim. To change the shape,
    assign an array (n_layer, H, D) to model.head_scale.
    """
    raise NotImplementedError('Begin with model.requires_grad_(False). Then let only the scales '
                              'require a gradient, and give them to an optimizer.')


# ---------------------------------------------------------------------- DAPE

def dape(scores, bias, first, second):
    """
    12. DAPE V2, arXiv:2410.04798, Eq. (3): S + B + f([S; B]). The scores S and the biases B of all
    heads are the 2H channels of a map. f is a convolution over the keys, a LeakyReLU (slope 0.01)
    and a second convolution. Convolve as torch does, without reversing the kernel. The middle of
    the kernel is at the output's key.
    Set keys j > i to 0 in the map, because f would otherwise see the future. Left of key 0, both
    convolutions read 0. Right of key T - 1, the map continues with zeros. The first convolution
    also computes the (K - 1) / 2 keys there that the second one reads.
    scores, bias: (H, T, T); first: (width, 2H, K); second: (H, width, K); K is odd. Returns
    (H, T, T), -inf at j > i.
    """
    raise NotImplementedError('Begin with torch.cat((scores, bias)), with zeros above the '
                              'diagonal. Read it as T rows of 2H channels: F.conv1d takes '
                              '(T, 2H, T).')


def leaky(scores):
    """Another f for DAPE, of one head: (T, T) to (T, T). Is it causal?"""
    kernel = scores.new_tensor([[[0.5, 1.0, 0.5]]])
    return F.conv1d(scores[:, None], kernel, padding=1)[:, 0].tril()


def leaks(f, T):
    """
    13. Find the leak: which future scores does f use? f maps float64 scores (T, T) to (T, T), as
    leaky() does. Of row i, attention uses only the outputs at keys j <= i.
    Returns (T, T) bool: True at (i, j) if j > i and the score at (i, j) changes an output of row i
    at a key <= i. Give f random scores. If they were all 0, a product of two scores would stay 0.
    """
    raise NotImplementedError('Begin with one score: change it by 1. Which outputs change?')


# ---------------------------------------------------------------------- reading beyond L

def sliding_windows(n, length, stride):
    """
    14. Perplexity of n tokens by sliding windows. Return a list of (lo, hi, scored), in order. A
    window reads tokens lo ... hi - 1, at most `length` of them, and scores the last `scored`. Token
    0 has no token before it, so it is never scored. Score all other tokens, each once. The window
    of each must begin at 0 or hold at least length - stride tokens before it. Each window begins
    `stride` tokens after the one before; only the last may begin fewer tokens after it.
    """
    raise NotImplementedError('Begin with (0, length, length - 1). Where does the next window end? '
                              'Which of its tokens are not scored yet?')


def far_repeat_gain(tokens, losses, cut_losses, g, L):
    """
    15. Does a model find a token far beyond L? Let s be the latest position before t at which
    tokens[s - g:s] equals tokens[t - g:t]. A target t >= 2L counts if s exists and
    s < t - L.
    The gain of t is its loss when the model sees only the last L tokens, minus its loss when the
    model sees everything.
    tokens: (n,) ids; losses: (n,), the loss of each token as a target; cut_losses: (n,), the same
    with only the last L tokens. Returns the mean gain of the targets that count, in nats.
    """
    raise NotImplementedError('Begin with a list of the places s that have the same g tokens '
                              'before them.')


def gain_and_headroom(losses, own_cut, cut, same, val_cut, val_same):
    """
    16. How large could a gain be? For each target of exercise 15 you have three losses. `losses`: a
    tuned model sees everything. `own_cut`: the tuned model sees only the last L tokens. `cut`: the
    untuned model sees only the last L tokens. `same` is True if a copy is right: the target equals
    tokens[s], with the s of exercise 15.
    gain is the mean of cut - losses. It uses the cut of the untuned model: tuning may make a
    model's own cut worse, which would count as a gain.
    headroom is the gain of a copy cache (the simplest form of Grave et al. 2017, arXiv:1612.04426):
    the mean of cut minus the mean loss of the cache. The cache gives the target the probability
    (1 - w) e^-cut + w c. c is 1 if the copy is right, else 0. w in [0, 1) gives the smallest mean
    loss on validation text, to four digits. The mean loss is convex in w, so a fine grid or a
    bisection finds w.
    R = gain / headroom.
    losses, own_cut, cut: (n,) nats; same: (n,) bool; val_cut, val_same: (m,), `cut` and `same` of
    the validation targets. Returns (gain, headroom, R).
    """
    raise NotImplementedError('Begin with a function of losses, copies and w that returns the '
                              'losses of the mixture. Use it to find w.')


# ---------------------------------------------------------------------- local order

def short_conv(x, w, before=None):
    """
    17. The short convolution of Canon layers, arXiv:2512.17351:
    y_t = x_t + sum_tau w_tau x_(t - tau), tau = 0 ... taps - 1.
    w_tau holds one number per channel, and the product is channel by channel. Before the first
    token of the text, x is 0.
    A model that reads a text in parts keeps the last taps - 1 inputs. They are `before` of the next
    part. y then equals the y of the whole text in one piece.
    x: (B, T, C); w: (taps, C); before: (B, taps - 1, C), or None where a text begins. Returns
    (B, T, C).
    """
    raise NotImplementedError('Begin with torch.cat((before, x), dim=1). If before is None, take '
                              'zeros. Which slice of it holds x_(t - tau) for every t?')


if __name__ == '__main__':
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    # torch.compile looks for the names that a class uses in its module, and __main__ becomes the
    # program that is run.
    from lessons import exercises
    position.METHODS['own'] = exercises.OwnBias
    sys.argv = sys.argv[1:]
    runpy.run_path(str(ROOT / sys.argv[0]), run_name='__main__')
