"""
Attention entropy against the whole matrix in float64, and rank correlation against its definition.

$ python -m pytest tests/test_entropy.py
"""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from conftest import mistake, plain_losses, plain_transformer, scale_set, stage

import checkpoint
import model as model_file
from corpus import Windows
from entropy import measure_entropy, spearman
from model import Attention, ModelConfig


def plain_entropy(q, k):
    """From the T x T matrix, in float64. q: (B, H, T, D); k: (B, n_kv_head, T, D). Returns (B, H, T)."""
    B, H, T, D = q.shape
    entropy = torch.zeros(B, H, T, dtype=torch.float64)
    for h in range(H):
        key = k[:, h * k.shape[1] // H].double()
        for i in range(T):
            scores = (q[:, h, i, None].double() * key[:, :i + 1]).sum(-1) / math.sqrt(D)
            p = (scores - scores.amax(-1, keepdim=True)).exp()
            p = p / p.sum(-1, keepdim=True)
            entropy[:, h, i] = torch.special.entr(p).sum(-1)
    return entropy


def random_qk(T, n_head=6, n_kv_head=2, D=16):
    """Queries and keys of heads from diffuse to sharp: head h's queries are 4^(h-3) times as long as normal ones."""
    generator = torch.Generator().manual_seed(T)
    q = torch.randn(2, n_head, T, D, generator=generator) * 4.0 ** (torch.arange(n_head) - 3)[:, None, None]
    return q, torch.randn(2, n_kv_head, T, D, generator=generator)


def attention_entropy(q, k):
    """Of a layer without position encoding."""
    H, D = q.shape[1], q.shape[3]
    return Attention(ModelConfig(61, 32, 1, H, k.shape[1], H * D, 4)).entropy(q, k)


PLACES = ['cpu', 'in chunks', pytest.param('cuda', marks=pytest.mark.skipif(not torch.cuda.is_available(),
                                                                            reason='needs an NVIDIA GPU'))]


def entropy_at(place, q, k):
    """attention_entropy of q and k computed at a place: on a device, or as on a device without a fused kernel."""
    with pytest.MonkeyPatch.context() as patch:
        if place == 'in chunks':
            patch.setattr(model_file, 'ENTROPY_KERNELS', {})
            place = 'cpu'
        return attention_entropy(q.to(place), k.to(place)).cpu()


# ----------------------------------------------------------------------------- one layer

@pytest.mark.parametrize('place', PLACES)
@pytest.mark.parametrize('T, n_kv_head', [(1, 2), (2, 1), (100, 2), (256, 6), (301, 2), (600, 1)])
def test_entropy_equals_that_of_the_float64_matrix(place, T, n_kv_head):
    q, k = random_qk(T, n_kv_head=n_kv_head)
    expected = plain_entropy(q, k)
    found = entropy_at(place, q, k)
    assert found.dtype == torch.float32 and found.shape == (2, 6, T)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)
    if T >= 100:  # some heads are diffuse, some sharp
        bound = math.log(T)
        assert expected[:, 0, -1].min() > 0.99 * bound and expected[:, -1, 1:].median() < 0.05 * bound


@pytest.mark.parametrize('place', PLACES)
def test_entropy_is_measured_in_float32_under_bfloat16(place):
    q, k = random_qk(100)
    with torch.autocast('cuda' if place == 'cuda' else 'cpu', torch.bfloat16):
        found = entropy_at(place, q, k)
    torch.testing.assert_close(found.double(), plain_entropy(q, k), rtol=0, atol=1e-4)


def test_entropy_of_bfloat16_queries_and_keys_is_exact_for_what_they_hold():
    q, k = (x.bfloat16() for x in random_qk(100))
    torch.testing.assert_close(attention_entropy(q, k).double(), plain_entropy(q, k), rtol=0, atol=1e-4)


@pytest.mark.parametrize('place', PLACES)
def test_entropy_lies_between_0_and_ln_of_the_number_of_keys(place):
    q, k = random_qk(300, n_head=8)
    entropy = entropy_at(place, q, k)
    assert (entropy[:, :, 0] < 1e-5).all() and (entropy >= 0).all()  # the first query sees itself only
    assert (entropy <= torch.arange(1, 301).log() + 1e-5).all()


def test_queries_of_zero_have_the_greatest_entropy():
    _, k = random_qk(70)
    bound = torch.arange(1, 71).log().expand(2, 6, 70)
    torch.testing.assert_close(attention_entropy(torch.zeros(2, 6, 70, 16), k), bound)


