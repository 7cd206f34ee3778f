"""
The transformer, against a second implementation in float64 and against hand calculations.

$ python -m pytest tests/test_model.py
"""

import math

import pytest
import torch
from conftest import EVERY, TINY, losses_and_gradients, near, random_model, tokens
from plain import plain_losses, plain_transformer

from configurator import run_config
from model import ModelConfig, Transformer, vector_of

TINYLLAMA = dict(vocab_size=32000, block_size=2048, n_layer=22, n_head=32, n_kv_head=4,
                 n_embd=2048, n_hidden=5632)


def without_weights(**config):
    with torch.device('meta'):
        return Transformer(ModelConfig(**config))


# ---------------------------------------------------------------------- size

def test_model_of_the_paper_has_1_100_048_384_weights_and_704_scales():
    for position in 'none', 'rope':
        model = without_weights(**TINYLLAMA, position=position)
        assert (model.n_params(), model.head_scale.numel()) == (1_100_048_384, 704)
        # There are as many head gains as head scales.
        assert sum(p.numel() for p in model.parameters()) == model.n_params() + 2 * 704


@pytest.mark.parametrize('size', ['125m', '350m', '2.7b', '6.7b'])
def test_models_of_dape_v2_have_as_many_weights_as_the_papers_block(size):
    """GPT-NeoX's block: 4 C^2 in attention, 8 C^2 in the MLP, 13 C in vectors. Output is untied."""
    c = run_config('config/dape/125m.py') | run_config(f'config/dape/{size}.py')
    sizes, C = {name: c[name] for name in TINYLLAMA.keys() & c.keys()}, c['n_embd']
    model = without_weights(**sizes | {'vocab_size': 50304})
    by_hand = 2 * 50304 * C + c['n_layer'] * (12 * C ** 2 + 13 * C)
    assert model.n_params() == pytest.approx(by_hand, rel=2e-3)


def test_flops_per_token_match_hand_arithmetic():
    layer = 2048 * (2048 + 2 * 256) + 2048 * 2048 + 3 * 2048 * 5632
    multiplied, norms = 22 * layer + 32000 * 2048, (2 * 22 + 1) * 2048
    matmul, attention = without_weights(**TINYLLAMA).flops_per_token(2048)
    assert 0 <= matmul - 2 * multiplied <= 2 * norms
    assert attention == 22 * 1024 * 2048 * (2 + 2)  # keys, channels; q.k and the sum of values


def test_flops_of_dape_are_those_of_its_kernels_at_every_key():
    plain = random_model(position='kerple').flops_per_token(100)
    dape = random_model(position='kerple', dape_kernel=3, dape_width=8).flops_per_token(100)
    by_kernel = 3 * 8 * 8 + 3 * 8 * 4 + 8 + 4  # from 2H to 8 to H channels, plus offsets
    assert dape == (plain[0], plain[1] + 2 * (100 / 2) * 2 * by_kernel)


def test_initial_weights_have_tinyllamas_spread_and_scales_are_frozen():
    sizes = dict(vocab_size=512, n_layer=5, n_embd=256, n_hidden=512, short_conv=256)
    torch.manual_seed(0)  # short convolutions take their numbers from it
    model = Transformer(ModelConfig(**TINY | sizes)).init_weights(torch.Generator().manual_seed(0))
    for name, p in model.named_parameters():
        assert p.requires_grad == (vector_of(name) not in ('head_scale', 'head_gain')), name
        if vector_of(name):
            assert (p == 1).all(), name
            continue
        std = math.sqrt(2 / (5 * 256))
        if name.endswith('out.weight'):
            std = 1 / (16 * 5)
        if name.endswith('conv.w'):
            std = 1 / math.sqrt(12)  # uniform from -1/2 to 1/2
            assert p.abs().max() <= 0.5
        near([p.mean().item(), p.std().item()], [0, std], atol=0.02 * std)


# ---------------------------------------------------------------------- what it computes

@pytest.mark.parametrize('n_kv_head, T', [(1, 2), (4, 45), (2, 300)])
def test_logits_and_losses_equal_those_of_a_plain_float64_transformer(n_kv_head, T):
    model, idx = random_model(n_kv_head=n_kv_head, n_layer=3).double(), tokens(2, T)
    expected, attention = plain_transformer(model, idx)
    near(model(idx), expected, atol=1e-10)
    assert attention[..., -1, :].amax() > 1.5 / T, 'attention is uniform'
    near(model(idx[:, :-1], idx[:, 1:]), plain_losses(model, idx), atol=1e-5)  # in float32


@pytest.mark.parametrize('changes', EVERY, ids=str)
def test_logits_and_losses_of_the_last_positions_equal_those_of_a_full_pass(changes):
    model, idx, seen = random_model(**changes), tokens(2, 21), []
    for tail in 1, 21, 30:
        near(model(idx, tail=tail), model(idx)[:, -tail:], atol=1e-5)
    losses = model(idx[:, :-1], idx[:, 1:])
    for block in model.blocks:  # the last layer computes only the last positions
        block.mlp.register_forward_hook(lambda mlp, inputs, y: seen.append(y.shape[1]))
    near(model(idx[:, :-1], idx[:, -3:]), losses[:, -3:], atol=1e-5)
    assert seen == [20, 3]


@pytest.mark.parametrize('changes', EVERY[::3], ids=str)
def test_checkpointed_activations_give_the_same_loss_and_gradients(changes):
    model, windows, calls = random_model(**changes), tokens(2, 31), []
    losses, gradients = losses_and_gradients(model, windows)
    model.blocks[0].attn.register_forward_hook(lambda *_: calls.append(1))
    model.checkpoint_activations = True
    again, found = losses_and_gradients(model, windows)
    assert len(calls) == 2  # forward, and once more in backward
    near(again, losses)
    near(found, gradients, atol=1e-6)


def test_head_scales_are_given_to_every_layer_or_refused():
    model = random_model()
    n_layer, H = model.head_scale.shape
    for scale in 2, torch.full((H,), 2), torch.full((1, H, 1), 2), torch.full((1, H, 8), 2):
        model.head_scale = scale
        assert (model.head_scale == 2).all()
    with pytest.raises(RuntimeError):
        model.head_scale = torch.ones(n_layer + 1, H, 1)


def test_a_change_of_a_thousandth_in_a_scale_counts_under_bfloat16():
    model, logits = random_model(), []
    for scale in 1.6, 1.601:  # in bfloat16 they are equal
        model.head_scale = scale
        with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):
            logits.append(model(tokens(1, 40)))
    assert logits[0].dtype == torch.bfloat16 and not torch.equal(*logits)


