"""
The prepare scripts of the papers' corpora, on small files of the same form, local or from a small
hub of our own.

$ python -m pytest tests/test_data_papers.py
"""

import functools
import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import Server, contents, mistake, stage_here
from test_data import all_texts, texts

from data import hub
from lib.errors import ROOT
from lib.tokens import UNFINISHED, open_tokens

huggingface_hub = pytest.importorskip('huggingface_hub')
pyarrow = pytest.importorskip('pyarrow')
parquet = pytest.importorskip('pyarrow.parquet')
GITHUB = 'RedPajamaGithub'


def arguments(name, out, *more):
    return f'data/{name}/prepare', '--tokenizer=bytes', f'--out_dir={out}', *more


def prepare(*words):
    return stage_here(*arguments(*words))


def refused(*words):
    return mistake(*arguments(*words))


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == '.parquet':
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return
    data = '\n'.join(map(json.dumps, rows)).encode()
    if path.suffix == '.zst':
        data = pytest.importorskip('zstandard').compress(data)
    path.write_bytes(gzip.compress(data) if path.suffix == '.gz' else data)


def pajama(folder, n_files, n_rows, length=20):
    """
    Parquet files as SlimPajama has them. Every third row is of GitHub. Returns the texts of the
    others, and --local=.
    """
    kinds, kept = ('RedPajamaC4', GITHUB, 'RedPajamaBook'), []
    for i in range(n_files):
        rows = [{'text': f'row {i} {j} '.ljust(length, '.'),
                 'meta': {'redpajama_set_name': kinds[j % 3]}} for j in range(n_rows)]
        write_rows(folder / f'data/train-{i:05d}-of-{n_files:05d}.parquet', rows)
        kept += [row['text'] for j, row in enumerate(rows) if j % 3 != 1]
    return kept, f'--local={folder}'


# ---------------------------------------------------------------------- what each takes

def test_slimpajama_leaves_out_github_and_refuses_rows_that_do_not_say(tmp_path):
    out, (train, local) = tmp_path / 'out', pajama(tmp_path / 'in', 3, 10)
    write_rows(tmp_path / 'in/data/validation-00000.parquet', [
        {'text': 'kept', 'meta': {'redpajama_set_name': 'RedPajamaArXiv'}},
        {'text': 'code', 'meta': {'redpajama_set_name': GITHUB}}])
    prepare('slimpajama', out, local)
    assert sorted(texts(out, 'train')) == sorted(train) and texts(out, 'val') == ['kept']
    assert not (out / UNFINISHED).exists()
    assert 'prepared already' in prepare('slimpajama', out, local)

    write_rows(tmp_path / 'bare/train.parquet', [{'text': 'may be code'}])
    bare = 'slimpajama', tmp_path / 'bare_out', f'--local={tmp_path}/bare'
    line = refused(*bare)
    assert 'meta.redpajama_set_name' in line and '--keep_github=True' in line
    prepare(*bare, '--keep_github=True')
    assert texts(tmp_path / 'bare_out', 'train') == ['may be code']


@pytest.mark.parametrize('suffix', ['.jsonl.gz', '.jsonl.zst', '.json'])
def test_arxiv_keeps_only_arxiv_whatever_the_compression(tmp_path, suffix):
    for name in 'train/00', 'val', 'test':
        write_rows(tmp_path / f'in/{name}{suffix}', [
            {'text': f'{name} {kind}', 'meta': {'pile_set_name': kind}}
            for kind in ('Pile-CC', 'ArXiv', 'Github')])
    prepare('arxiv', tmp_path / 'out', f'--local={tmp_path}/in')
    assert all_texts(tmp_path / 'out') == [['train/00 ArXiv'], ['val ArXiv'], ['test ArXiv']]


