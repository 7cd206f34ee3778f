"""
Every stage as an NVIDIA GPU would run it, traced without a GPU. Fake tensors have a shape, a type,
strides and a device, but no numbers. PyTorch's CUDA build checks each operation on them and says
what would come out. Models have the widths of the 1.1B config and two layers, because layers are
alike. Numbers, times and Triton's kernels are not tested here. The backward pass is traced on
`meta` tensors, because that of CUDA tensors needs a driver.

$ python3 -m venv cuda
$ cuda/bin/pip install torch==2.12.0 pytest numpy tiktoken datasets matplotlib
$ cuda/bin/python -m pytest tests/test_cuda_traces.py
"""

import contextlib

import numpy as np
import pytest
import torch
from conftest import EVERY, as_run
from fake_gpu import KERNELS, attention_by, fake_gpu
from torch.utils._python_dispatch import TorchDispatchMode

import tune_scale
from configurator import run_config
from eval_ppl import score_windows
from lib.checkpoints import cast_matrices
from lib.devices import Runtime
from lib.generate import Decoding, complete, generate
from lib.losses import loss_and_entropy
from model import ModelConfig, Transformer

if not torch.version.cuda:
    pytest.skip("needs PyTorch's CUDA build, see this file's docstring; no GPU",
                allow_module_level=True)

CONFIG = run_config('config/nope_1b.py')
SIZES = {name: CONFIG[name] for name in ('n_head', 'n_kv_head', 'n_embd', 'n_hidden', 'block_size')}
SIZES |= {'n_layer': 2, 'vocab_size': 32000}
GPU = torch.device('cuda', 0)


def made_up(x):
    """What the host reads of a fake tensor: zeros."""
    return np.zeros(tuple(x.shape), float if x.is_floating_point() else int)


@pytest.fixture(params=KERNELS)
def kernel(request, changes):
    """A kernel of attention; all but one are skipped with a method that calls none."""
    with torch.device('meta'):
        blocks = Transformer(ModelConfig(**SIZES | changes)).blocks
    own = blocks[0].attn.position.overrides - {'bias', 'mask'}
    if own and request.param != 'math':
        pytest.skip('this method has its own softmax')
    return request.param


@pytest.fixture
def fake(kernel, monkeypatch):
    """A GPU that is not there, whose attention goes by the kernel."""
    for name, read in (('numpy', made_up), ('tolist', lambda x: made_up(x).tolist()),
                       ('item', lambda x: made_up(x).item()),
                       ('__bool__', lambda x: True)):  # all logits are finite
        monkeypatch.setattr(torch.Tensor, name, read)
    torch.compiler.reset()
    with fake_gpu(kernel):
        yield


class NothingFromTheHost(TorchDispatchMode):
    """
    While it is open no tensor of more than one number may be copied to the GPU: it would wait for
    the copy.
    """

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        copies = operation in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        source = args[-1 if operation is torch.ops.aten.copy_.default else 0] if copies else None
        if copies and result.device.type == 'cuda' and source.device.type == 'cpu':
            raise AssertionError(f'{tuple(source.shape)} is copied to the GPU')
        return result


def gpu_model(dtype=torch.bfloat16, device=GPU, **changes):
    with torch.device(device):
        model = Transformer(ModelConfig(**SIZES | changes)).init_weights()
    for module in model.modules():  # .to() cannot move a model of fake tensors
        for name, x in module.named_buffers(recurse=False):
            setattr(module, name, x.to(device))
    return cast_matrices(model, dtype), Runtime(torch.device(device), dtype)


def ids(*shape, device=GPU):
    return torch.zeros(shape, dtype=torch.long, device=device)


def check(x, shape, dtype, device='cuda'):
    """Laid out as fresh memory, of this shape and type, on the GPU."""
    assert (tuple(x.shape), x.dtype, x.device.type) == (shape, dtype, device)
    assert x.is_contiguous()


HOW = pytest.mark.parametrize('how', ['plain', 'compiled'])


