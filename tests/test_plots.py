"""
Pictures show the numbers of the JSON that they are drawn from, and are drawn for every stage.

$ python -m pytest tests/test_plots.py
"""

import json
import warnings

from configurator import ROOT

import numpy as np
import pytest

import plots

ALL = '''{
"position_method": "rope", "short_conv": 4, "file": "a/$x_$.json",
"block_size": 4, "pretrained_length": 4, "dataset": "books", "protocol": "position",
"position": [1, 2, 3, 4, 5, 6, 7, 8, 16], "loss": [9, 1, 1, 1, 1, 1, 1, 1, 17],
"cut": {"context": 4, "position": [8, 16], "loss": [6, 7]}}'''
EACH = '''{
"eval_ppl": {"rows": [{"length": 4, "loss": 2}, {"length": 8, "loss": 3, "cut_loss": 1,
    "gain_error": 0.2}]},
"entropy": {"mean_entropy": [0, 1, 1, 1, 1, 1, 1, 1, 2],
    "bound": [0, 1, 1, 1, 1, 1, 1, 1, 3],
    "entropy": [[[0, 1, 1, 1, 1, 1, 1, 1, 3], [0, 1, 1, 1, 1, 1, 1, 1, 1]]]},
"uniform": {"stage": "tune_scale", "method": "uniform", "search": {"candidates": [1.5],
    "position": [1, 2, 3, 4, 5, 6, 7, 8, 16], "fit_a": 0.5,
    "loss": [[9, 1, 1, 1, 1, 1, 1, 1, 17]], "best_by_position": [1, 1, 1, 1, 1, 1, 1, 1, 2]}},
"head": {"stage": "tune_scale", "method": "head", "tuned": "channel:0.1,norm",
    "losses": [3, 2], "target_length": 16, "head_scale": [[[1, 2], [3, 4]]],
    "norm": {"norm.weight": [5, 6]}},
"passkey": {"lengths": [4, 8], "accuracy": [[1, 0.5, 1], [0, 0.5, 0]]},
"che": {"method": "RoPE", "lengths": [4, 9], "tasks": {"copy": {"accuracy": [1, 0.5],
    "chance": 0.125}}},
"attention": {"layer": 0, "head": 1, "lengths": [{"length": 8, "maps": {"score": [[1], [2, 3]],
    "attention": [[1], [0.25, 0.75]]}}]},
"demo": {"tail": 3, "lengths": [4, 5], "source": "books", "windows": 2, "readings": {"NoPE": {
    "curve": [9, 9, 3, 2, 1], "at": {"4": {}, "5": {"cut_loss": 4}},
    "far": {"gain": 0.5, "gain_error": 0.1}}}}}'''
RESULTS = {name: {'stage': name, **json.loads(ALL), **result}
           for name, result in json.loads(EACH).items()}

# stage | panel | curve | x:y ... The mean of the first 8 losses is 16 / 8, of the last 8 24 / 8.
CURVES = '''
eval_ppl | 0 | NAME | 4:2 8:3
eval_ppl | 0 | each, only the last 4 tokens, (± standard error of the difference) | 4:nan 8:1
entropy | 0 | NAME | 8:2 16:3
entropy | 0 | NAME, only the last 4 tokens | 8:6 16:7
entropy | 1 | NAME | 1:0 2:1 3:1 4:1 5:1 6:1 7:1 8:1 16:2
entropy | 2 | upper bound: ln i | 1:0 2:1 3:1 4:1 5:1 6:1 7:1 8:1 16:3
uniform | 0 | scale 1.5 | 8:2 16:3
uniform | 1 | fit, a = 0.500 | 1:1 2:1 3:1 4:1 5:1.11 6:1.2 7:1.28 8:1.35 16:1.69
che | 0 | RoPE (a/$x_$.json) | 4:1 9:0.5
demo | 0 | NoPE, only the last L tokens | 4:nan 5:4
'''


def panels(name):
    return plots.PICTURES[name](RESULTS[name]).axes


@pytest.mark.parametrize('row', CURVES.strip().splitlines())
def test_a_curve_has_the_numbers_of_the_json(row):
    name, panel, curve, points = row.split(' | ')
    axis = panels(name)[int(panel)]
    found = {label.replace('\n', ', '): getattr(line, 'lines', [line])[0]  # of error bars the curve
             for line, label in zip(*axis.get_legend_handles_labels())}
    expected = np.array([point.split(':') for point in points.split()], float)
    curve = curve.replace('NAME', 'RoPE + conv (a/$x_$.json)')
    assert found[curve].get_xydata() == pytest.approx(expected, abs=0.006, nan_ok=True)
    assert 'L = 4' in found


def test_bars_images_and_points_have_the_numbers_of_the_json():
    [axis] = panels('eval_ppl')
    assert axis.collections[0].get_segments()[1].tolist() == [[8, 0.8], [8, 1.2]]
    assert axis.lines[1].get_ydata().tolist() == [9, 1, 1, 1, 1, 1, 1, 1, 17]
    assert panels('demo')[0].lines[0].get_xydata().tolist() == [[3, 3], [4, 2], [5, 1]]
    scales = json.loads((ROOT / 'lessons/scale_uniform.json').read_text()) | {'file': 'x.json'}
    assert plots.draw_uniform(scales).axes[1].lines[1].get_ydata().max() == 2
    table = json.loads((ROOT / 'results/dape/methods.json').read_text())
    found = plots.draw_ppl(table).axes[0].lines[0].get_ydata()
    assert found == pytest.approx(np.log(table['rows'][0]['ppl']))
    assert panels('demo')[1].collections[0].get_segments()[0].tolist() == [[0.4, 0], [0.6, 0]]
    assert panels('head')[0].lines[0].get_ydata().tolist() == [3, 2]
    assert [line.get_ydata()[-1] for line in panels('entropy')[2].lines[:2]] == [3, 1]
    for name, panel, cells in (('passkey', 0, [[1, 0], [0.5, 0.5], [1, 0]]),
                               ('head', 1, [[1, 2, 3, 4]]), ('head', 2, [[5, 6]]),
                               ('attention', 0, [[1, None], [2, 3]])):
        assert panels(name)[panel].images[0].get_array().tolist() == cells


@pytest.mark.parametrize('name', RESULTS)
def test_pictures_of_all_stages_are_drawn_beside_their_json_without_a_warning(tmp_path, name):
    files = [tmp_path / f'{name}.json', tmp_path / 'b.json']
    for file in files:
        file.write_text(json.dumps(RESULTS[name]))
    several = name in 'eval_ppl entropy passkey che'
    with warnings.catch_warnings(action='error'):
        [path] = plots.draw(*files[:1 + several])
    assert path.name == (f'{name}_and_b.png' if several else f'{name}.png') and path.exists()


def test_every_stage_with_a_picture_is_here_and_others_draw_none(tmp_path):
    assert RESULTS.keys() == plots.PICTURES.keys()
    (tmp_path / 'longbench.json').write_text('{"stage": "longbench"}')
    assert plots.draw(tmp_path / 'longbench.json') == []
