"""
Settings from config files and the command line, and what a user sees of an error. Each test runs small real stages in
a project folder of its own, which holds a copy of configurator.py and errors.py.

$ python -m pytest tests/test_configurator.py
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

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
betas = (0.9, 0.95)
sizes: list[int] = [
    1,
    2,
]  # of heads
_private = 1
CONSTANT = 3

def helper():
    return 1

def main():
    print(json.dumps(settings(globals())))

if __name__ == '__main__':
    configure(globals())
    main()
'''
DEFAULTS = {'learning_rate': 1e-3, 'max_iters': 200, 'compile': True, 'dataset': 'pg#19', 'scale': None,
            'lengths': [128, 256], 'rates': None, 'betas': [0.9, 0.95], 'sizes': [1, 2]}  # JSON has no tuples
WITH_PATHS = STAGE.replace('# settings\n', "paths: list[str] = ['first.txt']  # files to read\n")


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / 'project'
    (folder / 'config').mkdir(parents=True)
    for name in 'configurator.py', 'errors.py':
        shutil.copy(ROOT / name, folder)
    (folder / 'stage.py').write_text(STAGE)
    return folder


def run(project, *arguments, cwd=None):
    command = [sys.executable, str(project / 'stage.py'), *arguments]
    return subprocess.run(command, cwd=cwd or project, capture_output=True, text=True)


def values(project, *arguments, cwd=None):
    """The settings that main() finds."""
    done = run(project, *arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def mistake(project, *arguments, status=1, cwd=None):
    """The one line that a user reads before the stage has done anything."""
    done = run(project, *arguments, cwd=cwd)
    assert done.returncode == status and done.stdout == '', done.stdout + done.stderr
    assert done.stderr.startswith('stage.py: ') and done.stderr.count('\n') == 1, done.stderr
    return done.stderr.removeprefix('stage.py: ').strip()


def stage_that(project, action, helper=''):
    """Make stage.py do `action` in main(), after configure()."""
    (project / 'helper.py').write_text(helper)
    (project / 'stage.py').write_text(
        'import json, os, signal, sys\nimport helper\nfrom configurator import configure\n'
        f"def main():\n    {action}\n\nif __name__ == '__main__':\n    configure(globals())\n    main()\n")


# ----------------------------------------------------------------------------- what is a setting, what overrides it

def test_settings_are_the_lower_case_values_in_source_order(project):
    found = values(project)
    assert found == DEFAULTS
    assert list(found) == list(DEFAULTS)


def test_config_files_run_in_order_and_keys_override_them_wherever_they_stand(project):
    (project / 'config/one.py').write_text('learning_rate = 0.1\nmax_iters = 1\ncompile = False\n')
    (project / 'config/two.py').write_text('max_iters = 2\ncompile = True\n')
    found = values(project, '--max_iters=4', 'config/one.py', '--max_iters=3', 'config/two.py')
    assert found == {**DEFAULTS, 'learning_rate': 0.1, 'max_iters': 3}
    assert values(project, 'config/two.py', 'config/one.py')['compile'] is False


def test_config_file_is_found_from_any_working_directory(project, tmp_path):
    (project / 'config/toy.py').write_text('max_iters = 7\n')
    (tmp_path / 'elsewhere').mkdir()
    assert values(project, 'config/toy.py', cwd=tmp_path / 'elsewhere')['max_iters'] == 7
    assert values(project, 'toy.py', cwd=project / 'config')['max_iters'] == 7
    assert values(project, str(project / 'config/toy.py'), cwd=tmp_path / 'elsewhere')['max_iters'] == 7


def test_config_file_may_lie_in_any_folder(project):
    (project / 'config/sets').mkdir()
    (project / 'config/sets/toy.py').write_text('max_iters = 9\n')
    assert values(project, 'config/sets/toy.py')['max_iters'] == 9


def test_config_file_of_the_working_directory_comes_before_the_projects(project, tmp_path):
    (project / 'config/toy.py').write_text('max_iters = 7\n')
    (tmp_path / 'config').mkdir()
    (tmp_path / 'config/toy.py').write_text('max_iters = 8\n')
    assert values(project, 'config/toy.py', cwd=tmp_path)['max_iters'] == 8


def test_config_file_is_code_and_only_its_plain_public_names_are_settings(project):
    (project / 'config/toy.py').write_text(
        'import math\nfrom os.path import basename\n_half = 0.5\nNOTE = 1\ndef double(x):\n    return 2 * x\n'
        'learning_rate = math.sqrt(double(_half))\ndataset = basename(__file__)\n')
    assert values(project, 'config/toy.py') == {**DEFAULTS, 'learning_rate': 1.0, 'dataset': 'toy.py'}


def test_config_file_does_not_see_the_stages_globals(project):
    (project / 'config/toy.py').write_text('max_iters = max_iters + 1\n')
    assert "NameError: name 'max_iters' is not defined" in mistake(project, 'config/toy.py')


def test_importing_a_stage_leaves_it_and_the_excepthook_alone(project):
    code = ('import sys; sys.argv.append("--max_iters=5"); hook = sys.excepthook; import stage, configurator; '
            'print(stage.max_iters, configurator.settings(vars(stage))["max_iters"], sys.excepthook is hook)')
    done = subprocess.run([sys.executable, '-c', code], cwd=project, capture_output=True, text=True)
    assert done.stdout == '200 200 True\n', done.stderr


def test_configurator_needs_only_the_standard_library(project):
    code = 'import sys; sys.path.insert(0, "."); import configurator'  # -I -S: no installed packages
    subprocess.run([sys.executable, '-I', '-S', '-c', code], cwd=project, check=True)


# ----------------------------------------------------------------------------- unknown settings

def test_typo_in_config_file_is_refused_with_the_nearest_setting(project):
    (project / 'config/toy.py').write_text('learing_rate = 1e-3\n')
    assert mistake(project, 'config/toy.py') == (
        "config/toy.py sets 'learing_rate', which stage.py does not have. Did you mean 'learning_rate'?")


def test_typo_on_the_command_line_is_refused_with_the_nearest_setting(project):
    assert mistake(project, '--max-iters=3') == (
        "the command line sets 'max-iters', which stage.py does not have. Did you mean 'max_iters'?")


@pytest.mark.parametrize('name', ['_private', 'CONSTANT', 'json', 'main'])
def test_globals_that_are_no_settings_cannot_be_set(project, name):
    assert f"sets '{name}', which stage.py does not have" in mistake(project, f'--{name}=1')


def test_key_unlike_any_setting_points_to_help(project):
    assert mistake(project, '--zzz=1').endswith('does not have. --help lists its settings.')


# ----------------------------------------------------------------------------- types

@pytest.mark.parametrize('argument, expected', [
    ('--learning_rate=1', 1.0),
    ('--learning_rate=-6e-4', -6e-4),
    ('--max_iters=-1', -1),
    ('--compile=False', False),
    ('--dataset=123', '123'),
    ('--dataset=a=b', 'a=b'),
    ('--dataset=None', 'None'),
    ('--dataset=', ''),
    ('--scale=1.2', 1.2),
    ('--scale=2', 2.0),
    ('--scale=out/x.json', 'out/x.json'),
    ('--scale=None', None),
    ('--lengths=[128,256,512]', [128, 256, 512]),
    ('--lengths=[]', []),
    ('--rates=[1, 0.5]', [1.0, 0.5]),
    ('--rates=None', None),
    ('--betas=(0.9, 0.99)', [0.9, 0.99]),
    ('--sizes=[4]', [4]),
])
def test_command_line_text_becomes_a_value_of_the_settings_type(project, argument, expected):
    name = argument[2:].split('=')[0]
    found = values(project, argument)
    assert found == {**DEFAULTS, name: expected}
    assert repr(found[name]) == repr(expected)  # 1 == 1.0 == True


@pytest.mark.parametrize('argument, message', [
    ('--learning_rate=fast', "'learning_rate' to 'fast', but it must be of type float."),
    ('--learning_rate=True', "'learning_rate' to True, but it must be of type float."),
    ('--max_iters=True', "'max_iters' to True, but it must be of type int."),
    ('--max_iters=1e3', "'max_iters' to 1000.0, but it must be of type int."),
    ('--max_iters=None', "'max_iters' to None, but it must be of type int."),
    ('--compile=1', "'compile' to 1, but it must be True or False."),
    ('--compile=false', "'compile' to 'false', but it must be True or False."),
    ('--lengths=128', "'lengths' to 128, but it must be of type list[int]."),
    ('--lengths=[128, 0.5]', "'lengths' to [128, 0.5], but it must be of type list[int]."),
    ('--lengths=[True]', "'lengths' to [True], but it must be of type list[int]."),
    ('--rates=["a"]', "'rates' to ['a'], but it must be of type list[float] | None."),
    ('--sizes=["a"]', "'sizes' to ['a'], but it must be of type list[int]."),
])
def test_wrong_type_names_setting_value_type_and_origin(project, argument, message):
    assert mistake(project, argument) == 'the command line sets ' + message


@pytest.mark.parametrize('text, message', [
    ("learning_rate = '1e-3'", "'learning_rate' to '1e-3', but it must be of type float."),
    ('max_iters = 2.0', "'max_iters' to 2.0, but it must be of type int."),
    ('max_iters = False', "'max_iters' to False, but it must be of type int."),
    ('dataset = 123', "'dataset' to 123, but it must be of type str."),  # only the command line spells text as 123
    ('scale = [1.0]', "'scale' to [1.0], but it must be of type float | str | None."),
])
def test_wrong_type_in_config_file_names_the_file(project, text, message):
    (project / 'config/toy.py').write_text(text)
    assert mistake(project, 'config/toy.py') == 'config/toy.py sets ' + message


def test_ints_in_config_file_become_floats_where_floats_are_wanted(project):
    (project / 'config/toy.py').write_text('learning_rate = 1\nscale = 2\nrates = [1, 2]\n')
    found = values(project, 'config/toy.py')
    assert [repr(found[name]) for name in ('learning_rate', 'scale', 'rates')] == ['1.0', '2.0', '[1.0, 2.0]']


# ----------------------------------------------------------------------------- other arguments

def test_other_arguments_are_refused_where_there_is_no_paths_setting(project):
    for argument in 'book.txt', 'config', 'config/toy.yaml', '--compile', '-max_iters=3':
        assert mistake(project, argument) == (
            f"'{argument}' is neither config/FILE.py nor --key=value.")


def test_other_arguments_are_appended_to_paths_where_there_is_one(project):
    (project / 'stage.py').write_text(WITH_PATHS)
    found = values(project, 'book.txt', '--max_iters=7', 'source/code.py')
    assert found == {'paths': ['first.txt', 'book.txt', 'source/code.py'], **DEFAULTS, 'max_iters': 7}


def test_missing_config_file_names_where_it_was_looked_for(project, tmp_path):
    message = mistake(project, 'config/none.py', cwd=tmp_path)
    assert message.startswith(f'There is no config/none.py in {tmp_path} or in the project.')


@pytest.mark.parametrize('text, error', [
    ('max_iters = = 3', 'SyntaxError: invalid syntax'),
    ('max_iters = 1 / 0', 'ZeroDivisionError: division by zero'),
    ("raise ValueError('two\\nlines')", 'ValueError: two lines'),
])
def test_config_file_that_fails_is_named_with_its_error(project, text, error):
    (project / 'config/bad.py').write_text(text)
    message = mistake(project, 'config/bad.py')
    assert message.startswith(f'config/bad.py stopped with {error}')


# ----------------------------------------------------------------------------- help

def test_help_shows_docstring_and_every_setting_with_default_and_comment(project):
    done = run(project, '--max_iters=5', '--help')
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout.splitlines() == [
        'Train a toy.', '', '$ python stage.py config/toy.py', '',
        *STAGE[STAGE.index('# settings'):STAGE.index('_private')].splitlines()]
    assert run(project, '-h').stdout == done.stdout


def test_help_works_without_docstring_or_settings(project):
    stage_that(project, 'pass')
    done = run(project, '--help')
    assert (done.returncode, done.stderr) == (0, '')


# ----------------------------------------------------------------------------- uncaught errors

def traceback_of(project, status=1):
    done = run(project)
    assert done.returncode == status and done.stderr.startswith('Traceback'), done.stderr
    return done.stderr


@pytest.mark.parametrize('action', [
    "raise ValueError('target_length is 1.\\n  Choose 2.')",
    "raise ValueError(\n        'target_length is 1. '\n        'Choose 2.'\n    )",
    "raise FileNotFoundError('target_length is 1. Choose 2.')",
])
def test_users_mistake_is_one_line_and_exit_status_1(project, action):
    stage_that(project, action)
    assert mistake(project) == 'target_length is 1. Choose 2.'


def test_users_mistake_found_by_a_helper_is_one_line(project):
    stage_that(project, 'helper.check()', helper="def check():\n    raise ValueError('no such task')\n")
    assert mistake(project) == 'no such task'


def test_file_that_our_code_cannot_open_is_one_line(project):
    stage_that(project, "open('none.bin')")
    assert mistake(project) == "[Errno 2] No such file or directory: 'none.bin'"


@pytest.mark.parametrize('action, error', [
    ("{}['key']", 'KeyError'),
    ("assert False, 'ours'", 'AssertionError: ours'),
    ("raise RuntimeError('ours')", 'RuntimeError: ours'),
    ("json.loads('{')", 'json.decoder.JSONDecodeError'),  # a ValueError, raised inside the standard library
    ("first, second = [1, 2, 3]", 'ValueError: too many values'),  # raised in our line, but nobody wrote a message
])
def test_bug_keeps_its_traceback(project, action, error):
    stage_that(project, action)
    shown = traceback_of(project)
    assert error in shown and 'stage.py", line' in shown


def test_error_inside_a_virtual_environment_of_the_project_keeps_its_traceback(project):
    packages = project / '.venv/lib/python3/site-packages'
    packages.mkdir(parents=True)
    (packages / 'package.py').write_text("def call():\n    raise ValueError('theirs')\n")
    stage_that(project, f'sys.path.append({str(packages)!r}); import package; package.call()')
    assert 'ValueError: theirs' in traceback_of(project)


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='needs /dev/full, a file on a full disk (Linux)')
def test_full_disk_is_one_line_wherever_it_is_met(project):
    stage_that(project, "from pathlib import Path; Path('/dev/full').write_text('x')")  # raised inside pathlib
    assert mistake(project) == '[Errno 28] No space left on device'
    stage_that(project, "raise OSError(28, 'No space left on device', 'out/last.pt')")
    assert mistake(project) == "[Errno 28] No space left on device: 'out/last.pt'"


def test_out_of_gpu_memory_names_the_setting_to_lower(project, tmp_path):
    library = 'class OutOfMemoryError(RuntimeError):\n    pass\n\ndef allocate():\n    raise OutOfMemoryError("CUDA")\n'
    (tmp_path / 'library.py').write_text(library)
    stage_that(project, f'sys.path.append({str(tmp_path)!r}); import library; library.allocate()')
    assert mistake(project) == ('out of GPU memory. Lower micro_batch_size, batch_tokens or batch_size, or set '
                                '--checkpoint_activations=True, as the stage has them; see --help.')


def test_interrupt_is_one_line(project):
    handler = 'signal.signal(signal.SIGINT, signal.default_int_handler)'  # a background job inherits none
    stage_that(project, f'{handler}; os.kill(os.getpid(), signal.SIGINT)')
    assert mistake(project, status=-signal.SIGINT) == 'interrupted'
