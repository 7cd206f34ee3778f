"""$ python -m pytest tests/test_convert.py      (convert, hf_folder, gguf_file, foreign)"""


import json

from configurator import UserError

import numpy as np
import pytest
import torch
from conftest import mistake, near, random_model, read, save_model, stage, tokens

from common import save_json
from data import encode_alike
from extras import convert, gguf_file, hf_folder
from generate import complete
from stage import open_model
from tokenizer import byte_pairs, get_tokenizer, tokenizer_state

transformers = pytest.importorskip('transformers')
tokenizers = pytest.importorskip('tokenizers')
pre_tokenizers = tokenizers.pre_tokenizers
gguf = pytest.importorskip('gguf')

BASE = {'vocab_size': 260, 'hidden_size': 64, 'intermediate_size': 96, 'num_hidden_layers': 2,
        'num_attention_heads': 4, 'num_key_value_heads': 2, 'max_position_embeddings': 64,
        'bos_token_id': 256, 'eos_token_id': 256, 'pad_token_id': None}
GRANITE = {'layer_types': ['attention'] * 2, 'num_local_experts': 0, 'mamba_n_heads': 1,
           'shared_intermediate_size': 96, 'attention_multiplier': 0.25}
LINEAR = {'rope_type': 'linear', 'rope_theta': 5000.0, 'factor': 4.0}
YARN = LINEAR | {'rope_type': 'yarn', 'original_max_position_embeddings': 32}
LLAMA3 = YARN | {'rope_type': 'llama3', 'low_freq_factor': 1.0, 'high_freq_factor': 4.0}
BYTES = get_tokenizer('bytes')
IDX = tokens(2, 100)


def stock(folder, kind='Llama', **changes):
    """Save a random model of transformers, whose attention is far from uniform, and return it."""
    torch.manual_seed(0)
    config = getattr(transformers, f'{kind}Config')(**BASE | changes)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for p in model.parameters():
        p.data = p.data * 5 if p.dim() > 1 else torch.rand_like(p) + 0.5
    model.save_pretrained(folder)
    return model


@pytest.fixture
def ours(cpu):
    """ours(source, position): the model of a folder or file, opened by a stage."""
    return lambda source, position=None: open_model(str(source), '', cpu, position)[0]


def written(folder, model=None, *arguments):
    """Write a model, or another that the arguments name, as transformers' model in folder/out."""
    if model:
        save_model(model, folder / 'last.pt')
    stage('extras.convert', f'--out_dir={folder}', f'--folder={folder}/out', '--dtype=float32',
          *arguments)
    if '--format=gguf' not in arguments:
        return transformers.AutoModelForCausalLM.from_pretrained(folder / 'out').eval()


def same(model, theirs):
    with torch.no_grad():
        near(model(IDX), theirs(IDX).logits, atol=1e-4)


# ---------------------------------------------------------------------- in

@pytest.mark.parametrize('kind, changes, position', [
    ('Llama', {'tie_word_embeddings': True}, 'rope'),
    ('Llama', {'rope_parameters': LINEAR}, 'rope'), ('Llama', {'rope_parameters': YARN}, 'rope'),
    ('Llama', {'rope_parameters': LLAMA3}, 'rope'),
    ('SmolLM3', {'no_rope_layers': [1, 1, 1, 0, 1, 1], 'num_hidden_layers': 6},
     'rope,rope,rope,none'),
    ('GraniteMoeHybrid', GRANITE, 'none'),
    ('GraniteMoeHybrid', GRANITE | {'position_embedding_type': 'rope'}, 'rope')], ids=str)
def test_llamas_and_what_is_written_of_them_give_the_logits_of_transformers(
        tmp_path, ours, kind, changes, position):
    theirs = stock(tmp_path / 'in', kind, **changes)
    model = ours(tmp_path / 'in')
    assert model.config.position == position
    same(model, theirs)
    (tmp_path / 'in/tokenizer.json').write_text(hf_folder.tokenizer_json(tokenizer_state(BYTES)))
    same(model, written(tmp_path, None, f'--init_from={tmp_path}/in'))
    again = ours(tmp_path / 'out')
    same(again, theirs)
    assert again.config.pretrained_length == model.config.pretrained_length


