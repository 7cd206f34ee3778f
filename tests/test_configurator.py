"""
Settings from config files and the command line, and what a user sees of an error.

$ python -m pytest tests/test_configurator.py
"""

import re
import runpy
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from conftest import ROOT, refuses

import configurator
from configurator import between, configure, settings
from lib.errors import UserError, report

STAGE = '''"""
Train a toy.

$ python stage.py config/toy.py
"""
# above the imports
import json
from configurator import configure, settings

# settings
learning_rate = 1e-3  # per step
max_iters = 200       # steps; -1 = for ever
compile = True        # torch.compile
dataset = 'pg#19'     # a folder # of data/

# ---- context ----
scale: float | str | None = None  # one number or a file
lengths: list[int] = [128, 256]   # in tokens
rates: list[float] | None = None
sizes: list[int] = [
    1,
    2,
]  # of heads
_private = 1
CONSTANT = 3

def main():
    pass

if __name__ == '__main__':
    configure(globals())
    main()
'''
DEFAULTS = {'learning_rate': 1e-3, 'max_iters': 200, 'compile': True, 'dataset': 'pg#19',
            'scale': None, 'lengths': [128, 256], 'rates': None, 'sizes': [1, 2]}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project folder with stage.py, which is the working directory, too."""
    (tmp_path / 'config').mkdir()
    (tmp_path / 'stage.py').write_text(STAGE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(configurator, 'ROOT', tmp_path)
    monkeypatch.setattr(sys, 'excepthook', sys.excepthook)
    return tmp_path


def values(project, *arguments):
    """The settings that main() finds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, 'argv', ['stage.py', *arguments])
        return settings(runpy.run_path(str(project / 'stage.py'), run_name='__main__'))


# ---------------------------------------------------------------------- what overrides what

def test_config_files_run_in_order_and_keys_override_them_wherever_they_stand(project, monkeypatch):
    assert list(values(project).items()) == list(DEFAULTS.items())
    monkeypatch.setattr(sys, 'argv', ['stage.py', '--max_iters=5'])
    hook = sys.excepthook  # importing a stage leaves it and the excepthook alone
    assert runpy.run_path('stage.py')['max_iters'] == 200 and sys.excepthook is hook
    (project / 'config/one.py').write_text('learning_rate = 0.1\nmax_iters = 1\n')
    (project / 'config/two.py').write_text('max_iters = 2\ncompile = False\n')
    found = values(project, '--compile=True', 'config/one.py', 'config/two.py')
    assert found == DEFAULTS | {'learning_rate': 0.1, 'max_iters': 2}
    assert values(project, 'config/two.py', 'config/one.py')['max_iters'] == 1


def test_config_file_is_found_from_any_folder_that_of_the_user_first(project, monkeypatch):
    (project / 'config/toy.py').write_text('max_iters = 7\n')
    (project / 'elsewhere/config').mkdir(parents=True)
    monkeypatch.chdir(project / 'elsewhere')
    assert values(project, 'config/toy.py')['max_iters'] == 7
    assert values(project, str(project / 'config/toy.py'))['max_iters'] == 7
    (project / 'elsewhere/config/toy.py').write_text('max_iters = 8\n')
    assert values(project, 'config/toy.py')['max_iters'] == 8


def test_config_file_is_code_and_only_its_plain_public_names_are_settings(project):
    (project / 'config/toy.py').write_text(
        'import math\nfrom os.path import basename\n_half = 0.5\nNOTE = 1\n'
        'def double(x):\n    return 2 * x\n'
        'learning_rate = math.sqrt(double(_half))\ndataset = basename(__file__)\n')
    found = values(project, 'config/toy.py')
    assert found == DEFAULTS | {'learning_rate': 1.0, 'dataset': 'toy.py'}


def test_a_setting_with_a_capital_is_refused(project):
    (project / 'config/toy.py').write_text('Max_iters = 4\n')
    refuses("it sets 'Max_iters'", values, project, 'config/toy.py')


def test_configurator_needs_only_the_standard_library():
    code = 'import sys; sys.path.insert(0, "."); import configurator'
    subprocess.run([sys.executable, '-I', '-S', '-c', code], cwd=ROOT, check=True)


@dataclass
class Declared:
    """Stands for position.Settings."""
    kernel: int = 0         # keys wide
    base: float = 10000.0   # of the angles
    max_iters: int = 200    # the stage has its own default


def test_settings_declared_in_a_class_are_settings_of_the_stage(monkeypatch, capsys):
    scope = {'__file__': str(ROOT / 'sample.py'), '__doc__': 'Toy.', 'max_iters': 3}
    monkeypatch.setattr(sys, 'argv', ['sample.py', '--base=5', '--max_iters=4'])
    monkeypatch.setattr(sys, 'excepthook', sys.excepthook)
    assert configure(scope, Declared) == {'base', 'max_iters'}
    assert settings(scope) == {'max_iters': 4, 'kernel': 0, 'base': 5.0}
    monkeypatch.setattr(sys, 'argv', ['sample.py', '--help'])
    with pytest.raises(SystemExit):
        configure(scope, Declared)
    assert 'kernel: int = 0         # keys wide' in capsys.readouterr().out.splitlines()


def test_types_are_read_as_python_3_14_keeps_them(monkeypatch):
    scope = {'__file__': 'toy.py', '__annotate__': lambda form: {'scale': float | None},
             'scale': None}
    monkeypatch.setattr(sys, 'argv', ['toy.py', '--scale=2'])
    monkeypatch.setattr(sys, 'excepthook', sys.excepthook)
    assert configure(scope) == {'scale'} and scope['scale'] == 2.0


