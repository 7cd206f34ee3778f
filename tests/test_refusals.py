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

READ = ['--out_dir={run}', '--device=cpu', '--dtype=float32']
WRITE = ['--init_from={run}/last.pt', '--out_dir={tmp}/out', '--device=cpu', '--dtype=float32']
EXPORT = ['--out_dir={run}', '--folder={tmp}/hf']
TRAIN = ['--dataset={corpus}', '--out_dir={tmp}/out', '--device=cpu']
UNIFORM = [*WRITE, '--method=uniform']

NUMBERS = [  # of scales, protocols and exports
    # scales that are infinite in float32, or 0, and weights that are infinite in the type written
    ('passkey', [*WRITE, '--scale=1e39'], 'scale is'),
    ('eval_ppl', [*WRITE, '--scale=1e-60'], 'scale is'),
    ('export', [*EXPORT, '--scale=1e39'], 'scale is'),
    ('export', [*EXPORT, '--scale=1e7', '--dtype=float16'], 'self_attn.q_proj.weight'),
    ('tune_scale', [*WRITE, '--init_scale=1e39'], 'init_scale is'),
    ('tune_scale', [*WRITE, '--init_scale=1.2', '--min_scale=1e39'], 'min_scale is'),
    ('tune_scale', [*UNIFORM, '--candidate_range=[1.0,1e39,1e38]'], 'candidate_range is'),
    ('tune_scale', [*UNIFORM, '--candidate_range=[1.0,2.0,1e-9]'], 'candidate_range is'),
    # seeds, sizes and rates that neither numpy nor torch takes
    ('sample', [*READ, '--seed=-1'], 'seed is'),
    ('sample', [*READ, f'--max_new_tokens={10 ** 20}'], 'max_new_tokens is'),
    ('passkey', [*WRITE, '--seed=-1'], 'seed is'),
    ('passkey', [*WRITE, f'--seed={10 ** 20}'], 'seed is'),
    ('train', [*TRAIN, f'--seed={10 ** 20}'], 'seed is'),
    ('train', [*TRAIN, '--learning_rate=1e999'], 'learning_rate is inf'),
    ('tune_scale', [*WRITE, f'--seed={10 ** 20}'], 'seed is'),
    ('tune_scale', [*WRITE, '--init_scale=1.2', '--beta1=1.5'], 'beta1 is'),
    ('che', ['--out_dir={tmp}/out', f'--seed={10 ** 20}'], 'seed is'),
    ('train', [*TRAIN, '--position=rope', '--rope_base=0'], 'rope_base is'),
    # windows shorter than what is measured in them
    ('entropy', [*WRITE, '--length=1'], 'length is'),
    ('eval_ppl', [*WRITE, '--protocol=position', '--lengths=[1]'], 'lengths is'),
    ('eval_ppl', [*WRITE, '--protocol=last', '--lengths=[16,64]', '--last=20'], 'last is'),
]


@pytest.mark.parametrize('stage, arguments, named', RUNS + FILES + NUMBERS)
def test_a_mistake_is_refused_in_one_line_that_names_it(tiny_run, corpus_dir, tmp_path, stage, arguments, named):
    run = shutil.copytree(tiny_run, tmp_path / 'run')
    places = {'run': run, 'corpus': corpus_dir, 'tmp': tmp_path}
    assert named in mistake(stage, *(argument.format(**places) for argument in arguments))
