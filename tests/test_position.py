"""
Each position method against its paper's formula; the extensions of RoPE and ALiBi against transformers' own too.

$ python -m pytest tests/test_position.py
"""

import math

import pytest
import torch
from conftest import random_model

from position import POSITIONS, QUERY_KEY, alibi_slopes, parse_scaling, rope_frequencies

D = 64


def turn(x, start, config, total=None):
    """x: (B, H, T, D), as RoPE turns it at positions start, start + 1 ..."""
    position = torch.arange(start, start + x.shape[2])
    return QUERY_KEY['rope'](config, position, total or start + x.shape[2])(x, x)[0]


def config(**changes):
    return random_model(position='rope', **changes).config  # head_dim 8


# ----------------------------------------------------------------------------- RoPE

def test_rope_is_multiplication_by_a_complex_number_of_size_one():
    x = torch.randn(2, 3, 50, 8, generator=torch.Generator().manual_seed(0))
    frequency = torch.tensor([10000 ** (-2 * k / 8) for k in range(4)], dtype=torch.float64)
    angle = torch.arange(7, 57)[:, None] * frequency
    expected = torch.complex(x[..., :4].double(), x[..., 4:].double()) * torch.polar(torch.ones_like(angle), angle)
    turned = turn(x, 7, config()).double()
    torch.testing.assert_close(torch.complex(turned[..., :4], turned[..., 4:]), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize('scaling', ['', 'pi:4', 'ntk:4', 'yarn:4'])
def test_rope_scores_depend_only_on_the_distance(scaling):
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0))

    def score(i, j):
        return (turn(q, i, config(rope_scaling=scaling)) @ turn(k, j, config(rope_scaling=scaling)).mT).item()

    for distance in (0, 1, 17):
        scores = [score(j + distance, j) for j in (0, 5, 200, 1000)]
        assert scores == pytest.approx([scores[0]] * 4, abs=2e-3)
    assert abs(score(1, 0) - score(0, 0)) > 0.05


def test_rope_base_sets_the_frequencies():
    frequency, factor = rope_frequencies(4, 100.0, '', 32, 32)
    assert frequency.tolist() == pytest.approx([1, 0.1]) and factor == 1


# ----------------------------------------------------------------------------- extensions of RoPE, L = 2048

def test_pi_divides_positions():
    plain, _ = rope_frequencies(D, 10000.0, '', 2048, 8192)
    assert torch.equal(rope_frequencies(D, 10000.0, 'pi:4', 2048, 8192)[0], plain / 4)


@pytest.mark.parametrize('s, base', [(2, 20452), (4, 41829), (8, 85550)])
def test_ntk_enlarges_the_base_as_in_the_papers_code(s, base):
    frequency, _ = rope_frequencies(D, 10000.0, f'ntk:{s}', 2048, 8192)
    assert frequency[0] == 1 and frequency[1].item() ** (-D / 2) == pytest.approx(base, rel=1e-4)
    slowest = 10000.0 ** (-(D - 2) / D)
    assert frequency[-1].item() == pytest.approx(slowest / s, rel=1e-9)  # what the exponent D / (D - 2) is for


def test_dynamic_ntk_is_plain_rope_up_to_L_and_grows_with_the_pass():
    plain, _ = rope_frequencies(D, 10000.0, '', 2048, 2048)
    for total in (1, 2047, 2048):
        assert torch.equal(rope_frequencies(D, 10000.0, 'dynamic_ntk:2', 2048, total)[0], plain)
    grown, _ = rope_frequencies(D, 10000.0, 'dynamic_ntk:2', 2048, 8192)
    assert torch.equal(grown, rope_frequencies(D, 10000.0, 'ntk:7', 2048, 8192)[0])  # 2 * 4 - 1


def test_yarn_mixes_pairs_between_8_and_21_at_the_papers_sizes():
    plain, _ = rope_frequencies(D, 10000.0, '', 2048, 8192)
    for s, square in ((2, 1.1434), (4, 1.2965), (8, 1.4591)):
        frequency, factor = rope_frequencies(D, 10000.0, f'yarn:{s}', 2048, 8192)
        for k in range(32):
            ramp = min(1, max(0, (k - 8) / 13))
            assert frequency[k].item() == pytest.approx(plain[k].item() * ((1 - ramp) + ramp / s))
        assert factor ** 2 == pytest.approx(square, abs=1e-4)


