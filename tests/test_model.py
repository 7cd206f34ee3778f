"""
The transformer: its size and start, its scales, and the speedups that must change no number.
test_position.py compares the whole model with a float64 program.

$ python -m pytest tests/test_model.py
"""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import EVERY, TINY, losses_and_gradients, near, random_model, tokens
from plain import plain_transformer

from model import (
    ModelConfig,
    Transformer,
    small_vectors,
    token_losses,
    vector_kind,
)
from position import METHODS, NoPE

TINYLLAMA = dict(vocab_size=32000, block_size=2048, n_layer=22, n_head=32, n_kv_head=4,
                 n_embd=2048, n_hidden=5632)


# ---------------------------------------------------------------------- size and start

def test_model_of_the_paper_has_1_100_048_384_weights_and_704_scales():
    for position in 'none', 'rope':
        with torch.device('meta'):
            model = Transformer(ModelConfig(**TINYLLAMA, position=position))
        assert model.n_params() == 1_100_048_384
        # There are as many head gains as head scales.
        assert sum(p.numel() for p in model.parameters()) == model.n_params() + 2 * 704


def test_matrices_start_with_tinyllamas_spread_and_vectors_at_1():
    sizes = dict(vocab_size=512, n_layer=5, n_embd=256, n_hidden=512, short_conv=256)
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**TINY | sizes)).init_weights()
    spreads = {'out': 1 / (16 * 5), 'attn_conv': 1 / math.sqrt(12), 'mlp_conv': 1 / math.sqrt(12)}
    for name, p in model.named_parameters():
        if name in small_vectors(model):
            assert (p == 1).all(), name
        else:
            std = spreads.get(name.split('.')[-2], math.sqrt(2 / (5 * 256)))
            near([p.mean().item(), p.std().item()], [0, std], atol=0.02 * std)


@pytest.mark.parametrize('position', METHODS)
def test_all_other_weights_start_the_same_whichever_method_a_model_has(position):
    starts = []
    for changes in {}, {'position': position, 'dape_kernel': 3, 'short_conv': 4}:
        torch.manual_seed(5)
        model = Transformer(ModelConfig(vocab_size=61, **TINY, **changes)).init_weights()
        starts.append(dict(model.named_parameters()))
    near({name: starts[1][name] for name in starts[0]}, starts[0])


class Own(NoPE):
    vectors = {'slope': 0.1}

    def __init__(self, config):
        super().__init__(config)
        self.slope = torch.nn.Parameter(torch.zeros(4, 1), requires_grad=False)


def test_small_vectors_are_scales_gains_norms_and_those_of_ones_own_method(monkeypatch):
    monkeypatch.setitem(METHODS, 'own', Own)
    model = random_model(position='own')
    kinds = {vector_kind(name) for name in small_vectors(model)}
    assert kinds == {'head_scale', 'head_gain', 'norm', 'slope'}
    assert [*small_vectors(model, 'slope')] == [f'blocks.{i}.attn.position.slope' for i in (0, 1)]
    frozen = {name.split('.')[-1] for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {'head_scale', 'head_gain', 'slope'}


# ---------------------------------------------------------------------- scales

def test_a_scale_may_be_one_per_channel():
    model, idx = random_model(position='rope', n_kv_head=1), tokens(2, 30)
    model.head_scale = 0.5 + torch.rand(2, 4, 8)
    near(model(idx), plain_transformer(model, idx)[0], atol=1e-4)


def test_a_change_of_a_thousandth_in_a_scale_counts_under_bfloat16():
    model, logits = random_model(), []
    for scale in 1.6, 1.601:  # in bfloat16 they are equal
        model.head_scale = scale
        with torch.autocast('cpu', torch.bfloat16):
            logits.append(model(tokens(1, 40)))
    assert logits[0].dtype == torch.bfloat16 and not torch.equal(*logits)


# ---------------------------------------------------------------------- speed changes no number

def test_the_last_positions_are_those_of_a_full_pass():
    model, idx, targets = random_model(), tokens(2, 21), tokens(2, 21, seed=2)
    near(model(idx, tail=4), model(idx)[:, -4:])
    near(model(idx, targets[:, -3:]), model(idx, targets)[:, -3:], atol=1e-5)


@pytest.mark.parametrize('changes', EVERY[::3], ids=str)
def test_checkpointed_activations_give_the_same_loss_and_gradients(changes):
    model, windows, calls = random_model(**changes).requires_grad_(), tokens(2, 31), []
    expected = losses_and_gradients(model, windows)
    model.blocks[0].attn.register_forward_hook(lambda *_: calls.append(1))
    model.checkpoint_activations = True
    near(losses_and_gradients(model, windows), expected, atol=1e-6)
    assert len(calls) == 2  # forward, and once more in backward


@pytest.mark.parametrize('compiled', [False, True])
def test_token_losses_are_those_of_cross_entropy(compiled, monkeypatch):
    x, targets, calls = torch.randn(42, 16), tokens(42), []
    weight, factors = torch.randn(61, 16, requires_grad=True), torch.rand(42)

    def and_gradient(losses):
        return losses, *torch.autograd.grad((factors * losses).sum(), weight)

    def count(graph, inputs):
        """A compiler that changes nothing, and counts the checkpointed parts of its graph."""
        calls.extend(node for node in graph.graph.nodes if 'checkpoint' in str(node.target))
        return graph

    expected = and_gradient(F.cross_entropy(F.linear(x, weight), targets, reduction='none'))
    monkeypatch.setattr('model.LOGITS_AT_ONCE', 8 * 61 // (64 if compiled else 1) + 1)
    if compiled:
        compute = torch.compile(token_losses, backend=count)
    else:
        compute, linear = token_losses, F.linear
        monkeypatch.setattr(F, 'linear', lambda *inputs: calls.append(1) or linear(*inputs))
    near(and_gradient(compute(x, weight, targets)), expected, atol=1e-5)
    assert len(calls) == (6 if compiled else 12)  # uncompiled: each chunk again in backward


def test_tied_weights_are_one_matrix():
    model = random_model(tied=True)
    assert model.head.weight is model.embed.weight
    assert model.n_params() == random_model().n_params() - 61 * 32
