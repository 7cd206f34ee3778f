"""
Every command that the project shows names a stage and config files that exist, and settings that
the stage has. Commands stand in READMEs, run.sh, config files and docstrings.

$ python -m pytest tests/test_commands.py
"""

import ast
import functools
import itertools
import os
import re
import runpy
import shlex
import subprocess
import sys

import pytest
from conftest import ROOT

from configurator import configure, run_config, settings
from position import Settings

PAGES = sorted([*ROOT.glob('*.md'), *ROOT.glob('results/**/*.md'), *ROOT.glob('lessons/*.md')])
CONFIGS = sorted(ROOT.glob('config/**/*.py'))
PROGRAMS = ['*.py', 'data/*/prepare.py', 'results/**/*.py']
STAGES = sorted(path for pattern in PROGRAMS for path in ROOT.glob(pattern))
RUNS = sorted(ROOT.glob('results/*/run.sh'))


def name_of(path):
    return str(path.relative_to(ROOT))


# ------------------------------------------------------------------- find commands

def command_of(words):
    """(program, arguments) if the words are a command of ours; else None."""
    launched = words[:1] in (['torchrun'], ['python'], ['python3'])
    words = [*itertools.dropwhile(lambda word: word.startswith('--'), words[launched:])]
    if words[:1] == ['-m'] and '.' in words[1]:
        words = [words[1].replace('.', '/') + '.py', *words[2:]]
    if words[:1] == ['results/study.py']:  # by results/train.sh
        words = ['train.py', *words[2:], f'--out_dir={words[1]}']
    if words and words[0].endswith('.py'):
        return words[0], [word for word in words[1:] if word != '...']


def commands_in(lines):
    """Our commands in lines of a shell. A line with a placeholder, such as NAME, has none."""
    found = []
    for line in lines:
        if not re.search(r'\b(STAGE|FILE|NAME|ORG)\b|_X\b', line):
            words = shlex.split(line, comments=True)
            groups = itertools.groupby(words, lambda word: word == '&&')
            found += [command_of([*group]) for is_and, group in groups if not is_and]
    return filter(None, found)


def shell_lines(path):
    """The lines of a page or a Python file that a reader may type."""
    text = path.read_text(encoding='utf-8')
    if path.suffix == '.md':
        blocks = '\n'.join(re.findall(r'```sh\n(.*?)```', text, re.DOTALL))
        lines = re.sub(r'\\\n', ' ', blocks).splitlines()
        spans = re.findall(r'`((?:python|torchrun|[\w/]+\.py)\s[^`]*)`', text)
        return lines + [' '.join(span.split()) for span in spans]
    text = re.sub(r'\\+\n[# ]*', ' ', text)
    return re.findall(r'^[#$] ((?:python|torchrun) .*)', text, re.MULTILINE)


def commands_run(script, folder):
    """The commands that a run.sh starts in a folder with only the results of `make demo`."""
    for name in 'nope', 'rope':
        (folder / f'out/demo/{name}').mkdir(parents=True)
        (folder / f'out/demo/{name}/loss.png').touch()
    log, python = folder / 'log', folder / 'python'
    python.write_text(f"#!/bin/bash\nprintf '%s\\x1f' python \"$@\" >> {log}; echo >> {log}\n")
    python.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    subprocess.run(['bash', str(script)], cwd=folder, env=os.environ | {'PATH': path}, check=True)
    lines = log.read_text().split('\x1f\n')[:-1]
    return [*filter(None, (command_of(line.split('\x1f')) for line in lines))]


# ------------------------------------------------------------------- check them

@functools.cache
def stage(program):
    """The names that a stage defines, and what else its configure() is given."""
    path = ROOT / program
    assert path.is_file(), f'there is no {program}'
    scope = runpy.run_path(str(path))
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if (isinstance(node, ast.Call) and getattr(node.func, 'id', '') == 'configure'
                and ast.unparse(node.args[0]) == 'globals()'):
            given, *more = [eval(ast.unparse(argument), scope) for argument in node.args]
            return given | {'TABLES': scope.get('TABLES', ())}, more
    return scope, None


@pytest.fixture
def check(monkeypatch):
    """A function that parses commands as their stages do. It raises UserError for a mistake."""
    def check(commands):
        monkeypatch.setattr(sys, 'excepthook', sys.excepthook)
        for program, arguments in commands:
            scope, more = stage(program)
            if more is not None:  # lib/plots.py takes the names of files
                tables = scope['TABLES']
                arguments = [f'--table={word}' if word in tables else word for word in arguments]
                monkeypatch.setattr(sys, 'argv', [program, *arguments])
                configure(dict(scope), *more)
    return check


@pytest.mark.parametrize('path', [*PAGES, *CONFIGS, *STAGES], ids=name_of)
def test_commands_shown(path, check):
    check(commands_in(shell_lines(path)))


def test_commands_are_found_on_the_pages():
    found = {path: [*commands_in(shell_lines(path))] for path in [*PAGES, *CONFIGS, *STAGES]}
    assert sum(map(len, found.values())) > 250 and len(found[ROOT / 'README.md']) > 20


@pytest.mark.skipif(os.name == 'nt', reason='a study is run by bash')
@pytest.mark.parametrize('path', RUNS, ids=name_of)
def test_commands_of_run_sh(path, check, tmp_path):
    commands = commands_run(path, tmp_path)
    assert commands
    check(commands)


@pytest.mark.parametrize('path', CONFIGS, ids=name_of)
def test_config_sets_what_one_stage_has(path):
    names, methods = run_config(str(path)).keys(), vars(Settings()).keys()
    scopes = [stage(program)[0] for program in ('train.py', 'tune_scale.py', 'che.py', 'demo.py')]
    assert any(names <= settings(scope).keys() | methods for scope in scopes)


# ------------------------------------------------------------------- the settings that stages share

# Settings that have another meaning, or another default for a reason.
EXCEPTIONS = '''
train.py          | out_dir init_from position dataset device dtype | It makes the models.
che.py            | out_dir position label | It makes its own models.
bench.py          | out_dir position device dtype | It makes its own models, on a CPU or CUDA.
demo.py           | out_dir | It is the folder of three runs.
tune_scale.py     | label | The name of the result also holds the length.
entropy.py        | dtype | Entropy needs float32.
attention_maps.py | dtype | Score maps need float32.
export.py         | dtype | It is the dtype of what is written.
'''


def setting_lines(path):
    """{name: source line} of the assignments at the top level of a file."""
    text = path.read_text(encoding='utf-8')
    lines = re.findall(r'^(([a-z]\w*)(?:: .+?)? = .*)', text, re.MULTILINE)
    return {name: line for line, name in lines}


def test_a_shared_setting_has_the_same_line_in_every_stage():
    rows = [row.split('|') for row in EXCEPTIONS.strip().splitlines()]
    exceptions = {name.strip(): names.split() for name, names, _ in rows}
    shared = setting_lines(ROOT / 'lessons/evaluation.py')
    del shared['lengths'], shared['n_samples']
    for path in [*ROOT.glob('*.py'), *ROOT.glob('lessons/*.py')]:
        names = setting_lines(path).keys() - exceptions.get(path.name, [])
        wanted = [line for name, line in shared.items() if name in names]
        text = path.read_text(encoding='utf-8')
        found = [line for line in text.splitlines() if line in wanted]
        assert found == wanted, path.name
        assert len(found) < 2 or '\n# which model, text and device\n' in text
