"""
Exercises on length generalization, from easy to hard. Each is a formula with its source: replace
the `raise` by code of your own, in PyTorch, then let it be graded:

$ make lessons                                                # all of them
$ python -m pytest lessons/test_exercises.py -k entropy       # those with this name

The project itself is the solution; lessons/README.md says which file holds each, and how long it
may take. Exercise 10 is a position bias of your own, which every stage knows as --position=own:

$ python -m lessons.exercises train.py --position=own --out_dir=out/demo/own --max_iters=800
$ python -m lessons.exercises eval_ppl.py --out_dir=out/demo/own --protocol=position

Shapes: H heads of size D, T tokens, so that q, k and v are (H, T, D) and scores or attention
(H, T, T), a row for each query i, a column for each key j, both from 0 on. s_ij is a score, a_ij
attention. Numbers may come in float64: make new tensors with the dtype of what you were given.
"""

import math
import runpy
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import position

# ---------------------------------------------------------------------- the softmax scale

def causal_attention(q, k, v, scale):
    """
    1. Attention with a softmax scale per head, Eq. (4) of arXiv:2404.12224 (the paper):
    s_ij = scale_h q_i . k_j / sqrt(D);  a_ij = exp(s_ij) / sum_{m <= i} exp(s_im) for j <= i, else
    0;  y_i = sum_j a_ij v_j.  q, k, v: (H, T, D); scale: (H,). Returns (H, T, D).
    """
    raise NotImplementedError('Begin with the scores, q @ k.mT, and hide the keys j > i.')


def scale_queries(q, scale):
    """
    2. The same without touching attention's code, so that any fused kernel will do: change the
    queries such that causal_attention(new, k, v, ones) is causal_attention(q, k, v, scale).
    q: (H, T, D); scale: (H,). Returns (H, T, D).
    """
    raise NotImplementedError('Scores are linear in q: what does a multiple of q do to them?')


def fold_scale(weight, scale):
    """
    3. The same in the weights, so that it costs nothing in use and any engine can read it. Queries
    are W x, and row h D + d of W gives channel d of head h. Change W so that the queries come out
    scaled. weight: (H D, C); scale: (H,). Returns (H D, C).
    """
    raise NotImplementedError('Which rows of W belong to head h?')


def fit_scale(position, best, L):
    """
    4. How the best uniform scale grows: fit best = 1 + a ln(position / L) by least squares, over
    positions beyond L alone; 1 is fixed, as at L nothing is to be changed. Appendix B of the paper.
    position, best: (n,); L: the training length in tokens. Returns a.
    """
    raise NotImplementedError('Set the derivative of sum (best - 1 - a x)^2 with respect to a to '
                              '0, where x = ln(position / L).')


# ---------------------------------------------------------------------- attention entropy

def entropy(attention):
    """
    5. How widely each query looks: H_i = -sum_j a_ij ln a_ij in nats, where 0 ln 0 is 0. Eq. (2) of
    the paper. attention: (H, T, T). Returns (H, T), from 0 to ln(i + 1).
    """
    raise NotImplementedError('Begin with a * ln a, and look at what it gives where a is 0.')


def entropy_without_matrix(q, k):
    """
    6. The same from q and k, never holding T x T numbers: put ln a_ij = s_ij - ln sum_m exp(s_im)
    into the formula, and H_i = ln sum_{j <= i} exp(s_ij) - sum_j a_ij s_ij. Row by row will do; one
    fused call is faster. s_ij = q_i . k_j / sqrt(D). q, k: (H, T, D). Returns (H, T).
    """
    raise NotImplementedError('Begin with one query: torch.logsumexp of its scores, less the mean '
                              'score under its attention.')


# ---------------------------------------------------------------------- where a token stands

def rotate(x, place, base=10000.0):
    """
    7. RoPE, Su et al. 2021, in Llama's layout: pair n of a head is (x[n], x[n + D/2]), turned
    counter-clockwise by the angle place * base^(-2n/D), n = 0 ... D/2 - 1. So q_i . k_j depends on
    i - j alone. x: (H, T, D); place: (T,), where the tokens stand. Returns (H, T, D).
    """
    raise NotImplementedError('Begin with the angles, (T, D/2). (a, b) turned by t is '
                              '(a cos t - b sin t, b cos t + a sin t).')


