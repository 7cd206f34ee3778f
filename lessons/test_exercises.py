"""
The grader of lessons/exercises.py, run by `make lessons`.

Each function plain_NAME() is the formula of exercise NAME, in NumPy and float64. The test below it
lists the usual mistakes, one a line: what a student does wrong | text of plain_NAME() | the text
that makes this mistake. If a student's result is wrong, the grader makes each of these changes in
its own formula. The message names the mistakes that give exactly the student's result.
"""

import inspect
import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from model import ModelConfig, Transformer

H, T, D = 4, 7, 4  # as many heads as channels, so that a scale on the wrong axis does not crash
SCALE = np.array([0.5, 1.0, 1.5, 2.0])


@pytest.fixture
def student():
    from lessons import exercises
    return exercises


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def require(condition, message):
    if not condition:
        raise pytest.fail.Exception(message, pytrace=False) from None


def run(exercise, *inputs, **settings):
    """What a student's function returns."""
    try:
        return exercise(*inputs, **settings)
    except NotImplementedError as error:
        if 'not implemented for' in str(error):  # by PyTorch, for a dtype
            raise
        require(False, f'{exercise.__qualname__}() is not written yet. {error}')


def call(exercise, *inputs):
    """What a student's function returns. Arrays go in as tensors, and come out as arrays."""
    given = [torch.tensor(x) if isinstance(x, np.ndarray) else x for x in inputs]
    found = run(exercise, *given)
    name = exercise.__qualname__
    require(found is not None, f'{name}() returns nothing. Usual mistake: a forgotten return.')
    for x, before in zip(given, inputs):
        require(np.array_equal(x, before),
                f'{name}() has changed its input. Usual mistake: an operation in place, such as '
                'q *= scale.')
    if isinstance(found, tuple | list):
        return [x.detach().numpy() if torch.is_tensor(x) else x for x in found]
    return found.detach().numpy() if torch.is_tensor(found) else found


def changed(function, *edits):
    """A function with other source text. edits: old text, new text, old text, new text ..."""
    source = inspect.getsource(function)
    for old, new in zip(edits[::2], edits[1::2]):
        assert source.count(old) == 1, f'{function.__name__}() should hold this text once: {old}'
        source = source.replace(old, new)
    names = dict(vars(inspect.getmodule(function)))
    exec(source, names)
    return names[function.__name__]


def close(found, expected):
    return np.isclose(found, expected, 1e-4, 1e-5, equal_nan=True)


@np.errstate(all='ignore')  # some mistakes divide by 0
def grade(student, plain, mistakes, *inputs, found=None, what=''):
    """
    Fail unless the student's function, or what was found, equals plain(*inputs). plain:
    plain_NAME(); mistakes: one per line; what: words for the message.
    """
    name = plain.__name__.removeprefix('plain_')
    what = name + what
    if found is None:
        found = call(getattr(student, name), *inputs)
    found = np.asarray(found, float)
    expected = np.asarray(plain(*inputs), float)
    require(found.shape == expected.shape,
            f'{what}: the result has shape {found.shape}; it should have {expected.shape}.')
    wrong = ~close(found, expected)
    if not wrong.any():
        return

    causes = []
    for line in mistakes.strip().splitlines():
        cause, *edits = [cell.strip() for cell in line.split('|')]
        if close(found, changed(plain, *edits)(*inputs)).all():
            causes.append(cause)
    advice = 'None of the usual mistakes gives this result.'
    if causes:
        advice = f"This is the result if {', or if '.join(causes)}."
    place = tuple(np.argwhere(wrong)[0].tolist())
    where = f' at {list(place)}, the first of {wrong.sum()} wrong numbers,' if place else ''
    require(False, f'{what}: the result{where} is {found[place]:.6g}; it should be '
                   f'{expected[place]:.6g}. {advice}')


# ---------------------------------------------------------------------- the softmax scale

def plain_causal_attention(q, k, v, scale):
    D = q.shape[2]
    e = np.exp(scale[:, None, None] * q @ k.mT / math.sqrt(D))
    e = np.where(np.tri(T), e, 0)
    return e / e.sum(-1, keepdims=True) @ v


