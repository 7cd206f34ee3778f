"""
The test split of Proof-pile: mathematical papers, proofs and code. Table 2 of the paper reads it
besides PG19. Source: Azerbayev et al. 2022, hoskinson-center/proof-pile. EleutherAI/proof-pile-2 is
another corpus. dwzhu/PoSE-Datasets has a copy, proof-pile/test.jsonl; we have not compared it.

$ python data/proof_pile/prepare.py
$ python data/proof_pile/prepare.py --local=FOLDER     # with your own copy, such as test.jsonl.gz
"""

import sys
from pathlib import Path

sys.path[:0] += map(str, Path(__file__).parents[1:3])
from configurator import configure

from hub import prepare

repo = 'hoskinson-center/proof-pile'  # on the hub
revision = '490b980249446f2f3bd2df3a8cf085d0f2de240a'  # its commit
local = ''                     # a folder of such files; '': read the hub's
tokenizer = 'hf:TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T'
max_tokens: int | None = None  # of each split, to the end of a document; None: all
out_dir = ''                   # where the token files go; '' for data/NAME


if __name__ == '__main__':
    configure(globals())
    prepare('proof_pile', repo, revision, local, tokenizer, max_tokens, out_dir, ['test'])
