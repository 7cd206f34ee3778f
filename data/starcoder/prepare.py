"""
StarCoderData in all languages, the smaller part of the paper's pretraining data (Section 4.1). It
has only a train split, because the paper validates on SlimPajama. It is gated: first accept its
terms on its page and log in. Sources: Li et al. 2023, arXiv:2305.06161;
scripts/prepare_starcoder.py of jzhang38/TinyLlama.

$ hf auth login && python data/starcoder/prepare.py
$ python data/starcoder/prepare.py --local=FOLDER --max_tokens=10_000_000   # part of your own
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from configurator import configure, settings
from data.hub import Source, prepare

repo = 'bigcode/starcoderdata'  # on the hub
revision = 'main'              # not pinned, because we knew no commit
tokenizer = 'hf:TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T'
max_tokens: int | None = None  # of each split, to the end of a document; None: all
local = ''                     # a folder of such files, or one file; '': read the hub's
out_dir = ''                   # where the token files go; '' for data/NAME


def main():
    source = Source(repo, revision, splits=['train'], field='content', advice=(
        'It is gated: accept its terms on huggingface.co/datasets/bigcode/starcoderdata and run '
        'hf auth login; or give your own files: --local=FOLDER with .parquet or .jsonl with a '
        'column content.'))
    prepare('starcoder', source, settings(globals()))


if __name__ == '__main__':
    configure(globals())
    main()
