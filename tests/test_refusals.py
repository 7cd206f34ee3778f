"""
Mistakes that once passed in silence, or ended in a traceback, as data: the command, and what the one line that refuses
it must name. {run} is the folder of a trained run, {corpus} its data set, {tmp} an empty folder.
{flipped_run} and {flipped_corpus} are the same with a bit turned over.
"""

import shutil

import pytest
from conftest import mistake

# stage, arguments, what the line names

RUNS = [  # of runs, ranks and settings
]

ON_CPU = ['--device=cpu', '--compile=False']
NEW_RUN = ['--out_dir={tmp}/new', '--block_size=32', '--n_embd=32', *ON_CPU]

FILES = [  # of files that are damaged, odd or not what they should be
    ('sample', ['--out_dir={flipped_run}', '--device=cpu'], 'flipped_run/last.pt'),
    ('eval_ppl', ['--out_dir={run}', '--dataset={flipped_corpus}', '--device=cpu'], 'test.bin'),
    ('train', ['--dataset={flipped_corpus}', *NEW_RUN], 'val.bin'),
    ('train', ['--dataset={corpus},{flipped_train}', *NEW_RUN], 'train.bin'),
    ('train', ['--dataset={corpus}', '--n_layer=100000000', *NEW_RUN], 'n_layer=100000000'),
    ('train', ['--dataset={corpus}', '--init_from={flipped_run}/last.pt', *NEW_RUN],
     'flipped_run/last.pt'),
]

NUMBERS = [  # of scales, protocols and exports
]


def flip_a_bit(path):
    """Turn over a bit a tenth into a file: in a checkpoint, of a weight."""
    content = bytearray(path.read_bytes())
    content[len(content) // 10] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize('stage, arguments, named', RUNS + FILES + NUMBERS)
def test_a_mistake_is_refused_in_one_line_that_names_it(tiny_run, corpus_dir, tmp_path, stage, arguments, named):
    run = shutil.copytree(tiny_run, tmp_path / 'run')
    places = {'run': run, 'corpus': corpus_dir, 'tmp': tmp_path}
    for name, whole, files in (('flipped_run', run, ['last.pt']),
                               ('flipped_train', corpus_dir, ['train.bin']),
                               ('flipped_corpus', corpus_dir, ['val.bin', 'test.bin'])):
        places[name] = shutil.copytree(whole, tmp_path / name)
        for file in files:
            flip_a_bit(tmp_path / name / file)
    assert named in mistake(stage, *(argument.format(**places) for argument in arguments))
