"""$ python -m pytest tests/test_huggingface.py       (lib/huggingface, lib/foreign, lib/exports)"""

import contextlib
import copy
import json
import random
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import (
    files_at_most,
    flip_a_bit,
    memory_at_most,
    mistake,
    near,
    random_model,
    read,
    refuses,
    stage_here,
    tokens,
)
from test_tokenizers import hf_json

from lib import checkpoints, exports, huggingface
from lib.answers import whole_folder
from lib.errors import UserError
from lib.foreign import load_foreign
from lib.generate import Decoding, complete, new_cache
from lib.huggingface import load_folder
from lib.losses import by_position
from lib.scales import apply_scale, put_vectors, save_scale
from lib.tokenizers import get_tokenizer, tiktoken_encoding, tokenizer_state, train_bpe
from model import ModelConfig, small_vectors

transformers = pytest.importorskip('transformers')
safetensors_torch = pytest.importorskip('safetensors.torch')
pytest.importorskip('tokenizers')

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
         "n_positions": 128},
"OPT": {"vocab_size": 260, "eos_token_id": 256, "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "ffn_dim": 96, "word_embed_proj_dim": 64,
        "max_position_embeddings": 64},
"BertGeneration": {"vocab_size": 260, "hidden_size": 64, "num_hidden_layers": 2,
                   "num_attention_heads": 4, "intermediate_size": 96},
