"""$ python -m pytest tests/test_huggingface.py"""

import contextlib
import copy
import dataclasses
import functools
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from conftest import (
    Server,
    files_at_most,
    flip_a_bit,
    mistake,
    near,
    random_model,
    read,
    refuses,
    stage,
    stage_here,
)

from lib import checkpoints, huggingface
from lib.answers import note, whole_folder
from lib.errors import UserError
from lib.generate import complete, new_cache
from lib.huggingface import load_folder, load_foreign
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
from model import ModelConfig, Transformer, small_vectors, vector_of

transformers = pytest.importorskip('transformers')
safetensors_torch = pytest.importorskip('safetensors.torch')
tokenizers = pytest.importorskip('tokenizers')

BYTES = tokenizer_state(get_tokenizer('bytes'))
SIZES = dict(vocab_size=260, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
             bos_token_id=256, eos_token_id=256, pad_token_id=None)
ROPE = {'rope_theta': 5000.0}
LINEAR = ROPE | {'rope_type': 'linear', 'factor': 4.0}
DYNAMIC = ROPE | {'rope_type': 'dynamic', 'factor': 2.0}
YARN = ROPE | {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 32}
SCALE = 'model.layers.{}.self_attn.scale_param'
FOREIGN = {'bloom': dict(hidden_size=64, n_layer=2, n_head=4),
           'mpt': dict(d_model=48, n_layers=2, n_heads=6, expansion_ratio=2, max_seq_len=64),
           'gpt2': dict(n_embd=64, n_layer=2, n_head=4, n_positions=128)}


def stock(folder, config, **save):
    """
    A random model of transformers, its norms not 1 and its attention far from uniform, saved to
    folder with a byte tokenizer. Returns it in float32 with eager attention.
    """
    torch.manual_seed(0)
    auto = transformers.AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation='eager').float().eval()
    for name, p in model.named_parameters():
        if name.endswith('bias'):
            p.data.uniform_(-0.1, 0.1)
        elif p.dim() == 1:
            p.data.uniform_(0.5, 1.5)
        else:
            p.data *= 5
    model.save_pretrained(folder, **save)
    text = huggingface.tokenizer_json(BYTES)
    (folder / 'tokenizer.json').write_text(text, encoding='utf-8')
    return model


def llama(folder, **changes):
    return stock(folder, transformers.LlamaConfig(**SIZES | changes))


def foreign(folder, kind, **changes):
    sizes = {'vocab_size': 260, 'eos_token_id': 256} | FOREIGN[kind] | changes
    return stock(folder, transformers.AutoConfig.for_model(kind, **sizes))


def ours(source, position=None):
    state = load_folder(str(source), position)
    model = Transformer(ModelConfig(**state['model_config'])).eval()
    model.load_state_dict(state['model'])
    return model


def weights_of(folder, position='rope'):
    return copy.deepcopy(load_folder(str(folder), position)['model'])  # less what is mapped


def unread(named, folder):
    """Raise AssertionError unless a folder is refused with a line that names this."""
    refuses(named, load_folder, str(folder), 'rope')


def export(folder, model, dtype=torch.float32, tokenizer=BYTES):
    with whole_folder(folder) as part:
        huggingface.save_folder(part, model, tokenizer, dtype)


def reopened(folder):
    """A folder as stock transformers reads it, with all tensors and no more: model and config."""
    auto = transformers.AutoModelForCausalLM
    model, report = auto.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    return model.eval(), model.config


