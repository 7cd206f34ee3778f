"""
The walk: how many functions of this project one crosses from a batch to an updated model. A reader
who steps through train.py meets these functions, and PyTorch's scaled_dot_product_attention. Also:
what a step leaves in DDP's gradients.

$ python -m pytest -s tests/test_walk.py     # prints the list
"""

import functools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import ROOT, TINY

import train
from lib.checkpoints import config_of
from lib.tokens import Windows
from model import Transformer


def crossed(walk):
    """The functions of this project that walk() calls, [(file, name)], in order of first call."""
    found = {}

    def on_event(frame, event, arg):
        path = Path(frame.f_code.co_filename)
        if event == 'call' and path.is_relative_to(ROOT) and path != Path(__file__):
            name = str(path.relative_to(ROOT)), frame.f_code.co_qualname
            if not name[0].startswith('.venv'):
                found[name] = True

    sys.setprofile(on_event)
    try:
        walk()
    finally:
        sys.setprofile(None)
    return list(found)


@pytest.fixture
def state(cpu):
    """The TrainState of a small NoPE model."""
    settings = vars(train) | TINY
    model = Transformer(config_of(settings, vocab_size=257)).init_weights()
    optimizer = train.new_optimizer(model, settings)
    scaler = torch.amp.GradScaler('cpu', enabled=False)
    return train.TrainState(model, model, optimizer, scaler, cpu.autocast(), cpu)


def test_a_training_step_crosses_at_most_18_functions_in_5_files_and_reaches_sdpa(
        cpu, state, corpus_dir, monkeypatch):
    windows, calls = Windows(str(corpus_dir), 'train', 32), []
    sdpa = F.scaled_dot_product_attention
    monkeypatch.setattr(F, 'scaled_dot_product_attention',
                        lambda *args, **more: calls.append(more) or sdpa(*args, **more))
    x, y = batch = train.rank_batch(windows, 0, 4, cpu)
    fetch_next = functools.partial(train.rank_batch, windows, 1, 4, cpu)

    forward = crossed(lambda: state.model(x, y).mean().backward())
    assert [call['is_causal'] for call in calls] == [True] * 2  # one call in each of the 2 layers
    step = crossed(lambda: train.train_step(state, batch, fetch_next, 4, 1.0))
    for functions, most, most_files in (forward, 10, 3), (step, 18, 5):
        print('', *(f'{file:16} {name}' for file, name in functions), sep='\n')
        assert len(functions) <= most and len({file for file, _ in functions}) <= most_files


def test_gradients_stay_in_the_buckets_of_ddp_after_a_step(cpu, state, corpus_dir, tmp_path):
    windows = Windows(str(corpus_dir), 'train', 32)
    fetch = functools.partial(train.rank_batch, windows, 0, 4, cpu)
    dist.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    try:
        _, state.called = train.place_model(state.model, False, False, replace(cpu, world_size=2))
        for _ in range(3):  # DDP makes its buckets anew after the first step
            train.train_step(state, fetch(), fetch, 2, 1.0)
    finally:
        dist.destroy_process_group()
    gradients = [p.grad for p in state.model.parameters() if p.requires_grad]
    assert len({gradient.untyped_storage().data_ptr() for gradient in gradients}) == 1
    assert not any(gradient.any() for gradient in gradients)
