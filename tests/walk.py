"""
The reader's load: what somebody opens who wants to understand a command.

$ python tests/walk.py     # prints files and tokens that the main stages import at their start, the
                           # functions from main() of train.py to the first forward pass, and those
                           # of one step of its loop

A token is one of Python's own tokenizer, without comments and docstrings.
"""

import io
import subprocess
import sys
import tempfile
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SKIP = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
        tokenize.ENDMARKER}
ENDS = {tokenize.NEWLINE, tokenize.ENDMARKER}
IMPORTED = '''
import sys
sys.path.insert(0, '.')
for stage in {stages}:
    __import__(stage)
for module in list(sys.modules.values()):
    print(getattr(module, '__file__', None))
'''


def count_tokens(path):
    """Tokens of a Python file, without comments and docstrings."""
    source = Path(path).read_text(encoding='utf-8')
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    count = 0
    for before, token, after in zip([tokens[-1], *tokens], tokens, [*tokens[1:], tokens[-1]]):
        is_alone = before.type in SKIP and after.type in ENDS
        count += token.type not in SKIP and not (token.type == tokenize.STRING and is_alone)
    return count


def imported(*stages):
    """{file of the project: its tokens} that a process imports at its start."""
    run = subprocess.run([sys.executable, '-c', IMPORTED.format(stages=stages)], cwd=ROOT,
                         capture_output=True, text=True, check=True)
    paths = [Path(line) for line in run.stdout.split() if line.endswith('.py')]
    own = [path for path in paths if path.is_relative_to(ROOT) and '.venv' not in path.parts]
    return {str(path.relative_to(ROOT)): count_tokens(path) for path in own}


def training_calls():
    """
    The functions of the project that training calls, [(file, name)], in the order of the calls,
    of two steps of a tiny model. Lambdas and comprehensions are part of what holds them.
    """
    sys.path.insert(0, str(ROOT))
    from configurator import configure

    import train
    from position import Settings
    from tokenizer import get_tokenizer, write_dataset
    calls = []

    def on_event(frame, event, arg):
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname
        if event == 'call' and path.parent == ROOT and not name.endswith('>'):
            calls.append((path.name, name))

    with tempfile.TemporaryDirectory() as folder:
        text = [Path(__file__).read_text()] * 3
        write_dataset(folder, get_tokenizer('bytes'), {'train': text, 'val': text})
        sys.argv = ['train.py', f'--dataset={folder}', f'--out_dir={folder}/run', '--max_iters=2',
                    '--n_layer=2', '--eval_windows=4', '--compile=False', '--device=cpu']
        given = configure(vars(train), Settings)
        sys.setprofile(on_event)
        try:
            train.main(given)
        finally:
            sys.setprofile(None)
    return calls


def crossed():
    """
    The distinct functions before the first forward pass of training, and those of its first step.
    """
    calls = training_calls()
    forward = [i for i, (_, name) in enumerate(calls) if name == 'Transformer.forward']
    return dict.fromkeys(calls[:forward[0]]), dict.fromkeys(calls[forward[0]:forward[1]])


def main():
    for stages in ['train'], ['train', 'tune_scale', 'eval_ppl']:
        files = imported(*stages)
        print(f"{' + '.join(stages)}: {len(files)} files, {sum(files.values()):,} tokens")
        print('   ', ', '.join(f'{name} {n:,}' for name, n in files.items()))
    for what, functions in zip(('before the first forward pass', 'of one step'), crossed()):
        print(f'functions {what}: {len(functions)} in {len({file for file, _ in functions})} files')
        print('   ', ', '.join(f'{file} {name}' for file, name in functions))


if __name__ == '__main__':
    main()
