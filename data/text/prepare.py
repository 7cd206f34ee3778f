"""
Your own text: UTF-8 files of any kind, .jsonl files with a text field, and folders of them. A file,
or a line of .jsonl, is a document. A hash of its path, or of the line, decides whether it goes to
train, val or test. A single text file is cut by lines: val and test get its end. You may also name
the splits: in a folder by subfolders train/, val/ and test/, or by files such as train.jsonl and
val.txt; or by --val="['FILE_OR_FOLDER']". A file that is named for val or test goes nowhere else.

$ python data/text/prepare.py book.txt                               # a token per byte
$ python data/text/prepare.py corpus/ more.jsonl --name=mine --tokenizer=bpe:8192  # trains a BPE
"""

import contextlib
import io
import itertools
import json
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from configurator import between, configure, settings
from lib.answers import note
from lib.errors import MALFORMED, ROOT, UserError
from lib.tokenizers import tokenizer_for
from lib.tokens import MIB, SPLITS, only_dataset, split_by_hash, write_corpus

paths: list[str] = []  # files and folders to read
val: list[str] = []    # files and folders for val; if any, no other text goes there
test: list[str] = []   # files and folders for test; if any, no other text goes there
val_fraction = 0.05    # of all other documents
test_fraction = 0.05   # of all other documents; 0 for no test split
name = 'text'          # of the dataset: it is written to data/NAME
tokenizer = 'bytes'    # bytes, gpt2, bpe:VOCABULARY, FILE.tiktoken, tokenizer.json, hf:ORG/NAME
field = 'text'         # the field to read in a .jsonl line
out_dir = ''           # where the token files go; '' for data/NAME


ALIASES = {'validation': 'val', 'valid': 'val', 'dev': 'val'}  # other names of a split


@dataclass
class File:
    split: str | None        # None: a hash decides
    name: str                # its path from the folder that the user named
    path: Path
    start: int = 0           # read only the lines that begin at a byte from start on
    stop: float = math.inf   # and before stop


def split_named(name):
    """The split that a folder, a .jsonl or a .txt file is named after; else the whole name."""
    stem = re.sub(r'\.(jsonl|txt)$', '', name)
    return ALIASES.get(stem, stem)


def list_files(paths, split=None):
    """The Files of files and folders, without hidden ones."""
    found = []
    for path in map(Path, paths):
        if path.is_file():
            found.append(File(split, path.name, path))
            continue
        if not path.is_dir():
            raise UserError(f'There is no file or folder {path}. Check the path.')
        named, left_out = {split_named(inside.name) for inside in path.iterdir()}, []
        has_splits = 'train' in named and not split
        if not has_splits and not split and named & {'val', 'test'}:
            note(f'{path} has files for val or test, but none for train. All of its files are '
                 'shared out among the splits.')
        for file in sorted(path.rglob('*')):
            inside = file.relative_to(path)
            own = split_named(inside.parts[0]) if has_splits else split
            if file.is_file() and not any(part.startswith('.') for part in inside.parts):
                if own in (None, *SPLITS):
                    found.append(File(own, inside.as_posix(), file))
                else:
                    left_out.append(file)
        if left_out:
            print(f'{len(left_out)} files of {path} are left out, because they are named for none '
                  f'of train, val and test, such as {left_out[0]}')
    return found


def each_once(files):
    """
    Each file once, whatever links and folders lead to it. A file for val or test goes nowhere else.
    Raises UserError if it is named for both.
    """
    kept = {}
    for file in sorted(files, key=lambda file: file.split not in ('val', 'test')):
        first = kept.setdefault(file.path.resolve(), file)
        if {first.split, file.split} == {'val', 'test'}:
            raise UserError(f'{file.path} is named for val and for test. Name it for one of them.')
    return list(kept.values())