"Lfm2": {"layer_types": ["conv", "full_attention"]}}''')
for kind in 'GraniteMoeHybrid', 'SmolLM3', 'Cohere', 'Lfm2':
    SIZES[kind] = SIZES['Llama'] | SIZES[kind]
YARN = {'rope_type': 'yarn', 'rope_theta': 5000.0, 'factor': 4.0,
        'original_max_position_embeddings': 32}


def stock(folder, kind='Llama', shard='1GB', **changes):
    """
    Save a random model of transformers and a byte tokenizer to a folder. The model's norms are not
    1 and its attention is far from uniform. Returns it in float32 with eager attention.
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


def weights_of(source):
    return copy.deepcopy(load_folder(str(source))['model'])  # a copy, because files are mapped


def unread(named, source, load=load_folder):
    """Fail unless a folder is refused with a line that contains `named`."""
    refuses(named, load, str(source))


def export(folder, model, dtype=torch.float32, tokenizer=BYTES):
    with whole_folder(folder) as part:
        exports.save_folder(part, model, tokenizer, dtype)


def reopened(folder):
    """The model of a folder in stock transformers, without missing or unused tensors."""
    auto = transformers.AutoModelForCausalLM
    model, report = auto.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    return model.eval()


@torch.no_grad()
def assert_same_logits(model, theirs, length=100):
    """Returns the logits."""
    idx = tokens(2, length)
    expected = theirs(idx).logits
    assert expected[:, -11:].log_softmax(-1).std(1).mean() > 0.1  # not equal at all positions
    near(model(idx), expected, 1e-4)
    return expected


def edit_config(folder, **changes):
    """Change entries of config.json; 'gone' removes one."""
    config = read(folder / 'config.json') | changes
    config = {key: value for key, value in config.items() if value != 'gone'}
    (folder / 'config.json').write_text(json.dumps(config))


def edit_weights(folder, **changes):
    """Change tensors of model.safetensors; None removes one. Returns all tensors."""
    path = folder / 'model.safetensors'
    weights = safetensors_torch.load(path.read_bytes()) | changes
    weights = {name: tensor for name, tensor in weights.items() if tensor is not None}
    safetensors_torch.save_file(weights, path, metadata={'format': 'pt'})
    return weights


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
    theirs = stock(tmp_path / 'in', kind, **json.loads(changes))
    model = ours(tmp_path / 'in')
    assert model.config.position == position
    assert_same_logits(model, theirs)
    export(tmp_path / 'out', model)
    assert_same_logits(model, reopened(tmp_path / 'out'))
    again = ours(tmp_path / 'out')
    assert again.config.L0 == model.config.L0
    for name in 'block_size', 'pretrained_length':  # an export states the longest context and L0
        setattr(again.config, name, getattr(model.config, name))
    assert again.config == model.config
    if (model.head_scale == 1).all():
        near(dict(again.state_dict()), dict(model.state_dict()))


def test_older_rope_settings_mean_the_same_and_come_first(tmp_path):
    stock(tmp_path)
    old = {'type': 'linear', 'factor': 4.0, 'attention_factor': None}
    edit_config(tmp_path, rope_theta=5000.0, rope_scaling=old)
    assert_same_logits(ours(tmp_path), reopened(tmp_path))


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
    scales = 1 + torch.arange(8).view(2, 4) / 4
    names = [huggingface.SCALES.format(i) for i in range(2)]
    edit_weights(tmp_path, **{name: row.bfloat16() for name, row in zip(names, scales)})
    unread('--position=none', tmp_path)
    assert torch.equal(ours(tmp_path, 'none').head_scale, scales)
    assert 'head scales, which are used' in capsys.readouterr().out
    edit_weights(tmp_path, **{names[1]: None})
    refuses(names[1], ours, tmp_path, 'none')


def test_a_half_precision_file_is_read_in_the_precision_of_the_activations(tmp_path):
    stock(tmp_path).to(torch.bfloat16).save_pretrained(tmp_path)
    half, single = ours(tmp_path, dtype=torch.bfloat16), ours(tmp_path)
    assert half.head.weight.dtype == torch.bfloat16
    assert half.norm.weight.dtype == single.head.weight.dtype == torch.float32


# ---------------------------------------------------------------------- what cannot be read

# Kind of config | what is changed in config.json | what the error names.
@pytest.mark.parametrize('kind, more', [('Llama', {}), ('SmolLM3', {'no_rope_layers': [1] * 6})])
def test_what_a_config_leaves_out_is_what_transformers_takes(tmp_path, kind, more):
    stock(tmp_path, kind, **more)
    edit_config(tmp_path, rope_parameters='gone', rope_theta='gone', rms_norm_eps='gone')
    theirs = reopened(tmp_path)
    assert_same_logits(ours(tmp_path), theirs)
    assert ours(tmp_path).config.norm_eps == theirs.config.rms_norm_eps


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
Llama | {"original_max_position_embeddings":"x","rope_scaling":{"type":"yarn"}} | pretrained_length
Llama | {"num_key_value_heads": "two"} | num_key_value_heads is two
Llama | {"rms_norm_eps": null} | rms_norm_eps is None
Llama | {"tie_word_embeddings": 1} | tie_word_embeddings is 1
Llama | {"layer_types": 5} | layer_types is 5
Llama | {"partial_rotary_factor": 0.5} | partial_rotary_factor is 0.5
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
    with memory_at_most(2 ** 30):  # a list of 10^9 layers alone would take 8 GB
        unread(named, tmp_path)


def test_pickled_weights_and_shards_of_them_import_the_same(tmp_path):
    stock(tmp_path)
    expected, weights = weights_of(tmp_path), edit_weights(tmp_path)
    (tmp_path / 'model.safetensors').unlink()
    path = tmp_path / 'pytorch_model.bin'
    for zipped in False, True:  # older models have rotary tables, which are no weights
        torch.save(weights | {'model.layers.0.self_attn.rotary_emb.inv_freq': torch.ones(8)}, path,
                   _use_new_zipfile_serialization=zipped)
        near(weights_of(tmp_path), expected)
    path.unlink()
    for i in range(2):
        torch.save(dict(list(weights.items())[i::2]), tmp_path / f'pytorch_model-{i}.bin')
    near(weights_of(tmp_path), expected)


def test_each_tensor_comes_once_and_from_a_regular_file(tmp_path):
    stock(tmp_path, shard='20KB')
    shard = min(tmp_path.glob('model-*.safetensors'))
    twice = tmp_path / 'model-00001-of-00099.safetensors'
    twice.write_bytes(shard.read_bytes())
    unread('another file of weights', tmp_path)
    twice.unlink()
    shard.unlink()
    shard.symlink_to('/dev/zero')  # which has no end
    with memory_at_most(2 ** 30):
        unread('missing', tmp_path)


def test_an_export_in_which_a_bit_flips_has_the_same_weights_or_is_refused(tmp_path):
    export(tmp_path, random_model(vocab_size=257), torch.bfloat16)
    path, state, n_read = tmp_path / 'model.safetensors', weights_of(tmp_path), 0
    header = int.from_bytes(path.read_bytes()[:8], 'little')
    for place in random.Random(0).sample(range(2 * header), 80):
        flip_a_bit(path, place)
        with contextlib.suppress(UserError):
            near(weights_of(tmp_path), state)
            n_read += 1
        flip_a_bit(path, place)
    assert n_read < 20


def test_weights_that_are_cut_short_of_another_kind_or_not_there_are_refused(tmp_path, monkeypatch):
    stock(tmp_path)
    path = tmp_path / 'model.safetensors'
    with monkeypatch.context() as patch, pytest.raises(PermissionError):
        patch.setattr(huggingface, 'open', Mock(side_effect=PermissionError), raising=False)
        weights_of(tmp_path)  # such a file is not called damaged
    edit_weights(tmp_path, **{'lm_head.weight': torch.ones(260, 64, dtype=torch.int8)})
    unread('torch.int8', tmp_path)
    path.write_bytes(path.read_bytes()[:-1000])
    unread('model.safetensors', tmp_path)
    path.unlink()
    unread('neither model.safetensors nor', tmp_path)


def test_hub_names_are_found_in_the_cache_without_a_network(tmp_path, monkeypatch):
    constants = pytest.importorskip('huggingface_hub').constants
    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path))
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    commit, repo = 'c0ffee' + 34 * '0', tmp_path / 'models--someone--nope'
    stock(repo / 'blobs', shard='20KB')
    for folder in 'refs', f'snapshots/{commit}':
        (repo / folder).mkdir(parents=True)
    (repo / 'refs/main').write_text(commit)
    for path in (repo / 'blobs').iterdir():
        (repo / 'snapshots' / commit / path.name).symlink_to(path)
    for name in '', f'@{commit}':
        near(weights_of(f'hf:someone/nope{name}'), weights_of(repo / 'blobs'))
    for source in 'hf:someone/nope@v2', 'hf:not a name':
        unread('--init_from=FOLDER', source)


@pytest.mark.slow
def test_a_model_of_1_1b_is_read_in_less_than_twice_its_memory(tmp_path):
    """TinyLlama's shape in bfloat16, 2.2 GB. The mapped file counts as memory, too."""
    c = ModelConfig(vocab_size=32000, block_size=2048, n_layer=22, n_head=32, n_kv_head=4,
                    n_embd=2048, n_hidden=5632, position='rope')
    path = tmp_path / 'model.safetensors'
    safetensors_torch.save_file({name: torch.full(shape, 0.02, dtype=torch.bfloat16)
                                 for _, parts in huggingface.tensor_table(c)
                                 for name, shape in parts}, path)
    (tmp_path / 'config.json').write_text(json.dumps(exports.their_config(c, torch.bfloat16)))
    size = path.stat().st_size
    with memory_at_most(int(2.9 * size)):
        model = ours(tmp_path, dtype=torch.bfloat16)
    assert size > 2.1e9 and model.head.weight.dtype == torch.bfloat16


# ---------------------------------------------------------------------- exports

@pytest.mark.parametrize('position, scaling, longest', [
    ('none', '', 32), ('rope', 'pi:4', 128), ('rope', 'ntk:4', 128), ('rope', 'dynamic_ntk:2', 32)])
def test_stock_transformers_computes_what_our_model_does(tmp_path, position, scaling, longest):
    model = random_model(vocab_size=257, position=position, rope_scaling=scaling)
    export(tmp_path / 'hf', model)
    theirs = reopened(tmp_path / 'hf')
    assert theirs.config.max_position_embeddings == longest
    for length in (32, 64, 128):  # L, 2L, 4L
        assert_same_logits(model, theirs, length)


def test_an_export_says_how_long_pretraining_windows_were(tmp_path):
    for scaling in '', 'pi:4', 'ntk:2.5', 'yarn:4', 'dynamic_ntk:2':
        export(tmp_path / 'hf', random_model(vocab_size=257, position='rope',
                                             rope_scaling=scaling))
        assert ours(tmp_path / 'hf').config.L0 == 32
        shutil.rmtree(tmp_path / 'hf')


def test_a_scale_per_channel_with_rope_is_refused(tmp_path):
    for position in 'rope', 'rope,none':
        model = random_model(vocab_size=257, position=position).requires_grad_(False)
        model.head_scale = torch.rand(2, 4, 8)
        refuses('a scale per channel with RoPE', export, tmp_path / position, model)


def test_folded_weights_are_rounded_once_and_vectors_are_not():
    model = random_model()
    weights, attn = exports.their_state(model, torch.bfloat16, 'llama'), model.blocks[1].attn
    q = attn.qkv.weight[:32].double() * attn.head_scale.double().repeat_interleave(8, dim=0)
    assert torch.equal(weights['model.layers.1.self_attn.q_proj.weight'], q.float().bfloat16())
    assert torch.equal(weights['model.norm.weight'], model.norm.weight)


# What no stock model can hold. The error names the last setting.
@pytest.mark.parametrize('changes', '''
{"position": "alibi"}
{"position": "rope,alibi"}
{"dape_kernel": 3}
{"short_conv": 4}
{"position": "rope", "rope_share": 0.5}
{"position": "rope", "rope_window": 8}
{"position": "rope", "random_positions": 64}
'''.strip().splitlines())
def test_a_setting_that_a_stock_model_has_no_place_for_is_not_exported(tmp_path, changes):
    changes = json.loads(changes)
    name, value = list(changes.items())[-1]
    refuses(f'{name} {value}', export, tmp_path / 'hf', random_model(**changes))


def test_a_folder_is_written_whole_or_not_at_all(tmp_path):
    model, folder = random_model(vocab_size=257), tmp_path / 'hf'
    with files_at_most(20000), pytest.raises(OSError, match='Is the disk full'):
        export(folder, model)
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
        ids, end = encoding.encode_ordinary(text), encoding.eot_token
        assert theirs(text)['input_ids'] == again.encode_ordinary(text) == ids
        assert theirs.decode(ids) == again.decode(ids) == text
        assert theirs('<|endoftext|>')['input_ids'] == [theirs.eos_token_id] == [end]
        assert again.eot_token == end


def test_a_tokenizer_that_begins_texts_does_so_after_export(tmp_path):
    state = tokenizer_state(get_tokenizer(hf_json(tmp_path)))
    export(tmp_path / 'hf', random_model(vocab_size=901), tokenizer=state)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / 'hf')
    config = read(tmp_path / 'hf/config.json')
    assert theirs('a')['input_ids'][0] == theirs.bos_token_id == config['bos_token_id'] == 1
    assert theirs.eos_token_id == config['eos_token_id'] == 900


def test_the_stage_folds_a_scale_file_with_all_kinds_of_vectors(tmp_path, tiny_run, tiny):
    model, info = tiny
    torch.manual_seed(0)
    sets = {T: {name: torch.rand((4, 8) if name.endswith('head_scale') else p.shape) + 0.5
                for name, p in small_vectors(model).items()}  # a scale for each channel
            for T in (64, 128)}
    save_scale(tmp_path / 'sets.json', info, sets, 'head')
    stage_here('export', f'--out_dir={tiny_run}', f'--folder={tmp_path}/hf', '--dtype=float32',
               f'--scale={tmp_path}/sets.json', '--target_length=64')
    theirs = reopened(tmp_path / 'hf')
    assert theirs.config.max_position_embeddings == 64  # at L = 32, a reader would cut texts
    again = ours(tmp_path / 'hf').config
    assert (again.block_size, again.L0) == (64, 32)
    put_vectors(model, sets[64])
    assert_same_logits(model, theirs, 64)


# ---------------------------------------------------------------------- other models

@pytest.mark.parametrize('kind, L', [('Bloom', 2048), ('Mpt', 64), ('GPT2', 128)])
@torch.no_grad()
def test_other_models_run_behind_our_calls(tmp_path, kind, L):
    # Tied, they would repeat one token.
    theirs = stock(tmp_path, kind, tie_word_embeddings=False)
    model, info = checkpoints.load_model(str(tmp_path), '', 'cpu')
    assert info['model_config']['block_size'] == model.config.block_size == L

    idx, expected = tokens(2, 60), assert_same_logits(model, theirs, 60)
    near(model(idx, tail=3), expected[:, -3:], 1e-4)
    cache = new_cache(model, 2, 60)
    parts = [model(part, cache=cache) for part in idx.split([48, 9, 1, 1, 1], dim=1)]
    near(torch.cat(parts, dim=1), expected, 1e-4)

    prompt = tokens(2, 20)
    expected = theirs.generate(prompt, num_beams=4, do_sample=False, max_new_tokens=12,
                               eos_token_id=256, pad_token_id=256,
                               attention_mask=torch.ones_like(prompt))[0, 20:].tolist()
    found = complete(model, prompt.tolist(), 12, Decoding((256,), beams=4))[0]
    assert found == [token for token in expected if token != 256] and len(set(found)) > 1
    if kind != 'GPT2':  # ALiBi reads past its length
        theirs.config.max_seq_len = 150  # MPT's alone: a longer table of the same biases
        assert_same_logits(model, theirs, 150)


@pytest.mark.parametrize('kind, L', [('GPT2', 128), ('OPT', 64)])
def test_learned_positions_end_at_the_length_of_training(tmp_path, kind, L):
    stock(tmp_path, kind)
    model, _ = load_foreign(str(tmp_path))
    assert model(tokens(2, L)).isfinite().all()
    refuses(f'{L} positions but {L + 1}', model, tokens(2, L + 1))


def test_other_models_say_what_they_cannot_do(tmp_path):
    stock(tmp_path, 'GPT2')
    model, info = load_foreign(str(tmp_path))
    through = 'gpt2 model is read through transformers'
    refuses(through, setattr, model, 'head_scale', 1.2)
    refuses(through, apply_scale, model, 1.2, info)
    refuses(through, by_position, model, tokens(2, 5), tokens(2, 5), print)
    refuses('128 positions but 129', model, tokens(2, 129))
    refuses('position gpt2', export, tmp_path / 'hf', model)
    refuses('takes no position', ours, tmp_path, 'none')
    edit_weights(tmp_path, **{'transformer.h.1.mlp.c_fc.weight': None})
    unread('transformer.h.1.mlp.c_fc.weight', tmp_path, load_foreign)
    edit_config(tmp_path, model_type='unheard_of')
    unread('unheard_of', tmp_path, load_foreign)
    stock(tmp_path, 'Bloom')
    for changes in ({'n_layer': 10 ** 9}, {'n_layer': 'two'}, {'n_layer': 2, 'vocab_size': 10**15}):
        edit_config(tmp_path, **changes)
        unread(str(tmp_path), tmp_path, load_foreign)
    stock(tmp_path, 'Cohere')  # it changes its logits after the output matrix
    unread('cohere model changes its logits', tmp_path, load_foreign)


def test_a_model_that_reads_later_tokens_is_refused(tmp_path):
    stock(tmp_path, 'BertGeneration')
    unread('bert-generation model reads later tokens', tmp_path, load_foreign)


def test_a_state_that_cannot_be_copied_for_beams_is_named(tmp_path):
    theirs = stock(tmp_path, 'Lfm2')
    model, _ = load_foreign(str(tmp_path))
    assert_same_logits(model, theirs, 20)
    refuses('cannot copy the state', complete, model, [[1, 2, 3]], 4, Decoding(beams=2))


# ---------------------------------------------------------------------- by the stages

@pytest.mark.slow
def test_stages_read_a_hugging_face_folder(tmp_path, corpus_dir):
    out = tmp_path / 'out'
    for kind in 'Llama', 'Bloom':
        stock(tmp_path / kind, kind, vocab_size=257)
        (tmp_path / kind / 'tokenizer.json').unlink()  # so it takes any text

    def arguments(kind, command):
        where = f'--init_from={tmp_path}/{kind} --dataset={corpus_dir} --out_dir={out}'
        return f'{where} --device=cpu {command}'.split()

    small = '--compile=False --max_iters=2 --batch_size=2 --micro_batch_size=2 '
    stage_here('tune_scale', *arguments('Llama', small + (
        '--position=none --target_length=96 --init_scale=1.2 --n_samples=2')))
    stage_here('train', *arguments('Llama', small + (
        '--rope_scaling=yarn --block_size=128 --eval_windows=2')))
    config = checkpoints.load(out / 'last.pt')['model_config']
    assert (config['position'], config['rope_scaling']) == ('rope', 'yarn:2')
    assert config['pretrained_length'] == 64
    measure = '--max_windows=4 --lengths=[64,128] --stride=8 '
    stage_here('eval_ppl', *arguments(
        'Llama', f'{measure} --position=none --scale={out}/scale_head_96.json'))
    stage_here('eval_ppl', *arguments('Bloom', measure))
    assert read(out / 'eval_ppl.json')['position_method'] == 'bloom'
    assert 'can be tuned' in mistake('tune_scale', *arguments('Bloom', small))
