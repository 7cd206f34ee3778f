"""
A stop at any moment costs nothing: signals, kills, full disks, damaged logs, a second run in the
same folder; and several ranks compute what one process does.

$ python -m pytest -m '' tests/test_runs.py    # -m '' for the slow ones, too
"""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, files_at_most, mistake, stage, stage_here
from training import Runs, assert_same, assert_steps, load, log_rows

from lib import checkpoints, devices
from lib import runs as runs_file
from lib.results import lock_file, unlock_file


@pytest.fixture(scope='module')
def runs(tmp_path_factory, corpus_dir):
    with pytest.MonkeyPatch.context() as patch:  # to measure the machine takes half a second
        patch.setattr(devices, 'matmul_flops', lambda *_: 1e12)
        yield Runs(tmp_path_factory.mktemp('runs'), corpus_dir)


@pytest.fixture(scope='module')
def plain(runs):
    """A run that was never stopped. A test that writes takes a copy."""
    return runs.train('plain')


def start(runs, name, ranks=1, **settings):
    """
    Start train.py in a process of its own, whose output goes to a file, NAME.out, as workers may
    outlive torchrun.
    """
    launcher = []
    if ranks > 1:
        launcher = ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={ranks}']
    command = [sys.executable, *launcher, ROOT / 'train.py', *runs.arguments(name, **settings)]
    environment = os.environ | {'OMP_NUM_THREADS': '1'}
    with open(runs.folder / f'{name}.out', 'w') as out:
        return subprocess.Popen(command, stdout=out, env=environment)


def wait_for(condition, process=None):
    """Ask until it is so. A run that hangs is ended by the limit of whoever runs the tests."""
    while not condition():
        assert process is None or process.poll() is None, 'ended too early'
        time.sleep(0.001)


def n_lines(path):
    return path.read_bytes().count(b'\n') if path.exists() else 0


def wait_for_steps(out_dir, n, process=None):
    log = out_dir / 'log.jsonl'
    wanted = n_lines(log) + n
    wait_for(lambda: n_lines(log) > wanted, process)


def holder(out_dir):
    """The process that writes to out_dir."""
    return int((out_dir / 'log.jsonl.lock').read_text().split()[1])


# ---------------------------------------------------------------------- a stop

@pytest.mark.parametrize('name', ['SIGTERM', 'SIGINT'])
def test_a_run_stopped_by_a_signal_saves_and_goes_on_as_if_unbroken(runs, plain, monkeypatch,
                                                                    capfd, name):
    number, flush = signal.Signals[name], runs_file.Recorder.flush

    def flush_at_step_5(recorder, step):
        if step == 5 and recorder.pending:
            os.kill(os.getpid(), number)
        return flush(recorder, step)

    monkeypatch.setattr(runs_file.Recorder, 'flush', flush_at_step_5)
    out_dir = runs.folder / name
    with pytest.raises(SystemExit) as stopped:
        stage_here('train', *runs.arguments(name))
    assert stopped.value.code == 128 + number
    assert 'once more stops at once' in capfd.readouterr().err
    assert load(out_dir)['step'] == 5
    assert_steps(out_dir, 5)
    monkeypatch.setattr(runs_file.Recorder, 'flush', flush)
    runs.resume(name)
    assert_same(plain, out_dir)


