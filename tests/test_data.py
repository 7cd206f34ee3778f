"""
The prepare scripts, run as a user runs them but in this process, writing to a temporary folder.

$ python -m pytest tests/test_data.py
"""

import hashlib
import json
import re
import zipfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from conftest import contents, mistake, read, refuses, stage_here, written_elsewhere

import data.code.prepare as code
from lib.errors import ROOT
from lib.tokenizers import parse_ranks, tokenizer_from_state, train_bpe
from lib.tokens import SPLITS, documents, open_tokens


def prepare(name, out, *arguments):
    """Run python data/NAME/prepare.py --out_dir=OUT ARGUMENTS. Returns what it printed."""
    return stage_here(f'data/{name}/prepare', f'--out_dir={out}', *arguments)


def prepared(name, out, *arguments):
    """Run prepare(). Returns the texts of [train, val, test]."""
    prepare(name, out, *arguments)
    return all_texts(out)


def refused(name, out, *arguments):
    return mistake(f'data/{name}/prepare', f'--out_dir={out}', *arguments)


def texts(folder, split):
    data = open_tokens(str(folder), split)
    encoding = tokenizer_from_state(data.tokenizer_state)
    return [encoding.decode(data.tokens[start:end].tolist()) for start, end in documents(data)]


def all_texts(folder):
    return [texts(folder, split) for split in SPLITS if (folder / f'{split}.bin').exists()]


def write(folder, *names):
    """A folder of small files."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f'text of {name}')
    return folder


# ---------------------------------------------------------------------- stdlib

def test_stdlib_is_split_by_file_and_prepared_only_once(tmp_path):
    train, val, test = prepared('stdlib', tmp_path)
    files = [text for text in train + val + test if len(text) > 100]  # some are the same one line
    assert len(set(files)) == len(files)
    assert min(len(''.join(files)) for files in (train, val, test)) > 200 * 1025  # windows
    assert Path(json.__file__).read_text(encoding='utf-8') in files

    assert 'prepared already' in prepare('stdlib', tmp_path)
    (tmp_path / 'val.bin').write_bytes(b'cut short')
    assert 'prepared already' not in prepare('stdlib', tmp_path)
    assert texts(tmp_path, 'val') == val


# ---------------------------------------------------------------------- code

@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip takes wheels from, instead of the network."""
    folder = tmp_path / 'index'
    folder.mkdir()
    monkeypatch.setenv('PIP_NO_INDEX', '1')
    monkeypatch.setenv('PIP_FIND_LINKS', str(folder))
    return folder


def lines_of(word):
    """Source of 20 lines; no passage of it occurs with another word."""
    return ''.join(f'def {word}_{i}():\n\n    return {i}\n' for i in range(20))


# What pip needs to find in a wheel.
WHEEL_PARTS = {'METADATA': 'Metadata-Version: 2.1\nName: NAME\nVersion: 1.0\n', 'RECORD': '',
               'WHEEL': 'Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n'}


def wheel(index, name, split, **files):
    """Put a wheel of these files, {module: source}, into the index. Returns its manifest entry."""
    path = index / f'{name}-1.0-py3-none-any.whl'
    with zipfile.ZipFile(path, 'w') as archive:
        for module, source in files.items():
            archive.writestr(f'{name}/{module}.py', source)
        archive.writestr(f'{name}/data.txt', 'no Python source')
        archive.writestr(f'{name}/tests/test_it.py', lines_of('a_test'))
        for part, text in WHEEL_PARTS.items():
            archive.writestr(f'{name}-1.0.dist-info/{part}', text.replace('NAME', name))
    return {'split': split, 'file': path.name,
            'sha256': hashlib.sha256(path.read_bytes()).hexdigest()}


@pytest.fixture
def wheels(index, tmp_path):
    """
    The manifest of a wheel for each split, and the arguments that name it. `taken` and `short`
    stand in two wheels.
    """
    taken = lines_of('taken')
    rows = [
        wheel(index, 'one', 'train', a=lines_of('a'), b=lines_of('b'), taken=taken, short='x = 1'),
        wheel(index, 'two', 'val', c=lines_of('c'), copied=lines_of('c'), empty='', short='x = 1'),
        wheel(index, 'three', 'test', d=lines_of('d'), f=lines_of('f') + lines_of('c'),
              e=lines_of('e') + taken.replace('\n', '\n\n')),
    ]
    path = tmp_path / 'manifest.json'
    path.write_text(json.dumps(rows))
    return rows, ('code', tmp_path / 'out', f'--manifest={path}', '--tokenizer=bytes')


