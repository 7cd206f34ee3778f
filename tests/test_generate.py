"""
Decoding, compared with repeated full passes and with probabilities computed by hand; and sample.py.

$ python -m pytest tests/test_generate.py
"""

import json
import math
import shutil

import pytest
import torch
from conftest import EVERY, near, random_model, refuses, stage_here, tokens

from lib.exports import save_folder
from lib.generate import (
    Decoding,
    complete,
    generate,
    new_cache,
    read_prompts,
    sample_token,
)
from lib.tokenizers import get_tokenizer, tokenizer_state

P = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2])  # of five tokens


# ---------------------------------------------------------------------- one token

@pytest.mark.parametrize('settings', [{'temperature': 0}, {'temperature': 1e-46}, {'top_k': 1}],
                         ids=str)
def test_temperature_0_and_top_k_1_take_the_likeliest_and_the_first_of_equals(settings):
    logits = torch.randn(8, 50)
    logits[:2, 7:9] = 9.0
    assert torch.equal(sample_token(logits, **settings), logits.argmax(-1, keepdim=True))


# The cumulative probabilities, likeliest first, are 0.4, 0.65, 0.85, 0.95, 1. Of the two likeliest
# only: 0.615, 1. Squared and normalized again: 0.587, 0.817, 0.963 ...
@pytest.mark.parametrize('row', '''
{"temperature": 0.5}                | 01234
{"temperature": 2.0}                | 01234
{"top_k": 2}                        | 13
{"top_k": 9}                        | 01234
{"top_p": 0.01}                     | 1
{"top_p": 0.64}                     | 13
{"top_p": 0.66}                     | 134
{"top_k": 2, "top_p": 0.6}          | 1
{"top_k": 2, "top_p": 0.62}         | 13
{"temperature": 0.5, "top_p": 0.58} | 1
{"temperature": 0.5, "top_p": 0.6}  | 13
'''.strip().splitlines())
def test_top_k_and_top_p_keep_exactly_the_right_tokens_in_proportion(row):
    settings, kept = row.split('|')
    settings, kept = json.loads(settings), [int(digit) for digit in kept.strip()]
    generator = torch.Generator().manual_seed(0)
    drawn = sample_token(P.log().expand(20_000, 5), generator=generator, **settings)
    expected = torch.zeros(5)
    expected[kept] = P[kept] ** (1 / settings.get('temperature', 1.0))
    shares = torch.bincount(drawn[:, 0], minlength=5) / 20_000
    assert shares.nonzero()[:, 0].tolist() == kept
    near(shares, expected / expected.sum(), atol=0.015)


# ---------------------------------------------------------------------- many tokens

@pytest.mark.parametrize('position', ['none', 'rope'])
@torch.no_grad()
def test_greedy_equals_argmax_of_repeated_full_forwards(position):
    model, ids = random_model(position=position), tokens(20).tolist()
    for _ in range(40):  # past block_size
        ids.append(model(torch.tensor([ids]))[0, -1].argmax().item())
    prompt, expected = ids[:20], ids[20:]
    assert list(generate(model, prompt, 40)) == complete(model, [prompt], 40)[0] == expected
    first = expected.index(expected[4])
    assert list(generate(model, prompt, 40, Decoding((expected[4],)))) == expected[:first]


def test_the_prompt_is_read_once_and_then_one_token_a_beam_and_the_last_logits_are_computed():
    model, seen = random_model(), []
    for module in model.embed, model.head:
        module.register_forward_hook(lambda _, inputs, y: seen.append(tuple(y.shape[:2])))
    list(generate(model, list(range(20)), 3))
    assert seen == [(1, 20), (1, 1)] + 2 * [(1, 1), (1, 1)]  # read, logits of
    seen.clear()
    complete(model, [[1, 2, 3], [4]], 4, Decoding(beams=3))
    assert seen[::2] == [(2, 3)] + 3 * [(6, 1)]


@pytest.mark.parametrize('beams', [1, 2])
def test_logits_that_are_not_finite_are_refused(beams):
    model = random_model()
    model.norm.weight.data[0] = math.nan
    refuses('logits of the model are not finite', complete, model, [[1, 2]], 3,
            Decoding(beams=beams))


def test_a_cache_that_is_too_short_is_refused():
    model = random_model()
    cache = new_cache(model, 1, 10)
    model(tokens(1, 8), cache=cache)
    with pytest.raises(ValueError, match='KV cache holds 10'):
        model(tokens(1, 3), cache=cache)


# ---------------------------------------------------------------------- completions

