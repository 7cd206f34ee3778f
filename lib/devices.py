"""Where a stage runs: device, precision and ranks. Models are compiled and sharded here."""

import contextlib
import ctypes
import datetime
import math
import os
import shutil
import sys
import sysconfig
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from lib.answers import note, progress_bar
from lib.errors import UserError

# Compile a model for windows of one length if reading them takes more FLOP than this.
# On a CPU, compiling took 33 to 101 s and saved 7% of the time, so it pays off if reading takes
# half an hour. The GPU's number is a guess.
WORTH_COMPILING = {'cpu': 2 ** 48, 'cuda': 2 ** 55}
# {sys.platform: (the C++ compiler that torch.compile calls if CXX is not set, how to get it)}.
COMPILERS = {
    'linux': ('g++', 'Debian, Ubuntu: apt-get install g++'),
    'darwin': ('clang++', 'xcode-select --install'),
    'win32': ('cl', "Visual Studio's Build Tools; start from their Developer Command Prompt")}
DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}


@dataclass
class Runtime:
    """Where this process runs: its device, its precision and its place among the ranks."""
    device: torch.device
    dtype: torch.dtype   # of activations; head scales and trained weights stay float32
    rank: int = 0
    world_size: int = 1

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

    def shard(self, items):
        """This rank's share of a list of items: every world_size-th item."""
        return items[self.rank::self.world_size]

    def gather(self, rows, n, finite=True):
        """
        Collect the rows of all ranks and put them in order. rows: computed for shard(range(n)).
        Returns (n, ...) float64, the same on every rank, so sums over it do not depend on the
        number of ranks. finite: raise UserError if a number is infinite or NaN, before it reaches a
        result.
        """
        rows = np.array(rows, dtype=np.float64)
        if self.world_size > 1:
            parts = [None] * self.world_size
            dist.all_gather_object(parts, rows)
            rows = np.array([parts[i % self.world_size][i // self.world_size] for i in range(n)])
        odd = rows[~np.isfinite(rows)]
        if finite and len(odd):
            raise UserError(f'{len(odd)} of {rows.size} numbers measured are not finite, the '
                            f'first is {odd[0]}; no result was written. Are the weights or scales '
                            'damaged? Try another --init_from=, --scale= or --dtype=.')
        return rows

    @torch.no_grad()
    def over_windows(self, windows, batch_tokens, measure, label=None, finite=True):
        """
        Measure every window, in batches of at most batch_tokens tokens. The ranks share the
        windows. windows: (n, T + 1) int64 ids. measure(inputs, targets) gets two (B, T) tensors and
        returns an array or tensor of B rows. Returns the rows of all windows in order, (n, ...)
        float64, on every rank. finite: see gather().
        """
        n, windows, rows = len(windows), self.shard(torch.as_tensor(windows)), []
        most = max(1, batch_tokens // (windows.shape[1] - 1))
        # Batches of equal size, because each size is compiled by itself.
        n_batches = max(1, math.ceil(len(windows) / most))
        size = max(1, math.ceil(len(windows) / n_batches))
        with progress_bar(len(windows), label, self.is_main and label is not None) as bar:
            for first in range(0, len(windows), size):
                # Fill the last batch up with the first windows, because a smaller batch would be
                # compiled again.
                batch = windows[torch.arange(first, first + size) % len(windows)].to(self.device)
                with self.autocast():
                    result = measure(batch[:, :-1], batch[:, 1:])
                rows += list(result.cpu().numpy() if torch.is_tensor(result) else result)
                bar.update(min(size, len(windows) - first))
        return self.gather(rows[:len(windows)], n, finite)

    def wait_for_all(self):
        if self.world_size > 1:
            dist.barrier()

    def close(self):
        """End a stage. Every rank waits here, because one rank may still send to another."""
        self.wait_for_all()
        if self.world_size > 1:
            dist.destroy_process_group()


def has_bfloat16(device):
    """
    True if bfloat16 is faster than float32 on every processor of this kind: GPUs with bfloat16 in
    hardware, and CPUs with AMX. CPUs with AVX-512's bfloat16 but without AMX differ: of two that we
    measured, one did twice as many products per second as in float32, the other half as many.
    """
    if device.type == 'cuda':
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == 'cpu' and torch.cpu._is_amx_tile_supported()


def choose_device(device, world_size):
    """The torch.device of a --device= setting. Raises UserError if it is not available."""
    here, accelerator = ['cpu'], torch.accelerator.current_accelerator(check_available=True)
    if accelerator:
        kind = accelerator.type
        here = [kind, *(f'{kind}:{i}' for i in range(torch.accelerator.device_count())), 'cpu']
    if device == 'auto':
        device = here[0]
    if device.startswith('cuda') and world_size > 1:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    if device not in here:
        raise UserError(f"device is '{device}', but this PyTorch sees {', '.join(here)}. Choose "
                        'auto or one of these; torchrun takes a GPU for each process of a node.')
    return torch.device(device)


def setup(device='auto', dtype='auto', seed=1337):
    """
    Choose the device and the precision; under torchrun, take this process's rank. Returns a
    Runtime. device: 'auto', 'cpu', 'cuda', 'cuda:1', 'mps'. dtype: a key of DTYPES, or 'auto':
    bfloat16 if has_bfloat16(), otherwise float16 on a GPU and float32 on a CPU or mps.
    """
    rank, world_size = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
    device = choose_device(device, world_size)
    if device.type == 'cuda':
        torch.cuda.set_device(device.index or 0)
    # Sharp attention has weights below 1e-38. A CPU computes slowly with such numbers unless it
    # rounds them to 0: rounding cut a tuning step of the 5M model at scale 2.2 from 19 s to 7.5 s.
    # Set this before the first thread pool starts, because threads copy it when they are created.
    torch.set_flush_denormal(True)
    if dtype == 'auto':
        half = 'float16' if device.type == 'cuda' else 'float32'
        dtype = 'bfloat16' if has_bfloat16(device) else half
    if dtype not in DTYPES:
        raise UserError(f"dtype is '{dtype}'. Choose auto, {', '.join(DTYPES)}.")
    if dtype == 'float16' and device.type == 'cpu':
        raise UserError("dtype is 'float16', which needs a GPU. Use --dtype=float32 or bfloat16.")
    if not 0 <= seed < 2 ** 32:
        raise UserError(f'seed is {seed}; it must be from 0 to 2^32 - 1.')

    if world_size > 1 and not dist.is_initialized():
        # Saving a large checkpoint may take longer than NCCL's 10 minutes.
        backend = 'nccl' if device.type == 'cuda' else 'gloo'
        dist.init_process_group(backend, timeout=datetime.timedelta(hours=2))
    if world_size > 1:
        chosen = [dtype]
        dist.broadcast_object_list(chosen)  # use the first rank's dtype, because machines differ
        dtype = chosen[0]
    torch.manual_seed(seed)
    if device.type == 'cpu':
        keep_freed_memory()
        # Without this, compiled code sums embedding gradients in another order in each run.
        # use_deterministic_algorithms() would load the compiler, which costs a second at every
        # start, so only can_compile() calls it. Do not fill new tensors, because that costs a pass
        # over each.
        torch.set_deterministic_debug_mode('error')
        torch.utils.deterministic.fill_uninitialized_memory = False
    # TF32 would round the inputs of float32 products, which entropies and score maps need, to
    # 10-bit mantissas. Half precision is as fast without TF32. PyTorch's newer switch,
    # fp32_precision, cannot be mixed with this one.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    return Runtime(device, DTYPES[dtype], rank, world_size)


def keep_freed_memory(largest=2 ** 30):
    """
    Make the C library, if it is glibc, keep freed blocks of up to `largest` bytes for the next
    step. By default glibc returns large blocks to the system, so every training step pays for their
    pages again. Keeping them cut a step of the demo model from 86 to 64 ms in one trial. The price:
    the heap has holes, and can grow to three times the size of what it holds.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL('libc.so.6').mallopt
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, in bytes
            mallopt(option, largest)


# ---------------------------------------------------------------------- compile and shard

def can_compile(runtime, enabled):
    """
    True if torch.compile is enabled and can work here. If it is enabled but something is missing,
    prints one line that names it.
    """
    if not enabled or runtime.device.type == 'mps':  # torch.compile for mps is too new
        return False
    compiler, source = COMPILERS.get(sys.platform, COMPILERS['linux'])
    compiler, missing = os.environ.get('CXX', compiler), None
    if not shutil.which(compiler):
        missing = f'the C++ compiler {compiler} ({source})'
    elif not Path(sysconfig.get_paths()['include'], 'Python.h').exists():
        missing = 'Python.h (Debian, Ubuntu: apt-get install python3-dev)'
    if missing:  # compiling for a GPU needs both, too
        runtime.print(f'torch.compile needs {missing}; going on uncompiled, which is slower.')
        return False
    if runtime.device.type == 'cpu':
        torch.use_deterministic_algorithms(True)
    # The number of shapes and models to compile. Beyond it, a call would silently run uncompiled.
    torch._dynamo.config.recompile_limit = 64
    return True


def compiled(model, runtime, enabled):
    """torch.compile(model), once per shape, or the model itself if can_compile() is False."""
    return torch.compile(model, dynamic=False) if can_compile(runtime, enabled) else model


def compiled_for(model, runtime, enabled, n, length):
    """The model, compiled if n windows of `length` tokens are enough work for this to pay off."""
    # Models of transformers have no flops_per_token. With scale sets, vectors change in each pass.
    if not hasattr(model, 'flops_per_token') or model.scale_sets:
        return model
    flops = n * length * sum(model.flops_per_token(length))
    pays = flops > WORTH_COMPILING.get(runtime.device.type, math.inf)  # mps: never compiled
    return compiled(model, runtime, enabled and pays)


def sharded(model, runtime, compile):
    """
    Split weights, gradients and optimizer state over the ranks (FSDP). A block's weights are whole
    only while the block runs. All weights and head scales stay float32; autocast lowers the
    precision of products. With `compile`, each block is compiled separately.
    """
    from torch.distributed.fsdp import fully_shard  # imported here, because it takes a second
    if {'t5', 'fire'} & set(model.config.position.split(',')):
        raise UserError(f'fsdp cannot split position {model.config.position}: PyTorch shards '
                        'neither a table that all layers share nor a single number. Leave out '
                        '--fsdp=True.')
    # This warning is about changing the losses in place, which we never do.
    warnings.filterwarnings('ignore', message='.*returned a view tensor')
    mesh = dist.init_device_mesh(runtime.device.type, (runtime.world_size,))
    by_blocks = can_compile(runtime, compile)
    for block in model.blocks:
        if by_blocks:
            block.compile(dynamic=False)
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def unsharded(state):
    """
    A state dict with whole tensors instead of sharded ones. The first rank gets them, in CPU
    memory; the others get None. Call it on every rank.
    """
    def whole(value):
        if not hasattr(value, 'full_tensor'):  # a plain tensor or a number
            return value
        tensor = value.full_tensor()  # all ranks must call this; only the first keeps the result
        return tensor.cpu() if dist.get_rank() == 0 else None

    return tree_map(whole, state)


def load_sharded(optimizer, state):
    """
    Load the saved moments, which are whole tensors, into an optimizer. The optimizer's parameters
    may be sharded. It keeps its own learning rates and other settings. Raises ValueError for
    moments of other shapes, because a fused optimizer would then write outside the weights.
    """
    weights = [p for group in optimizer.param_groups for p in group['params']]
    for i, moments in state['state'].items():
        p = weights[i]
        for name, x in moments.items():
            if x.shape != (() if name == 'step' else p.shape):
                raise ValueError(f'{name} of weight {i} has shape {tuple(x.shape)}')
            if hasattr(p, 'device_mesh') and x.shape == p.shape:
                from torch.distributed.tensor import distribute_tensor
                moments[name] = distribute_tensor(x.to(p.device), p.device_mesh, p.placements)
            else:
                # Copied, so that the mapped file can be closed; to the weight's device, because
                # copies of several ranks could fill the memory of the machine.
                moments[name] = x.to(p.device, copy=True)
    own = optimizer.state_dict()['param_groups']
    optimizer.load_state_dict(state | {'param_groups': own})


def learning_rate_at(step, peak, floor, warmup, decay):
    """The learning rate at a step: linear warm-up, then a cosine from peak to floor until decay."""
    if step < warmup:
        return peak * (step + 1) / warmup
    share = min(1.0, (step - warmup) / max(1, decay - warmup))
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * share))


def note_long_warmup(warmup, steps):
    """Say so if a run ends before the learning rate has reached its peak."""
    if warmup > steps:
        note(f'warmup_iters is {warmup:g}, and the run has {steps} steps, so the learning rate '
             'does not reach its peak')


# ---------------------------------------------------------------------- speed

def synchronize(device):
    if device.type != 'cpu':
        torch.accelerator.synchronize(device)


def matmul_flops(device, dtype, seconds=0.3):
    """
    FLOP/s of a large square matrix product in this precision: the ceiling for MFU. Returns the best
    of the products done in `seconds`. On a CPU the clock counts only the time that this thread
    computes, which excludes most of the time that other processes take. Some systems count it in
    steps of 10 ms.
    """
    clock = time.thread_time if device.type == 'cpu' else time.perf_counter
    size = 8192 if device.type == 'cuda' else 2048
    a = torch.randn(size, size, device=device, dtype=dtype)
    a @ a  # the first product may take a second, because the library loads
    best, stop = 0.0, time.perf_counter() + seconds
    synchronize(device)
    start, n = clock(), 0
    while not best or time.perf_counter() < stop:
        a @ a
        synchronize(device)
        n, elapsed = n + 1, clock() - start
        if elapsed > 0:
            best = max(best, n * 2 * size ** 3 / elapsed)
            start, n = clock(), 0
    return best
