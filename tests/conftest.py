"""
What several test files need: a small real corpus, models trained on it for a few steps, ways to
run a stage, and a second, slower implementation of the whole transformer.
"""

import contextlib
import copy
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
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import filelock
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lib import checkpoints, devices
from lib.answers import note
from lib.devices import Runtime
from lib.errors import UserError
from lib.generate import require_positions
from lib.tokenizers import format_ranks, get_tokenizer, tokenizer_state
from lib.tokens import Windows, write_corpus
from model import ModelConfig, Transformer, vector_of
from position import METHODS, Place, random_places

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
    This process as one that was started as a stage, and afterwards as it was before: its arguments,
    its excepthook, its signal handlers, torch's modes, and which notes were already printed.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    note.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, 'argv', [f'{name}.py', *map(str, arguments)])
        patch.setattr(sys, 'excepthook', sys.excepthook)
        # To measure the machine's matmul takes half a second.
        patch.setattr(devices, 'matmul_flops', lambda device, dtype: 1e12)
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
    begins = f'{Path(name).name}.py: '
    lines = [line for line in err.getvalue().splitlines() if line.startswith(begins)]
    assert len(lines) == 1 and 'Traceback' not in err.getvalue(), err.getvalue()
    return lines[0]


def refuses(named, call, *arguments, **options):
    """Raise AssertionError unless a call raises a UserError that names this."""
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
    """Turn over a bit of the byte at a place of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << place % 8
    path.write_bytes(content)


@pytest.fixture(scope='session')
def corpus_dir(tmp_path_factory):
    """
    A dataset folder: bytes of Python's own email (train, val) and json packages (test), one
    document a module.
    """
    folder = tmp_path_factory.mktemp('corpus') / 'bytes'
    train, test = ({path.name: path.read_text(encoding='utf-8')
                    for path in sorted(Path(package.__file__).parent.glob('*.py'))}
                   for package in (email, json))
    val = [train.pop(name) for name in ('message.py', 'header.py')]
    first, *others = test.values()
    test = [first, 'import json\n', *others]  # the second is shorter than any window
    write_corpus(folder, get_tokenizer('bytes'), {'train': train.values(), 'val': val,
                                                  'test': test})
    return folder


@pytest.fixture(scope='session')
def other_tokenizer(tmp_path_factory):
    """A dataset folder whose tokenizer, th.tiktoken, has one merge more than bytes."""
    folder = tmp_path_factory.mktemp('merged')
    ranks = {bytes([byte]): byte for byte in range(256)} | {b'th': 256}
    (folder / 'th.tiktoken').write_text(format_ranks(ranks))
    splits = dict.fromkeys(('train', 'val', 'test'), ['the weather then ' * 400])
    write_corpus(folder / 'data', get_tokenizer(str(folder / 'th.tiktoken')), splits)
    return folder / 'data'


@pytest.fixture(scope='session')
def tiny_run(tmp_path_factory, corpus_dir):
    """
    out_dir of a run: 20 steps of a model of TINY's shape on corpus_dir. A test that writes copies
    its last.pt.
    """
    out_dir = tmp_path_factory.mktemp('runs') / 'tiny'
    command = (f'{SIZES} --dataset={corpus_dir} --out_dir={out_dir} --max_iters=20 --batch_size=8 '
               '--micro_batch_size=8 --learning_rate=1e-2 --warmup_iters=5 --eval_windows=8 '
               '--device=cpu --dtype=float32 --compile=False')
    stage_here('train', *command.split())
    return out_dir


@pytest.fixture
def tiny(tiny_run):
    """The model of tiny_run, and what its checkpoint says."""
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
def files_at_most(n_bytes):
    """No file can grow past n_bytes here, as on a full disk; pytest's own output either."""
    import matplotlib.pyplot  # noqa: F401, as it writes a cache when it is first imported
    resource = pytest.importorskip('resource', reason='Windows cannot limit a file')
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def written_elsewhere(path):
    """As if process 99 were writing to a file or folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f'{path}.lock', timeout=0) as lock:
        Path(lock.lock_file).write_text('process 99 on some machine')
        yield
        Path(lock.lock_file).unlink()


class Server(BaseHTTPRequestHandler):
    """What serves requests to this machine; a subclass has do_GET(), which answers."""

    def answer(self, code, body=b'', *headers):
        self.send_response(code)
        for header in (*headers, ('Content-Length', str(len(body)))):
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

    @classmethod
    @contextlib.contextmanager
    def running(cls):
        """Serve while this is open. Gives the address."""
        with ThreadingHTTPServer(('127.0.0.1', 0), cls) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield f'http://127.0.0.1:{server.server_port}'
            server.shutdown()


def random_model(seed=0, **changes):
    """
    A small Transformer in which nothing is trivial: norms and head scales differ from 1, and q and
    k are large enough that attention is far from uniform.
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


