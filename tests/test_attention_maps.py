"""
The maps of attention_maps.py against the whole matrix in float64 of plain.py.

$ python -m pytest tests/test_attention_maps.py
"""

import pytest
import torch
from conftest import near, on, random_model, read, save_model, stage, tokens
from plain import plain_transformer
from torch.nn.utils.rnn import pad_sequence

from extras import attention_maps

MODELS = [{}, {'position': 'xl'}, {'position': 'rope_random'},
          {'position': 'window', 'dape_kernel': 3},
          {'position': 'cope', 'dape_kernel': 1}, {'position': 'kerple', 'dape_kernel': 3},
          {'position': 'kerple', 'dape_kernel': 3, 'dape_residual': False}]


@torch.no_grad()
def maps(model, idx, layer=1, head=2):
    """The maps as matrices, (n, n), with 0 at later keys; and the shares of the first key."""
    found, shares = attention_maps.maps_and_first_key(model, idx, layer, head)
    return {part: pad_sequence(rows, batch_first=True) for part, rows in found.items()}, shares


@pytest.mark.parametrize('changes', MODELS, ids=str)
def test_parts_of_one_head_add_up_to_the_float64_attention(changes):
    idx, model = tokens(2, 43), random_model(**changes)  # fewer than CELLS: a cell is a token
    whole = torch.from_numpy(plain_transformer(model, idx)[1])  # (B, n_layer, H, T, T)
    found, first_key = maps(model, idx)
    near(found['attention'], whole[:, 1, 2].mean(0), rtol=1e-3, atol=1e-5)
    near(first_key, whole[:, :, :, 21:, 0].mean((0, 3)), rtol=1e-3, atol=1e-5)

    found, _ = maps(model, idx[:1])
    scores = found['score'] + found.get('dape', 0)
    if model.config.dape_residual:
        scores = scores + found.get('bias', 0)
    attention = whole[0, 1, 2]
    off = scores.double() - attention.log()  # the same number in a row, at all that it sees
    assert (off - off.diagonal()[:, None])[attention > 0].abs().max() < 1e-3
    assert not scores[attention == 0].any()


def test_cells_are_means_over_the_keys_that_a_query_sees_and_sums_of_attention(monkeypatch):
    model, idx = random_model(position='window', dape_kernel=3), tokens(1, 43)
    whole, _ = maps(model, idx)
    monkeypatch.setattr(attention_maps, 'CELLS', 11)  # of 4 tokens, the last of 3
    found, _ = maps(model, idx)
    seen = torch.ones(43, 43).tril().triu(-31)
    seen[:, :4] = 1
    for row, column in (5, 2), (5, 5), (10, 10), (5, 1):
        cell = slice(4 * row, 4 * row + 4), slice(4 * column, 4 * column + 4)
        for part in whole:
            n = len(seen[cell]) if part == 'attention' else max(1, seen[cell].sum())
            near(found[part][row, column], whole[part][cell].sum() / n, rtol=1e-3, atol=1e-4)


def test_run_writes_the_maps_at_the_scale(tiny, windows, tmp_path):
    model = random_model(vocab_size=257, position='kerple', dape_kernel=3)
    save_model(model, tmp_path / 'last.pt', **tiny[1]['settings'])
    arguments = on(tmp_path, tmp_path, '--n_samples=3 --head=3 --scale=2 --lengths=[128]')
    stage('extras.attention_maps', *(one for one in arguments if 'dtype' not in one))
    assert (tmp_path / 'attention_scale2.png').exists()
    model.head_scale = 2
    found, first_key = maps(model, windows(3, 128)[:, :-1], head=3)
    [row] = read(tmp_path / 'attention_scale2.json')['lengths']
    near(row['first_key'], first_key, rtol=1e-4)
    for part, rows in row['maps'].items():
        assert [len(cells) for cells in rows] == list(range(1, 65))
        near(rows[20], found[part][20, :21], rtol=1e-4, atol=1e-5)
