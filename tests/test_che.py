"""
Algorithmic tasks: how answers are counted, and the stage as run.

$ python -m pytest tests/test_che.py
"""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, mistake, stage

from che import loss_and_accuracy, print_table
from lib.checkpoints import old_name
from lib.tasks import TASKS

TINY = ('--n_layer=1 --n_head=2 --n_embd=16 --n_hidden=16 --batch_size=8 --train_length=6 '
        '--test_length=9 --n_test=8 --warmup_iters=5 --device=cpu --position=kerple '
        '--dape_kernel=3').split()
TABLE = json.loads((ROOT / 'results/papers/tables.json').read_text())['dape_table6']


class Answers(torch.nn.Module):
    """A model that gives these answers, whatever it reads."""

    def __init__(self, answers):
        super().__init__()
        self.head, self.answers = torch.nn.Linear(1, 1), answers

    def forward(self, tokens, last):
        assert tokens.shape == (16, 21) and (tokens[:, 10:] == 5).all()  # empty in every slot
        return torch.nn.functional.one_hot(self.answers, 3).float()


def test_accuracy_counts_symbols_up_to_the_end_symbol_and_loss_counts_all():
    _, answers = TASKS['stack_manipulation'].generate(np.random.default_rng(0), 16, 10)
    right = torch.from_numpy(answers)
    wrong, end = (right + 1) % 3, right == 2
    before_end = end.cumsum(1) == 0

    def measure(answers):
        rng = np.random.default_rng(0)
        return loss_and_accuracy(Answers(answers), 'stack_manipulation', rng, 16, 10)

    loss, accuracy = measure(right)
    loss_at_zeros, the_same = measure(torch.where(before_end | end, right, wrong))
    assert accuracy == the_same == 1 and loss_at_zeros > loss + 0.05
    assert measure(wrong)[1] == 0
    n = before_end.sum()  # and 16 end symbols, which are wrong here
    accuracy = measure(torch.where(before_end, right, wrong))[1]
    assert accuracy.item() == pytest.approx(n / (n + 16))


def test_chance_is_a_guess_among_the_symbols_that_an_answer_really_has(capsys):
    row = {'inside': 1.0, 'outside': 1.0, 'paper': None}
    print_table([{'method': 'NoPE', 'train_length': 40, 'lengths': [500],
                  'tasks': dict.fromkeys(TASKS, row)}])
    for line in capsys.readouterr().out.splitlines()[2:]:
        _, name, chance, *_ = line.split()
        _, answers = TASKS[name].generate(np.random.default_rng(0), 500, 12)
        if name in ('stack_manipulation', 'binary_addition'):  # zeros after the 2 do not count
            answers = answers[np.cumsum(answers == 2, axis=1) - (answers == 2) == 0]
        assert chance == f'{100 / len(np.unique(answers)):.0f}', name


# ---------------------------------------------------------------------- the stage as run

@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """out_dir of two tasks, trained for 30 steps without a stop, and what was printed."""
    out_dir = tmp_path_factory.mktemp('che') / 'tiny'
    printed, _ = stage('che', *TINY, "--tasks=['bucket_sort','even_pairs']", '--max_iters=30',
                       '--eval_interval=10', f'--out_dir={out_dir}')
    return out_dir, printed


def arguments(out_dir, *more, steps=30):
    return [*TINY, "--tasks=['even_pairs']", f'--max_iters={steps}', f'--out_dir={out_dir}', *more]


def cells(printed):
    """{task: the cells of its line in the printed table}"""
    lines = [line.split() for line in printed.splitlines()]
    return {line[1]: line for line in lines if line[0] in ('R', 'DCF', 'CS')}


def test_result_has_all_lengths_by_value_and_the_papers_accuracy_beside_ours(run):
    out_dir, printed = run
    result = json.loads((out_dir / 'che.json').read_text())
    assert result['lengths'] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert list(result['tasks']) == ['even_pairs', 'bucket_sort']
    for name, row in result['tasks'].items():
        assert row['inside'] == pytest.approx(np.mean(row['accuracy'][:6]))
        assert row['outside'] == pytest.approx(np.mean(row['accuracy'][6:]))
        assert row['chance'] == TASKS[name].chance
        assert row['paper'] == TABLE['rows'][name][TABLE['columns'].index('DAPE 1x3 Kerple')]
        shown = 100 * row['inside'], 100 * row['outside'], row['paper']
        assert cells(printed)[name][3:] == [f'{number:.2f}' for number in shown]
    assert result['settings']['position'] == 'kerple'
    assert result['command'].startswith('python che.py')
    assert (out_dir / 'che.png').read_bytes()[:4] == b'\x89PNG'


def test_model_learns_even_pairs(tmp_path):
    larger = '--n_layer=2', '--n_embd=32', '--n_hidden=32', '--batch_size=64'
    stage('che', *arguments(tmp_path, *larger, '--learning_rate=3e-3', '--n_test=200', steps=300))
    result = json.loads((tmp_path / 'che.json').read_text())
    assert min(result['tasks']['even_pairs']['accuracy'][1:6]) > 0.9


def test_papers_table_is_whole():
    assert list(TABLE['rows']) == list(TASKS)
    assert {len(row) for row in TABLE['rows'].values()} == {11}
    order_matters = set(TASKS) - {'parity_check', 'cycle_navigation', 'bucket_sort'}
    for bias, better in (('Kerple', 8), ('FIRE', 6)):  # section 4.8: on 8, and on 6, of 11 tasks
        plain, dape = map(TABLE['columns'].index, (bias, f'DAPE 1x3 {bias}'))
        rows = [TABLE['rows'][name] for name in order_matters]
        assert sum(row[dape] > row[plain] for row in rows) == better


