"""
Lessons: the grader accepts right solutions, and those of the project. It refuses blank exercises
and the usual mistakes, and each message says what to look at. The notebook runs.

$ python -m pytest tests/test_lessons.py -m ''
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from configurator import ROOT

import numpy as np
import pytest
import solutions
from conftest import SIZES, near, read, stage

import entropy
import position
import tune_scale
from lessons import exercises
from lessons import test_exercises as grader

GRADED = [name.removeprefix('test_') for name in vars(grader) if name.startswith('test_')]
# Exercises that are not named as their test is
EXERCISES = {'own_bias': 'OwnBias', 'tune_scales_per_channel': 'tune_scales'}


def message(graded, student=solutions, **others):
    """What the grader says of a student's functions, with others in their place; '' if right."""
    student = SimpleNamespace(**{'leaky': exercises.leaky, **vars(student), **others})
    try:
        getattr(grader, f'test_{graded}')(student)
    except pytest.fail.Exception as refused:
        return refused.msg
    return ''


@pytest.mark.parametrize('graded', GRADED)
def test_a_blank_exercise_fails_and_says_how_to_begin_and_a_right_one_passes(graded):
    blank = message(graded, exercises)
    assert re.fullmatch(r'[\w.]+\(\) is not written yet\. \w.*', blank)
    assert message(graded) == ''


PROJECT = dict(
    fit_scale=lambda position, best, L: tune_scale.fit_scale(position.numpy(), best.numpy(), L)[0],
    entropy_without_matrix=lambda q, k: entropy.entropy_without_matrix(q[None], k[None])[0],
    yarn_frequencies=lambda D, base, s, L: (
        position.rope_frequencies(D, base, f'yarn:{s}', L, L)[0]),
    alibi=lambda H, i, j: position.ALiBi(SimpleNamespace(n_head=H)).bias(i, j),
    own_bias=position.Kerple)


@pytest.mark.parametrize('graded', PROJECT)
def test_what_the_project_computes_passes(graded):
    assert message(graded, **{EXERCISES.get(graded, graded): PROJECT[graded]}) == ''


# ---------------------------------------------------------------------- wrong

