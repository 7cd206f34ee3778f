"""
The standard library of the Python that runs this, as text: training data that every installation
already has. Each file is a document. A hash of its path decides whether it goes to train, val or
test.

$ python data/stdlib/prepare.py                        # bytes, 7 MB: a second
$ python data/stdlib/prepare.py --tokenizer=bpe:4096   # trains a BPE on it
"""

import hashlib
import platform
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from configurator import between, configure
from lib.errors import ROOT, UserError
from lib.tokenizers import tokenizer_for, version_of
from lib.tokens import SPLITS, is_prepared, only_dataset, split_by_hash, stable_hash, write_corpus

tokenizer = 'bytes'   # bytes, gpt2, bpe:VOCABULARY, FILE.tiktoken, tokenizer.json, hf:ORG/NAME
val_fraction = 0.07   # of the files
test_fraction = 0.07  # of the files
out_dir = ''          # where the token files go; '' for data/stdlib

# Leave out packages that some distributions do not install, tests, and tables made by programs.
SKIP = {'distutils', 'encodings', 'ensurepip', 'idlelib', 'lib2to3', 'pydoc_data', 'tkinter',
        'turtle', 'turtledemo', '__phello__', 'test', 'tests'}


def library_files(folder):
    """{path relative to folder: text} of the library's Python sources, in the order of a hash."""
    texts = {}
    for name in sys.stdlib_module_names:
        for path in [folder / f'{name}.py', *(folder / name).rglob('*.py')]:
            relative = path.relative_to(folder)
            if path.is_file() and not SKIP & {name, *relative.parts}:
                texts[relative.as_posix()] = path.read_text(encoding='utf-8')
    return {name: texts[name] for name in sorted(texts, key=stable_hash)}


def main():
    between(globals(), 0, 'val_fraction', 'test_fraction', most=1)
    if val_fraction + test_fraction >= 1:
        raise UserError('val_fraction and test_fraction must sum up to less than 1, so that there '
                        'is text to train on.')
    folder, library = Path(out_dir or ROOT / 'data/stdlib'), sysconfig.get_paths()['stdlib']
    texts = library_files(Path(library))
    if not texts:
        raise UserError(f'{library} has no Python sources. Use a Python that is installed with its '
                        'library.')
    everything = '\0'.join(f'{name}\0{text}' for name, text in texts.items())
    digest = hashlib.sha256(everything.encode()).hexdigest()
    report = {'python': platform.python_version(), 'files': len(texts), 'sha256': digest,
              'tokenizer': version_of(tokenizer), 'val_fraction': val_fraction,
              'test_fraction': test_fraction}
    print(f'standard library of Python {report["python"]}: {len(texts)} files, sha256 {digest}')
    shares = {'train': 1, 'val': val_fraction, 'test': test_fraction}
    splits = {split: [] for split in SPLITS if shares[split]}
    if is_prepared(folder, splits, report):
        return
    for name, text in texts.items():
        splits[split_by_hash(name, val_fraction, test_fraction)].append(text)
    with only_dataset(folder):
        encoding = tokenizer_for(tokenizer, splits['train'])
        write_corpus(folder, encoding, splits, report=report)


if __name__ == '__main__':
    configure(globals())
    main()
