"""
Algorithmic tasks: how answers are counted, and the stage as run.

$ python -m pytest tests/test_che.py
"""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import damage, mistake, near, random_model, read, stage_here, written_elsewhere

import che
from che import loss_and_accuracy
from lib.answers import paper_table
from lib.generate import complete
from lib.tasks import TASKS

TINY = ('--n_layer=1 --n_head=2 --n_embd=16 --n_hidden=16 --batch_size=8 --train_length=6 '
        '--test_length=9 --n_test=8 --warmup_iters=5 --device=cpu --position=kerple '
        '--dape_kernel=3').split()


def test_accuracy_counts_symbols_up_to_the_end_symbol_and_loss_counts_all():
    _, answers = TASKS['stack_manipulation'].generate(np.random.default_rng(0), 16, 10)
    right = torch.from_numpy(answers)
    end = right == 2
    before_end = end.cumsum(1) == 0

    def measured(is_right):
        def read(tokens, tail):
            assert tokens.shape == (16, 21) and (tokens[:, 10:] == 5).all()  # empty in every slot
            return F.one_hot(torch.where(is_right, right, (right + 1) % 3), 3).float()

        model, rng = Mock(side_effect=read), np.random.default_rng(0)
        model.head.weight.device = 'cpu'
        return [*map(float, loss_and_accuracy(model, 'stack_manipulation', rng, 16, 10, 5))]

    loss, *shares = measured(right < 3)
    loss_at_zeros, *the_same = measured(before_end | end)
    assert shares == the_same == [1, 1] and loss_at_zeros > loss + 0.05
    n = before_end.sum().item()
    assert measured(before_end)[1:] == [pytest.approx(n / (n + 16)), 0]  # no end symbol is right
    end[:4] = False
    assert measured(before_end | end)[2] == 12 / 16


@torch.no_grad()
def test_a_copy_counts_as_right_where_greedy_generation_writes_it():
    """A model trained for a few steps copies some texts rightly and others wrongly."""
    model = random_model(vocab_size=33, position='alibi', block_size=64)
    optimizer = torch.optim.Adam(model.requires_grad_().parameters(), 1e-2)
    with torch.enable_grad():
        for step in range(60):
            optimizer.zero_grad()
            loss_and_accuracy(model, 'copy', np.random.default_rng(step), 64, 3, 32)[0].backward()
            optimizer.step()
    *_, exact = loss_and_accuracy(model, 'copy', np.random.default_rng(1000), 64, 3, 32)
    x, _ = TASKS['copy'].generate(np.random.default_rng(1000), 64, 3)
    written = complete(model, [[*row, 32] for row in x.tolist()], 3)
    assert 0 < exact.item() < 1 and exact.item() == (written == x).all(1).mean()


@torch.no_grad()
def test_accuracy_is_the_mean_over_all_samples(tmp_path):
    """100 samples are read in batches of 64 and 36."""
    model, rng = random_model(vocab_size=6), np.random.default_rng([5, *b'test bucket_sort', 9])
    state = {'settings': {'seed': 5}, 'test': {}}
    run = che.TaskRun(['bucket_sort'], 5, model, state, tmp_path / 'bucket_sort.pt', None)
    parts = [che.draw('bucket_sort', rng, n, 9, 5) for n in (64, 36)]
    tokens, answers = (torch.cat(part) for part in zip(*parts))
    right = model(tokens, tail=9)[..., :5].argmax(-1) == answers
    found = che.test_accuracies(run, 'bucket_sort', [9], 100)
    near(found, [[right.float().mean(), right.all(1).float().mean()]], atol=1e-6)


# ---------------------------------------------------------------------- the stage as run

def arguments(out_dir, *more, steps=30, tasks="'even_pairs'"):
    return [*TINY, f'--tasks=[{tasks}]', f'--max_iters={steps}', f'--out_dir={out_dir}', *more]


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """out_dir of two tasks, trained for 30 steps without a stop, and what was printed."""
    out_dir = tmp_path_factory.mktemp('che')
    return out_dir, stage_here('che', *arguments(out_dir, tasks="'bucket_sort','even_pairs'"))


def test_a_method_with_other_settings_than_table_6_has_another_name():
    chosen = che.METHOD | {'short_conv': 0, 'short_conv_at': 'AC', 'position': 'alibi'}
    assert che.method_names(chosen) == ('ALiBi', 'alibi')
    name, folder = che.method_names(chosen | {'short_conv': 4})
    assert (name, folder) == ('ALiBi, short_conv 4', 'alibi_short_conv_4')
    assert name not in paper_table('dape_table6')['even_pairs']


def test_result_has_all_lengths_by_value_and_the_papers_accuracy_beside_ours(run):
    out_dir, printed = run
    result, paper = read(out_dir / 'che.json'), paper_table('dape_table6')
    assert result['lengths'] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert list(result['tasks']) == ['bucket_sort', 'even_pairs']
    for name, row in result['tasks'].items():
        near([row['inside'], row['outside']],
             [np.mean(row['accuracy'][:6]), np.mean(row['accuracy'][6:])], atol=1e-6)
        assert row['paper'] == paper[name]['DAPE 1x3 Kerple']
        shown = row['chance'] * 100, 100 * row['inside'], 100 * row['outside'], row['paper']
        line = ' '.join(f'{number:.4f}' for number in shown)
        assert f'{name} {line}' in ' '.join(printed.split())
    assert result['command'].startswith('python che.py') and (out_dir / 'che.png').exists()


def test_model_learns_even_pairs_and_the_first_length_past_training_is_always_tested(tmp_path):
    larger = '--n_layer=2 --n_embd=32 --n_hidden=32 --batch_size=64 --learning_rate=3e-3'.split()
    stage_here('che', *arguments(tmp_path, *larger, '--n_test=200', '--eval_every=5', steps=300))
    result = read(tmp_path / 'che.json')
    assert result['lengths'] == [1, 6, 7] and result['tasks']['even_pairs']['accuracy'][1] > 0.9


def test_one_model_learns_a_mixture_and_goes_on_where_it_stopped(tmp_path):
    def run(name, steps):
        folder = tmp_path / name
        out = stage_here('che', *arguments(folder, '--lengths=[24,6,3]', steps=steps,
                                           tasks="'flip_flop+copy','recall'"))
        weights = torch.load(folder / 'flip_flop+copy.pt', weights_only=True)['model']
        return out, read(folder / 'che.json'), weights

    run('two', 5)
    damage(tmp_path / 'two/flip_flop+copy.pt', 'settings dape_residual | DROP')  # is newer
    (_, resumed, others), (out, result, weights) = run('two', 8), run('one', 8)
    assert resumed['tasks'] == result['tasks'] and result['lengths'] == [3, 6, 24]
    assert list(result['tasks']) == ['flip_flop', 'copy', 'recall']
    near(others, weights)
    assert weights['embed.weight'].shape[0] == 32 + 1  # the symbols of copy, and the empty token
    for row in result['tasks'].values():
        assert f"{100 * row['accuracy'][2]:.4f}" in out
    assert 'loss' not in run('one', 8)[0]


def test_another_run_and_one_that_is_trained_elsewhere_are_named(run):
    line = mistake('che', *arguments(run[0], '--seed=7', '--learning_rate=0.01'))
    assert 'learning_rate 0.001, not 0.01; seed 1337, not 7' in line
    assert 'step 30, not at most 20' in mistake('che', *arguments(run[0], steps=20))
    with written_elsewhere(run[0] / 'even_pairs.pt'):
        assert 'process 99 ' in mistake('che', *arguments(run[0]))
