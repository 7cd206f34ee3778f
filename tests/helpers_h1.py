"""
What tests of stages need until conftest.py speaks of the new layout: a model trained for a
few steps, and ways to run a stage.
"""

import contextlib
import io
import os
import resource
import runpy
import subprocess
import sys
from email import message
from pathlib import Path

import pytest
import torch

from lib.checkpoints import checkpoint_state, save
from lib.devices import Runtime
from lib.errors import ROOT
from lib.tokens import get_tokenizer, tokenizer_state
from model import ModelConfig, Transformer

torch.set_num_threads(1)  # on tensors this small, threads only wait for each other
TINY = dict(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_hidden=64, block_size=32)


def stage(name, *arguments, ranks=1):
    """Run `python NAME.py ARGUMENTS` as a user does, on some ranks. Returns what it printed."""
    launcher = []
    if ranks > 1:
        launcher = ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={ranks}']
    command = [sys.executable, *launcher, str(ROOT / f'{name}.py'), *arguments]
    environment = os.environ | {'OMP_NUM_THREADS': '1', 'PYTHONUTF8': '1'}
    run = subprocess.run(command, capture_output=True, text=True, encoding='utf-8', env=environment)
    assert run.returncode == 0, f'exit status {run.returncode}\n{run.stdout}\n{run.stderr}'
    return run.stdout


def here(name, *arguments):
    """The same in this process, as importing torch again takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, 'argv', [f'{name}.py', *map(str, arguments)])
        patch.setattr(sys, 'excepthook', sys.excepthook)
        try:
            runpy.run_path(str(ROOT / f'{name}.py'), run_name='__main__')
        finally:
            torch.use_deterministic_algorithms(False)  # lib.devices.setup() had set it


def mistake(name, *arguments):
    """The one line that a stage refuses its arguments with."""
    with contextlib.redirect_stderr(io.StringIO()) as err:
        with pytest.raises(Exception) as caught:
            here(name, *arguments)
        from lib.errors import report
        report(caught.type, caught.value, caught.tb)
    line = err.getvalue()
    assert len(line.splitlines()) == 1, line
    return line.partition(': ')[2].strip()


@pytest.fixture(scope='session')
def tiny_run(tmp_path_factory):
    """out_dir of a model of TINY's shape after 20 steps on the bytes of a Python module."""
    encoding = get_tokenizer('bytes')
    text = Path(message.__file__).read_text(encoding='utf-8')
    ids = torch.tensor(encoding.encode_ordinary(text)[:20 * 8 * 33]).view(20, 8, 33)
    model = Transformer(ModelConfig(vocab_size=257, **TINY))
    model.init_weights(torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in ids:
        optimizer.zero_grad()
        model(batch[:, :-1], batch[:, 1:]).mean().backward()
        optimizer.step()
    out_dir = tmp_path_factory.mktemp('runs') / 'tiny'
    out_dir.mkdir()
    state = checkpoint_state(model, tokenizer_state(encoding), 20, settings={})
    save(out_dir / 'last.pt', **state)
    return out_dir


@pytest.fixture(scope='session')
def cpu():
    """One process on the CPU in float32."""
    return Runtime(torch.device('cpu'), torch.float32)


@contextlib.contextmanager
def files_at_most(n_bytes):
    """No file can grow past n_bytes here, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def random_model(seed=0, **changes):
    """A small Transformer whose attention is far from uniform and whose vectors are not 1."""
    generator = torch.Generator().manual_seed(seed)
    config = ModelConfig(**{'vocab_size': 61, **TINY, **changes})
    model = Transformer(config).init_weights(generator).eval()
    for name, p in model.named_parameters():
        if p.dim() == 1:
            p.data.uniform_(0.5, 1.5, generator=generator)
        elif name.endswith(('qkv.weight', 'out.weight', 'embed.weight')):
            p.data.mul_(3)
    return model
