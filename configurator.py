"""
nanoGPT's configurator, but strict. The settings of a stage are the lower-case globals of its file
that hold values, such as `max_iters = 200`. A stage calls configure(globals()) just before main().
A stage that trains calls configure(globals(), position.Settings): it then also has the settings of
single position methods, such as rope_base.

$ python STAGE.py [config/FILE.py ...] [--key=value ...]   # reads files in order, then keys
$ python STAGE.py --help                                   # lists the settings

A config file is Python code and runs in its own namespace. Names of its helper variables start with
an underscore.
"""

import ast
import contextlib
import dataclasses
import difflib
import inspect
import runpy
import sys
import types
from pathlib import Path

from lib.errors import ROOT, UserError, report

# What ast.literal_eval() raises for text that is no Python value, such as {{}}
UNREADABLE = ValueError, TypeError, SyntaxError, RecursionError, MemoryError


def settings(scope):
    """{setting: present value} of a stage or config file, in source order."""
    return {name: value for name, value in scope.items()
            if name.islower() and name[0] != '_' and not callable(value)
            and not isinstance(value, types.ModuleType)}


def annotations(scope):
    """{name: type} of the annotated globals of a stage."""
    if '__annotate__' in scope:  # from Python 3.14 on, a function returns them (PEP 649)
        return scope['__annotate__'](1)
    return scope.get('__annotations__', {})


def between(scope, least, *names, most=2 ** 63 - 1, why=''):
    """
    Raise UserError unless each of these settings lies between `least` and `most`. A setting is a
    number, a list of numbers, or None, which always passes. scope: globals(); why: what `least` is.
    numpy and torch accept no size beyond 2^63 - 1.
    """
    for name in names:
        value = scope[name]
        numbers = value if isinstance(value, list) else [value]
        if value is not None and not all(least <= number <= most for number in numbers):
            reason = f', {why}' if why else ''
            bound = f'at most {most}' if max(numbers) > most else f'at least {least}{reason}'
            raise UserError(f'{name} is {value}; it must be {bound}.')


def ignored_settings(given, own, choice):
    """
    The settings that the user gave and that a choice does not read, sorted. own: {choice: the
    settings that some other choice does not have}.
    """
    return sorted(({*given} & set().union(*own.values())) - own[choice])


def fit(value, kind):
    """
    Return value if it has the type `kind`, such as float | None or list[int]; else raise TypeError.
    If `kind` takes a float, an int becomes a float.
    """
    for member in kind.__args__ if isinstance(kind, types.UnionType) else [kind]:
        if type(value) is member:  # not isinstance: True is an instance of int
            return value
        if member is float and type(value) is int:
            return float(value)
        if isinstance(member, types.GenericAlias) and type(value) is list:
            return [fit(element, member.__args__[0]) for element in value]
    raise TypeError


def run_config(name):
    """
    Execute a config file and return its settings. The file is searched in the current folder first,
    then in the project's folder.
    """
    path = next((path for path in (Path(name), ROOT / name) if path.is_file()), None)
    if path is None:
        raise UserError(f'There is no {name} in {Path.cwd()} or in the project. Check the name.')
    try:
        scope = runpy.run_path(str(path))
        for other, value in scope.items():
            is_mixed = not (other.islower() or other.isupper())
            if other[0] != '_' and is_mixed and not callable(value):
                raise ValueError(f"it sets '{other}'. Settings are lower-case, and names of helper "
                                 'variables start with an underscore')
        return settings(scope)
    except Exception as error:
        raise UserError(f'{name} stopped with {type(error).__name__}: {error}. '
                        'Correct the file.') from error


def show_help(scope, known, declared=None):
    """Print a stage's docstring and the source lines of its settings, comments included."""
    source = Path(scope['__file__']).read_text(encoding='utf-8')
    lines, rows, own = source.splitlines(), [], set()
    for node in ast.parse(source).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, 'target', None)
        if isinstance(target, ast.Name) and target.id in known:
            rows.append(node)
            own.add(target.id)
    start = rows[0].lineno - 1 if rows else 0
    while start and lines[start - 1].startswith('#'):
        start -= 1
    shown = lines[start:rows[-1].end_lineno if rows else 0]
    if declared:
        shown += [line.strip() for line in inspect.getsource(declared).splitlines()
                  if line.partition(':')[0].strip() in known.keys() - own]
    print((scope['__doc__'] or '').strip(), '\n'.join(shown), sep='\n\n')
    sys.exit()


def arguments(scope, known, words):
    """Yield (source, name, [possible values]) for each setting that the command line gives."""
    for argument in sorted(words, key=lambda argument: '=' in argument):  # files first
        name, equals, text = argument.partition('=')
        if name.startswith('--') and equals:
            values = [text]
            with contextlib.suppress(*UNREADABLE):
                values.insert(0, ast.literal_eval(text))  # keep the text, too: a str can be '123'
            yield 'the command line', name[2:], values
        elif 'paths' in known and not name.startswith('-'):
            scope['paths'] = [*scope['paths'], argument]
        elif argument.endswith('.py'):
            for name, value in run_config(argument).items():
                yield argument, name, [value]
        else:
            raise UserError(f"'{argument}' is neither config/FILE.py nor --key=value.")


def configure(scope, declared=None, words=None):
    """
    Set the settings in a stage's globals() from its command line, and make report() show uncaught
    errors. declared: a dataclass whose fields are settings, too, such as position.Settings. If the
    stage assigns a field itself, that default counts. words: a command line, as a list; None: that
    of the process. Returns the names of the settings that the user gave. Raises UserError with the
    file or key that is wrong.
    """
    sys.excepthook = report
    if hasattr(sys.stdout, 'reconfigure'):  # prints file names that are not UTF-8
        sys.stdout.reconfigure(errors='backslashreplace')
    kinds = annotations(scope)
    for field in dataclasses.fields(declared) if declared else ():
        scope.setdefault(field.name, field.default)
        kinds = {field.name: field.type} | kinds
    known, given, words = settings(scope), set(), sys.argv[1:] if words is None else words
    if {'-h', '--help'} & set(words):
        show_help(scope, known, declared)
    for where, name, values in arguments(scope, known, words):
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            advice = f"Did you mean '{near[0]}'?" if near else '--help lists the settings.'
            stage = Path(scope['__file__']).name
            raise UserError(f"{where} sets '{name}', which {stage} does not have. {advice}")
        kind = kinds.get(name, type(known[name]))
        if kind is str:
            values = values[::-1]  # the text itself, with its quotes
        for value in values:
            with contextlib.suppress(TypeError, OverflowError):
                scope[name] = fit(value, kind)
                given.add(name)
                break
        else:
            wants = f'of type {kind.__name__ if isinstance(kind, type) else kind}'
            if kind is bool:
                wants = 'True or False'
            raise UserError(f"{where} sets '{name}' to {values[0]!r}, but it must be {wants}.")
    return given
