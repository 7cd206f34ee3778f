# The test split of Proof-pile: mathematical papers, proofs and code. Table 2 of the paper reads it
# besides PG19. Source: Azerbayev et al. 2022, hoskinson-center/proof-pile.
# EleutherAI/proof-pile-2 is another corpus. dwzhu/PoSE-Datasets has a copy, proof-pile/test.jsonl;
# we have not compared it.
# python data/hub/prepare.py data/hub/proof_pile.py
# python data/hub/prepare.py data/hub/proof_pile.py --local=FOLDER   # with your own test.jsonl.gz
repo = 'hoskinson-center/proof-pile'
revision = '490b980249446f2f3bd2df3a8cf085d0f2de240a'
splits = ['test']
out_dir = 'data/proof_pile'
