"""
Checkpoints and scale files: written whole or not at all, read without running anyone's code, refused where they do
not fit.

$ python -m pytest tests/test_checkpoint.py
"""

import errno
import json
import math
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import files_at_most, random_model, scale_set

import checkpoint
from corpus import format_ranks, get_tokenizer, tokenizer_state
from model import ModelConfig, Transformer


def tiny_model(seed=0):
    config = ModelConfig(vocab_size=20, block_size=8, n_layer=2, n_head=4, n_kv_head=2, n_embd=16, n_hidden=24)
    return Transformer(config).init_weights(torch.Generator().manual_seed(seed))


@pytest.fixture(scope='module')
def bytes_state():
    return tokenizer_state(get_tokenizer('bytes'))


@pytest.fixture
def out_dir(tmp_path, bytes_state):
    """last.pt at step 7 and best.pt at step 5, of two models."""
    for name, step in ('last.pt', 7), ('best.pt', 5):
        state = checkpoint.model_state(tiny_model(seed=step), bytes_state, step, settings={'seed': step})
        checkpoint.save(tmp_path / name, **state)
    return tmp_path


@pytest.fixture
def loaded(out_dir):
    return checkpoint.load_model('last', out_dir, 'cpu')


# ----------------------------------------------------------------------------- save and load

def test_writer_killed_while_saving_leaves_the_old_checkpoint(out_dir):
    script = ('import sys, torch, checkpoint\n'
              'print("ready", flush=True)\n'
              'checkpoint.save(sys.argv[1], model={"weight": torch.ones(2 ** 27)})\n')
    before, part = (out_dir / 'last.pt').read_bytes(), out_dir / 'last.pt.part'
    process = subprocess.Popen([sys.executable, '-c', script, out_dir / 'last.pt'], stdout=subprocess.PIPE,
                               cwd=Path(checkpoint.__file__).parent)
    assert process.stdout.readline() == b'ready\n'
    while not (part.exists() and part.stat().st_size > 2 ** 20) and process.poll() is None:
        pass
    process.kill()
    assert process.wait() == -signal.SIGKILL, 'it ended before it could be killed'
    process.stdout.close()
    assert 2 ** 20 < part.stat().st_size < 2 ** 29
    assert (out_dir / 'last.pt').read_bytes() == before
    checkpoint.save(out_dir / 'last.pt', **checkpoint.load(out_dir / 'best.pt'))  # what is left is in nobody's way
    assert checkpoint.load(out_dir / 'last.pt')['step'] == 5 and not part.exists()


def test_write_that_fails_leaves_the_old_checkpoint_and_no_rest(out_dir):
    before = (out_dir / 'last.pt').read_bytes()
    with pytest.raises(OSError, match='last.pt.* untouched'), files_at_most(100_000):
        checkpoint.save(out_dir / 'last.pt', model={'weight': torch.ones(100_000)})
    assert (out_dir / 'last.pt').read_bytes() == before
    assert not list(out_dir.glob('*.part'))


def test_saved_checkpoint_loads_as_it_was(out_dir, bytes_state):
    state = checkpoint.load(out_dir / 'last.pt')
    assert (state['step'], state['settings'], state['tokenizer']) == (7, {'seed': 7}, bytes_state)
    weights = tiny_model(seed=7).state_dict()
    assert list(state['model']) == list(weights)
    assert all(torch.equal(state['model'][name], weights[name]) for name in weights)


def test_save_makes_the_folder(tmp_path):
    checkpoint.save(tmp_path / 'a' / 'b' / 'x.pt', step=1)
    assert [path.name for path in (tmp_path / 'a' / 'b').iterdir()] == ['x.pt']


class Code:
    """Pickled, it makes whoever unpickles it create a file."""
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.mark.parametrize('write', [torch.save, lambda state, path: path.write_bytes(pickle.dumps(state))],
                         ids=['torch', 'pickle'])
