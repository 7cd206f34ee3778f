"""
The maps of attention_maps.py against the whole matrix in float64, from the formulas that
conftest.py has a second time.

$ python -m pytest tests/test_attention_maps.py
"""

import json
import math

import numpy as np
import pytest
import torch
from conftest import mistake, plain_transformer, random_model, stage_here

import attention_maps
import kernels
from lib import checkpoints
from lib.tokens import Windows

MODELS = {
    'nope': {},
    'xl': {'position': 'xl'},
    'rope at random positions': {'position': 'rope', 'random_positions': 90},
    'cope with DAPE': {'position': 'cope', 'dape_kernel': 1},
    'kerple with DAPE': {'position': 'kerple', 'dape_kernel': 3},
    'kerple without a residual': {
        'position': 'kerple', 'dape_kernel': 3, 'dape_residual': False},
}


@torch.no_grad()
@pytest.mark.parametrize('name', MODELS)
def test_parts_of_one_head_are_those_of_the_float64_matrix(name):
    T, model = 43, random_model(**MODELS[name])  # fewer than CELLS, so that a cell is one token
    tokens = torch.randint(61, (1, T), generator=torch.Generator().manual_seed(1))
    found = attention_maps.measure(model, tokens, layer=1, head=2)
    whole = plain_transformer(model, tokens)[1]  # (n_layer, 1, H, T, T)
    attention = whole[1, 0, 2]
    torch.testing.assert_close(found['attention'].double(), attention, rtol=1e-3, atol=1e-5)

    # What softmax sees is ln attention but for a constant in each row.
    seen = found['score'] + found.get('dape', 0)
    if 'kerple' in name:
        p, a = (model.get_parameter(f'blocks.1.attn.position.method.{x}')[2] for x in 'pa')
        i = torch.arange(T)
        bias = (-p * (1 + a * (i[:, None] - i).clamp(min=0)).log()).tril()
        torch.testing.assert_close(found['bias'].tril(), bias, rtol=1e-4, atol=1e-5)
        seen = seen + bias * model.config.dape_residual
    off = seen.double() - attention.log()
    assert (off - off[:, :1]).tril().abs().max() < 1e-3
    if 'position' not in MODELS[name] or 'kerple' in name:
        with model.probe(lambda layer, attention, q, k, place: (q[0, 2], k[0, 1])) as of_layers:
            model(tokens)
        q, k = of_layers[1]
        score = (q @ k.T / math.sqrt(model.config.head_dim)).tril()
        torch.testing.assert_close(found['score'].tril(), score, rtol=1e-4, atol=1e-4)

    first = whole[:, 0, :, T // 2:, 0].mean(-1)
    torch.testing.assert_close(found['first_key'].double(), first, rtol=1e-3, atol=1e-5)
    distance, late = torch.arange(T // 2, T)[:, None] - torch.arange(T), attention[T // 2:]
    edges = [0, 1, 2, 4, 8, 16, 32, 64]
    for share, low, high in zip(found['by_distance'], edges, edges[1:]):
        expected = late[(distance >= low) & (distance < high)].sum() / len(late)
        assert share.item() == pytest.approx(expected.item(), abs=1e-5)


@torch.no_grad()
def test_keys_outside_a_window_have_no_part_in_the_maps():
    model, tokens = random_model(position='rope', rope_window=10, dape_kernel=3), torch.arange(43)
    found = attention_maps.measure(model, tokens[None], layer=1, head=2)
    outside = tokens[:, None] - tokens >= 10
    for part in ('score', 'dape', 'attention'):
        assert found[part].isfinite().all() and (found[part][outside] == 0).all()
    whole = plain_transformer(model, tokens[None])[1][1, 0, 2]
    torch.testing.assert_close(found['attention'].double(), whole, rtol=1e-3, atol=1e-5)


@torch.no_grad()
def test_cells_are_means_over_keys_up_to_the_query_and_sums_of_attention(monkeypatch):
    T, model, tokens = 43, random_model(position='kerple', dape_kernel=3), torch.arange(43)[None]
    whole = attention_maps.measure(model, tokens, 0, 1)
    monkeypatch.setattr(attention_maps, 'CELLS', 11)  # of 4 tokens, the last of 3
    found = attention_maps.measure(model, tokens, 0, 1)
    cell, seen = torch.arange(T) // 4, torch.ones(T, T).tril()
    for part in ('score', 'bias', 'dape', 'attention'):
        for row, column in ((0, 0), (5, 2), (5, 5), (10, 0), (10, 10)):
            values, pairs = (x[cell == row][:, cell == column] for x in (whole[part].tril(), seen))
            n = len(values) if part == 'attention' else pairs.sum()
            expected = (values.sum() / n).item()
            assert found[part][row, column].item() == pytest.approx(expected, rel=1e-3, abs=1e-4)


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
    windows, found = torch.from_numpy(Windows(str(corpus_dir), 'test', 128).evenly_spaced(3)), []
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
