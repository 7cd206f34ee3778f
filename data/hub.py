"""
Corpora of Parquet or JSON-lines files, from the Hugging Face hub or a local folder, made into token files: what
data/{slimpajama,starcoder,pg19,proof_pile,arxiv}/prepare.py share.

Each file becomes a part in out_dir/parts.part, itself a small dataset of one split, by one of several processes that
read it as a stream; then the parts are joined in order. A part is written whole or not at all, so a run that was killed
goes on with the files it had not finished, and ends with the same bytes.
"""

import contextlib
import functools
import glob
import hashlib
import importlib.util
import io
import itertools
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from corpus import (
    finish_dataset,
    get_tokenizer,
    key_of,
    open_tokens,
    remove_dataset,
    tokenizer_digest,
    tokenizer_from_state,
    tokenizer_state,
    write_corpus,
)
from runtime import ROOT, Progress, save_json

SUFFIX = re.compile(r'\.(parquet|jsonl?)(\.gz|\.zst)?$')
SPLIT = re.compile(r'(?:^|[/_.-])(train|val|dev|test)(?:id|idation)?(?![a-z])')  # the first in a path says its split
EXPANSION = {'.parquet': 2.5, '.gz': 3.5, '.zst': 3.5}  # bytes of text in a byte of file: a rough guess
CHARACTERS = 8  # more than a token has on average: what max_tokens lets a part read, the rest is cut off in joining


@dataclass
class Source:
    """Where the text of a corpus is. A row is a document."""
    repo: str                      # ORG/NAME of a dataset on the hub
    revision: str                  # commit, or branch
    advice: str                    # what to do where it cannot be had
    splits: tuple = ('train', 'val', 'test')  # those to take; of a single one is every file that says none
    field: str = 'text'            # the column that holds the text
    where: list | None = None      # [key, sign, value]: only rows whose meta.key is (==) or is not (!=) value
    where_advice: str = 'Take a copy that has it.'  # what to do where there is no meta.key
    share: float = 1.0             # of the text that `where` leaves, roughly: for the disk it needs


@dataclass
class File:
    name: str   # path within the source
    url: str    # what datasets opens: a local path, or hf://
    size: int   # bytes


# ----------------------------------------------------------------------------- finding the files

def local_files(local):
    """All files of a folder, or those of a glob. Their names count from the folder, or from where the glob begins."""
    root = Path(local) if Path(local).is_dir() else Path(*itertools.takewhile(
        lambda part: not glob.has_magic(part), Path(local).parent.parts))
    paths = root.rglob('*') if Path(local).is_dir() else map(Path, glob.glob(local, recursive=True))
    return [File(path.relative_to(root).as_posix(), str(path), path.stat().st_size) for path in paths if path.is_file()]


def hub_files(source):
    """(commit, all files of a dataset on the hub)."""
    from huggingface_hub import HfApi
    try:
        info = HfApi().dataset_info(source.repo, revision=source.revision, files_metadata=True)
    except Exception as error:  # of the name, the revision, the network, the proxy: they share no class
        raise ValueError(f'{source.repo} could not be had ({type(error).__name__}). {source.advice}') from error
    return info.sha, [File(file.rfilename, f'hf://datasets/{source.repo}@{info.sha}/{file.rfilename}', file.size or 0)
                      for file in info.siblings]


def by_split(files, wanted):
    """
    {split: its files}, in the order to read them: train's in that of a hash, so that the first few are of all kinds,
    val's and test's by name, as evaluations that read the first documents expect.
    """
    splits = {split: [] for split in wanted}
    for file in sorted(files, key=lambda file: file.name):
        if SUFFIX.search(file.name):
            found = SPLIT.search(file.name)
            split = found[1].replace('dev', 'val') if found else wanted[0] if len(wanted) == 1 else None
            if split is None:
                raise ValueError(f'{file.name} does not say its split. Name it, or a folder it is in, train, val or '
                                 'test, or leave it out.')
            splits.setdefault(split, []).append(file)
    splits['train'] = sorted(splits.get('train', []), key=lambda file: key_of(file.name))
    return {split: splits[split] for split in wanted if splits[split]}


# ----------------------------------------------------------------------------- reading one

def rows(file):
    """Yield the rows of a file, dicts, of which a few MB are in memory."""
    from datasets import load_dataset
    kind = 'parquet' if SUFFIX.search(file.name)[1] == 'parquet' else 'json'
    yield from load_dataset(kind, data_files=[file.url], split='train', streaming=True)


def text_of(row, source):
    """The text of a row, '' if it is empty or not wanted. Raises ValueError if a column is missing."""
    if source.field not in row:
        raise ValueError(f"{source.repo} should have text in '{source.field}', but its columns are {', '.join(row)}. "
                         'Take another copy.')
    if source.where:
        key, sign, value = source.where
        meta = row.get('meta')
        if not isinstance(meta, dict) or meta.get(key) is None:
            raise ValueError(f'a row has no meta.{key}, so which are {value} cannot be told. {source.where_advice}')
        if (meta[key] == value) != (sign == '=='):
            return ''
    return row[source.field] or ''


