"""
The transformer, against a second implementation in float64 and against hand calculations.

$ python -m pytest tests/test_model.py
"""

import math
import shutil

import pytest
import torch
import torch.nn.functional as F
from conftest import plain_losses, plain_transformer, random_model
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd

import model as model_file
from configurator import run_config
from model import Attention, ModelConfig, Transformer, fused_attention
from position import POSITIONS

TINYLLAMA = dict(vocab_size=32000, block_size=2048, n_layer=22, n_head=32, n_kv_head=4, n_embd=2048, n_hidden=5632)


def tokens(*shape, vocab_size=61, seed=1):
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def gradients(model, idx, targets):
    model.zero_grad(set_to_none=True)
    losses = model(idx, targets)
    losses.mean().backward()
    return losses.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# ----------------------------------------------------------------------------- size

def big_model():
    with torch.device('meta'):
        return Transformer(ModelConfig(**TINYLLAMA))


@pytest.mark.parametrize('size', ['125m', '350m', '2.7b', '6.7b'])
def test_models_of_dape_v2_have_as_many_weights_as_the_papers_block(size):
    """Of GPT-NeoX's block, by hand: 4 C^2 and 8 C^2 in attention and MLP, biases and LayerNorms 13 C, output untied."""
    c = run_config('config/dape/125m.py') | run_config(f'config/dape/{size}.py')
    sizes = {name: c[name] for name in ('n_layer', 'n_head', 'n_kv_head', 'n_embd', 'n_hidden')}
    C, vocab_size = c['n_embd'], 50304
    with torch.device('meta'):
        model = Transformer(ModelConfig(vocab_size, 512, **sizes))
    assert model.n_params() == pytest.approx(2 * vocab_size * C + c['n_layer'] * (12 * C ** 2 + 13 * C), rel=2e-3)


def test_model_of_the_paper_has_1_100_048_384_weights_and_704_scales():
    model = big_model()
    assert model.n_params() == 1_100_048_384
    vectors = {name: p for name, p in model.named_parameters() if 'head_' in name}  # 704 scales, and as many gains
    assert sum(p.numel() for p in vectors.values()) == 2 * 704 and model.head_scale.numel() == 704
    assert sum(p.numel() for p in model.parameters()) == model.n_params() + 2 * 704
    twin = ModelConfig(**TINYLLAMA, position='rope')
    with torch.device('meta'):
        assert Transformer(twin).n_params() == 1_100_048_384


def test_flops_of_dape_are_those_of_its_kernels_at_every_key():
    plain, dape = (random_model(position='kerple', dape_kernel=kernel, dape_width=8).flops_per_token(100)
                   for kernel in (0, 3))
    by_kernel = 2 * (100 / 2) * 2 * (3 * 8 * 8 + 3 * 8 * 4 + 8 + 4)  # layers, keys; 2 H to 8 to H channels, offsets
    assert dape == (plain[0], plain[1] + by_kernel)


def test_flops_per_token_match_hand_arithmetic():
    weights = 22 * (2048 * (2048 + 2 * 256) + 2048 * 2048 + 3 * 2048 * 5632) + 32000 * 2048  # those that multiply
    norms = (2 * 22 + 1) * 2048
    # each of T queries reads (T + 1) / 2 keys: 2 FLOP per channel for q.k, 2 for the sum of values
    attention = sum(22 * keys * 2048 * (2 + 2) for keys in range(1, 2049)) / 2048
    matmul, by_attention = big_model().flops_per_token(2048)
    assert 0 <= matmul - 2 * weights <= 2 * norms
    assert by_attention == 2 * 22 * 2048 * 2048 == pytest.approx(attention, rel=1e-3)