def tokens(length, vocab_size=257):
    return torch.randint(vocab_size, (2, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model, idx):
    out = model(idx)
    return getattr(out, 'logits', out)


def equal(found, expected):
    near(found, expected, atol=1e-4)


@torch.no_grad()
def assert_same_model(model, theirs, length=100):
    """A model computes what theirs does: in one pass, in parts over a cache, as losses."""
    idx = tokens(length)
    expected = logits(theirs, idx)
    log_p = expected[:, -11:-1].log_softmax(-1)
    assert log_p.std(1).mean() > 0.1  # or equal logits would tell little of what was read
    equal(model(idx), expected)
    equal(model(idx, tail=3), expected[:, -3:])
    losses, targets = model(idx[:, :-1], idx[:, -10:]), idx[:, -10:, None]
    if not model.config.rope_scaling.startswith('dynamic'):  # which turns by the pass's length
        equal(losses, -log_p.gather(-1, targets)[..., 0])
    cache = new_cache(model, 2, length)
    parts = [model(part, cache=cache) for part in idx.split([length - 12, 9, 1, 1, 1], dim=1)]
    equal(torch.cat(parts, dim=1), expected)
    with pytest.raises(ValueError, match='KV cache holds'):
        model(idx[:, :1], cache=cache)


def edit_config(folder, **changes):
    config = read(folder / 'config.json') | changes
    config = {key: value for key, value in config.items() if value != 'gone'}
    (folder / 'config.json').write_text(json.dumps(config))


def edit_weights(folder, remove=(), **more):
    path = folder / 'model.safetensors'
    weights = safetensors_torch.load(path.read_bytes()) | more
    for name in remove:
        del weights[name]
    safetensors_torch.save_file(weights, path, metadata={'format': 'pt'})
    return weights


# ---------------------------------------------------------------------- in

@pytest.mark.parametrize('changes, length', [
    ({}, 100), ({'num_key_value_heads': 4, 'rms_norm_eps': 1e-3, 'tie_word_embeddings': True}, 60),
    ({'rope_parameters': LINEAR}, 100), ({'rope_parameters': DYNAMIC}, 150),
    ({'rope_parameters': YARN}, 100)])
def test_llama_checkpoints_give_the_logits_of_transformers(tmp_path, changes, length):
    theirs, model = llama(tmp_path, **changes), ours(tmp_path)
    assert model.config.position == 'rope'
    assert model.config.tied == changes.get('tie_word_embeddings', False)
    assert_same_model(model, theirs, length)


def test_older_rope_settings_mean_the_same(tmp_path):
    llama(tmp_path, rope_parameters=YARN)
    new = ours(tmp_path).config
    scaling = YARN | {'type': 'yarn', 'rope_type': None, 'attention_factor': None}
    edit_config(tmp_path, rope_parameters='gone', rope_theta=5000.0, rope_scaling=scaling)
    assert ours(tmp_path).config == new
    assert (new.rope_base, new.rope_scaling, new.rope_length) == (5000.0, 'yarn:4.0', 32)
    # Where both kinds stand, the one that transformers reads counts.
    llama(tmp_path)
    edit_config(tmp_path, rope_scaling={'rope_type': 'linear', 'factor': 4.0})
    model = ours(tmp_path)
    assert model.config.rope_scaling == 'pi:4.0'
    assert_same_model(model, transformers.AutoModelForCausalLM.from_pretrained(tmp_path))


def test_the_caller_can_read_a_llama_config_as_nope_and_is_told_so(tmp_path, capsys):
    llama(tmp_path, rope_parameters=YARN)
    rope, nope = ours(tmp_path), ours(tmp_path, 'none')
    assert capsys.readouterr().out.count('--position=none') == 1
    assert (logits(rope, tokens(60)) - logits(nope, tokens(60))).abs().max() > 1e-2
    assert (nope.config.position, nope.config.rope_scaling) == ('none', '')


@pytest.mark.parametrize('layers, position', [
    ([1] * 6, 'rope'), ([0] * 6, 'none'), ([1, 1, 1, 0, 1, 1], 'rope,rope,rope,none'),
    ([0, 1, 0, 1, 0, 1], 'none,rope'), ([1, 0, 0, 0, 0, 0], 'rope,none,none,none,none,none')])
def test_smollm3_is_rope_nope_or_a_pattern_by_its_layers_in_and_out(tmp_path, layers, position):
    theirs = stock(tmp_path / 'in', transformers.SmolLM3Config(
        **SIZES | {'num_hidden_layers': 6}, no_rope_layers=layers, tie_word_embeddings=False))
    model = ours(tmp_path / 'in')
    assert model.config.position == position
    assert_same_model(model, theirs)
    export(tmp_path / 'out', model)
    again, config = reopened(tmp_path / 'out')
    assert_same_model(model, again)
    assert ours(tmp_path / 'out').config == model.config
    if ',' in position:
        assert config.no_rope_layers == layers
    for odd in ([2] * 6, [0], None):
        edit_config(tmp_path / 'in', no_rope_layers=odd)
        refuses('no_rope_layers', ours, tmp_path / 'in')


GRANITE = {key: value for key, value in SIZES.items() if key != 'intermediate_size'} | {
    'shared_intermediate_size': 96, 'layer_types': ['attention'] * 2, 'num_local_experts': 0,
    'mamba_n_heads': 1, 'attention_multiplier': 0.25}


@pytest.mark.parametrize('kind, changes', [
    (None, {'attention_multiplier': 0.4}), ('nope', {'tie_word_embeddings': True}),
    ('rope', {'rope_parameters': ROPE | {'rope_type': 'default'}})])
def test_granite_with_attention_in_every_layer_is_nope_or_rope(tmp_path, kind, changes):
    config = GRANITE | changes | {'position_embedding_type': kind}
    theirs = stock(tmp_path, transformers.GraniteMoeHybridConfig(**config))
    model = ours(tmp_path)
    assert model.config.position == ('rope' if kind == 'rope' else 'none')
    scale = changes.get('attention_multiplier', 0.25) * 4  # the head size is 16
    near(model.head_scale, torch.full((2, 4), scale), 1e-6)
    assert_same_model(model, theirs)


def test_without_a_tokenizer_a_folder_is_read_for_logits(tmp_path, corpus_dir, capsys):
    theirs = llama(tmp_path)
    (tmp_path / 'tokenizer.json').unlink()
    model, info = checkpoints.load_model(str(tmp_path), None, 'cpu', 'rope')
    equal(logits(model, tokens(50)), logits(theirs, tokens(50)))
    note.cache_clear()
    capsys.readouterr()
    checkpoints.open_windows(info, str(corpus_dir), 'test', 32)
    assert f'{tmp_path} has no tokenizer' in capsys.readouterr().out
    info['model_config']['vocab_size'] = 256
    refuses('more tokens', checkpoints.open_windows, info, str(corpus_dir), 'test', 32)
    assert 'tokenizer.json' in mistake('sample', f'--init_from={tmp_path}', '--position=rope')


def test_shards_and_pickled_weights_import_the_same(tmp_path):
    def same():
        near(weights_of(tmp_path), expected)

    llama(tmp_path)
    expected, weights = weights_of(tmp_path), edit_weights(tmp_path)
    (tmp_path / 'model.safetensors').unlink()
    old = weights | {'model.layers.0.self_attn.rotary_emb.inv_freq': torch.ones(8)}  # no weight
    for zipped in True, False:
        torch.save(old, tmp_path / 'pytorch_model.bin', _use_new_zipfile_serialization=zipped)
        same()
    (tmp_path / 'pytorch_model.bin').unlink()
    for i in range(2):
        torch.save(dict(list(weights.items())[i::2]), tmp_path / f'pytorch_model-{i}.bin')
    same()
    stock(tmp_path, transformers.LlamaConfig(**SIZES), max_shard_size='20KB')
    same()


def test_head_scales_inside_a_checkpoint_are_read_and_not_taken_for_rope(tmp_path, capsys):
    llama(tmp_path)
    scales = torch.tensor([[1.0, 1.5, 2.0, 1.25], [1.125, 3.0, 1.0, 1.75]])
    edit_weights(tmp_path, **{SCALE.format(i): row.bfloat16() for i, row in enumerate(scales)})
    refuses('--position=none', ours, tmp_path)
    for position in ('none', 'rope'):  # the caller knows
        model = ours(tmp_path, position)
        assert model.config.position == position and torch.equal(model.head_scale, scales)
    assert capsys.readouterr().out.count('head scales of its own') == 1
    edit_weights(tmp_path, remove=[SCALE.format(1)])
    refuses(SCALE.format(1), ours, tmp_path, 'none')


# A folder of LlamaConfig or GraniteMoeHybridConfig, what is changed there, what the error names.
CONFIGS = '''
Llama | {"model_type": "bloom"} | 'bloom'
Llama | {"model_type": "gone"} | 'None'
Llama | {"hidden_size": "gone"} | hidden_size is None
Llama | {"num_attention_heads": 0} | n_head is 0
Llama | {"vocab_size": "260"} | vocab_size is 260
Llama | {"hidden_act": "gelu"} | hidden_act gelu
Llama | {"attention_bias": true} | attention_bias
Llama | {"head_dim": 32} | head_dim 32
Llama | {"sliding_window": 32} | sliding_window 32
Llama | {"layer_types": ["sliding_attention", "sliding_attention"]} | layer_types
Llama | {"num_key_value_heads": 3} | n_kv_head 3
Llama | {"intermediate_size": 128} | gate_proj.weight
Llama | {"num_hidden_layers": 3} | model.layers.2.input_layernorm.weight
Llama | {"num_hidden_layers": 1} | model.layers.1
Llama | {"tie_word_embeddings": true} | lm_head.weight
Llama | {"vocab_size": 256} | 257 tokens
Llama | {"num_hidden_layers": 1000000000} | 10000
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
Llama | {"layer_types": 5} | layer_types 5
GraniteMoeHybrid | {"layer_types": ["attention", "mamba"]} | layer_types
GraniteMoeHybrid | {"layer_types": "gone"} | layer_types
GraniteMoeHybrid | {"num_local_experts": 2} | num_local_experts 2
GraniteMoeHybrid | {"embedding_multiplier": 12} | embedding_multiplier 12
GraniteMoeHybrid | {"residual_multiplier": 0.2} | residual_multiplier 0.2
GraniteMoeHybrid | {"logits_scaling": 8} | logits_scaling 8
GraniteMoeHybrid | {"attention_multiplier": null} | attention_multiplier is None
'''.strip().splitlines()


# ---------------------------------------------------------------------- what cannot be read

@contextlib.contextmanager
def memory_at_most(n_bytes):
    """The process can ask for so much address space more, where /proc tells how much it has."""
    path = Path('/proc/self/statm')
    resource = pytest.importorskip('resource', reason='Windows cannot limit memory')
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if path.exists():
        used = int(path.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize('row', CONFIGS)
def test_what_our_model_does_not_do_is_refused_before_memory_is_asked_for(tmp_path, row):
    kind, changes, named = row.split(' | ')
    sizes = SIZES if kind == 'Llama' else GRANITE
    stock(tmp_path, getattr(transformers, f'{kind}Config')(**sizes))
    edit_config(tmp_path, **json.loads(changes))
    with memory_at_most(2 ** 30):  # a list of 10^9 layers alone would take 8 GB
        unread(named, tmp_path)


def test_bit_that_flips_in_pickled_weights_is_refused(tmp_path):
    path, bloom = tmp_path / 'pytorch_model.bin', functools.partial(foreign, kind='bloom')
    for make, load in (llama, load_folder), (bloom, load_foreign):
        make(tmp_path)
        weights = edit_weights(tmp_path)
        (tmp_path / 'model.safetensors').unlink()
        torch.save(weights, path)
        load(str(tmp_path))
        largest = max(weights.values(), key=torch.numel).numpy().tobytes()
        flip_a_bit(path, path.read_bytes().index(largest) + 100)
        refuses('pytorch_model.bin is damaged', load, str(tmp_path))


@pytest.fixture
def sharded(tmp_path):
    """A folder of weights in shards."""
    stock(tmp_path / 'shards', transformers.LlamaConfig(**SIZES), max_shard_size='20KB')
    return tmp_path / 'shards'


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_an_export_in_which_a_bit_flips_has_the_same_weights_or_is_refused(tmp_path, dtype):
    export(tmp_path, random_model(vocab_size=257), dtype)
    path, places, n_refused = tmp_path / 'model.safetensors', random.Random(0), 0
    whole, state = path.read_bytes(), weights_of(tmp_path)
    header = int.from_bytes(whole[:8], 'little')
    for place in [*places.sample(range(header), 40), *places.sample(range(len(whole)), 40)]:
        flip_a_bit(path, place)
        try:
            near(weights_of(tmp_path), state)
        except UserError as error:
            assert str(path) in str(error) or 'tensors' in str(error)
            n_refused += 1
        path.write_bytes(whole)
    assert n_refused > 60


def test_only_regular_files_of_the_folder_are_weights_and_each_tensor_comes_once(sharded):
    shard = sorted(sharded.glob('model-*.safetensors'))[0]
    twice = sharded / 'model-00001-of-00099.safetensors'
    twice.write_bytes(shard.read_bytes())
    unread('another file of weights', sharded)
    twice.unlink()
    shard.unlink()
    unread('lacks', sharded)
    shard.symlink_to('/dev/zero')
    with memory_at_most(2 ** 30):
        unread('lacks', sharded)


def test_links_of_the_hubs_cache_are_followed_but_not_to_a_device(sharded):
    folder = sharded
    expected, blobs = weights_of(folder), folder.with_name('blobs')
    folder.rename(blobs)
    folder.mkdir()
    for path in blobs.iterdir():
        (folder / path.name).symlink_to(f'../blobs/{path.name}')
    near(weights_of(folder), expected)
    (folder / 'config.json').unlink()
    (folder / 'config.json').symlink_to('/dev/zero')
    unread('has no config.json', folder)


def test_weights_that_cannot_be_read_are_not_called_damaged(tmp_path, monkeypatch):
    def refuse(path, *_):
        raise PermissionError(path)

    llama(tmp_path)
    monkeypatch.setattr(huggingface, 'open', refuse, raising=False)
    with pytest.raises(PermissionError, match='model.safetensors'):
        load_folder(str(tmp_path), 'rope')


def test_a_folder_that_is_not_whole_is_refused(tmp_path):
    def refused(named):
        unread(named, tmp_path)

    refused('has no config.json')
    for text in ('{', '[' * 200_000, '{"model_type": ["llama"]}', 'null'):
        (tmp_path / 'config.json').write_text(text)
        refuses('config.json', checkpoints.load_model, str(tmp_path), None, 'cpu')
    llama(tmp_path)
    path, pickled = tmp_path / 'model.safetensors', tmp_path / 'pytorch_model.bin'
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    refused('model.safetensors')
    path.write_bytes(whole)
    weights = edit_weights(tmp_path, **{'lm_head.weight': torch.ones(260, 64, dtype=torch.int8)})
    refused('torch.int8')
    path.unlink()
    refused('neither model.safetensors nor')
    torch.save(weights, pickled)
    pickled.write_bytes(pickled.read_bytes()[:-1000])
    refused('pytorch_model.bin')
    torch.save({'x': Path('/')}, pickled)  # code to run, not weights
    refused('pytorch_model.bin')
    pickled.unlink()
    (tmp_path / 'last.pt').touch()
    refused(f'--init_from={tmp_path}/last.pt')


def test_hub_names_are_found_in_the_cache_without_a_network(tmp_path, monkeypatch):
    constants = pytest.importorskip('huggingface_hub').constants
    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path))
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    commit, repo = 'c0ffee' + 34 * '0', tmp_path / 'models--someone--nope'
    llama(repo / 'snapshots' / commit)
    (repo / 'refs').mkdir()
    for ref in ('main', 'v1'):
        (repo / 'refs' / ref).write_text(commit)
    expected = weights_of(repo / 'snapshots' / commit, None)
    for name in ('', '@v1', '@' + commit):
        assert not huggingface.is_foreign(f'hf:someone/nope{name}')
        near(load_folder(f'hf:someone/nope{name}')['model'], expected)
    for source in ('hf:someone/nope@v2', 'hf:not a name'):
        refuses('--init_from=FOLDER', load_folder, source)


