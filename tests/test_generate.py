"""
Decoding against full passes, beam search against transformers, draws against probabilities by hand;
answers that survive a stop.

$ python -m pytest tests/test_generate.py -m ''
"""

import math
import shutil
from itertools import product

from configurator import UserError

import filelock
import pytest
import torch
from conftest import EVERY, near, random_model, stage, tokens

import generate as module
from generate import answer_all, complete, generate, identity, read_prompts

every = pytest.mark.parametrize('changes', EVERY, ids=str)


def sharp(seed=0, **changes):
    """A random model, some of whose next tokens are much likelier than others."""
    model = random_model(seed, **changes)
    model.head.weight.data *= 4
    return model


# ---------------------------------------------------------------------- the cache

@every
@pytest.mark.parametrize('fixed', [False, True])
@torch.no_grad()
def test_steps_with_a_cache_give_the_logits_of_full_passes_over_each_text_alone(changes, fixed):
    model, texts = random_model(**changes), tokens(2, 46)
    logits, cache = read_prompts(model, [text[:-6].tolist() for text in texts], 6)
    if fixed:
        cache.length = torch.tensor([40])  # as in a compiled step
    steps = texts[:, -6:].split(1, dim=1)
    found = torch.cat([logits[:, None], *(model(ids, cache=cache) for ids in steps)], 1)
    for text, its in zip(texts, found):
        near(its, model(text[None])[0, -7:], atol=1e-4)


@every
@pytest.mark.parametrize('beams', [1, 3])
def test_a_batch_completes_as_each_prompt_would_alone(changes, beams):
    model, prompts = sharp(**changes), [tokens(n).tolist() for n in (40, 3, 40)]
    how = 7, (5, 6, 7), beams
    together = complete(model, prompts, *how)
    assert together == [complete(model, [prompt], *how)[0] for prompt in prompts]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which('g++'), reason='torch.compile on a CPU needs g++')
@pytest.mark.parametrize('position', ['none', 'rope', 't5', 'cope'])
def test_compiled_steps_are_one_graph_that_writes_what_growing_steps_write(position):
    model, stats = sharp(position=position), torch._dynamo.utils.counters['stats']
    before = stats['unique_graphs']
    for seed in 1, 2:
        prompt = tokens(40, seed=seed).tolist()
        grown, compiled = (list(generate(model, prompt, 20, compile=on)) for on in (False, True))
        assert compiled == grown and stats['unique_graphs'] == before + 1
    other = object()  # a model of transformers stays as it is
    assert module.step_of(other, None, True) is other


# ---------------------------------------------------------------------- beam search

def test_completions_are_those_of_transformers(tmp_path):
    from test_convert import written
    model, eos = sharp(1, position='rope', vocab_size=257), list(range(0, 257, 9))
    theirs = written(tmp_path, model)
    for n, beams, least in product((22, 26, 32), (1, 2, 5), (0, 1)):
        prompt = 1 + 4 * tokens(1, n)
        found = theirs.generate(prompt, max_new_tokens=12, min_new_tokens=least, num_beams=beams,
                                do_sample=False, pad_token_id=0, eos_token_id=eos)
        [ours] = complete(model, prompt.tolist(), 12, eos, beams, eos * least)
        assert ours == [token for token in found[0, n:].tolist() if token not in eos]


def test_logits_that_are_not_finite_are_refused():
    model = random_model()
    model.norm.weight.data[0] = math.nan
    with pytest.raises(UserError, match='logits of the model are not finite'):
        complete(model, [[1] * 8], 1)


# ---------------------------------------------------------------------- drawn tokens

@pytest.mark.parametrize('temperature, top_k, expected', [
    (0, None, [0, 0, 1]), (1, None, [0.2, 0.3, 0.5]), (0.5, None, [4 / 38, 9 / 38, 25 / 38]),
    (1, 1, [0, 0, 1]), (0.5, 2, [0, 9 / 34, 25 / 34])])
def test_tokens_are_drawn_in_proportion_to_their_probabilities(temperature, top_k, expected,
                                                               monkeypatch):
    logits, random = torch.tensor([[0.2, 0.3, 0.5]]).log(), torch.Generator().manual_seed(0)
    monkeypatch.setattr(module, 'read_prompts', lambda *_: (logits, None))
    monkeypatch.setattr(module, 'step_of', lambda *_: None)
    drawn = [next(generate(None, [], 1, temperature, top_k, random)) for _ in range(10_000)]
    near(torch.tensor(drawn).bincount(minlength=3) / 10_000, expected, atol=0.02)


def test_sample_prints_the_prompt_and_draws_as_it_is_told(tiny_run, tiny):
    def sample(*how):
        return stage('sample', f'--out_dir={tiny_run}', '--device=cpu', '--dtype=float32',
                     '--prompt=def (', '--max_new_tokens=20', *how)

    [ids] = complete(tiny[0], [[256, *b'def (']], 20, [256])
    likeliest = f'def ({bytes(ids).decode()}\n'
    assert likeliest == sample('--temperature=0') == sample('--top_k=1')
    assert sample() == sample() != likeliest and sample('--seed=1') != sample()


def test_characters_of_several_bytes_are_printed_whole_and_broken_ones_marked(tiny_run,
                                                                              monkeypatch):
    broken = '東'.encode()[:2] + b'a' + 'ʼn'.encode()[:1]  # inside the text, and at its end
    ids = *'Zoë→🙂'.encode(), *broken, 256, 97  # 256 ends the text
    monkeypatch.setattr(module, 'generate', lambda *given: ids)
    assert stage('sample', f'--out_dir={tiny_run}', '--prompt=x') == 'xZoë→🙂�a�\n'


# ---------------------------------------------------------------------- answers

def test_answers_survive_a_stop_and_do_not_mix_with_others(tmp_path, cpu):
    asked, rows = [], [{'text': f'{i} ä'} for i in range(6)]

    def answers(about='this', path=tmp_path / 'new[1]/x'):
        asked.clear()
        found = answer_all(path, about, [9, 9, 4, 4, 4, 2], 10,
                           lambda items: asked.append(items) or [rows[i] for i in items], cpu)
        return [{'text': row['text']} for row in found]

    assert answers() == rows and asked == [[0], [1], [2, 3], [4, 5]]  # at most 10 tokens
    file = tmp_path / 'new[1]/x/0.jsonl'
    lines = file.read_bytes().split(b'\n')[1:]
    file.write_bytes(b'\n'.join(lines)[:-9])
    assert answers() == rows and asked == [[5]]
    file.write_bytes(b'\n'.join(lines[:3]))
    file.with_name('1.jsonl').write_bytes(lines[4])  # of another rank
    assert answers() == rows and asked == [[3, 5]]
    assert answers('that') == rows and len(asked) == 4
    with filelock.FileLock(f'{file}.lock'), pytest.raises(filelock.Timeout):
        answers()


def test_the_identity_of_a_model_tells_its_weights_tokenizer_and_small_vectors():
    model, info = random_model(), {'digest': 'a', 'model_config': 0, 'tokenizer': {'name': 'x'}}
    found = [identity(model, info | one)
             for one in ({}, {'digest': 'b'}, {'model_config': 1}, {'tokenizer': {'text': 'b'}})]
    model.norm.weight.data[0] += 1
    found.append(identity(model, info))
    model.scale_sets = {64: {'norm.weight': torch.ones(32)}}
    found.append(identity(model, info))
    assert len(set(found)) == 6 and identity(model, info) == found[-1]