def test_code_is_split_by_package_and_files_that_share_passages_are_dropped(wheels, index):
    rows, arguments = wheels
    said = prepare(*arguments)
    out = arguments[1]
    train, val, test = all_texts(out)
    assert sorted(train) == sorted([*map(lines_of, ('a', 'b', 'taken')), 'x = 1'])
    assert (val, test) == ([lines_of('c')], [lines_of('d')])
    assert 'test: 1 files are kept. 0 copies and 2 files that share' in said
    assert 'val: 1 files are kept. 1 copies and 1 files that share' in said

    for row in rows[:2]:  # these are kept, so they are not downloaded again
        (index / row['file']).unlink()
    (out / 'meta.json').unlink()
    (out / 'wheels' / rows[2]['file']).write_bytes(b'cut short')
    assert prepared(*arguments) == [train, val, test]


@pytest.mark.parametrize('fault', ['changed', 'missing'])
def test_wheel_that_is_not_the_one_of_the_manifest_is_refused(wheels, index, fault):
    rows, arguments = wheels
    (index / rows[1]['file']).unlink()
    if fault == 'changed':
        wheel(index, 'two', 'val', c=lines_of('other'))
    assert rows[1]['file'] in refused(*arguments)
    out = arguments[1]
    assert [path.name for path in out.glob('wheels/*.whl')] == [rows[0]['file']]
    assert not (out / 'meta.json').exists()


def test_code_takes_the_folder_before_it_downloads(wheels):
    rows, arguments = wheels
    out = arguments[1]
    out.mkdir()
    with written_elsewhere(out / 'meta.json'):
        assert 'process 99 ' in refused(*arguments)
    assert not (out / 'wheels').exists()


def test_a_python_without_pip_is_named(monkeypatch, tmp_path):
    said = SimpleNamespace(returncode=1, stderr='/x/python: No module named pip\n')
    monkeypatch.setattr(code.subprocess, 'run', lambda *_, **__: said)
    refuses('has no pip', code.pip_download, {'file': 'one-1.0-py3-none-any.whl'}, tmp_path)


def test_code_without_an_index_is_the_standard_library_and_says_so(wheels, index):
    for path in index.iterdir():
        path.unlink()
    _, arguments = wheels
    out = arguments[1]
    assert 'standard library' in prepare(*arguments)
    assert 'standard library' in read(out / 'meta.json')['report']['source']
    assert min(map(len, all_texts(out))) > 10
    assert 'prepared already' in prepare(*arguments)


# ---------------------------------------------------------------------- text

def test_text_files_and_jsonl_lines_are_documents_that_hashes_share_out(tmp_path):
    folder = write(tmp_path / 'in', 'one.txt', 'deep/two.md')
    (folder / '.hidden').write_bytes(b'\xff')
    bodies = [f'line {i} \u2028ä' for i in range(200)]
    rows = [json.dumps({'id': i, 'body': body}, ensure_ascii=False)
            for i, body in enumerate(bodies)]
    lines, more = tmp_path / 'lines.jsonl', tmp_path / 'more.jsonl'
    lines.write_text('\n\n'.join(rows), encoding='utf-8')
    options = '--field=body', '--val_fraction=0.2', '--test_fraction=0.1'
    splits = prepared('text', tmp_path / 'out', folder, lines, *options)
    assert sorted(sum(splits, [])) == sorted(['text of one.txt', 'text of deep/two.md', *bodies])
    assert 25 < len(splits[1]) < 60 and 8 < len(splits[2]) < 35

    # Some Windows tools begin a file with a byte order mark.
    more.write_text(f'\ufeff{{"body": "new"}}\n{rows[0]}', encoding='utf-8')
    again = prepared('text', tmp_path / 'more', lines, more, *options)
    for old, new in zip(splits, again):  # the same line stays in its split
        assert new.count(bodies[0]) == 2 * old.count(bodies[0])


