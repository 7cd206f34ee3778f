"""
What the test files share: a small text, a model trained on it for a few steps, random models, and
functions that run a stage.
"""

import contextlib
import email
import io
import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

from configurator import ROOT

import numpy as np
import pytest
import torch

import position_more  # noqa: F401, adds its methods to METHODS
from common import Runtime, save_checkpoint
from data import Windows
from model import ModelConfig, Transformer, vector_kind
from position import METHODS
from stage import open_model
from tokenizer import get_tokenizer, tokenizer_state, write_dataset

torch.set_num_threads(1)  # on tensors this small, threads only wait for each other
TINY = dict(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_hidden=64, block_size=32)
SIZES = [f'--{name}={value}' for name, value in TINY.items()]


# ---------------------------------------------------------------------- stages

def stage(name, *arguments, ranks=0):
    """
    Run a stage, such as train, extras.che or data.stdlib.prepare, as a user does. Returns what it
    printed. ranks: 0: in this process, because importing torch again takes seconds; 1: in a new
    process; more: by torchrun.
    """
    path, arguments = ROOT / f"{name.replace('.', '/')}.py", list(map(str, arguments))
    if ranks:
        launcher = ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={ranks}']
        program = ['-m', name] if name.startswith('extras.') else [str(path)]
        command = [sys.executable, *(launcher if ranks > 1 else []), *program, *arguments]
        run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600,
                             env=os.environ | {'OMP_NUM_THREADS': '1'})
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), process_state():
        patch.setattr(sys, 'argv', [str(path), *arguments])
        runpy.run_path(str(path), run_name='__main__')
    return out.getvalue()


@contextlib.contextmanager
def process_state():
    """Take back what setup() and train.py change in this process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def same_process_state():
    torch.manual_seed(0)  # for tests that draw
    with process_state():
        yield


def mistake(name, *arguments):
    """The one line with which a stage, in this process, refuses its arguments."""
    with pytest.raises(SystemExit) as caught:
        stage(name, *arguments)
    line = caught.value.code
    assert isinstance(line, str) and len(line.splitlines()) == 1, line
    return line


def on(run, out_dir, command=''):
    """The arguments of a stage that reads last.pt of a run, as a list."""
    where = f'--init_from={run}/last.pt --out_dir={out_dir} --device=cpu --dtype=float32 '
    return (where + command).split()


def read(path):
    """The JSON in a file."""
    return json.loads(Path(path).read_text())


# ---------------------------------------------------------------------- a text and a run

@pytest.fixture(scope='session')
def corpus_dir(tmp_path_factory):
    """
    A data set with the sources of Python's own packages email (train, val) and json (test), one
    document per module, as bytes.
    """
    folder = tmp_path_factory.mktemp('corpus') / 'bytes'
    train, test = ([path.read_text(encoding='utf-8')
                    for path in sorted(Path(package.__file__).parent.glob('*.py'))]
                   for package in (email, json))
    test.insert(1, 'import json\n')  # shorter than any window
    splits = {'train': train[2:], 'val': train[:2], 'test': test}
    write_dataset(folder, get_tokenizer('bytes'), splits)
    return folder


@pytest.fixture(scope='session')
def tiny_run(tmp_path_factory, corpus_dir):
    """out_dir of a run: 20 steps of a model of TINY's shape on corpus_dir. Tests only read it."""
    out_dir = tmp_path_factory.mktemp('runs') / 'tiny'
    stage('train', *SIZES, f'--dataset={corpus_dir}', f'--out_dir={out_dir}', *(
        '--max_iters=20 --batch_size=8 --micro_batch_size=8 --learning_rate=1e-2 --warmup_iters=5 '
        '--eval_windows=8 --device=cpu --dtype=float32 --compile=False').split())
    return out_dir


@pytest.fixture(scope='session')
def cpu():
    """One process on the CPU in float32."""
    return Runtime(torch.device('cpu'), torch.float32)


@pytest.fixture
def tiny(tiny_run, cpu):
    """(model, info) of the last checkpoint of tiny_run."""
    return open_model('last', tiny_run, cpu)


@pytest.fixture(scope='session')
def windows(corpus_dir):
    """windows(n, T): n windows of the test split, (n, T + 1) ids."""
    return lambda n, T: torch.from_numpy(Windows(str(corpus_dir), 'test', T).evenly_spaced(n))


# ---------------------------------------------------------------------- random models

# A claim about every method is tested with these settings: each method, also with convolutions and
# DAPE, RoPE with its settings, and layers with different methods.
CONV_DAPE = {'short_conv': 3, 'dape_kernel': 3, 'dape_width': 8}
EVERY = [{'position': name, **more} for name in METHODS for more in ({}, CONV_DAPE)] + [
    *({'position': 'rope', 'rope_scaling': f'{name}:4'}
      for name in ('pi', 'ntk', 'dynamic_ntk', 'yarn')),
    {'position': 'rope,none', 'dape_kernel': 1},
    {'position': 'none,t5,t5', 'n_layer': 3, 'short_conv': 2},
    {'position': 'rope_random', 'dape_kernel': 5},
    {'position': 'fire', 'dape_kernel': 1, 'dape_residual': False},
    {'position': 'none', 'tied': True}]


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
        if p.dim() == 1 or vector_kind(name):
            p.data.uniform_(0.5, 1.5, generator=generator)
        elif name.endswith('.e'):
            p.data.normal_(std=0.3, generator=generator)
        elif name.endswith(('qkv.weight', 'out.weight', 'embed.weight')):
            p.data.mul_(3)
    return model


def tokens(*shape, seed=1):
    """Random ids for random_model()."""
    return torch.randint(61, shape, generator=torch.Generator().manual_seed(seed))


def save_model(model, path, step=0, **settings):
    """Write a checkpoint of a model with the tokenizer `bytes`."""
    encoding = tokenizer_state(get_tokenizer('bytes'))
    save_checkpoint(path, model.state_dict(), model.config, tokenizer=encoding, step=step,
                    settings=settings)


def losses_and_gradients(model, windows, forward=None):
    """
    The losses, and {name: gradient} of each parameter that has one. windows: (B, T + 1) ids;
    forward: called instead of the model, such as the compiled model.
    """
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)  # RandomRoPE draws
    losses = (model if forward is None else forward)(windows[:, :-1], windows[:, 1:])
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
