"""
Results on disk: JSON that anyone can read, written whole or not at all, with what made it.

$ python -m pytest tests/test_answers.py
"""

import contextlib
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, contents, files_at_most, written_elsewhere

from lib.answers import OnlyWriter, bin_means, progress_bar, provenance, save_json, write_text
from lib.errors import UserError


def strict(path):
    """The JSON in a file; NaN and Infinity, which JSON does not have, are errors."""
    def refuse(constant):
        raise AssertionError(f'{constant} is not JSON')

    return json.loads(path.read_text(), parse_constant=refuse)


def test_answers_are_json_with_a_list_of_numbers_on_one_line(tmp_path):
    data = {'loss': [1.5, 2.25, -3e-7], 'rows': [[1, 2], [3, 4]], 'names': ['a', 'b'], 'none': None,
            'nested': {'deep': [1, 2, 3]}, 'empty': [], 'text': 'x = [1,   2]  # [ "wide" ]\n'}
    path = tmp_path / 'r.json'
    assert save_json(path, data) == strict(path) == data
    lines = path.read_text().splitlines()
    for line in ' "loss": [1.5, 2.25, -3e-07],', '  [1, 2],', '  "deep": [1, 2, 3]':
        assert line in lines


def test_numpy_numbers_become_numbers_and_what_is_not_finite_null(tmp_path):
    save_json(tmp_path / 'r.json', {
        'a': np.arange(3), 'b': np.array([1 / 3, np.nan]), 'c': np.float32(0.5), 'd': float('inf'),
        'counts': np.array([12_345_678])})
    assert strict(tmp_path / 'r.json') == {
        'a': [0, 1, 2], 'b': [0.333333, None], 'c': 0.5, 'd': None, 'counts': [12_345_678]}


WRITERS = {'save_json': lambda path: save_json(path, {'a': [1.5] * 1000}),
           'write_text': lambda path: write_text(path, 'new' * 1000)}


@pytest.mark.parametrize('write', WRITERS.values(), ids=WRITERS)
def test_file_is_replaced_whole_or_not_at_all(tmp_path, write):
    path = tmp_path / 'new folder' / 'file'
    write(path)  # makes the folder
    path.write_text('old')
    with pytest.raises(OSError), files_at_most(1000):
        write(path)
    with pytest.raises(TypeError):
        save_json(path, {'a': object()})  # JSON cannot hold it
    with open(path) as reader:
        write(path)
        assert reader.read() == 'old', 'a reader of the old file sees the new one'
    assert path.read_text() != 'old' and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize('name', ['r.json', 'r.json.part', 'r.json.lock'])
def test_a_link_that_was_planted_is_not_written_through(tmp_path, name):
    (tmp_path / 'of others').write_text('old')
    (tmp_path / name).symlink_to(tmp_path / 'of others')
    with contextlib.suppress(UserError):  # of a lock
        save_json(tmp_path / 'r.json', [1])
    assert (tmp_path / 'of others').read_text() == 'old'
    assert name == 'r.json.lock' or strict(tmp_path / 'r.json') == [1]


# ---------------------------------------------------------------------- one writer at a time

def test_a_second_writer_is_told_who_writes_and_nothing_of_a_lock_is_left(tmp_path):
    path = tmp_path / 'new folder/r.json'
    for write in (*WRITERS.values(), OnlyWriter):
        with written_elsewhere(path), pytest.raises(UserError, match='process 99 .*r.json'):
            write(path)
        write(path)  # what a lock is left of, nobody holds
    with OnlyWriter(path), OnlyWriter(path):
        save_json(path, [1])  # whose own lock it is
    assert [file.name for file in path.parent.iterdir()] == ['r.json']


def test_what_cannot_be_locked_is_refused_or_said(tmp_path, monkeypatch, capsys):
    (tmp_path / 'file').touch()
    for path in tmp_path / 'file/r.json', Path('/proc/none/r.json'):
        with pytest.raises(UserError, match='r.json cannot be written'):
            save_json(path, [1])
    def flock(*_):
        raise OSError(errno.ENOLCK, 'No locks available')

    monkeypatch.setattr('fcntl.flock', flock)  # as some network file systems are
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
        with OnlyWriter(path):
            n = int(path.read_text())
            path.write_text('')  # and nobody reads this
            path.write_text(str(n + 1))
        times -= 1
        time.sleep(0.001)
    except UserError:
        pass