def texts(file, source, max_tokens):
    """Yield the documents of a file, as many as max_tokens may need; every one for None."""
    n_characters = 0
    for row in rows(file):
        if text := text_of(row, source):
            yield text
            n_characters += len(text)
            if max_tokens and n_characters > CHARACTERS * max_tokens:
                return


def write_part(folder, file, split, source, state, max_tokens):
    """Make `folder` a dataset of one file, unless it is that already. Returns its tokens. state: of a tokenizer."""
    if not (folder / 'meta.json').is_file():
        documents = texts(file, source, max_tokens)
        first = next(documents, None)
        if first is None:
            save_json(folder / 'meta.json', {'splits': {split: {'tokens': 0}}})
        else:
            documents = itertools.chain([first], documents)
            with contextlib.redirect_stdout(io.StringIO()):
                write_corpus(folder, tokenizer_from_state(state), {split: documents}, workers=1)
    return json.loads((folder / 'meta.json').read_text())['splits'][split]['tokens']


def start_worker(parent):
    """Ends this process with its parent: killed, that cannot do it itself, and the next run must be alone."""
    def watch():
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # or Ctrl-C prints a traceback from each process
    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def mapper(workers):
    """map(), done by so many processes; what has not begun when the block ends is dropped."""
    if workers == 1:
        yield map
        return
    spawn = multiprocessing.get_context('spawn')  # forked, they would share this process's connections
    with ProcessPoolExecutor(workers, spawn, initializer=start_worker, initargs=(os.getpid(),)) as pool:
        try:
            yield pool.map
        finally:
            pool.shutdown(cancel_futures=True)


# ----------------------------------------------------------------------------- all of them

def join(folder, parts, max_tokens, report):
    """Write the dataset `folder`: of the parts, {split: [folder]}, all documents that begin before max_tokens."""
    remove_dataset(folder)
    counts, metas = {}, {part: json.loads((part / 'meta.json').read_text()) for part in sum(parts.values(), [])}
    for split in parts:
        count = counts[split] = {'tokens': 0, 'documents': 0, 'bytes': 0}
        with open(folder / f'{split}.bin', 'wb') as tokens, open(folder / f'{split}_starts.bin', 'wb') as starts:
            for part in parts[split]:
                if not metas[part]['splits'][split]['tokens'] or max_tokens and count['tokens'] >= max_tokens:
                    continue
                data = open_tokens(str(part.resolve()), split)
                n, end = len(data.starts), len(data.tokens)
                if max_tokens:
                    n = int(np.searchsorted(data.starts, max_tokens - count['tokens']))
                    end = int(data.starts[n]) if n < len(data.starts) else end
                data.tokens[:end].tofile(tokens)
                (data.starts[:n] + count['tokens']).tofile(starts)
                count['tokens'] += end
                count['documents'] += n
                # of a part that was cut, in proportion
                count['bytes'] += round(metas[part]['splits'][split]['bytes'] * end / len(data.tokens))
                last = part
        if not count['tokens']:
            raise ValueError(f'No row is left for the {split} split of {folder.name}. Give it other files.')
    shutil.copy(last / 'tokenizer_state.json', folder)
    finish_dataset(folder, metas[last] | {'splits': counts, 'report': report})


def first_row(file, source):
    """Its first row, None if it has none: before hours of work, that it can be read and has the columns we need."""
    if file.name.endswith('.zst') and importlib.util.find_spec('zstandard') is None:
        raise ValueError(f'{file.name} needs the optional package zstandard. Run: pip install zstandard')
    try:
        row = next(rows(file), None)
    except Exception as error:  # of the terms, the network, the file: they share no class
        raise ValueError(f'{file.name} of {source.repo} could not be read ({type(error).__name__}). '
                         f'{source.advice}') from error
    if row is not None:
        text_of(row, source)
    return row


def require_disk(folder, splits, encoding, source, row, max_tokens):
    """
    Print what the token files will need, by the sizes of the source's files and the tokens in a first row, and raise
    ValueError if the disk has less. Returns about how many tokens there will be.
    """
    sample = ((row or {}).get(source.field) or 'a')[:100_000]
    tokens_per_byte = len(encoding.encode_ordinary(sample)) / len(sample.encode(errors='replace'))
    sizes = [sum(file.size * EXPANSION.get(Path(file.name).suffix, 1.0) for file in files) for files in splits.values()]
    n_tokens = sum(min(size * source.share * tokens_per_byte, max_tokens or math.inf) for size in sizes)
    need = 2 * n_tokens * (2 if encoding.n_vocab <= 2 ** 16 else 4) / 1e9
    folder.mkdir(parents=True, exist_ok=True)
    free, there = shutil.disk_usage(folder).free / 1e9, bytes_in(folder) / 1e9
    files = sum(splits.values(), [])
    print(f'{len(files)} files, {sum(file.size for file in files) / 1e9:.2f} GB: about {n_tokens:.1e} tokens, '
          f'{need / 2:.2f} GB on disk and twice that while they are joined; {free:.2f} GB are free', flush=True)
    if need > free + there:
        raise ValueError(f'{folder} needs about {need:.2f} GB, but {free:.2f} GB are free. Free some, choose another '
                         '--out_dir=, or take a part with --max_tokens=.')
    return n_tokens


