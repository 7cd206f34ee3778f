"""
The tables and the scripts of results/.

$ python -m pytest tests/test_results.py
"""

import json
import os
import subprocess
from statistics import mean, stdev

from configurator import ROOT

import pytest
from test_commands import check

from results import tables

SCRIPTS = sorted(ROOT.glob('results/*/run.sh'))
MODELS = 'conv none rope_conv alibi conv_8L conv_A'
READINGS = 'untuned uniform head head_clamped channel vectors weights yarn yarn_head yarn_weights'


@pytest.fixture
def printed(capsys):
    """printed(*names): {(table, row): {column: text}} of what tables.py prints."""
    def printed(*names):
        tables.main(names)
        rows = {}
        for table in capsys.readouterr().out.strip().split('\n\n'):
            head, _, *lines = ([cell.strip() for cell in line.strip('|').split('|')]
                               for line in table.splitlines())
            rows |= {(head[0], line[0]): dict(zip(head, line)) for line in lines}
        return rows

    return printed


def test_a_row_of_past_L_is_the_mean_over_the_files_of_its_seeds(printed):
    rows = printed('past_L')
    runs = [json.loads((ROOT / f'results/past_L/conv_{seed}.json').read_text())['readings']
            for seed in range(1337, 1342)]
    gains = [run['untuned']['text'][3]['cut_loss'] - run['head']['text'][3]['loss'] for run in runs]
    row = rows['past_L', 'conv, head']
    assert row['seeds'] == '5'
    assert row['gain, all tokens'] == f'{mean(gains):.2f} ± {stdev(gains):.2f}'
    assert row['gain, far repeats'] == '0.59 ± 0.02'
    assert rows['past_L', 'conv_8L, untuned']['gain, all tokens'] == '-0.02'  # over its twin's
    assert rows['code_86M', 'conv, head']['gain, far repeats'] == ''  # was not measured


def test_rows_of_other_studies(printed):
    """Numbers that were worked out from the JSON by hand."""
    rows = printed('scoreboard', 'vectors_demo', 'passkey_demo')
    assert rows['small', 'weights']['gain at 8L'] == '-0.657 ± 0.030'
    assert rows['small', 'weights']['own gain at 8L'] == '-0.487 ± 0.033'
    assert rows['small', 'none']['recall at 4L'] == '0.604 ± 0.051'
    assert rows['eval_ppl_table', 'NoPE, scale']['512'] == '9.93 ± 0.59'
    assert rows['keys found', 'nope']['512'] == '62% (98%, 22%, 66%)'


def test_files_of_one_name_in_several_folders_are_seeds(printed, tmp_path):
    for seed, loss in ('1', 1.0), ('2', 2.0):
        (tmp_path / seed).mkdir()
        result = {'rows': [{'length': 128, 'loss': loss}, {'length': 256, 'loss': 3.0}]}
        (tmp_path / seed / 'eval_ppl.json').write_text(json.dumps(result))
    row = printed(f'{tmp_path}/1', f'{tmp_path}/2')['loss by length', 'eval_ppl']
    assert (row['seeds'], row['128'], row['256']) == ('2', '1.500 ± 0.707', '3.000 ± 0.000')


@pytest.mark.parametrize('script', SCRIPTS, ids=lambda path: path.parent.name)
def test_a_script_gives_stages_only_settings_that_they_have(script, tmp_path, monkeypatch):
    python, commands = tmp_path / 'python', tmp_path / 'commands'
    python.write_text(f'#!/bin/bash\nprintf "%q " "$@" >> {commands}; echo >> {commands}\n')
    python.chmod(0o755)
    where = {'PATH': f"{tmp_path}:{os.environ['PATH']}", 'SEEDS': '1337', 'MODELS': MODELS,
             'READINGS': READINGS}
    subprocess.run(['bash', script], cwd=ROOT, env=os.environ | where, check=True)
    lines = set(commands.read_text().splitlines())
    assert lines
    for line in lines:
        check(f'python {line}', monkeypatch)
