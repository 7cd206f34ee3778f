"""
Mistakes that once passed in silence, or ended in a traceback, as data: the command, and what the one line that refuses
it must name. {run} is the folder of a trained run, in it nan.pt, the model with a weight that is not a number, and
passkey.jsonl, whose third line is not an answer; {corpus} its data set, {tmp} an empty folder. {flipped_run} and
{flipped_corpus} are the same with a bit turned over.
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


def flip_a_bit(path):
    """Turn over a bit a tenth into a file: in a checkpoint, of a weight."""
    content = bytearray(path.read_bytes())
    content[len(content) // 10] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize('stage, arguments, named', RUNS + FILES + NUMBERS)
def test_a_mistake_is_refused_in_one_line_that_names_it(tiny_run, corpus_dir, tmp_path, stage, arguments, named):
    run = shutil.copytree(tiny_run, tmp_path / 'run')
    state = torch.load(run / 'last.pt', weights_only=True)
    state['model']['norm.weight'][0] = math.nan
    checkpoint.save(run / 'nan.pt', **state)
    (run / 'passkey.jsonl').write_text('{}\n{"item": 0}\n{"item": 1, "len\n{"item": 2}\n')
    (run / 'sizes.py').write_text('n_embd = 64\n')
    places = {'run': run, 'corpus': corpus_dir, 'tmp': tmp_path}
    for name, whole, files in (('flipped_run', run, ['last.pt']),
                               ('flipped_train', corpus_dir, ['train.bin']),
                               ('flipped_corpus', corpus_dir, ['val.bin', 'test.bin'])):
        places[name] = shutil.copytree(whole, tmp_path / name)
        for file in files:
            flip_a_bit(tmp_path / name / file)
    line = mistake(stage, *(argument.format(**places) for argument in arguments))
    assert named.format(**places) in line
    assert not list(tmp_path.glob('*.json')), 'a result was written'
