"""
Attention entropy against the matrix in float64: of one layer, of every method, and as run.

$ python -m pytest tests/test_entropy.py
"""

import json

import numpy as np
import pytest
import torch
from conftest import EVERY, near, on, random_model, read, stage, tokens
from plain import plain_entropy, plain_losses

from entropy import attention_entropy, entropies, entropy_without_matrix
from position import NoPE, Place

SCALES = [[0.5, 1, 2, 4], [1, 1, 1, 1]]


# ---------------------------------------------------------------------- the formula

LAYOUTS = {
    'tokens before heads': lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    'every second number': lambda x: torch.stack((x, -x), dim=-1)[..., 0],
}


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('n_kv_head, D, size', [(1, 16, 1), (2, 2, 5), (4, 64, 50)])
def test_entropy_without_a_matrix_is_exact_however_q_and_k_are_stored(layout, n_kv_head, D, size):
    q, k, i = size * torch.randn(2, 4, 70, D), torch.randn(2, n_kv_head, 70, D), torch.arange(70)
    attention = NoPE(None).scores(q.double(), k.double(), i, i).softmax(-1)
    found = entropy_without_matrix(*map(LAYOUTS[layout], (q, k)))
    assert found.dtype == torch.float32 and found.min() >= 0
    near(found, torch.special.entr(attention).sum(-1), atol=2e-5 * size)


@pytest.mark.parametrize('position', ['none', 'kerple'])
def test_entropy_is_float32_also_where_the_rest_is_not(position):
    method, i = random_model(position=position).blocks[0].attn.position, torch.arange(50)
    given = 4 * torch.randn(1, 4, 50, 8), torch.randn(1, 2, 50, 8), Place(i, i, 50)
    expected = attention_entropy(method, *given)
    with torch.autocast('cpu', torch.bfloat16):
        near(attention_entropy(method, *given), expected)


@pytest.mark.parametrize('changes', EVERY, ids=str)
def test_entropy_of_every_method_and_its_gradient_are_those_of_the_float64_matrix(changes):
    model, windows = random_model(**changes), tokens(2, 51)
    idx, scale = windows[:, :-1], model.head_scale.double().numpy()
    with torch.no_grad():
        found, losses = entropies(model, idx, windows[:, 1:])
    near(found, plain_entropy(model, idx), atol=1e-4)
    near(losses, model(idx, windows[:, 1:]), atol=1e-5)

    model.checkpoint_activations = True
    scales = [block.attn.head_scale.requires_grad_() for block in model.blocks]
    with_gradient, _ = entropies(model, idx, windows[:, 1:])
    near(with_gradient, found, atol=1e-4)
    gradients = torch.autograd.grad(with_gradient.mean(), scales)
    direction = np.random.default_rng(0).normal(size=scale.shape)
    ahead, behind = (plain_entropy(model, idx, scale + step * direction).mean()
                     for step in (1e-5, -1e-5))
    slope = (torch.stack(gradients)[..., 0].double().numpy() * direction).sum()
    assert slope == pytest.approx((ahead - behind) / 2e-5, rel=1e-3, abs=1e-6)


# ---------------------------------------------------------------------- as run

def test_run_with_tuned_scales_reports_the_float64_matrix(tiny_run, tiny, windows, tmp_path):
    model, info = tiny
    file = {'weights_digest': info['digest'], 'position_method': 'none', 'rope_scaling': '',
            'target_length': 128, 'head_scale': SCALES}
    (tmp_path / 'mine.json').write_text(json.dumps(file))
    command = f'--scale={tmp_path}/mine.json --length=128 --n_samples=3 --tail=16'
    stage('entropy', *on(tiny_run, tmp_path, command))
    result, ids = read(tmp_path / 'entropy_mine.json'), windows(3, 128)

    nats = plain_entropy(model, ids[:, :-1], SCALES).mean(1).reshape(2, 4, 64, 2).mean(-1)
    near(result['entropy'], nats, atol=1e-4)
    near(result['mean_entropy'], nats.mean((0, 1)), atol=1e-4)
    near(result['loss'], plain_losses(model, ids, SCALES).mean(0).reshape(64, 2).mean(1), atol=1e-4)
