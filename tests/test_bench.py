"""
bench.py as run at a tiny shape, and its arithmetic against counts made by hand.

$ python -m pytest tests/test_bench.py
"""

import shutil

import pytest
import torch
from conftest import read, stage
from torch.utils.flop_counter import FlopCounterMode

from extras import bench
from position import Settings

SIZES = {'n_layer': 2, 'n_head': 4, 'n_kv_head': 2, 'n_embd': 32, 'n_hidden': 48, 'vocab_size': 61,
         'batch_size': 2, 'context': 32, 'read_context': 64, 'n_decode': 3, 'rounds': 1,
         'compile': False}
close = pytest.approx


@pytest.fixture(autouse=True)
def sizes(monkeypatch):
    for name, value in (vars(Settings(position='rope')) | SIZES).items():
        monkeypatch.setattr(bench, name, value, raising=False)


def test_every_task_is_timed_beside_its_alternative_and_its_limit(tmp_path, cpu):
    pytest.importorskip('transformers')
    stage('extras.bench', *(f'--{name}={value}' for name, value in SIZES.items()), '--peer=hf',
          '--device=cpu', '--dtype=float32', f'--out_dir={tmp_path}')
    found = read(tmp_path / 'cpu.json')
    wanted = {'train': (64, 'transformers'), 'scale': (64, 'whole step'),
              'eval': (8 * 32, 'transformers'), 'entropy': (64, 'matrix'),
              'prefill': (64, 'transformers'), 'decode': (3, 'transformers')}
    assert found['results'].keys() == wanted.keys()
    for task, (tokens, other) in wanted.items():
        row = found['results'][task]
        assert row['tokens'] == tokens and row['limit_seconds'].keys() == {'ours', other}
        for who, limit in row['limit_seconds'].items():
            timed = row[who]
            rates = [timed[name] * timed['seconds'] for name in ('tokens_per_second', 'of_limit')]
            assert rates == close([tokens, limit], rel=1e-4)
            assert timed['times_ours'] == close(timed['seconds'] / row['ours']['seconds'], rel=1e-4)
            assert limit > 0 and timed['peak_memory'] > 0


def test_flop_of_reading_are_those_of_the_products_that_are_needed(cpu):
    model, T, tail = bench.new_model(16, cpu), 40, 6
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(61, (1, T)), tail=tail)
    products = counter.get_flop_counts()['Global'][torch.ops.aten.mm]
    attention = 2 * sum(4 * 32 * i for i in range(T))  # q.k and a.v in two layers
    assert bench.reading_flops(model, T, tail) == close(products + attention, rel=0.03)


def test_limits_are_those_counted_by_hand(cpu, monkeypatch):
    """A machine of 1 FLOP/s, whose memory moves 2^28 bytes a second."""
    monkeypatch.setattr(bench, 'medians', lambda works, runtime: dict.fromkeys(works, 1.0))
    monkeypatch.setattr(bench, 'matmul_flops', lambda *_: 1.0)
    monkeypatch.setattr(bench, 'peak_memory', lambda *_: 1)
    model = bench.new_model(64, cpu)
    matmul, attention = bench.flops_per_token(model, 32)
    weights = model.n_params() - 61 * 32
    keys = 2 * 2 * 2 * 8 * (64 + 1.5)  # in 2 layers of 2 key heads of 8 channels, halfway
    for task, expected in {
            'train': 3 * 64 * (matmul + attention),
            'prefill': bench.reading_flops(model, 64, 1),
            'eval': 8 * bench.reading_flops(model, 32, 4),
            'entropy': 2 * 32 * 64 ** 2,
            'decode': 3 * 4 * (weights + keys) / 2 ** 28,
            'scale': 2 * 32 * (2 * matmul + 3 * attention)}.items():
        assert bench.TASKS[task](cpu)['limit_seconds']['ours'] == close(expected), task
    assert bench.scale(cpu)['limit_seconds']['whole step'] == close(192 * (matmul + attention))


def test_peak_memory_is_that_of_the_tensors_held_at_once(cpu):
    def work():
        one, two = torch.zeros(3 * 10 ** 6), torch.zeros(2 * 10 ** 6)
        del one
        return two, torch.zeros(10 ** 6)

    assert bench.peak_memory(work, cpu) == close(4 * 5e6, rel=1e-3)


@pytest.mark.skipif(not shutil.which('g++'), reason='torch.compile on a CPU needs g++')
def test_what_is_compiled_after_the_warm_up_stops_the_run(monkeypatch, cpu):
    monkeypatch.setattr(bench, 'rounds', 2)
    add, sizes = torch.compile(lambda x: x + 1, dynamic=False), iter([1, 1, 1, 2])
    assert bench.medians({'stays': lambda: add(torch.ones(3))}, cpu)['stays'] > 0
    with pytest.raises(RuntimeError, match='recompile'):
        bench.medians({'grows': lambda: add(torch.ones(next(sizes)))}, cpu)
