"""
Corpora of Parquet or JSON-lines files, from the Hugging Face hub or a local folder, made into token
files: what data/{slimpajama,starcoder,pg19,proof_pile,arxiv}/prepare.py share.

Each file becomes a part in out_dir/parts.part, itself a small dataset of one split, by one of
several processes that read it as a stream; then the parts are joined in order. A part is written
whole or not at all, and named by a hash of all that it depends on. So a run that was killed goes on
with the files it had not finished, and ends with the same bytes.
"""

import contextlib
import glob
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
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from configurator import between
from lib.answers import optional, progress_bar, save_json
from lib.errors import ROOT, UserError
from lib.tokens import (
    get_tokenizer,
    is_prepared,
    new_dataset,
    only_dataset,
    open_tokens,
    stable_hash,
    tokenizer_digest,
    tokenizer_from_state,
    tokenizer_state,
    write_corpus,
)

SUFFIX = re.compile(r'\.(parquet|jsonl?)(\.gz|\.zst)?$')
# The first of these words in a path says which split a file is of.
SPLIT = re.compile(r'(?:^|[/_.-])(train|val|dev|test)(?:id|idation)?(?![a-z])')
# More than a token has on average: max_tokens times as many are read of each file, and what is too
# much is cut off when the parts are joined.
CHARACTERS_PER_TOKEN = 8


@dataclass
class Settings:
    """The settings of every prepare script that reads such a corpus."""
    tokenizer: str = 'hf:TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T'
    max_tokens: int | None = None  # of each split, to the end of a document; None: all
    local: str = ''                # a folder or glob of such files that you have; '': the hub
    workers: int | None = None     # processes; None: one per core
    out_dir: str = ''              # where the token files go; '' for data/NAME


@dataclass
class Source:
    """Where the text of a corpus is. A row is a document."""
    repo: str                      # ORG/NAME of a dataset on the hub
    revision: str                  # commit, or branch
    advice: str                    # what to do where it cannot be had
    splits: tuple = ('train', 'val', 'test')  # if it is one alone, files need not name it
    field: str = 'text'            # the column that holds the text
    where: list | None = None      # [key, sign, value]: only rows whose meta.key == or != value
    where_advice: str = 'Take a copy that has it.'  # what to do where there is no meta.key


@dataclass
class File:
    name: str   # path within the source
    url: str    # what the package datasets opens: a local path, or hf://
    size: int   # bytes


# ---------------------------------------------------------------------- finding the files

def local_files(local):
    """
    All files of a folder, or those of a glob. Their names count from the folder, or from where the
    glob begins.
    """
    pattern = f'{glob.escape(local)}/**' if Path(local).is_dir() else local
    root = Path(re.split(r'[*?[]', pattern)[0] + 'x').parent
    paths = map(Path, glob.glob(pattern, recursive=True))
    return [File(path.relative_to(root).as_posix(), str(path), path.stat().st_size)
            for path in paths if path.is_file()]


def hub_files(source):
    """The commit, and all files of a dataset on the hub."""
    api = optional('huggingface_hub').HfApi()
    try:
        info = api.dataset_info(source.repo, revision=source.revision, files_metadata=True)
    except Exception as error:  # of the name, the revision, the network: they share no class
        raise UserError(f'{source.repo} could not be had ({type(error).__name__}). '
                        f'{source.advice}') from error
    root = f'hf://datasets/{source.repo}@{info.sha}'
    return info.sha, [File(file.rfilename, f'{root}/{file.rfilename}', file.size or 0)
                      for file in info.siblings]


def by_split(files, wanted):
    """
    {split: its files}, in the order to read them: train's in that of a hash, so that the first few
    are of all kinds, val's and test's by name, as evaluations that read the first documents expect.
    """
    splits = {split: [] for split in wanted}
    for file in sorted(files, key=lambda file: file.name):
        if not SUFFIX.search(file.name):
            continue
        found = SPLIT.search(file.name)
        if found:
            split = found[1].replace('dev', 'val')
        elif len(wanted) == 1:
            split = wanted[0]
        else:
            raise UserError(f'{file.name} does not say its split. Name it, or a folder it is in, '
                            'train, val or test, or leave it out.')
        if split in splits:
            splits[split].append(file)
    if 'train' in splits:
        splits['train'].sort(key=lambda file: stable_hash(file.name))
    return {split: files for split, files in splits.items() if files}