def test_pickled_weights_and_head_scales_of_the_papers_code_are_read(tmp_path, ours, cpu):
    weights = stock(tmp_path, tie_word_embeddings=True).state_dict()
    scales = 1 + torch.arange(8.0).view(2, 4)
    weights |= {f'model.layers.{i}.self_attn.scale_param': row for i, row in enumerate(scales)}
    (tmp_path / 'model.safetensors').unlink()
    for i in range(2):
        torch.save(dict(list(weights.items())[i::2]), tmp_path / f'pytorch_model-{i}.bin')
    model = ours(tmp_path)
    assert torch.equal(model.head_scale, scales) and model.config.position == 'none'
    assert model.config.tied and 'lm_head.weight' in weights  # a copy
    near(model.blocks[1].mlp.out.weight, weights['model.layers.1.mlp.down_proj.weight'])
    model, info = open_model(str(tmp_path), '', cpu, 'rope')
    assert model.config.position == info['label'] == 'rope'  # not the name of the plain reading


def test_a_granite_with_an_unknown_position_is_refused_by_name(tmp_path, ours):
    stock(tmp_path, 'GraniteMoeHybrid', **GRANITE)
    path = tmp_path / 'config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | {'position_embedding_type': 'alibi'}))
    with pytest.raises(UserError, match='alibi'):
        ours(tmp_path)


@pytest.mark.parametrize('kind, changes, reason', [
    ('Llama', {'attention_bias': True}, 'proj.bias'), ('Llama', {'head_dim': 32}, 'head_dim'),
    ('Llama', {'rope_parameters': LLAMA3 | {'low_freq_factor': 2.0}}, 'low_freq'),
    ('Mpt', {'d_model': 64, 'n_layers': 2, 'n_heads': 4, 'max_seq_len': 64}, 'mpt'),
    ('GraniteMoeHybrid', GRANITE | {'attention_multiplier': 0.5}, 'attention_multiplier'),
    ('GraniteMoeHybrid', GRANITE | {'logits_scaling': 2.0}, 'logits_scaling'),
    ('Mamba', {}, 'mamba'), ('Gemma2', {'head_dim': 16}, 'gemma2')], ids=str)
