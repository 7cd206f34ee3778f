"""
The prepare scripts, run as a user runs them, writing to a temporary folder.

$ python -m pytest tests/test_data.py
"""

import gzip
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from corpus import documents, open_tokens, tokenizer_from_state

ROOT = Path(__file__).resolve().parents[1]


def command(name, *arguments):
    return [sys.executable, ROOT / 'data' / name / 'prepare.py', *map(str, arguments)]


def prepare(name, *arguments):
    return subprocess.run(command(name, *arguments), capture_output=True, text=True)


def prepared(name, out, *arguments):
    result = prepare(name, *arguments, f'--out_dir={out}')
    assert result.returncode == 0, result.stderr
    return result.stdout


def refused(name, *arguments):
    """The one line that a refused command prints."""
    result = prepare(name, *arguments)
    assert result.returncode == 1 and result.stderr.count('\n') == 1, result.stderr
    return result.stderr


def texts(folder, split):
    data = open_tokens(str(folder), split)
    encoding = tokenizer_from_state(data.tokenizer_state)
    return [encoding.decode(data.tokens[start:end].tolist()) for start, end in documents(data)]


# ----------------------------------------------------------------------------- stdlib

def test_stdlib_is_split_by_file_and_prepared_only_once(tmp_path):
    said = prepared('stdlib', tmp_path)
    train, val, test = (texts(tmp_path, split) for split in ('train', 'val', 'test'))
    meta = json.loads((tmp_path / 'meta.json').read_text())
    assert len(train) + len(val) + len(test) <= meta['report']['files']  # an empty file is no document
    files = [text for text in train + val + test if len(text) > 100]  # some __init__.py are the same one line
    assert len(set(files)) == len(files)
    assert min(meta['splits'][split]['tokens'] for split in ('val', 'test')) > 200 * 1025  # windows of 1,024 bytes
    assert Path(json.__file__).read_text(encoding='utf-8') in train + val + test
    assert meta['report']['python'] in said and meta['report']['sha256'] in said
    written = (tmp_path / 'train.bin').stat().st_mtime_ns
    assert 'prepared already' in prepared('stdlib', tmp_path)
    assert (tmp_path / 'train.bin').stat().st_mtime_ns == written
    (tmp_path / 'val.bin').write_bytes(b'cut short')
    assert 'prepared already' not in prepared('stdlib', tmp_path)
    assert texts(tmp_path, 'val') == val


# ----------------------------------------------------------------------------- text

def test_text_files_and_jsonl_lines_are_documents_that_hashes_share_out(tmp_path):
    (tmp_path / 'in' / 'deep').mkdir(parents=True)
    (tmp_path / 'in' / 'one.txt').write_text('first file\n')
    (tmp_path / 'in' / '.hidden').write_bytes(b'\xff')
    with gzip.open(tmp_path / 'in' / 'deep' / 'two.md.gz', 'wt') as file:
        file.write('second file')
    lines = [json.dumps({'id': i, 'body': f'line {i} ä'}) for i in range(200)]
    with gzip.open(tmp_path / 'lines.jsonl.gz', 'wt') as file:
        file.write('\n\n'.join(lines))
    options = '--field=body', '--val_fraction=0.2', '--test_fraction=0.1'
    prepared('text', tmp_path / 'out', tmp_path / 'in', tmp_path / 'lines.jsonl.gz', *options)
    splits = {split: texts(tmp_path / 'out', split) for split in ('train', 'val', 'test')}
    everything = sum(splits.values(), [])
    assert sorted(everything) == sorted(['first file\n', 'second file', *(f'line {i} ä' for i in range(200))])
    assert 25 < len(splits['val']) < 60 and 8 < len(splits['test']) < 35
    (tmp_path / 'more.jsonl').write_text('{"body": "new"}\n' + lines[0])  # the same line stays in its split
    options = '--field=body', '--val_fraction=0.2', '--test_fraction=0.1'
    prepared('text', tmp_path / 'more', tmp_path / 'lines.jsonl.gz', tmp_path / 'more.jsonl', *options)
    home = next(split for split in splits if 'line 0 ä' in splits[split])
    assert texts(tmp_path / 'more', home).count('line 0 ä') == 2


def test_single_text_file_is_cut_by_lines_without_loss(tmp_path):
    lines = [f'line {i}, ö\n' for i in range(5000)]
    (tmp_path / 'book.txt').write_text(''.join(lines), encoding='utf-8')
    prepared('text', tmp_path / 'out', tmp_path / 'book.txt', '--val_fraction=0.2', '--test_fraction=0.1')
    parts = [texts(tmp_path / 'out', split) for split in ('train', 'val', 'test')]
    assert [len(part) for part in parts] == [1, 1, 1]
    assert ''.join(part for part, in parts) == ''.join(lines) and all(part.endswith('\n') for part, in parts)
    assert abs(len(parts[1][0]) / sum(len(part) for part, in parts) - 0.2) < 0.01


