"""
bench.py as run at a tiny shape, and its arithmetic against counts made by hand.

$ python -m pytest tests/test_bench.py
"""

import json
import shutil

import pytest
import torch
from conftest import mistake, stage
from torch.utils.flop_counter import FlopCounterMode

import bench
from runtime import setup

TINY = ['--n_layer=2', '--n_head=4', '--n_kv_head=2', '--n_embd=32', '--n_hidden=48', '--vocab_size=61', '--context=32',
        '--batch_size=2', '--read_context=64', '--n_decode=3', '--rounds=1', '--compile=False', '--device=cpu',
        '--dtype=float32']


def run(folder, *arguments):
    """What a run prints, and its results."""
    out, _ = stage('bench', *TINY, f'--out_dir={folder}', '--name=result', *arguments)
    return out, json.loads((folder / 'result.json').read_text())


def test_every_task_is_timed_beside_its_alternative_and_its_limit(tmp_path):
    pytest.importorskip('transformers')
    out, found = run(tmp_path, '--peer=hf')
    beside = {'train': {'transformers'}, 'scale': {'whole step'}, 'eval': {'one by one', 'transformers'},
              'entropy': {'matrix'}, 'prefill': {'plain pass', 'transformers'}, 'decode': {'transformers'}}
    tokens = {'train': 64, 'scale': 64, 'eval': 16 * 32, 'entropy': 64, 'prefill': 64, 'decode': 3}
    assert found['results'].keys() == beside.keys()
    for task, others in beside.items():
        row = found['results'][task]
        assert row['tokens'] == tokens[task] and row['limit_seconds'].keys() == others | {'ours'}
        for who in others | {'ours'}:
            one = row[who]
            assert one['tokens_per_second'] == pytest.approx(tokens[task] / one['seconds'], rel=1e-4)
            limit = row['limit_seconds'][who]
            assert limit > 0 and one['of_limit'] == pytest.approx(limit / one['seconds'], rel=1e-4)
            assert one['peak_memory'] > 0
    # by hand, in each of two layers: qkv 32 x 64, out 32 x 32, MLP 3 x 32 x 48, norms; then a norm, and 32 x 61
    weights, attention = 2 * (32 * 64 + 32 * 32 + 3 * 32 * 48 + 2 * 32) + 32 + 61 * 32, 2 * 2 * 32 * 32
    wanted = (4 * weights + 3.5 * attention) / (6 * weights + 3.5 * attention)
    assert found['results']['scale']['ratio_by_arithmetic'] == pytest.approx(wanted, rel=1e-4)
    flops = found['results']['train']['limit_seconds']['ours'] * found['matmul_flops']
    assert flops == pytest.approx(3 * 64 * (2 * weights + attention), rel=1e-3)
    assert 'transformers' in out and 'of the limit' in out


def test_flop_of_reading_are_those_of_the_products_that_are_needed(monkeypatch):
    sizes = {'n_layer': 3, 'n_head': 4, 'n_kv_head': 2, 'n_embd': 32, 'n_hidden': 48, 'vocab_size': 61}
    for name, value in sizes.items():
        monkeypatch.setattr(bench, name, value)
    model, T, last = bench.new_model(setup('cpu', 'float32'), 16), 40, 6
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(61, (1, T)), last=last)
    products = counter.get_flop_counts()['Global'][torch.ops.aten.mm]
    attention = sum(4 * 32 * i for layer in range(3) for i in range(T - last if layer == 2 else 0, T))  # q.k and a.v
    norms = 2 * 32 * (3 * 2 + 1) * T  # as flops_per_token() counts all weights, a thousandth too many
    assert bench.reading_flops(model, T, last) == pytest.approx(products + attention + norms, rel=0.02)


def test_time_cost_table_stands_beside_the_papers(tmp_path):
    out, found = run(tmp_path, '--table=time_cost')
    rows = {row['method']: row for row in found['results']['time_cost']}
    assert all(0 < row['ratio'] < 100 for row in rows.values())
    assert rows['RoPE']['paper_ratio'] == pytest.approx(210.01 / 252.84, 1e-4)
    assert rows['Kerple, whole matrix']['paper_ratio'] is None
    assert out.count('\n') == 1 + 1 + len(rows) + 3


def test_a_profile_shows_what_the_time_goes_to(tmp_path):
    out, found = run(tmp_path, "--tasks=['train']", '--profile=True')
    seconds = list(found['results']['train']['ours']['operators'].values())
    assert 0 < sum(seconds) < 10 and seconds == sorted(seconds, reverse=True)
    assert any('mm' in name and f'ms {name}' in out for name in found['results']['train']['ours']['operators'])


