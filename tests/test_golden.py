"""
Golden numbers: what each position method of 2026-11-22 computed, in float32 on one CPU thread.
Other machines round differently, hence the tolerances.

$ python -m pytest tests/test_golden.py

tests/golden.json has the seed of each parameter, and for each method: the sum of squares of each
parameter at the start, then, with the weights of fill(): losses, gradient norms, mean entropies and
generated tokens.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import losses_and_gradients, near, read

from kernels import attention_entropy
from lib.generate import Decoding, complete
from model import ModelConfig, Transformer, vector_of

GOLDEN = read(Path(__file__).with_name('golden.json'))
SIZES = dict(vocab_size=31, block_size=16, n_layer=2, n_head=4, n_kv_head=2, n_embd=16, n_hidden=24)
close = pytest.approx


def fill(model):
    """Give each parameter random values of its own seed."""
    for name, p in model.named_parameters():
        generator = np.random.Generator(np.random.Philox(GOLDEN['seeds'][name]))
        values = torch.from_numpy(generator.uniform(-1, 1, p.shape).astype(np.float32))
        is_of_dape = '.position.first.' in name or '.position.second.' in name
        if vector_of(name) or p.dim() == 1 and not is_of_dape:
            p.data = 1 + 0.5 * values
        else:
            p.data = values * (0.5 if p.dim() > 1 else 0.2)
    return model.eval()


@pytest.mark.parametrize('name', GOLDEN['methods'])
def test_every_method_starts_and_computes_as_it_did(name):
    golden = GOLDEN['methods'][name]
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**SIZES, **golden['config'])).init_weights()
    start = {n: p.double().pow(2).sum().item() for n, p in model.named_parameters()}
    assert start == close(golden['start'], rel=1e-5, abs=1e-6)  # golden.json has 6 decimals

    x = torch.from_numpy(np.random.Generator(np.random.Philox(7)).integers(0, 31, (2, 41)))
    fill(model).requires_grad_(True)
    losses, gradients = losses_and_gradients(model, x)
    norms = {n: gradient.double().norm().item() for n, gradient in gradients.items()}
    assert losses.flatten()[::7].tolist() == close(golden['losses'], rel=1e-5)
    assert norms == close(golden['gradient_norms'], rel=1e-4, abs=1e-7)

    model.requires_grad_(False)
    with model.probe(attention_entropy) as entropy:
        model(x[:, :-1])
    near(torch.stack(entropy).double().mean((1, 3)), golden['entropy'], rtol=1e-5)  # (n_layer, H)
    prompts = [x[0, :20].tolist(), x[1, :13].tolist()]
    assert complete(model, prompts, 8) == golden['generated']
    assert complete(model, prompts, 6, Decoding(beams=3)) == golden['beam']
