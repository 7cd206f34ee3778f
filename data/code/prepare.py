"""
Python source, a text that repeats itself over long distances: the *.py files of the wheels that
manifest.json lists. Each package goes to train, val or test as a whole. Copies of a file are
dropped, and files that share a passage with an earlier split. The text has several licenses and is
not part of this project: pip downloads the wheels once and keeps them beside the token files.

$ python data/code/prepare.py     # downloads 49 MB; 20.5M tokens to train on
$ python data/code/prepare.py --tokenizer=bpe:1024 --out_dir=out/code    # trains the BPE anew

The second command made this folder's BPE of 1,024 tokens. If pip reaches no index, the standard
library of the Python that runs this replaces the wheels.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from configurator import configure
from data.stdlib.prepare import library_files
from lib.errors import ROOT, UserError, fault_of, require_kinds
from lib.tokenizers import tokenizer_for, version_of
from lib.tokens import (
    SPLITS,
    is_prepared,
    only_dataset,
    split_by_hash,
    stable_hash,
    write_corpus,
)

tokenizer = ''  # as in data/stdlib/prepare.py; '' for data/code/bpe_1024.tiktoken
manifest = ''   # the list of wheels; '' for data/code/manifest.json
out_dir = ''    # where wheels and token files go; '' for data/code

BPE = 'bpe_1024.tiktoken'
PASSAGE = 200       # characters of consecutive lines that mark two files as related
LARGEST = 200_000   # bytes of a file; larger ones are mostly tables that programs wrote
SKIP = {'test', 'tests'}  # folders left out
FRACTION = 0.07     # of the standard library's files, for val and for test


# ---------------------------------------------------------------------- wheels

def is_whole(path, wheel):
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == wheel['sha256']


def pip_download(wheel, folder):
    """Have pip put a wheel of the manifest into a folder. Returns what pip said if it failed."""
    name, version, python, abi, system = wheel['file'].removesuffix('.whl').split('-')
    command = [sys.executable, '-m', 'pip', 'download', f'{name}=={version}', '--quiet',
               '--no-deps', '--only-binary=:all:', f'--dest={folder}', f'--platform={system}',
               f'--abi={abi}', f'--implementation={python[:2]}', '--python-version=3.11',
               '--retries=2']
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stderr.splitlines()
    if done.returncode and any('No module named pip' in line for line in lines):
        raise UserError(f'{sys.executable} has no pip to download the wheels with. Install it: '
                        'python -m ensurepip, or uv pip install pip.')
    errors = [line for line in lines if line.startswith('ERROR')]
    return '' if done.returncode == 0 else (errors or lines or ['pip failed'])[-1]


def get_wheels(wheels, folder):
    """
    Download the wheels that `folder` lacks. Returns True if it then holds all of them, False if pip
    cannot even get the first one. Raises UserError if pip fails later, or if a wheel is not the one
    of the manifest.
    """
    unchecked = folder / 'unchecked.part'
    for i, wheel in enumerate(wheels):
        path = folder / wheel['file']
        if is_whole(path, wheel):
            continue
        print(f"downloading {wheel['file']}", flush=True)
        shutil.rmtree(unchecked, ignore_errors=True)
        problem = pip_download(wheel, unchecked)
        if problem and i == 0:
            print(f'{wheel["file"]} could not be downloaded: {problem}')
            return False
        if problem:
            raise UserError(f'{wheel["file"]} could not be downloaded: {problem}. The {i} wheels '
                            f'before it are in {folder}: the same command goes on from there.')
        if not is_whole(unchecked / wheel['file'], wheel):
            raise UserError(f'{wheel["file"]} was downloaded, but its SHA-256 is not the one of '
                            'the manifest. Nothing was written. Check the index that pip uses.')
        os.replace(unchecked / wheel['file'], path)
    return True


def sources(path):
    """{name: text} of the Python sources in a wheel."""
    texts = {}
    with zipfile.ZipFile(path) as wheel:
        for file in wheel.infolist():
            *folders, name = file.filename.split('/')
            is_read = name.endswith('.py') and 0 < file.file_size <= LARGEST
            if is_read and not SKIP & {*folders}:
                texts[file.filename] = wheel.read(file).decode(errors='replace')
    return texts


# ---------------------------------------------------------------------- what splits share

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
        length -= len(line)
    return hashes


def without_shared(splits):
    """
    {split: [text]} of {split: {name: text}}, in the order of a hash: without files that share a
    passage with an earlier split, and without copies of a file.
    """
    kept, seen = {}, set()
    for split, texts in splits.items():
        by_text = {texts[name]: passages(texts[name]) for name in sorted(texts, key=stable_hash)}
        own = {text: hashes for text, hashes in by_text.items() if not hashes & seen}
        seen = seen.union(*own.values())
        kept[split] = list(own)
        print(f'{split}: {len(own)} files are kept. {len(texts) - len(by_text)} copies and '
              f'{len(by_text) - len(own)} files that share a passage with an earlier split are '
              'dropped.')
    return kept


# ---------------------------------------------------------------------- both sources of text

def texts_of_wheels(wheels, folder):
    splits = {split: {} for split in SPLITS}
    for wheel in wheels:
        splits[wheel['split']] |= sources(folder / wheel['file'])
    return splits


def texts_of_library():
    splits = {split: {} for split in SPLITS}
    for name, text in library_files(Path(sysconfig.get_paths()['stdlib'])).items():
        splits[split_by_hash(name, FRACTION, FRACTION)][name] = text
    return splits


def main():
    folder = Path(out_dir or ROOT / 'data/code')
    path = Path(manifest or ROOT / 'data/code/manifest.json')
    if not path.is_file():
        raise UserError(f'There is no manifest {path}. Check the path.')
    listing = path.read_bytes()
    with fault_of(path, 'a manifest like data/code/manifest.json', 'Correct it.'):
        wheels, cache = json.loads(listing), folder / 'wheels'
        for wheel in wheels:
            require_kinds(wheel, file=str, split=str, sha256=str)
            if wheel['split'] not in SPLITS or wheel['file'].count('-') != 4:
                raise ValueError(f'no split, or not the name of a wheel: {wheel}')
    chosen = tokenizer or str(ROOT / 'data/code' / BPE)
    report = {'source': 'wheels', 'manifest_sha256': hashlib.sha256(listing).hexdigest(),
              'tokenizer': version_of(chosen)}
    if is_prepared(folder, SPLITS, report):
        return
    with only_dataset(folder):
        cache.mkdir(parents=True, exist_ok=True)
        if get_wheels(wheels, cache):
            splits = texts_of_wheels(wheels, cache)
        else:
            report['source'] = f'standard library of Python {platform.python_version()}'
            print(f'Instead of the wheels, the {report["source"]} is used. It is a smaller text, '
                  'so losses on the two cannot be compared.')
            splits = texts_of_library()
            if is_prepared(folder, SPLITS, report):
                return
        splits = without_shared(splits)
        n_bytes = sum(len(text) for texts in splits.values() for text in texts)
        encoding = tokenizer_for(chosen, splits['train'])
        write_corpus(folder, encoding, splits, report=report, total_bytes=n_bytes)


if __name__ == '__main__':
    configure(globals())
    main()
