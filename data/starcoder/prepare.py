"""
StarCoderData in all languages, the smaller part of the paper's pretraining data (Section 4.1). It
has only a train split, because the paper validates on SlimPajama. It is gated: first accept its
terms on its page and log in. Sources: Li et al. 2023, arXiv:2305.06161;
scripts/prepare_starcoder.py of jzhang38/TinyLlama.

$ hf auth login && python data/starcoder/prepare.py
$ python data/starcoder/prepare.py --local=FOLDER --max_tokens=10_000_000   # part of your own
                                      # files train*.parquet or .jsonl with a column `content`
"""

import sys
from pathlib import Path

sys.path[:0] += map(str, Path(__file__).parents[1:3])
from configurator import configure

from hub import prepare

repo = 'bigcode/starcoderdata'  # on the hub
revision = 'main'              # not pinned, because we knew no commit
local = ''                     # a folder of such files; '': read the hub's
tokenizer = 'hf:TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T'
max_tokens: int | None = None  # of each split, to the end of a document; None: all
out_dir = ''                   # where the token files go; '' for data/NAME


if __name__ == '__main__':
    configure(globals())
    prepare('starcoder', repo, revision, local, tokenizer, max_tokens, out_dir, field='content')
