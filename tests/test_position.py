"""
Every position method: its formula in float64, the fast ways to compute it, and classes of one's
own.

$ python -m pytest -m '' tests/test_position.py
"""

import math

from configurator import UserError

import numpy as np
import pytest
import torch
from conftest import EVERY, losses_and_gradients, near, random_model, tokens
from plain import plain_losses, plain_transformer

import position
from entropy import entropies
from model import small_vectors, vector_kind
from position import METHODS, NoPE, Place, RoPE, alibi_slopes, distances, rope_frequencies

every = pytest.mark.parametrize('changes', EVERY, ids=str)


def method(name, **changes):
    """The position method of a layer of a small model: 4 heads of size 8, L = 32."""
    return random_model(position=name, **changes).blocks[0].attn.position


# ---------------------------------------------------------------------- formulas

@every
def test_logits_and_losses_are_those_of_the_papers_formulas_in_float64(changes):
    """
    150 tokens go past T5's last bucket (128), CoPE's last count (63) and FIRE's M (16). A new
    method fails here until its formula stands in tests/plain.py.
    """
    model, idx = random_model(**changes), tokens(1, 150)
    near(model(idx), plain_transformer(model, idx)[0], atol=2e-4)
    near(model(idx[:, :-1], idx[:, 1:]), plain_losses(model, idx), atol=2e-4)


def frequencies(scaling='', total=8192):
    """Of a head of 64 channels and L = 2048."""
    return rope_frequencies(64, 10000.0, scaling, 2048, total)


@pytest.mark.parametrize('s, base', [(2, 20452), (8, 85550)])
def test_ntk_enlarges_the_base_as_in_the_papers_code_and_dynamic_ntk_only_past_L(s, base):
    plain, found = frequencies()[0], frequencies(f'ntk:{s}')[0]
    near(found[[0, 1, -1]], [1, base ** (-2 / 64), plain[-1] / s], rtol=3e-6)
    near(frequencies(f'dynamic_ntk:{s}', 1024)[0], plain)


@pytest.mark.parametrize('s, square', [(2, 1.1434), (8, 1.4591)])
def test_yarn_mixes_pairs_between_8_and_21_at_the_papers_sizes(s, square):
    found, factor = frequencies(f'yarn:{s}')
    ramp = np.clip((np.arange(32) - 8) / 13, 0, 1)
    near(found / frequencies()[0], 1 - ramp + ramp / s, rtol=1e-6)
    assert factor ** 2 == pytest.approx(square, abs=1e-4)


def test_alibi_slopes_match_the_paper():
    near(alibi_slopes(6), [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8], atol=1e-5)
    near(alibi_slopes(16), [2 ** (-k / 2) for k in range(1, 17)], atol=1e-5)


def test_t5_has_one_table_for_all_layers():
    names = [name for name, _ in random_model(position='none,t5,t5', n_layer=5).named_parameters()]
    assert sum('table' in name for name in names) == 1


def test_kerples_parameters_act_as_positive_numbers_and_can_recover():
    kerple = method('kerple')
    kerple.p.data[:], kerple.a.data[:] = -3.0, 0.004  # both are clamped to 0.01
    bias = kerple.bias(torch.tensor([7]), torch.tensor([2])).flatten()
    near(bias, [-0.01 * math.log(1.05)] * 4, atol=1e-6)
    bias.sum().backward()
    near(kerple.p.grad, [-math.log(1.05)] * 4, atol=1e-6)


def test_cope_counts_in_float32_where_its_scores_are_bfloat16():
    cope, i = method('cope'), torch.arange(120)
    cope.e.data[:] = 8 * (torch.arange(64) % 2)[:, None]     # 0 at even counts, 8 at odd ones
    q = torch.full((1, 4, 120, 8), 1 / 64).bfloat16()        # q.e is 0 or 1
    k = 16 * torch.randn(1, 2, 120, 8).bfloat16()
    expected = cope.similarity(q.float(), k.float(), i, i)
    near(cope.similarity(q, k, i, i).tril(), expected.tril(), atol=0.04)


def test_random_positions_are_a_sorted_uniform_subset_that_only_training_draws_anew():
    model, t = random_model(position='rope_random'), torch.arange(20)
    place = Place(t, t, 20)
    one, other = (block.attn.position for block in model.blocks)
    fixed, again, others = (layer.prepare(place).i for layer in (one, one, other))
    assert torch.equal(fixed, again) and torch.equal(fixed, others)
    model.train()
    drawn = torch.stack([one.prepare(place).i for _ in range(400)])
    assert (drawn.diff(dim=1) > 0).all() and drawn.min() >= 0 and drawn.max() < 2048
    # The expectation of the t-th smallest of 20 numbers from 1 ... 2048, minus 1.
    near(drawn.double().mean(0), (t + 1) * 2049 / 21 - 1, atol=60)


# ---------------------------------------------------------------------- every method

@every
def test_logits_of_a_token_depend_neither_on_later_tokens_nor_on_how_many_there_are(changes):
    model, idx = random_model(**changes, n_kv_head=1), tokens(2, 150)
    logits = model(idx)
    for t in 1, 77, 149:
        later = idx.clone()
        later[:, t:] = (idx[:, t:] + 1) % 61
        same = model(later) == logits
        assert same[:, :t].all() and not same[:, t].all()
        if changes['position'] != 'rope_random' and changes.get('rope_scaling') != 'dynamic_ntk:4':
            near(model(idx[:, :t]), logits[:, :t], atol=1e-4)


