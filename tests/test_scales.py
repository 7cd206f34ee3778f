"""
Scale files: read as they were written, refused where they do not fit, and sets of them by length.

$ python -m pytest tests/test_scales.py
"""

import json
import math

import numpy as np
import pytest
import torch
from conftest import near, random_model, read, refuses, save_model, scale_set

from lib.answers import note
from lib.checkpoints import load_model
from lib.generate import complete, generate, new_cache
from lib.losses import by_position
from lib.scales import (
    apply_scale,
    identity,
    read_scale_file,
    save_scale,
    vectors_for,
)
from model import small_vectors

# 2 layers of 4 heads, one of them below 0, as tuning without a constraint may leave it
SCALES = [[1.0, 1.25, 1.5, 2.0], [3.0, 0.123456, -0.07, 1.6]]
ONES = torch.ones(2, 4)


@pytest.fixture
def loaded(tmp_path):
    """A model of L = 8 whose vectors are all 1, and what its checkpoint says."""
    model = random_model(vocab_size=20, block_size=8)
    model.load_state_dict(vectors(1, model), strict=False)
    save_model(model, tmp_path / 'last.pt')
    return load_model('last', tmp_path, 'cpu')


def write(path, info, changes=()):
    """A scale file of SCALES for 64 tokens, with entries changed. Returns its name."""
    save_scale(path, info, {64: scale_set(SCALES)}, 'head')
    path.write_text(json.dumps(read(path) | dict(changes)))
    return str(path)


def vectors(value, model):
    """Every vector that can be tuned, all of its entries being `value`."""
    return {name: torch.full_like(p, value) for name, p in small_vectors(model).items()}


def assert_ones(model):
    """Every vector is that of the checkpoint."""
    assert all((p == 1).all() for p in small_vectors(model).values())


# ---------------------------------------------------------------------- one set

def test_scale_of_a_stage_is_nothing_a_number_or_a_file(tmp_path, loaded):
    (model, info), said = loaded, []
    path = write(tmp_path / 'scale_head_64.json', info)
    for own, notes in (1.0, 0), (3.0, 2):
        model.head_scale = own
        for scale, label, expected in (
                (None, '', own * ONES), (1.2, 'scale1.2', 1.2 * ONES), (None, '', own * ONES),
                ((2 * ONES).numpy(), 'scales', 2 * ONES), (None, '', own * ONES)):
            assert apply_scale(model, scale, info) == label
            assert torch.equal(model.head_scale, expected)
        for scale, expected in ((2, 2 * ONES), (np.float32(2), 2 * ONES),
                                (torch.tensor(2.0), 2 * ONES), (path, torch.tensor(SCALES))):
            apply_scale(model, scale, info, said.append)
            assert torch.equal(model.head_scale, expected)
        assert len(said) == 2 * notes
        apply_scale(model, None, info)
    assert said[0].startswith('scale2 ') and said[3].startswith('scale_head_64 ')
    refuses('scale 1e+39 must be a number that float32', apply_scale, model, 1e39, info)
    assert info['path'] not in said[0]  # the checkpoint's scales are 1


def test_answers_of_models_that_differ_in_a_vector_alone_are_told_apart(loaded):
    model, info = loaded
    seen = [identity(model, None, info), identity(model, None, info)]
    for vector in model.blocks[1].attn.head_scale, model.norm.weight:
        vector.data[0] += 1
        seen.append(identity(model, None, info))
    assert seen[0] == seen[1] and len({one['scale'] for one in seen}) == 3


def test_answers_under_another_position_method_are_told_apart(tiny_run):
    seen = []
    for position, scaling in (None, None), ('llama4', None), ('rope', None), ('rope', 'pi:2'):
        model, info = load_model('last', tiny_run, 'cpu', position, scaling)
        seen.append(json.dumps(identity(model, None, info)))
    model.config.rope_base = 50.0
    seen.append(json.dumps(identity(model, None, info)))
    info['tokenizer'] |= {'eot_token': 7}
    seen.append(json.dumps(identity(model, None, info)))
    assert len(set(seen)) == 6


def test_a_scale_file_leaves_nothing_behind(tmp_path, loaded):
    """A file of scales alone does not say what the gains of norms are."""
    model, info = loaded
    path = tmp_path / 'all.json'
    save_scale(path, info, {64: vectors(3, model)}, 'head')
    for scale in write(tmp_path / 'scale.json', info), 1.0:
        apply_scale(model, str(path), info)
        assert all((p == 3).all() for p in small_vectors(model).values())
        apply_scale(model, scale, info)
        near(model.head_scale, torch.tensor(SCALES) if scale != 1 else ONES)
    assert_ones(model)


