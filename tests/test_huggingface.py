"""$ python -m pytest tests/test_huggingface.py       (lib/huggingface, lib/foreign, lib/exports)"""

import contextlib
import copy
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from conftest import (
    files_at_most,
    flip_a_bit,
    mistake,
    near,
    random_model,
    read,
    refuses,
    stage,
    stage_here,
    tokens,
)

from lib import checkpoints, exports, huggingface
from lib.answers import whole_folder
from lib.errors import UserError
from lib.foreign import load_foreign
from lib.generate import Decoding, complete, new_cache
from lib.huggingface import load_folder
from lib.losses import by_position
from lib.scales import apply_scale, put_vectors, save_scale
from lib.tokenizers import (
    get_tokenizer,
    tiktoken_encoding,
    tokenizer_from_state,
    tokenizer_state,
    train_bpe,
)
from lib.tokens import write_corpus
from model import ModelConfig, small_vectors

transformers = pytest.importorskip('transformers')
safetensors_torch = pytest.importorskip('safetensors.torch')
tokenizers = pytest.importorskip('tokenizers')

BYTES = tokenizer_state(get_tokenizer('bytes'))
SIZES = json.loads('''{
"Llama": {
    "vocab_size": 260, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": null},
"GraniteMoeHybrid": {
    "shared_intermediate_size": 96, "layer_types": ["attention", "attention"],
    "num_local_experts": 0, "mamba_n_heads": 1, "attention_multiplier": 0.25},
"SmolLM3": {"num_hidden_layers": 6, "tie_word_embeddings": false},
"Cohere": {"logit_scale": 0.5},
"Bloom": {"vocab_size": 260, "eos_token_id": 256, "hidden_size": 64, "n_layer": 2, "n_head": 4},
"Mpt": {"vocab_size": 260, "eos_token_id": 256, "d_model": 48, "n_layers": 2, "n_heads": 6,
        "expansion_ratio": 2, "max_seq_len": 64},
"GPT2": {"vocab_size": 260, "eos_token_id": 256, "n_embd": 64, "n_layer": 2, "n_head": 4,
         "n_positions": 128}}''')
for kind in 'GraniteMoeHybrid', 'SmolLM3', 'Cohere':
    SIZES[kind] = SIZES['Llama'] | SIZES[kind]
YARN = {'rope_type': 'yarn', 'rope_theta': 5000.0, 'factor': 4.0,
        'original_max_position_embeddings': 32}


def stock(folder, kind='Llama', shard='1GB', **changes):
    """
    A random model of transformers, its norms not 1 and its attention far from uniform, saved to
    folder with a byte tokenizer. Returns it in float32 with eager attention.
    """
    torch.manual_seed(0)
    config = getattr(transformers, f'{kind}Config')(**SIZES[kind] | changes)
    auto = transformers.AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation='eager').float().eval()
    for name, p in model.named_parameters():
        if name.endswith('bias'):
            p.data.uniform_(-0.1, 0.1)
        elif p.dim() == 1:
            p.data.uniform_(0.5, 1.5)
        else:
            p.data *= 5
    model.save_pretrained(folder, max_shard_size=shard)
    text = exports.tokenizer_json(BYTES)
    (folder / 'tokenizer.json').write_text(text, encoding='utf-8')
    return model


def ours(source, position=None, dtype=torch.float32):
    return checkpoints.load_model(str(source), '', 'cpu', position, dtype=dtype)[0]


def weights_of(folder):
    return copy.deepcopy(load_folder(str(folder), 'rope')['model'])  # a copy: files are mapped


def unread(named, folder):
    """Raise AssertionError unless a folder is refused with a line that names this."""
    refuses(named, load_folder, str(folder), 'rope')


def export(folder, model, dtype=torch.float32, tokenizer=BYTES):
    with whole_folder(folder) as part:
        exports.save_folder(part, model, tokenizer, dtype)


def reopened(folder):
    """A folder as stock transformers reads it, without missing or unused tensors."""
    auto = transformers.AutoModelForCausalLM
    model, report = auto.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    return model.eval(), model.config


@torch.no_grad()
def logits(model, idx):
    out = model(idx)
    return getattr(out, 'logits', out)


