"""
The maps of attention_maps.py against the whole matrix in float64 of plain.py.

$ python -m pytest tests/test_attention_maps.py
"""

import pytest
import torch
from conftest import near, on, random_model, read, save_model, stage, tokens
from plain import plain_transformer

import position
from extras import attention_maps
from position import METHODS, NoPE, distances

MODELS = [{}, {'position': 'xl'}, {'position': 'rope', 'random_positions': 90},
          {'position': 'rope', 'rope_window': 10, 'dape_kernel': 3},
          {'position': 'cope', 'dape_kernel': 1}, {'position': 'kerple', 'dape_kernel': 3},
          {'position': 'kerple', 'dape_kernel': 3, 'dape_residual': False}]


@torch.no_grad()
def maps(model, idx, layer=1, head=2):
    return attention_maps.maps_and_first_key(model, idx, layer, head)


@pytest.mark.parametrize('rows', [2 ** 22, 5], ids=['whole', 'in_rows'])
@pytest.mark.parametrize('changes', MODELS, ids=str)
def test_parts_of_one_head_are_those_of_the_float64_matrix(changes, rows, monkeypatch):
    monkeypatch.setattr(position, 'SCORES_AT_ONCE', rows)
    T, model = 43, random_model(**changes)  # fewer than CELLS, so that a cell is one token
    idx, i = tokens(2, T), torch.arange(T)
    (found, first_key), distance = maps(model, idx), (i[:, None] - i).clamp(min=0)
    whole = torch.from_numpy(plain_transformer(model, idx)[1])  # (B, n_layer, H, T, T)
    near(found['attention'], whole[:, 1, 2].mean(0), rtol=1e-3, atol=1e-5)
    near(first_key, whole[:, :, :, T // 2:, 0].mean((0, 3)), rtol=1e-3, atol=1e-5)

    found, _ = maps(model, idx[:1])
    # In each row, what softmax sees is ln attention plus a constant.
    seen = found['score'] + found.get('dape', 0)
    if 'bias' in found:
        p, a = (model.get_parameter(f'blocks.1.attn.position.{x}')[2] for x in 'pa')
        near(found['bias'], (-p * (1 + a * distance).log()).tril(), rtol=1e-4, atol=1e-5)
        seen = seen + found['bias'] * model.config.dape_residual
    attention = whole[0, 1, 2]
    off = seen.double() - attention.log()
    assert (off - off.diagonal()[:, None])[attention > 0].abs().max() < 1e-3
    assert not seen[attention == 0].any()  # keys outside a window have no part in it


def test_cells_are_means_over_the_keys_that_a_query_sees_and_sums_of_attention(monkeypatch):
    model, idx = random_model(position='rope', rope_window=14, dape_kernel=3), tokens(1, 43)
    whole, _ = maps(model, idx)
    monkeypatch.setattr(attention_maps, 'CELLS', 11)  # of 4 tokens, the last of 3
    found, _ = maps(model, idx)
    seen = torch.ones(43, 43).tril().triu(-13)
    for part in whole:
        for row, column in (5, 2), (5, 5), (10, 10), (5, 1):
            cell = slice(4 * row, 4 * row + 4), slice(4 * column, 4 * column + 4)
            values = whole[part][cell]
            n = len(values) if part == 'attention' else max(1, seen[cell].sum())
            near(found[part][row, column], values.sum() / n, rtol=1e-3, atol=1e-4)


class OneBias(NoPE):
    """One bias for all heads, (1, T, S)."""

    def bias(self, i, j):
        return -0.1 * distances(i, j)


class OwnAttend(NoPE):
    def attend(self, q, k, v, place):
        return q


def test_heads_may_share_a_bias_and_attention_without_weights_is_refused(monkeypatch):
    monkeypatch.setitem(METHODS, 'one', OneBias)
    monkeypatch.setitem(METHODS, 'own', OwnAttend)
    found, _ = maps(random_model(position='one'), tokens(1, 9))
    near(found['bias'][8], 0.1 * torch.arange(-8.0, 1), atol=1e-6)
    with pytest.raises(SystemExit, match='own attend'):
        maps(random_model(position='own'), tokens(1, 9))


def test_run_is_the_mean_over_windows_at_the_scale(tiny, windows, tmp_path):
    model = random_model(vocab_size=257, position='kerple', dape_kernel=3)
    save_model(model, tmp_path / 'last.pt', **tiny[1]['settings'])
    arguments = on(tmp_path, tmp_path, '--n_samples=3 --head=3 --scale=2')
    out = stage('extras.attention_maps', *(one for one in arguments if 'dtype' not in one))
    assert (tmp_path / 'attention_scale2.png').stat().st_size > 10000
    result, model.head_scale = read(tmp_path / 'attention_scale2.json'), 2
    for row, T in zip(result['lengths'], (32, 128, 512), strict=True):
        idx = windows(3, T)[:, :-1]
        found, first_key = maps(model, idx, head=3)
        for part, cells in row['maps'].items():
            assert [len(line) for line in cells] == list(range(1, min(T, 64) + 1))
            near(cells[20], found[part][20, :21], rtol=1e-4, atol=1e-5)
        assert f'{first_key[1, 3]:.1%} on the first key' in out