@pytest.mark.parametrize('rows', [
    torch.tensor(SCALES)[..., None],
    1 + torch.arange(8).view(2, 4, 1) * 2 ** -7,  # bfloat16 has such numbers, of many digits
    torch.rand(2, 4, 1), torch.rand(2, 4, 8) - 0.5])
def test_scale_file_reads_as_it_was_written_to_the_last_digit(tmp_path, loaded, rows):
    path, (model, info) = tmp_path / 'scale.json', loaded
    tuned = {f'blocks.{i}.attn.head_scale': row for i, row in enumerate(rows)}
    save_scale(path, info, {64: tuned}, 'head', losses=[2.5, 2.25])
    data, sets = read_scale_file(path, model, info)
    assert (data['method'], data['losses'], list(sets)) == ('head', [2.5, 2.25], [64])
    assert all(torch.equal(sets[64][name], tuned[name]) for name in tuned)
    assert '[2.5, 2.25]' in path.read_text(), 'a list of numbers is not on one line'


@pytest.mark.parametrize('changes, named', [
    ({'digest': 'another'}, 'last.pt'),
    ({'rope_scaling': 'yarn:4'}, '--rope_scaling='),
    ({'position': 'rope'}, '--position=none')])
def test_scale_file_of_other_weights_or_another_position_method_is_refused(tmp_path, loaded,
                                                                           changes, named):
    (model, info), path = loaded, write(tmp_path / 'scale.json', loaded[1])
    other = info | changes | {'model_config': info['model_config'] | changes}
    refuses(named, apply_scale, model, path, other)


# What a file holds, or the entries in which it differs from a whole one, and what the refusal
# names; 'odd.json' by default.
@pytest.mark.parametrize('row', '''

[]
{"head_scale": [[1
\udc80
DEEP
LACKS head_scale
LACKS target_length
LACKS weights_digest
LACKS numbers_digest
LACKS position_method
LACKS rope_scaling
{"sets": 5}
{"sets": [5]}
{"sets": {}}
{"target_length": "64"}
{"target_length": 1.5}
{"head_gain": null}
{"head_scale": {}}
{"head_scale": [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]}
{"head_scale": [[1, 1, 1, HUGE], [1, 1, 1, 1]]}
{"head_scale": [[1, 1, 1, "1.2"], [1, 1, 1, 1]]} | numbers
{"head_scale": [[1, 1, 1, true], [1, 1, 1, 1]]} | numbers
{"head_scale": [[-1, 1, 1, 1], [1, 1, 1, 1]]} | above 0
{"head_scale": [[0, 1, 1, 1], [1, 1, 1, 1]]} | above 0
{"head_gian": [[1, 1, 1, 1], [1, 1, 1, 1]]} | 'head_gain'
{"zzz": 1} | Remove it
{"norm": null}
{"norm": {"norm.weight": 5}}
{"norm": {"norm.weight": WIDE NaN]}}
{"norm": {"norm.weight": WIDE 1e39]}}
{"norm": {"other": WIDE 1.0]}}
'''.splitlines()[1:])
def test_scale_file_that_fits_no_model_is_refused(tmp_path, loaded, row):
    (model, info), path = loaded, tmp_path / 'odd.json'
    text, *named = row.split(' | ')
    text = text.replace('HUGE', '1' + 400 * '0').replace('WIDE', '[' + 31 * '1.0, ')
    text = text.replace('DEEP', 200_000 * '[')
    whole = read(write(path, info))
    if text.startswith('LACKS'):
        del whole[text.split()[1]]
        text = json.dumps(whole)
    elif text.endswith('}'):
        text = json.dumps(whole | json.loads(text))
    path.write_text(text, errors='surrogateescape')
    refuses(*named or ['odd.json'], apply_scale, model, str(path), info)
    assert_ones(model)


def test_scale_file_edited_by_hand_says_so_and_is_used(tmp_path, loaded, capsys):
    model, info = loaded
    note.cache_clear()
    rows = [[1.5, 1.25, 1.5, 2.0], [3.0, 0.12, 0.07, 1.6]]
    for changes, said in ({}, False), ({'head_scale': rows}, True):
        apply_scale(model, write(tmp_path / 'scale.json', info, changes), info, lambda line: None)
        assert ('changed after it was tuned' in capsys.readouterr().out) == said
    near(model.head_scale, rows, atol=1e-6)


