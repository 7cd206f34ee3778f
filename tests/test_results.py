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

SCRIPTS = sorted(ROOT.glob('results/*/*.sh'))
MODELS = 'conv none rope_conv alibi conv_8L'
READINGS = 'untuned uniform head head_clamped vectors weights yarn yarn_weights'


def test_the_tables_of_the_pages_are_those_that_the_json_gives(capsys):
    tables.main(['--check'])
    assert capsys.readouterr().out == ''


def test_a_row_is_the_mean_over_the_files_of_its_seeds():
    runs = [json.loads((ROOT / f'results/past_L/conv_{seed}.json').read_text())['readings']
            for seed in range(1337, 1342)]
    gains = [run['untuned']['text'][3]['cut_loss'] - run['head']['text'][3]['loss'] for run in runs]
    rows = dict(tables.past_L(tables.read_old))
    assert [one['gain, all tokens'] for one in rows['NoPE + conv, head scales']] == gains
    text = f'| {mean(gains):.2f}±{stdev(gains):.2f} |'
    assert text in tables.markdown([('NoPE + conv', [{'gain': gain} for gain in gains])])


def test_files_of_one_name_in_several_folders_are_seeds(capsys, tmp_path):
    for seed, loss in ('1', 1.0), ('2', 2.0):
        (tmp_path / seed).mkdir()
        result = {'rows': [{'length': 128, 'loss': loss}, {'length': 256, 'loss': 3.0}]}
        (tmp_path / seed / 'eval_ppl.json').write_text(json.dumps(result))
    tables.main([f'{tmp_path}/1', f'{tmp_path}/2'])
    assert '| eval_ppl: loss | 1.50±0.71 | 3.00±0.00 |' in capsys.readouterr().out


@pytest.mark.parametrize('script', SCRIPTS, ids=str)
def test_a_script_gives_stages_only_settings_that_they_have(script, tmp_path, monkeypatch):
    python, commands = tmp_path / 'python', tmp_path / 'commands'
    python.write_text(f'#!/bin/bash\nprintf "%q " "$@" >> {commands}; echo >> {commands}\n')
    python.chmod(0o755)
    (tmp_path / 'project').mkdir()
    for path in ROOT.iterdir():
        if path.name != 'out':  # of which scripts leave out what is there
            (tmp_path / 'project' / path.name).symlink_to(path)
    where = {'PATH': f"{tmp_path}:{os.environ['PATH']}", 'SEEDS': '1337', 'MODELS': MODELS,
             'READINGS': READINGS, 'PYTHON': 'python'}
    subprocess.run(['bash', script], cwd=tmp_path / 'project', env=os.environ | where, check=True)
    lines = set(commands.read_text().splitlines())
    assert lines
    for line in lines:
        check(f'python {line}', monkeypatch)
