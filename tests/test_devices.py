"""
Ranks that put rows back in order, devices and precisions.

$ python -m pytest tests/test_devices.py
"""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import near, on, random_model, read, refuses, stage

from lib import devices
from lib.devices import Runtime, compiled, matmul_flops, setup

WINDOWS = np.random.default_rng(0).integers(0, 61, (7, 33))


# ---------------------------------------------------------------------- ranks

def everything(run):
    """What two ranks and one compute alike: {name: array}."""
    model, found = random_model(), {}
    for n in 7, 2, 1:  # of one row, the second rank has nothing to do
        found[f'rows {n}'] = run.gather(run.shard(np.arange(n * 6.0).reshape(n, 2, 3)), n)
        found[f'numbers {n}'] = run.gather(run.shard(list(range(n))), n)
        found[f'losses {n}'] = run.over_windows(WINDOWS[:n], 100, model)
    return found


@pytest.mark.slow
def test_two_ranks_agree_to_the_last_bit_and_compute_what_one_does(tmp_path, cpu):
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2']
    subprocess.run([*command, __file__, tmp_path], check=True, env=os.environ | {
        'OMP_NUM_THREADS': '1', 'PYTHONPATH': os.pathsep.join(sys.path)})
    one, two = (dict(np.load(tmp_path / f'{rank}.npz')) for rank in (0, 1))
    np.testing.assert_equal(one, two)
    expected = everything(cpu)
    assert one.keys() == expected.keys() and one['numbers 7'].dtype == np.float64
    for name in expected:
        near(one[name], expected[name], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('command, file, key, rtol', [
    ('entropy --length=64 --n_samples=3', 'entropy', 'entropy', 1e-5),
    ('eval_ppl --max_windows=13 --lengths=[64]', 'eval_ppl', 'loss_by_window', 1e-5),
    ('tune_scale --n_samples=4 --compile=False --method=uniform --candidate_range=[0.5,4.0,0.5] '
     '--label=new', 'scale_uniform_fit_new', 'fit_a', 1e-5),
    ('tune_scale --n_samples=4 --compile=False --init_scale=1.2 --max_iters=6 --tune=scale:0.05 '
     '--warmup_iters=2 --batch_size=4 --micro_batch_size=2 --target_length=64', 'scale_head_64',
     'head_scale', 2e-3),
])
def test_two_ranks_measure_and_tune_what_one_does(tiny_run, tmp_path, command, file, key, rtol):
    found = []
    for ranks in 1, 2:
        name, *words = command.split()
        stage(name, *on(tiny_run, tmp_path / str(ranks), ' '.join(words)), ranks=ranks)
        numbers = read(tmp_path / f'{ranks}/{file}.json')[key]
        found.append(numbers['64'] if key == 'loss_by_window' else numbers)
    near(*found, rtol=rtol)


@pytest.mark.parametrize('batch_tokens, sizes', [
    (3, [1] * 7), (70, [2, 2, 2, 2]), (130, [4, 4]), (10 ** 6, [7])])
def test_windows_are_measured_in_order_in_batches_of_one_size(cpu, batch_tokens, sizes):
    seen, weight = [], torch.ones(1, requires_grad=True)  # no gradient is computed

    def measure(inputs, targets):
        seen.append(len(inputs))
        return (inputs * 3 + targets) * weight

    found = cpu.over_windows(WINDOWS, batch_tokens, measure)
    assert np.array_equal(found, WINDOWS[:, :-1] * 3 + WINDOWS[:, 1:]) and seen == sizes
    rows = [[1.0, 2.0], [np.nan, np.inf]]  # no result is made of these
    refuses('nan', cpu.gather, rows, 2)
    assert cpu.gather(rows, 2, finite=False).shape == (2, 2)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_bfloat16_is_for_activations_only_and_float32_is_not_rounded_to_tf32(dtype):
    torch.backends.cuda.matmul.allow_tf32 = True  # as other code may have left it
    weight, run = torch.ones(4, 4), setup('cpu', str(dtype).removeprefix('torch.'))
    assert not torch.backends.cuda.matmul.allow_tf32 and not torch.backends.cudnn.allow_tf32
    with run.autocast():
        assert (weight @ weight).dtype == dtype and weight.dtype == torch.float32


# ---------------------------------------------------------------------- device and precision

@pytest.fixture(autouse=True)
def modes_of_torch_as_they_were():
    yield
    torch.use_deterministic_algorithms(False)


def test_setup_seeds_and_makes_torch_deterministic_and_fast():
    setup('cpu', 'float32', seed=5)
    assert torch.initial_seed() == 5 and torch.are_deterministic_algorithms_enabled()
    assert torch.tensor([1e-38]) * 1e-3 == 0  # such small numbers slow a CPU down


@pytest.mark.parametrize('amx, dtype', [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_on_a_cpu_is_bfloat16_with_amx_else_float32_and_measures_nothing(
        monkeypatch, amx, dtype):
    monkeypatch.setattr(torch.cpu, '_is_amx_tile_supported', lambda: amx)
    monkeypatch.setattr(torch.cpu, '_is_avx512_bf16_supported', lambda: True)
    monkeypatch.delattr(devices, 'matmul_flops')
    assert setup('cpu', 'auto').dtype == dtype


# ---------------------------------------------------------------------- compiling and speed

@pytest.mark.parametrize('platform, cxx, compiler', [
    ('win32', '', 'cl'), ('darwin', '', 'clang++'), ('linux', '', 'g++'), ('freebsd14', '', 'g++'),
    ('linux', '/own/c++', '/own/c++')])
@pytest.mark.parametrize('rank, enabled, n_lines', [(0, True, 1), (1, True, 0), (0, False, 0)])
def test_without_the_systems_compiler_one_line_names_it_and_the_model_stays(
        monkeypatch, capsys, platform, cxx, compiler, rank, enabled, n_lines):
    monkeypatch.setenv('CXX', cxx)
    if not cxx:
        monkeypatch.delenv('CXX')
    monkeypatch.setattr(devices.sys, 'platform', platform)
    monkeypatch.setattr(devices.shutil, 'which', lambda name: None)
    model, run = random_model(), Runtime(torch.device('cpu'), torch.float32, rank, world_size=2)
    assert compiled(model, run, enabled) is model
    out = capsys.readouterr().out
    assert out.count('\n') == out.count(f'compiler {compiler} ') == n_lines


def test_ceiling_is_the_operations_of_a_matrix_product_over_its_time(monkeypatch, cpu):
    seconds, computed = itertools.count(step=100), itertools.count()  # what others take is left out
    monkeypatch.setattr(devices.time, 'perf_counter', lambda: next(seconds))
    monkeypatch.setattr(devices.time, 'thread_time', lambda: next(computed))
    assert matmul_flops(cpu.device, cpu.dtype, seconds=200) == 2 * 2048 ** 3
    # a clock that stands still for three products counts them all
    coarse = iter([0, 0, 0, 1, 1, 1, 1, 2])
    monkeypatch.setattr(devices.time, 'thread_time', lambda: next(coarse))
    assert matmul_flops(cpu.device, cpu.dtype, seconds=100) == 3 * 2 * 2048 ** 3


if __name__ == '__main__':  # a rank of the first test
    this = setup('cpu', 'float32')
    np.savez(Path(sys.argv[1], f'{this.rank}.npz'), **everything(this))
    this.close()
