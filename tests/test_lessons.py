"""
Lessons: the grader refuses blank exercises and typical wrong ones with a message that says why, and
what the project itself computes passes it.
"""

import dataclasses
import math
import os
import re
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, near, read, refuses

import eval_ppl
import kernels
import lib.generate
import position
import tune_scale
from lessons import exercises
from lessons import test_exercises as grader
from lib import repeats
from lib.checkpoints import open_model
from lib.devices import Runtime
from lib.exports import folded_weight
from lib.scales import apply_scale, save_scale
from model import ShortConv, Transformer

GRADED = [name for name in vars(grader) if name.startswith('test_')]


def message(name, student):
    """What the grader says of an exercise, '' if it is right."""
    try:
        getattr(grader, name)(student)
    except pytest.fail.Exception as refused:
        return refused.msg
    return ''


# ---------------------------------------------------------------------- blank

@pytest.mark.parametrize('name', GRADED)
def test_blank_exercise_fails_and_says_how_to_begin(name):
    assert re.fullmatch(r'[\w.]+\(\) is still to be written\. \w.*', message(name, exercises))


def test_each_exercise_is_graded():
    of_file = re.findall(r'^ {4}(\d+)\. ', open(exercises.__file__, encoding='utf-8').read(), re.M)
    assert of_file == [str(n + 1) for n in range(len(of_file))]
    assert len(GRADED) == len(of_file) + 1  # tune_scales() is graded twice


# ---------------------------------------------------------------------- right

def attention_of(scale, weight):
    """An attention layer of the project with these scales and queries W x."""
    model = Transformer(grader.model_config()).double()
    model.blocks[0].attn.qkv.weight.data[:len(weight)] = weight
    model.head_scale = scale.expand(2, -1)
    return model


def causal_attention(q, k, v, scale):
    i = torch.arange(q.shape[1])
    return kernels.causal_attention((q * scale[:, None, None])[None], k[None], v[None], i, i)[0]


def scale_queries(q, scale):
    attention = attention_of(scale, torch.eye(q.shape[0] * q.shape[2])).blocks[0].attn
    i = torch.arange(q.shape[1])
    place = position.Place(i, i, len(i))
    x = q.transpose(0, 1).flatten(1)[None]
    return attention(x, place, probe=lambda layer, attention, q, k, place: q)[1][0]


def fold_scale(weight, scale):
    return folded_weight(attention_of(scale, weight), 'blocks.0.attn.qkv.weight')[:len(weight)]


def entropy(attention):
    class Given(position.NoPE):
        def scores(self, q, k, i, j, *shared):
            return attention.log()[None, :, i][..., :len(j)]

    q, i = attention[None], torch.arange(attention.shape[1])
    layer = SimpleNamespace(position=Given(None))
    return kernels.attention_entropy(0, layer, q, q, position.Place(i, i, len(i)))[0]


def rotate(x, place, base=10000.0):
    frequency, _ = position.rope_frequencies(x.shape[2], base, '', 1, 1)
    angle = place[:, None] * frequency
    return position.rotate(x[None], angle.cos(), angle.sin())[0]


def tune_scales(model, batches, rate, per_channel=False):
    model.requires_grad_(False)  # as load_model() leaves it
    cpu = Runtime(torch.device('cpu'), torch.float32, rank=0, world_size=1)
    if per_channel:
        model.head_scale = model.head_scale[..., None].expand(-1, -1, model.config.head_dim)
    windows = SimpleNamespace(block_size=batches[0][0].shape[1], batch=lambda step, size, rows: (
        torch.cat((batches[step][0], batches[step][1][:, -1:]), dim=1)[rows].numpy()))
    changes = {'tune': f"{'channel' if per_channel else 'scale'}:{rate}", 'warmup_iters': 0,
               'compile': False, 'max_iters': len(batches), 'batch_size': len(batches[0][0])}
    recipe = tune_scale.Recipe(**{field.name: (vars(tune_scale) | changes)[field.name]
                                  for field in dataclasses.fields(tune_scale.Recipe)})
    tune_scale.tune_vectors(model, windows, recipe, cpu)


