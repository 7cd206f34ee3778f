"""
The demo: what its report says is what the models do, and nothing is trained twice.

$ python -m pytest tests/test_demo.py -m ''
"""

from itertools import islice

from configurator import ROOT

import numpy as np
import pytest
import torch
from conftest import near, read, stage

import demo
from common import read_checkpoint
from repeats import find_targets
from stage import open_model, set_scale
from tokenizer import get_tokenizer, library_files

MODELS = ROOT / 'lessons/models'


@torch.no_grad()
def test_report_has_the_losses_of_the_models(tmp_path, cpu):
    stage('demo', ROOT / 'config/look.py', f'--models={MODELS}', f'--out_dir={tmp_path}',
          '--n_samples=3', '--targets=40')
    report = read(tmp_path / 'report.json')
    assert (report['L'], report['lengths'], report['windows']) == (128, [128, 256, 512, 1024], 3)

    # the middle of the first three files of more than 1,024 tokens
    model, info = open_model(f'{MODELS}/conv', '', cpu)
    encoded = map(get_tokenizer(info['tokenizer']).encode_ordinary, library_files().values())
    long = islice((ids for ids in encoded if len(ids) > 1024), 3)
    windows = torch.tensor([ids[(len(ids) - 1025) // 2:][:1025] for ids in long])
    window, t, *_ = find_targets(windows.numpy(), 128, 4, 40)
    far_cut = [model(windows[n:n + 1, i - 128:i], windows[n:n + 1, i:i + 1]).item()
               for n, i in zip(window, t)]
    cut = torch.cat([model(windows[:, end - 128:end], windows[:, end - 15:end + 1])
                     for end in (976, 992, 1008, 1024)], 1).mean()
    set_scale(model, MODELS / 'conv/scale_head_1024.json', info)
    losses = model(windows[:, :-1], windows[:, 1:])
    *_, trained, tuned = report['readings'].values()
    near([at['loss'] for at in tuned['at'].values()],
         [losses[:, T - 64:T].mean() for T in report['lengths']], atol=1e-4)
    near(tuned['curve'][::100], [losses[:, max(0, i - 63):i + 1].mean()
                                 for i in range(0, 1024, 100)], atol=1e-4)
    last = tuned['at']['1024']
    near([last['cut_loss'], last['gain']], [cut, cut - losses[:, 960:].mean()], atol=1e-4)
    near(tuned['far']['gain'], np.mean(far_cut) - losses[window, t - 1].mean(), atol=1e-4)
    near(report['differences'][-1]['difference'], trained['at']['1024']['loss'] - last['loss'],
         atol=1e-4)


def test_stages_that_have_finished_are_not_run_again(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, 'out_dir', str(tmp_path))
    folder, ran = tmp_path / 'none', []
    folder.mkdir()
    monkeypatch.setattr(demo, 'run', lambda lane, command: ran.append(command))
    for there, expected in (
            (None, ['train.py', 'uniform', '--tune=head_scale']), ('last.pt', ['=resume', '', '']),
            ('loss.png', ['uniform', '--tune=head_scale']), ('scale_uniform.json', ['--tune=']),
            ('scale_head_512.json', [])):
        if there:
            (folder / there).touch()
        ran.clear()
        demo.train_and_tune('none')
        assert len(ran) == len(expected) and all(part in command for part, command
                                                 in zip(expected, ran))


@pytest.mark.slow
def test_models_are_trained_and_tuned_by_the_stages(tmp_path, monkeypatch, corpus_dir, capfd):
    small = (f'--dataset={corpus_dir} --block_size=32 --n_layer=1 --n_embd=32 --n_hidden=48 '
             '--max_iters=3 --compile=False --device=cpu')
    tune = '--init_scale=1.0 --max_iters=1 --batch_size=1 --compile=False --device=cpu'
    for name, value in (('out_dir', str(tmp_path)), ('lengths', [32, 64]), ('train_args', small),
                        ('SCALES', {'head': ('', tune)})):
        monkeypatch.setattr(demo, name, value)
    demo.train_and_tune('conv')
    assert read_checkpoint(tmp_path / 'conv/last.pt')['model_config'].short_conv == 4
    assert read(demo.scale_file('conv', 'head'))['target_length'] == 64
    monkeypatch.setattr(demo, 'train_args', '--n_layer=none')
    with pytest.raises(SystemExit, match='failed. Its message is above'):
        demo.train_and_tune('rope')
    assert ' rope | n_layer is' in capfd.readouterr().out
