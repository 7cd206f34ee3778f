"""
The demo: its report is made of the stages' own numbers.

$ python -m pytest tests/test_demo.py
"""

import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import ROOT, near, read, stage

import demo
from lib import checkpoints

SMALL = ("--train_args=['--compile=False','--n_layer=1','--n_embd=32','--n_hidden=48',"
         "'--log_interval=1']")


@pytest.mark.parametrize('loss, reached', [
    ([9.0, 1.0, 1.04, 1.06, 1.0], 160),  # what comes back later is no reach
    ([9.0, 1.0, 1.2, 1.0, 1.0], 128), ([9.0, 1.0, 0.9, 0.8, 0.7], 288)])
def test_reach_is_the_last_position_before_the_loss_leaves_the_limit(loss, reached):
    assert demo.reach([32, 96, 160, 224, 288], loss, L=128, limit=1.05) == reached
    position = np.arange(1, 1025)  # and a slope is per e-fold
    assert demo.slope(position, 0.7 * np.log(position) + 3, 128, 256) == pytest.approx(0.7)
    # a smoothed value is the mean of those before
    near(demo.smooth([4.0, 2.0, 6.0, 1.0, 3.0], 3), [4, 3, 4, 3, 10 / 3], atol=1e-9)


@pytest.mark.slow
def test_ctrl_c_leaves_what_was_trained(tmp_path):
    process = subprocess.Popen([sys.executable, ROOT / 'demo.py', f'--out_dir={tmp_path}', SMALL],
                               start_new_session=True, stdout=subprocess.PIPE, text=True)
    log = tmp_path / 'nope/log.jsonl'
    while not log.exists() or len(log.read_text().splitlines()) < 20:
        assert process.poll() is None, 'ended too early'
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the demo and to its stage
    out, _ = process.communicate(timeout=60)
    step = checkpoints.load(tmp_path / 'nope/last.pt')['step']
    assert process.returncode and step >= 20 and f'SIGINT: saved step {step}' in out


@pytest.mark.slow
def test_report_has_the_numbers_of_the_stages(tmp_path):
    out, _ = stage('demo', f'--out_dir={tmp_path}', '--max_iters=12', '--tune_iters=2', SMALL,
                   '--n_samples=6', '--curve_samples=2',
                   "--tune_args=['--compile=False','--candidate_range=[1.0,1.3,0.3]']")
    report = read(tmp_path / 'report.json')
    best = read(tmp_path / 'nope/scale_uniform.json')['best_by_length']
    scales = {'NoPE': None, 'uniform 256': best[1], 'uniform 512': best[2],
              'head 256': f'{tmp_path}/nope/scale_head_320_head.json',
              'head 512': f'{tmp_path}/nope/scale_head_640_head.json',
              'vectors 256': f'{tmp_path}/nope/scale_head_320_vectors.json',
              'vectors 512': f'{tmp_path}/nope/scale_head_640_vectors.json', 'RoPE': None}
    assert report['windows'] == 6 and report['lengths'] == [128, 256, 512]
    assert list(report['methods']) == list(scales)
    found = {}
    for name, method in report['methods'].items():
        run = 'rope' if name == 'RoPE' else 'nope'
        path = f"{run}/eval_ppl_position_demo_{name.replace(' ', '_')}.json"
        found[name] = result = read(tmp_path / path)
        assert result['settings']['scale'] == scales[name]
        assert result['position_method'] == run.replace('nope', 'none')
        for row in result['rows']:
            at = method['at'][str(row['length'])]
            assert at['loss'] == row['loss'] and at['standard_error'] == row['standard_error']

    nope, rope = found['NoPE'], found['RoPE']
    curve = read(tmp_path / 'nope/entropy_demo_NoPE.json')
    pair, = (pair for pair in report['paired_differences']
             if (pair['a'], pair['b'], pair['length']) == ('NoPE', 'RoPE', 512))
    rows = np.subtract(nope['loss_at_by_window']['512'], rope['loss_at_by_window']['512'])
    near([report['gap_to_rope_at_L'], report['entropy_slope_past_L'], pair['difference'],
          pair['standard_error']],
         [nope['rows'][0]['loss'] - rope['rows'][0]['loss'],
          demo.slope(curve['position'], curve['mean_entropy'], 128, 256), rows.mean(),
          rows.std(ddof=1) / math.sqrt(6)], rtol=1e-4)
    assert (tmp_path / 'report.png').stat().st_size > 1000 and 'largest standard error' in out
