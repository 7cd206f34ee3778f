"""
Your own text: UTF-8 files of any kind, .jsonl files with a text field, and folders of them. A file,
or a line of .jsonl, is a document. A hash of its path, or of the line, decides whether it goes to
train, val or test. A single text file is cut by lines: val and test get its end. You may also name
the splits: in a folder by subfolders train/, val/ and test/, or by files such as train.jsonl and
val.txt; or by --val="['FILE_OR_FOLDER']". A file that is named for val or test goes nowhere else.
Hidden files are left out, and in a folder that names its splits all others.

$ python data/text/prepare.py book.txt                               # a token per byte
$ python data/text/prepare.py corpus/ more.jsonl --name=mine --tokenizer=bpe:8192  # trains a BPE
"""

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from configurator import ROOT, UserError, configure

from tokenizer import SPLITS, split_of, tokenizer_for, write_dataset

paths: list[str] = []  # files and folders to read
val: list[str] = []    # files and folders for val; if any, no other text goes there
test: list[str] = []   # files and folders for test; if any, no other text goes there
val_fraction = 0.05    # of all other documents
test_fraction = 0.05   # of all other documents; 0 for no test split
name = 'text'          # of the dataset: it is written to data/NAME
tokenizer = 'bytes'    # bytes, gpt2, bpe:VOCABULARY, FILE.tiktoken, tokenizer.json, hf:ORG/NAME
field = 'text'         # the field to read in a .jsonl line
out_dir = ''           # where the token files go; '' for data/NAME

# A file or folder, inside a folder, that is named after a split.
NAMED = re.compile(r'(train|val|dev|test)(id|idation)?(\.jsonl|\.txt)?(/|$)', re.IGNORECASE)


def list_files(paths, split='any'):
    """{path: (split, name)} of files and of the files in folders. any: a hash decides."""
    files = {}
    for root in map(Path, paths):
        if not root.exists():
            raise UserError(f'There is no file or folder {root}. Check the path.')
        folder = root if root.is_dir() else root.parent
        has_splits = split == 'any' and any((root / f'train{suffix}').exists()
                                            for suffix in ('', '.jsonl', '.txt'))
        for path in root, *sorted(root.rglob('*')):
            own, name = split, path.relative_to(folder).as_posix()
            if has_splits:
                match = NAMED.match(name)
                own = match and match[1].lower().replace('dev', 'val')
            if own and path.is_file() and '/.' not in f'/{name}':
                files[path.resolve()] = own, name
    return files


def read(path, name):
    """Yield each document of a file as (what a hash decides by, text)."""
    number = 0
    try:
        with open(path, encoding='utf-8-sig', newline='\n') as file:
            if path.suffix.lower() != '.jsonl':
                yield name, file.read()
                return
            for line in map(str.strip, file):
                number += 1
                if line:
                    yield line, '' + json.loads(line)[field]
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path} is not UTF-8, or its line {number} is not JSON with text in "
                        f"'{field}' ({error!r}).") from error


def cut_by_lines(text, fractions):
    """The shares of a text for train, val and test, each up to the end of a line."""
    data, parts, start, stop = text.encode(), [], 0, 0
    for share in 1 - sum(fractions), *fractions:
        stop += share * len(data)
        end = data.find(b'\n', round(stop) - 1) + 1 or len(data)
        parts.append(data[start:end].decode())
        start = end
    return parts


def main():
    if not re.fullmatch(r'\w[\w.-]*', name):
        raise UserError(f"name is '{name}'. It becomes a folder of data/, so it has letters, "
                        'digits, - and _.')
    # Each file once, whatever links and folders lead to it
    files = list_files(paths) | list_files(val, 'val') | list_files(test, 'test')
    named = [split for split, _ in files.values()]
    fractions = [0 if split in named else fraction
                 for split, fraction in (('val', val_fraction), ('test', test_fraction))]
    splits, is_alone = {split: [] for split in SPLITS}, named.count('any') == 1
    for path, (split, file_name) in files.items():
        for identity, text in read(path, file_name):
            if split == 'any' and is_alone and identity == file_name:  # no line of .jsonl
                for split, part in zip(SPLITS, cut_by_lines(text, fractions)):
                    splits[split].append(part)
            else:
                splits[split_of(identity, *fractions) if split == 'any' else split].append(text)
    write_dataset(out_dir or ROOT / 'data' / name, tokenizer_for(tokenizer, splits['train']),
                  splits, paths=paths, val=val, test=test)


if __name__ == '__main__':
    configure(globals())
    main()