@pytest.mark.parametrize('line', ['line {i}, ö\n', '{i}\r\n', 'of about a kB ' * 70 + '{i}\n'])
def test_single_text_file_is_cut_by_lines_without_loss(tmp_path, line):
    text = ''.join(line.format(i=i) for i in range(4000))
    book = tmp_path / 'book.txt'
    book.write_bytes(text.encode())
    [train], [val], [test] = prepared('text', tmp_path / 'out', book, '--val_fraction=0.2',
                                      '--test_fraction=0.1')
    assert train + val + test == text
    assert train.endswith('\n') and val.endswith('\n')
    assert len(val) / len(text) == pytest.approx(0.2, abs=0.01)


def test_splits_that_are_named_are_taken_as_they_are(tmp_path):
    folder = write(tmp_path / 'in', 'train/a', 'validation/a', 'test/a', 'README', 'more/x')
    said = prepare('text', tmp_path / 'out', folder)
    assert all_texts(tmp_path / 'out') == [[f'text of {name}/a'] for name in
                                           ('train', 'validation', 'test')]
    assert f'2 files of {folder} are left out' in said and 'README' in said
    assert read(tmp_path / 'out/meta.json')['report']['files'] == 3
    folder = write(tmp_path / 'files', 'train.txt', 'valid.txt', 'test.txt')
    assert prepared('text', tmp_path / 'out1', folder) == [
        [f'text of {name}.txt'] for name in ('train', 'valid', 'test')]
    folder = write(tmp_path / 'half', *'abcdefgh', 'test/a', 'test.py')
    shares = '--val_fraction=0.5', '--test_fraction=0'
    assert 'but none for train' in prepare('text', tmp_path / 'out3', folder, *shares)
    folder, out = write(tmp_path / 'other', 'a', 'b', 'deep/c'), tmp_path / 'out2'
    test, val = f'--test=["{folder}/deep"]', f'--val=["{folder}/b"]'
    assert prepared('text', out, folder, test, val) == [
        ['text of a'], ['text of b'], ['text of deep/c']]
    # A file that is named twice is read once. Without a test split, no file of it is left.
    assert prepared('text', out, folder, folder / 'a', val, '--test_fraction=0') == [
        ['text of a', 'text of deep/c'], ['text of b']]


@pytest.mark.parametrize(('name', 'arguments', 'said'), [
    ('code', ['--manifest={manifest}'], "is not a manifest like data/code/manifest.json (KeyError"),
    ('books', ['.', '--manifest={manifest}'], 'is not a manifest like data/books/manifest.json'),
    ('passkey', ['--tokenizer=bytes', '--min_length=1'], 'so the length 1 is too short'),
    ('passkey', ['--tokenizer=missing.json'], 'There is no tokenizer file missing.json'),
    ('text', ["--val=['{manifest}']"], 'None of the text falls into train. Give more files'),
])
def test_mistake_is_one_line_that_says_what_to_change(tmp_path, name, arguments, said):
    manifest = tmp_path / 'manifest.json'
    manifest.write_text('[{"sha256": "x"}]')
    arguments = [argument.format(manifest=manifest) for argument in arguments]
    assert said in refused(name, tmp_path / 'out', *arguments)


@pytest.mark.parametrize('named', ['in/../in/b', 'link', 'folder_of_links', 'link_to_folder'])
def test_file_named_for_val_goes_nowhere_else(tmp_path, named):
    write(tmp_path / 'in', 'a', 'b', 'c')
    (tmp_path / 'folder_of_links').mkdir()
    for link, target in (('link', 'in/b'), ('folder_of_links/x', 'in/b'),
                         ('link_to_folder', 'folder_of_links')):
        (tmp_path / link).symlink_to(tmp_path / target)
    assert prepared('text', tmp_path / 'out', tmp_path / 'in', f'--val=["{tmp_path / named}"]',
                    '--test_fraction=0') == [['text of a', 'text of c'], ['text of b']]


