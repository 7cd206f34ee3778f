"""
Tokenizers, token files and the sampling of windows.

$ python -m pytest tests/test_corpus.py
"""

import argparse
import json
import math
import typing
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

import corpus
from corpus import (
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
    tokenizer_for,
    tokenizer_from_state,
    tokenizer_state,
    train_bpe,
    write_corpus,
)

CODE = Path(argparse.__file__).read_text(encoding='utf-8')
UNICODE = ("Ärger über 12345 Grüße, it's WE'LL ſ's naïve — „Zitat“ 你好，世界。今天天气很好\r\n\r\n  \tΑθήνα שלום नमस्ते "
           '🙂👩‍👩‍👧 ½ Ⅷ ٣٤٥\u00a0\u2003x\u0085y\x1c z\n\n\n   end  \n')


@pytest.fixture(scope='module')
def bpe(tmp_path_factory):
    path = tmp_path_factory.mktemp('bpe') / 'small.tiktoken'
    return train_bpe([CODE, UNICODE * 20], 1000, path), path


def write(folder, texts, name='bytes', **options):
    write_corpus(folder, get_tokenizer(name), {split: texts for split in ('train', 'val')}, **options)
    return str(folder)


# ----------------------------------------------------------------------------- tokenizers

def test_bytes_are_utf8_and_end_of_text():
    encoding = get_tokenizer('bytes')
    assert (encoding.n_vocab, encoding.eot_token) == (257, 256)
    assert encoding.encode_ordinary(UNICODE) == list(UNICODE.encode())
    assert encoding.decode(encoding.encode_ordinary(UNICODE)) == UNICODE
    assert encoding.encode_ordinary('<|endoftext|>') == list(b'<|endoftext|>')


def test_trained_bpe_encodes_exactly_like_tokenizers(bpe):
    tokenizers = pytest.importorskip('tokenizers')
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    peer = tokenizers.Tokenizer(tokenizers.models.BPE())
    peer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Split(tokenizers.Regex(PATTERN), 'isolated'), byte_level])
    peer.train_from_iterator([CODE, UNICODE * 20], tokenizers.trainers.BpeTrainer(
        vocab_size=999, initial_alphabet=byte_level.alphabet(), show_progress=False))
    encoding, _ = bpe
    assert (encoding.n_vocab, encoding.eot_token) == (1000, 999)
    for text in (CODE, UNICODE, Path(typing.__file__).read_text(encoding='utf-8'), UNICODE[::-1]):
        theirs = peer.encode(text).ids  # their ids of single bytes are in another order, so tokens are compared
        ours = [encoding.decode_single_token_bytes(token) for token in encoding.encode_ordinary(text)]
        as_text = {chr(b): b for b in [*range(33, 127), *range(161, 173), *range(174, 256)]}
        as_text |= {chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in as_text.values())}
        assert ours == [bytes(as_text[c] for c in peer.id_to_token(token)) for token in theirs]
        assert b''.join(ours) == text.encode()


def test_bpe_is_trained_deterministically_and_its_file_begins_with_the_bytes(bpe, tmp_path):
    encoding, path = bpe
    again = train_bpe([CODE, UNICODE * 20], 1000, tmp_path / 'again.tiktoken')
    assert (tmp_path / 'again.tiktoken').read_text() == path.read_text()
    assert [again.decode_single_token_bytes(i) for i in range(256)] == [bytes([i]) for i in range(256)]
    assert tokenizer_digest(tokenizer_state(again)) == tokenizer_digest(tokenizer_state(encoding))  # but for the name
    with pytest.raises(ValueError, match='256 bytes'):
        train_bpe([CODE], 256, tmp_path / 'small.tiktoken')
    with pytest.raises(ValueError, match='bpe:8192'):
        tokenizer_for('bpe:many', [CODE], tmp_path)


def hf_json(folder, eos='</s>', config=None):
    """A tokenizer.json of the Llama kind: a space put before each text, spaces written as ▁, <s> added."""
    tokenizers = pytest.importorskip('tokenizers')
    alphabet = sorted(set(UNICODE.replace(' ', '▁') + 'abc<>/s▁'))
    vocab = {token: i for i, token in enumerate(['<unk>', '<s>', *alphabet, '▁a', 'bc'])} | {eos: 900}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [('▁', 'a'), ('b', 'c')], unk_token='<unk>'))
    tokenizer.add_special_tokens(['<unk>', '<s>', eos])
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend('▁'), tokenizers.normalizers.Replace(' ', '▁')])
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace('▁', ' '), tokenizers.decoders.Fuse(), tokenizers.decoders.Strip(' ', 1, 0)])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing('<s> $A', special_tokens=[('<s>', 1)])
    tokenizer.enable_truncation(5)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / 'tokenizer.json'))
    if config:
        (folder / 'tokenizer_config.json').write_text(json.dumps(config))
    return str(folder / 'tokenizer.json')


