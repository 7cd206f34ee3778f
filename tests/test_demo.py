"""
The demo: its report is made of the stages' own numbers.

$ python -m pytest tests/test_demo.py
"""

import json
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import ROOT, stage

import checkpoint
import demo


def test_reach_is_the_last_position_before_the_loss_leaves_its_value_at_the_training_length():
    position = [32, 96, 160, 224, 288]
    # what comes back later is no reach
    assert demo.reach(position, [9.0, 1.0, 1.04, 1.06, 1.0], L=128, at_L=1.0) == 160
    assert demo.reach(position, [9.0, 1.0, 1.2, 1.0, 1.0], L=128, at_L=1.0) == 128
    assert demo.reach(position, [9.0, 1.0, 0.9, 0.8, 0.7], L=128, at_L=1.0) == 288


def test_slope_of_entropy_is_per_e_fold_of_context():
    position = np.arange(1, 1025)
    assert demo.slope(position, 0.7 * np.log(position) + 3, 128, 256) == pytest.approx(0.7)


def test_smoothed_curve_is_the_mean_of_the_values_before():
    values = [4.0, 2.0, 6.0, 1.0, 3.0]
    assert demo.smooth(values, 3).tolist() == pytest.approx([4, 3, 4, 3, 10 / 3])


def test_ctrl_c_leaves_what_was_trained(tmp_path):
    command = [sys.executable, str(ROOT / 'demo.py'), f'--out_dir={tmp_path}',
               "--train_args=['--compile=False', '--n_layer=1', '--n_embd=32', '--n_hidden=48', '--log_interval=1']"]
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
    process = subprocess.Popen(command, start_new_session=True, **pipes)
    log = tmp_path / 'nope/log.jsonl'
    while not log.exists() or len(log.read_text().splitlines()) < 20:
        assert process.poll() is None, 'ended too early'
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the demo and to its stage
    out, _ = process.communicate(timeout=60)
    step = checkpoint.load(tmp_path / 'nope/last.pt')['step']
    assert process.returncode and step >= 20 and f'SIGINT: saved step {step}' in out


def test_demo_runs_all_stages_and_reports_their_numbers(tmp_path):
    out, _ = stage('demo', f'--out_dir={tmp_path}', '--max_iters=12', '--tune_iters=2', '--n_samples=6',
                   '--curve_samples=2', "--tune_args=['--compile=False', '--candidate_range=[1.0,1.3,0.3]']",
                   "--train_args=['--compile=False', '--n_layer=1', '--n_embd=32', '--n_hidden=48']")
    report = json.loads((tmp_path / 'report.json').read_text())
    assert report['windows'] == 6 and report['lengths'] == [128, 256, 512]
    assert list(report['methods']) == ['NoPE', 'uniform 256', 'uniform 512', 'head 256', 'head 512', 'RoPE']
    uniform = json.loads((tmp_path / 'nope/scale_uniform.json').read_text())
    best = dict(zip(uniform['lengths'], uniform['best_by_length']))
    scales = {'NoPE': None, 'RoPE': None} | {f'uniform {T}': best[T] for T in (256, 512)} | {
        f'head {T}': f'{tmp_path}/nope/scale_head_{5 * T // 4}.json' for T in (256, 512)}
    found = {}
    for name, method in report['methods'].items():
        folder = tmp_path / ('rope' if name == 'RoPE' else 'nope')
        found[name] = json.loads((folder / f"eval_ppl_position_demo_{name.replace(' ', '_')}.json").read_text())
        assert found[name]['settings']['scale'] == scales[name]
        assert found[name]['position_method'] == ('rope' if name == 'RoPE' else 'none')
        assert {T: cell['loss'] for T, cell in method['at'].items()} == {
            str(row['length']): row['loss'] for row in found[name]['rows']}
    nope, rope = found['NoPE'], found['RoPE']
    assert report['gap_to_rope_at_L'] == pytest.approx(nope['rows'][0]['loss'] - rope['rows'][0]['loss'])
    curve = json.loads((tmp_path / 'nope/entropy_demo_NoPE.json').read_text())
    for slope, low, high in ('entropy_slope_before_L', 64, 128), ('entropy_slope_past_L', 128, 256):
        assert report[slope] == pytest.approx(demo.slope(curve['position'], curve['mean_entropy'], low, high))
    pair = next(p for p in report['paired_differences'] if (p['a'], p['b'], p['length']) == ('NoPE', 'RoPE', 512))
    rows = np.subtract(nope['loss_at_by_window']['512'], rope['loss_at_by_window']['512'])
    assert pair['difference'] == pytest.approx(rows.mean(), rel=1e-4)
    assert pair['standard_error'] == pytest.approx(rows.std(ddof=1) / math.sqrt(6), rel=1e-4)
    assert (tmp_path / 'report.png').read_bytes().startswith(b'\x89PNG') and 'largest standard error' in out
