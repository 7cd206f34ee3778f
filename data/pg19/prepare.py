"""
PG19: books of Project Gutenberg from before 1919. Each book is a document. Table 2 of the paper
reads the test split. The train split stands in for Books3, which was withdrawn. Source: Rae et al.
2020, arXiv:1911.05507.

$ python data/pg19/prepare.py --repo=emozilla/pg19-test   # Table 2: the 100 test books
$ python data/pg19/prepare.py --tokenizer=gpt2            # train, val and test
$ python data/pg19/prepare.py --local=FOLDER              # your own files: train*, val*, test*,
                                                          # .parquet or .jsonl
"""

import sys
from pathlib import Path

sys.path[:0] += map(str, Path(__file__).parents[1:3])
from configurator import configure

from hub import prepare

repo = 'emozilla/pg19'         # deepmind/pg19 is a script, and datasets runs no scripts
revision = 'main'              # not pinned, because we knew no commit
local = ''                     # a folder of such files; '': read the hub's
tokenizer = 'hf:TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T'
max_tokens: int | None = None  # of each split, to the end of a document; None: all
out_dir = ''                   # where the token files go; '' for data/NAME


if __name__ == '__main__':
    configure(globals())
    prepare('pg19', repo, revision, local, tokenizer, max_tokens, out_dir)
