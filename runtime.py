"""
What every stage needs around the model: device and precision, ranks, progress, and results written to disk.
"""

import contextlib
import ctypes
import datetime
import functools
import importlib
import json
import math
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import time
import warnings
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from configurator import at_least
from errors import ROOT

try:
    import fcntl
except ImportError:  # on Windows; there, nothing is locked
    fcntl = None

DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}


# ----------------------------------------------------------------------------- device, precision, ranks

@dataclass
class Runtime:
    """Where this process runs: its device, its precision and its place among the ranks."""
    device: torch.device
    dtype: torch.dtype   # of activations; head scales and what is trained stay float32
    rank: int
    world_size: int

    @property
    def is_main(self):
        return self.rank == 0

    def autocast(self):
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def print(self, *args):
        if self.is_main:
            print(*args, flush=True)

    def mine(self, items):
        """This rank's share of a list of work: every world_size-th item."""
        return items[self.rank::self.world_size]

    def gather(self, rows, n, finite=True):
        """
        Put rows computed by mine(range(n)) back in order. rows: (len(mine), ...) array. Returns (n, ...) float64,
        the same on every rank, so that sums over it do not depend on the number of ranks.
        finite: raise ValueError where a number is infinite or NaN, before a result is made of it.
        """
        whole = rows = np.array(rows, dtype=np.float64)
        if self.world_size > 1:
            parts = [None] * self.world_size
            dist.all_gather_object(parts, rows)
            shape = next(part.shape[1:] for part in parts if len(part))
            whole = np.empty((n, *shape))
            for rank, part in enumerate(parts):
                if len(part):
                    whole[rank::self.world_size] = part
        not_finite = whole[~np.isfinite(whole)]
        if finite and len(not_finite):
            raise ValueError(f'{len(not_finite)} of {whole.size} numbers measured are not finite, the '
                             f'first is {not_finite[0]}; no result was written. Are the weights or scales '
                             'damaged? Take another --init_from=, --scale= or --dtype=.')
        return whole

    @torch.no_grad()
    def over_windows(self, windows, batch_tokens, measure, label=None, finite=True):
        """
        Measure every window, in batches of about batch_tokens tokens, split over ranks.
        windows: (n, T + 1) int64 ids; measure(inputs, targets), each (B, T), returns an array or tensor of B rows.
        Returns the rows of all windows in order, (n, ...) float64, on every rank; for finite see gather().
        """
        mine, rows = self.mine(torch.as_tensor(windows)), []
        progress = Progress(len(mine), label, enabled=self.is_main and label is not None)
        for batch in mine.split(max(1, batch_tokens // (mine.shape[1] - 1))) if len(mine) else ():
            batch = batch.to(self.device)
            with self.autocast():
                result = measure(batch[:, :-1], batch[:, 1:])
            rows += list(result.cpu().numpy() if torch.is_tensor(result) else result)
            progress.update(len(rows))
        return self.gather(rows, len(windows), finite)

    def close(self):
        """The end of a stage, on every rank: each waits for the others, as one of them may still send it something."""
        if self.world_size > 1:
            dist.barrier()
            dist.destroy_process_group()


def optional(package):
    """An optional package, imported. Raises ValueError with the command that installs it where it is missing."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        package = package.partition('.')[0]
        raise ValueError(f'This needs the optional package {package}. Run: pip install {package}') from error


def has_bfloat16(device):
    """True where bfloat16 arithmetic is in hardware; elsewhere it is emulated and slower than float32."""
    if device.type == 'cuda':
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == 'cpu':
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return False


def setup(device='auto', dtype='auto', seed=1337):
    """
    Choose the device, the precision and, under torchrun, this process's rank. Returns a Runtime.
    device: 'auto', 'cpu', 'cuda', 'cuda:1', 'mps'. dtype: 'auto' or a key of DTYPES.
    """
    at_least(0, {'seed': seed}, 'seed', below=2 ** 32)  # what numpy's RandomState takes
    if device == 'auto':
        device = 'cuda' if torch.cuda.is_available() else 'mps' if torch.backends.mps.is_available() else 'cpu'
    if device.startswith('cuda') and not torch.cuda.is_available():
        raise ValueError(f"device is '{device}' but this PyTorch sees no CUDA device. Use --device=cpu.")
    if device.startswith('mps') and not torch.backends.mps.is_available():
        raise ValueError("device is 'mps' but this PyTorch has no MPS. Use --device=cpu.")
    rank, world_size = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
    if world_size > 1 and device.startswith('cuda'):
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        device = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device is '{device}'. Choose auto, cpu, cuda, cuda:1 or mps.") from None
    if device.type == 'cuda':
        if (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"device is '{device}' but there are {torch.cuda.device_count()}, from cuda:0 on. "
                             'Choose another, or lower --nproc_per_node.')
        torch.cuda.set_device(device.index or 0)
    if world_size > 1 and not dist.is_initialized():  # a large checkpoint may take longer than NCCL's 10 minutes
        dist.init_process_group('nccl' if device.type == 'cuda' else 'gloo', timeout=datetime.timedelta(hours=2))
    if dtype == 'auto':
        dtype = 'bfloat16' if has_bfloat16(device) else 'float16' if device.type == 'cuda' else 'float32'
    if dtype not in DTYPES:
        raise ValueError(f"dtype is '{dtype}'. Choose auto, {', '.join(DTYPES)}.")
    if dtype == 'float16' and device.type == 'cpu':
        raise ValueError("dtype is 'float16', which needs a GPU. Use --dtype=float32 or bfloat16 on CPU.")
    torch.manual_seed(seed)
    if device.type == 'cpu':
        keep_freed_memory()
        # or compiled embedding gradients are summed in another order in each run
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # which would cost a pass over each new tensor
    # TF32 would round the products of entropies and score maps to 10-bit mantissas; half precision
    # does not use it. PyTorch's newer switch, fp32_precision, cannot be mixed with these two.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    return Runtime(device, DTYPES[dtype], rank, world_size)


def keep_freed_memory(largest=2 ** 30):
    """
    Have the C library keep freed blocks of up to `largest` bytes for the next step, where it is glibc. By default it
    hands large ones back to the system, and every training step pays for their pages again: 86 to 64 ms in one trial of
    the demo model. The price is a heap with holes, up to three times as large as what it holds.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL('libc.so.6').mallopt
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, in bytes
            mallopt(option, largest)


def can_compile(runtime, enabled):
    """True where torch.compile was asked for and can be done; where it cannot, one line says why."""
    if not enabled or runtime.device.type == 'mps':  # torch.compile for mps is young: uncompiled is the safe choice
        return False
    compiler = os.environ.get('CXX', 'clang++' if sys.platform == 'darwin' else 'g++')  # as torch chooses it
    header = Path(sysconfig.get_paths()['include'], 'Python.h')
    missing = (f'the C++ compiler {compiler} (Debian, Ubuntu: apt-get install g++)' if not shutil.which(compiler)
               else 'Python.h (Debian, Ubuntu: apt-get install python3-dev)' if not header.exists() else None)
    if missing:  # a GPU's kernels need both, too
        runtime.print(f'torch.compile needs {missing}; going on uncompiled, which is slower.')
        return False
    torch._dynamo.config.recompile_limit = 64  # of lengths, or models: beyond it a call would silently go uncompiled
    return True


def compiled(model, runtime, enabled):
    """torch.compile(model), once per shape, or the model as it is where that was not asked for or cannot be done."""
    return torch.compile(model, dynamic=False) if can_compile(runtime, enabled) else model


def learning_rate_at(step, peak, floor, warmup, decay):
    """Linear warm-up, then a cosine from peak to floor that ends at step `decay`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    share = min(1.0, (step - warmup) / max(1, decay - warmup))
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * share))


def sharded(model, runtime, compile):
    """
    Split weights, gradients and optimizer state over the ranks (FSDP): a block's weights are whole only while it runs.
    They stay float32, head scales too; autocast lowers the products. Blocks are compiled one by one.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard  # here, as it takes a second to import
    warnings.filterwarnings('ignore', message='.*returned a view tensor')  # nobody changes the losses in place
    mesh = init_device_mesh(runtime.device.type, (runtime.world_size,))
    by_blocks = can_compile(runtime, compile)
    for block in model.blocks:
        if by_blocks:
            block.compile(dynamic=False)
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def unsharded(state):
    """A state dict whose sharded tensors the first rank puts together in CPU memory. Call it on every rank."""
    if isinstance(state, dict):
        return {name: unsharded(value) for name, value in state.items()}
    if isinstance(state, list):
        return [unsharded(value) for value in state]
    if not hasattr(state, 'full_tensor'):  # a plain tensor or number
        return state
    tensor = state.full_tensor()  # all ranks take part; the others need not keep it
    return tensor.cpu() if dist.get_rank() == 0 else None


def load_sharded(optimizer, state):
    """
    Give an optimizer the moments of a saved one, whole tensors; its parameters may be sharded. Rates and the like stay
    its own.
    """
    weights = [p for group in optimizer.param_groups for p in group['params']]
    for i, moments in state['state'].items():
        p = weights[i]
        for name, x in moments.items():
            if hasattr(p, 'device_mesh') and x.shape == p.shape:
                from torch.distributed.tensor import distribute_tensor
                moments[name] = distribute_tensor(x.to(p.device), p.device_mesh, p.placements)
            else:
                moments[name] = x.clone()  # or the file, which is mapped, stays in use
    optimizer.load_state_dict(state | {'param_groups': optimizer.state_dict()['param_groups']})


def synchronize(device):
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
    elif device.type == 'mps':
        torch.mps.synchronize()


def matmul_flops(device, dtype, size=None, seconds=0.3):
    """FLOP/s of a large square matrix product on this device in this precision: the ceiling MFU is measured by."""
    size = size or (8192 if device.type == 'cuda' else 2048)
    a = torch.randn(size, size, device=device, dtype=dtype)
    a @ a  # the first may take a second, while the library loads
    best, stop = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < stop:
        synchronize(device)
        start = time.perf_counter()
        a @ a
        synchronize(device)
        best = max(best, 2 * size ** 3 / (time.perf_counter() - start))
    return best


# ----------------------------------------------------------------------------- progress and results

class Progress:
    """A progress bar on a terminal; in a log file, a line each half minute."""

    def __init__(self, total, label, enabled=True):
        self.total, self.label, self.enabled = max(1, total), label, enabled
        self.start = self.shown = time.perf_counter()
        self.tty = sys.stderr.isatty()

    def update(self, done, note=''):
        """done: units of `total` finished so far."""
        share, now = min(1.0, done / self.total), time.perf_counter()
        complete = self.tty and share == 1  # a terminal always shows the end
        if not self.enabled or now - self.shown < (0.1 if self.tty else 30) and not complete:
            return
        self.shown, seconds = now, now - self.start
        left = clock(seconds / share - seconds) if share else '?'
        line = f'{self.label}  [{"#" * int(share * 24):<24}] {share:4.0%}  {clock(seconds)}, {left} left  {note}'
        if self.tty:
            print(f'\r{line:<110}', end='\n' if complete else '', file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)


def clock(seconds):
    """Seconds as m:ss or h:mm:ss."""
    minutes, s = divmod(int(seconds), 60)
    return f'{minutes // 60}:{minutes % 60:02d}:{s:02d}' if minutes >= 60 else f'{minutes}:{s:02d}'


class Answers:
    """
    Work done item by item, a JSON line each, so that a stopped run goes on where it was, also with another number of
    ranks. path: of the .jsonl; each rank but the first has a file of its own beside it. settings: what the answers
    depend on. Raises ValueError where the file holds answers of other settings.
    """

    def __init__(self, path, settings, runtime):
        self.path, self.runtime = Path(path), runtime
        self.header = json.loads(json.dumps(settings))
        self.lock = lock_file(self.path, runtime)
        self.done = {row['item'] for row in self.read()}
        if runtime.world_size > 1:
            dist.barrier()  # all ranks have read the same before one of them writes
        mine = self.path if runtime.is_main else self.path.with_name(f'{self.path.stem}.rank{runtime.rank}.jsonl')
        mine.parent.mkdir(parents=True, exist_ok=True)
        whole = mine.read_bytes() if mine.exists() else b''
        whole = whole[:whole.rfind(b'\n') + 1]  # a kill may have left half a line
        write_text(mine, whole.decode())
        self.file = open(mine, 'a', encoding='utf-8')
        if not whole:
            self.write(self.header)

    def read(self):
        for path in [self.path, *sorted(self.path.parent.glob(f'{self.path.stem}.rank*.jsonl'))]:
            lines = path.read_bytes().split(b'\n')[:-1] if path.exists() else []
            header, *rows = read_rows(path, lines) or [self.header]
            if header != self.header:
                changed = sorted(key for key in header | self.header if header.get(key) != self.header.get(key))
                raise ValueError(f"{path} holds answers of other settings ({', '.join(changed)}). Remove it, or give "
                                 'this run another --label=.')
            yield from rows

    def write(self, row):
        self.file.write(json.dumps(row, ensure_ascii=False) + '\n')
        self.file.flush()

    def batches(self, items, size, batch_tokens):
        """Yield this rank's share of what is left, in lists of at most batch_tokens tokens. size(item): in tokens."""
        todo = self.runtime.mine([item for item in items if item not in self.done])
        progress, batch = Progress(len(todo), self.path.stem, self.runtime.is_main), []
        for n_done, item in enumerate(todo):
            if batch and (len(batch) + 1) * max(map(size, [*batch, item])) > batch_tokens:
                yield batch
                progress.update(n_done)
                batch = []
            batch.append(item)
        if batch:
            yield batch
        progress.update(len(todo))

    def add(self, item, **row):
        self.write({'item': item, **row})

    def finish(self):
        """The answers of all ranks, in the order of their items. Call it on every rank, after the last add()."""
        self.file.close()
        if self.runtime.world_size > 1:
            dist.barrier()
        rows = sorted(self.read(), key=lambda row: row['item'])
        unlock_file(self.lock)
        return rows


def read_rows(path, lines):
    """The rows of a .jsonl of answers, its header first. Raises ValueError naming the line that is not one."""
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or number > 1 and 'item' not in row:
            raise ValueError(f'line {number} of {path} cannot be read. Remove that line, and its item is '
                             'answered again, or remove the file.')
        rows.append(row)
    return rows


@contextlib.contextmanager
def whole_file(path):
    """
    Give a temporary name to write to, and rename it to `path` at the end: a reader, a crash or a full disk never leaves
    half a file there. An error on the way removes what was written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + '.part')
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def lock_file(path, runtime):
    """
    Let no other process write to `path` until unlock_file(), which takes what this returns. Call it on
    every rank. The first one locks PATH.lock, which the operating system unlocks when the process ends,
    however it ends; the file that is left then does no harm. Raises ValueError, on every rank, with the
    process that holds it.
    """
    lock, holder = None, [None]
    if runtime.is_main and fcntl:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path.with_name(path.name + '.lock'), 'a+')
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.truncate(0)
            lock.write(f'process {os.getpid()} on {platform.node()}')
            lock.flush()
        except BlockingIOError:
            lock.seek(0)
            holder = [lock.read() or 'another process']
        except OSError as error:  # some network file systems
            print(f'{lock.name} cannot be locked ({error}). Start no second run that writes there.')
    if runtime.world_size > 1:
        dist.broadcast_object_list(holder)
    if holder[0]:
        raise ValueError(f'{holder[0]} is writing to {path} now. Wait until it has ended, or choose '
                         'another --out_dir=.')
    return lock


def unlock_file(lock):
    if lock:
        Path(lock.name).unlink(missing_ok=True)
        lock.close()


def write_text(path, text):
    with whole_file(path) as part:
        part.write_text(text, encoding='utf-8')


def require_memory(n_bytes, what):
    """Raise ValueError if that is more memory than this machine has, where its system tells."""
    if hasattr(os, 'sysconf'):
        memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
        if n_bytes > memory:
            raise ValueError(f'{what} takes {n_bytes / 1e9:,.2f} GB of memory, but this machine '
                             f'has {memory / 1e9:,.2f} GB. Choose a smaller one.')


@functools.cache
def note(line):
    """Print a line, once however often it is asked for, by the first rank alone."""
    if int(os.environ.get('RANK', 0)) == 0:
        print(line, flush=True)


def tensors_in(value):
    """Yield the tensors that nested dicts and lists hold."""
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def checksum_of(storage):
    """(bytes, CRC-32) of the memory behind a tensor."""
    data = torch.empty(0, dtype=torch.uint8).set_(storage)
    return len(data), zlib.crc32(data.numpy())


def written_checksums(path):
    """
    {(bytes, CRC-32)} of the records that torch.save() wrote to a zip file. Raises BadZipFile for
    damage to what leads to them.
    """
    with zipfile.ZipFile(path) as archive, open(path, 'rb') as file:
        entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
        ends = [entry.header_offset for entry in entries[1:]] + [archive.start_dir]
        for entry, end in zip(entries, ends):
            # The header before a record says how long it is itself. One that is damaged may lead
            # torch.load() to another record, but what follows the right one is 24 bytes at most.
            file.seek(entry.header_offset + 26)
            start = entry.header_offset + 30 + sum(struct.unpack('<HH', file.read(4)))
            if not 0 <= end - start - entry.file_size <= 24:
                raise zipfile.BadZipFile(entry.filename)
            if entry.filename.endswith(('/data.pkl', '/byteorder')):
                archive.read(entry)  # compares its checksum
        return {(entry.file_size, entry.CRC) for entry in entries}


def require_checksums(path, state, advice):
    """
    Raise ValueError, ending in the advice, unless `state` is what torch.save() wrote to the zip
    file `path`. torch.load() does not compare the checksums that the zip keeps of each tensor.
    Entries that were dropped from `state` are not read: checking costs time.
    """
    try:
        storages = [tensor.untyped_storage() for tensor in tensors_in(state)]
        storages = {storage.data_ptr(): storage for storage in storages}  # tied weights share one
        written = written_checksums(path)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            whole = written.issuperset(pool.map(checksum_of, storages.values()))
    except Exception:  # zipfile has no common class for all that can be wrong in a zip
        whole = False
    if not whole:
        raise ValueError(f'{path} is damaged: its bytes differ from their checksums. {advice}')


def plain(value, digits=None):
    """What JSON can hold: arrays as lists of numbers of 6 digits, more than any measurement here has; NaN as None."""
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist(), digits=6)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, digits) for item in value]
    if isinstance(value, float):
        return None if not math.isfinite(value) else float(f'{value:.{digits}g}') if digits else value
    return value


def save_json(path, data):
    """Write JSON that a person can read: a key a line, a list of numbers on one line. Returns what a reader gets."""
    text = re.sub(r'\[\n[^][{}"]*\]', lambda numbers: f"[{' '.join(numbers[0][1:-1].split())}]",
                  json.dumps(plain(data), indent=1))
    write_text(path, text + '\n')
    return json.loads(text)


def read_json(path, stage, *curves):
    """
    The JSON that a stage wrote, such as 'entropy'. curves: keys of lists that are to be drawn.
    Raises ValueError for any other file, and where a curve has null, which was not finite.
    """
    try:
        result = json.loads(Path(path).read_text(encoding='utf-8'))
        ours, gaps = result['stage'] == stage, [key for key in curves if None in result[key]]
    except (ValueError, LookupError, TypeError, RecursionError):
        ours = False
    if not ours:
        raise ValueError(f'{path} is not a result of {stage}.py. Give the .json that it wrote.')
    if gaps:
        raise ValueError(f'{path} has null in {gaps[0]}, where a number was not finite. '
                         'Measure it again, or leave it out.')
    return result


def new_figure(rows=1, columns=1, width=6.4, height=4.0):
    """A matplotlib figure for a file, no screen needed. Returns figure, axes (one, or an array of rows x columns)."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    plt.rcParams.update({'axes.grid': True, 'grid.alpha': 0.3, 'axes.spines.top': False, 'axes.spines.right': False,
                         'legend.frameon': False, 'legend.fontsize': 9, 'axes.titlesize': 11})
    return plt.subplots(rows, columns, figsize=(width * columns, height * rows), layout='constrained')


