"""
What several test files share: a small corpus of real text, models trained on it for a few steps,
and functions that run a stage.
"""

import contextlib
import email
import functools
import io
import json
import math
import os
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import filelock
import numpy as np
import pytest
import torch

from lib import checkpoints, devices
from lib.answers import note
from lib.devices import Runtime
from lib.errors import UserError
from lib.generate import require_positions
from lib.tokenizers import format_ranks, get_tokenizer, tokenizer_state
from lib.tokens import Windows, write_corpus
from model import ModelConfig, Transformer, vector_of
from position import METHODS

ROOT = Path(__file__).resolve().parents[1]
torch.set_num_threads(1)  # on tensors this small, threads only wait for each other
TINY = dict(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_hidden=64, block_size=32)
SIZES = ' '.join(f'--{name}={value}' for name, value in TINY.items())


def stage(name, *arguments, ranks=1, status=0):
    """
    Run a stage of the project, `python NAME.py ARGUMENTS`, as a user does. Returns what it printed:
    (out, err).
    """
    launcher = []
    if ranks > 1:
        launcher = ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={ranks}']
    command = [sys.executable, *launcher, str(ROOT / f'{name}.py'), *map(str, arguments)]
    environment = os.environ | {'OMP_NUM_THREADS': '1', 'PYTHONUTF8': '1'}
    run = subprocess.run(command, capture_output=True, text=True, encoding='utf-8', env=environment)
    assert run.returncode == status, f'exit status {run.returncode}\n{run.stdout}\n{run.stderr}'
    return run.stdout, run.stderr


@contextlib.contextmanager
def as_stage(name, arguments):
    """
    Inside the `with` block, this process is like one that was started as a stage. Afterwards its
    arguments, excepthook, signal handlers and torch's modes are as before.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    note.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, 'argv', [f'{name}.py', *map(str, arguments)])
        patch.setattr(sys, 'excepthook', sys.excepthook)
        # The real function takes half a second to measure the machine.
        patch.setattr(devices, 'matmul_flops', lambda device, dtype: 1e12)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)  # setup() had set it
            for number, handler in handlers.items():
                signal.signal(number, handler)


def stage_here(name, *arguments):
    """Run a stage in this process: importing torch again takes seconds. Returns what it printed."""
    out = io.StringIO()
    with as_stage(name, arguments), contextlib.redirect_stdout(out):
        runpy.run_path(str(ROOT / f'{name}.py'), run_name='__main__')
    return out.getvalue()


def mistake(name, *arguments):
    """
    Run, in this process, a stage that must refuse its arguments with one line on stderr that begins
    with its name. Returns the line. An uncaught error is printed as Python would print it.
    """
    with as_stage(name, arguments), contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            runpy.run_path(str(ROOT / f'{name}.py'), run_name='__main__')
            pytest.fail(f'{name}.py {arguments} was not refused')
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
    begins = f'{Path(name).name}.py: '
    lines = [line for line in err.getvalue().splitlines() if line.startswith(begins)]
    assert len(lines) == 1 and 'Traceback' not in err.getvalue(), err.getvalue()
    return lines[0]


def refuses(named, call, *arguments, **options):
    """Fail unless a call raises a UserError whose message contains `named`."""
    with pytest.raises(UserError) as caught:
        call(*arguments, **options)
    assert named in str(caught.value)


def on(run, out_dir, command=''):
    """The arguments of a stage that reads last.pt of a run, as a list."""
    where = f'--init_from={run}/last.pt --out_dir={out_dir} --device=cpu --dtype=float32'
    return f'{where} {command}'.split()


def read(path):
    """The JSON in a file."""
    return json.loads(Path(path).read_text(encoding='utf-8'))


def flip_a_bit(path, place):
    """Flip one bit of the byte at a place of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << place % 8
    path.write_bytes(content)


