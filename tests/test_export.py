"""$ python -m pytest tests/test_export.py"""

import json
import math

import pytest
import torch
from conftest import mistake, near, on, random_model, read, refuses, stage_here, tokens

import export
from lib.answers import save_json
from lib.tokenizers import get_tokenizer, tokenizer_state, train_bpe

gguf = pytest.importorskip('gguf')
pytest.importorskip('tokenizers')


def field(reader, name):
    return reader.get_field(name).contents()


def rms(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x, base, factor):
    """RoPE as llama.cpp's "norm" kind has it: neighbours (2k, 2k + 1) turn together. (H, T, D)."""
    H, T, D = x.shape
    angle = torch.arange(T).double()[:, None] / factor * base ** (-torch.arange(0, D, 2) / D)
    pairs = torch.view_as_complex(x.reshape(H, T, D // 2, 2)) * torch.exp(1j * angle)
    return torch.view_as_real(pairs).reshape(H, T, D)


def logits_of_file(path, ids):
    """What a GGUF file says, in float64, from its own keys. ids: (T,). Returns (T, V)."""
    reader = gguf.GGUFReader(path)
    weights = {t.name: torch.from_numpy(gguf.dequantize(t.data, t.tensor_type).copy()).double()
               for t in reader.tensors}
    kind = field(reader, 'general.architecture')

    def value(name, default=None):
        found = reader.get_field(f'{kind}.{name}')
        return default if found is None else found.contents()

    H, n_kv = value('attention.head_count'), value('attention.head_count_kv')
    D, eps = value('embedding_length') // H, value('attention.layer_norm_rms_epsilon')
    D = value('rope.dimension_count', D)
    scale = value('attention.scale', D ** -0.5)
    T = len(ids)
    later = torch.ones(T, T, dtype=torch.bool).triu(1)
    x = weights['token_embd.weight'][ids] * value('embedding_scale', 1)
    for i in range(value('block_count')):
        own = {name.removeprefix(f'blk.{i}.'): w for name, w in weights.items()}
        y = rms(x, own['attn_norm.weight'], eps)
        q, k, v = ((y @ own[f'attn_{part}.weight'].T).view(T, n, D).transpose(0, 1)
                   for part, n in zip('qkv', (H, n_kv, n_kv)))
        if value('rope.scaling.finetuned', True):
            q, k = (turned(z, value('rope.freq_base', 10000.0), value('rope.scaling.factor', 1))
                    for z in (q, k))
        k, v = (z.repeat_interleave(H // n_kv, dim=0) for z in (k, v))
        scores = (q @ k.mT * scale).masked_fill(later, -math.inf)
        y = (scores.softmax(-1) @ v).transpose(0, 1).reshape(T, -1)
        residual = value('residual_scale', 1)
        x = x + y @ own['attn_output.weight'].T * residual
        y = rms(x, own['ffn_norm.weight'], eps)
        gate = y @ own['ffn_gate.weight'].T
        y = gate * torch.sigmoid(gate) * (y @ own['ffn_up.weight'].T)
        x = x + y @ own['ffn_down.weight'].T * residual
    output = weights.get('output.weight', weights['token_embd.weight'])
    return rms(x, weights['output_norm.weight'], eps) @ output.T / value('logit_scale', 1)


@pytest.mark.parametrize('changes', [
    {}, {'tied': True}, {'position': 'rope', 'rope_base': 5000.0},
    {'position': 'rope', 'rope_scaling': 'pi:4'}, {'position': 'rope', 'rope_scaling': 'ntk:4'}],
    ids=str)
def test_a_gguf_file_says_what_our_model_computes(tmp_path, changes):
    model, ids = random_model(vocab_size=61, **changes), tokens(1, 100)
    export.save_gguf(tmp_path / 'model.gguf', model, None, torch.float32, 128)
    near(logits_of_file(tmp_path / 'model.gguf', ids[0]), model(ids)[0].double(), 1e-4)
    reader = gguf.GGUFReader(tmp_path / 'model.gguf')
    name = 'llama' if 'position' in changes else 'granite'
    assert field(reader, 'general.architecture') == name
    assert field(reader, f'{name}.context_length') == 128
    if name == 'granite':
        assert field(reader, 'granite.rope.scaling.finetuned') is False
    assert field(reader, 'tokenizer.ggml.model') == 'none'


def test_yarn_is_written_and_what_llama_cpp_has_not_is_refused(tmp_path):
    model = random_model(position='rope', rope_scaling='yarn:4')
    export.save_gguf(tmp_path / 'yarn.gguf', model, None, torch.float32, 0)
    reader = gguf.GGUFReader(tmp_path / 'yarn.gguf')
    scaling = {name: field(reader, f'llama.rope.scaling.{name}')
               for name in ('type', 'factor', 'original_context_length')}
    assert scaling == {'type': 'yarn', 'factor': 4.0, 'original_context_length': 32}
    for named, changes in (('dynamic_ntk', {'position': 'rope', 'rope_scaling': 'dynamic_ntk:2'}),
                           ('rope,none', {'position': 'rope,none'}),
                           ('alibi', {'position': 'alibi'})):
        refuses(named, export.save_gguf, tmp_path / 'x', random_model(**changes), None,
                torch.float32, 0)


@pytest.mark.parametrize('dtype, short', [
    (torch.float32, 'F32'), (torch.float16, 'F16'), (torch.bfloat16, 'BF16')])
def test_matrices_of_a_gguf_file_are_rounded_once_and_vectors_stay(tmp_path, dtype, short):
    model = random_model()
    export.save_gguf(tmp_path / 'model.gguf', model, None, dtype, 0)
    block = model.blocks[1]
    q = block.attn.qkv.weight[:32] * block.attn.head_scale.repeat_interleave(8, dim=0)
    expected = {'blk.1.attn_q.weight': (short, q.to(dtype)),
                'blk.1.ffn_down.weight': (short, block.mlp.out.weight.to(dtype)),
                'output_norm.weight': ('F32', model.norm.weight)}
    for tensor in gguf.GGUFReader(tmp_path / 'model.gguf').tensors:
        kind, weight = expected.pop(tensor.name, (None, None))
        if kind:
            assert tensor.tensor_type.name == kind
            near(gguf.dequantize(tensor.data, tensor.tensor_type), weight)
    assert not expected


def test_a_gguf_file_carries_the_tokenizer(tmp_path):
    bpe = train_bpe(['the weather then, the other one ' * 50], 300, tmp_path / 'bpe.tiktoken')
    for encoding, splitter in ((get_tokenizer('bytes'), 'gpt-2'), (bpe, 'llama-bpe')):
        path = tmp_path / f'{encoding.name}.gguf'
        model = random_model(vocab_size=encoding.n_vocab + 3)
        export.save_gguf(path, model, tokenizer_state(encoding), torch.float32, 0)
        reader = gguf.GGUFReader(path)
        assert field(reader, 'tokenizer.ggml.pre') == splitter
        texts = field(reader, 'tokenizer.ggml.tokens')
        types = field(reader, 'tokenizer.ggml.token_type')
        assert len(texts) == len(types) == model.config.vocab_size
        assert texts[ord('a')] == 'a' and texts[ord(' ')] == 'Ġ'
        end = field(reader, 'tokenizer.ggml.eos_token_id')
        assert end == encoding.eot_token and types[end] == gguf.TokenType.CONTROL
        assert types[-1] == gguf.TokenType.UNUSED
    the = texts.index('Ġthe')
    assert bpe.encode_ordinary(' the') == [the]
    assert any(''.join(merge.split()) == 'Ġthe' for merge in field(reader, 'tokenizer.ggml.merges'))
    own = tokenizer_state(bpe) | {'pattern': r'\w+|\W+'}
    refuses('ids_only', export.save_gguf, tmp_path / 'x', model, own, torch.float32, 0)


def test_an_export_has_a_card_with_what_was_measured(tmp_path, tiny_run):
    measured = {}
    for name, scale in (('_scale1.5', '--scale=1.5'), ('', '--label=')):
        stage_here('eval_ppl', f'--out_dir={tiny_run}', scale, '--lengths=[64]', '--max_windows=4',
                   '--compile=False')
        row, = json.loads((tiny_run / f'eval_ppl{name}.json').read_text())['rows']
        measured[name] = f"| 64 | {row['loss']} ± {row['standard_error']} | {row['gain']} |"
    save_json(tiny_run / 'eval_ppl_table.json', {'rows': []})
    repeats = json.loads((tiny_run / 'eval_ppl_scale1.5.json').read_text())
    repeats['rows'] = [{'kind': 'all', 'loss': 9.0, 'gain': -1.0}]
    save_json(tiny_run / 'eval_ppl_repeat_scale1.5.json', repeats)
    try:
        for kind in ('hf', 'gguf'):
            said = stage_here('export', f'--out_dir={tiny_run}', f'--folder={tmp_path}/{kind}',
                              '--scale=1.5', f'--format={kind}', '--license=cc0-1.0')
            assert f'{tmp_path}/{kind}/README.md' in said
            card = (tmp_path / kind / 'README.md').read_text(encoding='utf-8')
            assert card.startswith('---\nlicense: cc0-1.0\n')
            assert measured['_scale1.5'] in card and measured[''] not in card
            assert 'Between 1.500 and 1.500' in card and '--scale=1.5' in card
            assert '| steps | 20 |' in card and '| training length L | 32 tokens |' in card
            assert '| learning_rate | 0.01 |' in card and 'not known' not in card
    finally:
        for path in tiny_run.glob('eval_ppl*'):
            path.unlink()
    assert (tmp_path / 'gguf/model.gguf').stat().st_size > 10000
    assert json.loads((tmp_path / 'hf/config.json').read_text())['model_type'] == 'granitemoehybrid'


@pytest.mark.parametrize('text', ['{cut', '[]', '{"identity": IDENTITY}',
                                  '{"identity": IDENTITY, "rows": [{"length": 64}]}'])
def test_a_damaged_result_beside_the_model_is_named(tmp_path, tiny_run, text):
    stage_here('eval_ppl', *on(tiny_run, tmp_path, '--lengths=[32] --max_windows=2'))
    identity = json.dumps(read(tmp_path / 'eval_ppl.json')['identity'])
    (tmp_path / 'eval_ppl.json').write_text(text.replace('IDENTITY', identity))
    line = mistake('export', f'--init_from={tiny_run}/last.pt', f'--out_dir={tmp_path}')
    assert f'{tmp_path}/eval_ppl.json is not a result' in line
    assert not (tmp_path / 'hf').exists()


def test_an_unknown_format_is_refused(tiny_run):
    assert "format is 'onnx'" in mistake('export', f'--out_dir={tiny_run}', '--format=onnx')
