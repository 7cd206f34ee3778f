"""
What every stage leans on: ranks that put rows back in order, devices and precisions, progress, results on disk.

$ python -m pytest tests/test_runtime.py
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from conftest import TINY, files_at_most

import runtime
from model import ModelConfig, Transformer
from runtime import Progress, Runtime, bin_means, clock, matmul_flops, save_json, save_png, setup, write_text

ONE = Runtime(torch.device('cpu'), torch.float32, rank=0, world_size=1)


# ----------------------------------------------------------------------------- ranks

def tiny_model():
    config = ModelConfig(vocab_size=257, **TINY)
    return Transformer(config).init_weights(torch.Generator().manual_seed(1)).requires_grad_(False)


def everything(run):
    """What the two ranks and the one compute alike: {name: array}."""
    model, windows = tiny_model(), np.random.default_rng(0).integers(0, 257, (7, 33))
    found = {}
    for n in 7, 2, 1:  # of one row, the second rank has nothing to do
        rows = np.arange(n * 6.0).reshape(n, 2, 3)
        found[f'gather {n}'] = run.gather(run.mine(rows), n)
        found[f'scalars {n}'] = run.gather(run.mine(list(range(n))), n)
    for batch_tokens in 1, 64, 100, 10 ** 6:
        found[f'integers {batch_tokens}'] = run.over_windows(
            windows, batch_tokens, lambda inputs, targets: (inputs * 3 + targets).numpy())
        found[f'losses {batch_tokens}'] = run.over_windows(windows, batch_tokens, model)
    return found


def one_window(run):
    """Its mean loss, (1,): a second rank has nothing to do."""
    model = tiny_model()
    return run.over_windows(np.arange(33)[None], 64, lambda inputs, targets: model(inputs, targets).mean(1))


@pytest.fixture(scope='module')
def two_ranks(tmp_path_factory):
    """Folder of what two processes under torchrun found: 0.npz of rank 0, 1.npz of rank 1 ..."""
    folder = tmp_path_factory.mktemp('ranks')
    run = subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', __file__,
                          folder], capture_output=True, text=True, env=os.environ | {
                              'OMP_NUM_THREADS': '1', 'PYTHONPATH': os.pathsep.join(sys.path)})
    assert (folder / '1.npz').exists(), run.stderr
    return folder


@pytest.fixture(scope='module')
def of_two_ranks(two_ranks):
    """everything() of rank 0, of rank 1."""
    return [np.load(two_ranks / f'{rank}.npz') for rank in (0, 1)]


def test_gather_puts_rows_of_two_ranks_back_in_order(of_two_ranks):
    for found in of_two_ranks:
        for n in 7, 2, 1:
            assert np.array_equal(found[f'gather {n}'], np.arange(n * 6.0).reshape(n, 2, 3))
            assert np.array_equal(found[f'scalars {n}'], np.arange(n))
            assert found[f'scalars {n}'].dtype == np.float64


def test_windows_measure_the_same_on_one_and_two_ranks_and_in_any_batches(of_two_ranks):
    windows = np.random.default_rng(0).integers(0, 257, (7, 33))
    expected = windows[:, :-1] * 3 + windows[:, 1:]
    for found in everything(ONE), *of_two_ranks:
        for batch_tokens in 1, 64, 100, 10 ** 6:
            assert np.array_equal(found[f'integers {batch_tokens}'], expected)
            assert found[f'losses {batch_tokens}'].shape == (7, 32)
            assert np.allclose(found[f'losses {batch_tokens}'], found['losses 1'], atol=1e-5)


def test_ranks_agree_to_the_last_bit(of_two_ranks):
    one, other = of_two_ranks
    assert sorted(one) == sorted(other) == sorted(everything(ONE))
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_rank_without_a_window_waits_for_the_others(two_ranks):
    for rank in 0, 1:
        assert (two_ranks / f'{rank}.npy').exists(), 'a rank stopped on no windows'
        assert np.allclose(np.load(two_ranks / f'{rank}.npy'), one_window(ONE), atol=1e-5)


def test_over_windows_gives_at_most_batch_tokens_at_once_and_at_least_one_window():
    sizes = []
    ONE.over_windows(torch.zeros(5, 11, dtype=torch.long), 25, lambda x, y: sizes.append(x.shape) or y.sum(1))
    assert sizes == [(2, 10), (2, 10), (1, 10)]
    sizes.clear()
    ONE.over_windows(torch.zeros(2, 11, dtype=torch.long), 3, lambda x, y: sizes.append(x.shape) or y.sum(1))
    assert sizes == [(1, 10), (1, 10)]


def test_over_windows_needs_no_gradient():
    weight = torch.ones(1, requires_grad=True)
    assert ONE.over_windows(torch.ones(3, 5), 8, lambda x, y: (x * weight).sum(1)).tolist() == [4, 4, 4]


# ----------------------------------------------------------------------------- device, precision, compiling

def test_setup_takes_cpu_and_float32_where_there_is_nothing_better():
    run = setup('cpu', 'float32')
    assert (run.device.type, run.dtype, run.rank, run.world_size, run.is_main) == ('cpu', torch.float32, 0, 1, True)
    assert setup('cpu', 'auto').dtype == (torch.bfloat16 if runtime.has_bfloat16(run.device) else torch.float32)
    assert torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_float32_products_are_not_rounded_to_tf32(dtype):
    torch.backends.cuda.matmul.allow_tf32 = True  # as other code in the process may have left it
    setup('cpu', dtype)
    assert not torch.backends.cuda.matmul.allow_tf32 and not torch.backends.cudnn.allow_tf32


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs an NVIDIA GPU')
def test_float32_products_on_a_gpu_have_float32_precision():
    device = setup('cuda', 'bfloat16').device
    a = torch.randn(256, 256, device=device)
    torch.testing.assert_close((a @ a).double(), a.double() @ a.double(), rtol=0, atol=1e-4)


def test_setup_seeds():
    numbers = []
    for seed in 1, 1, 2:
        setup('cpu', 'float32', seed)
        numbers.append(torch.rand(1).item())
    assert numbers[0] == numbers[1] != numbers[2]


@pytest.mark.parametrize('device, dtype, message', [
    ('cpu', 'floaty', "dtype is 'floaty'. Choose auto, float32, bfloat16, float16."),
    ('cpu', 'float16', "dtype is 'float16', which needs a GPU."),
    ('gpu', 'auto', "device is 'gpu'"),
    ('cpu:', 'auto', "device is 'cpu:'"),
    pytest.param('cuda', 'auto', "device is 'cuda' but this PyTorch sees no CUDA device. Use --device=cpu.",
                 marks=pytest.mark.skipif(torch.cuda.is_available(), reason='there is a CUDA device here')),
    pytest.param('cuda:3', 'auto', "device is 'cuda:3'",
                 marks=pytest.mark.skipif(torch.cuda.device_count() > 3, reason='there are CUDA devices here')),
    pytest.param('mps', 'auto', "device is 'mps'",
                 marks=pytest.mark.skipif(torch.backends.mps.is_available(), reason='this is a Mac')),
])
def test_setup_refuses_what_this_machine_cannot_do(device, dtype, message):
    with pytest.raises(ValueError) as caught:
        setup(device, dtype)
    assert message in str(caught.value) and '\n' not in str(caught.value)


def test_bfloat16_is_for_activations_only():
    run = setup('cpu', 'bfloat16')
    weight = torch.ones(4, 4)
    with run.autocast():
        assert (weight @ weight).dtype == torch.bfloat16
    with setup('cpu', 'float32').autocast():
        assert (weight @ weight).dtype == torch.float32


def test_without_a_c_compiler_one_line_names_it_and_training_goes_on(monkeypatch, capsys):
    monkeypatch.setenv('CXX', '/nonexistent/c++')
    model = tiny_model()
    assert runtime.compiled(model, ONE, enabled=True) is model
    out, err = capsys.readouterr()
    assert out.count('\n') == 1 and '/nonexistent/c++' in out and 'apt-get install g++' in out and 'uncompiled' in out
    assert err == ''
    second_rank = Runtime(torch.device('cpu'), torch.float32, rank=1, world_size=2)
    assert runtime.compiled(model, second_rank, enabled=True) is model
    assert capsys.readouterr().out == '', 'each rank says it'


def test_compiling_switched_off_says_nothing(monkeypatch, capsys):
    monkeypatch.setenv('CXX', '/nonexistent/c++')
    model = tiny_model()
    assert runtime.compiled(model, ONE, enabled=False) is model
    assert capsys.readouterr() == ('', '')


def test_ceiling_is_the_operations_of_a_matrix_product_over_its_time(monkeypatch):
    monkeypatch.setattr(runtime.time, 'perf_counter', itertools.count().__next__)  # a second between any two looks
    assert matmul_flops(ONE.device, ONE.dtype, size=64, seconds=10) == 2 * 64 ** 3


# ----------------------------------------------------------------------------- progress and results

def test_progress_prints_nothing_when_disabled(capsys):
    progress = Progress(3, 'reading', enabled=False)
    progress.shown -= 100  # as if the last line were long ago
    for done in range(4):
        progress.update(done)
    assert capsys.readouterr() == ('', '')


def test_progress_in_a_log_file_is_a_line_each_half_minute(capsys):
    progress = Progress(4, 'reading')
    progress.update(1)
    assert capsys.readouterr() == ('', '')
    progress.start -= 60  # as if it had started a minute ago
    progress.shown -= 31
    progress.update(2, 'loss 3')
    progress.update(3)
    out, err = capsys.readouterr()
    assert out == '' and err.count('\n') == 1
    assert err.startswith('reading  [############            ]  50%  1:00, 1:00 left') and 'loss 3' in err


@pytest.mark.parametrize('seconds, text', [(0, '0:00'), (59.9, '0:59'), (61, '1:01'), (3599, '59:59'),
                                           (3600, '1:00:00'), (3725, '1:02:05'), (360_000, '100:00:00')])
def test_clock(seconds, text):
    assert clock(seconds) == text


def test_bin_means_by_hand():
    positions, means = bin_means([1, 2, 3, 4, 5, 6, 7], 3)
    assert positions.tolist() == [2, 5] and means.tolist() == [2, 5]  # the seventh fills no bin
    positions, means = bin_means([[1, 3, 5, 7], [0, 0, 1, 0]], 2)
    assert positions.tolist() == [1.5, 3.5] and means.tolist() == [[2, 6], [0, 0.5]]
    for width in 0, 1:
        positions, means = bin_means(np.array([4., 9.]), width)
        assert positions.tolist() == [1, 2] and means.tolist() == [4, 9]
    assert bin_means(np.ones((2, 3, 64)), 16)[1].shape == (2, 3, 4)


def strict(path):
    """The JSON in a file; NaN and Infinity, which JSON does not have, are errors."""
    def refuse(constant):
        raise AssertionError(f'{constant} is not JSON')
    return json.loads(path.read_text(), parse_constant=refuse)


def test_results_are_json_with_a_list_of_numbers_on_one_line(tmp_path):
    data = {'loss': [1.5, 2.25, -3e-7], 'rows': [[1, 2], [3, 4]], 'names': ['a', 'b'], 'none': None, 'yes': True,
            'nested': {'deep': [1, 2, 3]}, 'empty': [], 'text': 'a [1, 2] "quoted" { } line\nend [', 'of': [{'x': [1]}]}
    save_json(tmp_path / 'r.json', data)
    text = (tmp_path / 'r.json').read_text().replace('[ ', '[').replace(' ]', ']')
    assert strict(tmp_path / 'r.json') == data and list(strict(tmp_path / 'r.json')) == list(data)
    for line in ' "loss": [1.5, 2.25, -3e-07],', '  [1, 2],', '  [3, 4]', '  "deep": [1, 2, 3]', ' "none": null,':
        assert line in text.splitlines()
    assert text.endswith('}\n')


def test_text_in_results_stays_as_it_is(tmp_path):
    data = {'text': 'x = [1,   2]  # [ wide ]'}
    save_json(tmp_path / 'r.json', data)
    assert strict(tmp_path / 'r.json') == data


def test_numpy_numbers_and_arrays_are_written_as_numbers(tmp_path):
    save_json(tmp_path / 'r.json', {'a': np.arange(3), 'b': np.array([[1 / 3, 2], [3, 4]]), 'c': np.float32(0.5),
                                    'd': np.int64(7), 'e': np.float64(0.25)})
    assert strict(tmp_path / 'r.json') == {'a': [0, 1, 2], 'b': [[0.333333, 2], [3, 4]], 'c': 0.5, 'd': 7, 'e': 0.25}


def test_counts_in_arrays_keep_all_their_digits(tmp_path):
    save_json(tmp_path / 'r.json', {'tokens': np.array([12_345_678, 1_048_577]), 'n': np.int64(12_345_678)})
    assert strict(tmp_path / 'r.json') == {'tokens': [12_345_678, 1_048_577], 'n': 12_345_678}


@pytest.mark.parametrize('write', [
    lambda path: save_json(path, {'a': 2}), lambda path: write_text(path, 'new'),
    lambda path: save_png(runtime.new_figure()[0], path)], ids=['save_json', 'write_text', 'save_png'])
def test_reader_of_the_old_file_never_sees_half_of_the_new(tmp_path, write):
    path = tmp_path / 'new folder' / 'file'
    write(path)  # makes the folder
    path.write_text('old')
    with open(path) as reader:
        write(path)
        assert reader.read() == 'old'  # replaced by another file, not written over
    assert path.read_bytes() != b'old'
    assert [file.name for file in path.parent.iterdir()] == ['file']


@pytest.mark.parametrize('write', [
    lambda path: save_json(path, {'a': [1.5] * 1000}), lambda path: write_text(path, 'new' * 1000),
    lambda path: save_png(runtime.new_figure()[0], path)], ids=['save_json', 'write_text', 'save_png'])
def test_write_that_fails_leaves_the_old_file_and_no_rest(tmp_path, write):
    path = tmp_path / 'file'
    path.write_text('old')
    with pytest.raises(OSError), files_at_most(1000):
        write(path)
    assert path.read_text() == 'old'
    assert [file.name for file in tmp_path.iterdir()] == ['file']


def test_figure_that_is_saved_is_closed(tmp_path):
    """Or all figures of a run stay in memory."""
    figure, _ = runtime.new_figure()
    assert plt.fignum_exists(figure.number)
    save_png(figure, tmp_path / 'x.png')
    assert not plt.fignum_exists(figure.number)


def test_what_json_cannot_hold_leaves_the_old_file(tmp_path):
    save_json(tmp_path / 'r.json', {'a': 1})
    with pytest.raises(TypeError):
        save_json(tmp_path / 'r.json', {'a': object()})
    assert strict(tmp_path / 'r.json') == {'a': 1}


def test_provenance_says_how_a_result_was_made(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, 'argv', ['/some/where/eval_ppl.py', '--scale=1.2'])
    made = runtime.provenance({'scale': 1.2}, ONE, 12.34)
    assert made['command'] == 'python eval_ppl.py --scale=1.2'
    assert made['settings'] == {'scale': 1.2} and made['seconds'] == 12.3 and made['dtype'] == 'float32'
    assert made['versions']['torch'] == torch.__version__ and 'cpu' in made['device']
    save_json(tmp_path / 'r.json', made)
    assert strict(tmp_path / 'r.json') == made


def test_result_is_written_where_git_is_not_installed(monkeypatch):
    monkeypatch.setenv('PATH', '')
    assert runtime.provenance({}, ONE, 1)['commit'] is None


if __name__ == '__main__':  # a rank of the fixture two_ranks
    this = setup('cpu', 'float32')
    np.savez(Path(sys.argv[1], f'{this.rank}.npz'), **everything(this))
    np.save(Path(sys.argv[1], f'{this.rank}.npy'), one_window(this))
    this.close()