def bytes_in(folder):
    """Of all token files in a folder, finished or not."""
    total = 0
    for path in folder.rglob('*.bin'):
        with contextlib.suppress(FileNotFoundError):  # renamed or joined in the meantime
            total += path.stat().st_size
    return total


@contextlib.contextmanager
def shown_progress(folder, label, total):
    """A progress bar of the bytes that the processes write into folder."""
    progress, stop = Progress(total, label), threading.Event()

    def watch():
        while not stop.wait(2):
            progress.update(min(bytes_in(folder), total - 1))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def write_parts(folder, split, files, source, state, max_tokens, workers):
    """Write the parts of a split, in order, until they have max_tokens. Returns their folders."""
    parts = [folder / f'{split}_{i:05d}' for i in range(len(files))]
    print(f'{split}: {len(files)} files, {sum((part / "meta.json").is_file() for part in parts)} of them done before',
          flush=True)
    done, n_tokens = [], 0
    write = functools.partial(write_part, split=split, source=source, state=state, max_tokens=max_tokens)
    with mapper(min(workers, len(files))) as map_parts:
        counts = map_parts(write, parts, files)
        for part, file in zip(parts, files):
            try:
                n_tokens += next(counts)
            except Exception as error:  # of the network, the file, a killed process: they share no class
                reason = f'{type(error).__name__}: {error}'[:300]
                raise ValueError(f'{file.name} stopped with {reason}. The parts done are kept: the same command goes '
                                 'on from there.') from error
            done.append(part)
            if max_tokens and n_tokens >= max_tokens:
                break
    return done


def prepare(name, source, local, tokenizer, max_tokens, workers, out_dir):
    """
    The stage of a prepare script; the arguments are its settings. local: a folder or a glob, '' for the hub.
    max_tokens: of each split, to the end of a document.
    """
    if max_tokens is not None and max_tokens < 1 or workers is not None and workers < 1:
        raise ValueError(f'max_tokens is {max_tokens} and workers {workers}; both must be at least 1, or None.')
    folder, commit = Path(out_dir) if out_dir else ROOT / 'data' / name, None
    if local:
        source.repo, source.advice, files = local, 'Get it again.', local_files(local)
    else:
        commit, files = hub_files(source)
    splits = by_split(files, source.splits)
    if not splits:
        raise ValueError(f'{source.repo} has no .parquet, .jsonl or .json files (.gz, .zst) for '
                         f'{" or ".join(source.splits)}. Check the path.')
    if missing := [split for split in source.splits if split not in splits]:
        print(f'{source.repo} has no files for {" and ".join(missing)}: left out')
    encoding = get_tokenizer(tokenizer)
    state = tokenizer_state(encoding)
    report = {'source': source.repo, 'commit': commit, 'field': source.field, 'where': source.where,
              'max_tokens': max_tokens}
    plan = report | {'tokenizer_digest': tokenizer_digest(state), 'files':
                     {split: [[file.name, file.size] for file in files] for split, files in splits.items()}}
    report['plan'] = hashlib.sha256(json.dumps(plan).encode()).hexdigest()[:16]
    with contextlib.suppress(FileNotFoundError, ValueError):  # not prepared yet, or damaged
        if all(open_tokens(str(folder.resolve()), split).meta['report'] == report for split in splits):
            print(f'{folder} is prepared already: same files, same tokenizer.')
            return
    row = first_row(next(iter(splits.values()))[0], source)
    unfinished = folder / 'parts.part'  # a name that git ignores
    if (unfinished / 'plan.json').is_file() and json.loads((unfinished / 'plan.json').read_text()) != report | plan:
        raise ValueError(f'{unfinished} holds parts of other files, or made with other settings: its plan.json says '
                         'which. Run with those again, or delete it.')
    n_tokens = require_disk(folder, splits, encoding, source, row, max_tokens)
    save_json(unfinished / 'plan.json', report | plan)
    with shown_progress(unfinished, f'tokenizing {name}', n_tokens * (2 if encoding.n_vocab <= 2 ** 16 else 4)):
        parts = {split: write_parts(unfinished, split, files, source, state, max_tokens, workers or os.cpu_count())
                 for split, files in splits.items()}
    join(folder, parts, max_tokens, report)
    shutil.rmtree(unfinished)
