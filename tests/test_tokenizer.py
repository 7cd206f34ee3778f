"""
Tokenizers, and the writer of token files.

$ python -m pytest tests/test_tokenizer.py
"""

import argparse
import json
from pathlib import Path

from configurator import ROOT

import numpy as np
import pytest
import tiktoken
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, processors

from data import open_split
from tokenizer import (
    EOT,
    PATTERN,
    HFTokenizer,
    get_tokenizer,
    split_of,
    start_token,
    tokenizer_state,
    write_dataset,
)

CODE = Path(argparse.__file__).read_text(encoding='utf-8')
UNICODE = ("Ärger über 12345 Grüße, it's WE'LL ſ's naïve — „Zitat“ 你好，世界。今天天气很好\r\n\r\n"
           '  \tΑθήνα שלום नमस्ते 🙂👩‍👩‍👧 ½ Ⅷ ٣٤٥\u00a0\u2003x\u0085y\x1c z\n\n\n   end  \n'
           '<|endoftext|>')
BYTES = get_tokenizer('bytes')
FILE = get_tokenizer(str(ROOT / 'data/code/bpe_1024.tiktoken'))


@pytest.fixture(scope='module')
def bpe():
    return get_tokenizer('bpe:1000', [CODE, UNICODE * 20])


# ---------------------------------------------------------------------- tokenizers

