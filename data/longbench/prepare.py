"""
LongBench (Bai et al. 2024, arXiv:2308.14508), the 16 English and code tasks of the paper's Table 3.
Its records, prompts and output lengths are not part of this project. They are downloaded, or taken
from a FOLDER with dataset2prompt.json, dataset2maxlen.json and data.zip.

$ python data/longbench/prepare.py            # downloads 0.11 GB
$ python data/longbench/prepare.py FOLDER     # no network

Writes data/longbench/TASK.jsonl of the archive, and the three files, if they have their SHA-256.
longbench.py also reads such files from another folder, by --data=.
"""

import hashlib
import sys
import urllib.request
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from configurator import ROOT, UserError, configure

from longbench import TASKS

paths: list[str] = []  # the folder that holds the files; none: download them
out_dir = 'data/longbench'  # a folder of the project, where the files go

CONFIG = ('https://raw.githubusercontent.com/THUDM/LongBench/'
          '2e00731f8d0bff23dc4325161044d0ed8af94c1e/LongBench/config/')
DATA = ('https://huggingface.co/datasets/zai-org/LongBench/resolve/'
        '5e628be450b7e67fb7ae6e201bd6d8f7056f7672/')
SOURCES = {  # {address: SHA-256}
    f'{CONFIG}dataset2prompt.json':
        '56d22ad4f382169c2b8a11ff4c982a4a1bea096c8152b0f0b85b64686b157c30',
    f'{CONFIG}dataset2maxlen.json':
        '72966b3c0933e214591637fb085798c5e687ebff4ddaab5d99bbc31120532022',
    f'{DATA}data.zip': 'cb45b11a4133c6bc1d6a44b0f8e701335ff1e543195db1103472e575857f7f64',
}


def main():
    folder = ROOT / out_dir
    folder.mkdir(parents=True, exist_ok=True)
    for address, digest in SOURCES.items():
        name = Path(address).name
        print(f'reading {name}')
        with open(Path(*paths, name), 'rb') if paths else urllib.request.urlopen(address) as file:
            content = file.read()
        if hashlib.sha256(content).hexdigest() != digest:
            raise UserError(f'{name} has another SHA-256 than {address} had.')
        (folder / name).write_bytes(content)
    with zipfile.ZipFile(folder / 'data.zip') as archive:
        for task in TASKS:
            (folder / f'{task}.jsonl').write_bytes(archive.read(f'data/{task}.jsonl'))
    print(f'wrote LongBench to {folder}')


if __name__ == '__main__':
    configure(globals())
    main()
