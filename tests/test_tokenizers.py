"""
Tokenizers.

$ python -m pytest tests/test_tokenizers.py
"""

import argparse
import json
import math
import typing
from pathlib import Path

import pytest
import torch
from conftest import refuses

from lib.tokenizers import (
    PATTERN,
    cut,
    get_tokenizer,
    known_ids,
    parse_ranks,
    start_token,
    tiktoken_encoding,
    tokenizer_digest,
    tokenizer_from_state,
    tokenizer_state,
    train_bpe,
)

CODE = Path(argparse.__file__).read_text(encoding='utf-8')
UNICODE = ("Ärger über 12345 Grüße, it's WE'LL ſ's naïve — „Zitat“ 你好，世界。今天天气很好\r\n\r\n"
           '  \tΑθήνα שלום नमस्ते 🙂👩‍👩‍👧 ½ Ⅷ ٣٤٥\u00a0\u2003x\u0085y\x1c z\n\n\n   end  \n')


@pytest.fixture(scope='module')
def bpe(tmp_path_factory):
    path = tmp_path_factory.mktemp('bpe') / 'small.tiktoken'
    return train_bpe([CODE, UNICODE * 20], 1000, path), path


def test_trained_bpe_encodes_exactly_like_tokenizers(bpe):
    tokenizers = pytest.importorskip('tokenizers')
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = tokenizers.pre_tokenizers.Split(tokenizers.Regex(PATTERN), 'isolated')
    peer = tokenizers.Tokenizer(tokenizers.models.BPE())
    peer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([words, byte_level])
    peer.decoder = tokenizers.decoders.ByteLevel()
    peer.train_from_iterator([CODE, UNICODE * 20], tokenizers.trainers.BpeTrainer(
        vocab_size=999, initial_alphabet=byte_level.alphabet(), show_progress=False))
    encoding, _ = bpe
    for text in (CODE, UNICODE, Path(typing.__file__).read_text(encoding='utf-8')):
        # Their ids of single bytes are in another order, so lengths of tokens are compared.
        theirs = [len(token) for token in peer.encode(text).tokens]  # a character is a byte
        ours = [encoding.decode_single_token_bytes(i) for i in encoding.encode_ordinary(text)]
        assert [len(token) for token in ours] == theirs
        assert b''.join(ours) == text.encode()


def test_bpe_is_trained_deterministically_and_its_ids_begin_with_the_bytes(bpe, tmp_path):
    encoding, path = bpe
    again = train_bpe([CODE, UNICODE * 20], 1000, tmp_path / 'again.tiktoken')
    assert (tmp_path / 'again.tiktoken').read_text() == path.read_text()
    assert tokenizer_digest(tokenizer_state(again)) == tokenizer_digest(tokenizer_state(encoding))
    for one, eot in (encoding, 999), (get_tokenizer('bytes'), 256):
        assert (one.n_vocab, one.eot_token) == (eot + 1, eot)
        assert one.decode_bytes(range(256)) == bytes(range(256))
        assert one.decode(one.encode_ordinary(UNICODE)) == UNICODE
        assert eot not in one.encode_ordinary('<|endoftext|>')


# A space is put before each text, spaces are written as ▁, <s> is added.
LLAMA = '''{
"version": "1.0", "truncation":
    {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0},
"normalizer": {"type": "Sequence", "normalizers": [
    {"type": "Prepend", "prepend": "▁"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
"post_processor": {"type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
"decoder": {"type": "Sequence", "decoders": [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
"added_tokens": [{"id": 0, "content": "<unk>", "special": true, SINGLE},
    {"id": 1, "content": "<s>", "special": true, SINGLE},
    {"id": EOT_ID, "content": "EOS", "special": true, SINGLE}],
"model": {"type": "BPE", "unk_token": "<unk>", "merges": [["▁", "a"], ["b", "c"]],
    "vocab": VOCAB}
}'''.replace('SINGLE', '''"single_word": false, "lstrip": false, "rstrip": false,
    "normalized": false''')


def hf_json(folder, eos='</s>', config=None, eot=900):
    """
    A tokenizer.json of the Llama kind. config: text of tokenizer_config.json; eot: the id of `eos`.
    """
    pytest.importorskip('tokenizers')
    alphabet = sorted(set(UNICODE.replace(' ', '▁') + 'abc<>/s▁'))
    vocab = {token: i for i, token in enumerate(['<unk>', '<s>', *alphabet, '▁a', 'bc'])}
    text = LLAMA.replace('VOCAB', json.dumps(vocab | {eos: eot})).replace('EOT_ID', str(eot))
    folder.mkdir(exist_ok=True)
    (folder / 'tokenizer.json').write_text(text.replace('EOS', eos), encoding='utf-8')
    if config:
        (folder / 'tokenizer_config.json').write_text(config)
    return str(folder / 'tokenizer.json')


