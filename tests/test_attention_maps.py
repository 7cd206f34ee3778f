"""
The maps of attention_maps.py against the whole matrix in float64, from the formulas that
plain.py has a second time.

$ python -m pytest tests/test_attention_maps.py
"""

import json
import math

import pytest
import torch
from conftest import near, on, random_model, read, save_model, stage_here, tokens
from plain import plain_transformer

import attention_maps
import kernels

MODELS = [json.loads(row) for row in '''
{}
{"position": "xl"}
{"position": "rope", "random_positions": 90}
{"position": "rope", "rope_window": 10, "dape_kernel": 3}
{"position": "cope", "dape_kernel": 1}
{"position": "kerple", "dape_kernel": 3}
{"position": "kerple", "dape_kernel": 3, "dape_residual": false}
'''.strip().splitlines()]


@torch.no_grad()
@pytest.mark.parametrize('changes', MODELS, ids=str)
def test_parts_of_one_head_are_those_of_the_float64_matrix(changes):
    T, model = 43, random_model(**changes)  # fewer than CELLS, so that a cell is one token
    idx, i = tokens(1, T), torch.arange(T)
    found, distance = attention_maps.window_maps(model, idx, layer=1, head=2), i[:, None] - i
    whole = plain_transformer(model, idx)[1]  # (n_layer, 1, H, T, T)
    attention = whole[1, 0, 2]
    near(found['attention'], attention, rtol=1e-3, atol=1e-5)

    # In each row, what softmax sees is ln attention plus a constant.
    seen = found['score'] + found.get('dape', 0)
    if 'bias' in found:
        p, a = (model.get_parameter(f'blocks.1.attn.position.method.{x}')[2] for x in 'pa')
        near(found['bias'].tril(), -p * (1 + a * distance.clamp(min=0)).log(), rtol=1e-4, atol=1e-5)
        seen += found['bias'] * model.config.dape_residual
    off = seen.double() - attention.log()
    assert (off - off.diagonal()[:, None])[attention > 0].abs().max() < 1e-3
    assert not seen.tril()[attention == 0].any()  # keys outside a window have no part in it
    if not changes or 'bias' in found:
        with model.probe(lambda layer, attention, q, k, place: (q[0, 2], k[0, 1])) as of_layers:
            model(idx)
        q, k = of_layers[1]
        near(found['score'].tril(), (q @ k.T / math.sqrt(8)).tril(), rtol=1e-4, atol=1e-4)

    near(found['first_key'], whole[:, 0, :, T // 2:, 0].mean(-1), rtol=1e-3, atol=1e-5)
    shares = [torch.where((distance >= low) & (distance < max(1, 2 * low)), attention, 0)
              for low in (0, 1, 2, 4, 8, 16, 32)]
    near(found['by_distance'], [share[T // 2:].sum(1).mean() for share in shares], atol=1e-5)


@pytest.mark.parametrize('changes, keys', [({'position': 'kerple', 'dape_kernel': 3}, 43),
                                           ({'position': 'rope', 'rope_window': 14}, 14)])
@torch.no_grad()
def test_cells_are_means_over_the_keys_that_a_query_sees_and_sums_of_attention(monkeypatch, changes,
                                                                              keys):
    model, idx = random_model(**changes), torch.arange(43)[None]
    whole = attention_maps.window_maps(model, idx, 0, 1)
    monkeypatch.setattr(attention_maps, 'CELLS', 11)  # of 4 tokens, the last of 3
    found, seen = attention_maps.window_maps(model, idx, 0, 1), torch.ones(43, 43).tril()
    seen -= seen.tril(-keys)
    for part in whole.keys() - {'first_key', 'by_distance'}:
        for row, column in (5, 2), (5, 5), (10, 10), (5, 1):
            cell = slice(4 * row, 4 * row + 4), slice(4 * column, 4 * column + 4)
            values = (whole[part] * seen)[cell]
            n = len(values) if part == 'attention' else max(1, seen[cell].sum())
            near(found[part][row, column], values.sum() / n, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_maps_in_float16_or_bfloat16_are_summed_in_float32():
    model, idx = random_model(position='alibi'), tokens(1, 60)
    whole = attention_maps.window_maps(model, idx, 0, 1)
    for dtype in torch.float16, torch.bfloat16:
        with torch.autocast('cpu', dtype):
            found = attention_maps.window_maps(model, idx, 0, 1)
        near(found['bias'], whole['bias'], rtol=1e-6)


@pytest.mark.filterwarnings('ignore:dape_cheat')
@torch.no_grad()
def test_row_chunks_change_nothing_even_where_dape_sees_later_keys(monkeypatch):
    model, idx = random_model(position='alibi', dape_kernel=3, dape_cheat=True), tokens(1, 60)
    whole = attention_maps.window_maps(model, idx, 1, 0)
    monkeypatch.setattr(kernels, 'SCORES_AT_ONCE', 4 * 60 * 5)
    found = attention_maps.window_maps(model, idx, 1, 0)
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4, equal_nan=True)


# ---------------------------------------------------------------------- as run

def test_run_is_the_mean_over_windows_at_the_scale(tiny, windows, tmp_path):
    model = random_model(vocab_size=257, position='kerple', dape_kernel=3)
    save_model(model, tmp_path / 'last.pt', settings=tiny[1]['settings'])
    out = stage_here('attention_maps', *on(tmp_path, tmp_path, '--n_samples=3 --head=3 --scale=2'))
    assert (tmp_path / 'attention_scale2.png').stat().st_size > 10000
    result, model.head_scale = read(tmp_path / 'attention_scale2.json'), 2
    assert (result['layer'], result['head'], result['dape_kernel']) == (1, 3, 3)
    for row, T in zip(result['lengths'], (32, 128, 512), strict=True):
        assert (row['length'], row['n_windows']) == (T, 3)
        with torch.no_grad():
            found = [attention_maps.window_maps(model, window[None, :-1], 1, 3)
                     for window in windows(3, T)]
        assert list(row['maps']) == ['score', 'bias', 'dape', 'attention']
        for part, cells in row['maps'].items():
            assert [len(line) for line in cells] == list(range(1, min(T, 64) + 1))
            mean = sum(one[part][20, :21] for one in found) / 3
            near(cells[20], mean, rtol=0.01, atol=1e-4)
        assert f"{row['first_key'][1][3]:.1%} on the first key" in out
