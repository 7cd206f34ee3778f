"""
The ArXiv papers of the Pile, one of the two corpora of DAPE V2. They come from a copy of the Pile
without its withdrawn text. Sources: Gao et al. 2020, arXiv:2101.00027; monology/pile-uncopyrighted.

$ python data/arxiv/prepare.py                  # reads the whole Pile to find them; needs zstandard
$ python data/arxiv/prepare.py --repo=suolyer/pile_arxiv    # only val and test
$ python data/arxiv/prepare.py --local=FOLDER   # train/*.jsonl.zst, val.jsonl.zst, test.jsonl.zst
"""

import sys
from pathlib import Path

sys.path[:0] += map(str, Path(__file__).parents[1:3])
from configurator import configure

from hub import prepare

repo = 'monology/pile-uncopyrighted'  # on the hub; all rows of another one are taken
revision = 'main'              # not pinned, because we knew no commit
local = ''                     # a folder of such files; '': read the hub's
tokenizer = 'gpt2'             # DAPE V2's; or bytes, FILE.tiktoken, tokenizer.json, hf:ORG/NAME
max_tokens: int | None = None  # of each split, to the end of a document; None: all
out_dir = ''                   # where the token files go; '' for data/NAME


def is_arxiv(meta):
    return meta['pile_set_name'] == 'ArXiv'


if __name__ == '__main__':
    configure(globals())
    keep = is_arxiv if repo == 'monology/pile-uncopyrighted' else None
    prepare('arxiv', repo, revision, local, tokenizer, max_tokens, out_dir, keep=keep)
