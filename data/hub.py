"""
Corpora of Parquet or JSON-lines files, from the Hugging Face hub or a local folder, made into token
files. data/{slimpajama,starcoder,pg19,proof_pile,arxiv}/prepare.py share this.

The package datasets reads the files as a stream. After each few MB of text,
out_dir/tokens.part/SPLIT.json says how much is written and where the stream is, so a run that was
killed goes on from there and ends with the same bytes.
"""

import itertools
import json
import math
import os
import re
import shutil
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from configurator import between
from lib.answers import optional, progress_bar, save_json
from lib.errors import ROOT, UserError, fault_of
from lib.tokenizers import get_tokenizer, tokenizer_digest, tokenizer_state
from lib.tokens import (
    MIB,
    UNFINISHED,
    SplitWriter,
    finish_dataset,
    is_prepared,
    only_dataset,
    split_files,
    stable_hash,
)

SUFFIX = re.compile(r'\.(parquet|jsonl?)(\.gz|\.zst)?$')
# The first of these words in a file's name, which includes its folders, is its split.
SPLIT = re.compile(r'(?:^|[/_.-])(train|val|dev|test)(?:id|idation)?(?![a-z])')
BATCH = 8 * MIB  # characters that are read between two savings of progress


@dataclass
class Source:
    """Where the text of a corpus is. A row is a document."""
    repo: str                      # ORG/NAME of a dataset on the hub
    revision: str                  # commit, or branch
    advice: str                    # what to do if it cannot be read
    splits: tuple = ('train', 'val', 'test')  # if there is only one, files need not name it
    field: str = 'text'            # the column that holds the text
    where: list | None = None      # [key, sign, value]: only rows whose meta.key == or != value
    where_advice: str = 'Take a copy that has it.'  # what to do if there is no meta.key


# ---------------------------------------------------------------------- finding the files

def local_files(local):
    """{name: path} of all files of a folder, or of one file. Names are relative to the folder."""
    root = Path(local)
    paths, folder = ([root], root.parent) if root.is_file() else (root.rglob('*'), root)
    return {path.relative_to(folder).as_posix(): str(path) for path in paths if path.is_file()}


def hub_files(source):
    """The commit of a dataset on the hub, and {name: URL} of all its files."""
    api = optional('huggingface_hub').HfApi()
    try:
        info = api.dataset_info(source.repo, revision=source.revision)
    except Exception as error:  # errors of name, revision and network share no class
        raise UserError(f'{source.repo} could not be found on the hub ({type(error).__name__}). '
                        f'{source.advice}') from error
    root = f'hf://datasets/{source.repo}@{info.sha}'
    return info.sha, {file.rfilename: f'{root}/{file.rfilename}' for file in info.siblings}


def by_split(names, wanted):
    """
    {split: the names of its files}, in the order to read them. For train this is the order of a
    hash, so that the first few files are of all kinds. For val and test it is by name, because
    evaluations read the first documents.
    """
    splits, others = {split: [] for split in wanted}, []
    for name in sorted(name for name in names if SUFFIX.search(name)):
        found = SPLIT.search(name)
        if not found and len(wanted) > 1:
            raise UserError(f'{name} does not say its split. Name it, or a folder it is in, '
                            'train, val or test, or leave it out.')
        split = found[1].replace('dev', 'val') if found else wanted[0]
        splits.get(split, others).append(name)
    if others:
        print(f'{len(others)} files of other splits are left out, such as {others[0]}')
    if 'train' in splits:
        splits['train'].sort(key=stable_hash)
    return {split: names for split, names in splits.items() if names}


def find_files(source, local):
    """The commit on the hub, or None for local files, and {split: {name: path or URL}}."""
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
    return commit, {split: {name: files[name] for name in names}
                    for split, names in splits.items()}


# ---------------------------------------------------------------------- reading one

def open_rows(name, url):
    """The rows of a file, as an IterableDataset of dicts."""
    if name.endswith('.zst'):
        optional('zstandard')
    kind = 'parquet' if SUFFIX.search(name)[1] == 'parquet' else 'json'
    return optional('datasets').load_dataset(kind, data_files=[url], split='train', streaming=True)


def text_of(row, source):
    """The text of a row; '' if it is empty or not wanted. Refuses a row without the columns."""
    if source.field not in row:
        raise UserError(f"{source.repo} should have text in '{source.field}', but its columns are "
                        f'{", ".join(row)}. Take another copy.')
    if source.where:
        key, sign, value = source.where
        meta = row.get('meta')
        if not isinstance(meta, dict) or meta.get(key) is None:
            raise UserError(f'a row has no meta.{key}, so it cannot be told whether it is {value}. '
                            f'{source.where_advice}')
        is_value = meta[key] == value
        if is_value != (sign == '=='):
            return ''
    text = row[source.field] or ''
    if not isinstance(text, str):
        raise UserError(f"'{source.field}' of a row in {source.repo} is {text!r:.80}, not text. "
                        'Take another copy.')
    return text


