"""
Mistakes that once passed in silence, or ended in a traceback, as data: the command, and what the one line that refuses
it must name. {run} is the folder of a trained run, {corpus} its data set, {tmp} an empty folder.
"""

import shutil

import pytest
from conftest import mistake

# stage, arguments, what the line names

RUNS = [  # of runs, ranks and settings
]

FILES = [  # of files that are damaged, odd or not what they should be
]

NUMBERS = [  # of scales, protocols and exports
]


@pytest.mark.parametrize('stage, arguments, named', RUNS + FILES + NUMBERS)
def test_a_mistake_is_refused_in_one_line_that_names_it(tiny_run, corpus_dir, tmp_path, stage, arguments, named):
    run = shutil.copytree(tiny_run, tmp_path / 'run')
    places = {'run': run, 'corpus': corpus_dir, 'tmp': tmp_path}
    assert named in mistake(stage, *(argument.format(**places) for argument in arguments))
