"""
The standard library of the Python that runs this, as text: training data that every installation
already has. Each file is a document. A hash of its path decides whether it goes to train, val or
test.

$ python data/stdlib/prepare.py                        # bytes, 7 MB: a second
$ python data/stdlib/prepare.py --tokenizer=bpe:4096   # trains a BPE on it
"""

import platform
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from configurator import ROOT, configure

from tokenizer import SPLITS, get_tokenizer, library_files, split_of, write_dataset

tokenizer = 'bytes'   # bytes, gpt2, bpe:VOCABULARY, FILE.tiktoken, tokenizer.json, hf:ORG/NAME
val_fraction = 0.07   # of the files
test_fraction = 0.07  # of the files
out_dir = 'data/stdlib'  # a folder of the project, where the token files go


def main():
    splits = {split: [] for split in SPLITS}
    for name, text in library_files().items():
        splits[split_of(name, val_fraction, test_fraction)].append(text)
    write_dataset(ROOT / out_dir, get_tokenizer(tokenizer, splits['train']),
                  splits, source=f'standard library of Python {platform.python_version()}')


if __name__ == '__main__':
    configure(globals())
    main()
