"""
Every command that pages, docstrings and config files show names a program that exists, and settings
that it has.

$ python -m pytest tests/test_commands.py
"""

import importlib
import re
import shlex
import sys
from dataclasses import fields

from configurator import ROOT, configure, run_config, settings

import pytest

from position import Settings

CONFIGS = sorted(ROOT.glob('config/**/*.py'))
PATTERNS = '*.md', '*/*.md', 'results/*/*.md', '*.py', 'extras/*.py', 'data/*/*.py'
FILES = [path for pattern in PATTERNS for path in sorted(ROOT.glob(pattern))] + CONFIGS
COMMAND = re.compile(r'(?:torchrun|python3?) (?:--\S+ )*(?:-m )?(\w[\w./]*)(.*)')


def name_of(path):
    return str(path.relative_to(ROOT))


def check(line, monkeypatch):
    """Raises UserError for settings that a stage lacks. line: a command, with its launcher."""
    command = COMMAND.match(line)
    if not command or '.' not in command[1]:
        return  # a program of others
    program, rest = command.groups()
    name = program.removesuffix('.py').replace('.', '/')
    assert (ROOT / f'{name}.py').is_file(), program
    stage = None if 'data/' in name else importlib.import_module(name.replace('/', '.'))
    if hasattr(stage, 'configure'):
        words = [word for word in shlex.split(rest, comments=True) if word != '...']
        monkeypatch.setattr(sys, 'argv', [program, *words])
        configure(dict(vars(stage)), vars(stage).get('Settings'))


@pytest.mark.parametrize('path', FILES, ids=name_of)
def test_commands_shown(path, monkeypatch):
    text = re.sub(r'\\+\n[#$ ]*', '', path.read_text(encoding='utf-8'))
    for line in re.findall(r'(?m)(?:^[#$ ]*|`)((?:torchrun|python3?) .*?)(?:`|$)', text):
        if not re.search(r'\b[A-Z]{4,}\b', line):  # a placeholder
            check(line, monkeypatch)


@pytest.mark.parametrize('path', CONFIGS, ids=name_of)
def test_a_config_file_sets_what_one_stage_has(path):
    names, methods = run_config(str(path)).keys(), {one.name for one in fields(Settings)}
    stages = map(importlib.import_module, ('train', 'tune_scale', 'extras.che', 'demo'))
    assert any(names <= settings(vars(stage)).keys() | methods for stage in stages)