# What a claim about every method is tested with: each method, RoPE with its settings, layers of
# several methods, and DAPE on top of each kind of method, with wide and narrow kernels.
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
    The losses, and {name: gradient} of all that has one. windows: (B, T + 1) ids; forward: the
    model compiled, say.
    """
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)  # random positions are drawn anew in training
    forward = model if forward is None else forward  # a compiled model has no truth value
    losses = forward(windows[:, :-1], windows[:, 1:])
    losses.mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return losses.detach(), gradients


def near(found, expected, atol=0, rtol=0):
    """
    Raise AssertionError unless two tensors, arrays, lists of numbers, or dicts or tuples of
    tensors differ by at most so much anywhere, whatever their precision.
    """
    if not isinstance(expected, dict | tuple):
        found, expected = (x if torch.is_tensor(x) else torch.from_numpy(np.array(x, float))
                           for x in (found, expected))
    torch.testing.assert_close(found, expected, atol=atol, rtol=rtol, check_dtype=False)


def as_run(model, runtime, L=None, **more):
    """What a protocol of eval_ppl.py takes of a Run. more: its settings, and data or samples."""
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
    Change a checkpoint as a row says: the keys of an entry, and its new value as JSON; DROP leaves
    the entry out.
    """
    keys, value = row.split(' | ')
    state = inside = torch.load(path, weights_only=True)
    *keys, last = [int(key) if key.isdigit() else key for key in keys.split()]
    for key in keys:
        inside = inside[key]
    inside[last] = None if value == 'DROP' else json.loads(value)
    if value == 'DROP':
        del inside[last]
    elif isinstance(inside[last], list) and keys[:1] == ['optimizer']:
        inside[last] = torch.tensor(inside[last])
    torch.save(state, path)


def save_model(model, path, step=0, settings=()):
    """Write a checkpoint of a model that reads bytes."""
    encoding = tokenizer_state(get_tokenizer('bytes'))
    state = checkpoints.checkpoint_state(model, encoding, step, settings=dict(settings))
    checkpoints.save(path, **state)


def scale_set(rows):
    """
    The vectors of a scale set, {parameter name: tensor}, from a list of head scales per layer.
    """
    rows = torch.tensor(rows, dtype=torch.float32)
    return {f'blocks.{layer}.attn.head_scale': row[:, None] for layer, row in enumerate(rows)}


def plain_transformer(model, idx, head_scale=None):
    """
    The architecture written down a second time, in float64, with the whole matrix of scores. idx:
    (B, T) ids; head_scale: (n_layer, n_head), the model's own by default. Returns logits (B, T, V)
    and attention (n_layer, B, H, T, T).
    """
    c = model.config
    state = {name: weight.detach().double() for name, weight in model.state_dict().items()}
    if head_scale is None:
        head_scale = model.head_scale
    head_scale = torch.as_tensor(head_scale, dtype=torch.float64)

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + c.norm_eps).sqrt() * state[name]

    i = torch.arange(idx.shape[1])
    places = [Place(i, i, len(i))] * c.n_layer
    if c.random_positions:
        places = random_places(places[0], model.draws)
    x, attention = state['embed.weight'][idx], []
    for layer in range(c.n_layer):
        block = f'blocks.{layer}'
        own = {name.removeprefix(f'{block}.attn.').replace('position.method.', 'position.'): p
               for name, p in state.items()}
        names, of_layer = c.position.split(','), copy.copy(c)
        of_layer.position = names[layer % len(names)]
        of_layer.positions = places[layer].i.double()
        y = plain_conv(norm(x, f'{block}.attn_norm.weight'), state.get(f'{block}.attn_conv.w'))
        y, matrices = plain_attention(of_layer, own, y, head_scale[layer])
        attention.append(matrices)
        x = x + y
        y = plain_conv(norm(x, f'{block}.mlp_norm.weight'), state.get(f'{block}.mlp_conv.w'))
        y = y @ state[f'{block}.mlp.gate_up.weight'].T
        gate, up = y.chunk(2, dim=-1)
        x = x + (gate / (1 + (-gate).exp()) * up) @ state[f'{block}.mlp.out.weight'].T
    return norm(x, 'norm.weight') @ state['head.weight'].T, torch.stack(attention)