@torch.no_grad()
def assert_same_logits(model, theirs, length=100):
    """Returns the logits."""
    idx = tokens(2, length)
    expected = logits(theirs, idx)
    assert expected[:, -11:].log_softmax(-1).std(1).mean() > 0.1  # not equal at all positions
    near(logits(model, idx), expected, 1e-4)
    return expected


def edit_config(folder, **changes):
    """Change entries of config.json; 'gone' removes one."""
    config = read(folder / 'config.json') | changes
    config = {key: value for key, value in config.items() if value != 'gone'}
    (folder / 'config.json').write_text(json.dumps(config))


def edit_weights(folder, remove=(), **more):
    """Remove and add tensors of model.safetensors. Returns all tensors."""
    path = folder / 'model.safetensors'
    weights = safetensors_torch.load(path.read_bytes()) | more
    for name in remove:
        del weights[name]
    safetensors_torch.save_file(weights, path, metadata={'format': 'pt'})
    return weights


@contextlib.contextmanager
def memory_at_most(n_bytes):
    """Inside, the process can allocate n_bytes more. Without /proc there is no limit."""
    path = Path('/proc/self/statm')
    resource = pytest.importorskip('resource', reason='Windows cannot limit memory')
    before = resource.getrlimit(resource.RLIMIT_AS)
    if path.exists():
        used = int(path.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + n_bytes, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


# ---------------------------------------------------------------------- Llama-type models

# Kind of config | what is changed in it | our position method.
IMPORTS = '''
Llama | {} | rope
Llama | {"num_key_value_heads": 4, "rms_norm_eps": 1e-3} | rope
Llama | {"tie_word_embeddings": true} | rope
Llama | {"rope_parameters": {"rope_theta": 5000, "rope_type": "linear", "factor": 4.0}} | rope
Llama | {"rope_parameters": {"rope_theta": 5000, "rope_type": "dynamic", "factor": 2.0}} | rope
Llama | {"rope_parameters": YARN} | rope
SmolLM3 | {"no_rope_layers": [1, 1, 1, 1, 1, 1]} | rope
SmolLM3 | {"no_rope_layers": [0, 0, 0, 0, 0, 0]} | none
SmolLM3 | {"no_rope_layers": [1, 1, 1, 0, 1, 1]} | rope,rope,rope,none
SmolLM3 | {"no_rope_layers": [0, 1, 0, 1, 0, 1]} | none,rope
SmolLM3 | {"no_rope_layers": [1, 0, 0, 0, 0, 0]} | rope,none,none,none,none,none
GraniteMoeHybrid | {"attention_multiplier": 0.4} | none
GraniteMoeHybrid | {"position_embedding_type": "nope", "tie_word_embeddings": true} | none
GraniteMoeHybrid | {"position_embedding_type": "rope", "rope_theta": 5000} | rope
'''.replace('YARN', json.dumps(YARN)).strip().splitlines()


@pytest.mark.parametrize('row', IMPORTS)
def test_our_model_and_its_export_give_the_logits_of_transformers(tmp_path, row):
    kind, changes, position = row.split(' | ')
    changes = json.loads(changes)
    theirs, model = stock(tmp_path / 'in', kind, **changes), ours(tmp_path / 'in')
    assert model.config.position == position
    assert (model.head.weight is model.embed.weight) == changes.get('tie_word_embeddings', False)
    assert_same_logits(model, theirs)
    export(tmp_path / 'out', model)
    assert_same_logits(model, reopened(tmp_path / 'out')[0])
    again = ours(tmp_path / 'out').config
    assert (again.position, again.rope_scaling) == (position, model.config.rope_scaling)


def test_older_rope_settings_mean_the_same_and_come_first(tmp_path):
    stock(tmp_path, rope_parameters=YARN)
    new = ours(tmp_path).config
    old = YARN | {'type': 'yarn', 'rope_type': None, 'attention_factor': None}
    edit_config(tmp_path, rope_parameters=None, rope_theta=5000.0, rope_scaling=old)
    assert ours(tmp_path).config == new
    stock(tmp_path)
    edit_config(tmp_path, rope_scaling={'rope_type': 'linear', 'factor': 4.0})
    assert_same_logits(ours(tmp_path), transformers.AutoModelForCausalLM.from_pretrained(tmp_path))


def test_the_caller_can_read_a_llama_config_as_nope_and_is_told_so(tmp_path, capsys):
    stock(tmp_path, rope_parameters=YARN)
    ours(tmp_path)
    nope = ours(tmp_path, 'none').config
    assert capsys.readouterr().out.count('--position=none') == 1
    assert (nope.position, nope.rope_scaling) == ('none', '')


def test_without_a_tokenizer_a_folder_is_read_for_logits(tmp_path, corpus_dir, capsys):
    stock(tmp_path)
    (tmp_path / 'tokenizer.json').unlink()
    _, info = checkpoints.load_model(str(tmp_path), '', 'cpu', 'rope')
    checkpoints.open_windows(info, str(corpus_dir), 'test', 32)
    assert f'{tmp_path} has no tokenizer' in capsys.readouterr().out
    info['model_config']['vocab_size'] = 256
    refuses('more tokens', checkpoints.open_windows, info, str(corpus_dir), 'test', 32)
    assert 'tokenizer.json' in mistake('sample', f'--init_from={tmp_path}', '--position=rope')


def test_head_scales_inside_a_checkpoint_are_read_and_not_taken_for_rope(tmp_path, capsys):
    stock(tmp_path)
    scales = torch.tensor([[1.0, 1.5, 2.0, 1.25], [1.125, 3.0, 1.0, 1.75]])
    names = [huggingface.SCALES.format(i) for i in range(2)]
    edit_weights(tmp_path, **{name: row.bfloat16() for name, row in zip(names, scales)})
    refuses('--position=none', ours, tmp_path)
    for position in ('none', 'rope'):  # the caller knows
        model = ours(tmp_path, position)
        assert model.config.position == position and torch.equal(model.head_scale, scales)
    assert capsys.readouterr().out.count('head scales of its own') == 1
    edit_weights(tmp_path, remove=names[1:])
    unread(names[1], tmp_path)


def test_half_precision_file_is_read_in_the_precision_of_the_activations(tmp_path):
    stock(tmp_path).to(torch.bfloat16).save_pretrained(tmp_path)
    half = ours(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in ours(tmp_path).parameters()} == {torch.float32}
    assert half.head.weight.dtype == torch.bfloat16 and half.norm.weight.dtype == torch.float32


# ---------------------------------------------------------------------- what cannot be read

# Kind of config | what is changed in config.json | what the error names.
CONFIGS = '''
Llama | {"model_type": "bloom"} | 'bloom'
Llama | {"model_type": "gone"} | 'None'
Llama | {"hidden_size": "gone"} | hidden_size is None
Llama | {"num_attention_heads": 0} | n_head is 0
Llama | {"vocab_size": "260"} | vocab_size is 260
Llama | {"hidden_act": "gelu"} | hidden_act is gelu
Llama | {"attention_bias": true} | attention_bias
Llama | {"head_dim": 32} | head_dim is 32
Llama | {"sliding_window": 32} | sliding_window is 32
Llama | {"layer_types": ["sliding_attention", "sliding_attention"]} | layer_types
Llama | {"num_key_value_heads": 3} | n_kv_head 3
Llama | {"intermediate_size": 128} | gate_proj.weight
Llama | {"num_hidden_layers": 3} | model.layers.2.input_layernorm.weight
Llama | {"num_hidden_layers": 1} | model.layers.1
Llama | {"tie_word_embeddings": true} | lm_head.weight
Llama | {"vocab_size": 256} | 257 tokens
Llama | {"num_hidden_layers": 1000000000} | model.layers.2.input_layernorm.weight
Llama | {"vocab_size": 1000000000000000} | 10000
Llama | {"rope_parameters": {"rope_type": "llama3", "factor": 4.0}} | 'llama3'
Llama | {"rope_parameters": {"rope_type": "linear", "factor": 0.5}} | 'pi:0.5'
Llama | {"rope_parameters": {"rope_type": "linear", "factor": null}} | 'pi:None'
Llama | {"rope_parameters": {"rope_type": "linear", "factor": "four"}} | 'pi:four'
Llama | {"rope_parameters": {"rope_type": "yarn", "factor": 4, "beta_fast": 16}} | {'beta_fast': 16}
Llama | {"rope_parameters": {"rope_type": ["linear"], "factor": 4.0}} | config.json
Llama | {"rope_parameters": "yes"} | config.json
Llama | {"original_max_position_embeddings": "x", "rope_parameters": {"type": "yarn"}} | rope_length
Llama | {"num_key_value_heads": "two"} | num_key_value_heads is two
Llama | {"rms_norm_eps": null} | rms_norm_eps is None
Llama | {"tie_word_embeddings": 1} | tie_word_embeddings is 1
Llama | {"layer_types": 5} | layer_types is 5
SmolLM3 | {"no_rope_layers": [2, 2]} | no_rope_layers is [2, 2]
SmolLM3 | {"no_rope_layers": [0]} | no_rope_layers is [0]
SmolLM3 | {"no_rope_layers": null} | no_rope_layers is None
GraniteMoeHybrid | {"layer_types": ["attention", "mamba"]} | layer_types
GraniteMoeHybrid | {"layer_types": "gone"} | layer_types
GraniteMoeHybrid | {"num_local_experts": 2} | num_local_experts is 2
GraniteMoeHybrid | {"embedding_multiplier": 12} | embedding_multiplier is 12
GraniteMoeHybrid | {"residual_multiplier": 0.2} | residual_multiplier is 0.2
GraniteMoeHybrid | {"logits_scaling": 8} | logits_scaling is 8
GraniteMoeHybrid | {"attention_multiplier": null} | attention_multiplier is None
'''.strip().splitlines()


@pytest.mark.parametrize('row', CONFIGS)
def test_what_our_model_does_not_do_is_refused_before_memory_is_asked_for(tmp_path, row):
    kind, changes, named = row.split(' | ')
    stock(tmp_path, kind)
    edit_config(tmp_path, **json.loads(changes))
    position = 'rope' if kind == 'Llama' else None
    with memory_at_most(2 ** 30):  # a list of 10^9 layers alone would take 8 GB
        refuses(named, load_folder, str(tmp_path), position)


def test_pickled_weights_and_shards_of_them_import_the_same(tmp_path):
    stock(tmp_path)
    expected, weights = weights_of(tmp_path), edit_weights(tmp_path)
    (tmp_path / 'model.safetensors').unlink()
    path = tmp_path / 'pytorch_model.bin'
    for zipped in True, False:  # older models have rotary tables, which are no weights
        torch.save(weights | {'model.layers.0.self_attn.rotary_emb.inv_freq': torch.ones(8)}, path,
                   _use_new_zipfile_serialization=zipped)
        near(weights_of(tmp_path), expected)
    path.unlink()
    for i in range(2):
        torch.save(dict(list(weights.items())[i::2]), tmp_path / f'pytorch_model-{i}.bin')
    near(weights_of(tmp_path), expected)


def test_each_tensor_comes_once_from_regular_files_or_links_to_them(tmp_path):
    folder, blobs = tmp_path / 'shards', tmp_path / 'blobs'
    stock(folder, shard='20KB')
    expected = weights_of(folder)
    folder.rename(blobs)  # the hub's cache has links
    folder.mkdir()
    for path in blobs.iterdir():
        (folder / path.name).symlink_to(f'../blobs/{path.name}')
    near(weights_of(folder), expected)
    shard = sorted(folder.glob('model-*.safetensors'))[0]
    twice = folder / 'model-00001-of-00099.safetensors'
    twice.write_bytes(shard.read_bytes())
    unread('another file of weights', folder)
    twice.unlink()
    shard.unlink()
    unread('missing', folder)
    for path, named in (shard, 'missing'), (folder / 'config.json', 'has no config.json'):
        path.unlink(missing_ok=True)
        path.symlink_to('/dev/zero')
        with memory_at_most(2 ** 30):
            unread(named, folder)


@pytest.mark.parametrize('kind, load', [('Llama', load_folder), ('Bloom', load_foreign)])
def test_bit_that_flips_in_pickled_weights_is_refused(tmp_path, kind, load):
    path = tmp_path / 'pytorch_model.bin'
    stock(tmp_path, kind)
    weights = edit_weights(tmp_path)
    (tmp_path / 'model.safetensors').unlink()
    torch.save(weights, path)
    load(str(tmp_path))
    largest = max(weights.values(), key=torch.numel).numpy().tobytes()
    flip_a_bit(path, path.read_bytes().index(largest) + 100)
    refuses('pytorch_model.bin is damaged', load, str(tmp_path))


def test_an_export_in_which_a_bit_flips_has_the_same_weights_or_is_refused(tmp_path):
    export(tmp_path, random_model(vocab_size=257), torch.bfloat16)
    path, places, n_refused = tmp_path / 'model.safetensors', random.Random(0), 0
    whole, state = path.read_bytes(), weights_of(tmp_path)
    for end in [int.from_bytes(whole[:8], 'little')] * 40 + [len(whole)] * 40:  # header, all
        flip_a_bit(path, places.randrange(end))
        try:
            near(weights_of(tmp_path), state)
        except UserError:
            n_refused += 1
        path.write_bytes(whole)
    assert n_refused > 60


def test_weights_that_cannot_be_read_are_not_called_damaged(tmp_path, monkeypatch):
    def refuse(path, *_):
        raise PermissionError(path)

    stock(tmp_path)
    monkeypatch.setattr(huggingface, 'open', refuse, raising=False)
    with pytest.raises(PermissionError, match='model.safetensors'):
        weights_of(tmp_path)


def test_a_folder_that_is_not_whole_is_refused(tmp_path):
    unread('has no config.json', tmp_path)
    for text in ('{', '[' * 200_000, '{"model_type": ["llama"]}', 'null'):
        (tmp_path / 'config.json').write_text(text)
        refuses('config.json', ours, tmp_path)
    stock(tmp_path)
    path, pickled = tmp_path / 'model.safetensors', tmp_path / 'pytorch_model.bin'
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    unread('model.safetensors', tmp_path)
    path.write_bytes(whole)
    edit_weights(tmp_path, **{'lm_head.weight': torch.ones(260, 64, dtype=torch.int8)})
    unread('torch.int8', tmp_path)
    path.unlink()
    unread('neither model.safetensors nor', tmp_path)
    torch.save({'x': Path('/')}, pickled)  # code to run, not weights
    unread('pytorch_model.bin', tmp_path)
    (tmp_path / 'last.pt').touch()
    unread(f'--init_from={tmp_path}/last.pt', tmp_path)


def test_hub_names_are_found_in_the_cache_without_a_network(tmp_path, monkeypatch):
    constants = pytest.importorskip('huggingface_hub').constants
    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path))
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    commit, repo = 'c0ffee' + 34 * '0', tmp_path / 'models--someone--nope'
    stock(repo / 'snapshots' / commit)
    (repo / 'refs').mkdir()
    for ref in ('main', 'v1'):
        (repo / 'refs' / ref).write_text(commit)
    assert not huggingface.is_foreign('hf:someone/nope')
    for name in ('', '@v1', '@' + commit):
        near(weights_of(f'hf:someone/nope{name}'), weights_of(repo / 'snapshots' / commit))
    for source in ('hf:someone/nope@v2', 'hf:not a name'):
        unread('--init_from=FOLDER', source)


