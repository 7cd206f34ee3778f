"""$ python -m pytest tests/test_export.py       (export.py, and GGUF files of lib/exports.py)"""

import json

import pytest
import torch
from conftest import (
    mistake,
    near,
    on,
    random_model,
    read,
    refuses,
    scale_set,
    stage_here,
    tokens,
)

from lib.answers import save_json
from lib.exports import save_gguf
from lib.huggingface import load_folder
from lib.scales import save_scale
from lib.tokenizers import get_tokenizer, tokenizer_state, train_bpe

gguf = pytest.importorskip('gguf')
transformers = pytest.importorskip('transformers')

# {key of a GGUF file, without the architecture: its value} for random_model().
SIZES = {'context_length': 128, 'embedding_length': 32, 'block_count': 2, 'feed_forward_length': 64,
         'attention.head_count': 4, 'attention.head_count_kv': 2, 'rope.dimension_count': 8,
         'vocab_size': 61, 'tokenizer.ggml.model': 'none'}
NOPE = {'general.architecture': 'granite', 'rope.scaling.finetuned': False, 'logit_scale': 1.0,
        'residual_scale': 1.0, 'embedding_scale': 1.0}
YARN = {'general.architecture': 'llama', 'rope.scaling.type': 'yarn', 'rope.scaling.factor': 4.0,
        'rope.scaling.original_context_length': 32}
# {our weight: the tensors of a GGUF file that it consists of}
TENSORS = {'embed': ['token_embd'], 'norm': ['output_norm'], 'head': ['output']}
for i in '01':
    TENSORS |= {f'blocks.{i}.{ours}': [f'blk.{i}.{name}' for name in names.split()]
                for ours, names in {
                    'attn_norm': 'attn_norm', 'attn.qkv': 'attn_q attn_k attn_v',
                    'attn.out': 'attn_output', 'mlp_norm': 'ffn_norm',
                    'mlp.gate_up': 'ffn_gate ffn_up', 'mlp.out': 'ffn_down'}.items()}


def saved(path, model, tokenizer=None, dtype=torch.float32):
    """The keys, without the architecture, and the tensors of a written GGUF file."""
    save_gguf(path, model, tokenizer, dtype, 128)
    reader = gguf.GGUFReader(path)
    kind = reader.get_field('general.architecture').contents()
    keys = {name.removeprefix(f'{kind}.'): field.contents()
            for name, field in reader.fields.items()}
    return keys, {tensor.name.removesuffix('.weight'): tensor for tensor in reader.tensors}


def weight_of(tensor):
    return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())


@pytest.mark.parametrize('tied', [False, True])
def test_a_gguf_file_of_nope_has_our_weights_and_no_rope(tmp_path, tied):
    model, again = random_model(tied=tied), random_model(seed=1, tied=tied)
    keys, tensors = saved(tmp_path / 'model.gguf', model)
    assert keys == keys | SIZES | NOPE and ('output' in tensors) != tied
    near(keys['attention.scale'], 8 ** -0.5, 1e-7)
    near(keys['attention.layer_norm_rms_epsilon'], model.config.norm_eps, 1e-9)
    weights = {f'{ours}.weight': torch.cat([weight_of(tensors[name]) for name in names])
               for ours, names in TENSORS.items() if ours != 'head' or not tied}
    again.load_state_dict(weights, strict=False)
    for block in again.blocks:  # the matrices contain them
        block.attn.head_scale.data.fill_(1)
        block.attn.head_gain.data.fill_(1)
    near(again(tokens(1, 100)), model(tokens(1, 100)), 1e-4)


@pytest.mark.parametrize('changes', [{'rope_base': 5000.0}, {'rope_scaling': 'ntk:4'}], ids=str)
def test_transformers_reads_a_gguf_file_of_rope(tmp_path, changes):
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    model = random_model(position='rope', **changes)
    keys, _ = saved(tmp_path / 'model.gguf', model)
    assert keys == keys | SIZES
    config = load_gguf_checkpoint(tmp_path / 'model.gguf')['config']
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()
    theirs.load_state_dict(load_gguf_checkpoint(tmp_path / 'model.gguf', return_tensors=True,
                                                model_to_load=theirs)['tensors'])
    near(theirs(tokens(1, 100)).logits, model(tokens(1, 100)), 1e-4)


@pytest.mark.parametrize('scaling, changes', [
    ('yarn:4', {}), ('pi:4', {'rope.scaling.type': 'linear'})])
def test_extensions_of_rope_are_keys_of_a_gguf_file(tmp_path, scaling, changes):
    keys, _ = saved(tmp_path / 'x', random_model(position='rope', rope_scaling=scaling))
    assert keys == keys | SIZES | YARN | changes


def test_an_extended_model_names_the_length_of_its_first_training(tmp_path):
    model = random_model(position='rope', rope_scaling='yarn:4', block_size=128,
                         pretrained_length=32)
    keys, _ = saved(tmp_path / 'x', model)
    assert keys == keys | SIZES | YARN


@pytest.mark.parametrize('dtype, short', [(torch.float16, 'F16'), (torch.bfloat16, 'BF16')])
def test_matrices_of_a_gguf_file_are_rounded_and_vectors_are_not(tmp_path, dtype, short):
    model = random_model()
    _, tensors = saved(tmp_path / 'model.gguf', model, dtype=dtype)
    assert tensors['blk.1.ffn_down'].tensor_type.name == short
    near(weight_of(tensors['blk.1.ffn_down']), model.blocks[1].mlp.out.weight.to(dtype))
    near(weight_of(tensors['output_norm']), model.norm.weight)