'''


HOLD = 'import sys; from lib.answers import OnlyWriter as x; x = x(sys.argv[1]); print(); input()'


def start(code, path, **environment):
    return subprocess.Popen([sys.executable, '-c', code, path], cwd=ROOT, text=True,
                            env=os.environ | environment, stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE)


@pytest.mark.slow
def test_processes_write_one_after_the_other_and_one_that_is_killed_stops_nobody(tmp_path):
    path = tmp_path / 'count'
    path.write_text('0')
    for process in [start(COUNT, path) for _ in range(3)]:
        assert process.wait() == 0
    assert path.read_text() == '150' and list(tmp_path.iterdir()) == [path]
    holder = start(HOLD, path)
    holder.stdout.readline()
    with pytest.raises(UserError, match=f'process {holder.pid} '):
        OnlyWriter(path)
    holder.kill()
    holder.wait()
    assert path.with_name('count.lock').exists()
    OnlyWriter(path).close()
    assert list(tmp_path.iterdir()) == [path]


RACER = '''
import sys
from conftest import stage_here
from lib.errors import UserError
for line in sys.stdin:
    try:
        print(bool(stage_here(*line.split())), flush=True)
    except UserError as error:
        print(error, flush=True)
'''
ON_RUN = '--init_from={run}/last.pt --device=cpu --dtype=float32'


@pytest.mark.slow
@pytest.mark.parametrize('command', [
    'export --out_dir={run} --folder={out}/hf',
    'export --out_dir={run} --folder={out}/gguf --format=gguf',
    'data/text/prepare {corpus}/meta.json --tokenizer=bpe:260 --out_dir={out}/data '
    '--val_fraction=0 --test_fraction=0',
    'data/stdlib/prepare --out_dir={out}',
    'tune_scale --out_dir={out} --init_scale=1.1 --target_length=64 --max_iters=2 --batch_size=4 '
    '--micro_batch_size=4 --n_samples=2 --compile=False ' + ON_RUN,
    'entropy --out_dir={out} --length=64 --n_samples=2 ' + ON_RUN])
def test_of_two_that_write_to_one_place_each_writes_all_or_is_refused(tiny_run, corpus_dir,
                                                                      tmp_path, command):
    racers = [start(RACER, '', PYTHONPATH='.:tests', OMP_NUM_THREADS='1') for _ in range(2)]
    for i in range(8):
        out = tmp_path / str(i)
        line = command.format(run=tiny_run, corpus=corpus_dir, out=out)
        for racer in racers[:i + 1]:  # the first time one alone
            print(line, file=racer.stdin, flush=True)
        said = [racer.stdout.readline().strip() for racer in racers[:i + 1]]
        assert 'True' in said and sorted(contents(out)) == sorted(contents(tmp_path / '0'))
        for line in said:
            assert line == 'True' or 'is writing to' in line or 'not an empty folder' in line
    for racer in racers:
        racer.communicate()


def test_provenance_says_how_a_result_was_made(tmp_path, monkeypatch, cpu):
    monkeypatch.setattr(sys, 'argv', ['/some/where/eval_ppl.py', '--scale=1.2'])
    monkeypatch.setattr(sys.modules['__main__'], '__spec__', None)  # under python -m pytest
    monkeypatch.setenv('PATH', '')  # where git is not installed
    made = provenance({'scale': 1.2}, cpu, 12.34)
    assert made['commit'] is None and made['command'] == 'python eval_ppl.py --scale=1.2'
    assert made['settings'] == {'scale': 1.2} and made['seconds'] == 12.3
    assert made['versions']['torch'] == torch.__version__ and made['dtype'] == 'float32'
    assert 'cpu' in made['device']
    assert save_json(tmp_path / 'r.json', made) == made


def test_bin_means_by_hand():
    rows = [[1, 3, 5, 7, 9], [0, 0, 1, 0, 2]]  # the fifth fills no bin of 2
    for values, width, positions, means in ((rows, 2, [1.5, 3.5], [[2, 6], [0, 0.5]]),
                                            ([4., 9.], 0, [1, 2], [4, 9]),
                                            ([4., 9.], 1, [1, 2], [4, 9])):
        found = bin_means(values, width)
        assert (found[0].tolist(), found[1].tolist()) == (positions, means)


@pytest.mark.parametrize('enabled', [True, False])
def test_progress_is_shown_on_stderr_alone_and_only_where_it_is_wanted(capsys, enabled):
    with progress_bar(4, 'reading', enabled) as bar:
        bar.update(4)
    out, err = capsys.readouterr()
    assert out == '' and ('reading' in err) == enabled