@pytest.fixture(scope='session')
def corpus_dir(tmp_path_factory):
    """
    A data set folder with the source of Python's own packages email (train, val) and json (test),
    one document per module, as bytes.
    """
    folder = tmp_path_factory.mktemp('corpus') / 'bytes'
    train, test = ({path.name: path.read_text(encoding='utf-8')
                    for path in sorted(Path(package.__file__).parent.glob('*.py'))}
                   for package in (email, json))
    val = [train.pop(name) for name in ('message.py', 'header.py')]
    test = list(test.values())
    test.insert(1, 'import json\n')  # shorter than any window
    splits = {'train': train.values(), 'val': val, 'test': test}
    write_corpus(folder, get_tokenizer('bytes'), splits)
    return folder


@pytest.fixture(scope='session')
def other_tokenizer(tmp_path_factory):
    """A data set folder whose tokenizer, th.tiktoken, has bytes and one merge."""
    folder = tmp_path_factory.mktemp('merged')
    ranks = {bytes([byte]): byte for byte in range(256)} | {b'th': 256}
    (folder / 'th.tiktoken').write_text(format_ranks(ranks))
    splits = dict.fromkeys(('train', 'val', 'test'), ['the weather then ' * 400])
    write_corpus(folder / 'data', get_tokenizer(str(folder / 'th.tiktoken')), splits)
    return folder / 'data'


@pytest.fixture(scope='session')
def tiny_run(tmp_path_factory, corpus_dir):
    """
    out_dir of a run: 20 steps of a model of TINY's shape on corpus_dir. A test that writes works on
    a copy of last.pt.
    """
    out_dir = tmp_path_factory.mktemp('runs') / 'tiny'
    command = (f'{SIZES} --dataset={corpus_dir} --out_dir={out_dir} --max_iters=20 --batch_size=8 '
               '--micro_batch_size=8 --learning_rate=1e-2 --warmup_iters=5 --eval_windows=8 '
               '--device=cpu --dtype=float32 --compile=False')
    stage_here('train', *command.split())
    return out_dir


@pytest.fixture
def tiny(tiny_run):
    """(model, info) of the checkpoint of tiny_run."""
    return checkpoints.load_model('last', tiny_run, 'cpu')


@pytest.fixture(scope='session')
def windows(corpus_dir):
    """windows(n, T): n windows of the test split, (n, T + 1) ids."""
    def windows(n, T, *spacing):
        return torch.from_numpy(Windows(str(corpus_dir), 'test', T).evenly_spaced(n, *spacing))

    return windows


@pytest.fixture(scope='session')
def cpu():
    """One process on the CPU in float32."""
    return Runtime(torch.device('cpu'), torch.float32, rank=0, world_size=1)


