"""
Passkey documents of many lengths. Each is a prompt of passkey.py and its answer. Mixed with text of
the same tokenizer, they train small models that can find passkeys.

$ python data/stdlib/prepare.py --tokenizer=bpe:1024 --out_dir=data/stdlib_bpe
$ python data/passkey/prepare.py                                       # 7M tokens: a minute
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from configurator import ROOT, configure

import numpy as np

from passkey import build_prompt
from tokenizer import get_tokenizer, write_dataset

tokenizer = 'data/stdlib_bpe'  # that of the text to mix with
min_length = 128     # of a document, in tokens
max_length = 256     # of a document, in tokens; at most block_size
n_documents = 40000  # for train; val and test get a hundredth of this
seed = 1             # of lengths, places and keys
out_dir = 'data/passkey'  # a folder of the project, where the token files go


def documents(encoding, n, stream):
    """Yield n documents. stream: a number that makes the random numbers of each split differ."""
    random = np.random.default_rng([seed, stream])
    for length in random.integers(min_length, max_length + 1, n).tolist():
        place, key = int(random.integers(length)), int(random.integers(10000, 100000))
        prompt, answer = build_prompt(encoding, length, place, key)
        yield encoding.decode(prompt[1:] + answer)  # without the start token


def main():
    encoding, few = get_tokenizer(tokenizer), n_documents // 100
    splits = {'train': documents(encoding, n_documents, 0), 'val': documents(encoding, few, 1),
              'test': documents(encoding, few, 2)}
    write_dataset(ROOT / out_dir, encoding, splits)


if __name__ == '__main__':
    configure(globals())
    main()