class Missing(Server):
    """It answers as the hub does where something is missing."""

    def do_GET(self):
        kind = 'Revision' if 'revision/v2' in self.path else 'Repo'
        self.answer(404, b'', ('X-Error-Code', f'{kind}NotFound'))

    do_HEAD = do_GET


def test_a_missing_repository_and_a_missing_revision_are_named(monkeypatch, tmp_path):
    hub = pytest.importorskip('huggingface_hub')
    with Missing.running() as endpoint:
        download = functools.partial(hub.snapshot_download, endpoint=endpoint, cache_dir=tmp_path)
        monkeypatch.setattr(hub, 'snapshot_download', download)
        refuses('RevisionNotFound', load_folder, 'hf:someone/nope@v2')
        refuses('RepositoryNotFound', load_folder, 'hf:someone/other')


def test_a_missing_optional_package_is_asked_for(tmp_path, monkeypatch):
    llama(tmp_path)
    for name in ('safetensors', 'safetensors.torch', 'transformers', 'huggingface_hub'):
        monkeypatch.setitem(sys.modules, name, None)
    for name, call, *arguments in (
            ('safetensors', load_folder, str(tmp_path)),
            ('transformers', load_foreign, str(tmp_path)),
            ('huggingface_hub', load_folder, 'hf:someone/nope'),
            ('safetensors', export, tmp_path / 'out', random_model())):
        refuses(f'pip install {name}', call, *arguments)


