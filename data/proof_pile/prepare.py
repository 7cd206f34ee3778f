"""
The test split of Proof-pile: mathematical papers, proofs and code. Table 2 of the paper reads it
besides PG19. Source: Azerbayev et al. 2022, hoskinson-center/proof-pile. EleutherAI/proof-pile-2 is
another corpus.

$ python data/proof_pile/prepare.py
$ python data/proof_pile/prepare.py --local=proofpile_test.jsonl.gz    # your own copy of the file
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from configurator import configure, settings
from data.hub import Source, prepare

repo = 'hoskinson-center/proof-pile'  # on the hub
revision = '490b980249446f2f3bd2df3a8cf085d0f2de240a'  # its commit
tokenizer = 'hf:TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T'
max_tokens: int | None = None  # of each split, to the end of a document; None: all
local = ''                     # a folder of such files, or one file; '': read the hub's
out_dir = ''                   # where the token files go; '' for data/NAME


def main():
    source = Source(repo, revision, splits=['test'], advice=(
        'Give your own copy: --local=proofpile_test.jsonl.gz. dwzhu/PoSE-Datasets has one, '
        'proof-pile/test.jsonl; we have not compared it.'))
    prepare('proof_pile', source, settings(globals()))


if __name__ == '__main__':
    configure(globals())
    main()
