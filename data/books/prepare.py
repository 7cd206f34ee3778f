"""
Long texts: 146 public-domain books in English. Each book is a document; val and test are whole
books. manifest.json lists them with their SHA-256. Their text is not part of this project: FOLDER
must hold these files.

$ python data/books/prepare.py FOLDER                        # bytes, 100 MB
$ python data/books/prepare.py FOLDER --tokenizer=bpe:4096   # a BPE trained on the train split
"""

import hashlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from configurator import configure
from lib.errors import ROOT, UserError, fault_of, require_kinds
from lib.tokenizers import tokenizer_for
from lib.tokens import SPLITS, only_dataset, write_corpus

paths: list[str] = []  # the folder of books
tokenizer = 'bytes'    # bytes, gpt2, bpe:VOCABULARY, FILE.tiktoken, tokenizer.json, hf:ORG/NAME
manifest = ''          # the list of books; '' for data/books/manifest.json
out_dir = ''           # where the token files go; '' for data/books


def require_books(folder, books):
    """Raise UserError unless the folder holds the books of the manifest."""
    for book in books:
        path = folder / book['file']
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != book['sha256']:
            raise UserError(f"{path} is missing or changed. It should be {book['title']} by "
                            f"{book['author']}. Nothing was written. For other books: python "
                            'data/text/prepare.py FOLDER --name=books')


def texts(folder, books, split):
    """Yield the books of a split."""
    for book in books:
        if book['split'] == split:
            path = folder / book['file']
            with fault_of(path, 'text in UTF-8', 'Convert it.'):
                text = path.read_bytes().decode()
            yield text


def main():
    if len(paths) != 1 or not Path(paths[0]).is_dir():
        raise UserError(f'Name one folder, the one that holds the books, not {paths}.')
    folder, listing = Path(paths[0]), Path(manifest or ROOT / 'data/books/manifest.json')
    if not listing.is_file():
        raise UserError(f'There is no manifest {listing}. Check the path.')
    with fault_of(listing, 'a manifest like data/books/manifest.json', 'Correct it.'):
        books = json.loads(listing.read_text(encoding='utf-8'))
        for book in books:
            if book['split'] not in SPLITS:
                raise ValueError(f"split is {book['split']}")
            require_kinds(book, file=str, title=str, author=str, sha256=str, bytes=int)
    require_books(folder, books)
    out = Path(out_dir or ROOT / 'data/books')
    digest = hashlib.sha256(listing.read_bytes()).hexdigest()
    with only_dataset(out):
        encoding = tokenizer_for(tokenizer, texts(folder, books, 'train'))
        write_corpus(out, encoding, {split: texts(folder, books, split) for split in SPLITS},
                     report={'books': len(books), 'manifest_sha256': digest},
                     total_bytes=sum(book['bytes'] for book in books))


if __name__ == '__main__':
    configure(globals())
    main()
