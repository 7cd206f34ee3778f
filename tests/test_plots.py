"""Pictures: every result in the repository draws one, which names its run and what it hides."""

import copy
import json
import math
import warnings
from pathlib import Path

import pytest
from conftest import ROOT, read

from lib import figures, plots
from results.channel_scale import table as channels
from results.scoreboard import table as scoreboard

PICTURES = plots.PICTURES | {'channel_scale': channels.draw, 'scoreboard': scoreboard.draw}
RESULTS = {}
for path in sorted(ROOT.glob('results/**/*.json')):
    result = read(path)
    if plots.kind_of(result) in PICTURES:
        RESULTS[f'{path.parent.name}/{path.stem}'] = result


@pytest.mark.parametrize('name', RESULTS)
def test_every_result_draws_without_a_warning_and_names_its_run(name):
    result = RESULTS[name]
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        figure = PICTURES[plots.kind_of(result)](result)
        figure.draw_without_rendering()
    for axis in figure.axes:
        curves = [line for line in figures.named_lines(axis) if len(line.get_xdata()) > 1]
        assert len([line for line in curves if ', cut to ' not in line.get_label()]) <= 8
        assert axis.get_legend() is None
    if result.get('compare'):
        run = f"{1 + len(result['compare'])} runs"
    elif 'checkpoint' in result and 'name' not in result.get('rows', [{}])[0]:
        run = Path(result['checkpoint']).parent.name
    else:
        run = result.get('method', result['settings'].get('out_dir', result.get('label')))
    assert run in figure.get_suptitle()


def test_panels_of_a_table_show_their_familys_cut_context_and_write_what_lies_above_them():
    result = RESULTS['books/eval_ppl_table']
    axes = plots.draw_ppl(result).axes
    drawn = {line.get_label(): tuple(line.get_ydata()) for axis in axes
             for line in figures.named_lines(axis) if ', cut to ' in line.get_label()}
    at_L = {row['name']: row['ppl'][0] for row in result['rows']}
    assert drawn == {f'{name}, cut to 256': 4 * (at_L[name],)
                     for name in ('RoPE', 'NoPE', 'ALiBi, trained so')}
    # A value above the panel is written at its edge.
    assert 'NoPE  ↑ up to 1,480' in [text.get_text() for axis in axes for text in axis.texts]


@pytest.mark.parametrize('lengths, stride, drawn', [
    ([64], 16, {}),
    ([64, 128, 256], 16, {128: 5.0, 256: 5.0}),                       # those of L score the same
    ([64, 128, 256], 17, {256: math.exp(1.25)}),                      # in a shorter context
    ([256, 512], 16, {256: math.exp(1.25), 512: math.exp(1.5)})])     # L was not measured
def test_a_models_cut_context_begins_at_L(lengths, stride, drawn):
    rows = [{'length': T, 'ppl': 5.0 if T == 128 else 7.0} for T in lengths]
    for row in rows:
        if row['length'] > 128:
            row['cut_loss'] = 1 + row['length'] / 1024
    result = {'rows': rows, 'lengths': lengths, 'rule': 'same', 'stride': stride,
              'protocol': 'sliding', 'label': '', 'dataset': 'books', 'position_method': 'none',
              'checkpoint': 'out/nope/last.pt', 'block_size': 512, 'pretrained_length': 128}
    [axis] = plots.draw_ppl(result).axes
    low, high = axis.get_ylim()
    assert all(low < ppl < high for ppl in drawn.values())
    cut = [line.get_xydata() for line in figures.named_lines(axis) if 'cut to 128' in
           line.get_label()]
    assert dict(cut[0] if cut else []) == pytest.approx(drawn)


def test_bars_of_a_perplexity_are_the_standard_error_of_the_loss_times_it():
    result = copy.deepcopy(RESULTS['extension_demo/eval_ppl_table'])
    result['rows'] = result['rows'][:1]
    row, = result['rows']
    row['standard_error'] = [0.1] * len(row['ppl'])
    bars = [collection for collection in plots.draw_ppl(result).axes[0].collections
            if hasattr(collection, 'get_segments')]
    heights = [(high - low) / 2 for (_, low), (_, high) in bars[0].get_segments()]
    assert heights == pytest.approx([0.1 * ppl for ppl in row['ppl']])


def test_bound_and_running_mean_are_by_hand():
    _, [axis] = figures.panels('', 1, 1)
    for unit, at_8 in ('nats', math.log(8)), ('bits', 3):
        figures.draw_bound(axis, [2, 8], unit)
        assert axis.get_lines()[-1].get_ydata()[-1] == pytest.approx(at_8)
    assert figures.running_mean([8.0] * 16 + [0.0] * 8)[[0, 8, -1]].tolist() == [8, 8, 0]


def test_missing_and_constant_values_draw():
    result = copy.deepcopy(RESULTS['extension_demo/eval_ppl_table'])
    result['lengths'] = result['lengths'][:1]
    for i, row in enumerate(result['rows']):
        row['ppl'] = [3.0 if i else None]
    plots.draw_ppl(result).draw_without_rendering()


def test_a_demo_whose_far_repeats_are_in_one_window_draws():
    result = read(ROOT / 'results/demo/look.json')
    for row in result['readings'].values():
        row['far']['gain_error'] = None
    plots.draw_demo(result)


def test_entropy_draws_its_heads_beside_it(tmp_path):
    path = tmp_path / 'entropy_x.json'
    path.write_text(json.dumps(RESULTS['entropy_4L/entropy_scale']))
    drawn = plots.draw(path)
    assert drawn == [tmp_path / 'entropy_x.png', tmp_path / 'entropy_heads_x.png']
    assert all(picture.read_bytes().startswith(b'\x89PNG') for picture in drawn)


def test_a_log_draws_with_and_without_validation(tmp_path):
    rows = [{'step': 1, 'tokens': 64, 'loss': 5.0}, {'step': 1, 'tokens': 64, 'val_loss': 4.9}]
    for n in 0, 1, 2:
        log = tmp_path / 'log.jsonl'
        log.write_text(''.join(json.dumps(row) + '\n' for row in rows[:n]))
        plots.draw_log(log, tmp_path / f'loss{n}.png')
        assert (tmp_path / f'loss{n}.png').exists()
