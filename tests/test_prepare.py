"""
The prepare scripts of data/, on small files.

$ python -m pytest tests/test_prepare.py
"""

import hashlib
import json
import runpy
import shutil
import subprocess
import zipfile
from unittest.mock import Mock

from configurator import ROOT

import numpy as np
import pandas
import pytest
from conftest import mistake, read, stage

from data import open_split, stable_hash
from tokenizer import SPLITS, get_tokenizer


def prepare(name, out, *arguments):
    """Run data/NAME/prepare.py. Returns the texts of [train, val, test], as far as there are."""
    stage(f'data.{name}.prepare', f'--out_dir={out}', *arguments)
    found = []
    for split in read(out / 'meta.json')['splits']:
        tokens, starts, meta = open_split(str(out), split)
        encoding = get_tokenizer(meta['tokenizer'])
        found.append([encoding.decode(ids[:-1].tolist()) for ids in np.split(tokens, starts[1:])])
    return found


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
    rows = [json.dumps({'body': body}, ensure_ascii=False) for body in bodies]
    lines = tmp_path / f'lines.{suffix}'  # some Windows tools begin a file with a byte order mark
    lines.write_text('\ufeff' + '\n\n'.join(rows), encoding='utf-8')
    splits = prepare('text', tmp_path / 'out', folder, lines, '--field=body')
    assert sorted(sum(splits, [])) == sorted(['text of one.txt', 'text of deep/two.md', *bodies])
    assert min(map(len, splits)) > 2


@pytest.mark.parametrize('line', ['line {i}, ö\n', '{i}\r\n', 'of about a kB ' * 70 + '{i}\n'])
def test_a_single_text_file_is_cut_by_lines_without_loss(tmp_path, line):
    text = ''.join(line.format(i=i) for i in range(4000))
    (tmp_path / 'book.txt').write_bytes(text.encode())
    [train], [val], [test] = prepare('text', tmp_path / 'out', tmp_path / 'book.txt',
                                     '--val_fraction=0.2', '--test_fraction=0.1')
    assert train + val + test == text and val[-1] == '\n'
    assert len(val) / len(text) == pytest.approx(0.2, abs=0.01)
    assert prepare('text', tmp_path / 'all', tmp_path / 'book.txt', '--val_fraction=0.0',
                   '--test_fraction=1.0') == [[text]]


def test_of_few_documents_the_longest_is_cut(tmp_path):
    folder = write(tmp_path / 'in', *(f'chapter{i}.txt' for i in range(8, 15)))
    (folder / 'chapter9.txt').write_text('a line\n' * 100)  # by the hash all are train
    train, val, test = prepare('text', tmp_path / 'out', folder)
    assert (len(train), val, test) == (7, ['a line\n' * 5], ['a line\n' * 5])


def test_splits_that_are_named_are_taken_as_they_are(tmp_path):
    folder = write(tmp_path / 'in', 'train/a', 'validation/b', 'test.txt')
    assert prepare('text', tmp_path / 'out', folder / 'train', f'--val={folder}/validation',
                   f'--test={folder}/test.txt') == [
        [f'text of {file}'] for file in ('train/a', 'validation/b', 'test.txt')]
    assert prepare('text', tmp_path / 'two', folder / 'train', f'--val={folder}/test.txt') == [
        ['text of train/a'], ['text of test.txt']]
    assert prepare('text', tmp_path / 'inside', folder, f'--val={folder}/validation') == [
        ['text of test.txt', 'text of train/a'], ['text of validation/b']]
    assert 'their sum' in refused('text', tmp_path / 'new', folder, '--test_fraction=1.5')


@pytest.mark.parametrize('arguments, said', [
    ([], 'There is no text'), (['{}/bad.txt'], 'bad.txt is not UTF-8'),
    (['{}/bad.jsonl'], 'bad.jsonl is not UTF-8, or not JSON')])
def test_text_that_cannot_be_read_is_refused(tmp_path, arguments, said):
    (tmp_path / 'bad.txt').write_bytes(b'fine\n\xe4')
    (tmp_path / 'bad.jsonl').write_text('{"text": "fine"}\n{"text":')
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


def test_files_that_share_a_passage_with_an_earlier_split_are_dropped():
    page = runpy.run_path(str(ROOT / 'data/code/prepare.py'))
    a, b, c, d = map(lines_of, 'abcd')
    assert page['without_shared']({
        'train': {'1': a, '2': b, 'short': 'x = 1'}, 'val': {'3': c, 'copy': c, 'short': 'x = 1'},
        'test': {'4': d, '5': lines_of('e') + c, '6': lines_of('f') + b.replace('\n', '\n\n')}}
    ) == {'train': [a, b, 'x = 1'], 'val': [c], 'test': [d]}


