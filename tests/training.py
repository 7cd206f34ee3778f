"""Runs of train.py for test_train.py and test_runs.py, and how two of them are compared."""

import json
import shutil
from pathlib import Path

import torch
from conftest import mistake, stage_here

from lib import checkpoints

SIZES = '--n_layer=2 --n_head=4 --n_kv_head=2 --n_embd=32 --n_hidden=64 --block_size=32'
# 12 steps of two micro-batches each, validated at every third
RECIPE = (
    '--batch_size=4 --micro_batch_size=2 --max_iters=12 --lr_decay_iters=12 --eval_interval=3 '
    '--eval_windows=4 --log_interval=5 --keep_steps=[4] --learning_rate=1e-2 --min_lr=1e-3 '
    '--warmup_iters=4 --device=cpu --dtype=float32 --compile=False'
)


class Runs:
    """
    Runs of train.py in this process, each in an out_dir of its own in `folder`. What a command
    sets, it sets last, and so over RECIPE and SIZES.
    """

    def __init__(self, folder, dataset):
        self.folder, self.dataset = folder, dataset

    def arguments(self, name, command='', sizes=SIZES):
        where = f'--out_dir={self.folder}/{name} --dataset={self.dataset}'
        return f'{where} {RECIPE} {sizes} {command}'.split()

    def train(self, name, command='', sizes=SIZES):
        """Train to the end. Returns out_dir; what was printed is then in self.printed."""
        self.printed = stage_here('train', *self.arguments(name, command, sizes))
        return self.folder / name

    def resume(self, name, command=''):
        return self.train(name, f'--init_from=resume {command}')

    def refused(self, name, command=''):
        """The line that refuses a run, which must change no file."""
        before = contents(self.folder / name)
        line = mistake('train', *self.arguments(name, command))
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
        for key in a.keys() - {'settings'}:
            if key in ('model', 'optimizer'):
                torch.testing.assert_close(a[key], b[key], rtol=0, atol=0)
            else:
                assert a[key] == b[key], key
    assert not list(other.glob('*.part'))
