"""
What older versions of the project wrote and computed: their checkpoints, scale files, token files
and runs are read as then, and give the numbers of then, all made by the version of 2026-11-22 on
one CPU thread in float32 (tests/old/numbers.json). Other machines round otherwise, hence the
tolerance.

$ python -m pytest tests/test_old.py
"""

import hashlib
import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import losses_and_gradients, near, on, read, stage_here

from kernels import attention_entropy
from lib.checkpoints import old_name, weights_digest
from lib.generate import complete
from model import ModelConfig, Transformer, vector_of

OLD = Path(__file__).parent / 'old'
NUMBERS = read(OLD / 'numbers.json')
SIZES = dict(vocab_size=31, block_size=16, n_layer=2, n_head=4, n_kv_head=2, n_embd=16, n_hidden=24)
close = pytest.approx  # relative 1e-6 where nothing else is said


@pytest.fixture(scope='session')
def old(tmp_path_factory):
    """The folder of the old files."""
    folder = tmp_path_factory.mktemp('old')
    with tarfile.open(OLD / 'runs.tar.xz') as archive:
        archive.extractall(folder, filter='data')
    return folder


def fill(model):
    """Weights that depend on nothing but their old names."""
    for name, p in model.named_parameters():
        name = old_name(name)
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], 'big')
        values = np.random.Generator(np.random.Philox(seed)).uniform(-1, 1, p.numel())
        values = torch.from_numpy(values.astype(np.float32)).view(p.shape)
        if vector_of(name) or p.dim() == 1 and '.dape.' not in name:
            p.data = 1 + 0.5 * values
        else:
            p.data = values * (0.5 if p.dim() > 1 else 0.2)
    return model


@pytest.mark.parametrize('name', NUMBERS['methods'])
def test_every_method_starts_and_computes_as_it_did(name):
    then = NUMBERS['methods'][name]
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**SIZES, **then['config'])).init_weights()
    start = {old_name(n): p.double().pow(2).sum().item() for n, p in model.named_parameters()}
    assert start == close(then['start'], rel=1e-5, abs=1e-6)  # kept to 6 digits
    fill(model).eval()
    assert weights_digest(model.state_dict())[:16] == then['digest']

    x = torch.from_numpy(np.random.Generator(np.random.Philox(7)).integers(0, 31, (2, 41)))
    model.requires_grad_(True)
    losses, gradients = losses_and_gradients(model, x)
    norms = {old_name(n): gradient.double().norm().item() for n, gradient in gradients.items()}
    assert losses.flatten()[::7].tolist() == close(then['losses'], rel=1e-5)
    assert norms == close(then['gradient_norms'], rel=1e-4, abs=1e-7)

    model.requires_grad_(False)
    with model.probe(attention_entropy) as entropy:
        model(x[:, :-1])
    near(torch.stack(entropy).double().mean((1, 3)), then['entropy'], rtol=1e-5)  # (n_layer, H)
    prompts = [x[0, :20].tolist(), x[1, :13].tolist()]
    assert complete(model, prompts, 8) == then['generated']
    assert complete(model, prompts, 6, beams=3) == then['beam']


HERE = ['--device=cpu', '--dtype=float32']


def result_of(folder, name, *arguments):
    """The JSON that a stage leaves in a folder."""
    stage_here(name, f'--out_dir={folder}', '--label=now', *arguments, *HERE)
    return read(next(folder.glob(f'{name}*now.json')))


CASES = {'none': 'none', 'kerple_dape': 'kerple_dape', 't5': 't5',
         'rope_yarn4': 'rope --rope_scaling=yarn:4',
         'rope_dynamic_ntk2': 'rope --rope_scaling=dynamic_ntk:2',
         'none_scale_head_64': 'none --scale={old}/scale_head_64.json',
         'none_scale_sets_gn': 'none --scale={old}/scale_sets_gn.json',
         'none_scale_uniform_fit': 'none --scale={old}/scale_uniform_fit.json'}


@pytest.mark.parametrize('protocol, key, case', [
    *(('sliding', 'loss', case) for case in CASES),
    ('position', 'loss', 'none_scale_sets_gn'), ('tail', 'ppl', 'none_scale_sets_gn')])
def test_perplexities_of_old_checkpoints_and_scale_files(old, tmp_path, protocol, key, case):
    run, *more = CASES[case].format(old=old).split()
    counts = {'sliding': [], 'position': ['--tail=4', '--n_samples=16'], 'tail': ['--n_samples=8']}
    result = result_of(tmp_path, 'eval_ppl', f'--init_from={old}/{run}/last.pt', *more,
                       f'--dataset={old}/tokens', f'--protocol={protocol}', *counts[protocol])
    then = NUMBERS['stages']['last' if protocol == 'tail' else protocol][case]
    assert [row[key] for row in result['rows']] == close(then, rel=1e-5)


@pytest.mark.parametrize('run', ['none', 'kerple_dape', 't5'])
def test_old_runs_go_on_as_they_did(old, tmp_path, run):
    folder = shutil.copytree(old / run, tmp_path / run)
    settings = read(folder / 'config.json')
    settings |= {'init_from': 'resume', 'out_dir': str(folder), 'dataset': f'{old}/tokens',
                 'max_iters': 30, 'lr_decay_iters': 20}
    del settings['rope_scaling'], settings['rope_base']
    out = stage_here('train', *(f'--{name}={value}' for name, value in settings.items()))
    assert 'does not say which text it was trained on' in out
    rows = [json.loads(line) for line in (folder / 'log.jsonl').read_text().splitlines()]
    losses = [row.get('loss', row.get('val_loss')) for row in rows][-11:]
    assert losses == close(NUMBERS['stages']['resumed'][run], rel=1e-5)


def test_scales_are_tuned_as_they_were(old, tmp_path):
    scale = NUMBERS['stages']['uniform']['best_by_length'][1]
    command = (f'--dataset={old}/tokens --target_lengths=[32,64] --tune=scale,out,norm '
               f'--init_scale={scale} --n_samples=8 --batch_size=4 --micro_batch_size=2 '
               '--max_iters=6 --warmup_iters=2 --compile=False')
    stage_here('tune_scale', *on(old / 'none', tmp_path, command))
    sets = read(tmp_path / 'scale_sets.json')['sets']
    for now, then in zip(sets, NUMBERS['stages']['tuned_sets_gn'], strict=True):
        for kind in ('head_scale', 'head_gain'):
            near(now[kind], then[kind], rtol=1e-4)