def test_pip_is_asked_for_a_wheel_that_is_missing_and_may_build_nothing(tmp_path, monkeypatch):
    out, manifest = tmp_path / 'out', f'--manifest={tmp_path}/list.json'
    wheel = out / 'wheels/one-1.0-py3-none-any.whl'
    wheel.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel, 'w') as archive:
        for name in 'one/a.py', 'one/data.txt', 'one/tests/b.py':
            archive.writestr(name, f'of {name}')
    row = {'split': 'train', 'file': wheel.name}
    row['sha256'] = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (tmp_path / 'list.json').write_text(json.dumps([row]))
    assert prepare('code', out, manifest) == [['of one/a.py']]

    (out / 'meta.json').unlink()
    pip = Mock(return_value=Mock(returncode=1))
    monkeypatch.setattr(subprocess, 'run', pip)
    wheel.write_text('another wheel')
    assert 'another SHA-256' in refused('code', out, manifest)
    wheel.unlink()
    assert 'data/stdlib/prepare.py' in refused('code', out, manifest)
    *command, package = pip.call_args[0][0]
    assert '--only-binary=:all:' in command and command[-1] == '--' and package == 'one==1.0'
    assert '--implementation=py' in command


def test_longbench_is_unpacked_if_its_files_are_those_that_we_know(tmp_path):
    main = runpy.run_path(str(ROOT / 'data/longbench/prepare.py'))['main']
    page = main.__globals__
    page |= {'paths': [tmp_path], 'out_dir': str(tmp_path / 'out')}
    write(tmp_path, 'dataset2prompt.json', 'dataset2maxlen.json')
    with zipfile.ZipFile(tmp_path / 'data.zip', 'w') as archive:
        for task in page['TASKS']:
            archive.writestr(f'data/{task}.jsonl', task)
    with pytest.raises(SystemExit, match='another SHA-256'):
        main()
    for address in page['SOURCES']:
        content = (tmp_path / address.rpartition('/')[2]).read_bytes()
        page['SOURCES'][address] = hashlib.sha256(content).hexdigest()
    main()
    assert (tmp_path / 'out/trec.jsonl').read_text() == 'trec'


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
    table = pandas.DataFrame(rows)
    if path.suffix == '.parquet':
        table.to_parquet(path)
    else:  # compressed as its name says
        table.to_json(path, orient='records', lines=True)


SLIM = {'data/train-0.parquet': [{'text': kind, 'meta': {'redpajama_set_name': f'RedPajama{kind}'}}
                                 for kind in ('C4', 'Github', 'Book')]}
PILE = [{'text': kind, 'meta': {'pile_set_name': kind}} for kind in ('Pile-CC', 'ArXiv', 'Github')]
CODE = {f'{i}/train-0.parquet': [{'content': 'nine byte', f'only {i}': j} for j in range(50)]
        for i in range(3)}
PROOF = {'test/a_test.jsonl.gz': [{'text': '0', 'meta': {'a': 1}}, {'text': '1', 'meta': {}},
                                  {'text': '2', 'meta': {'a': {'b': 'c'}}}],
         'dev/a_dev.jsonl.gz': [{'text': 'no', 'meta': {}}]}


@pytest.mark.parametrize('name, files, arguments, kept', [
    ('slimpajama', SLIM, [], [['C4', 'Book']]),
    ('arxiv', {'train/0.jsonl.zst': PILE, 'val.jsonl.zst': PILE}, [], [['ArXiv'], ['ArXiv']]),
    ('starcoder', CODE, ['--max_tokens=503'], [['nine byte'] * 51]),
    ('proof_pile', PROOF, [], [['0', '1', '2']])])
def test_a_corpus_keeps_its_rows(tmp_path, monkeypatch, name, files, arguments, kept):
    monkeypatch.setattr(shutil, 'rmtree', None)  # a stopped run goes on, so nothing is removed
    for file, rows in files.items():
        write_rows(tmp_path / 'in' / file, rows)
    assert prepare('hub', tmp_path / 'out', f'data/hub/{name}.py', '--tokenizer=bytes',
                   f'--local={tmp_path}/in', *arguments) == kept


def test_train_files_come_in_the_order_of_a_hash_and_others_in_that_of_names():
    hub = runpy.run_path(str(ROOT / 'data/hub/prepare.py'))
    files = {f'{letter}/{name}.json': letter for letter in 'hgfedcba' for name in ('train', 'dev')}
    train, val, test = (hub['paths_of'](split, files | {'README.md': '', 'infos.json': ''})
                        for split in SPLITS)
    assert train == sorted('abcdefgh', key=lambda x: stable_hash(f'{x}/train.json'))
    assert val == [*'abcdefgh'] and test == []
