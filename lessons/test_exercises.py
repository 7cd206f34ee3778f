"""
The grader of lessons/exercises.py, run by `make lessons`. What is right is computed here from the
formulas alone, one number at a time in float64, and so are the usual mistakes: a message says what
was expected, where the first difference is, and which mistake gives just that. A mistake that gives
something else is not named.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from model import ModelConfig, Transformer

H, T, D = 4, 7, 4  # as many heads as channels, so that a scale on the wrong axis is no crash
SCALE = np.array([0.5, 1.0, 1.5, 2.0])


@pytest.fixture
def student():
    from lessons import exercises
    return exercises


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def refuse(message):
    pytest.fail(message, pytrace=False)


def run(exercise, *given, **settings):
    """What a student's function returns."""
    try:
        found, begin = exercise(*given, **settings), None
    except NotImplementedError as error:
        begin = error
    if begin:
        refuse(f'{exercise.__qualname__}() is still to be written. {begin}')
    return found


def call(exercise, *inputs):
    """What a student's function gives, arrays going in and coming out."""
    given = [torch.tensor(x) if isinstance(x, np.ndarray) else x for x in inputs]
    found = run(exercise, *given)
    if found is None:
        refuse(f'{exercise.__qualname__}() returns nothing. Usual mistake: a forgotten return.')
    for x, was in zip(given, inputs):
        if isinstance(was, np.ndarray) and not np.array_equal(x, was):
            refuse(f'{exercise.__qualname__}() has changed what it was given. Usual mistake: an '
                   'operation in place, such as q *= scale.')
    return found.detach().numpy() if torch.is_tensor(found) else found


def grade(name, found, right, mistakes):
    """Fail unless `found` is `right`. mistakes: {what was done wrong: what that gives}."""
    found, right = np.asarray(found, float), np.asarray(right, float)
    if found.shape != right.shape:
        refuse(f'{name}: the result has shape {found.shape}; it should have {right.shape}.')
    same = np.isclose(found, right, 1e-4, 1e-5)
    if same.all():
        return
    place = tuple(int(n) for n in np.argwhere(~same)[0])
    where = f'at {list(place)}, the first of {(~same).sum()} of {same.size}, ' if place else ''
    causes = [cause for cause, wrong in mistakes.items()
              if np.isclose(found, wrong, 1e-4, 1e-5, equal_nan=True).all()]
    advice = 'None of the usual mistakes gives this.'
    if causes:
        advice = f"This is what comes out where {', or where '.join(causes)}."
    refuse(f'{name}: {where}{right[place]:.6g} was expected, not {found[place]:.6g}. '
           f'{advice}')


# ---------------------------------------------------------------------- the softmax scale

def plain_attention(q, k, scale, later=lambda score: 0):
    """Attention (H, T, T) by its formula. later: what counts for exp(score) of a later key."""
    a = np.zeros((len(q), q.shape[1], q.shape[1]))
    for h, i, j in np.ndindex(a.shape):
        score = scale[h] * (q[h, i] @ k[h, j]) / math.sqrt(q.shape[2])
        a[h, i, j] = math.exp(score) if j <= i else later(score)
    return a / a.sum(-1, keepdims=True)


def test_causal_attention(student):
    q, k, v = draw(3, H, T, D)
    of_channel = plain_attention(q * SCALE, k, np.ones(H))
    grade('causal_attention', call(student.causal_attention, q, k, v, SCALE),
          plain_attention(q, k, SCALE) @ v, {
        'scores are not divided by sqrt(D)': plain_attention(q, k, SCALE * math.sqrt(D)) @ v,
        'scores are divided by D': plain_attention(q, k, SCALE / math.sqrt(D)) @ v,
        'queries see later keys': plain_attention(q, k, SCALE, later=math.exp) @ v,
        'scores of later keys are 0, which exp makes 1: they should be -inf': plain_attention(
            q, k, SCALE, later=lambda score: 1) @ v,
        'the scale is left out': plain_attention(q, k, np.ones(H)) @ v,
        'a scale belongs to a channel, not to a head': of_channel @ v})


def test_scale_queries(student):
    q = draw(H, T, D)
    grade('scale_queries', call(student.scale_queries, q, SCALE),
          [scale * head for scale, head in zip(SCALE, q)], {
        'a scale belongs to a channel, not to a head: write scale[:, None, None]': q * SCALE,
        'the root is taken, as if k were scaled, too': q * SCALE[:, None, None] ** 0.5})