@contextmanager
def reading(name, source):
    """A context that turns an error in reading a file into a UserError."""
    try:
        yield
    except UserError:
        raise
    except StopIteration as error:  # what `datasets` raises for an empty file
        raise UserError(f'{name} of {source.repo} is empty. {source.advice}') from error
    except Exception as error:  # errors of terms, network and file share no class
        reason = f'{type(error).__name__}: {error}'[:300]
        raise UserError(f'{name} of {source.repo} could not be read ({reason}). {source.advice} '
                        'What was written before is kept: the same command goes on from '
                        'there.') from error


def next_texts(rows, source):
    """The texts of the next rows, about BATCH characters; an empty list at the end."""
    texts, size = [], 0
    for row in rows:
        texts.append(text_of(row, source))
        size += len(texts[-1])
        if size >= BATCH:
            break
    return texts


# ---------------------------------------------------------------------- writing a split

def write_split(folder, split, files, source, encoding, max_tokens):
    """
    Write the token files of a split into folder, or go on writing them. files: {name: path or URL}.
    Returns how many tokens, documents and bytes of text they hold.
    """
    progress, place = folder / f'{split}.json', {'file': 0, 'stream': None, 'count': None}
    if progress.is_file():
        with fault_of(progress, 'the progress of this script', f'Remove {folder}.'):
            place = json.loads(progress.read_text())
        print(f'{split}: goes on after {place["count"]["tokens"]:,} tokens')
    with (progress_bar(None, split) as bar,
          closing(SplitWriter(folder, split, encoding, bar, place['count'])) as writer):
        for i, (name, url) in list(enumerate(files.items()))[place['file']:]:
            if writer.count['tokens'] >= max_tokens:
                break  # open no file that nothing is taken from
            with reading(name, source):
                stream = open_rows(name, url)
                if i == place['file'] and place['stream']:
                    stream.load_state_dict(place['stream'])
                rows = iter(stream)
                while writer.count['tokens'] < max_tokens and (texts := next_texts(rows, source)):
                    writer.write(texts, max_tokens)
                    writer.sync()
                    save_json(progress, {'file': i, 'stream': stream.state_dict(),
                                         'count': writer.count})
    return writer.count


def prepare(name, source, settings):
    """The stage of a prepare script. settings: {name: value} of the script."""
    between(settings, 1, 'max_tokens')
    folder = Path(settings['out_dir'] or ROOT / 'data' / name)
    commit, splits = find_files(source, settings['local'])
    encoding = get_tokenizer(settings['tokenizer'])

    # What the token files depend on. A file on the hub cannot change without its commit.
    here = {} if commit else {url: Path(url).stat() for names in splits.values()
                              for url in names.values()}
    files = [[split, name, here[url].st_size if here else None]
             for split, names in splits.items() for name, url in names.items()]
    built = folder / 'meta.json'
    is_newer = built.exists() and any(one.st_mtime > built.stat().st_mtime
                                      for one in here.values())
    report = {'source': source.repo, 'commit': commit, 'field': source.field,
              'where': source.where, 'max_tokens': settings['max_tokens'],
              'files': f'{stable_hash(*files):016x}',
              'tokenizer_digest': tokenizer_digest(tokenizer_state(encoding))}
    if not is_newer and is_prepared(folder, splits, report):
        return
    for names in splits.values():  # a wrong file is refused before hours of work
        first = next(iter(names))
        with reading(first, source):
            next_texts(open_rows(first, names[first]).take(1), source)

    unfinished = folder / UNFINISHED
    with only_dataset(folder):
        begun = unfinished / 'report.json'
        with fault_of(begun, 'the report of this script', f'Remove {unfinished}.'):
            goes_on = begun.is_file() and json.loads(begun.read_text()) == report
        if not goes_on:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            save_json(begun, report)
        elif not built.exists():  # a kill while finish_dataset() moved files has left some there
            for name in itertools.chain(*map(split_files, splits)):
                if (folder / name).exists() and not (unfinished / name).exists():
                    os.replace(folder / name, unfinished / name)
        counts = {}
        for split, names in splits.items():
            counts[split] = write_split(unfinished, split, names, source, encoding,
                                        settings['max_tokens'] or math.inf)
        finish_dataset(folder, encoding, counts, report)
        shutil.rmtree(unfinished)
