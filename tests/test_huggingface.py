"""$ python -m pytest tests/test_huggingface.py"""

import contextlib
import dataclasses
import errno
import functools
import http.server
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from conftest import ROOT, files_at_most, mistake, random_model, stage

import checkpoint
import huggingface
from corpus import get_tokenizer, tiktoken_encoding, tokenizer_from_state, tokenizer_state, train_bpe, write_corpus
from generate import complete
from model import ModelConfig, Transformer
from position import ALiBi

transformers = pytest.importorskip('transformers')
safetensors_torch = pytest.importorskip('safetensors.torch')
tokenizers = pytest.importorskip('tokenizers')

BYTES = tokenizer_state(get_tokenizer('bytes'))
SIZES = dict(vocab_size=260, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64, bos_token_id=256, eos_token_id=256, pad_token_id=None)
ROPE = {'rope_theta': 5000.0}
YARN = ROPE | {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 32}


def stock(folder, config, **save):
    """
    A random model of transformers, its norms not 1 and its attention far from uniform, saved to folder with a byte
    tokenizer. Returns it in float32 with eager attention.
    """
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation='eager').float().eval()
    for name, p in model.named_parameters():
        if p.dim() == 1:
            p.data.uniform_(*((-0.1, 0.1) if name.endswith('bias') else (0.5, 1.5)))
        else:
            p.data *= 5
    model.save_pretrained(folder, **save)
    (folder / 'tokenizer.json').write_text(huggingface.tokenizer_json(BYTES), encoding='utf-8')
    return model


def llama(folder, **changes):
    return stock(folder, transformers.LlamaConfig(**SIZES | changes))


def smollm3(folder, has_rope):
    return stock(folder, transformers.SmolLM3Config(**SIZES, no_rope_layers=has_rope, tie_word_embeddings=False))


def ours(source, position=None):
    state = huggingface.load_folder(str(source), position)
    model = Transformer(ModelConfig(**state['model_config'])).eval()
    model.load_state_dict(state['model'])
    return model


def tokens(length, vocab_size=260):
    return torch.randint(vocab_size, (2, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model, idx):
    return getattr(out := model(idx), 'logits', out)


def assert_equal(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


@torch.no_grad()
def assert_same_model(model, theirs, length=100):
    """Behind our calls a model computes what transformers does: in one pass, in parts over a cache, as losses."""
    idx = tokens(length, model.config.vocab_size)
    log_p = logits(theirs, idx[:, :-1]).log_softmax(-1)
    assert log_p.std(1).mean() > 0.1  # or equal logits would tell little of what was read
    assert_equal(model(idx[:, :-1], idx[:, -10:]), -log_p[:, -10:].gather(-1, idx[:, -10:, None])[..., 0])
    expected = logits(theirs, idx)
    assert_equal(model(idx), expected)
    assert_equal(model(idx, last=3), expected[:, -3:])
    cache = model.new_cache(2, length)
    parts = [model(part, cache=cache) for part in idx.split([length - 12, 9, 1, 1, 1], dim=1)]
    assert_equal(torch.cat(parts, dim=1), expected)
    assert cache.length == length
    with pytest.raises(ValueError, match='KV cache holds'):
        model(idx[:, :1], cache=cache)


def edit_config(folder, **changes):
    config = json.loads((folder / 'config.json').read_text())
    config = {key: value for key, value in (config | changes).items() if value != 'gone'}
    (folder / 'config.json').write_text(json.dumps(config))


# ----------------------------------------------------------------------------- in

@pytest.mark.parametrize('changes, length', [
    ({}, 100), ({'num_key_value_heads': 4, 'rms_norm_eps': 1e-3}, 60), ({'tie_word_embeddings': True}, 60),
    ({'rope_parameters': ROPE | {'rope_type': 'linear', 'factor': 4.0}}, 100),
    ({'rope_parameters': ROPE | {'rope_type': 'dynamic', 'factor': 2.0}}, 60),
    ({'rope_parameters': ROPE | {'rope_type': 'dynamic', 'factor': 2.0}}, 150),
    ({'rope_parameters': YARN}, 100), ({'rope_parameters': YARN | {'original_max_position_embeddings': 64}}, 100)])
def test_llama_checkpoints_give_the_logits_of_transformers(tmp_path, changes, length):
    theirs, model = llama(tmp_path, **changes), ours(tmp_path)
    assert model.config.position == 'rope' and model.config.tied == changes.get('tie_word_embeddings', False)
    assert_same_model(model, theirs, length)


def test_older_rope_settings_mean_the_same(tmp_path):
    llama(tmp_path, rope_parameters=YARN)
    new = huggingface.our_config(huggingface.read_config(str(tmp_path)), '', 'rope')
    scaling = {'type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 32, 'attention_factor': None}
    edit_config(tmp_path, rope_parameters='gone', rope_theta=5000.0, rope_scaling=scaling)
    assert huggingface.our_config(huggingface.read_config(str(tmp_path)), '', 'rope') == new
    assert (new.rope_base, new.rope_scaling, new.rope_length) == (5000.0, 'yarn:4.0', 32)


def test_where_both_kinds_of_rope_settings_stand_the_one_of_transformers_counts(tmp_path):
    llama(tmp_path)
    edit_config(tmp_path, rope_scaling={'rope_type': 'linear', 'factor': 4.0})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation='eager')
    model = ours(tmp_path)
    assert model.config.rope_scaling == 'pi:4.0'
    assert_same_model(model, theirs, 100)


def test_the_caller_can_read_a_llama_config_as_nope_and_is_told_so(tmp_path, capsys):
    llama(tmp_path, rope_parameters=YARN)
    rope, nope = ours(tmp_path), ours(tmp_path, 'none')
    assert 'if its card says NoPE, add --position=none' in capsys.readouterr().out.splitlines()[0]
    assert (logits(rope, tokens(60)) - logits(nope, tokens(60))).abs().max() > 1e-2
    assert (nope.config.position, nope.config.rope_scaling) == ('none', '')
    ours(tmp_path, 'rope')
    assert capsys.readouterr().out == ''


def test_smollm3_is_nope_or_rope_by_its_layers(tmp_path):
    for position, has_rope in (('none', [0, 0]), ('rope', [1, 1])):
        theirs, model = smollm3(tmp_path / position, has_rope), ours(tmp_path / position)
        assert model.config.position == position
        assert_same_model(model, theirs)
    smollm3(tmp_path / 'mixed', [1, 0])
    for has_rope in ([1, 0], [0], [], None):
        edit_config(tmp_path / 'mixed', no_rope_layers=has_rope)
        with pytest.raises(ValueError, match='no_rope_layers .*; our model has RoPE in all of its 2 layers or in none'):
            ours(tmp_path / 'mixed')


def test_shards_and_pickled_weights_import_the_same(tmp_path):
    llama(tmp_path / 'whole')
    expected = huggingface.load_folder(str(tmp_path / 'whole'), 'rope')['model']
    weights = safetensors_torch.load_file(tmp_path / 'whole/model.safetensors')
    stock(tmp_path / 'shards', transformers.LlamaConfig(**SIZES), max_shard_size='20KB')
    assert len(list((tmp_path / 'shards').glob('*.safetensors'))) > 2
    for name in ('bin', 'old_bin', 'bin_shards'):
        shutil.copytree(tmp_path / 'whole', tmp_path / name, ignore=lambda *_: ['model.safetensors'])
    more = weights | {'model.layers.0.self_attn.rotary_emb.inv_freq': torch.ones(8)}  # in old files; no weight
    torch.save(more, tmp_path / 'bin/pytorch_model.bin')
    torch.save(more, tmp_path / 'old_bin/pytorch_model.bin', _use_new_zipfile_serialization=False)
    shard = {name: f'pytorch_model-{i % 2}.bin' for i, name in enumerate(weights)}
    for file in set(shard.values()):
        torch.save({name: weights[name] for name in weights if shard[name] == file}, tmp_path / 'bin_shards' / file)
    (tmp_path / 'bin_shards/pytorch_model.bin.index.json').write_text(json.dumps({'weight_map': shard}))
    for name in ('shards', 'bin', 'old_bin', 'bin_shards'):
        state = huggingface.load_folder(str(tmp_path / name), 'rope')['model']
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[key], expected[key]) for key in expected), name