def test_splits_that_are_named_are_taken_as_they_are(tmp_path):
    for split in ('train', 'val', 'test'):
        (tmp_path / 'in' / split).mkdir(parents=True)
        (tmp_path / 'in' / split / 'a.txt').write_text(f'{split} text')
    (tmp_path / 'in' / 'README').write_text('not a part of any')
    prepared('text', tmp_path / 'out', tmp_path / 'in')
    assert [texts(tmp_path / 'out', split) for split in ('train', 'val', 'test')] == [
        ['train text'], ['val text'], ['test text']]
    options = f"--val=['{tmp_path}/in/val']", '--test_fraction=0'
    prepared('text', tmp_path / 'out', tmp_path / 'in' / 'train' / 'a.txt', *options)
    assert texts(tmp_path / 'out', 'train') == ['train text'] and texts(tmp_path / 'out', 'val') == ['val text']
    assert not (tmp_path / 'out' / 'test.bin').exists()


def files(folder, *names):
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text(f'text of {name}', errors='replace')
    return folder


@pytest.mark.parametrize('named', ['in/b', 'link', 'in/../in/b', 'held', 'linked'])
def test_file_named_for_val_goes_nowhere_else(tmp_path, named):
    """Be it by its name, through a link or by a folder of links."""
    files(tmp_path / 'in', 'a', 'b', 'c')
    (tmp_path / 'link').symlink_to(tmp_path / 'in' / 'b')
    (tmp_path / 'held').mkdir()
    (tmp_path / 'held' / 'x').symlink_to(tmp_path / 'in' / 'b')
    (tmp_path / 'linked').symlink_to(tmp_path / 'held')
    options = f"--val=['{tmp_path / named}']", '--test_fraction=0'
    prepared('text', tmp_path / 'out', tmp_path / 'in', *options)
    assert texts(tmp_path / 'out', 'train') == ['text of a', 'text of c']
    assert texts(tmp_path / 'out', 'val') == ['text of b']


def test_folder_named_for_test_goes_nowhere_else(tmp_path):
    files(tmp_path / 'in', 'a', 'b')
    files(tmp_path / 'in' / 'deep', 'c', 'd')
    options = f"--test=['{tmp_path}/in/deep']", f"--val=['{tmp_path}/in/b']"
    prepared('text', tmp_path / 'out', tmp_path / 'in', *options)
    assert [texts(tmp_path / 'out', split) for split in ('train', 'val', 'test')] == [
        ['text of a'], ['text of b'], ['text of c', 'text of d']]


def test_file_that_two_paths_lead_to_is_read_once(tmp_path):
    """Its two names could fall into train and val."""
    folder = files(tmp_path / 'in', 'a', 'b')
    options = '--val_fraction=0', '--test_fraction=0'
    prepared('text', tmp_path / 'out', folder, folder / 'a', *options)
    assert texts(tmp_path / 'out', 'train') == ['text of a', 'text of b']


def test_file_named_for_val_and_for_test_is_refused(tmp_path):
    folder, out = files(tmp_path / 'in', 'a', 'b'), f'--out_dir={tmp_path}/out'
    line = refused('text', folder, out, f"--val=['{folder}/a']", f"--test=['{folder}/a']")
    assert f'{folder}/a is named for val and for test' in line


def test_file_of_one_line_is_refused_before_work_where_it_must_be_cut(tmp_path):
    (tmp_path / 'one.txt').write_text('word ' * 1000)
    # no line begins in the last part of the second
    (tmp_path / 'two.txt').write_text('word ' * 900 + '\n' + 'word ' * 100)
    out = f'--out_dir={tmp_path}/out'
    for name in ('one.txt', 'two.txt'):
        line = refused('text', tmp_path / name, out, '--tokenizer=bpe:300')
        assert f'{tmp_path / name} cannot be cut for' in line and '_fraction=0' in line
    assert not (tmp_path / 'out').exists()
    options = '--val_fraction=0', '--test_fraction=0'
    prepared('text', tmp_path / 'out', tmp_path / 'one.txt', *options)
    assert texts(tmp_path / 'out', 'train') == ['word ' * 1000]


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='other systems refuse such names')
def test_file_name_that_is_not_utf8_is_as_good_as_any(tmp_path):
    files(tmp_path / 'in', 'a.txt', 'b.txt', 'odd\udcff.txt')
    out = os.fsdecode(os.fsencode(tmp_path) + b'/out\xff')
    options = f'--out_dir={out}', '--val_fraction=0', '--test_fraction=0'
    run = subprocess.run(command('text', tmp_path / 'in', *options), capture_output=True,
                         env=os.environ | {'PYTHONIOENCODING': 'utf-8:strict'})
    assert run.returncode == 0, run.stderr
    assert len(texts(out, 'train')) == 3 and 'text of odd?.txt' in texts(out, 'train')


def test_half_a_surrogate_pair_in_json_is_replaced_for_every_tokenizer(tmp_path):
    pytest.importorskip('tokenizers')
    lines = [f'{{"text": "half \\ud800 a pair, {i}"}}' for i in range(50)]
    (tmp_path / 'half.jsonl').write_text('\n'.join(lines))
    for tokenizer in ('bytes', 'bpe:300'):
        options = f'--tokenizer={tokenizer}', '--val_fraction=0', '--test_fraction=0'
        prepared('text', tmp_path / tokenizer, tmp_path / 'half.jsonl', *options)
        found = texts(tmp_path / tokenizer, 'train')
        assert found == [f'half \N{REPLACEMENT CHARACTER} a pair, {i}' for i in range(50)]