def test_initial_weights_have_tinyllamas_standard_deviations():
    C, n_layer = 256, 5
    config = ModelConfig(vocab_size=512, block_size=32, n_layer=n_layer, n_head=4, n_kv_head=2, n_embd=C, n_hidden=512)
    model = Transformer(config).init_weights(torch.Generator().manual_seed(0))
    state = dict(model.named_parameters())
    for name in ('embed.weight', 'head.weight', 'blocks.3.attn.qkv.weight', 'blocks.3.mlp.gate_up.weight'):
        assert state[name].std().item() == pytest.approx(math.sqrt(2 / (5 * C)), rel=0.02), name
        assert abs(state[name].mean().item()) < 0.001, name
    for name in ('blocks.3.attn.out.weight', 'blocks.3.mlp.out.weight'):
        assert state[name].std().item() == pytest.approx(1 / (math.sqrt(C) * n_layer), rel=0.02), name
    vectors = [p for p in state.values() if p.dim() == 1]
    assert len(vectors) == 4 * n_layer + 1 and all((p == 1).all() for p in vectors)


def test_same_generator_seed_gives_same_initial_weights():
    first, second = random_model(seed=3).state_dict(), random_model(seed=3).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first['head.weight'], random_model(seed=4).state_dict()['head.weight'])


def test_unknown_position_names_the_known_ones():
    with pytest.raises(ValueError, match="position is 'sinusoidal'") as error:
        random_model(position='sinusoidal')
    assert all(name in str(error.value) for name in POSITIONS) and {'none', 'rope'} <= set(POSITIONS)


@pytest.mark.parametrize('sizes', [
    dict(n_head=4, n_kv_head=3), dict(n_head=4, n_kv_head=8), dict(n_head=4, n_kv_head=0),  # groups
    dict(n_head=5, n_kv_head=5), dict(n_embd=36, n_head=12, n_kv_head=12)], ids=str)        # head sizes 6.4, 3
def test_heads_that_do_not_fit_are_refused(sizes):
    with pytest.raises(ValueError, match='n_head|n_kv_head'):
        random_model(**sizes)


# ----------------------------------------------------------------------------- what it computes

@pytest.mark.parametrize('n_kv_head', [1, 2, 4])
@pytest.mark.parametrize('position', ['none', 'rope', 'logn'])
@pytest.mark.parametrize('T', [1, 45, 300])
def test_logits_equal_a_plain_float64_transformer(position, n_kv_head, T):
    model, idx = random_model(position=position, n_kv_head=n_kv_head, n_layer=3), tokens(2, T)
    expected, attention = plain_transformer(model, idx)
    torch.testing.assert_close(model(idx).double(), expected, rtol=0, atol=2e-4)  # with gradients: on a CPU, a matrix
    with torch.no_grad():                                                         # without: a fused kernel
        torch.testing.assert_close(model(idx).double(), expected, rtol=0, atol=2e-4)
    if position == 'none':  # rotate() computes in float32 always
        torch.testing.assert_close(model.double()(idx), expected, rtol=0, atol=1e-10)
    assert T == 1 or attention[..., -1, :].amax() > 2 / T  # attention was not just uniform


