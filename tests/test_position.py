"""
Each position method is compared with its paper's formula. Some claims hold for all methods.

$ python -m pytest tests/test_position.py
"""

import math

import pytest
import torch
from conftest import EVERY, TINY, losses_and_gradients, near, random_model, refuses, tokens
from plain import plain_transformer

from kernels import attention_entropy, repeat_heads
from lib.generate import new_cache
from model import ModelConfig, Transformer
from position import (
    METHODS,
    NoPE,
    Place,
    RoPE,
    alibi_slopes,
    distances,
    random_places,
    rope_frequencies,
)

D, L = 64, 2048  # size of a head and training length in the tests of RoPE's extensions


def method(name, **changes):
    """The position method of a layer of a small model: 4 heads of size 8, L = 32."""
    return random_model(position=name, **changes).blocks[0].attn.position


# ---------------------------------------------------------------------- RoPE

def frequencies(scaling='', total=4 * L):
    return rope_frequencies(D, 10000.0, scaling, L, total)


@pytest.mark.parametrize('s, base', [(2, 20452), (8, 85550)])
def test_ntk_enlarges_the_base_as_in_the_papers_code(s, base):
    frequency, _ = frequencies(f'ntk:{s}')
    near(frequency[[0, 1]], [1, base ** (-2 / D)], rtol=3e-6)
    # The slowest pair turns s times slower. This is why the exponent is D / (D - 2).
    near(frequency[-1], frequencies()[0][-1] / s, rtol=1e-9)


@pytest.mark.parametrize('s, square', [(2, 1.1434), (8, 1.4591)])
def test_yarn_mixes_pairs_between_8_and_21_at_the_papers_sizes(s, square):
    frequency, factor = frequencies(f'yarn:{s}')
    ramp = ((torch.arange(32).double() - 8) / 13).clamp(0, 1)
    near(frequency, frequencies()[0] * (1 - ramp + ramp / s), rtol=1e-6)
    assert factor ** 2 == pytest.approx(square, abs=1e-4)


# ---------------------------------------------------------------------- formulas

@pytest.mark.parametrize('changes', EVERY, ids=str)
def test_logits_equal_the_papers_formulas_in_float64(changes):
    """
    150 tokens go past T5's last bucket (128), CoPE's last count (63) and FIRE's M (16). A new
    method fails here until its formula stands in tests/plain.py.
    """
    if changes.get('rope_scaling'):
        pytest.skip('the float64 transformer has no extensions; tests above compare frequencies')
    model, idx = random_model(**changes), tokens(1, 150)
    expected, _ = plain_transformer(model, idx)
    near(model(idx), expected, atol=2e-4)
    other = random_model(position='logn' if changes == {'position': 'none'} else 'none')
    other.load_state_dict(model.state_dict(), strict=False)
    difference = (other(idx) - expected).abs().max()
    assert difference > 0.05, 'the method hardly changes the logits, so this tests nothing'


# ---------------------------------------------------------------------- classes of one's own

class OwnMask(NoPE):
    def mask(self, i, j):
        return super().mask(i, j) | (distances(i, j) > 5)


class OwnScores(NoPE):
    def scores(self, q, k, i, j, *more):
        return super().scores(q, k, i, j, *more) * 1.5


class CappedRoPE(RoPE):
    def similarity(self, q, k, i, j):
        return 2 * super().similarity(q, k, i, j).tanh()


@pytest.mark.parametrize('own', [OwnMask, OwnScores, CappedRoPE])
def test_what_a_class_overrides_is_in_logits_and_entropies(monkeypatch, own):
    """Compared with the matrix softmax(scores) of the class."""
    monkeypatch.setitem(METHODS, 'own', own)
    model, idx = random_model(position='own'), tokens(2, 40)
    attention, i = model.blocks[0].attn, torch.arange(40)
    q, k, v = torch.randn(2, 4, 40, 8), torch.randn(2, 2, 40, 8), torch.randn(2, 2, 40, 8)
    weights = attention.position.softmax(attention.position.scores(q, k, i, i))
    near(attention.position.attend(q, k, v, i, i), weights @ repeat_heads(v, 4), 1e-5)
    found = attention_entropy(0, attention, q, k, Place(i, i, 40))
    near(found, torch.special.entr(weights).sum(-1), atol=1e-5)
    plain = random_model(position='rope' if issubclass(own, RoPE) else 'none')
    assert (model(idx) - plain(idx)).abs().max() > 0.05, 'what it overrides is ignored'


def test_what_dape_would_drop_is_refused_when_the_model_is_made(monkeypatch):
    class OwnAttend(NoPE):
        def attend(self, q, k, v, i, j):
            return 2 * super().attend(q, k, v, i, j)

    for own, step in (OwnAttend, 'attend'), (OwnScores, 'scores'):
        monkeypatch.setitem(METHODS, 'own', own)
        with pytest.raises(ValueError, match=rf'{own.__name__}.*{step}\(\)'):
            random_model(position='own', dape_kernel=3)