@pytest.mark.slow
@pytest.mark.skipif(not Path('/proc/self/statm').exists(), reason='needs Linux to limit memory')
@pytest.mark.skipif(shutil.disk_usage(tempfile.gettempdir()).free < 5e9, reason='needs 5 GB')
def test_a_model_of_1_1b_is_read_in_less_than_twice_its_memory(tmp_path):
    """TinyLlama's shape in bfloat16, 2.2 GB; the file, which is mapped, counts, too."""
    c = transformers.LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
        num_key_value_heads=4, vocab_size=32000, max_position_embeddings=2048)
    with torch.device('meta'):
        model = transformers.LlamaForCausalLM(c)
    weights = {name: torch.full(p.shape, 0.02, dtype=torch.bfloat16)
               for name, p in model.named_parameters()}
    safetensors_torch.save_file(weights, tmp_path / 'model.safetensors')
    size = sum(weight.nbytes for weight in weights.values())
    del weights
    (tmp_path / 'config.json').write_text(c.to_json_string())
    (tmp_path / 'tokenizer.json').write_text(huggingface.tokenizer_json(BYTES), encoding='utf-8')
    with memory_at_most(size + int(1.9 * size)):
        model, _ = checkpoints.load_model(str(tmp_path), '', 'cpu', dtype=torch.bfloat16)
    assert size > 2.1e9 and model.blocks[0].mlp.out.weight.dtype == torch.bfloat16


