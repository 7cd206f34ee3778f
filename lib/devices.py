"""Where a stage runs: device, precision, ranks, and what is compiled or sharded there."""

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

from lib.errors import UserError
from lib.results import progress_bar

# Reading windows of one length is compiled from this many FLOP on: on a CPU, on a GPU. Compiling
# took 33 to 101 s on a CPU and saved 7% of the time, so it pays where reading takes half an hour.
# The GPU's number is a guess.
WORTH_COMPILING = 2 ** 48, 2 ** 55
# By sys.platform: the C++ compiler that torch.compile calls if CXX is not set, and how to get it.
COMPILERS = {
    'linux': ('g++', 'Debian, Ubuntu: apt-get install g++'),
    'darwin': ('clang++', 'xcode-select --install'),
    'win32': ('cl', "Visual Studio's Build Tools; start from their Developer Command Prompt")}
DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}


@dataclass
class Runtime:
    """Where this process runs: its device, its precision and its place among the ranks."""
    device: torch.device
    dtype: torch.dtype   # of activations; head scales and what is trained stay float32
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
        """This rank's share of a list of work: every world_size-th item."""
        return items[self.rank::self.world_size]

    def gather(self, rows, n, finite=True):
        """
        Put rows computed for shard(range(n)) back in order. Returns (n, ...) float64, the same on
        every rank, so that sums over it do not depend on the number of ranks. finite: raise
        UserError where a number is infinite or NaN, before a result is made of it.
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
                            'damaged? Take another --init_from=, --scale= or --dtype=.')
        return rows

    @torch.no_grad()
    def over_windows(self, windows, batch_tokens, measure, label=None, finite=True):
        """
        Measure every window, in batches of at most batch_tokens tokens, split over the ranks.
        windows: (n, T + 1) int64 ids; measure(inputs, targets), each (B, T), returns an array or
        tensor of B rows. Returns the rows of all windows in order, (n, ...) float64, on every rank;
        for finite see gather().
        """
        n, windows, rows = len(windows), self.shard(torch.as_tensor(windows)), []
        most = max(1, batch_tokens // (windows.shape[1] - 1))
        size = math.ceil(len(windows) / max(1, math.ceil(len(windows) / most))) or 1
        with progress_bar(len(windows), label, self.is_main and label is not None) as bar:
            for first in range(0, len(windows), size):
                # The last batch is filled up with the first windows: a batch of another size would
                # be compiled again.
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
        """The end of a stage: every rank waits here, because one may still send to another."""
        self.wait_for_all()
        if self.world_size > 1:
            dist.destroy_process_group()


def has_bfloat16(device):
    """
    True where bfloat16 is faster than float32 on every processor of that kind: on a GPU with
    bfloat16 in hardware, on a CPU with AMX. With AVX-512's bfloat16 and no AMX, one processor that
    we measured did twice as many products a second as in float32, another half as many.
    """
    if device.type == 'cuda':
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == 'cpu' and torch.cpu._is_amx_tile_supported()


def choose_device(device, world_size):
    """The torch.device of a --device= setting. Raises UserError for one that is not here."""
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
    Choose the device, the precision and, under torchrun, this process's rank. Returns a Runtime.
    device: 'auto', 'cpu', 'cuda', 'cuda:1', 'mps'. dtype: a key of DTYPES, or 'auto', which is
    bfloat16 where has_bfloat16(), else float16 on a GPU and float32 on a CPU or mps.
    """
    rank, world_size = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
    device = choose_device(device, world_size)
    # Sharp attention has weights below 1e-38, with which a CPU reckons slowly unless it takes them
    # for 0: a tuning step of the 5M model at scale 2.2 took 19 s and takes 7.5. First of all, as
    # the threads of a pool take this over when they are made.
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

    if device.type == 'cuda':
        torch.cuda.set_device(device.index or 0)
    if world_size > 1 and not dist.is_initialized():
        # Saving a large checkpoint may take longer than NCCL's 10 minutes.
        backend = 'nccl' if device.type == 'cuda' else 'gloo'
        dist.init_process_group(backend, timeout=datetime.timedelta(hours=2))
    if world_size > 1:
        chosen = [dtype]
        dist.broadcast_object_list(chosen)  # the first rank's, because machines may differ
        dtype = chosen[0]
    torch.manual_seed(seed)
    if device.type == 'cpu':
        keep_freed_memory()
        # Compiled embedding gradients are otherwise summed in another order in each run. New
        # tensors are not filled, which would cost a pass over each. use_deterministic_algorithms()
        # would load the compiler, a second of every start; can_compile() calls it.
        torch.set_deterministic_debug_mode('error')
        torch.utils.deterministic.fill_uninitialized_memory = False
    # TF32 would round the products of entropies and score maps to 10-bit mantissas. Off, it slows
    # down no half precision. PyTorch's newer switch, fp32_precision, cannot be mixed with this one.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    return Runtime(device, DTYPES[dtype], rank, world_size)