def test_a_missing_optional_package_is_asked_for(tmp_path, monkeypatch):
    stock(tmp_path)
    for name in ('safetensors', 'safetensors.torch', 'transformers', 'huggingface_hub'):
        monkeypatch.setitem(sys.modules, name, None)
    unread('pip install safetensors', tmp_path)
    unread('pip install huggingface_hub', 'hf:someone/nope')
    refuses('pip install transformers', load_foreign, str(tmp_path))
    refuses('pip install safetensors', export, tmp_path / 'out', random_model())


@pytest.mark.slow
@pytest.mark.skipif(not Path('/proc/self/statm').exists(), reason='needs Linux to limit memory')
@pytest.mark.skipif(shutil.disk_usage(tempfile.gettempdir()).free < 5e9, reason='needs 5 GB')
def test_a_model_of_1_1b_is_read_in_less_than_twice_its_memory(tmp_path):
    """TinyLlama's shape in bfloat16, 2.2 GB; the file, which is mapped, counts, too."""
    c = ModelConfig(vocab_size=32000, block_size=2048, n_layer=22, n_head=32, n_kv_head=4,
                    n_embd=2048, n_hidden=5632, position='rope')
    weights = {name: torch.full(shape, 0.02, dtype=torch.bfloat16)
               for _, parts in huggingface.tensor_table(c) for name, shape in parts}
    safetensors_torch.save_file(weights, tmp_path / 'model.safetensors')
    size = sum(weight.nbytes for weight in weights.values())
    del weights
    (tmp_path / 'config.json').write_text(json.dumps(exports.their_config(c, torch.bfloat16)))
    with memory_at_most(size + int(1.9 * size)):
        model = ours(tmp_path, dtype=torch.bfloat16)
    assert size > 2.1e9 and model.blocks[0].mlp.out.weight.dtype == torch.bfloat16


