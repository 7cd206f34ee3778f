"""
Tokenizers, token files and the sampling of windows.

$ python -m pytest tests/test_tokens.py
"""

import argparse
import json
import math
import typing
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import contents, flip_a_bit, read, refuses

from lib import tokens
from lib.tokens import (
    PATTERN,
    SLOTS,
    Windows,
    cut,
    documents,
    get_tokenizer,
    open_tokens,
    parse_ranks,
    shuffled,
    split_by_hash,
    start_token,
    tiktoken_encoding,
    tokenizer_digest,
    tokenizer_from_state,
    tokenizer_state,
    train_bpe,
    write_corpus,
)

CODE = Path(argparse.__file__).read_text(encoding='utf-8')
UNICODE = ("Ärger über 12345 Grüße, it's WE'LL ſ's naïve — „Zitat“ 你好，世界。今天天气很好\r\n\r\n"
           '  \tΑθήνα שלום नमस्ते 🙂👩‍👩‍👧 ½ Ⅷ ٣٤٥\u00a0\u2003x\u0085y\x1c z\n\n\n   end  \n')
DAMAGED = 'meta.json or tokenizer_state.json is not whole'


@pytest.fixture(scope='module')
def bpe(tmp_path_factory):
    path = tmp_path_factory.mktemp('bpe') / 'small.tiktoken'
    return train_bpe([CODE, UNICODE * 20], 1000, path), path


def write(folder, texts, name='bytes'):
    write_corpus(folder, get_tokenizer(name), {'train': texts, 'val': texts})
    return str(folder)


# ---------------------------------------------------------------------- tokenizers

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


# ---------------------------------------------------------------------- token files

def test_each_document_is_read_back_and_followed_by_end_of_text(tmp_path):
    texts = ['one', UNICODE, '', 'half a pair \ud800.', ['in ', 'two parts']]
    data = open_tokens(write(tmp_path, texts), 'val')
    back = [bytes(data.tokens[start:end].tolist()).decode() for start, end in documents(data)]
    assert back == ['one', UNICODE, 'half a pair \N{REPLACEMENT CHARACTER}.', 'in two parts']
    assert [data.tokens[end] for _, end in documents(data)] == [256] * 4
    assert data.starts.dtype == np.int64 and data.tokens.dtype == np.uint16
    assert data.meta['splits']['val']['tokens'] == len(data.tokens)


def test_large_vocabularies_are_stored_in_32_bits(tmp_path):
    encoding = get_tokenizer(hf_json(tmp_path, eot=70_000))
    write_corpus(tmp_path / 'data', encoding, {'train': ['a']})
    tokens = open_tokens(str(tmp_path / 'data'), 'train').tokens
    assert tokens.dtype == np.uint32 and tokens.tolist() == [*encoding.encode_ordinary('a'), 70_000]


def test_several_threads_write_what_one_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, 'MIB', 1000)  # so that there are many chunks
    texts = [f'line {i} of some text\n' * 50 for i in range(99)]
    for encoding in get_tokenizer('bytes'), get_tokenizer(hf_json(tmp_path)):
        for workers in 1, 3:
            write_corpus(tmp_path / str(workers), encoding, {'train': texts}, workers=workers)
        assert contents(tmp_path / '1') == contents(tmp_path / '3')
        ends = np.cumsum([len(encoding.encode_ordinary(text)) + 1 for text in texts])
        assert open_tokens(str(tmp_path / '3'), 'train').starts.tolist() == [0, *ends[:-1]]


def test_interrupted_preparation_leaves_the_old_dataset_and_no_other_file(tmp_path):
    def failing():
        yield 'new text'
        raise KeyboardInterrupt

    folder = Path(write(tmp_path / 'data', ['old text']))
    before = contents(folder)
    with pytest.raises(KeyboardInterrupt):
        write(folder, failing())
    assert contents(folder) == before
    refuses('train split', write, tmp_path / 'other', [''])
    assert not contents(tmp_path / 'other')