def test_starcoder_reads_content_and_max_tokens_ends_with_a_document(tmp_path):
    for i, language in enumerate(('ada', 'python', 'ruby')):
        rows = [{'content': f'{i}{j:03d} code'} for j in range(50)]  # 9 bytes and an end
        write_rows(tmp_path / f'in/{language}/train-0.parquet', rows)
    local, some = f'--local={tmp_path}/in', tmp_path / 'some'
    prepare('starcoder', tmp_path / 'all', local)
    for max_tokens, n_documents in (1, 1), (10, 1), (11, 2), (503, 51), (10 ** 6, 150):
        prepare('starcoder', some, local, f'--max_tokens={max_tokens}')
        assert texts(some, 'train') == texts(tmp_path / 'all', 'train')[:n_documents]
        assert len(open_tokens(str(some), 'train').tokens) == 10 * n_documents


@pytest.mark.parametrize('local', ['in', 'in/test/proofpile_test.jsonl.gz'])
def test_proof_pile_is_its_test_file_in_order_whatever_its_meta_holds(tmp_path, local):
    rows = [{'text': f'proof {i}', 'meta': meta}
            for i, meta in enumerate(({'a': 1}, {'b': {'c': 'x'}}, {}, {'a': 's'}))]
    write_rows(tmp_path / 'in/test/proofpile_test.jsonl.gz', rows)
    write_rows(tmp_path / 'in/dev/proofpile_dev.jsonl.gz', [{'text': 'no', 'meta': {}}])
    prepare('proof_pile', tmp_path / 'out', f'--local={tmp_path}/{local}')
    assert texts(tmp_path / 'out', 'test') == [row['text'] for row in rows]


# ---------------------------------------------------------------------- kills

# While reading, or after a batch was written. Each start reads a row of both splits to check them.
@pytest.mark.parametrize('where, every', [('text_of', 5), ('save_json', 3)])
@pytest.mark.parametrize('kind', ['parquet', 'jsonl.gz'])
def test_a_run_that_was_stopped_anywhere_ends_with_the_same_bytes(tmp_path, monkeypatch, where,
                                                                  every, kind):
    local, killed = f'--local={tmp_path}/in', tmp_path / 'killed'
    for name in 'train-0', 'train-1', 'test':
        rows = [{'text': f'{name} {i} ' * i} for i in range(5)]  # the first is empty
        write_rows(tmp_path / f'in/{name}.{kind}', rows)
    prepare('pg19', tmp_path / 'unbroken', local)
    monkeypatch.setattr(hub, 'BATCH', 1)  # so that progress is saved after each row
    call, calls = getattr(hub, where), 0

    def stopped(*arguments):
        nonlocal calls
        calls += 1
        if calls % every == 0:
            raise KeyboardInterrupt
        return call(*arguments)

    monkeypatch.setattr(hub, where, stopped)
    n_stops = 0
    while not (killed / 'meta.json').exists():
        try:
            prepare('pg19', killed, local)
        except KeyboardInterrupt:
            n_stops += 1
    assert n_stops >= 4
    assert contents(killed) == contents(tmp_path / 'unbroken')


