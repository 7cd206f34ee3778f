"""
What several test files need: a small real corpus, a model trained on it for a few steps, a way to
run a stage, and a second, slower implementation of the whole transformer.
"""

import contextlib
import email
import io
import json
import math
import os
import resource
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lib import devices
from lib.devices import Runtime
from lib.results import note
from lib.tokens import format_ranks, get_tokenizer, write_corpus
from model import ModelConfig, Transformer
from position import METHODS, Bias

ROOT = Path(__file__).resolve().parents[1]
torch.set_num_threads(1)  # on tensors this small, threads only wait for each other
TINY = dict(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_hidden=64, block_size=32)


def stage(name, *arguments, ranks=1, status=0):
    """
    Run a stage of the project, `python NAME.py ARGUMENTS`, as a user does. Returns what it printed:
    (out, err).
    """
    launcher = ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={ranks}'] if ranks > 1 else []
    run = subprocess.run([sys.executable, *launcher, str(ROOT / f'{name}.py'), *arguments], capture_output=True,
                         text=True, encoding='utf-8', env=os.environ | {'OMP_NUM_THREADS': '1', 'PYTHONUTF8': '1'})
    assert run.returncode == status, f'exit status {run.returncode}\n{run.stdout}\n{run.stderr}'
    return run.stdout, run.stderr


