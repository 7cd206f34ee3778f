"""
The Chomsky-hierarchy tasks against slow definitions, and the stage as run.

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

from che import TASKS, loss_and_accuracy, print_table
from model import ModelConfig, Transformer

LENGTHS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 20, 39, 40]
TINY = ['--n_layer=1', '--n_head=2', '--n_embd=16', '--n_hidden=16', '--batch_size=8', '--train_length=6',
        '--test_length=9', '--n_test=8', '--warmup_iters=5', '--device=cpu']


# what the answer to one input is, a list of symbols, from the task's statement; x: a list of symbols

def pairs(x):
    text = ''.join(map(str, x))
    return [sum(text[k:k + 2] in ('01', '10') for k in range(len(text))) % 2]


def value(x, alphabet):
    return [eval(''.join(alphabet[symbol] for symbol in x)) % 5]  # Python's own arithmetic, which puts products first


def walk(x):
    place = 0
    for step in x:
        place = {0: (4, 0, 1, 2, 3), 1: (0, 1, 2, 3, 4), 2: (1, 2, 3, 4, 0)}[step][place]
    return [place]


def stack(x):
    left = []
    for symbol in x:
        if symbol == 2:
            left = left[:-1]
        else:
            left = [*left, {0: 0, 1: 1, 3: 0, 4: 1}[symbol]]
    return ([*reversed(left), 2] + [0] * len(x))[:len(x) + 1]


def unknown(x):
    if len(x) < 3:
        return [0]
    left, right = ''.join('01234+-()x='[symbol] for symbol in x).split('=')
    (answer,) = [digit for digit in '01234' if eval(left.replace('x', digit)) % 5 == int(right)]  # there is one only
    return [int(answer)]


def missing(x):
    if len(x) == 1:
        return [1]
    half = len(x) // 2
    at = x.index(2)
    return [x[at + half] if at < half else x[at - half]]


def total(x):
    parts = ''.join(map(str, x)).split('2')
    number, digits = sum(2 ** k for part in parts for k, bit in enumerate(part) if bit == '1'), []
    while number or not digits:
        digits, number = [*digits, number % 2], number // 2
    return digits + [2] + [0] * (len(x) - len(digits))


def root(x):
    number, slots = int(''.join(map(str, x)), 2), (len(x) + 1) // 2
    low = 0
    while (low + 1) ** 2 <= number and len(x) <= 20:  # one after the other, or for long numbers a bit at a time
        low += 1
    for bit in reversed(range(slots if len(x) > 20 else 0)):
        low += 2 ** bit * ((low + 2 ** bit) ** 2 <= number)
    return [low >> bit & 1 for bit in reversed(range(slots))]


SLOW = {
    'even_pairs': pairs,
    'modular_arithmetic_simple': lambda x: value(x, '01234+-*'),
    'parity_check': lambda x: [x.count(1) & 1],
    'cycle_navigation': walk,
    'stack_manipulation': stack,
    'reverse_string': lambda x: [x[-k] for k in range(1, len(x) + 1)],
    'modular_arithmetic': lambda x: value(x, '01234+-*()'),
    'solve_equation': unknown,
    'duplicate_string': lambda x: x + x,
    'missing_duplicate': missing,
    'odds_first': lambda x: [s for k, s in enumerate(x) if k % 2] + [s for k, s in enumerate(x) if k % 2 == 0],
    'binary_addition': total,
    'compute_sqrt': root,
    'bucket_sort': lambda x: [s for s in range(5) for _ in range(x.count(s))],
}
# sizes of the alphabets, and the length of an answer where it is not 1, from the released code of Ruoss et al. 2023
SIZES = {'even_pairs': (2, 2), 'modular_arithmetic_simple': (9, 5), 'parity_check': (2, 2), 'cycle_navigation': (3, 5),
         'stack_manipulation': (5, 3), 'reverse_string': (2, 2), 'modular_arithmetic': (11, 5),
         'solve_equation': (11, 5), 'duplicate_string': (2, 2), 'missing_duplicate': (4, 2), 'odds_first': (2, 2),
         'binary_addition': (3, 3), 'compute_sqrt': (2, 2), 'bucket_sort': (5, 5)}
ANSWER = {'stack_manipulation': lambda n: n + 1, 'reverse_string': lambda n: n, 'duplicate_string': lambda n: 2 * n,
          'odds_first': lambda n: n, 'binary_addition': lambda n: n + 1, 'compute_sqrt': lambda n: -(-n // 2),
          'bucket_sort': lambda n: n}


@pytest.mark.parametrize('task', SLOW)
@pytest.mark.parametrize('length', LENGTHS)
def test_answers_are_those_of_the_slow_definition_in_the_right_shape_and_alphabet(task, length):
    inputs, targets = TASKS[task][0](np.random.default_rng(length), 50, length)
    n = length - (task == 'modular_arithmetic_simple' and length % 2 == 0)
    assert inputs.shape == (50, n) and targets.shape == (50, ANSWER.get(task, lambda n: 1)(length))
    assert inputs.dtype == targets.dtype == np.int64 and inputs.min() >= 0 and targets.min() >= 0
    assert TASKS[task][2:4] == SIZES[task]
    assert inputs.max() < SIZES[task][0] and targets.max() < SIZES[task][1]
    for x, y in zip(inputs.tolist(), targets.tolist()):
        assert y == SLOW[task](x), (x, y)


def test_examples_of_the_papers_code_have_its_answers():
    # of Ruoss et al. 2023; for odds_first what its code does, as its example has the even places first
    for task, x, y in [('even_pairs', '001110', '0'), ('even_pairs', '0101001', '1'), ('parity_check', '1010100', '1'),
                       ('modular_arithmetic_simple', '15273', '2'), ('modular_arithmetic_simple', '16161', '4'),
                       ('modular_arithmetic_simple', '071547362', '0'), ('cycle_navigation', '20100', '3'),
                       ('stack_manipulation', '0110422', '11020000'), ('missing_duplicate', '01100210', '1'),
                       ('missing_duplicate', '1011213', '0'), ('odds_first', '00110101', '01110100'),
                       ('binary_addition', '001201101', '0101120000'), ('compute_sqrt', '100101', '110')]:
        assert SLOW[task]([*map(int, x)]) == [*map(int, y)], (task, x)  # as the slow definitions check ours


def test_all_inputs_and_answers_that_should_occur_do():
    def seen(task, length, answers=False):
        return {tuple(row) for row in TASKS[task][0](np.random.default_rng(0), 3000, length)[answers].tolist()}
    assert len(seen('even_pairs', 3)) == 8 and len(seen('cycle_navigation', 3)) == 27
    assert len(seen('modular_arithmetic_simple', 3)) == 75
    assert len(seen('modular_arithmetic', 5)) == 75 and len(seen('modular_arithmetic', 4)) == 5
    assert len(seen('solve_equation', 3)) == 5 and len(seen('missing_duplicate', 4)) == 16
    assert len(seen('stack_manipulation', 3)) == 2 * 9 + 4 * 3  # a stack of one or of two, then orders
    assert len(seen('compute_sqrt', 5)) == 31 and len(seen('binary_addition', 1)) == 1
    assert len(seen('binary_addition', 4)) == 2 * 3 and len(seen('binary_addition', 2)) == 3
    assert {x.index(9) for x in seen('solve_equation', 7)} == {1, 3}  # either digit of (a+b)=c
    # the operator of the outer brackets, the first symbol from 5 to 7 that is in these alone, but for a sign after the
    # bracket: expressions of 1 to 5 symbols stand before it
    outer = {next(k for k in range(2, 9) if 5 <= x[k] <= 7 and x[:k].count(8) - x[:k].count(9) == 1)
             for x in seen('modular_arithmetic', 9)}
    assert outer == {2, 3, 4, 5, 6}
    for task, (_, _, _, n_out) in TASKS.items():
        assert {s for answer in seen(task, 12, answers=True) for s in answer} == set(range(n_out)), task


class Fixed(torch.nn.Module):
    """A model whose answers are given: right in some places."""

    def __init__(self, right):
        super().__init__()
        self.head, self.right = torch.nn.Linear(1, 1), right

    def forward(self, tokens, last):
        self.tokens = tokens
        answers = torch.tensor([SLOW['stack_manipulation'](x) for x in tokens[:, :-last].tolist()])
        wrong = (answers + 1) % 3
        return torch.nn.functional.one_hot(torch.where(self.right(answers), answers, wrong), 6).float()


def test_accuracy_counts_symbols_up_to_the_end_symbol_and_loss_counts_all():
    def before_end(answers):
        return (answers == 2).cumsum(1) == 0
    for right, expected in [(lambda y: y >= 0, 1.0), (lambda y: before_end(y) | (y == 2), 1.0), (lambda y: y > 9, 0.0)]:
        model = Fixed(right)
        loss, share = loss_and_accuracy(model, 'stack_manipulation', np.random.default_rng(0), 16, 10)
        assert share == expected
        assert (model.tokens[:, 10:] == 5).all() and model.tokens.shape == (16, 21)  # the empty token, in every slot
    share = loss_and_accuracy(Fixed(before_end), 'stack_manipulation', np.random.default_rng(0), 16, 10)[1]
    _, targets = TASKS["stack_manipulation"][0](np.random.default_rng(0), 16, 10)
    lengths = (targets == 2).argmax(1)
    assert share.item() == pytest.approx(lengths.sum() / (lengths + 1).sum())  # all but the end symbols themselves
    losses = [loss_and_accuracy(Fixed(right), 'stack_manipulation', np.random.default_rng(0), 16, 10)[0]
              for right in (lambda y: y >= 0, lambda y: before_end(y) | (y == 2))]
    assert losses[1] > losses[0] + 0.05


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """out_dir of two tasks, trained for 30 steps without a stop, and what was printed."""
    out_dir = tmp_path_factory.mktemp('che') / 'tiny'
    return out_dir, stage('che', *TINY, "--tasks=['bucket_sort','even_pairs']", '--position=kerple', '--dape_kernel=3',
                          '--max_iters=30', f'--out_dir={out_dir}', '--eval_interval=10')[0]


def arguments(out_dir, *more):
    return [*TINY, "--tasks=['even_pairs']", '--position=kerple', '--dape_kernel=3', f'--out_dir={out_dir}', *more]


def test_result_has_all_lengths_by_value_and_the_papers_accuracy_beside_ours(run):
    out_dir, printed = run
    result = json.loads((out_dir / 'che.json').read_text())
    assert result['lengths'] == [1, 2, 3, 4, 5, 6, 7, 8, 9] and list(result['tasks']) == ['even_pairs', 'bucket_sort']
    table = json.loads((ROOT / 'results/papers.json').read_text())['dape_table6']
    for task, row in result['tasks'].items():
        assert row['inside'] == pytest.approx(np.mean(row['accuracy'][:6]))
        assert row['outside'] == pytest.approx(np.mean(row['accuracy'][6:]))
        assert row['chance'] == 1 / SIZES[task][1]
        assert row['paper'] == table['rows'][task][table['columns'].index('DAPE 1x3 Kerple')]
        line = next(line for line in printed.splitlines() if line.split()[1:2] == [task])
        assert line.split() == [row['level'], task, f"{100 * row['chance']:.0f}", *(
            f'{x:.2f}' for x in (100 * row['inside'], 100 * row['outside'], row['paper']))]
    assert result['settings']['position'] == 'kerple' and result['command'].startswith('python che.py')
    assert (out_dir / 'che.png').read_bytes()[:4] == b'\x89PNG'


def test_chance_is_a_guess_among_the_symbols_that_an_answer_really_has(capsys):
    row = {'inside': 1.0, 'outside': 1.0, 'paper': None}
    print_table([{'method': 'NoPE', 'train_length': 40, 'lengths': [500], 'tasks': dict.fromkeys(TASKS, row)}])
    shown = {line.split()[1]: line.split()[2] for line in capsys.readouterr().out.splitlines()[2:]}
    for task, (make, *_) in TASKS.items():
        _, targets = make(np.random.default_rng(0), 500, 12)
        if task in ('stack_manipulation', 'binary_addition'):  # what follows the 2 that ends an answer does not count
            targets = targets[np.cumsum(targets == 2, axis=1) - (targets == 2) == 0]
        assert shown[task] == f'{100 / len(np.unique(targets)):.0f}', task
    assert shown['stack_manipulation'] == shown['binary_addition'] == '33'


def test_methods_stand_side_by_side(run, tmp_path):
    found = json.loads((run[0] / 'che.json').read_text())
    other = found | {'method': 'CoPE', 'tasks': {'even_pairs': found['tasks']['even_pairs'] | {'paper': None}}}
    (tmp_path / 'other.json').write_text(json.dumps(other))
    out, _ = stage('che', *TINY, "--tasks=['bucket_sort','even_pairs']", '--position=kerple', '--dape_kernel=3',
                   '--max_iters=30', f'--out_dir={run[0]}', f"--compare=['{tmp_path}/other.json']")
    lines = {line.split()[1]: line.split() for line in out.splitlines() if line[:2] in ('R ', 'CS')}
    even, sort = lines['even_pairs'], lines['bucket_sort']
    assert even[6:] == [*even[3:5], '-'] and even[5] == '100.00' and sort[6:] == ['-']
    assert 'DAPE 1x3 Kerple                        CoPE' in out


def test_papers_table_is_whole():
    table = json.loads((ROOT / 'results/papers.json').read_text())['dape_table6']
    assert list(table['rows']) == list(TASKS) and {len(row) for row in table['rows'].values()} == {11}
    column = table['columns'].index
    order_matters = [row for task, row in table['rows'].items()
                     if task not in ('parity_check', 'cycle_navigation', 'bucket_sort')]
    for bias, better in (('Kerple', 8), ('FIRE', 6)):  # section 4.8: on 8, and on 6, of 11 tasks
        assert sum(row[column(f'DAPE 1x3 {bias}')] > row[column(bias)] for row in order_matters) == better


def test_stopped_and_resumed_run_has_the_weights_and_the_accuracy_of_an_unbroken_one(run, tmp_path):
    stage('che', *arguments(tmp_path, '--max_iters=20', '--eval_interval=20', '--eval_every=5'))  # of two, the second
    stage('che', *arguments(tmp_path, '--max_iters=30', '--label=more'))
    unbroken, resumed = (torch.load(folder / 'even_pairs.pt', weights_only=True) for folder in (run[0], tmp_path))
    assert unbroken['step'] == resumed['step'] == 30
    for name, weight in unbroken['model'].items():
        assert torch.equal(weight, resumed['model'][name]), name
    ours, theirs = (json.loads(path.read_text()) for path in (tmp_path / 'che_more.json', run[0] / 'che.json'))
    assert ours['tasks']['even_pairs'] == theirs['tasks']['even_pairs']
    assert json.loads((tmp_path / 'che.json').read_text())['lengths'] == [1, 6, 7]  # the first past training is tested


def test_finished_task_is_neither_trained_nor_tested_again(run, tmp_path):
    shutil.copytree(run[0], tmp_path / 'copy')
    before = (tmp_path / 'copy/even_pairs.pt').read_bytes()
    out, _ = stage('che', *arguments(tmp_path / 'copy', '--max_iters=30'))
    assert 'loss' not in out and (tmp_path / 'copy/even_pairs.pt').read_bytes() == before


def test_a_task_that_another_process_trains_is_refused_and_other_tasks_are_not(tmp_path):
    more = '--max_iters=1000000', '--eval_interval=1000000'
    command = [sys.executable, '-u', str(ROOT / 'che.py'), *arguments(tmp_path, *more)]
    with subprocess.Popen(command, env=os.environ | {'OMP_NUM_THREADS': '1'}, stdout=subprocess.PIPE) as first:
        first.stdout.readline()  # now it trains
        line = mistake('che', *arguments(tmp_path, '--max_iters=30'))
        stage('che', *arguments(tmp_path, "--tasks=['parity_check']", '--max_iters=1', '--label=other'))
        first.kill()
    assert f'process {first.pid} ' in line and 'even_pairs.pt' in line
    stage('che', *arguments(tmp_path, '--max_iters=1'))  # the lock ended with the process
    assert not list(tmp_path.glob('*.lock'))


def test_model_learns_even_pairs():
    torch.manual_seed(1)
    model = Transformer(ModelConfig(3, 7, 2, 2, 2, 32, 32, 'kerple', dape_kernel=3)).init_weights()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    for step in range(300):
        rng = np.random.default_rng(step)
        loss, _ = loss_and_accuracy(model, 'even_pairs', rng, 64, int(rng.integers(1, 7)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        rng = np.random.default_rng(10 ** 6)
        assert min(loss_and_accuracy(model, 'even_pairs', rng, 200, n)[1] for n in range(2, 7)) > 0.9


def test_mistakes_are_met_before_work_in_one_line(run, tmp_path):
    def refused(*more, out_dir='nowhere'):
        return mistake('che', *arguments(out_dir, '--max_iters=30', *more))
    line = refused("--tasks=['even_pair']")
    assert "even_pair: no task of that name. Choose from even_pairs, modular_arithmetic_simple" in line
    assert 'test_length is 6; it must be at least 7' in refused('--test_length=6')
    assert 'seed is -1; it must be at least 0' in refused('--seed=-1')
    assert 'n_test is 0; it must be at least 1' in refused('--n_test=0')
    assert 'learning_rate is -1.0; it must be' in refused('--learning_rate=-1')
    (tmp_path / 'other.json').write_text('{"stage": "entropy"}')
    (tmp_path / 'damaged.json').write_bytes(b'{"stage": \xff')
    (tmp_path / 'deep.json').write_text('[' * 200_000)
    for other in ('other', 'damaged', 'deep'):
        assert f'{other}.json is not a result of che.py' in refused(f"--compare=['{tmp_path}/{other}.json']")
    assert "position is 'kerpel', which is unknown" in refused('--position=kerpel')
    line = refused('--seed=7', '--learning_rate=0.01', out_dir=run[0])
    assert 'even_pairs.pt is another run: learning_rate 0.001, not 0.01; seed 1337, not 7. Choose another' in line
    assert 'is another run: step 30, not at most 20' in refused('--max_iters=20', out_dir=run[0])


def test_damaged_run_is_named(run, tmp_path):
    (tmp_path / 'even_pairs.pt').write_bytes((run[0] / 'even_pairs.pt').read_bytes()[:999])
    assert 'even_pairs.pt is cut short or not a run of che.py' in mistake('che', *arguments(tmp_path, '--max_iters=30'))
    content = bytearray((run[0] / 'even_pairs.pt').read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / 'even_pairs.pt').write_bytes(content)
    assert 'even_pairs.pt is damaged' in mistake('che', *arguments(tmp_path, '--max_iters=30'))