@pytest.mark.slow
def test_a_process_that_was_killed_goes_on_and_ends_with_the_same_bytes(tmp_path):
    _, local = pajama(tmp_path / 'in', 40, 600, length=10_000)
    killed, whole = tmp_path / 'killed', tmp_path / 'unbroken'
    name, *words = arguments('slimpajama', killed, local)
    run = subprocess.Popen([sys.executable, ROOT / f'{name}.py', *words],
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (killed / UNFINISHED / 'train.json').exists():
        assert run.poll() is None
        time.sleep(0.005)
    run.kill()
    run.wait()
    assert not (killed / 'meta.json').exists()
    assert 'train: goes on after' in prepare('slimpajama', killed, local)
    prepare('slimpajama', whole, local)
    assert contents(killed) == contents(whole)


def test_a_file_that_breaks_off_keeps_what_was_written_for_the_same_settings(tmp_path):
    _, local = pajama(tmp_path / 'in', 2, 20, length=2000)
    out = tmp_path / 'out'
    names = hub.local_files(f'{tmp_path}/in')
    last = hub.by_split(names, ['train'])['train'][-1]
    path = Path(names[last])
    whole = path.read_bytes()
    path.write_bytes(whole[:len(whole) // 2].ljust(len(whole), b'\0'))
    line = refused('slimpajama', out, local)
    assert last in line and 'goes on from there' in line

    path.write_bytes(whole)
    assert 'train: goes on after' in prepare('slimpajama', out, local)
    assert len(texts(out, 'train')) == 26
    assert 'goes on after' not in prepare('slimpajama', out, local, '--keep_github=True')
    assert len(texts(out, 'train')) == 40


# ---------------------------------------------------------------------- the hub

class Hub(Server):
    """As much of the Hugging Face hub as datasets asks for: one dataset with one file."""
    commit, name, gated, data = 'a' * 40, 'data/test-00000-of-00001.parquet', False, b''

    def do_GET(self):
        if '/resolve/' in self.path and self.gated:
            self.answer(403, b'', ('X-Error-Code', 'GatedRepo'))
        elif '/resolve/' in self.path:
            first, last = self.headers['Range'].removeprefix('bytes=').split('-')
            self.answer(206, self.data[int(first):int(last or len(self.data)) + 1])
        else:
            entry = {'type': 'file', 'path': self.name, 'rfilename': self.name,
                     'size': len(self.data), 'oid': 'b' * 40}
            info = {'id': 'emozilla/pg19', 'sha': self.commit, 'siblings': [entry], 'tags': [],
                    'private': False}
            self.answer(200, json.dumps([entry] if '/tree/' in self.path else info).encode())


@pytest.mark.slow
def test_from_the_hub_the_commit_is_kept_and_a_gated_set_says_what_to_do(tmp_path, monkeypatch):
    def run(*words):
        name, *words = arguments(*words)
        with Hub.running() as endpoint:
            return subprocess.run([sys.executable, ROOT / f'{name}.py', *words],
                                  capture_output=True, text=True, env={
                **os.environ, 'HF_ENDPOINT': endpoint, 'HF_HOME': str(tmp_path / 'cache'),
                'HF_HUB_OFFLINE': '0'})

    write_rows(tmp_path / 'test.parquet', [{'text': 'a book'}, {'text': 'another', 'url': 'x'}])
    monkeypatch.setattr(Hub, 'data', (tmp_path / 'test.parquet').read_bytes())
    found = run('pg19', tmp_path / 'out')
    assert 'train and val: left out' in found.stdout, found.stderr
    assert texts(tmp_path / 'out', 'test') == ['a book', 'another']
    assert open_tokens(str(tmp_path / 'out'), 'test').meta['report']['commit'] == Hub.commit

    monkeypatch.setattr(Hub, 'gated', True)
    monkeypatch.setattr(Hub, 'name', 'ada/train-0.parquet')
    found = run('starcoder', tmp_path / 'no')
    lines = [line for line in found.stderr.splitlines() if line.startswith('prepare.py: ')]
    assert found.returncode == 1 and len(lines) == 1, found.stderr
    assert 'hf auth login' in lines[0] and '--local=FOLDER' in lines[0]
    assert 'Traceback' not in found.stderr and not (tmp_path / 'no').exists()


def test_without_a_network_local_files_are_asked_for(tmp_path, monkeypatch):
    closed = functools.partial(huggingface_hub.HfApi, endpoint='http://127.0.0.1:1')
    monkeypatch.setattr(huggingface_hub, 'HfApi', closed)
    line = refused('pg19', tmp_path / 'out')
    assert 'emozilla/pg19' in line and '--local=FOLDER' in line


def test_a_package_that_is_missing_is_asked_for(tmp_path, monkeypatch):
    (tmp_path / 'train.jsonl.zst').touch()
    monkeypatch.setitem(sys.modules, 'zstandard', None)  # as if it were not installed
    line = refused('pg19', tmp_path / 'out', f'--local={tmp_path}')
    assert 'pip install zstandard' in line and not (tmp_path / 'out').exists()
