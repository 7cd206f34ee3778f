"""
nanoGPT's configurator, strict. The settings of a stage are the lower-case names that its file assigns before the first
def or class; they are plain module globals. A stage calls configure(globals()) just before main().

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
    """The settings of a stage and their values now, {name: value} in source order. scope: the stage's globals()."""
    return {name: scope[name] for name in declared(scope)[0]}


def declared(scope):
    """{setting: its type, from the annotation or else the default}, and the lines of the file that assign them."""
    source, kinds, lines, end = Path(scope['__file__']).read_text(encoding='utf-8'), {}, [], 0
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            break
        name = getattr(getattr(node, 'target', None) or getattr(node, 'targets', [None])[0], 'id', '_')
        if name.islower() and name[0] != '_':
            kinds[name] = scope.get('__annotations__', {}).get(name, type(scope[name]))
            lines += source.splitlines()[end:node.end_lineno]  # with the comments above
        end = node.end_lineno
    return kinds, lines


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
        raise FileNotFoundError(f'{name} is neither in {Path.cwd()} nor in {ROOT}. Check the name of the config file.')
    try:
        names = runpy.run_path(str(path))
    except Exception as error:
        raise ValueError(f'{name} stopped with {type(error).__name__}: {error}. Correct the file.') from error
    return {key: value for key, value in names.items() if key.islower() and key[0] != '_'
            and not callable(value) and not isinstance(value, types.ModuleType)}


def configure(scope):
    """
    Set the settings in a stage's globals() from its command line, and have uncaught errors shown by report().
    Raises ValueError or FileNotFoundError naming the file or key that is wrong.
    """
    sys.excepthook = report
    stage, (known, lines), found = Path(scope['__file__']).name, declared(scope), []
    if {'-h', '--help'} & set(sys.argv):
        print((scope['__doc__'] or '').strip(), '\n'.join(lines).strip('\n'), sep='\n\n')
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
            raise ValueError(f"{stage} cannot use '{argument}'. It takes config/FILE.py and --key=value.")
    for where, name, values in found:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ValueError(f"{where} sets '{name}', which {stage} does not have. "
                             + (f"Did you mean '{near[0]}'?" if near else '--help lists its settings.'))
        for value in values:
            with contextlib.suppress(TypeError):
                scope[name] = fit(value, known[name])
                break
        else:
            kind = known[name].__name__ if isinstance(known[name], type) else known[name]
            wants = 'True or False' if kind == 'bool' else f'of type {kind}'
            raise ValueError(f"{where} sets '{name}' to {values[0]!r}, but it must be {wants}.")