# ---------------------------------------------------------------------- what is refused

# An argument, or the content of config/toy.py, and what the error names. DEEP: many open brackets.
REFUSED = """
--max-iters=1             | 'max_iters'
--learing_rate=1          | 'learning_rate'
--zzz=1                   | --help
--_private=1              | '_private'
--CONSTANT=1              | 'CONSTANT'
--json=1                  | 'json'
--main=1                  | 'main'
--learning_rate=fast      | the command line sets 'learning_rate' to
--max_iters=True          | the command line sets 'max_iters' to
--max_iters=1e3           | the command line sets 'max_iters' to
--max_iters=None          | the command line sets 'max_iters' to
--max_iters=DEEP          | the command line sets 'max_iters' to
--compile=1               | the command line sets 'compile' to
--lengths=128             | the command line sets 'lengths' to
--lengths=[128, 0.5]      | the command line sets 'lengths' to
book.txt                  | book.txt
config/toy.yaml           | config/toy.yaml
--compile                 | --compile
-max_iters=3              | -max_iters=3
config/none.py            | config/none.py
learning_rate = '1e-3'    | config/toy.py sets 'learning_rate'
max_iters = 2.0           | config/toy.py sets 'max_iters'
compile = 1               | config/toy.py sets 'compile'
dataset = 123             | config/toy.py sets 'dataset'
scale = [1.0]             | config/toy.py sets 'scale'
max_iters = = 3           | config/toy.py stopped with SyntaxError
max_iters = 1 / 0         | config/toy.py stopped with ZeroDivisionError
max_iters = max_iters + 1 | config/toy.py stopped with NameError
import sys; sys.nothing   | config/toy.py stopped with AttributeError
"""


@pytest.mark.parametrize('row', REFUSED.strip().splitlines())
def test_what_is_no_setting_has_the_wrong_type_or_fails_is_refused_with_its_name(project, row):
    argument, named = (cell.strip() for cell in row.split('|'))
    if re.match('[a-z_]+ ', argument):
        (project / 'config/toy.py').write_text(argument)
        argument = 'config/toy.py'
    with pytest.raises(UserError) as refusal:
        values(project, argument.replace('DEEP', '[' * 9999))
    assert named in str(refusal.value)


@pytest.mark.parametrize('row', '''
--learning_rate=1      | 1.0
--learning_rate=-6e-4  | -0.0006
--compile=False        | False
--dataset=123          | '123'
--dataset=a=b          | 'a=b'
--dataset='a'          | "'a'"
--dataset={{}}         | '{{}}'
--dataset=             | ''
--scale=2              | 2.0
--scale=x.json         | 'x.json'
--scale=None           | None
--lengths=[]           | []
--lengths=[128,512]    | [128, 512]
--rates=[1, 0.5]       | [1.0, 0.5]
'''.strip().splitlines())
def test_text_becomes_a_value_of_the_settings_type(project, row):
    argument, expected = (cell.strip() for cell in row.split('|'))
    name, found = argument[2:].split('=')[0], values(project, argument)
    assert repr(found[name]) == expected  # 1 == 1.0 == True
    assert found | {name: 0} == DEFAULTS | {name: 0}


def test_other_arguments_are_paths_where_the_stage_has_this_setting(project):
    paths = "paths: list[str] = ['first.txt']\n"
    (project / 'stage.py').write_text(STAGE.replace('# settings\n', paths))
    found = values(project, 'book.txt', '--max_iters=7', 'source/code.py')
    assert found['paths'] == ['first.txt', 'book.txt', 'source/code.py']


def test_numbers_out_of_bounds_are_refused():
    scope = {'n': 3, 'none': None, 'sizes': [1, 10 ** 20], 'p': 1.5}
    between(scope, 3, 'n', 'none')
    for least, name, most in (4, 'n', 9), (0, 'n', 2), (0, 'p', 1), (2, 'sizes', 10 ** 30):
        refuses(f'{name} is', between, scope, least, name, most=most)
    refuses('sizes is', between, scope, 0, 'sizes')  # more than numpy and torch take


@pytest.mark.parametrize('error, text', [
    (UserError('target_length is 1.\n  Choose 2.'), 'target_length is 1. Choose 2.'),
    (FileNotFoundError(2, 'No such file', 'x.bin'), "[Errno 2] No such file: 'x.bin'"),
    (OSError(28, 'No space left on device'), '[Errno 28] No space left on device'),
    (KeyboardInterrupt(), 'interrupted'), (torch.OutOfMemoryError(), 'out of GPU memory'),
    (KeyError('key'), ''), (AssertionError('ours'), ''), (ValueError('many'), '')], ids=repr)
def test_users_mistake_is_one_line_and_a_bug_keeps_its_traceback(error, text, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['some/where/stage.py'])
    report(type(error), error, None)
    shown = capsys.readouterr().err
    if text:
        assert shown.startswith(f'stage.py: {text}') and shown.count('\n') == 1
    else:
        assert type(error).__name__ in shown and not shown.startswith('stage.py')


def test_help_shows_docstring_and_every_setting_with_default_and_comment(project, capsys):
    for option in '-h', '--help':
        with pytest.raises(SystemExit):
            values(project, '--max_iters=5', option)
        shown = STAGE[STAGE.index('# settings'):STAGE.index('_private')].splitlines()
        lines = capsys.readouterr().out.splitlines()
        assert lines == ['Train a toy.', '', '$ python stage.py config/toy.py', '', *shown]
