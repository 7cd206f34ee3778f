"""
export.py as run: the set of a scale file that it folds. What the folder holds is tested in
test_huggingface.py.

$ python -m pytest tests/test_export.py
"""

import pytest
import torch
from conftest import mistake, scale_set, stage_here

from lib import checkpoints
from lib.scales import save_scale


@pytest.fixture
def arguments(tiny_run, tmp_path):
    """The command for a file of two sets, which stands last."""
    _, info = checkpoints.load_model('last', tiny_run, 'cpu')
    sets = {T: scale_set([[1, 1.2, 1.4, T / 32]] * 2) for T in (64, 128)}
    save_scale(tmp_path / 'sets.json', info, sets, 'head')
    scale = f'--scale={tmp_path}/sets.json'
    return [f'--out_dir={tiny_run}', f'--folder={tmp_path}/hf', '--dtype=float32', scale]


def test_the_stage_folds_a_scale_set_and_prints_the_lines_that_load_it(arguments, tiny_run):
    transformers = pytest.importorskip('transformers')
    out = stage_here('export', *arguments, '--target_length=64')
    names = {'transformers': transformers}
    for line in out.splitlines()[1:]:
        exec(line.strip(), names)
    theirs = names['model'].eval()
    assert theirs.config.max_position_embeddings == 64  # not L = 32, at which a reader would cut
    assert names['tokenizer']('def')['input_ids'] == [100, 101, 102]
    model, _ = checkpoints.load_model('last', tiny_run, 'cpu')
    model.head_scale = [[1, 1.2, 1.4, 2]] * 2
    idx = torch.arange(64)[None] * 3
    torch.testing.assert_close(theirs(idx).logits, model(idx), rtol=1e-4, atol=1e-4)


def test_a_set_that_is_not_there_is_refused(arguments):
    assert '32, 64, 128' in mistake('export', *arguments)
    for T in (31, 129):
        assert f'target_length is {T}' in mistake('export', *arguments, f'--target_length={T}')
    assert 'target_length' in mistake('export', *arguments[:-1], '--target_length=64')
    assert "dtype is 'int8'" in mistake('export', *arguments, '--dtype=int8')