@pytest.mark.parametrize('kind', ['pi', 'ntk', 'dynamic_ntk', 'yarn'])
def test_every_extension_by_1_is_plain_rope(kind):
    plain = rope_frequencies(D, 10000.0, '', 2048, 2048)
    frequency, factor = rope_frequencies(D, 10000.0, f'{kind}:1', 2048, 2048)
    assert torch.equal(frequency, plain[0]) and factor == 1


@pytest.mark.parametrize('text', ['yarn', 'yarn:', 'yarn:0.5', 'yarn:x', 'yarn:inf', 'nope:2', '2'])
def test_wrong_extensions_are_refused(text):
    with pytest.raises(ValueError, match='METHOD:FACTOR'):
        parse_scaling(text)


def test_extension_of_another_method_is_refused():
    with pytest.raises(ValueError, match="extends RoPE, but position is 'none'"):
        random_model(rope_scaling='pi:2')


# ----------------------------------------------------------------------------- ALiBi, log-n

@pytest.mark.parametrize('n_head, slopes', [
    (1, [2 ** -8]), (4, [2 ** -2, 2 ** -4, 2 ** -6, 2 ** -8]),
    (6, [2 ** -2, 2 ** -4, 2 ** -6, 2 ** -8, 2 ** -1, 2 ** -3]),
    (8, [2.0 ** -k for k in range(1, 9)]),
    (12, [2.0 ** -k for k in range(1, 9)] + [0.70711, 0.35355, 0.17678, 0.08839]),
    (16, [2 ** (-k / 2) for k in range(1, 17)]),
])
def test_alibi_slopes_match_the_paper(n_head, slopes):
    assert alibi_slopes(n_head) == pytest.approx(slopes, abs=1e-5)


def test_logn_leaves_the_query_at_L_alone():
    q = torch.ones(1, 1, 64, 8)
    grown = QUERY_KEY['logn'](random_model(position='logn').config, torch.arange(64), 64)(q, q)[0][0, 0, :, 0]
    assert grown[0] == 0 and grown[31] == 1 and grown[63].item() == pytest.approx(math.log(64) / math.log(32))


# ----------------------------------------------------------------------------- every method with a cache

EVERY = [{'position': name} for name in POSITIONS] + [
    {'position': 'rope', 'rope_scaling': f'{kind}:4'} for kind in ('pi', 'ntk', 'dynamic_ntk', 'yarn')]


@pytest.mark.parametrize('changes', EVERY, ids=str)
def test_cached_decoding_equals_a_full_pass(changes):
    model, idx = random_model(**changes), torch.randint(61, (2, 90), generator=torch.Generator().manual_seed(0))
    full = model(idx)
    with torch.no_grad():
        cache, parts = model.new_cache(2, 90), []  # 90: the length is fixed before prefill
        for part in idx.split([40, 1, 1, 30, 1, 17], dim=1):
            parts.append(model(part, cache=cache))
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=0, atol=1e-4)


@pytest.mark.parametrize('changes', EVERY, ids=str)
def test_prompts_of_unequal_length_go_on_as_each_would_alone(changes):
    model, generator = random_model(**changes), torch.Generator().manual_seed(0)
    lengths, more = [33, 5, 20], 4
    rows = [torch.randint(61, (1, n + more), generator=generator) for n in lengths]
    prompts = torch.zeros(3, 33, dtype=torch.long)
    for b, (row, n) in enumerate(zip(rows, lengths)):
        prompts[b, :n] = row[0, :n]
    with torch.no_grad():
        cache = model.new_cache(3, 33 + more)
        first = model(prompts, cache=cache)
        cache.set_prompt_lengths(torch.tensor(lengths))
        later = torch.cat([model(torch.cat([row[:, n + t:n + t + 1] for row, n in zip(rows, lengths)]), cache=cache)
                           for t in range(more)], dim=1)
        for b, (row, n) in enumerate(zip(rows, lengths)):
            alone = model.new_cache(1, 33 + more)  # of the same length: dynamic NTK's base depends on it
            expected = model(row, cache=alone)[0]
            torch.testing.assert_close(first[b, :n], expected[:n], rtol=0, atol=1e-4)
            torch.testing.assert_close(later[b], expected[n:], rtol=0, atol=1e-4)
