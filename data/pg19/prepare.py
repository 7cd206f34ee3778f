"""
PG19: books of Project Gutenberg from before 1919, a document each. Its test split is what Table 2
of the paper reads; its train split stands in for Books3, which was withdrawn. Source: Rae et al.
2020, arXiv:1911.05507.

$ python data/pg19/prepare.py --repo=emozilla/pg19-test   # Table 2: the 100 test books
$ python data/pg19/prepare.py --tokenizer=gpt2            # train, val and test
$ python data/pg19/prepare.py --local=FOLDER              # files you have: train*, val*, test*
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from configurator import configure, settings
from data.hub import Settings, Source, prepare

repo = 'emozilla/pg19'         # deepmind/pg19 is a script, which datasets no longer runs
revision = 'main'              # not pinned: no commit was known to us


def main():
    source = Source(repo, revision, advice=(
        'Give files you have: --local=FOLDER with train*, validation*, test*, .parquet or .jsonl '
        'that have text; or take data/books.'))
    prepare('pg19', source, settings(globals()))


if __name__ == '__main__':
    configure(globals(), Settings)
    main()
