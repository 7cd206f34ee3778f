"""
bench.py as run at a tiny shape, and its arithmetic against counts made by hand.

$ python -m pytest tests/test_bench.py
"""

import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import read, save_model, stage_here
from torch.utils.flop_counter import FlopCounterMode

import bench
from configurator import settings
from lib.checkpoints import load_model
from lib.devices import Runtime, setup
from results.bench import table
from results.gpu import table as gpu

SIZES = {'n_layer': 2, 'n_head': 4, 'n_kv_head': 2, 'n_embd': 32, 'n_hidden': 48, 'vocab_size': 61}
WORK = {'batch_size': 2, 'read_context': 64, 'n_decode': 3, 'rounds': 1, 'compile': False,
        'device': 'cpu', 'dtype': 'float32', 'name': 'result'}
close = pytest.approx


def run(folder, *more, program='bench', **settings):
    """What a run prints, and its results."""
    settings = SIZES | WORK | {'context': 32} | settings
    arguments = [f'--{name}={value}' for name, value in settings.items() if value is not None]
    return (stage_here(program, *arguments, f'--out_dir={folder}', *more),
            read(folder / 'result.json'))


@pytest.fixture
def tiny():
    """The settings of a bench with these sizes, and its runtime."""
    return SimpleNamespace(**settings(vars(bench)) | SIZES | {'runtime': setup('cpu', 'float32')})


def test_every_task_is_timed_beside_its_alternative_and_its_limit(tiny, tmp_path):
    pytest.importorskip('transformers')
    _, found = run(tmp_path, '--peer=hf')
    wanted = {'train': (64, 'transformers'), 'scale': (64, 'whole step'),
              'eval': (8 * 32, 'ours, uncompiled', 'transformers', 'transformers, uncompiled'),
              'entropy': (64, 'matrix'), 'prefill': (64, 'transformers'),
              'decode': (3, 'transformers')}
    assert found['results'].keys() == wanted.keys()
    for task, (tokens, *others) in wanted.items():
        row = found['results'][task]
        assert row['tokens'] == tokens and row['limit_seconds'].keys() == {'ours', *others}
        for who, limit in row['limit_seconds'].items():
            timed = row[who]
            rates = timed['tokens_per_second'], timed['of_limit']
            assert rates == close((tokens / timed['seconds'], limit / timed['seconds']), rel=1e-4)
            assert timed['times_ours'] == close(timed['seconds'] / row['ours']['seconds'], rel=1e-4)
            assert limit > 0 and timed['peak_memory'] > 0
    flops = found['results']['train']['limit_seconds']['ours'] * found['matmul_flops']
    of_token = sum(bench.new_model(tiny, 32).flops_per_token(32))
    assert flops == close(3 * 64 * of_token, rel=1e-3)


def test_limit_of_a_head_scale_step_leaves_out_the_gradients_of_weights(tiny):
    model = bench.new_model(tiny, 32)
    (one, attention), (two, more) = [bench.step_limits(tiny, model, T, T) for T in (16, 32)]
    assert [one['whole step'], two['ours'], more] == close(
        [1.5 * one['ours'], 2 * one['ours'], 4 * attention])


def test_flop_of_reading_are_those_of_the_products_that_are_needed(tiny):
    model, T, tail = bench.new_model(tiny, 16), 40, 6
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(61, (1, T)), tail=tail)
    products = counter.get_flop_counts()['Global'][torch.ops.aten.mm]
    queries = [*range(T), *range(T - tail, T)]  # of the first layer, then of the last
    attention = sum(4 * 32 * i for i in queries)  # q.k and a.v
    assert bench.reading_flops(model, T, tail) == close(products + attention, rel=0.03)


def test_limits_are_those_counted_by_hand(tiny, monkeypatch):
    """A machine of 1 FLOP/s, whose memory moves 2^28 bytes a second."""
    monkeypatch.setattr(bench, 'medians', lambda s, works: dict.fromkeys(works, 1.0))
    monkeypatch.setattr(bench, 'rate', lambda *_: 1.0)
    monkeypatch.setattr(bench, 'peak_memory', lambda *_: 1)
    vars(tiny).update(WORK, context=32)
    model = bench.new_model(tiny, 64)
    matmul, attention = model.flops_per_token(32)
    weights = model.n_params() - 61 * 32
    keys = 2 * 2 * 2 * 8 * (64 + 1.5)  # in 2 layers of 2 key heads of 8 channels, halfway
    for task, expected in {
            'prefill': bench.reading_flops(model, 64, 1),
            'eval': 8 * bench.reading_flops(bench.new_model(tiny, 32), 32, 4),
            'entropy': 2 * 32 * 64 ** 2,
            'decode': 3 * 4 * (weights + keys) / 2 ** 28,
            'scale': 2 * 32 * (2 * matmul + 3 * attention)}.items():
        assert bench.TASKS[task](tiny)['limit_seconds']['ours'] == close(expected), task


