"""
A stop at any moment costs nothing: signals, kills, full disks, damaged logs, a second run in the
same folder; and several ranks compute what one process does.

$ python -m pytest -m '' tests/test_runs.py    # -m '' for the slow ones, too
"""

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from conftest import (
    ROOT,
    Runs,
    assert_same,
    assert_steps,
    damage,
    files_at_most,
    load,
    log_rows,
    mistake,
    near,
    random_model,
    refuses,
    stage,
    stage_here,
    written_elsewhere,
)

from lib import checkpoints
from lib.answers import note
from lib.runs import Recorder, Speed, StopSignal


def test_weights_that_are_not_finite_replace_no_checkpoint(tmp_path, cpu):
    """A loss can be finite when the update after it is not."""
    recorder, model = Recorder(tmp_path, cpu, {'tracker': ''}, 1, None), random_model()
    recorder.save('last.pt', model, 4)
    before = (tmp_path / 'last.pt').read_bytes()
    model.embed.weight.data[7, 0] = math.nan
    refuses('embed.weight became', recorder.save, 'last.pt', model, 5)
    assert (tmp_path / 'last.pt').read_bytes() == before
    recorder.close()


def start(runs, name, command, ranks=1):
    """Start train.py in a process of its own, whose output goes to a file, NAME.out."""
    launcher = []
    if ranks > 1:
        launcher = f'-m torch.distributed.run --standalone --nproc_per_node={ranks}'.split()
    arguments = runs.arguments(name, command)
    with open(runs.folder / f'{name}.out', 'w') as out:
        return subprocess.Popen([sys.executable, *launcher, ROOT / 'train.py', *arguments],
                                stdout=out, env=os.environ | {'OMP_NUM_THREADS': '1'})


def wait_for(condition, process):
    """Wait without a time limit, because the machine may be busy."""
    while not condition():
        assert process.poll() is None, 'ended too early'
        time.sleep(0.001)


def wait_for_steps(out_dir, n, process):
    """Wait until the log has n more lines."""
    log = out_dir / 'log.jsonl'

    def n_lines():
        return log.read_bytes().count(b'\n') if log.exists() else 0

    wanted = n + n_lines()
    wait_for(lambda: n_lines() > wanted, process)


# ---------------------------------------------------------------------- a stop

@contextlib.contextmanager
def at_step_5(do, *arguments):
    """Inside the `with` block, a run calls do(*arguments) after step 5, before it logs the loss."""
    flush = Recorder.flush

    def do_and_flush(recorder, step):
        if step == 5 and recorder.pending:
            do(*arguments)
        return flush(recorder, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, 'flush', do_and_flush)
        yield


@pytest.mark.parametrize('name', ['SIGTERM', 'SIGINT'])
def test_a_run_stopped_by_a_signal_saves_and_goes_on_as_if_unbroken(runs, plain, capfd, name):
    number, out_dir = signal.Signals[name], runs.folder / name
    with at_step_5(signal.raise_signal, number), pytest.raises(SystemExit) as stopped:
        runs.train(name)
    assert stopped.value.code == 128 + number
    assert 'once more stops at once' in capfd.readouterr().err
    assert load(out_dir)['step'] == 5 and not (out_dir / 'loss.png').exists()
    assert_steps(out_dir, 5)
    assert_same(plain, runs.resume(name))


def test_a_run_that_goes_on_after_its_end_has_no_picture_until_it_ends_again(runs):
    """make demo and the studies take the picture for a sign that the run has finished."""
    out_dir = runs.train('goes_on', '--max_iters=4')
    assert (out_dir / 'loss.png').exists()
    with at_step_5(signal.raise_signal, signal.SIGTERM), pytest.raises(SystemExit):
        runs.resume('goes_on', '--max_iters=12')
    assert not (out_dir / 'loss.png').exists()
    runs.resume('goes_on')
    assert (out_dir / 'loss.png').exists()


def test_on_several_gpus_ranks_ask_each_other_only_at_log_steps(monkeypatch):
    def asked(ranks, device, is_log_step):
        runtime = SimpleNamespace(world_size=ranks, device=torch.device(device), is_main=True)
        monkeypatch.setattr(StopSignal, '__init__', lambda *_: None)
        stop, asks = StopSignal(), []
        stop.runtime, stop.received = runtime, 'SIGTERM' if ranks == 1 else None
        monkeypatch.setattr(dist, 'all_gather_object',
                            lambda found, own: asks.append(found.__setitem__(1, 'SIGTERM')))
        return stop.on_any_rank(is_log_step), len(asks)

    for device in 'cpu', 'cuda':
        for is_log_step in True, False:
            assert asked(1, device, is_log_step) == ('SIGTERM', 0)
    assert [asked(2, *where) for where in (('cpu', True), ('cpu', False), ('cuda', True))] == [
        ('SIGTERM', 1)] * 3
    assert asked(2, 'cuda', False) == (None, 0)


