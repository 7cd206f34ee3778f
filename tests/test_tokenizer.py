"""
Tokenizers, and the writer of token files.

$ python -m pytest tests/test_tokenizer.py
"""

import argparse
import json
import typing
from pathlib import Path

from configurator import ROOT

import numpy as np
import pytest
import tiktoken
import torch
from tiktoken_ext.openai_public import r50k_pat_str

from data import open_split
from tokenizer import (
    EOT,
    PATTERN,
    HFTokenizer,
    cut,
    encode_documents,
    get_tokenizer,
    split_of,
    start_token,
    tokenizer_for,
    tokenizer_state,
    train_bpe,
    write_dataset,
)

CODE = Path(argparse.__file__).read_text(encoding='utf-8')
UNICODE = ("Ärger über 12345 Grüße, it's WE'LL ſ's naïve — „Zitat“ 你好，世界。今天天气很好\r\n\r\n"
           '  \tΑθήνα שלום नमस्ते 🙂👩‍👩‍👧 ½ Ⅷ ٣٤٥\u00a0\u2003x\u0085y\x1c z\n\n\n   end  \n'
           '<|endoftext|>')
BPE_1024 = ROOT / 'data/code/bpe_1024.tiktoken'


@pytest.fixture(scope='module')
def bpe():
    return train_bpe([CODE, UNICODE * 20], 1000)


def like_tiktoken(encoding, pattern=PATTERN):
    """A tiktoken.Encoding with the merges and the ids of a trained byte-level BPE."""
    # How tokenizer.json writes bytes: each that is not printable gets the next character from 256.
    others = iter(range(256, 512))
    byte_of = {chr(b if chr(b).isprintable() and b != 32 else next(others)): b for b in range(256)}
    vocab = encoding.tokenizer.get_vocab()
    ranks = {bytes(map(byte_of.get, token)): i for token, i in vocab.items() if token != EOT}
    return tiktoken.Encoding('peer', pat_str=pattern, mergeable_ranks=ranks,
                             special_tokens={EOT: vocab[EOT]})


# ---------------------------------------------------------------------- tokenizers

def test_a_trained_bpe_is_exact_on_any_text_and_encodes_like_tiktoken(bpe):
    random, peer = np.random.default_rng(0), like_tiktoken(bpe)
    points = random.choice([*range(0xd800), *range(0xe000, 0x110000)], (200, 50))
    texts = [CODE, UNICODE, Path(typing.__file__).read_text(encoding='utf-8'), ' ' * 5000,
             *(''.join(map(chr, row)) for row in points.tolist())]
    for text, ids in zip(texts, bpe.encode_ordinary_batch(texts)):
        assert ids == peer.encode_ordinary(text) and bpe.eot_token not in ids
        assert bpe.decode(ids) == text and bpe.decode_bytes(ids) == text.encode()
    assert (bpe.n_vocab, bpe.eot_token, bpe.decode_bytes([0])) == (1000, 0, EOT.encode())
    assert tokenizer_for('bpe:1000', [CODE, UNICODE * 20]).text == bpe.text  # it is deterministic


def test_bytes_are_their_own_ids_and_the_merges_of_a_file_are_used():
    one, other = get_tokenizer('bytes'), get_tokenizer(str(BPE_1024))
    assert one.encode_ordinary(UNICODE) == list(UNICODE.encode()) and one.eot_token == 256
    assert other.decode(other.encode_ordinary(UNICODE)) == UNICODE and other.eot_token == 1023
    assert other.encode_ordinary('def main():\n    return 1, "naïve"\n') == [
        487, 329, 795, 40, 316, 258, 327, 32, 49, 44, 293, 110, 97, 195, 175, 372, 535]


# A space is put before each text, spaces are written as ▁, <s> is added, texts are cut to 5 tokens.
LLAMA = {
    'version': '1.0', 'truncation': {'direction': 'Right', 'max_length': 5, 'stride': 0,
                                     'strategy': 'LongestFirst'},
    'normalizer': {'type': 'Sequence', 'normalizers': [
        {'type': 'Prepend', 'prepend': '▁'},
        {'type': 'Replace', 'pattern': {'String': ' '}, 'content': '▁'}]},
    'post_processor': {'type': 'TemplateProcessing', 'pair': [], 'single': [
        {'SpecialToken': {'id': '<s>', 'type_id': 0}}, {'Sequence': {'id': 'A', 'type_id': 0}}],
        'special_tokens': {'<s>': {'id': '<s>', 'ids': [1], 'tokens': ['<s>']}}},
    'decoder': {'type': 'Sequence', 'decoders': [
        {'type': 'Replace', 'pattern': {'String': '▁'}, 'content': ' '}, {'type': 'Fuse'},
        {'type': 'Strip', 'content': ' ', 'start': 1, 'stop': 0}]},
    'added_tokens': [{'id': i, 'content': token, 'special': True, 'single_word': False,
                      'lstrip': False, 'rstrip': False, 'normalized': False}
                     for i, token in ((1, '<s>'), (70_000, '</s>'))],
    'model': {'type': 'BPE', 'merges': [['▁', 'a'], ['b', 'c']], 'vocab': {
        **{token: i for i, token in enumerate(['', '<s>', *'abc<>/s▁', '▁a', 'bc'])},
        '</s>': 70_000}}}