def test_finished_task_is_not_trained_again_and_methods_stand_side_by_side(run, tmp_path):
    out_dir = tmp_path / 'copy'
    shutil.copytree(run[0], out_dir)
    before = (out_dir / 'even_pairs.pt').read_bytes()
    other = json.loads((out_dir / 'che.json').read_text()) | {'method': 'CoPE'}
    other['tasks'] = {'even_pairs': other['tasks']['even_pairs'] | {'paper': None}}
    (tmp_path / 'other.json').write_text(json.dumps(other))
    out, _ = stage('che', *arguments(out_dir, f"--compare=['{tmp_path}/other.json']",
                                     "--tasks=['bucket_sort','even_pairs']"))
    assert 'loss' not in out and (out_dir / 'even_pairs.pt').read_bytes() == before
    even, sort = cells(out)['even_pairs'], cells(out)['bucket_sort']
    assert even[5:] == ['100.00', *even[3:5], '-'] and sort[6:] == ['-']
    assert 'DAPE 1x3 Kerple                        CoPE' in out


@pytest.mark.slow
def test_a_run_that_was_stopped_or_is_old_ends_as_an_unbroken_one(run, tmp_path):
    # with --eval_every=5 the first length past training is tested, not a multiple
    stage('che', *arguments(tmp_path, '--eval_interval=20', '--eval_every=5', steps=20))
    assert json.loads((tmp_path / 'che.json').read_text())['lengths'] == [1, 6, 7]

    # Older runs have other names of weights and fewer settings.
    state = torch.load(tmp_path / 'even_pairs.pt', weights_only=True)
    state['model'] = {old_name(name): weight for name, weight in state['model'].items()}
    assert 'blocks.0.attn.bias.p' in state['model']
    for later in ('rope_base', 'rope_scaling', 'dape_residual', 'dape_cheat'):
        del state['settings'][later]
    torch.save(state, tmp_path / 'even_pairs.pt')
    stage('che', *arguments(tmp_path, '--label=more'))
    unbroken = torch.load(run[0] / 'even_pairs.pt', weights_only=True)
    resumed = torch.load(tmp_path / 'even_pairs.pt', weights_only=True)
    assert unbroken['step'] == resumed['step'] == 30
    for name, weight in unbroken['model'].items():
        assert torch.equal(weight, resumed['model'][name]), name
    ours, theirs = (json.loads(path.read_text())['tasks']['even_pairs']
                    for path in (tmp_path / 'che_more.json', run[0] / 'che.json'))
    assert ours == theirs


@pytest.mark.slow
def test_a_task_that_another_process_trains_is_refused_and_other_tasks_are_not(tmp_path):
    long = arguments(tmp_path, '--eval_interval=1000000', steps=1000000)
    command = [sys.executable, '-u', str(ROOT / 'che.py'), *long]
    with subprocess.Popen(command, env=os.environ | {'OMP_NUM_THREADS': '1'},
                          stdout=subprocess.PIPE) as first:
        first.stdout.readline()  # now it trains
        line = mistake('che', *arguments(tmp_path))
        other = "--tasks=['parity_check']", '--label=other'
        stage('che', *arguments(tmp_path, *other, steps=1))
        first.kill()
    assert f'process {first.pid} ' in line and 'even_pairs.pt' in line
    stage('che', *arguments(tmp_path, steps=1))  # the lock ended with the process
    assert not list(tmp_path.glob('*.lock'))


@pytest.mark.parametrize('argument, message', [
    ("--tasks=['even_pair']", 'even_pair: no task of that name. Choose from even_pairs'),
    ('--test_length=6', 'test_length is 6; it must be at least 7'),
    ('--seed=-1', 'seed is -1'),
    ('--n_test=0', 'n_test is 0; it must be at least 1'),
    ('--learning_rate=-1', 'learning_rate is -1.0; it must be'),
    ('--position=kerpel', "position is 'kerpel', which is unknown"),
    ('--random_positions=9', 'below 9, so it cannot read 10 tokens'),
    ("--compare=['{}/other.json']", 'other.json is not a result of che.py'),
])
def test_mistakes_are_met_before_work_in_one_line(tmp_path, argument, message):
    (tmp_path / 'other.json').write_text('{"stage": "entropy"}')
    out_dir = tmp_path / 'out'
    assert message in mistake('che', *arguments(out_dir, argument.format(tmp_path)))
    assert not out_dir.exists()


def test_another_run_and_a_damaged_one_are_named(run, tmp_path):
    line = mistake('che', *arguments(run[0], '--seed=7', '--learning_rate=0.01'))
    assert 'another run: learning_rate 0.001, not 0.01; seed 1337, not 7. Choose' in line
    line = mistake('che', *arguments(run[0], steps=20))
    assert 'is another run: step 30, not at most 20' in line
    content, path = bytearray((run[0] / 'even_pairs.pt').read_bytes()), tmp_path / 'even_pairs.pt'
    path.write_bytes(content[:999])
    assert f'{path} is cut short or not a run' in mistake('che', *arguments(tmp_path))
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert f'{path} is damaged' in mistake('che', *arguments(tmp_path))
