"""
The search for scales: what moves and what stays, against AdamW written by hand, brute force and
hand calculations.

$ python -m pytest tests/test_tune_scale.py
"""

import contextlib
import copy
import io
import math
import shutil
import types

import numpy as np
import pytest
import torch
from conftest import as_run, near, on, read, refuses, scale_set, stage_here
from plain import plain_cut, plain_entropy, plain_losses
from torch.distributed.run import get_args_parser

import tune_scale
from configurator import settings
from lib import checkpoints
from lib.devices import learning_rate_at
from lib.errors import UserError
from lib.scales import apply_scale, save_scale, vectors_for
from lib.tokens import Windows
from tune_scale import first_scale, fit_scale, search_uniform, tune_vectors

RECIPE = {
    'tune': 'scale:0.05',
    'warmup_iters': 2,
    'max_iters': 6,
    'batch_size': 4,
    'micro_batch_size': 2,
    'compile': False,
}


def recipe(**changes):
    """The settings of tune_scale.py's defaults, RECIPE and these changes."""
    return vars(tune_scale) | RECIPE | changes


@pytest.fixture
def model(tiny):
    return tiny[0]


@pytest.fixture
def text(corpus_dir):
    return Windows(str(corpus_dir), 'train', 64, 5)


# ---------------------------------------------------------------------- head

def adamw_by_hand(model, windows, scale, r):
    """The recipe r in float64 and in full: the scales after it, and the loss at each step."""
    m, v, losses = 0, 0, []
    for step in range(r['max_iters']):
        scale = scale.detach().double().requires_grad_()
        tokens = torch.from_numpy(windows.batch(step, r['batch_size']))
        losses.append(plain_losses(model, tokens, scale).mean())
        g, = torch.autograd.grad(losses[-1], scale)
        if r['grad_clip']:
            g = g * min(1, r['grad_clip'] / g.norm())
        m = r['beta1'] * m + (1 - r['beta1']) * g
        v = r['beta2'] * v + (1 - r['beta2']) * g * g
        m_hat, v_hat = m / (1 - r['beta1'] ** (step + 1)), v / (1 - r['beta2'] ** (step + 1))
        lr = learning_rate_at(step, 0.05, 0.005, r['warmup_iters'], r['max_iters'])
        scale = scale - lr * m_hat / (v_hat.sqrt() + 1e-8)
        if r['min_scale'] is not None and scale.dim() == 2:  # not one scale per channel
            scale = scale.clamp(min=r['min_scale'])
    return scale, [loss.item() for loss in losses]


@pytest.mark.parametrize('changes', [
    {},
    {'min_scale': None, 'grad_clip': 0.0},
    {'grad_clip': 1e-3, 'beta1': 0.5, 'beta2': 0.5, 'checkpoint_activations': True},
    {'tune': 'channel:0.05'},
], ids=str)
def test_tuning_equals_adamw_written_by_hand(cpu, model, text, changes):
    how = recipe(**changes)
    start = torch.full((2, 4, 8) if 'tune' in changes else (2, 4), 1.02)
    expected, losses = adamw_by_hand(model, text, start, how)
    model.head_scale = start
    near(tune_vectors(model, text, how, cpu), losses, rtol=1e-5)
    scales = torch.stack([block.attn.head_scale for block in model.blocks])
    near(scales, expected.view(scales.shape), atol=2e-3)
    assert (scales - 1.02).abs().mean() > 0.02  # ten times that tolerance
    assert (scales.min() < 1) == bool({'min_scale', 'tune'} & set(changes))
    assert not any(p.requires_grad for p in model.parameters()), 'the model stays frozen'


@pytest.mark.parametrize('tune, endings', [
    ('scale', 'head_scale'),
    ('out', 'head_gain'),
    ('attn_norm', 'attn_norm.weight'),
    ('scale,out,norm', ('head_scale', 'head_gain', 'norm.weight')),
    ('sink:0.1', 'position.sink'),  # a vector of a position method
])
def test_only_the_vectors_named_by_tune_move_and_the_loss_falls(cpu, tiny_run, text, tune,
                                                                endings):
    method = 'sink' if 'sink' in tune else None
    model, _ = checkpoints.load_model('last', tiny_run, 'cpu', method)
    model.head_scale = 1.2
    before = copy.deepcopy(model)
    tune_vectors(model, text, recipe(tune=tune), cpu)
    for name, p in model.named_parameters():
        assert torch.equal(p, before.get_parameter(name)) != name.endswith(endings), name
    tokens = torch.from_numpy(text.batch(0, 4 * 6))  # what it is tuned on
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    assert model(inputs, targets).mean() < before(inputs, targets).mean()