def test_matrices_keep_their_precision_and_vectors_are_float32(tmp_path):
    stock(tmp_path, transformers.LlamaConfig(**SIZES)).bfloat16().save_pretrained(tmp_path)
    state = huggingface.load_folder(str(tmp_path), 'rope')['model']
    assert all(weight.dtype == (torch.float32 if weight.dim() == 1 else torch.bfloat16) for weight in state.values())


def test_head_scales_inside_a_checkpoint_are_read(tmp_path, capsys):
    llama(tmp_path)
    weights = safetensors_torch.load_file(tmp_path / 'model.safetensors')
    scales = torch.tensor([[1.0, 1.5, 2.0, 1.25], [1.125, 3.0, 1.0, 1.75]])
    weights |= {f'model.layers.{i}.self_attn.scale_param': row.bfloat16() for i, row in enumerate(scales)}
    safetensors_torch.save_file(weights, tmp_path / 'model.safetensors')
    assert torch.equal(ours(tmp_path, 'none').head_scale, scales)
    assert 'has head scales of its own, 1.000 to 3.000' in capsys.readouterr().out
    del weights['model.layers.1.self_attn.scale_param']
    safetensors_torch.save_file(weights, tmp_path / 'model.safetensors')
    with pytest.raises(ValueError, match='lacks 1 tensors: model.layers.1.self_attn.scale_param'):
        ours(tmp_path, 'none')


def test_head_scales_under_a_llama_config_are_not_taken_for_rope(tmp_path):
    llama(tmp_path)
    weights = safetensors_torch.load_file(tmp_path / 'model.safetensors')
    weights |= {f'model.layers.{i}.self_attn.scale_param': torch.full((4,), 1.5) for i in range(2)}
    safetensors_torch.save_file(weights, tmp_path / 'model.safetensors')
    with pytest.raises(ValueError, match='--position=none'):
        ours(tmp_path)
    for position in ('none', 'rope'):  # the caller knows
        model = ours(tmp_path, position)
        assert model.config.position == position and (model.head_scale == 1.5).all()


def test_a_tokenizer_comes_along(tmp_path):
    llama(tmp_path)
    encoding = tokenizer_from_state(huggingface.load_folder(str(tmp_path), 'rope')['tokenizer'])
    assert encoding.encode_ordinary('né') == list('né'.encode()) and encoding.eot_token == 256


# ----------------------------------------------------------------------------- what cannot be read

