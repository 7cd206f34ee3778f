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

sys.path.insert(0, str(Path(__file__).parents[2]))
from configurator import ROOT, UserError, configure

from tokenizer import SPLITS, get_tokenizer, write_dataset

paths: list[str] = []  # the folder of books; none: this one
tokenizer = 'bytes'    # bytes, gpt2, bpe:VOCABULARY, FILE.tiktoken, tokenizer.json, hf:ORG/NAME
manifest = 'data/books/manifest.json'  # the list of books, a file of the project
out_dir = 'data/books'  # a folder of the project, where the token files go


def main():
    books = json.loads((ROOT / manifest).read_text('utf-8'))
    splits = {split: [] for split in SPLITS}
    for book in books:
        path = Path(*paths, book['file'])
        content = path.read_bytes() if path.is_file() else b''
        if hashlib.sha256(content).hexdigest() != book['sha256']:
            raise UserError(f"{path} is missing or changed. It should be {book['title']} by "
                            f"{book['author']}. For other books: python data/text/prepare.py "
                            'FOLDER --out_dir=data/books')
        splits[book['split']].append(content.decode())
    write_dataset(ROOT / out_dir, get_tokenizer(tokenizer, splits['train']),
                  splits, books=len(books))


if __name__ == '__main__':
    configure(globals())
    main()
