# The ArXiv papers of the Pile, one of the two corpora of DAPE V2. They come from a copy of the Pile
# without its withdrawn text. Sources: Gao et al. 2020, arXiv:2101.00027;
# monology/pile-uncopyrighted.
# python data/hub/prepare.py data/hub/arxiv.py      # reads the whole Pile; needs zstandard
# python data/hub/prepare.py data/hub/arxiv.py --repo=suolyer/pile_arxiv --only=   # val and test
repo = 'monology/pile-uncopyrighted'  # its main branch, because we knew no commit
only = 'ArXiv'
tokenizer = 'gpt2'  # DAPE V2's
out_dir = 'data/arxiv'
