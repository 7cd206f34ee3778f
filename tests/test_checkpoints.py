"""
Checkpoints: written whole or not at all, read without running anyone's code, refused where damaged.

$ python -m pytest tests/test_checkpoints.py
"""

import contextlib
import os
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import (
    ROOT,
    damage,
    files_at_most,
    flip_a_bit,
    memory_at_most,
    mistake,
    near,
    on,
    random_model,
    read,
    refuses,
    save_model,
    tokens,
)

import sample
from lib.checkpoints import (
    Run,
    load,
    load_model,
    open_model,
    require_space,
    save,
    weights_digest,
)
from lib.errors import UserError
from lib.tokenizers import get_tokenizer, tokenizer_state
from model import Transformer, vector_of

BYTES = tokenizer_state(get_tokenizer('bytes'))


def small_model(seed, **changes):
    return random_model(seed, vocab_size=20, block_size=8, n_embd=16, n_hidden=24, **changes)


@pytest.fixture
def out_dir(tmp_path):
    """last.pt at step 7 and best.pt at step 5, of two models."""
    for name, step in ('last.pt', 7), ('best.pt', 5):
        save_model(small_model(step), tmp_path / name, step, {'seed': step})
    return tmp_path


# ---------------------------------------------------------------------- save

def test_write_that_fails_leaves_the_old_checkpoint_and_no_rest(out_dir):
    before = (out_dir / 'last.pt').read_bytes()
    with pytest.raises(OSError, match='last.pt'), files_at_most(100_000):
        save(out_dir / 'last.pt', model={'weight': torch.ones(100_000)})
    assert (out_dir / 'last.pt').read_bytes() == before
    assert not list(out_dir.glob('*.part'))


def test_disk_without_room_is_refused_but_a_checkpoint_that_will_be_replaced_counts(tmp_path):
    require_space(tmp_path / 'new', 1)
    twice = 2 * shutil.disk_usage(tmp_path).free
    refuses('free', require_space, tmp_path, twice)
    with open(tmp_path / 'last.pt', 'wb') as file:
        file.truncate(twice)
    require_space(tmp_path, twice)


# ---------------------------------------------------------------------- load

def test_load_model_rebuilds_last_best_or_any_file(out_dir):
    for init_from, step in ('last', 7), ('best', 5), (out_dir / 'best.pt', 5):
        (model, info), made = load_model(init_from, out_dir, 'cpu'), small_model(step)
        near(dict(model.state_dict()), dict(made.state_dict()))
        assert (info['step'], info['settings'], info['tokenizer']) == (step, {'seed': step}, BYTES)
        assert model.config == made.config and Path(info['path']).parent == out_dir
        assert not any([model.training, *(p.requires_grad for p in model.parameters())])


def test_a_setting_or_a_small_vector_that_a_checkpoint_lacks_changes_nothing(tmp_path):
    model, path = random_model(vocab_size=257), tmp_path / 'last.pt'
    model.blocks[1].attn.head_gain.data.fill_(1)
    save_model(model, path)
    for entry in 'model blocks.1.attn.head_gain', 'model_config dape_width':
        damage(path, f'{entry} | DROP')
    lacks, _ = load_model(path, '', 'cpu')
    assert lacks.config == model.config
    assert torch.equal(lacks(tokens(1, 20)), model(tokens(1, 20)))


def test_layers_share_t5s_table_after_loading_too(tmp_path):
    model = random_model(position='t5', vocab_size=257)
    save_model(model, tmp_path / 'last.pt')
    loaded, _ = load_model('last', tmp_path, 'cpu')
    tables = {id(block.attn.position.table) for block in loaded.blocks}
    assert len(tables) == 1 and loaded.n_params() == model.n_params()


def test_opening_a_model_does_not_load_the_compiler(out_dir):
    """It would take a second of every start."""
    code = f"""
import sys
from lib.checkpoints import load_model
from lib.devices import setup
runtime = setup('cpu', 'float32')
load_model('last', {str(out_dir)!r}, runtime.device)
sys.exit('torch._dynamo' in sys.modules)"""
    subprocess.run([sys.executable, '-c', code], cwd=ROOT, check=True)


# ---------------------------------------------------------------------- refused

