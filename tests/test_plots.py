"""Pictures: every result in the repository draws one, which says whose it is and what it hides."""

import json
import warnings
from pathlib import Path

import pytest

from lib import figures, plots
from lib.errors import UserError

RESULTS = {}
for path in sorted(Path(__file__).parents[1].glob('results/**/*.json')):
    result = json.loads(path.read_text())
    if plots.kind_of(result) in plots.PICTURES:
        RESULTS[f'{path.parent.name}/{path.stem}'] = result


def write(folder, name, result):
    path = folder / f'{name}.json'
    path.write_text(json.dumps(result))
    return path


def examples():
    """A result of each kind, the tables all: they differ most."""
    seen = {}
    for name, result in RESULTS.items():
        kind = plots.kind_of(result)
        key = name if kind.startswith('eval_ppl') else kind
        seen.setdefault(key, result)
    return seen


@pytest.mark.parametrize('name', RESULTS)
def test_every_result_draws_without_a_warning(name):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        figure = plots.PICTURES[plots.kind_of(RESULTS[name])](RESULTS[name])
        figure.draw_without_rendering()
    for axis in figure.axes:
        assert len(figures.named_lines(axis)) <= 8
        assert axis.get_legend() is None


@pytest.mark.parametrize('kind', examples())
def test_the_title_names_the_run(kind):
    result = examples()[kind]
    title = plots.PICTURES[plots.kind_of(result)](result).get_suptitle()
    if 'checkpoint' in result and 'name' not in result.get('rows', [{}])[0]:
        assert Path(result['checkpoint']).parent.name in title
    else:
        assert result.get('method', result['settings']['out_dir']) in title


def test_a_value_above_the_panel_is_written_at_its_edge():
    figure = plots.draw_ppl(RESULTS['books/eval_ppl_table'])
    texts = [text.get_text() for axis in figure.axes for text in axis.texts]
    assert 'NoPE  ↑ 1,480' in texts


def test_missing_and_constant_values_draw(tmp_path):
    result = json.loads(json.dumps(RESULTS['extension_demo/eval_ppl_table']))
    result['lengths'] = result['lengths'][:1]
    for row in result['rows']:
        row['ppl'] = [3.0]
    result['rows'][0]['ppl'] = [None]
    plots.draw(write(tmp_path, 'table', result))
    assert (tmp_path / 'table.png').read_bytes().startswith(b'\x89PNG')


def test_entropy_draws_its_heads_beside_it(tmp_path):
    plots.draw(write(tmp_path, 'entropy_x', RESULTS['entropy_4L/entropy_scale']))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {'entropy_x.json', 'entropy_x.png', 'entropy_heads_x.png'}


def test_one_method_has_one_colour():
    uniform = figures.color_of('NoPE, uniform scale 1.8')
    assert uniform == figures.color_of('NoPE, scale_uniform_fit')


@pytest.mark.parametrize('result', [{'stage': 'bench'}, [1]])
def test_a_result_without_a_picture_is_refused(tmp_path, monkeypatch, result):
    path = write(tmp_path, 'x', result)
    assert plots.draw(path) == []
    monkeypatch.setattr(plots.sys, 'argv', ['plots.py', str(path)])
    with pytest.raises(UserError, match='x.json has no picture'):
        plots.main()
    assert not (tmp_path / 'x.png').exists()


def test_a_log_draws_with_and_without_validation(tmp_path):
    rows = [{'step': 1, 'tokens': 64, 'loss': 5.0}, {'step': 1, 'tokens': 64, 'val_loss': 4.9}]
    for n in (0, 1, 2):
        log = tmp_path / 'log.jsonl'
        log.write_text(''.join(json.dumps(row) + '\n' for row in rows[:n]))
        plots.draw_log(log, tmp_path / f'loss{n}.png')
        assert (tmp_path / f'loss{n}.png').stat().st_size > 1000