@contextlib.contextmanager
def memory_at_most(n_bytes):
    """
    Inside the `with` block, the process can allocate n_bytes more. Without /proc there is no limit.
    """
    path = Path('/proc/self/statm')
    resource = pytest.importorskip('resource', reason='Windows cannot limit memory')
    before = resource.getrlimit(resource.RLIMIT_AS)
    if path.exists():
        used = int(path.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextlib.contextmanager
def files_at_most(n_bytes):
    """Inside the `with` block, no file can grow past n_bytes, as on a full disk."""
    import matplotlib.pyplot  # noqa: F401, because it writes a cache when first imported
    resource = pytest.importorskip('resource', reason='Windows cannot limit a file')
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def written_elsewhere(path):
    """Inside the `with` block, a file or folder is locked as if process 99 were writing to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f'{path}.lock', timeout=0) as lock:
        Path(lock.lock_file).write_text('process 99 on some machine')
        yield
        Path(lock.lock_file).unlink()


def random_model(seed=0, **changes):
    """
    A small Transformer in which no part is trivial: norms and head scales differ from 1, and q and
    k are so large that attention is far from uniform.
    """
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)  # some position methods start from it
    model = Transformer(ModelConfig(**{'vocab_size': 61, **TINY, **changes}))
    model.init_weights(generator).eval()
    for name, p in model.named_parameters():
        if name.endswith(('.beta', '.gamma')):
            continue  # log-beta starts at random numbers; larger ones would enlarge rounding errors
        if p.dim() == 1 or vector_of(name):
            p.data.uniform_(0.5, 1.5, generator=generator)
        elif name.endswith('.e'):
            p.data.normal_(std=0.3, generator=generator)
        elif name.endswith(('qkv.weight', 'out.weight', 'embed.weight')):
            p.data.mul_(3)
    return model


# A claim about every method is tested with these settings: each method, RoPE with its settings,
# layers with different methods, and DAPE on each kind of method, with wide and narrow kernels.
EVERY = [{'position': name} for name in METHODS] + [json.loads(row) for row in '''
{"position": "rope", "rope_scaling": "yarn:4"}
{"position": "rope", "rope_scaling": "dynamic_ntk:4"}
{"position": "rope", "rope_share": 0.5}
{"position": "rope,none", "rope_window": 10}
{"position": "none", "short_conv": 4}
{"position": "rope", "short_conv": 3, "short_conv_at": "A"}
{"position": "none,t5"}
{"position": "rope", "random_positions": 200}
{"position": "alibi,none", "random_positions": 200}
{"position": "rope,none", "rope_window": 10, "dape_kernel": 3}
{"position": "kerple", "dape_kernel": 3, "short_conv": 2, "short_conv_at": "C"}
{"position": "none", "dape_kernel": 5}
{"position": "ssmax", "dape_kernel": 1}
{"position": "adaptive", "dape_kernel": 3}
{"position": "sink", "dape_kernel": 3}
{"position": "rope", "dape_kernel": 1}
{"position": "kerple", "dape_kernel": 3, "dape_width": 8}
{"position": "fire", "dape_kernel": 1, "dape_residual": false}
{"position": "t5", "dape_kernel": 3, "dape_width": 8}
{"position": "xl", "dape_kernel": 3, "dape_width": 8}
'''.strip().splitlines()]


def tokens(*shape, seed=1):
    """Random ids for random_model()."""
    return torch.randint(61, shape, generator=torch.Generator().manual_seed(seed))


def losses_and_gradients(model, windows, forward=None):
    """
    The losses, and {name: gradient} of each parameter that has one. windows: (B, T + 1) ids;
    forward: called instead of the model, such as the compiled model.
    """
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)  # training draws random positions
    forward = model if forward is None else forward  # a compiled model has no truth value
    losses = forward(windows[:, :-1], windows[:, 1:])
    losses.mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return losses.detach(), gradients


def near(found, expected, atol=0, rtol=0):
    """
    Fail unless two tensors, arrays, lists of numbers, or dicts or tuples of tensors agree within
    the tolerance everywhere. Their dtypes may differ.
    """
    if not isinstance(expected, dict | tuple):
        found, expected = (x if torch.is_tensor(x) else torch.from_numpy(np.array(x, float))
                           for x in (found, expected))
    torch.testing.assert_close(found, expected, atol=atol, rtol=rtol, check_dtype=False)


def as_run(model, runtime, L=None, **more):
    """What a protocol of eval_ppl.py reads from a Run. more: its settings, and data or samples."""
    def windows(length):
        require_positions(model, length)
        return SimpleNamespace(data=more.get('data'),
                               evenly_spaced=lambda n, spacing: more['samples'])

    return SimpleNamespace(model=model, runtime=runtime, L=L or model.config.block_size,
                           windows=windows, settings=more,
                           compiled_for=functools.partial(devices.compiled_for, model, runtime,
                                                          True))


def plain_copy_loss(losses, same, weight):
    """The copy cache by its definition, of single numbers."""
    p = [(1 - weight) * math.exp(-loss) + weight * (1 if is_same else 0)
         for loss, is_same in zip(losses, same)]
    return sum(-math.log(each) for each in p) / len(p)


def damage(path, row):
    """
    Change one entry of a checkpoint. row: 'KEYS | VALUE', with the keys that lead to the entry, and
    its new value in JSON, or DROP to delete it.
    """
    keys, value = row.split(' | ')
    state = inside = torch.load(path, weights_only=True)
    *keys, last = [int(key) if key.isdigit() else key for key in keys.split()]
    for key in keys:
        inside = inside[key]
    if value == 'DROP':
        del inside[last]
    else:
        value = json.loads(value)
        is_tensor = isinstance(value, list) and keys[:1] == ['optimizer']
        inside[last] = torch.tensor(value) if is_tensor else value
    torch.save(state, path)


def save_model(model, path, step=0, settings=()):
    """Write a checkpoint of a model with the tokenizer `bytes`."""
    encoding = tokenizer_state(get_tokenizer('bytes'))
    state = checkpoints.checkpoint_state(model, encoding, step, model.state_dict(),
                                         settings=dict(settings))
    checkpoints.save(path, **state)


def scale_set(rows):
    """The vectors of a scale set, {parameter name: tensor}. rows: head scales of each layer."""
    rows = torch.tensor(rows, dtype=torch.float32)
    return {f'blocks.{layer}.attn.head_scale': row[:, None] for layer, row in enumerate(rows)}


# ---------------------------------------------------------------------- runs of train.py

# 12 steps of two micro-batches each, with a validation after every third step
RECIPE = (
    '--batch_size=4 --micro_batch_size=2 --max_iters=12 --lr_decay_iters=12 --eval_interval=3 '
    '--eval_windows=4 --log_interval=5 --keep_steps=[4] --learning_rate=1e-2 --min_lr=1e-3 '
    '--warmup_iters=4 --device=cpu --dtype=float32 --compile=False'
)


class Runs:
    """
    Runs of train.py in this process. Each run has its own out_dir in `folder`. The settings of a
    command come last, so they override RECIPE and SIZES.
    """

    def __init__(self, folder, dataset):
        self.folder, self.dataset = folder, dataset

    def arguments(self, name, command='', sizes=SIZES):
        where = f'--out_dir={self.folder}/{name} --dataset={self.dataset}'
        return f'{where} {RECIPE} {sizes} {command}'.split()

    def train(self, name, command='', sizes=SIZES):
        """Train to the end. Returns out_dir, and keeps what was printed in self.printed."""
        self.printed = stage_here('train', *self.arguments(name, command, sizes))
        return self.folder / name

    def resume(self, name, command=''):
        return self.train(name, f'--init_from=resume {command}')

    def refused(self, name, command=''):
        """The line with which train.py refuses to run. It must change no file."""
        before = contents(self.folder / name)
        line = mistake('train', *self.arguments(name, command))
        assert contents(self.folder / name) == before
        return line

    def copy(self, run, name):
        return Path(shutil.copytree(run, self.folder / name))


@pytest.fixture(scope='module')
def runs(tmp_path_factory, corpus_dir):
    return Runs(tmp_path_factory.mktemp('runs'), corpus_dir)


@pytest.fixture(scope='module')
def plain(runs):
    """out_dir of a run that was never stopped. A test that writes works on a copy."""
    return runs.train('plain')


def contents(folder):
    """{path in the folder: bytes} of every file in a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob('*')
            if path.is_file()}


def load(out_dir, name='last.pt'):
    return checkpoints.load(out_dir / name)


def log_rows(out_dir, key='loss'):
    """{step: value} of the rows of log.jsonl with this key. Fails if a step comes twice."""
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
    """Fail unless two runs have the same log.jsonl, last.pt and best.pt, to the last bit."""
    assert (one / 'log.jsonl').read_text() == (other / 'log.jsonl').read_text()
    for name in 'last.pt', 'best.pt':
        a, b = load(one, name), load(other, name)
        for key in 'model', 'optimizer':
            torch.testing.assert_close(a.pop(key, None), b.pop(key, None), rtol=0, atol=0)
        assert a | {'settings': None} == b | {'settings': None}
    assert not list(other.glob('*.part'))