def test_the_printed_loss_is_the_mean_since_the_last_printed_line(runs):
    """Also if a validation comes between two printed lines."""
    losses = [*log_rows(runs.train('printed')).values()]  # lines at 5, 10, 12; validations at 3 ...
    means = [sum(losses[a:b]) / (b - a) for a, b in ((0, 5), (5, 10), (10, 12))]
    found = re.findall(r'step +\d+  loss ([\d.]+)', runs.printed)
    assert found == [f'{loss:.4f}' for loss in means]


def test_a_step_to_keep_that_never_comes_is_named(runs):
    runs.train('keeps', '--keep_steps=[2,13] --max_iters=3')
    assert 'keep_steps has [13], but the run ends at max_iters 3' in runs.printed


def test_a_step_to_keep_that_is_past_is_named(runs, plain):
    runs.copy(plain, 'kept')
    runs.train('kept', '--init_from=resume --max_iters=13 --keep_steps=[2,13]')
    assert 'keep_steps has [2], but the run is already at step 12' in runs.printed


def test_a_run_that_was_saved_by_another_process_meanwhile_does_not_go_on(runs, plain, monkeypatch):
    out_dir = runs.copy(plain, 'raced')
    init = Recorder.__init__

    def saved_elsewhere(*given, **more):
        os.utime(out_dir / 'last.pt', (1, 1))
        init(*given, **more)

    monkeypatch.setattr(Recorder, '__init__', saved_elsewhere)
    line = runs.refused('raced', '--init_from=resume --max_iters=13')
    assert f'another process has just saved {out_dir}/last.pt' in line


def test_a_warm_up_that_is_longer_than_the_run_is_named(runs):
    runs.train('cold', '--warmup_iters=9 --max_iters=3')
    assert 'the learning rate does not reach its peak' in runs.printed


def test_a_resumed_run_keeps_its_settings(runs, plain):
    with at_step_5(signal.raise_signal, signal.SIGTERM), pytest.raises(SystemExit):
        runs.train('bare')
    stage_here('train', f'--out_dir={runs.folder}/bare', '--init_from=resume', '--device=cpu',
               '--compile=False')
    assert_same(plain, runs.folder / 'bare')