# A test of the grader | what its message says | what tests/solutions.py holds | what a student
# wrote instead | perhaps more of both.
WRONG = r'''
causal_attention | not divided by sqrt(D) | / math.sqrt(q.shape[2]) |
causal_attention | queries see later keys | .masked_fill(later, -math.inf) |
causal_attention | scores of later keys are 0 | -math.inf | 0
causal_attention | queries see one later key | triu(1) | triu(2)
causal_attention | divided by sqrt(H) | q.shape[2] | q.shape[0]
scale_queries | in place | q * scale[:, None, None] | q.mul_(scale[:, None, None])
scale_queries | write scale[:, None, None] | scale[:, None, None] | scale
fold_scale | repeat_interleave | repeat_interleave | repeat
fit_scale | positions up to L are | > L | > 0
fit_scale | fitted instead of fixed | x @ (y - 1) | (x - x.mean()) @ y \
    | x @ x | (x - x.mean()).square().sum()
entropy | 0 ln 0 gives nan | torch.special.entr(attention) | -(attention * attention.log())
entropy | of a itself | torch.special.entr(attention) | -(attention * (attention + 1e-9).log())
entropy_without_matrix | scores are not divided | / math.sqrt(q.shape[2]) |
entropy_without_matrix | the whole matrix | rows = [] | rows, all_scores = [], q @ k.mT
rotate | neighbors are a pair | x.chunk(2, dim=-1) | x[..., ::2], x[..., 1::2] \
    | torch.cat | torch.stack | sin), dim=-1) | sin), dim=-1).flatten(2)
yarn_frequencies | position interpolation | 1 - share + share / s | 1 / s
yarn_frequencies | low may be below 0 | max(0, | max(-D,
yarn_frequencies | high ends at D/2 - 1 | D - 1 | D // 2 - 1
yarn_frequencies | high may be above D - 1 | D - 1 | 2 * D
yarn_frequencies | n(32): 32 and 1 are swapped | n(32), n(1) | n(1), n(32)
yarn_frequencies | and high - low is negative | n(32), n(1) | n(1), n(32) \
    | max(high - low, 0.001) | (high - low)
yarn_frequencies | high - low is 0 or less | max(high - low, 0.001) | (high - low)
alibi | far keys get more | -slopes | slopes
alibi | a forgotten return | return -slopes | -slopes
own_bias | a forgotten return | return -self | -self
own_bias | far key gets more | -self | self
own_bias | Use the i and j given | position.distances(i, j) | i[:, None] - torch.arange(len(j))
own_bias | not finite at j > i | position.distances(i, j) | i[:, None] - j
own_bias | no gradient reaches p | self.p[ | self.p.detach()[
own_bias | it has no nn.Parameter | nn.Parameter(torch.ones(config.n_head)) \
    | torch.ones(config.n_head)
own_bias | gradient of p is not finite | position.distances(i, j) | \
    i[:, None] - j \
    | -self | torch.where(distance < 0, 0, -self | log1p(distance) | log1p(distance))
tune_scales | Clamp after each step | scale.data.clamp_(min=1) | pass
tune_scales | Clamp after each step | inputs, targets in batches | n, batch in enumerate(batches) \
    | model(inputs, targets) | model(*batch) | not per_channel | n == len(batches) - 1
tune_scales | the optimizer got model.parameters() | model.requires_grad_(False) | \
    | Adam(scales | Adam(model.parameters()
tune_scales | requires_grad_(False) was left out | model.requires_grad_(False) |
tune_scales | lack requires_grad_(True) | head_scale.requires_grad_() | head_scale
tune_scales | zero_grad() was left out | optimizer.zero_grad() |
tune_scales | the optimizer did not get this scale | optimizer.step() |
tune_scales | goes up the gradient | loss.backward() | (-loss).backward()
tune_scales | Take one step for each batch | in batches | in batches[:1]
tune_scales | did not get the rate | Adam(scales, rate) | Adam(scales, 0.05)
tune_scales | the optimizer did not get this scale | in model.blocks] | in model.blocks][:1]
tune_scales_per_channel | the optimizer did not get this scale | optimizer.step() |
tune_scales_per_channel | goes up the gradient | loss.backward() | (-loss).backward()
tune_scales_per_channel | not expanded to one per channel | if per_channel | if False
tune_scales_per_channel | the bound of 1 was kept | if not per_channel | if True
tune_scales_per_channel | were first set to 1 | model.head_scale[..., None] | torch.ones(2, 4, 1)
dape | at j > i it should be -inf | .masked_fill(later, -math.inf) |
dape | result if f sees scores of later keys | .tril() |
dape | begins at key -1 | x[..., :K // 2] = 0 |
dape | result if f sees scores of later keys | .tril() | | padding=K - 1 | padding=1 \
    | x[..., :K // 2] = 0 | | F.conv1d(x, second) | F.conv1d(x, second, padding=1)
dape | ends at the last key | padding=K - 1 | padding=1 \
    | x[..., :K // 2] = 0 | | F.conv1d(x, second) | F.conv1d(x, second, padding=1)
leaks | of the mean of the row, at key 0 | moved[i, :i + 1].any() | moved[i, i]
leaks | nothing is found | randn | zeros
leaks | outputs at keys after i | moved[i, :i + 1] | moved[i]
leaks | or of other rows | moved[i, :i + 1] | moved.tril()
sliding_windows | the first window scores only a stride | end - 1)] | stride)]
sliding_windows | which has no token before it | end - 1)] | end)]
sliding_windows | the rest at the end is dropped | return windows | return windows[:-1]
sliding_windows | token 1 is never scored. | return windows | return []
sliding_windows | tokens after the one before | return windows | return windows[::-1]
sliding_windows | tokens after the one before | windows = [(0 | stride = 1; windows = [(0
sliding_windows | scores a whole stride again | end - before)) | stride))
far_repeat_gain | the wrong sign | cut_losses - losses | losses - cut_losses
far_repeat_gain | before 2L count | 2 * L | L
far_repeat_gain | s is the latest of all before t | places[-1] | places[0]
far_repeat_gain | s is the latest of all before t | range(g, t) | range(g, t - L)
far_repeat_gain | s is the first of the g equal tokens | places[-1] < | places[-1] - g <
far_repeat_gain | None of the usual mistakes | .mean() | .mean() * len(tokens)
far_repeat_gain | at [0], the first of 64 | (cut_losses - losses)[counted] | torch.tensor(0.1)
gain_and_headroom | the gain is against the tuned model's | gain = cut | gain = own_cut
gain_and_headroom | gain and headroom are both against | gain = cut | gain = own_cut \
    | room = cut - mixed(cut | room = own_cut - mixed(own_cut
gain_and_headroom | the gain has the wrong sign | cut - losses | losses - cut
gain_and_headroom | not on validation text | mixed(val_cut, val_same | mixed(cut, same
gain_and_headroom | and 0 ln 0 gives nan | -p.log() | (1 - w) * loss - w * copy.log()
gain_and_headroom | so w is 0 | -p.log() | (1 - w) * loss - w * (copy + 1e-9).log()
gain_and_headroom | the model keeps its whole p | -p.log() | torch.where(copy, -p.log(), loss)
gain_and_headroom | with the losses of the whole window | mixed(cut, | mixed(losses,
gain_and_headroom | w is found to two digits | torch.arange(10000) / 10000 | torch.arange(100) / 100
gain_and_headroom | w is found to three digits | torch.arange(10000) / 10000 \
    | torch.arange(1000) / 1000
gain_and_headroom | the mean of ratios | gain.mean() / room.mean() | (gain / room).mean()
gain_and_headroom | None of the usual mistakes | gain.mean() / room.mean() | 1
short_conv | it looks ahead instead of back | w.flip(0) | w \
    | torch.cat((before, x), dim=1) | F.pad(x, (0, 0, 0, taps - 1))
short_conv | w is reversed in time, as F.conv1d reads it | w.flip(0) | w
short_conv | w is reversed in time, and it looks ahead | torch.cat((before, x), dim=1) \
    | F.pad(x, (0, 0, 0, taps - 1))
short_conv | the residual, x_t without a weight, is left out | x + y.mT | y.mT
short_conv | `before` is ignored | before is None | True
short_conv | wraps around | x.new_zeros(len(x), taps - 1, C) | x[:, 1 - taps:]
short_conv | channels mix | [:, None] | [None].expand(C, -1, -1) | , groups=C |
short_conv | transposed | w.flip(0) | w.mT.flip(0)
'''.replace('\\\n', ' ').strip().splitlines()