def test_what_our_model_does_not_compute_is_run_by_transformers(tmp_path, ours, kind, changes,
                                                                reason):
    theirs = stock(tmp_path, kind, **changes)
    model = ours(tmp_path)
    half = convert.read(str(tmp_path), dtype=torch.bfloat16)['digest']
    assert half == convert.read(str(tmp_path))['digest']
    if kind == 'Mpt':
        theirs.config.max_seq_len = 100
    same(model, theirs)
    with torch.no_grad():
        log_p = theirs(IDX[:, :-1]).logits.log_softmax(-1)
        near(model(IDX[:, :-1], IDX[:, -9:]),
             -log_p[:, -9:].gather(-1, IDX[:, -9:, None])[..., 0], atol=1e-4)
    text = theirs.generate(IDX[:1, :9], max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert complete(model, IDX[:1, :9].tolist(), 6) == text[:, 9:].tolist()
    with pytest.raises(UserError, match=reason):
        written(tmp_path, None, f'--init_from={tmp_path}')
    if kind == 'Mamba':
        assert reason in mistake('tune_scale', f'--init_from={tmp_path}', '--method=uniform')
        with pytest.raises(AttributeError, match='repeat'):
            complete(model, [[1, 2]], 6, beams=2)


def test_a_head_of_its_own_is_read_though_the_config_ties_it(tmp_path, ours):
    stock(tmp_path, vocab_size=99)
    (tmp_path / 'model.safetensors').rename(tmp_path / 'model-00001-of-00001.safetensors')
    theirs = stock(tmp_path)  # transformers takes model.safetensors, not the parts of another
    save_json(tmp_path / 'config.json', read(tmp_path / 'config.json') |
              {'tie_word_embeddings': True})
    same(ours(tmp_path), theirs)


def test_dynamic_ntk_does_not_remember_a_longer_text(tmp_path, ours):
    theirs = stock(tmp_path, rope_parameters=LINEAR | {'rope_type': 'dynamic'})
    model, short = ours(tmp_path), theirs(IDX[:, :64]).logits
    assert model.config.rope_scaling == 'dynamic_ntk:4'
    same(model, theirs)
    near(model(IDX[:, :64]), short, atol=1e-4)


def test_what_cannot_be_read_is_named_in_a_line(tmp_path, ours):
    for kind, changes, entry, text in (
            ('Llama', {}, {'num_hidden_layers': 3}, 'model.layers.2'),
            ('GPT2', {}, {'n_layer': 3}, 'the folder lacks .*h.2'),
            ('Qwen2', {'rope_parameters': LINEAR | {'rope_type': 'dynamic'}}, {}, 'dynamic NTK'),
            ('BertGeneration', {}, {}, 'bert-generation.*not causal')):
        stock(tmp_path, kind, **changes)
        save_json(tmp_path / 'config.json', read(tmp_path / 'config.json') | entry)
        with pytest.raises(UserError, match=text) as caught:
            ours(tmp_path)
        assert '\n' not in str(caught.value)


# ---------------------------------------------------------------------- out

@pytest.mark.parametrize('settings, kind', [
    ({}, 'smollm3'), ({'position': 'rope', 'rope_base': 500.0}, 'llama'),
    ({'position': 'rope,none', 'rope_scaling': 'yarn:2', 'tied': True}, 'smollm3')], ids=str)
def test_scales_and_gains_are_in_the_weights_that_are_written(tmp_path, settings, kind, ours):
    model = random_model(vocab_size=257, **settings)
    theirs = written(tmp_path, model)
    assert theirs.config.model_type == kind and len(model.head_scale.unique()) == 8
    same(model, theirs)
    assert ours(tmp_path / 'out').config.position == model.config.position


def test_of_several_sets_of_scales_per_channel_the_one_for_a_length_is_written(tmp_path, cpu):
    model, channels = random_model(vocab_size=257), 1 + torch.rand(2, 4, 8)
    save_model(model, tmp_path / 'last.pt')
    _, info = open_model('last', tmp_path, cpu)
    save_json(tmp_path / 'sets.json', {
        'position_method': 'none', 'rope_scaling': '', 'weights_digest': info['digest'],
        'sets': [{'target_length': T, 'head_scale': (T / 64 * channels).tolist()}
                 for T in (64, 256)]})
    scale = f'--scale={tmp_path}/sets.json'
    _, info = open_model('last', tmp_path, cpu, scale=f'{tmp_path}/sets.json')
    assert info['tuned_length'] == 256
    assert '64, 256' in mistake('extras.convert', f'--out_dir={tmp_path}', scale,
                                f'--folder={tmp_path}/out')
    theirs = written(tmp_path, model, scale, '--target_length=128')
    model.head_scale = 2.5 * channels  # between 1 and 4 times, linear in ln T
    same(model, theirs)
    assert theirs.config.max_position_embeddings == 128


def test_what_no_stock_model_computes_is_not_written(tmp_path):
    for settings in ({'position': 'alibi'}, {'short_conv': 4},
                     {'position': 'rope', 'rope_scaling': 'ntk:2'}):
        with pytest.raises(UserError, match='Only NoPE'):
            written(tmp_path, random_model(vocab_size=257, **settings))
    assert not (tmp_path / 'out').exists()
    model = random_model(position='rope')
    model.head_scale = torch.ones(2, 4, 8)
    with pytest.raises(UserError, match='per channel'):
        convert.fold(model)


def test_a_written_tokenizer_pads_on_the_left_and_is_written_again(tmp_path):
    written(tmp_path, random_model(vocab_size=257))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / 'out')
    assert tokenizer(['def f', 'x'], padding=True)['input_ids'] == [
        [*b'def f'], [256] * 4 + [*b'x']]
    stage('extras.convert', f'--init_from={tmp_path}/out', f'--folder={tmp_path}/b',
          '--format=gguf')
    assert get_tokenizer(f'{tmp_path}/b/model.gguf').encode_ordinary('def f') == [*b'def f']


def test_a_tiktoken_tokenizer_becomes_a_tokenizer_json(tmp_path):
    merged = b'th', b' t', b' th', b'the', b' the', b'12', b'\n\n'
    ranks = {token: i for i, token in enumerate([*(bytes([i]) for i in range(256)), *merged])}
    mine = byte_pairs('mine', ranks, gguf_file.PATTERN, len(ranks))
    (tmp_path / 'tokenizer.json').write_text(hf_folder.tokenizer_json(tokenizer_state(mine)))
    theirs = get_tokenizer(str(tmp_path / 'tokenizer.json'))
    assert theirs.eot_token == mine.eot_token
    for text in "the other  It's 123\r\n\n\n x", '漢字 🙂 <|endoftext|> ñ':
        assert theirs.encode_ordinary(text) == mine.encode_ordinary(text)
        assert theirs.decode(theirs.encode_ordinary(text)) == text
    states = [tokenizer_state(one) for one in (mine, theirs, BYTES)]
    assert encode_alike(*states[:2], np.arange(256)) and not encode_alike(*states[1:], IDX[0])


# ---------------------------------------------------------------------- GGUF