@contextlib.contextmanager
def memory_at_most(n_bytes):
    """The process can ask for so much address space more, where /proc tells how much it has."""
    if not Path('/proc/self/statm').exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize('changes, message', [
    ({'model_type': 'bloom'}, "model_type 'bloom'; of llama and smollm3 alone"),
    ({'model_type': 'gone'}, "model_type 'None'"),
    ({'hidden_size': 'gone'}, "lacks 'hidden_size'"),
    ({'num_attention_heads': 0, 'vocab_size': '260'}, 'has vocab_size 260, n_head 0; each must be a whole number'),
    ({'max_position_embeddings': None}, 'has block_size None; each must be a whole number'),
    ({'hidden_act': 'gelu'}, 'has hidden_act gelu; our model has silu'),
    ({'attention_bias': True}, 'has attention_bias True'),
    ({'mlp_bias': True}, 'has mlp_bias True'),
    ({'head_dim': 32}, 'has head_dim 32; our model has 16'),
    ({'sliding_window': 32}, 'has sliding_window 32'),
    ({'num_key_value_heads': 3}, 'n_head 4 must be a multiple of n_kv_head 3'),
    ({'rope_parameters': ROPE | {'rope_type': 'llama3', 'factor': 8.0}}, "RoPE of type 'llama3'"),
    ({'rope_parameters': ROPE | {'rope_type': 'longrope', 'factor': 8.0}}, "RoPE of type 'longrope'"),
    ({'rope_parameters': ROPE | {'rope_type': 'linear'}}, "RoPE of type 'linear'"),
    ({'rope_parameters': ROPE | {'rope_type': 'linear', 'factor': 0.5}}, 'a factor of 1 or more alone'),
    ({'rope_parameters': YARN | {'beta_fast': 16}}, "'yarn' with {'beta_fast': 16}"),
    ({'rope_parameters': YARN | {'attention_factor': 2.0}}, "'yarn' with {'attention_factor': 2.0}"),
    ({'rope_parameters': YARN | {'truncate': False}}, "'yarn' with {'truncate': False}"),
    ({'intermediate_size': 128}, r'gate_proj.weight of .* is \(96, 64\) .* calls for \(128, 64\)'),
    ({'num_hidden_layers': 3}, r'lacks 9 tensors: model.layers.2.input_layernorm.weight'),
    ({'num_hidden_layers': 1}, r'has 9 tensors that our model has no place for: model.layers.1'),
    ({'tie_word_embeddings': True}, 'lm_head.weight differs'),
    ({'vocab_size': 256}, 'has 257 tokens but the model only 256')])
def test_what_our_model_does_not_do_is_refused_by_name(tmp_path, changes, message):
    llama(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        huggingface.load_folder(str(tmp_path))


@pytest.mark.parametrize('changes', [
    {'num_hidden_layers': 10 ** 9}, {'hidden_size': 10 ** 9}, {'vocab_size': 10 ** 15},
    {'num_key_value_heads': 'two'}, {'rms_norm_eps': 'small'}, {'rms_norm_eps': None},
    {'tie_word_embeddings': None}, {'rope_parameters': 'yes'}, {'rope_parameters': [1]},
    {'rope_parameters': ROPE | {'rope_type': ['linear']}},
    {'rope_parameters': ROPE | {'rope_type': 'linear', 'factor': 'four'}},
    {'rope_parameters': {'rope_theta': 'high'}}, {'layer_types': 5},
    {'layer_types': ['sliding_attention'] * 2}, {'head_dim': 'x'},
    {'original_max_position_embeddings': 'x', 'rope_parameters': YARN}], ids=str)
def test_sizes_no_machine_holds_and_entries_of_the_wrong_kind_are_refused(tmp_path, changes):
    """Before memory is asked for: a list of 10^9 layers alone would take 8 GB."""
    llama(tmp_path)
    edit_config(tmp_path, **changes)
    named = f'config.json of {tmp_path}|calls for'
    with memory_at_most(2 ** 30), pytest.raises(ValueError, match=named):
        huggingface.load_folder(str(tmp_path), 'rope')


@pytest.mark.parametrize('text', [
    '[' * 200_000, '{"model_type": ["llama"]}', 'null', '5', '{"model_type": {}}'],
    ids=lambda text: text[:20])
def test_config_json_of_another_kind_is_named(tmp_path, text):
    llama(tmp_path)
    (tmp_path / 'config.json').write_text(text)
    with pytest.raises(ValueError, match='config.json is not the config.json of a model'):
        checkpoint.load_model(str(tmp_path), None, 'cpu')


def test_bit_that_flips_in_pickled_weights_is_refused(tmp_path):
    llama(tmp_path)
    weights = safetensors_torch.load_file(tmp_path / 'model.safetensors')
    path = tmp_path / 'pytorch_model.bin'
    (tmp_path / 'model.safetensors').unlink()
    torch.save(weights, path)
    content = bytearray(path.read_bytes())
    content[content.index(weights['lm_head.weight'].numpy().tobytes()) + 1000] ^= 4
    path.write_bytes(content)
    with pytest.raises(ValueError, match='pytorch_model.bin is damaged'):
        huggingface.load_folder(str(tmp_path), 'rope')


@pytest.fixture
def sharded(tmp_path):
    """A folder of weights in shards, and a function that renames one of them in its index."""
    folder = tmp_path / 'shards'
    stock(folder, transformers.LlamaConfig(**SIZES), max_shard_size='20KB')
    index = folder / 'model.safetensors.index.json'

    def rename(first):
        weight_map = json.loads(index.read_text())['weight_map']
        weight_map['lm_head.weight'] = first
        index.write_text(json.dumps({'weight_map': weight_map}))

    return folder, rename


@pytest.mark.parametrize('name', [
    '../other.safetensors', '{tmp}/other.safetensors', 'deep/x.safetensors', '..', '.', '',
    '/dev/zero', None, 5])
def test_index_that_leads_out_of_its_folder_is_refused(sharded, tmp_path, name):
    folder, rename = sharded
    weights = {'lm_head.weight': torch.zeros(260, 64)}
    safetensors_torch.save_file(weights, tmp_path / 'other.safetensors')
    shutil.copytree(folder, folder / 'deep')
    shutil.copy(tmp_path / 'other.safetensors', folder / 'deep/x.safetensors')
    rename(name.format(tmp=tmp_path) if isinstance(name, str) else name)
    with memory_at_most(2 ** 30), pytest.raises(ValueError, match=str(folder)):
        huggingface.load_folder(str(folder), 'rope')


@pytest.mark.parametrize('suffix', ['safetensors', 'bin'])
def test_link_to_a_device_is_refused(sharded, suffix):
    folder, rename = sharded
    (folder / f'x.{suffix}').symlink_to('/dev/zero')
    rename(f'x.{suffix}')
    named = f'x.{suffix} is missing or not a file'
    with memory_at_most(2 ** 30), pytest.raises(ValueError, match=named):
        huggingface.load_folder(str(folder), 'rope')
    (folder / 'config.json').unlink()
    (folder / 'config.json').symlink_to('/dev/zero')
    with memory_at_most(2 ** 30), pytest.raises(ValueError, match='has no config.json'):
        huggingface.load_folder(str(folder), 'rope')


def test_links_of_the_hubs_cache_are_followed(sharded):
    folder, _ = sharded
    expected = huggingface.load_folder(str(folder), 'rope')['model']
    blobs = folder.with_name('blobs')
    folder.rename(blobs)
    folder.mkdir()
    for path in blobs.iterdir():
        (folder / path.name).symlink_to(f'../blobs/{path.name}')
    found = huggingface.load_folder(str(folder), 'rope')['model']
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_weights_that_cannot_be_read_are_not_called_damaged(tmp_path, monkeypatch):
    llama(tmp_path)

    def refuse(path, *_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(huggingface, 'open', refuse, raising=False)
    with pytest.raises(PermissionError, match='model.safetensors'):
        huggingface.load_folder(str(tmp_path), 'rope')


def test_a_folder_that_is_not_whole_is_refused(tmp_path):
    def refused(message):
        with pytest.raises(ValueError, match=message):
            huggingface.load_folder(str(tmp_path), 'rope')

    refused('has no config.json. Give the folder')
    llama(tmp_path)
    weights, index = tmp_path / 'model.safetensors', tmp_path / 'model.safetensors.index.json'
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1000])
    refused('model.safetensors is missing, cut short')
    tensors = safetensors_torch.load(whole)
    safetensors_torch.save_file(tensors | {'lm_head.weight': torch.ones(260, 64, dtype=torch.int8)}, weights)
    refused('lm_head.weight of .* torch.int8')
    weights.unlink()
    refused('neither model.safetensors nor pytorch_model.bin')
    torch.save(tensors, tmp_path / 'pytorch_model.bin')
    (tmp_path / 'pytorch_model.bin').write_bytes((tmp_path / 'pytorch_model.bin').read_bytes()[:-1000])
    refused('pytorch_model.bin is missing, cut short')
    torch.save({'x': Path('/')}, tmp_path / 'pytorch_model.bin')  # code to run, not weights
    refused('not a file of weights')
    (tmp_path / 'pytorch_model.bin').unlink()
    for text in ('{', '{}', '[]', '{"weight_map": 1}'):
        index.write_text(text)
        refused('index.json does not tell which file has which tensor')
    index.write_text('{"weight_map": {"lm_head.weight": "model-1-of-2.safetensors"}}')
    refused('model-1-of-2.safetensors is missing')
    (tmp_path / 'tokenizer_config.json').write_text('{')
    refused('is not a tokenizer_config.json')
    (tmp_path / 'tokenizer.json').unlink()
    refused('has no tokenizer.json')
    (tmp_path / 'config.json').write_text('{')
    refused('is not the config.json of a model')
    (tmp_path / 'last.pt').touch()
    refused(f'is a run of train.py. Name its checkpoint: --init_from={tmp_path}/last.pt')