def test_hugging_face_tokenizer_adds_nothing_cuts_nothing_and_reads_special_tokens_as_text(tmp_path):
    encoding = get_tokenizer(hf_json(tmp_path))
    assert encoding.eot_token == 900 and encoding.n_vocab == 901
    assert start_token(encoding) == 1 and start_token(get_tokenizer('bytes')) == 256
    ids = encoding.encode_ordinary('a bc</s> a bc a bc')
    assert 1 not in ids and 900 not in ids and len(ids) > 5
    assert ids == encoding.tokenizer.encode('a bc</s> a bc a bc', add_special_tokens=False).ids
    assert encoding.decode(ids) == 'a bc</s> a bc a bc' == encoding.decode_bytes(ids).decode()
    assert encoding.decode([1, *ids[:2], 900]) == encoding.decode(ids[:2])  # real special tokens are no text
    assert encoding.decode_bytes([*ids[:2], 900]).decode() == encoding.decode(ids[:2]) + '</s>'


def test_end_of_text_is_the_one_of_tokenizer_config_or_a_usual_one_or_an_error(tmp_path):
    assert get_tokenizer(hf_json(tmp_path / 'a', '<|end|>', {'eos_token': '<|end|>'})).eot_token == 900
    assert get_tokenizer(hf_json(tmp_path / 'b', '<|end|>', {'eos_token': {'content': '<|end|>'}})).eot_token == 900
    assert get_tokenizer(hf_json(tmp_path / 'c', '<eos>')).eot_token == 900
    with pytest.raises(ValueError, match='eos_token'):
        get_tokenizer(hf_json(tmp_path / 'd', '<|end|>'))


def test_tokenizer_is_rebuilt_from_a_checkpoint_without_its_files(bpe, tmp_path):
    for encoding in (get_tokenizer('bytes'), bpe[0], get_tokenizer(hf_json(tmp_path))):
        state = tokenizer_state(encoding)
        torch.save({'tokenizer': state}, tmp_path / 'last.pt')
        loaded = torch.load(tmp_path / 'last.pt', weights_only=True)['tokenizer']
        again = tokenizer_from_state(loaded)
        assert all(isinstance(value, (str, int)) for value in loaded.values())
        assert again.encode_ordinary(UNICODE) == encoding.encode_ordinary(UNICODE)
        assert (again.name, again.n_vocab, again.eot_token) == (encoding.name, encoding.n_vocab, encoding.eot_token)
        assert tokenizer_digest(loaded) == tokenizer_digest(state) == tokenizer_digest(state | {'name': 'other'})
        assert tokenizer_digest(state) != tokenizer_digest(state | {'text': state['text'] + ' '})


def test_wrong_tokenizers_are_refused_with_a_reason(bpe, tmp_path):
    with pytest.raises(ValueError, match='gpt-2.*Take gpt2, bytes'):
        get_tokenizer('gpt-2')
    with pytest.raises(FileNotFoundError, match='none.tiktoken'):
        get_tokenizer(str(tmp_path / 'none.tiktoken'))
    (tmp_path / 'tokenizer.json').write_text('{}')
    with pytest.raises(ValueError, match='not a tokenizer.json'):
        get_tokenizer(str(tmp_path / 'tokenizer.json'))
    lines = bpe[1].read_text().splitlines()
    with pytest.raises(ValueError, match='x.tiktoken, line 3'):
        parse_ranks('\n'.join([*lines[:2], 'AAAA', *lines[2:]]), 'x.tiktoken')
    with pytest.raises(ValueError, match='single bytes'):
        parse_ranks('\n'.join(lines[1:]), 'x.tiktoken')
    with pytest.raises(ValueError, match='rank twice'):
        parse_ranks('\n'.join([*lines, 'AAAA 7']), 'x.tiktoken')


@pytest.mark.parametrize('name', ['tokenizer.json', 'ranks.tiktoken'])
def test_tokenizer_file_that_is_not_utf8_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(b'{"version": "\xff"}')
    with pytest.raises(ValueError, match=f'{name} is not UTF-8'):
        get_tokenizer(str(tmp_path / name))


