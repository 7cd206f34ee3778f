"""Uniform search and head scales, against direct computations."""

import json
import math

import numpy as np
import pytest
import torch
from conftest import mistake, near, on, random_model, read, save_model, stage

import tune_scale
from common import read_checkpoint, setup
from data import Windows
from stage import open_model

HEAD = ('--target_length=64 --max_iters=3 --batch_size=4 --micro_batch_size=2 --init_scale=1.2 '
        '--compile=False').split()


def opened(run, scale=None):
    return open_model('last', str(run), setup('cpu', 'float32'), scale=scale)[0]


@pytest.fixture(scope='module')
def tuned(tiny_run, tmp_path_factory):
    """A folder with the scale files of a few searches of tiny_run."""
    folder = tmp_path_factory.mktemp('tuned')
    stage('tune_scale', *on(tiny_run, folder), '--method=uniform', '--n_samples=4',
          '--candidate_range=[0.8,2.0,0.4]', '--target_length=128')
    for more in ([], ['--min_scale=None', '--label=no_min', '--tune=head_scale:0.5',
                      '--init_scale=1.0'],
                 ['--tune=channel', '--label=channel'],
                 ['--tune=head_scale,head_gain,norm', '--label=all'],
                 ['--target_lengths=[64,128]', '--target_length=None']):
        stage('tune_scale', *on(tiny_run, folder), *HEAD, *more)
    return folder


def test_the_fit_is_the_least_squares_line_through_1_at_L():
    position, best = np.array([10, 20, 40, 80]), np.array([1.0, 1.3, 1.8, 1.9])
    x = np.log([2, 4, 8])
    a = np.linalg.lstsq(x[:, None], best[1:] - 1, rcond=None)[0][0]
    rest, spread = best[1:] - 1 - a * x, best[1:] - best[1:].mean()
    r2 = 1 - (rest ** 2).sum() / (spread ** 2).sum()
    assert tune_scale.fit_scale(position, best, 10) == pytest.approx((a, r2))
    assert np.isnan(tune_scale.fit_scale(np.arange(60), np.full(60, 1.1), 10)[1])


def test_a_uniform_search_reads_the_same_windows_with_each_scale(tiny_run, tuned, corpus_dir):
    found, model = read(tuned / 'scale_uniform.json'), opened(tiny_run)
    x = torch.from_numpy(Windows(str(corpus_dir), 'val', 128).evenly_spaced(4))
    assert found['search']['candidates'] == [0.8, 1.2, 1.6, 2.0]
    losses = []
    for scale in found['search']['candidates']:
        model.head_scale = scale
        losses.append(model(x[:, :-1], x[:, 1:]).mean(0))
    bins = torch.stack(losses).unflatten(1, (-1, 2)).mean(-1)
    candidates = np.array(found['search']['candidates'])
    assert found['search']['best_by_position'] == candidates[bins.argmin(0)].tolist()
    for n, best in zip(found['lengths'], found['best_by_length']):  # the last 64 tokens of each
        means = [of_one[max(0, n - 64):n].mean().item() for of_one in losses]
        assert best == found['search']['candidates'][int(np.argmin(means))]
    assert found['lengths'] == [32, 64, 128] and found['target_length'] == 128
    assert found['head_scale'] == [[found['best_by_length'][-1]] * 4] * 2
    fit = read(tuned / 'scale_uniform_fit.json')['sets']
    assert [one['head_scale'][0][0] for one in fit] == pytest.approx(
        [1 + found['fit_a'] * math.log(n / 32) for n in (64, 128)])


def test_a_model_that_depends_on_the_length_is_searched_at_each_by_itself(corpus_dir, tmp_path):
    model = random_model(vocab_size=257, position='rope', rope_scaling='dynamic_ntk:4')
    model.head_scale = 1.0
    save_model(model, tmp_path / 'last.pt', dataset=str(corpus_dir))
    stage('tune_scale', f'--out_dir={tmp_path}', '--method=uniform', '--target_length=128',
          '--candidate_range=[1.0,1.0,0.1]', '--n_samples=2', '--tail=4', '--device=cpu')
    found = read(tmp_path / 'scale_uniform_dynamic_ntk4.json')['search']
    near(found['loss_at_length'][0][0], found['cut']['loss'][0], atol=1e-6)  # both of L tokens


def test_only_head_scales_move_and_none_falls_below_1(tiny_run, tuned, corpus_dir, monkeypatch):
    model, runtime = opened(tiny_run), setup('cpu', 'float32')
    before = {name: p.clone() for name, p in model.named_parameters()}
    model.head_scale = 1.01
    for name, value in dict(max_iters=3, batch_size=4, micro_batch_size=4, compile=False).items():
        monkeypatch.setattr(tune_scale, name, value)
    groups = tune_scale.vectors_to_tune(model)
    tune_scale.tune_vectors(model, groups, Windows(str(corpus_dir), 'train', 64), runtime)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {f'blocks.{layer}.attn.head_scale' for layer in range(2)}
    assert not any(p.requires_grad for p in model.parameters())
    assert model.head_scale.min() == 1  # three steps lead from 1.01 below it
    assert np.min(read(tuned / 'scale_head_64_no_min.json')['head_scale']) < 1  # the ablation
    gains = read(tuned / 'scale_head_64_all.json')['head_gain'].values()
    assert np.min([*gains]) < 1  # Eq. (6) is about head scales