# ---------------------------------------------------------------------- out

@pytest.mark.parametrize('position, scaling', [
    ('none', ''), ('rope', ''), ('rope', 'pi:4'), ('rope', 'ntk:4'), ('rope', 'dynamic_ntk:2'),
    ('rope', 'yarn:4')])
def test_stock_transformers_computes_what_our_model_does(tmp_path, position, scaling):
    model = random_model(vocab_size=257, n_embd=64, position=position, rope_scaling=scaling,
                         tied=scaling == 'pi:4')
    export(tmp_path / 'hf', model)
    theirs, config = reopened(tmp_path / 'hf')
    assert config.eos_token_id == 256
    kind = 'GraniteMoeHybrid' if position == 'none' else 'Llama'
    assert type(theirs).__name__ == f'{kind}ForCausalLM'
    for length in (32, 64, 128):  # L, 2L, 4L
        assert_same_model(model, theirs, length)
    again = ours(tmp_path / 'hf')
    equal(logits(again, tokens(100)), logits(model, tokens(100)))
    assert again.config.block_size == (128 if scaling in ('pi:4', 'ntk:4', 'yarn:4') else 32)


def test_folded_weights_are_rounded_once(tmp_path):
    model = random_model(vocab_size=257)
    export(tmp_path / 'hf', model, torch.bfloat16)
    weights, attn = edit_weights(tmp_path / 'hf'), model.blocks[1].attn
    scale, gain = (x.double().flatten().repeat_interleave(8)
                   for x in (attn.head_scale, attn.head_gain))
    exact = {'q': attn.qkv.weight[:32].double() * scale[:, None],
             'o': attn.out.weight.double() * gain}
    for name, weight in exact.items():
        written = weights[f'model.layers.1.self_attn.{name}_proj.weight']
        assert torch.equal(written, weight.float().bfloat16())
    assert torch.equal(weights['model.norm.weight'], model.norm.weight)
    for name, weight in weights_of(tmp_path / 'hf', None).items():  # they keep their precision
        assert weight.dtype == (torch.float32 if vector_of(name) else torch.bfloat16)