def mark_length(axis, L):
    """A dotted line at the training length."""
    axis.axvline(L, color='black', ls=':', lw=1)
    axis.annotate(f' L = {L}', (L, 1), xycoords=('data', 'axes fraction'), va='top', fontsize=8)


def method_name(position):
    """How pictures call a position method."""
    return {'none': 'NoPE', 'rope': 'RoPE', 'alibi': 'ALiBi', 'kerple': 'Kerple'}.get(position, position)


def save_png(figure, path):
    """Write a matplotlib figure, whole or not at all, and close it."""
    import matplotlib.pyplot as plt
    with whole_file(path) as part:
        figure.savefig(part, format='png', dpi=130)
    plt.close(figure)


def bin_means(values, width):
    """
    Means over bins of `width` positions, so that a curve over thousands of positions is smooth and its JSON short.
    values: (..., T). Returns the mean position (1-based) of each bin, (bins,), and the means, (..., bins).
    """
    values, width = np.asarray(values), max(1, width)
    bins = values.shape[-1] // width
    means = values[..., :bins * width].reshape(*values.shape[:-1], bins, width).mean(-1)
    return np.arange(bins) * width + (width + 1) / 2, means


def running_mean(values, bins=8):
    """Means of `bins` neighbours, for a smoother curve; positions go through it too. 8 bins of L / 16 are L / 2."""
    return np.convolve(values, np.ones(bins) / bins, 'valid') if len(values) > 2 * bins else values


