"""
Results on disk: JSON that anyone can read, written whole or not at all, with what made it.

$ python -m pytest tests/test_answers.py
"""

import contextlib
import errno
import json
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, files_at_most, refuses, written_elsewhere

from lib import answers
from lib.answers import bin_means, command, provenance, save_json, whole_folder
from lib.errors import UserError
from lib.tokenizers import get_tokenizer
from lib.tokens import write_corpus


def strict(path):
    """The JSON in a file. NaN and Infinity, which JSON does not have, are errors."""
    return json.loads(path.read_text(), parse_constant=pytest.fail)


@pytest.fixture
def path(tmp_path):
    """A file to write, in a folder that does not exist yet."""
    return tmp_path / 'new folder/r.json'


def test_answers_are_json_with_a_list_of_numbers_on_one_line(path):
    data = {'loss': [1.5, 2.25, -3e-7], 'rows': [[1, 2], [3, 4]], 'names': ['a', 'b'], 'none': None,
            'nested': {'deep': [1, 2, 3]}, 'empty': [], 'text': 'x = [1,   2]  # [ "wide" ]\n'}
    assert save_json(path, data) == strict(path) == data
    lines = path.read_text().splitlines()
    for line in ' "loss": [1.5, 2.25, -3e-07],', '  [1, 2],', '  "deep": [1, 2, 3]':
        assert line in lines


def test_numpy_numbers_become_numbers_and_what_is_not_finite_null(path):
    save_json(path, {'a': np.arange(3), 'b': np.array([1 / 3, np.nan]), 'c': np.float32(0.5),
                     'd': float('inf'), 'counts': np.array([12_345_678])})
    assert strict(path) == {
        'a': [0, 1, 2], 'b': [0.333333, None], 'c': 0.5, 'd': None, 'counts': [12_345_678]}


def test_a_file_is_replaced_whole_or_not_at_all(path):
    save_json(path, 'old')
    with pytest.raises(OSError), files_at_most(1000):
        save_json(path, [1.5] * 1000)
    with pytest.raises(TypeError):
        save_json(path, object())  # JSON cannot hold it
    with open(path) as reader:
        save_json(path, 'new')
        assert reader.read() == '"old"\n', 'a reader of the old file sees the new one'
    assert strict(path) == 'new' and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize('name', ['r.json', 'r.json.part', 'r.json.lock'])
def test_a_link_that_was_planted_is_not_written_through(tmp_path, name):
    (tmp_path / 'of others').write_text('old')
    (tmp_path / name).symlink_to(tmp_path / 'of others')
    with contextlib.suppress(UserError):  # a lock that is a link is refused
        save_json(tmp_path / 'r.json', [1])
    assert (tmp_path / 'of others').read_text() == 'old'
    assert name == 'r.json.lock' or strict(tmp_path / 'r.json') == [1]


# ---------------------------------------------------------------------- one writer at a time

def save_folder(path):
    with whole_folder(path):
        pass


def save_corpus(path):
    write_corpus(path.parent, get_tokenizer('bytes'), {'train': ['text']})


@pytest.mark.parametrize('write, name', [
    (lambda path: save_json(path, 1), 'r.json'), (save_folder, 'hf'), (save_corpus, 'meta.json')])
def test_a_second_writer_is_told_who_writes_and_nothing_of_a_lock_is_left(path, write, name):
    path = path.with_name(name)
    with written_elsewhere(path):
        refuses('process 99 on some machine is writing to', write, path)
    path.with_name(f'{name}.lock').write_text('a process that was killed')
    write(path)
    assert path.exists() and not list(path.parent.glob('*.lock'))


def test_what_cannot_be_locked_is_refused_or_said(tmp_path, monkeypatch, capsys):
    (tmp_path / 'file').touch()
    for path in tmp_path / 'file/r.json', Path('/proc/none/r.json'):
        refuses('r.json cannot be written', save_json, path, [1])

    def flock(*_):
        raise OSError(errno.ENOLCK, 'No locks available')

    monkeypatch.setattr('fcntl.flock', flock)  # as in some network file systems
    save_json(tmp_path / 'r.json', [1])
    assert 'no locks' in capsys.readouterr().out and strict(tmp_path / 'r.json') == [1]


COUNT = '''
import sys, time
from pathlib import Path
from lib.errors import UserError
from lib.answers import OnlyWriter
path, times = Path(sys.argv[1]), 50
while times:
    try:
        with OnlyWriter(path), OnlyWriter(path):  # a process may take its own lock again
            n = int(path.read_text())
            path.write_text('')  # no other process reads this
            path.write_text(str(n + 1))
        times -= 1
        time.sleep(0.001)
    except UserError:
        pass
'''


@pytest.mark.slow
def test_processes_write_one_after_the_other(tmp_path):
    path = tmp_path / 'count'
    path.write_text('0')
    command = [sys.executable, '-c', COUNT, path]
    for process in [subprocess.Popen(command, cwd=ROOT) for _ in range(3)]:
        assert process.wait() == 0
    assert path.read_text() == '150' and list(tmp_path.iterdir()) == [path]


# ---------------------------------------------------------------------- what is in a result

def test_provenance_says_how_a_result_was_made(monkeypatch, cpu):
    monkeypatch.setattr(sys, 'argv', ['/some/where/eval_ppl.py', '--scale=1.2'])
    monkeypatch.setattr(sys.modules['__main__'], '__spec__', None)  # it is set under python -m
    monkeypatch.setenv('PATH', '')  # as if git were not installed
    made = provenance({'scale': 1.2}, cpu, 12.34)
    assert made == made | {'command': 'python eval_ppl.py --scale=1.2', 'commit': None,
                           'settings': {'scale': 1.2}, 'seconds': 12.3, 'dtype': 'float32'}
    assert made['versions']['torch'] == torch.__version__ and 'cpu' in made['device']
    monkeypatch.undo()
    monkeypatch.setattr(sys, 'argv', ['/some/where/eval_ppl.py', "--controls=['near']"])
    monkeypatch.setattr(sys.modules['__main__'], '__spec__', None)
    assert shlex.split(command()) == ['python', 'eval_ppl.py', "--controls=['near']"]
    monkeypatch.setattr(sys, 'argv', ['/some/where/eval_ppl.py', '--scale=1.2'])
    monkeypatch.setattr(answers, 'STARTER', '-m lessons.exercises')
    assert command() == 'python -m lessons.exercises eval_ppl.py --scale=1.2'


def test_the_commit_of_a_repository_around_a_copy_is_not_ours(monkeypatch, tmp_path, cpu):
    git = ['git', '-C', str(tmp_path), '-c', 'user.name=x', '-c', 'user.email=x@x.org']
    for words in ['init', '-q'], ['commit', '-q', '--allow-empty', '-m', 'homework']:
        subprocess.run(git + words, check=True)
    monkeypatch.setattr(answers, 'ROOT', tmp_path / 'copy')
    (tmp_path / 'copy').mkdir()
    assert provenance({}, cpu, 0)['commit'] is None


@pytest.mark.parametrize('values, width, positions, means', [
    ([[1, 3, 5, 7, 9], [0, 0, 1, 0, 2]], 2, [1.5, 3.5], [[2, 6], [0, 0.5]]),  # 9 and 2 fill no bin
    ([4., 9.], 0, [1, 2], [4, 9])])
def test_bin_means_by_hand(values, width, positions, means):
    found = bin_means(values, width)
    assert (found[0].tolist(), found[1].tolist()) == (positions, means)