def test_loss_that_is_not_finite_stops_tuning_and_says_where(cpu, model, text):
    model.norm.weight.data.fill_(math.inf)
    refuses('at step 1', tune_vectors, model, text, recipe(), cpu)


# ---------------------------------------------------------------------- uniform

def test_fit_equals_a_hand_calculation():
    # ln(i / L) = ln 2, 2 ln 2; best - 1 = 0.2, 0.5: a = (0.2 + 2 * 0.5) / (5 ln 2), residuals
    # -0.04 and 0.02 around the fitted 0.24 and 0.48, deviations from the mean -0.15 and 0.15
    fit = fit_scale([50, 100, 200, 400], [9, 1, 1.2, 1.5], 100)
    assert fit == pytest.approx((0.24 / math.log(2), 1 - 0.002 / 0.045))
    a, r2 = fit_scale([200, 400], [1, 1], 100)
    assert a == 0 and math.isnan(r2)  # one value has no R2


def test_candidates_end_at_or_before_the_last():
    assert tune_scale.candidates([1.0, 2.0, 0.6]) == [1.0, 1.6]
    assert tune_scale.candidates([1.0, 1.3, 0.1]) == [1.0, 1.1, 1.2, 1.3]


def test_uniform_search_equals_brute_force_and_leaves_the_model_as_it_was(cpu, model, corpus_dir):
    windows, scales = Windows(str(corpus_dir), 'val', 128), np.array([0.3, 0.5, 1, 1.7, 3, 5, 9])
    plain = copy.deepcopy(model)
    run = as_run(model, cpu, n_samples=6, batch_tokens=600, tail=16)
    search = search_uniform(run, windows, scales.tolist())
    near(model.state_dict(), plain.state_dict())
    tokens = torch.from_numpy(windows.evenly_spaced(6))
    heads = [torch.full((2, 4), scale) for scale in scales]
    losses = np.array([plain_losses(model, tokens, one).mean(0) for one in heads])
    entropy = [plain_entropy(model, tokens[:, :-1], one).mean((0, 1, 2)) for one in heads]
    at = np.stack([losses[:, T - 16:T].mean(1) for T in (32, 64, 128)], axis=1)
    binned, drawn = (np.reshape(rows, (7, 64, 2)).mean(-1) for rows in (losses, entropy))
    best = scales[binned.argmin(0)]
    assert search['lengths'] == [32, 64, 128] and len(set(best)) > 1
    cut = [plain_cut(plain, tokens, T, 16).mean() for T in search['lengths']]
    near(search['cut']['loss'], cut, rtol=1e-5)
    assert search['entropy'].pop(3) is None  # six of the seven are drawn
    near(search['entropy'], np.delete(drawn, 3, axis=0), atol=1e-4)
    for name, expected in {
            'loss_at_length': at, 'best_by_length': scales[at.argmin(0)], 'loss': binned,
            'best_loss_by_position': binned.min(0), 'best_by_position': best}.items():
        near(search[name], expected, rtol=1e-5)
    assert (search['fit_a'], search['fit_r2']) == fit_scale(search['position'], best, 32)


# ---------------------------------------------------------------------- as run

UNIFORM = '--method=uniform --candidate_range=[0.5,4.0,0.5]'
STEPS = '--max_iters=6 --warmup_iters=2 --batch_size=4 --micro_batch_size=2 '
HEAD = STEPS + '--target_length=64 '


def tune(out_dir, command):
    command = f'--n_samples=4 --compile=False {command}'
    return stage_here('tune_scale', *on(out_dir, out_dir, command))


@pytest.fixture(scope='module')
def tuned(tiny_run, tmp_path_factory):
    """
    A folder with last.pt of tiny_run and another model's checkpoint, after --method=uniform of both
    and then head at 2L. Returns the folder, and what the two stages printed.
    """
    out_dir = tmp_path_factory.mktemp('tuned')
    shutil.copy(tiny_run / 'last.pt', out_dir)
    state = checkpoints.load(tiny_run / 'last.pt')
    state['model']['head.weight'] *= 1.5
    checkpoints.save(out_dir / 'other.pt', **state)
    uniform = tune(out_dir, f'{UNIFORM} --compare=["{out_dir}/other.pt"]')
    return out_dir, uniform, tune(out_dir, HEAD)