def result_path(folder, *parts):
    """folder/PART_PART..., empty parts left out: a result without .json or .png. A str, as scale1.2 has no suffix."""
    return str(Path(folder, '_'.join(part for part in parts if part)))


def provenance(settings, runtime, seconds):
    """What a result needs to be made again: command, settings, commit, versions, device, time taken."""
    commit = ''
    if shutil.which('git'):
        git = ['git', '-C', str(ROOT)]
        commit = subprocess.run([*git, 'rev-parse', '--short', 'HEAD'], capture_output=True, text=True).stdout.strip()
        changed = subprocess.run([*git, 'diff', '--quiet', 'HEAD', '--', '*.py'], capture_output=True).returncode == 1
        commit += ' with changes' * changed
    device = torch.cuda.get_device_name(runtime.device) if runtime.device.type == 'cuda' else platform.machine()
    return {
        'command': ' '.join(['python', Path(sys.argv[0]).name, *sys.argv[1:]]),
        'settings': settings,
        'commit': commit or None,
        'versions': {'python': platform.python_version(), 'torch': torch.__version__, 'numpy': np.__version__},
        'device': f'{runtime.device.type} ({device}, {torch.get_num_threads()} threads, {runtime.world_size} ranks)',
        'dtype': str(runtime.dtype).removeprefix('torch.'),
        'seconds': round(seconds, 1),
    }
