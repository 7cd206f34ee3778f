"""
Lessons: the grader accepts right solutions, and those of the project. It refuses blank exercises
and the usual mistakes. Each message says what to look at.

$ python -m pytest tests/test_lessons.py
"""

import math
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import solutions
import torch
from conftest import ROOT, SIZES, near, read, refuses, stage_here

import eval_ppl
import kernels
import lib.generate
import position
import tune_scale
from lessons import exercises
from lessons import test_exercises as grader
from lib.checkpoints import load_model, open_model
from lib.scales import apply_scale, save_scale

GRADED = [name.removeprefix('test_') for name in vars(grader) if name.startswith('test_')]


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


def test_each_exercise_is_graded_and_has_a_wrong_solution():
    of_file = re.findall(r'^ {4}(\d+)\. ', open(exercises.__file__, encoding='utf-8').read(), re.M)
    assert of_file == [str(n + 1) for n in range(len(of_file))]
    assert len(GRADED) == len(of_file) + 1  # tune_scales() is graded twice
    assert {row.partition(' | ')[0] for row in WRONG} == set(GRADED)


PROJECT = dict(
    fit_scale=lambda *inputs: tune_scale.fit_scale(*inputs)[0],
    entropy_without_matrix=lambda q, k: kernels.entropy_without_matrix(q[None], k[None])[0],
    yarn_frequencies=lambda D, base, s, L: (
        position.rope_frequencies(D, base, f'yarn:{s}', L, L)[0]),
    alibi=lambda H, i, j: position.ALiBi(SimpleNamespace(n_head=H)).bias(i, j),
    own_bias=position.Kerple,
    sliding_windows=lambda n, length, stride: (
        eval_ppl.sliding_windows(0, n, length, 0, stride, 'classic')))


@pytest.mark.parametrize('graded', PROJECT)
def test_what_the_project_computes_passes(graded):
    exercise = EXERCISES.get(graded, graded)
    assert message(graded, **{exercise: PROJECT[graded]}) == ''


# ---------------------------------------------------------------------- wrong

EXERCISES = {'own_bias': 'OwnBias', 'tune_scales_per_channel': 'tune_scales'}  # others as graded

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
    i[..., None, :, None] - j[..., None, None, :] \
    | -self | torch.where(distance < 0, 0, -self | log1p(distance) | log1p(distance))
own_bias | of position.distances() | position.distances(i, j) | (i[:, None] - j).clamp(min=0)
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
far_repeat_gain | the earliest of several places counts | places[-1] | places[0]
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
    told_apart, grade = {}, grader.grade

    @np.errstate(all='ignore')
    def compare(student, plain, mistakes, *inputs, **_):
        expected = np.asarray(plain(*inputs))
        for line in mistakes.strip().splitlines():
            mistake, *edits = [cell.strip() for cell in line.split('|')]
            wrong = grader.changed(plain, *edits)(*inputs)
            told_apart[mistake] = told_apart.get(mistake) or not grader.close(wrong, expected).all()
        with pytest.raises(pytest.fail.Exception, match='None of the usual mistakes'):
            grade(student, plain, mistakes, *inputs, found=1.7 * expected + 0.123)

    monkeypatch.setattr(grader, 'grade', compare)
    assert message(graded) == ''
    assert all(told_apart.values()), told_apart


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which('g++'), reason='torch.compile on a CPU needs g++')
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
    command = (f'-m lessons.exercises {ROOT}/train.py --position=own --out_dir=own {SIZES} '
               f'--dataset={corpus_dir} --max_iters=2 --device=cpu --dtype=float32 --compile=True')
    run = subprocess.run([sys.executable, *command.split()], cwd=tmp_path, capture_output=True,
                         text=True, env=os.environ | {'PYTHONPATH': str(ROOT)})
    assert run.returncode == 0, run.stderr
    assert (tmp_path / 'own/last.pt').exists()


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
    for scale, expected in ((None, np.ones((4, 8))), (2, np.full((4, 8), 2)), (head, head),
                            (head.tolist(), head), (channel, channel.mean(2)),
                            (SCALES, read(SCALES)['head_scale'])):
        near(open_model(MODEL, scale)[0].head_scale, expected, 1e-6)
    for scale in head[:3], head * math.nan, channel[None]:
        refuses('4 x 8', open_model, MODEL, scale)


def test_scales_of_an_opened_model_are_saved_from_python(tmp_path):
    (model, _), tuned = open_model(MODEL), 1 + np.arange(32).reshape(4, 8) / 32
    apply_scale(model, tuned, model.info)
    vectors = {name: p for name, p in model.named_parameters() if name.endswith('head_scale')}
    save_scale(tmp_path / 'mine.json', model.info, {640: vectors}, 'head')
    near(open_model(MODEL, str(tmp_path / 'mine.json'))[0].head_scale, tuned, 1e-6)


def test_the_example_of_an_evaluation_reads_scale_sets_by_length(tmp_path, corpus_dir, tiny_run,
                                                                 windows):
    model, info = load_model('last', tiny_run, 'cpu')
    vectors = {name: p for name, p in model.named_parameters() if name.endswith('head_scale')}
    sets = {T: {name: torch.full_like(p, 3.0) for name, p in vectors.items()} for T in (64, 128)}
    save_scale(tmp_path / 'sets.json', info, sets, 'head')
    shares = []
    for length, scale in (32, '--scale=1.0'), (64, '--scale=3.0'):  # a pass of L tokens uses no set
        for of_scale in scale, f'--scale={tmp_path}/sets.json':
            stage_here('lessons/evaluation', f'--init_from={tiny_run}/last.pt', of_scale,
                       f'--out_dir={tmp_path}', f'--dataset={corpus_dir}', '--device=cpu',
                       f'--lengths=[{length}]', '--dtype=float32', '--label=one')
            shares.append(read(tmp_path / 'accuracy_one.json')['rows'][0]['accuracy'])
    assert shares[0] == shares[1] > 0 and shares[2] == shares[3] > 0
    text = windows(64, 32)
    model.head_scale = 1.0
    near(shares[0], (model(text[:, :-1]).argmax(-1) == text[:, 1:]).float().mean(), atol=1e-3)
    stage_here('lessons/evaluation', f'--init_from={tiny_run}/last.pt', f'--out_dir={tmp_path}',
               f'--dataset={corpus_dir}', '--device=cpu', '--lengths=[32,64]', '--dtype=float32')
    text = windows(64, 64)[:, -33:]  # every length scores the same tokens
    near(read(tmp_path / 'accuracy.json')['rows'][0]['accuracy'],
         (model(text[:, :-1]).argmax(-1) == text[:, 1:]).float().mean(), atol=1e-3)


@pytest.mark.slow
def test_tour_runs_from_top_to_bottom_within_a_minute_of_two_cores():
    resource = pytest.importorskip('resource')  # not on Windows
    assert MODEL.stat().st_size < 3.5e6
    cells = [cell for cell in read(ROOT / 'lessons/tour.ipynb')['cells']
             if cell['cell_type'] == 'code']
    assert not any(cell['outputs'] for cell in cells)
    program = '\n'.join(''.join(cell['source']) for cell in cells)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    run = subprocess.run([sys.executable, '-c', program], cwd=ROOT / 'lessons', text=True,
                         capture_output=True, timeout=1800, env=os.environ | {'MPLBACKEND': 'agg'})
    seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    assert run.returncode == 0, run.stderr
    assert seconds < 120  # of two cores, whatever else they do
    assert 'to 4L' in run.stdout