def test_the_rate_rises_for_20_steps_and_falls_by_a_cosine_to_a_tenth():
    found = [tune_scale.share_of_peak(step) for step in (0, 19, 20, 110, 200)]
    assert found == pytest.approx([0.05, 1, 1, 0.55, 0.1])


def test_the_first_step_follows_the_slope_of_the_loss(tiny_run, tuned, corpus_dir):
    """Adam's first step is the rate times the sign of the gradient, here by finite differences."""
    model, x = opened(tiny_run), Windows(str(corpus_dir), 'train', 64, seed=314).batch(0, 4)
    x = torch.from_numpy(x)

    def loss_with(scale):
        model.head_scale = scale
        return model(x[:, :-1], x[:, 1:]).double().mean()

    scales = torch.full((2, 4), 1.2)
    found = read(tuned / 'scale_head_64.json')['losses'][0]
    assert found == pytest.approx(loss_with(scales).item())
    slopes = torch.zeros(2, 4)
    for head in range(8):
        step = torch.zeros(8).index_fill(0, torch.tensor([head]), 0.05).view(2, 4)
        slopes.view(-1)[head] = loss_with(scales + step) - loss_with(scales - step)
    stage('tune_scale', *on(tiny_run, tuned), *HEAD, '--max_iters=1', '--warmup_iters=1',
               '--label=first', '--tune=head_scale:0.01')
    moved = torch.tensor(read(tuned / 'scale_head_64_first.json')['head_scale']) - 1.2
    assert torch.allclose(moved.abs(), torch.tensor(0.01), atol=1e-4)
    clear = slopes.abs() > 1e-5  # smaller ones are rounding errors
    assert clear.sum() > 3 and torch.equal(moved.sign()[clear], -slopes.sign()[clear])


def test_a_scale_file_gives_a_model_the_numbers_in_it(tiny_run, tuned):
    for name, shape in ('64', (2, 4)), ('64_all', (2, 4)), ('64_channel', (2, 4, 8)):
        path = tuned / f'scale_head_{name}.json'
        found, model = read(path), opened(tiny_run, path)
        assert model.head_scale.tolist() == pytest.approx(np.array(found['head_scale']))
        assert np.shape(found['head_scale']) == shape
        for vector, row in (found.get('norm', {}) | found.get('head_gain', {})).items():
            assert model.get_parameter(vector).flatten().tolist() == pytest.approx(row)


def test_head_scales_start_at_the_best_uniform_scale_linear_in_ln_T(tiny_run, tmp_path):
    model, info = open_model('last', str(tiny_run), setup('cpu', 'float32'))
    file = {'weights_digest': info['digest'], 'position_method': 'none', 'rope_scaling': '',
            'target_length': 128, 'head_scale': [[2.0] * 4] * 2, 'lengths': [32, 128],
            'best_by_length': [1.0, 2.0]}
    (tmp_path / 'scale_uniform.json').write_text(json.dumps(file))
    assert tune_scale.first_scale(tmp_path, 64, model, info) == pytest.approx(1.5)


def test_each_pass_takes_the_set_of_its_length(tiny_run, tuned):
    model, plain = opened(tiny_run, tuned / 'scale_sets.json'), opened(tiny_run)
    sets = {one['target_length']: torch.tensor(one['head_scale'])
            for one in read(tuned / 'scale_sets.json')['sets']}
    alone = read(tuned / 'scale_head_64.json')['head_scale']
    assert torch.equal(sets[64], torch.tensor(alone))
    middle = sets[64] + (sets[128] - sets[64]) * math.log(96 / 64) / math.log(2)
    x = torch.arange(200).view(1, -1) % 256
    for T, scales in {20: 1.0, 32: 1.0, 64: sets[64], 96: middle, 128: sets[128],
                      200: sets[128]}.items():
        plain.head_scale = scales
        assert torch.allclose(model(x[:, :T]), plain(x[:, :T]), atol=1e-6)


@pytest.mark.slow
def test_two_ranks_tune_like_one(tiny_run, tuned, tmp_path):
    stage('tune_scale', *on(tiny_run, tmp_path), *HEAD, ranks=2)
    one, two = read(tuned / 'scale_head_64.json'), read(tmp_path / 'scale_head_64.json')
    assert two['head_scale'] == pytest.approx(np.array(one['head_scale']), rel=1e-5)
    assert two['losses'] == pytest.approx(one['losses'], rel=1e-5)


@pytest.mark.parametrize('words, named', [
    ('--target_length=64', 'scale_uniform.json'), ('--tune=sink --init_scale=1.0', 'sink')])
def test_a_mistake_ends_in_one_line(tiny_run, tmp_path, words, named):
    assert named in mistake('tune_scale', *on(tiny_run, tmp_path), *words.split())


def test_scales_of_other_weights_or_another_reading_are_refused(tiny_run, tuned, tmp_path):
    path = tuned / 'scale_head_64.json'
    for change in {'weights_digest': 'x'}, {'position_method': 'rope'}:
        (tmp_path / 'changed.json').write_text(json.dumps(read(path) | change))
        with pytest.raises(SystemExit, match=''.join(change)):
            opened(tiny_run, tmp_path / 'changed.json')
    assert read(path)['weights_digest'] == read_checkpoint(tiny_run / 'last.pt')['digest']
