"""
The search for scales: what moves and what stays, against AdamW written by hand, brute force and hand calculations.

$ python -m pytest tests/test_tune_scale.py
"""

import contextlib
import io
import json
import math
import shutil

import numpy as np
import pytest
import torch
from conftest import mistake, plain_losses, plain_transformer, scale_set, stage
from torch.distributed.run import get_args_parser

import checkpoint
import tune_scale
from configurator import settings
from corpus import Windows
from tune_scale import first_scale, fit_scale, search_uniform, tune_vectors

RECIPE = dict(learning_rate=0.05, warmup_iters=2, max_iters=6, batch_size=4, micro_batch_size=2, beta1=0.9, beta2=0.95,
              grad_clip=1.0, min_scale=1.0, checkpoint_activations=False, compile=False, n_samples=6, batch_tokens=600)


@pytest.fixture
def recipe(monkeypatch):
    """Set the settings of tune_scale.py, as its command line would: recipe(max_iters=3)."""
    def change(**settings):
        for name, value in settings.items():
            monkeypatch.setattr(tune_scale, name, value)

    change(**RECIPE)
    return change


@pytest.fixture
def model(tiny_run):
    return checkpoint.load_model('last', tiny_run, 'cpu')[0]


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if not name.endswith('head_scale')}


# ----------------------------------------------------------------------------- head

def adamw_by_hand(model, windows, scale, recipe):
    """The recipe once more, in float64 and in full: the scales after it, and the loss at each step."""
    r = RECIPE | recipe
    scale = torch.full((2, 4), scale, dtype=torch.float64)
    m, v, losses = torch.zeros_like(scale), torch.zeros_like(scale), []
    for step in range(r['max_iters']):
        scale.requires_grad_(True)
        loss = plain_losses(model, torch.from_numpy(windows.batch(step, r['batch_size'])), scale).mean()
        g, = torch.autograd.grad(loss, scale)
        scale = scale.detach()
        g = g * min(1, (r['grad_clip'] or math.inf) / g.norm())  # 0 for none, as in train.py
        m = r['beta1'] * m + (1 - r['beta1']) * g
        v = r['beta2'] * v + (1 - r['beta2']) * g * g
        if step < r['warmup_iters']:
            lr = r['learning_rate'] * (step + 1) / r['warmup_iters']
        else:
            p = (step - r['warmup_iters']) / (r['max_iters'] - r['warmup_iters'])
            lr = r['learning_rate'] * (0.1 + 0.45 * (1 + math.cos(math.pi * p)))
        m_hat, v_hat = m / (1 - r['beta1'] ** (step + 1)), v / (1 - r['beta2'] ** (step + 1))
        scale = scale - lr * m_hat / (v_hat.sqrt() + 1e-8)
        if r['min_scale'] is not None:
            scale = scale.clamp(min=r['min_scale'])
        losses.append(loss.item())
    return scale, losses


@pytest.mark.parametrize('changes', [dict(), dict(min_scale=None), dict(grad_clip=1e-3, beta1=0.5, beta2=0.5),
                                     dict(grad_clip=0.0), dict(micro_batch_size=4, max_iters=1),
                                     dict(checkpoint_activations=True)], ids=str)
def test_tuning_equals_adamw_written_by_hand(cpu, recipe, model, corpus_dir, changes):
    recipe(**changes)
    windows = Windows(str(corpus_dir), 'train', 64, 5)
    expected, expected_losses = adamw_by_hand(model, windows, 1.02, changes)
    model.head_scale = 1.02
    losses = tune_vectors(model, windows, cpu)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    torch.testing.assert_close(model.head_scale.double(), expected, rtol=0, atol=2e-3)
    assert (model.head_scale - 1.02).abs().mean() > 0.02  # ten times that tolerance
    if not changes:
        assert expected.min() == 1  # the constraint was met


