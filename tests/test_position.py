"""
Each position method against its paper's formula; the extensions of RoPE and ALiBi against transformers' own too.

$ python -m pytest tests/test_position.py
"""

import contextlib
import math
import os
import random
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, TINY, plain_transformer, random_model

import model as model_file
from model import ModelConfig, Transformer
from position import POSITIONS, QUERY_KEY, CoPE, Kerple, alibi_slopes, parse_scaling, rope_frequencies

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


@pytest.mark.parametrize('position', POSITIONS)
def test_no_method_changes_when_a_model_goes_on_at_another_length(position):
    model, idx = random_model(position=position), torch.arange(50)[None]
    longer = random_model(position=position, block_size=128, rope_length=32)
    longer.load_state_dict(model.state_dict())
    assert torch.equal(longer(idx), model(idx))


# ----------------------------------------------------------------------------- every method

EXTENDED = [{'position': 'rope', 'rope_scaling': f'{kind}:4'} for kind in ('pi', 'ntk', 'dynamic_ntk', 'yarn')]
DAPES = [{'position': name, 'dape_kernel': kernel, 'dape_width': 8, 'dape_residual': residual}
         for name in ('none', 'rope', 'kerple', 'alibi', 'fire', 't5', 'cope', 'xl')
         for kernel, residual in ((1, True), (3, name != 'fire'))] + [
    {'position': 'none', 'dape_kernel': 5}, {'position': 'kerple', 'dape_kernel': 7}]
EVERY = [{'position': name} for name in POSITIONS] + EXTENDED + DAPES


def some_tokens(*shape):
    return torch.randint(61, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize('changes', [{'position': name} for name in POSITIONS] + DAPES, ids=str)
def test_logits_equal_the_papers_formulas_in_float64(changes):
    model, idx = random_model(**changes, n_kv_head=2), some_tokens(2, 40)
    expected, _ = plain_transformer(model, idx)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(model(idx).double(), expected, rtol=0, atol=1e-4)
    plain = random_model(**changes | {'dape_kernel': 0} if changes.get('dape_kernel') else {'position': 'rope'})
    if changes != {'position': 'rope'}:
        assert (plain(idx).double() - expected).abs().max() > 0.05  # so the method is no small matter


@pytest.mark.parametrize('position', ['t5', 'cope', 'fire'])
def test_the_formulas_hold_where_distances_and_counts_are_at_their_bounds(position):
    """Past T5's last bucket, 128 keys back, CoPE's last count, 63, and FIRE's L0 = 16."""
    model, idx = random_model(position=position, n_layer=1), some_tokens(1, 200)
    with torch.no_grad():
        torch.testing.assert_close(model(idx).double(), plain_transformer(model, idx)[0], rtol=0, atol=1e-4)


def random_shapes(changes):
    """A few random (sizes of a model, T, t < T), others for each method."""
    draw = random.Random(str(changes))
    for n_head, n_embd in ((4, 32), (6, 48), (2, 8)):
        T = draw.randint(20, 100)
        yield {'n_head': n_head, 'n_kv_head': draw.choice((1, 2)), 'n_embd': n_embd}, T, draw.randint(1, T - 1)


@pytest.mark.parametrize('changes', EVERY, ids=str)
def test_future_tokens_never_change_earlier_logits(changes):
    for sizes, T, t in random_shapes(changes):
        model, idx = random_model(**changes, **sizes), some_tokens(2, T)
        changed = idx.clone()
        changed[:, t:] = (idx[:, t:] + 1 + some_tokens(2, T - t) % 60) % 61
        for grad in (True, False):  # training has an attention of its own
            with torch.set_grad_enabled(grad):
                one, other = model(idx), model(changed)
            assert torch.equal(one[:, :t], other[:, :t])
            assert not torch.equal(one[:, t], other[:, t])


@pytest.mark.parametrize('changes', EVERY, ids=str)
def test_rows_of_a_long_pass_equal_those_of_a_short_one(changes):
    for sizes, T, t in random_shapes(changes):
        if changes.get('rope_scaling', '').startswith('dynamic'):
            T, t = 30, 20  # up to L, where it is plain RoPE
        model, idx = random_model(**changes, **sizes), some_tokens(1, T)
        with torch.no_grad():
            torch.testing.assert_close(model(idx)[:, :t], model(idx[:, :t]), rtol=0, atol=1e-5)


@pytest.mark.parametrize('changes', EVERY, ids=str)
def test_cached_decoding_equals_a_full_pass(changes):
    model, idx = random_model(**changes), some_tokens(2, 90)
    full = model(idx)
    with torch.no_grad():
        cache, parts = model.new_cache(2, 90), []  # 90: the length is fixed before prefill
        for part in idx.split([40, 1, 1, 30, 1, 17], dim=1):
            parts.append(model(part, cache=cache))
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=0, atol=1e-3)