@pytest.mark.parametrize('text', [
    '[' * 200_000, '{"eos_token": [1]}', '{"eos_token": 5}', '[]', 'null'],
    ids=lambda text: text[:20])
def test_odd_tokenizer_config_is_named(tmp_path, text):
    path = hf_json(tmp_path)
    (tmp_path / 'tokenizer_config.json').write_text(text)
    with pytest.raises(ValueError, match='tokenizer_config.json'):
        get_tokenizer(path)


def test_half_a_surrogate_pair_is_replaced_before_a_hugging_face_tokenizer_sees_it(tmp_path):
    encoding = get_tokenizer(hf_json(tmp_path))
    half, replaced = (f'a {x} bc' for x in ('\udc00', '\N{REPLACEMENT CHARACTER}'))
    assert encoding.encode_ordinary(half) == encoding.encode_ordinary(replaced)


def test_pieces_of_a_long_document_have_the_tokens_of_the_whole(bpe):
    from tiktoken_ext.openai_public import r50k_pat_str
    ranks = parse_ranks(bpe[1].read_text(), 'small')
    text = (CODE[:30000] + UNICODE) * 3
    parts = [text[i:i + 777] for i in range(0, len(text), 777)]
    for encoding in (bpe[0], tiktoken_encoding('like gpt2', ranks, r50k_pat_str, len(ranks))):
        whole = encoding.encode_ordinary(text)
        for limit in (500, 5000):
            pieces = list(cut(text, limit))
            assert pieces == list(cut(parts, limit))  # whether it comes whole or in parts
            assert [token for piece, _ in pieces for token in encoding.encode_ordinary(piece)] == whole
            assert [last for _, last in pieces] == [False] * (len(pieces) - 1) + [True] and len(pieces) > 5
    assert ''.join(piece for piece, _ in cut(list('x' * 1001), 100)) == 'x' * 1001  # no place to cut at all
    assert list(cut('', 100)) == list(cut(['', ''], 100)) == list(cut(['', ''], math.inf)) == []
    assert list(cut(iter(parts), math.inf)) == [(text, True)]


# ----------------------------------------------------------------------------- token files

def test_each_document_is_read_back_and_followed_by_end_of_text(tmp_path):
    texts = ['one', UNICODE, '', 'half a pair \ud800.', ['in ', 'two parts']]
    data = open_tokens(write(tmp_path, texts), 'val')
    back = [bytes(data.tokens[start:end].tolist()).decode() for start, end in documents(data)]
    assert back == ['one', UNICODE, 'half a pair \N{REPLACEMENT CHARACTER}.', 'in two parts']
    assert [data.tokens[end] for _, end in documents(data)] == [256] * 4
    assert data.starts.dtype == np.int64 and data.tokens.dtype == np.uint16
    assert data.meta['splits']['val']['tokens'] == len(data.tokens)
    assert tokenizer_from_state(data.tokenizer_state).name == 'bytes'


def test_large_vocabularies_are_stored_in_32_bits(tmp_path):
    tokens = [bytes([i]) for i in range(256)] + [bytes([i, j]) for i in range(256) for j in range(256)]
    encoding = tiktoken_encoding('large', {token: i for i, token in enumerate(tokens)}, r'[\s\S]{1,2}', len(tokens))
    write_corpus(tmp_path, encoding, {'train': ['a~']})
    data = open_tokens(str(tmp_path), 'train')
    assert data.tokens.dtype == np.uint32 and data.tokens.tolist() == [256 + 97 * 256 + 126, 65792]


@pytest.mark.parametrize('kind', ['bytes', 'hf'])
def test_several_threads_write_what_one_writes(tmp_path, kind):
    texts = [f'line {i} of some text\n' * 20_000 for i in range(33)]
    encoding = get_tokenizer('bytes') if kind == 'bytes' else get_tokenizer(hf_json(tmp_path))
    for folder, workers in ('one', 1), ('three', 3):
        write_corpus(tmp_path / folder, encoding, {'train': texts}, workers)
    for name in ('train.bin', 'train_starts.bin', 'meta.json', 'tokenizer_state.json'):
        assert (tmp_path / 'one' / name).read_bytes() == (tmp_path / 'three' / name).read_bytes()
    ends = np.cumsum([len(encoding.encode_ordinary(text)) + 1 for text in texts])
    assert np.fromfile(tmp_path / 'three' / 'train_starts.bin', np.int64).tolist() == [0, *ends[:-1]]