def test_only_head_scale_moves(cpu, recipe, model, corpus_dir):
    before = weights(model)
    model.head_scale = 1.2
    tune_vectors(model, Windows(str(corpus_dir), 'train', 64, 0), cpu)
    after = weights(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (model.head_scale != 1.2).all()
    assert not [name for name, p in model.named_parameters() if p.requires_grad]  # frozen again
    assert not [name for name, p in model.named_parameters() if p.grad is not None and not name.endswith('head_scale')]


@pytest.mark.parametrize('tune, endings', [('out', ('head_gain',)), ('norm', ('norm.weight',)),
                                           ('scale,out,norm', ('head_scale', 'head_gain', 'norm.weight'))])
def test_only_the_vectors_named_by_tune_move(cpu, recipe, model, corpus_dir, tune, endings):
    recipe(tune=tune)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.head_scale, windows = 1.2, Windows(str(corpus_dir), 'train', 64, 0)
    tokens = torch.from_numpy(np.concatenate([windows.batch(step, 4) for step in range(6)]))  # what it is tuned on
    loss = model(tokens[:, :-1], tokens[:, 1:]).mean()
    tune_vectors(model, windows, cpu)
    for name, p in model.named_parameters():
        moved = not torch.equal(p, before[name] if 'head_scale' not in name else torch.full_like(p, 1.2))
        assert moved == name.endswith(endings), name
    assert model(tokens[:, :-1], tokens[:, 1:]).mean() < loss


def test_unknown_vectors_are_refused(cpu, recipe, model, corpus_dir):
    recipe(tune='scale,gain')
    with pytest.raises(ValueError, match="tune is 'scale,gain'. Choose scale, out, norm"):
        tune_vectors(model, Windows(str(corpus_dir), 'train', 64, 0), cpu)


def test_constraint_keeps_every_scale_at_1_or_more_and_without_it_some_fall_below(cpu, recipe, model, corpus_dir):
    windows, lowest = Windows(str(corpus_dir), 'train', 64, 0), {}
    for min_scale in (1.0, 0.9, None):
        recipe(min_scale=min_scale, learning_rate=0.5, max_iters=8)
        model.head_scale = 1.0
        tune_vectors(model, windows, cpu)
        lowest[min_scale] = model.head_scale.min().item()
    assert lowest[1.0] == 1.0 and lowest[0.9] == pytest.approx(0.9, abs=1e-6) and lowest[None] < 0.85


def test_tuning_lowers_the_loss(cpu, recipe, model, corpus_dir):
    recipe(max_iters=25, learning_rate=0.3)
    windows = Windows(str(corpus_dir), 'train', 128, 0)
    tokens = torch.from_numpy(Windows(str(corpus_dir), 'val', 128, 0).fixed(40))

    def loss():
        with torch.no_grad():
            return model(tokens[:, :-1], tokens[:, 1:]).mean().item()

    model.head_scale = 1.0
    before = loss()
    tune_vectors(model, windows, cpu)
    assert loss() < before - 1e-3


def test_loss_that_is_not_finite_stops_tuning_and_says_where(cpu, recipe, model, corpus_dir):
    model.norm.weight.data.fill_(math.inf)
    with pytest.raises(ValueError, match='the loss became (nan|inf) at step 1; nothing was written'):
        tune_vectors(model, Windows(str(corpus_dir), 'train', 64, 0), cpu)


# ----------------------------------------------------------------------------- uniform

def test_fit_recovers_a_planted_scale():
    position = np.arange(1, 400)
    best = np.where(position > 50, 1 + 0.3 * np.log(position / 50), 17.0)  # what is not beyond L does not count
    a, r2 = fit_scale(position, best, 50)
    assert a == pytest.approx(0.3) and r2 == pytest.approx(1)


def test_fit_equals_a_hand_calculation():
    # ln(i / L) = ln 2, 2 ln 2; best - 1 = 0.2, 0.5: a = (0.2 + 2 * 0.5) / (5 ln 2), residuals -0.04 and 0.02 around the
    # fitted 0.24 and 0.48, deviations from the mean -0.15 and 0.15
    a, r2 = fit_scale([50, 100, 200, 400], [9, 1, 1.2, 1.5], 100)
    assert a == pytest.approx(0.24 / math.log(2)) and r2 == pytest.approx(1 - 0.002 / 0.045)


def test_fit_of_one_value_has_no_r2():
    a, r2 = fit_scale([200, 400], [1, 1], 100)
    assert a == 0 and math.isnan(r2)


def test_uniform_search_equals_brute_force(cpu, recipe, model, corpus_dir):
    recipe(last=16)
    windows, scales = Windows(str(corpus_dir), 'val', 128, 0), [0.3, 0.5, 1.0, 1.7, 3.0, 5.0, 9.0]
    search = search_uniform(model, windows, scales, 32, cpu)
    tokens = torch.from_numpy(windows.fixed(6))
    with torch.no_grad():
        losses = np.array([plain_losses(model, tokens, torch.full((2, 4), s)).mean(0).numpy() for s in scales])
        attention = [plain_transformer(model, tokens[:, :-1], torch.full((2, 4), s))[1] for s in scales]
    entropy = np.array([torch.special.entr(a).sum(-1).mean((0, 1, 2)).numpy() for a in attention])

    assert search['lengths'] == [32, 64, 128]
    at = np.stack([losses[:, T - 16:T].mean(1) for T in (32, 64, 128)], axis=1)
    np.testing.assert_allclose(search['loss_at_length'], at, rtol=1e-5)
    assert list(search['best_by_length']) == [scales[i] for i in at.argmin(0)]
    bins = len(search['position'])
    binned = losses.reshape(7, bins, -1).mean(-1)
    np.testing.assert_allclose(search['loss'], binned, rtol=1e-5)
    drawn = [0, 1, 2, 4, 5, 6]
    assert search['entropy'].pop(3) is None  # six of the seven are drawn
    np.testing.assert_allclose(search['entropy'], entropy.reshape(7, bins, -1).mean(-1)[drawn], atol=1e-4)
    best = np.array(scales)[binned.argmin(0)]
    assert len(set(best)) > 1 and list(search['best_by_position']) == list(best)
    np.testing.assert_allclose(search['best_loss_by_position'], binned.min(0), rtol=1e-5)
    beyond = search['position'] > 32
    x = np.log(search['position'][beyond] / 32)[:, None]
    a, residual, *_ = np.linalg.lstsq(x, best[beyond] - 1)
    assert search['fit_a'] == pytest.approx(a[0])
    assert search['fit_r2'] == pytest.approx(1 - residual[0] / (len(x) * best[beyond].var()))


# ----------------------------------------------------------------------------- as run

def arguments(out_dir, *more):
    return [f'--out_dir={out_dir}', '--device=cpu', '--dtype=float32', '--n_samples=4', '--compile=False', *more]


UNIFORM = ['--method=uniform', '--candidate_range=[0.5,4.0,0.5]']
HEAD = ['--method=head', '--max_iters=6', '--learning_rate=0.05', '--warmup_iters=2', '--batch_size=4',
        '--micro_batch_size=2', '--target_length=64']


@pytest.fixture(scope='module')
def tuned(tiny_run, tmp_path_factory):
    """A copy of tiny_run with a second checkpoint of another step, after --method=uniform and then head at 2L."""
    out_dir = tmp_path_factory.mktemp('tuned')
    shutil.copy(tiny_run / 'last.pt', out_dir)
    save_changed(tiny_run / 'last.pt', out_dir / 'step_10.pt', step=10)
    uniform, _ = stage('tune_scale', *arguments(out_dir, *UNIFORM, f"--compare=['{out_dir}/step_10.pt']"))
    head, _ = stage('tune_scale', *arguments(out_dir, *HEAD))
    return out_dir, uniform, head


def save_changed(source, path, step):
    """A checkpoint like source, with its queries and keys tripled, so that other scales are best for it."""
    model, info = checkpoint.load_model(source, None, 'cpu')
    for block in model.blocks:
        block.attn.qkv.weight.data[:48].mul_(3)
    state = checkpoint.model_state(model, info['tokenizer'], step, settings=info['settings'])
    checkpoint.save(path, **state)


def test_uniform_file_holds_the_search_of_each_checkpoint_and_the_best_scale(tuned, corpus_dir, cpu, recipe):
    out_dir, printed, _ = tuned
    data = json.loads((out_dir / 'scale_uniform.json').read_text())
    assert (out_dir / 'scale_uniform.png').stat().st_size > 1000
    assert list(data['searches']) == ['last, step 20', 'step_10, step 10']
    assert (data['method'], data['block_size'], data['target_length']) == ('uniform', 32, 256)
    assert data['lengths'] == [32, 64, 128, 256]  # L ... 8L
    recipe(n_samples=4, last=64)
    for name, search in data['searches'].items():
        model, _ = checkpoint.load_model(out_dir / f"{name.split(',')[0]}.pt", out_dir, 'cpu')
        scales = [0.5 * i for i in range(1, 9)]
        expected = search_uniform(model, Windows(str(corpus_dir), 'val', 256, 0), scales, 32, cpu)
        np.testing.assert_allclose(search['loss_at_length'], expected['loss_at_length'], rtol=1e-4)
        assert search['best_by_length'] == list(expected['best_by_length'])
        assert f"{name}: scale = 1 + {expected['fit_a']:.4f} ln(i / 32)" in printed
    assert data['searches']['last, step 20']['loss'] != data['searches']['step_10, step 10']['loss']
    assert data['best_by_length'] == data['searches']['last, step 20']['best_by_length']
    assert data['head_scale'] == [[data['best_by_length'][-1]] * 4] * 2


def test_scale_file_says_what_it_is_and_how_it_was_made(tuned):
    out_dir, _, printed = tuned
    data = json.loads((out_dir / 'scale_head_64.json').read_text())
    assert (out_dir / 'scale_head_64.png').stat().st_size > 1000
    info = checkpoint.load_model('last', out_dir, 'cpu')[1]
    assert (data['method'], data['block_size'], data['target_length']) == ('head', 32, 64)
    assert data['weights_digest'] == info['digest'] and len(info['digest']) == 64
    assert np.shape(data['head_scale']) == (2, 4) and np.min(data['head_scale']) >= 1
    assert len(data['losses']) == 6 and data['settings']['learning_rate'] == 0.05
    assert {'command', 'commit', 'versions', 'device', 'seconds', 'dataset', 'checkpoint'} <= data.keys()
    assert len(data['curves']) == 3 and np.shape(data['last_entropy']) == (2, 4)
    assert f"scales {np.min(data['head_scale']):.3f} to {np.max(data['head_scale']):.3f}" in printed


def test_head_scales_start_at_the_best_uniform_scale_of_the_target_length(tuned):
    out_dir, _, _ = tuned
    uniform = json.loads((out_dir / 'scale_uniform.json').read_text())
    start = json.loads((out_dir / 'scale_head_64.json').read_text())['init_scale']
    assert start == uniform['best_by_length'][1]  # at 2L


def test_tuning_that_raised_the_validation_loss_says_so_and_one_that_lowered_it_does_not(tuned):
    out_dir, _, printed = tuned
    out, _ = stage('tune_scale', *arguments(out_dir, *HEAD, '--learning_rate=1e6', '--label=far'))
    for name, worse, text in ('scale_head_64', False, printed), ('scale_head_64_far', True, out):
        data = json.loads((out_dir / f'{name}.json').read_text())
        _, before, after = (np.mean(curve['loss']) for curve in data['curves'].values())
        assert data['worse_than_start'] == worse == bool(after > before)
        assert ('the validation loss rose' in text) == worse


def test_sets_are_tuned_one_from_the_other(tuned):
    out_dir, _, _ = tuned
    more = [*HEAD[:-1], '--init_scale=1.5', '--tune=scale,out,norm']
    stage('tune_scale', *arguments(out_dir, *more, '--target_lengths=[128,64]', '--label=both'))
    stage('tune_scale', *arguments(out_dir, *more, '--target_length=64', '--label=first'))
    data, first = (json.loads((out_dir / name).read_text())
                   for name in ('scale_sets_both.json', 'scale_head_64_first.json'))
    assert [one['target_length'] for one in data['sets']] == [64, 128]
    for kind in ('head_scale', 'head_gain'):
        assert data['sets'][0][kind] == first[kind] and data['sets'][1][kind] != first[kind]
        assert np.abs(np.subtract(data['sets'][1][kind], first[kind])).max() < 6 * 0.05  # six steps from there
    assert len(data['sets'][0]['norm']) == 2 * 2 + 1 and data['losses'][:6] == first['losses']
    assert data['tuning_tokens'] == 6 * 4 * (64 + 128) and first['tuning_tokens'] == 6 * 4 * 64


def test_fit_is_written_as_sets_too(tuned):
    out_dir, _, _ = tuned
    fit = json.loads((out_dir / 'scale_uniform_fit.json').read_text())
    assert [one['target_length'] for one in fit['sets']] == [64, 128, 256]
    for one in fit['sets']:
        expected = 1 + fit['fit_a'] * math.log(one['target_length'] / 32)
        np.testing.assert_allclose(one['head_scale'], np.full((2, 4), expected), atol=1e-5)


def test_a_single_set_by_length_too_leaves_passes_of_L_tokens_as_they_were_trained(tuned, tmp_path):
    out_dir, _, _ = tuned
    stage('tune_scale', *arguments(tmp_path, *HEAD, f'--init_from={out_dir}/last.pt', '--init_scale=1.5',
                                   '--target_lengths=[64]'))
    model, info = checkpoint.load_model('last', out_dir, 'cpu')
    plain = model(torch.arange(32)[None])
    checkpoint.apply_scale(model, str(tmp_path / 'scale_sets.json'), info)
    assert torch.equal(model(torch.arange(32)[None]), plain)
    model(torch.arange(64)[None])
    assert (model.head_scale != 1).all()


def test_start_is_interpolated_in_ln_of_the_length(tuned, tmp_path):
    out_dir, _, _ = tuned
    info = checkpoint.load_model('last', out_dir, 'cpu')[1]
    checkpoint.save_scale(tmp_path / 'scale_uniform.json', info, {128: scale_set(np.ones((2, 4)))}, 'uniform',
                          lengths=[32, 64, 128], best_by_length=[1.0, 1.2, 1.6])
    found = [first_scale('uniform', tmp_path, info, T) for T in (32, 64, 64 * 2 ** 0.5, 128)]
    assert found == pytest.approx([1.0, 1.2, 1.4, 1.6])
    assert first_scale(1.35, tmp_path, info, 64) == 1.35
    for lengths in ([32, 64], 'many', None, [], [32, 64, 0], [[32], [64], [128]]):
        sets, best = {128: scale_set(np.ones((2, 4)))}, [1.0, 1.2, 1.6]
        checkpoint.save_scale(tmp_path / 'scale_uniform.json', info, sets, 'uniform',
                              lengths=lengths, best_by_length=best)
        with pytest.raises(ValueError, match='scale_uniform.json needs lengths and best_by_length'):
            first_scale('uniform', tmp_path, info, 64)


def test_scale_file_gives_a_fresh_model_the_tuned_scales(tuned):
    out_dir, _, _ = tuned
    model, info = checkpoint.load_model('last', out_dir, 'cpu')
    assert (model.head_scale == 1).all()
    assert checkpoint.apply_scale(model, str(out_dir / 'scale_head_64.json'), info) == 'scale_head_64'
    assert model.head_scale.tolist() == [pytest.approx(row) for row in json.loads(
        (out_dir / 'scale_head_64.json').read_text())['head_scale']]


def test_weights_file_is_untouched_by_tuning(tuned, tiny_run):
    assert (tuned[0] / 'last.pt').read_bytes() == (tiny_run / 'last.pt').read_bytes()


def test_scale_file_of_other_weights_is_refused(tuned):
    out_dir, _, _ = tuned
    model, info = checkpoint.load_model(out_dir / 'step_10.pt', None, 'cpu')
    for name in ('scale_head_64.json', 'scale_uniform.json'):
        with pytest.raises(ValueError, match=f'{name} was tuned for other weights than .*step_10.pt'):
            checkpoint.apply_scale(model, str(out_dir / name), info)
    with pytest.raises(ValueError, match='other weights'):
        first_scale('uniform', out_dir, info, 64)


def test_two_ranks_search_the_same_scale_as_one(tuned):
    out_dir, _, _ = tuned
    stage('tune_scale', *arguments(out_dir, *UNIFORM, '--label=two_ranks'), ranks=2)
    one, two = (json.loads((out_dir / f'scale_uniform{label}.json').read_text()) for label in ('', '_two_ranks'))
    (one, *_), (two,) = (result['searches'].values() for result in (one, two))
    np.testing.assert_allclose(two['loss_at_length'], one['loss_at_length'], rtol=1e-5)
    assert two['best_by_length'] == one['best_by_length']
    assert (out_dir / 'scale_uniform_fit_two_ranks.json').exists()  # not over the other


def test_two_ranks_tune_the_same_scales_as_one(tuned):
    out_dir, _, _ = tuned
    stage('tune_scale', *arguments(out_dir, *HEAD, '--label=two_ranks'), ranks=2)
    one, two = (json.loads((out_dir / f'scale_head_64{label}.json').read_text()) for label in ('', '_two_ranks'))
    assert '2 ranks' in two['device'] and '1 ranks' in one['device']
    np.testing.assert_allclose(two['losses'], one['losses'], rtol=1e-5)
    np.testing.assert_allclose(two['head_scale'], one['head_scale'], atol=2e-3)
    assert np.abs(np.array(one['head_scale']) - one['init_scale']).max() > 0.05
    np.testing.assert_allclose(two['curves']['head scale']['loss'], one['curves']['head scale']['loss'], rtol=1e-3)


def test_every_setting_can_be_given_under_torchrun():
    refused = []
    for name in settings(vars(tune_scale)):
        with contextlib.redirect_stderr(io.StringIO()):
            try:  # torchrun reads what follows the script too, and stops where it could be two of its own options
                get_args_parser().parse_args(['tune_scale.py', f'--{name}=1'])
            except SystemExit:
                refused.append(name)
    assert refused == []


def test_compared_checkpoint_of_the_same_step_does_not_replace_the_first(tuned, tmp_path):
    out_dir, _, _ = tuned
    shutil.copy(out_dir / 'last.pt', tmp_path)
    save_changed(out_dir / 'last.pt', tmp_path / 'other.pt', step=20)
    stage('tune_scale', *arguments(tmp_path, *UNIFORM, f"--compare=['{tmp_path}/other.pt']"))
    before, after = (json.loads((folder / 'scale_uniform.json').read_text()) for folder in (out_dir, tmp_path))
    assert len(after['searches']) == 2
    assert next(iter(after['searches'].values())) == before['searches']['last, step 20']
    assert after['head_scale'] == before['head_scale']


@pytest.mark.parametrize('wrong, message', [
    (['--method=head'], 'scale_uniform.json does not exist. Run tune_scale.py --method=uniform first'),
    (['--method=head', '--init_scale=best'], "init_scale is 'best'"),
    (['--method=head', '--init_scale=1.2', '--target_length=16'], 'target_length is 16 but'),
    (['--method=head', '--init_scale=1.2', '--target_lengths=[32,64]'], 'target_length is 32 but'),
    (['--method=uniform', '--target_length=31'], 'target_length is 31 but'),
    (['--method=uniform', '--target_length=32'], 'target_length is 32 but'),  # no position lies beyond L
    (['--method=layer'], "method is 'layer'"),
    (['--method=uniform', '--last=0'], 'last is 0; it must be'),
    (['--target_length=0'], 'target_length is 0; it must be'),
    (['--learning_rate=-1'], 'learning_rate is -1.0; it must be'),
    (['--method=uniform', '--candidate_range=[0.0,1.0,0.1]'], 'candidate_range'),
    (['--method=uniform', '--candidate_range=[2.0,1.0,0.1]'], 'candidate_range'),
    (['--method=uniform', '--candidate_range=[1.0,2.0,0.0]'], 'candidate_range'),
], ids=str)
def test_mistakes_are_one_line_before_any_work(tiny_run, tmp_path, wrong, message):
    out_dir = tmp_path / 'out'
    assert message in mistake('tune_scale', *arguments(out_dir, f'--init_from={tiny_run}/last.pt', *wrong))
    assert not out_dir.exists()
