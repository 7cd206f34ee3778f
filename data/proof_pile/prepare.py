"""
The test split of Proof-pile: mathematical papers, proofs and code, which Table 2 of the paper reads
besides PG19. Source: Azerbayev et al. 2022, hoskinson-center/proof-pile. EleutherAI/proof-pile-2 is
another corpus.

$ python data/proof_pile/prepare.py
$ python data/proof_pile/prepare.py --local=proofpile_test.jsonl.gz    # the file, had another way
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from configurator import configure, settings
from data.hub import Settings, Source, prepare

repo = 'hoskinson-center/proof-pile'  # on the hub
revision = '490b980249446f2f3bd2df3a8cf085d0f2de240a'  # its commit


def main():
    source = Source(repo, revision, splits=['test'], advice=(
        'Give a file you have: --local=proofpile_test.jsonl.gz; dwzhu/PoSE-Datasets has a copy, '
        'proof-pile/test.jsonl, not compared by us.'))
    prepare('proof_pile', source, settings(globals()))


if __name__ == '__main__':
    configure(globals(), Settings)
    main()