@pytest.mark.parametrize('position', ['none', 'rope', 'logn'])
@pytest.mark.parametrize('T', [33, 256, 257, 600])
def test_future_tokens_never_change_earlier_logits(position, T):
    model, idx = random_model(position=position), tokens(2, T)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            logits = model(idx)
            for j in (1, T // 2, T - 1):
                changed = idx.clone()
                changed[:, j:] = (idx[:, j:] + 1 + tokens(2, T - j, vocab_size=60, seed=j)) % 61
                other = model(changed)
                assert torch.equal(other[:, :j], logits[:, :j])
                assert not torch.equal(other[:, j], logits[:, j])


@pytest.mark.parametrize('position', ['none', 'rope', 'logn'])
def test_rope_but_neither_nope_nor_logn_tells_a_single_layer_the_order_of_earlier_tokens(position):
    model, idx = random_model(position=position, n_layer=1), tokens(1, 40)
    shuffled = torch.cat((idx[:, :-1].flip(1), idx[:, -1:]), dim=1)
    difference = (model(idx)[:, -1] - model(shuffled)[:, -1]).abs().max()
    assert difference < 1e-4 if position in ('none', 'logn') else difference > 1e-2


@pytest.mark.parametrize('changes', [{}, {'position': 'rope'}, {'position': 'alibi'}, {'position': 'logn'},
                                     {'position': 'kerple', 'dape_kernel': 3}, {'position': 'cope'}])
def test_logits_and_losses_of_the_last_positions_equal_those_of_a_full_pass(changes):
    model, idx = random_model(**changes), tokens(2, 21)
    assert model(idx, last=3).shape == (2, 3, 61)
    for last in 1, 3, 21, 30:
        torch.testing.assert_close(model(idx, last=last), model(idx)[:, -last:])
    torch.testing.assert_close(model(idx[:, :-1], idx[:, -3:]), model(idx[:, :-1], idx[:, 1:])[:, -3:])


def test_the_last_layer_computes_the_last_positions_alone(monkeypatch):
    model, seen = random_model(), []
    for block in model.blocks:
        mlp = block.mlp
        monkeypatch.setattr(mlp, 'forward', lambda x, forward=mlp.forward: (seen.append(x.shape[1]), forward(x))[1])
    model(tokens(1, 20), last=3)
    assert seen == [20] * (len(model.blocks) - 1) + [3]


@pytest.mark.parametrize('T, size', [(1, 1), (40, 1), (128, 1), (300, 1), (300, 300)])
def test_attention_of_training_equals_the_fused_kernel_and_its_gradients(T, size):
    """size: of the queries; 300 gives scores that differ by more than exp can hold, of later keys too."""
    shapes = (2, 4, T, 16), (2, 2, T, 16), (2, 2, T, 16)
    q, k, v = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    q, k, v = (x.requires_grad_() for x in (size * q, k, v))
    ours, theirs = fused_attention(q, k, v, is_causal=True), F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    weight = torch.randn_like(ours)
    for one, other in zip(*(torch.autograd.grad((y * weight).sum(), (q, k, v)) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11 * size)


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs an NVIDIA GPU')
@pytest.mark.parametrize('kind', ['causal', 'seen', 'bias', 'decode'])
@pytest.mark.parametrize('dtype, atol', [(torch.float32, 2e-3), (torch.bfloat16, 3e-2)])
def test_attention_on_a_gpu_equals_the_formula_and_needs_no_whole_matrix(kind, dtype, atol):
    T = 1 if kind == 'decode' else 2048
    q, k, v = (torch.randn(2, n_head, length, 64, device='cuda', dtype=dtype)
               for n_head, length in ((32, T), (4, 2048), (4, 2048)))
    j = torch.arange(2048, device='cuda')
    seen = (j <= j[-T:, None])[None, None] & (j > 5)
    mask = {'causal': None, 'bias': torch.randn(1, 32, T, 2048, device='cuda', dtype=dtype)}.get(kind, seen)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        found = fused_attention(q, k, v, mask, is_causal=mask is None)
    assert torch.cuda.max_memory_allocated() - before < 2 * 32 * T * 2048 * 4 or kind == 'decode'
    expected = model_file.matrix_attention(q.float(), k.float(), v.float(), j <= j[:, None] if mask is None else mask)
    rows = slice(10, None) if T > 1 else slice(None)  # the first see no key
    torch.testing.assert_close(found.float()[:, :, rows], expected[:, :, rows], rtol=0, atol=atol)


class SaysItIsOnAGPU(torch.Tensor):
    """A tensor on the CPU for which fused_attention() goes the way of a GPU."""

    device = torch.device('cuda')


def test_decoding_takes_heads_that_a_gpu_kernel_returns_transposed(monkeypatch):
    attention = F.scaled_dot_product_attention

    def memory_efficient_kernel(*tensors):
        """On CUDA it returns token by token, then head by head: strides (2048, 64, 256, 1) here."""
        y = attention(*(x.as_subclass(torch.Tensor) for x in tensors))
        return y.transpose(1, 2).contiguous().transpose(1, 2)

    q, k, v = (torch.randn(2, n_head, T, 64) for n_head, T in ((32, 1), (4, 40), (4, 40)))
    lengths = torch.tensor([40, 33])  # prompts of unequal length
    seen = torch.arange(40) < lengths[:, None, None, None]
    expected = attention(q, k, v, seen, enable_gqa=True)
    monkeypatch.setattr(model_file.F, 'scaled_dot_product_attention', memory_efficient_kernel)
    found = fused_attention(*(x.as_subclass(SaysItIsOnAGPU) for x in (q, k, v)), seen)
    torch.testing.assert_close(found.as_subclass(torch.Tensor), expected)


# ----------------------------------------------------------------------------- head scale

class AttentionWithoutScale(Attention):
    """Attention as it was before it had scales and gains, for windows of few tokens."""

    def project(self, x, query_key):
        B, T, _ = x.shape
        heads = self.qkv(x).view(B, T, -1, self.head_dim).transpose(1, 2)
        q, k, v = heads.split([self.n_head, self.n_kv_head, self.n_kv_head], dim=1)
        return *query_key(q, k), v

    def attend(self, q, k, v, i, j):
        return fused_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def with_and_without_scale(monkeypatch, **changes):
    """Two models of the same weights: every scale 1, and no multiplication by a scale at all."""
    model = random_model(**changes)
    model.head_scale = 1.0
    for block in model.blocks:
        block.attn.head_gain.data.fill_(1)
    monkeypatch.setattr(model_file, 'Attention', AttentionWithoutScale)
    plain = random_model(**changes)
    plain.load_state_dict(model.state_dict())
    assert type(plain.blocks[0].attn) is AttentionWithoutScale
    return model, plain


@pytest.mark.parametrize('position', ['none', 'rope'])
def test_head_scale_of_one_is_plain_attention_to_the_last_bit(monkeypatch, position):
    model, plain = with_and_without_scale(monkeypatch, position=position)
    windows = tokens(2, 301)
    for T in (40, 300):
        losses, grads = gradients(model, windows[:, :T], windows[:, 1:T + 1])
        plain_loss, plain_grads = gradients(plain, windows[:, :T], windows[:, 1:T + 1])
        assert torch.equal(losses, plain_loss)
        assert grads.keys() == plain_grads.keys() and len(grads) == 2 * 6 + 3
        assert all(torch.equal(grads[name], plain_grads[name]) for name in grads)


@pytest.mark.skipif(not shutil.which('g++'), reason='torch.compile on a CPU needs g++')
@pytest.mark.parametrize('position', ['none', 'rope'])
def test_head_scale_of_one_is_plain_attention_to_the_last_bit_when_compiled(monkeypatch, position):
    model, plain = with_and_without_scale(monkeypatch, position=position)
    windows, results = tokens(2, 34), []
    for each in (model, plain):
        losses = torch.compile(each)(windows[:, :-1], windows[:, 1:])
        losses.mean().backward()
        results.append([losses, *(p.grad for p in each.parameters() if p.requires_grad)])
    assert len(results[0]) == 1 + 2 * 6 + 3
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize('position', ['none', 'rope', 'logn'])
def test_head_scale_folds_into_the_query_weights(position):
    model, idx = random_model(position=position), tokens(2, 50)
    logits = model(idx)
    for block in model.blocks:
        rows = block.attn.qkv.weight.data[:32].view(4, 8, 32)  # the queries of 4 heads of 8
        rows *= block.attn.head_scale[:, None, None]
    assert not torch.allclose(model(idx), logits, atol=1e-2)
    model.head_scale = 1.0
    torch.testing.assert_close(model(idx), logits, rtol=0, atol=1e-4)


def test_head_scale_is_set_by_a_number_or_by_an_array_and_read_back():
    model = random_model()
    model.head_scale = 1.25
    assert torch.equal(model.head_scale, torch.full((2, 4), 1.25))
    model.head_scale = [[1, 2, 3, 4], [5, 6, 7, 8.5]]
    assert model.head_scale.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8.5]]
    assert model.blocks[1].attn.head_scale.tolist() == [5, 6, 7, 8.5]
    with pytest.raises(RuntimeError):
        model.head_scale = [[1, 2, 3]]