def plain_conv(x, w):
    """y_t = x_t + sum_tau w_tau x_(t - tau), token by token. x: (B, T, C); w: (taps, C) or None."""
    if w is None:
        return x
    y = x.clone()
    for t in range(x.shape[1]):
        for tau in range(min(len(w), t + 1)):
            y[:, t] += w[tau] * x[:, t - tau]
    return y


def plain_attention(c, own, x, head_scale):
    """
    One layer's attention. c: the config, with the layer's own method and the tokens' positions;
    own: its parameters in float64; x: (B, T, C), normed. Returns (B, T, C) and the matrices of
    weights (B, H, T, T).
    """
    H, K, D = c.n_head, c.n_kv_head, c.n_embd // c.n_head
    y = (x @ own['qkv.weight'].T).unflatten(-1, (-1, D)).transpose(1, 2)
    q, k, v = y.split([H, K, K], dim=1)
    shared = [h * K // H for h in range(H)]  # which key head serves a query head
    q, k, v = head_scale.view(H, 1, -1) * plain_turn(c, q), k[:, shared], v[:, shared]

    scores = q @ plain_turn(c, k).mT / math.sqrt(D)
    scores = plain_position(c, own, scores, q, k).masked_fill(plain_hidden(c), -math.inf)
    sink = own['position.sink'].exp()[:, None] if c.position == 'sink' else 0
    weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + sink)
    y = weights @ v * own['head_gain'][:, None]
    return y.transpose(1, 2).flatten(2) @ own['out.weight'].T, weights


def plain_hidden(c):
    """Which keys a query does not see, (T, T)."""
    i = torch.arange(len(c.positions))
    window, sinks = c.rope_window if c.position == 'rope' and c.rope_window else len(i), 0
    if c.position == 'window':
        window, sinks = c.block_size, 4
    return (i > i[:, None]) | (i <= i[:, None] - window) & (i >= sinks)


def plain_entropy(model, idx, head_scale=None):
    """Of each query's attention to the keys, in nats: (n_layer, B, H, T) float64."""
    p = plain_transformer(model, idx, head_scale)[1]
    p = p / p.sum(-1, keepdim=True)
    return -(p * p.clamp(min=1e-300).log()).sum(-1)  # torch's entr() has no gradient at 0


def plain_turn(c, x):
    """RoPE in complex numbers: x[n] + i x[n + D/2], each times e^(i angle)."""
    if c.position != 'rope':
        return x
    D = x.shape[-1]
    frequency = c.rope_base ** -(torch.arange(0, D, 2).double() / D)
    frequency[round(c.rope_share * D / 2):] = 0
    turned = torch.complex(*x.chunk(2, -1)) * torch.exp(1j * c.positions[:, None] * frequency)
    return torch.cat((turned.real, turned.imag), dim=-1)


# ---------------------------------------------------------------------- plain position methods
# From the papers' formulas. A new method needs an entry in PLAIN_BIASES, PLAIN_FACTORS or
# PLAIN_SCORES.

def plain_kerple(c, own, d):
    p, a = (own[f'position.{name}'][:, None, None] for name in 'pa')
    return -p * (1 + a * d).log()


def plain_fire(c, own, d):
    slope, L0 = own['position.c'], c.block_size // 2
    longest = c.positions.clamp(min=abs(own['position.mu'].item()) * L0)[:, None]
    x = (1 + slope * d).log() / ((1 + slope * longest).log() + 1e-6)
    hidden = torch.relu(x[..., None] * own['position.f.0.weight'][:, 0] + own['position.f.0.bias'])
    return (hidden @ own['position.f.2.weight'].T + own['position.f.2.bias']).movedim(-1, 0)


def plain_t5(c, own, d):
    wide = 16 + ((d / 16).log() / math.log(8) * 16).floor()
    bucket = torch.where(d < 16, d, wide.clamp(max=31)).long()
    return math.sqrt(c.n_embd / c.n_head) * own['position.table'][bucket].movedim(-1, 0)