def test_code_in_a_strangers_checkpoint_is_refused_and_never_runs(out_dir, write):
    mark, path = out_dir / 'executed', out_dir / 'strange.pt'
    write(checkpoint.load(out_dir / 'last.pt') | {'settings': Code(mark)}, path)
    if write is torch.save:
        torch.load(path, weights_only=False)
        assert mark.exists(), 'the file is harmless and tests nothing'
        mark.unlink()
    for read in (checkpoint.load, lambda path: checkpoint.load_model(path, None, 'cpu')):
        with pytest.raises(ValueError, match='strange.pt .*not a checkpoint of this project') as caught:
            read(path)
        assert '\n' not in str(caught.value)
    assert not mark.exists()


@pytest.mark.parametrize('keep', [0, 100, 0.5, 0.99])
def test_checkpoint_cut_short_is_refused(out_dir, keep):
    size = (out_dir / 'last.pt').stat().st_size
    os.truncate(out_dir / 'last.pt', keep if isinstance(keep, int) else int(keep * size))
    with pytest.raises(ValueError, match='last.pt is cut short or not a checkpoint'):
        checkpoint.load(out_dir / 'last.pt')


def flip(path, place):
    """Turn over a bit of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << place % 8
    path.write_bytes(content)


def equal(one, other):
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if torch.is_tensor(one) else one == other


def test_bit_that_flips_in_a_checkpoint_changes_nothing_that_is_read(out_dir):
    """It is refused, or lies in what only fills up the file."""
    path, places, n_refused = out_dir / 'last.pt', random.Random(0), 0
    whole, state = path.read_bytes(), checkpoint.load(path)
    for _ in range(300):
        flip(path, places.randrange(len(whole)))
        try:
            assert equal(checkpoint.load(path), state)
        except ValueError as error:
            assert str(path) in str(error)
            n_refused += 1
        path.write_bytes(whole)
    assert n_refused > 200


def test_bit_that_flips_in_any_weight_is_refused(out_dir):
    path, weights = out_dir / 'last.pt', tiny_model(seed=7).state_dict()
    whole = path.read_bytes()
    for weight in weights.values():
        flip(path, whole.index(weight.numpy().tobytes()) + weight.nbytes // 2)
        with pytest.raises(ValueError, match='last.pt is damaged'):
            checkpoint.load_model('last', out_dir, 'cpu')
        path.write_bytes(whole)


def test_header_that_leads_to_another_record_is_refused(out_dir):
    """Both records are whole; where the second begins, the header before the first one says."""
    path = out_dir / 'x.pt'
    more = [torch.full((16,), 0.375), torch.full((16,), 0.625)]
    checkpoint.save(path, **checkpoint.load(out_dir / 'last.pt'), more=more)
    content = bytearray(path.read_bytes())
    first, second = (content.index(tensor.numpy().tobytes()) for tensor in more)
    header = content.rindex(b'PK\x03\x04', 0, first)
    length = int.from_bytes(content[header + 28:header + 30], 'little') + second - first
    content[header + 28:header + 30] = length.to_bytes(2, 'little')
    path.write_bytes(content)
    assert torch.load(path, mmap=True)['more'][0][0] == 0.625, 'it was not led to the other'
    with pytest.raises(ValueError, match='x.pt is damaged'):
        checkpoint.load(path)


def test_damaged_moments_matter_only_to_who_reads_them(out_dir):
    path, moment = out_dir / 'x.pt', torch.full((99,), 0.25)
    checkpoint.save(path, **checkpoint.load(out_dir / 'last.pt'), optimizer={'state': [moment]})
    flip(path, path.read_bytes().index(moment.numpy().tobytes()))
    with pytest.raises(ValueError, match='x.pt is damaged'):
        checkpoint.load(path)
    assert 'optimizer' not in checkpoint.load(path, optimizer=False)
    checkpoint.load_model(path, out_dir, 'cpu')


def test_checkpoint_that_cannot_be_opened_says_why_in_the_words_of_the_system(out_dir, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), 'last.pt')

    monkeypatch.setattr('builtins.open', refuse)
    with pytest.raises(PermissionError, match='last.pt'):
        checkpoint.load(out_dir / 'last.pt')


def test_missing_checkpoint_is_refused_with_the_command_that_makes_it(out_dir):
    with pytest.raises(ValueError, match='none.pt does not exist. Train that model first'):
        checkpoint.load(out_dir / 'none.pt')


@pytest.mark.parametrize('content', [{'model': {}, 'step': 1}, [1, 2], torch.ones(3)], ids=['dict', 'list', 'tensor'])
def test_file_of_another_program_is_refused(tmp_path, content):
    torch.save(content, tmp_path / 'x.pt')
    with pytest.raises(ValueError, match='x.pt .*not a checkpoint of this project'):
        checkpoint.load(tmp_path / 'x.pt')


def test_lacking_entries_are_named(tmp_path):
    torch.save({'model': {}, 'step': 1, 'digest': ''}, tmp_path / 'x.pt')
    with pytest.raises(ValueError, match='it lacks model_config, tokenizer'):
        checkpoint.load(tmp_path / 'x.pt')


def test_disk_without_room_is_refused(tmp_path):
    checkpoint.require_space(tmp_path / 'new', 1)
    assert (tmp_path / 'new').is_dir()
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(ValueError, match='need 1000000000.00 GB but .* GB are free'):
        checkpoint.require_space(tmp_path, 10 ** 18)
    with pytest.raises(ValueError, match='free'):
        checkpoint.require_space(tmp_path, 2 * free)
    with open(tmp_path / 'last.pt', 'wb') as file:
        file.truncate(2 * free)  # of a run that goes on: it will be replaced
    checkpoint.require_space(tmp_path, 2 * free)


# ----------------------------------------------------------------------------- models

def test_load_model_rebuilds_last_best_or_any_file(out_dir):
    shutil.copy(out_dir / 'best.pt', out_dir / 'kept.pt')
    idx = torch.arange(8)[None]
    for init_from, seed, file in ('last', 7, 'last.pt'), ('best', 5, 'best.pt'), (out_dir / 'kept.pt', 5, 'kept.pt'):
        model, info = checkpoint.load_model(init_from, out_dir, 'cpu')
        assert torch.equal(model(idx), tiny_model(seed)(idx))
        assert info['step'] == seed and info['path'] == str(out_dir / file)
        assert model.config == tiny_model().config
        assert not model.training and not any(weight.requires_grad for weight in model.parameters())


def test_load_model_reads_what_train_wrote(tiny_run):
    model, info = checkpoint.load_model('last', tiny_run, 'cpu')
    assert info['digest'] == checkpoint.weights_digest(model.state_dict())
    assert info['step'] == 20 and 'optimizer' not in info
    assert model(torch.zeros(1, 5, dtype=torch.long)).shape == (1, 5, 257)


def test_weights_of_another_shape_are_refused(tmp_path, bytes_state):
    """DAPE over ALiBi and over NoPE has the same names, with twice the channels where there is a bias."""
    model = random_model(position='alibi', dape_kernel=3, vocab_size=257)
    checkpoint.save(tmp_path / 'last.pt', **checkpoint.model_state(model, bytes_state, 0))
    with pytest.raises(ValueError, match=r'blocks.0.attn.dape.first.weight of shape \(32, 8, 1, 3\), so'):
        checkpoint.load_model('last', tmp_path, 'cpu', position='none')


def test_model_loaded_in_half_precision_computes_what_autocast_does(tiny_run):
    (plain, _), (lower, _) = (checkpoint.load_model('last', tiny_run, 'cpu', dtype=dtype)
                              for dtype in (torch.float32, torch.bfloat16))
    idx = torch.arange(40)[None]
    with torch.autocast('cpu', torch.bfloat16):
        assert torch.equal(lower(idx[:, :-1], idx[:, 1:]), plain(idx[:, :-1], idx[:, 1:]))
    assert lower.head.weight.dtype == torch.bfloat16 and lower.head_scale.dtype == torch.float32


def test_loaded_model_can_be_changed_without_touching_its_file(out_dir, loaded):
    before = (out_dir / 'last.pt').read_bytes()
    model, _ = loaded
    model.head_scale = 3
    model.embed.weight.data.zero_()
    assert (out_dir / 'last.pt').read_bytes() == before


def test_data_of_another_tokenizer_is_refused(tmp_path, bytes_state, loaded):
    checkpoint.require_tokenizer(loaded[1], bytes_state | {'name': 'called otherwise'}, 'mine')
    ranks = {bytes([byte]): byte for byte in range(256)} | {b'th': 256}
    (tmp_path / 'th.tiktoken').write_text(format_ranks(ranks))
    other = tokenizer_state(get_tokenizer(str(tmp_path / 'th.tiktoken')))
    with pytest.raises(ValueError, match=r'last.pt was trained with tokenizer bytes, but data set mine .* th.tiktoken'):
        checkpoint.require_tokenizer(loaded[1], other, 'mine')


# ----------------------------------------------------------------------------- digest

def test_digest_changes_with_any_weight_of_a_small_model():
    """No matrix here has more than 4,096 weights, so each one counts, down to its last bit."""
    state = tiny_model().state_dict()
    digests = {checkpoint.weights_digest(state)}
    for name, weight in state.items():
        if weight.dim() == 2:
            for index in 0, weight.numel() // 3, weight.numel() - 1:
                changed = weight.clone().flatten()
                changed[index] = torch.nextafter(changed[index], torch.tensor(9.0))
                digests.add(checkpoint.weights_digest(state | {name: changed.view(weight.shape)}))
    n_matrices = sum(weight.dim() == 2 for weight in state.values())
    assert n_matrices == 10 and len(digests) == 1 + 3 * n_matrices


def test_digest_samples_4096_weights_of_a_large_matrix_from_end_to_end():
    weight = torch.zeros(300, 1000)
    digests = {checkpoint.weights_digest({'w': weight})}
    for place in np.linspace(0, weight.numel() - 1, 4096).astype(int)[[0, 1, 1000, 4094, 4095]]:
        changed = weight.clone().flatten()
        changed[place] = 1
        digests.add(checkpoint.weights_digest({'w': changed.view(weight.shape)}))
    assert len(digests) == 6


def test_digest_changes_with_names_and_shapes():
    weight = torch.ones(4, 6)
    states = {'w': weight}, {'v': weight}, {'w': weight.view(6, 4)}, {'w': weight, 'v': weight}
    assert len({checkpoint.weights_digest(state) for state in states}) == 4


def test_digest_is_blind_to_head_scales_and_norms(out_dir):
    model = tiny_model(seed=7)
    before = checkpoint.weights_digest(model.state_dict())
    model.head_scale = 1.7
    for name, weight in model.named_parameters():
        if 'norm' in name:
            weight.data.fill_(2)
    assert checkpoint.weights_digest(model.state_dict()) == before


def test_digest_is_the_same_after_save_and_load(out_dir):
    state = checkpoint.load(out_dir / 'last.pt')
    model, info = checkpoint.load_model('last', out_dir, 'cpu')
    digests = {checkpoint.weights_digest(weights) for weights in (
        tiny_model(seed=7).state_dict(), state['model'], model.state_dict(), dict(reversed(state['model'].items())))}
    assert digests == {state['digest']} == {info['digest']}


# ----------------------------------------------------------------------------- scales

SCALES = [[1.0, 1.25, 1.5, 2.0], [3.0, 0.123456, -0.07, 1.6]]  # 2 layers of 4 heads, one below 0: unconstrained


def test_scale_of_a_stage_is_nothing_a_number_or_a_file(tmp_path, loaded):
    model, info = loaded
    model.head_scale = 1.5
    assert checkpoint.apply_scale(model, None, info) == ''
    assert torch.equal(model.head_scale, torch.full((2, 4), 1.5))  # as it was
    assert checkpoint.apply_scale(model, 1.2, info) == 'scale1.2'
    assert torch.equal(model.head_scale, torch.full((2, 4), 1.2))
    assert checkpoint.apply_scale(model, 2, info) == 'scale2'
    checkpoint.save_scale(tmp_path / 'scale_head_64.json', info, {64: scale_set(SCALES)}, 'head')
    assert checkpoint.apply_scale(model, str(tmp_path / 'scale_head_64.json'), info) == 'scale_head_64'
    assert torch.equal(model.head_scale, torch.tensor(SCALES))


def test_scale_file_reads_as_it_was_written(tmp_path, loaded):
    path, info = tmp_path / 'scale.json', loaded[1]
    checkpoint.save_scale(path, info, {64: scale_set(SCALES)}, 'head', losses=[2.5, 2.25])
    data, sets = checkpoint.read_scale_file(path, info)
    assert all(torch.equal(sets[64][name], row) for name, row in scale_set(SCALES).items())
    assert np.allclose(data['head_scale'], SCALES, atol=1e-6, rtol=0)
    assert (data['method'], data['block_size'], data['target_length']) == ('head', 8, 64)
    assert data['losses'] == [2.5, 2.25] and data['weights_digest'] == info['digest']
    assert '1.0, 1.25, 1.5, 2.0' in path.read_text()  # a layer a line, for people


@pytest.mark.parametrize('scale', [0, -1, -0.5])
def test_scale_that_is_not_above_0_is_refused(loaded, scale):
    model, info = loaded
    with pytest.raises(ValueError, match='above 0'):
        checkpoint.apply_scale(model, scale, info)
    assert torch.equal(model.head_scale, torch.ones(2, 4))


def test_scale_file_of_another_model_is_refused(out_dir, loaded):
    path = out_dir / 'scale.json'
    checkpoint.save_scale(path, checkpoint.load_model('best', out_dir, 'cpu')[1], {64: scale_set(SCALES)}, 'head')
    model, info = loaded
    with pytest.raises(ValueError, match=r'scale.json was tuned for other weights than .*last.pt'):
        checkpoint.apply_scale(model, str(path), info)
    assert torch.equal(model.head_scale, torch.ones(2, 4))


def test_checkpoint_older_than_a_setting_has_its_default(tiny_run, tmp_path):
    state = torch.load(tiny_run / 'last.pt', weights_only=True)
    config = dict(state['model_config'])
    for name in 'dape_kernel', 'rope_scaling':
        del state['model_config'][name]
    torch.save(state, tmp_path / 'old.pt')
    assert checkpoint.load(tmp_path / 'old.pt')['model_config'] == config


@pytest.mark.parametrize('changes, named', [
    ({'n_layer': 10 ** 9}, 'n_layer=1000000000'), ({'n_embd': 10 ** 9}, 'n_embd=1000000000'),
    ({'vocab_size': 10 ** 9}, 'holds .* weights'), ({'n_hidden': 10 ** 18}, 'holds .* weights'),
    ({'dape_kernel': 3, 'dape_width': 10 ** 9}, 'holds .* weights'),
    ({'n_layer': None}, 'n_layer is None'), ({'n_embd': '16'}, "n_embd is '16'"),
    ({'norm_eps': 'small'}, "norm_eps is 'small'"), ({'rope_base': [1]}, 'rope_base'),
    ({'learning_rate': 1}, 'learning_rate')], ids=str)
def test_model_settings_that_are_not_those_of_the_weights_are_refused(out_dir, changes, named):
    state = torch.load(out_dir / 'last.pt', weights_only=True)
    state['model_config'] |= changes
    checkpoint.save(out_dir / 'odd.pt', **state)
    with pytest.raises(ValueError, match=f'odd.pt .*{named}'):
        checkpoint.load_model(out_dir / 'odd.pt', None, 'cpu')


@pytest.mark.parametrize('changes', [
    {'model': None}, {'model': [1]}, {'model': {'w': 1}}, {'model_config': None}], ids=str)
def test_entry_of_the_wrong_kind_in_a_checkpoint_is_refused(out_dir, changes):
    state = torch.load(out_dir / 'last.pt', weights_only=True)
    checkpoint.save(out_dir / 'odd.pt', **state | changes)
    with pytest.raises(ValueError, match='odd.pt'):
        checkpoint.load(out_dir / 'odd.pt')


def test_scale_file_of_another_position_method_is_refused(tmp_path, loaded):
    model, info = loaded
    checkpoint.save_scale(tmp_path / 'scale.json', info, {64: scale_set(SCALES)}, 'head')
    for setting, other in ('rope_scaling', 'yarn:4'), ('position', 'rope'):  # the same weights, read another way
        tuned = info['model_config'][setting]
        info['model_config'][setting] = other
        with pytest.raises(ValueError, match=f"scale.json was tuned with {setting} '{tuned}', but .* read with "
                                             f"'{other}'. Add --{setting}={tuned}"):
            checkpoint.apply_scale(model, str(tmp_path / 'scale.json'), info)
        info['model_config'][setting] = tuned


def test_scale_file_that_does_not_exist_is_refused(loaded):
    model, info = loaded
    for scale in 'nowhere.json', '1,2':
        with pytest.raises(ValueError, match=f'{scale} does not exist. Make one with tune_scale.py, or give a number'):
            checkpoint.apply_scale(model, scale, info)


@pytest.mark.parametrize('text', ['', '{"head_scale": [[1', '[]', '{}', '"text"', '{"head_scale": [[1, 1, 1, 1]]}',
                                  '\x80\x81', '[' * 200_000],
                         ids=lambda text: text[:20])
def test_file_that_is_no_scale_file_is_refused(tmp_path, loaded, text):
    path = tmp_path / 'broken.json'
    path.write_bytes(text.encode('latin-1'))
    with pytest.raises(ValueError, match='broken.json is not a scale file') as caught:
        checkpoint.apply_scale(*loaded[:1], str(path), loaded[1])
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize('changes', [
    {'sets': None}, {'sets': 5}, {'sets': [5]}, {'sets': [None]}, {'sets': {}},
    {'target_length': None}, {'target_length': '64'}, {'target_length': [64]},
    {'norm': None}, {'norm': [1]}, {'norm': {'norm.weight': None}}, {'norm': {'norm.weight': 5}},
    {'norm': {'norm.weight': ['a'] * 16}}, {'norm': {'norm.weight': [[1.0]] * 16}},
    {'norm': {'norm.weight': [math.nan] * 16}}, {'head_scale': None}, {'head_scale': {}},
    {'head_gain': None}, {'head_scale': [[10 ** 400] * 4] * 2}, {'tuning_tokens': 'many'}],
    ids=lambda changes: str(changes)[:40])
def test_entry_of_the_wrong_kind_in_a_scale_file_is_refused(tmp_path, loaded, changes):
    path, (model, info) = tmp_path / 'odd.json', loaded
    checkpoint.save_scale(path, info, {64: scale_set(SCALES)}, 'head')
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match='odd.json'):
        checkpoint.apply_scale(model, str(path), info)
    assert torch.equal(model.head_scale, torch.ones(2, 4))


def test_folder_is_no_scale_file(out_dir, loaded):
    with pytest.raises(ValueError, match='is not a scale file'):
        checkpoint.read_scale_file(out_dir, loaded[1])


@pytest.mark.parametrize('rows', [[[1.0] * 4] * 3, [[1.0] * 3] * 2, [['a'] * 4] * 2],
                         ids=['a-layer-more', 'a-head-less', 'words'])
def test_scale_file_whose_rows_do_not_fit_the_model_is_refused(tmp_path, loaded, rows):
    """A person may have edited it."""
    path, (model, info) = tmp_path / 'edited.json', loaded
    checkpoint.save_scale(path, info, {64: scale_set(SCALES)}, 'head')
    path.write_text(json.dumps(json.loads(path.read_text()) | {'head_scale': rows}))
    with pytest.raises(ValueError, match='edited.json'):
        checkpoint.apply_scale(model, str(path), info)
    assert torch.equal(model.head_scale, torch.ones(2, 4))


@pytest.mark.parametrize('kind, row', [('head_scale', 1), ('head_gain', 0),
                                       ('norm', 'norm.weight')])
def test_scale_file_beyond_float32_is_refused_whichever_vector_it_is(tmp_path, loaded, kind, row):
    """1e39 is finite in JSON, and infinite once it is in the model."""
    path, (model, info) = tmp_path / 'edited.json', loaded
    checkpoint.save_scale(path, info, {64: vectors(1.5, model)}, 'head')
    data = json.loads(path.read_text())
    data[kind][row][0] = 1e39
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=f'{kind}.* in .*edited.json'):
        checkpoint.apply_scale(model, str(path), info)
    assert all(torch.equal(p, torch.ones_like(p)) for p in model.parameters() if p.dim() == 1)


def test_number_that_replaces_scales_of_the_checkpoint_says_so_once(loaded, capsys, monkeypatch):
    model, info = loaded
    checkpoint.apply_scale(model, 1.2, info)
    assert capsys.readouterr().out == ''  # every scale was 1: nothing is lost
    model.head_scale = SCALES
    checkpoint.apply_scale(model, None, info)
    assert capsys.readouterr().out == ''
    checkpoint.apply_scale(model, 1.2, info)
    line, = capsys.readouterr().out.splitlines()
    assert info['path'] in line and '-0.070 to 3.000' in line and '1.2' in line
    monkeypatch.setenv('RANK', '1')
    model.head_scale = SCALES
    checkpoint.apply_scale(model, 1.2, info)
    assert capsys.readouterr().out == ''


# ----------------------------------------------------------------------------- scale sets

def vectors(value, model):
    """Every vector that can be tuned, all of its entries being `value`."""
    return {name: torch.full_like(p, value) for name, p in model.named_parameters() if p.dim() == 1}


def test_sets_keep_gains_and_norms_and_are_chosen_by_the_length_of_the_pass(tmp_path, loaded):
    model, info = loaded  # L = 8
    before, path = {name: p.clone() for name, p in model.named_parameters()}, tmp_path / 'scale_sets.json'
    checkpoint.save_scale(path, info, {16: vectors(1.2, model), 64: vectors(2.0, model)}, 'head')
    assert checkpoint.apply_scale(model, str(path), info) == 'scale_sets'
    for total, value in ((16, 1.2), (64, 2.0), (32, 1.6), (16 * 2 ** 0.5, 1.4)):
        model.use_set(total)
        assert all(p.allclose(torch.tensor(value)) for p in model.parameters() if p.dim() == 1)
    for total in (1, 8):
        model.use_set(total)
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    with pytest.warns(UserWarning, match='no scales for more than 64 tokens'):
        model.use_set(65)
    assert (model.head_scale == 2).all()
    model.use_set(int(8 * 2 ** 0.5 + 0.5))
    share = math.log(11 / 8) / math.log(16 / 8)
    assert model.head_scale.flatten()[0].item() == pytest.approx(1 + 0.2 * share)


def test_contexts_up_to_L_keep_the_pretrained_losses_to_the_last_bit_under_sets(tmp_path, loaded):
    model, info = loaded
    idx = torch.arange(64)[None] % 11
    before = [model(idx[:, :T]) for T in (1, 5, 8, 30)]
    sets = {T: vectors(value, model) for T, value in ((4, 1.4), (8, 1.3), (16, 1.2), (64, 2.0))}  # even if it has some
    checkpoint.save_scale(tmp_path / 'sets.json', info, sets, 'head')
    checkpoint.apply_scale(model, str(tmp_path / 'sets.json'), info)
    model(idx[:, :40])
    after = [model(idx[:, :T]) for T in (1, 5, 8, 30)]
    assert [torch.equal(a, b) for a, b in zip(after, before)] == [True, True, True, False]


def test_cached_decoding_under_sets_equals_a_full_pass_of_the_length_fixed_before(tmp_path, loaded):
    model, info = loaded
    idx = torch.arange(40)[None] * 7 % 11
    checkpoint.save_scale(tmp_path / 'sets.json', info, {16: vectors(1.2, model), 64: vectors(2.0, model)}, 'head')
    checkpoint.apply_scale(model, str(tmp_path / 'sets.json'), info)
    full, cache = model(idx), model.new_cache(1, 40)
    with torch.no_grad():
        parts = [model(part, cache=cache) for part in idx.split([5, 1, 1, 33], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=0, atol=1e-4)


def test_each_position_is_read_in_the_pass_that_ends_nearest(loaded):
    model, _ = loaded
    assert model.passes(50) == [(0, 50)]
    model.sets = {8: {}, 16: {}, 64: {}}
    assert model.passes(50) == [(0, 8), (8, 16), (16, 50)] and model.passes(16) == [(0, 8), (8, 16)]
    assert model.passes(5) == [(0, 5)]