def dape(scores, bias, first, second):
    class Given(position.Bias):
        def similarity(self, q, k, i, j):
            return scores[None]

        def bias(self, i, j):
            return bias

    config = SimpleNamespace(n_head=len(scores), dape_width=len(first), dape_cheat=False,
                             dape_kernel=first.shape[2], dape_residual=True)
    method, i = position.DAPE(config, Given(config)).to(scores.dtype), torch.arange(scores.shape[1])
    for convolution, weight in (method.first, first), (method.second, second):
        convolution.weight.data = weight[:, :, None]
        convolution.bias.data.zero_()
    return method.scores(None, None, i, i)[0]


def leaks(f, T):
    moves = torch.autograd.functional.jacobian(f, torch.randn(T, T).double())
    # moves: of output (i, j) by score (k, m)
    return torch.stack([moves[i, :i + 1, i].abs().sum(0) for i in range(T)]).triu(1) > 0


def far_repeat_gain(tokens, losses, cut_losses, g, L, first=2):
    t, s = np.arange(len(tokens)), repeats.last_repeats(tokens.numpy()[None], g)[0]
    return (cut_losses - losses)[(t >= first * L) & (s >= 0) & (s < t - L)].mean()


def gain_and_headroom(losses, own_cut, cut, same, val_cut, val_same):
    losses, own_cut, cut, same = (x.numpy() for x in (losses, own_cut, cut, same))
    weight = repeats.fit_copy_weight(val_cut.numpy(), val_same.numpy())
    row = repeats.repeat_summary(np.arange(len(losses)), losses, cut, own_cut,
                                  repeats.copy_losses(cut, same, weight))
    return np.array([row[name] for name in ('gain', 'headroom', 'R')])


def short_conv(x, w, before=None):
    conv = ShortConv(SimpleNamespace(short_conv=len(w), n_embd=x.shape[2]), 'conv')
    conv.w.data = w
    if before is None:
        return conv(x)
    cache = lib.generate.KVCache(Transformer(grader.model_config()), len(x), 1)
    conv(before, cache)
    return conv(x, cache)


SOLVED = SimpleNamespace(
    causal_attention=causal_attention, scale_queries=scale_queries, fold_scale=fold_scale,
    fit_scale=lambda *fitted: tune_scale.fit_scale(*fitted)[0], entropy=entropy,
    entropy_without_matrix=lambda q, k: kernels.entropy(q[None], k[None])[0], rotate=rotate,
    yarn_frequencies=lambda D, base, s, L: (
        position.rope_frequencies(D, base, f'yarn:{s}', L, L)[0]),
    alibi=lambda H, i, j: position.ALiBi(SimpleNamespace(n_head=H)).bias(i, j),
    OwnBias=position.Kerple, tune_scales=tune_scales, dape=dape, leaks=leaks,
    leaky=exercises.leaky, far_repeat_gain=far_repeat_gain, gain_and_headroom=gain_and_headroom,
    short_conv=short_conv,
    sliding_windows=lambda n, length, stride: (
        eval_ppl.sliding_windows(0, n, length, 0, stride, 'classic')))


@pytest.mark.parametrize('name', GRADED)
def test_project_passes_the_grader(name):
    assert message(name, SOLVED) == ''


# ---------------------------------------------------------------------- wrong

def descent(freeze=True, require=True, zero=True, expand=True, clamp='each step',
            channel_bound=None, every_weight=False, sign=1):
    """tune_scales() as its text says, by Adam; or with a step of it left out."""
    def tune(model, batches, rate, per_channel=False):
        if freeze:
            model.requires_grad_(False)
        if per_channel and expand:
            scale = model.head_scale[..., None]
            model.head_scale = scale.expand(-1, -1, model.config.head_dim)
        scales = [block.attn.head_scale for block in model.blocks]
        for p in scales:
            p.requires_grad_(require)
        optimizer = torch.optim.Adam(model.parameters() if every_weight else scales, rate)
        when = channel_bound if per_channel else clamp
        for inputs, targets in batches:
            if zero:
                optimizer.zero_grad()
            (sign * model(inputs, targets).mean()).backward()
            optimizer.step()
            for p in scales if when == 'each step' else []:
                p.data.clamp_(min=1)
        for p in scales if when == 'the end' else []:
            p.data.clamp_(min=1)
    return tune