def as_called(model, how):
    """The model, compiled or not, and what must hold while it is called as it is."""
    if how == 'plain':
        return model, NothingFromTheHost()
    return torch.compile(model, backend='eager', dynamic=False), contextlib.nullcontext()


# Random positions are drawn from as many as the longest pass here has.
every = pytest.mark.parametrize('changes', [
    changes | ({'random_positions': 8192} if 'random_positions' in changes else {})
    for changes in EVERY], ids=str)


# ---------------------------------------------------------------------- training and tuning

@HOW
@every
def test_training(fake, changes, how):
    model, runtime = gpu_model(torch.float32, **changes)
    model.checkpoint_activations, runtime.dtype = True, torch.bfloat16
    (called, alone), x = as_called(model, how), ids(2, 2048)
    with runtime.autocast(), alone:
        losses = called(x, x)
    check(losses, (2, 2048), torch.float32)
    assert losses.requires_grad


@HOW
@every
def test_head_scale_tuning(fake, changes, how):
    model, runtime = gpu_model(**changes)
    model.requires_grad_(False).checkpoint_activations = True
    for p in tune_scale.vectors_of(model, ['scale', 'out', 'norm']).values():
        p.requires_grad_(True)
    (called, alone), x = as_called(model, how), ids(1, 8192)
    with runtime.autocast(), alone:
        loss = tune_scale.objective(called, x, x)
    check(loss, (), torch.float32)
    assert loss.requires_grad


@every
def test_backward_on_meta_tensors(kernel, changes):
    model, _ = gpu_model(torch.float32, 'meta', **changes)
    model.bfloat16()  # as autocast knows no `meta`
    x = ids(2, 2048, device='meta')
    with attention_by(kernel):
        model(x, x).mean().backward()
    for p in model.parameters():
        if p.requires_grad:
            check(p.grad, tuple(p.shape), torch.bfloat16, 'meta')


# ---------------------------------------------------------------------- evaluation

@HOW
@every
@torch.no_grad()
def test_sliding_windows(fake, changes, how):
    model, runtime = gpu_model(**changes)
    windows = [(start, start + 4096, 256) for start in range(0, 1024, 256)]
    seen = []
    model.norm.register_forward_hook(lambda norm, inputs, x: seen.append(x))
    called, _ = as_called(model, how)
    run = as_run(called, runtime, model.config.block_size, batch_tokens=8192)
    sums = score_windows(run, np.zeros(8192, np.uint16), windows)
    assert sums.shape == (4,)
    check(seen[0], (2, 257, 2048), torch.float32)


@every
def test_entropy(fake, changes):
    model, runtime = gpu_model(torch.float32, **changes)
    loss, heads = loss_and_entropy(model, np.zeros((2, 4097), np.int64), 128, 8192, runtime)
    assert loss.shape == (4096,) and heads.shape == (2, 32, 32)


@pytest.mark.parametrize('n_beams', [1, 3])
@pytest.mark.parametrize('lengths', [(300, 300), (300, 17)], ids=['equal', 'unequal'])
@every
def test_completions(fake, changes, lengths, n_beams):
    model, runtime = gpu_model(**changes)
    logits = []
    model.head.register_forward_hook(lambda head, inputs, y: logits.append(y))
    with runtime.autocast():
        found = complete(model, [[1] * n for n in lengths], 4,
                         Decoding(cache_dtype=torch.bfloat16, beams=n_beams))
    assert [len(new) for new in found] == [4, 4]
    rows = 1 if model.needs_equal_lengths and lengths[0] != lengths[1] else 2
    check(logits[0], (rows, 32000), torch.bfloat16)
    check(logits[1], (rows * n_beams, 1, 32000), torch.bfloat16)


@every
def test_sampling_one_prompt(fake, changes):
    model, runtime = gpu_model(**changes)
    with runtime.autocast():
        how = Decoding(cache_dtype=torch.bfloat16, temperature=1.0, top_k=50, top_p=0.9)
        new = generate(model, [1] * 30, 3, how)
        assert len(list(new)) == 3
