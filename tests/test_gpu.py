"""
A GPU against the CPU: losses, gradients, entropies and completions of every position method, and
compiled training steps. Skipped where there is no GPU.

$ python -m pytest -m '' tests/test_gpu.py
"""

import copy

import pytest
import torch
from conftest import EVERY, losses_and_gradients, near, random_model, tokens

import kernels
from kernels import attention_entropy
from lib.devices import setup
from lib.generate import Decoding, complete

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs an NVIDIA GPU')
every = pytest.mark.parametrize('changes', EVERY, ids=str)


@pytest.fixture(scope='module')
def gpu():
    return setup('cuda', 'float32').device


def on_both(changes, device):
    """The same model on the CPU and on a GPU."""
    model = random_model(**changes)
    return model, copy.deepcopy(model).to(device)


@every
@pytest.mark.parametrize('how', ['plain', 'in many chunks', 'checkpointed', 'compiled'])
def test_losses_and_gradients_are_those_of_the_cpu(monkeypatch, gpu, changes, how):
    if how == 'in many chunks':
        monkeypatch.setattr(kernels, 'SCORES_AT_ONCE', 300)
    model, on_gpu = on_both(changes, gpu)
    on_gpu.checkpoint_activations = how == 'checkpointed'
    windows, forward = tokens(2, 141), on_gpu
    if how == 'compiled':
        torch.compiler.reset()
        forward = torch.compile(on_gpu, dynamic=False).__call__
    losses, gradients = losses_and_gradients(model, windows)
    found, found_gradients = losses_and_gradients(on_gpu, windows.to(gpu), forward)
    near(found.cpu(), losses, atol=1e-3)
    for name, gradient in gradients.items():
        near(found_gradients[name].cpu(), gradient, rtol=1e-2, atol=1e-4)
    with torch.autocast('cuda', torch.bfloat16):
        found, _ = losses_and_gradients(on_gpu, windows.to(gpu), forward)
    near(found.mean().cpu(), losses.mean(), atol=0.05)


@pytest.mark.parametrize('has_bias', [False, True])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_grouped_queries_need_no_whole_matrix(gpu, dtype, has_bias):
    T, i = 2048, torch.arange(2048, device=gpu)
    q, k, v = (torch.randn(2, n_head, T, 64, device=gpu, dtype=dtype) for n_head in (32, 4, 4))
    bias = torch.randn(1, 32, T, T, device=gpu, dtype=dtype) if has_bias else None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kernels.attention(q, k, v, i, i, bias)
    assert torch.cuda.max_memory_allocated() - before < 2 * 32 * T * T * 4


@every
@torch.no_grad()
def test_entropies_are_those_of_the_cpu(gpu, changes):
    entropies = []
    for model in on_both(changes, gpu):
        with model.probe(attention_entropy) as entropy:
            model(tokens(2, 140).to(model.head.weight.device))
        entropies.append(torch.stack(entropy).cpu())
    near(entropies[1], entropies[0], atol=1e-3)


@every
@pytest.mark.parametrize('beams', [1, 3])
def test_completions_of_unequal_prompts_are_those_of_the_cpu(gpu, changes, beams):
    prompts = [row[:n].tolist() for row, n in zip(tokens(3, 40), (40, 7, 23))]
    how = Decoding(beams=beams)
    one, other = (complete(model, prompts, 12, how) for model in on_both(changes, gpu))
    same = sum(a == b for a, b in zip(one, other))
    assert same >= 2, 'two tokens may be equally likely, but hardly in two of three texts'
