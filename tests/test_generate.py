"""
Decoding against full passes, beam search against all continuations, draws against probabilities by
hand; answers that survive a stop.

$ python -m pytest tests/test_generate.py -m ''
"""

import json
import math
import shutil
from itertools import product

from configurator import UserError

import filelock
import pytest
import torch
import torch.nn.functional as F
from conftest import EVERY, near, random_model, stage, tokens

from generate import (
    answer_all,
    complete,
    generate,
    identity,
    needs_equal_lengths,
    read_prompts,
    sample_token,
)

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
    """The texts differ in length where the method allows it."""
    model = random_model(**changes)
    texts = [tokens(n, seed=n) for n in (46, 46 if needs_equal_lengths(model) else 9)]
    logits, cache = read_prompts(model, [text[:-6].tolist() for text in texts], 6)
    if fixed:
        cache.fix()
    new = torch.stack([text[-6:] for text in texts]).split(1 if fixed else [1, 3, 1, 1], dim=1)
    found = torch.cat([logits[:, None], *(model(ids, cache=cache) for ids in new)], 1)
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
        prompts = [tokens(n, seed=seed).tolist() for n in (40, 3)]
        grown, compiled = (list(generate(model, prompts, 20, compile=on)) for on in (False, True))
        assert compiled == grown and stats['unique_graphs'] == before + 1


# ---------------------------------------------------------------------- greedy and beam search

@torch.no_grad()
def test_beam_search_with_enough_beams_finds_the_best_of_all_continuations():
    """The score of a text is its mean log-probability, with that of its end token."""
    texts = torch.tensor([*product(range(4), repeat=5)])
    for seed, least in product((0, 4, 5), (0, 2)):           # the best have 5, 4 and 0 tokens
        model, scored = sharp(seed, vocab_size=4, short_conv=3), []
        log_p = model(F.pad(texts, (1, 0), value=seed % 4)).log_softmax(-1)[:, :5]
        log_p = log_p.gather(-1, texts[..., None])[..., 0]   # of each token of each text
        for ids, its in zip(texts.tolist(), log_p):
            n = ids.index(0) if 0 in ids else 5              # 0 is the end token
            if n >= least:
                scored.append((its[:n + 1].mean(), ids[:n]))
        assert complete(model, [[seed % 4]], 5, [0], 256, least) == [max(scored)[1]]


def test_completions_are_those_of_transformers(tmp_path):
    from test_convert import written
    model, eos = sharp(position='rope', vocab_size=257), list(range(0, 257, 9))
    theirs = written(tmp_path, model)
    for n, beams, least in product((12, 15, 17), (1, 2, 5), (0, 4)):
        prompt = 1 + 4 * tokens(1, n)
        found = theirs.generate(prompt, max_new_tokens=12, min_new_tokens=least, num_beams=beams,
                                do_sample=False, pad_token_id=0, eos_token_id=eos)
        [ours] = complete(model, prompt.tolist(), 12, eos, beams, least)
        assert ours == [token for token in found[0, n:].tolist() if token not in eos]


@pytest.mark.parametrize('beams', [1, 2])
def test_logits_that_are_not_finite_and_more_tokens_than_random_positions_are_refused(beams):
    model = random_model(position='rope', random_positions=9)
    with pytest.raises(UserError, match='9 random positions, so it cannot read 10'):
        complete(model, [[1] * 8], 2, beams=beams)
    model.norm.weight.data[0] = math.nan
    with pytest.raises(UserError, match='logits of the model are not finite'):
        complete(model, [[1] * 8], 1, beams=beams)


# ---------------------------------------------------------------------- drawn tokens