def test_interrupted_preparation_leaves_the_old_dataset_and_no_other_file(tmp_path):
    def failing():
        yield 'new text'
        raise KeyboardInterrupt
    folder = write(tmp_path / 'data', ['old text'])
    before = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / 'data', failing())
    assert {path.name: path.read_bytes() for path in Path(folder).iterdir()} == before
    with pytest.raises(ValueError, match='No document .* val split'):
        write_corpus(tmp_path / 'other', get_tokenizer('bytes'), {'train': ['text'], 'val': ['']})
    assert list((tmp_path / 'other').iterdir()) == []


def test_dataset_that_is_half_replaced_does_not_look_prepared(tmp_path):
    write(tmp_path, ['old text'])
    (tmp_path / 'val_starts.bin').unlink()
    (tmp_path / 'val_starts.bin').mkdir()  # cannot be replaced by a file
    with pytest.raises(OSError):
        write(tmp_path, ['new text'])
    assert not (tmp_path / 'meta.json').exists()


def test_preparing_again_leaves_no_stale_split(tmp_path):
    write(tmp_path, ['old'])
    write_corpus(tmp_path, get_tokenizer('bytes'), {'train': ['new']})
    with pytest.raises(FileNotFoundError, match='no split val. It has train'):
        open_tokens(str(tmp_path), 'val')
    assert not (tmp_path / 'val.bin').exists()


def test_what_is_missing_or_damaged_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match='no dataset nonsense'):
        open_tokens('nonsense', 'train')
    (tmp_path / 'raw').mkdir()
    (tmp_path / 'raw' / 'prepare.py').touch()
    with pytest.raises(FileNotFoundError, match=r'not prepared. Run: python .*raw/prepare.py'):
        open_tokens(str(tmp_path / 'raw'), 'train')
    folder = Path(write(tmp_path / 'data', ['some text']))
    for damaged in ('train.bin', 'train_starts.bin'):
        whole = (folder / damaged).read_bytes()
        for wrong in (whole[:-2], whole + b'xx'):
            (folder / damaged).write_bytes(wrong)
            with pytest.raises(ValueError, match=f'{damaged} has {len(wrong)} bytes.* should have {len(whole)}'):
                open_tokens(str(folder), 'train')
        (folder / damaged).write_bytes(whole)
    for damaged in ('meta.json', 'tokenizer_state.json'):
        whole = (folder / damaged).read_text()
        for wrong in (whole[:-9], '[]', whole.replace('e', 'f'), '{"dtype": "x"}'):
            (folder / damaged).write_text(wrong)
            with pytest.raises(ValueError, match='meta.json or tokenizer_state.json is damaged'):
                open_tokens(str(folder), 'train')
        (folder / damaged).write_text(whole)
    open_tokens(str(folder), 'train')


@pytest.fixture
def prepared(tmp_path):
    return Path(write(tmp_path, ['some text', 'and more', 'of it']))


@pytest.mark.parametrize('name', ['train.bin', 'train_starts.bin'])
def test_bit_that_flips_in_a_token_file_is_refused(prepared, name):
    whole = (prepared / name).read_bytes()
    for place in range(len(whole)):
        content = bytearray(whole)
        content[place] ^= 1
        (prepared / name).write_bytes(content)
        with pytest.raises(ValueError, match=f'{name} is damaged'):
            open_tokens(str(prepared), 'train')
    (prepared / name).write_bytes(whole)
    checksum = zlib.crc32((prepared / 'train.bin').read_bytes())
    assert open_tokens(str(prepared), 'train').checksum == f'{checksum:08x}'


def edit_meta(folder, **changes):
    meta = json.loads((folder / 'meta.json').read_text())
    meta = {key: value for key, value in (meta | changes).items() if value != 'gone'}
    (folder / 'meta.json').write_text(json.dumps(meta))


@pytest.mark.parametrize('starts', [
    [0, 9, -2 ** 62], [0, 9, 9], [0, 18, 9], [1, 9, 18], [0, 9, 25]])
def test_document_starts_that_do_not_rise_within_the_file_are_refused(prepared, starts):
    edit_meta(prepared, checksums='gone')
    np.array(starts, np.int64).tofile(prepared / 'train_starts.bin')
    with pytest.raises(ValueError, match='train_starts.bin is damaged'):
        open_tokens(str(prepared), 'train')


def test_token_outside_the_vocabulary_is_refused(prepared):
    edit_meta(prepared, checksums='gone', vocab_size=100)
    with pytest.raises(ValueError, match='train.bin is damaged: it has token 256'):
        open_tokens(str(prepared), 'train')


