"""
The prepare scripts of data/, on small files.

$ python -m pytest tests/test_prepare.py
"""

import contextlib
import gzip
import hashlib
import importlib.util
import itertools
import json
import os
import sys
import zipfile
from unittest.mock import Mock

from configurator import ROOT

import huggingface_hub
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from conftest import mistake, read, stage

import tokenizer
from data import open_split, stable_hash
from tokenizer import SPLITS, get_tokenizer

sys.path.append(str(ROOT / 'data'))
import hub  # noqa: E402


def prepare(name, out, *arguments):
    """Run data/NAME/prepare.py. Returns the texts of [train, val, test], as far as there are."""
    stage(f'data.{name}.prepare', f'--out_dir={out}', *arguments)
    return [texts(out, split) for split in read(out / 'meta.json')['splits']]


def texts(folder, split):
    tokens, starts, meta = open_split(str(folder), split)
    encoding = get_tokenizer(meta['tokenizer'])
    return [encoding.decode(ids[:-1].tolist()) for ids in np.split(tokens, starts[1:])]


def refused(name, out, *arguments):
    """The line with which a script refuses. It must leave no dataset."""
    line = mistake(f'data.{name}.prepare', f'--out_dir={out}', *arguments)
    assert not (out / 'meta.json').exists()
    return line


