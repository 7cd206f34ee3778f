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
SIZES = '--n_lengths=2 --n_depths=3 --n_keys=2 '


def merging(*merged):
    """A tokenizer of bytes and some longer tokens."""
    ranks = [*(bytes([i]) for i in range(256)), *merged]
    ranks = dict(zip(ranks, range(len(ranks))))
    return byte_pairs('merging', ranks, r'[\s\S]+', len(ranks))


# ---------------------------------------------------------------------- prompts

@pytest.mark.parametrize('encoding', [BYTES, merging(b'. ', b'.\n', b'he', b'The', b's ')])
def test_prompts_fill_the_length_asked_and_hold_the_key_at_the_place_asked(encoding):
    """Both are at most one filler short."""
    def size(text):
        return 1 + len(encoding.encode_ordinary(text))

    for length, _, place, key in draw_cells([310, 777, 2048], 10, 2, seed=1):
        prompt, answer = build_prompt(encoding, length, place, key)
        text, line = encoding.decode(prompt[1:] + answer), KEY.format(key=key)
        assert encoding.decode(answer).strip() == str(key) and prompt[0] == encoding.eot_token
        before, after = (part.count(FILLER) for part in text.split(line))
        start = TASK + FILLER * before
        assert text == f'{start}{line}{FILLER * after}{QUESTION} {key}'
        assert len(prompt + answer) <= length < size(text.replace(line, line + FILLER))
        assert size(start) <= max(place, size(TASK))
        assert place < size(start + FILLER) or after < 2


# In bytes the start has 1 token, the task 149, a filler 90, the key line 60, the question 38 and
# the answer 6, so that 8 fillers fit into 974 tokens. As the released code counts a start token
# with the key line, it puts that line at 974 - 61 - 44 = 869 or earlier, behind 7 fillers.
@pytest.mark.parametrize('place, before, after', [
    (329, 1, 7), (330, 2, 6), (0, 0, 8), (973, 7, 1)])
def test_fillers_of_a_prompt_by_hand(place, before, after):
    prompt, answer = build_prompt(BYTES, 974, place, 12345)
    text = TASK + before * FILLER + KEY.format(key=12345) + after * FILLER + QUESTION
    assert (BYTES.decode(prompt[1:]), BYTES.decode(answer)) == (text, ' 12345')
    with pytest.raises(UserError, match='answer have 254 tokens'):
        build_prompt(BYTES, 253, place, 12345)


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

def test_accuracy_is_by_length_and_depth(tiny_run, tiny, tmp_path, monkeypatch):
    found = {key for length, depth, _, key in draw_cells([300, 600], 3, 2, 42)
             if (length, depth) in ((300, 0), (300, 1), (600, 2))}

    def finds_some(model, prompts, n):
        keys = [re.search(rb'\d{5}', bytes(prompt[1:]))[0] for prompt in prompts]
        assert all(bytes(prompt[1:]).endswith(b' is' + b' ' * (6 - n)) for prompt in prompts)
        return [[32, *key][-n:] if int(key) in found else ids
                for key, ids in zip(keys, complete(model, prompts, n))]

    monkeypatch.setattr('generate.complete', finds_some)
    scale = tmp_path / 'x.json'
    scale.write_text(json.dumps({
        'weights_digest': tiny[1]['digest'], 'position_method': 'none', 'rope_scaling': '',
        'target_length': 300, 'head_scale': [[1.1] * 4] * 2}))
    for hint in 0, 1:  # the same files, whose answers must not mix
        stage('passkey', *on(tiny_run, tmp_path, f'{SIZES} --scale={scale} --hint={hint}'))
        result = read(tmp_path / 'passkey_x.json')
        assert (result['lengths'], result['accuracy']) == ([300, 600], [[1, 1, 0], [0, 0, 1]])
        assert result['accuracy_of_all'] == 0.5
    assert (tmp_path / 'passkey_x.png').exists()


@pytest.mark.slow
def test_two_ranks_give_the_answers_of_one_process(tiny_run, tmp_path):
    def lines(folder, rank):
        return (tmp_path / folder / f'passkey/{rank}.jsonl').read_text().split('\n')[1:]

    for ranks in 0, 2:
        command = on(tiny_run, tmp_path / str(ranks), f'{SIZES} --max_length=600')
        stage('passkey', *command, ranks=ranks)
    assert sorted(lines('0', 0)) == sorted(lines('2', 0) + lines('2', 1)) and lines('2', 1)