def test_a_tokenizer_json_adds_and_cuts_nothing_and_reads_special_tokens_as_text(tmp_path):
    path, text = tmp_path / 'tokenizer.json', 'a bc</s> a bc a bc'
    path.write_text(json.dumps(LLAMA))
    encoding = get_tokenizer(str(path))
    assert (encoding.eot_token, encoding.n_vocab, start_token(encoding)) == (70_000, 70_001, 1)
    assert start_token(get_tokenizer('bytes')) == 256
    ids = encoding.encode_ordinary(text)
    assert len(ids) > 5 and not {1, 70_000} & {*ids}
    assert encoding.decode([1, *ids, 70_000]) == text == encoding.decode_bytes(ids).decode()
    long = 'a bc ' * 60_000  # in pieces, each would get another space
    assert [*encode_documents(encoding, [long, ''])] == [[*encoding.encode_ordinary(long), 70_000]]
    (tmp_path / 'tokenizer_config.json').write_text('{"eos_token": {"content": "bc"}}')
    assert get_tokenizer(str(path)).eot_token == 11


def test_a_tokenizer_is_rebuilt_from_its_state(bpe, tmp_path):
    checkpoint = torch.load(ROOT / 'lessons/models/none/last.pt', weights_only=True)
    assert checkpoint['tokenizer'] | {'name': ''} == tokenizer_state(
        get_tokenizer(str(BPE_1024))) | {'name': ''}
    write_dataset(tmp_path, bpe, {'train': ['text']})
    for encoding in get_tokenizer('bytes'), get_tokenizer(str(BPE_1024)), bpe:
        again = get_tokenizer(json.loads(json.dumps(tokenizer_state(encoding))))
        assert again.encode_ordinary(UNICODE) == encoding.encode_ordinary(UNICODE)
        assert (again.n_vocab, again.eot_token) == (encoding.n_vocab, encoding.eot_token)
    assert tokenizer_state(get_tokenizer(str(tmp_path))) == tokenizer_state(bpe)  # of a dataset


@pytest.mark.parametrize('change', [
    {'normalizer': {'type': 'Precompiled', 'precompiled_charsmap': 'AAAA'}},  # the library panics
    {'post_processor': LLAMA['post_processor'] | {'special_tokens': {}}},     # here as well
    {'model': None}])
def test_a_tokenizer_json_that_cannot_be_used_ends_in_one_line(change):
    with pytest.raises(SystemExit, match='^x.json cannot be used') as caught:
        HFTokenizer('x.json', json.dumps(LLAMA | change))
    assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(SystemExit, match='eos_token'):
        HFTokenizer('x.json', json.dumps(LLAMA), '<|im_end|>')
    with pytest.raises(SystemExit, match="no tokenizer 'gpt-2'"):
        get_tokenizer('gpt-2')


# ---------------------------------------------------------------------- pieces

def test_pieces_of_a_document_have_the_tokens_of_the_whole(bpe):
    text = (CODE[:30000] + UNICODE) * 3
    for encoding in bpe, like_tiktoken(bpe), like_tiktoken(bpe, r50k_pat_str):
        for limit in 500, 5000:
            pieces = list(cut(text, limit))
            ids = encoding.encode_ordinary_batch(pieces)
            assert sum(ids, []) == encoding.encode_ordinary(text)
            assert all(limit <= len(piece) <= 2 * limit for piece in pieces[:-1])
    assert [*cut('x' * 1001, 100)] == ['x' * 200] * 5 + ['x'] and [*cut('', 100)] == ['']


def test_a_run_of_blanks_of_any_length_is_encoded(bpe):
    text = f'x{" " * 999_999}y'  # tiktoken panics on it whole
    for encoding in (bpe, get_tokenizer('bytes'), get_tokenizer(str(BPE_1024)),
                     like_tiktoken(bpe, r50k_pat_str)):
        [ids] = encode_documents(encoding, [text])
        assert ids[-1] == encoding.eot_token and encoding.decode(ids[:-1]) == text


# ---------------------------------------------------------------------- token files

def test_each_document_is_read_back_and_followed_by_end_of_text(tmp_path, bpe):
    texts, large = ['one', UNICODE, '', 'last'], HFTokenizer('large', json.dumps(LLAMA))
    splits = {'train': texts, 'val': [''], 'test': ['x']}
    for encoding in get_tokenizer('bytes'), bpe, large:
        write_dataset(tmp_path, encoding, splits, made='here')
        tokens, starts, meta = open_split(str(tmp_path), 'train')
        documents = np.split(tokens.tolist(), starts[1:])
        assert [document.tolist() for document in documents] == [
            [*encoding.encode_ordinary(text), encoding.eot_token] for text in texts if text]
        assert tokens.dtype == (np.uint32 if encoding is large else np.uint16)
        assert meta['vocab_size'] == encoding.n_vocab
        assert [*meta['splits']] == ['train', 'test'] and meta['made'] == 'here'


def test_an_interrupted_preparation_leaves_the_old_dataset(tmp_path):
    def interrupted():
        yield 'new text'
        raise KeyboardInterrupt

    write_dataset(tmp_path, get_tokenizer('bytes'), {'train': ['old']})
    with pytest.raises(KeyboardInterrupt):
        write_dataset(tmp_path, get_tokenizer('bytes'), {'train': interrupted()})
    assert bytes(open_split(str(tmp_path), 'train')[0].tolist()[:-1]) == b'old'
    with pytest.raises(SystemExit, match='no text'):
        write_dataset(tmp_path / 'other', get_tokenizer('bytes'), {'train': []})


def test_a_document_stays_in_its_split_in_every_version():
    assert [split_of(f'document {i}', 0.3, 0.3) for i in range(6)] == [
        'val', 'train', 'test', 'val', 'train', 'val']