# ---------------------------------------------------------------------- exports

@pytest.mark.parametrize('position, scaling, kind, longest', [
    ('none', '', 'GraniteMoeHybrid', 32), ('rope', 'pi:4', 'Llama', 128),
    ('rope', 'ntk:4', 'Llama', 128), ('rope', 'dynamic_ntk:2', 'Llama', 32)])
def test_stock_transformers_computes_what_our_model_does(tmp_path, position, scaling, kind,
                                                         longest):
    model = random_model(vocab_size=257, position=position, rope_scaling=scaling)
    export(tmp_path / 'hf', model)
    theirs, config = reopened(tmp_path / 'hf')
    assert type(theirs).__name__ == f'{kind}ForCausalLM'
    assert (config.max_position_embeddings, config.eos_token_id) == (longest, 256)
    for length in (32, 64, 128):  # L, 2L, 4L
        assert_same_logits(model, theirs, length)


def test_folded_weights_are_rounded_once_and_vectors_are_not():
    model = random_model()
    weights, attn = exports.their_state(model, torch.bfloat16, 'llama'), model.blocks[1].attn
    q = attn.qkv.weight[:32].double() * attn.head_scale.double().repeat_interleave(8, dim=0)
    assert torch.equal(weights['model.layers.1.self_attn.q_proj.weight'], q.float().bfloat16())
    assert torch.equal(weights['model.norm.weight'], model.norm.weight)