def test_hugging_face_tokenizer_adds_and_cuts_nothing_and_reads_special_tokens_as_text(tmp_path):
    encoding, text = get_tokenizer(hf_json(tmp_path)), 'a bc</s> a bc a bc'
    assert (encoding.eot_token, encoding.n_vocab, start_token(encoding)) == (900, 901, 1)
    assert start_token(get_tokenizer('bytes')) == 256
    ids = encoding.encode_ordinary(text)
    assert 1 not in ids and 900 not in ids and len(ids) > 5
    assert encoding.decode(ids) == text == encoding.decode_bytes(ids).decode()
    assert encoding.decode([1, *ids, 900]) == text  # these are no text
    assert encoding.decode_bytes([900]) == b'</s>'
    replaced = encoding.encode_ordinary('a \N{REPLACEMENT CHARACTER} bc')
    assert encoding.encode_ordinary('a \udc00 bc') == replaced
    for eos, config in (('<|end|>', '{"eos_token": "<|end|>"}'),
                        ('<|end|>', '{"eos_token": {"content": "<|end|>"}}'), ('<eos>', '{}')):
        assert get_tokenizer(hf_json(tmp_path, eos, config)).eot_token == 900


def test_an_end_token_that_the_vocabulary_lacks_is_refused(tmp_path):
    hf_json(tmp_path, config='{"eos_token": "<|im_end|>"}')
    refuses('no end-of-text token <|im_end|>', get_tokenizer, str(tmp_path / 'tokenizer.json'))


def test_ids_that_a_tokenizer_does_not_have_are_left_out():
    encoding = get_tokenizer('bytes')
    assert known_ids(encoding, [97, 98]) == [97, 98]
    assert known_ids(encoding, [97, 300, 98]) == [97, 98]


def test_tokenizer_is_rebuilt_from_a_checkpoint_without_its_files(bpe, tmp_path):
    for encoding in get_tokenizer('bytes'), bpe[0], get_tokenizer(hf_json(tmp_path)):
        state = tokenizer_state(encoding)
        torch.save(state, tmp_path / 'last.pt')
        loaded = torch.load(tmp_path / 'last.pt', weights_only=True)
        again = tokenizer_from_state(loaded)
        assert again.encode_ordinary(UNICODE) == encoding.encode_ordinary(UNICODE)
        for name in 'name', 'n_vocab', 'eot_token':
            assert getattr(again, name) == getattr(encoding, name)
        assert tokenizer_digest(loaded) == tokenizer_digest(state | {'name': 'other'})
        assert tokenizer_digest(loaded) != tokenizer_digest(state | {'text': state['text'] + ' '})


def test_wrong_tokenizers_are_refused_with_a_reason(bpe, tmp_path):
    refuses('twice', parse_ranks, bpe[1].read_text() + 'AAAA 7', 'x')
    refuses('eos_token', get_tokenizer, hf_json(tmp_path, '<|end|>'))
    for text in '[' * 200_000, '{"eos_token": [1]}', '{"eos_token": 5}', '[]':
        refuses('tokenizer_config.json', get_tokenizer, hf_json(tmp_path, config=text))


@pytest.mark.parametrize('limit', [500, 5000])
def test_pieces_of_a_long_document_have_the_tokens_of_the_whole(bpe, limit):
    from tiktoken_ext.openai_public import r50k_pat_str
    ranks = parse_ranks(bpe[1].read_text(), 'small')
    text = (CODE[:30000] + UNICODE) * 3
    parts = [text[i:i + 777] for i in range(0, len(text), 777)]
    pieces, last = zip(*cut(text, limit))
    assert list(zip(pieces, last)) == list(cut(parts, limit))  # it comes whole or in parts
    assert last == (False,) * (len(last) - 1) + (True,)
    for encoding in bpe[0], tiktoken_encoding('like gpt2', ranks, r50k_pat_str, len(ranks)):
        ids = [i for piece in pieces for i in encoding.encode_ordinary(piece)]
        assert ids == encoding.encode_ordinary(text)
    assert ''.join(piece for piece, _ in cut(list('x' * 1001), 100)) == 'x' * 1001
    assert list(cut(['', ''], 100)) == []
    assert list(cut(iter(parts), math.inf)) == [(text, True)]
