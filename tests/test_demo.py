"""
The demo: what its report says is what the models do, and nothing is trained twice.

$ python -m pytest tests/test_demo.py -m ''
"""

from configurator import ROOT

import numpy as np
import pytest
import torch
from conftest import near, read, stage

import demo
from common import read_checkpoint
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


def test_commands_that_have_finished_are_not_run_again(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(demo, 'out_dir', str(tmp_path))
    monkeypatch.setattr(demo, 'run', lambda name, command: ran.append('=resume' in command))
    (tmp_path / 'conv').mkdir()
    for there, resumed in (('last.pt', [True, False]), ('loss.png', [False]),
                           ('scale_head_512.json', [])):
        (tmp_path / 'conv' / there).touch()
        ran.clear()
        demo.run_lane(demo.lanes()[0])
        assert ran == resumed


def test_models_of_other_settings_are_not_taken_for_these(tmp_path, monkeypatch):
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    monkeypatch.setattr(demo, 'out_dir', str(tmp_path))
    monkeypatch.setattr(demo, 'run', lambda name, command: None)
    demo.train_and_tune()
    (tmp_path / 'none').mkdir()
    (tmp_path / 'none/last.pt').touch()
    monkeypatch.setattr(demo, 'train_args', '--seed=1338')
    with pytest.raises(SystemExit, match='other train_args'):
        demo.train_and_tune()


@pytest.mark.slow
def test_models_are_trained_and_tuned_by_the_stages(tmp_path, monkeypatch, corpus_dir, capfd):
    small = (f'--dataset={corpus_dir} --block_size=32 --n_layer=1 --n_embd=32 --n_hidden=48 '
             '--max_iters=3 --compile=False --device=cpu')
    tune = f'{demo.HEADS} --max_iters=1 --batch_size=1 --compile=False --device=cpu'
    for name, value in (('out_dir', str(tmp_path)), ('lengths', [32, 64]), ('train_args', small),
                        ('HEADS', tune)):
        monkeypatch.setattr(demo, name, value)
    demo.run_lane(demo.lanes()[0])
    assert read_checkpoint(tmp_path / 'conv/last.pt')['model_config'].short_conv == 4
    assert read(tmp_path / 'conv/scale_head_64.json')['target_length'] == 64
    with pytest.raises(SystemExit, match='failed. Its message is above'):
        demo.run('rope', 'train.py --n_layer=none')
    assert 'rope | n_layer is' in capfd.readouterr().out