def test_a_model_without_scales_comes_back_bit_for_bit(tmp_path):
    model = random_model(vocab_size=257)
    for block in model.blocks:
        block.attn.head_scale.data.fill_(1)
        block.attn.head_gain.data.fill_(1)
    export(tmp_path / 'hf', model)
    again = ours(tmp_path / 'hf')
    assert again.config == model.config
    near(dict(again.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize('changes', [
    {'position': 'alibi'}, {'position': 'rope,alibi'}, {'dape_kernel': 3}, {'short_conv': 4},
    {'position': 'rope', 'rope_share': 0.5}, {'position': 'rope', 'rope_window': 8},
    {'position': 'rope', 'random_positions': 64}], ids=str)
def test_a_setting_that_a_stock_model_has_no_place_for_is_not_exported(tmp_path, changes):
    name, value = list(changes.items())[-1]
    refuses(f'{name} {value}', export, tmp_path / 'hf', random_model(**changes))


def test_a_folder_is_written_whole_or_not_at_all(tmp_path):
    model, folder = random_model(vocab_size=257), tmp_path / 'hf'
    with files_at_most(20000), pytest.raises(OSError, match='Is the disk full'):
        export(folder, model)
    model.head_scale = 1e6
    refuses('layers.0.self_attn.q_proj.weight', export, folder, model, torch.float16)
    model.blocks[1].attn.register_buffer('sink', torch.zeros(4))
    refuses('blocks.1.attn.sink', export, folder, model)
    assert not list(tmp_path.iterdir())


def test_exported_tokenizers_encode_as_ours(tmp_path):
    from tiktoken_ext.openai_public import r50k_pat_str
    text = Path(huggingface.__file__).read_text() + " It's 12345 ñandú 漢字 🙂\r\n\r\n  \t x </s>  "
    bpe, model = train_bpe([text], 400, tmp_path / 'bpe.tiktoken'), random_model(vocab_size=403)
    ranks = bpe._mergeable_ranks
    gap = {token: rank + (rank > 300) for token, rank in ranks.items()}
    for encoding in (get_tokenizer('bytes'), bpe,
                     tiktoken_encoding('gpt2', ranks, r50k_pat_str, len(ranks)),
                     tiktoken_encoding('gap', gap, bpe._pat_str, 402)):
        folder = tmp_path / 'hf' / encoding.name
        export(folder, model, tokenizer=tokenizer_state(encoding))
        again = get_tokenizer(str(folder / 'tokenizer.json'))
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        ids, end = encoding.encode_ordinary(text), '<|endoftext|>'
        assert theirs(text)['input_ids'] == again.encode_ordinary(text) == ids
        assert again.encode_ordinary(end) == encoding.encode_ordinary(end)
        assert theirs(end)['input_ids'] == [encoding.eot_token]
        assert theirs.eos_token_id == again.eot_token == encoding.eot_token
        assert theirs.decode(ids) == again.decode(ids) == text
    assert exports.tokenizer_json(tokenizer_state(again)) == again.text


def test_a_tokenizer_that_begins_texts_does_so_after_export(tmp_path):
    tokenizer = tokenizers.Tokenizer.from_str(exports.tokenizer_json(BYTES))
    tokenizer.add_special_tokens(['<s>'])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        '<s> $A', special_tokens=[('<s>', 257)])
    tokenizer.save(str(tmp_path / 'tokenizer.json'))
    state = tokenizer_state(get_tokenizer(str(tmp_path / 'tokenizer.json')))
    export(tmp_path / 'hf', random_model(vocab_size=258), tokenizer=state)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / 'hf')
    assert theirs('a')['input_ids'] == [257, 97]
    config = read(tmp_path / 'hf/config.json')
    assert theirs.bos_token_id == config['bos_token_id'] == 257
    assert theirs.eos_token_id == config['eos_token_id'] == 256


