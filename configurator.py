"""
nanoGPT's configurator, strict. The settings of a stage are the literals that its file assigns to lower-case names
before the first def or class; they are plain module globals. A stage calls configure(globals()) just before main().

$ python STAGE.py [config/FILE.py ...] [--key=value ...]   # files in their order, then keys; --help lists the settings

A config file is code and runs as code, in a namespace of its own; its helper variables start with an underscore.
"""

import ast
import difflib
import errno
import io
import sys
import tokenize
import traceback
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def settings(scope):
    """The settings of a stage and their values now, {name: value} in source order. scope: the stage's globals()."""
    return {name: scope[name] for name in declared(scope)}


def declared(scope):
    """{name: (type, comment, headings above)}, all text, in source order. The type: the annotation or the default's."""
    source = Path(scope['__file__']).read_text(encoding='utf-8')
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string.lstrip('# ') for token in tokens if token.type == tokenize.COMMENT}
    found, end = {}, 0
    for node in ast.parse(source).body:
        headings = [comments[line].strip('# -') for line in range(end + 1, node.lineno) if line in comments]
        end, kind = node.end_lineno, None
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                break
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                default = literal(value, otherwise=...)
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=value):
                default, kind = literal(value, otherwise=...), ast.unparse(annotation)
            case _:
                continue
        if name.islower() and not name.startswith('_') and default is not ...:
            assert kind or default is not None, f'{name} = None needs an annotation, such as {name}: str | None = None'
            element = f'[{type(default[0]).__name__}]' if isinstance(default, list) and default else ''
            found[name] = kind or type(default).__name__ + element, comments.get(end, ''), headings
    return found


def literal(source, otherwise):
    """The number, string, list, ... that a text or a syntax tree spells out, or `otherwise` if it is no literal."""
    try:
        return ast.literal_eval(source)
    except (ValueError, SyntaxError):
        return otherwise


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
    names = {'__file__': str(path)}
    try:
        exec(compile(path.read_text(encoding='utf-8'), path, 'exec'), names)
    except Exception as error:
        raise ValueError(f'{name} stopped with {type(error).__name__}: {error}. Correct the file.') from error
    return {key: value for key, value in names.items() if key.islower() and not key.startswith('_')
            and not callable(value) and not isinstance(value, types.ModuleType)}


def print_help(scope, known):
    print((scope['__doc__'] or '').strip())
    shown = {name: f'--{name}={scope[name]!r}' for name in known}
    width = min(40, max(map(len, shown.values()), default=0))
    for name, (_, comment, headings) in known.items():
        print(*[f'\n{heading}\n' for heading in headings if heading], sep='', end='')
        print(f'  {shown[name]:{width}}  {comment}'.rstrip())


def report(error, stage):
    """Print one line for what a user can mend, the whole traceback for a bug. stage: path of the running script."""
    last = traceback.extract_tb(error.__traceback__)[-1]  # where it was raised
    file = Path(last.filename).resolve()
    ours = (file.is_relative_to(ROOT) or file.is_relative_to(stage.parent)) and 'site-packages' not in file.parts
    if isinstance(error, KeyboardInterrupt):
        message = 'interrupted'
    elif isinstance(error, OSError) and error.errno == errno.ENOSPC:
        message = f'no disk space left for {error.filename or "a file"}. Free some space and run the command again.'
    elif type(error).__name__ == 'OutOfMemoryError':  # torch's, by its name: importing torch takes seconds
        message = 'out of GPU memory. Lower micro_batch_size (or set checkpoint_activations=True).'
    elif ours and (isinstance(error, OSError) or isinstance(error, ValueError) and last.line.startswith('raise ')):
        message = ' '.join(str(error).split())  # a ValueError without `raise` came out of C code, say reshape: a bug
    else:
        return sys.__excepthook__(type(error), error, error.__traceback__)
    print(f'{stage.name}: {message}', file=sys.stderr)
    sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def configure(scope):
    """
    Set the settings in a stage's globals() from its command line, and have uncaught errors shown by report().
    Raises ValueError or FileNotFoundError naming the file or key that is wrong.
    """
    stage, known = Path(scope['__file__']).resolve(), declared(scope)
    sys.excepthook = lambda kind, error, trace: report(error, stage)
    if {'-h', '--help'} & set(sys.argv[1:]):
        print_help(scope, known)
        sys.exit()
    files, keys, paths = [], [], []
    for argument in sys.argv[1:]:
        key, equals, text = argument.lstrip('-').partition('=')
        if argument.startswith('--') and equals:
            keys.append(('the command line', key, [literal(text, otherwise=text), text]))  # 123 may be a str: '123'
        elif argument.startswith('-'):
            raise ValueError(f'Write --{key}={text or "value"}, not {argument}.')
        elif argument.endswith('.py') and ('paths' not in known or Path(argument).absolute().parent.name == 'config'):
            files += [(argument, key, [value]) for key, value in run_config(argument).items()]
        elif 'paths' in known:
            paths.append(argument)
        else:
            raise ValueError(f"{stage.name} cannot use '{argument}'. It takes config/FILE.py and --key=value.")
    for where, name, values in files + keys:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            advice = f"Did you mean '{near[0]}'?" if near else '--help lists its settings.'
            raise ValueError(f"{where} sets '{name}', which {stage.name} does not have. {advice}")
        kind = known[name][0]
        for value in values:
            try:
                scope[name] = fit(value, eval(kind))
                break
            except TypeError:
                pass
        else:
            wants = 'True or False' if kind == 'bool' else f'of type {kind}'
            raise ValueError(f"{where} sets '{name}' to {values[0]!r}, but it must be {wants}.")
    if paths:
        scope['paths'] = scope['paths'] + paths
