"""The study of what reads past L: gains over seeds, from the files of models and seeds."""

import statistics

import pytest
from conftest import ROOT, near, read

from lib.answers import save_json
from lib.tokens import Windows
from results.past_L import rates, repeats, table


def unit(model, seed, readings):
    """A file of one model and seed. readings: {name: (loss, own cut, gain at far repeats)}."""
    found = {}
    for name, (loss, own_cut, gain) in readings.items():
        text = [{'length': T, 'loss': loss} for T in table.lengths()]
        for row in text[1:]:
            row['cut_loss'] = own_cut
        repeats = [{'kind': kind, 'loss': 2 - gain, 'cut_loss': 2.0, 'gain': gain, 'headroom': 0.5,
                    'gain_error': 0.01, 'own_gain': gain, 'R': gain / 0.5}
                   for kind in ('all', 'same token', 'near, all', 'other document, all')]
        found[name] = {'text': text, 'repeats': repeats, 'entropy': [2.0, gain]}
    return {'model': model, 'seed': seed, 'readings': found}


def test_a_gain_over_all_tokens_is_over_the_cut_context_of_the_untuned_model(monkeypatch, tmp_path,
                                                                             capsys):
    monkeypatch.setattr(table, 'folder', lambda *of: tmp_path)
    monkeypatch.setattr(table, 'SEEDS', [1, 2, 3])
    monkeypatch.setattr(table, 'seeds', [1])  # to measure; the table shows all
    for seed, gain in (1, 0.1), (3, 0.3):  # the second is not there yet
        readings = {'untuned': (2.5, 2.0, -0.1), 'head': (2.1, 2.4, gain)}
        if seed == 3:  # the other file is older
            readings['weights'] = 2.0, 2.0, 0.5
        save_json(table.file_of('conv', seed), unit('conv', seed, readings))
    untuned, head, weights = table.collect()
    assert weights['seeds'] == [3]
    assert head['seeds'] == [1, 3] and 'gain at 128' not in head
    near(head['gain at 1024']['mean'], 2.0 - 2.1)  # and not 2.4 - 2.1, by its own cut
    near(head['gain, all']['values'], [0.1, 0.3])
    near(head['gain, all']['sd'], statistics.stdev([0.1, 0.3]))
    near(head['R']['mean'], 0.4, 1e-6)
    near(head['entropy']['mean'], [2.0, 0.2])
    table.print_table([untuned, head])
    line = capsys.readouterr().out.splitlines()[3]
    assert line.startswith('| NoPE + conv, head scales | 2 | 2.10 ± 0.00 |')
    assert '| 0.20 ± 0.14 | 0.40 ± 0.28 |' in line
    figure = table.draw({'rows': [untuned, head]})
    assert len(figure.axes[0].get_lines()) >= 3  # two readings and the cut context


@pytest.mark.parametrize('series', table.SERIES)
def test_a_stored_table_is_what_the_files_of_its_seeds_give(monkeypatch, series):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(table, 'series', series)
    path = table.folder('results', series) / 'past_L.json'
    if not path.exists():
        return pytest.skip('not measured yet')
    for row, expected in zip(table.collect(), read(path)['rows'], strict=True):
        assert row.keys() == expected.keys()
        for key, cell in expected.items():
            if isinstance(cell, dict):
                near(row[key]['mean'], cell['mean'], atol=1e-6)
            else:
                assert row[key] == pytest.approx(cell)


def test_gains_are_over_the_untuned_model_and_entropies_stand_at_their_lengths(monkeypatch):
    asked, made = {}, dict.fromkeys(('commit', 'versions', 'device', 'dtype'))

    def evaluated(folder, protocol, label, arguments):
        asked[protocol, label] = folder, arguments
        return made | {'rows': [], 'share': 0, 'copy_weight': {}}

    for name, stub in {'evaluated': evaluated, 'train': lambda *_: None,
                       'made': lambda *_: {'mean_entropy': list(range(16))}}.items():
        monkeypatch.setattr(table.study, name, stub)
    found, run = table.result_of('conv', 1)['readings'], 'out/past_L/1/conv'
    for name in found:
        folder, arguments = asked['repeat', name]
        assert (f'--baseline={run}/last.pt' in arguments) == (name == 'weights') == (folder != run)
    assert found['head']['entropy'] == [1, 3, 7, 15]  # 16 bins up to 8L
    table.result_of('conv_8L', 1)
    assert f'--baseline={run}/last.pt' in asked['repeat', 'untuned'][1]


def test_a_series_of_another_length_tunes_and_reads_at_multiples_of_it(monkeypatch):
    commands, made = [], dict.fromkeys(('commit', 'versions', 'device', 'dtype'))

    def stage(path, command):
        commands.append(command)
        return made | {'rows': [], 'share': 0, 'copy_weight': {}, 'mean_entropy': [0] * 16}

    monkeypatch.setattr(table, 'series', 'code_86M')
    monkeypatch.setattr(table.study, 'made', stage)
    monkeypatch.setattr(table.study, 'train', lambda *_: None)
    assert table.result_of('conv', 1)['readings'].keys() == {'untuned', 'head'}
    tunings = [one for one in commands if one.startswith('tune_scale.py')]
    assert len(tunings) == 1 and '--target_length=4096 ' in tunings[0]
    assert sum('--lengths=[512,1024,2048,4096,8192]' in one for one in commands) == 2
    assert sum('--lengths=[4096]' in one for one in commands) == 2
    assert all('--dtype=bfloat16' in one and '{' not in one for one in commands)


def test_a_series_that_reads_another_text_uses_the_trainings_of_its_series(monkeypatch):
    for series, trainings in (('code', ''), ('code_on_books', ''), ('mix_on_books', 'mix/')):
        monkeypatch.setattr(table, 'series', series)
        assert table.run_of('conv', 1) == f'out/past_L/{trainings}1/conv'
        mixed = '--dataset=code:0.5,books_code:0.5'
        assert (mixed in table.recipe('conv')) == bool(trainings)
    assert str(table.file_of('conv', 1)) == 'results/past_L/mix_on_books/conv_1.json'


def test_shares_of_repeats_against_a_search_of_each_token(corpus_dir, monkeypatch):
    monkeypatch.setattr(repeats, 'n_tokens', 8 * 64)
    follows, copied, among = 0, 0, 0
    for window in Windows(str(corpus_dir), 'train', 64).batch(0, 8).tolist():
        for t in range(4, len(window)):
            places = [s for s in range(4, t) if window[s - 4:s] == window[t - 4:t]]
            follows += bool(places)
            copied += bool(places) and window[places[-1]] == window[t]
            among += 1
    found = repeats.shares(str(corpus_dir), 64)
    assert found == {'repeats': follows / among, 'copied': copied / among} and 0 < copied < follows


def test_rates_are_multiplied_and_defaults_written_out():
    tunings = table.tunings_of('conv')[0]
    assert rates.times(tunings['vectors'], 1) == tunings['vectors']
    assert rates.times(tunings['vectors'], 3).endswith('--tune=channel:0.3,norm:0.03')
    assert '--init_scale=1.0 --tune=scale:0.03 ' in rates.times(tunings['head'], 0.3)
    assert '--learning_rate=0.003 --min_lr=0.0003 ' in rates.times(table.FINETUNE, 3)
