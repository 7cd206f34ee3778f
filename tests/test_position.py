"""
Every position method: its formula in float64, its numbers of 2026-11-22, the fast ways to compute
it, and classes of one's own.

$ python -m pytest tests/test_position.py
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import EVERY, TINY, losses_and_gradients, near, random_model, tokens
from plain import plain_losses, plain_rotated, plain_transformer

import position
from configurator import UserError
from entropy import entropies
from model import ModelConfig, Transformer
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
    expected, _ = plain_transformer(model, idx)
    near(model(idx), expected, atol=2e-4)
    near(model(idx[:, :-1], idx[:, 1:]), plain_losses(model, idx), atol=2e-4)
    name = changes['position']
    other = random_model(**changes | {'position': 'logn' if name == 'none' else 'none',
                                      'rope_scaling': '', 'rope_share': 1.0, 'rope_window': 0,
                                      'random_positions': 0, 'dape_residual': True})
    other.load_state_dict(model.state_dict(), strict=False)
