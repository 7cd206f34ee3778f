"""
Mistakes that once passed in silence, or ended in a traceback, as data: the command, and what the
one line that refuses it must name. {run} is the folder of a trained run, in it nan.pt, the model
with a weight that is not a number, and passkey.jsonl, whose third line is not an answer; {corpus}
its data set, {tmp} an empty folder. {flipped_run} and {flipped_corpus} are the same with a bit
turned over.

$ python -m pytest tests/test_refusals.py
"""

import math
import shutil

import pytest
import torch
from conftest import mistake

from lib import checkpoints

ON_CPU = '--device=cpu --dtype=float32 '
NAN = '--init_from={run}/nan.pt --out_dir={tmp} ' + ON_CPU
READ = '--out_dir={run} ' + ON_CPU
WRITE = '--init_from={run}/last.pt --out_dir={tmp}/out ' + ON_CPU
TRAIN = '--out_dir={tmp}/new --block_size=32 --n_embd=32 --compile=False --device=cpu '
FINETUNE = '--init_from={run}/last.pt --dataset={corpus} ' + TRAIN
EXPORT = '--out_dir={run} --folder={tmp}/hf '
UNIFORM = WRITE + '--method=uniform '

# stage, arguments, what the line names
MISTAKES = [
    ('eval_ppl', NAN + '--protocol=sliding --max_windows=4', 'nan'),
    ('eval_ppl', NAN + '--protocol=last --n_samples=2', 'nan'),
    ('eval_ppl', NAN + '--protocol=position --n_samples=2', 'nan'),
    ('entropy', NAN + '--n_samples=2 --length=64', 'nan'),
    ('tune_scale', NAN + '--method=uniform --n_samples=2 --dataset={corpus}', 'nan'),
    ('passkey', READ + '--max_length=600 --n_lengths=2', 'line 3 of {run}/passkey.jsonl'),
    ('train', FINETUNE + '--dape_residual=False', 'dape_residual is False'),
    ('train', FINETUNE + '{run}/sizes.py', 'n_hidden is 48'),

    # files that are damaged
    ('sample', '--out_dir={flipped_run} --device=cpu', 'flipped_run/last.pt'),
    ('eval_ppl', READ + '--dataset={flipped_corpus}', 'test.bin'),
    ('train', TRAIN + '--dataset={flipped_corpus}', 'val.bin'),
    ('train', TRAIN + '--dataset={corpus},{flipped_train}', 'train.bin'),
    ('train', TRAIN + '--dataset={corpus} --init_from={flipped_run}/last.pt', 'last.pt'),

    # sizes that no machine holds, scales that are infinite in float32, or 0
    ('train', TRAIN + '--dataset={corpus} --n_layer=100000000', 'n_layer=100000000'),
    ('passkey', WRITE + '--scale=1e39', 'scale '),
    ('eval_ppl', WRITE + '--scale=1e-60', 'scale '),
    ('export', EXPORT + '--scale=1e7 --dtype=float16', 'self_attn.q_proj.weight'),
    ('tune_scale', WRITE + '--init_scale=1e39', 'init_scale '),
    ('tune_scale', WRITE + '--init_scale=1.2 --min_scale=1e39', 'min_scale '),
    ('tune_scale', UNIFORM + '--candidate_range=[1.0,1e39,1e38]', 'candidate_range '),
    ('tune_scale', UNIFORM + '--candidate_range=[1.0,2.0,1e-9]', 'candidate_range '),

    # seeds, sizes and rates that neither numpy nor torch takes
    ('sample', READ + '--seed=-1', 'seed is'),
    ('sample', READ + '--max_new_tokens=100000000000000000000', 'max_new_tokens is'),
    ('passkey', WRITE + '--seed=100000000000000000000', 'seed is'),
    ('train', TRAIN + '--dataset={corpus} --seed=-1', 'seed is'),
    ('train', TRAIN + '--dataset={corpus} --learning_rate=1e999', 'learning_rate is inf'),
    ('tune_scale', WRITE + '--init_scale=1.2 --beta1=1.5', 'beta1 is'),
    ('che', '--out_dir={tmp}/out --seed=-1', 'seed is'),
    ('train', TRAIN + '--dataset={corpus} --position=rope --rope_base=0', 'rope_base is'),

    # windows shorter than what is measured in them
    ('entropy', WRITE + '--length=1', 'length is'),
    ('eval_ppl', WRITE + '--protocol=position --lengths=[1]', 'lengths is'),
    ('eval_ppl', WRITE + '--protocol=last --lengths=[16,64] --last=20', 'last is'),
]


def flip_a_bit(path):
    """Turn over a bit a tenth into a file: in a checkpoint, of a weight."""
    content = bytearray(path.read_bytes())
    content[len(content) // 10] ^= 1
    path.write_bytes(content)


@pytest.fixture(scope='module')
def places(tiny_run, corpus_dir, tmp_path_factory):
    """What the names in braces stand for, but {tmp}."""
    folder = tmp_path_factory.mktemp('refusals')
    run = shutil.copytree(tiny_run, folder / 'run')
    state = torch.load(run / 'last.pt', weights_only=True)
    state['model']['norm.weight'][0] = math.nan
    checkpoints.save(run / 'nan.pt', **state)
    (run / 'passkey.jsonl').write_text('{}\n{"item": 0}\n{"item": 1, "len\n{"item": 2}\n')
    (run / 'sizes.py').write_text('n_hidden = 48\n')
    places = {'run': run, 'corpus': corpus_dir}
    for name, whole, files in (('flipped_run', run, ['last.pt']),
                               ('flipped_train', corpus_dir, ['train.bin']),
                               ('flipped_corpus', corpus_dir, ['val.bin', 'test.bin'])):
        places[name] = shutil.copytree(whole, folder / name)
        for file in files:
            flip_a_bit(folder / name / file)
    return places


@pytest.mark.parametrize('stage, command, named', MISTAKES)
def test_a_mistake_is_refused_in_one_line_that_names_it(places, tmp_path, stage, command, named):
    names = places | {'tmp': tmp_path}
    line = mistake(stage, *(argument.format(**names) for argument in command.split()))
    assert named.format(**names) in line
    assert not list(tmp_path.rglob('*.json')), 'a result was written'
