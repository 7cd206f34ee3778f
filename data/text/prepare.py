"""
Your own text: UTF-8 files of any kind and .jsonl with a text field, also gzipped (.gz), and folders
of them. A file, or a line of .jsonl, is a document; a hash of its path, or of the line, says
whether it goes to train, val or test. Of a single plain text file the end is cut off for val and
test. Splits of your own are taken as they are: a folder with subfolders train/, val/ and test/, or
--val="['FILE_OR_FOLDER']". What is named there goes nowhere else.

$ python data/text/prepare.py book.txt                                # a token per byte
$ python data/text/prepare.py corpus/ more.jsonl.gz --name=mine --tokenizer=bpe:8192   # a BPE of it
"""

import contextlib
import gzip
import json
import math
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from configurator import configure
from lib.errors import MALFORMED, ROOT, UserError
from lib.tokens import MIB, SPLITS, only_dataset, split_by_hash, tokenizer_for, write_corpus

paths: list[str] = []  # files and folders to read
val: list[str] = []    # files and folders for val; no other text goes there then
test: list[str] = []   # files and folders for test; no other text goes there then
val_fraction = 0.05    # of all other documents
test_fraction = 0.05   # of all other documents; 0 for no test split
name = 'text'          # of the dataset: it is written to data/NAME
tokenizer = 'bytes'    # bytes, gpt2, bpe:VOCABULARY, FILE.tiktoken, tokenizer.json, hf:ORG/NAME
field = 'text'         # the one to read in a .jsonl line
out_dir = ''           # where the token files go; '' for data/NAME


@dataclass
class File:
    split: str | None  # None where a hash decides
    name: str          # its path from what the user named
    path: Path
    start: int = 0           # the bytes to read, from the start of a line
    stop: float = math.inf   # to the end of another

    @property
    def is_jsonl(self):
        return self.path.name.endswith(('.jsonl', '.jsonl.gz'))


# ---------------------------------------------------------------------- finding files

def list_files(paths, split=None):
    """The Files of files and folders, hidden ones left out."""
    found = []
    for path in map(Path, paths):
        if path.is_file():
            found.append(File(split, path.name, path))
            continue
        if not path.is_dir():
            raise UserError(f'There is no file or folder {path}. Check the path.')
        has_splits = (path / 'train').is_dir() and not split
        for file in sorted(path.rglob('*')):
            inside = file.relative_to(path)
            own = inside.parts[0] if has_splits else split
            is_hidden = any(part.startswith('.') for part in inside.parts)
            if file.is_file() and not is_hidden and own in (None, *SPLITS):
                found.append(File(own, inside.as_posix(), file))
    return found


def each_once(files):
    """
    Each file once, whatever links and folders lead to it; one for val or test goes nowhere else.
    Raises UserError if it is named for both.
    """
    kept = {}
    for file in sorted(files, key=lambda file: file.split not in ('val', 'test')):
        first = kept.setdefault(file.path.resolve(), file)
        if {first.split, file.split} == {'val', 'test'}:
            raise UserError(f'{file.path} is named for val and for test. Name it for one of them.')
    return list(kept.values())


# ---------------------------------------------------------------------- reading one

def read_blocks(file):
    """Yield (offset in bytes, whole lines as bytes), about 1 MiB at a time."""
    path = file.path
    try:
        with gzip.open(path) if path.suffix == '.gz' else open(path, 'rb') as data:
            offset = data.seek(file.start)
            while block := data.read(min(MIB, file.stop - offset)):
                if offset + len(block) < file.stop:
                    block += data.readline()
                yield offset, block
                offset += len(block)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f'{path} is not a whole gzip file: {error}. Compress it again.') from error


def decode(data, path, offset):
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        where = f'byte {offset + error.start:,} is 0x{data[error.start]:02x}'
        raise UserError(f'{path} is not UTF-8: {where}. Convert the file or leave it '
                        'out.') from error