def applied(out_dir, path):
    """The folder's model under a scale file."""
    model, info = checkpoints.load_model('last', out_dir, 'cpu')
    assert apply_scale(model, str(path), info) == path.stem
    return model


def test_uniform_file_holds_the_search_of_each_checkpoint(tuned):
    out_dir, printed, _ = tuned
    data, fit = read(out_dir / 'scale_uniform.json'), read(out_dir / 'scale_uniform_fit.json')
    assert data['target_length'] == 256 and data['lengths'] == [32, 64, 128, 256]  # L ... 8L
    for name, search in data['searches'].items():
        assert f"{name}: scale = 1 + {search['fit_a']:.4f} ln(i / 32)" in printed
    one, other = data['searches'].values()  # two checkpoints of the same step
    assert one['loss'] != other['loss'] and data['best_by_length'] == one['best_by_length']
    assert data['head_scale'] == [[data['best_by_length'][-1]] * 4] * 2
    assert [one['target_length'] for one in fit['sets']] == [64, 128, 256]
    wanted = [1 + fit['fit_a'] * math.log(n) for n in (2, 4, 8)]
    near([one['head_scale'][1][3] for one in fit['sets']], wanted, atol=1e-5)
    model = applied(out_dir, out_dir / 'scale_uniform_fit.json')
    for T, scale in (32, 1), (64, wanted[0]), (256, wanted[2]):
        with vectors_for(model, T):
            near(model.head_scale, [[scale] * 4] * 2, atol=1e-5)


def test_a_fit_that_falls_to_0_is_not_written_and_the_search_is(tuned, tmp_path):
    out_dir = shutil.copytree(tuned[0], tmp_path / 'run')
    printed = tune(out_dir, UNIFORM + ' --candidate_range=[0.1,0.2,0.1]')
    assert 'the fit falls to 0 at 256' in printed
    assert not (out_dir / 'scale_uniform_fit.json').exists()
    assert max(read(out_dir / 'scale_uniform.json')['best_by_length']) <= 0.2


def test_scale_file_says_what_it_is_and_gives_a_model_its_scales(tuned, tiny_run):
    out_dir, path = tuned[0], tuned[0] / 'scale_head_64.json'
    data, uniform = read(path), read(out_dir / 'scale_uniform.json')
    assert (data['method'], data['block_size'], data['target_length']) == ('head', 32, 64)
    assert data['init_scale'] == uniform['best_by_length'][1]  # the best at 2L
    assert {'command', 'commit', 'versions', 'device', 'seconds', 'dataset'} <= data.keys()
    assert len(data['losses']) == 6 and np.shape(data['last_entropy']) == (2, 4)
    assert data['cut']['position'] == [32, 64]
    near(applied(out_dir, path).head_scale, data['head_scale'], rtol=1e-6)
    assert (out_dir / 'last.pt').read_bytes() == (tiny_run / 'last.pt').read_bytes()


def test_scales_are_tuned_on_train_and_measured_and_searched_on_val(tuned, tiny, corpus_dir):
    def windows(split, length):
        return Windows(str(corpus_dir), split, length, 314)

    data, uniform = (read(tuned[0] / f'scale_{name}.json') for name in ('head_64', 'uniform'))
    first = torch.from_numpy(windows('train', 64).batch(0, 4))
    start = torch.full((2, 4), data['init_scale'])
    near(data['losses'][0], plain_losses(tiny[0], first, start).mean(), rtol=1e-4)
    val, longer = (torch.from_numpy(windows('val', T).evenly_spaced(4)) for T in (64, 256))
    entropy = plain_entropy(tiny[0], val[:, :-1], torch.tensor(data['head_scale']))
    near(data['last_entropy'], entropy[..., -2:].mean((1, 3)), atol=1e-3)  # bins of 2
    search, = (one for one in uniform['searches'].values()
               if one['best_by_length'] == uniform['best_by_length'])
    at_8L = plain_losses(tiny[0], longer)[:, -uniform['settings']['tail']:].mean()
    near(search['loss_at_length'][1][3], at_8L, rtol=1e-4)  # candidate 1 is 1.0


def test_tuning_that_raised_the_validation_loss_says_so(tuned):
    out_dir, _, printed = tuned
    out = tune(out_dir, HEAD + '--tune=scale:1e6 --label=far')
    for name, worse, text in ('', False, printed), ('_far', True, out):
        data = read(out_dir / f'scale_head_64{name}.json')
        _, before, after = (np.mean(curve['loss']) for curve in data['curves'].values())
        assert data['worse_than_start'] == worse == bool(after > before)
        assert ('the validation loss rose' in text) == worse


