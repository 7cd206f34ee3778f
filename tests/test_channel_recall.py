"""
Recall with vectors tuned past L: what is tuned, and how a cut context is read.

$ python -m pytest tests/test_channel_recall.py
"""

import numpy as np
import pytest
import torch
from conftest import ROOT, near, random_model, save_model

from results.channel_scale import recall, table

TINY = ('--n_layer=2 --n_head=2 --n_embd=16 --n_hidden=16 --max_iters=4 --lengths=[16,32] '
        '--n_test=8 --device=cpu')


@pytest.fixture(scope='module')
def measured(tmp_path_factory):
    """recall.result_of() of a small model, each method tuned for 30 steps; and its losses."""
    folder, tunings = tmp_path_factory.mktemp('recall'), []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        for name, value in {'out_dir': folder, 'max_iters': 30, 'n_test': 64, 'RATE': 1e-2,
                            'TRAINING': f'{recall.TRAINING} {TINY}'}.items():
            patch.setattr(recall, name, value)
        tune = recall.tune

        def tune_and_look(model, groups, seed, clamp=None):
            weights = {name: p.clone() for name, p in model.named_parameters()}
            start = loss(model)
            n = tune(model, groups, seed, clamp)
            changed = {name for name, p in model.named_parameters() if (p != weights[name]).any()}
            tunings.append((start, loss(model), changed, model.head_scale))
            return n

        @torch.no_grad()
        def loss(model):
            return sum(recall.loss_of(model, *batch).item()
                       for batch in recall.samples('val', 7, 64, 256))

        patch.setattr(recall, 'tune', tune_and_look)
        yield recall.result_of(7), tunings


@torch.no_grad()
def test_the_lead_of_near_keys_is_that_of_loops(tmp_path, monkeypatch, corpus_dir, windows):
    """Channel by channel, of head 3 of layer 1, whose keys are the second key head's."""
    monkeypatch.setattr(table, 'L', 8)
    model, leads = random_model(vocab_size=257), []
    save_model(model, tmp_path / 'last.pt', settings={'dataset': str(corpus_dir)})
    found = table.features(str(tmp_path), n=2)['lead of near keys over far ones'][1, 3]
    with model.probe(lambda layer, attention, q, k, place: (q[:, 3], k[:, 1])) as seen:
        model(windows(2, 32)[:, :-1])
    for q, k in zip(*seen[1]):
        for i in range(24, 32):
            near_mean, far_mean = ((q[i] @ keys.T / 8 ** 0.5).softmax(0) @ keys
                                   for keys in (k[i - 7:i + 1], k[:i - 7]))
            leads.append(q[i] * (near_mean - far_mean))
    near(found, torch.stack(leads).mean(0), atol=1e-4)


def test_each_tuning_changes_only_what_it_names_and_lowers_the_loss(measured):
    found, tunings = measured
    endings = [('head_scale',)] * 4 + [('attn_norm.weight',)]
    endings += [('head_scale', 'head_gain', 'norm.weight'), ('head_scale', 'norm.weight')]
    assert list(found['numbers'].values())[:7] == [4, 4, 32, 32, 32, 8 + 5 * 16, 32 + 5 * 16]
    for (start, end, changed, _), ending in zip(tunings[:-1], endings, strict=True):
        assert all(any(name.endswith(one) for name in changed) for one in ending)
        assert all(name.endswith(ending) for name in changed) and end < start
    start, end, changed, scale = tunings[-1]  # every weight
    assert end < start and not any('head_' in name for name in changed) and (scale == 1).all()
    for _, _, _, scale in tunings[:2]:
        assert (scale >= 1).all()


def test_nothing_is_tuned_or_chosen_on_test_samples(measured, monkeypatch):
    model, drawn = recall.trained(7), []
    monkeypatch.setattr(recall, 'samples', lambda name, *_: drawn.append(name) or iter(()))
    recall.tune(model, [{'params': [model.norm.weight], 'rate': 0.1}], 7)
    recall.best_uniform(model, 7)
    assert set(drawn) == {'tune', 'val'}


def test_cut_context_is_the_longest_of_training_which_is_a_copy_of_L_symbols(measured):
    found, _ = measured
    model = recall.trained(7)
    T = 16 + 1 + 15  # the symbols, an empty token, and all but the last of their copy
    assert found['cut_tokens'] == T
    [(tokens, answers)] = recall.samples('test', 1, 64, 64)
    n = answers.shape[1]
    with torch.no_grad():
        cut = recall.answer_cut(model, tokens, n)
        for k in range(n):
            end = 64 - n + 1 + k
            near(cut[:, k], model(tokens[:, end - T:end])[:, -1], atol=1e-5)
        assert (cut - model(tokens, tail=n)).abs().max() > 1e-4
        near(recall.answer_cut(model, tokens[:, -T:], 4), model(tokens[:, -T:])[:, -4:], 1e-5)


def test_cut_context_holds_an_answer_where_its_key_and_value_are_in_it(measured):
    found, *_ = measured
    assert found['held_by_cut'][:2] == [1, 1]  # up to 32 symbols nothing is cut
    [(tokens, answers)] = recall.samples('test', 7, 64, 64)
    held = []
    for row, values in zip(tokens.tolist(), answers.tolist()):
        for k, value in enumerate(values):
            end = 64 - len(values) + 1 + k
            context = row[end - 32:end]
            pairs = zip(context[:-1], context[1:])
            held.append((context[-1], value) in pairs)
    near(found['held_by_cut'][2], np.mean(held), atol=1e-6)
