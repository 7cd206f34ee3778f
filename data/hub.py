"""
Corpora of Parquet or JSON-lines files, from the Hugging Face hub or a local folder, made into token
files. data/{slimpajama,starcoder,pg19,proof_pile,arxiv}/prepare.py share this.

The package datasets reads the files as a stream, so a corpus need not fit on the disk. A run that
was killed goes on where it was and ends with the same bytes: see write_split() in tokenizer.py.
"""

import math
import re
from pathlib import Path

from configurator import ROOT, UserError

from data import stable_hash
from tokenizer import SPLITS, get_tokenizer, write_dataset

KIND = re.compile(r'\.(parquet|json)l?(\.gz|\.zst)?$')
# The first of these words in a file's name, which includes its folders, is its split.
SPLIT = re.compile(r'(?:^|[/_.-])(train|val|dev|test)(?:id|idation)?(?![a-z])')


def find_files(repo, revision, local):
    """{name: path or URL} of the files of a local folder, or one file, or a dataset on the hub."""
    if local:
        root = Path(local)
        folder, paths = (root, root.rglob('*')) if root.is_dir() else (root.parent, [root])
        return {path.relative_to(folder).as_posix(): str(path) for path in paths}
    from huggingface_hub import HfApi
    info = HfApi().dataset_info(repo, revision=revision)
    return {file.rfilename: f'hf://datasets/{repo}@{info.sha}/{file.rfilename}'
            for file in info.siblings}


def by_split(files, splits):
    """
    {split: the paths of its files}, in the order to read them. For train this is the order of a
    hash, so that the first few files are of all kinds. For val and test it is by name, because
    evaluations read the first documents. If only one split is wanted, files need not name it.
    """
    found = {split: [] for split in splits}
    for name in sorted(filter(KIND.search, files)):
        split = SPLIT.search(name)
        if not split and len(splits) > 1:
            raise UserError(f'{name} does not say its split. Name it, or a folder it is in, '
                            'train, val or test, or leave it out.')
        split = split[1].replace('dev', 'val') if split else splits[0]
        found.get(split, []).append(name)
    if 'train' in found:
        found['train'].sort(key=stable_hash)
    return {split: [files[name] for name in names] for split, names in found.items() if names}


def stream(paths, field, where):
    """The rows of files of one kind, in order, as a stream of {'text': str}. See prepare()."""
    from datasets import load_dataset
    from datasets.data_files import DataFilesList

    def text_of(row):
        if where and (row['meta'][where[0]] == where[1]) != where[2]:
            return {'text': ''}  # the writer leaves out empty documents
        return {'text': row[field] or ''}

    kind, columns = KIND.search(paths[0])[1], [field, 'meta'][:2 if where else 1]
    # A DataFilesList is taken as it is. In a list, each path would cost a request to the hub.
    rows = load_dataset(kind, data_files=DataFilesList(paths, []), split='train', streaming=True,
                        **{'columns': columns} if kind == 'parquet' else {})
    return rows.map(text_of)


def prepare(name, repo, revision, local, tokenizer, max_tokens, out_dir, splits=SPLITS,
            field='text', where=None):
    """
    Prepare data/NAME. The arguments up to out_dir are the settings of its page. field: the column
    that holds the text. where: (key, value, keep), to keep or to leave out the rows whose meta.key
    is that value.
    """
    try:
        found = by_split(find_files(repo, revision, local), splits)
        streams = {split: stream(paths, field, where) for split, paths in found.items()}
    except Exception as error:  # errors of name, terms, network and file share no class
        raise UserError(f'{local or repo} cannot be read ({error!r}). Give your own files with '
                        '--local=FOLDER. --help says which.') from error
    about = {split: f'{len(paths)} from {paths[0]} on' for split, paths in found.items()}
    write_dataset(out_dir or ROOT / 'data' / name, get_tokenizer(tokenizer), streams,
                  max_tokens or math.inf, files=about, where=where)