def test_causal_attention(student):
    grade(student, plain_causal_attention, '''
        scores are not divided by sqrt(D) | / math.sqrt(D) |
        scores are divided by D           | math.sqrt(D)   | D
        queries see later keys            | np.tri(T), e   | True, e
        queries see one later key         | np.tri(T), e   | np.tri(T, k=1), e
        queries do not see their own key  | np.tri(T), e   | np.tri(T, k=-1), e
        scores of later keys are 0, which exp makes 1: they should be -inf | e, 0 | e, 1
        the scale is left out             | scale[:, None, None] * q | q
        each channel has a scale: each head should have one | scale[:, None, None] | scale
        ''', *draw(3, H, T, D), SCALE)
    grade(student, plain_causal_attention, '''
        scores are divided by sqrt(H) | math.sqrt(D) | math.sqrt(len(q))
        ''', *draw(3, H, T, 6), SCALE, what=', with 4 heads of 6 channels')


def plain_scale_queries(q, scale):
    return scale[:, None, None] * q


def test_scale_queries(student):
    grade(student, plain_scale_queries, '''
        each channel has a scale: write scale[:, None, None] | scale[:, None, None] | scale
        the root is taken, as if k were scaled, too | scale[: | np.sqrt(scale)[:
        ''', draw(H, T, D), SCALE)


