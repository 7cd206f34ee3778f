"""
Windows of tokenized text.

$ python -m pytest tests/test_data.py
"""

from pathlib import Path

import numpy as np
import pytest

from data import CYCLE, Windows, open_split, stable_hash
from tokenizer import get_tokenizer, train_bpe, write_dataset


def numbered(folder, n_blocks, first=0, encoding='bytes'):
    """A dataset whose block b is the text of number first + b: so a window tells which it is."""
    text = ''.join(f'{first + b:04d}' for b in range(n_blocks))
    encoding = get_tokenizer(encoding) if isinstance(encoding, str) else encoding
    write_dataset(folder, encoding, {'train': [text + 'x'], 'val': [text + 'x']})
    return str(folder)


def numbers(windows):
    return [int(bytes(row.tolist())) for row in windows]


def test_the_order_of_training_is_the_same_in_every_version(tmp_path):
    assert stable_hash('a', 1) == 0x773232abe9343f0e  # the first 8 bytes of sha256 of 'a/1'
    order = numbers(Windows(numbered(tmp_path, 50), 'train', 3, seed=1).batch(0, 6))
    assert order == [12, 26, 0, 33, 5, 24]


def test_each_block_is_seen_once_per_epoch_and_in_another_order_in_the_next(tmp_path):
    folder, blocks = numbered(tmp_path, 97), list(range(97))  # train and val hold the same text
    windows = Windows(folder, 'train', 3, seed=1)
    seen = numbers(np.concatenate([windows.batch(step, 8) for step in range(25)]))
    others = [numbers(Windows(folder, split, 3, seed).batch(0, 97))
              for split, seed in (('train', 2), ('val', 1))]
    orders = [seen[:97], seen[97:194], *others]
    assert all(sorted(order) == blocks for order in orders)
    assert len({*map(tuple, orders), tuple(blocks)}) == 5


def test_a_batch_depends_only_on_seed_split_and_step_however_ranks_share_it(tmp_path):
    a, b = numbered(tmp_path / 'a', 50), numbered(tmp_path / 'b', 31, first=1000)
    windows, new = (Windows(f'{a}:0.7,{b}:0.3', 'train', 3, seed=1) for _ in range(2))
    for step in 0, 7, CYCLE // 16, 10 ** 12:  # the third reaches into the next cycle
        whole = windows.batch(step, 15)
        for n_ranks in 1, 2, 15:
            for rank in range(n_ranks):
                rows = slice(rank, None, n_ranks)
                assert (windows.batch(step, 15, rows) == whole[rows]).all()
        assert (np.concatenate([new.batch(3 * step + i, 5) for i in range(3)]) == whole).all()
    assert whole.dtype == np.int64 and whole.shape == (15, 4)
    assert windows.n_tokens == (4 * 50 + 2) + (4 * 31 + 2)  # resume compares those of all sources


def test_a_mixture_holds_its_shares_exactly_and_reads_each_source_in_epochs(tmp_path):
    a, b = numbered(tmp_path / 'a', 400), numbered(tmp_path / 'b', 400, first=1000)
    windows = Windows(f'{a}:2,{b}:2,{a}:2', 'train', 3)
    assert np.bincount(windows.sources).tolist() == [3333, 3334, 3333]
    seen = np.array(numbers(Windows(f'{a}:0.694,{b}:0.306', 'train', 3, 1).batch(0, 2 * CYCLE)))
    for cycle in seen.reshape(2, CYCLE):
        assert (cycle < 1000).sum() == 6940
    of_a, of_b = seen[seen < 1000], seen[seen >= 1000] - 1000
    counts = np.bincount(of_a)
    assert len(counts) == 400 and np.ptp(counts) == 1  # 34.7 epochs of 400 blocks
    alone = np.array(numbers(Windows(a, 'train', 3, 1).batch(0, 1000)))
    assert (of_a[:1000] == alone).all()  # a mixture does not change a source's order
    assert (of_b[:400] != alone[:400]).any()  # and each source has an order of its own


def test_windows_for_evaluation_are_evenly_spaced_over_the_first_source(tmp_path):
    a, b = numbered(tmp_path / 'a', 50), numbered(tmp_path / 'b', 50, first=1000)  # 202 tokens
    for seed in 1, 2:
        windows = Windows(f'{a}:0.3,{b}:0.7', 'val', 3, seed)
        assert numbers(windows.evenly_spaced(4)) == [0, 12, 25, 37]
        assert numbers(windows.evenly_spaced(1000)) == list(range(50))
        windows.evenly_spaced(1000, spacing=2)
        assert windows.places.tolist() == list(range(0, 197, 2))


def test_windows_for_evaluation_lie_in_one_document_if_enough_of_them_do(tmp_path):
    folder = numbered(tmp_path / 'a', 50)
    np.array([0, 10, 106]).tofile(Path(folder) / 'val_starts.bin')
    windows = Windows(folder, 'val', 3)
    windows.evenly_spaced(47)
    assert windows.crossing == 0 and len(windows.places) == 47
    assert not {8, 104} & {*windows.places}  # tokens 8 to 11 and 104 to 107 are of two documents
    windows.evenly_spaced(50)
    assert windows.crossing == 2 and len(windows.places) == 50


def test_a_dataset_that_does_not_fit_is_refused(tmp_path):
    a, b = numbered(tmp_path / 'a', 50), numbered(tmp_path / 'b', 50)
    other = numbered(tmp_path / 'c', 50, encoding=train_bpe(['th'], 258))
    info = {'tokenizer': open_split(other, 'val')[2]['tokenizer']}
    for said, dataset, split, size, *more in (
            ('different tokenizers', f'{a},{other}', 'train', 3),
            ('different tokenizers', a, 'val', 3, 0, info),
            ('fewer than 203 tokens', a, 'val', 202),
            ('no split test, but train, val', a, 'test', 3),
            ('Give one: --dataset=NAME', '', 'val', 3),
            ('prepare.py', str(tmp_path), 'val', 3), ('as it was prepared', b, 'val', 3)):
        (tmp_path / 'b/val.bin').write_bytes(b'cut short.')
        with pytest.raises(SystemExit, match=said):
            Windows(dataset, split, size, *more)