def test_preparing_again_leaves_no_stale_split_and_does_not_look_done_half_way(tmp_path):
    write(tmp_path, ['old'])
    write_corpus(tmp_path, get_tokenizer('bytes'), {'train': ['new']})
    refuses('no split val', open_tokens, str(tmp_path), 'val')
    assert not (tmp_path / 'val.bin').exists()
    (tmp_path / 'val_starts.bin').mkdir()  # cannot be replaced by a file
    with pytest.raises(OSError):
        write(tmp_path, ['newer'])
    assert not (tmp_path / 'meta.json').exists()


@pytest.fixture
def prepared(tmp_path):
    return Path(write(tmp_path, ['some text', 'and more', 'of it']))


def refused(named, folder):
    refuses(named, open_tokens, str(folder), 'train')


@pytest.mark.parametrize('name', ['train.bin', 'train_starts.bin'])
def test_any_change_of_a_token_file_is_refused(prepared, name):
    path, whole = prepared / name, (prepared / name).read_bytes()
    for content in whole[:-2], whole + b'xx':
        path.write_bytes(content)
        refused(name, prepared)
    for place in range(len(whole)):
        path.write_bytes(whole)
        flip_a_bit(path, place)
        refused(name, prepared)


def edit_meta(folder, **changes):
    meta = read(folder / 'meta.json') | changes
    meta = {key: value for key, value in meta.items() if value != 'gone'}
    (folder / 'meta.json').write_text(json.dumps(meta))


def test_large_file_is_read_through_only_where_that_is_asked_for(prepared, monkeypatch):
    monkeypatch.setattr(tokens, 'CHECKED_AT_OPEN', 8)
    path = prepared / 'train.bin'
    path.write_bytes(bytes(path.stat().st_size))
    Windows(str(prepared), 'train', 3)
    refuses('train.bin', Windows, str(prepared), 'train', 3, check=True)


@pytest.mark.parametrize('changes', '''
{"splits": null}
{"splits": {"train": null}}
{"splits": {"train": {"tokens": 24}}}
{"tokenizer_digest": null}
{"vocab_size": "257"}
{"dtype": "float16"}
{"checksums": ["x"]}
{"checksums": {}}
{"checksums": "gone"}
'''.split('\n')[1:-1])
def test_entry_of_the_wrong_kind_in_meta_json_is_refused(prepared, changes):
    edit_meta(prepared, **json.loads(changes))
    refused(DAMAGED, prepared)


def test_a_model_gets_the_vocabulary_of_the_tokenizer_whatever_meta_json_says(prepared):
    edit_meta(prepared, vocab_size=5, tokenizer='gone')
    assert Windows(str(prepared), 'train', 3).vocab_size == 257


def test_what_is_damaged_or_not_prepared_is_named_and_what_cannot_be_read_is_not(prepared):
    refused('nonsense', 'nonsense')
    for name in 'meta.json', 'tokenizer_state.json':
        whole = (prepared / name).read_text()
        for text in whole[:-9], whole.replace('e', 'f'), '[]', '[' * 200_000:
            (prepared / name).write_text(text)
            refused(DAMAGED, prepared)
        (prepared / name).write_text(whole)
    (prepared / 'tokenizer_state.json').unlink()
    (prepared / 'tokenizer_state.json').mkdir()
    with pytest.raises(IsADirectoryError, match='tokenizer_state.json'):
        open_tokens(str(prepared), 'train')
    (prepared / 'meta.json').rename(prepared / 'prepare.py')
    refused('prepare.py', prepared)


def test_a_document_stays_in_its_split_when_others_come():
    splits = [split_by_hash(f'document {i}', 0.1, 0.2) for i in range(5000)]
    assert splits[:9] == [split_by_hash(f'document {i}', 0.1, 0.2) for i in range(9)]
    assert splits.count('val') / 5000 == pytest.approx(0.1, abs=0.02)
    assert splits.count('test') / 5000 == pytest.approx(0.2, abs=0.02)


# ---------------------------------------------------------------------- sampling