def yarn_frequencies(D, base, s, L):
    """
    8. YaRN, Peng et al. 2023, section 3.2: the angle per position of each pair of RoPE, extended by
    a factor s. Pair n turns L / (2 pi base^(2n/D)) times in L tokens, so the pair that turns r
    times is n(r) = D ln(L / (2 pi r)) / (2 ln base). Pairs up to low = floor(n(32)), but not below
    0, stay as they are; those from high = ceil(n(1)), but not above D - 1, are divided by s; the
    share of the latter grows linearly between. Where high is not above low, the pairs after low are
    divided whole. Returns (D/2,) float64. (YaRN's temperature is left out.)
    """
    raise NotImplementedError('Begin with RoPE and the share, a straight line that is 0 at low and '
                              '1 at high, clamped.')


def alibi(n_head, i, j):
    """
    9. ALiBi, Press et al. 2022: what is added to the scores, -m_h (i - j), with the slopes m_h =
    2^(-8h/H) for h = 1 ... H. n_head: H, a power of two; i: (T,) positions of queries, j: (S,) of
    keys. Returns (H, T, S); what it holds at j > i does not matter.
    """
    raise NotImplementedError('Begin with the distances, i[:, None] - j.')


class OwnBias(position.Bias):
    """
    10. A position bias of your own: `bias` gives what is added to the scores. Learned numbers, if
    any, are nn.Parameters made in __init__. The bias must depend on i - j alone, give far keys no
    more than near ones, be finite up to 64 L, where L = config.block_size, and pass a gradient to
    each of its parameters. What it gives at j > i does not matter, but must be finite. Then train
    it by the command on top, and put it beside NoPE: lessons/README.md.
    """

    def __init__(self, config):
        super().__init__(config)
        self.n_head = config.n_head  # H

    def bias(self, i, j):
        """
        i: (T,) positions of queries, j: (S,) of keys. Returns (H, T, S). Where prompts differ in
        length, they are (B, T) and (B, S), and it returns (B, H, T, S): position.distances(i, j),
        i - j or 0 at j > i, is (1, T, S) or (B, 1, T, S), and so serves both.
        """
        raise NotImplementedError('Begin with alibi(), then bend the line: a logarithm, a square '
                                  'root, a horizon ...')


# ---------------------------------------------------------------------- tuning

def tune_scales(model, batches, rate, per_channel=False):
    """
    11. HeadScale, section 3 of the paper, in some 15 lines: all weights stay frozen, and the head
    scales of all layers, block.attn.head_scale of each of model.blocks, (H, 1), follow the gradient
    of the mean loss, model(inputs, targets).mean(): one step a batch, by an optimizer of your
    choice. After each step no scale is left below 1, Eq. (6). batches: a list of (inputs, targets),
    (B, T) ids each; rate: the learning rate. Leaves the scales in the model.
    per_channel (beyond the paper): one scale for each channel of a head, (H, D), that starts at its
    head's; without the bound. D is model.config.head_dim; `model.head_scale = ` takes (n_layer, H,
    D).
    """
    raise NotImplementedError('Begin with model.requires_grad_(False), then let the scales alone '
                              'require a gradient, and give them to an optimizer.')


# ---------------------------------------------------------------------- DAPE

def dape(scores, bias, first, second):
    """
    12. DAPE V2's Eq. (3): S + B + f([S; B]). The scores and the bias of all heads are 2H channels
    of a map; f is a convolution over the keys, a LeakyReLU (slope 0.01), and another convolution.
    Keys j > i are 0 in the map, or f would see the future. In torch's way of convolution a middle
    key stands in the middle of the kernel, and left of key 0 both convolutions see 0. To its right
    each row goes on in zeros, so that f's middle layer has (K - 1) / 2 keys more than T.
    scores, bias: (H, T, T); first: (width, 2H, K); second: (H, width, K), K odd. Returns (H, T, T),
    -inf at j > i.
    """
    raise NotImplementedError('Begin with torch.cat((scores, bias)), zeros above the diagonal, as '
                              'T rows of 2H channels: F.conv1d takes (T, 2H, T).')


