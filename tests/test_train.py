"""Training: its loop, and that stops, kills, ranks and mistakes lose nothing."""

import gc
import json
import math
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import filelock
import pytest
import torch
from conftest import ROOT, SIZES, mistake, stage
from plain import plain_entropy

import train
from common import model_config, read_checkpoint
from data import Windows
from model import Transformer

RUN = SIZES + ('--max_iters=8 --eval_interval=4 --log_interval=2 --batch_size=4 --warmup_iters=2 '
               '--micro_batch_size=2 --eval_windows=4 --device=cpu --dtype=float32 '
               '--compile=False').split()


def trained(corpus_dir, out_dir, *more):
    """What train.py printed; it ran for 8 steps, in this process."""
    return stage('train', f'--dataset={corpus_dir}', f'--out_dir={out_dir}', *RUN, *more)


def resumed(out_dir, *more):
    return stage('train', '--init_from=resume', f'--out_dir={out_dir}', '--device=cpu',
                      '--compile=False', *more)


def largest_difference(one, other):
    a, b = read_checkpoint(one / 'last.pt')['model'], read_checkpoint(other / 'last.pt')['model']
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def test_the_rate_warms_up_for_a_share_of_the_steps_and_stays_at_min_lr(monkeypatch):
    for name, value in dict(warmup_iters=0.1, max_iters=40, lr_decay_iters=20).items():
        monkeypatch.setattr(train, name, value)
    rates = [train.learning_rate_at(step) for step in (0, 3, 4, 12, 20, 39)]
    assert rates == pytest.approx([5e-4, 2e-3, 2e-3, 1.1e-3, 2e-4, 2e-4])


@pytest.fixture(scope='module')
def whole(corpus_dir, tmp_path_factory):
    """The folder of a run of 8 steps that nothing interrupted."""
    out_dir = tmp_path_factory.mktemp('whole') / 'run'
    trained(corpus_dir, out_dir)
    return out_dir


def test_the_optimizer_decays_all_weights_but_convolutions_and_leaves_out_scales():
    model = Transformer(model_config(dict(vocab_size=9, block_size=8, n_layer=1, n_head=2, n_embd=8,
                                          n_kv_head=2, n_hidden=8, short_conv=4)))
    decayed, convolutions = train.new_optimizer(model).param_groups
    assert (decayed['weight_decay'], convolutions['weight_decay']) == (0.1, 0)
    assert [p.shape for p in convolutions['params']] == [(4, 8), (4, 8)]
    n_scales = 2 * 2  # head_scale and head_gain of two heads
    n = sum(p.numel() for group in (decayed, convolutions) for p in group['params'])
    assert n == sum(p.numel() for p in model.parameters()) - n_scales == model.n_params()