@contextlib.contextmanager
def as_stage(name, arguments):
    """
    This process as one that was started as a stage, and afterwards as it was before: its arguments,
    its excepthook, its signal handlers, torch's modes, and which notes were already printed.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    note.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, 'argv', [f'{name}.py', *arguments])
        patch.setattr(sys, 'excepthook', sys.excepthook)
        # To measure the machine's matmul takes half a second.
        patch.setattr(devices, 'matmul_flops', lambda *_: 1e12)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)  # setup() had set it
            for number, handler in handlers.items():
                signal.signal(number, handler)


def stage_here(name, *arguments):
    """
    Run a stage in this process, as importing torch again takes seconds. Returns what it printed.
    """
    out = io.StringIO()
    with as_stage(name, arguments), contextlib.redirect_stdout(out):
        runpy.run_path(str(ROOT / f'{name}.py'), run_name='__main__')
    return out.getvalue()


def mistake(name, *arguments):
    """
    Run a stage that should refuse its arguments, with nothing on stderr but one line that begins
    with its name. Returns the line. In this process; an uncaught error ends as Python would end it.
    """
    with as_stage(name, arguments), contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            runpy.run_path(str(ROOT / f'{name}.py'), run_name='__main__')
            pytest.fail(f'{name}.py {arguments} was not refused')
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
    lines = [line for line in err.getvalue().splitlines() if line.startswith(f'{name}.py: ')]
    assert len(lines) == 1 and 'Traceback' not in err.getvalue(), err.getvalue()
    return lines[0]


@pytest.fixture(scope='session')
def corpus_dir(tmp_path_factory):
    """
    A dataset folder: bytes of Python's own email (train, val) and json packages (test), one
    document a module.
    """
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
def other_tokenizer(tmp_path_factory):
    """A dataset folder whose tokenizer, th.tiktoken, has one merge more than bytes."""
    folder = tmp_path_factory.mktemp('merged')
    ranks = {bytes([byte]): byte for byte in range(256)} | {b'th': 256}
    (folder / 'th.tiktoken').write_text(format_ranks(ranks))
    splits = {split: ['the weather then ' * 400] for split in ('train', 'val', 'test')}
    write_corpus(folder / 'data', get_tokenizer(str(folder / 'th.tiktoken')), splits, workers=1)
    return folder / 'data'


@pytest.fixture(scope='session')
def tiny_run(tmp_path_factory, corpus_dir):
    """
    out_dir of a run: 20 steps of a model of TINY's shape on corpus_dir. A test that writes copies
    its last.pt.
    """
    out_dir = tmp_path_factory.mktemp('runs') / 'tiny'
    sizes = [f'--{name}={value}' for name, value in TINY.items()]
    stage_here('train', *sizes, f'--dataset={corpus_dir}', f'--out_dir={out_dir}', '--max_iters=20', '--batch_size=8',
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
    import matplotlib.pyplot  # noqa: F401, as it writes a cache when it is first imported
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def random_model(seed=0, **changes):
    """
    A small Transformer in which nothing is trivial: norms and head scales differ from 1, and q and
    k are large enough that attention is far from uniform.
    """
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)  # some position methods start from it
    model = Transformer(ModelConfig(**{'vocab_size': 61, **TINY, **changes})).init_weights(generator).eval()
    for name, p in model.named_parameters():
        if p.dim() == 1:
            p.data.uniform_(0.5, 1.5, generator=generator)
        elif name.endswith('position.e'):
            p.data.normal_(std=0.3, generator=generator)
        elif name.endswith(('qkv.weight', 'out.weight', 'embed.weight')):
            p.data.mul_(3)
    return model


def scale_set(rows):
    """
    The vectors of a scale set, {parameter name: tensor}, from a list of head scales per layer.
    """
    return {f'blocks.{i}.attn.head_scale': torch.tensor(row, dtype=torch.float32) for i, row in enumerate(rows)}


def plain_transformer(model, idx, head_scale=None):
    """
    The architecture written down a second time, in float64, one head at a time, with the whole
    matrix of scores. idx: (B, T) ids; head_scale: (n_layer, n_head), the model's own by default.
    Returns logits (B, T, V) and attention (n_layer, B, H, T, T).
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
        own = {name.removeprefix(f'blocks.{layer}.attn.').replace('position.method.', 'position.'): p
               for name, p in state.items()}
        q = [head_scale[layer, h] * turn(heads[h]) for h in range(c.n_head)]
        groups = [h * c.n_kv_head // c.n_head for h in range(c.n_head)]
        k, v = ([heads[c.n_head + i * c.n_kv_head + group] for group in groups] for i in (0, 1))
        scores = torch.stack([a @ turn(b).transpose(1, 2) / math.sqrt(D) for a, b in zip(q, k)], dim=1)  # (B, H, T, T)
        matrices = plain_position(c, own, scores, q, k)
        matrices = matrices + torch.full((T, T), -math.inf, dtype=torch.float64).triu(1)
        matrices = (matrices - matrices.amax(-1, keepdim=True)).exp()
        matrices = (matrices / matrices.sum(-1, keepdim=True)).unbind(1)
        outputs = [matrix @ v[h] * own['head_gain'][h] for h, matrix in enumerate(matrices)]
        attention.append(torch.stack(matrices, dim=1))
        x = x + torch.cat(outputs, dim=-1) @ state[f'blocks.{layer}.attn.out.weight'].T
        y = norm(x, f'blocks.{layer}.mlp_norm.weight') @ state[f'blocks.{layer}.mlp.gate_up.weight'].T
        gate, up = y[..., :c.n_hidden], y[..., c.n_hidden:]
        x = x + (gate / (1 + (-gate).exp()) * up) @ state[f'blocks.{layer}.mlp.out.weight'].T
    return norm(x, 'norm.weight') @ state['head.weight'].T, torch.stack(attention)


def plain_position(c, own, scores, q, k):
    """
    Scores (B, H, T, T) as a position method and DAPE change them, from the papers' formulas, a
    query and a key at a time where that is short. own: the attention's parameters in float64; q, k:
    a list of (B, T, D), one a head.
    """
    B, H, T, _ = scores.shape
    D, bias, L0 = q[0].shape[-1], torch.zeros(H, T, T, dtype=torch.float64), c.block_size // 2
    relu = torch.relu
    for i in range(T if issubclass(METHODS[c.position], Bias) else 0):
        for j in range(i + 1):
            d = i - j
            if c.position == 'alibi':  # 4 heads: slopes 1/4, 1/16, 1/64, 1/256
                bias[:, i, j] = -d * torch.tensor([4.0 ** -(h + 1) for h in range(H)])
            elif c.position == 'kerple':
                bias[:, i, j] = -own['position.p'] * torch.log(1 + own['position.a'] * d)
            elif c.position == 'fire':
                cut = max(i, abs(own['position.mu'].item() * L0))
                x = math.log(1 + own['position.c'] * d) / (math.log(1 + own['position.c'] * cut) + 1e-6)
                hidden = relu(own['position.f.0.weight'][:, 0] * x + own['position.f.0.bias'])
                bias[:, i, j] = own['position.f.2.weight'] @ hidden + own['position.f.2.bias']
            elif c.position == 't5':
                bucket = d if d < 16 else min(31, 16 + int(math.log(d / 16) / math.log(8) * 16))
                bias[:, i, j] = math.sqrt(D) * own['position.table'][bucket]
    if c.position == 'logn':
        scores = scores * (torch.arange(1, T + 1).double().log() / math.log(c.block_size))[:, None]
    if c.position == 'cope':
        more = torch.zeros_like(scores)
        for i in range(T):
            for j in range(i + 1):
                p = torch.sigmoid(scores[:, :, i, j:i + 1]).sum(-1).clamp(max=63)          # (B, H)
                at = torch.stack([head[:, i] @ own['position.e'].T for head in q], dim=1)   # (B, H, 64)
                low, high = (at.gather(-1, f(p).long()[..., None])[..., 0] for f in (torch.floor, torch.ceil))
                more[:, :, i, j] = low + (p - p.floor()) * (high - low)
        scores = scores + more
    if c.position == 'xl':
        C = H * D
        frequency = torch.tensor([10000 ** (-n / C) for n in range(0, C, 2)], dtype=torch.float64)
        for d in range(T):
            r = own['position.W.weight'] @ torch.cat(((d * frequency).sin(), (d * frequency).cos()))
            for h in range(H):
                for i in range(d, T):
                    by_place = (q[h][:, i] + own['position.v'][h]) @ r[h * D:(h + 1) * D]
                    scores[:, h, i, i - d] += (k[h][:, i - d] @ own['position.u'][h] + by_place) / math.sqrt(D)
    if not c.dape_kernel:
        return scores + bias
    maps = torch.cat((scores, bias.expand(scores.shape)), dim=1) if issubclass(METHODS[c.position], Bias) else scores
    w1, b1, w2, b2 = (own[f'position.{name}'] for name in ('first.weight', 'first.bias', 'second.weight', 'second.bias'))
    p, change = c.dape_kernel // 2, torch.zeros_like(scores)
    for i in range(T):
        row = torch.zeros(B, maps.shape[1], T + 4 * p, dtype=torch.float64)  # key j stands at j + 2 p, zeros around
        row[:, :, 2 * p:2 * p + i + 1] = maps[:, :, i, :i + 1]
        between = {}
        for j in range(i + 1 + p):  # the first convolution, at the keys that the second one asks for
            x = sum(row[:, :, 2 * p + j + o] @ w1[:, :, 0, o + p].T for o in range(-p, p + 1)) + b1
            between[j] = torch.where(x > 0, x, 0.01 * x)
        for j in range(i + 1):
            change[:, :, i, j] = b2 + sum(between[j + o] @ w2[:, :, 0, o + p].T for o in range(-p, p + 1) if j + o >= 0)
    return scores + change + bias * c.dape_residual


def plain_losses(model, tokens, head_scale=None):
    """
    -ln p of each token after the first, by plain_transformer. tokens: (B, T + 1) ids. Returns (B,
    T) float64.
    """
    logits, _ = plain_transformer(model, tokens[:, :-1], head_scale)
    log_p = logits - logits.logsumexp(-1, keepdim=True)
    return -log_p.gather(-1, tokens[:, 1:, None])[..., 0]
