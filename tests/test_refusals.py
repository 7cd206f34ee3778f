"""
Mistakes that once passed in silence, or ended in a traceback, as data: the command, and what the one line that refuses
it must name. {run} is the folder of a trained run, in it nan.pt, the model with a weight that is not a number, and
passkey.jsonl, whose third line is not an answer; {corpus} its data set, {tmp} an empty folder.
"""

import math
import shutil

import pytest
import torch
from conftest import mistake

import checkpoint

# stage, arguments, what the line names

NAN = ['--init_from={run}/nan.pt', '--out_dir={tmp}', '--device=cpu', '--dtype=float32']
FINETUNE = ['--init_from={run}/last.pt', '--out_dir={tmp}/fine', '--dataset={corpus}', '--block_size=32',
            '--device=cpu', '--max_iters=1']

RUNS = [  # of runs, ranks and settings
    ('eval_ppl', [*NAN, '--protocol=sliding', '--max_windows=4'], 'nan'),
    ('eval_ppl', [*NAN, '--protocol=last', '--n_samples=2'], 'nan'),
    ('eval_ppl', [*NAN, '--protocol=position', '--n_samples=2'], 'nan'),
    ('entropy', [*NAN, '--n_samples=2', '--length=64'], 'nan'),
    ('tune_scale', [*NAN, '--method=uniform', '--n_samples=2', '--dataset={corpus}'], 'nan'),
    ('passkey', ['--out_dir={run}', '--device=cpu', '--max_length=600', '--n_lengths=2'],
     'line 3 of {run}/passkey.jsonl'),
    ('train', [*FINETUNE, '--n_layer=8'], 'n_layer is 8'),
    ('train', [*FINETUNE, '--rope_base=500000'], 'rope_base is 500000'),
    ('train', [*FINETUNE, '--dape_residual=False'], 'dape_residual is False'),
    ('train', ['{run}/sizes.py', *FINETUNE], 'n_embd is 64'),
]

FILES = [  # of files that are damaged, odd or not what they should be
]

NUMBERS = [  # of scales, protocols and exports
]


@pytest.mark.parametrize('stage, arguments, named', RUNS + FILES + NUMBERS)
def test_a_mistake_is_refused_in_one_line_that_names_it(tiny_run, corpus_dir, tmp_path, stage, arguments, named):
    run = shutil.copytree(tiny_run, tmp_path / 'run')
    state = torch.load(run / 'last.pt', weights_only=True)
    state['model']['norm.weight'][0] = math.nan
    checkpoint.save(run / 'nan.pt', **state)
    (run / 'passkey.jsonl').write_text('{}\n{"item": 0}\n{"item": 1, "len\n{"item": 2}\n')
    (run / 'sizes.py').write_text('n_embd = 64\n')
    places = {'run': run, 'corpus': corpus_dir, 'tmp': tmp_path}
    line = mistake(stage, *(argument.format(**places) for argument in arguments))
    assert named.format(**places) in line
    assert not list(tmp_path.glob('*.json')), 'a result was written'
