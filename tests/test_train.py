"""
Training: what it computes, that a stop at any moment costs nothing, and what it refuses.

$ python -m pytest tests/test_train.py
"""

import json
import math
import multiprocessing
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import matplotlib.image
import pytest
import torch
from conftest import TINY, stage
from torch.utils._python_dispatch import TorchDispatchMode

import checkpoint
import train
from configurator import run_config
from corpus import format_ranks, get_tokenizer, write_corpus
from runtime import learning_rate_at

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = TINY | dict(batch_size=4, micro_batch_size=4, max_iters=12, eval_interval=3, eval_windows=4, log_interval=5,
                       learning_rate=1e-2, min_lr=1e-3, warmup_iters=4, device='cpu', dtype='float32', compile=False)

# a run is a fork of a process that has imported these already: half a second instead of four
CONTEXT = multiprocessing.get_context('forkserver')
CONTEXT.set_forkserver_preload(['matplotlib.pyplot', 'pytest', 'tiktoken', 'torch._dynamo'])


def run_train(arguments, output):
    """`python train.py ARGUMENTS` in a process of its own. output: path of its stdout; its stderr is beside it."""
    for number, suffix in (1, '.out'), (2, '.err'):
        os.dup2(os.open(output.with_suffix(suffix), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    torch.set_num_threads(1)
    sys.argv = ['train.py', *arguments]
    try:
        runpy.run_path(str(ROOT / 'train.py'), run_name='__main__')
    except Exception:
        sys.excepthook(*sys.exc_info())  # the interpreter would call it; multiprocessing does not
        sys.exit(1)


class Runs:
    """Runs of train.py, each in an out_dir of its own in folder."""

    def __init__(self, folder, dataset):
        self.folder, self.dataset = folder, dataset

    def arguments(self, name, **settings):
        """SETTINGS and these over them; None leaves one at train.py's default."""
        settings = SETTINGS | {'dataset': self.dataset, 'out_dir': self.folder / name} | settings
        return [f'--{key}={value}' for key, value in settings.items() if value is not None]

    def start(self, name, **settings):
        process = CONTEXT.Process(target=run_train, args=(self.arguments(name, **settings), self.folder / name))
        process.start()
        return process

    def finish(self, name, process):
        """Wait for the end. Returns exit status, stdout, stderr."""
        process.join(120)
        assert process.exitcode is not None, 'still running after two minutes'
        return process.exitcode, *((self.folder / name).with_suffix(s).read_text() for s in ('.out', '.err'))

    def train(self, name, **settings):
        """Train to the end. Returns out_dir."""
        status, out, err = self.finish(name, self.start(name, **settings))
        assert status == 0, out + err
        return self.folder / name

    def copy(self, run, name):
        return Path(shutil.copytree(run, self.folder / name))

    def refused(self, name, **settings):
        """The one line that a run with these settings stops with. Whatever is in out_dir must stay as it is."""
        out_dir = Path(settings.get('out_dir', self.folder / name))
        before = contents(out_dir)
        status, out, err = self.finish(name, self.start(name, **settings))
        assert status == 1, out + err
        assert contents(out_dir) == before, 'files changed although the run was refused'
        return one_line(err)


def one_line(err):
    assert err.startswith('train.py: ') and err.count('\n') == 1 and 'Traceback' not in err, err
    return err.strip()


def contents(folder):
    return {str(path): path.read_bytes() for path in folder.rglob('*') if path.is_file()}


def log_rows(out_dir, key='loss'):
    """{step: value} of the rows of log.jsonl that have the key."""
    rows = [json.loads(line) for line in (out_dir / 'log.jsonl').read_text().splitlines()]
    steps = [row['step'] for row in rows if key in row]
    assert steps == sorted(set(steps)), f'steps of {key} out of order or twice: {steps}'
    return {row['step']: row[key] for row in rows if key in row}


def leaves(value, name=''):
    """{path: value} of all that nested dicts and lists hold, tensors as their bytes."""
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {path: leaf for key, item in items for path, leaf in leaves(item, f'{name}/{key}').items()}
    return {name: (value.dtype, value.shape, value.numpy().tobytes()) if torch.is_tensor(value) else value}


def assert_same_to_the_last_bit(one, other):
    """Two runs: every logged number, weights, optimizer moments, step, best loss, in last.pt and best.pt."""
    assert (one / 'log.jsonl').read_text() == (other / 'log.jsonl').read_text()
    for name in 'last.pt', 'best.pt':
        a, b = (leaves({key: value for key, value in checkpoint.load(out_dir / name).items() if key != 'settings'})
                for out_dir in (one, other))
        assert a.keys() == b.keys()
        assert [key for key in a if a[key] != b[key]] == [], f'{name} differs'
    assert not list(other.glob('*.part'))


def wait_for(condition, process=None, seconds=100):
    """Ask again and again, fast enough to catch a file while it is being written. process: it must live meanwhile."""
    stop = time.monotonic() + seconds
    while not condition():
        status = process and (process.exitcode if hasattr(process, 'exitcode') else process.poll())
        assert status is None, 'ended too early'
        assert time.monotonic() < stop, 'waited too long'


def n_lines(path):
    return path.read_bytes().count(b'\n') if path.exists() else 0


@pytest.fixture(scope='module')
def runs(tmp_path_factory, corpus_dir):
    return Runs(tmp_path_factory.mktemp('train'), corpus_dir)


@pytest.fixture(scope='module')
def plain(runs):
    """12 steps of 2 micro-batches each, validated at every third; never stopped. Tests that write take a copy."""
    return runs.train('plain', micro_batch_size=2, keep_steps=[4, 7])


# ----------------------------------------------------------------------------- what it computes and writes

def test_learning_rate_warms_up_to_its_peak_and_falls_to_its_floor():
    schedule = [learning_rate_at(step, 1.0, 0.1, warmup=4, decay=24) for step in range(30)]
    assert schedule[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert schedule[9] == pytest.approx(0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2)  # a quarter of the cosine: cos 45 deg
    assert schedule[14] == pytest.approx(0.55)  # half of it
    assert schedule[24:] == [pytest.approx(0.1)] * 6
    assert schedule[4:25] == sorted(schedule[4:25], reverse=True)


def test_learning_rate_without_warm_up_starts_at_its_peak():
    assert learning_rate_at(0, 1.0, 0.1, warmup=0, decay=10) == 1.0
    assert learning_rate_at(10, 1.0, 0.1, warmup=10, decay=10) == 1.0  # no room for a cosine


@pytest.mark.parametrize('files, warmup, steps', [
    (['finetune_8k.py'], 20, 200), (['finetune_8k.py', 'yarn.py'], 4, 200),
    (['finetune_8k.py', 'pi.py', 'raw.py'], 100, 1000),
    (['finetune_8k.py', 'yarn.py', 'raw.py'], 20, 1000), (['finetune_8k.py', 'raw.py', 'yarn.py'], 20, 1000)])
def test_the_papers_recipes_compose_in_any_order(files, warmup, steps):
    recipe = {}
    for file in files:
        recipe |= run_config(f'config/{file}')
    assert (recipe['warmup_iters'] * recipe['max_iters'], recipe['max_iters']) == (warmup, steps)


def test_warm_up_below_1_is_a_share_of_the_steps(runs, plain):
    share = runs.train('share', micro_batch_size=2, keep_steps=[4, 7], warmup_iters=0.35)  # of 12 steps: 4
    assert_same_to_the_last_bit(plain, share)


def test_the_papers_model_still_learns_at_99_7_percent_of_its_peak_when_it_stops():
    """Section 4.1: TinyLlama's schedule over 3T tokens, stopped after 50K steps of 2M."""
    c = run_config('config/nope_1b.py')
    last = learning_rate_at(c['max_iters'], c['learning_rate'], c['min_lr'], c['warmup_iters'],
                                  c['lr_decay_iters'])
    assert round(last / c['learning_rate'], 3) == 0.997
    assert c['max_iters'] * c['batch_size'] * c['block_size'] == 50_000 * 2 ** 21


def test_training_lowers_the_loss(runs):
    loss = log_rows(runs.train('longer', max_iters=60))
    assert loss[1] == pytest.approx(math.log(257), abs=0.5)  # it starts by knowing nothing of 257 tokens
    assert sum(loss[step] for step in range(51, 61)) / 10 < loss[1] - 1


def test_log_has_each_step_once_with_the_tokens_read_so_far(plain):
    assert list(log_rows(plain)) == list(range(1, 13))
    assert list(log_rows(plain, 'val_loss')) == [3, 4, 6, 7, 9, 12]  # each third, and the kept ones
    rows = [json.loads(line) for line in (plain / 'log.jsonl').read_text().splitlines()]
    assert all(row['tokens'] == row['step'] * 4 * 32 for row in rows)


def test_config_json_holds_the_resolved_settings(plain):
    config = json.loads((plain / 'config.json').read_text())
    assert config == checkpoint.load(plain / 'last.pt')['settings']
    assert config | TINY == config
    assert (config['micro_batch_size'], config['keep_steps'], config['learning_rate']) == (2, [4, 7], 1e-2)
    assert config['grad_clip'] == 1.0  # a default


def test_loss_png_is_a_picture(plain):
    assert (plain / 'loss.png').read_bytes().startswith(b'\x89PNG\r\n\x1a\n')
    assert matplotlib.image.imread(plain / 'loss.png').std() > 0


def test_keep_steps_writes_the_weights_of_those_steps(runs, plain):
    states = {step: checkpoint.load(plain / f'step_{step}.pt') for step in (4, 7)}
    assert [state['step'] for state in states.values()] == [4, 7]
    stopped = checkpoint.load(runs.train('four', micro_batch_size=2, max_iters=4, lr_decay_iters=12) / 'last.pt')
    assert leaves(states[4]['model']) == leaves(stopped['model'])
    assert states[4]['digest'] != states[7]['digest']


def test_best_pt_holds_the_lowest_validation_loss(runs, plain):
    out_dir = runs.copy(plain, 'worse')
    runs.train('worse', init_from='resume', max_iters=24, learning_rate=0.5, min_lr=0.5)  # now it gets worse
    val_loss, best = log_rows(out_dir, 'val_loss'), checkpoint.load(out_dir / 'best.pt')
    assert best['best_val_loss'] == min(val_loss.values()) == val_loss[best['step']]
    assert best['step'] < 24 and val_loss[24] > min(val_loss.values())
    assert checkpoint.load(out_dir / 'last.pt')['best_val_loss'] == best['best_val_loss']


def test_evaluation_cannot_disturb_training(runs, plain):
    often = runs.train('often', micro_batch_size=2, keep_steps=[4, 7], eval_interval=1, eval_windows=9)
    assert log_rows(often) == log_rows(plain)
    one, other = (checkpoint.load(out_dir / 'last.pt') for out_dir in (plain, often))
    assert leaves(one['model']) == leaves(other['model']) and leaves(one['optimizer']) == leaves(other['optimizer'])


def test_micro_batches_add_up_to_the_batch(runs, plain):
    """4 x 1, 2 x 2 and 1 x 4 sequences."""
    for micro_batch_size in 1, 4:
        other = runs.train(f'micro_{micro_batch_size}', micro_batch_size=micro_batch_size, keep_steps=[4, 7])
        for key in 'loss', 'val_loss':
            assert log_rows(other, key) == pytest.approx(log_rows(plain, key), rel=1e-4)


class Casts(TorchDispatchMode):
    """Lists the shapes of what is cast to bfloat16."""
    shapes = ()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype == torch.bfloat16:
            self.shapes += tuple(out.shape),
        return out


def test_each_weight_is_cast_once_a_step_however_many_micro_batches_it_has(runs, monkeypatch, tmp_path):
    changes = {'dataset': str(runs.dataset), 'out_dir': str(tmp_path), 'dtype': 'bfloat16', 'micro_batch_size': 1}
    for name, value in (SETTINGS | changes | {'max_iters': 3, 'eval_windows': 1, 'block_size': 47}).items():
        monkeypatch.setattr(train, name, value)
    monkeypatch.setattr(signal, 'signal', lambda *_: None)  # pytest keeps its own
    try:
        with Casts() as casts:
            train.main()
    finally:
        torch.use_deterministic_algorithms(False)  # runtime.setup() had set it
    weights = checkpoint.load(tmp_path / 'last.pt')['model']
    assert all(weight.dtype == torch.float32 for weight in weights.values())
    matrices = [tuple(w.shape) for name, w in weights.items() if w.dim() == 2 and name != 'embed.weight']
    for shape in set(matrices):
        assert casts.shapes.count(shape) == (3 + 1) * matrices.count(shape)  # 3 steps of 4 micro-batches, a validation


def test_another_seed_is_another_run(runs, plain):
    assert log_rows(runs.train('seed', seed=1, max_iters=2))[1] != log_rows(plain)[1]


def test_a_mixture_of_datasets_trains_one_model(runs, corpus_dir):
    other = shutil.copytree(corpus_dir, runs.folder / 'other_data')
    out_dir = runs.train('mixture', dataset=f'{corpus_dir}:0.7,{other}:0.3')
    assert list(log_rows(out_dir)) == list(range(1, 13))


def test_checkpoint_says_which_text_it_was_trained_on(runs, plain, corpus_dir):
    checksum = f'{zlib.crc32((corpus_dir / "train.bin").read_bytes()):08x}'
    for name in ('last.pt', 'best.pt', 'step_4.pt'):
        assert checkpoint.load(plain / name)['data'] == {str(corpus_dir): checksum}


@pytest.fixture
def other_text(runs, corpus_dir, tmp_path):
    """A dataset of the same tokenizer."""
    splits = {split: ['other text ' * 500] for split in ('train', 'val')}
    write_corpus(tmp_path / 'data', get_tokenizer('bytes'), splits)
    return tmp_path / 'data'


@pytest.mark.parametrize('mixture', ['{other}', '{corpus}:0.7,{other}:0.3'])
def test_resuming_on_other_text_is_refused(runs, plain, corpus_dir, other_text, mixture):
    name = f'other_text_{len(mixture)}'
    runs.copy(plain, name)
    dataset = mixture.format(corpus=corpus_dir, other=other_text)
    line = runs.refused(name, init_from='resume', dataset=dataset, micro_batch_size=2)
    assert f'dataset {other_text} has other tokens' in line
    assert f'{runs.folder / name}/last.pt' in line


def test_resuming_after_the_data_were_prepared_anew_is_refused(runs, corpus_dir, other_text):
    dataset = Path(shutil.copytree(corpus_dir, runs.folder / 'anew'))
    runs.train('anew_run', dataset=dataset, max_iters=1, lr_decay_iters=2)
    shutil.copytree(other_text, dataset, dirs_exist_ok=True)
    line = runs.refused('anew_run', dataset=dataset, max_iters=2, init_from='resume')
    assert f'dataset {dataset} has other tokens' in line


def test_resuming_where_a_copy_of_the_same_text_lies_goes_on(runs, plain, corpus_dir):
    out_dir = runs.copy(plain, 'moved')
    copied = shutil.copytree(corpus_dir, runs.folder / 'moved_data')
    runs.train('moved', dataset=copied, micro_batch_size=2, max_iters=13, init_from='resume')
    assert list(log_rows(out_dir)) == list(range(1, 14))


def test_checkpoint_from_before_text_was_kept_resumes_with_a_note(runs, plain):
    out_dir = runs.copy(plain, 'no_text')
    state = torch.load(out_dir / 'last.pt', weights_only=True)
    del state['data']
    checkpoint.save(out_dir / 'last.pt', **state)
    runs.train('no_text', micro_batch_size=2, max_iters=13, init_from='resume')
    assert f'{out_dir}/last.pt does not say which text' in out_dir.with_suffix('.out').read_text()


def test_rope_trains_and_resumes_like_nope(runs):
    whole = runs.train('rope', position='rope', max_iters=6)
    runs.train('rope_parts', position='rope', max_iters=3, lr_decay_iters=6)
    runs.train('rope_parts', position='rope', max_iters=6, init_from='resume')
    assert_same_to_the_last_bit(whole, runs.folder / 'rope_parts')


# ----------------------------------------------------------------------------- stopping and going on

def test_run_killed_again_and_again_equals_unbroken_run(runs):
    """SIGKILL at any moment, half of the times while a checkpoint is being written."""
    settings = dict(micro_batch_size=2, max_iters=60, eval_interval=1, keep_steps=[7], log_interval=7)
    unbroken = runs.train('unbroken', **settings)
    out_dir, when, cut_short = runs.folder / 'killed', random.Random(0), 0
    last, part, log = (out_dir / name for name in ('last.pt', 'last.pt.part', 'log.jsonl'))
    for kill in range(6):
        lines = n_lines(log)
        process = runs.start('killed', init_from='resume' if last.exists() else 'scratch', **settings)
        wait_for(lambda: last.exists() and n_lines(log) > lines + 4, process)  # noqa: B023
        if kill % 2:
            time.sleep(when.uniform(0, 0.02))
        else:
            wait_for(part.exists, process)
        process.kill()
        process.join()
        cut_short += part.exists()
        assert process.exitcode == -signal.SIGKILL
    assert cut_short, 'no kill hit a checkpoint while it was written'
    runs.train('killed', init_from='resume', **settings)
    assert_same_to_the_last_bit(unbroken, out_dir)


@pytest.mark.parametrize('name', ['SIGTERM', 'SIGINT'])
def test_run_stopped_by_a_signal_saves_and_then_equals_unbroken_run(runs, name):
    settings = dict(max_iters=150, eval_interval=60, log_interval=1)
    if not (runs.folder / 'not_stopped').exists():
        runs.train('not_stopped', **settings)
    out_dir, process = runs.folder / name, runs.start(name, **settings)
    wait_for(lambda: n_lines(out_dir / 'log.jsonl') > 4, process)
    os.kill(process.pid, signal.Signals[name])
    status, out, err = runs.finish(name, process)
    step = checkpoint.load(out_dir / 'last.pt')['step']
    assert status == 128 + signal.Signals[name] and f'{name}: saved step {step}' in out and 4 < step < 150
    assert err.strip() == 'finishing this step, then saving; once more stops at once'
    assert not (out_dir / 'loss.png').exists()
    assert list(log_rows(out_dir)) == list(range(1, step + 1))
    runs.train(name, init_from='resume', **settings)
    assert_same_to_the_last_bit(runs.folder / 'not_stopped', out_dir)


def test_compiled_run_resumed_from_what_a_kill_would_leave_equals_unbroken_run(runs):
    """Files are copied while the run goes on: that is what a kill at this moment leaves, one compilation less."""
    settings = dict(compile=True, n_layer=1, max_iters=200, eval_interval=50, log_interval=5)
    unbroken, out_dir = runs.folder / 'compiled', runs.folder / 'compiled_again'
    out_dir.mkdir()
    process = runs.start('compiled', **settings)
    wait_for((unbroken / 'last.pt').exists, process)
    for name in 'last.pt', 'best.pt', 'log.jsonl':
        shutil.copy(unbroken / name, out_dir)
    status, out, err = runs.finish('compiled', process)
    assert status == 0 and 'uncompiled' not in out, err
    assert checkpoint.load(out_dir / 'last.pt')['step'] < 200
    runs.train('compiled_again', init_from='resume', **settings)
    assert_same_to_the_last_bit(unbroken, out_dir)


def test_resuming_a_finished_run_changes_nothing(runs, plain):
    out_dir = runs.copy(plain, 'finished')
    runs.train('finished', micro_batch_size=2, keep_steps=[4, 7], init_from='resume')
    assert_same_to_the_last_bit(plain, out_dir)


def test_resume_goes_on_after_a_log_line_was_cut_short(runs, plain):
    """As a full disk leaves it."""
    out_dir = runs.copy(plain, 'cut_line')
    with open(out_dir / 'log.jsonl', 'a') as log:
        log.write('{"step": 13, "tok')
    runs.train('cut_line', micro_batch_size=2, keep_steps=[4, 7], init_from='resume', max_iters=14)
    assert list(log_rows(out_dir)) == list(range(1, 15))


def test_resume_keeps_every_line_that_can_be_read_and_names_the_others(runs, plain):
    out_dir = runs.copy(plain, 'bad_lines')
    log = out_dir / 'log.jsonl'
    lines = log.read_bytes().splitlines()
    bad = [b'{"step": 5, "tok', b'\xff', b'[5]', b'{}', b'{"step": "5"}']
    log.write_bytes(b'\n'.join([*lines[:6], *bad, *lines[6:]]) + b'\n')
    runs.train('bad_lines', micro_batch_size=2, keep_steps=[4, 7], init_from='resume', max_iters=14)
    assert log.read_bytes().splitlines()[:len(lines)] == lines
    assert list(log_rows(out_dir)) == list(range(1, 15))
    (note,) = [line for line in out_dir.with_suffix('.out').read_text().splitlines() if 'dropped' in line]
    assert str(log) in note and note.endswith('line 7, 8, 9, 10, 11')


def test_resume_names_the_settings_that_changed(runs, plain):
    runs.copy(plain, 'changed')
    out_dir = runs.train('changed', micro_batch_size=2, init_from='resume', weight_decay=0.2, max_iters=13)
    out = out_dir.with_suffix('.out').read_text()
    assert 'resuming with weight_decay = 0.2 (was 0.1)' in out and 'resuming with max_iters = 13 (was 12)' in out
    assert 'learning_rate =' not in out
    optimizer = torch.load(out_dir / 'last.pt', weights_only=True)['optimizer']
    assert [group['weight_decay'] for group in optimizer['param_groups']] == [0.2]  # and it was used
    assert list(log_rows(out_dir)) == list(range(1, 14))


# ----------------------------------------------------------------------------- two runs in one out_dir

def holder(out_dir):
    """The process that writes to out_dir."""
    return int((out_dir / 'log.jsonl.lock').read_text().split()[1])


@pytest.mark.parametrize('init_from', ['scratch', 'resume'])
def test_a_second_run_in_the_out_dir_of_a_living_one_is_refused(runs, init_from):
    name = f'beside_{init_from}'
    out_dir, settings = runs.folder / name, dict(max_iters=10 ** 5, log_interval=1)
    first = runs.start(name, eval_interval=1 if init_from == 'resume' else 10 ** 5, **settings)
    wait_for(lambda: n_lines(out_dir / 'log.jsonl') > 4, first)
    status, out, err = runs.finish('second', runs.start('second', out_dir=out_dir, init_from=init_from, **settings))
    assert status == 1 and f'process {first.pid} ' in one_line(err) and str(out_dir) in err, out
    os.kill(first.pid, signal.SIGTERM)
    status, _, err = runs.finish(name, first)
    assert status == 128 + signal.SIGTERM, err
    step = checkpoint.load(out_dir / 'last.pt')['step']
    assert list(log_rows(out_dir)) == list(range(1, step + 1))  # the first did not notice
    runs.train('second', out_dir=out_dir, init_from='resume', **settings | {'max_iters': step + 1})
    assert not list(out_dir.glob('*.lock'))


def test_workers_that_outlive_torchrun_keep_others_out_until_they_end(runs):
    out_dir = runs.folder / 'orphans'
    settings = dict(max_iters=10 ** 4, eval_interval=1, log_interval=1)
    run = TwoRanks(runs, 'orphans', **settings)
    wait_for(lambda: n_lines(out_dir / 'log.jsonl') > 4, run.process)
    run.process.kill()
    run.process.wait()
    second = TwoRanks(runs, 'second_of_orphans', out_dir=out_dir, init_from='resume', **settings)
    status, _, err = second.finish()  # its second rank does not wait for the first
    assert status == 1 and f'process {holder(out_dir)} on' in err, err
    n_before = n_lines(out_dir / 'log.jsonl')
    wait_for(lambda: n_lines(out_dir / 'log.jsonl') > n_before)  # they train on
    os.kill(holder(out_dir), signal.SIGTERM)
    wait_for(lambda: not (out_dir / 'log.jsonl.lock').exists())
    step = checkpoint.load(out_dir / 'last.pt')['step']
    assert list(log_rows(out_dir)) == list(range(1, step + 1))


# ----------------------------------------------------------------------------- two ranks

class TwoRanks:
    """A run on two ranks under torchrun, whose output is in files, as its workers may outlive torchrun."""

    def __init__(self, runs, name, **settings):
        self.files = [(runs.folder / f'{name}.{kind}').open('w+') for kind in ('ranks_out', 'ranks_err')]
        self.process = subprocess.Popen(
            [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', ROOT / 'train.py',
             *runs.arguments(name, micro_batch_size=2, **settings)], env=os.environ | {'OMP_NUM_THREADS': '1'},
            stdout=self.files[0], stderr=self.files[1])

    def finish(self):
        """Wait for torchrun's end. Returns exit status, stdout, stderr."""
        status = self.process.wait(timeout=100)
        return status, *(Path(file.name).read_text() for file in self.files)


@pytest.fixture(scope='module')
def two_ranks(runs):
    """A run on two ranks that torchrun was told to stop by SIGTERM. Returns out_dir, stdout."""
    run = TwoRanks(runs, 'two_ranks', max_iters=400, eval_interval=10, log_interval=10 ** 6)
    wait_for(lambda: n_lines(runs.folder / 'two_ranks' / 'log.jsonl') > 30, run.process)
    run.process.terminate()
    status, out, _ = run.finish()
    assert status
    return runs.folder / 'two_ranks', out


def test_two_ranks_train_the_model_that_one_rank_trains(runs, two_ranks):
    """That one rank reads two micro-batches a step."""
    out_dir, _ = two_ranks
    one = runs.train('one_rank', micro_batch_size=2, max_iters=30, lr_decay_iters=400, eval_interval=10)
    for key in 'loss', 'val_loss':
        ours = {step: value for step, value in log_rows(out_dir, key).items() if step <= 30}
        assert ours == pytest.approx(log_rows(one, key), rel=1e-3)


def test_two_ranks_stop_together_on_sigterm_and_one_goes_on(runs, two_ranks):
    out_dir, out = two_ranks
    step = checkpoint.load(out_dir / 'last.pt')['step']
    assert f'SIGTERM: saved step {step}' in out and step < 400
    assert list(log_rows(out_dir)) == list(range(1, step + 1))
    resumed = runs.copy(out_dir, 'from_two_ranks')
    runs.train('from_two_ranks', micro_batch_size=2, max_iters=step + 5, lr_decay_iters=400, init_from='resume')
    assert list(log_rows(resumed)) == list(range(1, step + 6))


def test_two_ranks_stop_and_fail_on_a_signal_that_reaches_one_worker_alone(runs):
    """As a scheduler may send it; torchrun itself is told nothing."""
    out_dir = runs.folder / 'one_worker'
    run = TwoRanks(runs, 'one_worker', max_iters=10 ** 5, eval_interval=10 ** 5, log_interval=1)
    wait_for(lambda: n_lines(out_dir / 'log.jsonl') > 4, run.process)
    os.kill(holder(out_dir), signal.SIGTERM)
    status, out, err = run.finish()
    assert status and 'exitcode  : 143' in err, err
    step = checkpoint.load(out_dir / 'last.pt')['step']
    assert f'SIGTERM: saved step {step}' in out and list(log_rows(out_dir)) == list(range(1, step + 1))


def test_what_all_ranks_refuse_is_said_once(runs):
    _, err = stage('train', *runs.arguments('refused_twice', batch_size=0), ranks=2, status=1)
    assert err.count('batch_size is 0; it must be at least 1') == 1


def sharded_run(runs, name, **settings):
    """A run on two ranks that split the model. Returns out_dir."""
    arguments = runs.arguments(name, **{'fsdp': True, 'dtype': 'float32', 'micro_batch_size': 1} | settings)
    subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2',
                    ROOT / 'train.py', *arguments], env=os.environ | {'OMP_NUM_THREADS': '1'}, check=True, timeout=120)
    return runs.folder / name


def scaled_seed(runs, dtype):
    """A checkpoint of one step whose head scales are 1.001, which bfloat16 would make 1."""
    seed = runs.train(f'{dtype}_seed', dtype=dtype, max_iters=1)
    state = torch.load(seed / 'last.pt', weights_only=True)
    for name, scale in state['model'].items():
        if name.endswith('head_scale'):
            scale.fill_(1.001)
    checkpoint.save(seed / 'scaled.pt', **state)
    return seed / 'scaled.pt'


def assert_close_weights(one, other):
    one, other = (checkpoint.load(out_dir / 'last.pt')['model'] for out_dir in (one, other))
    for name, weight in one.items():
        assert weight.dtype == other[name].dtype == torch.float32
        torch.testing.assert_close(weight, other[name], rtol=0, atol=2e-5)


def test_a_sharded_model_learns_what_a_whole_one_does_and_goes_on_in_one_process_and_sharded(runs):
    """The micro-batches, two a step and rank, are four a step here."""
    options = {'lr_decay_iters': 9, 'eval_interval': 3, 'log_interval': 1, 'eval_windows': 5}  # windows: an odd number
    options['init_from'] = scaled_seed(runs, 'float32')
    whole = runs.train('whole', dtype='float32', micro_batch_size=1, max_iters=9, **options)
    first = sharded_run(runs, 'sharded', max_iters=6, **options)
    one_process = runs.copy(first, 'on_in_one_process')
    options['init_from'] = 'resume'
    sharded_run(runs, 'sharded', max_iters=9, **options)
    runs.train('on_in_one_process', dtype='float32', micro_batch_size=1, max_iters=9, **options)
    for out_dir in first, one_process:
        for key in 'loss', 'val_loss':
            assert log_rows(out_dir, key) == pytest.approx(log_rows(whole, key), abs=1e-5)
        assert_close_weights(out_dir, whole)
        scales = checkpoint.load_model('last', out_dir, 'cpu')[0].head_scale
        assert torch.equal(scales, torch.full_like(scales, 1.001))


def test_a_sharded_model_in_bfloat16_keeps_weights_and_scales_in_float32(runs):
    """With activations recomputed in backward."""
    options = {'dtype': 'bfloat16', 'max_iters': 3, 'log_interval': 1, 'eval_interval': 3,
               'checkpoint_activations': True, 'init_from': scaled_seed(runs, 'bfloat16')}
    whole = runs.train('whole_bfloat16', micro_batch_size=1, **options)
    split = sharded_run(runs, 'sharded_bfloat16', **options)
    for key in 'loss', 'val_loss':
        assert log_rows(split, key) == pytest.approx(log_rows(whole, key), abs=5e-3)
    weights = checkpoint.load(split / 'last.pt')['model']
    assert all(weight.dtype == torch.float32 for weight in weights.values())
    scales = checkpoint.load_model('last', split, 'cpu')[0].head_scale
    assert torch.equal(scales, torch.full_like(scales, 1.001))


def test_sharding_needs_several_ranks(runs):
    assert 'torchrun --nproc_per_node=N' in runs.refused('alone', fsdp=True)


# ----------------------------------------------------------------------------- starting from other weights

def test_fine_tuning_starts_from_the_given_weights_at_another_block_size(runs, plain):
    out_dir = runs.train('fine', init_from=plain / 'best.pt', block_size=64, max_iters=3)
    model, _ = checkpoint.load_model(plain / 'best.pt', None, 'cpu')
    windows = torch.from_numpy(train.Windows(str(runs.dataset), 'train', 64, 1337).batch(0, 4))
    assert log_rows(out_dir)[1] == pytest.approx(model(windows[:, :-1], windows[:, 1:]).mean().item(), rel=1e-5)
    state = checkpoint.load(out_dir / 'last.pt')
    assert state['model_config']['block_size'] == 64 and list(log_rows(out_dir)) == [1, 2, 3]
    assert state['digest'] != checkpoint.load(plain / 'best.pt')['digest']


def test_fine_tuned_run_records_the_model_it_trained_and_not_the_defaults(runs, plain):
    """The sizes come from the checkpoint; n_layer = 4 is only train.py's default."""
    out_dir = runs.train('sizes', init_from=plain / 'last.pt', max_iters=1, **dict.fromkeys(TINY) | {'block_size': 32})
    assert checkpoint.load(out_dir / 'last.pt')['model_config']['n_layer'] == 2
    config = json.loads((out_dir / 'config.json').read_text())
    assert {name: config[name] for name in TINY} == TINY


# ----------------------------------------------------------------------------- what goes wrong on the way

def test_fine_tuning_extends_rope_by_the_ratio_of_the_lengths_and_resumes(runs):
    rope = runs.train('rope_to_extend', position='rope', max_iters=3)
    settings = dict(init_from=rope / 'last.pt', rope_scaling='yarn', block_size=96)
    whole = runs.train('yarn', max_iters=5, **settings)
    config = checkpoint.load(whole / 'last.pt')['model_config']
    assert (config['rope_scaling'], config['rope_length'], config['block_size']) == ('yarn:3', 32, 96)
    part = runs.train('yarn_in_two', max_iters=3, lr_decay_iters=5, **settings)
    runs.train('yarn_in_two', max_iters=5, lr_decay_iters=5, **settings | {'init_from': 'resume'})
    assert log_rows(part) == log_rows(whole)
    again = runs.train('yarn_again', init_from=whole / 'last.pt', rope_scaling='pi:2.5', block_size=64, max_iters=1)
    config = checkpoint.load(again / 'last.pt')['model_config']
    assert (config['rope_scaling'], config['rope_length'], config['block_size']) == ('pi:2.5', 32, 64)
    for name, changes in ('without_yarn', {'rope_scaling': ''}), ('nope_of_yarn', {'position': 'none'}):
        other = runs.train(name, init_from=whole / 'last.pt', max_iters=1, **changes)
        assert checkpoint.load(other / 'last.pt')['model_config']['rope_scaling'] == ''


@pytest.mark.parametrize('position', ['kerple', 'xl'])
def test_fine_tuning_with_a_method_that_has_weights_of_its_own_is_refused(runs, plain, position):
    message = runs.refused(f'nope_{position}', init_from=plain / 'last.pt', position=position)
    assert 'has no blocks.0.attn.' in message and f'was not trained with position {position}' in message


def test_fine_tuning_cannot_add_dape(runs, plain):
    message = runs.refused('nope_dape', init_from=plain / 'last.pt', dape_kernel=3)
    assert 'dape_kernel is 3, but the model was trained with 0' in message


@pytest.mark.parametrize('name, value', [('n_layer', 8), ('rope_base', 5e5), ('dape_width', 64), ('n_head', 8)])
def test_fine_tuning_and_its_resumption_refuse_a_size_that_the_model_does_not_have(runs, plain, name, value):
    message = runs.refused(f'other_{name}', init_from=plain / 'last.pt', **{name: value})
    assert f'{name} is {value}, but' in message and str(plain / 'last.pt') in message
    tuned = runs.folder / 'tuned_to_resume'
    if not tuned.exists():
        runs.train(tuned.name, init_from=plain / 'last.pt', max_iters=1)
    message = runs.refused(tuned.name, init_from='resume', **{name: value})
    assert f'{name} is {value}, but' in message


def test_resuming_a_fine_tuned_run_with_another_position_method_is_refused(runs, plain):
    runs.train('tuned_without', init_from=plain / 'last.pt', max_iters=1)
    assert 'position is rope but' in runs.refused('tuned_without', init_from='resume', position='rope')


def test_fine_tuning_nope_with_an_extension_of_rope_is_refused(runs, plain):
    message = runs.refused('nope_yarn', init_from=plain / 'last.pt', rope_scaling='yarn:2')
    assert "rope_scaling yarn:2 extends RoPE, but position is 'none'" in message


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(runs, plain):
    out_dir = runs.copy(plain, 'exploding')
    before = (out_dir / 'last.pt').read_bytes()
    status, out, err = runs.finish('exploding', runs.start('exploding', init_from='resume', learning_rate=1e9,
                                                           min_lr=1e9, max_iters=60, log_interval=20,
                                                           eval_interval=60))
    assert status == 1, out
    assert 'the loss became' in one_line(err) and 'last.pt holds the last good state' in err
    assert (out_dir / 'last.pt').read_bytes() == before and not list(out_dir.glob('*.part'))
    assert all(math.isfinite(loss) for loss in log_rows(out_dir).values())


def test_no_checkpoint_is_promised_where_the_loss_explodes_before_the_first(runs):
    status, _, err = runs.finish('early', runs.start('early', learning_rate=1e9, min_lr=1e9, warmup_iters=0))
    assert status == 1 and 'loss became' in one_line(err)
    assert 'last.pt holds' not in err and not (runs.folder / 'early' / 'last.pt').exists()


def test_a_validation_loss_too_large_for_a_perplexity_is_no_crash(runs):
    """exp(710) is more than a float holds; the loss itself is finite."""
    settings = dict(learning_rate=20, min_lr=20, warmup_iters=0, eval_interval=1)
    status, _, err = runs.finish('huge', runs.start('huge', **settings))
    assert status == 0 or one_line(err)
    assert max(log_rows(runs.folder / 'huge', 'val_loss').values()) > 710


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MB."""
    (tmp_path / 'disk').mkdir()
    mount = ['mount', '-t', 'tmpfs', '-o', 'size=3m', 'tmpfs', tmp_path / 'disk']
    if not sys.platform.startswith('linux') or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip('mounting a small file system needs Linux and root')
    yield tmp_path / 'disk'
    subprocess.run(['umount', '--lazy', tmp_path / 'disk'], check=True)


def test_disk_that_fills_up_stops_the_run_and_resuming_it_equals_unbroken_run(runs, small_disk):
    settings = dict(max_iters=150, eval_interval=5, log_interval=5)
    unbroken = runs.train('roomy', **settings)
    out_dir, process = small_disk / 'run', runs.start('full', out_dir=small_disk / 'run', **settings)
    wait_for((out_dir / 'last.pt').exists, process)
    with open(small_disk / 'filler', 'wb', buffering=0) as filler, pytest.raises(OSError):
        while True:
            filler.write(bytes(4096))
    status, out, err = runs.finish('full', process)
    assert status == 1, out
    assert 'space' in one_line(err)
    assert not list(out_dir.glob('*.part'))
    assert checkpoint.load(out_dir / 'last.pt')['step'] < 150
    (small_disk / 'filler').unlink()
    runs.train('full', out_dir=out_dir, init_from='resume', **settings)
    assert_same_to_the_last_bit(unbroken, out_dir)


def test_disk_too_small_is_refused_before_the_first_step(runs, small_disk):
    line = runs.refused('no_room', out_dir=small_disk / 'run', n_embd=128)
    assert 'GB are free' in line and str(small_disk) in line


# ----------------------------------------------------------------------------- what it refuses, in one line

@pytest.fixture(scope='module')
def other_tokenizer_dir(tmp_path_factory):
    """A dataset of another tokenizer: one merge more than bytes."""
    folder = tmp_path_factory.mktemp('merged')
    ranks = {bytes([byte]): byte for byte in range(256)} | {b'th': 256}
    (folder / 'th.tiktoken').write_text(format_ranks(ranks))
    documents = ['the weather then and there\n' * 40] * 8
    splits = {split: documents for split in ('train', 'val', 'test')}
    write_corpus(folder / 'data', get_tokenizer(str(folder / 'th.tiktoken')), splits, workers=1)
    return folder / 'data'


def test_dataset_that_is_not_prepared_is_refused(runs, tmp_path):
    assert 'no dataset nowhere' in runs.refused('r1', dataset='nowhere')
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'mine' / 'prepare.py').touch()
    line = runs.refused('r1', dataset=tmp_path / 'mine')
    assert 'is not prepared. Run: python ' in line and 'mine/prepare.py' in line


def test_truncated_token_file_is_refused(runs, corpus_dir):
    damaged = Path(shutil.copytree(corpus_dir, runs.folder / 'damaged'))
    os.truncate(damaged / 'train.bin', 1001)
    assert 'train.bin has 1,001 bytes' in runs.refused('r2', dataset=damaged)


@pytest.mark.parametrize('start', ['resume', 'fine-tune'])
def test_data_of_another_tokenizer_is_refused(runs, plain, other_tokenizer_dir, start):
    name = f'tokenizer_{start}'
    if start == 'resume':
        runs.copy(plain, name)
    line = runs.refused(name, init_from='resume' if start == 'resume' else plain / 'last.pt',
                        dataset=other_tokenizer_dir, micro_batch_size=2, keep_steps=[4, 7])
    assert 'tokenizer bytes' in line and 'th.tiktoken' in line and 'last.pt' in line


def test_mixture_of_tokenizers_is_refused(runs, corpus_dir, other_tokenizer_dir):
    assert 'th.tiktoken' in runs.refused('r3', dataset=f'{corpus_dir},{other_tokenizer_dir}')


@pytest.mark.parametrize('init_from', ['scratch', 'best.pt'])
def test_out_dir_that_holds_a_run_is_not_overwritten(runs, plain, init_from):
    out_dir = runs.copy(plain, f'taken_{init_from}')
    line = runs.refused(out_dir.name, init_from=init_from if init_from == 'scratch' else out_dir / init_from)
    assert 'already holds a run' in line and '--out_dir=' in line


def test_resume_without_a_checkpoint_is_refused(runs):
    line = runs.refused('never_ran', init_from='resume')
    assert 'last.pt does not exist' in line
    assert not (runs.folder / 'never_ran').exists()


@pytest.mark.parametrize('setting', ['n_layer=3', 'position=rope', 'block_size=16'])
def test_resuming_another_model_is_refused(runs, plain, setting):
    name, value = setting.split('=')
    runs.copy(plain, setting)
    line = runs.refused(setting, init_from='resume', **{name: value})
    assert f'{name} is {value}' in line and f'--{name}={(TINY | dict(position="none"))[name]}' in line


@pytest.mark.parametrize('keep', [0, 1000, 0.5, -1])
def test_checkpoint_cut_short_is_refused(runs, plain, keep):
    out_dir = runs.copy(plain, f'cut_{keep}')
    size = (out_dir / 'last.pt').stat().st_size
    os.truncate(out_dir / 'last.pt', int(size * keep) if isinstance(keep, float) else keep if keep >= 0 else size - 1)
    assert 'last.pt is cut short' in runs.refused(out_dir.name, init_from='resume')


@pytest.mark.parametrize('settings, message', [
    (dict(batch_size=6), 'must be a multiple of micro_batch_size 4 x 1 ranks. Take --micro_batch_size=2.'),
    (dict(learing_rate=1), "Did you mean 'learning_rate'?"),
    (dict(max_iters='many'), "sets 'max_iters' to 'many'"),
    (dict(position='sinusoidal'), "position is 'sinusoidal'"),
    (dict(n_head=5), 'n_embd 32 over n_head 5'),
    (dict(n_kv_head=3), 'n_kv_head 3'),
    (dict(block_size=10 ** 6), 'less than a window of 1,000,000'),
    (dict(dtype='floaty'), "dtype is 'floaty'"),
    (dict(device='gpu'), "device is 'gpu'"),
    (dict(micro_batch_size=0), 'micro_batch_size'),
    (dict(max_iters=0), 'max_iters is 0'),
    (dict(learning_rate=-1), 'learning_rate is -1.0; it must be at least 0'),
    (dict(grad_clip=-1), 'grad_clip is -1.0; it must be'),
    (dict(beta2=1), 'beta2 is 1.0; it must be below 1'),
    (dict(eval_interval=0), 'eval_interval'),
    (dict(log_interval=0), 'log_interval'),
    (dict(eval_windows=0), 'eval_windows'),
], ids=lambda value: '-'.join(value) if isinstance(value, dict) else '')
def test_setting_that_cannot_work_is_refused(runs, settings, message):
    name = 'bad_' + '_'.join(settings)
    assert message in runs.refused(name, **settings)
    assert not (runs.folder / name).exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a CUDA device here')
def test_cuda_where_there_is_none_is_refused(runs):
    assert 'no CUDA device' in runs.refused('cuda', device='cuda')
