"""The scoreboard's rows: shared between processes, gone on with after a stop, and averaged."""

import contextlib
from types import SimpleNamespace

import pytest
from conftest import ROOT, near, read, written_elsewhere

import train
from configurator import run_config, settings
from lib.answers import save_json
from lib.errors import UserError
from results.scoreboard import table


def row_file(key, seed, loss, cut_loss=1.5):
    """What a row and seed measured, as far as the table takes it."""
    past_L = {'loss': loss, 'cut_loss': cut_loss, 'gain': cut_loss - loss}
    repeats = {'loss': loss, 'own_cut_loss': cut_loss, 'own_gain': cut_loss - loss,
               'cut_loss': 1.5, 'gain': 1.5 - loss}
    return {'seed': seed, 'tuned_numbers': 0, 'repeats': [repeats],
            'text': [{'loss': loss}, {'loss': loss}, past_L, {'loss': loss}]}


def test_what_is_there_is_not_measured_again_and_what_another_process_has_comes_last(
        monkeypatch, tmp_path):
    measured, rope = [], tmp_path / 'out/scoreboard/small/1/rope'
    monkeypatch.chdir(tmp_path)

    def measure(key, seed):
        measured.append((key, seed))
        return row_file(key, seed, 1.0)

    monkeypatch.setattr(table, 'measure', measure)
    there = tmp_path / 'results/scoreboard/small/none_1.json'
    there.parent.mkdir(parents=True)
    save_json(there, row_file('none', 1, 2.0))
    other = contextlib.ExitStack()  # of another process, which works on RoPE
    other.enter_context(written_elsewhere(rope / 'scoreboard'))

    def other_process_ends(seconds):
        if not rope.joinpath('ended').exists():
            rope.joinpath('ended').touch()
            save_json(table.result_file('rope', 1), row_file('rope', 1, 3.0))
            other.close()

    monkeypatch.setattr(table, 'time', SimpleNamespace(sleep=other_process_ends))
    table.work_on([('none', 1), ('rope', 1), ('yarn', 1), ('alibi', 1)])
    assert measured == [('alibi', 1), ('yarn', 1)]  # YaRN reads the RoPE model
    assert read(there)['text'][0]['loss'] == 2 and not list(tmp_path.glob('out/**/*.lock'))


def test_a_row_is_the_mean_and_the_spread_of_its_seeds(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(table, 'seeds', [1, 2, 3])
    for key, seed, loss in ('none', 1, 1.0), ('none', 3, 2.0), ('t5', 1, 3.0):
        table.result_file(key, seed).parent.mkdir(parents=True, exist_ok=True)
        save_json(table.result_file(key, seed), row_file(key, seed, loss))
    none, t5 = table.collect()
    assert none['seeds'] == [1, 3] and none['loss at L']['mean'] == 1.5
    near(none['loss at L']['sd'], 0.5 ** 0.5)
    assert t5['own gain at 8L'] == {'mean': -1.5, 'sd': None} and 'recall at L' not in t5
    table.print_table([none, t5])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith('| NoPE | 0 |  | 2 | 1.500 ± 0.707 |')
    assert lines[3].startswith('| T5 bias | 0 |  | 1 | 3.000 |')


def test_a_gain_is_over_the_cut_context_of_the_model_that_was_not_tuned(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(table, 'seeds', [1, 2])
    table.result_file('none', 1).parent.mkdir(parents=True)
    for seed in 1, 2:
        save_json(table.result_file('none', seed), row_file('none', seed, 4.0))
        # Tuning made the cut context worse.
        save_json(table.result_file('weights', seed), row_file('weights', seed, 2.0 + seed, 3.0))
    save_json(table.result_file('yarn', 1), row_file('yarn', 1, 2.0))  # RoPE was not measured
    none, weights, yarn = table.collect()
    for at in 'at 8L', 'at far repeats':
        assert none[f'gain {at}'] == none[f'own gain {at}'] == {'mean': -2.5, 'sd': 0}
        assert weights[f'gain {at}']['mean'] == -2 and weights[f'own gain {at}']['mean'] == -0.5
        assert f'gain {at}' not in yarn and yarn[f'own gain {at}']['mean'] == -0.5


def test_an_unknown_row_or_size_is_refused(monkeypatch):
    for name, value in ('methods', ['kerpel']), ('size', 'large'):
        with monkeypatch.context() as patch:
            patch.setattr(table, name, value)
            with pytest.raises(UserError, match=str(value).strip("[]'")):
                table.main()


@pytest.mark.parametrize('path', ['config/scoreboard.py', 'config/code.py'])
def test_the_recipe_of_a_study_leans_on_no_default_of_train(path):
    source = (ROOT / 'train.py').read_text()
    section = source[source.index('# data\n'):source.index('# machine\n')]
    recipe = {name for name in settings(vars(train)) if f'\n{name} = ' in section
              or f'\n{name}: ' in section}
    assert {'dataset', 'n_layer', 'learning_rate', 'lr_decay_iters'} <= recipe
    rows = {'short_conv', 'short_conv_at'}  # what a row of the study is about
    assert recipe - rows <= set(run_config(path))