@pytest.mark.parametrize('position, beams', [('none', 1), ('none', 5), ('rope', 2)])
def test_completions_equal_those_of_transformers(tmp_path, position, beams):
    transformers = pytest.importorskip('transformers')
    model = random_model(position=position, vocab_size=257)
    model.head.weight.data *= 4  # so that some continuations are much likelier than others
    save_folder(tmp_path, model, tokenizer_state(get_tokenizer('bytes')), torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation='eager').eval()
    prompts, n_ended = [(7 * tokens(n) % 257).tolist() for n in (1, 7, 31)], 0
    often = tuple(range(0, 257, 9))
    for eos, least in ((), 0), ((256,), 0), (often, 0), (often, 4):
        how = Decoding(eos, beams=beams, min_new_tokens=least)
        found_here = complete(model, prompts, 12, how)
        for prompt, ours in zip(prompts, found_here):
            idx = torch.tensor([prompt])
            found = theirs.generate(idx, attention_mask=torch.ones_like(idx), max_new_tokens=12,
                                    min_new_tokens=least, num_beams=beams, do_sample=False,
                                    pad_token_id=0, eos_token_id=list(eos) or None)
            found = found[0, len(prompt):].tolist()
            end = next((i for i, token in enumerate(found) if token in eos), 12)
            assert ours == found[:end]
            n_ended += end < 12
    assert n_ended > 0


@pytest.mark.parametrize('beams', [1, 3])
@pytest.mark.parametrize('changes', EVERY, ids=str)
def test_a_batch_of_unequal_prompts_completes_as_each_would_alone(changes, beams):
    model = random_model(**changes)
    model.head.weight.data *= 4
    prompts = [tokens(n).tolist() for n in (40, 3, 17, 40)]
    how = Decoding((5, 6, 7), beams=beams)
    together = complete(model, prompts, 10, how)
    assert together == [complete(model, [one], 10, how)[0] for one in prompts]


@pytest.mark.parametrize('changes', EVERY, ids=str)
@torch.no_grad()
def test_steps_of_equal_shapes_give_the_logits_of_steps_that_grow(changes):
    """The steps of equal shapes are those that are compiled. The two prompts differ in length."""
    model, found = random_model(**changes), []
    lengths, new = [9, 9 if model.needs_equal_lengths else 4], tokens(2, 6)
    for fixed in False, True:
        _, cache = read_prompts(model, [list(range(n)) for n in lengths], 8)
        if fixed:
            cache.fix()
        found.append([model(new[:, t:t + 1], tail=1, cache=cache) for t in range(6)])
        assert int(cache.length) == 15
    for grown, fixed in zip(*found):
        near(fixed, grown, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which('g++'), reason='torch.compile on a CPU needs g++')
@pytest.mark.parametrize('position', ['none', 'rope'])
def test_compiled_steps_are_one_graph_that_completes_as_the_model_does(position):
    model, stats = random_model(position=position), torch._dynamo.utils.counters['stats']
    model.head.weight.data *= 4
    before = stats['unique_graphs']
    for seed in 1, 2:  # two sets of prompts with the same lengths
        prompts = [tokens(n, seed=seed).tolist() for n in (40, 3, 17)]
        expected = complete(model, prompts, 20)
        assert complete(model, prompts, 20, Decoding(compile=True)) == expected
        assert stats['unique_graphs'] == before + 1
    expected = list(generate(model, prompts[0], 20))
    assert list(generate(model, prompts[0], 20, Decoding(compile=True))) == expected


# ---------------------------------------------------------------------- sample.py

def sample(folder, *arguments):
    return stage_here('sample', f'--out_dir={folder}', '--device=cpu', '--dtype=float32',
                      *arguments)


def test_sample_prints_the_prompt_and_goes_on(tiny_run):
    prompt = '--prompt=def naïve('
    out = sample(tiny_run, prompt, '--max_new_tokens=40', '--n_samples=2', '--seed=3')
    one, two = out.split('\n---\n')
    assert one.startswith('def naïve(') and two.startswith('def naïve(') and one != two
    assert 10 + 10 < len(one) <= 10 + 40  # 40 bytes; several may be one character
    assert sample(tiny_run, prompt, '--max_new_tokens=0') == 'def naïve(\n'


def test_characters_of_several_bytes_are_printed_whole_and_broken_ones_marked(tiny_run,
                                                                              monkeypatch):
    broken = '東'.encode()[:2] + b'a' + 'ʼn'.encode()[:1]  # inside the text, and at its end
    ids = 'Zoë→🙂'.encode() + broken
    monkeypatch.setattr('lib.generate.generate', lambda *given: iter(ids))
    assert sample(tiny_run, '--prompt=x') == 'xZoë→🙂�a�\n'


def test_sample_draws_as_it_is_told(tiny_run, tiny):
    def drawn(*how):
        return sample(tiny_run, '--prompt=def ', '--max_new_tokens=20', *how)

    ids = generate(tiny[0], [256, *b'def '], 20, Decoding((256,)))
    likeliest = 'def ' + bytes(ids).decode(errors='replace') + '\n'
    assert drawn('--temperature=0') == drawn('--top_k=1') == drawn('--top_p=0') == likeliest
    assert drawn('--seed=3') == drawn('--seed=3') != drawn('--seed=4')