@pytest.mark.parametrize('name', METHODS)
def test_no_method_changes_when_a_model_goes_on_at_another_length(name):
    model, idx = random_model(position=name), tokens(1, 50)
    longer = random_model(position=name, block_size=128, pretrained_length=32)
    assert torch.equal(longer(idx), model(idx))


@every
def test_some_rows_at_a_time_are_the_whole_matrix_forward_and_backward(monkeypatch, changes):
    model, windows, saved = random_model(**changes).requires_grad_(), tokens(2, 101), []
    with monkeypatch.context() as patch:
        patch.setattr(NoPE, 'attend', lambda method, q, k, v, place:
                      method.attend_by_scores(q, k, v, place.i, place.j))
        patch.setattr(NoPE, 'changed', {'scores'})
        expected = losses_and_gradients(model, windows)
    assert all(gradient.abs().sum() > 0 for gradient in expected[1].values())

    for at_once in position.SCORES_AT_ONCE, 8000:
        monkeypatch.setattr(position, 'SCORES_AT_ONCE', at_once)
        with torch.no_grad():
            near(model(windows[:, :-1], windows[:, 1:]), expected[0], atol=1e-4)
        with torch.autograd.graph.saved_tensors_hooks(
                lambda x: saved.append(x.numel()) or x, lambda x: x):
            near(losses_and_gradients(model, windows), expected, atol=5e-5)
        if at_once == 8000:  # 10 chunks
            assert max(saved) < 2 * 100 * 100, 'backward keeps scores'
        saved.clear()


@pytest.mark.slow
@every
def test_every_method_is_one_graph_for_a_compiler(changes):
    torch.compiler.reset()  # because it stops compiling code that it has compiled often
    model, windows = random_model(**changes).train(), tokens(2, 41)
    compiled = torch.compile(model, backend='aot_eager', fullgraph=True, dynamic=False)
    expected = losses_and_gradients(model, windows)
    near(losses_and_gradients(model, windows, compiled), expected, atol=1e-5)


@pytest.mark.slow
def test_compiled_dape_of_one_window_has_the_gradients_of_uncompiled_dape():
    torch.compiler.reset()
    model, windows = random_model(position='kerple', dape_kernel=3, n_layer=1, n_head=8, n_embd=128,
                                  block_size=128), tokens(1, 129)
    compiled = losses_and_gradients(model, windows, torch.compile(model, dynamic=False))
    near(compiled, losses_and_gradients(model, windows), atol=1e-4)


# ---------------------------------------------------------------------- classes of one's own

def own_mask(method, i, j):
    """That of `window`, without the later keys, which a query must not see in any case."""
    return (distances(i, j) >= 32) & (j >= 4)


def doubled(step):
    return lambda method, *given: 2 * getattr(NoPE, step)(method, *given)


# {step: what a class of one's own does in it, and settings and factors with which the project's
# methods compute the same}
OWN = {
    'prepare': (lambda method, place:
                RoPE.prepare(method, Place(place.i / 2, place.j / 2, place.total)),
                {'position': 'rope', 'rope_scaling': 'pi:2'}, {}),
    'encode': (lambda method, q, k, place: (2 * q, k), {}, {'head_scale': 2}),
    'similarity': (doubled('similarity'), {}, {'head_scale': 2}),
    'bias': (lambda method, i, j: -distances(i, j) / 4 ** torch.arange(1, 5)[:, None, None],
             {'position': 'alibi'}, {}),
    'mask': (own_mask, {'position': 'window'}, {}),
    'scores': (doubled('scores'), {}, {'head_scale': 2}),
    'softmax': (lambda method, scores: NoPE.softmax(method, 2 * scores), {}, {'head_scale': 2}),
    'attend': (doubled('attend'), {}, {'head_gain': 2}),
}


@pytest.mark.parametrize('step', OWN)
def test_a_step_of_ones_own_class_is_in_training_and_entropy_or_refused(monkeypatch, step):
    """Even if it is put into the class after the model is built."""
    function, settings, factors = OWN[step]
    own = type('Own', (RoPE if step == 'prepare' else NoPE,), {})
    monkeypatch.setitem(METHODS, 'own', own)
    model, same, windows = random_model(position='own'), random_model(**settings), tokens(2, 61)
    setattr(own, step, function)
    for name, vector in small_vectors(same).items():
        vector.data *= factors.get(vector_kind(name), 1)
    near(losses_and_gradients(model, windows), losses_and_gradients(same, windows), atol=1e-4)

    ids = windows[:, :-1], windows[:, 1:]
    with torch.no_grad():
        if step == 'attend':
            with pytest.raises(UserError, match=r'own attend\(\)'):
                entropies(model, *ids)
        else:
            near(entropies(model, *ids), entropies(same, *ids), atol=1e-4)
    if step in ('scores', 'attend'):
        with pytest.raises(ValueError, match='DAPE would not be used'):
            random_model(position='own', dape_kernel=3)


def test_a_step_that_is_misspelt_or_set_on_the_object_is_refused(monkeypatch):
    class OnObject(NoPE):
        def __init__(self, config):
            super().__init__(config)
            self.bias = distances

    for own, message in ((OnObject, 'sets bias on the object'),
                         (type('Own', (NoPE,), {'biass': own_mask}), r'mean bias\(\)')):
        monkeypatch.setitem(METHODS, 'own', own)
        with pytest.raises(ValueError, match=message):
            random_model(position='own')
