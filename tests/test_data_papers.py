"""
The prepare scripts of the papers' corpora, on small files of the same form, local or from a small hub of our own.

$ python -m pytest tests/test_data_papers.py
"""

import contextlib
import functools
import gzip
import importlib.util
import json
import os
import runpy
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest

from corpus import documents, get_tokenizer, open_tokens, tokenizer_from_state
from data import hub

ROOT = Path(__file__).resolve().parents[1]


def command(name, *arguments):
    return [sys.executable, str(ROOT / 'data' / name / 'prepare.py'), '--tokenizer=bytes', *map(str, arguments)]


def prepare(name, *arguments):
    """As a user runs it, but in this process and in one process: importing datasets again takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, 'argv', [*command(name, *arguments)[1:], '--workers=1'])
        patch.setattr(sys, 'excepthook', sys.excepthook)
        patch.setattr(sys, 'path', sys.path.copy())
        runpy.run_path(str(ROOT / 'data' / name / 'prepare.py'), run_name='__main__')


def refused(name, *arguments):
    with pytest.raises(ValueError) as caught:
        prepare(name, *arguments)
    assert Path(caught.traceback[-1].path).name == 'hub.py'  # raised by us: a user sees one line, not a traceback
    return str(caught.value)


def texts(folder, split):
    data = open_tokens(str(folder), split)
    encoding = tokenizer_from_state(data.tokenizer_state)
    return [encoding.decode(data.tokens[start:end].tolist()) for start, end in documents(data)]


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == '.parquet':
        return pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    data = '\n'.join(map(json.dumps, rows)).encode()
    if path.suffix == '.zst':
        import zstandard
        data = zstandard.compress(data)
    path.write_bytes(gzip.compress(data) if path.suffix == '.gz' else data)


def pajama(folder, n_files, n_rows, length=20):
    """Parquet files as SlimPajama has them, every third row being of GitHub. Returns the texts of the others."""
    rows = [{'text': f'row {i} '.ljust(length, '.'),
             'meta': {'redpajama_set_name': ('RedPajamaC4', 'RedPajamaGithub', 'RedPajamaBook')[i % 3]}}
            for i in range(n_files * n_rows)]
    for i in range(n_files):
        write_rows(folder / 'data' / f'train-{i:05d}-of-{n_files:05d}.parquet', rows[i * n_rows:(i + 1) * n_rows])
    return [row['text'] for row in rows if row['meta']['redpajama_set_name'] != 'RedPajamaGithub']


# ----------------------------------------------------------------------------- what each takes

def test_slimpajama_leaves_out_github_and_refuses_rows_that_do_not_say(tmp_path):
    train = pajama(tmp_path / 'in', 3, 10)
    write_rows(tmp_path / 'in' / 'data' / 'validation-00000.parquet', [
        {'text': 'kept', 'meta': {'redpajama_set_name': 'RedPajamaArXiv'}},
        {'text': 'code', 'meta': {'redpajama_set_name': 'RedPajamaGithub'}}])
    prepare('slimpajama', f'--local={tmp_path}/in', f'--out_dir={tmp_path}/out')
    assert sorted(texts(tmp_path / 'out', 'train')) == sorted(train)
    assert texts(tmp_path / 'out', 'val') == ['kept']
    checksums = open_tokens(str(tmp_path / 'out'), 'train').meta['checksums']
    assert sorted(checksums) == ['train.bin', 'train_starts.bin', 'val.bin', 'val_starts.bin']
    assert not (tmp_path / 'out' / 'parts.part').exists()

    write_rows(tmp_path / 'bare' / 'train.parquet', [{'text': 'may be code'}])
    line = refused('slimpajama', f'--local={tmp_path}/bare', f'--out_dir={tmp_path}/bare_out')
    assert 'meta.redpajama_set_name' in line and '--keep_github=True' in line
    prepare('slimpajama', f'--local={tmp_path}/bare', f'--out_dir={tmp_path}/bare_out', '--keep_github=True')
    assert texts(tmp_path / 'bare_out', 'train') == ['may be code']


@pytest.mark.parametrize('suffix', ['.jsonl.gz', '.jsonl.zst', '.json'])
def test_arxiv_keeps_only_arxiv_whatever_the_compression(tmp_path, suffix):
    if suffix == '.jsonl.zst':
        pytest.importorskip('zstandard')
    for split in ('train/00', 'val', 'test'):
        write_rows(tmp_path / 'in' / f'{split}{suffix}', [
            {'text': f'{split} {name}', 'meta': {'pile_set_name': name}} for name in ('Pile-CC', 'ArXiv', 'Github')])
    prepare('arxiv', f'--local={tmp_path}/in', f'--out_dir={tmp_path}/out')
    for split, name in (('train', 'train/00'), ('val', 'val'), ('test', 'test')):
        assert texts(tmp_path / 'out', split) == [f'{name} ArXiv']


def test_zst_without_its_package_is_refused_in_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    (tmp_path / 'train.jsonl.zst').write_bytes(b'')
    assert 'pip install zstandard' in refused('arxiv', f'--local={tmp_path}', f'--out_dir={tmp_path}/out')


def test_starcoder_reads_content_and_a_part_ends_with_a_document(tmp_path):
    for i, language in enumerate(('ada', 'python', 'ruby')):
        write_rows(tmp_path / 'in' / language / 'train-0.parquet', [{'content': f'{i}{j:03d} code'} for j in range(50)])
    prepare('starcoder', f'--local={tmp_path}/in', f'--out_dir={tmp_path}/all')
    everything = texts(tmp_path / 'all', 'train')
    assert len(everything) == 150
    for max_tokens, n_documents in ((1, 1), (10, 1), (11, 2), (503, 51), (10 ** 6, 150)):  # each is 9 bytes and an end
        prepare('starcoder', f'--local={tmp_path}/in', f'--out_dir={tmp_path}/some', f'--max_tokens={max_tokens}')
        assert texts(tmp_path / 'some', 'train') == everything[:n_documents]
        assert len(open_tokens(str(tmp_path / 'some'), 'train').tokens) == 10 * n_documents


def test_proof_pile_is_its_test_file_in_order_whatever_its_meta_holds(tmp_path):
    metas = {'a': 1}, {'b': {'c': 'x'}}, {}, {'a': 's'}
    rows = [{'text': f'proof {i}', 'meta': meta} for i, meta in enumerate(metas)]
    write_rows(tmp_path / 'in' / 'test' / 'proofpile_test.jsonl.gz', rows)
    write_rows(tmp_path / 'in' / 'dev' / 'proofpile_dev.jsonl.gz', [{'text': 'no', 'meta': {}}])
    for i, local in enumerate(('in', 'in/test/proofpile_test.jsonl.gz', 'in/*/*test*')):
        prepare('proof_pile', f'--local={tmp_path}/{local}', f'--out_dir={tmp_path}/{i}')
        assert texts(tmp_path / str(i), 'test') == [row['text'] for row in rows]


# ----------------------------------------------------------------------------- kills

def test_a_run_killed_half_way_goes_on_and_ends_with_the_same_bytes(tmp_path, capsys):
    pajama(tmp_path / 'in', 40, 60, length=10_000)  # more than its workers can do before they notice the kill
    prepare('slimpajama', f'--local={tmp_path}/in', f'--out_dir={tmp_path}/unbroken')
    line = command('slimpajama', f'--local={tmp_path}/in', f'--out_dir={tmp_path}/killed', '--workers=2')
    parts = tmp_path / 'killed' / 'parts.part'
    run = subprocess.Popen(line, stdout=subprocess.DEVNULL)
    while not list(parts.glob('*/meta.json')):
        assert run.poll() is None
        time.sleep(0.005)
    run.kill()
    assert run.wait() == -9
    time.sleep(1)  # its processes end by themselves
    done = {path: path.stat().st_mtime_ns for path in parts.glob('*/meta.json')}
    time.sleep(0.5)
    assert set(done) == set(parts.glob('*/meta.json')) and len(done) < 40
    assert not (tmp_path / 'killed' / 'meta.json').exists()

    other = refused('slimpajama', f'--local={tmp_path}/in', f'--out_dir={tmp_path}/killed', '--keep_github=True')
    assert 'plan.json' in other
    again = subprocess.run(line, capture_output=True, text=True)
    assert again.returncode == 0 and f'40 files, {len(done)} of them done before' in again.stdout, again.stderr
    for name in ('train.bin', 'train_starts.bin', 'meta.json', 'tokenizer_state.json'):
        assert (tmp_path / 'killed' / name).read_bytes() == (tmp_path / 'unbroken' / name).read_bytes()
    capsys.readouterr()
    prepare('slimpajama', f'--local={tmp_path}/in', f'--out_dir={tmp_path}/killed')
    assert 'prepared already' in capsys.readouterr().out


# ----------------------------------------------------------------------------- the hub

class Hub(BaseHTTPRequestHandler):
    """As much of the Hugging Face hub as datasets asks for: one dataset with one file."""
    commit, name, gated, data = 'a' * 40, 'data/test-00000-of-00001.parquet', False, b''

    def do_GET(self):
        entry = {'type': 'file', 'path': self.name, 'rfilename': self.name, 'size': len(self.data), 'oid': 'b' * 40}
        if '/resolve/' not in self.path:
            info = {'id': 'emozilla/pg19', 'sha': self.commit, 'siblings': [entry], 'tags': [], 'private': False}
            self.answer(200, json.dumps([entry] if '/tree/' in self.path else info).encode())
        elif self.gated:
            self.answer(403, b'', ('X-Error-Code', 'GatedRepo'))
        else:
            first, last = self.headers['Range'].removeprefix('bytes=').split('-')
            self.answer(206, self.data[int(first):int(last or len(self.data)) + 1])

    def answer(self, code, body, *headers):
        self.send_response(code)
        for header in (*headers, ('Content-Length', str(len(body)))):
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def local_hub(tmp_path):
    """The environment of a process that takes a Hub for the hub."""
    with ThreadingHTTPServer(('127.0.0.1', 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f'http://127.0.0.1:{server.server_port}'
        yield os.environ | {'HF_ENDPOINT': endpoint, 'HF_HOME': str(tmp_path / 'cache'), 'HF_HUB_OFFLINE': '0'}
        server.shutdown()


def test_from_the_hub_the_commit_is_kept_and_a_gated_set_says_what_to_do(tmp_path, monkeypatch):
    write_rows(tmp_path / 'test.parquet', [{'text': 'a book'}, {'text': 'another', 'url': 'x'}])
    monkeypatch.setattr(Hub, 'data', (tmp_path / 'test.parquet').read_bytes())
    with local_hub(tmp_path) as environment:
        out = tmp_path / 'out'
        run = subprocess.run(command('pg19', f'--out_dir={out}'), env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        assert texts(out, 'test') == ['a book', 'another']
        assert open_tokens(str(out), 'test').meta['report']['commit'] == Hub.commit
        assert 'train and val: left out' in run.stdout

        monkeypatch.setattr(Hub, 'gated', True)
        monkeypatch.setattr(Hub, 'name', 'ada/train-0.parquet')
        run = subprocess.run(command('starcoder', f'--out_dir={tmp_path}/no'), env=environment, capture_output=True,
                             text=True)
    assert run.returncode == 1 and run.stderr.count('\n') == 1, run.stderr
    assert 'GatedRepoError' in run.stderr and 'hf auth login' in run.stderr and '--local=FOLDER' in run.stderr
    assert not (tmp_path / 'no').exists()
    gone = functools.partial(huggingface_hub.HfApi, endpoint=environment['HF_ENDPOINT'])
    monkeypatch.setattr(huggingface_hub, 'HfApi', gone)
    assert 'emozilla/pg19 could not be had' in (line := refused('pg19')) and '--local=FOLDER' in line


# ----------------------------------------------------------------------------- mistakes

def test_mistakes_are_told_before_work_starts(tmp_path):
    out = f'--out_dir={tmp_path}/out'
    assert 'has no .parquet' in refused('pg19', f'--local={tmp_path}/none', out)
    write_rows(tmp_path / 'a' / 'books.jsonl', [{'text': 'x'}])
    assert 'books.jsonl does not say its split' in refused('pg19', f'--local={tmp_path}/a', out)
    write_rows(tmp_path / 'b' / 'train.jsonl', [{'body': 'x', 'id': 1}])
    assert "'text', but its columns are body, id" in refused('pg19', f'--local={tmp_path}/b', out)
    (tmp_path / 'c').mkdir()
    (tmp_path / 'c' / 'train.parquet').write_bytes(b'no such thing')
    assert 'train.parquet of' in refused('pg19', f'--local={tmp_path}/c', out)
    assert 'max_tokens is 0' in refused('pg19', f'--local={tmp_path}/a', out, '--max_tokens=0')
    assert not (tmp_path / 'out').exists()
    write_rows(tmp_path / 'd' / 'test.jsonl', [{'text': 'x', 'meta': {'pile_set_name': 'Pile-CC'}}])
    assert 'No row is left for the test split' in refused('arxiv', f'--local={tmp_path}/d', out)


def test_a_file_that_breaks_off_keeps_the_parts_done(tmp_path):
    pajama(tmp_path / 'in', 2, 20, length=2000)
    files = hub.by_split(hub.local_files(f'{tmp_path}/in'), ('train',))['train']  # in the order of reading
    whole = Path(files[1].url).read_bytes()
    Path(files[1].url).write_bytes(whole[:len(whole) // 2] + b'\0' * (len(whole) - len(whole) // 2))
    line = refused('slimpajama', f'--local={tmp_path}/in', f'--out_dir={tmp_path}/out')
    assert f'{files[1].name} stopped with' in line and 'goes on from there' in line
    assert len(list((tmp_path / 'out' / 'parts.part').glob('*/meta.json'))) == 1
    Path(files[1].url).write_bytes(whole)
    prepare('slimpajama', f'--local={tmp_path}/in', f'--out_dir={tmp_path}/out')
    assert open_tokens(str(tmp_path / 'out'), 'train').meta['splits']['train']['documents'] == 27  # 40 less every third


def test_a_disk_with_too_little_space_is_refused(tmp_path, monkeypatch, capsys):
    splits = {'train': [hub.File('train.jsonl', '', 10 ** 9)]}
    monkeypatch.setattr(hub.shutil, 'disk_usage', lambda folder: SimpleNamespace(free=3.9e9))
    source, encoding, row = hub.Source('o/n', 'main', ''), get_tokenizer('bytes'), {'text': 'abc'}
    with pytest.raises(ValueError, match='needs about 4.00 GB, but 3.90 GB are free'):  # 1e9 tokens of 2 bytes, twice
        hub.require_disk(tmp_path, splits, encoding, source, row, None)
    assert hub.require_disk(tmp_path, splits, encoding, source, row, 9 * 10 ** 8) == 9 * 10 ** 8
    assert '2.00 GB on disk' in capsys.readouterr().out