# Which of five tokens may come. The likeliest are 1 and 3, then follow 2, 4 and 0. Cumulative
# probabilities: 0.35, 0.7, 0.85, 0.95, 1; squared and normalized again 0.44, 0.875, 0.955 ...
@pytest.mark.parametrize('row', '''
01000 {"temperature": 0}
11111 {"temperature": 0.5}
11111 {"temperature": 2.0}
01000 {"top_k": 1}
01010 {"top_k": 2}
11111 {"top_k": 9}
01000 {"top_p": 0.0}
01000 {"top_p": 0.34}
01010 {"top_p": 0.36}
01010 {"top_p": 0.69}
01110 {"top_p": 0.71}
01000 {"top_p": 0.49, "top_k": 2}
01000 {"top_p": 0.43, "temperature": 0.5}
01010 {"top_p": 0.86, "temperature": 0.5}
'''.strip().splitlines())
def test_top_k_and_top_p_keep_exactly_the_right_tokens_in_proportion(row):
    kept, how = row.split(maxsplit=1)
    how = {'temperature': 1} | json.loads(how)
    p = torch.tensor([0.05, 0.35, 0.15, 0.35, 0.1])
    generator = torch.Generator().manual_seed(0)
    drawn = sample_token(p.log().expand(20_000, 5), generator=generator, **how)
    expected = p ** (1 / (how['temperature'] or 1)) * torch.tensor([*map(int, kept)])
    near(drawn.flatten().bincount(minlength=5) / 20_000, expected / expected.sum(), atol=0.015)


def test_sample_prints_the_prompt_and_draws_as_it_is_told(tiny_run, tiny):
    def sample(*how):
        return stage('sample', f'--out_dir={tiny_run}', '--device=cpu', '--dtype=float32',
                     '--prompt=def (', '--max_new_tokens=20', *how)

    [ids] = complete(tiny[0], [[256, *b'def (']], 20, [256])
    likeliest = f'def ({bytes(ids).decode()}\n'
    assert likeliest == sample('--temperature=0') == sample('--top_k=1') == sample('--top_p=0')
    assert sample() == sample() != likeliest
    assert sample('--n_samples=2').startswith(f'{sample()}---\ndef (')


def test_characters_of_several_bytes_are_printed_whole_and_broken_ones_marked(tiny_run,
                                                                              monkeypatch):
    broken = '東'.encode()[:2] + b'a' + 'ʼn'.encode()[:1]  # inside the text, and at its end
    ids = *'Zoë→🙂'.encode(), *broken, 256, 97  # 256 ends the text
    monkeypatch.setattr('generate.generate', lambda *given, **how: [[i] for i in ids])
    assert stage('sample', f'--out_dir={tiny_run}', '--prompt=x') == 'xZoë→🙂�a�\n'


# ---------------------------------------------------------------------- answers

def test_answers_survive_a_stop_and_do_not_mix_with_others(tmp_path, cpu):
    asked, rows = [], [{'item': i, 'text': f'{i} ä'} for i in range(6)]

    def answers(**about):
        asked.clear()
        return answer_all(tmp_path / 'new/x', about, [9, 9, 4, 4, 4, 2], 10,
                          lambda items: asked.append(items) or [rows[i] for i in items], cpu)

    assert answers() == rows and asked == [[0], [1], [2, 3], [4, 5]]  # at most 10 tokens
    file = tmp_path / 'new/x.jsonl'
    lines = file.read_bytes().split(b'\n')
    for cut in 1, 3, 4:  # the last line ends in ä"}, and ä has two bytes
        file.write_bytes(b'\n'.join(lines)[:-cut])
        assert answers() == rows and asked == [[5]]
    file.write_bytes(b'\n'.join(lines[:4]))
    (tmp_path / 'new/x.rank1.jsonl').write_bytes(b'\n'.join(lines[::5]))  # has item 4
    assert answers() == rows and asked == [[3, 5]]
    with filelock.FileLock(f'{file}.lock'), pytest.raises(UserError, match='Another process'):
        answers()
    with pytest.raises(UserError, match='x.*jsonl holds answers of other settings'):
        answers(seed=2)


def test_the_identity_of_a_model_tells_its_vectors_scale_file_weights_and_settings(tmp_path):
    def found(seed=0, text='', **info):
        (tmp_path / 'scale').write_text(text)
        info = {'digest': 0, 'model_config': 0} | info
        return identity(random_model(seed), info, str(tmp_path / 'scale'))

    assert len({found(), found(1), found(text='1'), found(digest=1), found(model_config=1)}) == 5