def test_hub_names_are_found_in_the_cache_without_a_network(tmp_path, monkeypatch):
    constants = pytest.importorskip('huggingface_hub').constants
    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path))
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    commit, repo = 'c0ffee' + 34 * '0', tmp_path / 'models--someone--nope'
    llama(repo / 'snapshots' / commit)
    for ref in ('main', 'v1'):
        (repo / 'refs').mkdir(exist_ok=True)
        (repo / 'refs' / ref).write_text(commit)
    expected = ours(repo / 'snapshots' / commit, 'none')
    for name in ('', '@v1', '@' + commit):
        source = f'hf:someone/nope{name}'
        assert not huggingface.is_foreign(source)
        assert_equal(logits(ours(source, 'none'), tokens(9)), logits(expected, tokens(9)))
    for source in ('hf:someone/nope@v2', 'hf:someone/other', 'hf:not a name'):
        with pytest.raises(ValueError, match=f'{source} could not be had: .*--init_from=FOLDER'):
            ours(source)


def test_a_missing_repository_and_a_missing_revision_are_named(monkeypatch, tmp_path):
    """A server answers as the hub does where something is missing."""
    hub = pytest.importorskip('huggingface_hub')

    class Missing(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(404)
            self.send_header('X-Error-Code', 'RevisionNotFound' if 'revision/v2' in self.path else 'RepoNotFound')
            self.send_header('Content-Length', '0')
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Missing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(hub, 'snapshot_download', functools.partial(
            hub.snapshot_download, endpoint=f'http://127.0.0.1:{server.server_port}', cache_dir=tmp_path))
        for source, why in (('hf:someone/nope@v2', 'someone/nope has no revision v2'),
                            ('hf:someone/other', 'there is no someone/other, or it is private')):
            with pytest.raises(ValueError, match=why):
                huggingface.load_folder(source)
        server.shutdown()


def test_a_missing_optional_package_is_asked_for(tmp_path, monkeypatch):
    llama(tmp_path)
    for name in ('safetensors', 'safetensors.torch', 'transformers', 'huggingface_hub'):
        monkeypatch.setitem(sys.modules, name, None)
    for name, call in (('safetensors', huggingface.load_folder), ('transformers', huggingface.load_foreign)):
        with pytest.raises(ValueError, match=f'pip install {name}'):
            call(str(tmp_path))
    with pytest.raises(ValueError, match='pip install huggingface_hub'):
        huggingface.load_folder('hf:someone/nope')
    with pytest.raises(ValueError, match='pip install safetensors$'):
        huggingface.save_folder(random_model(), BYTES, tmp_path / 'out', torch.float32)


def big_llama(folder):
    """TinyLlama's shape in bfloat16, 2.2 GB of random numbers."""
    c = transformers.LlamaConfig(hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
                                 num_key_value_heads=4, vocab_size=32000, max_position_embeddings=2048)
    with torch.device('meta'):
        shapes = {name: p.shape for name, p in transformers.LlamaForCausalLM(c).named_parameters()}
    noise = (0.02 * torch.randn(2 ** 16)).bfloat16()
    tensors = {name: noise.repeat(-(-shape.numel() // len(noise)))[:shape.numel()].view(shape).clone()
               for name, shape in shapes.items()}
    safetensors_torch.save_file(tensors, folder / 'model.safetensors')
    (folder / 'config.json').write_text(c.to_json_string())
    (folder / 'tokenizer.json').write_text(huggingface.tokenizer_json(BYTES), encoding='utf-8')
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.skipif(not Path('/proc/self/status').exists(), reason='needs Linux, to measure memory')
@pytest.mark.skipif(shutil.disk_usage(tempfile.gettempdir()).free < 5e9, reason='needs 5 GB of disk')
def test_a_model_of_1_1b_is_read_in_20_seconds_and_1_3_times_its_size(tmp_path):
    """Of memory that is not the mapped file's, beyond what importing torch takes; from a warm disk cache."""
    size = big_llama(tmp_path)
    assert 2.1e9 < size < 2.3e9
    script = """
import sys, threading, time
import torch
def anonymous():
    return next(int(line.split()[1]) * 1024 for line in open('/proc/self/status') if line.startswith('RssAnon'))
before, peak, ended = anonymous(), 0, False
import checkpoint
def watch():
    global peak
    while not ended:
        peak = max(peak, anonymous())
        time.sleep(0.002)
thread = threading.Thread(target=watch)
thread.start()
start = time.perf_counter()
model, _ = checkpoint.load_model(sys.argv[1], '', 'cpu', dtype=torch.bfloat16)
seconds = time.perf_counter() - start
ended = True
thread.join()
assert model.blocks[0].mlp.out.weight.dtype == torch.bfloat16
print(peak - before, seconds)
"""
    run = subprocess.run([sys.executable, '-c', script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    memory, seconds = map(float, run.stdout.splitlines()[-1].split())
    assert memory < 1.3 * size and seconds < 20, (memory / size, seconds)


# ----------------------------------------------------------------------------- out

@pytest.mark.parametrize('position, scaling', [('none', ''), ('rope', ''), ('rope', 'pi:4'), ('rope', 'ntk:4'),
                                               ('rope', 'dynamic_ntk:2'), ('rope', 'yarn:4')])
def test_stock_transformers_computes_what_our_model_does(tmp_path, position, scaling):
    model = random_model(vocab_size=257, n_embd=64, position=position, rope_scaling=scaling, tied=scaling == 'pi:4')
    assert model.head_scale.std() > 0.1 and model.blocks[1].attn.head_gain.std() > 0.1  # what is folded matters
    huggingface.save_folder(tmp_path / 'hf', model, BYTES, torch.float32)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'hf', output_loading_info=True)
    assert not any(report.values()) and theirs.config.eos_token_id == 256
    assert type(theirs).__name__ == ('LlamaForCausalLM' if position == 'rope' else 'SmolLM3ForCausalLM')
    assert_same_model(model, theirs.eval())
    again = ours(tmp_path / 'hf')
    assert_equal(logits(again, tokens(100, 257)), logits(model, tokens(100, 257)))
    assert again.config.block_size == (128 if scaling in ('pi:4', 'ntk:4', 'yarn:4') else 32)  # how far it reads


def test_folded_weights_are_rounded_once(tmp_path):
    model = random_model(vocab_size=257)
    huggingface.save_folder(tmp_path / 'hf', model, BYTES, torch.bfloat16)
    weights, attn = safetensors_torch.load_file(tmp_path / 'hf/model.safetensors'), model.blocks[1].attn
    q = (attn.qkv.weight[:32].double().view(4, 8, 32) * attn.head_scale.double()[:, None, None]).view(32, 32)
    o = (attn.out.weight.double().view(32, 4, 8) * attn.head_gain.double()[:, None]).view(32, 32)
    for name, exact in (('q', q), ('o', o)):
        written = weights[f'model.layers.1.self_attn.{name}_proj.weight']
        assert torch.equal(written, exact.float().bfloat16())
    assert torch.equal(weights['model.norm.weight'], model.norm.weight)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'hf').dtype == torch.bfloat16


def test_a_model_without_scales_comes_back_bit_for_bit(tmp_path):
    model = random_model(vocab_size=257)
    model.head_scale = 1
    for block in model.blocks:
        block.attn.head_gain.data.fill_(1)
    huggingface.save_folder(tmp_path / 'hf', model, BYTES, torch.float32)
    state, again = model.state_dict(), huggingface.load_folder(str(tmp_path / 'hf'))
    assert again['model_config'] == dataclasses.asdict(model.config) and again['model'].keys() == state.keys()
    assert all(torch.equal(again['model'][name], state[name]) for name in state)


@pytest.mark.parametrize('position', ['alibi', 'logn'])
def test_methods_without_a_stock_model_are_not_exported(tmp_path, position):
    with pytest.raises(ValueError, match=f"position '{position}' .* Only rope and none"):
        huggingface.save_folder(tmp_path / 'hf', random_model(vocab_size=257, position=position), BYTES, torch.float32)
    assert not list(tmp_path.iterdir())


def test_a_part_that_stock_models_do_not_have_is_not_exported(tmp_path):
    @dataclasses.dataclass
    class LaterConfig(ModelConfig):
        window: int = 0

    model = random_model(vocab_size=257)
    model.config = LaterConfig(**dataclasses.asdict(model.config), window=16)
    with pytest.raises(ValueError, match='window 16'):
        huggingface.save_folder(tmp_path / 'hf', model, BYTES, torch.float32)
    model.config.window = 0
    for add in torch.nn.Module.register_parameter, torch.nn.Module.register_buffer:
        model = random_model(vocab_size=257)
        add(model.blocks[1].attn, 'sink', torch.nn.Parameter(torch.zeros(4)))
        with pytest.raises(ValueError, match='blocks.1.attn.sink'):
            huggingface.save_folder(tmp_path / 'hf', model, BYTES, torch.float32)
    assert not list(tmp_path.iterdir())


def test_weights_are_exported_only_in_a_type_that_holds_them(tmp_path):
    model = random_model(vocab_size=257)
    model.head_scale = 1e6
    with pytest.raises(ValueError, match='model.layers.0.self_attn.q_proj.weight .*float16'):
        huggingface.save_folder(tmp_path / 'hf', model, BYTES, torch.float16)
    assert not list(tmp_path.iterdir())
    huggingface.save_folder(tmp_path / 'hf', model, BYTES, torch.bfloat16)


def test_a_folder_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    model = random_model(vocab_size=257)
    with files_at_most(20000), pytest.raises(OSError, match='Is the disk full'):
        huggingface.save_folder(tmp_path / 'hf', model, BYTES, torch.float32)
    assert not list(tmp_path.iterdir())
    (tmp_path / 'hf').mkdir()
    huggingface.save_folder(tmp_path / 'hf', model, BYTES, torch.float32)
    assert [path.name for path in tmp_path.iterdir()] == ['hf']
    assert sorted(path.name for path in (tmp_path / 'hf').iterdir()) == [
        'config.json', 'model.safetensors', 'tokenizer.json', 'tokenizer_config.json']
    with pytest.raises(ValueError, match='is not an empty folder'):
        huggingface.save_folder(tmp_path / 'hf', model, BYTES, torch.float32)
    monkeypatch.setattr(shutil, 'disk_usage', lambda _: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(ValueError, match='0.02 GB but 0.00 GB are free'):
        huggingface.save_folder(tmp_path / 'new', model, BYTES, torch.float32)


def test_exported_tokenizers_encode_as_ours(tmp_path):
    from tiktoken_ext.openai_public import r50k_pat_str
    text = Path(huggingface.__file__).read_text() + " It's 12345 ñandú 漢字 🙂\r\n\r\n  \t x </s>  "
    bpe = train_bpe([text], 400, tmp_path / 'bpe.tiktoken')
    ranks = bpe._mergeable_ranks
    gap = {token: rank + (rank > 300) for token, rank in ranks.items()}
    for encoding in (get_tokenizer('bytes'), bpe, tiktoken_encoding('gpt2', ranks, r50k_pat_str, len(ranks)),
                     tiktoken_encoding('gap', gap, bpe._pat_str, 402)):
        folder = tmp_path / 'hf' / encoding.name
        huggingface.save_folder(folder, random_model(vocab_size=403), tokenizer_state(encoding), torch.float32)
        again = get_tokenizer(str(folder / 'tokenizer.json'))
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        expected = encoding.encode_ordinary(text)
        assert again.encode_ordinary(text + '<|endoftext|>') == encoding.encode_ordinary(text + '<|endoftext|>')
        assert theirs(text)['input_ids'] == expected
        assert theirs('a<|endoftext|>')['input_ids'][-1] == theirs.eos_token_id == again.eot_token == encoding.eot_token
        assert theirs.decode(expected) == again.decode(expected) == text
    state = tokenizer_state(again)
    huggingface.save_folder(tmp_path / 'again', random_model(vocab_size=403), state, torch.float32)
    assert get_tokenizer(str(tmp_path / 'again/tokenizer.json')).text == again.text


def test_a_tokenizer_that_begins_texts_does_so_after_export(tmp_path):
    tokenizer = tokenizers.Tokenizer.from_str(huggingface.tokenizer_json(BYTES))
    tokenizer.add_special_tokens(['<s>'])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing('<s> $A', special_tokens=[('<s>', 257)])
    tokenizer.save(str(tmp_path / 'tokenizer.json'))
    state = tokenizer_state(get_tokenizer(str(tmp_path / 'tokenizer.json')))
    huggingface.save_folder(tmp_path / 'hf', random_model(vocab_size=258), state, torch.float32)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / 'hf')
    config = json.loads((tmp_path / 'hf/config.json').read_text())
    assert theirs('a')['input_ids'] == [config['bos_token_id'], 97] == [theirs.bos_token_id, 97] == [257, 97]
    assert config['eos_token_id'] == theirs.eos_token_id == 256


def test_the_stage_folds_a_scale_file(tmp_path, tiny_run):
    model, info = checkpoint.load_model('last', tiny_run, 'cpu')
    sets = {T: {f'blocks.{i}.attn.head_scale': torch.linspace(1, T / 32, 4) for i in range(2)} for T in (64, 128)}
    checkpoint.save_scale(tmp_path / 'sets.json', info, sets, 'head')
    arguments = [f'--out_dir={tiny_run}', f'--scale={tmp_path / "sets.json"}', f'--folder={tmp_path / "hf"}']
    assert 'has sets for 32, 64, 128 tokens' in mistake('export', *arguments)
    assert "dtype is 'int8'" in mistake('export', *arguments, '--dtype=int8')
    for T in (31, 129):
        assert 'are for 32 to 128 tokens' in mistake('export', *arguments, f'--target_length={T}')
    assert '--scale=None has none' in mistake('export', arguments[0], arguments[2], '--target_length=64')
    out, _ = stage('export', *arguments, '--target_length=64', '--dtype=float32')
    names = {'transformers': transformers}
    for line in out.splitlines()[1:]:  # the two lines that it prints load it
        exec(line.strip(), names)
    assert names['model'].config.max_position_embeddings == 64  # not L = 32: what reads it would cut the input there
    model.load_state_dict(sets[64], strict=False)
    assert_equal(logits(names['model'], tokens(64, 257)), logits(model, tokens(64, 257)))
    assert names['tokenizer']('def')['input_ids'] == [100, 101, 102]


# ----------------------------------------------------------------------------- others, through transformers

FOREIGN = {
    'bloom': dict(hidden_size=64, n_layer=2, n_head=4),
    'mpt': dict(d_model=48, n_layers=2, n_heads=6, expansion_ratio=2, max_seq_len=64),
    'gpt2': dict(n_embd=64, n_layer=2, n_head=4, n_positions=128),
}


def foreign(folder, kind, **changes):
    sizes = {'vocab_size': 260, 'eos_token_id': 256} | FOREIGN[kind] | changes
    return stock(folder, transformers.AutoConfig.for_model(kind, **sizes))


@pytest.mark.parametrize('kind', FOREIGN)
def test_other_models_run_behind_our_calls(tmp_path, kind):
    theirs = foreign(tmp_path, kind)
    assert huggingface.is_foreign(str(tmp_path))
    model, info = huggingface.load_foreign(str(tmp_path))
    L = {'bloom': 2048, 'mpt': 64, 'gpt2': 128}[kind]
    assert (model.config.block_size, info['model_config']['block_size'], model.config.position) == (L, L, kind)
    assert tokenizer_from_state(info['tokenizer']).eot_token == 256 and info['settings'] == {}
    assert (model.passes(50), model.sets, model.n_params()) == ([(0, 50)], {}, theirs.num_parameters())
    assert_same_model(model, theirs, 60)
    model.logits_per_chunk = 260 * 3  # losses in chunks of three tokens
    assert_same_model(model, theirs, 60)


@pytest.mark.parametrize('kind', FOREIGN)
def test_beam_search_over_other_models_is_that_of_transformers(tmp_path, kind):
    theirs, prompt = foreign(tmp_path, kind, tie_word_embeddings=False), tokens(20)  # tied, they repeat one token
    model = huggingface.load_foreign(str(tmp_path))[0]
    expected = theirs.generate(prompt, num_beams=4, do_sample=False, max_new_tokens=12, eos_token_id=256,
                               pad_token_id=256, attention_mask=torch.ones_like(prompt))[0, 20:].tolist()
    found = complete(model, prompt.tolist(), 12, beams=4, eos=(256,))[0]
    assert found == [token for token in expected if token != 256] and len(set(found)) > 1


@pytest.mark.parametrize('kind', ['bloom', 'mpt'])
def test_alibi_models_read_past_their_length(tmp_path, kind):
    theirs = foreign(tmp_path, kind)
    theirs.config.max_seq_len = 150  # MPT's alone: a longer table of the same biases
    assert_same_model(huggingface.load_foreign(str(tmp_path))[0], theirs, 150)


def test_other_models_say_what_they_cannot_do(tmp_path):
    foreign(tmp_path, 'gpt2')
    model, info = huggingface.load_foreign(str(tmp_path))
    with pytest.raises(ValueError, match='gpt2 model is read through transformers'):
        model.head_scale = 1.2
    with pytest.raises(ValueError, match='gpt2 model is read through transformers'):
        checkpoint.apply_scale(model, 1.2, info)
    with pytest.raises(ValueError, match='gpt2 model is read through transformers'):
        model.losses_and_entropy(tokens(5), tokens(5))
    with pytest.raises(ValueError, match='gpt2 model has 128 positions but 129 are needed'):
        model(tokens(129))
    with pytest.raises(ValueError, match="position 'gpt2' .* Only rope and none"):
        huggingface.save_folder(tmp_path / 'hf', model, info['tokenizer'], torch.float32)
    weights = safetensors_torch.load_file(tmp_path / 'model.safetensors')
    weights.pop('transformer.h.1.mlp.c_fc.weight')
    safetensors_torch.save_file(weights, tmp_path / 'model.safetensors', metadata={'format': 'pt'})
    with pytest.raises(ValueError, match='lacks weights: transformer.h.1.mlp.c_fc.weight'):
        huggingface.load_foreign(str(tmp_path))
    edit_config(tmp_path, model_type='unheard_of')
    with pytest.raises(ValueError, match='transformers cannot read .*unheard_of'):
        huggingface.load_foreign(str(tmp_path))


@pytest.mark.parametrize('changes', [
    {'n_layer': 10 ** 9}, {'hidden_size': 10 ** 9}, {'vocab_size': 10 ** 15}, {'n_layer': 'two'},
    {'vocab_size': None}], ids=str)
def test_sizes_of_other_models_that_no_machine_holds_are_refused(tmp_path, changes):
    foreign(tmp_path, 'bloom')
    edit_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=str(tmp_path)):
        huggingface.load_foreign(str(tmp_path))


def test_bit_that_flips_in_pickled_weights_of_other_models_is_refused(tmp_path):
    weights = foreign(tmp_path, 'bloom').state_dict()
    (tmp_path / 'model.safetensors').unlink()
    path = tmp_path / 'pytorch_model.bin'
    torch.save(weights, path)
    huggingface.load_foreign(str(tmp_path))
    weight = weights['transformer.h.1.mlp.dense_h_to_4h.weight']
    content = bytearray(path.read_bytes())
    content[content.index(weight.numpy().tobytes())] ^= 4
    path.write_bytes(content)
    with pytest.raises(ValueError, match='pytorch_model.bin is damaged'):
        huggingface.load_foreign(str(tmp_path))


def test_logits_that_are_more_than_the_output_matrix_are_refused(tmp_path):
    stock(tmp_path, transformers.CohereConfig(**SIZES, logit_scale=0.5))
    with pytest.raises(ValueError, match='logits of a cohere model are more than'):
        huggingface.load_foreign(str(tmp_path))


@pytest.mark.parametrize('n_head', [4, 6, 12])
def test_our_alibi_is_that_of_bloom(n_head):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    mask = torch.ones(9, 9).triu(1).bool()
    theirs = build_alibi_tensor(torch.ones(1, 9), n_head, torch.float32).expand(n_head, 9, 9)  # slope * j
    config = ModelConfig(9, 9, 1, n_head, n_head, 2 * n_head, 2, position='alibi')
    bias = ALiBi(config)(torch.arange(9), torch.arange(9))
    scores = torch.randn(n_head, 9, 9)
    a, b = [(scores + x).masked_fill(mask, -torch.inf).softmax(-1) for x in (bias, theirs)]
    torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


# ----------------------------------------------------------------------------- through checkpoint.py and the stages

def test_half_precision_file_is_read_in_the_precision_of_the_activations(tmp_path):
    llama(tmp_path / 'float32').to(torch.bfloat16).save_pretrained(tmp_path / 'half')
    shutil.copy(tmp_path / 'float32/tokenizer.json', tmp_path / 'half')
    half, _ = checkpoint.load_model(str(tmp_path / 'half'), None, 'cpu', dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters() if p.dim() == 2} == {torch.bfloat16}
    assert {p.dtype for p in half.parameters() if p.dim() == 1} == {torch.float32}
    full, _ = checkpoint.load_model(str(tmp_path / 'half'), None, 'cpu')
    assert {p.dtype for p in full.parameters()} == {torch.float32}
    with torch.autocast('cpu', torch.bfloat16):  # the same rounded weights, activations rounded in the same places
        assert torch.equal(logits(half, tokens(20)), logits(full, tokens(20)))


def test_tied_matrices_stay_one_after_loading(tmp_path):
    llama(tmp_path, tie_word_embeddings=True)
    model, _ = checkpoint.load_model(str(tmp_path), None, 'cpu')
    assert model.head.weight is model.embed.weight
    assert sum(model.flops_per_token(0)) == 2 * model.n_params()


def text_for(source, folder):
    """A data set prepared with the tokenizer of a Hugging Face folder."""
    text = Path(json.__file__).with_name('decoder.py').read_text(encoding='utf-8')
    splits = {split: [text] for split in ('train', 'val', 'test')}
    write_corpus(folder, get_tokenizer(str(source / 'tokenizer.json')), splits, workers=1)
    return folder


def test_every_stage_reads_a_hugging_face_folder(tmp_path):
    llama(tmp_path / 'llama', vocab_size=257)
    corpus_dir = text_for(tmp_path / 'llama', tmp_path / 'text')
    common = [f'--init_from={tmp_path}/llama', f'--out_dir={tmp_path}/out', '--device=cpu', '--compile=False']
    assert 'Give a data set with --dataset=' in mistake('eval_ppl', *common[:3])
    common.append(f'--dataset={corpus_dir}')
    arguments = [*common[:3], common[4], '--position=none', '--n_samples=2', '--length=128']
    stage('entropy', *arguments, '--scale=1.3')
    stage('tune_scale', *common, '--position=none', '--target_length=96', '--max_iters=2', '--init_scale=1.2',
          '--batch_size=2', '--micro_batch_size=2', '--n_samples=2')
    out, _ = stage('eval_ppl', *common[:3], common[4], '--position=none', '--max_windows=4', '--lengths=[64,128]',
                   f'--scale={tmp_path}/out/scale_head_96.json')
    assert 'its config says Llama' not in out
    stage('train', *common, '--rope_scaling=yarn', '--block_size=128', '--max_iters=1', '--batch_size=2',
          '--micro_batch_size=2', '--eval_windows=2')
    config = checkpoint.load(tmp_path / 'out/last.pt')['model_config']
    assert (config['position'], config['rope_scaling'], config['rope_length']) == ('rope', 'yarn:2', 64)
    stage('sample', f'--init_from={tmp_path}/llama', '--device=cpu', '--max_new_tokens=3')


def test_other_models_are_evaluated_and_say_that_they_cannot_be_tuned(tmp_path):
    foreign(tmp_path / 'bloom', 'bloom')
    corpus_dir = text_for(tmp_path / 'bloom', tmp_path / 'text')
    common = [f'--init_from={tmp_path}/bloom', f'--out_dir={tmp_path}/out', '--device=cpu', f'--dataset={corpus_dir}']
    out, _ = stage('eval_ppl', *common, '--max_windows=4', '--lengths=[64,128]', '--stride=8')
    result = json.loads((tmp_path / 'out/eval_ppl.json').read_text())
    assert result['position_method'] == 'bloom' and f"{result['rows'][1]['ppl']:.3f}" in out
    stage('sample', common[0], '--device=cpu', '--max_new_tokens=3')
    assert 'no scale of it can be tuned' in mistake('tune_scale', *common)
    assert 'takes no position' in mistake('eval_ppl', *common, '--position=none')