def test_a_model_without_scales_comes_back_bit_for_bit(tmp_path):
    model = random_model(vocab_size=257)
    for block in model.blocks:
        block.attn.head_scale.data.fill_(1)
        block.attn.head_gain.data.fill_(1)
    export(tmp_path / 'hf', model)
    again = load_folder(str(tmp_path / 'hf'))
    assert again['model_config'] == dataclasses.asdict(model.config)
    near(again['model'], dict(model.state_dict()))


def test_what_a_stock_model_has_no_place_for_is_not_exported(tmp_path):
    for changes in ({'position': 'alibi'}, {'position': 'rope,alibi'}, {'dape_kernel': 3},
                    {'position': 'rope', 'rope_share': 0.5}, {'position': 'rope', 'rope_window': 8},
                    {'position': 'rope', 'random_positions': 64}, {'short_conv': 4}):
        name, value = list(changes.items())[-1]
        model = random_model(vocab_size=257, **changes)
        refuses(f'{name} {value}', export, tmp_path / 'hf', model)
    model = random_model(vocab_size=257)
    model.head_scale = 1e6
    refuses('layers.0.self_attn.q_proj.weight', export, tmp_path / 'hf', model, torch.float16)
    model.blocks[1].attn.register_buffer('sink', torch.zeros(4))
    refuses('blocks.1.attn.sink', export, tmp_path / 'hf', model)
    assert not list(tmp_path.iterdir())


