"""Far repeats, the copy cache and their errors, against brute force."""

import numpy as np
import pytest
import torch
from conftest import mistake, on, read, stage

import repeats
from common import read_checkpoint, save_checkpoint, setup
from data import Windows
from stage import open_model


def test_a_far_repeat_is_what_its_definition_says():
    tokens, L, g = np.random.default_rng(0).integers(0, 3, (4, 90)), 10, 3
    wanted = []
    for window, row in enumerate(tokens):
        for t in range(2 * L, 90):
            found = [s for s in range(g, t) if (row[s - g:s] == row[t - g:t]).all()]
            if found and max(found) < t - L:
                wanted.append((window, t, row[max(found)] == row[t]))
    window, t, same, n = repeats.find_targets(tokens, L, g, 1000)
    assert n == len(wanted) and list(zip(window, t, same)) == wanted
    drawn = repeats.find_targets(tokens, L, g, 5)
    assert len(drawn[0]) == 5 and drawn[3] == n
    assert all(np.array_equal(a, b) for a, b in zip(drawn, repeats.find_targets(tokens, L, g, 5)))


def test_the_copy_cache_has_the_best_weight():
    random = np.random.default_rng(1)
    losses, same = random.exponential(2, 300), random.random(300) < 0.4
    p = np.exp(-losses)
    mixed = repeats.copy_losses(losses, same, 0.3)
    assert mixed == pytest.approx(-np.log(0.7 * p + 0.3 * same))
    weight = repeats.fit_copy_weight(losses, same)
    means = [repeats.copy_losses(losses, same, w).mean() for w in np.arange(0.001, 1, 0.001)]
    assert weight == pytest.approx(0.001 + 0.001 * np.argmin(means), abs=0.001)
    assert repeats.fit_copy_weight(losses, np.zeros(300, bool)) < 1e-9  # nothing to copy


def test_the_error_of_a_ratio_is_over_windows():
    a, b, window = np.array([1.0, 3, 2, 4]), np.array([1.0, 1, 2, 2]), np.array([0, 0, 5, 7])
    ratio, error = repeats.ratio_over_windows(a, b, window)
    rests = np.array([a[:2].sum() - ratio * 2, 2 - ratio * 2, 4 - ratio * 2])
    assert ratio == 10 / 6
    assert error == pytest.approx(np.sqrt((rests ** 2).sum() * 3 / 2) / 6)


@pytest.mark.parametrize('name, value', [('scale', 1.3), ('position', 'llama4')])
def test_the_gain_is_the_cut_loss_of_the_untuned_model_minus_the_loss(tiny_run, corpus_dir,
                                                                      tmp_path, name, value):
    stage('repeats', *on(tiny_run, tmp_path), f'--{name}={value}', '--length=128', '--n_samples=6',
               '--targets=20', '--gram=4', '--control=True')
    found = read(next(tmp_path.glob('*.json')))
    data = Windows(str(corpus_dir), 'test', 128)
    x = data.evenly_spaced(6)
    window, t, same, _ = repeats.find_targets(x, 32, 4, 20)
    runtime = setup('cpu', 'float32')
    plain, scaled = (open_model('last', tiny_run, runtime, **how)[0] for how in ({}, {name: value}))

    def loss(model, ids):
        ids = torch.from_numpy(ids)[None]
        return model(ids[:, :-1], ids[:, 1:])[0, -1].item()

    whole = [loss(scaled, x[w, :at + 1]) for w, at in zip(window, t)]
    cut = [loss(plain, x[w, at - 32:at + 1]) for w, at in zip(window, t)]
    row = found['rows'][0]
    assert row['gain'] == pytest.approx(np.mean(cut) - np.mean(whole), abs=1e-5)
    val = Windows(str(corpus_dir), 'val', 128).evenly_spaced(6)
    val_window, val_t, val_same, _ = repeats.find_targets(val, 32, 4, 20)
    of_val = np.array([loss(plain, val[w, at - 32:at + 1]) for w, at in zip(val_window, val_t)])
    weight = repeats.fit_copy_weight(of_val, val_same)
    assert found['copy_weight'] == pytest.approx(weight, abs=1e-4)
    copied = repeats.copy_losses(np.array(cut), same, weight)
    assert row['headroom'] == pytest.approx(np.mean(cut) - copied.mean(), abs=1e-5)
    assert row['R'] == pytest.approx(row['gain'] / row['headroom'], rel=1e-3)

    document = np.searchsorted(data.starts, np.stack((data.places, data.places + 128)), 'right')
    others = repeats.other_windows(*document)
    control = []
    for w, at in zip(window, t):
        text = x[w, :at + 1].copy()
        text[:at - 32] = x[others[w], :at - 32]
        control.append(loss(scaled, text))
    assert found['rows'][-1]['kind'] == 'other document'
    assert found['rows'][-1]['loss'] == pytest.approx(np.mean(control), abs=1e-5)
    assert all(set(range(*document[:, w] + [0, 1])).isdisjoint(range(*document[:, o] + [0, 1]))
               for w, o in enumerate(others))
    with pytest.raises(SystemExit, match='no other text'):
        repeats.other_windows(*np.zeros((2, 4), int))


def test_a_baseline_with_another_tokenizer_is_refused(tiny_run, tmp_path):
    state = read_checkpoint(tiny_run / 'last.pt')
    kept = {name: state[name] for name in ('step', 'settings')}
    save_checkpoint(tmp_path / 'other.pt', state['model'], state['model_config'],
                    tokenizer=state['tokenizer'] | {'eot_token': 0}, **kept)
    assert 'tokenizers' in mistake('repeats', *on(tiny_run, tmp_path), '--length=128', '--gram=4',
                                   f'--baseline={tmp_path}/other.pt')


def test_text_without_far_repeats_ends_in_one_line(tiny_run, tmp_path):
    line = mistake('repeats', *on(tiny_run, tmp_path), '--length=128', '--gram=60', '--n_samples=4')
    assert 'gram' in line
