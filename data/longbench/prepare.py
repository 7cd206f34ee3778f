"""
LongBench (Bai et al. 2024, arXiv:2308.14508), the 16 English and code tasks of the paper's Table 3.
Its records, prompts and output lengths are not part of this project. They are downloaded, or taken
from a FOLDER with dataset2prompt.json, dataset2maxlen.json, and data.zip or the TASK.jsonl files.

$ python data/longbench/prepare.py            # downloads 0.11 GB
$ python data/longbench/prepare.py FOLDER     # no network

Writes data/longbench/TASK.jsonl, dataset2prompt.json, dataset2maxlen.json: all of them or none.
Downloads are compared with their SHA-256. longbench.py checks what the files hold.
"""

import hashlib
import io
import sys
import tempfile
import urllib.request
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from configurator import configure
from lib.answers import OnlyWriter
from lib.errors import ROOT, UserError
from longbench import TASKS

paths: list[str] = []  # a folder that holds the files; none: download them
out_dir = ''           # where the files go; '' for data/longbench

CONFIG = ('https://raw.githubusercontent.com/THUDM/LongBench/'
          '2e00731f8d0bff23dc4325161044d0ed8af94c1e/LongBench/config/')
DATA = ('https://huggingface.co/datasets/zai-org/LongBench/resolve/'
        '5e628be450b7e67fb7ae6e201bd6d8f7056f7672/')
SOURCES = {  # {file: (where it is, its SHA-256)}
    'dataset2prompt.json': (
        CONFIG, '56d22ad4f382169c2b8a11ff4c982a4a1bea096c8152b0f0b85b64686b157c30'),
    'dataset2maxlen.json': (
        CONFIG, '72966b3c0933e214591637fb085798c5e687ebff4ddaab5d99bbc31120532022'),
    'data.zip': (
        DATA, 'cb45b11a4133c6bc1d6a44b0f8e701335ff1e543195db1103472e575857f7f64'),
}
NAMES = ['dataset2prompt.json', 'dataset2maxlen.json', *(f'{task}.jsonl' for task in TASKS)]


def download():
    """{name: bytes} of the three files. Raises UserError if one has another SHA-256."""
    files = {}
    for name, (address, digest) in SOURCES.items():
        print(f'downloading {name}')
        try:
            with urllib.request.urlopen(address + name, timeout=60) as response:
                files[name] = response.read()
        except Exception as error:  # errors of the network share no class
            raise UserError(f'{name} could not be downloaded ({error}). Put dataset2prompt.json '
                            f'and dataset2maxlen.json from {CONFIG} and data.zip from {DATA} '
                            'into a folder, then run: python data/longbench/prepare.py FOLDER'
                            ) from error
        found = hashlib.sha256(files[name]).hexdigest()
        if found != digest:
            raise UserError(f'{name} has sha256 {found}, not {digest}. Nothing was written. Try '
                            'again.')
    return files


def read_folder(folder):
    """{name: bytes} of the files of LongBench that a folder holds."""
    paths = [Path(folder, name) for name in (*NAMES, 'data.zip')]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


def unpack(files):
    """Add the tasks that only data.zip has. files: {name: bytes}."""
    try:
        archive = zipfile.ZipFile(io.BytesIO(files['data.zip']))
        for name in NAMES[2:]:
            if name not in files:
                files[name] = archive.read(f'data/{name}')
    except Exception as error:  # errors of a damaged zip file share no class
        raise UserError(f'data.zip is not whole: {error}. Get it again from {DATA}') from error


def main():
    if len(paths) > 1:
        raise UserError(f"Name the one folder that holds LongBench, not {' '.join(paths)}.")
    files = read_folder(*paths) if paths else download()
    if 'data.zip' in files:
        unpack(files)
    missing = [name for name in NAMES if name not in files]
    if missing:
        raise UserError(f"{paths[0]} lacks {', '.join(missing)}. The two .json files are at "
                        f'{CONFIG} and data.zip with all of .jsonl at {DATA}')

    out = Path(out_dir or ROOT / 'data/longbench')
    print(f'writing LongBench to {out}')
    with OnlyWriter(out / NAMES[0]), tempfile.TemporaryDirectory(dir=out) as part:
        for name in NAMES:
            Path(part, name).write_bytes(files[name])
        for name in NAMES:  # only now, when all are whole
            Path(part, name).replace(out / name)


if __name__ == '__main__':
    configure(globals())
    main()