def text_pieces(file):
    """Yield the text of a file, about 1 MiB at a time."""
    for offset, block in read_blocks(file):
        yield decode(block, file.path, offset)


def json_texts(file, is_wanted):
    """Yield the field of each line of a .jsonl file for which is_wanted(line) is true."""
    number = 0
    for offset, block in read_blocks(file):
        for data in block.splitlines(keepends=True):
            number += 1
            line = decode(data, file.path, offset).strip()
            offset += len(data)
            if line and is_wanted(line):
                yield field_of(line, f'{file.path}, line {number},')


def field_of(line, where):
    text = None
    with contextlib.suppress(*MALFORMED):
        text = json.loads(line)[field]
    if not isinstance(text, str):
        raise UserError(f"{where} is not a JSON object with text in '{field}': {line[:200]} "
                        'Correct or drop it, or set --field=NAME.')
    return text


# ---------------------------------------------------------------------- splits

def cut_in_parts(file, shares):
    """A plain text file as one of its parts for each split, cut where a line begins."""
    size, parts, start, share_so_far = file.path.stat().st_size, [], 0, 0.0
    with open(file.path, 'rb') as data:
        for split, share in shares.items():
            share_so_far += share
            stop, place = start, round(share_so_far * size)
            if place > start:
                data.seek(place - 1)
                data.readline()
                stop = data.tell()
            if start < stop:
                parts.append(File(split, file.name, file.path, start, stop))
            elif share:
                raise UserError(f'{file.path} cannot be cut for {split}: no line begins in its '
                                f'{share:.0%}. Break it into lines, set --{split}_fraction=0, or '
                                f'name another file for {split}.')
            start = stop
    return parts


def with_splits(files, shares):
    """
    The files, each with its split, but of .jsonl that of each line is decided later. shares: of
    each split in what the user did not name for one.
    """
    undecided, decided = [file for file in files if file.split is None], []
    for file in files:
        if file.split or file.is_jsonl:
            decided.append(file)
        elif len(undecided) == 1 and file.path.suffix != '.gz':
            decided += cut_in_parts(file, shares)
        else:
            file.split = split_by_hash(file.name, shares['val'], shares['test'])
            decided.append(file)
    return decided


def documents(files, split, shares):
    """Yield the documents of a split, as write_corpus() takes them."""
    def is_wanted(line):
        return split == (file.split or split_by_hash(line, shares['val'], shares['test']))

    for file in files:
        if file.is_jsonl:
            yield from json_texts(file, is_wanted)
        elif file.split == split:
            yield text_pieces(file)


def main():
    files = each_once(list_files(paths) + list_files(val, 'val') + list_files(test, 'test'))
    n_bytes = sum(file.path.stat().st_size for file in files)
    if not n_bytes:
        raise UserError('There is nothing to read. Name files or folders that hold text.')
    given = {file.split for file in files}
    shares = {'val': val_fraction, 'test': test_fraction}
    for split in shares:
        if split in given or None not in given:  # no other text goes there
            shares[split] = 0.0
    shares = {'train': 1 - sum(shares.values())} | shares
    splits = [split for split in SPLITS if shares[split] > 0 or split in given]
    n_files, files = len(files), with_splits(files, shares)
    empty = set(splits) - {file.split for file in files}
    if empty and not any(file.is_jsonl for file in files):
        raise UserError(f'None of {n_files} files falls into {" or ".join(sorted(empty))}. Give '
                        """more files, or name some for it, as in --val="['FILE']".""")

    folder = Path(out_dir or ROOT / 'data' / name)
    with only_dataset(folder):
        encoding = tokenizer_for(tokenizer, documents(files, 'train', shares), folder, n_bytes)
        splits = {split: documents(files, split, shares) for split in splits}
        write_corpus(folder, encoding, splits, total_bytes=n_bytes)


if __name__ == '__main__':
    configure(globals())
    main()