def test_dataset_without_checksums_is_read_with_a_note(prepared, capsys):
    edit_meta(prepared, checksums='gone')
    for split in ('train', 'val', 'train'):
        assert len(open_tokens(str(prepared), split).starts) == 3
    assert capsys.readouterr().out.count(f'{prepared} was prepared before') == 1


def test_large_file_is_read_through_only_where_that_is_asked_for(prepared, monkeypatch, capsys):
    monkeypatch.setattr(corpus, 'CHECKED_AT_OPEN', 8)
    (prepared / 'train.bin').write_bytes(bytes((prepared / 'train.bin').stat().st_size))
    assert open_tokens(str(prepared), 'train').checksum is None
    Windows(str(prepared), 'train', 3)
    for check in (open_tokens, lambda *arguments, check: Windows(*arguments, 3, check=check)):
        with pytest.raises(ValueError, match='train.bin is damaged'):
            check(str(prepared), 'train', check=True)
    assert f'reading {prepared}/train.bin through' in capsys.readouterr().out


@pytest.mark.parametrize('changes', [
    {'splits': None}, {'splits': {'train': None}},
    {'splits': {'train': {'tokens': None, 'documents': 3}}},
    {'splits': {'train': {'tokens': 25, 'documents': -3}}},
    {'vocab_size': None}, {'vocab_size': '257'}, {'dtype': None}, {'dtype': 'object'},
    {'dtype': 'float16'}, {'tokenizer': None}, {'checksums': None}, {'checksums': ['x']}], ids=str)
def test_entry_of_the_wrong_kind_in_meta_json_is_refused(prepared, changes):
    edit_meta(prepared, **changes)
    with pytest.raises(ValueError, match='meta.json or tokenizer_state.json is damaged'):
        open_tokens(str(prepared), 'train')


@pytest.mark.parametrize('name', ['meta.json', 'tokenizer_state.json'])
def test_json_nested_too_deep_is_refused(prepared, name):
    (prepared / name).write_text('[' * 200_000)
    with pytest.raises(ValueError, match='meta.json or tokenizer_state.json is damaged'):
        open_tokens(str(prepared), 'train')


def test_file_that_cannot_be_read_is_not_called_damaged(prepared):
    (prepared / 'tokenizer_state.json').unlink()
    (prepared / 'tokenizer_state.json').mkdir()
    with pytest.raises(IsADirectoryError, match='tokenizer_state.json'):
        open_tokens(str(prepared), 'train')


def test_a_document_stays_in_its_split_when_others_come():
    splits = [split_by_hash(f'document {i}', 0.1, 0.2) for i in range(5000)]
    assert splits == [split_by_hash(f'document {i}', 0.1, 0.2) for i in range(5000)]
    assert abs(splits.count('val') / 5000 - 0.1) < 0.02 and abs(splits.count('test') / 5000 - 0.2) < 0.02


# ----------------------------------------------------------------------------- sampling

def numbered(folder, n_blocks, block_size=3, first=0, **options):
    """A dataset whose block b is the bytes of number first + b, so that a window tells which one it is."""
    text = ''.join(f'{first + b:0{block_size + 1}d}' for b in range(n_blocks))
    return write(folder, [text + 'x'], **options)


def numbers(windows):
    return [int(bytes(row.tolist())) for row in windows]


def test_shuffling_is_one_to_one_and_keyed():
    orders = {tuple(shuffled(97, key).tolist()) for key in (0, 1, 2 ** 64 - 1)}
    assert len(orders) == 3 and all(sorted(order) == list(range(97)) for order in orders)
    assert shuffled(8, 5).tolist() == [2, 4, 3, 1, 5, 0, 6, 7]  # in every version of numpy


def test_each_block_is_seen_once_per_epoch_and_in_another_order_in_the_next(tmp_path):
    windows = Windows(numbered(tmp_path, 97), 'train', 3, seed=1)
    seen = numbers(np.concatenate([windows.batch(step, 8) for step in range(25)]))
    first, second = seen[:97], seen[97:194]
    assert sorted(first) == sorted(second) == list(range(97))
    assert first != second and first != list(range(97))


