"""
The demo: what its report says is what the models do.

$ python -m pytest tests/test_demo.py -m ''
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, mistake, near, read, refuses, stage_here

import demo
from lib import checkpoints
from lib.answers import save_json
from lib.checkpoints import open_model
from lib.repeats import find_targets
from lib.tokens import Windows
from results.demo import table as seeds

MODELS = ROOT / 'lessons/models'
SMALL = ['--n_layer=1', '--n_embd=32', '--n_hidden=48', '--compile=False', '--device=cpu']


@pytest.fixture(scope='module')
def look(tmp_path_factory):
    """The folder of a small `make look`, and what it printed."""
    folder = tmp_path_factory.mktemp('look')
    out = stage_here('demo', 'config/look.py', f'--out_dir={folder}', '--n_samples=3',
                     '--targets=40', f'--text={ROOT / "model.py"}')
    return folder, out


def test_claims_and_rows_of_the_seeds_are_what_their_reports_give():
    stored = read(ROOT / 'results/demo/seeds.json')
    reports = stored['reports']
    assert {seed: seeds.claims_of(report) for seed, report in reports.items()} == stored['claims']
    for row, expected in zip(seeds.rows_of([*reports.values()]), stored['rows'], strict=True):
        assert row == {key: pytest.approx(value) for key, value in expected.items()}


def test_smooth_value_is_the_mean_of_those_before():
    near(demo.smooth([4.0, 2.0, 6.0, 1.0, 3.0], 3), [4, 3, 4, 3, 10 / 3], atol=1e-9)


@torch.no_grad()
def test_report_has_the_losses_of_the_models(look):
    folder, out = look
    report = read(folder / 'report.json')
    assert (report['L'], report['lengths'], report['windows']) == (128, [128, 256, 512, 1024], 3)
    assert (folder / 'report.png').stat().st_size > 1000

    text = (ROOT / 'model.py').read_text()
    model, encoding = open_model(MODELS / 'conv/last.pt')
    windows = []
    for first in range(0, 3 * 4096, 4096):  # pieces of 4 characters a token
        ids = encoding.encode_ordinary(text[first:first + 4096])
        start = (len(ids) - 1025) // 2
        windows.append(ids[start:start + 1025])
    windows = torch.tensor(windows)
    far = find_targets(windows.numpy(), 128, 4, 40)
    cut = [model(windows[n:n + 1, t - 128:t], windows[n:n + 1, t:t + 1]).item()
           for n, t in zip(far.window, far.t)]
    at = torch.cat([model(windows[:, end - 128:end], windows[:, end - 15:end + 1])
                    for end in (976, 992, 1008, 1024)], 1)
    row = report['readings']['NoPE + conv']['at']['1024']
    near([row['cut_loss'], row['gain']], [at.mean(), at.mean() - row['loss']], atol=1e-4)
    for pair in report['differences']:
        a, b = (report['readings'][pair[name]]['at']['1024']['loss'] for name in 'ab')
        near(pair['difference'], a - b, atol=1e-4)
    for title, scale in (('NoPE + conv', None),
                         ('NoPE + conv, head scales', MODELS / 'conv/scale_head_1024.json')):
        model, _ = open_model(MODELS / 'conv/last.pt', scale and str(scale))
        losses = model(windows[:, :-1], windows[:, 1:])
        row = report['readings'][title]
        near([row['at'][str(T)]['loss'] for T in report['lengths']],
             [losses[:, T - 64:T].mean() for T in report['lengths']], atol=1e-4)
        near(row['curve'][::100], [losses.mean(0)[max(0, t - 63):t + 1].mean()
                                   for t in range(0, 1024, 100)], atol=1e-4)
        near(row['far']['gain'], np.mean(cut) - losses[far.window, far.t - 1].mean(), atol=1e-4)
        assert f"{row['at']['1024']['loss']:.2f}" in out and f"{row['far']['gain']:+.2f}" in out
    uniform = read(MODELS / 'none/scale_uniform.json')
    best = uniform['best_by_length'][uniform['lengths'].index(1024)]
    near(report['readings']['NoPE, best uniform scale']['scale'], [best, best], atol=1e-6)
    near(report['readings']['NoPE + conv, head scales']['scale'],
         [model.head_scale.min(), model.head_scale.max()], atol=1e-6)


def test_the_demos_own_models_read_the_split_test_of_the_text_that_they_are_trained_on(
        monkeypatch, corpus_dir):
    monkeypatch.setattr(demo, 'train_args', [f'--dataset={corpus_dir}', '--block_size=32'])
    monkeypatch.setattr(demo, 'target_length', 128)
    monkeypatch.setattr(demo, 'n_samples', 3)
    found = demo.text_to_read()
    assert found.L == 32 and found.source == f'{corpus_dir}, test'
    assert np.array_equal(found.windows, Windows(str(corpus_dir), 'test', 128).evenly_spaced(3))
    monkeypatch.setattr(demo, 'target_length', 127)
    refuses('it must be at least 4L = 128', demo.text_to_read)


def test_a_damaged_result_is_named(tmp_path):
    path = tmp_path / 'scale.json'
    for text in '{"command": "x', '[1]', '{"command": 5}':
        path.write_text(text)
        if text.endswith('5}'):
            assert not demo.is_made(path, ['tune_scale.py'])
        else:
            refuses('scale.json is not a whole JSON file', demo.is_made, path, ['tune_scale.py'])


def test_a_finished_model_is_refused_if_its_settings_text_or_base_have_changed(
        monkeypatch, tmp_path, tiny_run, corpus_dir):
    arguments = [f'--{name}={value}' for name, value in read(tiny_run / 'config.json').items()
                 if name != 'out_dir' and value != [] and value is not None]
    demo.require_trained_with(tiny_run, arguments)
    refuses('was trained with seed=1337, not with 7', demo.require_trained_with, tiny_run,
            [*arguments, '--seed=7'])
    refuses('was trained with n_layer=2, not with 4', demo.require_trained_with, tiny_run,
            [argument for argument in arguments if 'n_layer' not in argument])
    base, tuned = tmp_path / 'base.pt', tmp_path / 'tuned'
    shutil.copytree(tiny_run, tuned)
    config = read(tiny_run / 'config.json') | {'init_from': str(base), 'n_layer': 9}
    save_json(tuned / 'config.json', config)
    base.touch()
    os.utime(base, (1, 1))
    of_base = [argument for argument in arguments if 'n_layer' not in argument]
    of_base += [f'--init_from={base}']
    demo.require_trained_with(tuned, of_base)  # n_layer is that of the base
    refuses('n_layer=9, not with 2', demo.require_trained_with, tuned, [*of_base, '--n_layer=2'])
    os.utime(base, (2e9, 2e9))
    refuses(f'{base} is newer than {tuned}', demo.require_trained_with, tuned, of_base)
    refuses(f'was trained from {base}, not from scratch', demo.require_trained_with, tuned,
            of_base[:-1])
    shutil.copytree(corpus_dir, tmp_path / 'moved')
    demo.require_trained_with(tiny_run, [*arguments, f'--dataset={tmp_path}/moved'])
    monkeypatch.setattr(demo, 'Windows', lambda *_: SimpleNamespace(
        checksums={str(corpus_dir): 'another'}))
    refuses('is another text than', demo.require_trained_with, tiny_run, arguments)


def test_lengths_of_the_report_end_with_the_windows():
    for T, lengths in (512, [128, 256, 512]), (600, [128, 256, 512, 600]):
        assert demo.Text('', np.zeros((2, T + 1)), 128, None).lengths() == lengths


def test_a_finished_model_has_the_settings_that_are_asked_for():
    for trained, wanted in ((4, 4), (0.004, 4e-3), ('rope', 'rope'), ('float32', 'auto'),
                            ('yarn:8', 'yarn')):
        assert demo.is_value(trained, wanted)
    for trained, wanted in (4, 5), ('rope', 'none'), (True, False), ('yarn:8', ''):
        assert not demo.is_value(trained, wanted)


@pytest.mark.parametrize('arguments, said', [
    ('--text=missing.txt', "text is 'missing.txt', which is not a file"),
    ('--text=LICENSE', 'the text has 0 windows of 1025 tokens'),
    ('--target_length=512', 'is not tuned for 512 tokens'),
    ('--tune_iters=9', 'tune_iters is for training and tuning, but models is lessons/models'),
])
def test_mistake_is_refused_before_work(tmp_path, arguments, said):
    assert said in mistake('demo', 'config/look.py', f'--out_dir={tmp_path}', arguments)


def small_demo(monkeypatch, folder, corpus_dir):
    monkeypatch.setattr(demo, 'out_dir', str(folder))
    monkeypatch.setattr(demo, 'max_iters', 4)
    monkeypatch.setattr(demo, 'tune_iters', 1)
    monkeypatch.setattr(demo, 'train_args', [*SMALL, f'--dataset={corpus_dir}'])
    monkeypatch.setattr(demo, 'tune_args', ['--compile=False', '--device=cpu', '--n_samples=2',
                                            '--batch_size=1', '--candidate_range=[1.0,1.3,0.3]'])


@pytest.mark.slow
def test_models_are_trained_and_tuned_once(tmp_path, monkeypatch, corpus_dir, capfd):
    small_demo(monkeypatch, tmp_path, corpus_dir)
    seconds = demo.train_and_tune()
    assert len(seconds) == 6 and min(seconds.values()) > 0
    steps = {model: checkpoints.load(tmp_path / model / 'last.pt')['step'] for model in demo.TRAIN}
    assert steps == {'none': 3, 'rope': 1, 'conv': 4}
    for model, kind in demo.READINGS.values():
        if kind:
            assert read(demo.scale_file(model, kind))['target_length'] == 512
    assert demo.train_and_tune() == {}
    monkeypatch.setattr(demo, 'max_iters', 40)  # these models are not what was asked for
    with pytest.raises(demo.UserError, match='conv was trained with max_iters=4, not with 40'):
        demo.train_and_tune()
    monkeypatch.setattr(demo, 'max_iters', 4)
    monkeypatch.setattr(demo, 'train_args', [*SMALL, f'--dataset={corpus_dir}', '--n_layer=0'])
    with pytest.raises(demo.UserError, match='conv was trained with n_layer=1, not with 0'):
        demo.train_and_tune()
    for model in demo.TRAIN:
        shutil.rmtree(tmp_path / model)
    with pytest.raises(demo.UserError, match='failed. Its message is above'):
        demo.train_and_tune()
    assert ' | train.py: n_layer is 0' in capfd.readouterr().out


@pytest.mark.slow
def test_ctrl_c_leaves_what_was_trained(tmp_path, corpus_dir):
    arguments = [*SMALL, f'--dataset={corpus_dir}', '--log_interval=1']
    program = ('import demo; demo.max_iters = 10 ** 6; demo.CORES = demo.LANES = 2; '
               'demo.train_and_tune.__globals__.update('
               f'out_dir={str(tmp_path)!r}, train_args={arguments}); demo.train_and_tune()')
    process = subprocess.Popen([sys.executable, '-c', program], cwd=ROOT, start_new_session=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    logs = [tmp_path / model / 'log.jsonl' for model in ('none', 'conv')]
    while not all(log.exists() and len(log.read_text().splitlines()) > 20 for log in logs):
        assert process.poll() is None, 'ended too early'
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the demo and to its stages
    out, _ = process.communicate(timeout=120)
    for log in logs:
        step = checkpoints.load(log.with_name('last.pt'))['step']
        assert step >= 20 and f'SIGINT: saved step {step}' in out
    assert process.returncode
