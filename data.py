"""
Windows of tokenized text, for training and evaluation.

A prepared dataset is a folder, data/NAME, that is complete by itself:
    train.bin, val.bin, test.bin  the tokens of a split, one flat array; each document is followed
                                  by end-of-text
    train_starts.bin, ...         where the documents of the split start, int64
    meta.json                     tokenizer, vocabulary, dtype, counts of tokens and documents;
                                  written last: if it is there, the other files are whole
tokenizer.py writes it.
"""

import functools
import hashlib
import json
import os
from pathlib import Path

from configurator import ROOT, UserError

import numpy as np

SLOTS = 10_000  # samples in a cycle; each cycle has the same number of samples from each source


def stable_hash(*parts):
    """A 64-bit hash of the parts' texts. Unlike hash(), it is the same in every process."""
    text = '/'.join(map(str, parts)).encode(errors='surrogatepass')
    return int.from_bytes(hashlib.sha256(text).digest()[:8], 'big')


@functools.lru_cache(maxsize=8)
def shuffled(n, *key):
    """
    range(n), shuffled, (n,) int64. The order depends only on key, because numpy never changes the
    raw numbers of Philox.
    """
    return np.random.Philox(key=stable_hash(*key)).random_raw(n).argsort(kind='stable')


def open_split(dataset, split):
    """The tokens and document starts of a split, memory-mapped, and the content of meta.json."""
    if not dataset:
        raise UserError('The model does not name its training text. Give one: --dataset=NAME.')
    folder = ROOT / 'data' / dataset
    folder = folder if folder.is_dir() else Path(dataset)
    if not (folder / 'meta.json').is_file():
        raise UserError(f'Dataset {dataset} is not prepared. Run: python '
                        f'{os.path.relpath(folder)}/prepare.py (--help says what it takes).')
    meta = json.loads((folder / 'meta.json').read_text(encoding='utf-8'))
    if split not in meta['splits']:
        raise UserError(f"Dataset {dataset} has no split {split}, but {', '.join(meta['splits'])}.")
    tokens = np.memmap(folder / f'{split}.bin', meta['dtype'], 'r')
    if len(tokens) != meta['splits'][split]['tokens']:
        raise UserError(f'{folder}/{split}.bin is not as it was prepared. Prepare it again.')
    return tokens, np.fromfile(folder / f'{split}_starts.bin', np.int64), meta


def shares(weights):
    """
    How many of SLOTS samples each source gets, (n,) int. Shares are rounded down, and what is left
    over goes to the largest remainders: weights 2 and 1 are 6,667 and 3,333 samples.
    """
    weights = np.array(weights)
    exact = weights / weights.sum() * SLOTS
    slots = np.floor(exact).astype(int)
    missing = SLOTS - slots.sum()
    slots[np.argsort(slots - exact, kind='stable')[:missing]] += 1
    return slots


class Windows:
    """
    Windows of a dataset, or of a weighted mixture such as 'slimpajama:0.694,starcoder:0.306'; val
    and test are those of its first source. A window is block_size + 1 consecutive tokens, which
    gives block_size predictions. info: about a model that shall read them; its tokenizer must be
    the dataset's.
    Attributes: tokens, starts (of documents) and meta.json of the first source; its tokenizer's
    state. Of the last evenly_spaced(): places, where its windows start, (n,), and crossing, how
    many of them reach into another document.
    """

    def __init__(self, dataset, split, block_size, seed=0, info=None):
        self.dataset, self.split, self.block_size, self.seed = dataset, split, block_size, seed
        names, weights = [], []
        for source in dataset.split(','):
            name, colon, weight = source.rpartition(':')
            names.append(name if colon else source)
            weights.append(float(weight) if colon else 1.0)
        opened = [open_split(name, split) for name in (names if split == 'train' else names[:1])]
        self.slots = shares(weights[:len(opened)])
        self.tokens, self.starts, self.meta = opened[0]

        self.tokenizer = self.meta['tokenizer']
        tokenizers = [meta['tokenizer'] for _, _, meta in opened]
        if info and info['tokenizer']:
            tokenizers.append(info['tokenizer'])
        # Names do not count: a tokenizer may have been read from another file.
        if any(state | {'name': ''} != self.tokenizer | {'name': ''} for state in tokenizers):
            raise UserError(f'The parts of {dataset}, or it and the model, have different '
                            'tokenizers. Prepare the text with one, or name other text.')

        size = block_size + 1
        self.blocks = [tokens[:len(tokens) // size * size].reshape(-1, size)
                       for tokens, _, _ in opened]
        if not all(map(len, self.blocks)):
            raise UserError(f'The split {split} of {dataset} has fewer than {size:,} tokens. '
                            'Choose shorter windows, or prepare more text.')

    def batch(self, step, batch_size, rows=slice(None)):
        """
        The windows of a step, (n_rows, block_size + 1) int64. They depend only on (seed, split,
        step). rows: the slice of the batch for this rank or micro-batch. Each source is read epoch
        after epoch. Each epoch reads each block once, in a new order. In a mixture the samples come
        in cycles of SLOTS: each cycle has the same number from each source, in a new order.
        """
        windows = []
        for sample in range(step * batch_size, (step + 1) * batch_size)[rows]:
            cycle, slot = divmod(sample, SLOTS)
            order = shuffled(SLOTS, self.seed, self.split, 'cycle', cycle)
            sources = np.repeat(np.arange(len(self.slots)), self.slots)[order]
            s = int(sources[slot])
            before = int((sources[:slot] == s).sum())  # samples of this source in the cycle
            epoch, i = divmod(cycle * self.slots[s] + before, len(self.blocks[s]))
            order = shuffled(len(self.blocks[s]), self.seed, self.split, s, epoch)
            windows.append(self.blocks[s][order[i]])
        return np.array(windows, np.int64).reshape(-1, self.block_size + 1)

    def evenly_spaced(self, n, spacing=None):
        """
        Windows for evaluation, evenly spaced over the split, in order, (n, block_size + 1) int64.
        Each lies within one document if enough of them do, because a loss after another document
        says nothing about reading far; else `crossing` says how many do not. There are fewer than n
        if n would start less than `spacing` tokens apart; None: they do not overlap.
        """
        size = self.block_size + 1
        places = np.arange(0, self.blocks[0].size - size + 1, spacing or size)
        crosses = self.document(places) != self.document(places + size - 1)
        if np.count_nonzero(~crosses) >= n:
            places, crosses = places[~crosses], crosses[~crosses]
        n = min(n, len(places))
        chosen = np.arange(n) * len(places) // n
        self.places, self.crossing = places[chosen], int(crosses[chosen].sum())
        return self.tokens[self.places[:, None] + np.arange(size)].astype(np.int64)

    def document(self, places):
        """The number of the document of each token of the split, counted from 1."""
        return np.searchsorted(self.starts, places, side='right')
