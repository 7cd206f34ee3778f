"""
Token files and the sampling of windows.

$ python -m pytest tests/test_tokens.py
"""

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import contents, flip_a_bit, read, refuses
from test_tokenizers import UNICODE, hf_json

from lib import tokens
from lib.tokenizers import get_tokenizer
from lib.tokens import (
    SLOTS,
    SplitWriter,
    Windows,
    documents,
    is_prepared,
    open_tokens,
    parse_part,
    shuffled,
    split_by_hash,
    stable_hash,
    write_corpus,
)

DAMAGED = 'meta.json or tokenizer_state.json is not whole'


def write(folder, texts, name='bytes'):
    write_corpus(folder, get_tokenizer(name), {'train': texts, 'val': texts})
    return str(folder)


# ---------------------------------------------------------------------- token files

def test_each_document_is_read_back_and_followed_by_end_of_text(tmp_path):
    texts = ['one', UNICODE, '', 'half a pair \ud800.', ['in ', 'two parts']]
    data = open_tokens(write(tmp_path, texts), 'val')
    back = [bytes(data.tokens[start:end].tolist()).decode() for start, end in documents(data)]
    assert back == ['one', UNICODE, 'half a pair \N{REPLACEMENT CHARACTER}.', 'in two parts']
    assert [data.tokens[end] for _, end in documents(data)] == [256] * 4
    assert data.starts.dtype == np.int64
    assert data.meta['splits']['val']['tokens'] == len(data.tokens)


def test_another_tokenizer_in_the_same_folder_is_said(tmp_path, capsys):
    write(tmp_path / 'data', ['one'])
    write(tmp_path / 'data', ['two'])
    assert 'had the tokenizer' not in capsys.readouterr().out
    write(tmp_path / 'data', ['one'], hf_json(tmp_path, eot=300))
    assert 'had the tokenizer bytes' in capsys.readouterr().out


def test_documents_of_any_length_are_written_whole_in_bounded_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, 'MIB', 100)  # so that there are many pieces and batches
    texts = [f'line {i} of some text\n' * (i % 60) for i in range(99)]
    # A vocabulary above 2^16 needs 32 bits.
    for encoding, dtype in ((get_tokenizer('bytes'), np.uint16),
                            (get_tokenizer(hf_json(tmp_path, eot=70_000)), np.uint32)):
        write_corpus(tmp_path / 'data', encoding, {'train': texts})
        data = open_tokens(str(tmp_path / 'data'), 'train')
        assert data.tokens.dtype == dtype
        assert [data.tokens[start:end].tolist() for start, end in documents(data)] == [
            encoding.encode_ordinary(text) for text in texts if text]


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


def test_token_files_that_lost_their_end_are_not_continued(tmp_path):
    count = {'tokens': 5, 'documents': 1, 'bytes': 4}
    refuses('train.bin is shorter', SplitWriter, tmp_path, 'train', get_tokenizer('bytes'), None,
            count)


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


def test_a_model_gets_the_vocabulary_of_the_tokenizer_whatever_meta_json_says(prepared):
    edit_meta(prepared, vocab_size=5, tokenizer='gone')
    assert Windows(str(prepared), 'train', 3).vocab_size == 257


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
'''.strip().splitlines())
def test_an_entry_of_the_wrong_kind_in_meta_json_is_refused(prepared, changes):
    edit_meta(prepared, **json.loads(changes))
    refused(DAMAGED, prepared)


@pytest.mark.parametrize('name', ['meta.json', 'tokenizer_state.json'])
def test_a_damaged_json_file_is_refused(prepared, name):
    whole = (prepared / name).read_text()
    for text in whole[:-9], whole.replace('e', 'f'), '[]', '[' * 200_000:
        (prepared / name).write_text(text)
        refused(DAMAGED, prepared)


@pytest.mark.parametrize('name', ['tokenizer_state.json', 'train.bin', 'train_starts.bin'])
def test_a_missing_file_is_named_and_the_dataset_counts_as_not_prepared(prepared, name):
    (prepared / name).unlink()
    refuses(f'has no {name}. Prepare', Windows, str(prepared), 'train', 3)
    assert not is_prepared(prepared, ['train'], {})


def test_a_folder_that_is_not_prepared_is_told_what_to_run(prepared):
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


def test_a_mixture_is_evaluated_on_its_first_source_alone(tmp_path, capsys):
    a = numbered(tmp_path / 'a', 50)
    write_corpus(tmp_path / 'b', get_tokenizer('bytes'), {'train': ['1000' * 50]})  # has no val
    windows = Windows(f'{a}:0.3,{tmp_path}/b:0.7', 'val', 3)
    assert numbers(windows.evenly_spaced(1000)) == list(range(50)) and [*windows.checksums] == [a]
    assert f'is only that of {a}' in capsys.readouterr().out


def test_splits_and_orders_are_the_same_in_every_version(tmp_path):
    """Otherwise test text of an old model becomes training text of a new one."""
    assert stable_hash('a', 1) == 0x773232abe9343f0e  # the first 8 bytes of sha256 of 'a/1'
    splits = [split_by_hash(f'document {i}', 0.3, 0.3) for i in range(6)]
    assert splits == ['val', 'train', 'test', 'val', 'train', 'val']
    order = numbers(Windows(numbered(tmp_path, 50), 'train', 3, seed=1).batch(0, 6))
    assert order == [12, 26, 0, 33, 5, 24]


def test_evaluation_windows_are_in_order_and_evenly_spaced_whatever_the_seed(tmp_path):
    folder = numbered(tmp_path, 50)  # 202 tokens
    for seed in 1, 2:
        windows = Windows(folder, 'val', 3, seed)
        assert numbers(windows.evenly_spaced(4)) == [0, 12, 25, 37]
        assert numbers(windows.evenly_spaced(1000)) == list(range(50))
        assert windows.evenly_spaced_starts(1000, 2).tolist() == list(range(0, 197, 2))
    assert len(Windows(folder, 'train', 201).evenly_spaced(5)) == 1
    refuses('202 tokens', Windows, folder, 'train', 202)


@pytest.mark.parametrize('part, expected', [
    ('code', ('code', 1)), ('code:0.5', ('code', 0.5)), (r'C:\data\mine', (r'C:\data\mine', 1)),
    (r'C:\data\mine:2', (r'C:\data\mine', 2)), ('/a:b/mine:1e-1', ('/a:b/mine', 0.1))])
def test_a_dataset_is_a_name_or_a_path_with_a_weight(part, expected):
    assert parse_part(part) == expected
