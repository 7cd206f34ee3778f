"""What all stages share: means over windows, checkpoints, JSON."""

import json

import numpy as np
import pytest
import torch
from conftest import random_model, save_model

import common
from common import read_checkpoint, save_checkpoint, weights_digest


def test_every_window_is_measured_once_in_order_whatever_the_batch(cpu):
    windows = torch.arange(7 * 5).view(7, 5)
    for batch_tokens in (1, 4, 8, 12, 1000):
        rows = cpu.over_windows(windows, batch_tokens,
                                lambda x, y: torch.stack((x[:, 0], y[:, -1]), 1))
        assert rows.tolist() == [[5 * w, 5 * w + 4] for w in range(7)]
    with pytest.raises(SystemExit, match='not finite'):
        cpu.over_windows(windows, 8, lambda x, y: x[:, 0] / 0)


def test_two_ranks_measure_each_window_once_in_order(monkeypatch):
    windows, ranks = torch.arange(5 * 5).view(5, 5), {}
    for rank in (0, 1, 0):  # the second time with what the others measured
        def gather(parts, own, rank=rank):
            ranks[rank] = own
            parts[:] = [ranks.get(n, own) for n in range(2)]

        monkeypatch.setattr(common.dist, 'all_gather_object', gather)
        runtime = common.Runtime(torch.device('cpu'), torch.float32, rank, 2)
        rows = runtime.over_windows(windows, 8, lambda x, y: x[:, 0])
    assert rows.tolist() == [0, 5, 10, 15, 20]


@pytest.mark.parametrize('damage', ['cut short', 'a flipped bit', 'other content', 'not there'])
def test_a_damaged_checkpoint_ends_in_one_line(tmp_path, damage):
    path = tmp_path / 'last.pt'
    save_model(random_model(), path)
    content = bytearray(path.read_bytes())
    if damage == 'cut short':
        content = content[:len(content) // 2]
    elif damage == 'a flipped bit':
        content[len(content) // 2] ^= 4
    elif damage == 'other content':
        torch.save({'weights': 1}, path)
        content = path.read_bytes()
    path.write_bytes(content)
    if damage == 'not there':
        path.unlink()
    with pytest.raises(SystemExit) as caught:
        read_checkpoint(path)
    assert str(path) in str(caught.value) and '\n' not in str(caught.value)


def test_a_checkpoint_runs_no_code_of_its_author(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / 'written'), 'w'))

    torch.save({'model': Evil()}, tmp_path / 'evil.pt')
    with pytest.raises(SystemExit):
        read_checkpoint(tmp_path / 'evil.pt')
    assert not (tmp_path / 'written').exists()


def test_a_write_that_fails_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    path, model = tmp_path / 'last.pt', random_model()
    save_model(model, path)
    before = path.read_bytes()
    monkeypatch.setattr(common.os, 'fsync', lambda file: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_checkpoint(path, model.state_dict(), model.config, step=1)
    assert path.read_bytes() == before


def test_the_digest_names_the_matrices_and_not_the_small_vectors():
    model = random_model()
    before = weights_digest(model.state_dict())
    model.head_scale = 3.0
    model.norm.weight.data += 1
    assert weights_digest(model.state_dict()) == before
    model.blocks[1].mlp.out.weight.data[0, 0] += 1
    assert weights_digest(model.state_dict()) != before


def test_a_setting_of_another_version_is_refused_unless_it_is_off():
    values = {'vocab_size': 9, 'block_size': 8, 'n_layer': 1, 'n_head': 1, 'n_kv_head': 1,
              'n_embd': 4, 'n_hidden': 4}
    assert common.model_config(values | {'dape_cheat': False}).pretrained_length == 8
    with pytest.raises(SystemExit, match='dape_cheat'):
        common.model_config(values | {'dape_cheat': True})


def test_json_holds_arrays_with_each_list_of_numbers_on_one_line(tmp_path):
    path = tmp_path / 'new/x.json'
    common.save_json(path, {'a': np.array([[0.5, np.nan]]), 'b': 1 / 3, 'c': torch.tensor([2])})
    text = path.read_text(encoding='utf-8')
    assert '[0.5, NaN]' in text and json.loads(text)['b'] == 1 / 3 and json.loads(text)['c'] == [2]


def test_json_keeps_every_blank_of_a_text(tmp_path):  # such as the merges of a tokenizer
    data = {'[ ]': '[ ] [\n1 ]', 'a': [[1, 2], ['[ ]']]}
    common.save_json(tmp_path / 'x.json', data)
    assert json.loads((tmp_path / 'x.json').read_text()) == data
