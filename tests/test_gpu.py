"""
A GPU against the CPU for every position method: losses, gradients, entropies, training steps in
bfloat16, compiled. Skipped where there is no GPU.

$ python -m pytest tests/test_gpu.py
"""

import copy

import pytest
import torch
from conftest import EVERY, losses_and_gradients, near, random_model, tokens

import position
from common import setup
from entropy import entropies

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs an NVIDIA GPU')
every = pytest.mark.parametrize('changes', EVERY, ids=str)


@pytest.fixture(scope='module')
def gpu():
    return setup('cuda', 'bfloat16')


@every
@pytest.mark.parametrize('how', ['plain', 'in many chunks', 'checkpointed', 'compiled'])
def test_losses_and_gradients_are_those_of_the_cpu(monkeypatch, gpu, changes, how):
    if how == 'in many chunks':
        monkeypatch.setattr(position, 'SCORES_AT_ONCE', 300)
    model, windows = random_model(**changes).requires_grad_(), tokens(2, 141)
    on_gpu = copy.deepcopy(model).to(gpu.device)
    on_gpu.checkpoint_activations = how == 'checkpointed'
    forward = on_gpu
    if how == 'compiled':
        torch.compiler.reset()
        forward = torch.compile(on_gpu, dynamic=False)
    losses, gradients = losses_and_gradients(model, windows)
    found = losses_and_gradients(on_gpu, windows.to(gpu.device), forward)
    near(found[0].cpu(), losses, atol=1e-3)
    for name, gradient in gradients.items():
        near(found[1][name].cpu(), gradient, rtol=1e-2, atol=1e-4)
    with gpu.autocast():
        found = losses_and_gradients(on_gpu, windows.to(gpu.device), forward)
    near(found[0].mean().cpu(), losses.mean(), atol=0.05)


@every
@torch.no_grad()
def test_entropies_are_those_of_the_cpu(gpu, changes):
    model, windows = random_model(**changes), tokens(2, 141)
    expected = entropies(model, windows[:, :-1], windows[:, 1:])
    windows = windows.to(gpu.device)
    found = entropies(model.to(gpu.device), windows[:, :-1], windows[:, 1:])
    near(tuple(x.cpu() for x in found), expected, atol=1e-3)