def test_a_change_of_a_thousandth_in_a_scale_counts_under_bfloat16():
    model, idx = random_model(), tokens(1, 40)

    def logits(scale):
        model.head_scale = scale
        with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):
            return model(idx)

    assert logits(1.6).dtype == torch.bfloat16 and model.head_scale.dtype == torch.float32
    assert torch.tensor(1.601).bfloat16() == torch.tensor(1.6).bfloat16()  # so a scale kept in bfloat16 would not move
    assert not torch.equal(logits(1.6), logits(1.601))


def test_a_compiled_training_step_casts_each_matrix_to_bfloat16_once():
    """In the graphs that a compiler gets, cut as inductor cuts them: none again in backward, where casts look cheap."""
    model, windows, casts = random_model(), tokens(2, 41), []

    def count(graph, inputs):
        cast = [node.args[0] for node in graph.graph.nodes if str(node.target).startswith('aten._to_copy')
                or 'convert_element_type' in str(node.target)]
        casts.append(sum(x.op == 'placeholder' and x.meta['val'].shape in matrices for x in cast))
        return make_boxed_func(graph.forward)

    matrices = [p.shape for name, p in model.named_parameters() if p.dim() == 2 and name != 'embed.weight']
    backend = aot_autograd(fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    with torch.autocast('cpu', torch.bfloat16):
        losses = torch.compile(model, backend=backend, dynamic=False)(windows[:, :-1], windows[:, 1:])
    losses.mean().backward()
    assert casts == [len(matrices), 0]


def test_gradient_of_head_scale_equals_finite_differences_in_float64():
    model, windows = random_model(), tokens(2, 41)
    model.requires_grad_(False)
    for block in model.blocks:
        block.attn.head_scale.requires_grad_(True)
    _, grads = gradients(model, windows[:, :-1], windows[:, 1:])
    assert sorted(grads) == ['blocks.0.attn.head_scale', 'blocks.1.attn.head_scale']  # and of no weight
    expected, step = torch.zeros(2, 4), 1e-5
    for layer in range(2):
        for head in range(4):
            change = torch.zeros(2, 4, dtype=torch.float64)
            change[layer, head] = step
            up, down = (plain_losses(model, windows, model.head_scale + sign * change).mean() for sign in (1, -1))
            expected[layer, head] = (up - down) / (2 * step)
    found = torch.stack([block.attn.head_scale.grad for block in model.blocks])
    assert expected.abs().min() > 1e-5  # every head counts
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


def test_head_scale_is_frozen_until_it_is_tuned():
    windows = tokens(2, 21)
    _, grads = gradients(random_model(), windows[:, :-1], windows[:, 1:])
    assert 'embed.weight' in grads and not [name for name in grads if name.endswith('head_scale')]


# ----------------------------------------------------------------------------- loss

def test_losses_are_the_cross_entropy_of_each_of_the_last_targets():
    model, windows = random_model(), tokens(3, 31)
    expected = plain_losses(model, windows)
    losses = model(windows[:, :-1], windows[:, 1:])
    assert losses.dtype == torch.float32 and losses.shape == (3, 30)
    torch.testing.assert_close(losses.double(), expected, rtol=0, atol=1e-4)
    logits = model(windows[:, :-1])
    torch.testing.assert_close(losses, F.cross_entropy(logits.mT, windows[:, 1:], reduction='none'), rtol=0, atol=1e-5)
    for K in (1, 7):
        last = model(windows[:, :-1], windows[:, -K:])
        torch.testing.assert_close(last.double(), expected[:, -K:], rtol=0, atol=1e-4)


@pytest.mark.parametrize('rows', [1, 7, 64])
def test_losses_in_chunks_equal_losses_at_once_with_their_gradients(rows):
    model, windows = random_model(), tokens(3, 31)
    losses, grads = gradients(model, windows[:, :-1], windows[:, -20:])  # 60 rows of logits
    model.logits_per_chunk = rows * 61 + 60
    chunked, chunked_grads = gradients(model, windows[:, :-1], windows[:, -20:])
    torch.testing.assert_close(chunked, losses, rtol=0, atol=1e-5)
    assert chunked_grads.keys() == grads.keys()
    for name in grads:
        torch.testing.assert_close(chunked_grads[name], grads[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: n + m)


def test_a_compiled_loss_in_bfloat16_is_the_cross_entropy_of_the_same_logits_with_its_gradients():
    model, windows = random_model(), tokens(3, 31)
    x = torch.randn(3, 30, model.config.n_embd)

    def losses_and_gradients(losses_of):
        of, weight = x.clone().requires_grad_(), torch.linspace(-1, 2, 90).view(3, 30)
        with torch.autocast('cpu', torch.bfloat16):
            losses = losses_of(of, windows[:, 1:])
        return losses, *torch.autograd.grad((losses * weight).sum(), (of, model.head.weight))

    ours = losses_and_gradients(torch.compile(model.losses, backend='aot_eager'))
    theirs = losses_and_gradients(model.losses)
    assert ours[0].dtype == torch.float32
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=1e-5)
    for one, other in zip(ours[1:], theirs[1:], strict=True):  # of the head's rounded to bfloat16 in both
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)


