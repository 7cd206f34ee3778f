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
import re
from pathlib import Path

from configurator import ROOT, UserError

import numpy as np

CYCLE = 10_000  # samples of a mixture; each cycle has equally many of a source, by its weight


def stable_hash(*parts):
    """A 64-bit hash of the parts' texts. Unlike hash(), it is the same in every process."""
    text = '/'.join(map(str, parts)).encode(errors='surrogatepass')
    return int.from_bytes(hashlib.sha256(text).digest()[:8], 'big')


@functools.lru_cache(maxsize=64)
def shuffled(n, *key):
    """
    range(n) in the order that sorts n random numbers, (n,) int64. It depends only on key. It is not
    rng.permutation(n), because only Philox's raw numbers stay the same in all versions of numpy.
    """
    return np.random.Philox(key=stable_hash(*key)).random_raw(n).argsort(kind='stable')


def open_split(dataset, split):
    """The tokens and document starts of a split, memory-mapped, and the content of meta.json."""
    if not dataset:
        raise UserError('The model does not name its training text. Give one: --dataset=NAME.')
    folder = ROOT / 'data' / dataset
    if not folder.is_dir():
        folder = Path(dataset)
    if not (folder / 'meta.json').is_file():
        raise UserError(f'Dataset {dataset} is not prepared. Run data/{dataset}/prepare.py, if it '
                        'is there, what its config says, or for your own text '
                        'data/text/prepare.py.')
    meta = json.loads((folder / 'meta.json').read_text(encoding='utf-8'))
    if split not in meta['splits']:
        raise UserError(f"Dataset {dataset} has no split {split}, but {', '.join(meta['splits'])}.")
    tokens = np.memmap(folder / f'{split}.bin', meta['dtype'], 'r')
    if len(tokens) != meta['splits'][split]['tokens']:
        raise UserError(f'{folder}/{split}.bin is not as it was prepared. Prepare it again.')
    return tokens, np.fromfile(folder / f'{split}_starts.bin', np.int64), meta


def encode_alike(a, b, ids):
    """
    True if two tokenizers, given by their states, encode the text of some ids of the first in the
    same way. States of equal tokenizers may differ: files spell the same rules in several ways.
    """
    from tokenizer import from_state  # it imports this file
    a, b = from_state(a), from_state(b)
    text = a.decode(ids.tolist())
    return a.eot_token == b.eot_token and a.encode_ordinary(text) == b.encode_ordinary(text)


class Windows:
    """
    Windows of a dataset, or of a weighted mixture such as 'slimpajama:0.694,starcoder:0.306'; val
    and test are those of its first source. A window is block_size + 1 consecutive tokens, which
    gives block_size predictions. info: about a model that shall read them; its tokenizer must be
    the dataset's.
    Attributes: tokens, starts (of documents) and meta.json of the first source; its tokenizer's
    state; n_tokens of all sources. Of the last evenly_spaced(): places, where its windows start,
    (n,); documents, the numbers of those in which they start and end, (2, n); crossing, for how
    many these differ.
    """

    def __init__(self, dataset, split, block_size, seed=0, info=None):
        self.dataset, self.split, self.block_size, self.seed = dataset, split, block_size, seed
        opened, weights = [], []
        sources = dataset.split(',')
        # val and test are those of the first source
        for source in sources if split == 'train' else sources[:1]:
            # NAME:WEIGHT, or NAME alone, which may be C:\mine
            name, weight = re.fullmatch(r'(.*?)(?:: *([\d.]+))?', source).groups()
            opened.append(open_split(name, split))
            weights.append(float(weight or 1))
        # The sources of CYCLE samples: with weights 2 and 1, 6,667 are of the first
        ends = np.cumsum(weights)
        ends = np.round(ends / ends[-1] * CYCLE)
        self.sources = ends.searchsorted(np.arange(CYCLE), side='right')
        self.tokens, self.starts, self.meta = opened[0]
        self.n_tokens = sum(len(tokens) for tokens, _, _ in opened)

        self.tokenizer = self.meta['tokenizer']
        tokenizers = [meta['tokenizer'] for _, _, meta in opened]
        if info and info['tokenizer']:
            tokenizers.append(info['tokenizer'])
        for state in tokenizers:
            text = self.tokens[:10_000]
            if state != self.tokenizer and not encode_alike(self.tokenizer, state, text):
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
        after epoch, and each epoch reads each block once, in a new order. In a mixture the samples
        come in cycles. Each has a fixed number of every source, by its weight, in a new order. If
        6,667 of 10,000 samples are of source 0, and 20 of the first 30 samples of cycle 2 were of
        it, the next one from it is its sample number 2 * 6,667 + 20.
        """
        windows = []
        for sample in range(step * batch_size, (step + 1) * batch_size)[rows]:
            cycle, at = divmod(sample, CYCLE)
            sources = self.sources[shuffled(CYCLE, self.seed, self.split, 'cycle', cycle)]
            source = sources[at]
            is_of_it = sources == source
            # samples of this source before this one, since step 0
            number = cycle * is_of_it.sum() + is_of_it[:at].sum()
            blocks = self.blocks[source]
            epoch, i = divmod(number, len(blocks))
            order = shuffled(len(blocks), self.seed, self.split, source, epoch)
            windows.append(blocks[order[i]])
        return np.array(windows, np.int64)

    def evenly_spaced(self, n, spacing=None):
        """
        Windows for evaluation, evenly spaced over the split, in order, (n, block_size + 1) int64.
        Each lies within one document if enough of them do, because a loss after another document
        says nothing about reading far; else `crossing` says how many do not. There are fewer than n
        if n would start less than `spacing` tokens apart; None: they do not overlap.
        """
        size = self.block_size + 1
        places = np.arange(0, self.blocks[0].size - size + 1, spacing or size)
        # (2, n): the document of each window's first token, and of its last, counted from 1
        documents = self.starts.searchsorted((places, places + size - 1), side='right')
        inside, = np.nonzero(documents[0] == documents[1])
        chosen = inside if len(inside) >= n else np.arange(len(places))
        n = min(n, len(chosen))
        chosen = chosen[np.arange(n) * len(chosen) // n]
        self.places, self.documents = places[chosen], documents[:, chosen]
        self.crossing = int((self.documents[0] != self.documents[1]).sum())
        return self.tokens[self.places[:, None] + np.arange(size)].astype(np.int64)