@pytest.mark.parametrize('place', PLACES)
@pytest.mark.parametrize('of', ['q', 'k'])
def test_gradient_of_entropy_equals_finite_differences_in_float64(place, of):
    tensors, step = dict(zip('qk', random_qk(20, n_head=4))), 1e-5
    weight, way = torch.randn(2, 4, 20, dtype=torch.float64), torch.randn_like(tensors[of])
    ahead, behind = (plain_entropy(**tensors | {of: tensors[of].double() + change * way})
                     for change in (step, -step))
    expected = ((ahead - behind) * weight).sum() / (2 * step)
    tensors[of].requires_grad_()
    (entropy_at(place, **tensors).double() * weight).sum().backward()
    assert (tensors[of].grad * way).sum().item() == pytest.approx(expected.item(), rel=1e-3)


# ----------------------------------------------------------------------------- a whole model

def test_measure_entropy_equals_the_plain_model_bin_by_bin(cpu, tiny_run, corpus_dir):
    model, _ = checkpoint.load_model('last', tiny_run, 'cpu')
    model.head_scale = torch.linspace(0.5, 6, 8).view(2, 4)
    windows = Windows(str(corpus_dir), 'test', 90, 0)
    tokens = torch.from_numpy(windows.fixed(5))
    with torch.no_grad():
        expected_loss = plain_losses(model, tokens).mean(0)[:88].view(22, 4).mean(1)
        attention = plain_transformer(model, tokens[:, :-1])[1]  # (n_layer, B, H, T, T)
    expected = torch.special.entr(attention).sum(-1).mean(1)[..., :88].unflatten(-1, (22, 4)).mean(-1)
    position, loss, entropy = measure_entropy(model, windows, 5, 200, 4, cpu)
    assert entropy.shape == (2, 4, 22)
    np.testing.assert_allclose(position, np.arange(1, 89).reshape(22, 4).mean(1))  # the last two fill no bin
    np.testing.assert_allclose(loss, expected_loss, atol=1e-4)
    np.testing.assert_allclose(entropy, expected, atol=1e-4)


# ----------------------------------------------------------------------------- rank correlation

def test_spearman_of_hand_worked_examples():
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [math.exp(-x) for x in (1, 2, 3, 4)]) == pytest.approx(-1)
    # ranks 1 2 3 4 5 and 2 1 4 3 5: 1 - 6 * (1 + 1 + 1 + 1 + 0) / (5 * 24) = 0.8
    assert spearman([1, 2, 3, 4, 5], [20, 10, 40, 30, 50]) == pytest.approx(0.8)
    # ties: ranks 1.5 1.5 3 and 1 2 3: deviations (-.5 -.5 1) . (-1 0 1) = 1.5, over sqrt(1.5 * 2)
    assert spearman([7, 7, 9], [1, 2, 3]) == pytest.approx(1.5 / math.sqrt(3))
    assert math.isnan(spearman([1, 2, 3], [5, 5, 5]))


def test_spearman_equals_its_definition_with_ties():
    generator = np.random.default_rng(0)
    for _ in range(20):
        x, y = generator.integers(0, 6, (2, 30))
        rank_x, rank_y = ([sum(b < a for b in v) + (sum(b == a for b in v) + 1) / 2 for a in v] for v in (x, y))
        assert spearman(x, y) == pytest.approx(np.corrcoef(rank_x, rank_y)[0, 1])


# ----------------------------------------------------------------------------- as run

def run(tiny_run, tmp_path, *arguments):
    out, _ = stage('entropy', f'--init_from={tiny_run}/last.pt', f'--out_dir={tmp_path}', '--device=cpu',
                   '--dtype=float32', '--n_samples=6', *arguments)
    return out


def test_two_ranks_measure_what_one_does(tiny_run, tmp_path):
    results = []
    for ranks in (1, 2):
        stage('entropy', f'--init_from={tiny_run}/last.pt', f'--out_dir={tmp_path / str(ranks)}', '--device=cpu',
              '--dtype=float32', '--n_samples=5', '--length=64', ranks=ranks)
        results.append(json.loads((tmp_path / str(ranks) / 'entropy.json').read_text()))
    for key in 'entropy', 'loss':
        np.testing.assert_allclose(results[1][key], results[0][key], rtol=1e-5)


