"""
Your own text: UTF-8 files of any kind, .jsonl files with a text field, and folders of them. A file,
or a line of .jsonl, is a document. A hash of its path, or of the line, decides whether it goes to
train, val or test. If a split stays empty, the longest document is cut by lines: val and test get
its end.

A folder may also name the splits, by subfolders train/, val/ and test/, or by files such as
train.jsonl and val.txt. All else in such a folder is left out, and so are hidden files. Files and
folders of these names may also be given one by one.

$ python data/text/prepare.py book.txt                               # a token per byte
$ python data/text/prepare.py corpus/ more.jsonl --name=mine --tokenizer=bpe:8192  # trains a BPE
"""

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from configurator import ROOT, UserError, configure

from tokenizer import SPLITS, get_tokenizer, split_of, write_dataset

paths: list[str] = []  # files and folders to read
val_fraction = 0.05    # of the documents, or of the one that is cut
test_fraction = 0.05   # of the documents, or of the one that is cut
name = 'text'          # of the dataset: it is written to data/NAME
tokenizer = 'bytes'    # bytes, gpt2, bpe:VOCABULARY, FILE.tiktoken, tokenizer.json, hf:ORG/NAME
field = 'text'         # the field to read in a .jsonl line
out_dir = ''           # where the token files go; '' for data/NAME

# A file or folder, inside a folder, that is named after a split.
NAMED = re.compile(r'(train|val|dev|test)(id|idation)?(\.jsonl|\.txt)?(/|$)', re.IGNORECASE)


def list_files():
    """{path: (its name in the folder that was given, split)}. split None: a hash decides."""
    files, names = {}, [NAMED.match(Path(path).name) for path in paths]
    for root, of_root in zip(map(Path, paths), names):
        if not root.exists():
            raise UserError(f'There is no file or folder {root}. Check the path.')
        folder = root if root.is_dir() else root.parent
        names_splits = any(re.fullmatch(r'train(\.jsonl|\.txt)?', path.name, re.IGNORECASE)
                           for path in root.glob('*'))
        for path in root, *sorted(root.rglob('*')):
            file = path.relative_to(folder).as_posix()
            named = NAMED.match(file) if names_splits else None
            if all(names) and len({one[1].lower() for one in names}) > 1:
                named = of_root  # the arguments are train.jsonl and val.jsonl, or such folders
            is_left_out = names_splits and not named or '/.' in f'/{file}'
            if path.is_file() and not is_left_out:
                split = named[1].lower().replace('dev', 'val') if named else None
                files[path.resolve()] = file, split
    return files


def read(path, file):
    """The documents of a file, a list of (what a hash decides by, text)."""
    line, documents = '', []
    try:
        text = path.read_bytes().decode('utf-8-sig')  # without the byte order mark of some tools
        if path.suffix.lower() != '.jsonl':
            return [(file, text)]
        for line in map(str.strip, text.split('\n')):
            if line:
                documents.append((line, '' + (json.loads(line)[field] or '')))
        return documents
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path} is not UTF-8, or its line {line[:50]!r} is not JSON with a text "
                        f"in the field '{field}' ({error}).") from error


def cut_by_lines(text, shares):
    """The shares of a text for train, val and test, each up to the end of a line or word."""
    data, parts, start, stop = text.encode(), [], 0, 0
    for share in shares:
        stop += share * len(data)
        end = round(stop)
        if end > 0:
            end = (data.find(b'\n', end - 1, len(data) - 1) + 1
                   or data.find(b' ', end - 1) + 1 or len(data))
        parts.append(data[start:end].decode())
        start = end
    return parts


def main():
    is_taken = name != 'text' and (ROOT / 'data' / name / 'prepare.py').exists() and not out_dir
    if is_taken or not re.fullmatch(r'\w[\w.-]*', name):
        raise UserError(f"name is '{name}'. It becomes a new folder of data/, so it has letters, "
                        'digits, - and _. Or give a folder: --out_dir=')
    files, splits = list_files(), {split: [] for split in SPLITS}
    for path, (file, named) in files.items():
        for identity, text in read(path, file):
            split = named or split_of(identity, val_fraction, test_fraction)
            splits[split].append(text)
    shares = dict(zip(SPLITS, (1 - (val_fraction + test_fraction), val_fraction, test_fraction)))
    is_named = any(named for _, named in files.values())
    if not is_named and any(share and not splits[split] for split, share in shares.items()):
        longest = max(sum(splits.values(), []), key=len, default='')
        for split, part in zip(SPLITS, cut_by_lines(longest, shares.values())):
            splits[split] = [text for text in splits[split] if text is not longest] + [part]
    write_dataset(out_dir or ROOT / 'data' / name, get_tokenizer(tokenizer, splits['train']),
                  splits, paths=paths)


if __name__ == '__main__':
    configure(globals())
    main()
