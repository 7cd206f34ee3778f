"""
StarCoderData, every language, the smaller part of the paper's pretraining data (Section 4.1). It
has a train split only: the paper validates on SlimPajama alone. It is gated: accept its terms on
its page and log in first. Sources: Li et al. 2023, arXiv:2305.06161; scripts/prepare_starcoder.py
of jzhang38/TinyLlama.

$ hf auth login && python data/starcoder/prepare.py
$ python data/starcoder/prepare.py --local=FOLDER --max_tokens=10_000_000   # a part of yours
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from configurator import configure, settings
from data.hub import Settings, Source, prepare

repo = 'bigcode/starcoderdata'  # on the hub
revision = 'main'              # not pinned: no commit was known to us


def main():
    source = Source(repo, revision, splits=['train'], field='content', advice=(
        'It is gated: accept its terms on huggingface.co/datasets/bigcode/starcoderdata and run '
        'hf auth login; or give files you have, --local=FOLDER with .parquet or .jsonl that have '
        'content.'))
    prepare('starcoder', source, settings(globals()))


if __name__ == '__main__':
    configure(globals(), Settings)
    main()
