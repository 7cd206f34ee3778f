"""
Results on disk: JSON with what is needed to make it again, progress, answers that survive a stop.
"""

import atexit
import contextlib
import errno
import functools
import glob
import importlib
import itertools
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import filelock
import numpy as np
import torch
from tqdm import tqdm

from lib.errors import MALFORMED, ROOT, UserError, fault_of, require_kinds


def optional(package):
    """An optional package, imported. Raises UserError with the command that installs it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.partition('.')[0]
        raise UserError(f'This needs the optional package {name}. Run: pip install '
                        f'{name}') from error


@functools.cache
def note(line):
    """Print a line, once however often it is asked for, by the first rank alone."""
    if int(os.environ.get('RANK', 0)) == 0:
        print(line, flush=True)


def progress_bar(total, label, enabled=True):
    """A bar on a terminal; in a log file a new state each half minute. Call its update(n)."""
    pause = 0.1 if sys.stderr.isatty() else 30
    return tqdm(total=total, desc=label, disable=not enabled, mininterval=pause, ncols=100)


# ---------------------------------------------------------------------- files

class OnlyWriter:
    """
    Until close(), or the end of a with block, no other process writes to `path`, a file or a
    folder: one that tries raises UserError with the process that does. The operating system locks
    PATH.lock, and unlocks it when the process ends, however it ends. A process that holds a lock
    may take it again; the first that took it frees it. wanted: False locks nothing.
    """

    held = {}  # {path of a lock: the lock}

    def __init__(self, path, wanted=True):
        self.key, key = None, os.path.abspath(f'{path}.lock')
        if not wanted or key in self.held:
            return
        lock = filelock.FileLock(key, thread_local=False, fallback_to_soft=False)
        try:
            lock.acquire(timeout=0.5)  # longer than a small file takes
            with contextlib.suppress(OSError):  # on Windows a locked file has no text
                Path(key).write_text(f'process {os.getpid()} on {platform.node()}')
        except filelock.Timeout as error:
            raise UserError(f'{writer(key)} is writing to {path} now. Wait until it has ended, or '
                            'choose another folder or --label=.') from error
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                raise UserError(f'{path} cannot be written ({error}). Choose another '
                                'folder.') from error
            note(f'{key}: this file system has no locks. Start no second run that writes there.')
        self.key, self.held[key] = key, lock

    def close(self):
        lock = self.held.pop(self.key, None)
        if lock:
            with contextlib.suppress(OSError):  # on Windows release() removes it
                os.unlink(self.key)
            lock.release()

    __del__ = close

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()


def writer(lock):
    """The process that a lock file names."""
    with contextlib.suppress(OSError):
        return Path(lock).read_text() or 'another process'
    return 'another process'


@atexit.register
def remove_locks():
    """Those of a process that ends with an error, before filelock unlocks them."""
    for lock in OnlyWriter.held:
        with contextlib.suppress(OSError):
            os.unlink(lock)


@contextlib.contextmanager
def whole_file(path):
    """
    Give a temporary name to write to, and rename it to `path` at the end: a reader, a crash or a
    full disk never leaves half a file there. An error on the way removes what was written.
    """
    path = Path(path)
    part = path.with_name(path.name + '.part')
    with OnlyWriter(path):
        part.unlink(missing_ok=True)  # of a run that was killed, or a planted link
        try:
            yield part
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_folder(folder):
    """
    Give a temporary folder to write to, and rename it to `folder`, a new or an empty one, at the
    end: it has all files or is not there.
    """
    folder = Path(folder).resolve()
    part = folder.with_name(folder.name + '.part')
    with OnlyWriter(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f'{folder} exists and is not an empty folder. Remove it or choose '
                            'another folder.')
        shutil.rmtree(part, ignore_errors=True)  # of a run that was killed
        part.mkdir()
        try:
            yield part
            if folder.exists():  # Windows replaces no folder
                folder.rmdir()
            part.replace(folder)
        except OSError as error:
            raise OSError(f'could not write {folder} ({error}). Is the disk full?') from error
        finally:
            shutil.rmtree(part, ignore_errors=True)


def write_text(path, text):
    with whole_file(path) as part:  # the same bytes on every system
        part.write_text(text, encoding='utf-8', newline='\n')


def read_lines(path, header=False, **kinds):
    """
    The rows of a .jsonl file, dicts; none where there is no file. What cannot be read, as a kill or
    a full disk leaves it, or has not the `kinds`, {name: type}, is left out with a note. header:
    the first row may be any dict.
    """
    rows = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
            if rows or not header:
                require_kinds(row, **kinds)
            rows.append(dict(row))
        except MALFORMED:
            note(f'{path}: dropped what could not be read: {line}')
    return rows


def write_lines(path, rows):
    write_text(path, ''.join(f'{json.dumps(row)}\n' for row in rows))


def json_value(value, digits=17):
    """What JSON can hold: arrays as lists of numbers of 6 digits, more than any measurement here
    has; NaN as None."""
    if isinstance(value, (np.ndarray, np.generic)):
        return json_value(value.tolist(), digits=6)
    if isinstance(value, dict):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item, digits) for item in value]
    if isinstance(value, float):
        return float(f'{value:.{digits}g}') if math.isfinite(value) else None
    return value


def save_json(path, data):
    """
    Write JSON that a person can read: a key a line, a list of numbers on one line. Returns what a
    reader gets.
    """
    def on_one_line(numbers):
        return f"[{' '.join(numbers[0][1:-1].split())}]"

    text = json.dumps(json_value(data), indent=1)
    text = re.sub(r'\[\n[^][{}"]*\]', on_one_line, text)
    write_text(path, text + '\n')
    return json.loads(text)


def read_json(path, stage):
    """The JSON that a stage wrote, such as 'explore'. Raises UserError for any other file."""
    with fault_of(path, f'a result of {stage}.py', 'Give the .json that it wrote.'):
        result = json.loads(Path(path).read_text(encoding='utf-8'))
        if result['stage'] != stage:
            raise ValueError(f"its stage is {result['stage']}")
    return result


def result_path(folder, *parts):
    """folder/PART_PART..., empty parts left out: a result without .json. A str, as scale1.2 has no
    suffix."""
    return str(Path(folder, '_'.join(part for part in parts if part)))


def command():
    """What was typed to run this program."""
    module = sys.modules['__main__'].__spec__  # None where a file is run
    program = f'-m {module.name}' if module else Path(sys.argv[0]).name
    return ' '.join(['python', program, *sys.argv[1:]])


def provenance(settings, runtime, seconds):
    """What a result needs to be made again: command, settings, commit, versions, device, time."""
    commit = ''
    if shutil.which('git'):
        describe = ['git', '-C', str(ROOT), 'describe', '--always', '--exclude=*',
                    '--dirty= with changes']
        commit = subprocess.run(describe, capture_output=True, text=True).stdout.strip()
    device = platform.machine()
    if runtime.device.type == 'cuda':
        device = torch.cuda.get_device_name(runtime.device)
    return {
        'command': command(),
        'settings': settings,
        'commit': commit or None,
        'versions': {'python': platform.python_version(), 'torch': torch.__version__,
                     'numpy': np.__version__},
        'device': f'{runtime.device.type} ({device}, {torch.get_num_threads()} threads, '
                  f'{runtime.world_size} ranks)',
        'dtype': str(runtime.dtype).removeprefix('torch.'),
        'seconds': round(seconds, 1),
    }


def paper_table(name):
    """A table of a paper in results/papers/tables.json as {row: {column: number}}."""
    table = json.loads((ROOT / 'results/papers/tables.json').read_text())[name]
    return {row: dict(zip(table['columns'], values)) for row, values in table['rows'].items()}


def cell_text(value):
    if isinstance(value, int | np.integer):
        return f'{value:,}'
    if isinstance(value, float):
        return f'{value:,.0f}' if abs(value) >= 1000 else f'{value:.4f}'
    return str(value)


def print_rows(say, rows):
    """
    Print rows, {name: number or text}, as a table. Columns have the names that the result's JSON
    has; a cell is empty where its row has no such entry.
    """
    names = dict.fromkeys(itertools.chain(*rows))
    table = [[name.replace('_', ' ') for name in names]]
    for row in rows:
        table.append([cell_text(row.get(name, '')) for name in names])
    widths = [max(map(len, column)) for column in zip(*table)]
    for cells in table:
        say('  '.join(f'{cell:>{width}}' for cell, width in zip(cells, widths)))


def print_scores(say, ours, theirs):
    """
    Our scores {task: percent}, beside them rows of a paper's table, {name: {task: percent}}, nan
    where there is no number; and the plain means over the tasks.
    """
    columns = {'here': ours}
    for name, scores in theirs.items():
        columns[f'paper: {name}'] = scores
    rows = {task: [column.get(task, math.nan) for column in columns.values()] for task in ours}
    rows['average'] = np.mean(list(rows.values()), axis=0)
    say(' ' * 22 + ''.join(f'{name:>28}' for name in columns))
    for task, scores in rows.items():
        say(f'{task:22}' + ''.join(f'{score:28.2f}' for score in scores))


def bin_means(values, width):
    """
    Means over bins of `width` positions, so that a curve over thousands of positions is smooth and
    its JSON short. values: (..., T). Returns the mean position (1-based) of each bin, (bins,), and
    the means, (..., bins).
    """
    values, width = np.asarray(values), max(1, width)
    bins = values.shape[-1] // width
    means = values[..., :bins * width].reshape(*values.shape[:-1], bins, width).mean(-1)
    return np.arange(bins) * width + (width + 1) / 2, means


# ---------------------------------------------------------------------- answers that survive a stop

class AnswerLog:
    """
    Work done item by item, a JSON line each, so that a stopped run goes on where it was, also with
    another number of ranks. path: of the .jsonl; each rank but the first has a file of its own
    beside it. kinds: {name: type} of what an answer holds; settings: what the answers depend on.
    Raises UserError where the file holds answers of other settings.
    """

    def __init__(self, path, kinds, settings, runtime):
        self.path, self.runtime, self.items = Path(path), runtime, []
        self.kinds = {'item': int} | kinds
        self.header = json.loads(json.dumps(settings))
        self.lock = OnlyWriter(self.path, runtime.is_main)
        self.done = {row['item'] for row in self.read()}
        runtime.wait_for_all()  # all ranks have read the same before one of them writes
        own = self.path
        if not runtime.is_main:
            own = self.path.with_name(f'{self.path.stem}.rank{runtime.rank}.jsonl')
        write_lines(own, self.lines(own))
        self.file = open(own, 'a', encoding='utf-8')

    def lines(self, path):
        return read_lines(path, header=True, **self.kinds) or [self.header]

    def read(self):
        """Yield the answers of all ranks."""
        others = sorted(self.path.parent.glob(f'{glob.escape(self.path.stem)}.rank*.jsonl'))
        for path in [self.path, *others]:
            header, *answers = self.lines(path)
            changed = [key for key in header | self.header
                       if header.get(key) != self.header.get(key)]
            if changed:
                raise UserError(f"{path} holds answers of other settings ({', '.join(changed)}). "
                                'Remove it, or give this run another --label=.')
            yield from answers

    def batches(self, items, size, batch_tokens):
        """
        Yield this rank's share of what is left, in lists of at most batch_tokens tokens.
        size(item): in tokens.
        """
        self.items = items
        todo = self.runtime.shard([item for item in items if item not in self.done])
        batch = []
        with progress_bar(len(todo), self.path.stem, self.runtime.is_main) as bar:
            for item in todo:
                longest = max(map(size, [*batch, item]))
                if batch and (len(batch) + 1) * longest > batch_tokens:
                    yield batch
                    bar.update(len(batch))
                    batch = []
                batch.append(item)
            if batch:
                yield batch
            bar.update(len(batch))

    def add(self, item, **row):
        row = json.dumps({'item': item, **row}, ensure_ascii=False)
        print(row, file=self.file, flush=True)

    def finish(self):
        """The answers of all ranks, one an item. Call it on every rank."""
        self.file.close()
        self.runtime.wait_for_all()
        rows = {row['item']: row for row in self.read()}
        self.runtime.wait_for_all()
        self.lock.close()
        return [rows[item] for item in self.items]