def test_a_disk_that_fills_up_stops_the_run_and_leaves_what_it_had(runs, plain):
    out_dir = runs.train('full', '--max_iters=6')
    n_bytes = (out_dir / 'last.pt').stat().st_size
    with files_at_most(n_bytes // 2):  # room for best.pt, and not for the optimizer
        assert 'last.pt' in mistake('train', *runs.arguments('full', '--init_from=resume'))
    assert_same(plain, runs.resume('full'))


@pytest.mark.parametrize('size', [0, 'whole'])
def test_a_run_whose_text_is_changed_in_place_says_so_and_stops(tmp_path, corpus_dir, size):
    """The text is cut off. Then it stays empty, or it grows to its old size with other content."""
    text = shutil.copytree(corpus_dir, tmp_path / 'corpus') / 'train.bin'
    whole, runs = text.read_bytes(), Runs(tmp_path, text.parent)

    def change():
        os.truncate(text, 0)
        os.truncate(text, len(whole) if size == 'whole' else 0)

    with at_step_5(change):
        assert f'{text} has changed' in mistake('train', *runs.arguments('run'))
    text.write_bytes(whole)
    runs.resume('run')
    assert_steps(tmp_path / 'run', 12)


def test_resume_keeps_every_line_that_can_be_read_and_shows_the_others(runs, plain):
    out_dir = runs.copy(plain, 'bad_lines')
    log = out_dir / 'log.jsonl'
    lines = log.read_bytes().splitlines()
    bad = [b'{"step": 5, "tok', b'\xff', b'[5]', b'{"loss": 5.0}', b'{"step": "5", "tokens": 5}']
    log.write_bytes(b'\n'.join([*lines[:6], *bad, *lines[6:], b'{"step": 13, "tok']))
    runs.resume('bad_lines', '--max_iters=14')
    assert log.read_bytes().splitlines()[:len(lines)] == lines
    assert_steps(out_dir, 14)
    for line in bad:
        assert f'{log}: dropped what could not be read: {line}' in runs.printed


@pytest.mark.parametrize('row', '''
scaler | DROP
scaler | []
best_val_loss | DROP
best_val_loss | "x"
data | DROP
data | []
data | {"text": null}
settings init_from | DROP
optimizer | DROP
optimizer | null
optimizer | {}
optimizer state | 5
optimizer state 0 | 5
optimizer state 0 | {"exp_avg": 5}
optimizer state 0 step | [1.0, 2.0]
optimizer state 0 exp_avg | [1.0, 2.0]
optimizer state 99 | {"step": [1.0]}
'''.strip().splitlines())
def test_a_checkpoint_that_no_run_can_go_on_from_is_refused(runs, plain, row):
    name = row.translate(str.maketrans(' |"/[]{}', '_' * 8))
    damage(runs.copy(plain, name) / 'last.pt', row)
    assert 'last.pt is not what a run' in runs.refused(name, '--init_from=resume --max_iters=14')


@pytest.mark.parametrize('kept, lost', [(5, 8), (99, 0), (0, 12)])
def test_resume_says_how_many_steps_the_log_has_lost(runs, plain, kept, lost):
    """kept: lines of the log. The fourth line has no loss."""
    log = runs.copy(plain, f'lost_{lost}') / 'log.jsonl'
    log.write_bytes(b''.join(log.read_bytes().splitlines(keepends=True)[:kept]))
    runs.resume(f'lost_{lost}')  # no step is left to do
    assert (f'{log} lacks {lost} of 12 steps' in runs.printed) == bool(lost)


def test_a_second_run_in_the_out_dir_of_a_living_one_is_refused(runs, plain, monkeypatch):
    out_dir, command = runs.copy(plain, 'locked'), '--init_from=resume --max_iters=13'
    monkeypatch.setitem(sys.modules, 'trackio', Mock())
    with written_elsewhere(out_dir / 'log.jsonl'):
        line = runs.refused('locked', f'{command} --tracker=trackio')
    sys.modules['trackio'].init.assert_not_called()
    assert 'process 99 ' in line and str(out_dir) in line
    runs.train('locked', command)
    assert not list(out_dir.glob('*.lock'))


@pytest.mark.slow
def test_a_run_killed_again_and_again_equals_an_unbroken_one(runs):
    """Kills come at any step. Every second kill comes while a checkpoint is written."""
    command = '--max_iters=60 --eval_interval=1'
    unbroken, out_dir = runs.train('unbroken', command), runs.folder / 'killed'
    for kill in range(4):
        init_from = 'resume' if (out_dir / 'last.pt').exists() else 'scratch'
        process = start(runs, 'killed', f'{command} --init_from={init_from}')
        wait_for_steps(out_dir, 6, process)
        if kill % 2:
            wait_for((out_dir / 'last.pt.part').exists, process)
        process.kill()
        process.wait()
    assert load(out_dir)['step'] < 60
    assert_same(unbroken, runs.resume('killed', command))


# ---------------------------------------------------------------------- two ranks

@pytest.mark.slow
def test_two_ranks_train_what_one_does_and_a_signal_to_one_of_them_stops_both_with_a_checkpoint(
        runs):
    """A scheduler may send the signal to one worker. Afterwards one process resumes the run."""
    out_dir, one = runs.folder / 'two_ranks', runs.train('one_rank')
    torchrun = start(runs, 'two_ranks', '--max_iters=100000 --log_interval=1', ranks=2)
    wait_for_steps(out_dir, 20, torchrun)
    worker = int((out_dir / 'log.jsonl.lock').read_text().split()[1])
    os.kill(worker, signal.SIGTERM)
    assert torchrun.wait() != 0
    step = load(out_dir)['step']
    assert f'SIGTERM: saved step {step}' in (runs.folder / 'two_ranks.out').read_text()
    assert_steps(out_dir, step)
    for key in 'loss', 'val_loss':
        ours = {step: value for step, value in log_rows(out_dir, key).items() if step <= 12}
        assert ours == pytest.approx(log_rows(one, key), rel=1e-3)
    assert_steps(runs.resume('two_ranks', f'--max_iters={step + 2}'), step + 2)


@pytest.mark.slow
def test_what_all_ranks_refuse_is_said_once(runs):
    _, err = stage('train', *runs.arguments('refused', '--batch_size=0'), ranks=2, status=1)
    assert err.count('batch_size is 0') == 1


@pytest.mark.parametrize('seconds, ceiling, advice, shown', [
    ([4, 1, 2.9], 2e9, 0, 'MFU  17%'),
    ([1, 2, 3.1, 9], 2e9, 1, 'MFU   6%'),
    ([1], 0.5e9, 0, ''),  # the ceiling was measured too low
])
def test_a_run_shows_its_share_of_the_machine_and_says_once_that_it_became_slow(
        capsys, seconds, ceiling, advice, shown):
    note.cache_clear()
    speed = Speed(0, 100, 1000, 1e6, ceiling)
    for step, taken in enumerate(seconds, start=1):
        speed.time -= taken
        line = speed.line(step)
    assert capsys.readouterr().out.count('GOMP_SPINCOUNT') == advice
    assert shown in line and ('MFU' in line) == bool(shown) and 'left' in line


# ---------------------------------------------------------------------- sharded and compiled

def seed_of(runs, dtype='float32'):
    """A checkpoint of one step whose head scales are 1.001, which bfloat16 would make 1."""
    seed = runs.folder / dtype
    if not seed.exists():
        state = load(runs.train(dtype, f'--dtype={dtype} --max_iters=1'))
        for name, scale in state['model'].items():
            if name.endswith('head_scale'):
                state['model'][name] = scale + 0.001
        checkpoints.save(seed / 'scaled.pt', **state)
    return f'--init_from={seed}/scaled.pt --dtype={dtype} --micro_batch_size=1'


def on_two_ranks(runs, name, command):
    stage('train', *runs.arguments(name, command), ranks=2)
    return runs.folder / name


def assert_close_runs(one, other, atol=1e-4):
    for key in ('loss', 'val_loss'):
        assert log_rows(one, key) == pytest.approx(log_rows(other, key), abs=atol)
    weights, others = load(one)['model'], load(other)['model']
    near(weights, others, atol)
    scale = weights['blocks.0.attn.head_scale']
    assert torch.equal(scale, others['blocks.0.attn.head_scale'])


@pytest.mark.slow
def test_a_sharded_model_learns_what_a_whole_one_does_and_goes_on_anywhere(runs):
    """On two ranks and in one process. Of 5 validation windows, one rank reads one more."""
    command = f'{seed_of(runs)} --eval_windows=5 --max_iters='
    whole = runs.train('whole', command + '9')
    first = on_two_ranks(runs, 'sharded', command + '6 --fsdp=True')
    alone = runs.copy(first, 'sharded_then_alone')
    on_two_ranks(runs, 'sharded', command + '9 --fsdp=True --init_from=resume')
    runs.resume('sharded_then_alone', '--micro_batch_size=1 --eval_windows=5 --max_iters=9')
    assert_close_runs(first, whole)
    assert_close_runs(alone, whole)


@pytest.mark.slow
@pytest.mark.parametrize('dtype, model, speed', [
    ('float32', '', ''),  # DDP
    ('float32', '', '--fsdp=True'),
    ('bfloat16', '', '--fsdp=True --checkpoint_activations=True'),
    ('float32', '--short_conv=3', ''),
    ('float32', '--short_conv=3', '--fsdp=True --checkpoint_activations=True'),
])
def test_two_compiled_ranks_train_what_one_plain_process_does(runs, dtype, model, speed):
    name = f'compiled_{dtype}_{len(model)}_{len(speed)}'
    command = f'{model or seed_of(runs, dtype)} --micro_batch_size=1 --max_iters=3'
    one = runs.train(f'{name}_plain', command)
    two = on_two_ranks(runs, name, f'{command} --compile=True {speed}')
    assert_close_runs(two, one, atol={'float32': 1e-4, 'bfloat16': 2e-2}[dtype])


@pytest.mark.slow
@pytest.mark.parametrize('position', ['none', 'kerple'])
def test_a_compiled_run_that_recomputes_activations_trains_what_a_plain_one_does(runs, position):
    """A resumed compiled run is the same to the last bit."""
    simple = f'--position={position} --n_layer=1'
    fast = simple + ' --compile=True --checkpoint_activations=True'
    plain, whole = runs.train(f'{position}_plain', simple), runs.train(position, fast)
    assert 'uncompiled' not in runs.printed
    assert_close_runs(whole, plain, atol=2e-3)
    runs.train(f'{position}_parts', f'{fast} --max_iters=6')
    assert_same(whole, runs.resume(f'{position}_parts', fast))


def test_a_tracker_gets_what_the_log_gets(runs, monkeypatch):
    tracker = Mock()
    monkeypatch.setitem(sys.modules, 'trackio', tracker)
    out_dir = runs.train('tracked', '--tracker=trackio --max_iters=3')
    sent = [call.kwargs | call.args[0] for call in tracker.log.call_args_list]
    assert sent == [json.loads(row) for row in (out_dir / 'log.jsonl').read_text().splitlines()]
    tracker.finish.assert_called_once()


def test_a_missing_tracker_is_refused_before_work(runs, monkeypatch):
    monkeypatch.setitem(sys.modules, 'wandb', None)
    assert 'pip install wandb' in runs.refused('untracked', '--tracker=wandb')
