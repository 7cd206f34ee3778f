"""
The demo: what its report says is what the models do.

$ python -m pytest tests/test_demo.py -m ''
"""

import os
import subprocess
import sys

from configurator import ROOT

import numpy as np
import pytest
import torch
from conftest import near, read, stage

from repeats import find_targets
from scales import set_scale
from stage import open_model
from tokenizer import get_tokenizer, library_files

MODELS = ROOT / 'lessons/models'


@torch.no_grad()
def test_report_has_the_losses_of_the_models(tmp_path, cpu):
    stage('demo', ROOT / 'config/look.py', f'--models={MODELS}', f'--out_dir={tmp_path}',
          '--n_samples=3', '--targets=40')
    report = read(tmp_path / 'report.json')
    *_, tuned = report['readings'].values()

    # the middle of the first three files of more than 1,024 tokens
    model, info = open_model(f'{MODELS}/conv', '', cpu)
    encoded = map(get_tokenizer(info['tokenizer']).encode_ordinary, library_files().values())
    long = [ids for ids in encoded if len(ids) > 1024][:3]
    windows = torch.tensor([ids[(len(ids) - 1025) // 2:][:1025] for ids in long])
    window, t, *_ = find_targets(windows.numpy(), 128, 4, 40)
    far_cut = [model(windows[n:n + 1, i - 128:i], windows[n:n + 1, i:i + 1]).item()
               for n, i in zip(window, t)]
    set_scale(model, MODELS / 'conv/scale_head_1024.json', info)
    losses = model(windows[:, :-1], windows[:, 1:])
    near([at['loss'] for at in tuned['at'].values()],
         [losses[:, T - 64:T].mean() for T in (128, 256, 512, 1024)], atol=1e-4)
    near(tuned['curve'][::1000], [losses[:, 0].mean(), losses[:, 937:1001].mean()], atol=1e-4)
    near(tuned['far']['gain'], np.mean(far_cut) - losses[window, t - 1].mean(), atol=1e-4)


SMALL = '''#!/bin/bash
case $1 in
    data/*) exit ;;
    train.py) set -- "$@" --dataset={0} --n_layer=1 --n_embd=32 --n_hidden=32 --max_iters=2 \\
        --eval_windows=2 --compile=False --device=cpu ;;
    tune_scale.py) set -- "$@" --n_samples=1 --max_iters=1 --compile=False --device=cpu ;;
    demo.py) set -- "$@" --dataset={0} --n_samples=3 --targets=9 ;;
esac
exec {1} "$@"
'''


@pytest.mark.slow
def test_the_script_trains_and_tunes_what_the_demo_reads(tmp_path, corpus_dir):
    python = tmp_path / 'small'
    python.write_text(SMALL.format(corpus_dir, sys.executable))
    python.chmod(0o755)
    for path in ROOT.iterdir():
        if path.name != 'out':
            (tmp_path / path.name).symlink_to(path)
    for _ in range(2):  # the second time all is there
        subprocess.run(['bash', 'results/past_L/demo.sh'], cwd=tmp_path, check=True,
                       env=os.environ | {'PYTHON': str(python), 'SEED': '3'})
    out = tmp_path / 'out/demo_code_3'
    assert len(read(out / 'report.json')['readings']) == 6
    assert read(out / 'rope/config.json')['seed'] == 3
