"""
The prepare scripts of the papers' corpora, on small files of the same form. The files are local or
come from a fake hub.

$ python -m pytest tests/test_data_papers.py
"""

import gzip
import itertools
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from conftest import contents, mistake, stage_here
from test_data import all_texts, texts

from data import hub
from lib.tokens import UNFINISHED, open_tokens, stable_hash

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


def pajama(folder):
    """
    Two Parquet files as SlimPajama has them, where every third row is of GitHub. Returns the texts
    of the other rows, and --local=.
    """
    kinds, kept = ('RedPajamaC4', GITHUB, 'RedPajamaBook'), []
    for i in range(2):
        rows = [{'text': f'row {i} {j} '.ljust(2000, '.'),
                 'meta': {'redpajama_set_name': kinds[j % 3]}} for j in range(20)]
        write_rows(folder / f'data/train-{i}.parquet', rows)
        kept += [row['text'] for j, row in enumerate(rows) if j % 3 != 1]
    return kept, f'--local={folder}'


# ---------------------------------------------------------------------- what each takes

def test_slimpajama_leaves_out_github_and_refuses_rows_that_do_not_say(tmp_path):
    out, (train, local) = tmp_path / 'out', pajama(tmp_path / 'in')
    for text in 'kept', 'KEPT':  # the second file has the size of the first
        write_rows(tmp_path / 'in/data/validation-00000.parquet', [
            {'text': text, 'meta': {'redpajama_set_name': 'RedPajamaArXiv'}},
            {'text': 'code', 'meta': {'redpajama_set_name': GITHUB}}])
        prepare('slimpajama', out, local)
        assert sorted(texts(out, 'train')) == sorted(train) and texts(out, 'val') == [text]
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


def test_no_file_is_opened_past_max_tokens(tmp_path, monkeypatch):
    for i in range(9):
        write_rows(tmp_path / f'in/train-{i}.parquet', [{'content': 'some code'}] * 3)
    opened, open_rows = [], hub.open_rows
    monkeypatch.setattr(hub, 'open_rows', lambda name, url: opened.append(name) or open_rows(name,
                                                                                             url))
    prepare('starcoder', tmp_path / 'out', f'--local={tmp_path}/in', '--max_tokens=40')
    assert len(opened) == 1 + 2  # the first one is tried before the work


def test_files_of_other_splits_are_named(capsys):
    assert hub.by_split(['train/0.json', 'test_helpers.json'], ['train']) == {
        'train': ['train/0.json']}
    assert '1 files of other splits are left out, such as test_helpers' in capsys.readouterr().out


def test_train_files_come_in_the_order_of_a_hash_and_dev_is_val_in_that_of_names():
    names = [f'{letter}/train-0.parquet' for letter in 'abcdefgh']
    found = hub.by_split(names, ['train'])['train']
    assert sorted(found) == names != found == sorted(names, key=stable_hash)
    found = hub.by_split(['dev/1.json', 'dev/0.json'], ['train', 'val'])
    assert found == {'val': ['dev/0.json', 'dev/1.json']}


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
    call, calls = getattr(hub, where), itertools.count(1)

    def stopped(*arguments):
        if next(calls) % every == 0:
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


@pytest.mark.parametrize('n_moved', range(4))
def test_a_kill_while_the_finished_files_are_moved_loses_nothing(tmp_path, monkeypatch, n_moved):
    local, killed = f'--local={tmp_path}/in', tmp_path / 'killed'
    for name in 'train', 'test':
        write_rows(tmp_path / f'in/{name}.jsonl', [{'text': f'{name} {i}'} for i in range(5)])
    prepare('pg19', tmp_path / 'unbroken', local)
    prepare('pg19', killed, local, '--max_tokens=9')  # an old dataset, which is replaced
    replace, calls = os.replace, itertools.count()

    def stopped(source, target):
        if str(target).endswith('.bin') and next(calls) == n_moved:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, 'replace', stopped)
        with pytest.raises(KeyboardInterrupt):
            prepare('pg19', killed, local)
    prepare('pg19', killed, local)
    assert contents(killed) == contents(tmp_path / 'unbroken')


