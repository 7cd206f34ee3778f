# PG19: books of Project Gutenberg from before 1919. Each book is a document. Table 2 of
# arXiv:2404.12224 reads the test split. The train split stands in for Books3, which was withdrawn.
# Source: Rae et al. 2020, arXiv:1911.05507.
# python data/hub/prepare.py data/hub/pg19.py --repo=emozilla/pg19-test   # 100 test books
# python data/hub/prepare.py data/hub/pg19.py --tokenizer=gpt2            # train, val and test
repo = 'emozilla/pg19'  # deepmind/pg19 is a script, and datasets runs no scripts; its main branch
out_dir = 'data/pg19'
