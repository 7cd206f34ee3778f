"""
Algorithmic tasks: how answers are counted, and the stage as run.

$ python -m pytest tests/test_che.py
"""

from unittest.mock import Mock

import numpy as np
import torch
import torch.nn.functional as F
from conftest import mistake, near, read, stage

from extras import che
from extras.tasks import TASKS
from model import Transformer

TINY = ('--n_layer=1 --n_head=2 --n_embd=16 --n_hidden=16 --batch_size=8 --train_length=6 '
        '--test_length=9 --n_test=100 --warmup_iters=5 --device=cpu').split()


def run(out_dir, tasks, steps, *more):
    """What is printed, and the result."""
    out = stage('extras.che', *TINY, f'--tasks=[{tasks}]', f'--max_iters={steps}',
                f'--out_dir={out_dir}', *more)
    return out, read(out_dir / 'che.json')


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
        return [*map(float, che.loss_and_accuracy(model, 'stack_manipulation', rng, 16, 10, 5))]

    loss, *shares = measured(right < 3)
    loss_at_zeros, *the_same = measured(before_end | end)
    assert shares == the_same == [1, 1] and loss_at_zeros > loss + 0.05
    n = before_end.sum().item()
    near(measured(before_end)[1:], [n / (n + 16), 0], atol=1e-6)  # no end symbol is right


def test_a_copy_is_predicted_from_the_right_symbols_before_and_recall_at_its_queries():
    x, _ = TASKS['copy'].generate(np.random.default_rng(0), 9, 3)
    tokens, _ = che.draw('copy', np.random.default_rng(0), 9, 3, 32)
    assert tokens.tolist() == [[*row, 32, *row[:-1]] for row in x.tolist()]
    x, _ = TASKS['recall'].generate(np.random.default_rng(0), 9, 8)
    assert (che.draw('recall', np.random.default_rng(0), 9, 8, 32)[0].numpy() == x).all()


def test_a_result_is_the_mean_over_new_samples_and_stands_beside_the_papers(tmp_path):
    out, result = run(tmp_path, "'bucket_sort','even_pairs'", 30, '--position=kerple',
                      '--dape_kernel=3')
    assert result['lengths'] == [*range(1, 10)] and (tmp_path / 'che.png').exists()
    assert list(result['tasks']) == ['bucket_sort', 'even_pairs']
    state = torch.load(tmp_path / 'bucket_sort.pt', weights_only=True)
    model = Transformer(che.ModelConfig(**state['model_config']))
    model.load_state_dict(state['model'])
    rng = np.random.default_rng([1337, *b'test bucket_sort', 9])
    row = result['tasks']['bucket_sort']
    x, y = map(np.concatenate, zip(*(TASKS['bucket_sort'].generate(rng, n, 9) for n in (64, 36))))
    tokens = F.pad(torch.from_numpy(x), (0, 9), value=5)
    right = model(tokens, tail=9)[..., :5].argmax(-1).numpy() == y
    near([row['accuracy'][8], row['exact'][8]], [right.mean(), right.all(1).mean()], atol=1e-6)
    near([row['inside'], row['outside']],
         [np.mean(row['accuracy'][:6]), np.mean(row['accuracy'][6:])], atol=1e-6)
    assert (row['chance'], row['paper']) == (0.2, 99.06)
    line = f"bucket_sort 20.0% {row['inside']:.1%} {row['outside']:.1%} 99.1%"
    assert 'task chance at 1, 2 ... 6 at 7, 8 ... 9 Table 6 ' + line in ' '.join(out.split())


def test_a_method_with_other_settings_than_table_6_has_another_name(monkeypatch):
    for name, value in vars(che.Settings(position='alibi')).items():
        monkeypatch.setattr(che, name, value, raising=False)
    assert che.method_name() == 'ALiBi'
    monkeypatch.setattr(che, 'short_conv', 4)
    monkeypatch.setattr(che, 'dape_kernel', 3)
    assert che.method_name() == 'DAPE 1x3 ALiBi, short_conv 4'


def test_model_learns_even_pairs_and_the_first_length_past_training_is_always_tested(tmp_path):
    larger = '--n_layer=2 --n_embd=32 --n_hidden=32 --batch_size=64 --learning_rate=3e-3'.split()
    out, result = run(tmp_path, "'even_pairs'", 300, *larger, '--eval_every=5',
                      '--position=kerple')
    assert result['lengths'] == [1, 6, 7] and 'at 1, 6 at 7' in ' '.join(out.split())
    assert result['tasks']['even_pairs']['accuracy'][1] > 0.9


def test_one_model_learns_a_mixture_and_goes_on_where_it_stopped(tmp_path):
    def of(name, steps):
        more = '--lengths=[24,6,3]', '--position=rope', '--random_positions=99'
        out, result = run(tmp_path / name, "'flip_flop+copy','recall'", steps, *more)
        path = tmp_path / name / 'flip_flop+copy.pt'
        return out, result, torch.load(path, weights_only=True)['model']

    of('two', 5)
    (_, resumed, others), (out, result, weights) = of('two', 8), of('one', 8)
    assert resumed['tasks'] == result['tasks'] and result['lengths'] == [3, 6, 24]
    assert list(result['tasks']) == ['flip_flop', 'copy', 'recall']
    near(others, weights)
    assert weights['embed.weight'].shape[0] == 32 + 1  # the symbols of copy, and the empty token
    assert all(f"{row['accuracy'][2]:.1%}" in out for row in result['tasks'].values())
    assert 'loss' not in of('one', 8)[0]


def test_another_run_an_unknown_task_and_lengths_without_a_baseline_are_refused(tmp_path):
    run(tmp_path, "'parity_check'", 2, '--lengths=[6,7]')
    for setting, named in {'--seed=7': '1337', '--max_iters=1': '2 steps', '--lengths=[7,8]':
                           'lengths', '--tasks=["even_pair"]': 'even_pair'}.items():
        assert named in mistake('extras.che', *TINY, '--tasks=["parity_check"]', '--max_iters=2',
                                f'--out_dir={tmp_path}', setting)