def test_bpe_is_trained_and_kept_with_the_data(tmp_path):
    pytest.importorskip('tokenizers')
    text = Path(json.__file__).read_text(encoding='utf-8')
    (tmp_path / 'code.py').write_text(text)
    prepared('text', tmp_path / 'out', tmp_path / 'code.py', '--tokenizer=bpe:400')
    data = open_tokens(str(tmp_path / 'out'), 'train')
    assert data.meta['vocab_size'] == 400 and data.tokens.max() == 399
    assert ''.join(texts(tmp_path / 'out', split)[0] for split in ('train', 'val', 'test')) == text
    (tmp_path / 'out' / 'tokenizer.tiktoken').rename(tmp_path / 'elsewhere.tiktoken')
    assert ''.join(texts(tmp_path / 'out', split)[0] for split in ('train', 'val', 'test')) == text


def test_text_that_cannot_be_read_is_named(tmp_path):
    out = f'--out_dir={tmp_path / "out"}'
    assert 'nothing to read' in refused('text', out)
    assert 'no file or folder nowhere.txt' in refused('text', 'nowhere.txt', out)
    (tmp_path / 'latin.txt').write_bytes((b'x' * 99 + b'\n') * 30 + b'x\xe4\n')
    assert 'latin.txt is not UTF-8: byte 3,001 is 0xe4' in refused('text', tmp_path / 'latin.txt', out)
    deep = '[' * 100_000
    for line, complaint in ((deep, 'line 2, is not JSON'),
                            ('{"body": "x", "id": 1}',
                             "line 2, has no text in 'text', but the fields body, id"),
                            ('{"text": ', 'line 2, is not JSON'), ('[1]', 'but list')):
        (tmp_path / 'x.jsonl').write_text('{"text": "fine"}\n' + line)
        assert complaint in refused('text', tmp_path / 'x.jsonl', out, '--val_fraction=0', '--test_fraction=0')
    (tmp_path / 'cut.txt.gz').write_bytes(gzip.compress(b'some text' * 999)[:-9])
    arguments = tmp_path / 'cut.txt.gz', out, '--val_fraction=0', '--test_fraction=0'
    assert 'cut.txt.gz is not a whole gzip file' in refused('text', *arguments)
    (tmp_path / 'a.txt').write_text('a')
    (tmp_path / 'b.txt').write_text('b')
    assert 'None of 2 files falls into' in refused('text', tmp_path / 'a.txt', tmp_path / 'b.txt', out)
    assert not (tmp_path / 'out').exists() or not list((tmp_path / 'out').iterdir())


# ----------------------------------------------------------------------------- books

def test_the_list_of_books_is_whole():
    books = json.loads((ROOT / 'data' / 'books' / 'manifest.json').read_text(encoding='utf-8'))
    assert [sum(book['split'] == split for book in books) for split in ('train', 'val', 'test')] == [137, 4, 5]
    assert all(book['file'].startswith(book['split'] + '/') and len(book['sha256']) == 64 for book in books)
    assert len({book['sha256'] for book in books}) == len({book['file'] for book in books}) == len(books)


def test_books_are_checked_against_the_manifest_before_anything_is_written(tmp_path):
    books = []
    for split in ('train', 'val', 'test'):
        (tmp_path / 'in' / split).mkdir(parents=True)
        path, text = tmp_path / 'in' / split / 'book.txt', f'A {split} book with \r\n line ends.'.encode()
        path.write_bytes(text)
        books.append({'split': split, 'file': f'{split}/book.txt', 'title': split.title(), 'author': 'N. N.',
                      'year': 1900, 'bytes': len(text), 'sha256': hashlib.sha256(text).hexdigest()})
    (tmp_path / 'list.json').write_text(json.dumps(books))
    options = f'--manifest={tmp_path / "list.json"}', f'--out_dir={tmp_path / "out"}'
    prepared('books', tmp_path / 'out', tmp_path / 'in', options[0])
    assert texts(tmp_path / 'out', 'val') == ['A val book with \r\n line ends.']
    assert open_tokens(str(tmp_path / 'out'), 'val').meta['report']['books'] == 3
    (tmp_path / 'in' / 'train' / 'book.txt').write_text('Another book of some length')
    (tmp_path / 'in' / 'test' / 'book.txt').unlink()
    result = prepare('books', tmp_path / 'in', *options)
    assert 'train/book.txt differs' in result.stdout and 'test/book.txt is missing: Test by N. N.' in result.stdout
    assert result.returncode == 1 and '2 of 3 books' in result.stderr and result.stderr.count('\n') == 1
    assert texts(tmp_path / 'out', 'train') == ['A train book with \r\n line ends.']
    assert 'Name the one folder' in refused('books', *options)
