"""
Your own text: UTF-8 files of any kind and .jsonl with a text field, also gzipped (.gz), and folders
of them. A file, or a line of .jsonl, is a document; a hash of its path, or of the line, says
whether it goes to train, val or test. Of a single plain text file the end is cut off for val and
test. Splits of your own are taken as they are: a folder with subfolders train/, val/ and test/, or
--val="['FILE_OR_FOLDER']". What is named there goes nowhere else.

$ python data/text/prepare.py book.txt                                # a token per byte
$ python data/text/prepare.py corpus/ more.jsonl.gz --name=mine --tokenizer=bpe:8192   # a BPE of it
"""

import gzip
import json
import math
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from configurator import configure
from lib.errors import ROOT, UserError
from lib.tokens import MIB, SPLITS, split_by_hash, tokenizer_for, write_corpus

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
    held_out, kept = {}, {}
    for file in files:
        if file.split in ('val', 'test'):
            other = held_out.setdefault(file.path.resolve(), file.split)
            if other != file.split:
                raise UserError(f'{file.path} is named for val and for test. Name it for one of '
                                'them.')
    for file in files:
        path = file.path.resolve()
        if held_out.get(path, file.split) == file.split:
            kept.setdefault(path, file)
    return list(kept.values())


# ---------------------------------------------------------------------- reading one

def read_lines(path, begin=0.0, end=1.0):
    """
    Yield (offset in bytes, lines as bytes), about 1 MiB at a time: the lines that start in that
    share of the file.
    """
    size = path.stat().st_size
    start, stop = int(begin * size), int(end * size) if end < 1 else math.inf
    try:
        with gzip.open(path) if path.suffix == '.gz' else open(path, 'rb') as file:
            if start:  # go on to where the next line starts
                file.seek(start - 1)
                file.readline()
            offset = file.tell()
            while offset < stop:
                lines = file.readlines(min(MIB, stop - offset))
                if not lines:
                    break
                yield offset, lines
                offset = file.tell()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f'{path} is not a whole gzip file: {error}. Compress it again.') from error


def decode(data, path, offset):
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        where = f'byte {offset + error.start:,} is 0x{data[error.start]:02x}'
        raise UserError(f'{path} is not UTF-8: {where}. Convert the file or leave it '
                        'out.') from error


def text_pieces(path, begin=0.0, end=1.0):
    """Yield the text of a file, or of a share of its lines, about 1 MiB at a time."""
    for offset, lines in read_lines(path, begin, end):
        yield decode(b''.join(lines), path, offset)


def json_texts(path, is_wanted):
    """Yield the field of each line of a .jsonl file for which is_wanted(line) is true."""
    number = 0
    for offset, lines in read_lines(path):
        for data in lines:
            number += 1
            line = decode(data, path, offset).strip()
            offset += len(data)
            if line and is_wanted(line):
                yield field_of(line, f'{path}, line {number},')


def field_of(line, where):
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f'{where} is not JSON: {error}. Correct or drop it.') from error
    if not isinstance(record, dict):
        raise UserError(f"{where} has no text in '{field}', but is of type "
                        f'{type(record).__name__}. Make each line an object.')
    if not isinstance(record.get(field), str):
        raise UserError(f"{where} has no text in '{field}', but the fields {', '.join(record)}. "
                        'Set --field=NAME.')
    return record[field]


# ---------------------------------------------------------------------- splits

class Splitter:
    """
    Which documents go to which split. Where a split has files of its own, no other document goes
    there; of a single plain text file, `only`, each split gets a share of the lines.
    """

    def __init__(self, files):
        self.files, given = files, {file.split for file in files}
        self.val = val_fraction if None in given and 'val' not in given else 0.0
        self.test = test_fraction if None in given and 'test' not in given else 0.0
        self.shares = {'train': (0.0, 1 - self.val - self.test),
                       'val': (1 - self.val - self.test, 1 - self.test),
                       'test': (1 - self.test, 1.0)}
        self.splits = [split for split, (begin, end) in self.shares.items()
                       if split in given or begin < end]
        by_hash = [file for file in files if file.split is None]
        self.only = None
        if len(by_hash) == 1 and not by_hash[0].is_jsonl and by_hash[0].path.suffix != '.gz':
            self.only = by_hash[0]
        self.require_text()

    def split_of(self, file, line=None):
        return file.split or split_by_hash(line or file.name, self.val, self.test)

    def require_text(self):
        """Refuse, before any work, files that leave a split without text."""
        if self.only:
            path = self.only.path
            for split, (begin, end) in self.shares.items():
                if 0 < begin < end and next(read_lines(path, begin, end), None) is None:
                    raise UserError(f'{path} cannot be cut for {split}: no line begins between '
                                    f'{begin:.0%} and {end:.0%} of it. Break it into lines, set '
                                    f'--{split}_fraction=0, or name another file for {split}.')
        elif not any(file.is_jsonl for file in self.files):
            empty = set(self.splits) - {self.split_of(file) for file in self.files}
            if empty:
                raise UserError(f'None of {len(self.files)} files falls into '
                                f'{" or ".join(sorted(empty))}. Give more files, or name some for '
                                """it, as in --val="['FILE']".""")

    def documents(self, split):
        """Yield the documents of a split, as write_corpus() takes them."""
        begin, end = self.shares[split]
        for file in self.files:
            if file.is_jsonl:
                yield from json_texts(file.path, lambda line, file=file:
                                      self.split_of(file, line) == split)
            elif file is self.only:
                if begin < end:
                    yield text_pieces(file.path, begin, end)
            elif self.split_of(file) == split:
                yield text_pieces(file.path)


def main():
    files = each_once(list_files(paths) + list_files(val, 'val') + list_files(test, 'test'))
    n_bytes = 0
    for file in files:
        size = file.path.stat().st_size
        n_bytes += 3 * size if file.path.suffix == '.gz' else size  # what gzip usually saves
    if not n_bytes:
        raise UserError('There is nothing to read. Name files or folders that hold text.')
    splitter, folder = Splitter(files), Path(out_dir or ROOT / 'data' / name)
    encoding = tokenizer_for(tokenizer, splitter.documents('train'), folder, n_bytes)
    splits = {split: splitter.documents(split) for split in splitter.splits}
    write_corpus(folder, encoding, splits, total_bytes=n_bytes)


if __name__ == '__main__':
    configure(globals())
    main()