# ---------------------------------------------------------------------- reading one

def rows(file):
    """Yield the rows of a file, dicts, of which a few MB are in memory."""
    kind = 'parquet' if SUFFIX.search(file.name)[1] == 'parquet' else 'json'
    yield from optional('datasets').load_dataset(kind, data_files=[file.url], split='train',
                                                 streaming=True)


def text_of(row, source):
    """The text of a row, '' if it is empty or not wanted. Refuses a row without the columns."""
    if source.field not in row:
        raise UserError(f"{source.repo} should have text in '{source.field}', but its columns are "
                        f'{", ".join(row)}. Take another copy.')
    if source.where:
        key, sign, value = source.where
        meta = row.get('meta')
        if not isinstance(meta, dict) or meta.get(key) is None:
            raise UserError(f'a row has no meta.{key}, so which are {value} cannot be told. '
                            f'{source.where_advice}')
        is_value = meta[key] == value
        if is_value != (sign == '=='):
            return ''
    return row[source.field] or ''


def texts(file, source, max_tokens):
    """Yield the documents of a file, as many as max_tokens may need."""
    n_characters = 0
    for row in rows(file):
        text = text_of(row, source)
        if text:
            yield text
            n_characters += len(text)
        if n_characters > CHARACTERS_PER_TOKEN * max_tokens:
            return


def require_readable(file, source):
    """Read the first row of a file, to refuse it before hours of work."""
    if file.name.endswith('.zst'):
        optional('zstandard')
    try:
        row = next(rows(file), None)
    except UserError:
        raise
    except Exception as error:  # of the terms, the network, the file: they share no class
        raise UserError(f'{file.name} of {source.repo} could not be read '
                        f'({type(error).__name__}). {source.advice}') from error
    if row is not None:
        text_of(row, source)


# ---------------------------------------------------------------------- parts

def write_part(part, file, split, source, state, max_tokens):
    """Make the folder `part` a dataset of one file, unless it is that already. Returns its tokens.
    state: of the tokenizer."""
    if not (part / 'meta.json').is_file():
        documents = texts(file, source, max_tokens)
        first = next(documents, None)
        if first is None:
            save_json(part / 'meta.json', {'splits': {split: {'tokens': 0}}})
        else:
            documents = itertools.chain([first], documents)
            with contextlib.redirect_stdout(io.StringIO()):
                write_corpus(part, tokenizer_from_state(state), {split: documents}, workers=1)
    return count_of(part, split)['tokens']


def count_of(part, split):
    return json.loads((part / 'meta.json').read_text())['splits'][split]


def start_worker():
    """Have this process end with its parent, which cannot end it when it is killed itself."""
    def watch():
        multiprocessing.parent_process().join()
        os._exit(1)

    os.environ['TOKENIZERS_PARALLELISM'] = 'false'  # a process a core is enough
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # or Ctrl-C prints a traceback from each process
    threading.Thread(target=watch, daemon=True).start()