def test_bpe_is_trained_and_kept_with_the_data(tmp_path, monkeypatch):
    pytest.importorskip('tokenizers')
    path, out = tmp_path / 'half.jsonl', tmp_path / 'out'
    path.write_text('{"text": "half \\ud800 a pair"}\n' * 50)
    expected = [['half \N{REPLACEMENT CHARACTER} a pair'] * 50]
    assert expected == prepared('text', out, path, '--tokenizer=bpe:262', '--val_fraction=0',
                                '--test_fraction=0')
    data = open_tokens(str(out), 'train')
    assert data.meta['vocab_size'] == 262 and data.tokens.max() == 261
    before = contents(out)
    path.write_text('{"text": "other text"}\n' * 50)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr('lib.tokens.SplitWriter.write', Mock(side_effect=KeyboardInterrupt))
        prepare('text', out, path, '--tokenizer=bpe:262', '--val_fraction=0',
                '--test_fraction=0')
    assert contents(out) == before  # a stopped script changes nothing, the BPE included
    (out / 'tokenizer.tiktoken').unlink()  # the data set does without
    assert all_texts(out) == expected
    (out / 'tokenizer.tiktoken').touch()
    prepare('text', out, path, '--val_fraction=0', '--test_fraction=0')
    assert not (out / 'tokenizer.tiktoken').exists()  # it is not that of these tokens


def test_another_tokenizer_of_the_same_name_is_not_the_same(tmp_path):
    pytest.importorskip('tokenizers')
    path = tmp_path / 'mine.tiktoken'
    for text in 'one two ', 'three four ':
        train_bpe([text * 50], 260, path)
        assert 'prepared already' not in prepare('stdlib', tmp_path / 'out', f'--tokenizer={path}')
    assert 'prepared already' in prepare('stdlib', tmp_path / 'out', f'--tokenizer={path}')


# ---------------------------------------------------------------------- books and passkeys

def test_manifests_are_whole_and_share_nothing_between_splits():
    books, wheels = [read(ROOT / f'data/{name}/manifest.json') for name in ('books', 'code')]
    for rows, counts in (books, [137, 4, 5]), (wheels, [8, 2, 3]):
        assert [sum(row['split'] == split for row in rows) for split in SPLITS] == counts
        assert all(re.fullmatch('[0-9a-f]{64}', row['sha256']) for row in rows)
        assert len({row['sha256'] for row in rows}) == len(rows)
    assert all(book['file'].startswith(book['split'] + '/') for book in books)
    assert len({wheel['file'].split('-')[0] for wheel in wheels}) == len(wheels)  # packages


WORDS = {'train': ' qz', 'val': ' jx', 'test': ' wk'}


def test_books_are_checked_against_the_manifest_before_anything_is_written(tmp_path):
    books, folder, out = [], tmp_path / 'in', tmp_path / 'out'
    for split in SPLITS:
        name, text = f'{split}/book.txt', f'A {split} book with \r\n line ends.' + 40 * WORDS[split]
        text = text.encode()
        write(folder, name)
        (folder / name).write_bytes(text)
        books.append({'split': split, 'file': name, 'title': split, 'author': 'N. N.',
                      'bytes': len(text), 'sha256': hashlib.sha256(text).hexdigest()})
    (tmp_path / 'list.json').write_text(json.dumps(books))
    manifest = f'--manifest={tmp_path}/list.json'
    assert prepared('books', out, folder, manifest)[1] == [
        'A val book with \r\n line ends.' + 40 * ' jx']
    prepare('books', tmp_path / 'bpe', folder, manifest, '--tokenizer=bpe:262')
    ranks = parse_ranks(open_tokens(str(tmp_path / 'bpe'), 'val').tokenizer_state['text'], '')
    assert b' qz' in ranks and not {b' jx', b' wk'} & ranks.keys()  # learned on train alone
    before = contents(out)
    (folder / 'train/book.txt').write_text('Another book')
    assert 'train/book.txt' in refused('books', out, folder, manifest) and contents(out) == before


def test_passkey_documents_hold_their_key_twice_and_fit_their_lengths(tmp_path):
    train, val, test = prepared('passkey', tmp_path, '--tokenizer=bytes', '--n_documents=100',
                                '--min_length=600', '--max_length=800')
    assert (len(train), len(val), len(test)) == (100, 1, 1) and val != test
    for text in train:
        key = text[-5:]
        assert key.isdecimal() and text.count(key) >= 2 and 500 < len(text) <= 800
