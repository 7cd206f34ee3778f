"""
How LongBench is prepared: from a folder, from data.zip, or not at all. The records are made up.

$ python -m pytest tests/test_data_longbench.py
"""

import io
import urllib.error
import zipfile
from unittest.mock import Mock

import pytest
from conftest import contents, files_at_most, mistake, stage_here

from longbench import TASKS

PREPARE = 'data/longbench/prepare'
CONFIGS = ['dataset2prompt.json', 'dataset2maxlen.json']


@pytest.fixture
def folder(tmp_path):
    """The benchmark's files, with a record each."""
    folder = tmp_path / 'given'
    folder.mkdir()
    for name in CONFIGS + [f'{task}.jsonl' for task in TASKS]:
        (folder / name).write_text(f'{{"input": "{name}"}}\n')
    return folder


@pytest.fixture
def out(tmp_path):
    return tmp_path / 'out'


def test_files_of_a_folder_are_copied(folder, out):
    stage_here(PREPARE, folder, f'--out_dir={out}')
    assert contents(out) == contents(folder) and len(contents(out)) == 18


def test_tasks_may_come_in_data_zip_if_it_is_whole(folder, out):
    expected = contents(folder)
    with zipfile.ZipFile(folder / 'data.zip', 'w') as archive:
        for path in folder.glob('*.jsonl'):
            archive.write(path, f'data/{path.name}')
            path.unlink()
    stage_here(PREPARE, folder, f'--out_dir={out}')
    assert contents(out) == expected
    whole = (folder / 'data.zip').read_bytes()
    (folder / 'data.zip').write_bytes(whole[:len(whole) // 2])
    assert 'data.zip is not whole' in mistake(PREPARE, folder, f'--out_dir={out}2')


def test_nothing_is_written_of_a_folder_that_is_not_whole(folder, out):
    (folder / 'lcc.jsonl').unlink()
    (folder / CONFIGS[1]).unlink()
    message = mistake(PREPARE, folder, f'--out_dir={out}')
    assert 'lacks dataset2maxlen.json, lcc.jsonl.' in message
    assert 'Name the one folder' in mistake(PREPARE, folder, folder, f'--out_dir={out}')
    assert not out.exists()


def test_a_full_disk_leaves_nothing(folder, out):
    (folder / 'repobench-p.jsonl').write_text('{"input": "x"}\n' * 1000)
    with files_at_most(10_000), pytest.raises(OSError):
        stage_here(PREPARE, folder, f'--out_dir={out}')
    assert list(out.iterdir()) == []


@pytest.mark.parametrize('response, named', [
    (urllib.error.URLError('no network'), ['no network', 'dataset2prompt.json', 'FOLDER']),
    ([io.BytesIO(b'another file')], ['sha256'])])
def test_a_download_that_fails_or_has_another_digest_is_refused(monkeypatch, out, response, named):
    monkeypatch.setattr('urllib.request.urlopen', Mock(side_effect=response))
    message = mistake(PREPARE, f'--out_dir={out}')
    assert all(name in message for name in named) and not out.exists()
