"""
Passkey prompts, counted token by token, and the stage as run.

$ python -m pytest tests/test_passkey.py -m ''
"""

import json
import re

from configurator import UserError

import pytest
from conftest import on, read, stage

from generate import complete
from passkey import FILLER, KEY, QUESTION, TASK, build_prompt, draw_cells
from tokenizer import byte_pairs, get_tokenizer

BYTES = get_tokenizer('bytes')
SIZES = '--max_length=600 --n_lengths=2 --n_depths=3 --n_keys=2 '


def merging(pattern, *merged):
    """A tokenizer of bytes and some longer tokens."""
    ranks = [*(bytes([i]) for i in range(256)), *merged]
    return byte_pairs('merging', dict(zip(ranks, range(len(ranks)))), pattern, len(ranks))


# ---------------------------------------------------------------------- prompts

@pytest.mark.parametrize('encoding', [BYTES, merging(r'[\s\S]+', b'. ', b'.\n', b'he', b'The')])
def test_prompts_fill_the_length_asked_and_hold_the_key_at_the_place_asked(encoding):
    """Both are at most one filler short."""
    filler, task = (len(encoding.encode_ordinary(text)) for text in (FILLER, TASK))
    for length, _, place, key in draw_cells([310, 777, 2048], 10, 2, seed=1):
        prompt, answer, start = build_prompt(encoding, length, place, key, 'exact')
        text, line = encoding.decode(prompt[1:]), KEY.format(key=key)
        ids, more = (encoding.encode_ordinary(f'{one} {key}')
                     for one in (text, text.replace(line, line + FILLER)))
        assert [encoding.eot_token, *ids] == prompt + answer
        assert len(ids) < length <= len(more)
        before, after = (part.count(FILLER) for part in text.split(line))
        assert text == TASK + FILLER * before + line + FILLER * after + QUESTION
        assert place - filler <= start <= max(place, task + 1) or after < 2


# In bytes the task has 149 tokens, a filler 90, the key line 60, the question 38, the answer 6. The
# released code counts the start token with the task, and once more with the key line. So after one
# filler there is room for 974 - 6 - 150 - 90 - 61 - 38 = 629 tokens, which is 6.99 fillers.
@pytest.mark.parametrize('protocol, place, before, after', [
    ('paper', 329, 1, 6), ('exact', 329, 1, 7), ('paper', 330, 2, 5), ('paper', 0, 0, 7),
    ('paper', 973, 7, 0)])
def test_the_paper_counts_pieces_by_hand(protocol, place, before, after):
    prompt, answer, start = build_prompt(BYTES, 974, place, 12345, protocol)
    text = TASK + before * FILLER + KEY.format(key=12345) + after * FILLER + QUESTION
    assert (BYTES.decode(prompt[1:]), BYTES.decode(answer)) == (text, ' 12345')
    assert start == 150 + 90 * before


def test_a_length_or_a_tokenizer_that_cannot_hold_the_question_is_refused():
    with pytest.raises(UserError, match='has 248 tokens and its answer 6'):
        build_prompt(BYTES, 253, 0, 12345, 'exact')
    with pytest.raises(UserError, match='an answer changes the tokens of the text before it'):
        build_prompt(merging(r'[\s\S]+', b's '), 900, 0, 12345, 'exact')


# length, depth, place, key: drawn one by one as in run_pass.py, by numpy.random after seed(42)
CELLS = '''
200 0 51 86820
200 0 92 64886
200 1 182 47194
200 1 186 97498
100 0 23 70263
100 0 35 26023
100 1 52 74820
100 1 71 10769
'''


def test_places_and_keys_are_drawn_as_by_the_released_code():
    cells = draw_cells([100, 200], 2, 2, seed=42)
    assert [' '.join(map(str, cell)) for cell in cells] == CELLS.strip().splitlines()


# ---------------------------------------------------------------------- as run

def test_the_result_of_a_model_that_reads_300_tokens(tiny_run, tiny, tmp_path, monkeypatch):
    def reads_300_tokens(model, prompts, n):
        return [[32, *re.search(rb'\d{5}', bytes(prompt[1:]))[0]] if len(prompt) <= 300 else ids
                for prompt, ids in zip(prompts, complete(model, prompts, n))]

    monkeypatch.setattr('generate.complete', reads_300_tokens)
    scale = tmp_path / 'x.json'
    scale.write_text(json.dumps({
        'weights_digest': tiny[1]['digest'], 'position_method': 'none', 'rope_scaling': '',
        'target_length': 300, 'head_scale': [[1.1] * 4] * 2}))
    stage('passkey', *on(tiny_run, tmp_path, f'{SIZES} --scale={scale}'))
    result = read(tmp_path / 'passkey_x.json')
    assert (result['lengths'], result['accuracy']) == ([300, 600], [[1, 1, 1], [0, 0, 0]])
    assert (result['accuracy_inside'], result['accuracy_of_all']) == (1, 0.5)
    cells, rows = draw_cells([300, 600], 3, 2, 42), result['answers']['rows']
    for row, (length, depth, _, key) in zip(rows, cells, strict=True):
        assert row[1:4] == [length, depth, key] and row[7] == (row[6] == f' {key}')
    assert (tmp_path / 'passkey_x.png').exists()


@pytest.mark.slow
def test_two_ranks_give_the_answers_of_one_process(tiny_run, tmp_path):
    for ranks in 0, 2:
        stage('passkey', *on(tiny_run, tmp_path / str(ranks), SIZES), ranks=ranks)
    one, two = (read(tmp_path / ranks / 'passkey.json')['answers'] for ranks in '02')
    assert one == two and (tmp_path / '2/passkey.rank1.jsonl').exists()
