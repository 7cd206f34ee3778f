"""
The maps of attention.py against the whole matrix in float64, from the formulas that conftest.py has a second time.

$ python -m pytest tests/test_attention.py
"""

import json
import math

import numpy as np
import pytest
import torch
from conftest import mistake, plain_position, plain_transformer, random_model, stage

import attention
import checkpoint
import model as model_file
from corpus import Windows

MODELS = [{}, {'position': 'kerple'}, {'position': 'rope'}, {'position': 'xl'}, {'position': 'cope', 'dape_kernel': 1},
          {'position': 'kerple', 'dape_kernel': 3}, {'position': 'kerple', 'dape_kernel': 3, 'dape_residual': False}]


def plain_parts(model, tokens, layer, head):
    """{part: (T, T)} of one head in float64, lower triangle, and all attention (n_layer, 1, H, T, T)."""
    c, state = model.config, {name: p.double() for name, p in model.state_dict().items()}
    T, x, (query_key, *where) = tokens.shape[1], model.embed(tokens), model.where(tokens.shape[1], 'cpu')
    for block in model.blocks[:layer]:
        x = block(x, query_key, *where)
    block = model.blocks[layer]
    q, k, _ = (y.double() for y in block.attn.project(block.attn_norm(x), query_key))
    k = k.repeat_interleave(c.n_head // c.n_kv_head, dim=1)
    own = {name.removeprefix(f'blocks.{layer}.attn.'): p for name, p in state.items()}
    raw = q @ k.transpose(-1, -2) / math.sqrt(c.n_embd // c.n_head)
    q, k = (list(y.unbind(1)) for y in (q, k))
    bias = torch.zeros_like(raw)
    if c.position == 'kerple':
        i = torch.arange(T, dtype=torch.float64)
        distance = (i[:, None] - i).clamp(min=0)
        bias = -own['bias.p'][:, None, None] * (1 + own['bias.a'][:, None, None] * distance).log()
    plain_config = type(c)(**{**vars(c), 'dape_kernel': 0})
    score = plain_position(plain_config, own, raw.clone(), q, k) - bias
    seen = plain_position(c, own, raw.clone(), q, k)
    whole = plain_transformer(model, tokens)[1]
    parts = {'score': score, 'bias': bias, 'dape': seen - score - bias * c.dape_residual, 'attention': whole[layer]}
    return {part: values.expand(raw.shape)[0, head].tril() for part, values in parts.items()}, whole


@torch.no_grad()
@pytest.mark.parametrize('changes', MODELS, ids=lambda changes: '-'.join(map(str, changes.values())) or 'none')
def test_maps_and_first_key_equal_those_of_the_float64_matrix(monkeypatch, changes):
    T, width = 43, 4  # the last cell holds 3 tokens
    monkeypatch.setattr(attention, 'CELLS', 11)
    monkeypatch.setattr(model_file, 'CHUNK', 4 * T * 5)  # five query rows of four heads
    model, tokens = random_model(**changes), torch.randint(0, 61, (1, T), generator=torch.Generator().manual_seed(1))
    assert len(list(model.blocks[0].attn.row_chunks(T, T, 4))) == 9
    found = attention.measure(model, tokens, layer=1, head=2)
    parts, whole = plain_parts(model, tokens, 1, 2)

    has = {'score': True, 'bias': 'kerple' in changes.values(), 'dape': 'dape_kernel' in changes, 'attention': True}
    assert list(found)[:-2] == [part for part in has if has[part]]
    for part in list(found)[:-2]:
        for row in range(11):
            for column in range(row + 1):
                rows, keys = (range(width * n, min(T, width * (n + 1))) for n in (row, column))
                values = [parts[part][i, j].item() for i in rows for j in keys if j <= i]
                expected = sum(values) / (len(rows) if part == 'attention' else len(values))
                assert found[part][row, column].item() == pytest.approx(expected, rel=1e-3, abs=1e-4), (part, row)
    torch.testing.assert_close(found['first_key'].double(), whole[:, 0, :, T // 2:, 0].mean(-1), rtol=1e-3, atol=1e-5)
    bins = [sum(parts['attention'][i, i - d].item() for i in range(T // 2, T) for d in distances if d <= i) / 22
            for distances in ([0], [1], [2, 3], range(4, 8), range(8, 16), range(16, 32), range(32, 64))]
    np.testing.assert_allclose(found['by_distance'], bins, atol=1e-5)
    assert sum(bins) == pytest.approx(1)


def test_parts_add_up_to_the_log_of_attention_where_a_cell_is_one_token():
    """With one token a cell, score + bias + dape is ln attention but for a constant in each row."""
    model, tokens = random_model(position='fire', dape_kernel=3), torch.arange(40)[None]
    with torch.no_grad():
        found = attention.measure(model, tokens, 0, 1)
    off = (found['score'] + found['bias'] + found['dape'] - found['attention'].log()).numpy()
    assert max(np.ptp(off[i, :i + 1]) for i in range(40)) < 1e-3 < np.nanstd(found['dape'].numpy())


@torch.no_grad()
def test_row_chunks_change_nothing_even_where_dape_sees_later_keys(monkeypatch):
    model, tokens = random_model(position='alibi', dape_kernel=3, dape_cheat=True), torch.arange(60)[None]
    whole = attention.measure(model, tokens, 1, 0)
    monkeypatch.setattr(model_file, 'CHUNK', 4 * 60 * 5)
    for part, values in attention.measure(model, tokens, 1, 0).items():
        torch.testing.assert_close(values, whole[part], rtol=1e-4, atol=1e-4, equal_nan=True)


# ----------------------------------------------------------------------------- as run

@pytest.fixture(scope='module')
def dape_run(tiny_run, tmp_path_factory):
    """out_dir of an untrained model with Kerple and DAPE 1x3, which read the tiny run's text."""
    _, info = checkpoint.load_model('last', tiny_run, 'cpu')
    model = random_model(position='kerple', dape_kernel=3, vocab_size=info['model_config']['vocab_size'])
    state = checkpoint.model_state(model, info['tokenizer'], 0, settings=info['settings'])
    path = tmp_path_factory.mktemp('dape') / 'last.pt'
    checkpoint.save(path, **state)
    return path.parent


def test_run_writes_a_picture_and_numbers_of_the_parts_that_the_model_has(dape_run):
    out, _ = stage('attention', f'--out_dir={dape_run}', '--device=cpu', '--n_samples=2', '--lengths=[32,100]',
                   '--head=3')
    result = json.loads((dape_run / 'attention.json').read_text())
    assert (dape_run / 'attention.png').stat().st_size > 10000
    assert (result['layer'], result['head'], result['dape_kernel'], result['block_size']) == (1, 3, 3, 32)
    assert [row['length'] for row in result['lengths']] == [32, 100] and result['settings']['n_samples'] == 2
    for row, n in zip(result['lengths'], (32, 50)):
        assert list(row['maps']) == ['score', 'bias', 'dape', 'attention'] and row['n_windows'] == 2
        assert all([len(line) for line in cells] == list(range(1, n + 1)) for cells in row['maps'].values())
        assert np.sum(row['maps']['attention'][-1]) == pytest.approx(1, abs=0.01)
        assert np.sum(row['by_distance']) == pytest.approx(1) and np.shape(row['first_key']) == (2, 4)
        assert f"{row['length']} tokens: {row['first_key'][1][3]:.1%} on the first key" in out


def test_run_at_the_default_lengths_is_the_mean_over_windows_at_the_scale(tiny_run, corpus_dir, tmp_path):
    stage('attention', f'--init_from={tiny_run}/last.pt', f'--out_dir={tmp_path}', '--device=cpu', '--scale=8',
          '--layer=0', '--n_samples=3')
    rows = json.loads((tmp_path / 'attention_scale8.json').read_text())['lengths']
    assert [row['length'] for row in rows] == [32, 128, 512] and list(rows[0]['maps']) == ['score', 'attention']
    model, _ = checkpoint.load_model('last', tiny_run, 'cpu')  # at scale 1
    windows = torch.from_numpy(Windows(str(corpus_dir), 'test', 128).fixed(3))
    found = [attention.measure(model, window[None, :-1], 0, 0)['score'][63].numpy() for window in windows]
    np.testing.assert_allclose(rows[1]['maps']['score'][63], 8 * np.mean(found, axis=0), rtol=0.01, atol=1e-4)


def test_mistakes_are_one_line(tiny_run, tmp_path):
    arguments = [f'--init_from={tiny_run}/last.pt', f'--out_dir={tmp_path}', '--device=cpu']
    assert 'layer is 2, but' in mistake('attention', *arguments, '--layer=2')
    assert 'head is -1, but' in mistake('attention', *arguments, '--head=-1')
    assert '100,000' in mistake('attention', *arguments, '--lengths=[32,100000]')
    assert 'lengths is []' in mistake('attention', *arguments, '--lengths=[]')
    assert not list(tmp_path.iterdir())
