"""
Corpora of Parquet or JSON-lines files, from the Hugging Face hub or a local folder, made into token
files. data/{slimpajama,starcoder,pg19,proof_pile,arxiv}/prepare.py share this.

The package datasets reads the files as a stream, so a corpus need not fit on the disk. A run that
was stopped reads the stream again, but goes on behind the documents that it had already tokenized.
"""

import re
from pathlib import Path

from configurator import ROOT

from data import stable_hash
from tokenizer import SPLITS, get_tokenizer, write_dataset

KIND = re.compile(r'\.(parquet|json)l?(\.gz|\.zst)?$')
# The first of these words in a file's name, which includes its folders, is its split. Files without
# one are left out.
SPLIT = re.compile(r'(?:^|[/_.-])(train|val|dev|test)(?:id|idation)?(?![a-z])')


def find_files(repo, revision, local):
    """{name: path or URL} of the files of a local folder, or of a dataset on the hub."""
    if local:
        return {path.relative_to(local).as_posix(): str(path) for path in Path(local).rglob('*')}
    from huggingface_hub import HfApi
    info = HfApi().dataset_info(repo, revision=revision)
    return {file.rfilename: f'hf://datasets/{repo}@{info.sha}/{file.rfilename}'
            for file in info.siblings}


def paths_of(split, files):
    """
    The paths of the files of a split, in the order to read them. For train this is the order of a
    hash, so that the first few files are of all kinds. For val and test it is by name, because
    evaluations read the first documents.
    """
    names = []
    for name in sorted(filter(KIND.search, files), key=stable_hash if split == 'train' else None):
        named = SPLIT.search(name)
        if named and named[1].replace('dev', 'val') == split:
            names.append(files[name])
    return names


def stream(paths, field, keep):
    """Yield the texts of files of one kind, in order. See prepare()."""
    from datasets import load_dataset
    from datasets.data_files import DataFilesList
    kind, columns = KIND.search(paths[0])[1], [field, 'meta'] if keep else [field]
    # A DataFilesList is taken as it is. In a list, each path would cost a request to the hub.
    rows = load_dataset(kind, data_files=DataFilesList(paths, []), split='train', streaming=True,
                        **{'columns': columns} if kind == 'parquet' else {})
    for row in rows:
        if keep is None or keep(row['meta']):
            yield row[field]


def prepare(name, repo, revision, local, tokenizer, max_tokens, out_dir, splits=SPLITS,
            field='text', keep=None):
    """
    Prepare data/NAME. The arguments up to out_dir are the settings of its page. field: the column
    that holds the text. keep: a function of a row's meta that says if the row is kept; None: all.
    """
    files, texts, sources = find_files(repo, revision, local), {}, {}
    for split in splits:
        paths = paths_of(split, files)
        if paths:
            texts[split] = stream(paths, field, keep)
            sources[split] = f'{len(paths)} from {paths[0]} on'
    write_dataset(out_dir or ROOT / 'data' / name, get_tokenizer(tokenizer), texts,
                  max_tokens, go_on=True, files=sources,
                  kept=keep.__name__ if keep else 'all')