def keep_freed_memory(largest=2 ** 30):
    """
    Have the C library keep freed blocks of up to `largest` bytes for the next step, where it is
    glibc. By default it hands large ones back to the system, and every training step pays for their
    pages again: 86 to 64 ms in one trial of the demo model. The price is a heap with holes, up to
    three times as large as what it holds.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL('libc.so.6').mallopt
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, in bytes
            mallopt(option, largest)


# ---------------------------------------------------------------------- compile and shard

def can_compile(runtime, enabled):
    """True where torch.compile was asked for and can be done; if not, one line says why."""
    if not enabled or runtime.device.type == 'mps':  # torch.compile for mps is young
        return False
    compiler, source = COMPILERS.get(sys.platform, COMPILERS['linux'])
    compiler, missing = os.environ.get('CXX', compiler), None
    if not shutil.which(compiler):
        missing = f'the C++ compiler {compiler} ({source})'
    elif not Path(sysconfig.get_paths()['include'], 'Python.h').exists():
        missing = 'Python.h (Debian, Ubuntu: apt-get install python3-dev)'
    if missing:  # a GPU's kernels need both, too
        runtime.print(f'torch.compile needs {missing}; going on uncompiled, which is slower.')
        return False
    if runtime.device.type == 'cpu':
        torch.use_deterministic_algorithms(True)
    # Of lengths or models: beyond this limit a call would silently go uncompiled.
    torch._dynamo.config.recompile_limit = 64
    return True


def compiled(model, runtime, enabled):
    """torch.compile(model), once per shape, or the model as it is where that cannot be done."""
    return torch.compile(model, dynamic=False) if can_compile(runtime, enabled) else model


def compiled_for(model, runtime, enabled, n, length):
    """The model, compiled where n windows of `length` tokens are enough work for that to pay."""
    if not hasattr(model, 'flops_per_token') or model.scale_sets:
        return model  # of transformers, or one whose vectors are exchanged before each pass
    flops = n * length * sum(model.flops_per_token(length))
    pays = flops > WORTH_COMPILING[runtime.device.type == 'cuda']
    return compiled(model, runtime, enabled and pays)


def sharded(model, runtime, compile):
    """
    Split weights, gradients and optimizer state over the ranks (FSDP): a block's weights are whole
    only while it runs. They stay float32, head scales too; autocast lowers the products. Blocks are
    compiled one by one.
    """
    from torch.distributed.fsdp import fully_shard  # here, as it takes a second to import
    if {'t5', 'fire'} & set(model.config.position.split(',')):
        raise UserError(f'fsdp cannot split position {model.config.position}: PyTorch shards '
                        'neither a table that all layers share nor a single number. Leave out '
                        '--fsdp=True.')
    # Nobody changes the losses in place, which this warns of.
    warnings.filterwarnings('ignore', message='.*returned a view tensor')
    mesh = dist.init_device_mesh(runtime.device.type, (runtime.world_size,))
    by_blocks = can_compile(runtime, compile)
    for block in model.blocks:
        if by_blocks:
            block.compile(dynamic=False)
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def unsharded(state):
    """A state dict whose sharded tensors the first rank puts together in CPU memory. Call it on
    every rank."""
    def whole(value):
        if not hasattr(value, 'full_tensor'):  # a plain tensor or a number
            return value
        tensor = value.full_tensor()  # all ranks take part; the others need not keep it
        return tensor.cpu() if dist.get_rank() == 0 else None

    return tree_map(whole, state)


def load_sharded(optimizer, state):
    """
    Give an optimizer the moments of a saved one, whole tensors; its parameters may be sharded.
    Rates and the like stay its own. Raises ValueError for moments of other shapes, with which a
    fused optimizer would write where no weight is.
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
                moments[name] = x.clone()  # or the file, which is mapped, stays in use
    own = optimizer.state_dict()['param_groups']
    optimizer.load_state_dict(state | {'param_groups': own})


def learning_rate_at(step, peak, floor, warmup, decay):
    """Linear warm-up, then a cosine from peak to floor that ends at step `decay`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    share = min(1.0, (step - warmup) / max(1, decay - warmup))
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * share))


# ---------------------------------------------------------------------- speed

def synchronize(device):
    if device.type != 'cpu':
        torch.accelerator.synchronize(device)


def matmul_flops(device, dtype, seconds=0.3):
    """
    FLOP/s of a large square matrix product in this precision, the best of those done in so many
    seconds: the ceiling that MFU is measured by. On a CPU by the time that this thread computes,
    which leaves out most of what other processes take; some systems count it in steps of 10 ms.
    """
    clock = time.thread_time if device.type == 'cpu' else time.perf_counter
    size = 8192 if device.type == 'cuda' else 2048
    a = torch.randn(size, size, device=device, dtype=dtype)
    a @ a  # the first may take a second, while the library loads
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