def leaky(scores):
    """The f of a DAPE that somebody else wrote, for one head: (T, T) to (T, T). Is it causal?"""
    kernel = scores.new_tensor([[[0.5, 1.0, 0.5]]])
    return F.conv1d(scores[:, None], kernel, padding=1)[:, 0].tril()


def leaks(f, T):
    """
    13. Find the leak: which scores of the future does f use? f: (T, T) float64 scores to (T, T), as
    leaky() above; row i is used up to key i. Returns (T, T) bool: True at (i, j) where j > i and
    some output of row i at a key <= i changes with the score at (i, j). Give f random scores: at
    zeros a product does not move.
    """
    raise NotImplementedError('Begin with one score: change it a little, and see which outputs '
                              'move.')


# ---------------------------------------------------------------------- reading beyond L

def sliding_windows(n, length, stride):
    """
    14. Perplexity of n tokens by sliding windows: a list of (lo, hi, scored), in order. A window
    reads tokens lo ... hi - 1, at most `length` of them, and scores its last `scored`. Each token
    but token 0, before which there is nothing, is scored once, by a window that begins at 0 or
    holds at least length - stride tokens before it; a window moves on by `stride`, the last perhaps
    by less.
    """
    raise NotImplementedError('Begin with (0, length, length - 1). Where does the next window end, '
                              'and which of its tokens were not scored yet?')


def far_repeat_gain(tokens, losses, cut_losses, g, L):
    """
    15. Is a token far beyond L found? A target t >= 2L counts if the g tokens before it,
    tokens[t - g:t], stood before a token s, tokens[s - g:s], with s < t - L, and before none with
    t - L <= s < t. Its gain is its loss with a context cut to L tokens less that with all of it.
    tokens: (n,) ids; losses, cut_losses: (n,), of each token as a target. Returns the mean gain in
    nats over the targets that count.
    """
    raise NotImplementedError('Begin with a list of the places s where the same g tokens stood '
                              'before.')


def gain_and_headroom(losses, own_cut, cut, same, val_cut, val_same):
    """
    16. A gain says little until you know how much there was to gain. Of each target of exercise 15
    you have the loss of a tuned model with all of the context, `losses`; its loss with the context
    cut to L tokens, `own_cut`; and the untuned model's loss with that cut, `cut`. `same` is True
    where the copy is right: the token that followed the earlier place, tokens[s], is the target.
    gain is the mean of cut - losses. The untuned model's cut is used because tuning may make a
    model's own cut worse, which would count as a gain.
    headroom is what a copy cache gains (Grave et al. 2017, arXiv:1612.04426, in its simplest form).
    The cache gives the target the probability (1 - w) e^-cut + w c, where c is 1 if the copy is
    right, else 0. headroom is the mean of cut minus the mean loss of the cache. Choose the w in
    [0, 1) with the smallest mean loss on validation text, to four digits. The mean loss is convex
    in w, so a fine grid or a bisection finds it.
    R = gain / headroom. losses, own_cut, cut: (n,) nats; same: (n,) bool; val_cut, val_same: (m,),
    `cut` and `same` of the validation targets. Returns (gain, headroom, R).
    """
    raise NotImplementedError('Begin with a function of losses, copies and w that returns the '
                              'losses of the mixture. Then find w by it.')


# ---------------------------------------------------------------------- local order

def short_conv(x, w, before=None):
    """
    17. The short convolution of Canon layers, arXiv:2512.17351: y_t = x_t + sum_tau w_tau
    x_(t - tau), tau = 0 ... taps - 1. The product is channel by channel: w_tau holds one number for
    each channel. x is 0 before the first token of the text. A model that reads a text in parts
    keeps the last taps - 1 inputs in its cache. They are `before` when it reads the next part, and
    y is then the same as if it had read the text in one piece.
    x: (B, T, C); w: (taps, C); before: (B, taps - 1, C), or None where a text begins. Returns
    (B, T, C).
    """
    raise NotImplementedError('Begin with torch.cat((before, x), dim=1), where before is zeros if '
                              'it is None. Which slice of it holds x_(t - tau) for every t?')


if __name__ == '__main__':
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        sys.exit(__doc__)
    position.METHODS['own'] = OwnBias
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name='__main__')
