"""Studies: units are measured once, shared between processes, and averaged over seeds."""

import contextlib
import os
import re
from types import SimpleNamespace

import pytest
from conftest import ROOT, read, refuses, written_elsewhere

from configurator import run_config
from lib.answers import save_json
from results import study
from results.scoreboard import steps, table


def row_file(key, seed, loss, cut_loss=1.5):
    """What a row and seed measured, as far as the table reads it."""
    past_L = {'loss': loss, 'cut_loss': cut_loss, 'gain': cut_loss - loss}
    repeats = {'loss': loss, 'own_cut_loss': cut_loss, 'own_gain': cut_loss - loss,
               'cut_loss': 1.5, 'gain': 1.5 - loss}
    return {'seed': seed, 'tuned_numbers': 0, 'repeats': [repeats],
            'text': [{'loss': loss}, {'loss': loss}, past_L, {'loss': loss}]}


@pytest.fixture
def board(monkeypatch, tmp_path):
    """board(key, seed, **row): write the file of a row and seed in an empty scoreboard."""
    monkeypatch.chdir(tmp_path)
    table.result_file('none', 1).parent.mkdir(parents=True)
    monkeypatch.setattr(table, 'SEEDS', [1, 2, 3])
    return lambda key, seed, *losses: save_json(table.result_file(key, seed),
                                                row_file(key, seed, *losses))


def test_what_is_there_is_not_measured_again_and_what_another_process_has_comes_last(
        board, monkeypatch, tmp_path):
    measured = []

    def result_of(key, seed):
        measured.append(key)
        return row_file(key, seed, 1.0)

    def recall_of(key, seed):
        measured.append(f'{key}, recall')
        return {}

    for name, value in {'seeds': [1], 'methods': ['none', 'rope', 'yarn', 'alibi'],
                        'result_of': result_of, 'recall_of': recall_of}.items():
        monkeypatch.setattr(table, name, value)
    board('none', 1, 2.0)
    other = contextlib.ExitStack()  # another process works on RoPE
    other.enter_context(written_elsewhere(tmp_path / 'out/scoreboard/small/1/rope/scoreboard'))

    def other_process_ends(seconds):
        if seconds and not table.result_file('rope', 1).exists():
            board('rope', 1, 3.0)
            other.close()

    monkeypatch.setattr(study, 'time', SimpleNamespace(sleep=other_process_ends))
    study.measure_units(table.units())
    recalls = ['none, recall', 'rope, recall']
    assert measured == [*recalls, 'alibi', 'alibi, recall', 'yarn']  # YaRN reads the RoPE model
    assert read(table.result_file('none', 1))['text'][0]['loss'] == 2
    assert not list(tmp_path.glob('out/**/*.lock'))


def test_a_study_whose_folder_cannot_be_written_says_so_and_does_not_wait(tmp_path):
    (tmp_path / 'file').write_text('')
    refuses('cannot be written', study.measure_units,
            {tmp_path / 'unit.json': (str(tmp_path / 'file/run'), dict)})


def test_the_time_of_a_step_knows_the_settings_of_every_row():
    found = {key: steps.changes_of(row) for key, row in table.ROWS.items() if not row.init}
    assert found['conv'] == {'short_conv': 4} and found['none'] == {}
    assert found['kerple_dape3'] == {'position': 'kerple', 'dape_kernel': 3}


def test_a_stage_runs_again_only_for_another_command(monkeypatch, tmp_path):
    path, ran = tmp_path / 'x.json', []

    def run(*words):
        ran.append(words)
        save_json(path, {'command': ' '.join(['python', *words])})

    monkeypatch.setattr(study.demo, 'run', run)
    for command in 'che.py --seed=1', 'che.py  --seed=1 ', 'che.py --seed=2':
        study.made(path, command)
    assert ran == [('che.py', '--seed=1'), ('che.py', '--seed=2')]
    ran.clear()
    monkeypatch.setattr(study.demo, 'require_trained_with', lambda *given: ran.append(given))
    for name in '', 'last.pt', 'loss.png':
        (tmp_path / name).touch()
        study.train(tmp_path, 'config/code.py --seed=1')
    train = 'train.py', 'config/code.py', '--seed=1', f'--out_dir={tmp_path}'
    assert ran == [train, (*train, '--init_from=resume'),
                   (tmp_path, ['config/code.py', '--seed=1'])]


def test_a_study_says_what_it_does_not_measure(tmp_path, capsys):
    (tmp_path / 'one.json').touch()
    study.measure_units({tmp_path / 'one.json': (tmp_path, None)})
    assert '1 of 1 results are there already' in capsys.readouterr().out
    refuses('nothing to measure', study.measure_units, {})


def test_a_stage_runs_again_if_what_it_read_is_newer(monkeypatch, tmp_path):
    path, scales, model = tmp_path / 'x.json', tmp_path / 'scales.json', tmp_path / 'last.pt'
    monkeypatch.setattr(study.demo, 'run', lambda *words: ran.append(words) or save_json(
        path, {'command': ' '.join(['python', *words])}))
    command, ran = f'eval_ppl.py --out_dir={tmp_path} --scale={scales}', []
    for source in scales, model:
        source.touch()
        os.utime(source, (0, 0))
        study.made(path, command)
        os.utime(source, (path.stat().st_mtime + 1,) * 2)
        study.made(path, command)
        os.utime(source, (0, 0))
    study.made(path, command)
    assert len(ran) == 3


