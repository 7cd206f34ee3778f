"""
What several test files need: a small real corpus, a model trained on it for a few steps, a way to run a stage, and
a second, slower implementation of the whole transformer.
"""

import contextlib
import email
import io
import json
import math
import os
import resource
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from corpus import get_tokenizer, write_corpus
from model import ModelConfig, Transformer
from runtime import Runtime, new_figure

ROOT = Path(__file__).resolve().parents[1]
torch.set_num_threads(1)  # on tensors this small, threads only wait for each other
TINY = dict(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_hidden=64, block_size=32)


def stage(name, *arguments, ranks=1, status=0):
    """Run a stage of the project, `python NAME.py ARGUMENTS`, as a user does. Returns what it printed: (out, err)."""
    launcher = ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={ranks}'] if ranks > 1 else []
    run = subprocess.run([sys.executable, *launcher, str(ROOT / f'{name}.py'), *arguments], capture_output=True,
                         text=True, encoding='utf-8', env=os.environ | {'OMP_NUM_THREADS': '1', 'PYTHONUTF8': '1'})
    assert run.returncode == status, f'exit status {run.returncode}\n{run.stdout}\n{run.stderr}'
    return run.stdout, run.stderr


def mistake(name, *arguments):
    """
    Run a stage that should refuse its arguments, with exit status 1 and nothing on stderr but one line. Returns it.
    In this process, as importing torch again takes seconds; what ends an uncaught error is called as Python does.
    """
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as err:
        patch.setattr(sys, 'argv', [f'{name}.py', *arguments])
        patch.setattr(sys, 'excepthook', sys.excepthook)
        try:
            runpy.run_path(str(ROOT / f'{name}.py'), run_name='__main__')
            pytest.fail(f'{name}.py {arguments} was not refused')
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            torch.use_deterministic_algorithms(False)  # runtime.setup() had set it
    line = err.getvalue()
    assert len(line.splitlines()) == 1 and line.startswith(f'{name}.py: '), line
    return line.strip()


@pytest.fixture(scope='session')
def corpus_dir(tmp_path_factory):
    """A dataset folder: bytes of Python's own email (train, val) and json packages (test), one document a module."""
    folder = tmp_path_factory.mktemp('corpus') / 'bytes'
    package = Path(email.__file__).parent
    held_out = [package / 'message.py', package / 'header.py']
    texts = {'train': [path for path in sorted(package.glob('*.py')) if path not in held_out], 'val': held_out,
             'test': sorted(Path(json.__file__).parent.glob('*.py'))}
    documents = {split: [path.read_text(encoding='utf-8') for path in paths] for split, paths in texts.items()}
    documents['test'].insert(1, 'import json\n')  # shorter than any window
    write_corpus(folder, get_tokenizer('bytes'), documents, workers=1)
    return folder


@pytest.fixture(scope='session')
def tiny_run(tmp_path_factory, corpus_dir):
    """out_dir of a run: 20 steps of a model of TINY's shape on corpus_dir. A test that writes copies its last.pt."""
    out_dir = tmp_path_factory.mktemp('runs') / 'tiny'
    sizes = [f'--{name}={value}' for name, value in TINY.items()]
    stage('train', *sizes, f'--dataset={corpus_dir}', f'--out_dir={out_dir}', '--max_iters=20', '--batch_size=8',
          '--micro_batch_size=8', '--learning_rate=1e-2', '--warmup_iters=5', '--eval_windows=8', '--device=cpu',
          '--dtype=float32', '--compile=False')
    return out_dir


@pytest.fixture(scope='session')
def cpu():
    """One process on the CPU in float32."""
    return Runtime(torch.device('cpu'), torch.float32, rank=0, world_size=1)


@contextlib.contextmanager
def files_at_most(n_bytes):
    """No file can grow past n_bytes here, as on a full disk; pytest's own output either."""
    new_figure()  # matplotlib writes a cache when it is first imported: before the limit
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def random_model(seed=0, **changes):
    """
    A small Transformer in which nothing is trivial: norms and head scales differ from 1, and q and k are large enough
    that attention is far from uniform.
    """
    generator = torch.Generator().manual_seed(seed)
    model = Transformer(ModelConfig(**{'vocab_size': 61, **TINY, **changes})).init_weights(generator).eval()
    for name, p in model.named_parameters():
        if p.dim() == 1:
            p.data.uniform_(0.5, 1.5, generator=generator)
        elif name.endswith(('qkv.weight', 'out.weight', 'embed.weight')):
            p.data.mul_(3)
    return model