def test_fold_scale(student):
    weight = draw(H * D, 16)
    by_row = np.array([SCALE[row // D] for row in range(H * D)])
    grade('fold_scale', call(student.fold_scale, weight, SCALE), weight * by_row[:, None], {
        'columns are scaled, which changes x': weight * by_row,
        'rows of all heads are mixed: repeat_interleave, not repeat': weight * np.tile(
            SCALE, D)[:, None]})


def test_fit_scale(student):
    position = np.array([50.0, 100, 150, 200, 400, 800])
    best = np.array([1.3, 0.9, 1.2, 1.1, 1.7, 1.9])
    x = np.log(position / 100)

    def slope(x, y):
        return sum(x * (y - 1)) / sum(x * x)

    grade('fit_scale', call(student.fit_scale, position, best, 100), slope(x[2:], best[2:]), {
        'positions up to L are fitted, too': slope(x, best),
        'the 1 is fitted instead of fixed': np.polyfit(x[2:], best[2:], 1)[0],
        'positions up to L are fitted, too, and the 1 as well': np.polyfit(x, best, 1)[0],
        'position is not divided by L': slope(np.log(position[2:]), best[2:])})


# ---------------------------------------------------------------------- attention entropy

def plain_entropy(a):
    return [[sum(-x * math.log(x) for x in row if x > 0) for row in head] for head in a]


def test_entropy(student):
    a = plain_attention(*draw(2, H, T, D), 3 * SCALE)
    right = np.array(plain_entropy(a))
    with np.errstate(all='ignore'):
        not_a_number = -(a * np.log(a)).sum(-1)
    found = call(student.entropy, a)
    grade('entropy', found, right, {
        '0 ln 0 is not a number: use torch.special.entr, or xlogy': not_a_number,
        'the logarithm is to base 2: these are bits': right / math.log(2),
        'the sign is left out': -right})
    if found.min() < 0:
        refuse(f'entropy: {found.min():.1g} was found, but it is never below 0. Usual mistake: '
               'log(a + 1e-9), where the logarithm should be of a itself.')


class NoMatrix(TorchDispatchMode):
    """Refuses tensors of `most` numbers."""

    def __init__(self, most):
        super().__init__()
        self.most = most

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        made = op(*args, **kwargs or {})
        for x in made if isinstance(made, (tuple, list)) else [made]:
            if torch.is_tensor(x) and x.numel() >= self.most:
                refuse(f'entropy_without_matrix: {op} made {tuple(x.shape)}, the whole matrix.'
                       ' Usual mistake: q @ k.mT of all queries at once.')
        return made


def test_entropy_without_matrix(student):
    q, k = draw(2, 2, 40, D)
    a = plain_attention(q, k, np.ones(2))
    s = np.where(a > 0, q @ k.swapaxes(1, 2), 0)
    with NoMatrix(40 * 40):
        found = call(student.entropy_without_matrix, q, k)
    sums = np.log(np.where(a > 0, np.exp(s / math.sqrt(D)), 0).sum(-1))
    grade('entropy_without_matrix', found, plain_entropy(a), {
        'the mean score is not divided by sqrt(D)': sums - (a * s).sum(-1),
        'the mean score is left out': sums,
        'queries see later keys': plain_entropy(plain_attention(
            q, k, np.ones(2), later=math.exp))})


# ---------------------------------------------------------------------- where a token stands

def plain_rotate(x, place, sign=1, step=2, interleaved=False):
    y = np.zeros_like(x)
    for t, n in np.ndindex(len(place), D // 2):
        a, b = (2 * n, 2 * n + 1) if interleaved else (n, n + D // 2)
        turn = np.exp(1j * sign * place[t] * 100.0 ** (-step * n / D))
        pair = (x[:, t, a] + 1j * x[:, t, b]) * turn
        y[:, t, a], y[:, t, b] = pair.real, pair.imag
    return y


def test_rotate(student):
    x, place = draw(H, T, D), np.arange(3, T + 3)
    grade('rotate', call(student.rotate, x, place, 100.0), plain_rotate(x, place), {
        'neighbours are a pair: that is the layout of the paper': plain_rotate(
            x, place, interleaved=True),
        'pairs turn clockwise': plain_rotate(x, place, sign=-1),
        'the angle is base^(-n/D)': plain_rotate(x, place, step=1),
        'place is not looked at': plain_rotate(x, np.arange(T))})


def plain_yarn(base, s, L, size=16, least=0, most=15, clamp=True, turns=(32, 1), steep=True):
    """steep: where high is not above low, the pairs after low are divided whole."""
    low, high = (size * math.log(L / (2 * math.pi * r)) / (2 * math.log(base)) for r in turns)
    low, high = max(least, math.floor(low)), min(most, math.ceil(high))
    found = []
    for n in range(size // 2):
        share = float(n > low) if high == low or steep and high < low else (n - low) / (high - low)
        share = min(1, max(0, share)) if clamp else share
        found.append(base ** (-2 * n / size) * (1 - share + share / s))
    return np.array(found)


def test_yarn_frequencies(student):
    # low < 0 at 64; high = low at 4; high is past D/2 - 1 at 100000, past D - 1 with the base 10.
    for base, L in ((10000.0, 512), (10000.0, 64), (10000.0, 4), (10000.0, 100000), (10.0, 600)):
        s, right, plain = 4.0, plain_yarn(base, 4.0, L), plain_yarn(base, 1.0, L)
        grade(f'yarn_frequencies(16, {base}, {s}, {L})',
              call(student.yarn_frequencies, 16, base, s, L), right, {
            'the fast pairs are divided and the slow ones stay': plain * (1 + 1 / s) - right,
            'all pairs are divided by s: position interpolation': plain / s,
            'low is n(1) and high is n(32): 32 and 1 are swapped': plain_yarn(
                base, s, L, turns=(1, 32)),
            '32 and 1 are swapped, so that high - low is negative': plain_yarn(
                base, s, L, turns=(1, 32), steep=False),
            'the share is not clamped to 0 ... 1': plain_yarn(base, s, L, clamp=False),
            'low may be below 0': plain_yarn(base, s, L, least=-99),
            'high ends at D/2 - 1 instead of D - 1': plain_yarn(base, s, L, most=7),
            'high may be above D - 1': plain_yarn(base, s, L, most=99)})


def test_alibi(student):
    i, j = np.array([5, 6]), np.arange(7)
    visible = j <= i[:, None]

    def right(i, j, first=1):
        slopes = [2.0 ** (-8 * (h + first) / H) for h in range(H)]
        return np.array([[[-slope * (n - m) for m in j] for n in i] for slope in slopes]) * visible

    grade('alibi', call(student.alibi, H, i, j) * visible, right(i, j), {
        'far keys get more than near ones: the sign': -right(i, j),
        'the first head has h = 0': right(i, j, first=0),
        'i and j are not looked at': right(np.arange(2), j)})


def test_own_bias(student):
    torch.manual_seed(0)
    own, far = student.OwnBias(model_config()), torch.arange(64 * 8)
    found = call(own.bias, far[-1:], far)
    problems = {
        f'it should be ({H}, T, S) = ({H}, 1, 512), but is {found.shape}':
            found.shape != (H, 1, 512),
        'it is not finite at each distance': not np.isfinite(found).all(),
        'a far key gets more than a near one; usual mistake: the sign':
            (np.diff(found) < 0).any(),
        'it is the same everywhere, which softmax does not see': np.ptp(found) == 0}
    later = call(own.bias, far[-2:-1] + 9, far[:-1] + 9)
    problems['it depends on more than i - j: use the i and j given, not torch.arange'] = (
        later.shape != found[..., 1:].shape or not np.allclose(later, found[..., 1:], 1e-4, 1e-5))
    problems['it is not finite at j > i; usual mistake: a logarithm or a root of i - j < 0'] = (
        not np.isfinite(call(own.bias, far[:9], far)).all())
    for problem, there in problems.items():
        if there:
            refuse(f'OwnBias: {problem}.')
    try:
        of_two = own.bias(far[:18].view(2, 9), far.expand(2, -1)).shape
    except (RuntimeError, IndexError) as error:
        of_two = str(error)
    if of_two != (2, H, 9, 512):
        refuse(f'OwnBias: of two sequences, i (2, 9) and j (2, 512), it should be (2, {H}, 9, '
               f'512), but is {of_two}. Usual mistake: i[:, None] - j for position.distances().')
    parameters = dict(own.named_parameters())
    if parameters:
        (own.bias(far[-9:], far) * torch.tensor(draw(H, 9, 512))).sum().backward()
    for name, p in parameters.items():
        if p.grad is not None and not p.grad.isfinite().all():
            refuse(f'OwnBias: the gradient of {name} is not finite. Usual mistake: a logarithm or '
                   'a root of i - j < 0; at j > i clamp i - j to 0.')
        if p.grad is None or not p.grad.abs().sum() > 0:
            refuse(f'OwnBias: no gradient reaches {name}, so it would not be learned.')


# ---------------------------------------------------------------------- tuning

def model_config():
    return ModelConfig(vocab_size=11, block_size=8, n_layer=2, n_head=H, n_kv_head=2, n_embd=16,
                       n_hidden=16)


def random_model():
    model = Transformer(model_config()).init_weights(torch.Generator().manual_seed(0))
    for p in model.parameters():
        if p.dim() == 2 and p.requires_grad:  # so large that attention is far from uniform
            p.data *= 3
    model.head_scale = 1.0
    return model


def mean_loss(model, batch):
    logits, rows = model(batch[0]).detach().double().numpy(), batch[1].numpy()[..., None]
    return (np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, rows, -1)[..., 0]).mean()


def slopes(model, batch):
    """How the loss changes with each scale of each layer, by trying a little more and less."""
    rows = []
    for block in model.blocks:
        scale = block.attn.head_scale.data.view(-1)
        for n, was in enumerate(scale.tolist()):
            scale[n] = was + 0.02
            more = mean_loss(model, batch)
            scale[n] = was - 0.02
            rows.append((more - mean_loss(model, batch)) / 0.04)
            scale[n] = was
    return np.array(rows)


def require_bound(model, mistake):
    least = min(block.attn.head_scale.min() for block in model.blocks)
    if least < 1:
        refuse(f'tune_scales: a scale is {least:.4f}, below 1. Usual mistake: Eq. (6), the clamp '
               f'after each step, was {mistake}.')


def tuned(student, batches, per_channel, rate=0.05):
    """A model that the student has tuned."""
    model, stuck = random_model(), False

    def before_each_pass(*inputs):
        if not per_channel:
            require_bound(model, 'left for the end')

    asked = model.register_forward_pre_hook(before_each_pass)
    try:
        run(student.tune_scales, model, batches, rate, per_channel=per_channel)
    except RuntimeError as error:
        stuck = 'does not require grad' in str(error)
        if not stuck:
            raise
    if stuck:
        refuse('tune_scales: nothing takes part in the gradient. Usual mistake: the scales lack '
               'requires_grad_(True) after model.requires_grad_(False).')
    asked.remove()
    return model


def require_frozen(model):
    start = random_model()
    for name, p in model.named_parameters():
        if name.endswith('head_scale'):
            continue
        if not torch.equal(p, start.get_parameter(name)):
            refuse(f'tune_scales: {name} has changed, but all weights are frozen. Usual mistake: '
                   'the optimizer got model.parameters().')
        if p.grad is not None:
            refuse(f'tune_scales: a gradient was computed for {name}, but all weights are frozen. '
                   'Usual mistake: model.requires_grad_(False) was left out.')


def require_tuned(student, per_channel):
    start, what = random_model(), f'tune_scales(per_channel={per_channel})'
    tokens = torch.randint(11, (8, 17), generator=torch.Generator().manual_seed(1))
    batch = tokens[:, :-1], tokens[:, 1:]
    if per_channel:
        start.head_scale = torch.ones(2, H, D)
    slope, model = slopes(start, batch), tuned(student, [batch], per_channel)
    require_frozen(model)
    found = [block.attn.head_scale.detach() for block in model.blocks]
    shape = (H, D) if per_channel else (H, 1)
    if any(scale.shape != shape for scale in found):
        refuse(f'{what}: a layer has scales of {tuple(found[0].shape)}, not {shape}. Usual '
               'mistake: they were not expanded to one per channel.')
    if not per_channel:
        require_bound(model, 'left out')

    # One step goes down the gradient.
    moved = torch.cat([scale.flatten() for scale in found]).double().numpy() - 1
    clear = abs(slope) > 0.1 * abs(slope).max()
    right = np.where(slope < 0, moved > 0, moved < 0 if per_channel else moved == 0)
    for n in np.flatnonzero(clear & ~right)[:1]:
        mistake = 'the optimizer did not get this scale'
        if (clear & (slope * moved > 0)).any():
            mistake = 'the step goes up the gradient'
        elif per_channel and moved.any() and moved.min() == 0:
            mistake = 'the bound was kept for channels, too'
        refuse(f'{what}: the loss changes by {slope[n]:.4f} a unit of scale {n}, but one step '
               f'changed it by {moved[n]:.4f}. Usual mistake: {mistake}.')

    # At a rate of 0 all steps have the same gradient, so what is left after two is no more.
    one, two = [[p.grad for p in tuned(student, [batch] * steps, per_channel, 0.0).parameters()
                 if p.grad is not None] for steps in (1, 2)]
    if one and all(torch.allclose(p, 2 * q, 1e-3) for p, q in zip(two, one)):
        refuse(f'{what}: the gradient of the second step holds that of the first, too. Usual '
               'mistake: zero_grad() was left out.')
    before = mean_loss(start, batch)
    after = mean_loss(tuned(student, [batch] * 20, per_channel), batch)
    if not after < before:
        refuse(f'{what}: 20 steps changed the loss from {before:.4f} to {after:.4f}.')


def test_tune_scales(student):
    require_tuned(student, per_channel=False)


def test_tune_channel_scales(student):
    require_tuned(student, per_channel=True)


# ---------------------------------------------------------------------- DAPE

def plain_convolution(x, kernel, keys):
    """Row by row, x: {(channel, key): number}, 0 elsewhere; kernel: (channels out, in, K)."""
    y, K = {}, kernel.shape[2]
    for c, j in itertools.product(range(len(kernel)), keys):
        y[c, j] = sum(kernel[c, n, t] * x.get((n, j + t - K // 2), 0)
                      for n in range(kernel.shape[1]) for t in range(K))
    return y


def plain_dape(scores, bias, first, second, hidden=True, goes_on=True, residual=True,
               begins_before=False):
    (n_head, n), half = scores.shape[:2], first.shape[2] // 2
    keys = range(-half * begins_before, n + half * goes_on)  # of the middle layer
    result = np.full(scores.shape, -np.inf)
    for i in range(n):
        end = i + 1 if hidden else n
        x = {(c, j): row[i, j] for c, row in enumerate((*scores, *bias)) for j in range(end)}
        middle = plain_convolution(x, first, keys)
        middle = {at: max(y, 0.01 * y) for at, y in middle.items()}
        f = plain_convolution(middle, second, range(n))
        for h, j in np.ndindex(n_head, i + 1):
            result[h, i, j] = residual * (scores[h, i, j] + bias[h, i, j]) + f[h, j]
    return result


def test_dape(student):
    inputs = (*draw(2, 2, 6, 6), draw(5, 4, 3, seed=1), draw(2, 5, 3, seed=2))
    found, right = np.asarray(call(student.dape, *inputs)), plain_dape(*inputs)
    if found.shape == right.shape and np.isfinite(found[np.isinf(right)]).any():
        refuse('dape: at j > i it should be -inf, for softmax to hide these keys.')
    grade('dape', found, right, {
        'f sees scores of later keys, which tells it the next token': plain_dape(
            *inputs, hidden=False, goes_on=False),
        'the middle layer ends at the last key': plain_dape(*inputs, goes_on=False),
        'the middle layer begins at key -1 instead of zeros left of key 0': plain_dape(
            *inputs, begins_before=True),
        'S + B is not added to f': plain_dape(*inputs, residual=False)})


def test_leaks(student):
    later = np.triu(np.ones((T, T), bool), 1)
    one_late = later & ~np.triu(later, 2)
    cases = {
        'leaky': (student.leaky, one_late),
        'a causal f': (lambda s: s.tril() ** 2, later & False),
        's itself': (lambda s: s, later & False),
        'sums over rows': (lambda s: s.cumsum(0), later & False),
        's - its mean over the whole row': (lambda s: (s - s.mean(1, keepdim=True)).tril(), later),
        's times the score after it': (lambda s: (s * s.roll(-1, 1)).tril(), one_late)}
    for name, (f, right) in cases.items():
        grade(f'leaks, of {name}', call(student.leaks, f, T), right, {
            'the past counts, too: keep j > i alone': right | ~later,
            'i and j are exchanged': right.T,
            'nothing is found: the scores were zeros, or the changes too small': right & False,
            'outputs at keys after i, or of other rows, count, too': later})


# ---------------------------------------------------------------------- reading beyond L

def test_sliding_windows(student):
    for n, length, stride in ((20, 8, 3), (20, 8, 8), (5, 8, 3), (8, 8, 2), (21, 4, 1)):
        what, scored = f'sliding_windows({n}, {length}, {stride})', {}
        windows = list(call(student.sliding_windows, n, length, stride))
        for window in windows:
            lo, hi, count = window
            problem = None
            if lo < 0 or hi > n or not 0 < hi - lo <= length or not 0 < count < hi - lo + (lo > 0):
                problem = f'is not within 0 ... {n} and {length} tokens, with 1 or more to score'
            elif lo > 0 and hi - count - lo < length - stride:
                problem = (f'scores token {hi - count} with {hi - count - lo} before it, not '
                           f'{length - stride}')
            for token in range(hi - count, hi):
                if token in scored:
                    problem = f'scores token {token}, as {scored[token]} did'
                    if window == windows[-1] and count == stride:
                        problem += '; usual mistake: the last window scores a whole stride again'
                scored[token] = window
            if problem:
                refuse(f'{what}: the window {window} {problem}.')
        missing = sorted(set(range(1, n)) - set(scored))
        if not missing:
            continue
        mistake = ''
        if windows and missing[0] >= windows[-1][1]:
            mistake = ' Usual mistake: the rest at the end is dropped.'
        elif windows and missing[0] < windows[0][1] and windows[0][2] == stride:
            mistake = ' Usual mistake: the first window scores only a stride.'
        refuse(f'{what}: token {missing[0]} is never scored.{mistake}')


def plain_shares(tokens, g, L, first=None, near=None, pick=max):
    """What each token weighs in the mean, 0 if it does not count. pick: one of several places."""
    first, near, counts = 2 * L if first is None else first, L if near is None else near, []
    for t in range(len(tokens)):
        same = [s for s in range(g, t) if list(tokens[s - g:s]) == list(tokens[t - g:t])]
        counts.append(t >= first and len(same) > 0 and pick(same) < t - near)
    return np.array(counts) / sum(counts)


def test_far_repeat_gain(student):
    # Seeds of texts in which each of the mistakes below changes which targets count.
    for g, L, n_symbols, seed in (2, 8, 4, 26), (1, 12, 12, 3):
        tokens = np.random.default_rng(seed).integers(0, n_symbols, 64)
        losses, right = abs(draw(64)), plain_shares(tokens, g, L)
        # It is called once for each token t: in the cut context only t's loss is higher, by 1 nat.
        found = [call(student.far_repeat_gain, tokens, losses, losses + one, g, L)
                 for one in np.eye(64)]
        grade(f'far_repeat_gain with g={g} and L={L}, where only token t gains 1, for each t',
              found, right, {
            'the difference has the other sign': -right,
            'the gains are summed: the mean is asked for': right > 0,
            'the mean is over all tokens': (right > 0) / 64,
            'targets before 2L count': plain_shares(tokens, g, L, first=g),
            'the target at 2L does not count': plain_shares(tokens, g, L, first=2 * L + 1),
            's = t - L is taken for far': plain_shares(tokens, g, L, near=L - 1),
            'places within the last L count, too': plain_shares(tokens, g, L, near=0),
            'the earliest of several places is looked at, not the latest': plain_shares(
                tokens, g, L, pick=min)})


def plain_copy(losses, same, w):
    """Losses of the mixture, -ln((1 - w) p + w c), target by target."""
    return np.array([-math.log((1 - w) * math.exp(-loss) + w * c) for loss, c in zip(losses, same)])


def plain_weight(losses, same):
    """The weight with the least mean loss: cut off the worse third of where it may be."""
    low, high = 0.0, 1.0
    while high - low > 1e-9:
        third = (high - low) / 3
        less, more = (plain_copy(losses, same, w).mean() for w in (low + third, high - third))
        low, high = (low, high - third) if less < more else (low + third, high)
    return low


def test_gain_and_headroom(student):
    (losses, own_cut), (cut, val_cut) = draw(2, 40), 0.5 + 2 * abs(draw(2, 40, seed=1))
    losses, own_cut = 0.85 * cut * np.exp(0.2 * losses), 1.1 * cut * np.exp(0.2 * own_cut)
    same, val_same = draw(40, seed=2) > -0.6, draw(40, seed=3) > -0.3
    w, gain = plain_weight(val_cut, val_same), (cut - losses).mean()

    def headroom(w, losses=cut, base=cut):
        return (base - plain_copy(losses, same, w)).mean()

    def row(gain, headroom):
        return [gain, headroom, gain / headroom if headroom else math.inf]

    right, own_gain = row(gain, headroom(w)), (own_cut - losses).mean()
    steps = min(np.arange(100) / 100, key=lambda w: plain_copy(val_cut, val_same, w).mean())
    ratios = (cut - losses) / (cut - plain_copy(cut, same, w))
    found = call(student.gain_and_headroom, losses, own_cut, cut, same, val_cut, val_same)
    grade('gain_and_headroom, which returns [gain, headroom, R]', found, right, {
        "the gain is against the tuned model's own cut": row(own_gain, headroom(w)),
        "gain and headroom are both against the tuned model's own cut": row(
            own_gain, headroom(w, own_cut, own_cut)),
        'the gain has the other sign': row(-gain, headroom(w)),
        'the headroom has the other sign': row(gain, -headroom(w)),
        'w is fitted on the targets that are scored, not on validation text': row(
            gain, headroom(plain_weight(cut, same))),
        'log-probabilities are mixed instead of probabilities: a wrong copy has ln 0, so w is 0':
            row(gain, 0),
        'log-probabilities are mixed instead of probabilities, and something is not a number': row(
            gain, math.nan),
        'the model keeps its whole p where the copy is wrong, so w is 1': row(
            gain, np.where(same, cut, 0).mean()),
        'the copy is mixed with the losses of the whole window': row(gain, headroom(w, losses)),
        'w is found to two digits: four are asked for': row(gain, headroom(steps)),
        'R is the mean of ratios instead of the ratio of means': [*right[:2], ratios.mean()],
        'R is upside down': [*right[:2], 1 / right[2]]})


# ---------------------------------------------------------------------- local order

def plain_short_conv(x, w, first=0, step=-1, residual=1, wrap=False, start=0, mix=False):
    """
    One number at a time, from token `first` on. It reads x_(t + step tau). start: all tokens before
    this one are 0; mix: each output sums over all channels.
    """
    y = residual * x[:, first:]
    for b, t, c in np.ndindex(y.shape):
        for tau, channel in itertools.product(range(len(w)), range(len(w[0])) if mix else [c]):
            s = first + t + step * tau
            if wrap or start <= s < x.shape[1]:
                y[b, t, c] += w[tau, channel] * x[b, s % x.shape[1], channel]
    return y


def test_short_conv(student):
    # As many taps as channels, so that w on the wrong axis is no crash.
    x, w = draw(2, T, D), draw(4, D, seed=1)
    for n in (0, 3, 6):  # a text in one piece, and its second part of 4 tokens or 1 token
        given = (x, w) if n == 0 else (x[:, n:], w, x[:, n - 3:n])
        what = f', the last {T - n} tokens with the 3 inputs before them' if n else ''
        grade(f'short_conv{what}', call(student.short_conv, *given), plain_short_conv(x, w, n), {
            'it looks ahead instead of back': plain_short_conv(x, w, n, step=1),
            'w is reversed in time, as F.conv1d reads it': plain_short_conv(x, w[::-1], n),
            'w is reversed in time, and it looks ahead': plain_short_conv(x, w[::-1], n, step=1),
            'the residual, x_t without a weight, is left out': plain_short_conv(
                x, w, n, residual=0),
            'tau begins at 1, and so w_0 is left out': plain_short_conv(
                x, w * (np.arange(4) > 0)[:, None], n),
            'the start of the text wraps around to its end, as torch.roll does': plain_short_conv(
                x, w, n, wrap=True),
            '`before` is not looked at': plain_short_conv(x, w, n, start=n),
            'channels mix: each output sums over all channels': plain_short_conv(x, w, n, mix=True),
            'w is transposed: it is (taps, C)': plain_short_conv(x, w.T, n)})