def test_a_disk_that_fills_up_stops_the_run_and_leaves_what_it_had(runs, plain):
    out_dir = runs.train('full', max_iters=6)
    before = (out_dir / 'last.pt').read_bytes()
    with files_at_most(len(before) // 2):  # room for best.pt, and not for the optimizer
        line = mistake('train', *runs.arguments('full', init_from='resume'))
    assert 'last.pt' in line and (out_dir / 'last.pt').read_bytes() == before
    assert not list(out_dir.glob('*.part'))
    runs.resume('full')
    assert_same(plain, out_dir)


def test_resume_keeps_every_line_that_can_be_read_and_names_the_others(runs, plain):
    out_dir = runs.copy(plain, 'bad_lines')
    log = out_dir / 'log.jsonl'
    lines = log.read_bytes().splitlines()
    bad = [b'{"step": 5, "tok', b'\xff', b'[5]', b'{}', b'{"step": "5"}']
    log.write_bytes(b'\n'.join([*lines[:6], *bad, *lines[6:], b'{"step": 13, "tok']))
    runs.resume('bad_lines', max_iters=14)
    assert log.read_bytes().splitlines()[:len(lines)] == lines
    assert_steps(out_dir, 14)
    assert f'{log}: dropped what could not be read, line 7, 8, 9, 10, 11, ' in runs.printed


@pytest.mark.slow
def test_a_run_killed_again_and_again_equals_an_unbroken_one(runs):
    """At any step, and at half of the times while a checkpoint is written."""
    settings = {'max_iters': 60, 'eval_interval': 1, 'lr_decay_iters': None}
    unbroken, out_dir = runs.train('unbroken', **settings), runs.folder / 'killed'
    for kill in range(4):
        init_from = 'resume' if (out_dir / 'last.pt').exists() else 'scratch'
        process = start(runs, 'killed', init_from=init_from, **settings)
        wait_for_steps(out_dir, 6, process)
        if kill % 2:
            wait_for((out_dir / 'last.pt.part').exists, process)
        process.kill()
        process.wait()
    assert load(out_dir)['step'] < 60
    runs.resume('killed', **settings)
    assert_same(unbroken, out_dir)


@pytest.mark.slow
def test_a_compiled_run_resumed_from_what_a_kill_would_leave_equals_an_unbroken_one(runs):
    settings = {'compile': True, 'n_layer': 1}
    whole = runs.train('compiled', **settings)
    assert 'uncompiled' not in runs.printed
    parts = runs.train('compiled_parts', max_iters=6, **settings)
    runs.resume('compiled_parts', **settings)
    assert_same(whole, parts)


# ---------------------------------------------------------------------- two runs in one out_dir

@pytest.mark.parametrize('init_from', ['scratch', 'resume'])
def test_a_second_run_in_the_out_dir_of_a_living_one_is_refused(runs, plain, cpu, init_from):
    name = f'beside_{init_from}'
    out_dir = runs.folder / name
    if init_from == 'resume':
        runs.copy(plain, name)
    lock = lock_file(out_dir / 'log.jsonl', cpu)  # as the run that lives has it
    line = runs.refused(name, init_from=init_from)
    assert f'process {os.getpid()} ' in line and str(out_dir) in line
    unlock_file(lock)
    runs.train(name, init_from=init_from, max_iters=13)
    assert not list(out_dir.glob('*.lock'))


@pytest.mark.slow
def test_workers_that_outlive_torchrun_keep_others_out_until_they_end(runs):
    settings = {'max_iters': 10 ** 5, 'eval_interval': 1, 'log_interval': 1}
    out_dir = runs.folder / 'orphans'
    torchrun = start(runs, 'orphans', ranks=2, **settings)
    wait_for_steps(out_dir, 4, torchrun)
    torchrun.kill()
    torchrun.wait()
    worker = holder(out_dir)
    line = mistake('train', *runs.arguments('orphans', init_from='resume', **settings))
    assert f'process {worker} on' in line
    wait_for_steps(out_dir, 1)  # they train on
    os.kill(worker, signal.SIGTERM)
    wait_for(lambda: not (out_dir / 'log.jsonl.lock').exists())
    step = load(out_dir)['step']
    assert_steps(out_dir, step)


# ---------------------------------------------------------------------- two ranks

@pytest.fixture(scope='module')
def two_ranks(runs):
    """A run on two ranks whose torchrun was told to stop. Returns out_dir and stdout."""
    torchrun = start(runs, 'two_ranks', ranks=2, max_iters=10 ** 4, lr_decay_iters=400,
                     log_interval=1)
    out_dir = runs.folder / 'two_ranks'
    wait_for_steps(out_dir, 20, torchrun)
    torchrun.terminate()
    assert torchrun.wait() != 0
    return out_dir, (runs.folder / 'two_ranks.out').read_text()


@pytest.mark.slow
def test_two_ranks_train_what_one_does_stop_together_and_one_goes_on(runs, two_ranks):
    out_dir, out = two_ranks
    one = runs.train('one_rank', max_iters=12, lr_decay_iters=400)
    for key in ('loss', 'val_loss'):
        ours = {step: value for step, value in log_rows(out_dir, key).items() if step <= 12}
        assert ours == pytest.approx(log_rows(one, key), rel=1e-3)
    step = load(out_dir)['step']
    assert f'SIGTERM: saved step {step}' in out
    assert_steps(out_dir, step)
    resumed = runs.copy(out_dir, 'on_one_rank')
    runs.train('on_one_rank', max_iters=step + 2, lr_decay_iters=400, init_from='resume')
    assert_steps(resumed, step + 2)


@pytest.mark.slow
def test_a_signal_that_reaches_a_worker_alone_ends_the_run_with_a_checkpoint(runs):
    """As a scheduler may send it; torchrun itself is told nothing."""
    out_dir = runs.folder / 'one_worker'
    torchrun = start(runs, 'one_worker', ranks=2, max_iters=10 ** 5, eval_interval=10 ** 5,
                     log_interval=1)
    wait_for_steps(out_dir, 4, torchrun)
    os.kill(holder(out_dir), signal.SIGTERM)
    assert torchrun.wait() != 0
    step = load(out_dir)['step']
    assert f'SIGTERM: saved step {step}' in (runs.folder / 'one_worker.out').read_text()
    assert_steps(out_dir, step)


@pytest.mark.slow
def test_what_all_ranks_refuse_is_said_once(runs):
    _, err = stage('train', *runs.arguments('refused', batch_size=0), ranks=2, status=1)
    assert err.count('batch_size is 0') == 1


# ---------------------------------------------------------------------- sharded and compiled

def seed_of(runs, dtype):
    """A checkpoint of one step whose head scales are 1.001, which bfloat16 would make 1."""
    seed = runs.folder / f'seed_{dtype}'
    if not seed.exists():
        runs.train(seed.name, dtype=dtype, max_iters=1)
    state = torch.load(seed / 'last.pt', weights_only=True)
    for name, scale in state['model'].items():
        if name.endswith('head_scale'):
            scale.fill_(1.001)
    checkpoints.save(seed / 'scaled.pt', **state)
    return seed / 'scaled.pt'


def train_on_two_ranks(runs, name, **settings):
    stage('train', *runs.arguments(name, micro_batch_size=1, **settings), ranks=2)
    return runs.folder / name


def assert_close_runs(one, other, atol):
    for key in ('loss', 'val_loss'):
        assert log_rows(one, key) == pytest.approx(log_rows(other, key), abs=atol)
    weights, others = load(one)['model'], load(other)['model']
    torch.testing.assert_close(weights, others, rtol=0, atol=atol)
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


@pytest.mark.slow
def test_a_sharded_model_learns_what_a_whole_one_does_and_goes_on_anywhere(runs):
    """On two ranks and in one process. Of 5 validation windows, one rank reads one more."""
    settings = {'eval_windows': 5, 'init_from': seed_of(runs, 'float32'), 'max_iters': 9}
    whole = runs.train('whole', micro_batch_size=1, **settings)
    first = train_on_two_ranks(runs, 'sharded', fsdp=True, **settings | {'max_iters': 6})
    alone = runs.copy(first, 'sharded_then_alone')
    settings['init_from'] = 'resume'
    train_on_two_ranks(runs, 'sharded', fsdp=True, **settings)
    runs.train('sharded_then_alone', micro_batch_size=1, **settings)
    for run in (first, alone):
        assert_close_runs(run, whole, atol=1e-4)
        scale = checkpoints.load_model('last', run, 'cpu')[0].head_scale
        assert torch.equal(scale, torch.full_like(scale, 1.001))


SPEEDS = {
    'compiled DDP': {'compile': True},
    'compiled FSDP': {'compile': True, 'fsdp': True},
    'compiled FSDP in bfloat16': {
        'compile': True, 'fsdp': True, 'dtype': 'bfloat16', 'checkpoint_activations': True},
}


@pytest.mark.slow
@pytest.mark.parametrize('name', SPEEDS)
def test_two_compiled_ranks_train_what_one_plain_process_does(runs, name):
    settings = {'max_iters': 3, 'dtype': 'float32'} | SPEEDS[name]
    settings['init_from'] = seed_of(runs, settings['dtype'])
    plain = {'compile': False, 'fsdp': False, 'checkpoint_activations': False}
    one = runs.train(f'{name} plain', micro_batch_size=1, **settings | plain)
    two = train_on_two_ranks(runs, name, **settings)
    assert 'uncompiled' not in runs.printed
    assert_close_runs(two, one, atol=2e-2 if settings['dtype'] == 'bfloat16' else 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize('position', ['none', 'kerple'])
def test_a_compiled_run_that_recomputes_activations_trains_what_a_plain_one_does(runs, position):
    settings = {'position': position, 'max_iters': 3, 'n_layer': 1}
    plain = runs.train(f'{position} plain', **settings)
    fast = runs.train(f'{position} fast', compile=True, checkpoint_activations=True, **settings)
    assert 'uncompiled' not in runs.printed
    assert_close_runs(fast, plain, atol=1e-4)
