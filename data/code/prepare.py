"""
Python source, a text that repeats itself over long distances: the *.py files of the wheels that
manifest.json lists. Each package goes to train, val or test as a whole. Copies of a file are
dropped, and files that share a passage with an earlier split. The text has several licenses and is
not part of this project: pip downloads the wheels once and keeps them beside the token files.

$ python data/code/prepare.py     # downloads 49 MB; 20.5M tokens to train on

bpe_1024.tiktoken is a BPE of 1,024 tokens that was trained on the train split.
"""

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from configurator import ROOT, UserError, configure

from data import stable_hash
from tokenizer import SPLITS, get_tokenizer, write_dataset

tokenizer = f'{ROOT}/data/code/bpe_1024.tiktoken'  # or another, as in data/stdlib/prepare.py
manifest = 'data/code/manifest.json'  # the list of wheels, a file of the project
out_dir = 'data/code'  # a folder of the project, where wheels and token files go

PASSAGE = 200       # characters of consecutive lines that mark two files as related
LARGEST = 200_000   # bytes of a file; larger ones are mostly tables that programs wrote
SKIP = {'test', 'tests'}  # folders left out


def download(file, sha256, folder):
    """Have pip put a wheel into a folder, unless it is there. Returns its path."""
    path = folder / file
    if not path.exists():
        print(f'downloading {file}', flush=True)
        package, version, python, abi, system = path.stem.split('-')
        done = subprocess.run(  # pip builds nothing, because a build runs a stranger's code
            [sys.executable, '-m', 'pip', 'download', '--quiet', '--no-deps',
             '--only-binary=:all:', f'--dest={folder}', f'--platform={system}', f'--abi={abi}',
             f'--implementation={python[:2]}', '--python-version=3.11', '--',
             f'{package}=={version}'])
        if done.returncode:
            raise UserError('pip cannot download it. Instead of the wheels, Python\'s own library '
                            'will do: python data/stdlib/prepare.py '
                            '--tokenizer=data/code/bpe_1024.tiktoken --out_dir=data/code')
    if hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
        raise UserError(f'{path} has another SHA-256 than in the manifest. Remove it, then try '
                        'again.')
    return path


def sources(path):
    """{name: text} of the Python sources in a wheel."""
    texts = {}
    with zipfile.ZipFile(path) as wheel:
        for file in wheel.infolist():
            is_source = file.filename.endswith('.py') and not SKIP & {*file.filename.split('/')}
            if is_source and 0 < file.file_size <= LARGEST:
                texts[file.filename] = wheel.read(file).decode(errors='replace')
    return texts


def passages(text):
    """
    The hashes of a text's passages. A passage begins at a line and ends with the line that gives it
    PASSAGE characters. A shorter text is one passage. Empty lines, and spaces around a line, do not
    count.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    hashes, end, length = set(), 0, 0
    for start, line in enumerate(lines):
        while length < PASSAGE and end < len(lines):
            length += len(lines[end])
            end += 1
        if length < PASSAGE and start > 0:
            break
        hashes.add(hash('\n'.join(lines[start:end])))
        length -= len(line)  # the next passage starts a line later
    return hashes


def without_shared(splits):
    """
    {split: [text]} of {split: {name: text}}, in the order of a hash: without files that share a
    passage with an earlier split, and without copies of a file.
    """
    kept, seen = {}, set()
    for split, texts in splits.items():
        # equal texts are one key, so copies go here
        by_text = {texts[name]: passages(texts[name]) for name in sorted(texts, key=stable_hash)}
        own = {text: hashes for text, hashes in by_text.items() if not hashes & seen}
        seen = seen.union(*own.values())
        kept[split] = list(own)
        print(f'{split}: {len(own)} of {len(texts)} files are kept')
    return kept


def main():
    folder, splits = ROOT / out_dir, {split: {} for split in SPLITS}
    wheels = json.loads((ROOT / manifest).read_text('utf-8'))
    for wheel in wheels:
        path = download(wheel['file'], wheel['sha256'], folder / 'wheels')
        splits[wheel['split']] |= sources(path)
    texts = without_shared(splits)
    write_dataset(folder, get_tokenizer(tokenizer, texts['train']), texts, source='wheels')


if __name__ == '__main__':
    configure(globals())
    main()