def test_scales_tuned_with_another_position_method_are_not_overwritten(tuned):
    out_dir, kept = tuned[0], (tuned[0] / 'scale_head_64.json').read_bytes()
    with pytest.raises(UserError, match="tuned with position 'none'.*--label="):
        tune(out_dir, HEAD + '--position=llama4 --init_scale=1.2')
    assert (out_dir / 'scale_head_64.json').read_bytes() == kept
    tune(out_dir, HEAD + '--position=llama4 --init_scale=1.2 --label=llama4')
    assert read(out_dir / 'scale_head_64_llama4.json')['position_method'] == 'llama4'


def test_sets_are_tuned_one_from_the_other_and_read_back(tuned):
    out_dir, more = tuned[0], STEPS + '--init_scale=1.5 --tune=scale:0.05,out,norm '
    tune(out_dir, more + '--target_lengths=[128,64]')
    tune(out_dir, more + '--target_length=64 --label=first')
    data, first = read(out_dir / 'scale_sets.json'), read(out_dir / 'scale_head_64_first.json')
    one, other = data['sets']
    assert (one['target_length'], other['target_length']) == (64, 128)
    for kind in 'head_scale', 'head_gain':
        assert one[kind] == first[kind] != other[kind]
        assert np.abs(np.subtract(other[kind], first[kind])).max() < 6 * 0.05  # six steps from it
    assert len(one['norm']) == 5 and data['losses'][:6] == first['losses']
    assert data['tuning_tokens'] == 6 * 4 * (64 + 128)
    loaded, *_, after = data['curves'].values()
    near(after['loss'][:16], loaded['loss'][:16], rtol=1e-6)  # up to L no set is used
    model = applied(out_dir, out_dir / 'scale_sets.json')
    with vectors_for(model, 64):
        near(model.head_scale, one['head_scale'], rtol=1e-6)


def test_channel_scales_are_a_vector_per_head_and_read_back(tuned):
    out_dir, more = tuned[0], STEPS + '--init_scale=1.5 --tune=channel --label=channel '
    tune(out_dir, more + '--target_lengths=[64,128]')
    path = out_dir / 'scale_sets_channel.json'
    scales = np.array([one['head_scale'] for one in read(path)['sets']])
    assert scales.shape == (2, 2, 4, 8) and (np.abs(scales - 1.5).max((0, 3)) > 0.01).all()
    model, tokens = applied(out_dir, path), torch.arange(65)[None]
    for length, scale in (32, np.ones((2, 4))), (64, scales[0]):  # up to L the model's own
        with vectors_for(model, length):
            expected = plain_losses(model, tokens[:, :length + 1], scale)
            near(model(tokens[:, :length], tokens[:, 1:length + 1]), expected, atol=1e-5)
            near(model.head_scale, scale.reshape(2, 4, -1).mean(-1), atol=1e-6)


def test_rates_are_the_papers_and_those_of_the_studies():
    """Head scales: section 4.2 of the paper."""
    assert tune_scale.rates_of('scale,channel,out,norm,attn_norm,sink') == {
        'scale': 0.1, 'channel': 0.03, 'out': 0.02, 'norm': 0.01, 'attn_norm': 0.01, 'sink': 0.02}


def test_start_is_interpolated_in_ln_of_the_length(tiny, tmp_path):
    def start(T, lengths=(32, 64, 128)):
        save_scale(tmp_path / 'scale_uniform.json', tiny[1], {128: scale_set([[1] * 4] * 2)},
                   'uniform', lengths=lengths, best_by_length=[1.0, 1.2, 1.6])
        run = types.SimpleNamespace(model=tiny[0], info=tiny[1], settings={'out_dir': tmp_path})
        return first_scale(run, 'uniform', T)

    near([start(T) for T in (32, 64, 64 * 2 ** 0.5, 128)], [1.0, 1.2, 1.4, 1.6], 1e-6)
    for lengths in [32, 64], 'many', None, [[32], [64], [128]]:
        refuses('scale_uniform.json needs lengths', start, 64, lengths)


def test_every_setting_can_be_given_under_torchrun():
    """torchrun reads what follows the script, too, and stops where it could be two of its own."""
    for name in settings(vars(tune_scale)):
        with contextlib.redirect_stderr(io.StringIO()):
            get_args_parser().parse_args(['tune_scale.py', f'--{name}=1'])
