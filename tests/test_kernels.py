"""
Fast attention, entropy and losses against their plain formulas.

$ python -m pytest tests/test_kernels.py
"""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import EVERY, losses_and_gradients, near, random_model, tokens
from plain import plain_entropy
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
from bench import peak_memory
from kernels import attention_entropy
from lib.generate import new_cache
from position import NoPE, Place

# ---------------------------------------------------------------------- attention

def plain_attend(method, q, k, v, i, j):
    """attend() of a position method, by the whole matrix of its scores."""
    weights = method.softmax(method.scores(q, k, i, j))
    return weights @ kernels.repeat_heads(v, q.shape[1])


@pytest.mark.parametrize('changes', EVERY, ids=str)
def test_speed_changes_neither_logits_nor_losses_nor_gradients(monkeypatch, changes):
    model, windows = random_model(**changes), tokens(2, 141)
    with monkeypatch.context() as patch:
        for block in model.blocks:
            method = block.attn.position
            patch.setattr(method, 'attend', partial(plain_attend, method))
        logits = model(windows).detach()
        losses, gradients = losses_and_gradients(model, windows)

    assert all(gradient.abs().sum() > 0 for gradient in gradients.values())
    for at_once in kernels.SCORES_AT_ONCE, 5000:  # with 5000, backward computes rows again
        monkeypatch.setattr(kernels, 'SCORES_AT_ONCE', at_once)
        with torch.no_grad():  # takes a fused kernel if there is one
            near(model(windows), logits, atol=1e-4)
        near(losses_and_gradients(model, windows), (losses, gradients), atol=1e-5)


class Operations(TorchDispatchMode):
    """Counts operations."""
    n = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.n += 1
        return operation(*args, **(kwargs or {}))


def test_on_a_gpu_few_scores_are_one_chunk(monkeypatch):
    gpu, row_chunks = torch.device('cuda'), kernels.row_chunks
    assert [*row_chunks(512, 512, 12, gpu)] == [(slice(0, 512), 512)]
    assert len([*row_chunks(512, 512, 12 * 32, gpu)]) == 8
    assert len([*row_chunks(512, 512, 12, torch.device('cpu'))]) == 8

    model, windows = random_model(position='kerple', block_size=512), tokens(1, 513)
    counts, expected = [], losses_and_gradients(model, windows)
    for _ in range(2):
        with Operations() as operations:
            near(losses_and_gradients(model, windows), expected, atol=1e-5)
        counts.append(operations.n)
        monkeypatch.setattr(kernels, 'row_chunks', lambda T, S, n_maps, _, all_keys=False:
                            row_chunks(T, S, n_maps, gpu, all_keys))
    assert counts[0] > 2.5 * counts[1]


@pytest.mark.parametrize('position', ['none', 'kerple'])
def test_entropy_is_float32_also_where_the_rest_is_not(position):
    attention, i = random_model(position=position).blocks[0].attn, torch.arange(50)
    q, k, place = 4 * torch.randn(1, 4, 50, 8), torch.randn(1, 2, 50, 8), Place(i, i, 50)
    expected = attention_entropy(0, attention, q, k, place)
    with torch.autocast('cpu', torch.bfloat16):
        near(attention_entropy(0, attention, q, k, place), expected)


@pytest.mark.slow
@pytest.mark.parametrize('checkpointed', [False, True])
@pytest.mark.parametrize('changes', [
    {'position': 'kerple'}, {'position': 'kerple', 'dape_kernel': 3}], ids=str)
def test_many_chunks_are_left_out_of_the_graph_and_change_nothing(monkeypatch, changes,
                                                                  checkpointed):
    monkeypatch.setattr(kernels, 'SCORES_AT_ONCE', 8000)  # 21 chunks
    model, windows, n_operations = random_model(**changes), tokens(2, 142), []
    model.checkpoint_activations = checkpointed
    expected = losses_and_gradients(model, windows)
    for most in 100, 2:
        monkeypatch.setattr(kernels, 'CHUNKS_IN_A_GRAPH', most)
        torch.compiler.reset()
        counter, n_graphs = CompileCounter(), []
        forward = torch.compile(model, backend=counter, dynamic=False).__call__
        for _ in range(2):
            near(losses_and_gradients(model, windows, forward), expected, atol=1e-5)
            n_graphs.append(counter.frame_count)
        assert n_graphs[0] == n_graphs[1], 'compiled again'
        n_operations.append(counter.op_count)
    assert n_operations[1] < n_operations[0]


@pytest.mark.parametrize('dape_kernel', [0, 3])
def test_memory_of_training_grows_with_the_length_not_with_its_square(monkeypatch, cpu,
                                                                      dape_kernel):
    monkeypatch.setattr(kernels, 'SCORES_AT_ONCE', 2 ** 13)
    model = random_model(position='kerple', dape_kernel=dape_kernel, n_layer=1)
    short, long = (peak_memory(partial(losses_and_gradients, model, windows), cpu)
                   for windows in (tokens(1, 129), tokens(1, 257)))
    assert long <= 2.3 * short


