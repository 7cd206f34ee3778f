"""A trained model for a stage: opened, scaled, and its results beside it."""


import pytest
import torch
from conftest import ROOT, near, random_model, read, save_model, stage, tokens

from common import Runtime, setup
from scales import set_scale, use_sets
from stage import bin_means, open_model, result_path, results_folder


@pytest.fixture
def saved(tmp_path):
    """A random model, and the path of its checkpoint."""
    model = random_model(position='rope,none', rope_base=500.0)
    save_model(model, tmp_path / 'run/last.pt', dataset='text')
    return model, tmp_path / 'run'


@pytest.fixture(autouse=True)
def folder_of_a_run(tmp_path):
    (tmp_path / 'run').mkdir()


def test_a_model_is_found_by_its_run_file_or_folder(saved, cpu):
    model, run = saved
    x = tokens(2, 40)
    for where in (('last', run), (f'{run}/last.pt', 'elsewhere'), (str(run), 'elsewhere')):
        opened, info = open_model(*where, cpu)
        assert torch.equal(opened(x), model(x)) and not opened.training
        assert not any(p.requires_grad for p in opened.parameters())
        assert info['path'].endswith('run/last.pt') and info['settings'] == {'dataset': 'text'}


def test_a_model_can_be_read_with_another_position_or_scaling(saved, cpu):
    model, run = saved
    other = random_model(position='rope,none', rope_base=500.0, rope_scaling='yarn:4')
    opened, info = open_model('last', run, cpu, rope_scaling='yarn:4', scale=1.5)
    other.load_state_dict(model.state_dict())
    other.head_scale = 1.5
    near(opened(tokens(1, 50)), other(tokens(1, 50)), atol=1e-6)
    assert info['label'] == 'yarn4_scale1.5'
    opened, info = open_model('last', run, cpu, position='none')
    assert (info['label'], opened.config.position) == ('none', 'none')
    with pytest.raises(SystemExit, match='does not fit'):
        open_model('last', run, cpu, position='kerple')


def test_half_precision_casts_matrices_and_nothing_else(saved):
    opened, _ = open_model('last', saved[1], Runtime(torch.device('cpu'), torch.bfloat16))
    half = {name.split('.')[-2] for name, p in opened.named_parameters()
            if p.dtype == torch.bfloat16}
    assert half == {'qkv', 'out', 'gate_up', 'head'}


def test_scales_come_as_number_or_array(saved, cpu):
    model, info = open_model('last', saved[1], cpu)
    assert set_scale(model, torch.full((2, 4), 2.0), info) == 'scales'
    assert (model.head_scale == 2).all()


def test_sets_leave_passes_up_to_L_as_they_were(saved, cpu):
    model, _ = open_model('last', saved[1], cpu)
    x, name = tokens(1, 64), 'blocks.0.attn.head_scale'
    short = model(x[:, :32])
    use_sets(model, {64: {name: torch.full((4, 1), 3.0)}})
    assert not torch.allclose(model(x), saved[0](x))
    assert torch.equal(model(x[:, :32]), short)


@pytest.mark.parametrize('init_from, given, folder', [
    ('last', set(), 'out/demo/nope'), ('best', set(), 'out/demo/nope'),
    ('/models/tiny/a.gguf', set(), 'out/tiny-a'), ('hf:ORG/NAME-0.6B', set(), 'out/ORG-NAME-0.6B'),
    ('/runs/a/last.pt', set(), 'out/runs-a'), ('/runs/a/step_5.pt', set(), 'out/a-step_5'),
    ('/models/tiny/llama', {'out_dir'}, 'out/demo/nope')])
def test_results_go_beside_the_model(monkeypatch, tmp_path, init_from, given, folder):
    assert results_folder('out/demo/nope', init_from, given) == folder


def test_a_result_of_other_weights_is_not_replaced(tmp_path):
    info = {'digest': 'a', 'path': 'x', 'label': '', 'dataset': ''}
    path = result_path(tmp_path, 'entropy', '', info)
    (tmp_path / 'entropy.json').write_text('{"weights_digest": "b"}')
    with pytest.raises(SystemExit, match='other weights'):
        result_path(tmp_path, 'entropy', '', info)
    assert result_path(tmp_path, 'entropy', '', info, 'data/x', 'val') == f'{path}_x_val'
    (tmp_path / 'entropy.json').write_text('{"weights_digest": "a"}')
    assert result_path(tmp_path, 'entropy', '', info) == path


def test_a_result_says_how_it_was_made(tiny_run, tmp_path):
    stage('eval_ppl', f'--init_from={tiny_run}', f'--out_dir={tmp_path}', '--lengths=[32]',
          '--max_windows=2', '--label=$\\foo$', '--device=cpu')
    found = read(tmp_path / 'eval_ppl_$\\foo$.json')
    assert found['command'].startswith('python eval_ppl.py --init_from=')
    assert found['settings']['max_windows'] == 2 and found['versions']['torch'] == torch.__version__
    assert (tmp_path / 'eval_ppl_$\\foo$.png').exists()


# The losses of the checkpoints of the repository on 128 tokens, as they were before the core was
# rebuilt (commit 23254a5, float32, one thread): mean, and the last of them
RECORDED = {
    'lessons/demo.pt': [11.774423, 21.092329],
    'lessons/demo.pt lessons/scale_uniform.json': [11.629484, 17.528912],
    'lessons/demo.pt lessons/scale_head_640.json': [11.754181, 19.953598],
    'lessons/models/none/last.pt': [9.169269, 4.510002],
    'lessons/models/none/last.pt lessons/models/none/scale_head_1024.json': [9.613830, 4.807302],
    'lessons/models/rope/last.pt': [8.073429, 4.861689],
    'lessons/models/conv/last.pt': [9.770666, 10.062113],
    'lessons/models/conv/last.pt lessons/models/conv/scale_head_1024.json': [9.761565, 9.009310],
}


@pytest.mark.parametrize('name', RECORDED)
def test_every_checkpoint_and_scale_file_gives_the_losses_that_it_gave(name):
    checkpoint, _, scale = name.partition(' ')
    model, _ = open_model(str(ROOT / checkpoint), '', setup('cpu', 'float32'),
                          scale=str(ROOT / scale) if scale else None)
    x = torch.arange(129).view(1, -1) * 7 % 250
    losses = model(x[:, :-1], x[:, 1:])[0]
    near([losses.mean().item(), losses[-1].item()], RECORDED[name], atol=1e-5)


def test_bins_are_means_of_positions_counted_from_1():
    middle, means = bin_means(torch.tensor([[1.0, 3, 5, 7, 100]]), 2)
    near(middle, [1.5, 3.5])
    near(means, [[2, 6]])