def in_shares(file, shares):
    """A single text file as one File for each split. shares: {split: its share of the bytes}."""
    size, stop, files = file.path.stat().st_size, 0, []
    for split, share in shares.items():
        start, stop = stop, stop + share * size
        files.append(File(split, file.name, file.path, round(start), round(stop)))
    return files


def read(file):
    """Yield the text of a file in parts of whole lines, about 1 MiB each."""
    with open(file.path, 'rb') as data:
        if file.start:
            data.seek(file.start - 1)
            data.readline()  # this line began before
        while (offset := data.tell()) < file.stop:
            part = data.read(min(MIB, file.stop - offset - 1)) + data.readline()
            if not part:
                return
            try:
                text = part.decode()
                yield text if offset else text.removeprefix('\ufeff')  # a byte order mark
            except UnicodeDecodeError as error:
                where = f'byte {offset + error.start:,} is 0x{part[error.start]:02x}'
                raise UserError(f'{file.path} is not UTF-8: {where}. Convert or unpack the '
                                'file, or leave it out.') from error


def field_of(line, where):
    text = None
    with contextlib.suppress(*MALFORMED):
        text = json.loads(line)[field]
    if not isinstance(text, str):
        raise UserError(f"{where} is not a JSON object with text in '{field}': {line[:200]} "
                        'Correct or drop it, or set --field=NAME.')
    return text


def documents(files, split, shares):
    """Yield the documents of a split, as write_corpus() takes them."""
    def goes_here(file, identity):
        return split == (file.split or split_by_hash(identity, shares['val'], shares['test']))

    for file in files:
        if file.path.suffix != '.jsonl':
            if goes_here(file, file.name):
                yield read(file)
            continue
        lines = itertools.chain.from_iterable(map(io.StringIO, read(file)))
        for number, line in enumerate(map(str.strip, lines), 1):
            if line and goes_here(file, line):
                yield field_of(line, f'{file.path}, line {number},')


def main():
    files = each_once(list_files(paths) + list_files(val, 'val') + list_files(test, 'test'))
    n_bytes = sum(file.path.stat().st_size for file in files)
    if not n_bytes:
        raise UserError('There is nothing to read. Name files or folders that hold text.')
    if not out_dir and (not name or {':', ','} & {*name}):
        raise UserError(f"name is '{name}'. It must not be empty, nor have : or , because "
                        '--dataset= takes several names with weights.')
    named = {file.split for file in files}
    between(globals(), 0, 'val_fraction', 'test_fraction', most=1)
    shares = {'val': val_fraction, 'test': test_fraction}
    for split in shares:
        if split in named or None not in named:  # no other text goes there
            shares[split] = 0.0
    if sum(shares.values()) >= 1 and 'train' not in named:
        raise UserError(f'val_fraction and test_fraction sum up to {sum(shares.values()):g}. The '
                        'sum must be below 1, so that there is text to train on.')
    shares = {'train': max(0, 1 - sum(shares.values()))} | shares
    splits = [split for split in SPLITS if shares[split] > 0 or split in named]
    undecided = [file for file in files if not file.split]
    if len(undecided) == 1 and undecided[0].path.suffix != '.jsonl':
        files.remove(undecided[0])
        files += in_shares(undecided[0], shares)
    for split in splits:
        if not any(itertools.chain.from_iterable(documents(files, split, shares))):
            advice = 'Give more files or lines'
            if split == 'test':
                advice += ', set --test_fraction=0'
            if split != 'train':
                advice += f', or name files: --{split}="[\'FILE\']"'
            raise UserError(f'None of the text falls into {split}. {advice}.')

    folder = Path(out_dir or ROOT / 'data' / name)
    with only_dataset(folder):
        encoding = tokenizer_for(tokenizer, documents(files, 'train', shares), n_bytes)
        splits = {split: documents(files, split, shares) for split in splits}
        write_corpus(folder, encoding, splits, total_bytes=n_bytes, report={
            'files': len(files), 'bytes': n_bytes, 'settings': settings(globals())})


if __name__ == '__main__':
    configure(globals())
    main()
