"""
Fast attention, entropy and losses against their plain formulas.

$ python -m pytest tests/test_kernels.py
"""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import EVERY, losses_and_gradients, near, plain_entropy, random_model, tokens
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kernels
from kernels import attention_entropy
from model import matrices
from position import NoPE

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


class Largest(TorchDispatchMode):
    """Inside the `with` block, `numel` is the size of the largest tensor an operation returned."""
    numel = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        results = operation(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if torch.is_tensor(result):
                self.numel = max(self.numel, result.numel())
        return results


@pytest.mark.parametrize('changes', [
    {'position': 'kerple'}, {'position': 'kerple', 'dape_kernel': 3}], ids=str)
def test_memory_of_training_grows_with_the_length_not_with_its_square(monkeypatch, changes):
    monkeypatch.setattr(kernels, 'SCORES_AT_ONCE', 2 ** 13)
    model, sizes = random_model(**changes, n_layer=1), []
    for T in 128, 256:
        kept = {}  # one entry for all views of the same memory

        def keep(x, kept=kept):
            kept[x.untyped_storage().data_ptr()] = x
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), Largest() as mode:
            losses_and_gradients(model, tokens(1, T + 1))
        sizes.append((sum(x.untyped_storage().nbytes() for x in kept.values()), mode.numel))
    for short, long in zip(*sizes):  # bytes kept for backward, and the largest tensor
        assert long <= 2.3 * short


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


# ---------------------------------------------------------------------- on a GPU

@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs an NVIDIA GPU')
@pytest.mark.parametrize('kind', ['causal', 'seen', 'bias'])
@pytest.mark.parametrize('dtype, atol', [(torch.float32, 2e-3), (torch.bfloat16, 3e-2)])
@torch.no_grad()
def test_attention_on_a_gpu_equals_the_formula_and_needs_no_whole_matrix(kind, dtype, atol):
    T, j = 2048, torch.arange(2048, device='cuda')
    q, k, v, bias = (torch.randn(shape, device='cuda', dtype=dtype) for shape in (
        (2, 32, T, 64), (2, 4, T, 64), (2, 4, T, 64), (1, 32, T, T)))
    causal = (j <= j[:, None])[None, None]
    mask = {'causal': None, 'seen': causal & (j > 5), 'bias': bias}[kind]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = kernels.attention(q, k, v, j, j, mask)
    assert torch.cuda.max_memory_allocated() - before < 2 * 32 * T * T * 4

    keys, values = (kernels.repeat_heads(x.float(), 32) for x in (k, v))
    scores = q.float() @ keys.mT / 8
    if kind == 'bias':
        scores = scores + bias
    else:
        scores = scores.masked_fill(~(causal if mask is None else mask), -math.inf)
    expected = scores.softmax(-1) @ values
    near(found[:, :, 10:], expected[:, :, 10:], atol)  # with 'seen', the first rows see no key


def test_decoding_takes_heads_that_a_gpu_kernel_returns_transposed(monkeypatch):
    attention = F.scaled_dot_product_attention

    def memory_efficient_kernel(*tensors):
        """On CUDA its result is stored token by token, and head by head within a token."""
        y = attention(*tensors)
        return y.transpose(1, 2).contiguous().transpose(1, 2)

    q, k, v = (torch.randn(2, n_head, T, 64) for n_head, T in ((32, 1), (4, 40), (4, 40)))
    seen = torch.arange(40) < torch.tensor([40, 33])[:, None, None, None]
    expected = attention(q, k, v, seen, enable_gqa=True)
    monkeypatch.setattr(F, 'scaled_dot_product_attention', memory_efficient_kernel)
    found = kernels.attention(q, k, v, torch.tensor([[39], [32]]), torch.arange(40), seen)
    near(found, expected, atol=1e-5)


# ---------------------------------------------------------------------- entropy

@pytest.mark.parametrize('n_kv_head, size', [(1, 1), (2, 5), (4, 50)])
def test_entropy_without_a_matrix_equals_that_of_the_float64_matrix(n_kv_head, size):
    q, k, i = size * torch.randn(2, 4, 70, 16), torch.randn(2, n_kv_head, 70, 16), torch.arange(70)
    attention = NoPE(None).scores(q.double(), k.double(), i, i).softmax(-1)
    found = kernels.entropy(q, k)
    assert found.dtype == torch.float32 and found.min() >= 0
    near(found, torch.special.entr(attention).sum(-1), atol=2e-5 * size)
    for pair in (q.requires_grad_(), k), (k, q):
        with pytest.raises(ValueError, match='gradient'):
            kernels.entropy(*pair)


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
        near(torch.stack(entropy), expected, atol=1e-3)
        found = torch.autograd.grad(torch.stack(entropy).mean(), scales)
        near(torch.stack(found)[..., 0], gradient, rtol=1e-3, atol=1e-6)


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


@pytest.mark.slow
def test_a_compiled_training_step_casts_each_matrix_to_bfloat16_once():
    """Counts the casts in the graphs that a compiler gets, partitioned as Inductor does it."""
    model, windows, n_casts = random_model(), tokens(2, 41), []
    shapes = [p.shape for p in matrices(model).values()]

    def count(graph, inputs):
        casts = [node.args[0] for node in graph.graph.nodes
                 if str(node.target).startswith(('aten._to_copy', 'prims.convert_element_type'))]
        n_casts.append(sum(x.op == 'placeholder' and x.meta['val'].shape in shapes
                           for x in casts))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=count, bw_compiler=count,
                           partition_fn=min_cut_rematerialization_partition)
    with torch.autocast('cpu', torch.bfloat16):
        losses_and_gradients(model, windows, torch.compile(model, backend=backend, dynamic=False))
    assert n_casts == [len(shapes), 0]  # forward, backward