@pytest.mark.parametrize('row', WRONG)
def test_a_usual_mistake_is_refused_with_its_message(row):
    graded, advice, *edits = [cell.strip() for cell in row.split('|')]
    exercise = EXERCISES.get(graded, graded)
    wrong = grader.changed(getattr(solutions, exercise), *edits)
    assert advice in message(graded, **{exercise: wrong})


@pytest.mark.parametrize('graded', GRADED)
def test_each_mistake_that_the_grader_names_gives_another_result(monkeypatch, graded):
    told_apart = {}

    @np.errstate(all='ignore')
    def compare(student, plain, mistakes, *inputs, **_):
        for line in mistakes.strip().splitlines():
            mistake, *edits = [cell.strip() for cell in line.split('|')]
            wrong = grader.changed(plain, *edits)(*inputs)
            told_apart[mistake] = told_apart.get(mistake) or not grader.close(
                wrong, plain(*inputs)).all()

    monkeypatch.setattr(grader, 'grade', compare)
    assert message(graded) == ''
    assert all(told_apart.values()), told_apart


# ---------------------------------------------------------------------- what students run

@pytest.mark.slow
def test_own_bias_trains_compiled_by_the_command_of_the_lesson(tmp_path, corpus_dir):
    text = Path(exercises.__file__).read_text(encoding='utf-8')
    for old, new in ((r'self.n_head = .*', 'self.slope = nn.Parameter(torch.zeros(config.n_head))'),
                     (r"raise NotImplementedError\('Begin with -slope(.|\n)*?'\)\n",
                      'slope = F.softplus(self.slope)[:, None, None]\n'
                      '        return -slope * position.distances(i, j)\n')):
        text, found = re.subn(old, new, text)
        assert found == 1
    (tmp_path / 'lessons').mkdir()
    (tmp_path / 'lessons/__init__.py').touch()
    (tmp_path / 'lessons/exercises.py').write_text(text, encoding='utf-8')
    command = (f'-m lessons.exercises train.py --position=own --out_dir=own --max_iters=2 '
               f'--dataset={corpus_dir} --device=cpu')
    subprocess.run([sys.executable, *command.split(), *SIZES], cwd=tmp_path, check=True,
                   env=os.environ | {'PYTHONPATH': str(ROOT)})
    assert (tmp_path / 'own/last.pt').exists()


def test_the_example_of_an_evaluation_counts_right_predictions(tmp_path, corpus_dir, tiny_run, tiny,
                                                               windows):
    stage('lessons.evaluation', f'--out_dir={tmp_path}', f'--init_from={tiny_run}', '--tail=20',
          '--lengths=[32,64]', '--device=cpu', '--dtype=float32')
    rows, text = read(tmp_path / 'accuracy.json')['rows'], windows(64, 64)
    for row, samples in zip(rows, (text[:, -33:], text)):  # all lengths score the same tokens
        right = tiny[0](samples[:, :-1]).argmax(-1)[:, -20:] == samples[:, -20:]
        near(row['accuracy'], right.float().mean(), atol=1e-3)


@pytest.mark.slow
def test_tour_runs_from_top_to_bottom():
    cells = [cell for cell in read(ROOT / 'lessons/tour.ipynb')['cells']
             if cell['cell_type'] == 'code']
    program = '\n'.join(''.join(cell['source']) for cell in cells)
    run = subprocess.run([sys.executable, '-c', program], cwd=ROOT / 'lessons', check=True,
                         capture_output=True, text=True, env=os.environ | {'MPLBACKEND': 'agg'})
    assert 'to 4L' in run.stdout and not any(cell['outputs'] for cell in cells)
