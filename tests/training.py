"""Runs of train.py for test_train.py and test_runs.py, and how two of them are compared."""

import json
import shutil
from pathlib import Path

import torch
from conftest import TINY, mistake, stage_here

from lib import checkpoints

# 12 steps of two micro-batches each, validated at every third
SETTINGS = TINY | {
    'batch_size': 4,
    'micro_batch_size': 2,
    'max_iters': 12,
    'lr_decay_iters': 12,
    'eval_interval': 3,
    'eval_windows': 4,
    'log_interval': 5,
    'keep_steps': [4],
    'learning_rate': 1e-2,
    'min_lr': 1e-3,
    'warmup_iters': 4,
    'device': 'cpu',
    'dtype': 'float32',
    'compile': False,
}


class Runs:
    """Runs of train.py in this process, each in an out_dir of its own in `folder`."""

    def __init__(self, folder, dataset):
        self.folder, self.dataset = folder, dataset

    def arguments(self, name, **settings):
        """SETTINGS and these over them; None leaves one at train.py's default."""
        settings = {'dataset': self.dataset, 'out_dir': self.folder / name} | SETTINGS | settings
        return [f'--{key}={value}' for key, value in settings.items() if value is not None]

    def train(self, name, **settings):
        """Train to the end. Returns out_dir; what was printed is then in self.printed."""
        self.printed = stage_here('train', *self.arguments(name, **settings))
        return self.folder / name

    def resume(self, name, **settings):
        return self.train(name, init_from='resume', **settings)

    def refused(self, name, **settings):
        """The line that refuses a run with these settings, which must change no file."""
        before = contents(self.folder / name)
        line = mistake('train', *self.arguments(name, **settings))
        assert contents(self.folder / name) == before
        return line

    def copy(self, run, name):
        return Path(shutil.copytree(run, self.folder / name))


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob('*') if path.is_file()}


def load(out_dir, name='last.pt'):
    return checkpoints.load(out_dir / name)


def log_rows(out_dir, key='loss'):
    """{step: value} of the rows of log.jsonl that have the key; no step may be there twice."""
    rows = {}
    for line in (out_dir / 'log.jsonl').read_text().splitlines():
        row = json.loads(line)
        if key in row:
            assert row['step'] > max(rows, default=0)
            rows[row['step']] = row[key]
    return rows


def assert_steps(out_dir, n):
    assert list(log_rows(out_dir)) == list(range(1, n + 1))


def assert_same(one, other):
    """Two runs, to the last bit: every logged number, and what last.pt and best.pt hold."""
    assert (one / 'log.jsonl').read_text() == (other / 'log.jsonl').read_text()
    for name in ('last.pt', 'best.pt'):
        a, b = load(one, name), load(other, name)
        for key in a.keys() - {'settings'} | b.keys() - {'settings'}:
            if key in ('model', 'optimizer'):
                torch.testing.assert_close(a[key], b[key], rtol=0, atol=0)
            else:
                assert a[key] == b[key], key
    assert not list(other.glob('*.part'))
