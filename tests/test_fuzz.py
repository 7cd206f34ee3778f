"""
Random command lines: whatever a user gives, a stage does its work or refuses in one line.

$ python -m pytest -m slow tests/test_fuzz.py

Left out are demo.py and bench.py, which start other stages and run for minutes, and commonsense.py,
which asks the network for its questions.
"""

import contextlib
import importlib
import io
import random
import shutil

import pytest
from conftest import SIZES, as_stage, stage_here

from configurator import settings
from lib.errors import report

# What makes each stage small; {names} are of `files`. A case changes or adds some.
READ = 'init_from={last.pt} out_dir=out device=cpu dtype=float32 '
STAGES = {
    'train': SIZES.replace('--', '') + (
        ' dataset={corpus} out_dir=out max_iters=2 batch_size=2 micro_batch_size=2 eval_windows=2 '
        'device=cpu compile=False'),
    'tune_scale': READ + (
        'max_iters=2 batch_size=2 micro_batch_size=2 init_scale=1.2 n_samples=2 target_length=64 '
        'candidate_range=[1.0,2.0,0.5] compile=False'),
    'eval_ppl': READ + 'lengths=[32,64] max_windows=2 n_samples=2',
    'entropy': READ + 'length=64 n_samples=2',
    'attention_maps': READ + 'lengths=[32] n_samples=1',
    'passkey': READ + 'max_length=300 n_lengths=1 n_depths=1 n_keys=1',
    'longbench': READ + 'data=nowhere',
    'sample': READ + 'max_new_tokens=3',
    'export': 'init_from={last.pt} out_dir=out folder=hf',
    'che': ('out_dir=out n_layer=1 n_head=2 n_embd=16 max_iters=2 n_test=2 batch_size=2 '
            'train_length=8 test_length=12 device=cpu'),
}
NUMBERS = [-1, 0, 1, 3, 10 ** 20, -1.0, 0.5, 1e39, 1e999]
WORDS = ['', 'nowhere', 'a:b', 'yarn:2', 'rope', 'none', 'ä\udcff', 'None', 'True', 'x' * 300]
LISTS = [[], [0], [1, 2, 3], [-3, 32], [10 ** 20], ['x'], [[1]], [1.0, 2.0, 0.1]]
SLOW = {'compile'}  # is not tried


@pytest.fixture(scope='module')
def files(tiny_run, corpus_dir, tmp_path_factory):
    """Files and folders of all kinds, and some that are not there."""
    folder = tmp_path_factory.mktemp('files')
    whole, noise = (tiny_run / 'last.pt').read_bytes(), random.Random(0).randbytes(3000)
    contents = {
        'last.pt': whole,
        'cut.pt': whole[:len(whole) // 2],
        'noise.pt': noise,
        'noise.json': noise,
        'empty.json': b'',
        'list.json': b'[1, 2]',
        'number.json': b'3',
        'deep.json': b'[' * 100_000,
        'other.json': b'{"stage": "entropy", "head_scale": {}, "weights_digest": 5}',
        'noise.py': noise,
        'wrong.py': b'out_dir = 3\n',
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    (folder / 'folder').mkdir()
    damaged = shutil.copytree(corpus_dir, folder / 'damaged')
    for name in ('meta.json', 'train.bin', 'test.bin'):
        (damaged / name).write_bytes(noise)
    files = {path.name: path for path in sorted(folder.iterdir())}
    return files | {'corpus': corpus_dir, 'missing': folder / 'missing'}


def random_case(generator, files):
    """A stage and the arguments of its command line."""
    stage, paths = generator.choice(list(STAGES)), list(files.values())
    defaults = settings(vars(importlib.import_module(stage)))
    arguments = []
    for word in STAGES[stage].split():
        name, value = word.split('=')
        arguments.append(f'--{name}={files.get(value.strip("{}"), value)}')
    for name in generator.sample(sorted(defaults.keys() - SLOW), generator.randint(1, 2)):
        kinds = {str: [WORDS, paths, paths], list: [LISTS, [[str(path)] for path in paths]],
                 int: [NUMBERS], float: [NUMBERS], bool: [NUMBERS]}
        kinds = kinds.get(type(defaults[name]), [NUMBERS, WORDS, LISTS, paths])  # of None, any
        arguments.append(f'--{name}={generator.choice(generator.choice(kinds))}')
    if generator.random() < 0.1:
        arguments.append(str(generator.choice(paths)))  # as if it were a config file
    return stage, arguments


def error_of(stage, arguments):
    """What a stage writes to stderr about the error that ends it; '' where it does its work."""
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
        try:
            stage_here(stage, *arguments)
        except Exception as error:
            with contextlib.redirect_stderr(io.StringIO()) as err, as_stage(stage, arguments):
                report(type(error), error, error.__traceback__)
            return err.getvalue()
    return ''


@pytest.mark.slow
@pytest.mark.parametrize('seed', range(60))
def test_a_random_command_works_or_is_refused_in_one_line(files, tmp_path, monkeypatch, seed):
    monkeypatch.chdir(tmp_path)  # where words that are paths lead
    stage, arguments = random_case(random.Random(seed), files)
    error = error_of(stage, arguments)
    if error:
        assert error.startswith(f'{stage}.py: ') and error.count('\n') == 1, arguments