def plain_logbeta(c, own, n):
    beta, gamma = own['position.beta'][:, None], own['position.gamma'][:, None]
    return 1 + beta * (n + 1).log() ** gamma


def plain_adaptive(c, own, scores, q, k):
    a = scores.masked_fill(plain_hidden(c), -math.inf).softmax(-1)
    H = torch.special.entr(a).sum(-1, keepdim=True)
    P = -0.037 * H ** 4 + 0.481 * H ** 3 - 2.3 * H ** 2 + 4.917 * H - 1.791
    return scores * torch.where(H > 0.5, P.clamp(min=1), 1)


def plain_cope(c, own, scores, q, k):
    changed, at_count = scores.clone(), q @ own['position.e'].T
    gates = scores.sigmoid().tril()
    for j in range(scores.shape[-1]):
        count = gates[..., j:].sum(-1).clamp(max=63)  # from key j to the query's own, (B, H, T)
        low = at_count.gather(-1, count.floor().long()[..., None])[..., 0]
        high = at_count.gather(-1, count.ceil().long()[..., None])[..., 0]
        changed[..., j] += low + (count - count.floor()) * (high - low)
    return changed


def plain_xl(c, own, scores, q, k):
    C, D, T = c.n_embd, c.n_embd // c.n_head, scores.shape[-1]
    i = torch.arange(T)
    angle = i[:, None] * torch.tensor([10000 ** (-n / C) for n in range(0, C, 2)])
    r = torch.cat((angle.sin(), angle.cos()), dim=-1).double() @ own['position.W.weight'].T
    r = r.unflatten(-1, (-1, D))[(i[:, None] - i).clamp(min=0)]  # (T, T, H, D)
    by_place = torch.einsum('bhid,ijhd->bhij', q + own['position.v'][:, None], r)
    by_key = torch.einsum('bhjd,hd->bhj', k, own['position.u'])[:, :, None]
    return scores + (by_place + by_key) / math.sqrt(D)


# Of the distances d, (T, T), a bias (H, T, T). ALiBi's and NAPE's slopes are those of 4 heads.
PLAIN_BIASES = {
    'alibi': lambda c, own, d: -d * 4.0 ** -torch.arange(1, 5)[:, None, None],
    'nape': lambda c, own, d: -d * torch.tensor([1, 1 / 2, 0, 0])[:, None, None],
    'nape_ssmax': lambda c, own, d: -d * torch.tensor([1, 1 / 2, 0, 0])[:, None, None],
    'kerple': plain_kerple,
    'fire': plain_fire,
    't5': plain_t5,
}

