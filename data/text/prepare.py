"""
Your own text: UTF-8 files of any kind, .jsonl files with a text field, and folders of them, but for
hidden files. A file, or a line of .jsonl, is a document. A hash of its text decides whether it goes
to train, val or test. If a split stays empty, the longest document is cut by lines: val and test
get its end. Text that already has such splits keeps them by --val and --test.

$ python data/text/prepare.py book.txt                               # a token per byte
$ python data/text/prepare.py corpus/ more.jsonl --tokenizer=bpe:8192 --out_dir=data/mine
$ python data/text/prepare.py corpus/train --val=corpus/val --test=corpus/test
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from configurator import ROOT, UserError, configure

from tokenizer import SPLITS, get_tokenizer, split_of, write_dataset

paths: list[str] = []  # files and folders to read
val = ''               # the file or folder of val; '': a share of the documents, or none with test
test = ''              # the file or folder of test; '': a share of the documents, or none with val
val_fraction = 0.05    # of the documents, or of the one that is cut
test_fraction = 0.05   # of the documents, or of the one that is cut
tokenizer = 'bytes'    # bytes, gpt2, bpe:VOCABULARY, FILE.tiktoken, tokenizer.json, hf:ORG/NAME
field = 'text'         # the field to read in a .jsonl line
out_dir = 'data/text'  # a folder of the project, where the token files go


def read(roots):
    """Yield the documents of files, and of the files in folders."""
    for root in map(Path, roots):
        for path in [root, *sorted(root.rglob('*'))]:
            inside = path.relative_to(root).parts  # () for a file that was given itself
            if path.is_dir() or any(part.startswith('.') for part in inside):
                continue
            try:
                text = path.read_bytes().decode('utf-8-sig')  # without a byte order mark
                if path.suffix.lower() == '.jsonl':
                    for line in filter(str.strip, text.split('\n')):
                        yield json.loads(line)[field] or ''
                else:
                    yield text
            except ValueError as error:
                raise UserError(f'{path} is not UTF-8, or not JSON: {error}') from error


def cut_by_lines(text, shares):
    """The shares of a text for train, val and test, each up to the end of a line or word."""
    data, parts, start, stop = text.encode(), [], 0, 0
    for share in shares:
        stop += share * len(data)
        end = round(stop)
        if end > 0:
            # the end of the line, else of the word, else of the text
            end = (data.find(b'\n', end - 1, len(data) - 1) + 1
                   or data.find(b' ', end - 1) + 1 or len(data))
        parts.append(data[start:end].decode())
        start = end
    return parts


def share_out(documents):
    """{split: texts} of documents, as the top of this file says."""
    splits = {split: [] for split in SPLITS}
    for text in documents:
        splits[split_of(text, val_fraction, test_fraction)].append(text)
    shares = 1 - (val_fraction + test_fraction), val_fraction, test_fraction
    if any(share and not splits[split] for split, share in zip(SPLITS, shares)):
        longest = max(sum(splits.values(), []), key=len, default='')
        for split, part in zip(SPLITS, cut_by_lines(longest, shares)):
            # its parts replace it
            splits[split] = [text for text in splits[split] if text is not longest] + [part]
    return splits


def main():
    if val or test:
        splits = {}
        for split, roots in ('train', paths), ('val', [val]), ('test', [test]):
            splits[split] = [*read(filter(None, roots))]
        held_out = {*splits['val'], *splits['test']}  # which may lie in a folder of paths
        splits['train'] = [text for text in splits['train'] if text not in held_out]
    else:
        splits = share_out(read(paths))
    write_dataset(ROOT / out_dir, get_tokenizer(tokenizer, splits['train']), splits, paths=paths)


if __name__ == '__main__':
    configure(globals())
    main()