@pytest.mark.parametrize('name', ['test_tune_scales', 'test_tune_channel_scales'])
def test_a_student_who_follows_the_text_passes_and_may_leave_the_scales_unfrozen(name):
    assert message(name, SimpleNamespace(tune_scales=descent())) == ''


class NearCountsLess(position.ALiBi):
    def bias(self, i, j):
        return -super().bias(i, j)


class FromZero(position.ALiBi):
    def bias(self, i, j):
        return super().bias(torch.arange(len(i)), torch.arange(len(j)))


class LogOfNegative(position.Kerple):
    def bias(self, i, j):
        return -self.p[:, None, None] * torch.log1p(i[:, None] - j)


class RootOfNegative(position.Kerple):
    def bias(self, i, j):
        distance = i[..., None, :, None] - j[..., None, None, :]
        return -torch.where(distance < 0, 0, (self.p[:, None, None] * distance).sqrt())


class OneSequence(position.ALiBi):
    def bias(self, i, j):
        return super().bias(i, j) if i.dim() == 1 else -(i[:, None] - j).float()


def yarn(least=lambda D: 0, most=lambda D: D - 1, turns=(32, 1), narrowest=0.001):
    """YaRN's frequencies, the ends of its ramp held at least and most."""
    def frequencies(D, base, s, L):
        low, high = (D * math.log(L / (2 * math.pi * r)) / (2 * math.log(base)) for r in turns)
        low, high = max(least(D), math.floor(low)), min(most(D), math.ceil(high))
        n = torch.arange(D // 2).double()
        share = ((n - low) / max(high - low, narrowest)).clamp(0, 1)
        return base ** (-2 * n / D) * (1 - share + share / s)
    return frequencies


def leaks_seen_at(outputs):
    """leaks() by changing one score; outputs: which of all that move are looked at, for row i."""
    def found(f, T):
        moved, scores = torch.zeros(T, T, dtype=torch.bool), torch.randn(T, T).double()
        for i, j in torch.ones(T, T).triu(1).nonzero():
            changed = scores.clone()
            changed[i, j] += 0.1
            difference = f(changed) - f(scores)
            moved[i, j] = (outputs(difference, i) != 0).any()
        return moved
    return found


def line(s, best):
    return np.polyfit(np.log(s.numpy()), best.numpy(), 1)[0]


def bad_rotate(x, place, base):
    turn = torch.exp(1j * place[:, None] * base ** (-torch.arange(0, x.shape[2], 2) / x.shape[2]))
    return torch.view_as_real(torch.complex(x[..., ::2], x[..., 1::2]) * turn).flatten(-2)


def bad_dape(scores, bias, first, second):
    x = torch.cat((scores, bias)).transpose(0, 1)
    f = F.conv1d(F.leaky_relu(F.conv1d(x, first, padding=1)), second, padding=1)
    return scores + bias + f.transpose(0, 1)


def shifted_dape(scores, bias, first, second):
    """Right, but the middle layer is computed at key -1, too, where it should be 0."""
    n_head, n = scores.shape[:2]
    rows = torch.cat((scores, bias)).tril().transpose(0, 1)
    middle = F.leaky_relu(F.conv1d(rows, first, padding=2))     # of keys -1 ... n
    f = F.conv1d(middle, second).transpose(0, 1)
    later = torch.ones(n, n).triu(1).bool()
    return (scores + bias + f).masked_fill(later, -math.inf)


def earliest_far_repeats(tokens, losses, cut_losses, g, L):
    counted = []
    for t in range(2 * L, len(tokens)):
        places = [s for s in range(g, t) if torch.equal(tokens[s - g:s], tokens[t - g:t])]
        if places and places[0] < t - L:
            counted.append(t)
    return (cut_losses - losses)[counted].mean()


def bad_windows(n, length, stride):
    return [(hi - length, hi, stride) for hi in range(length, n + 1, stride)]


def twice(n, length, stride):
    return [(lo, hi, stride if lo else scored)
            for lo, hi, scored in SOLVED.sliding_windows(n, length, stride)]


def mixed(losses, same, w):
    return -((1 - w) * (-losses).exp() + w * same).log()


def mixed_logs(losses, same, w):
    return (1 - w) * losses + torch.where(same, 0, w * math.inf)


def mixed_logs_without_zero(losses, same, w):
    return (1 - w) * losses - w * (same + 1e-9).log()


def mixed_where_right(losses, same, w):
    return torch.where(same, mixed(losses, same, w), losses)


def headroom(mixture=mixed, grid=10_000, fit_on_test=False, by_target=False, gain_base='cut',
             headroom_base='cut', mix_with='cut', sign=1):
    """gain_and_headroom() as its text says, by a grid; or with a mistake."""
    def found(losses, own_cut, cut, same, val_cut, val_same):
        of = {'losses': losses, 'own_cut': own_cut, 'cut': cut}
        fitted_on = (cut, same) if fit_on_test else (val_cut, val_same)
        weights = torch.arange(grid) / grid
        means = torch.stack([mixture(*fitted_on, w).mean() for w in weights])
        copied = mixture(of[mix_with], same, weights[means.argmin()])
        gain, room = sign * (of[gain_base] - losses), of[headroom_base] - copied
        R = (gain / room).mean() if by_target else gain.mean() / room.mean()
        return gain.mean(), room.mean(), R
    return found


def conv(ahead=False, flip=True, residual=True, use_before=True):
    """short_conv() as its text says, by F.conv1d; or with a step of it left out."""
    def found(x, w, before=None):
        n, (_, T, C) = len(w) - 1, x.shape
        if before is None or not use_before:
            before = x.new_zeros(len(x), n, C)
        kernel = (w.flip(0) if flip else w).mT[:, None]
        y = F.conv1d(F.pad(torch.cat((before, x), dim=1), (0, 0, 0, n)).mT, kernel, groups=C).mT
        return y[:, n:] + x if ahead else y[:, :T] + residual * x
    return found


def rolled_conv(x, w, before=None):
    return x + sum(w[tau] * x.roll(tau, 1) for tau in range(len(w)))


def mixing_conv(x, w, before=None):
    padded = F.pad(x, (0, 0, len(w) - 1, 0))
    kernel = w.flip(0).mT[None].expand(x.shape[2], -1, -1)
    return x + F.conv1d(padded.mT, kernel).mT


@pytest.mark.parametrize('name, right', [('gain_and_headroom', headroom()), ('short_conv', conv())])
def test_a_student_who_follows_the_text_of_an_exercise_passes(name, right):
    assert message(f'test_{name}', SimpleNamespace(**{name: right})) == ''


# Exercise of the grader: a typical wrong solution, and what the message says of it.
WRONG = [
    ('causal_attention', lambda q, k, v, scale: SOLVED.causal_attention(
        q * math.sqrt(q.shape[2]), k, v, scale), 'not divided by sqrt(D)'),
    ('causal_attention', lambda q, k, v, scale: F.scaled_dot_product_attention(
        q * scale[:, None, None], k, v), 'queries see later keys'),
    ('causal_attention', lambda q, k, v, scale: (
        scale[:, None, None] * q @ k.mT / math.sqrt(q.shape[2])).tril().softmax(-1) @ v,
     'scores of later keys are 0'),
    ('scale_queries', lambda q, scale: q.mul_(scale[:, None, None]), 'in place'),
    ('scale_queries', lambda q, scale: q * scale, 'write scale[:, None, None]'),
    ('fold_scale', lambda weight, scale: weight * scale.repeat(len(weight) // 4)[:, None],
     'repeat_interleave'),
    ('fit_scale', lambda position, best, L: line(position / L, best), 'positions up to L'),
    ('fit_scale', lambda position, best, L: line(
        (position / L)[position > L], best[position > L]), 'fitted instead of fixed'),
    ('entropy', lambda a: -(a * a.log()).sum(-1), '0 ln 0 is not a number'),
    ('entropy', lambda a: -(a * (a + 1e-9).log()).sum(-1), 'of a itself'),
    ('entropy_without_matrix', lambda q, k: torch.special.entr((q @ k.mT).softmax(-1)).sum(-1),
     'the whole matrix'),
    ('rotate', bad_rotate, 'neighbours are a pair'),
    ('yarn_frequencies', lambda D, base, s, L: base ** (-torch.arange(0, D, 2) / D) / s,
     'position interpolation'),
    ('yarn_frequencies', yarn(least=lambda D: -D), 'low may be below 0'),
    ('yarn_frequencies', yarn(most=lambda D: D // 2 - 1), 'high ends at D/2 - 1'),
    ('yarn_frequencies', yarn(most=lambda D: 2 * D), 'high may be above D - 1'),
    ('yarn_frequencies', yarn(turns=(1, 32)), 'n(32): 32 and 1 are swapped'),
    ('yarn_frequencies', yarn(turns=(1, 32), narrowest=-99), '32 and 1 are swapped, so that'),
    ('alibi', lambda H, i, j: -SOLVED.alibi(H, i, j), 'far keys get more'),
    ('own_bias', NearCountsLess, 'far key gets more'),
    ('own_bias', FromZero, 'use the i and j given'),
    ('own_bias', LogOfNegative, 'not finite at j > i'),
    ('own_bias', RootOfNegative, 'at j > i clamp i - j to 0'),
    ('own_bias', OneSequence, 'for position.distances()'),
    ('tune_scales', descent(clamp=None), 'after each step, was left out'),
    ('tune_scales', descent(clamp='the end'), 'after each step, was left for the end'),
    ('tune_scales', descent(freeze=False, every_weight=True), 'all weights are frozen'),
    ('tune_scales', descent(freeze=False), 'requires_grad_(False) was left out'),
    ('tune_scales', descent(require=False), 'lack requires_grad_(True)'),
    ('tune_scales', descent(zero=False), 'zero_grad() was left out'),
    ('tune_scales', lambda *args, per_channel: None, 'the optimizer did not get this scale'),
    ('tune_scales', descent(sign=-1), 'goes up the gradient'),
    ('tune_channel_scales', lambda model, *args, per_channel: setattr(
        model, 'head_scale', torch.ones(2, 4, 4)), 'the optimizer did not get this scale'),
    ('tune_channel_scales', descent(sign=-1), 'goes up the gradient'),
    ('tune_channel_scales', descent(expand=False), 'not expanded to one per channel'),
    ('tune_channel_scales', descent(channel_bound='each step'), 'the bound was kept'),
    ('dape', lambda *inputs: bad_dape(*inputs).tril(), 'at j > i it should be -inf'),
    ('dape', shifted_dape, 'begins at key -1 instead of zeros'),
    ('dape', lambda *inputs: bad_dape(*inputs).masked_fill(
        torch.ones(6, 6).triu(1).bool(), -math.inf), 'comes out where f sees scores of later'),
    ('leaks', lambda f, T: torch.zeros(T, T, dtype=torch.bool), 'nothing is found'),
    ('leaks', leaks_seen_at(lambda moved, i: moved[i]), 'outputs at keys after i'),
    ('leaks', leaks_seen_at(lambda moved, i: moved.tril()), 'or of other rows'),
    ('sliding_windows', bad_windows, 'the first window scores only a stride'),
    ('sliding_windows', lambda *sizes: SOLVED.sliding_windows(*sizes)[:-1],
     'the rest at the end is dropped'),
    ('sliding_windows', lambda *sizes: [], 'token 1 is never scored.'),
    ('sliding_windows', twice, 'scores a whole stride again'),
    ('far_repeat_gain', lambda *inputs: -SOLVED.far_repeat_gain(*inputs), 'the other sign'),
    ('far_repeat_gain', lambda *inputs: far_repeat_gain(*inputs, first=1), 'before 2L count'),
    ('far_repeat_gain', earliest_far_repeats, 'the earliest of several places is looked at'),
    ('far_repeat_gain', lambda tokens, losses, cut_losses, g, L: SOLVED.far_repeat_gain(
        tokens, losses, cut_losses, g, L) * len(tokens), 'None of the usual mistakes'),
    ('gain_and_headroom', headroom(gain_base='own_cut'), "the gain is against the tuned model's"),
    ('gain_and_headroom', headroom(gain_base='own_cut', headroom_base='own_cut',
                                   mix_with='own_cut'), 'gain and headroom are both against'),
    ('gain_and_headroom', headroom(sign=-1), 'the gain has the other sign'),
    ('gain_and_headroom', headroom(fit_on_test=True), 'not on validation text'),
    ('gain_and_headroom', headroom(mixed_logs), 'and something is not a number'),
    ('gain_and_headroom', headroom(mixed_logs_without_zero), 'a wrong copy has ln 0, so w is 0'),
    ('gain_and_headroom', headroom(mixed_where_right), 'the model keeps its whole p'),
    ('gain_and_headroom', headroom(mix_with='losses'), 'with the losses of the whole window'),
    ('gain_and_headroom', headroom(grid=100), 'w is found to two digits'),
    ('gain_and_headroom', headroom(by_target=True), 'the mean of ratios'),
    ('gain_and_headroom', lambda *inputs: (
        SOLVED.gain_and_headroom(*inputs) * [1, 1, 0] + [0, 0, 1]), 'None of the usual mistakes'),
    ('short_conv', conv(ahead=True, flip=False), 'it looks ahead instead of back'),
    ('short_conv', conv(flip=False), 'w is reversed in time, as F.conv1d reads it'),
    ('short_conv', conv(ahead=True), 'w is reversed in time, and it looks ahead'),
    ('short_conv', conv(residual=False), 'the residual, x_t without a weight, is left out'),
    ('short_conv', conv(use_before=False), '`before` is not looked at'),
    ('short_conv', rolled_conv, 'wraps around'),
    ('short_conv', mixing_conv, 'channels mix'),
    ('short_conv', lambda x, w, before=None: SOLVED.short_conv(x, w.mT, before), 'transposed')]


@pytest.mark.parametrize('name, wrong, advice', WRONG)
def test_typical_mistake_is_refused_with_its_message(name, wrong, advice):
    exercise = {'tune_channel_scales': 'tune_scales', 'own_bias': 'OwnBias'}.get(name, name)
    student = SimpleNamespace(**vars(SOLVED) | {exercise: wrong})
    assert advice in message(f'test_{name}', student)


OTHERWISE = [name for name, value in vars(SOLVED).items()
             if name not in ('OwnBias', 'tune_scales', 'leaky', 'sliding_windows')]


@pytest.mark.parametrize('name', OTHERWISE)
def test_no_mistake_is_named_where_none_gives_the_result(monkeypatch, name):
    named, right, grade = [], getattr(SOLVED, name), grader.grade

    def collect(what, found, right, mistakes):
        named.extend(mistakes)
        grade(what, found, right, mistakes)

    monkeypatch.setattr(grader, 'grade', collect)
    student = SimpleNamespace(**vars(SOLVED) | {
        name: lambda *inputs: 1.7 * right(*inputs) + 0.123})
    said = message(f'test_{name}', student)
    assert said.endswith('None of the usual mistakes gives this.') and named
    assert not any(mistake in said for mistake in named)


class Forgetful(position.ALiBi):
    def bias(self, i, j):
        super().bias(i, j)


@pytest.mark.parametrize('name', [*OTHERWISE, 'sliding_windows', 'OwnBias'])
def test_a_forgotten_return_is_told(name):
    forgetful = Forgetful if name == 'OwnBias' else lambda *inputs: None
    student = SimpleNamespace(**vars(SOLVED) | {name: forgetful})
    said = message({'OwnBias': 'test_own_bias'}.get(name, f'test_{name}'), student)
    assert said.endswith('returns nothing. Usual mistake: a forgotten return.')


def test_one_number_for_every_text_is_no_far_repeat_gain():
    answers = []

    def first_answer(*inputs):
        answers.append(SOLVED.far_repeat_gain(*inputs))
        return answers[0]

    student = SimpleNamespace(**vars(SOLVED) | {'far_repeat_gain': first_answer})
    assert 'of 64' in message('test_far_repeat_gain', student)


@pytest.mark.parametrize('name', GRADED)
def test_each_mistake_that_the_grader_names_gives_another_result(monkeypatch, name):
    told_apart = {}

    def grade(what, found, right, mistakes):
        for mistake, wrong in mistakes.items():
            differs = not np.allclose(right, wrong, 1e-4, 1e-5)
            told_apart[mistake] = told_apart.get(mistake, False) or differs

    monkeypatch.setattr(grader, 'grade', grade)
    assert message(name, SOLVED) == ''
    assert all(told_apart.values()), told_apart


def test_leaks_by_changing_one_score_are_found():
    right = SimpleNamespace(leaky=exercises.leaky, leaks=leaks_seen_at(
        lambda moved, i: moved[i, :i + 1]))
    assert message('test_leaks', right) == ''


def test_each_exercise_has_a_wrong_solution():
    assert {f'test_{name}' for name, _, _ in WRONG} == set(GRADED)


# ---------------------------------------------------------------------- from Python

MODEL, SCALES = ROOT / 'lessons/demo.pt', ROOT / 'lessons/scale_head_640.json'


def test_docstring_of_open_model_runs(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    names = {'open_model': open_model, 'torch': torch, 'kernels': kernels, 'lib': lib}
    exec(textwrap.dedent(open_model.__doc__.split('\n\n')[1]), names)
    assert names['losses'].shape == (1, 512) and names['losses'].mean() < math.log(256)
    assert torch.stack(names['entropy']).shape == (4, 1, 8, 513)
    assert len(capsys.readouterr().out.strip()) > 10
    assert (names['model'].head_scale == torch.tensor(1.3)).all()


def test_open_model_takes_a_number_an_array_or_a_file():
    head, channel = np.linspace(1, 2, 32).reshape(4, 8), torch.linspace(1, 2, 512).view(4, 8, 16)
    of_file = read(SCALES)['head_scale']
    for scale, expected in ((None, np.ones((4, 8))), (2, np.full((4, 8), 2)), (head, head),
                            (head.tolist(), head), (channel, channel.mean(2)),
                            (SCALES, of_file), (str(SCALES), of_file)):
        near(open_model(MODEL, scale)[0].head_scale, expected, 1e-6)
    for scale in head[:3], head.T, head * math.nan, channel[None]:
        refuses('4 x 8', open_model, MODEL, scale)


def test_scales_of_an_opened_model_are_saved_and_set_from_python(tmp_path):
    (model, _), tuned = open_model(MODEL), 1 + np.arange(32).reshape(4, 8) / 32
    apply_scale(model, tuned, model.info)
    vectors = {name: p for name, p in model.named_parameters() if name.endswith('head_scale')}
    save_scale(tmp_path / 'mine.json', model.info, {640: vectors}, 'head')
    near(open_model(MODEL, tmp_path / 'mine.json')[0].head_scale, tuned, 1e-6)


@pytest.mark.slow
def test_tour_runs_from_top_to_bottom_within_a_minute_of_two_cores():
    resource = pytest.importorskip('resource')  # not on Windows
    assert MODEL.stat().st_size < 3.5e6
    cells = [cell for cell in read(ROOT / 'lessons/tour.ipynb')['cells']
             if cell['cell_type'] == 'code']
    assert not any(cell['outputs'] for cell in cells)
    program = '\n'.join(''.join(cell['source']) for cell in cells)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = subprocess.run([sys.executable, '-c', program], cwd=ROOT / 'lessons', text=True,
                         capture_output=True, timeout=1800,
                         env=os.environ | {'MPLBACKEND': 'agg'})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run.returncode == 0, run.stderr
    assert after.ru_utime - before.ru_utime < 120  # of two cores, whatever else they do
    assert 'to 4L' in run.stdout
