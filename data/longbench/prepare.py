"""
LongBench (Bai et al. 2024, arXiv:2308.14508), the 16 English and code tasks of the paper's Table 3. Records, prompts
and output lengths are the benchmark's own and no part of this project: they are downloaded, or taken from a FOLDER that
holds dataset2prompt.json, dataset2maxlen.json, and data.zip or the TASK.jsonl files.

$ python data/longbench/prepare.py            # downloads 0.11 GB
$ python data/longbench/prepare.py FOLDER     # no network

Writes data/longbench/TASK.jsonl, dataset2prompt.json, dataset2maxlen.json: all of them or none
"""

import hashlib
import io
import json
import sys
import tempfile
import urllib.request
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from configurator import configure
from runtime import ROOT

paths: list[str] = []  # the folder that holds the files; none: download them
out_dir = ''           # where the files go; '' for data/longbench

CONFIG = 'https://raw.githubusercontent.com/THUDM/LongBench/2e00731f8d0bff23dc4325161044d0ed8af94c1e/LongBench/config'
DATA = {'repo_id': 'zai-org/LongBench', 'revision': '5e628be450b7e67fb7ae6e201bd6d8f7056f7672'}
DATA_URL = f'https://huggingface.co/datasets/{DATA["repo_id"]}/resolve/{DATA["revision"]}/data.zip'
SHA256 = {
    'dataset2prompt.json': '56d22ad4f382169c2b8a11ff4c982a4a1bea096c8152b0f0b85b64686b157c30',
    'dataset2maxlen.json': '72966b3c0933e214591637fb085798c5e687ebff4ddaab5d99bbc31120532022',
    'data.zip': 'cb45b11a4133c6bc1d6a44b0f8e701335ff1e543195db1103472e575857f7f64',
}
ROWS = {'narrativeqa': 200, 'qasper': 200, 'multifieldqa_en': 150, 'hotpotqa': 200, '2wikimqa': 200, 'musique': 200,
        'gov_report': 200, 'qmsum': 200, 'multi_news': 200, 'trec': 200, 'triviaqa': 200, 'samsum': 200,
        'passage_count': 200, 'passage_retrieval_en': 200, 'lcc': 500, 'repobench-p': 500}


def download():
    """{name: bytes} of the three files. data.zip stays in the cache of Hugging Face."""
    from huggingface_hub import hf_hub_download
    print('needs about 0.3 GB of disk: data.zip, 0.11 GB, in the cache of Hugging Face, and what is in it', flush=True)
    files = {}
    try:
        for name in ('dataset2prompt.json', 'dataset2maxlen.json'):
            with urllib.request.urlopen(f'{CONFIG}/{name}', timeout=60) as response:
                files[name] = response.read()
        files['data.zip'] = Path(hf_hub_download(filename='data.zip', repo_type='dataset', **DATA)).read_bytes()
    except OSError as error:
        raise ValueError(f'LongBench could not be downloaded ({str(error).splitlines()[0]}). Put dataset2prompt.json '
                         f'and dataset2maxlen.json from {CONFIG} and data.zip from {DATA_URL} into a folder, then run: '
                         'python data/longbench/prepare.py FOLDER') from error
    return files


def unpack(files, must_match):
    """
    {name of a file to write: its bytes}. files: the same with data.zip in place of what it holds. A digest other than
    in SHA256 is refused, or of a user's own files only noted, as is another number of rows. Raises ValueError.
    """
    for name in SHA256.keys() & files.keys():
        digest = hashlib.sha256(files[name]).hexdigest()
        if digest != SHA256[name] and must_match:
            raise ValueError(f'{name} has sha256 {digest}, not {SHA256[name]}. Nothing was written; get it again.')
        if digest != SHA256[name]:
            print(f'note: {name} is not the file that this script downloads: its sha256 is {digest}')
    contents = {name: content for name, content in files.items() if name != 'data.zip'}
    if 'data.zip' in files:
        try:
            with zipfile.ZipFile(io.BytesIO(files['data.zip'])) as archive:
                for name in [f'{task}.jsonl' for task in ROWS if f'{task}.jsonl' not in files]:
                    contents[name] = archive.read(f'data/{name}')
        except (zipfile.BadZipFile, KeyError) as error:
            raise ValueError(f'data.zip is not whole: {error}. Get it again from {DATA_URL}') from error
    for name, content in contents.items():
        task = name.removesuffix('.jsonl')
        try:
            rows = [json.loads(line) for line in (content.splitlines() if task in ROWS else [content])]
        except ValueError as error:
            raise ValueError(f'{name} is not JSON: {error}. Get it again.') from error
        if len(rows) != ROWS.get(task, 1):
            print(f'note: {name} has {len(rows)} rows, in the benchmark {ROWS[task]}')
    return contents


def main():
    names = ['dataset2prompt.json', 'dataset2maxlen.json', *(f'{task}.jsonl' for task in ROWS)]
    if paths:
        if len(paths) > 1 or not Path(paths[0]).is_dir():
            raise ValueError(f'Name the one folder that holds LongBench, not {" ".join(paths)}.')
        found = [name for name in [*names, 'data.zip'] if Path(paths[0], name).is_file()]
        missing = [name for name in names if name not in found and ('data.zip' not in found or name in SHA256)]
        if missing:
            raise ValueError(f'{paths[0]} lacks {", ".join(missing)}. The two .json files are at {CONFIG} and all of '
                             f'.jsonl in {DATA_URL}')
        files = {name: Path(paths[0], name).read_bytes() for name in found}
    else:
        files = download()
    contents = unpack(files, must_match=not paths)
    out = Path(out_dir) if out_dir else ROOT / 'data' / 'longbench'
    print(f'writing {sum(map(len, contents.values())) / 1e9:.2f} GB to {out}')
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as part:  # all are whole before one is in its place
        for name, content in contents.items():
            Path(part, name).write_bytes(content)
        for name in contents:
            Path(part, name).replace(out / name)


if __name__ == '__main__':
    configure(globals())
    main()