def test_a_gguf_file_carries_the_tokenizer(tmp_path):
    model = random_model(vocab_size=303)
    bpe = train_bpe(['the weather then, the other one ' * 50], 300, tmp_path / 'bpe.tiktoken')
    for encoding, splitter in ((get_tokenizer('bytes'), 'gpt-2'), (bpe, 'llama-bpe')):
        state = tokenizer_state(encoding)
        keys, _ = saved(tmp_path / f'{encoding.name}.gguf', model, state)
        texts, types = keys['tokenizer.ggml.tokens'], keys['tokenizer.ggml.token_type']
        assert keys['tokenizer.ggml.pre'] == splitter
        assert len(texts) == len(types) == 303 and types[-1] == gguf.TokenType.UNUSED
        assert texts[ord('a')] == 'a' and texts[ord(' ')] == 'Ġ'
        assert keys['tokenizer.ggml.eos_token_id'] == encoding.eot_token
        assert types[encoding.eot_token] == gguf.TokenType.CONTROL
    assert bpe.encode_ordinary(' the') == [texts.index('Ġthe')]
    assert 'Ġthe' in [merge.replace(' ', '') for merge in keys['tokenizer.ggml.merges']]
    refuses('ids_only', saved, tmp_path / 'x', model, state | {'pattern': r'\w+|\W+'})


@pytest.fixture
def measured(tmp_path, tiny_run):
    """The result of eval_ppl.py in tmp_path, of the model of tiny_run with a scale."""
    stage_here('eval_ppl', *on(tiny_run, tmp_path, '--scale=1.5 --lengths=[64] --max_windows=2'))
    return read(tmp_path / 'eval_ppl_scale1.5.json')


def test_an_export_has_a_card_with_what_was_measured(tmp_path, tiny_run, measured):
    row, = measured['rows']
    for name, changes in {'another_model': {'identity': {}, 'rows': [row | {'loss': 9.87}]},
                          'far_repeats': {'rows': [{'kind': 'all', 'loss': 9.87}]}}.items():
        save_json(tmp_path / f'eval_ppl_{name}.json', measured | changes)
    for kind in ('hf', 'gguf'):
        said = stage_here('export', f'--init_from={tiny_run}/last.pt', f'--out_dir={tmp_path}',
                          '--scale=1.5', f'--format={kind}', '--license=cc0-1.0')
        assert f'{tmp_path}/{kind}/README.md' in said
        card = (tmp_path / kind / 'README.md').read_text(encoding='utf-8')
        assert card.startswith('---\nlicense: cc0-1.0\n')
        for text in (f"| 64 | {row['loss']} ± {row['standard_error']} | {row['gain']} |",
                     'Between 1.500 and 1.500', '--scale=1.5', '| steps | 20 |', 'width 32',
                     '| training length L | 32 tokens |', '| learning_rate | 0.01 |',
                     f"('{tmp_path}/{kind}'"):
            assert text in card
        assert '9.87' not in card and 'not known' not in card
    assert (tmp_path / 'gguf/model.gguf').stat().st_size > 10000


def test_a_model_that_does_not_know_its_training_is_exported_again(tmp_path, tiny_run):
    on = f'--out_dir={tmp_path}', '--scale=1.5'
    stage_here('export', f'--init_from={tiny_run}/last.pt', f'--folder={tmp_path}/a', *on)
    stage_here('export', f'--init_from={tmp_path}/a', f'--folder={tmp_path}/b', on[0])
    card = (tmp_path / 'b/README.md').read_text(encoding='utf-8')
    assert 'nats per token | not known' in card and 'adds no scales to the weights' in card
    first, second = (load_folder(f'{tmp_path}/{name}')['model'] for name in 'ab')
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_card_of_a_set_has_only_the_losses_of_its_length(tmp_path, tiny_run, tiny):
    path = tmp_path / 'sets.json'
    save_scale(path, tiny[1], {T: scale_set([[1.5] * 4] * 2) for T in (64, 128)}, 'head')
    scale = f'--scale={path}'
    stage_here('eval_ppl', *on(tiny_run, tmp_path, f'{scale} --lengths=[64,128] --max_windows=2'))
    stage_here('export', f'--init_from={tiny_run}/last.pt', f'--out_dir={tmp_path}', scale,
               '--target_length=64')
    card = (tmp_path / 'hf/README.md').read_text(encoding='utf-8')
    assert '| 64 | ' in card and '| 128 | ' not in card


def test_a_damaged_result_beside_the_model_is_named(tmp_path, tiny_run, measured):
    path = tmp_path / 'eval_ppl_scale1.5.json'
    for text in ('{cut', '[]', '{"identity": IDENTITY}',
                 '{"identity": IDENTITY, "rows": [{"length": 64}]}'):
        path.write_text(text.replace('IDENTITY', json.dumps(measured['identity'])))
        line = mistake('export', f'--init_from={tiny_run}/last.pt', f'--out_dir={tmp_path}',
                       '--scale=1.5')
        assert f'{path} is not a result' in line and not (tmp_path / 'hf').exists()