class Code:
    """When a pickle of it is read, a file is created."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.mark.parametrize('write', [torch.save, lambda x, path: path.write_bytes(pickle.dumps(x))])
def test_code_in_a_strangers_checkpoint_is_refused_and_never_runs(out_dir, write):
    mark, path = out_dir / 'executed', out_dir / 'strange.pt'
    write(load(out_dir / 'last.pt') | {'settings': Code(mark)}, path)
    refuses('strange.pt', load, path)
    assert not mark.exists()
    if write is torch.save:
        torch.load(path, weights_only=False)
        assert mark.exists(), 'the file is harmless and tests nothing'
    write([1, 2], path)  # a file of another program
    refuses('strange.pt', load, path)


def test_a_checkpoint_that_is_cut_short_or_has_a_flipped_bit_gives_no_other_weights(out_dir):
    """It is refused, or the bit is in padding."""
    path, places, n_read = out_dir / 'last.pt', random.Random(0), 0
    whole, state = path.read_bytes(), load(path)
    for _ in range(100):
        flip_a_bit(path, places.randrange(len(whole)))
        with contextlib.suppress(UserError):
            found, n_read = load(path), n_read + 1
            near(found.pop('model'), state['model'])
            assert found == {key: state[key] for key in state if key != 'model'}
        path.write_bytes(whole)
    assert n_read < 40
    for share in 0.99, 0.5, 0:
        os.truncate(path, int(share * len(whole)))
        refuses('last.pt', load, path)


def test_a_file_that_cannot_be_opened_is_not_called_damaged(out_dir, monkeypatch):
    monkeypatch.setattr('builtins.open', Mock(side_effect=PermissionError('last.pt')))
    with pytest.raises(PermissionError, match='last.pt'):
        load(out_dir / 'last.pt')


# What is changed, its new value as JSON, and what the refusal names; 'last.pt' by default.
ROWS = [f'{entry} | {value}' for entry in ('model', 'model_config', 'settings', 'digest', 'step')
        for value in ('DROP', 'null', '[]')]
ROWS += '''
model | {"embed.weight": 5}
model | {"1": []}
model_config n_layer | null | NoneType
model_config n_layer | 1000000000 | n_layer=1000000000
model_config n_embd | "16" | str
model_config n_embd | 1000000000 | blocks.0.attn
model_config vocab_size | 1000000000 | embed
model_config dape_kernel | 3 | position.first
model_config rope_base | [1] | list
model_config pretrained_length | "x"
model_config pretrained_length | -1 | pretrained_length is -1
model_config pretrained_length | 0 | pretrained_length is 0
model_config norm_eps | "x"
model_config norm_eps | -1.0 | norm_eps is -1
model_config tied | 5
model_config learning_rate | 1 | learning_rate
settings | 5
settings seed | {}
settings dataset | 5
step | "7"
step | -7
tokenizer | DROP
tokenizer | {}
tokenizer | 5
tokenizer kind | "gone"
tokenizer kind | []
tokenizer name | DROP
tokenizer text | null
tokenizer text | "YQ== 0" | bytes
tokenizer text | "YQ== 0 1" | bytes
tokenizer pattern | DROP
tokenizer pattern | 5
tokenizer pattern | "(" | bytes
tokenizer pattern | ""
tokenizer eot_token | "x"
tokenizer eot_token | -1 | bytes
'''.strip().splitlines()


@pytest.mark.parametrize('row', ROWS)
def test_a_checkpoint_without_an_entry_or_with_one_of_the_wrong_kind_is_refused(out_dir, row):
    keys, value, *named = row.split(' | ')
    damage(out_dir / 'last.pt', f'{keys} | {value}')
    with memory_at_most(2 ** 30):  # sizes of 10^9 are refused before they are allocated
        refuses(*named or ['last.pt'], open_model, out_dir / 'last.pt')


def test_weights_of_another_position_method_are_refused(tmp_path):
    """DAPE on ALiBi and on NoPE has the same names, but other channels."""
    save_model(random_model(position='alibi', dape_kernel=3), tmp_path / 'last.pt')
    for named in 'blocks.0.attn.position.first.weight', '(32, 8, 1, 3)':
        refuses(named, load_model, 'last', tmp_path, 'cpu', position='none')


# ---------------------------------------------------------------------- digest

def test_the_digest_changes_with_any_weight_down_to_its_last_bit_and_samples_large_matrices():
    state = {**small_model(0).state_dict(), 'large': torch.zeros(300, 1000)}
    digests = {weights_digest(state)}
    matrices = [name for name in state if not vector_of(name)]
    for name in matrices:
        # Of a large matrix, 4,096 weights are sampled from end to end.
        places = torch.linspace(0, state[name].numel() - 1, min(4096, state[name].numel())).long()
        for place in places[[0, len(places) // 3, -1]]:
            other = state[name].clone()
            other.view(-1)[place].nextafter_(torch.tensor(9.0))
            digests.add(weights_digest(state | {name: other}))
    assert len(digests) == 1 + 3 * len(matrices)


def test_the_digest_changes_with_names_and_shapes_but_not_with_head_scales_and_norms():
    weight, state = torch.ones(4, 6), small_model(0).state_dict()
    others = {'w': weight}, {'v': weight}, {'w': weight.T}, {'w': weight, 'v': weight}
    assert len({weights_digest(other) for other in others}) == 4
    tuned = {name: p + 0.7 * bool(vector_of(name)) for name, p in reversed(state.items())}
    assert weights_digest(tuned) == weights_digest(state)


def test_digest_is_the_one_that_checkpoints_and_scale_files_have():
    state = load(ROOT / 'lessons/demo.pt')
    assert weights_digest(state['model']) == state['digest']
    assert state['digest'] == read(ROOT / 'lessons/scale_uniform.json')['weights_digest']


# ---------------------------------------------------------------------- open one for a stage

def test_stage_that_decodes_has_equal_weights_stored_by_column(out_dir):
    settings = vars(sample) | {'out_dir': out_dir, 'device': 'cpu', 'dtype': 'float32'}
    plain, decoding = (Run(settings, decodes=decodes).model for decodes in (False, True))
    torch.use_deterministic_algorithms(False)  # a Run had set it
    for name, p in decoding.named_parameters():
        assert torch.equal(p, plain.get_parameter(name))
    assert plain.head.weight.is_contiguous()
    for block in decoding.blocks:
        assert block.attn.qkv.weight.t().is_contiguous()


@pytest.mark.parametrize('command', [
    'eval_ppl', 'eval_ppl --protocol=repeat', 'entropy', 'attention_maps', 'passkey',
    'tune_scale --init_scale=1.1', 'tune_scale --method=uniform'])
def test_a_folder_that_cannot_be_written_is_met_before_the_work(tiny_run, monkeypatch, command):
    """The folder is below a file, because root can write to a read-only folder."""
    stage, *more = command.split()
    monkeypatch.setattr(Transformer, 'hidden', lambda *_, **more: pytest.fail('work has begun'))
    out_dir = tiny_run / 'last.pt/below'
    assert f'{out_dir}/' in mistake(stage, *on(tiny_run, out_dir), *more)
