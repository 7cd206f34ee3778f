"""
bench.py at a tiny shape, and its arithmetic against counts made by hand.

$ python -m pytest tests/test_bench.py
"""

import pytest
import torch
from conftest import read
from torch.utils.flop_counter import FlopCounterMode

from extras import bench
from position import Settings

SIZES = {'n_layer': 2, 'n_head': 4, 'n_kv_head': 2, 'n_embd': 32, 'n_hidden': 48, 'vocab_size': 61,
         'batch_size': 2, 'context': 32, 'read_context': 64, 'n_decode': 3, 'rounds': 1,
         'compile': False, 'device': 'cpu', 'dtype': 'float32', 'PRODUCT': {'cpu': 64}}
close = pytest.approx


@pytest.fixture(autouse=True)
def sizes(monkeypatch):
    for name, value in (vars(Settings(position='rope')) | SIZES).items():
        monkeypatch.setattr(bench, name, value, raising=False)


def test_every_task_is_timed_beside_its_alternative(tmp_path, monkeypatch):
    pytest.importorskip('transformers')
    monkeypatch.setattr(bench, 'out_dir', str(tmp_path))
    bench.main()
    found = read(tmp_path / 'cpu.json')['results']
    beside = {'train': 'transformers', 'scale': 'whole step', 'methods': 'DAPE 1x3 Kerple',
              'eval': 'transformers', 'entropy': 'matrix', 'prefill': 'transformers',
              'decode': 'transformers'}
    assert [*found] == [*beside]
    for task, who in beside.items():
        [piece] = found[task]
        assert piece[who]['seconds'] > 0, task


def test_what_is_compared_takes_turns_and_ratios_are_of_one_round(monkeypatch, cpu):
    monkeypatch.setattr(bench, 'rounds', 3)
    times = iter([9, 9, 9, 9, 9, 9, 1, 2, 4, 2, 3, 4, 1, 4, 8])  # two rounds to warm up, then three
    monkeypatch.setattr(bench, 'seconds_of', lambda work, runtime: next(times))
    monkeypatch.setattr(bench, 'peak_memory', lambda work, runtime: 5)
    rate = 2 * 64 ** 3 / 4  # of the large product, in its median round
    found = bench.compare('title', {'a': None, 'b': None}, {'a': rate, 'b': rate / 2}, cpu)
    assert found['b'] == {'seconds': 3, 'ratio': 2, 'from': 1.5, 'to': 4, 'by_flop': 0.5,
                          'of_limit': 0.25, 'peak_memory': 5}
    assert found['a']['ratio'] == 1


def test_flop_of_reading_are_those_of_the_products_that_are_needed(cpu):
    model, T, tail = bench.new_model(16, cpu), 40, 6
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(61, (1, T)), tail=tail)
    products = counter.get_flop_counts()['Global'][torch.ops.aten.mm]
    attention = 2 * sum(4 * 32 * i for i in range(T))  # q.k and a.v in two layers
    assert bench.reading_flops(model, T, tail) == close(products + attention, rel=0.03)


def test_backward_counts_twice_and_frozen_matrices_once(cpu):
    model = bench.new_model(32, cpu, position='kerple', dape_kernel=3)
    dape = 2 * ((8 * 32 * 3 + 32) + (32 * 4 * 3 + 4))  # weights of two layers, 2 x 4 heads to 4
    matmul, attention = bench.flops_per_token(model, 32)
    assert matmul == 2 * (model.n_params() - 61 * 32 - dape)
    assert attention == (2 * 2 * 32 + dape) * 32
    assert bench.step_flops(model) == 64 * 3 * (matmul + attention)
    only_scales = bench.only_scales(model, cpu)
    assert bench.step_flops(only_scales) == 64 * (2 * matmul + 3 * attention)
