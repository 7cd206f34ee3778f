"""
Training: what it computes and writes, how it starts from other weights, and what it refuses.

$ python -m pytest tests/test_train.py
"""

import math
import shutil
import zlib

import pytest
import torch
from conftest import (
    TINY,
    assert_same,
    assert_steps,
    load,
    log_rows,
    losses_and_gradients,
    mistake,
    near,
    read,
)
from plain import plain_entropy, plain_losses
from torch.utils._python_dispatch import TorchDispatchMode

from configurator import run_config
from lib import checkpoints
from lib.devices import learning_rate_at
from lib.tokenizers import get_tokenizer
from lib.tokens import Windows, write_corpus
from model import ModelConfig, Transformer
from position import RoPE, Settings, random_places


@pytest.fixture(scope='module')
def rope(runs):
    return runs.train('rope', '--position=rope --max_iters=3 --eval_interval=1')


# ---------------------------------------------------------------------- the recipe

def test_learning_rate_warms_up_to_its_peak_and_falls_to_its_floor():
    schedule = [learning_rate_at(step, 1.0, 0.1, warmup=4, decay=24) for step in range(30)]
    assert schedule[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    quarter = 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2  # cos 45 degrees
    near([schedule[i] for i in (9, 14, 24)], [quarter, 0.55, 0.1], atol=1e-9)
    assert learning_rate_at(10, 1.0, 0.1, warmup=10, decay=10) == 1.0  # no room for a cosine


@pytest.mark.parametrize('files, warmup, steps', [
    ('finetune_8k', 20, 200),
    ('finetune_8k pi raw', 100, 1000),
    ('finetune_8k yarn raw', 20, 1000),
    ('finetune_8k raw yarn', 20, 1000),
])
def test_the_papers_recipes_compose_in_any_order(files, warmup, steps):
    recipe = {}
    for file in files.split():
        recipe |= run_config(f'config/{file}.py')
    assert recipe['max_iters'] == steps and recipe['warmup_iters'] * steps == warmup


def test_the_papers_model_still_learns_at_99_7_percent_of_its_peak_when_it_stops():
    """Section 4.1: TinyLlama's schedule over 3T tokens, stopped after 50K steps of 2M."""
    c = run_config('config/nope_1b.py')
    peak, warmup, decay = c['learning_rate'], c['warmup_iters'], c['lr_decay_iters']
    last = learning_rate_at(c['max_iters'], peak, c['min_lr'], warmup, decay)
    assert round(last / peak, 3) == 0.997
    assert c['max_iters'] * c['batch_size'] * c['block_size'] == 50_000 * 2 ** 21


def test_warm_up_below_1_is_a_share_of_the_steps(runs, plain):
    assert_same(plain, runs.train('share', '--warmup_iters=0.35'))  # of 12 steps: 4


# ---------------------------------------------------------------------- what a run computes

def test_a_run_leaves_its_log_settings_picture_and_kept_steps(runs, plain, corpus_dir):
    assert_steps(plain, 12)
    assert list(log_rows(plain, 'val_loss')) == [3, 4, 6, 9, 12]  # each third and the kept one
    assert '"tokens": 1536' in (plain / 'log.jsonl').read_text()  # 12 steps of 4 x 32
    assert (plain / 'loss.png').exists()
    last, kept, config = load(plain), load(plain, 'step_4.pt'), read(plain / 'config.json')
    assert config == last['settings'] == config | TINY | {'grad_clip': 1.0}
    checksum = zlib.crc32((corpus_dir / 'train.bin').read_bytes())
    assert last['data'] == kept['data'] == {str(corpus_dir): f'{checksum:08x}'}
    stopped = load(runs.train('four', '--max_iters=4'))
    near(kept['model'], stopped['model'])
    assert kept['digest'] == stopped['digest'] != last['digest']


def test_the_log_has_loss_and_attention_entropy_of_validation_windows(tiny_run, corpus_dir):
    """The loss is the mean of 8 windows, the entropy that of the first 4."""
    entropy = log_rows(tiny_run, 'entropy')
    assert list(entropy) == list(log_rows(tiny_run, 'val_loss')) == [20]
    model, _ = checkpoints.load_model('last', tiny_run, 'cpu')
    windows = torch.from_numpy(Windows(str(corpus_dir), 'val', 32).evenly_spaced(8))
    near(log_rows(tiny_run, 'val_loss')[20], plain_losses(model, windows).mean(), rtol=1e-5)
    near(entropy[20], plain_entropy(model, windows[:4, :-1]).mean(), atol=1e-4)


def test_training_equals_adamw_written_by_hand(runs):
    """Short convolutions have no weight decay."""
    found = load(runs.train('by_hand', '--short_conv=3 --max_iters=5 --grad_clip=0.5 '
                                       '--weight_decay=0.3 --beta1=0.8'))
    torch.manual_seed(1337)
    model = Transformer(ModelConfig(**found['model_config'])).init_weights()
    windows, m, v, clips = Windows(str(runs.dataset), 'train', 32, 1337), {}, {}, []
    for step in range(5):
        _, gradients = losses_and_gradients(model, torch.from_numpy(windows.batch(step, 4)))
        clips.append(min(1, 0.5 / torch.stack([g.norm() for g in gradients.values()]).norm()))
        lr = learning_rate_at(step, 1e-2, 1e-3, 4, 12)
        for name, g in gradients.items():
            p, g = model.get_parameter(name).data, clips[-1] * g
            m[name] = 0.8 * m.get(name, 0) + 0.2 * g
            v[name] = 0.95 * v.get(name, 0) + 0.05 * g * g
            m_hat, v_hat = m[name] / (1 - 0.8 ** (step + 1)), v[name] / (1 - 0.95 ** (step + 1))
            decay = 0 if name.endswith('conv.w') else 0.3
            p -= lr * (m_hat / (v_hat.sqrt() + 1e-8) + decay * p)
    near(found['model'], dict(model.state_dict()), atol=1e-4)
    assert min(clips) < 1


def test_best_pt_holds_the_lowest_validation_loss(runs, plain):
    loss = log_rows(plain)
    assert loss[1] == pytest.approx(math.log(257), abs=0.5)  # it knows nothing of 257 tokens yet
    assert loss[12] < loss[1] - 0.5, 'training does not lower the loss'
    out_dir = runs.copy(plain, 'worse')
    runs.resume('worse', '--max_iters=24 --learning_rate=0.5 --min_lr=0.5')
    val_loss, best = log_rows(out_dir, 'val_loss'), load(out_dir, 'best.pt')
    assert best['best_val_loss'] == min(val_loss.values()) == val_loss[best['step']]
    assert best['step'] < 24 and load(out_dir)['best_val_loss'] == best['best_val_loss']


@pytest.mark.parametrize('more', ['', '--position=rope --random_positions=64'])
def test_micro_batches_cannot_change_training(runs, more):
    """With random positions, all micro-batches of a step have the same ones."""
    one, *others = (runs.train(f'micro_{size}{len(more)}',
                               f'{more} --max_iters=3 --micro_batch_size={size}')
                    for size in (1, 2, 4))
    for other in others:
        for key in 'loss', 'val_loss':
            assert log_rows(other, key) == pytest.approx(log_rows(one, key), rel=1e-5)


def test_each_step_draws_other_random_positions(runs, monkeypatch):
    draws = []
    monkeypatch.setattr('model.random_places',
                        lambda place, drawn: draws.append(drawn) or random_places(place, drawn))
    runs.train('draws', '--position=rope --random_positions=64 --max_iters=2 --micro_batch_size=4')
    assert not torch.equal(draws[0], draws[1])


def test_evaluation_cannot_change_training_but_another_seed_does(runs, plain):
    often = runs.train('often', '--eval_interval=1 --eval_windows=9')
    assert log_rows(often) == log_rows(plain)
    assert log_rows(runs.train('seed', '--seed=1 --max_iters=1'))[1] != log_rows(plain)[1]


class Casts(TorchDispatchMode):
    """Lists the shapes of what is cast to bfloat16."""
    shapes = ()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype == torch.bfloat16:
            self.shapes += (tuple(out.shape),)
        return out


def test_each_weight_is_cast_once_a_pass_and_stays_float32(runs):
    with Casts() as casts:
        out_dir = runs.train('casts', '--dtype=bfloat16 --micro_batch_size=4 --max_iters=3 '
                                      '--eval_windows=1 --block_size=47 --keep_steps=[]')
    weights = load(out_dir)['model']
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    qkv = tuple(weights['blocks.0.attn.qkv.weight'].shape)
    # in each of 2 layers: 3 steps, a validation, and its entropies
    assert casts.shapes.count(qkv) == 2 * (3 + 2)


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(runs, plain):
    explode, out_dir = '--learning_rate=1e9 --min_lr=1e9 ', runs.copy(plain, 'exploding')
    more = explode + '--init_from=resume --max_iters=60 --log_interval=20 --eval_interval=60'
    line = mistake('train', *runs.arguments('exploding', more))
    assert 'loss became' in line and f'{out_dir}/last.pt' in line
    assert (out_dir / 'last.pt').read_bytes() == (plain / 'last.pt').read_bytes()
    assert all(math.isfinite(loss) for loss in log_rows(out_dir).values())
    line = mistake('train', *runs.arguments('early', explode + '--warmup_iters=0'))
    assert 'loss became' in line and 'last.pt' not in line  # there is none to go on from


def test_a_validation_loss_too_large_for_a_perplexity_is_no_crash(runs):
    """exp(710) is more than a float holds; the loss itself is finite."""
    out_dir = runs.train('huge', '--learning_rate=20 --min_lr=20 --warmup_iters=0 --max_iters=6')
    assert max(log_rows(out_dir, 'val_loss').values()) > 710


# ---------------------------------------------------------------------- resuming

@pytest.mark.parametrize('more', ['--position=rope', '--position=rope --random_positions=64',
                                  '--short_conv=3'])
def test_runs_in_two_parts_equal_unbroken_ones(runs, more):
    whole = runs.train(f'whole{len(more)}', f'{more} --max_iters=6')
    runs.train(f'parts{len(more)}', f'{more} --max_iters=3')
    for _ in range(2):  # the second time it had ended
        assert_same(whole, runs.resume(f'parts{len(more)}', f'{more} --max_iters=6'))


def test_resume_names_the_settings_that_changed_and_uses_them(runs, plain):
    runs.copy(plain, 'changed')
    out_dir = runs.resume('changed', '--weight_decay=0.2 --max_iters=13')
    assert 'weight_decay = 0.2 (was 0.1)' in runs.printed
    assert 'learning_rate =' not in runs.printed
    group, = load(out_dir)['optimizer']['param_groups']
    assert group['weight_decay'] == 0.2


def test_resuming_on_other_text_is_refused_and_on_a_copy_goes_on(runs, plain, corpus_dir):
    other = runs.folder / 'other'
    write_corpus(other, get_tokenizer('bytes'), {'train': ['other ' * 500], 'val': ['o ' * 500]})
    mixture = f'--dataset={corpus_dir}:0.7,{other}:0.3'
    assert_steps(runs.train('mixture', f'{mixture} --max_iters=2'), 2)
    for dataset in f'--dataset={other}', mixture:
        assert f'dataset {other}' in runs.refused('plain', f'--init_from=resume {dataset}')
    runs.copy(plain, 'text')
    copied = runs.copy(corpus_dir, 'copied')
    assert_steps(runs.resume('text', f'--dataset={copied} --max_iters=13'), 13)
    shutil.copytree(other, copied, dirs_exist_ok=True)  # the same folder, prepared anew
    assert f'dataset {copied}' in runs.refused(
        'text', f'--init_from=resume --dataset={copied} --max_iters=13')


def test_a_run_that_lost_its_last_checkpoint_is_not_overwritten(runs, plain):
    folder = runs.copy(plain, 'lost')
    for name in 'last.pt', 'best.pt':
        (folder / name).rename(folder / f'step_{len(name)}.pt')
    assert 'already holds a run (step_' in runs.refused('lost', '--max_iters=3')


# ---------------------------------------------------------------------- starting from other weights

def test_fine_tuning_starts_from_the_given_weights_at_another_block_size(runs, plain):
    """The sizes come from the checkpoint; n_layer = 4 is only train.py's default."""
    command = f'--init_from={plain}/best.pt --max_iters=3 --block_size=64'
    out_dir = runs.train('fine', command, sizes='')
    model, _ = checkpoints.load_model(plain / 'best.pt', None, 'cpu')
    windows = torch.from_numpy(Windows(str(runs.dataset), 'train', 64, 1337).batch(0, 4))
    near(log_rows(out_dir)[1], plain_losses(model, windows).mean(), rtol=1e-5)
    config = read(out_dir / 'config.json')
    assert config == config | TINY | {'block_size': 64}
    longer = {'block_size': 64, 'pretrained_length': 32}
    assert load(out_dir)['model_config'] == vars(model.config) | longer


def test_fine_tuning_with_another_method_takes_its_settings(runs, plain):
    command = f'--init_from={plain}/last.pt --max_iters=1 '
    changes = '--position=rope --rope_base=5000'
    config = load(runs.train('to_rope', f'{command} {changes}'))['model_config']
    assert (config['position'], config['rope_base']) == ('rope', 5000.0)
    assert 'reads the same text in the same order' in runs.printed
    again = f'--init_from={runs.folder}/to_rope/last.pt --max_iters=1 --rope_base=9000'
    assert 'rope_base is 9000.0' in runs.refused('again', again)  # that of a model with RoPE
    runs.train('random', f'{command} {changes} --random_positions=64 --seed=2')
    assert 'same order' not in runs.printed
    state = torch.load(plain / 'last.pt', weights_only=True)
    del state['data']  # as in lessons/demo.pt
    torch.save(state, plain / 'bare.pt')
    runs.train('bare', f'--init_from={plain}/bare.pt --max_iters=1')
    assert 'reads the same text in the same order' in runs.printed


def test_fine_tuning_extends_rope_by_the_ratio_of_the_lengths_and_resumes(runs, rope):
    yarn = '--rope_scaling=yarn --block_size=96 --max_iters='
    start = f'--init_from={rope}/last.pt {yarn}'
    whole, part = runs.train('yarn', start + '4'), runs.train('yarn_in_two', start + '2')
    runs.resume('yarn_in_two', yarn + '4')
    assert log_rows(part) == log_rows(whole)
    assert load(whole)['model_config']['rope_scaling'] == 'yarn:3'
    for i, (more, scaling) in enumerate((('--rope_scaling=pi:2.5 --block_size=64', 'pi:2.5'),
                                         ('--rope_scaling=', ''), ('--position=none', ''))):
        run = runs.train(f'yarn_{i}', f'--init_from={whole}/last.pt --max_iters=1 {more}')
        config = load(run)['model_config']
        assert config['rope_scaling'] == scaling and config['pretrained_length'] == 32


def test_a_model_goes_on_without_rope_and_without_rope_settings(runs, rope):
    start = runs.train('windowed', '--position=rope,none --rope_window=8 --rope_share=0.5 '
                                   '--max_iters=1')
    for i, (run, how) in enumerate(((rope, 'config/drope.py'), (start, '--position=none'))):
        drope = runs.train(f'drope_{i}', f'{how} --init_from={run}/last.pt --max_iters=2')
        config = load(drope)['model_config']
        assert config['position'] == 'none'
        assert all(config[name] == getattr(Settings, name) for name in RoPE.settings)
    model, _ = checkpoints.load_model('last', start, 'cpu', position='llama4')
    assert model.config.rope_window == 0


# ---------------------------------------------------------------------- what it refuses

def test_disk_too_small_is_refused_before_the_first_step(runs, monkeypatch):
    monkeypatch.setattr(shutil, 'disk_usage', lambda _: shutil._ntuple_diskusage(10, 9, 1))
    assert 'GB are free' in runs.refused('no_room')