def test_is_plain_follows_from_what_a_class_overrides_and_cannot_be_set():
    assert [method(name).is_plain for name in ('none', 'rope', 'ssmax', 'alibi', 'window', 'cope')
            ] == [True, True, True, False, False, False]
    with pytest.raises(TypeError, match='is_plain'):
        type('Odd', (NoPE,), {'is_plain': True})


# ---------------------------------------------------------------------- every method

@pytest.mark.parametrize('changes', EVERY, ids=str)
def test_future_tokens_never_change_earlier_logits(changes):
    sizes = {'n_head': 6, 'n_embd': 48, 'n_kv_head': 1}
    model, idx = random_model(**changes, **sizes), tokens(2, 150)
    logits = model(idx)
    for t in 1, 77, 149:
        later = idx.clone()
        later[:, t:] = (idx[:, t:] + 1) % 61
        same = model(later) == logits
        assert same[:, :t].all() and not same[:, t].all()


@pytest.mark.parametrize('name', METHODS)
def test_no_method_changes_when_a_model_goes_on_at_another_length(name):
    model, idx = random_model(position=name), tokens(1, 50)
    longer = random_model(position=name, block_size=128, pretrained_length=32)
    longer.load_state_dict(model.state_dict())
    assert torch.equal(longer(idx), model(idx))


@pytest.mark.parametrize('changes', EVERY, ids=str)
def test_a_method_keeps_its_own_start_and_all_other_weights_start_as_in_nope(changes):
    def start(**changes):
        torch.manual_seed(5)
        model = Transformer(ModelConfig(vocab_size=61, **TINY, **changes))
        own = {name: p.clone() for name, p in model.named_parameters() if '.position.' in name}
        return own, dict(model.init_weights().named_parameters())

    own, found = start(**changes)
    expected = own | start()[1]
    near({name: found[name] for name in expected}, expected)


# ---------------------------------------------------------------------- random positions

def test_random_positions_are_a_sorted_uniform_subset():
    t = torch.arange(20)
    places = random_places(Place(t, t, 20), torch.rand(400, 100))
    i = torch.stack([place.i for place in places])
    assert (i.diff(dim=1) > 0).all() and i.min() >= 0 and i.max() < 100
    # The expectation of the t-th smallest of 20 numbers from 1 ... 100, minus 1.
    near(i.double().mean(0), (t + 1) * 101 / 21 - 1, atol=3)


def drawn(model, T):
    """The positions of T tokens in each layer of a pass, (n_layer, T)."""
    with model.probe(lambda layer, attention, q, k, place: place.i) as positions:
        model(tokens(1, T))
    return torch.stack(positions)


def test_random_positions_are_new_in_each_pass_of_training_and_the_same_outside_of_it():
    model, other = (random_model(seed, position='rope', random_positions=100) for seed in (0, 1))
    fixed = drawn(model, 40)
    assert not torch.equal(*fixed) and torch.equal(drawn(other, 40), fixed)
    torch.manual_seed(3)
    first, second = drawn(model.train(), 40), drawn(model, 40)
    torch.manual_seed(3)
    assert torch.equal(drawn(model, 40), first) and not torch.equal(first, second)


def test_more_tokens_than_random_positions_are_refused():
    model = random_model(position='rope', random_positions=50)
    with pytest.raises(ValueError, match='random_positions is 50, so 51 tokens'):
        model(tokens(1, 51))
    refuses('51 tokens', new_cache, model, 1, 51)


# ---------------------------------------------------------------------- cache

@pytest.mark.parametrize('changes', EVERY, ids=str)
@torch.no_grad()
def test_cached_decoding_equals_a_full_pass(changes):
    model, idx = random_model(**changes), tokens(2, 90)
    cache = new_cache(model, 2, 90)  # sets the length of the whole text
    parts = [model(part, cache=cache) for part in idx.split([40, 1, 1, 30, 1, 17], dim=1)]
    assert cache.length == 90
    near(torch.cat(parts, 1), model(idx), atol=1e-3)


# ---------------------------------------------------------------------- compiled

@pytest.mark.slow
@pytest.mark.parametrize('backend, changes', [
    *(('aot_eager', changes) for changes in EVERY),  # faster, because it generates no code
    ('inductor', {'position': 'cope', 'n_layer': 1}),
    ('inductor', {'position': 'kerple', 'dape_kernel': 3, 'n_layer': 1})], ids=str)
def test_every_method_is_one_graph_for_a_compiler(backend, changes):
    torch.compiler.reset()  # because it stops compiling code that it has compiled often
    model, windows = random_model(**changes).train(), tokens(2, 41)
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    expected = losses_and_gradients(model, windows)
    near(losses_and_gradients(model, windows, compiled), expected, atol=1e-5)


# ---------------------------------------------------------------------- single methods