def test_a_folder_is_written_whole_or_not_at_all(tmp_path):
    model, folder = random_model(vocab_size=257), tmp_path / 'hf'
    with files_at_most(20000), pytest.raises(OSError, match='Is the disk full'):
        export(folder, model)
    assert not list(tmp_path.iterdir())
    folder.mkdir()
    export(folder, model)
    assert sorted(path.name for path in tmp_path.rglob('*')) == [
        'config.json', 'hf', 'model.safetensors', 'tokenizer.json', 'tokenizer_config.json']
    refuses('not an empty folder', export, folder, model)


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
    export(tmp_path / 'again', model, tokenizer=tokenizer_state(again))
    assert (tmp_path / 'again/tokenizer.json').read_text() == again.text


def test_a_tokenizer_that_begins_texts_does_so_after_export(tmp_path):
    tokenizer = tokenizers.Tokenizer.from_str(huggingface.tokenizer_json(BYTES))
    tokenizer.add_special_tokens(['<s>'])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        '<s> $A', special_tokens=[('<s>', 257)])
    tokenizer.save(str(tmp_path / 'tokenizer.json'))
    state = tokenizer_state(get_tokenizer(str(tmp_path / 'tokenizer.json')))
    export(tmp_path / 'hf', random_model(vocab_size=258), tokenizer=state)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / 'hf')
    assert theirs('a')['input_ids'] == [257, 97]
    for where in (theirs.bos_token_id, theirs.eos_token_id), [
            read(tmp_path / 'hf/config.json')[f'{kind}_token_id'] for kind in ('bos', 'eos')]:
        assert list(where) == [257, 256]


def test_the_stage_folds_a_scale_file_with_all_kinds_of_vectors(tmp_path, tiny_run, tiny):
    model, info = tiny
    generator = torch.Generator().manual_seed(0)
    sets = {T: {name: (0.5 + torch.rand(4, 8, generator=generator)  # a scale per channel
                       if name.endswith('head_scale') else
                       0.5 + torch.rand(p.shape, generator=generator))
                for name, p in small_vectors(model).items()} for T in (64, 128)}
    save_scale(tmp_path / 'sets.json', info, sets, 'head')
    stage_here('export', f'--out_dir={tiny_run}', f'--folder={tmp_path}/hf', '--dtype=float32',
               f'--scale={tmp_path}/sets.json', '--target_length=64')
    theirs, config = reopened(tmp_path / 'hf')
    assert config.max_position_embeddings == 64  # at L = 32 a reader of the folder would cut texts
    put_vectors(model, sets[64])
    equal(logits(theirs, tokens(64)), logits(model, tokens(64)))


# ---------------------------------------------------------------------- others, by transformers

@pytest.mark.parametrize('kind', FOREIGN)
def test_other_models_run_behind_our_calls(tmp_path, kind):
    theirs = foreign(tmp_path, kind, tie_word_embeddings=False)  # tied, they repeat one token
    assert huggingface.is_foreign(str(tmp_path))
    model, info = load_foreign(str(tmp_path))
    L = {'bloom': 2048, 'mpt': 64, 'gpt2': 128}[kind]
    assert info['model_config']['block_size'] == model.config.block_size == L
    assert model.config.position == kind and model.n_params() == theirs.num_parameters()
    assert tokenizer_from_state(info['tokenizer']).eot_token == 256
    assert_same_model(model, theirs, 60)
    prompt = tokens(20)
    expected = theirs.generate(prompt, num_beams=4, do_sample=False, max_new_tokens=12,
                               eos_token_id=256, pad_token_id=256,
                               attention_mask=torch.ones_like(prompt))[0, 20:].tolist()
    found = complete(model, prompt.tolist(), 12, beams=4, eos=(256,))[0]
    assert found == [token for token in expected if token != 256] and len(set(found)) > 1
    if kind != 'gpt2':  # ALiBi reads past its length
        theirs.config.max_seq_len = 150  # MPT's alone: a longer table of the same biases
        assert_same_model(model, theirs, 150)


def test_other_models_say_what_they_cannot_do(tmp_path):
    foreign(tmp_path, 'gpt2')
    model, info = load_foreign(str(tmp_path))
    through = 'gpt2 model is read through transformers'
    refuses(through, setattr, model, 'head_scale', 1.2)
    refuses(through, apply_scale, model, 1.2, info)
    refuses(through, by_position, model, tokens(5), tokens(5), print)
    refuses('128 positions but 129', model, tokens(129))
    refuses('position gpt2', export, tmp_path / 'hf', model)
    edit_weights(tmp_path, remove=['transformer.h.1.mlp.c_fc.weight'])
    refuses('transformer.h.1.mlp.c_fc.weight', load_foreign, str(tmp_path))
    edit_config(tmp_path, model_type='unheard_of')
    refuses('unheard_of', load_foreign, str(tmp_path))
    for changes in ({'n_layer': 10 ** 9}, {'vocab_size': 10 ** 15}, {'n_layer': 'two'}):
        foreign(tmp_path, 'bloom')
        edit_config(tmp_path, **changes)
        refuses(str(tmp_path), load_foreign, str(tmp_path))