def test_the_stage_folds_a_scale_file_with_all_kinds_of_vectors(tmp_path, tiny_run, tiny):
    model, info = tiny
    generator = torch.Generator().manual_seed(0)
    sets = {T: {} for T in (64, 128)}
    for vectors in sets.values():
        for name, p in small_vectors(model).items():
            shape = (4, 8) if name.endswith('head_scale') else p.shape  # a scale per channel
            vectors[name] = 0.5 + torch.rand(shape, generator=generator)
    save_scale(tmp_path / 'sets.json', info, sets, 'head')
    stage_here('export', f'--out_dir={tiny_run}', f'--folder={tmp_path}/hf', '--dtype=float32',
               f'--scale={tmp_path}/sets.json', '--target_length=64')
    theirs, config = reopened(tmp_path / 'hf')
    assert config.max_position_embeddings == 64  # at L = 32 a reader of the folder would cut texts
    put_vectors(model, sets[64])
    assert_same_logits(model, theirs, 64)


# ---------------------------------------------------------------------- other models

@pytest.mark.parametrize('kind, L', [('Bloom', 2048), ('Mpt', 64), ('GPT2', 128)])
@torch.no_grad()
def test_other_models_run_behind_our_calls(tmp_path, kind, L):
    # Tied, they would repeat one token.
    theirs = stock(tmp_path, kind, tie_word_embeddings=False)
    assert huggingface.is_foreign(str(tmp_path))
    model, info = load_foreign(str(tmp_path))
    assert info['model_config']['block_size'] == model.config.block_size == L
    assert model.n_params() == theirs.num_parameters()
    assert tokenizer_from_state(info['tokenizer']).eot_token == 256

    idx, expected = tokens(2, 60), assert_same_logits(model, theirs, 60)
    near(model(idx, tail=3), expected[:, -3:], 1e-4)
    cache = new_cache(model, 2, 60)
    parts = [model(part, cache=cache) for part in idx.split([48, 9, 1, 1, 1], dim=1)]
    near(torch.cat(parts, dim=1), expected, 1e-4)
    refuses('KV cache holds 60', model, idx[:, :1], cache=cache)

    prompt = tokens(2, 20)
    expected = theirs.generate(prompt, num_beams=4, do_sample=False, max_new_tokens=12,
                               eos_token_id=256, pad_token_id=256,
                               attention_mask=torch.ones_like(prompt))[0, 20:].tolist()
    found = complete(model, prompt.tolist(), 12, Decoding((256,), beams=4))[0]
    assert found == [token for token in expected if token != 256] and len(set(found)) > 1
    if kind != 'GPT2':  # ALiBi reads past its length
        theirs.config.max_seq_len = 150  # MPT's alone: a longer table of the same biases
        assert_same_logits(model, theirs, 150)


