"""Settings: from config files, then from the command line; what is wrong ends in one line."""

import subprocess
import sys

from configurator import UserError, configure

import pytest
from conftest import ROOT

dataset = 'stdlib'
steps = 10
rate = 0.1
scale: float | str | None = None
lengths: list[int] = []
compile = True


def given(monkeypatch, *words):
    """The settings of this file after a command line, and the names that it gave."""
    scope = dict(globals())
    monkeypatch.setattr(sys, 'argv', ['stage.py', *map(str, words)])
    names = configure(scope)
    return {name: scope[name] for name in names}


def test_a_value_gets_the_type_of_its_setting(monkeypatch):
    found = given(monkeypatch, '--steps=20', '--rate=1', '--scale=1.2', '--lengths=[1,2]',
                  '--compile=False', '--dataset=a=b')
    assert found == {'steps': 20, 'rate': 1.0, 'scale': 1.2, 'lengths': [1, 2], 'compile': False,
                     'dataset': 'a=b'}
    assert given(monkeypatch, '--scale=file.json') == {'scale': 'file.json'}
    assert given(monkeypatch, '--scale=None', '--dataset=123') == {'scale': None, 'dataset': '123'}


def test_a_missing_package_is_named_with_the_command_that_installs_its_pin():
    run = subprocess.run([sys.executable, '-c', "import sys; sys.modules['rouge'] = None; "
                          'import longbench'], cwd=ROOT, capture_output=True, text=True)
    assert 'rouge' in run.stderr and 'pip install ".[dev]"' in run.stdout


def test_files_are_read_in_order_and_keys_come_last(monkeypatch, tmp_path):
    for name, text in ('a', 'steps = 1\nrate = 2\n_helper = 3'), ('b', 'steps = 5'):
        (tmp_path / f'{name}.py').write_text(text)
    files = tmp_path / 'a.py', tmp_path / 'b.py'
    assert given(monkeypatch, *files) == {'steps': 5, 'rate': 2.0}
    assert given(monkeypatch, '--steps=7', *files)['steps'] == 7


@pytest.mark.parametrize('word, named', [
    ('--stepps=20', "'steps'"), ('--steps=2.5', 'int'), ('--lengths=3', 'list[int]'),
    ('--rate=fast', 'float'), ('steps', 'steps')])
def test_a_mistake_names_the_setting_and_what_it_wants(monkeypatch, word, named):
    with pytest.raises(UserError) as caught:
        given(monkeypatch, word)
    assert named in str(caught.value)


def test_help_prints_each_setting_with_its_comment():
    run = subprocess.run([sys.executable, ROOT / 'train.py', '--help'], capture_output=True,
                         text=True, check=True)
    for line in ('max_iters = 2200             # training steps',
                 'rope_base: float = 10000.0  # RoPE: pair k of a head'):
        assert line in run.stdout
