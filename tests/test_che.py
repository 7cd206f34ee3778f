"""
Algorithmic tasks: how answers are counted, and the stage as run.

$ python -m pytest tests/test_che.py
"""

import numpy as np
import torch
import torch.nn.functional as F
from conftest import mistake, near, read, stage

from extras import che
from extras.tasks import TASKS
from model import Transformer

TINY = ('--n_layer=1 --n_head=2 --n_embd=16 --n_hidden=16 --batch_size=8 --train_length=6 '
        '--lengths=[1,2,3,4,5,6,7,8,9] --n_test=100 --warmup_iters=5 --device=cpu').split()


def run(out_dir, tasks, *more):
    """What is printed, with single spaces, and the result."""
    out = stage('extras.che', *TINY, f'--tasks={tasks}', f'--out_dir={out_dir}', *more)
    return ' '.join(out.split()), read(out_dir / 'che.json')


def test_accuracy_counts_symbols_up_to_the_end_symbol_and_loss_counts_all():
    answers = torch.tensor([[1, 2, 0], [0, 1, 2]])
    for given, loss, symbols in ([1, 2, 0], 0, 1), ([1, 2, 1], 1 / 6, 1), ([1, 0, 0], 1 / 6, 4 / 5):
        logits = 99.0 * F.one_hot(torch.tensor([given, [0, 1, 2]]), 3)
        near(che.loss_and_accuracy(logits, answers, ends=True),
             [99 * loss, symbols], atol=1e-5)


def test_a_copy_is_predicted_from_the_right_symbols_before_and_recall_at_its_queries():
    x, _ = TASKS['copy'].generate(np.random.default_rng(0), 9, 3)
    tokens, _ = che.draw('copy', np.random.default_rng(0), 9, 3, 32)
    assert tokens.tolist() == [[*row, 32, *row[:-1]] for row in x.tolist()]
    x, _ = TASKS['recall'].generate(np.random.default_rng(0), 9, 8)
    assert (che.draw('recall', np.random.default_rng(0), 9, 8, 32)[0].numpy() == x).all()


def test_a_result_is_the_mean_over_new_samples_of_each_length(tmp_path):
    out, result = run(tmp_path, "['bucket_sort']", '--position=kerple', '--dape_kernel=3',
                      '--max_iters=30')
    state = torch.load(tmp_path / 'bucket_sort.pt', weights_only=True)
    model = Transformer(che.ModelConfig(**state['model_config']))
    model.load_state_dict(state['model'])
    rng = np.random.default_rng([1337, *b'test bucket_sort', 9])
    x, y = map(np.concatenate, zip(*(TASKS['bucket_sort'].generate(rng, n, 9) for n in (64, 36))))
    tokens = F.pad(torch.from_numpy(x), (0, 9), value=5)
    right = model(tokens, tail=9)[..., :5].argmax(-1).numpy() == y
    row = result['tasks']['bucket_sort']
    near(row['accuracy'][8], right.mean(), atol=1e-6)
    near([row['inside'], row['outside']],
         [np.mean(row['accuracy'][:6]), np.mean(row['accuracy'][6:])], atol=1e-6)
    assert (result['lengths'], result['method']) == ([*range(1, 10)], 'kerple+dape3')
    assert 'task chance up to 6 longer' in out and (tmp_path / 'che.png').exists()
    assert f"bucket_sort 20.0% {row['inside']:.1%} {row['outside']:.1%}" in out


def test_one_model_learns_a_mixture_and_once_trained_is_only_tested(tmp_path):
    arguments = "['parity_check+copy','recall']", '--lengths=[24,6,3]'
    first, result = run(tmp_path, *arguments, '--max_iters=2')
    again, the_same = run(tmp_path, *arguments, '--max_iters=2')
    assert 'loss' in first and 'loss' not in again and the_same['tasks'] == result['tasks']
    assert list(result['tasks']) == ['parity_check', 'copy', 'recall']
    assert result['lengths'] == [3, 6, 24] and 'up to 6 longer' in first
    weights = torch.load(tmp_path / 'parity_check+copy.pt', weights_only=True)['model']
    assert weights['embed.weight'].shape[0] == 32 + 1  # the symbols of copy, and the empty token
    assert '--max_iters=2' in mistake('extras.che', *TINY, f'--tasks={arguments[0]}',
                                      '--max_iters=3', f'--out_dir={tmp_path}')
