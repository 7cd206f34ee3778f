"""
Results on disk: JSON files that can be reproduced, progress bars, and answers that survive a stop.
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
import shlex
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
    """
    Import an optional package. If it is missing, raises UserError with the command that installs
    it.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.partition('.')[0]
        raise UserError(f'This needs the optional package {name}. Run: pip install '
                        f'{name}') from error


@functools.cache
def note(line):
    """Print a line, only on the first rank. A repeated call with the same line prints nothing."""
    if int(os.environ.get('RANK', 0)) == 0:
        print(line, flush=True)


def progress_bar(total, label, enabled=True):
    """
    A progress bar; call its update(n). A log file, unlike a terminal, gets a new line only every
    30 s.
    """
    pause = 0.1 if sys.stderr.isatty() else 30
    return tqdm(total=total, desc=label, disable=not enabled, mininterval=pause, ncols=100)


# ---------------------------------------------------------------------- files

class Busy(UserError):
    """Another process is writing there."""


class OnlyWriter:
    """
    The only process that may write to `path`, a file or a folder, until close() or the end of a
    with block. In any other process, OnlyWriter(path) raises Busy, which names the writing
    process. The operating system locks PATH.lock, and unlocks it however the process ends. A
    process may take its own lock again; only the object that took it first frees it. wanted: False
    locks nothing.
    """

    held = {}  # {path of a lock: the lock}

    def __init__(self, path, wanted=True):
        self.key, key = None, os.path.abspath(f'{path}.lock')
        if not wanted or key in self.held:
            return
        lock = filelock.FileLock(key, thread_local=False, fallback_to_soft=False)
        try:
            lock.acquire(timeout=0.5)  # to write a small file takes less time
            with contextlib.suppress(OSError):  # Windows does not allow writing to a locked file
                Path(key).write_text(f'process {os.getpid()} on {platform.node()}')
        except filelock.Timeout as error:
            raise Busy(f'{writer(key)} is writing to {path} now. Wait until it has ended, or '
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
            with contextlib.suppress(OSError):  # on Windows release() removes the file
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
    """Remove the lock files of a process that ends with an error, before filelock unlocks them."""
    for lock in OnlyWriter.held:
        with contextlib.suppress(OSError):
            os.unlink(lock)


@contextlib.contextmanager
def whole_file(path):
    """
    A context that yields a temporary path to write to, and renames that file to `path` at the end.
    So `path` never holds half a file, even after a crash or with a full disk. After an error, the
    temporary file is removed.
    """
    path = Path(path)
    part = path.with_name(path.name + '.part')
    with OnlyWriter(path):
        part.unlink(missing_ok=True)  # left by a killed run, or a link that somebody planted
        try:
            yield part
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_folder(folder):
    """
    A context that yields a temporary folder to write to, and renames it to `folder` at the end. So
    `folder` has all files or none. It must be new or empty.
    """
    folder = Path(folder).resolve()
    part = folder.with_name(folder.name + '.part')
    with OnlyWriter(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f'{folder} exists and is not an empty folder. Remove it or choose '
                            'another folder.')
        shutil.rmtree(part, ignore_errors=True)  # left by a killed run
        part.mkdir()
        try:
            yield part
            if folder.exists():  # Windows cannot replace a folder
                folder.rmdir()
            part.replace(folder)
        except OSError as error:
            raise OSError(f'could not write {folder} ({error}). Is the disk full?') from error
        finally:
            shutil.rmtree(part, ignore_errors=True)


def write_text(path, text):
    with whole_file(path) as part:  # newline='\n' writes the same bytes on every system
        part.write_text(text, encoding='utf-8', newline='\n')


def read_lines(path, header=False, **kinds):
    """
    The rows of a .jsonl file, as a list of dicts; empty if there is no file. kinds: {name: type} of
    the entries of a row. A row that lacks one, or that a kill or a full disk has damaged, is left
    out with a note. header: the first row may be any dict.
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
    """
    A value in types that JSON can hold. Arrays become lists of numbers with 6 digits, more than any
    measurement here has. NaN and infinity become None.
    """
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
    Write JSON that a person can read: one key per line, and each list of numbers on one line.
    Returns the data as read back from JSON.
    """
    def on_one_line(numbers):
        return f"[{' '.join(numbers[0][1:-1].split())}]"

    text = json.dumps(json_value(data), indent=1)
    text = re.sub(r'\[\n[^][{}"]*\]', on_one_line, text)
    write_text(path, text + '\n')
    return json.loads(text)


def read_json(path, stage):
    """The JSON that a stage wrote. stage: its name, such as 'entropy'. Refuses any other file."""
    with fault_of(path, f'a result of {stage}.py', 'Give the .json that it wrote.'):
        result = json.loads(Path(path).read_text(encoding='utf-8'))
        if result['stage'] != stage:
            raise ValueError(f"its stage is {result['stage']}")
    return result


def result_path(folder, *parts):
    """
    The path of a result without .json: folder/PART_PART..., without empty parts. A str, because a
    Path would take the .2 of scale1.2 for a suffix.
    """
    return str(Path(folder, '_'.join(part for part in parts if part)))


STARTER = ''  # what runs a stage in its place, such as '-m lessons.exercises'


def command():
    """The command line that runs this program."""
    module = sys.modules['__main__'].__spec__  # None, unless the program was run with -m
    program = ['-m', module.name] if module else [Path(sys.argv[0]).name]
    return shlex.join(['python', *STARTER.split(), *program, *sys.argv[1:]])


def provenance(settings, runtime, seconds):
    """How a result was made: command, settings, commit, versions, device, dtype, seconds."""
    commit = ''
    # Not the commit of a repository that surrounds a copy of the project.
    if shutil.which('git') and (ROOT / '.git').exists():
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
    """A paper's table, from results/papers/tables.json, as {row: {column: number}}."""
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
    Print rows, {name: number or text}, as a table. A column has the name that the entry has in the
    result's JSON. A cell is empty if its row lacks the entry.
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
    Print our scores, {task: percent}, next to rows of a paper's table, {name: {task: percent}}, and
    the unweighted means over the tasks. A missing number is nan.
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
    Means over bins of `width` positions. They make a curve over thousands of positions smooth, and
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
    Answers to items, saved as one JSON line each. A stopped run can go on where it was, even with
    another number of ranks. path: of the .jsonl file of the first rank; each other rank writes its
    own file next to it. kinds: {name: type} of the entries of an answer; settings: what the answers
    depend on. Raises UserError if the file holds answers of other settings.
    """

    def __init__(self, path, kinds, settings, runtime):
        self.path, self.runtime, self.items = Path(path), runtime, []
        self.kinds = {'item': int} | kinds
        self.header = json.loads(json.dumps(settings))
        self.lock = OnlyWriter(self.path, runtime.is_main)
        self.done = {row['item'] for row in self.read()}
        runtime.wait_for_all()  # no rank may write before all ranks have read
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
        Yield this rank's share of the unanswered items, in lists of at most batch_tokens tokens,
        each item padded to the longest. size(item): its number of tokens.
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
        """The answers of all ranks, one per item, in order. Call it on every rank."""
        self.file.close()
        self.runtime.wait_for_all()
        rows = {row['item']: row for row in self.read()}
        self.runtime.wait_for_all()
        self.lock.close()
        return [rows[item] for item in self.items]