@pytest.mark.parametrize('changes', [c for c in EVERY if c.get('dape_kernel', 0) < 3], ids=str)
def test_prompts_of_unequal_length_go_on_as_each_would_alone(changes):
    model, lengths, more = random_model(**changes), [33, 5, 20], 4
    rows = [some_tokens(1, n + more) for n in lengths]
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
            torch.testing.assert_close(first[b, :n], expected[:n], rtol=0, atol=1e-3)
            torch.testing.assert_close(later[b], expected[n:], rtol=0, atol=1e-3)


IN_ROWS = [{'position': name} for name in ('alibi', 'kerple', 'fire', 't5', 'cope', 'xl')] + DAPES


@pytest.mark.parametrize('changes', IN_ROWS, ids=str)
def test_chunks_of_rows_change_neither_losses_nor_gradients(monkeypatch, changes):
    model, windows, results = random_model(**changes), some_tokens(2, 71), []
    for rows in (71, 16):
        chunks = [(slice(n, min(n + rows, 70)), min(n + rows, 70)) for n in range(0, 70, rows)]
        monkeypatch.setattr(model_file.Attention, 'row_chunks', lambda attn, T, S, n_maps, chunks=chunks: chunks)
        monkeypatch.setattr(model_file, 'CHUNK', 1000)  # so that backward computes them again
        model.zero_grad()
        losses = model(windows[:, :-1], windows[:, 1:])
        losses.mean().backward()
        results.append([losses.detach(), *(p.grad.clone() for p in model.parameters() if p.requires_grad)])
    for whole, chunked in zip(*results):
        torch.testing.assert_close(chunked, whole, rtol=0, atol=1e-5)
    idle = [name for name, p in model.named_parameters() if p.requires_grad and not p.grad.abs().sum() > 0]
    assert idle == []


@pytest.mark.parametrize('changes', EVERY, ids=str)
def test_every_method_is_one_graph_for_a_compiler_with_the_same_losses_and_gradients(changes):
    """Forward and backward as torch.compile cuts them; no code is generated, which would take a minute for each."""
    torch.compiler.reset()  # it gives up on code that it has compiled many times
    model, windows, results = random_model(**changes).train(), some_tokens(2, 41), []
    for forward in (model, torch.compile(model, backend='aot_eager', fullgraph=True, dynamic=False)):
        model.zero_grad()
        losses = forward(windows[:, :-1], windows[:, 1:])
        losses.mean().backward()
        results.append([losses.detach(), *(p.grad.clone() for p in model.parameters() if p.requires_grad)])
    for plain, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=0, atol=1e-5)


