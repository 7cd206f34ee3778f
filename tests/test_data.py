"""
The prepare scripts, run as a user runs them but in this process, writing to a temporary folder.

$ python -m pytest tests/test_data.py
"""

import gzip
import hashlib
import json
import sys
from pathlib import Path

import pytest
from conftest import contents, read, stage_here

from lib.errors import ROOT, UserError
from lib.tokens import SPLITS, documents, open_tokens, tokenizer_from_state

EVERYTHING_TRAINS = '--val_fraction=0', '--test_fraction=0'


def prepare(name, out, *arguments):
    """Runs python data/NAME/prepare.py --out_dir=OUT ARGUMENTS. Returns what it printed."""
    return stage_here(f'data/{name}/prepare', f'--out_dir={out}', *arguments)


def refused(*arguments):
    """What a user is told of a mistake."""
    with pytest.raises(UserError) as caught:
        prepare(*arguments)
    return str(caught.value)


def texts(folder, split):
    data = open_tokens(str(folder), split)
    encoding = tokenizer_from_state(data.tokenizer_state)
    return [encoding.decode(data.tokens[start:end].tolist()) for start, end in documents(data)]


def all_texts(folder, *splits):
    return [texts(folder, split) for split in splits or SPLITS]


def write(folder, *names):
    """A folder of small files."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f'text of {name}', errors='replace')
    return folder


# ---------------------------------------------------------------------- stdlib

def test_stdlib_is_split_by_file_and_prepared_only_once(tmp_path):
    said = prepare('stdlib', tmp_path)
    train, val, test = all_texts(tmp_path)
    meta = read(tmp_path / 'meta.json')
    files = [text for text in train + val + test if len(text) > 100]  # some are the same one line
    assert len(set(files)) == len(files)
    assert min(meta['splits'][split]['tokens'] for split in SPLITS) > 200 * 1025  # windows
    assert Path(json.__file__).read_text(encoding='utf-8') in files
    assert meta['report']['python'] in said and meta['report']['sha256'] in said

    assert 'prepared already' in prepare('stdlib', tmp_path)
    (tmp_path / 'val.bin').write_bytes(b'cut short')
    assert 'prepared already' not in prepare('stdlib', tmp_path)
    assert texts(tmp_path, 'val') == val


# ---------------------------------------------------------------------- text

def test_text_files_and_jsonl_lines_are_documents_that_hashes_share_out(tmp_path):
    folder = write(tmp_path / 'in', 'one.txt')
    (folder / '.hidden').write_bytes(b'\xff')
    (folder / 'deep').mkdir()
    (folder / 'deep/two.md.gz').write_bytes(gzip.compress(b'second file'))
    rows = [json.dumps({'id': i, 'body': f'line {i} ä'}) for i in range(200)]
    lines, more = tmp_path / 'lines.jsonl.gz', tmp_path / 'more.jsonl'
    lines.write_bytes(gzip.compress('\n\n'.join(rows).encode()))
    options = '--field=body', '--val_fraction=0.2', '--test_fraction=0.1'
    prepare('text', tmp_path / 'out', folder, lines, *options)
    train, val, test = all_texts(tmp_path / 'out')
    expected = ['text of one.txt', 'second file', *(f'line {i} ä' for i in range(200))]
    assert sorted(train + val + test) == sorted(expected)
    assert 25 < len(val) < 60 and 8 < len(test) < 35

    more.write_text(f'{{"body": "new"}}\n{rows[0]}')  # the same line stays in its split
    prepare('text', tmp_path / 'more', lines, more, *options)
    counts = [[text.count('line 0 ä') for text in all_texts(tmp_path / name)]
              for name in ('out', 'more')]
    assert counts[1] == [2 * n for n in counts[0]]


def test_single_text_file_is_cut_by_lines_without_loss(tmp_path):
    text = ''.join(f'line {i}, ö\n' for i in range(5000))
    book = tmp_path / 'book.txt'
    book.write_text(text, encoding='utf-8')
    prepare('text', tmp_path / 'out', book, '--val_fraction=0.2', '--test_fraction=0.1')
    [train], [val], [test] = all_texts(tmp_path / 'out')
    assert train + val + test == text
    assert train.endswith('\n') and val.endswith('\n')
    assert len(val) / len(text) == pytest.approx(0.2, abs=0.01)


def test_splits_that_are_named_are_taken_as_they_are(tmp_path):
    folder = write(tmp_path / 'in', 'train/a', 'val/a', 'test/a', 'README')
    prepare('text', tmp_path / 'out', folder)
    assert all_texts(tmp_path / 'out') == [[f'text of {split}/a'] for split in SPLITS]
    folder, out = write(tmp_path / 'other', 'a', 'b', 'deep/c'), tmp_path / 'out2'
    options = f'--test=["{folder}/deep"]', f'--val=["{folder}/b"]'
    prepare('text', out, folder, *options)
    assert all_texts(out) == [['text of a'], ['text of b'], ['text of deep/c']]
    prepare('text', out, folder, folder / 'a', options[1], '--test_fraction=0')  # a, but once
    assert texts(out, 'train') == ['text of a', 'text of deep/c']
    assert not (out / 'test.bin').exists()


@pytest.mark.parametrize('named', ['in/../in/b', 'link', 'folder_of_links', 'link_to_folder'])
def test_file_named_for_val_goes_nowhere_else(tmp_path, named):
    write(tmp_path / 'in', 'a', 'b', 'c')
    (tmp_path / 'folder_of_links').mkdir()
    for link, target in (('link', 'in/b'), ('folder_of_links/x', 'in/b'),
                         ('link_to_folder', 'folder_of_links')):
        (tmp_path / link).symlink_to(tmp_path / target)
    options = f'--val=["{tmp_path / named}"]', '--test_fraction=0'
    prepare('text', tmp_path / 'out', tmp_path / 'in', *options)
    train, val = all_texts(tmp_path / 'out', 'train', 'val')
    assert (train, val) == (['text of a', 'text of c'], ['text of b'])


@pytest.mark.skipif(sys.platform != 'linux', reason='other systems refuse such names')
def test_a_file_name_that_is_not_utf8_is_as_good_as_any(tmp_path):
    folder, out = write(tmp_path / 'in', 'odd\udcff.txt'), tmp_path / 'out\udcff'
    prepare('text', out, folder, *EVERYTHING_TRAINS)
    assert texts(out, 'train') == ['text of odd?.txt']


def test_bpe_is_trained_and_kept_with_the_data(tmp_path):
    pytest.importorskip('tokenizers')
    path, out = tmp_path / 'half.jsonl', tmp_path / 'out'
    path.write_text('{"text": "half \\ud800 a pair"}\n' * 50)
    for tokenizer in 'bytes', 'bpe:262':
        prepare('text', out, path, f'--tokenizer={tokenizer}', *EVERYTHING_TRAINS)
        assert texts(out, 'train') == ['half \N{REPLACEMENT CHARACTER} a pair'] * 50
    data = open_tokens(str(out), 'train')
    assert data.meta['vocab_size'] == 262 and data.tokens.max() == 261
    (out / 'tokenizer.tiktoken').unlink()  # the data set does without
    assert len(texts(out, 'train')) == 50


def test_files_that_leave_a_split_without_text_are_refused(tmp_path):
    folder, out = write(tmp_path / 'in', 'a.txt', 'b.txt'), tmp_path / 'out'
    assert 'falls into val' in refused('text', out, folder)
    assert not out.exists()


# ---------------------------------------------------------------------- books and passkeys

def test_the_list_of_books_is_whole():
    books = read(ROOT / 'data/books/manifest.json')
    assert [sum(book['split'] == split for book in books) for split in SPLITS] == [137, 4, 5]
    assert all(book['file'].startswith(book['split'] + '/') for book in books)
    assert len({book['sha256'] for book in books}) == len({book['file'] for book in books}) == 146


def test_books_are_checked_against_the_manifest_before_anything_is_written(tmp_path):
    books, folder, out = [], tmp_path / 'in', tmp_path / 'out'
    for split in SPLITS:
        name, text = f'{split}/book.txt', f'A {split} book with \r\n line ends.'.encode()
        write(folder, name)
        (folder / name).write_bytes(text)
        books.append({'split': split, 'file': name, 'title': split, 'author': 'N. N.',
                      'bytes': len(text), 'sha256': hashlib.sha256(text).hexdigest()})
    (tmp_path / 'list.json').write_text(json.dumps(books))
    manifest = f'--manifest={tmp_path}/list.json'
    prepare('books', out, folder, manifest)
    assert texts(out, 'val') == ['A val book with \r\n line ends.']
    before = contents(out)
    (folder / 'train/book.txt').write_text('Another book')
    (folder / 'test/book.txt').unlink()
    assert '2 of 3' in refused('books', out, folder, manifest) and contents(out) == before
    assert 'folder' in refused('books', out, manifest)


def test_passkey_documents_hold_their_key_twice_and_fit_their_lengths(tmp_path):
    prepare('passkey', tmp_path, '--tokenizer=bytes', '--n_documents=100', '--min_length=600',
            '--max_length=800')
    train, val, test = all_texts(tmp_path)
    assert (len(train), len(val), len(test)) == (100, 1, 1)
    for text in train:
        key = text[-5:]
        assert key.isdecimal() and text.count(key) >= 2 and 500 < len(text) <= 800
