"""$ python -m pytest tests/test_huggingface.py"""

import dataclasses
import json
import shutil

import pytest
import tiktoken
import torch
from conftest import files_at_most, mistake, random_model, stage

import checkpoint
import huggingface
from corpus import get_tokenizer, tokenizer_from_state, tokenizer_state, tiktoken_encoding, train_bpe
from model import ModelConfig, Transformer
from position import ALiBi

transformers = pytest.importorskip('transformers')
safetensors_torch = pytest.importorskip('safetensors.torch')
tokenizers = pytest.importorskip('tokenizers')
BYTES = tokenizer_state(get_tokenizer('bytes'))
VOCAB = 260
SIZES = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64, bos_token_id=256, eos_token_id=256, pad_token_id=None)


def stock(folder, config, **save):
    """
    A random model of transformers, with norms that are not 1 and attention far from uniform, saved to folder with a
    byte tokenizer. Returns it, in float32 with eager attention.
    """
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation='eager').float().eval()
    for name, p in model.named_parameters():
        if p.dim() == 1:
            torch.nn.init.uniform_(p, 0.5, 1.5)
        elif any(key in name for key in ('q_proj', 'k_proj', 'query_key_value', 'Wqkv', 'c_attn')):
            p.data *= 5
    model.save_pretrained(folder, **save)
    (folder / 'tokenizer.json').write_text(huggingface.tokenizer_json(BYTES), encoding='utf-8')
    return model


def llama(folder, save=None, **changes):
    return stock(folder, transformers.LlamaConfig(**SIZES | changes), **save or {})


def ours(source, position=None):
    state = huggingface.load_folder(str(source), position)
    model = Transformer(ModelConfig(**state['model_config'])).eval()
    model.load_state_dict(state['model'])
    return model


def tokens(length, vocab_size=VOCAB):
    return torch.randint(vocab_size, (2, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def check_equal(model, theirs, length=100):
    """A model behind our calls has the logits of one of transformers, in one pass, in parts over a cache, and as losses."""
    idx = tokens(length, model.config.vocab_size)
    expected = theirs(idx).logits
    assert expected.std() > 0.05
    torch.testing.assert_close(model(idx), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(model(idx, last=3), expected[:, -3:], rtol=0, atol=1e-4)
    losses = -expected.log_softmax(-1)[:, -11:-1].gather(-1, idx[:, -10:, None])[..., 0]
    torch.testing.assert_close(model(idx[:, :-1], idx[:, -10:]), losses if model.config.position != 'rope' or not
                               model.config.rope_scaling.startswith('dynamic') else model_losses(model, idx),
                               rtol=0, atol=1e-4)
    cache = model.new_cache(2, length)
    parts = [model(part, cache=cache) for part in idx.split([length - 12, 9, 1, 1, 1], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=0, atol=1e-4)
    assert cache[0].length == length