def test_growth_table_follows_the_arithmetic_of_its_limit(tmp_path):
    _, found = run(tmp_path, '--table=growth', '--contexts=[16, 32]')
    one, two = found['results']['growth']
    tuning, whole = one['linear_seconds']['ours'], one['linear_seconds']['whole step']
    assert whole == pytest.approx(4 / 3 * tuning, rel=1e-4)
    assert two['linear_seconds']['ours'] == pytest.approx(2 * tuning, rel=1e-4)
    assert two['quadratic_seconds'] == pytest.approx(4 * one['quadratic_seconds'], rel=1e-4)
    assert one['limit_seconds']['ours'] == pytest.approx(tuning + one['quadratic_seconds'], rel=1e-4)


def test_peak_memory_is_that_of_the_tensors_held_at_once():
    def megabytes(n):
        return torch.zeros(n * 10 ** 6, dtype=torch.uint8)

    def work():
        one, two = megabytes(3), megabytes(2)
        del one
        return two, megabytes(1)

    kept = megabytes(7)
    assert bench.peak_memory(work, setup('cpu', 'float32')) == pytest.approx(5e6, rel=1e-3) and len(kept)


def test_memory_of_tuning_grows_with_the_context_and_no_faster(tmp_path):
    _, found = run(tmp_path, '--table=memory', '--contexts=[8192, 16384]')  # in shorter ones attention is a matrix
    one, two = found['results']['memory']
    assert two['per_token'] == pytest.approx(one['per_token'], rel=0.1)
    assert one['peak_memory'] == pytest.approx(8192 * one['per_token'], rel=1e-4)
    # by hand: embedding and head 61 x 32 each, norms 2 x 2 + 1, matrices as above, a scale and a gain for each head
    weights = 4 * (2 * 61 * 32 + 5 * 32 + 2 * (32 * 64 + 32 * 32 + 3 * 32 * 48 + 2 * 4))
    assert one['weights'] == weights


def test_a_training_config_gives_the_model_and_the_command_line_stays(tmp_path):
    (tmp_path / 'like.py').write_text("block_size = 48\nn_layer = 3\nlearning_rate = 1.0")
    arguments = [argument for argument in TINY if not argument.startswith(('--context', '--n_layer'))]
    arguments += [f'--out_dir={tmp_path}', '--name=result', f'--like=["{tmp_path}/like.py"]', "--tasks=['train']"]
    for more, context in ([], 48), (['--context=16'], 16):
        stage('bench', *arguments, *more)
        found = json.loads((tmp_path / 'result.json').read_text())
        assert found['results']['train']['tokens'] == 2 * context
        assert (found['settings']['n_layer'], found['settings']['position']) == (3, 'none')  # as train.py's default


def test_whole_matrix_gives_the_logits_of_our_attention(monkeypatch):
    sizes = {'n_layer': 2, 'n_head': 4, 'n_kv_head': 2, 'n_embd': 32, 'n_hidden': 48, 'vocab_size': 61}
    for name, value in sizes.items():
        monkeypatch.setattr(bench, name, value)
    runtime = setup('cpu', 'float32')
    ours, matrix = (bench.new_model(runtime, 16, position='kerple', dape_kernel=0) for _ in range(2))
    idx = torch.randint(61, (2, 40))
    for block in matrix.blocks:
        block.attn = bench.WholeMatrix(matrix.config)
    matrix.load_state_dict(ours.state_dict())
    torch.testing.assert_close(matrix(idx), ours(idx))


@pytest.mark.skipif(not shutil.which('g++'), reason='torch.compile on a CPU needs g++')
def test_graphs_compiled_after_the_warm_up_are_counted(monkeypatch):
    monkeypatch.setattr(bench, 'rounds', 2)
    compiled, sizes = torch.compile(lambda x: x + 1, dynamic=False), iter([1, 1, 1, 2, 2])
    monkeypatch.setattr(bench, 'LATE_GRAPHS', [])
    runtime = setup('cpu', 'float32')
    bench.medians({'grows': lambda: compiled(torch.ones(next(sizes)))}, runtime)
    bench.medians({'stays': lambda: compiled(torch.ones(2))}, runtime)
    assert bench.LATE_GRAPHS == [1, 0]


def test_mistakes_are_one_line():
    assert 'Choose from: train, scale' in mistake('bench', "--tasks=['trains']")
    assert 'Choose time_cost, growth, memory' in mistake('bench', '--table=costs')
    assert 'Choose hf' in mistake('bench', '--peer=vllm')
    assert 'rounds is 0; it must be at least 1' in mistake('bench', '--rounds=0')
    assert 'contexts is [0]; it must be' in mistake('bench', '--table=growth', '--contexts=[0]')
    assert 'sets no n_layer' in mistake('bench', "--like=['config/tune_8k.py']")
