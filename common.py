"""
What all stages share: device, precision and ranks; means over windows; checkpoints; JSON files.
"""

import contextlib
import ctypes
import dataclasses
import datetime
import hashlib
import json
import math
import os
import re
import shutil
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

from configurator import UserError

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from model import ModelConfig, vector_kind

# Sharp attention has weights below 1e-38, with which a CPU computes slowly unless it rounds them to
# 0: a tuning step took 7.5 s instead of 19 s. Threads inherit this when they start.
torch.set_flush_denormal(True)
DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}


# ---------------------------------------------------------------------- where a stage runs

@dataclass
class Runtime:
    """Where this process runs: its device, its precision and its place among the ranks."""
    device: torch.device
    dtype: torch.dtype   # of activations; in models that are only read, of matrices, too
    rank: int = 0
    world_size: int = 1
    is_main: bool = True  # the first rank: it prints and writes

    def autocast(self):
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def print(self, *args):
        if self.is_main:
            print(*args, flush=True)

    @torch.no_grad()
    def over_windows(self, windows, batch_tokens, measure, label=None):
        """
        Measure every window, in batches of at most batch_tokens tokens that the ranks share.
        windows: (n, T + 1) int64 ids. measure(inputs, targets) gets two (B, T) tensors and returns
        a tensor of B rows. Returns the rows of all windows in order, (n, ...) float64, on every
        rank. label: text of a progress bar. Raises UserError if a number is not finite.
        With 2 ranks and 5 windows in batches of 2, the first rank reads windows 0 2 and 4 1, the
        second 1 3 and 0 2; the last three only fill up the batches.
        """
        n, windows = len(windows), torch.as_tensor(windows)
        # Batches have one size, because each new size would be compiled, and all ranks have equally
        # many, because ranks that share a model (FSDP) run each pass together.
        most = max(1, batch_tokens // (windows.shape[1] - 1))
        n_batches = math.ceil(n / most / self.world_size)
        size = math.ceil(n / n_batches / self.world_size)
        # the windows of this rank: rank, rank + world_size ...; with % n it begins again at 0
        own = torch.arange(self.rank, n_batches * size * self.world_size, self.world_size) % n
        rows = []
        # disable: None shows the bar in a terminal only, True never
        for batch in tqdm(own.split(size), label, disable=None if label and self.is_main else True):
            batch = windows[batch].to(self.device)
            with self.autocast():
                rows.append(measure(batch[:, :-1], batch[:, 1:]).cpu().double().numpy())
        rows = np.concatenate(rows)                       # of this rank, (n_batches * size, ...)
        parts = [rows] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(parts, rows)
        rows = np.stack(parts, axis=1).reshape(-1, *rows.shape[1:])[:n]
        if not np.isfinite(rows).all():
            raise UserError('a measured number is not finite, so nothing was written. Did training '
                            'diverge, or is the checkpoint or scale file damaged?')
        return rows


def setup(device='auto', dtype='auto', seed=1337):
    """
    The Runtime of this process. device: auto, cpu, cuda, cuda:1, mps. dtype: float32, bfloat16,
    float16, or auto: bfloat16 where it is fast, else float16 on a GPU and float32 on a CPU.
    """
    rank, local_rank, world_size = 0, 0, 1
    if dist.is_torchelastic_launched():  # by torchrun; others may leave RANK in the environment
        names = 'RANK', 'LOCAL_RANK', 'WORLD_SIZE'
        rank, local_rank, world_size = (int(os.environ[name]) for name in names)
    if device == 'auto':
        device = torch.accelerator.current_accelerator(check_available=True) or 'cpu'
    device = torch.device(device)
    if device.type == 'cuda':
        device = torch.device('cuda', device.index or local_rank)
        torch.cuda.set_device(device)
        torch.backends.cudnn.allow_tf32 = False  # else DAPE's convolutions keep only 10 bits
    if device.type == 'cpu':
        prepare_cpu()
    if dtype == 'auto':
        dtype = 'float32'
        if device.type == 'cuda':
            is_fast = torch.cuda.is_bf16_supported(including_emulation=False)
            dtype = 'bfloat16' if is_fast else 'float16'
        elif device.type == 'cpu' and torch.cpu._is_amx_tile_supported():
            dtype = 'bfloat16'
    if world_size > 1:
        # Saving a large checkpoint may take longer than NCCL's 10 minutes.
        dist.init_process_group('nccl' if device.type == 'cuda' else 'gloo',
                                timeout=datetime.timedelta(hours=2))
    torch.manual_seed(seed)
    return Runtime(device, DTYPES[dtype], rank, world_size, rank == 0)


def prepare_cpu():
    """Make a CPU fast, and its runs repeatable bit for bit. Nothing here is about the model."""
    # Make the C library, if it is glibc, keep freed blocks of up to 1 GB for the next step,
    # instead of paying for their pages again: a step of the demo model took 64 ms, not 86 ms.
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL('libc.so.6').mallopt
        if mallopt(-3, 2 ** 30):   # M_MMAP_THRESHOLD; before version 2.35 at most 32 MB
            mallopt(-1, 2 ** 30)   # M_TRIM_THRESHOLD
    # Else the gradients of embeddings are summed in another order in each run. This function does
    # not load the compiler, as torch.use_deterministic_algorithms() would.
    torch.set_deterministic_debug_mode('error')
    torch.utils.deterministic.fill_uninitialized_memory = False


def can_compile(runtime, wanted):
    """
    True if torch.compile is wanted and can work here, and then sets it up. If it is wanted and
    cannot work, says what it lacks.
    """
    if not wanted or runtime.device.type == 'mps':  # torch.compile for mps is too new
        return False
    compiler = os.environ.get('CXX', {'darwin': 'clang++', 'win32': 'cl'}.get(sys.platform, 'g++'))
    header = Path(sysconfig.get_paths()['include'], 'Python.h')
    if not shutil.which(compiler) or not header.exists():
        runtime.print(f'torch.compile needs {compiler} and {header} (Debian, Ubuntu: apt-get '
                      'install g++ python3-dev); going on uncompiled, which is slower.')
        return False
    torch._dynamo.config.recompile_limit = 64  # shapes; beyond it a call would run uncompiled
    return True


# ---------------------------------------------------------------------- checkpoints

def weights_digest(weights, dtype=torch.float32):
    """
    SHA-256 of a state dict: over the name, the shape and up to 4,096 evenly spaced values of each
    weight matrix. Small vectors (head scales, norms) are left out, so that a scale file still fits
    the checkpoint after they are tuned. dtype: what values are rounded to first.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        if weight.dim() >= 2 and not vector_kind(name):
            n = weight.numel()
            places = torch.linspace(0, n - 1, min(n, 4096), dtype=torch.float64).long()
            values = weight.flatten()[places.to(weight.device)].to(dtype).float().cpu().numpy()
            digest.update(f'{name} {tuple(weight.shape)}'.encode() + values.tobytes())
    return digest.hexdigest()


def save_checkpoint(path, model_weights, config, **state):
    """Write a checkpoint whole or not at all: a kill or a full disk leaves the file before it."""
    state |= {'model': model_weights, 'model_config': dataclasses.asdict(config),
              'digest': weights_digest(model_weights)}
    part = Path(f'{path}.part')
    with open(part, 'wb') as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def read_checkpoint(path):
    """The entries of a checkpoint, tensors mapped if possible; `model_config` as a ModelConfig."""
    if not Path(path).is_file():
        raise UserError(f'{path} does not exist. Train that model first, by train.py and its '
                        'config, or name another model.')
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip():  # torch.load() does not compare the checksums
                raise ValueError('a checksum is wrong')
        # Windows replaces no file that is mapped, as last.pt would be when a resumed run saves
        state = torch.load(path, 'cpu', weights_only=True, mmap=sys.platform != 'win32')
        return state | {'model_config': model_config(state['model_config']), 'path': str(path)}
    except Exception as error:  # errors of zip and unpickling share no class
        raise UserError(f'{path} is damaged, cut short or of another program '
                        f'({type(error).__name__}). Take another checkpoint.') from error


def read_model(path, position=None, dtype=torch.float32):
    """
    What read_checkpoint() returns, of a checkpoint file, a run's folder, a Hugging Face folder,
    hf:ORG/NAME or a .gguf file. position, dtype: see convert.read().
    """
    if Path(path, 'last.pt').is_file():
        path = f'{path}/last.pt'
    if path.startswith('hf:') or path.endswith('.gguf') or Path(path).is_dir():
        from extras import convert
        return convert.read(path, position, dtype)
    return read_checkpoint(path)


def model_config(values):
    """A ModelConfig of {setting: value}, from settings or from a checkpoint, also an older one."""
    known = {one.name for one in dataclasses.fields(ModelConfig)}
    # A setting that is gone is dropped if it was off or had this value, which changed nothing; with
    # any other value ModelConfig() refuses it.
    unchanged = {'short_conv_at': 'AC', 'rope_share': 1.0}
    values = {name: value for name, value in values.items()
              if name in known or (value and value != unchanged.get(name))}
    try:
        return ModelConfig(**values)
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from error


def load_weights(model, weights, path, **options):
    """
    Load a checkpoint's weights. A small vector of attention that it lacks, such as a head gain or a
    sink, keeps its first value.
    """
    missing, unknown = model.load_state_dict(weights, strict=False, **options)
    wrong = [name for name in missing if vector_kind(name) in (None, 'norm')] + unknown
    if wrong:
        raise UserError(f'{path} does not fit a model with position {model.config.position}: '
                        f'only one of them has {wrong[0]}.')


# ---------------------------------------------------------------------- JSON files

def save_json(path, data):
    """
    Write JSON that a person can read, each list of numbers on one line; whole or not at all. data
    may hold arrays and tensors. Python's JSON has NaN, which other programs may not read.
    """
    text = json.dumps(data, indent=1, default=lambda array: array.tolist())  # of numpy or torch
    # indent puts each number of a list on a line of its own: join them
    text = re.sub(r'\[\n([^][{}"]*)\]', lambda found: f"[{' '.join(found[1].split())}]", text)
    part = Path(f'{path}.part')
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_text(text + '\n', encoding='utf-8')
    part.replace(path)