def numbered(folder, n_blocks, first=0, name='bytes'):
    """A dataset whose block b is the text of number first + b: so a window tells which it is."""
    text = ''.join(f'{first + b:04d}' for b in range(n_blocks))
    return write(folder, [text + 'x'], name)


def numbers(windows):
    return [int(bytes(row.tolist())) for row in windows]


def test_each_block_is_seen_once_per_epoch_and_in_another_order_in_the_next(tmp_path):
    folder, blocks = numbered(tmp_path, 97), list(range(97))  # train and val hold the same text
    windows = Windows(folder, 'train', 3, seed=1)
    seen = numbers(np.concatenate([windows.batch(step, 8) for step in range(25)]))
    others = [numbers(Windows(folder, split, 3, seed).batch(0, 97))
              for split, seed in (('train', 2), ('val', 1))]
    orders = [seen[:97], seen[97:194], *others]
    assert all(sorted(order) == blocks for order in orders)
    assert len({*map(tuple, orders), tuple(blocks)}) == 5
    assert windows.batch(0, 100).max() <= ord('9')  # the tokens past the last block are not read
    assert shuffled(8, 5).tolist() == [2, 4, 3, 1, 5, 0, 6, 7]  # in every version of numpy
    assert sorted(shuffled(97, 2 ** 64 - 1)) == blocks


def test_batch_does_not_depend_on_how_it_is_cut_or_what_came_before(tmp_path):
    a, b = numbered(tmp_path / 'a', 50), numbered(tmp_path / 'b', 31, first=1000)
    windows, new = (Windows(f'{a}:0.7,{b}:0.3', 'train', 3, seed=1) for _ in range(2))
    for step in 0, 7, SLOTS // 16, 10 ** 12:  # the third reaches into the next cycle
        whole = windows.batch(step, 15)
        for n_parts in 1, 2, 15:
            for i in range(n_parts):
                part = slice(i, None, n_parts)
                assert (windows.batch(step, 15, part) == whole[part]).all()
        assert (np.concatenate([new.batch(3 * step + i, 5) for i in range(3)]) == whole).all()
    assert whole.dtype == np.int64 and whole.shape == (15, 4)
    assert windows.batch(0, 15, slice(15, None)).shape == (0, 4)


def test_mixture_holds_its_weights_exactly_and_reads_each_source_in_epochs(tmp_path):
    a, b = numbered(tmp_path / 'a', 400), numbered(tmp_path / 'b', 400, first=1000)
    assert Windows(f'{a}:2, {b}:2,{a}:2', 'train', 3).slots == (3334, 3333, 3333)
    windows = Windows(f'{a}:0.694,{b}:0.306', 'train', 3, seed=1)
    seen = np.array(numbers(windows.batch(0, 2 * SLOTS)))
    for cycle in seen.reshape(2, SLOTS):
        assert (cycle < 1000).sum() == 6940
        assert (cycle[:1000] < 1000).mean() == pytest.approx(0.694, abs=0.05)
    of_a, of_b = seen[seen < 1000], seen[seen >= 1000] - 1000
    counts = np.bincount(of_a)
    assert len(counts) == 400 and np.ptp(counts) == 1  # 34.7 epochs of 400 blocks
    alone = np.array(numbers(Windows(a, 'train', 3, seed=1).batch(0, 1000)))
    assert (of_a[:1000] == alone).all()  # a mixture does not change a source's order
    assert (of_b[:400] != alone[:400]).any()  # and each source has an order of its own


def test_a_split_of_a_window_and_its_target_is_long_enough(tmp_path):
    folder = numbered(tmp_path, 50)  # 202 tokens
    assert len(Windows(folder, 'train', 201).evenly_spaced(5)) == 1
    refuses('202 tokens', Windows, folder, 'train', 202)


@pytest.mark.parametrize('seed', [1, 2])
def test_evaluation_windows_are_in_order_and_evenly_spaced(tmp_path, seed):
    windows = Windows(numbered(tmp_path, 100), 'val', 3, seed)
    assert numbers(windows.evenly_spaced(4)) == [0, 25, 50, 75]
    assert numbers(windows.evenly_spaced(1000)) == list(range(100))