def test_a_step_is_adamw_on_the_mean_loss_of_its_batch(corpus_dir, whole):
    """All eight steps and the validation after them, computed without train.py."""
    state = read_checkpoint(whole / 'last.pt')
    torch.manual_seed(1337)
    model = Transformer(state['model_config']).init_weights()
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(weights, betas=(0.9, 0.95), weight_decay=0.1), []
    cosine = [2e-4 + 9e-4 * (1 + math.cos(math.pi * n / 6)) for n in range(6)]
    for step, rate in enumerate([1e-3, 2e-3, *cosine]):
        optimizer.param_groups[0]['lr'] = rate
        x = torch.from_numpy(Windows(str(corpus_dir), 'train', 32, seed=1337).batch(step, 4))
        loss = model(x[:, :-1], x[:, 1:]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    rows = [json.loads(line) for line in (whole / 'log.jsonl').read_text().splitlines()]
    assert [row['loss'] for row in rows if 'loss' in row] == pytest.approx(losses, rel=1e-4)
    x = torch.from_numpy(Windows(str(corpus_dir), 'val', 32).evenly_spaced(4))
    measured = [row['val_loss'] for row in rows if 'val_loss' in row]
    assert measured[1] == pytest.approx(model(x[:, :-1], x[:, 1:]).mean().item(), rel=1e-4)
    assert [row['step'] for row in rows if 'val_loss' in row] == [4, 8]
    assert rows[-1]['entropy'] == pytest.approx(plain_entropy(model, x[:, :-1]).mean(), rel=1e-3)
    assert rows[-1]['tokens'] == 8 * 4 * 32


def test_a_resumed_run_ends_bit_for_bit_like_one_that_was_not_stopped(corpus_dir, whole, tmp_path):
    out_dir = tmp_path / 'run'
    trained(corpus_dir, out_dir, '--max_iters=4', '--lr_decay_iters=8')
    with open(out_dir / 'log.jsonl', 'a') as file:
        file.write('{"step": 5, "loss": 1.0}\n{"step": 6, "lo')  # as a killed run may leave
    resumed(out_dir, '--max_iters=8')
    assert largest_difference(whole, out_dir) == 0
    assert (out_dir / 'log.jsonl').read_text() == (whole / 'log.jsonl').read_text()
    a, b = (read_checkpoint(run / 'last.pt')['optimizer']['state'] for run in (whole, out_dir))
    assert all(torch.equal(a[name]['exp_avg_sq'], b[name]['exp_avg_sq']) for name in a)


@pytest.mark.slow
@pytest.mark.parametrize('how', [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_stopped_or_killed_process_goes_on_where_it_was(corpus_dir, tmp_path, how):
    command = [sys.executable, ROOT / 'train.py', f'--dataset={corpus_dir}', *RUN,
               '--max_iters=100000', '--lr_decay_iters=8', '--eval_interval=50']
    process = subprocess.Popen([*command, f'--out_dir={tmp_path}/run'],
                               env=os.environ | {'OMP_NUM_THREADS': '1'})
    while not (tmp_path / 'run/last.pt').exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(how)
    assert process.wait() == (-9 if how == signal.SIGKILL else 128 + how)
    step = read_checkpoint(tmp_path / 'run/last.pt')['step']
    assert step % 50 == 0 or how != signal.SIGKILL
    resumed(tmp_path / 'run', f'--max_iters={step + 3}')
    trained(corpus_dir, tmp_path / 'twin', f'--max_iters={step + 3}', '--lr_decay_iters=8')
    assert largest_difference(tmp_path / 'run', tmp_path / 'twin') == 0


@pytest.mark.slow
@pytest.mark.parametrize('more', [[], ['--fsdp=True'], ['--fsdp=True', '--compile=True']])
def test_two_ranks_train_like_one_and_resume_exactly(corpus_dir, whole, tmp_path, more):
    def on_two(name, *arguments):
        stage('train', f'--out_dir={tmp_path / name}', *arguments, *more, ranks=2)

    on_two('once', f'--dataset={corpus_dir}', *RUN, '--micro_batch_size=1')
    assert largest_difference(whole, tmp_path / 'once') < 2e-4  # AdamW magnifies rounding errors
    on_two('twice', f'--dataset={corpus_dir}', *RUN, '--micro_batch_size=1', '--max_iters=4',
           '--lr_decay_iters=8')
    on_two('twice', '--init_from=resume', '--max_iters=8', '--device=cpu', '--compile=False')
    assert largest_difference(tmp_path / 'once', tmp_path / 'twice') == 0


def test_best_pt_has_the_least_validation_loss_also_after_a_resume(corpus_dir, tmp_path):
    trained(corpus_dir, tmp_path, '--max_iters=4', '--lr_decay_iters=8')
    resumed(tmp_path, '--max_iters=8', '--learning_rate=1.0', '--min_lr=1.0')
    assert read_checkpoint(tmp_path / 'best.pt')['step'] == 4


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_file(corpus_dir, tmp_path):
    trained(corpus_dir, tmp_path / 'run', '--max_iters=4', '--lr_decay_iters=8')
    good = (tmp_path / 'run/last.pt').read_bytes()
    line = mistake('train', '--init_from=resume', f'--out_dir={tmp_path}/run', '--max_iters=20',
                   '--device=cpu', '--learning_rate=1e30', '--grad_clip=0.0', '--compile=False')
    assert 'last.pt' in line and 'learning_rate' in line
    assert (tmp_path / 'run/last.pt').read_bytes() == good


@pytest.mark.parametrize('words, named', [
    ('--n_layer=2', 'holds a run'),
    ('--init_from=resume --max_iters=9 --batch_size=8', 'batch_size is 8'),
    ('--init_from=resume --max_iters=9 --n_layer=3', 'n_layer is 3'),
    ('--init_from=resume --max_iters=9 --position=rope', 'position'),
    ('--init_from=resume --max_iters=9 --beta1=0.8', 'beta1 is 0.8'),
    ('--init_from=resume --max_iters=9 --beta1=0.8', 'beta1 is 0.8'),
    ('--position=ropy --out_dir=other', 'kerple'),
    ('--rope_base=500.0 --out_dir=other', 'rope_base'),
    ('--micro_batch_size=3 --out_dir=other', 'micro_batch_size')])
def test_a_mistake_ends_in_one_line_that_names_it(corpus_dir, whole, tmp_path, words, named):
    words = words.replace('out_dir=other', f'out_dir={tmp_path}/other').split()
    start = [] if '--init_from=resume' in words else [f'--dataset={corpus_dir}', *RUN]
    gc.collect()  # frees the lock of a run that was refused before, in this process
    assert named in mistake('train', f'--out_dir={whole}', *start, *words)


def test_two_processes_never_share_a_run(corpus_dir, tmp_path):
    (tmp_path / 'run').mkdir()
    with filelock.FileLock(tmp_path / 'run/run.lock'):
        assert 'Another process' in mistake('train', f'--out_dir={tmp_path}/run')


def test_fine_tuning_keeps_L_and_takes_the_factor_of_yarn_from_the_lengths(corpus_dir, tmp_path):
    trained(corpus_dir, tmp_path / 'rope', '--position=rope', '--max_iters=2')
    trained(corpus_dir, tmp_path / 'long', f'--init_from={tmp_path}/rope/last.pt', '--max_iters=1',
            '--block_size=128', '--rope_scaling=yarn')
    c = read_checkpoint(tmp_path / 'long/last.pt')['model_config']
    assert (c.block_size, c.pretrained_length, c.rope_scaling) == (128, 32, 'yarn:4')
    stage('train', f'--out_dir={tmp_path}/again', *RUN, f'--init_from={tmp_path}/long/last.pt',
          '--max_iters=1', '--block_size=64', '--rope_scaling=yarn')  # and the model's own text
    resumed(tmp_path / 'again', '--max_iters=2', '--rope_scaling=yarn:2')
    (tmp_path / 'again/loss.png').unlink()  # as if it had been killed before
    resumed(tmp_path / 'again', '--max_iters=2')
    assert (tmp_path / 'again/loss.png').exists()
    settings = read_checkpoint(tmp_path / 'again/last.pt')['settings']
    assert (settings['rope_scaling'], settings['init_from'][-7:]) == ('yarn:2', 'last.pt')
    assert settings['dataset'] == str(corpus_dir)
    trained(corpus_dir, tmp_path / 'none', f'--init_from={tmp_path}/rope/last.pt', '--max_iters=1',
            '--position=none')
    model = Transformer(read_checkpoint(tmp_path / 'none/last.pt')['model_config'])
    assert model.config.position == 'none'
    model.load_state_dict(read_checkpoint(tmp_path / 'rope/last.pt')['model'])
    x = torch.from_numpy(Windows(str(corpus_dir), 'train', 32, seed=1337).batch(0, 4))
    first = json.loads((tmp_path / 'none/log.jsonl').read_text().splitlines()[0])
    assert first['loss'] == pytest.approx(model(x[:, :-1], x[:, 1:]).mean().item(), rel=1e-5)


def test_each_step_draws_random_positions_also_after_a_resume(corpus_dir, tmp_path, monkeypatch):
    drawn, draw = [], torch.rand_like
    monkeypatch.setattr(torch, 'rand_like', lambda x: drawn.append(draw(x)) or drawn[-1])
    run = '--position=rope_random', '--lr_decay_iters=8'
    for name, n in ('whole', 6), ('stopped', 4):
        trained(corpus_dir, tmp_path / name, *run, f'--max_iters={n}')
    assert len({x[0].item() for x in drawn}) == 6 * 2 * 2  # steps, layers, micro-batches
    resumed(tmp_path / 'stopped', '--max_iters=6')
    assert largest_difference(tmp_path / 'whole', tmp_path / 'stopped') == 0


def test_a_tracker_gets_what_the_log_gets(corpus_dir, tmp_path, monkeypatch):
    rows, started = [], []
    module = SimpleNamespace(init=lambda **about: started.append(about['name']),
                             log=lambda row, step: rows.append({'step': step} | row),
                             finish=lambda: started.append('finished'))
    monkeypatch.setitem(sys.modules, 'trackio', module)
    trained(corpus_dir, tmp_path / 'run', '--tracker=trackio', '--max_iters=4')
    log = [json.loads(line) for line in (tmp_path / 'run/log.jsonl').read_text().splitlines()]
    assert rows == log and started == [f'{tmp_path}/run', 'finished']
    assert (tmp_path / 'run/loss.png').exists()