def test_decoding_takes_heads_that_a_gpu_kernel_returns_transposed(monkeypatch):
    attention = F.scaled_dot_product_attention
    q, k, v = (torch.randn(2, n_head, T, 64) for n_head, T in ((32, 1), (4, 40), (4, 40)))
    expected = attention(q, k, v, enable_gqa=True)
    # On CUDA the result is stored token by token, and head by head within a token.
    monkeypatch.setattr(F, 'scaled_dot_product_attention', lambda *given: attention(
        *given).transpose(1, 2).contiguous().transpose(1, 2))
    near(kernels.attention(q, k, v, torch.tensor([39]), torch.arange(40)), expected, atol=1e-5)


# ---------------------------------------------------------------------- entropy

@pytest.mark.parametrize('n_kv_head, size', [(1, 1), (2, 5), (4, 50)])
def test_entropy_without_a_matrix_equals_that_of_the_float64_matrix(n_kv_head, size):
    q, k, i = size * torch.randn(2, 4, 70, 16), torch.randn(2, n_kv_head, 70, 16), torch.arange(70)
    attention = NoPE(None).scores(q.double(), k.double(), i, i).softmax(-1)
    found = kernels.entropy_without_matrix(q, k)
    assert found.dtype == torch.float32 and found.min() >= 0
    near(found, torch.special.entr(attention).sum(-1), atol=2e-5 * size)
    with pytest.raises(ValueError, match='gradient'):
        kernels.entropy_without_matrix(q, k.requires_grad_())


@pytest.mark.parametrize(
    'changes', [changes for changes in EVERY if 'rope_scaling' not in changes], ids=str)
def test_entropy_of_every_method_and_its_gradient_are_those_of_the_float64_matrix(changes):
    model, idx = random_model(**changes), tokens(2, 50)
    scale = model.head_scale.double().requires_grad_()
    expected = plain_entropy(model, idx, scale)
    gradient, = torch.autograd.grad(expected.mean(), scale)
    with torch.no_grad(), model.probe(attention_entropy) as entropy:
        model(idx)
    near(torch.stack(entropy), expected, atol=1e-4)
    if model.config.position == 'adaptive':
        return  # its formula in float64 has no gradient where a weight is 0

    scales = [block.attn.head_scale.requires_grad_() for block in model.blocks]
    for model.checkpoint_activations in False, True:
        with model.probe(attention_entropy) as entropy:
            model(idx)
        model(idx)  # outside the block the model calls no probe
        near(torch.stack(entropy), expected, atol=1e-3)
        found = torch.autograd.grad(torch.stack(entropy).mean(), scales)
        near(torch.stack(found)[..., 0], gradient, rtol=1e-3, atol=1e-6)


def test_entropy_of_a_pass_with_a_cache_is_refused():
    model, idx = random_model(), tokens(1, 9)
    cache = new_cache(model, 1, 9)
    model(idx[:, :5], cache=cache)
    with pytest.raises(ValueError, match='cache'), model.probe(attention_entropy):
        model(idx[:, 5:], cache=cache)


# ---------------------------------------------------------------------- loss

@pytest.mark.parametrize('rows', [1, 7])
def test_losses_in_chunks_equal_losses_at_once_and_hold_a_chunk_of_logits(monkeypatch, rows):
    model, windows, sizes = random_model(), tokens(3, 21), []
    expected = losses_and_gradients(model, windows)
    monkeypatch.setattr(kernels, 'LOGITS_AT_ONCE', rows * 61 + 60)
    model.head.register_forward_hook(lambda head, inputs, logits: sizes.append(logits.numel()))
    near(losses_and_gradients(model, windows), expected, atol=1e-5)
    assert len(sizes) == 2 * math.ceil(60 / rows)  # backward computes each chunk again
    assert max(sizes) == rows * 61


@pytest.mark.parametrize('kept, products', [(2 * 21 * 61, 1), (2 * 21 * 61 - 1, 4)])
def test_compiled_float32_losses_keep_so_many_logits_and_are_those_of_the_plain_ones(
        monkeypatch, kept, products):
    x, head, targets = torch.randn(2, 21, 16), torch.nn.Linear(16, 61, bias=False), tokens(2, 21)

    def gradients(loss):
        losses = loss(x, head, targets)
        return losses, *torch.autograd.grad(losses.square().mean(), head.weight)

    expected, calls = gradients(kernels.cross_entropy), []
    monkeypatch.setattr(kernels, 'LOGITS_KEPT', kept)
    monkeypatch.setattr(kernels, 'LOGITS_AT_ONCE', 21 * 61)  # two chunks, again in backward
    head.register_forward_hook(lambda *_: calls.append(1))
    found = gradients(torch.compile(kernels.cross_entropy, backend='eager', dynamic=False))
    near(found, expected, atol=1e-5)
    assert len(calls) == products
