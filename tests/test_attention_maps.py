"""
The maps of attention_maps.py against the whole matrix in float64, from the formulas that
conftest.py has a second time.

$ python -m pytest tests/test_attention_maps.py
"""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from conftest import mistake, plain_position, plain_transformer, random_model, stage_here

import attention_maps
import kernels
from lib import checkpoints
from lib.tokens import Windows

MODELS = {
    'nope': {},
    'xl': {'position': 'xl'},
    'cope with DAPE': {'position': 'cope', 'dape_kernel': 1},
    'kerple with DAPE': {'position': 'kerple', 'dape_kernel': 3},
    'kerple without a residual': {
        'position': 'kerple', 'dape_kernel': 3, 'dape_residual': False},
}


def plain_parts(model, tokens, layer, head):
    """
    {part: (T, T)} of one head in float64, lower triangle, from the layer's scaled queries and keys;
    and all attention (n_layer, 1, H, T, T).
    """
    c, T, prefix = model.config, tokens.shape[1], f'blocks.{layer}.attn.'
    with model.probe(lambda number, attention, q, k, place: (q.double(), k.double())) as seen:
        model(tokens)
    q, k = seen[layer]
    k = k.repeat_interleave(c.n_head // c.n_kv_head, dim=1)
    raw = q @ k.transpose(-1, -2) / math.sqrt(c.head_dim)
    own, bias = {}, torch.zeros_like(raw)
    for name, p in model.state_dict().items():
        name = name.removeprefix(prefix).replace('position.method.', 'position.')
        own[name] = p.double()
    if c.position == 'kerple':
        i = torch.arange(T, dtype=torch.float64)
        distance = (i[:, None] - i).clamp(min=0)
        p, a = (own[f'position.{name}'][:, None, None] for name in 'pa')
        bias = (-p * (1 + a * distance).log())[None]
    q, k = list(q.unbind(1)), list(k.unbind(1))
    score = plain_position(dataclasses.replace(c, dape_kernel=0), own, raw.clone(), q, k) - bias
    dape = plain_position(c, own, raw.clone(), q, k) - score - bias * c.dape_residual
    attention = plain_transformer(model, tokens)[1]
    parts = {'score': score, 'bias': bias, 'dape': dape, 'attention': attention[layer]}
    return {part: values[0, head].tril() for part, values in parts.items()}, attention


@torch.no_grad()
@pytest.mark.parametrize('name', MODELS)
def test_maps_and_first_key_equal_those_of_the_float64_matrix(monkeypatch, name):
    T, width, n = 43, 4, 11  # the last cell holds 3 tokens
    monkeypatch.setattr(attention_maps, 'CELLS', n)
    monkeypatch.setattr(kernels, 'SCORES_AT_ONCE', 4 * T * 5)  # five query rows of four heads
    model, generator = random_model(**MODELS[name]), torch.Generator().manual_seed(1)
    tokens = torch.randint(61, (1, T), generator=generator)
    found = attention_maps.measure(model, tokens, layer=1, head=2)
    parts, attention = plain_parts(model, tokens, 1, 2)

    has = {'score': True, 'bias': 'kerple' in name, 'dape': 'dape_kernel' in MODELS[name]}
    names = [part for part in has if has[part]] + ['attention']
    assert list(found) == [*names, 'by_distance', 'first_key']
    cell = torch.arange(T) // width
    for part in names:
        for row, column in ((0, 0), (5, 2), (5, 5), (10, 0), (10, 9), (10, 10)):
            values = parts[part][cell == row][:, cell == column]
            seen = torch.ones(T, T).tril()[cell == row][:, cell == column].sum()
            expected = values.sum() / (len(values) if part == 'attention' else seen)
            assert found[part][row, column].item() == pytest.approx(expected.item(), rel=1e-3,
                                                                    abs=1e-4)
    first = attention[:, 0, :, T // 2:, 0].mean(-1)
    torch.testing.assert_close(found['first_key'].double(), first, rtol=1e-3, atol=1e-5)

    late = parts['attention'][T // 2:]
    distance = torch.arange(T // 2, T)[:, None] - torch.arange(T)
    edges = [0, 1, 2, 4, 8, 16, 32, 64]
    for i, (low, high) in enumerate(zip(edges, edges[1:])):
        share = late[(distance >= low) & (distance < high)].sum() / len(late)
        assert found['by_distance'][i].item() == pytest.approx(share.item(), abs=1e-5)


@pytest.mark.filterwarnings('ignore:dape_cheat')
@torch.no_grad()
def test_row_chunks_change_nothing_even_where_dape_sees_later_keys(monkeypatch):
    model = random_model(position='alibi', dape_kernel=3, dape_cheat=True)
    tokens = torch.arange(60)[None]
    whole = attention_maps.measure(model, tokens, 1, 0)
    monkeypatch.setattr(kernels, 'SCORES_AT_ONCE', 4 * 60 * 5)
    found = attention_maps.measure(model, tokens, 1, 0)
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4, equal_nan=True)


# ---------------------------------------------------------------------- as run

def test_run_writes_a_picture_and_the_parts_that_the_model_has(tiny_run, tmp_path):
    _, info = checkpoints.load_model('last', tiny_run, 'cpu')
    model = random_model(**MODELS['kerple with DAPE'], vocab_size=257)
    state = checkpoints.checkpoint_state(model, info['tokenizer'], 0, settings=info['settings'])
    checkpoints.save(tmp_path / 'last.pt', **state)
    command = f'--out_dir={tmp_path} --device=cpu --n_samples=2 --lengths=[32,100] --head=3'
    out = stage_here('attention_maps', *command.split())
    result = json.loads((tmp_path / 'attention.json').read_text())
    assert (tmp_path / 'attention.png').stat().st_size > 10000
    assert (result['layer'], result['head'], result['dape_kernel']) == (1, 3, 3)
    for row, T, n in zip(result['lengths'], (32, 100), (32, 50), strict=True):
        assert row['length'] == T and row['n_windows'] == 2
        assert list(row['maps']) == ['score', 'bias', 'dape', 'attention']
        for cells in row['maps'].values():
            assert [len(line) for line in cells] == list(range(1, n + 1))
        assert np.sum(row['by_distance']) == pytest.approx(1)
        assert f"{row['first_key'][1][3]:.1%} on the first key" in out


def test_run_at_the_default_lengths_is_the_mean_over_windows_at_the_scale(tiny_run, corpus_dir,
                                                                          tmp_path):
    command = f'--init_from={tiny_run}/last.pt --out_dir={tmp_path} --device=cpu '
    stage_here('attention_maps', *(command + '--scale=8 --layer=0 --n_samples=3').split())
    rows = json.loads((tmp_path / 'attention_scale8.json').read_text())['lengths']
    assert [row['length'] for row in rows] == [32, 128, 512]
    model, _ = checkpoints.load_model('last', tiny_run, 'cpu')  # at scale 1
    windows, found = torch.from_numpy(Windows(str(corpus_dir), 'test', 128).fixed(3)), []
    for window in windows:
        maps = attention_maps.measure(model, window[None, :-1], 0, 0)
        found.append(maps['score'][63].numpy())
    score = rows[1]['maps']['score'][63]
    np.testing.assert_allclose(score, 8 * np.mean(found, axis=0), rtol=0.01, atol=1e-4)


@pytest.mark.parametrize('more, named', [('--layer=2', 'layer is 2'), ('--head=-1', 'head is -1'),
                                         ('--lengths=[32,100000]', '100,000')])
def test_mistakes_are_one_line(tiny_run, tmp_path, more, named):
    where = [f'--init_from={tiny_run}/last.pt', f'--out_dir={tmp_path}', '--device=cpu']
    assert named in mistake('attention_maps', *where, more)
    assert not list(tmp_path.iterdir())