def write_parts(parts, split, source, state, max_tokens, workers):
    """
    Write the parts of a split, {folder: File}, in order, until they have max_tokens. Returns the
    folders of those.
    """
    n_done = sum((part / 'meta.json').is_file() for part in parts)
    print(f'{split}: {len(parts)} files, {n_done} of them done before', flush=True)
    write = partial(write_part, split=split, source=source, state=state, max_tokens=max_tokens)
    spawn = multiprocessing.get_context('spawn')  # forked, they would share connections
    # 61 is the most that Windows takes.
    pool = ProcessPoolExecutor(min(workers, len(parts), 61), spawn, start_worker)
    run = map if workers == 1 else pool.map
    written, n_tokens = [], 0
    try:
        with progress_bar(len(parts), split) as bar:
            for part, n in zip(parts, run(write, parts, parts.values())):
                written.append(part)
                n_tokens += n
                bar.update()
                if n_tokens >= max_tokens:
                    break
    except Exception as error:  # of the network, the file, a killed process
        name = list(parts.values())[len(written)].name
        reason = f'{type(error).__name__}: {error}'[:300]
        raise UserError(f'{name} stopped with {reason}. The parts done are kept: the same command '
                        'goes on from there.') from error
    finally:
        pool.shutdown(cancel_futures=True)
    return written


def join_split(folder, split, parts, max_tokens):
    """
    Write the files of a split: of its parts, all documents that begin before max_tokens. Returns
    how many tokens, documents and bytes of text.
    """
    total = {'tokens': 0, 'documents': 0, 'bytes': 0}
    with (open(folder / f'{split}.bin', 'wb') as tokens,
          open(folder / f'{split}_starts.bin', 'wb') as starts):
        for part in parts:
            count = count_of(part, split)
            if not count['tokens']:
                continue
            data = open_tokens(str(part.resolve()), split)
            n = int(np.searchsorted(data.starts, max_tokens - total['tokens']))
            end = int(data.starts[n]) if n < len(data.starts) else len(data.tokens)
            data.tokens[:end].tofile(tokens)
            (data.starts[:n] + total['tokens']).tofile(starts)
            total['tokens'] += end
            total['documents'] += n
            total['bytes'] += round(count['bytes'] * end / count['tokens'])  # in proportion
    return total


# ---------------------------------------------------------------------- all of them

def find_files(source, local):
    """The commit on the hub, or None for local files, and {split: [File]}."""
    commit = None
    if local:
        source.repo, source.advice, files = local, 'Get it again.', local_files(local)
    else:
        commit, files = hub_files(source)
    splits = by_split(files, source.splits)
    if not splits:
        raise UserError(f'{source.repo} has no .parquet, .jsonl or .json files (.gz, .zst) for '
                        f'{" or ".join(source.splits)}. Check the path.')
    missing = [split for split in source.splits if split not in splits]
    if missing:
        print(f'{source.repo} has no files for {" and ".join(missing)}: left out')
    return commit, splits


def prepare(name, source, settings):
    """The stage of a prepare script. settings: {name: value} of Settings."""
    between(settings, 1, 'max_tokens', 'workers')
    folder = Path(settings['out_dir'] or ROOT / 'data' / name)
    commit, splits = find_files(source, settings['local'])
    encoding = get_tokenizer(settings['tokenizer'])
    state = tokenizer_state(encoding)

    unfinished = folder / 'parts.part'  # a name that git ignores
    max_tokens = settings['max_tokens']
    what = commit, source.field, source.where, max_tokens, tokenizer_digest(state)
    parts = {}
    for split, files in splits.items():
        names = [f'{split}_{stable_hash(file.name, file.size, *what):016x}' for file in files]
        parts[split] = {unfinished / name: file for name, file in zip(names, files)}
    report = {'source': source.repo, 'commit': commit, 'field': source.field,
              'where': source.where, 'max_tokens': max_tokens,
              'parts': f'{stable_hash(*(part.name for of in parts.values() for part in of)):016x}'}
    if is_prepared(folder, splits, report):
        print(f'{folder} is prepared already: same files, same tokenizer.')
        return

    require_readable(next(iter(splits.values()))[0], source)
    workers, max_tokens = settings['workers'] or os.cpu_count(), max_tokens or math.inf
    with only_dataset(folder):
        written = {split: write_parts(parts[split], split, source, state, max_tokens, workers)
                   for split in splits}
        with new_dataset(folder, encoding, report) as (temporary, counts):
            for split in splits:
                counts[split] = join_split(temporary, split, written[split], max_tokens)
        shutil.rmtree(unfinished)
