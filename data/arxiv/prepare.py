"""
The ArXiv papers of the Pile, one of the two corpora of DAPE V2. They come from a copy of the Pile
without its withdrawn text. Sources: Gao et al. 2020, arXiv:2101.00027; monology/pile-uncopyrighted.

$ python data/arxiv/prepare.py                  # reads the whole Pile to find them; needs zstandard
$ python data/arxiv/prepare.py --held_out=True  # only val and test
$ python data/arxiv/prepare.py --local=FOLDER   # train/*.jsonl.zst, val.jsonl.zst, test.jsonl.zst
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from configurator import configure, settings
from data.hub import Source, prepare

held_out = False               # True: only val and test, from suolyer/pile_arxiv
revision = 'main'              # not pinned, because we knew no commit
max_tokens: int | None = None  # of each split, to the end of a document; None: all
local = ''                     # a folder of such files, or one file; '': read the hub's
out_dir = ''                   # where the token files go; '' for data/NAME
tokenizer = 'gpt2'             # DAPE V2's; or bytes, FILE.tiktoken, tokenizer.json, hf:ORG/NAME


def main():
    if held_out:
        source = Source('suolyer/pile_arxiv', revision, splits=['val', 'test'], advice=(
            'Give your own files: --local=FOLDER with val.json and test.json.'))
    else:
        source = Source('monology/pile-uncopyrighted', revision, advice=(
            'Give your own files: --local=FOLDER with train/*.jsonl.zst, val.jsonl.zst and '
            'test.jsonl.zst of the Pile; or take only val and test with --held_out=True.'))
        source.where = ['pile_set_name', '==', 'ArXiv']
    prepare('arxiv', source, settings(globals()))


if __name__ == '__main__':
    configure(globals())
    main()