def test_a_column_that_holds_no_text_and_a_damaged_progress_are_named(tmp_path):
    write_rows(tmp_path / 'in/train.jsonl', [{'text': 5}])
    assert "'text' of a row" in refused('pg19', tmp_path / 'out', f'--local={tmp_path}/in')
    write_rows(tmp_path / 'in/train.jsonl', [{'text': 'a'}])
    write_rows(tmp_path / 'in/test.jsonl', [{'text': ''}])
    line = refused('pg19', tmp_path / 'out', f'--local={tmp_path}/in')
    assert 'No document is left for the test split' in line
    (tmp_path / 'out' / UNFINISHED / 'train.json').write_text('')
    assert 'train.json' in refused('pg19', tmp_path / 'out', f'--local={tmp_path}/in')
    (tmp_path / 'out' / UNFINISHED / 'report.json').write_text('')
    assert 'report.json' in refused('pg19', tmp_path / 'out', f'--local={tmp_path}/in')


def test_progress_counts_only_what_is_on_the_disk(tmp_path, monkeypatch):
    """A killed process writes nothing more, so each count is on the disk before it is saved."""
    _, local = pajama(tmp_path / 'in')
    counts = []

    def save_json(path, progress):
        if 'count' in progress:
            counts.append(progress['count']['tokens'])
            assert path.with_suffix('.bin').stat().st_size == 2 * counts[-1]

    monkeypatch.setattr(hub, 'BATCH', 1)
    monkeypatch.setattr(hub, 'save_json', save_json)
    prepare('slimpajama', tmp_path / 'out', local)
    assert len(counts) > 20


def test_a_file_that_breaks_off_keeps_what_was_written_for_the_same_settings(tmp_path):
    _, local = pajama(tmp_path / 'in')
    out = tmp_path / 'out'
    names = hub.local_files(tmp_path / 'in')
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

@pytest.fixture
def on_the_hub(tmp_path, monkeypatch):
    """on_the_hub(name): a dataset on a fake hub with one file, which holds two books."""
    write_rows(tmp_path / 'file.parquet', [{'text': 'a book'}, {'text': 'another', 'url': 'x'}])
    open_rows = hub.open_rows

    def on_the_hub(name):
        info = SimpleNamespace(sha='a' * 40, siblings=[SimpleNamespace(rfilename=name)])
        monkeypatch.setattr(huggingface_hub.HfApi, 'dataset_info', lambda *_, **more: info)

    def open_here(name, url):
        assert url == f'hf://datasets/emozilla/pg19@{"a" * 40}/{name}'
        return open_rows(name, str(tmp_path / 'file.parquet'))

    monkeypatch.setattr(hub, 'open_rows', open_here)
    return on_the_hub


def test_from_the_hub_the_commit_is_kept_and_missing_splits_are_named(tmp_path, on_the_hub):
    on_the_hub('data/test-00000-of-00001.parquet')
    assert 'train and val: left out' in prepare('pg19', tmp_path / 'out')
    assert texts(tmp_path / 'out', 'test') == ['a book', 'another']
    assert open_tokens(str(tmp_path / 'out'), 'test').meta['report']['commit'] == 'a' * 40


def test_a_gated_set_says_what_to_do(tmp_path, on_the_hub, monkeypatch):
    on_the_hub('ada/train-0.parquet')
    monkeypatch.setattr(hub, 'open_rows', Mock(side_effect=PermissionError('403')))
    line = refused('starcoder', tmp_path / 'no')
    assert 'hf auth login' in line and '--local=FOLDER' in line and not (tmp_path / 'no').exists()


def test_without_a_network_local_files_are_asked_for(tmp_path, monkeypatch):
    no_network = Mock(side_effect=ConnectionError)
    monkeypatch.setattr(huggingface_hub.HfApi, 'dataset_info', no_network)
    line = refused('pg19', tmp_path / 'out')
    assert 'emozilla/pg19' in line and '--local=FOLDER' in line


def test_a_package_that_is_missing_is_asked_for(tmp_path, monkeypatch):
    (tmp_path / 'train.jsonl.zst').touch()
    monkeypatch.setitem(sys.modules, 'zstandard', None)  # as if it were not installed
    line = refused('pg19', tmp_path / 'out', f'--local={tmp_path}')
    assert 'pip install zstandard' in line and not (tmp_path / 'out').exists()