def scale_set(rows):
    """The vectors of a scale set, {parameter name: tensor}, from a list of head scales per layer."""
    return {f'blocks.{i}.attn.head_scale': torch.tensor(row, dtype=torch.float32) for i, row in enumerate(rows)}


def plain_transformer(model, idx, head_scale=None):
    """
    The architecture written down a second time, in float64, one head at a time, with the whole matrix of scores.
    idx: (B, T) ids; head_scale: (n_layer, n_head), the model's own by default. Returns logits (B, T, V) and attention
    (n_layer, B, H, T, T).
    """
    c, state = model.config, {name: weight.detach().double() for name, weight in model.state_dict().items()}
    head_scale = torch.as_tensor(model.head_scale if head_scale is None else head_scale, dtype=torch.float64)
    D, T = c.n_embd // c.n_head, idx.shape[1]

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + c.norm_eps).sqrt() * state[name]

    def turn(x):  # as complex numbers x[k] + i x[k + D/2], each times e^(i angle)
        if c.position != 'rope':
            return x
        angle = torch.arange(T, dtype=torch.float64)[:, None] / c.rope_base ** (torch.arange(D // 2) * 2 / D).double()
        turned = torch.complex(x[..., :D // 2], x[..., D // 2:]) * torch.exp(1j * angle)
        return torch.cat((turned.real, turned.imag), dim=-1)

    x, attention = state['embed.weight'][idx], []
    for layer in range(c.n_layer):
        y = norm(x, f'blocks.{layer}.attn_norm.weight') @ state[f'blocks.{layer}.attn.qkv.weight'].T
        heads = [y[..., i * D:(i + 1) * D] for i in range(c.n_head + 2 * c.n_kv_head)]
        outputs, matrices = [], []
        for h in range(c.n_head):
            group = h * c.n_kv_head // c.n_head
            q, k, v = heads[h], heads[c.n_head + group], heads[c.n_head + c.n_kv_head + group]
            scores = head_scale[layer, h] * turn(q) @ turn(k).transpose(1, 2) / math.sqrt(D)
            if c.position == 'alibi':  # 4 heads: slopes 1/4, 1/16, 1/64, 1/256
                scores = scores - 4.0 ** -(h + 1) * (torch.arange(T)[:, None] - torch.arange(T)).double()
            if c.position == 'logn':
                scores = scores * (torch.arange(1, T + 1).double().log() / math.log(c.block_size))[:, None]
            scores = scores + torch.full((T, T), -math.inf, dtype=torch.float64).triu(1)
            matrices.append((scores - scores.amax(-1, keepdim=True)).exp())
            matrices[-1] = matrices[-1] / matrices[-1].sum(-1, keepdim=True)
            outputs.append(matrices[-1] @ v * state[f'blocks.{layer}.attn.head_gain'][h])
        attention.append(torch.stack(matrices, dim=1))
        x = x + torch.cat(outputs, dim=-1) @ state[f'blocks.{layer}.attn.out.weight'].T
        y = norm(x, f'blocks.{layer}.mlp_norm.weight') @ state[f'blocks.{layer}.mlp.gate_up.weight'].T
        gate, up = y[..., :c.n_hidden], y[..., c.n_hidden:]
        x = x + (gate / (1 + (-gate).exp()) * up) @ state[f'blocks.{layer}.mlp.out.weight'].T
    return norm(x, 'norm.weight') @ state['head.weight'].T, torch.stack(attention)


def plain_losses(model, tokens, head_scale=None):
    """-ln p of each token after the first, by plain_transformer. tokens: (B, T + 1) ids. Returns (B, T) float64."""
    logits, _ = plain_transformer(model, tokens[:, :-1], head_scale)
    log_p = logits - logits.logsumexp(-1, keepdim=True)
    return -log_p.gather(-1, tokens[:, 1:, None])[..., 0]
