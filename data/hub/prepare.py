"""
Corpora of Parquet or JSON-lines files, from the Hugging Face hub or a local folder, made into token
files. The other files here are configs, one for each corpus, with its sources.

$ python data/hub/prepare.py data/hub/pg19.py                  # reads the hub, as a stream
$ python data/hub/prepare.py data/hub/pg19.py --local=FOLDER   # your own files, such as
                                                               # train.jsonl, val-1.parquet

The package datasets reads the files as a stream, so a corpus need not fit on the disk. A run that
was stopped reads the stream again, but goes on behind the documents that it had already tokenized.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from configurator import ROOT, configure

from data import stable_hash
from tokenizer import SPLITS, get_tokenizer, write_dataset

repo = ''                      # on the hub
revision = 'main'              # its commit, tag or branch
local = ''                     # a folder of such files; '': read the hub's
splits: list[str] = [*SPLITS]  # those that are read, as far as there are files
field = 'text'                 # the column that holds the text
only = ''                      # keep only rows whose meta has this value; '': all
without = ''                   # leave out rows whose meta has this value
tokenizer = 'hf:TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T'
max_tokens: int | None = None  # of each split, to the end of a document; None: all
out_dir = ''                   # a folder of the project, where the token files go

KIND = re.compile(r'\.(parquet|json)l?(\.gz|\.zst)?$')
# The first of these words in a file's name, which includes its folders, is its split. Files without
# one are left out.
SPLIT = re.compile(r'(?:^|[/_.-])(train|val|dev|test)(?:id|idation)?(?![a-z])')


def find_files():
    """{name: path or URL} of the files of the local folder, or of the dataset on the hub."""
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


def stream(paths):
    """Yield the texts of files of one kind, in order."""
    from datasets import load_dataset
    from datasets.data_files import DataFilesList
    chooses = only or without
    kind, columns = KIND.search(paths[0])[1], [field, 'meta'] if chooses else [field]
    # A DataFilesList is taken as it is. In a list, each path would cost a request to the hub.
    rows = load_dataset(kind, data_files=DataFilesList(paths, []), split='train', streaming=True,
                        **{'columns': columns} if kind == 'parquet' else {})
    for row in rows:
        about = row['meta'].values() if chooses else ()  # with neither setting each row passes
        if (not only or only in about) and without not in about:
            yield row[field]


def main():
    files, texts, sources = find_files(), {}, {}
    for split in splits:
        paths = paths_of(split, files)
        if paths:
            texts[split] = stream(paths)
            sources[split] = f'{len(paths)} from {paths[0]} on'
    write_dataset(ROOT / out_dir, get_tokenizer(tokenizer), texts, max_tokens, go_on=True,
                  files=sources, field=field, only=only, without=without)


if __name__ == '__main__':
    configure(globals())
    main()
