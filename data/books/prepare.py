"""
Long texts: 146 public-domain books in English, a document each, whole books kept for val and test. manifest.json
lists them with their digests; their text is not part of this project: FOLDER holds these very files.

$ python data/books/prepare.py FOLDER                        # bytes, 100 MB
$ python data/books/prepare.py FOLDER --tokenizer=bpe:4096   # a BPE trained on the train split
"""

import hashlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from configurator import configure
from corpus import tokenizer_for, write_corpus
from runtime import ROOT

paths: list[str] = []  # the folder of books
tokenizer = 'bytes'    # bytes, gpt2, bpe:VOCABULARY, FILE.tiktoken, tokenizer.json, hf:ORG/NAME
manifest = ''          # the list of books; '' for data/books/manifest.json
out_dir = ''           # where the token files go; '' for data/books


def faulty_books(folder, books):
    """How many books are missing or others than the manifest says; prints a line for each of the first three."""
    n_faulty = 0
    for book in books:
        path = folder / book['file']
        if not path.is_file():
            fault = f'is missing: {book["title"]} by {book["author"]}'
        elif hashlib.sha256(path.read_bytes()).hexdigest() != book['sha256']:
            fault = f'differs: {path.stat().st_size:,} bytes, in the manifest {book["bytes"]:,}, or another sha256'
        else:
            continue
        n_faulty += 1
        if n_faulty <= 3:
            print(f'{book["file"]} {fault}')
    return n_faulty


def main():
    if len(paths) != 1 or not Path(paths[0]).is_dir():
        raise ValueError(f'Name the one folder that holds the books, not {" ".join(paths) or "nothing"}.')
    folder, listing = Path(paths[0]), Path(manifest or ROOT / 'data' / 'books' / 'manifest.json')
    books = json.loads(listing.read_text(encoding='utf-8'))
    n_faulty = faulty_books(folder, books)
    if n_faulty:
        raise ValueError(f'{n_faulty} of {len(books)} books in {folder} are missing or changed. Nothing was '
                         'written. Other books: python data/text/prepare.py FOLDER --name=books')

    def texts(split):  # a book at a time
        return ((folder / book['file']).read_bytes().decode() for book in books if book['split'] == split)

    out = Path(out_dir) if out_dir else ROOT / 'data' / 'books'
    report = {'books': len(books), 'manifest_sha256': hashlib.sha256(listing.read_bytes()).hexdigest()}
    encoding = tokenizer_for(tokenizer, texts('train'), out)
    splits = {split: texts(split) for split in ('train', 'val', 'test')}
    write_corpus(out, encoding, splits, report=report, total_bytes=sum(book['bytes'] for book in books))


if __name__ == '__main__':
    configure(globals())
    main()