def test_loss_in_chunks_never_holds_more_logits_than_a_chunk():
    model, windows, seen = random_model(), tokens(3, 31), []
    model.logits_per_chunk = 10 * 61
    model.head.register_forward_hook(lambda module, inputs, output: seen.append(output.numel()))
    gradients(model, windows[:, :-1], windows[:, 1:])
    assert len(seen) == 2 * 9 and max(seen) == 10 * 61  # 90 rows in tens; backward computes each again


@pytest.mark.parametrize('position', ['none', 'rope', 'logn'])
def test_checkpointed_activations_give_the_same_loss_and_gradients(position):
    model, windows, calls = random_model(position=position), tokens(2, 31), []
    model.blocks[0].attn.register_forward_hook(lambda *_: calls.append(1))
    losses, grads = gradients(model, windows[:, :-1], windows[:, 1:])
    assert len(calls) == 1
    model.checkpoint_activations = True
    again, again_grads = gradients(model, windows[:, :-1], windows[:, 1:])
    assert len(calls) == 3  # forward, and once more in backward
    assert torch.equal(again, losses) and again_grads.keys() == grads.keys()
    for name in grads:
        torch.testing.assert_close(again_grads[name], grads[name], rtol=1e-5, atol=1e-7)


# ----------------------------------------------------------------------------- KV cache

