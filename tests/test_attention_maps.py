"""
The maps of attention_maps.py against the whole matrix in float64, from the formulas that
conftest.py has a second time.

$ python -m pytest tests/test_attention_maps.py
"""

import json
import math

import pytest
import torch
from conftest import (
    near,
    on,
    plain_transformer,
    random_model,
    read,
    save_model,
    stage_here,
    tokens,
)

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

    # What softmax sees is ln attention but for a constant in each row.
    seen = found['score'] + found.get('dape', 0)
    if 'bias' in found:
        p, a = (model.get_parameter(f'blocks.1.attn.position.method.{x}')[2] for x in 'pa')
        bias = -p * (1 + a * distance.clamp(min=0)).log()
        near(found['bias'].tril(), bias, rtol=1e-4, atol=1e-5)
        seen = seen + bias * model.config.dape_residual
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


@torch.no_grad()
def test_cells_are_means_over_keys_up_to_the_query_and_sums_of_attention(monkeypatch):
    model, idx = random_model(position='kerple', dape_kernel=3), torch.arange(43)[None]
    whole = attention_maps.window_maps(model, idx, 0, 1)
    monkeypatch.setattr(attention_maps, 'CELLS', 11)  # of 4 tokens, the last of 3
    found, seen = attention_maps.window_maps(model, idx, 0, 1), torch.ones(43, 43).tril()
    for part in 'score', 'bias', 'dape', 'attention':
        for row, column in (0, 0), (5, 2), (5, 5), (10, 0), (10, 10):
            cell = slice(4 * row, 4 * row + 4), slice(4 * column, 4 * column + 4)
            values = whole[part].tril()[cell]
            n = len(values) if part == 'attention' else seen[cell].sum()
            near(found[part][row, column], values.sum() / n, rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings('ignore:dape_cheat')
@torch.no_grad()
def test_row_chunks_change_nothing_even_where_dape_sees_later_keys(monkeypatch):
    model = random_model(position='alibi', dape_kernel=3, dape_cheat=True)
    whole, found = {}, {}
    for maps, at_once in (whole, kernels.SCORES_AT_ONCE), (found, 4 * 60 * 5):
        monkeypatch.setattr(kernels, 'SCORES_AT_ONCE', at_once)
        maps |= attention_maps.window_maps(model, torch.arange(60)[None], 1, 0)
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4, equal_nan=True)


# ---------------------------------------------------------------------- as run

def test_run_writes_a_picture_and_the_parts_that_the_model_has(tiny, tmp_path):
    model = random_model(vocab_size=257, position='kerple', dape_kernel=3)
    save_model(model, tmp_path / 'last.pt', settings=tiny[1]['settings'])
    command = on(tmp_path, tmp_path, '--n_samples=2 --lengths=[32,100] --head=3')
    out, result = stage_here('attention_maps', *command), read(tmp_path / 'attention.json')
    assert (tmp_path / 'attention.png').stat().st_size > 10000
    assert (result['layer'], result['head'], result['dape_kernel']) == (1, 3, 3)
    for row, T, n in zip(result['lengths'], (32, 100), (32, 50), strict=True):
        assert (row['length'], row['n_windows']) == (T, 2)
        assert list(row['maps']) == ['score', 'bias', 'dape', 'attention']
        for cells in row['maps'].values():
            assert [len(line) for line in cells] == list(range(1, n + 1))
        near(sum(row['by_distance']), 1, atol=1e-5)
        assert f"{row['first_key'][1][3]:.1%} on the first key" in out


def test_run_at_the_default_lengths_is_the_mean_over_windows_at_the_scale(tiny_run, tiny, windows,
                                                                          tmp_path):
    stage_here('attention_maps', *on(tiny_run, tmp_path, '--scale=8 --layer=0 --n_samples=3'))
    rows = read(tmp_path / 'attention_scale8.json')['lengths']
    assert [row['length'] for row in rows] == [32, 128, 512]
    found = [attention_maps.window_maps(tiny[0], window[None, :-1], 0, 0)['score'][63]  # at scale 1
             for window in windows(3, 128)]
    near(rows[1]['maps']['score'][63], 8 * torch.stack(found).mean(0), rtol=0.01, atol=1e-4)
