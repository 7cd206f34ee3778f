"""
Your own text: UTF-8 files of any kind and .jsonl with a text field, also gzipped (.gz), and folders of them.
A file, or a line of .jsonl, is a document; a hash of its path, or of the line, says whether it goes to train, val or
test. Of a single plain text file the end is cut off for val and test. Splits of your own are taken as they are: a
folder with subfolders train/, val/ and test/, or --val="['FILE_OR_FOLDER']".
What is named for val or test goes nowhere else.

$ python data/text/prepare.py book.txt                                           # a token per byte
$ python data/text/prepare.py corpus/ more.jsonl.gz --name=mine --tokenizer=bpe:8192   # a BPE trained on it
"""

import gzip
import json
import math
import sys
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from configurator import configure
from corpus import MIB, split_by_hash, tokenizer_for, write_corpus
from runtime import ROOT

paths: list[str] = []  # files and folders to read
val: list[str] = []    # files and folders for val; no other text goes there then
test: list[str] = []   # files and folders for test; no other text goes there then
val_fraction = 0.05    # of all other documents
test_fraction = 0.05   # of all other documents; 0 for no test split
name = 'text'          # of the dataset: it is written to data/NAME
tokenizer = 'bytes'    # bytes, gpt2, bpe:VOCABULARY, FILE.tiktoken, tokenizer.json, hf:ORG/NAME
field = 'text'         # the one to read in a .jsonl line
out_dir = ''           # where the token files go; '' for data/NAME


def list_files(paths, split=None):
    """[(split, or None where a hash decides, path relative to what was named, path)], hidden files left out."""
    found = []
    for path in map(Path, paths):
        if path.is_dir():
            files = sorted((file.relative_to(path), file) for file in path.rglob('*') if file.is_file())
            by_name = (path / 'train').is_dir() and not split
            for inside, file in files:
                own = inside.parts[0] if by_name else split
                if own in (None, 'train', 'val', 'test') and not any(part.startswith('.') for part in inside.parts):
                    found.append((own, inside.as_posix(), file))
        elif path.is_file():
            found.append((split, path.name, path))
        else:
            raise FileNotFoundError(f'There is no file or folder {path}. Check the path.')
    return found


def each_once(sources):
    """
    The sources, each file once whatever links and folders lead to it: if it is for val or test,
    it goes nowhere else. Raises ValueError if it is named for both.
    """
    held_out, kept = {}, {}
    for split, _, path in sources:
        if split in ('val', 'test') and held_out.setdefault(path.resolve(), split) != split:
            raise ValueError(f'{path} is named for val and for test. Name it for one of them.')
    for source in sources:
        split, path = source[0], source[2].resolve()
        if held_out.get(path, split) == split:
            kept.setdefault(path, source)
    return list(kept.values())


def is_jsonl(path):
    return path.name.endswith(('.jsonl', '.jsonl.gz'))


def read_lines(path, begin=0.0, end=1.0):
    """Yield (offset in bytes, lines as bytes), about 1 MiB at a time: lines that start in that share of the file."""
    start, stop = (int(share * path.stat().st_size) for share in (begin, end))
    try:
        with gzip.open(path) if path.suffix == '.gz' else open(path, 'rb') as file:
            if start:
                file.seek(start - 1)
                file.readline()
            while (offset := file.tell()) < (stop if end < 1 else math.inf):
                lines = file.readlines(min(MIB, stop - offset) if end < 1 else MIB)
                if not lines:
                    break
                yield offset, lines
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f'{path} is not a whole gzip file: {error}. Compress it again.') from error


def decode(data, path, offset):
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        where = f'byte {offset + error.start:,} is 0x{data[error.start]:02x}'
        raise ValueError(f'{path} is not UTF-8: {where}. Convert the file or leave it out.') from error


def require_lines(path, parts):
    """Raise ValueError unless a line begins in each part but the first: lines are not cut."""
    for split, (begin, end) in parts.items():
        if 0 < begin < end and next(read_lines(path, begin, end), None) is None:
            raise ValueError(f'{path} cannot be cut for {split}: no line begins between '
                             f'{begin:.0%} and {end:.0%} of it. Break it into lines, '
                             f'set --{split}_fraction=0, or name another file for {split}.')


def text_pieces(path, begin=0.0, end=1.0):
    """Yield the text of a file, or of a share of its lines, about 1 MiB at a time."""
    for offset, lines in read_lines(path, begin, end):
        yield decode(b''.join(lines), path, offset)


def json_texts(path, wanted):
    """Yield the field of each line of a .jsonl file for which wanted(line) is true."""
    number = 0
    for offset, lines in read_lines(path):
        for data in lines:
            line, number, offset = decode(data, path, offset).strip(), number + 1, offset + len(data)
            if not line or not wanted(line):
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f'{path}, line {number}, is not JSON: {error}. Correct or drop it.') from error
            if not isinstance(record, dict) or not isinstance(record.get(field), str):
                has = f'the fields {", ".join(record)}' if isinstance(record, dict) else type(record).__name__
                raise ValueError(f"{path}, line {number}, has no text in '{field}', but {has}. Set --field=NAME.")
            yield record[field]


def main():
    sources = each_once(list_files(paths) + list_files(val, 'val') + list_files(test, 'test'))
    if not sum(path.stat().st_size for *_, path in sources):
        raise ValueError('There is nothing to read. Name files or folders that hold text.')
    given = {split for split, *_ in sources}
    val_share = val_fraction if None in given and 'val' not in given else 0.0
    test_share = test_fraction if None in given and 'test' not in given else 0.0
    parts = {'train': (0.0, 1 - val_share - test_share), 'val': (1 - val_share - test_share, 1 - test_share),
             'test': (1 - test_share, 1.0)}
    splits = [split for split, (begin, end) in parts.items() if split in given or begin < end]
    hashed = [path for split, _, path in sources if not split]
    only = hashed[0] if len(hashed) == 1 and not is_jsonl(hashed[0]) and hashed[0].suffix != '.gz' else None

    if only:
        require_lines(only, parts)

    def split_of(source, line=None):
        return source[0] or split_by_hash(line or source[1], val_share, test_share)

    def documents(split):
        for source in sources:
            path = source[2]
            if is_jsonl(path):
                yield from json_texts(path, lambda line, source=source: split_of(source, line) == split)
            elif path == only and parts[split][0] < parts[split][1]:
                yield text_pieces(path, *parts[split])
            elif path != only and split_of(source) == split:
                yield text_pieces(path)

    empty = set(splits) - {split_of(source) for source in sources}
    if empty and not only and not any(is_jsonl(path) for *_, path in sources):
        raise ValueError(f'None of {len(sources)} files falls into {" or ".join(sorted(empty))}. Give more files, or '
                         """name some for it, as in --val="['FILE']".""")
    folder = Path(out_dir) if out_dir else ROOT / 'data' / name
    total = sum(path.stat().st_size * (3 if path.suffix == '.gz' else 1) for *_, path in sources)  # 3: usual for gzip
    encoding = tokenizer_for(tokenizer, documents('train'), folder, total)
    write_corpus(folder, encoding, {split: documents(split) for split in splits}, total_bytes=total)


if __name__ == '__main__':
    configure(globals())
    main()