def test_a_row_is_the_mean_and_the_spread_of_its_seeds(board, capsys):
    for key, seed, loss in ('none', 1, 1.0), ('none', 3, 2.0), ('t5', 1, 3.0):
        board(key, seed, loss)
    none, t5 = table.collect()
    assert none['seeds'] == [1, 3] and t5['own gain at 8L'] == {'mean': -1.5, 'sd': None}
    study.print_table(table.lines([none, t5]))
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith('| NoPE | 0 | 2 | 1.500 ± 0.707 |')
    assert lines[3].startswith('| T5 bias | 0 | 1 | 3.000 |')
    assert study.over_seeds([[1.0, 2.0], [3.0, 2.0]]) == {'mean': [2, 2], 'sd': [2 ** 0.5, 0]}


def test_recall_has_a_file_of_its_own_that_older_files_lack(board):
    for key in 'none', 'alibi':
        board(key, 1, 1.0)
    shares = {'accuracy': [0.9, 0.8, 0.7, 0.6, 0.5], 'exact': [0.5, 0.4, 0.3, 0.2, 0.1]}
    older = read(table.result_file('none', 1)) | {'recall': {'accuracy': [0.1] * 4}}
    save_json(table.result_file('none', 1), older)
    table.recall_file('alibi', 1).parent.mkdir()
    save_json(table.recall_file('alibi', 1), {'recall': shares, 'copy': shares})
    none, alibi, _ = table.collect()
    assert none['recall at L']['mean'] == 0.1 and 'recall at 64L' not in none
    assert alibi['recall at 64L']['mean'] == alibi['copy at L']['mean'] == 0.5


def test_a_gain_is_over_the_cut_context_of_the_model_that_was_not_tuned(board):
    for seed in 1, 2:
        board('none', seed, 4.0)
        board('weights', seed, 2.0 + seed, 3.0)  # tuning made its cut context worse
    board('yarn', 1, 2.0)  # RoPE was not measured
    none, weights, yarn = table.collect()
    for at in 'at 8L', 'at far repeats':
        assert none[f'gain {at}'] == none[f'own gain {at}'] == {'mean': -2.5, 'sd': 0}
        assert weights[f'gain {at}']['mean'] == -2 and weights[f'own gain {at}']['mean'] == -0.5
        assert f'gain {at}' not in yarn and yarn[f'own gain {at}']['mean'] == -0.5


@pytest.mark.parametrize('size', ['small', 'books'])
def test_a_stored_board_is_what_the_files_of_its_seeds_give(monkeypatch, size):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(table, 'size', size)
    monkeypatch.setattr(table.recall, 'share_held', lambda *_: [0.0] * 5)  # takes seconds
    stored = [row for row in read(f'results/scoreboard/{size}.json')['rows'] if row['row'] != 'cut']
    found = [row for row in table.collect() if row['row'] != 'cut']
    for row, expected in zip(found, stored, strict=True):
        assert row.keys() == expected.keys()
        for name in table.COLUMNS.keys() & row.keys():
            assert row[name] == pytest.approx(expected[name]), (row['row'], name)


def test_every_weight_is_tuned_at_8L_and_read_beside_the_untuned_model(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    trained, read_as, made = {}, {}, dict.fromkeys(('commit', 'versions', 'device', 'dtype'))

    def evaluated(folder, protocol, key, arguments):
        read_as[protocol] = arguments
        return made | {'rows': [], 'share': 0}

    monkeypatch.setattr(study, 'train', lambda folder, how: trained.update({folder: how}))
    monkeypatch.setattr(study, 'evaluated', evaluated)
    table.result_of('weights', 1)
    untuned = 'out/scoreboard/small/1/none'
    how, = (how for folder, how in trained.items() if folder != untuned)
    assert '--block_size=1024' in how and f'--init_from={untuned}/last.pt' in how
    assert f'--baseline={untuned}/last.pt' in read_as['repeat']
    assert '--lengths=[1024]' in read_as['repeat']


def test_a_row_that_trains_has_a_run_of_its_own():
    with pytest.raises(ValueError, match="The row 'Mine' trains a model"):
        table.Row('Mine', 'bias', train='--position=mine')


def test_a_gain_far_above_0_and_a_family_that_is_not_known_are_drawn():
    result = read(ROOT / 'results/scoreboard/small.json')
    result['rows'][0]['gain at far repeats']['mean'] = 0.35
    result['rows'][0]['family'] = 'mine'
    figure = table.draw(result)
    low, high = figure.axes[0].get_ylim()
    assert low < -0.35 and 0.35 < high < 1
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert {'mine', 'NoPE, tuned'} < set(labels)


@pytest.mark.parametrize('path', ['config/scoreboard.py', 'config/code.py'])
def test_the_recipe_of_a_study_leans_on_no_default_of_train(path):
    source = (ROOT / 'train.py').read_text()
    section = source[source.index('# data\n'):source.index('# machine\n')]
    recipe = {*re.findall(r'^(\w+).* = ', section, re.MULTILINE)}
    assert {'dataset', 'n_layer', 'learning_rate', 'lr_decay_iters'} <= recipe
    rows = {'position', 'short_conv', 'short_conv_at'}  # what a row of the study is about
    assert recipe - rows <= set(run_config(path))