def test_a_trained_bpe_is_exact_on_any_text_and_encodes_like_tiktoken(bpe):
    # How tokenizer.json writes bytes: each that is not printable gets the next character from 256.
    others = iter(range(256, 512))
    byte_of = {chr(b if chr(b).isprintable() and b != 32 else next(others)): b for b in range(256)}
    vocab = bpe.tokenizer.get_vocab()
    ranks = {bytes(map(byte_of.get, token)): i for token, i in vocab.items() if token != EOT}
    peer = tiktoken.Encoding('peer', pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    points = ''.join(map(chr, [*range(0xd800), *range(0xe000, 0x110000, 99)]))
    for text in CODE, UNICODE, ' ' * 5000, points:
        ids = bpe.encode_ordinary(text)
        assert ids == peer.encode_ordinary(text) and bpe.eot_token not in ids
        assert bpe.decode(ids) == text
    assert (bpe.n_vocab, bpe.eot_token, bpe.eos) == (1000, 0, EOT)
    again = get_tokenizer('bpe:1000', [CODE, UNICODE * 20])
    assert again.text == bpe.text  # training is deterministic


def test_bytes_are_their_own_ids_and_the_merges_of_a_file_are_used():
    assert BYTES.encode_ordinary(UNICODE) == list(UNICODE.encode()) and BYTES.eot_token == 256
    assert FILE.decode(FILE.encode_ordinary(UNICODE)) == UNICODE and FILE.eot_token == 1023
    assert FILE.encode_ordinary('def main():\n    return 1, "naïve"\n') == [
        487, 329, 795, 40, 316, 258, 327, 32, 49, 44, 293, 110, 97, 195, 175, 372, 535]


def like_llama():
    """A space is put before each text, spaces are ▁, <s> is added, texts are cut to 5 tokens."""
    vocab = {token: i for i, token in enumerate(['', '<s>', *'abc<>/s▁', '▁a', 'bc'])}
    made = Tokenizer(models.BPE(vocab | {'</s>': 70_000}, [('▁', 'a'), ('b', 'c')]))
    made.normalizer = normalizers.Sequence([
        normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
    made.decoder = decoders.Sequence([
        decoders.Replace('▁', ' '), decoders.Fuse(), decoders.Strip(' ', 1, 0)])
    made.post_processor = processors.TemplateProcessing('<s> $A', special_tokens=[('<s>', 1)])
    made.add_special_tokens(['<s>', '</s>'])
    made.enable_truncation(5)
    return made.to_str()


LLAMA = like_llama()


def test_a_tokenizer_json_adds_and_cuts_nothing_and_reads_special_tokens_as_text(tmp_path):
    path, text = tmp_path / 'tokenizer.json', 'a bc</s> a bc a bc'
    path.write_text(LLAMA)
    config = tmp_path / 'tokenizer_config.json'
    config.write_text('{"eos_token": "</s>"}')
    encoding = get_tokenizer(str(path))
    assert (encoding.eot_token, encoding.n_vocab, start_token(encoding)) == (70_000, 70_001, 1)
    ids = encoding.encode_ordinary(text)
    assert len(ids) > 5 and not {1, 70_000} & {*ids}
    assert encoding.decode([1, *ids, 70_000]) == text
    config.write_text('{"eos_token": {"content": "bc"}, "bos_token": "a", "add_bos_token": true}')
    again = get_tokenizer(tokenizer_state(get_tokenizer(str(path))))
    assert (again.eot_token, again.decode([start_token(again)])) == (11, 'a')


def test_a_tokenizer_is_rebuilt_from_its_state(bpe, tmp_path):
    checkpoint = torch.load(ROOT / 'lessons/models/none/last.pt', weights_only=True)
    assert checkpoint['tokenizer'] | {'name': ''} == tokenizer_state(FILE) | {'name': ''}
    write_dataset(tmp_path, bpe, {'train': ['text']})
    for encoding in BYTES, FILE, bpe:
        again = get_tokenizer(json.loads(json.dumps(tokenizer_state(encoding))))
        assert again.encode_ordinary(UNICODE) == encoding.encode_ordinary(UNICODE)
        assert (again.n_vocab, again.eot_token, start_token(again)) == (
            encoding.n_vocab, encoding.eot_token, encoding.eot_token)
    assert tokenizer_state(get_tokenizer(str(tmp_path))) == tokenizer_state(bpe)  # of a dataset


# ---------------------------------------------------------------------- token files

def test_each_document_is_read_back_and_followed_by_end_of_text(tmp_path, bpe):
    texts, large = ['one', UNICODE, '', 'last'], HFTokenizer('large', LLAMA, '</s>')
    splits = {'train': texts, 'val': [''], 'test': ['x']}
    for encoding in BYTES, bpe, large:
        write_dataset(tmp_path, encoding, splits, made='here')
        tokens, starts, meta = open_split(str(tmp_path), 'train')
        documents = np.split(tokens.tolist(), starts[1:])
        assert [document.tolist() for document in documents] == [
            [*encoding.encode_ordinary(text), encoding.eot_token] for text in texts if text]
        assert tokens.dtype == (np.uint32 if encoding is large else np.uint16)
        assert meta['vocab_size'] == encoding.n_vocab
        assert [*meta['splits']] == ['train', 'test'] and meta['made'] == 'here'


def test_a_stopped_run_leaves_the_old_dataset_and_can_go_on(tmp_path):
    def write(texts, **options):
        write_dataset(tmp_path, BYTES, {'train': texts}, **options)

    def stopped(after):
        yield from texts[:after]
        raise KeyboardInterrupt

    def is_there(texts):
        tokens = open_split(str(tmp_path), 'train')[0].astype(np.uint8)  # end-of-text becomes 0
        return tokens.tobytes().decode() == '\0'.join(texts) + '\0'

    texts = [f'text {i}' for i in range(1000)]
    write(['old'])
    for after in 300, 700, 500:
        with pytest.raises(KeyboardInterrupt):
            write(stopped(after), go_on=True)
    assert is_there(['old'])
    write(['new'] * 500 + texts[500:], go_on=True)  # the first 500 are there already
    assert is_there(texts)
    with pytest.raises(KeyboardInterrupt):
        write(stopped(700))
    write(['new'])
    assert is_there(['new'])


def test_a_document_stays_in_its_split_in_every_version():
    assert [split_of(f'document {i}', 0.3, 0.3) for i in range(6)] == [
        'val', 'train', 'test', 'val', 'train', 'val']