def test_logits_that_are_more_than_the_output_matrix_are_refused(tmp_path):
    stock(tmp_path, transformers.CohereConfig(**SIZES, logit_scale=0.5))
    refuses('cohere', load_foreign, str(tmp_path))


# ---------------------------------------------------------------------- by the stages

def test_half_precision_file_is_read_in_the_precision_of_the_activations(tmp_path):
    llama(tmp_path).to(torch.bfloat16).save_pretrained(tmp_path)
    full, _ = checkpoints.load_model(str(tmp_path), None, 'cpu')
    half, _ = checkpoints.load_model(str(tmp_path), None, 'cpu', dtype=torch.bfloat16)
    assert {p.dtype for p in full.parameters()} == {torch.float32}
    assert half.head.weight.dtype == torch.bfloat16
    assert {p.dtype for p in half.parameters() if p.dim() == 1} == {torch.float32}
    with torch.autocast('cpu', torch.bfloat16):  # activations are rounded in the same places
        assert torch.equal(logits(half, tokens(20)), logits(full, tokens(20)))


def test_tied_matrices_stay_one_after_loading(tmp_path):
    llama(tmp_path, tie_word_embeddings=True)
    model, _ = checkpoints.load_model(str(tmp_path), None, 'cpu')
    assert model.head.weight is model.embed.weight


def text_for(source, folder):
    """A data set prepared with the tokenizer of a Hugging Face folder."""
    text = Path(json.__file__).with_name('decoder.py').read_text(encoding='utf-8')
    encoding = get_tokenizer(str(source / 'tokenizer.json'))
    write_corpus(folder, encoding, {split: [text] for split in ('train', 'val', 'test')})
    return f'--dataset={folder}'


@pytest.mark.slow
def test_stages_read_a_hugging_face_folder(tmp_path):
    llama(tmp_path / 'llama', vocab_size=257)
    model = [f'--init_from={tmp_path}/llama', '--device=cpu']
    assert '--dataset=' in mistake('eval_ppl', *model)
    data = [text_for(tmp_path / 'llama', tmp_path / 'text'), f'--out_dir={tmp_path}/out']
    small = ['--compile=False', '--max_iters=2', '--batch_size=2', '--micro_batch_size=2']
    stage('tune_scale', *model, *data, *small, '--position=none', '--target_length=96',
          '--init_scale=1.2', '--n_samples=2')
    said, _ = stage('eval_ppl', *model, *data, '--position=none', '--max_windows=4',
                    '--lengths=[64,128]', f'--scale={tmp_path}/out/scale_head_96.json')
    assert 'its config says Llama' not in said
    stage('train', *model, *data, *small, '--rope_scaling=yarn', '--block_size=128',
          '--eval_windows=2')
    config = checkpoints.load(tmp_path / 'out/last.pt')['model_config']
    assert (config['position'], config['rope_scaling']) == ('rope', 'yarn:2')
    assert config['rope_length'] == 64
    stage('sample', *model, '--max_new_tokens=3')


@pytest.mark.slow
def test_other_models_are_evaluated_and_say_that_they_cannot_be_tuned(tmp_path):
    foreign(tmp_path / 'bloom', 'bloom')
    model = [f'--init_from={tmp_path}/bloom', '--device=cpu']
    data = [text_for(tmp_path / 'bloom', tmp_path / 'text'), f'--out_dir={tmp_path}/out']
    said, _ = stage('eval_ppl', *model, *data, '--max_windows=4', '--lengths=[64,128]',
                    '--stride=8')
    result = read(tmp_path / 'out/eval_ppl.json')
    assert result['position_method'] == 'bloom' and f"{result['rows'][1]['ppl']:.4f}" in said
    stage('sample', *model, '--max_new_tokens=3')
    assert 'can be tuned' in mistake('tune_scale', *model, *data)
    assert 'takes no position' in mistake('eval_ppl', *model, *data, '--position=none')