@pytest.mark.skipif(not shutil.which('g++'), reason='torch.compile on a CPU needs g++')
@pytest.mark.parametrize('changes', [{'position': 'cope'}, {'position': 'kerple', 'dape_kernel': 3}], ids=str)
def test_compiled_losses_and_gradients_equal_plain_ones(changes):
    model, windows, results = random_model(**changes, n_layer=1), some_tokens(2, 41), []
    for forward in (model, torch.compile(model)):
        model.zero_grad()
        losses = forward(windows[:, :-1], windows[:, 1:])
        losses.mean().backward()
        results.append([losses.detach(), *(p.grad.clone() for p in model.parameters() if p.requires_grad)])
    for plain, compiled in zip(*results):
        torch.testing.assert_close(compiled, plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize('changes', [{'position': 'kerple'}, {'position': 'xl'},
                                     {'position': 'kerple', 'dape_kernel': 3}], ids=str)
def test_entropy_is_that_of_the_attention_that_is_used(changes):
    model, windows = random_model(**changes), some_tokens(2, 51)
    _, entropy = model.losses_and_entropy(windows[:, :-1], windows[:, 1:])
    _, attention = plain_transformer(model, windows[:, :-1])
    torch.testing.assert_close(entropy.double(), torch.special.entr(attention).sum(-1), rtol=0, atol=1e-3)


def test_head_scale_multiplies_the_query_before_anything_else_uses_it():
    for changes in ({'position': 'kerple', 'dape_kernel': 3}, {'position': 'xl'}, {'position': 'cope'}):
        model, idx = random_model(**changes), some_tokens(1, 30)
        scales = torch.tensor([[1.5, 1, 2, 0.7], [1, 1.2, 0.5, 3]])
        model.head_scale = scales
        torch.testing.assert_close(model(idx).double(), plain_transformer(model, idx, scales)[0], rtol=0, atol=1e-3)


# ----------------------------------------------------------------------------- single methods

def test_t5_has_one_table_for_all_layers():
    model = random_model(position='t5')
    assert model.blocks[0].attn.bias is model.blocks[1].attn.bias
    assert len([name for name, _ in model.named_parameters() if 'table' in name]) == 1


def test_kerples_parameters_act_as_positive_numbers():
    bias = Kerple(random_model(position='kerple').config)
    bias.p.data[:], bias.a.data[:] = -3.0, 0.0
    expected = -0.01 * math.log(1 + 0.01 * 5)
    assert bias(torch.tensor([7]), torch.tensor([2])).flatten().tolist() == pytest.approx([expected] * 4)


def test_kerples_parameters_can_come_back_from_below_their_least_value():
    bias = Kerple(random_model(position='kerple').config)
    bias.p.data[:], bias.a.data[:] = -3.0, 0.004
    bias(torch.tensor([7]), torch.tensor([2])).sum().backward()
    assert bias.p.grad.tolist() == pytest.approx([-math.log(1 + 0.01 * 5)] * 4)
    assert bias.a.grad.tolist() == pytest.approx([-0.01 * 5 / (1 + 0.01 * 5)] * 4)


@pytest.mark.parametrize('changes', [{'position': name} for name in POSITIONS] + DAPES, ids=str)
def test_under_one_seed_all_other_weights_start_the_same_with_every_method(changes):
    def start(**changes):
        torch.manual_seed(5)
        return Transformer(ModelConfig(61, **TINY | changes)).init_weights().state_dict()

    plain, model = start(), start(**changes)
    assert all(torch.equal(model[name], weight) for name, weight in plain.items())


def test_cheating_dape_leaks_later_tokens_and_the_honest_one_does_not():
    idx = some_tokens(1, 40)
    changed = idx.clone()
    changed[:, 30] = (idx[:, 30] + 1) % 61
    for cheat in (False, True):
        with pytest.warns(match='sees the tokens that it is to predict') if cheat else contextlib.nullcontext():
            model = random_model(position='kerple', dape_kernel=3, dape_cheat=cheat)
        moved = (model(idx)[:, :30] - model(changed)[:, :30]).abs().max()
        assert moved > 1e-3 if cheat else moved == 0


def test_dape_without_channels_is_refused():
    with pytest.raises(ValueError, match='dape_width is 0; it must be at least 1'):
        random_model(dape_kernel=3, dape_width=0)


def test_a_leak_without_dape_is_refused():
    with pytest.raises(ValueError, match='dape_cheat is a variant of DAPE'):
        random_model(dape_cheat=True)


def test_cope_counts_in_float32_where_its_scores_are_bfloat16():
    cope = CoPE(ModelConfig(61, **TINY | {'n_embd': 4, 'n_head': 1, 'n_kv_head': 1}))
    cope.e.data = (torch.arange(64) % 2)[:, None].float().expand(64, 4)  # 0 at even counts and 1 at odd ones
    scores, i = torch.randn(1, 1, 60, 60).bfloat16(), torch.arange(60)
    found = cope(scores, torch.full((1, 1, 60, 4), 0.25).bfloat16(), None, i, i)
    gates = scores.double().sigmoid().tril()
    count = gates.flip(-1).cumsum(-1).flip(-1)
    wanted = 1 - (count % 2 - 1).abs()
    torch.testing.assert_close(found.double().tril(), wanted.tril(), rtol=0, atol=0.01)


@pytest.mark.parametrize('kernel', [2, -1, 4])
def test_kernels_that_are_not_odd_are_refused(kernel):
    with pytest.raises(ValueError, match=f'dape_kernel is {kernel}; it must be odd'):
        random_model(dape_kernel=kernel)


@pytest.mark.skipif(not os.path.exists('/proc/self/clear_refs'), reason='needs Linux, to measure peak memory')
@pytest.mark.parametrize(('dape_kernel', 'batch', 'lengths'), [(3, 1, (512, 1024)), (0, 8, (128, 256))], ids=str)
def test_peak_memory_in_training_grows_with_the_length_not_its_square(dape_kernel, batch, lengths):
    # small blocks go straight back to the system, so that what is resident is what is in use
    env = os.environ | {'MALLOC_MMAP_THRESHOLD_': '65536', 'MALLOC_TRIM_THRESHOLD_': '65536', 'OMP_NUM_THREADS': '1'}
    script = """
import sys, torch
import model
from model import Attention, ModelConfig
attn = Attention(ModelConfig(61, 512, 1, 12, 12, 192, 4, position='kerple', dape_kernel=int(sys.argv[1])))
def run(T, chunk):
    model.CHUNK = chunk
    x, i = torch.randn(int(sys.argv[2]), T, 192, requires_grad=True), torch.arange(T)
    attn(x, lambda q, k: (q, k), i, i).square().mean().backward()
def peak():
    return next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('VmHWM'))
run(64, 1000)  # with all that is imported on the way
open('/proc/self/clear_refs', 'w').write('5')  # the peak starts anew
before = peak()
run(int(sys.argv[3]), 2 ** 18)
print(peak() - before)
"""
    peaks = [int(subprocess.run([sys.executable, '-c', script, *map(str, (dape_kernel, batch, T))], cwd=ROOT, env=env,
                                capture_output=True, text=True, check=True).stdout) for T in lengths]
    assert 0 < peaks[1] < 2 * peaks[0], peaks


# ----------------------------------------------------------------------------- Proposition 1 of DAPE V2

def recall_model(n_tokens, dape):
    """
    One layer and one head, built by hand, without position encoding. W_q^T W_k = -I, so that a score is lowest where
    the key is the query's own token; the kernel is [-1, 1] over the keys: score_j - score_{j-1} is highest just after.
    """
    model = Transformer(ModelConfig(n_tokens, 64, 1, 1, 1, n_tokens, 1, dape_kernel=3 if dape else 0, dape_width=2))
    one = torch.eye(n_tokens)
    block = model.blocks[0]
    with torch.no_grad():
        model.embed.weight.copy_(one)
        model.head.weight.copy_(one)
        block.attn.qkv.weight.copy_(torch.cat((-one, one, one)))
        block.attn.out.weight.copy_(10 * one)                     # what was recalled outweighs the token itself
        block.mlp.out.weight.zero_()
        if dape:  # S + f(S) = 5 (S_j - S_{j-1}); LeakyReLU(x) - LeakyReLU(-x) = 1.01 x, so f can be linear
            kernel = torch.tensor([-5.0, 4.0, 0.0])               # at j - 1, j, j + 1
            block.attn.dape.first.weight.copy_(torch.stack((kernel, -kernel))[:, None, None])
            block.attn.dape.second.weight.copy_(torch.tensor([[0, 1, 0], [0, -1, 0]])[None, :, None] / 1.01)
            block.attn.dape.first.bias.zero_()
            block.attn.dape.second.bias.zero_()
    return model


def test_a_convolution_over_scores_recalls_what_followed_without_position_encoding():
    words = 'hakuna matata it means no worries for the rest of your days'.split()
    heard = 'it means no worries hakuna matata for the rest of your days hakuna'.split()
    idx = torch.tensor([[words.index(word) for word in heard]])
    assert words[recall_model(len(words), dape=True)(idx)[0, -1].argmax()] == 'matata'
    model, plain, hits, plain_hits = recall_model(20, dape=True), recall_model(20, dape=False), 0, 0
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        order = torch.randperm(20, generator=generator)
        asked = int(torch.randint(19, (), generator=generator))
        idx = torch.cat((order, order[asked:asked + 1]))[None]
        hits += model(idx)[0, -1].argmax().item() == order[asked + 1].item()
        plain_hits += plain(idx)[0, -1].argmax().item() == order[asked + 1].item()
    assert hits == 50 and plain_hits < 25