# Of the number n of keys that a query sees, (T,), what its scores are multiplied by.
PLAIN_FACTORS = {
    'none': lambda c, own, n: n ** 0,
    'rope': lambda c, own, n: n ** 0,  # plain_turn() has turned q and k already
    'logn': lambda c, own, n: n.log() / math.log(c.block_size),
    'ssmax': lambda c, own, n: own['position.s'][:, None] * n.log(),
    'logbeta': plain_logbeta,
    'llama4': lambda c, own, n: 1 + 0.1 * (1 + n // c.block_size).log(),
    'window': lambda c, own, n: n ** 0,  # plain_hidden() has its mask
    'sink': lambda c, own, n: n ** 0,    # plain_attention() has its denominator
    'nape_ssmax': lambda c, own, n: torch.cat((n.expand(2, -1) ** 0,
                                               own['position.s'][:, None] * n.log())),
}

# the scores (B, H, T, T), changed
PLAIN_SCORES = {'adaptive': plain_adaptive, 'cope': plain_cope, 'xl': plain_xl}


def plain_position(c, own, scores, q, k):
    """
    Scores (B, H, T, T) as a position method and DAPE change them. own: the attention's parameters
    in float64; q, k: (B, H, T, D).
    """
    bias, maps = 0, scores
    if c.position in PLAIN_FACTORS:
        n_keys = torch.arange(1, scores.shape[-1] + 1).double()
        maps = scores = scores * PLAIN_FACTORS[c.position](c, own, n_keys)[..., None]
    if c.position in PLAIN_BIASES:
        distances = (c.positions[:, None] - c.positions).clamp(min=0)
        bias = PLAIN_BIASES[c.position](c, own, distances)
        maps = torch.cat((scores, bias.expand(scores.shape)), dim=1)
    if c.position in PLAIN_SCORES:
        maps = scores = PLAIN_SCORES[c.position](c, own, scores, q, k)
    if c.dape_kernel:
        scores = scores + plain_dape(c, own, maps.masked_fill(plain_hidden(c), 0))
    return scores + bias if c.dape_residual or not c.dape_kernel else scores


def plain_dape(c, own, maps):
    """DAPE's two convolutions over the keys that a query sees. maps: (B, H or 2H, T, T)."""
    w1, w2 = (own[f'position.{name}.weight'][:, :, 0] for name in ('first', 'second'))
    b1, b2 = (own[f'position.{name}.bias'] for name in ('first', 'second'))
    p, change = c.dape_kernel // 2, torch.zeros_like(maps[:, :c.n_head])
    for i in range(maps.shape[-1]):
        row = F.pad(maps[:, :, i, :i + 1], (p, 2 * p))
        between = F.leaky_relu(F.conv1d(row, w1, b1), 0.01)  # of key 0 to key i + p
        change[:, :, i, :i + 1] = F.conv1d(F.pad(between, (p, 0)), w2, b2)
    return change


def plain_losses(model, tokens, head_scale=None):
    """
    -ln p of each token after the first, by plain_transformer. tokens: (B, T + 1) ids. Returns (B,
    T) float64.
    """
    logits, _ = plain_transformer(model, tokens[:, :-1], head_scale)
    log_p = logits - logits.logsumexp(-1, keepdim=True)
    return -log_p.gather(-1, tokens[:, 1:, None])[..., 0]


def plain_cut(model, tokens, T, tail, head_scale=None):
    """
    The loss of the `tail` targets up to position T, (B, tail), each block of L / 8 read from the L
    tokens before its end. tokens: (B, T + 1) ids or more.
    """
    L, blocks = model.config.trained_length, []
    for end in range(T - tail + L // 8, T + 1, L // 8):
        piece = tokens[:, max(0, end - L):end + 1]
        blocks.append(plain_losses(model, piece, head_scale)[:, -L // 8:])
    return torch.cat(blocks, dim=1)


# ---------------------------------------------------------------------- runs of train.py

# 12 steps of two micro-batches each, validated at every third
RECIPE = (
    '--batch_size=4 --micro_batch_size=2 --max_iters=12 --lr_decay_iters=12 --eval_interval=3 '
    '--eval_windows=4 --log_interval=5 --keep_steps=[4] --learning_rate=1e-2 --min_lr=1e-3 '
    '--warmup_iters=4 --device=cpu --dtype=float32 --compile=False'
)


class Runs:
    """
    Runs of train.py in this process, each in an out_dir of its own in `folder`. What a command
    sets, it sets last, and so over RECIPE and SIZES.
    """

    def __init__(self, folder, dataset):
        self.folder, self.dataset = folder, dataset

    def arguments(self, name, command='', sizes=SIZES):
        where = f'--out_dir={self.folder}/{name} --dataset={self.dataset}'
        return f'{where} {RECIPE} {sizes} {command}'.split()

    def train(self, name, command='', sizes=SIZES):
        """Train to the end. Returns out_dir; what was printed is then in self.printed."""
        self.printed = stage_here('train', *self.arguments(name, command, sizes))
        return self.folder / name

    def resume(self, name, command=''):
        return self.train(name, f'--init_from=resume {command}')

    def refused(self, name, command=''):
        """The line that refuses a run, which must change no file."""
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
    """A run that was never stopped. A test that writes takes a copy."""
    return runs.train('plain')


def contents(folder):
    """{path in it: bytes} of every file in a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob('*')
            if path.is_file()}


def load(out_dir, name='last.pt'):
    return checkpoints.load(out_dir / name)


def log_rows(out_dir, key='loss'):
    """{step: value} of the rows of log.jsonl that have the key; no step may be there twice."""
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
    """Two runs, to the last bit: every logged number, and what last.pt and best.pt hold."""
    assert (one / 'log.jsonl').read_text() == (other / 'log.jsonl').read_text()
    for name in 'last.pt', 'best.pt':
        a, b = load(one, name), load(other, name)
        for key in 'model', 'optimizer':
            torch.testing.assert_close(a.pop(key, None), b.pop(key, None), rtol=0, atol=0)
        assert a | {'settings': None} == b | {'settings': None}
    assert not list(other.glob('*.part'))