def test_a_vector_that_the_registry_does_not_have_is_not_lost_in_silence(tmp_path, loaded):
    with pytest.raises(ValueError, match='blocks.0.attn.temperature'):
        save_scale(tmp_path / 'scale.json', loaded[1],
                   {64: {'blocks.0.attn.temperature': torch.ones(4)}}, 'head')


# ---------------------------------------------------------------------- sets by length

@pytest.fixture
def with_sets(tmp_path, loaded):
    """
    The model under sets for 4, 16 and 64 tokens: all vectors 3, 1.2 and 2. The first set is never
    used, because passes of up to L tokens keep the model's own vectors.
    """
    (model, info), path = loaded, tmp_path / 'scale_sets.json'
    sets = {4: 3.0, 16: 1.2, 64: 2.0}
    save_scale(path, info, {T: vectors(x, model) for T, x in sets.items()}, 'head')
    assert apply_scale(model, str(path), info) == 'scale_sets'
    return model


def test_another_scale_takes_the_place_of_sets(with_sets, loaded):
    apply_scale(with_sets, 3.0, loaded[1], lambda line: None)
    assert with_sets.scale_sets is None and torch.equal(with_sets.head_scale, 3 * ONES)
    apply_scale(with_sets, None, loaded[1])
    assert_ones(with_sets)  # the vectors of other kinds are those of the checkpoint


def test_another_position_method_is_part_of_the_label(tmp_path, tiny_run):
    for method, scale, label in ((None, 1.2, 'scale1.2'), ('none', 1.2, 'scale1.2'),
                                 ('llama4', None, 'llama4'), ('llama4', 1.2, 'llama4_scale1.2')):
        model, info = load_model('last', tiny_run, 'cpu', method)
        assert apply_scale(model, scale, info) == label


def test_a_pass_that_chose_no_set_gives_nan_and_no_wrong_number(with_sets):
    idx = torch.arange(9)[None]
    with vectors_for(with_sets, 9):
        assert with_sets(idx).isfinite().all()
    assert with_sets(idx).isnan().all()


@pytest.mark.parametrize('total, value', [
    (1, 1), (8, 1), (11, 1 + 0.2 * math.log2(11 / 8)), (16, 1.2), (32, 1.6), (64, 2), (99, 2)])
def test_sets_hold_every_vector_and_are_chosen_by_the_length_of_the_pass(with_sets, capsys, total,
                                                                         value):
    note.cache_clear()
    wanted = vectors(value, with_sets)
    with vectors_for(with_sets, total):
        near({name: with_sets.get_parameter(name).data for name in wanted}, wanted,
             atol=0 if total <= 8 else 1e-6)
    assert ('longer passes use' in capsys.readouterr().out) == (total > 64)


@torch.no_grad()
def test_cached_decoding_under_sets_equals_a_full_pass_of_the_length_fixed_before(with_sets):
    idx = torch.arange(40)[None] * 7 % 11
    cache = new_cache(with_sets, 1, 40)
    with vectors_for(with_sets, 40):
        full = with_sets(idx)
        parts = [with_sets(part, cache=cache) for part in idx.split([5, 1, 1, 33], dim=1)]
        ids = idx[:, :37]
        for _ in range(3):
            ids = torch.cat((ids, with_sets(ids)[:, -1:].argmax(-1)), dim=1)
    near(torch.cat(parts, 1), full, atol=1e-4)
    assert complete(with_sets, idx[:, :37].tolist(), 3) == ids[:, 37:].tolist()


def test_each_prompt_has_the_set_of_its_own_length_and_answer(with_sets):
    prompts = [[7 * t % 11 for t in range(n)] for n in (5, 40)]
    alone = [complete(with_sets, [prompt], 24)[0] for prompt in prompts]
    assert with_sets.needs_equal_lengths and complete(with_sets, prompts, 24) == alone
    assert [[*generate(with_sets, prompt, 24)] for prompt in prompts] == alone


@torch.no_grad()
def test_each_position_is_read_in_the_pass_that_ends_nearest(with_sets):
    windows = torch.arange(51)[None] * 7 % 11
    inputs, targets = windows[:, :-1], windows[:, 1:]
    losses, seen = by_position(with_sets, inputs, targets, lambda layer, a, q, k, place: q[..., 0])
    expected = []
    for first, end in ((0, 8), (8, 16), (16, 50)):
        with vectors_for(with_sets, end):
            expected.append(with_sets(inputs[:, :end], targets[:, first:end]))
    assert torch.equal(losses, torch.cat(expected, 1)) and seen.shape == (2, 1, 4, 50)