def test_run_in_bits_reports_nats_over_ln_2(tiny_run, corpus_dir, cpu, tmp_path):
    shutil.copy(tiny_run / 'last.pt', tmp_path)
    _, info = checkpoint.load_model('last', tiny_run, 'cpu')
    scales = [[0.5, 1, 2, 4], [1, 1, 1, 1]]
    checkpoint.save_scale(tmp_path / 'mine.json', info, {256: scale_set(scales)}, 'head')
    out = run(tiny_run, tmp_path, f'--scale={tmp_path}/mine.json', '--bits=True', '--length=128')
    result = json.loads((tmp_path / 'entropy_mine.json').read_text())
    assert all((tmp_path / f'{name}_mine.png').stat().st_size > 1000 for name in ('entropy', 'entropy_heads'))
    assert result['unit'] == 'bits' and result['head_scale'] == scales and result['weights_digest'] == info['digest']

    model, _ = checkpoint.load_model('last', tiny_run, 'cpu')
    model.head_scale = scales
    width = 128 // len(result['position'])
    _, loss, nats = measure_entropy(model, Windows(str(corpus_dir), 'test', 128), 6, 1000, width, cpu)
    np.testing.assert_allclose(result['entropy'], nats / math.log(2), atol=1e-4)
    np.testing.assert_allclose(result['mean_entropy'], nats.mean((0, 1)) / math.log(2), atol=1e-4)
    np.testing.assert_allclose(result['bound'], np.log2(result['position']), rtol=1e-5)
    np.testing.assert_allclose(result['loss'], loss, rtol=1e-4)  # the loss stays in nats
    last = [bin_[-1] for bin_ in nats[0]]
    assert result['spearman'][0] == pytest.approx(spearman(scales[0], last)) and result['spearman'][1] is None
    for T in (16, 32, 64, 128):  # the printed rows show the bin that ends at each length
        row = next(line.split() for line in out.splitlines() if line.split()[:1] == [str(T)])
        assert float(row[1]) == pytest.approx(result['mean_entropy'][T // width - 1], abs=6e-4)


def test_the_stage_finds_the_entropy_of_the_float64_matrix_by_default(
        tiny_run, corpus_dir, tmp_path):
    """Also where auto would be bfloat16, which under such large scales is tenths of a nat off."""
    _, info = checkpoint.load_model('last', tiny_run, 'cpu')
    scales = [[0.5, 2, 4, 8], [3, 6, 9, 12]]
    checkpoint.save_scale(tmp_path / 'mine.json', info, {256: scale_set(scales)}, 'head')
    stage('entropy', f'--init_from={tiny_run}/last.pt', f'--out_dir={tmp_path}', '--device=cpu',
          '--n_samples=3', '--length=64', f'--scale={tmp_path}/mine.json')
    model, _ = checkpoint.load_model('last', tiny_run, 'cpu')
    model.head_scale = scales
    tokens = torch.from_numpy(Windows(str(corpus_dir), 'test', 64).fixed(3))
    attention = plain_transformer(model, tokens[:, :-1])[1]
    expected = torch.special.entr(attention).sum(-1).mean(1).unflatten(-1, (32, 2)).mean(-1)
    found = json.loads((tmp_path / 'entropy_mine.json').read_text())['entropy']
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_run_without_a_scale_has_no_correlation_and_no_label(tiny_run, tmp_path):
    run(tiny_run, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ['entropy.json', 'entropy.png', 'entropy_heads.png']
    result = json.loads((tmp_path / 'entropy.json').read_text())
    assert result['unit'] == 'nats' and 'spearman' not in result
    assert result['position'][-1] > 8 * 32 - 8 and np.shape(result['entropy']) == (2, 4, len(result['position']))


def test_window_longer_than_the_text_is_one_line(tiny_run, tmp_path):
    line = mistake('entropy', f'--init_from={tiny_run}/last.pt', f'--out_dir={tmp_path}', '--length=100000')
    assert '100,000' in line


def test_mistakes_are_met_before_work_in_one_line(tiny_run, tmp_path):
    (tmp_path / 'other.json').write_text('{"stage": "passkey"}')
    gap = {'stage': 'entropy', 'position': [1, 2], 'loss': [3, None], 'mean_entropy': [1, 2]}
    (tmp_path / 'gap.json').write_text(json.dumps(gap))
    for argument, message in (('--n_samples=0', 'n_samples is 0; it must be at least 1'),
                              (f"--compare=['{tmp_path}/other.json']", 'other.json is not a result of entropy.py'),
                              (f"--compare=['{tmp_path}/gap.json']", 'gap.json has null in loss')):
        assert message in mistake('entropy', f'--init_from={tiny_run}/last.pt', f'--out_dir={tmp_path}/out', argument)