def test_other_models_say_what_they_cannot_do(tmp_path):
    stock(tmp_path, 'GPT2')
    model, info = load_foreign(str(tmp_path))
    through = 'gpt2 model is read through transformers'
    refuses(through, setattr, model, 'head_scale', 1.2)
    refuses(through, apply_scale, model, 1.2, info)
    refuses(through, by_position, model, tokens(2, 5), tokens(2, 5), print)
    refuses('128 positions but 129', model, tokens(2, 129))
    refuses('position gpt2', export, tmp_path / 'hf', model)
    edit_weights(tmp_path, remove=['transformer.h.1.mlp.c_fc.weight'])
    refuses('transformer.h.1.mlp.c_fc.weight', load_foreign, str(tmp_path))
    edit_config(tmp_path, model_type='unheard_of')
    refuses('unheard_of', load_foreign, str(tmp_path))
    stock(tmp_path, 'Bloom')
    for changes in ({'n_layer': 10 ** 9}, {'n_layer': 'two'}, {'n_layer': 2, 'vocab_size': 10**15}):
        edit_config(tmp_path, **changes)
        refuses(str(tmp_path), load_foreign, str(tmp_path))
    stock(tmp_path, 'Cohere')  # it changes its logits after the output matrix
    refuses('cohere model changes its logits', load_foreign, str(tmp_path))


