"""
nanoGPT's configurator, but strict. The settings of a stage are the lower-case globals of its file
that hold values, such as `max_iters = 200`. A stage calls configure(globals()) just before main().

$ python STAGE.py [config/FILE.py ...] [--key=value ...]   # reads files in order, then keys
$ python STAGE.py --help                                   # lists the settings

A config file is Python code and runs in its own namespace. Names of its helper variables start with
an underscore.
"""

import ast
import difflib
import inspect
import os
import re
import runpy
import sys
import types
from dataclasses import fields
from pathlib import Path

ROOT = Path(__file__).resolve().parent
# How often a thread of PyTorch looks whether the others are done before it sleeps. By the default,
# 300000, one other busy process makes training on a CPU 6 times slower. The OpenMP library reads
# this when torch is imported, so each stage imports this file first.
os.environ.setdefault('GOMP_SPINCOUNT', '10000')


class UserError(SystemExit):
    """A mistake that the user can mend. Python prints its text and ends with exit status 1."""


def show_error(kind, error, trace):
    """Python's own message, and how to install what only some stages need."""
    sys.__excepthook__(kind, error, trace)
    if kind is ModuleNotFoundError:
        print('Install the packages that only some stages need: pip install ".[dev]"')


sys.excepthook = show_error


def settings(scope):
    """{setting: present value} of a stage or config file, in source order."""
    return {name: value for name, value in scope.items()
            if name.islower() and name[0] != '_' and not callable(value)
            and not isinstance(value, types.ModuleType)}


def fit(value, kind):
    """`value` as a `kind`, such as float | None or list[int]; an int becomes a float if it must."""
    # each type of a union such as float | None, in order, or the one type
    for member in kind.__args__ if isinstance(kind, types.UnionType) else [kind]:
        if type(value) is member:  # not isinstance: True is an instance of int
            return value
        if member is float and type(value) is int:
            return float(value)
        if isinstance(member, types.GenericAlias) and type(value) is list:
            return [fit(element, member.__args__[0]) for element in value]
    raise TypeError(f'it must be of type {kind.__name__ if isinstance(kind, type) else kind}')


def parse(text, kind):
    """
    A value of the command line as a `kind`; a str needs no quotes. As float | str | None, '1' is
    1.0, 'None' is None and 'x' is 'x'; as an int, 'x' raises TypeError.
    """
    try:
        return text if kind is str else fit(ast.literal_eval(text), kind)
    except (ValueError, SyntaxError, TypeError):
        return fit(text, kind)


def run_config(name):
    """The settings that a config file makes. It is searched here, then in the project's folder."""
    path = name if Path(name).is_file() else ROOT / name
    return settings(runpy.run_path(str(path)))


def show_help(scope, known, declared):
    """Print a stage's docstring, and of each setting the source line with its comment."""
    print(scope['__doc__'].strip() + '\n')
    source = Path(scope['__file__']).read_text(encoding='utf-8')
    if declared:
        source += inspect.getsource(declared)
    for name in known:
        # lines that are indented far belong to the one before, such as those of a long comment
        print(re.search(rf'(?m)^ *({name}(: .+)? = .+(\n {{8,}}.+)*)', source)[1])
    sys.exit()


def configure(scope, declared=None):
    """
    Set the settings in a stage's globals() from its command line. declared: a dataclass whose
    fields are settings, too, such as position.Settings. Returns the names of the settings that
    were given. A setting `paths`, where a stage has it, takes all that is not --key=value.
    """
    # {setting: type} of those with an annotation, such as x: int | None = None. Not
    # scope['__annotations__'], which from Python 3.14 on is made only when the module is asked.
    kinds = sys.modules[scope['__name__']].__annotations__
    for one in fields(declared) if declared else ():
        scope.setdefault(one.name, one.default)  # where both have one, the stage's default counts
        kinds = {one.name: one.type} | kinds
    known, given = settings(scope), set()
    if {'-h', '--help'} & {*sys.argv}:
        show_help(scope, known, declared)
    for word in sorted(sys.argv[1:], key=lambda word: word.startswith('--')):  # first the files
        name, equals, text = word.partition('=')
        if name.startswith('--') and equals:
            values, convert = {name[2:]: text}, parse
        elif 'paths' in known and not name.startswith('-'):
            values, convert = {'paths': [*scope['paths'], word]}, fit
        elif word.endswith('.py'):
            values, convert = run_config(word), fit
        else:
            raise UserError(f"'{word}' is neither config/FILE.py nor --key=value.")
        for name, value in values.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                advice = f"Did you mean '{near[0]}'?" if near else '--help lists the settings.'
                raise UserError(f"{Path(scope['__file__']).name} has no setting '{name}'. {advice}")
            try:
                scope[name] = convert(value, kinds.get(name, type(known[name])))
            except TypeError as error:
                raise UserError(f'{name} is {value!r}, but {error}.') from None
            given.add(name)
    return given