def test_a_gguf_file_of_nope_says_so_and_has_scales_and_gains_in_its_weights(tmp_path, ours):
    model, path = random_model(vocab_size=257), tmp_path / 'out/model.gguf'
    written(tmp_path, model, '--format=gguf', '--target_length=200')
    fields = gguf.GGUFReader(path).fields
    assert not fields['granite.rope.scaling.finetuned'].contents()
    again = ours(path)
    c = again.config
    assert (c.position, c.block_size, c.pretrained_length) == ('none', 200, 32)
    assert torch.all(again.head_scale == 1)
    near(again(IDX), model(IDX), atol=1e-4)


def test_a_gguf_file_keeps_the_extension_of_rope(tmp_path, ours):
    model = random_model(vocab_size=257, position='rope', rope_scaling='yarn:2')
    written(tmp_path, model, '--format=gguf')
    again = ours(tmp_path / 'out/model.gguf')
    assert (again.config.rope_scaling, again.config.block_size) == ('yarn:2', 64)
    near(again(IDX), model(IDX), atol=1e-4)


def gguf_of(model, path, kind='float32'):
    """Write a GGUF file of a model with matrices of this kind."""
    gguf_file.write(path, model, tokenizer_state(BYTES), kind)


def test_a_gguf_file_is_read_as_transformers_reads_it(tmp_path, ours):
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    path = tmp_path / 'model.gguf'
    gguf_of(random_model(vocab_size=300, position='rope', rope_base=500.0, tied=True), path, 'q4_1')
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        **load_gguf_checkpoint(path)['config'])).eval()
    found = load_gguf_checkpoint(path, return_tensors=True, model_to_load=theirs)
    theirs.load_state_dict(found['tensors'], strict=False)
    theirs.tie_weights()
    same(ours(path), theirs)


@pytest.mark.parametrize('kind, expected', [
    ('gpt-2', 'a Ġ Ġ12'), ('llama-bpe', 'a Ġ Ġ 12'), ('smollm', 'a ĠĠ 1 2')])
def test_the_tokenizer_in_a_gguf_file_cuts_text_as_its_kind_says(kind, expected):
    words = [*(chr(byte) for byte in range(33, 127)), 'Ġ', 'ĠĠ', '12', 'Ġ12', '<end>']
    fields = {'model': 'gpt2', 'pre': kind, 'tokens': words, 'merges': ['Ġ Ġ', '1 2', 'Ġ 12'],
              'token_type': [1] * (len(words) - 1) + [3], 'eos_token_id': len(words) - 1,
              'bos_token_id': 0, 'add_bos_token': True}
    state = gguf_file.read_tokenizer('mine', {f'tokenizer.ggml.{name}': value
                                              for name, value in fields.items()})
    tokenizer = get_tokenizer(state)
    assert [words[i] for i in tokenizer.encode_ordinary('a  12')] == expected.split()
    assert tokenizer.start_token == 0 and tokenizer.eot_token == len(words) - 1
    assert len(tokenizer.encode_ordinary('<end>')) == 5  # no end, but text


@pytest.mark.parametrize('digits, kind', [(r'\p{N}{1,3}', 'llama-bpe'), (r'\p{N}', None)])
def test_a_rule_that_cuts_text_is_known_in_the_spelling_of_llama_3(digits, kind):
    rule = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits +
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    cut = pre_tokenizers.Split(tokenizers.Regex(rule), 'isolated')
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({'a': 0, 'b': 1, 'ab': 2}, [('a', 'b')]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, bytes_only])
    assert gguf_file.kind_of(tokenizer) == kind


def test_a_gguf_file_that_cannot_be_read_is_named_in_a_line(tmp_path, ours):
    path, model = tmp_path / 'model.gguf', random_model(vocab_size=257, position='rope')
    gguf_of(model, path)
    whole = path.read_bytes()
    fields = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}
    with pytest.raises(ValueError, match='its expert_count is 32'):
        gguf_file.config_of(fields | {'llama.expert_count': 32}, tied=False)

    for changed, reason in ((whole.replace(b'output_norm', b'rope_freqs3'), 'rope_freqs3'),
                            (whole[:-1000], ''),
                            (whole.replace(b'gpt-2', b'qwen2'), 'is qwen2'),
                            (whole.replace(b'llama', b'gemma'), 'architecture is gemma')):
        path.write_bytes(changed)
        with pytest.raises(UserError, match=f'model.gguf.*{reason}') as caught:
            ours(path)
        assert '\n' not in str(caught.value)