@pytest.mark.parametrize('chunks', [[1] * 40, [23] + [1] * 17, [23, 5, 1, 11], [1, 39], [40]], ids=str)
@pytest.mark.parametrize('position', ['none', 'rope', 'logn'])
@torch.no_grad()
def test_decoding_over_the_cache_equals_a_full_forward(position, chunks):
    model, idx = random_model(position=position), tokens(3, 40)
    cache = model.new_cache(3, 41)
    logits = torch.cat([model(part, cache=cache) for part in idx.split(chunks, dim=1)], dim=1)
    torch.testing.assert_close(logits, model(idx), rtol=0, atol=1e-4)
    torch.testing.assert_close(logits.double(), plain_transformer(model, idx)[0], rtol=0, atol=2e-4)
    assert cache.length == 40 and all(k.shape == (3, 2, 41, 8) for k in cache.k)


def test_cache_that_is_too_short_says_so():
    model = random_model()
    cache = model.new_cache(1, 10)
    model(tokens(1, 8), cache=cache)
    with pytest.raises(ValueError, match='holds 10 tokens but 11 are needed'):
        model(tokens(1, 3), cache=cache)


# ----------------------------------------------------------------------------- losses_and_entropy

@pytest.mark.parametrize('position', ['none', 'rope', 'logn'])
def test_losses_and_entropy_of_one_pass_equal_the_plain_ones(position):
    model, windows = random_model(position=position), tokens(2, 71)
    losses, entropy = model.losses_and_entropy(windows[:, :-1], windows[:, 1:])
    attention = plain_transformer(model, windows[:, :-1])[1]
    assert losses.dtype == entropy.dtype == torch.float32 and entropy.shape == (2, 2, 4, 70)
    torch.testing.assert_close(losses.double(), plain_losses(model, windows), rtol=0, atol=1e-4)
    torch.testing.assert_close(entropy.double(), torch.special.entr(attention).sum(-1), rtol=0, atol=1e-4)