# ---------------------------------------------------------------------- by the stages

@pytest.fixture
def text(tmp_path):
    """Arguments of a stage that reads text. Its data set has the byte tokenizer of stock()."""
    source = Path(json.__file__).with_name('decoder.py').read_text(encoding='utf-8')
    (tmp_path / 'tokenizer.json').write_text(exports.tokenizer_json(BYTES), encoding='utf-8')
    encoding = get_tokenizer(str(tmp_path / 'tokenizer.json'))
    write_corpus(tmp_path / 'text', encoding, dict.fromkeys(('train', 'val', 'test'), [source]))
    return [f'--dataset={tmp_path}/text', f'--out_dir={tmp_path}/out']


@pytest.mark.slow
def test_stages_read_a_hugging_face_folder(tmp_path, text):
    stock(tmp_path / 'llama', vocab_size=257)
    model = [f'--init_from={tmp_path}/llama', '--device=cpu']
    small = ['--compile=False', '--max_iters=2', '--batch_size=2', '--micro_batch_size=2']
    stage('tune_scale', *model, *text, *small, '--position=none', '--target_length=96',
          '--init_scale=1.2', '--n_samples=2')
    said, _ = stage('eval_ppl', *model, *text, '--position=none', '--max_windows=4',
                    '--lengths=[64,128]', f'--scale={tmp_path}/out/scale_head_96.json')
    assert 'its config says Llama' not in said
    stage('train', *model, *text, *small, '--rope_scaling=yarn', '--block_size=128',
          '--eval_windows=2')
    config = checkpoints.load(tmp_path / 'out/last.pt')['model_config']
    assert (config['position'], config['rope_scaling']) == ('rope', 'yarn:2')
    assert config['rope_length'] == 64


@pytest.mark.slow
def test_other_models_are_evaluated_and_say_that_they_cannot_be_tuned(tmp_path, text):
    stock(tmp_path / 'bloom', 'Bloom')
    model = [f'--init_from={tmp_path}/bloom', '--device=cpu']
    said, _ = stage('eval_ppl', *model, *text, '--max_windows=4', '--lengths=[64,128]',
                    '--stride=8')
    result = read(tmp_path / 'out/eval_ppl.json')
    assert result['position_method'] == 'bloom' and f"{result['rows'][1]['ppl']:.4f}" in said
    stage('sample', *model, '--max_new_tokens=3')
    assert 'can be tuned' in mistake('tune_scale', *model, *text)
    assert 'takes no position' in mistake('eval_ppl', *model, *text, '--position=none')
