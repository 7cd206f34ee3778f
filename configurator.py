"""
nanoGPT's configurator, strict. The settings of a stage are the lower-case globals of its file that are values, such as
`max_iters = 200`. A stage calls configure(globals()) just before main().

$ python STAGE.py [config/FILE.py ...] [--key=value ...]   # files in their order, then keys; --help lists the settings

A config file is code and runs as code, in a namespace of its own; its helper variables start with an underscore.
"""

import ast
import contextlib
import difflib
import runpy
import sys
import types
from pathlib import Path

from errors import ROOT, report


def settings(scope):
    """The settings of a stage or config file and their values now, {name: value} in source order. scope: globals()."""
    return {name: value for name, value in scope.items() if name.islower() and name[0] != '_'
            and not callable(value) and not isinstance(value, types.ModuleType)}


def at_least(least, scope, *names, below=2 ** 63):
    """
    Raise ValueError unless these settings in globals(), a number or a list each, are at least
    `least` and less than `below`; None may be. From 2^63 on neither numpy nor torch takes a size.
    """
    for name in names:
        value = scope[name]
        numbers = value if isinstance(value, list) else [value]
        if value is None:
            continue
        if any(number < least for number in numbers):
            raise ValueError(f'{name} is {value}; it must be at least {least}.')
        if not all(number < below for number in numbers):  # nan is not, either
            raise ValueError(f'{name} is {value}; it must be below {below}.')


def fit(value, kind):
    """value if the type `kind` (float | None, list[int], ...) takes it, an int made a float; else raises TypeError."""
    for member in kind.__args__ if isinstance(kind, types.UnionType) else [kind]:
        if type(value) is member:  # not isinstance: True is an instance of int
            return value
        if member is float and type(value) is int:
            return float(value)
        if isinstance(member, types.GenericAlias) and type(value) is list:
            return [fit(element, member.__args__[0]) for element in value]
    raise TypeError


def run_config(name):
    """Execute a config file, found from the current folder or else from the project's. Returns {name: value}."""
    path = next((path for path in (Path(name), ROOT / name) if path.is_file()), None)
    if path is None:
        raise FileNotFoundError(f'There is no {name} in {Path.cwd()} or in the project. Check the name.')
    try:
        return settings(runpy.run_path(str(path)))
    except Exception as error:
        raise ValueError(f'{name} stopped with {type(error).__name__}: {error}. Correct the file.') from error


def configure(scope):
    """
    Set the settings in a stage's globals() from its command line, and have uncaught errors shown by report().
    Returns the names of those that were given.
    Raises ValueError or FileNotFoundError naming the file or key that is wrong.
    """
    sys.excepthook = report
    if hasattr(sys.stdout, 'reconfigure'):  # or a file name that is not UTF-8 could not be printed
        sys.stdout.reconfigure(errors='backslashreplace')
    stage, known, found = Path(scope['__file__']), settings(scope), []
    if {'-h', '--help'} & set(sys.argv):  # the file's docstring, and the lines from the first setting to the last
        source = stage.read_text(encoding='utf-8')
        rows = [node for node in ast.parse(source).body if isinstance(node, ast.Assign | ast.AnnAssign)
                and ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target) in known]
        lines, start = source.splitlines(), rows[0].lineno - 1 if rows else 0
        while start and lines[start - 1].startswith('#'):
            start -= 1
        print((scope['__doc__'] or '').strip(), '\n'.join(lines[start:rows[-1].end_lineno if rows else 0]), sep='\n\n')
        sys.exit()
    for argument in sorted(sys.argv[1:], key=lambda argument: '=' in argument):  # files before keys
        name, equals, text = argument.partition('=')
        if name.startswith('--') and equals:
            found.append(('the command line', name[2:], [text]))
            with contextlib.suppress(ValueError, SyntaxError):
                found[-1][2].insert(0, ast.literal_eval(text))  # but 123 may be a str: '123'
        elif 'paths' in known and not name.startswith('-'):
            scope['paths'] = [*scope['paths'], argument]
        elif argument.endswith('.py'):
            found += [(argument, name, [value]) for name, value in run_config(argument).items()]
        else:
            raise ValueError(f"'{argument}' is neither config/FILE.py nor --key=value.")
    for where, name, values in found:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ValueError(f"{where} sets '{name}', which {stage.name} does not have. "
                             + (f"Did you mean '{near[0]}'?" if near else '--help lists its settings.'))
        kind = scope.get('__annotations__', {}).get(name, type(known[name]))
        for value in values:
            with contextlib.suppress(TypeError):
                scope[name] = fit(value, kind)
                break
        else:
            wants = 'True or False' if kind is bool else f'of type {kind.__name__ if isinstance(kind, type) else kind}'
            raise ValueError(f"{where} sets '{name}' to {values[0]!r}, but it must be {wants}.")
    return {name for _, name, _ in found}
