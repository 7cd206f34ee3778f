"""
Passkey documents of many lengths. Each is a prompt of passkey.py and its answer. Mixed with text of
the same tokenizer, they train small models that can find passkeys.

$ python data/stdlib/prepare.py --tokenizer=bpe:1024 --out_dir=data/stdlib_bpe
$ python data/passkey/prepare.py                                       # 7M tokens: a minute
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from configurator import between, configure
from lib.errors import ROOT
from lib.tokenizers import get_tokenizer
from lib.tokens import write_corpus
from passkey import build_prompt

tokenizer = 'data/stdlib_bpe/tokenizer.tiktoken'  # the same as of the text to mix with
min_length = 128     # of a document, in tokens
max_length = 256     # of a document, in tokens; at most block_size
n_documents = 40000  # for train; val and test get a hundredth of this
seed = 1             # of lengths, places and keys
out_dir = ''         # where the token files go; '' for data/passkey


def documents(encoding, n, stream):
    """Yield n documents. stream: a number that makes the random numbers of each split differ."""
    random = np.random.default_rng([seed, stream])
    for length in random.integers(min_length, max_length + 1, n).tolist():
        depth, key = int(random.integers(length)), int(random.integers(10000, 100000))
        yield encoding.decode(ids_of(encoding, length, depth, key))


def ids_of(encoding, length, depth, key):
    """The ids of a prompt and its answer, without the start token."""
    prompt, answer, _ = build_prompt(encoding, length, depth, key, 'exact')
    return prompt[1:] + answer


def main():
    between(globals(), 0, 'seed')
    between(globals(), 1, 'max_length', most=2 ** 24)
    between(globals(), 1, 'min_length', most=max_length)
    between(globals(), 100, 'n_documents', most=2 ** 24)
    encoding = get_tokenizer(tokenizer)
    for key in range(10000, 100000, 999):  # some keys have more tokens than others
        ids_of(encoding, min_length, 0, key)
    counts = {'train': n_documents, 'val': n_documents // 100, 'test': n_documents // 100}
    splits = {split: documents(encoding, n, i) for i, (split, n) in enumerate(counts.items())}
    write_corpus(out_dir or ROOT / 'data/passkey', encoding, splits)


if __name__ == '__main__':
    configure(globals())
    main()