def test_in_bfloat16_a_frozen_model_has_the_precision_of_a_stage(tiny, tmp_path):
    save_model(bench.new_model(tiny, 16), tmp_path / 'last.pt')
    model, _ = load_model('last', tmp_path, 'cpu', dtype=torch.bfloat16)
    tiny.runtime, idx = Runtime(torch.device('cpu'), torch.bfloat16), torch.randint(61, (2, 9))
    ours = bench.both(tiny, 16, frozen=True)['ours']
    with tiny.runtime.autocast(), torch.no_grad():
        theirs = model(idx)
    found = bench.as_in_stages(tiny, 'ours', lambda: ours(idx))()
    assert torch.equal(found, theirs)
    with pytest.raises(RuntimeError, match='same dtype'):  # without autocast
        bench.as_in_stages(tiny, 'transformers', lambda: ours(idx))()


def test_ratios_of_methods_are_over_dape(tiny, monkeypatch):
    times = {'own step': 3.0, 'own forward': 1.0, 'DAPE step': 2.0, 'DAPE forward': 4.0}
    monkeypatch.setattr(table, 'medians', lambda s, works: times)
    monkeypatch.setattr(table, 'step_and_forward', lambda *_: {})
    tiny.context = 16
    assert {(row['ratio'], row['forward_ratio']) for row in table.time_cost(tiny)} == {(1.5, 0.25)}


def test_tflops_are_by_the_usual_convention(tiny):
    flops = 6 * (bench.new_model(tiny, 16).n_params() - 61 * 32) + 12 * 2 * 32 * 16
    chosen = {key: value for key, value in vars(tiny).items() if key != 'runtime'}
    one = {'task': 'training step', 'limit_seconds': {'ours': 1.0},
           'ours': {'seconds': 2.0, 'tokens_per_second': 1e9, 'of_limit': 0.5}}
    row, = gpu.rows_of({'device': 'cuda (NVIDIA H100 80GB)', 'results': {'train': one},
                        'settings': chosen | {'context': 16}})
    assert (row['TFLOP/s'], row['of sheet']) == close((flops / 1e3, flops * 1e9 / 989e12))


def test_whole_matrix_gives_the_logits_of_our_attention(tiny):
    model, idx = bench.new_model(tiny, 16, position='kerple'), torch.randint(61, (2, 40))
    ours = model(idx)
    for block in model.blocks:
        matrix = table.WholeMatrix(model.config)
        matrix.load_state_dict(block.attn.position.state_dict())
        block.attn.position = matrix
    torch.testing.assert_close(model(idx), ours)


@pytest.mark.slow
def test_tables_have_a_row_for_each_context_or_method_and_the_papers_ratio(tmp_path):
    def rows_of(name):
        _, found = run(tmp_path, name, '--contexts=[16,32]', program='results/bench/table')
        return found['results'][name]

    assert [row['tokens'] for row in rows_of('growth')] == [16, 32]
    assert [row['length'] for row in rows_of('memory')] == [16, 32]
    rows = {row['method']: row for row in rows_of('time_cost')}
    assert list(rows) == list(table.TABLE_7)
    assert all(0 < row['ratio'] < 100 for row in rows.values())
    assert rows['RoPE']['paper_ratio'] == close(210.01 / 252.84, 1e-4)
    assert rows['Kerple, whole matrix']['paper_ratio'] is None


def test_peak_memory_is_that_of_the_tensors_held_at_once(tiny):
    def work():
        one, two = torch.zeros(3 * 10 ** 6), torch.zeros(2 * 10 ** 6)
        del one
        return two, torch.zeros(10 ** 6)
    assert bench.peak_memory(work, tiny.runtime) == close(4 * 5e6, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize('given, context', [(None, 48), (16, 16)])
def test_a_training_config_gives_the_model_and_the_command_line_stays(tmp_path, given, context):
    (tmp_path / 'like.py').write_text('block_size = 48\nn_layer = 3\nlearning_rate = 1.0')
    out, found = run(tmp_path, f'--like=["{tmp_path}/like.py"]', '--tasks=["train"]',
                     '--profile=True', n_layer=None, context=given)
    row, settings = found['results']['train'], found['settings']
    assert row['tokens'] == 2 * context
    assert (settings['n_layer'], settings['position']) == (3, 'none')  # as train.py's default
    assert 'aten::mm' in row['ours']['operators'] and 'aten::mm' in out


@pytest.mark.skipif(not shutil.which('g++'), reason='torch.compile on a CPU needs g++')
def test_what_is_compiled_after_the_warm_up_stops_the_run(tiny):
    tiny.rounds = 2
    add, sizes = torch.compile(lambda x: x + 1, dynamic=False), iter([1, 1, 1, 2])
    assert bench.medians(tiny, {'stays': lambda: add(torch.ones(3))})['stays'] > 0
    with pytest.raises(RuntimeError, match='recompile'):
        bench.medians(tiny, {'grows': lambda: add(torch.ones(next(sizes)))})
