"""
SlimPajama, the larger part of the paper's pretraining data (Section 4.1). Its GitHub rows are left
out, as TinyLlama does, because StarCoder has them. Sources: Soboleva et al. 2023;
scripts/prepare_slimpajama.py of jzhang38/TinyLlama.

$ python data/slimpajama/prepare.py --repo=DKYoon/SlimPajama-6B \
      --revision=b5f90f419b7489cdba26fdbc8c022fcb5562f968   # a sample, enough to tune scales with
$ python data/slimpajama/prepare.py                  # all of it
$ python data/slimpajama/prepare.py --local=FOLDER   # your own files: train*, validation*, test*,
                                                     # .parquet or .jsonl with its columns
"""

import sys
from pathlib import Path

sys.path[:0] += map(str, Path(__file__).parents[1:3])
from configurator import configure

from hub import prepare

repo = 'gmongaras/SlimPajama-627B_Reupload'  # the publisher's copy is gone
revision = 'c34c22dbb10ae6b264a2f357a909d1a537141b36'  # its commit
local = ''                     # a folder of such files; '': read the hub's
tokenizer = 'hf:TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T'
max_tokens: int | None = None  # of each split, to the end of a document; None: all
out_dir = ''                   # where the token files go; '' for data/NAME


def is_not_github(meta):
    return meta['redpajama_set_name'] != 'RedPajamaGithub'


if __name__ == '__main__':
    configure(globals())
    prepare('slimpajama', repo, revision, local, tokenizer, max_tokens, out_dir,
            keep=is_not_github)