def test_alibi_slopes_match_the_paper():
    near(alibi_slopes(6), [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8], atol=1e-5)
    near(alibi_slopes(16), [2 ** (-k / 2) for k in range(1, 17)], atol=1e-5)


def test_ssmax_starts_as_nope_at_the_last_position_of_a_window():
    ssmax = METHODS['ssmax'](random_model().config)
    near(ssmax.factor(torch.tensor([31.0])), torch.ones(4, 1), atol=1e-6)


def test_nape_starts_as_alibi_beside_nope_and_a_sink_as_one_more_key_of_score_0():
    near(METHODS['nape_ssmax'](random_model().config).s, torch.full((2,), 1 / math.log(32)))
    near(METHODS['sink'](random_model().config).sink, torch.zeros(4, 1))


def test_the_adaptive_temperature_leaves_sharp_and_very_flat_rows_alone():
    """Below 0.5 nats by its rule; above 5.9 nats because its polynomial is below 1 there."""
    adaptive = method('adaptive')
    for n, spread, changes in (2, 8.0, False), (600, 0.1, False), (20, 1.0, True):
        q, k, i = torch.rand(1, 4, 1, 8) + spread, spread * torch.randn(1, 2, n, 8), torch.arange(n)
        plain = NoPE.similarity(adaptive, q, k, i[-1:], i)
        assert torch.equal(adaptive.similarity(q, k, i[-1:], i), plain) != changes


@pytest.mark.parametrize('changes', [
    {'position': 't5'}, {'position': 't5', 'dape_kernel': 3},
    {'position': 'none,t5,t5', 'n_layer': 5}])
def test_t5_has_one_table_for_all_layers(changes):
    names = [name for name, _ in random_model(**changes).named_parameters() if 'table' in name]
    assert len(names) == 1


def test_kerples_parameters_act_as_positive_numbers_and_can_recover():
    kerple = method('kerple')
    kerple.p.data[:], kerple.a.data[:] = -3.0, 0.004  # both are clamped to 0.01
    bias = kerple.bias(torch.tensor([7]), torch.tensor([2])).flatten()
    bias.sum().backward()
    found = torch.stack((bias.detach(), kerple.p.grad, kerple.a.grad))[:, 0]
    near(found, [-0.01 * math.log(1.05), -math.log(1.05), -0.01 * 5 / 1.05], rtol=1e-5)


def test_cope_counts_in_float32_where_its_scores_are_bfloat16():
    cope = method('cope', n_embd=16)                                # heads of 4
    cope.e.data = (torch.arange(64) % 2)[:, None].expand(64, 4) * 8.0  # 0 at even counts, 8 at odd
    i = torch.arange(60)
    q = torch.full((1, 4, 60, 4), 0.03125).bfloat16()               # q.e is 0 or 1
    k = torch.randn(1, 2, 60, 4).bfloat16() * 16
    scores = NoPE.similarity(cope, q, k, i, i).double()
    count = scores.sigmoid().tril().flip(-1).cumsum(-1).flip(-1)
    wanted = 1 - (count % 2 - 1).abs()
    near((cope.similarity(q, k, i, i) - scores).tril(), wanted.tril(), atol=0.03)


def test_cheating_dape_leaks_later_tokens_and_says_so():
    with pytest.warns(match='dape_cheat'):
        model = random_model(position='kerple', dape_kernel=3, dape_cheat=True)
    idx = tokens(1, 40)
    cut, whole = model(idx[:, :30]), model(idx)[:, :30]
    assert (whole - cut).abs().max() > 1e-3


# ---------------------------------------------------------------------- Proposition 1 of DAPE V2

def test_a_convolution_over_scores_recalls_what_followed_without_position_encoding():
    """
    Proposition 1. The score is lowest where the key is the query's own token. With f(S) = 5 (S_j -
    S_(j-1)) - S_j, attention goes to the key just after this one.
    """
    dape = method('none', dape_kernel=3, dape_width=2, n_head=1, n_kv_head=1)
    kernel, both = torch.tensor([-5.0, 4.0, 0.0]), torch.tensor([1.0, -1.0])  # at j - 1, j, j + 1
    for p in dape.parameters():
        p.data.zero_()
    dape.first.weight.data[:, 0, 0] = both[:, None] * kernel
    dape.second.weight.data[0, :, 0, 1] = both / 1.01  # LeakyReLU(x) - LeakyReLU(-x) = 1.01 x
    order = torch.rand(30, 20).argsort(dim=1)  # 20 tokens in 30 orders; then one token again
    asked, i = torch.randint(19, (30, 1)), torch.arange(21)
    x = 20 ** 0.5 * torch.eye(20)[torch.cat((order, order.gather(1, asked)), dim=1)][:, None]
    hits = [(one.attend(-x, x, x, i, i)[:, 0, -1].argmax(-1) == order.gather(1, asked + 1)[:, 0])
            for one in (dape, dape.method)]
    assert hits[0].all() and hits[1].sum() < 15