def write(folder, *names):
    """A folder of small files."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f'text of {name}')
    return folder


# ---------------------------------------------------------------------- text

@pytest.mark.parametrize('suffix', ['jsonl', 'JSONL'])
def test_files_and_lines_of_jsonl_are_documents_that_hashes_share_out(tmp_path, suffix):
    folder = write(tmp_path / 'in', 'one.txt', 'deep/two.md', '.hidden')
    bodies = [f'line {i} \u2028ä' for i in range(200)]
    rows = [json.dumps({'id': i, 'body': body}, ensure_ascii=False)
            for i, body in enumerate(bodies)]
    lines, more = tmp_path / f'lines.{suffix}', tmp_path / 'more.jsonl'
    lines.write_text('\n\n'.join(rows), encoding='utf-8')
    options = '--field=body', '--val_fraction=0.2', '--test_fraction=0.1'
    splits = prepare('text', tmp_path / 'out', folder, lines, *options)
    assert sorted(sum(splits, [])) == sorted(['text of one.txt', 'text of deep/two.md', *bodies])
    # Some Windows tools begin a file with a byte order mark.
    more.write_text(f'\ufeff{{"body": "new"}}\n{rows[0]}', encoding='utf-8')
    for old, new in zip(splits, prepare('text', tmp_path / 'more', lines, more, *options)):
        assert new.count(bodies[0]) == 2 * old.count(bodies[0])  # a line stays in its split


@pytest.mark.parametrize('line', ['line {i}, ö\n', '{i}\r\n', 'of about a kB ' * 70 + '{i}\n'])
def test_a_single_text_file_is_cut_by_lines_without_loss(tmp_path, line):
    text = ''.join(line.format(i=i) for i in range(4000))
    (tmp_path / 'book.txt').write_bytes(text.encode())
    [train], [val], [test] = prepare('text', tmp_path / 'out', tmp_path / 'book.txt',
                                     '--val_fraction=0.2', '--test_fraction=0.1')
    assert train + val + test == text and val[-1] == '\n'
    assert len(val) / len(text) == pytest.approx(0.2, abs=0.01)


def test_splits_that_are_named_are_taken_as_they_are(tmp_path):
    folder = write(tmp_path / 'in', 'train/a', 'validation/a', 'test/a', 'README', 'more/x')
    assert prepare('text', tmp_path / 'out', folder) == [
        ['text of train/a'], ['text of validation/a'], ['text of test/a']]
    folder = write(tmp_path / 'files', 'train.txt', 'valid.txt', 'test.txt')
    assert prepare('text', tmp_path / 'out', folder) == [
        ['text of train.txt'], ['text of valid.txt'], ['text of test.txt']]
    folder = write(tmp_path / 'other', 'a', 'b', 'deep/c', 'test/d')  # no split is named train
    (tmp_path / 'link').symlink_to(folder / 'b')
    for val in f'{folder}/b', tmp_path / 'link', f'{folder}/../other/b':  # it goes nowhere else
        assert prepare('text', tmp_path / 'out', folder, f'{folder}/a', f'--val=["{val}"]',
                       f'--test=["{folder}/deep"]') == [
            ['text of a', 'text of test/d'], ['text of b'], ['text of deep/c']]


@pytest.mark.parametrize('arguments, said', [
    (['nowhere.txt'], 'no file or folder nowhere.txt'), ([], 'There is no text'),
    (['{}/in/train', '--name=../../..'], "name is '../../..'"),
    (['{}/in/train', '--name='], "name is ''"), (['{}/in/train', '--name=a:2'], "name is 'a:2'"),
    (['{}/bad.txt'], 'bad.txt is not UTF-8'), (['{}/bad.jsonl'], 'bad.jsonl is not UTF-8, or its'),
    (['{}/null.jsonl'], 'its line 2 is not JSON with text')])
def test_text_that_cannot_be_read_is_refused(tmp_path, arguments, said):
    write(tmp_path / 'in', 'train/a')
    (tmp_path / 'bad.txt').write_bytes(b'fine\n\xe4')
    (tmp_path / 'bad.jsonl').write_text('{"text": "fine"}\n{"text":')
    (tmp_path / 'null.jsonl').write_text('{"text": "fine"}\n{"text": null}')
    assert said in refused('text', tmp_path / 'out', *(one.format(tmp_path) for one in arguments))


# ---------------------------------------------------------------------- books, code and tasks

def test_books_are_those_of_the_manifest_or_refused(tmp_path):
    folder, rows = write(tmp_path / 'in', *SPLITS), []
    for split in SPLITS:
        digest = hashlib.sha256(f'text of {split}'.encode()).hexdigest()
        rows.append({'split': split, 'file': split, 'title': 'T', 'author': 'A', 'sha256': digest})
    (tmp_path / 'list.json').write_text(json.dumps(rows))
    manifest = f'--manifest={tmp_path}/list.json'
    assert prepare('books', tmp_path / 'out', folder, manifest) == [
        [f'text of {split}'] for split in SPLITS]
    (folder / 'val').write_text('Another book')
    assert 'in/val is missing or changed' in refused('books', tmp_path / 'new', folder, manifest)


def lines_of(word):
    """Source of 20 lines; no passage of it occurs with another word."""
    return ''.join(f'def {word}_{i}():\n\n    return {i}\n' for i in range(20))


def wheel(folder, name, split, **files):
    """A wheel of these files, {module: source}, that pip can find. Returns its manifest entry."""
    path, info = folder / f'{name}-1.0-py3-none-any.whl', f'{name}-1.0.dist-info'
    with zipfile.ZipFile(path, 'w') as archive:
        for module, source in files.items():
            archive.writestr(f'{name}/{module}.py', source)
        archive.writestr(f'{name}/tests/test_it.py', lines_of('a_test'))
        archive.writestr(f'{info}/METADATA', f'Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n')
        archive.writestr(f'{info}/WHEEL', 'Wheel-Version: 1.0\nTag: py3-none-any\n')
        archive.writestr(f'{info}/RECORD', '')
    return {'split': split, 'file': path.name,
            'sha256': hashlib.sha256(path.read_bytes()).hexdigest()}


@pytest.fixture
def code(tmp_path, monkeypatch):
    """(entries of a manifest, arguments that name it). pip takes wheels from tmp_path alone."""
    monkeypatch.setenv('PIP_NO_INDEX', '1')
    monkeypatch.setenv('PIP_FIND_LINKS', str(tmp_path))
    taken = lines_of('taken')
    rows = [
        wheel(tmp_path, 'one', 'train', a=lines_of('a'), taken=taken, short='x = 1'),
        wheel(tmp_path, 'two', 'val', c=lines_of('c'), copied=lines_of('c'), empty='',
              short='x = 1'),
        wheel(tmp_path, 'three', 'test', d=lines_of('d'), f=lines_of('f') + lines_of('c'),
              e=lines_of('e') + taken.replace('\n', '\n\n'))]
    (tmp_path / 'list.json').write_text(json.dumps(rows))
    return rows, [f'--manifest={tmp_path}/list.json', '--tokenizer=bytes']


def test_code_is_split_by_package_and_files_that_share_passages_are_dropped(tmp_path, code):
    rows, arguments = code
    train, val, test = prepare('code', tmp_path / 'out', *arguments)
    assert sorted(train) == sorted([lines_of('a'), lines_of('taken'), 'x = 1'])
    assert (val, test) == ([lines_of('c')], [lines_of('d')])
    (tmp_path / rows[2]['file']).unlink()  # it was kept, so it is not downloaded again
    assert prepare('code', tmp_path / 'out', *arguments) == [train, val, test]
    assert rows[2]['file'] in refused('code', tmp_path / 'new', *arguments)


def test_a_wheel_of_another_sha256_or_name_is_refused_and_built_by_nobody(tmp_path, code):
    rows, arguments = code
    for name, said in ((rows[0]['file'], 'its SHA-256 is not'),
                       ('x @ file:///x-1.0.tar.gz', 'not the name of a wheel'),
                       ('--index-url=http://x-1-py3-none-any.whl', 'not the name of a wheel')):
        (tmp_path / 'list.json').write_text(json.dumps([rows[0] | {'file': name, 'sha256': ''}]))
        assert said in refused('code', tmp_path / 'out', *arguments)


def test_code_without_an_index_is_the_standard_library_and_says_so(tmp_path, code):
    (tmp_path / code[0][0]['file']).unlink()
    assert min(map(len, prepare('code', tmp_path / 'out', *code[1]))) > 10
    assert 'standard library' in read(tmp_path / 'out/meta.json')['source']


def test_longbench_is_unpacked_if_its_files_are_those_that_we_know(tmp_path):
    spec = importlib.util.spec_from_file_location('x', ROOT / 'data/longbench/prepare.py')
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    page.paths, page.out_dir = [tmp_path], str(tmp_path / 'out')
    paths = {tmp_path / address.rpartition('/')[2]: address for address in page.SOURCES}
    write(tmp_path, *(path.name for path in paths))
    with zipfile.ZipFile(tmp_path / 'data.zip', 'w') as archive:
        for task in page.TASKS:
            archive.writestr(f'data/{task}.jsonl', task)
    with pytest.raises(SystemExit, match='another SHA-256'):
        page.main()
    assert not (tmp_path / 'out').exists()
    for path, address in paths.items():
        page.SOURCES[address] = hashlib.sha256(path.read_bytes()).hexdigest()
    page.main()
    assert (tmp_path / 'out/trec.jsonl').read_text() == 'trec'
    assert (tmp_path / 'out/dataset2maxlen.json').exists()


def test_passkey_documents_hold_their_key_and_fit_their_lengths(tmp_path):
    train, val, test = prepare('passkey', tmp_path, '--tokenizer=bytes', '--n_documents=100',
                               '--min_length=600', '--max_length=800')
    assert (len(train), len(val), len(test)) == (100, 1, 1) and val != test
    for text in train:
        key = text[-5:]
        assert key.isdecimal() and text.count(key) >= 2 and 500 < len(text) <= 800


# ---------------------------------------------------------------------- the hub's corpora

def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == '.parquet':
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return
    data = '\n'.join(map(json.dumps, rows)).encode()
    if path.suffix == '.zst':
        data = pytest.importorskip('zstandard').compress(data)
    path.write_bytes(gzip.compress(data) if path.suffix == '.gz' else data)


def test_slimpajama_leaves_out_github(tmp_path):
    rows = [{'text': f'{i}', 'meta': {'redpajama_set_name': kind}} for i, kind in
            enumerate(('RedPajamaC4', 'RedPajamaGithub', 'RedPajamaBook'))]
    write_rows(tmp_path / 'in/data/train-0.parquet', rows)
    for more, kept in ((), ['0', '2']), (['--keep_github=True'], ['0', '1', '2']):
        assert prepare('slimpajama', tmp_path / 'out', '--tokenizer=bytes',
                       f'--local={tmp_path}/in', *more) == [kept]


@pytest.mark.parametrize('suffix', ['.jsonl.gz', '.jsonl.zst', '.json'])
def test_arxiv_keeps_only_arxiv_whatever_the_compression(tmp_path, suffix):
    for name in 'train/00', 'val', 'test':
        write_rows(tmp_path / f'in/{name}{suffix}', [
            {'text': f'{name} {kind}', 'meta': {'pile_set_name': kind}}
            for kind in ('Pile-CC', 'ArXiv', 'Github')])
    assert prepare('arxiv', tmp_path / 'out', '--tokenizer=bytes', f'--local={tmp_path}/in') == [
        ['train/00 ArXiv'], ['val ArXiv'], ['test ArXiv']]


def test_starcoder_reads_content_and_max_tokens_ends_with_a_document(tmp_path):
    for i, language in enumerate(('ada', 'python', 'ruby')):  # their other columns differ
        write_rows(tmp_path / f'in/{language}/train-0.parquet', [
            {'content': f'{i}{j:03d} code', language: j} for j in range(50)])
    local = '--tokenizer=bytes', f'--local={tmp_path}/in'
    [whole] = prepare('starcoder', tmp_path / 'out', *local)
    assert len(whole) == 150
    for max_tokens, n_documents in (10, 1), (11, 2), (503, 51):
        assert prepare('starcoder', tmp_path / 'out', *local, f'--max_tokens={max_tokens}') == [
            whole[:n_documents]]  # each has 9 bytes and an end


def test_proof_pile_is_its_test_file_whatever_its_meta_holds(tmp_path):
    rows = [{'text': f'proof {i}', 'meta': meta}
            for i, meta in enumerate(({'a': 1}, {'b': {'c': 'x'}}, {}, {'a': 's'}))]
    write_rows(tmp_path / 'in/test/proofpile_test.jsonl.gz', rows)
    write_rows(tmp_path / 'in/dev/proofpile_dev.jsonl.gz', [{'text': 'no', 'meta': {}}])
    assert prepare('proof_pile', tmp_path / 'out', '--tokenizer=bytes', f'--local={tmp_path}') == [
        [row['text'] for row in rows]]


def test_train_files_come_in_the_order_of_a_hash_and_others_in_that_of_names():
    files = {f'{letter}/{name}.json': letter for letter in 'hgfedcba' for name in ('train', 'dev')}
    found = hub.by_split(files | {'README.md': 'r'}, SPLITS)
    assert found['train'] == sorted('abcdefgh', key=lambda x: stable_hash(f'{x}/train.json'))
    assert found['val'] == [*'abcdefgh'] and 'test' not in found
    assert hub.by_split({'x.parquet': 'x', 'test_y.parquet': 'y'}, ['train']) == {'train': ['x']}
    with pytest.raises(SystemExit, match='x.json does not say its split'):
        hub.by_split({'x.json': 'x'}, SPLITS)


@pytest.mark.parametrize('kind', ['parquet', 'jsonl.gz'])
@pytest.mark.parametrize('module, function', [(tokenizer, 'encode_documents'), (os, 'fsync')])
def test_a_run_that_was_stopped_anywhere_ends_with_the_same_bytes(tmp_path, monkeypatch, kind,
                                                                  module, function):
    for name in 'train-0', 'train-1', 'train-2', 'test':
        write_rows(tmp_path / f'in/{name}.{kind}', [
            {'text': f'{name} {i} ' * i, 'meta': {'redpajama_set_name': github}}  # first: empty
            for i, github in enumerate(['', 'RedPajamaGithub', ''] * 3)])
    arguments, stopped = ('--tokenizer=bytes', f'--local={tmp_path}/in'), tmp_path / 'stopped'
    assert len(prepare('slimpajama', tmp_path / 'whole', *arguments)[0]) == 15
    monkeypatch.setattr(tokenizer.next_texts, '__defaults__', (0,))  # save after each document
    call, calls, n_stops = getattr(module, function), itertools.count(1), 0

    def stop(*arguments):
        if next(calls) % 5 == 0:
            raise KeyboardInterrupt
        return call(*arguments)

    monkeypatch.setattr(module, function, stop)
    while not (stopped / 'meta.json').exists():
        with contextlib.suppress(KeyboardInterrupt):
            n_stops += 1
            prepare('slimpajama', stopped, *arguments)
    assert n_stops >= 4
    for path in (tmp_path / 'whole').iterdir():
        assert (stopped / path.name).read_bytes() == path.read_bytes()
    assert len(list(stopped.iterdir())) == 5


def test_a_broken_file_keeps_what_was_written_for_the_same_tokenizer(tmp_path):
    write_rows(tmp_path / 'in/train.jsonl', [{'text': 'one'}, {'text': 'two'}])
    where = f'--local={tmp_path}/in', f'--out_dir={tmp_path}/out'
    for name, goes_on in ('bytes', True), (str(ROOT / 'data/code/bpe_1024.tiktoken'), False):
        write_rows(tmp_path / 'in/test.jsonl', [{'text': 5}])
        with pytest.raises(TypeError):
            stage('data.pg19.prepare', '--tokenizer=bytes', *where)
        write_rows(tmp_path / 'in/test.jsonl', [{'text': 'three'}])
        said = stage('data.pg19.prepare', f'--tokenizer={name}', *where)
        assert ('train: goes on after 8 tokens' in said) == goes_on
        assert texts(tmp_path / 'out', 'train') == ['one', 'two']


def test_the_hub_gives_a_commit_and_its_absence_is_one_line(tmp_path, monkeypatch):
    info = Mock(sha='a' * 40, siblings=[Mock(rfilename='data/test.parquet')])
    monkeypatch.setattr(huggingface_hub.HfApi, 'dataset_info', Mock(return_value=info))
    assert hub.find_files('org/name', 'main', '') == {
        'data/test.parquet': f'hf://datasets/org/name@{info.sha}/data/test.parquet'}
    monkeypatch.setattr(huggingface_hub.HfApi, 'dataset_info', Mock(side_effect=ConnectionError))
    line = refused('pg19', tmp_path / 'out')
    assert 'emozilla/pg19 cannot be read' in line