def plain_fold_scale(weight, scale):
    factors = np.repeat(scale, len(weight) // len(scale))
    return weight * factors[:, None]


def test_fold_scale(student):
    grade(student, plain_fold_scale, '''
        columns are scaled, which changes x | factors[:, None] | factors
        rows get the scales of other heads: use repeat_interleave, not repeat | repeat | tile
        ''', draw(H * D, H * D), SCALE)
    grade(student, plain_fold_scale, '', draw(H * 6, 10), SCALE, what=', with W (24, 10)')


def plain_fit_scale(position, best, L):
    far = position > L
    x, y = np.log(position[far] / L), best[far] - 1
    return (x * y).sum() / (x * x).sum()


def test_fit_scale(student):
    grade(student, plain_fit_scale, '''
        positions up to L are fitted, too   | > L | > 0
        the 1 is fitted instead of fixed    | (x * y).sum() / (x * x).sum() | np.polyfit(x, y, 1)[0]
        the 1 is fitted, and positions up to L are, too | > L | > 0 \
                                            | (x * y).sum() / (x * x).sum() | np.polyfit(x, y, 1)[0]
        position is not divided by L        | [far] / L | [far]
        ''', np.array([50.0, 100, 150, 200, 400, 800]), np.array([1.3, 0.9, 1.2, 1.1, 1.7, 1.9]),
          100)


# ---------------------------------------------------------------------- attention entropy

def plain_entropy(a):
    logs = np.log(np.where(a > 0, a, 1))
    return -(a * logs).sum(-1)


def test_entropy(student):
    a = plain_causal_attention(*draw(2, H, T, D), np.eye(T), 3 * SCALE)
    found = call(student.entropy, a)
    grade(student, plain_entropy, '''
        0 ln 0 gives nan: use torch.special.entr or torch.xlogy | np.where(a > 0, a, 1) | a
        the logarithm is to base 2: these are bits | np.log( | np.log2(
        the minus sign is left out | -(a | (a
        ''', a, found=found)
    require(np.min(found) >= 0,
            f'entropy: one entropy is {np.min(found):.1g}, but none is below 0. Usual mistake: '
            'log(a + 1e-9). Take the logarithm of a itself.')


class NoMatrix(TorchDispatchMode):
    """Refuses an operation that returns 40 x 40 numbers or more."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        results = operation(*args, **kwargs or {})
        for x in results if isinstance(results, tuple | list) else [results]:
            require(not torch.is_tensor(x) or x.numel() < 40 * 40,
                    f'entropy_without_matrix: {operation} made the whole matrix. Usual mistake: '
                    'q @ k.mT of all queries at once.')
        return results


def plain_entropy_without_matrix(q, k):
    s = q @ k.mT / math.sqrt(D)
    e = np.exp(s) * np.tri(40)
    return np.log(e.sum(-1)) - (e * s).sum(-1) / e.sum(-1)


def test_entropy_without_matrix(student):
    with NoMatrix():
        grade(student, plain_entropy_without_matrix, '''
            the mean score is not divided by sqrt(D) | - (e | - math.sqrt(D) * (e
            the mean score is left out | - (e * s).sum(-1) / e.sum(-1) |
            queries see later keys | * np.tri(40) |
            scores are not divided by sqrt(D) | / math.sqrt(D) |
            0 times -inf gives nan: leave later keys out of the mean score \
                | - (e * s) | - (e * np.where(np.tri(40), s, -np.inf))
            ''', *draw(2, 2, 40, D))


# ---------------------------------------------------------------------- where a token stands

def plain_rotate(x, place, base):
    D = x.shape[2]
    angle = np.outer(place, base ** (-2 * np.arange(D // 2) / D))
    first, second = np.arange(D).reshape(2, -1)
    turned = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angle)
    y = np.empty_like(x)
    y[..., first], y[..., second] = turned.real, turned.imag
    return y


def test_rotate(student):
    for size in D, 6:
        grade(student, plain_rotate, '''
            neighbors are a pair: this is the layout of the paper \
                                             | reshape(2, -1) | reshape(-1, 2).T
            pairs turn clockwise             | np.exp(1j | np.exp(-1j
            the angle is place * base^(-n/D) | -2 * | -1 *
            place is ignored                 | outer(place | outer(place - place[0]
            D is the number of heads         | D = x.shape[2] | D = 4
            ''', draw(H, T, size), np.arange(3, T + 3), 100.0)


def plain_yarn_frequencies(size, base, s, L):
    low, high = (size * math.log(L / (2 * math.pi * r)) / (2 * math.log(base)) for r in (32, 1))
    low, high = max(0, math.floor(low)), min(size - 1, math.ceil(high))
    n = np.arange(size // 2)
    share = np.clip((n - low) / max(high - low, 0.001), 0, 1)
    return base ** (-2 * n / size) * (1 - share + share / s)


def test_yarn_frequencies(student):
    # low < 0 at 64; high = low at 4; high < low at 1; high is past D/2 - 1 at 100000, and past
    # D - 1 with base 10.
    for base, L in ((10000.0, 512), (10000.0, 64), (10000.0, 4), (10000.0, 1), (10000.0, 100000),
                    (10.0, 600)):
        grade(student, plain_yarn_frequencies, '''
            fast pairs are divided and slow ones stay \
                                       | 1 - share + share / s | share + (1 - share) / s
            all pairs are divided by s: this is position interpolation | 1 - share + share | 1
            low is n(1) and high is n(32): 32 and 1 are swapped | (32, 1) | (1, 32)
            32 and 1 are swapped, and high - low is negative | (32, 1) | (1, 32) \
                                       | max(high - low, 0.001) | (high - low)
            the share is not clamped to 0 ... 1 | , 0, 1) | , -np.inf, np.inf)
            low may be below 0         | max(0, | max(-99,
            high - low is 0 or less    | max(high - low, 0.001) | (high - low)
            high ends at D/2 - 1 instead of D - 1 | size - 1 | size // 2 - 1
            high may be above D - 1    | size - 1 | 99
            ''', 16, base, 4.0, L, what=f'(16, {base}, 4.0, {L})')


def plain_alibi(n_head, i, j):
    m = 2.0 ** (-8 * np.arange(1, n_head + 1) / n_head)
    return -m[:, None, None] * (i[:, None] - j)


def test_alibi(student):
    for n_head in 8, 4:
        grade(student, plain_alibi, '''
            far keys get more than near ones: the sign is wrong | -m | m
            the first head has h = 0 | 1, n_head + 1 | n_head
            the slope of head h is 2^(-h), as with 8 heads | / n_head | / 8
            i is ignored             | i[:, None] | np.arange(2)[:, None]
            ''', n_head, np.array([5, 6]), np.arange(5), what=f'({n_head}, i, j)')


def test_own_bias(student):
    torch.manual_seed(0)
    own, j = student.OwnBias(model_config()), torch.arange(64 * 8)
    found = call(own.bias, j[-1:], j)
    require(found.shape == (H, 1, 512),
            f'OwnBias: it should be ({H}, T, S) = ({H}, 1, 512), but is {found.shape}.')
    require(np.isfinite(found).all(), 'OwnBias: it is not finite at each distance.')
    require((np.diff(found) >= 0).all(),
            'OwnBias: a far key gets more than a near one. Usual mistake: the sign.')
    require(np.ptp(found) > 0, 'OwnBias: it is the same for each key, so softmax ignores it.')
    require(close(call(own.bias, j[-1:] + 9, j[1:] + 9), found[..., 1:]).all(),
            'OwnBias: it depends on more than i - j. Use the i and j given, not torch.arange.')
    clamp = ('Usual mistake: a logarithm or a root of i - j < 0. At j > i clamp i - j to 0.')
    require(np.isfinite(call(own.bias, j[:9], j)).all(),
            f'OwnBias: it is not finite at j > i. {clamp}')
    require(list(own.parameters()), 'OwnBias: it has no nn.Parameter, so nothing would be learned.')
    bias = own.bias(j[-9:], j)
    loss = (bias * torch.tensor(draw(H, 9, 512))).sum()
    loss = loss + 0 * sum(p.sum() for p in own.parameters())  # which takes part even if unused
    for name, p in own.named_parameters():
        slope, = torch.autograd.grad(loss, p, retain_graph=True)
        require(slope.any(), f'OwnBias: no gradient reaches {name}, so it would not be learned.')
        require(slope.isfinite().all(), f'OwnBias: the gradient of {name} is not finite. {clamp}')


# ---------------------------------------------------------------------- tuning

def model_config():
    return ModelConfig(vocab_size=11, block_size=8, n_layer=2, n_head=H, n_kv_head=2, n_embd=16,
                       n_hidden=16)


def untuned():
    model = Transformer(model_config()).init_weights(torch.Generator().manual_seed(0))
    model.head_scale = [[1, 1, 1.2, 1.4], [1.3, 1, 1, 1.1]]
    for p in model.parameters():
        if p.dim() == 2 and p.requires_grad:  # so large that attention is far from uniform
            p.data *= 3
    return model


def require_bound(model, *_):
    least = model.head_scale.min()
    require(least >= 1, f'tune_scales: a scale is {least:.4f}, below 1. Usual mistake: Eq. (6) is '
                        'left out, or left for the end. Clamp after each step.')


def tuned(student, batches, per_channel, rate=0.05):
    """A model that the student has tuned."""
    model, calls = untuned(), []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    if not per_channel:
        model.register_forward_pre_hook(require_bound)
    try:
        run(student.tune_scales, model, batches, rate, per_channel=per_channel)
    except RuntimeError as error:
        if 'does not require grad' not in str(error):
            raise
        require(False, 'tune_scales: nothing requires a gradient. Usual mistake: the scales lack '
                       'requires_grad_(True) after model.requires_grad_(False).')
    require(len(calls) == len(batches),
            f'tune_scales: for {len(batches)} batches the model was called {len(calls)} times. '
            'Take one step for each batch.')
    return model


def require_frozen(model, start):
    for name, p in model.named_parameters():
        if name.endswith('head_scale'):
            continue
        require(torch.equal(p, start.get_parameter(name)),
                f'tune_scales: {name} has changed, but all weights are frozen. Usual mistake: the '
                'optimizer got model.parameters().')
        require(p.grad is None,
                f'tune_scales: {name} has a gradient, but all weights are frozen. Usual mistake: '
                'model.requires_grad_(False) was left out.')


def test_tune_scales(student):
    require_tuned(student, per_channel=False)


def test_tune_scales_per_channel(student):
    require_tuned(student, per_channel=True)


def require_tuned(student, per_channel):
    tokens = torch.randint(11, (8, 17), generator=torch.Generator().manual_seed(1))
    batch = tokens[:, :-1], tokens[:, 1:]
    start, model = untuned(), tuned(student, [batch], per_channel)
    require_frozen(model, start)
    what, width = f'tune_scales(per_channel={per_channel})', D if per_channel else 1
    for block in model.blocks:
        shape = tuple(block.attn.head_scale.shape)
        require(shape == (H, width), f'{what}: a layer has scales of {shape}, not {(H, width)}. '
                                     'Usual mistake: they were not expanded to one per channel.')
    if not per_channel:
        require_bound(model)

    start.head_scale = start.head_scale[..., None].expand(2, H, width)
    first = start.head_scale.flatten()
    still = [tuned(student, [batch] * steps, per_channel, 0.0) for steps in (1, 2)]
    require((still[0].head_scale.flatten() == first).all(),
            f'{what}: at a rate of 0 the scales changed. Usual mistakes: the optimizer did not get '
            'the rate; the scales were first set to 1.')

    # One step goes down the gradient.
    scales = [block.attn.head_scale.requires_grad_() for block in start.blocks]
    before = start(*batch).mean()
    slope = torch.stack(torch.autograd.grad(before, scales)).flatten()
    moved = model.head_scale.flatten() - first
    clear = slope.abs() > 0.1 * slope.abs().max()
    may_fall = moved < 0 if per_channel else (moved < 0) | (first == 1) & (moved == 0)
    right = torch.where(slope < 0, moved > 0, may_fall)
    mistake = 'the optimizer did not get this scale'
    if (clear & (slope * moved > 0)).any():
        mistake = 'the step goes up the gradient'
    elif per_channel and (first + moved >= 1).all() and (moved[clear & (slope < 0)] > 0).all():
        mistake = 'the bound of 1 was kept for channels, too'
    for n in (clear & ~right).nonzero():
        require(False, f'{what}: the loss changes by {slope[n].item():.4f} per unit of scale '
                       f'{n.item()}, but one step changed this scale by {moved[n].item():.4f}. '
                       f'Usual mistake: {mistake}.')

    # At a rate of 0 each step has the same gradient. Twice as much after two steps is a sum.
    one, two = ([p.grad for p in model.parameters() if p.grad is not None] for model in still)
    summed = any(map(torch.any, one)) and all(
        torch.allclose(p, 2 * q, 1e-3) for p, q in zip(two, one))
    require(not summed, f'{what}: the gradient of the second step includes that of the first. '
                        'Usual mistake: zero_grad() was left out.')
    after = tuned(student, [batch] * 20, per_channel)(*batch).mean()
    require(after < before, f'{what}: 20 steps changed the loss from {before:.4f} to {after:.4f}.')


# ---------------------------------------------------------------------- DAPE

def plain_convolution(x, kernel):
    """x: (rows, channels, keys); kernel: (channels out, in, K). Returns K - 1 keys less."""
    windows = np.lib.stride_tricks.sliding_window_view(x, kernel.shape[2], axis=2)
    return np.einsum('icjt,oct->ioj', windows, kernel)


def plain_dape(scores, bias, first, second):
    seen = np.tri(6)
    maps = np.concatenate((scores, bias)) * seen
    pad = first.shape[2] // 2
    rows = np.pad(maps.swapaxes(0, 1), ((0, 0), (0, 0), (2 * pad, 2 * pad)))
    middle = plain_convolution(rows, first)  # of keys -pad ... 5 + pad
    middle = np.maximum(middle, 0.01 * middle)
    middle[..., :pad] *= 0
    f = plain_convolution(middle, second).swapaxes(0, 1)
    return np.where(seen, scores + bias + f, -np.inf)


def test_dape(student):
    inputs = *draw(2, 2, 6, 6), draw(5, 4, 3, seed=1), draw(2, 5, 3, seed=2)
    wider = draw(5, 4, 5, seed=1), draw(2, 5, 5, seed=2)
    found = np.asarray(call(student.dape, *inputs))
    require(found.shape != (2, 6, 6) or np.isinf(found[:, np.tri(6) == 0]).all(),
            'dape: at j > i it should be -inf, so that softmax hides these keys.')
    grade(student, plain_dape, '''
        f sees scores of later keys, which tell it the next token | * seen |
        f sees scores of later keys, and the middle layer ends at the last one \
            | * seen | | middle[..., :pad] | middle[..., [0, 7]]
        the middle layer ends at the last key | middle[..., :pad] | middle[..., [0, 7]]
        the middle layer begins at key -1: it should be 0 left of key 0 | *= 0 | *= 1
        S + B is not added to f | scores + bias + f | f
        ''', *inputs, found=found)
    grade(student, plain_dape, '', *inputs[:2], *wider, what=', with K = 5')


def plain_leaks(later_keys):
    """later_keys: how many keys after its own a row uses."""
    later = np.tri(T) == 0
    return later & (np.tri(T, k=later_keys) == 1)


def test_leaks(student):
    for name, f, later_keys in (
            ('leaky', student.leaky, 1),
            ('a causal f', lambda s: s.tril() ** 2, 0),
            ('s itself', lambda s: s, 0),
            ('sums over rows', lambda s: s.cumsum(0), 0),
            ('s - its mean over the row', lambda s: (s - s.mean(1, keepdim=True)).tril(), T),
            ('the mean of the row, at key 0',
             lambda s: s.mean(1, keepdim=True) * (torch.arange(T) == 0), T),
            ('s times the score after it', lambda s: (s * s.roll(-1, 1)).tril(), 1)):
        grade(student, plain_leaks, '''
            the past counts, too: only j > i should | later & ( | ~later + (
            i and j are exchanged | == 1) | == 1).T | np.tri(T) | np.tri(T).T
            nothing is found: the scores were zeros, or the changes too small | == 1 | > 1
            outputs at keys after i, or of other rows, count, too | k=later_keys | k=T
            ''', later_keys, found=call(student.leaks, f, T), what=f', of {name}')


# ---------------------------------------------------------------------- reading beyond L

def test_sliding_windows(student):
    for n, length, stride in (20, 8, 3), (20, 8, 7), (5, 8, 3), (8, 8, 2), (21, 4, 1):
        what, scored = f'sliding_windows({n}, {length}, {stride})', []
        windows = list(call(student.sliding_windows, n, length, stride))
        for lo, hi, count in windows:
            first = hi - count
            require(first >= 1, f'{what}: the window ({lo}, {hi}, {count}) scores token {first}, '
                                'which has no token before it.')
            require(0 <= lo < hi <= min(n, lo + length) and lo <= first < hi,
                    f'{what}: the window ({lo}, {hi}, {count}) is not within 0 ... {n} and '
                    f'{length} tokens, with 1 or more to score.')
            require(lo == 0 or first - lo >= length - stride,
                    f'{what}: the window ({lo}, {hi}, {count}) scores token {first} with '
                    f'{first - lo} tokens before it; it should have {length - stride}.')
            scored.extend(range(first, hi))
        for token in range(1, n):
            times = scored.count(token)
            require(times < 2, f'{what}: token {token} is scored {times} times. Usual mistake: the '
                               'last window scores a whole stride again.')
            require(times, f'{what}: token {token} is never scored. Usual mistakes: the first '
                           'window scores only a stride; the rest at the end is dropped.')
        steps = np.diff([lo for lo, _, _ in windows])
        require((steps[:-1] == stride).all() and (0 < steps).all() and (steps <= stride).all(),
                f'{what}: the windows begin {steps} tokens after the one before; it should be '
                f'{stride}, for the last window at most {stride}.')


def plain_far_repeat_gain(tokens, g, L):
    """What each target weighs in the mean gain."""
    counts = []
    for t in range(64):
        same = [s for s in range(g, t) if list(tokens[s - g:s]) == list(tokens[t - g:t])]
        counts.append(t >= 2 * L and len(same) > 0 and max(same) < t - L)
    return np.array(counts) / sum(counts)


def test_far_repeat_gain(student):
    losses = abs(draw(64))
    # Each mistake changes which targets of these texts count.
    for g, L, n_symbols, seed in (2, 8, 4, 26), (1, 12, 12, 3):
        tokens = np.random.default_rng(seed).integers(0, n_symbols, 64)
        # One call for each token t: with the cut context only the loss of t is higher, by 1 nat.
        found = [call(student.far_repeat_gain, tokens, losses, losses + one, g, L)
                 for one in np.eye(64)]
        grade(student, plain_far_repeat_gain, '''
            the difference has the wrong sign         | / sum(counts) | / -sum(counts)
            the gains are summed: the exercise asks for their mean | / sum(counts) | / 1
            the mean is over all tokens               | / sum(counts) | / 64
            targets before 2L count                   | 2 * L | 0
            the target at 2L does not count           | t >= | t >
            s = t - L counts as far                   | < t - L | <= t - L
            places within the last L count, too       | < t - L | < t
            a far place counts although there is a later one: s is the latest of all before t \
                                                      | max( | min(
            s is the first of the g equal tokens: it comes after them | max(same) | max(same) - g
            ''', tokens, g, L, found=found,
            what=f' with g={g} and L={L}, where only token t gains 1 nat, for each t')


def plain_gain_and_headroom(losses, own_cut, cut, same, val_cut, val_same):
    def mixed(x, c, w):
        p = (1 - w) * np.exp(-x) + w * c
        return -np.log(p)

    w = np.arange(0, 1, 0.00001)
    w = w[mixed(val_cut, val_same, w[:, None]).mean(1).argmin()]
    gain = cut - losses
    room = cut - mixed(cut, same, w)
    return gain.mean(), room.mean(), gain.mean() / room.mean()


def test_gain_and_headroom(student):
    (x, y), (cut, val_cut) = draw(2, 40), 0.5 + 2 * abs(draw(2, 40, seed=1))
    same, val_same = draw(40, seed=2) > -0.6, draw(40, seed=3) > -0.3
    grade(student, plain_gain_and_headroom, '''
        the gain is against the tuned model's own cut | gain = cut | gain = own_cut
        gain and headroom are both against the tuned model's own cut | gain = cut | gain = own_cut \
            | room = cut - mixed(cut | room = own_cut - mixed(own_cut
        the gain has the wrong sign | cut - losses | losses - cut
        the headroom has the wrong sign | cut - mixed(cut, same, w) | mixed(cut, same, w) - cut
        w is fitted on the targets that are scored, not on validation text \
            | val_cut, val_same, w[ | cut, same, w[
        log-probabilities are mixed instead of probabilities: a wrong copy has ln 0, so w is 0 \
            | -np.log(p) | (1 - w) * x - w * np.log(c + 1e-9)
        log-probabilities are mixed instead of probabilities, and 0 ln 0 gives nan \
            | -np.log(p) | (1 - w) * x - w * np.log(c)
        the model keeps its whole p where the copy is wrong, so w is 1 | 1 - w | 1 - w * c
        the copy is mixed with the losses of the whole window | mixed(cut, | mixed(losses,
        w is found to two digits: four are asked for | 0.00001 | 0.01
        w is found to three digits: four are asked for | 0.00001 | 0.001
        R is the mean of ratios instead of the ratio of means \
            | gain.mean() / room.mean() | (gain / room).mean()
        R is upside down | gain.mean() / room.mean() | room.mean() / gain.mean()
        ''', 0.85 * cut * np.exp(0.2 * x), 1.1 * cut * np.exp(0.2 * y), cut, same, val_cut,
          val_same, what=', which returns [gain, headroom, R]')


# ---------------------------------------------------------------------- local order

def plain_short_conv(x, w, before=None):
    last = len(w) - 1
    edge = np.zeros((2, last, x.shape[2]))
    before = edge if before is None else before
    padded = np.concatenate((before, x, edge), axis=1)
    y = x.copy()
    for tau in range(len(w)):
        term = w[tau] * padded[:, last - tau:][:, :x.shape[1]]
        y += term
    return y


def test_short_conv(student):
    # As many taps as channels, so that w on the wrong axis does not crash.
    x, w = draw(2, T, D), draw(4, D, seed=1)
    for what, *inputs in (('', x, w), (', the last 4 tokens', x[:, 3:], w, x[:, :3]),
                          (', the last token', x[:, 6:], w, x[:, 3:6])):
        grade(student, plain_short_conv, '''
            it looks ahead instead of back                | last - tau | last + tau
            w is reversed in time, as F.conv1d reads it   | w[tau] | w[last - tau]
            w is reversed in time, and it looks ahead     | last - tau | last + tau \
                                                          | w[tau] | w[last - tau]
            the residual, x_t without a weight, is left out | x.copy() | 0 * x
            tau begins at 1, so w_0 is left out           | range(len(w)) | range(1, len(w))
            the start of the text wraps around to its end, as torch.roll does \
                                                          | edge if | x[:, -3:] if
            `before` is ignored                           | else before | else edge
            channels mix: each output sums over all channels \
                                                          | += term | += term.sum(-1, keepdims=True)
            w is transposed: it is (taps, C)              | w[tau] | w[:, tau]
            ''', *inputs, what=what)
    for taps in 4, 2:
        grade(student, plain_short_conv, '', draw(2, T, 6), draw(taps, 6),
              what=f', with w ({taps}, 6)')