def test_batch_does_not_depend_on_how_it_is_cut_or_what_came_before(tmp_path):
    dataset = f'{numbered(tmp_path / "a", 50)}:0.7,{numbered(tmp_path / "b", 31, first=1000)}:0.3'
    windows = Windows(dataset, 'train', 3, seed=1)
    for step in (0, 7, SLOTS // 16, 10 ** 12):  # the third one reaches from one cycle of the mixture into the next
        whole = windows.batch(step, 15)
        for n_parts in (1, 2, 3, 15):
            parts = [windows.batch(step, 15, slice(i, None, n_parts)) for i in range(n_parts)]
            assert all((part == whole[i::n_parts]).all() for i, part in enumerate(parts))
        assert (whole == Windows(dataset, 'train', 3, seed=1).batch(step, 15)).all()
    assert whole.dtype == np.int64 and whole.shape == (15, 4)
    assert windows.batch(0, 15, slice(15, None)).shape == (0, 4)


def test_batch_size_only_regroups_the_samples(tmp_path):
    windows = Windows(numbered(tmp_path, 50), 'train', 3, seed=1)
    assert (windows.batch(2, 12) == np.concatenate([windows.batch(step, 4) for step in (6, 7, 8)])).all()


def test_seeds_and_splits_differ(tmp_path):
    folder = numbered(tmp_path, 97)  # train and val hold the same text here
    train, other, val = Windows(folder, 'train', 3, 1), Windows(folder, 'train', 3, 2), Windows(folder, 'val', 3, 1)
    assert numbers(train.batch(0, 97)) != numbers(other.batch(0, 97)) != numbers(val.batch(0, 97))
    assert numbers(train.batch(0, 97)) != numbers(val.batch(0, 97))


def test_mixture_holds_its_weights_exactly_and_reads_each_source_in_epochs(tmp_path):
    a, b, c = (numbered(tmp_path / name, 400, first=first) for name, first in (('a', 0), ('b', 1000), ('c', 2000)))
    windows = Windows(f'{a}:2, {b}:2, {c}:2', 'train', 3, seed=1)
    assert windows.slots == (3334, 3333, 3333)
    windows = Windows(f'{a}:0.694,{b}:0.306', 'train', 3, seed=1)
    for cycle in range(2):
        seen = np.array(numbers(windows.batch(cycle, SLOTS)))
        assert (seen < 1000).sum() == 6940 and (seen >= 1000).sum() == 3060
        assert abs((seen[:1000] < 1000).mean() - 0.694) < 0.05  # within the cycle they are mixed well
    seen = np.array(numbers(windows.batch(0, 2 * SLOTS)))
    counts = np.unique(seen[seen < 1000], return_counts=True)[1]
    assert len(counts) == 400 and counts.max() - counts.min() <= 1  # 13,880 samples = 34.7 epochs of 400 blocks
    alone = np.array(numbers(Windows(a, 'train', 3, seed=1).batch(0, 1000)))
    assert (seen[seen < 1000][:1000] == alone).all()  # a mixture does not change a source's order
    assert (seen[seen >= 1000][:400] - 1000 != alone[:400]).any()  # and each source has an order of its own


def test_mixtures_that_cannot_work_are_refused(tmp_path, bpe):
    a, b = numbered(tmp_path / 'a', 50), numbered(tmp_path / 'b', 50, name=str(bpe[1]))
    with pytest.raises(ValueError, match=r'a has tokenizer bytes .*, .*b has small.tiktoken'):
        Windows(f'{a}:0.5,{b}:0.5', 'train', 3)
    with pytest.raises(ValueError, match='hardly any weight'):
        Windows(f'{a}:1,{a}:0.00001', 'train', 3)
    for weight in ('x', '-1', '0', 'nan'):
        with pytest.raises(ValueError, match='NAME:WEIGHT'):
            Windows(f'{a}:1,{a}:{weight}', 'train', 3)
    with pytest.raises(ValueError, match='train of .*a has 202 tokens.*window of 202 '):
        Windows(a, 'train', 202)
    assert len(Windows(a, 'train', 201).fixed(5)) == 1  # 202 tokens are one window of 201 predictions


def test_evaluation_windows_are_in_order_and_evenly_spaced(tmp_path):
    windows = Windows(numbered(tmp_path, 100), 'val', 3, seed=1)
    assert numbers(windows.fixed(4)) == [0, 25, 50, 75]
    assert numbers(windows.fixed(1000)) == list(range(100))
    assert numbers(Windows(numbered(tmp_path, 100), 'val', 3, seed=2).fixed(4)) == [0, 25, 50, 75]


def test_tokens_past_the_last_whole_block_are_never_read(tmp_path):
    windows = Windows(numbered(tmp_path, 10), 'train', 3)  # then 'x' and end-of-text
    assert windows.batch(0, 100).max() <= ord('9') and windows.vocab_size == 257
