"""
Results on disk: JSON that anyone can read, written whole or not at all, with what made it.

$ python -m pytest tests/test_results.py
"""

import json
import os
import sys

import numpy as np
import pytest
import torch
from conftest import files_at_most

from lib import results
from lib.errors import UserError
from lib.results import bin_means, lock_file, progress_bar, provenance, save_json, write_text


def strict(path):
    """The JSON in a file; NaN and Infinity, which JSON does not have, are errors."""
    def refuse(constant):
        raise AssertionError(f'{constant} is not JSON')

    return json.loads(path.read_text(), parse_constant=refuse)


def test_results_are_json_with_a_list_of_numbers_on_one_line(tmp_path):
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


@pytest.mark.skipif(os.name == 'nt', reason='nothing is locked on Windows')
def test_a_lock_whose_file_is_removed_before_it_is_held_is_taken_anew(tmp_path, monkeypatch, cpu):
    take, taken = results.fcntl.flock, []

    def flock(file, how):
        take(file, how)
        taken.append(file)
        if len(taken) == 1:  # as its last holder does, which another process has waited for
            os.unlink(file.name)

    monkeypatch.setattr(results.fcntl, 'flock', flock)
    lock = lock_file(tmp_path / 'log.jsonl', cpu)
    with pytest.raises(UserError, match=f'process {os.getpid()} '):
        lock_file(tmp_path / 'log.jsonl', cpu)
    assert len(taken) == 2 and lock is taken[1]


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
