"""
Passkey prompts, counted token by token, and the stage as run.

$ python -m pytest tests/test_passkey.py
"""

import email.message
import functools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from conftest import mistake, on, read, scale_set, stage, stage_here, written_elsewhere

from lib.scales import save_scale
from lib.tokenizers import get_tokenizer, train_bpe
from passkey import FILLER, KEY, QUESTION, TASK, build_prompt, draw_cells
from results.channel_scale import passkey as study


@pytest.fixture(scope='module', params=['bytes', 'bpe'])
def encoding(request, tmp_path_factory):
    if request.param == 'bytes':
        return get_tokenizer('bytes')
    text = Path(email.message.__file__).read_text(encoding='utf-8')
    path = tmp_path_factory.mktemp('bpe') / 'small.tiktoken'
    return train_bpe([text, TASK, FILLER * 3, QUESTION], 600, path)


def test_prompts_fill_the_length_asked_and_hold_the_key_at_the_place_asked(encoding):
    """Or less than a filler before."""
    lengths = [300, 777, 2048] if encoding.name == 'bytes' else [160, 401, 1024]
    filler, task = (len(encoding.encode_ordinary(text)) for text in (FILLER, TASK))
    for length, depth, place, key in draw_cells(lengths, 10, 2, seed=1):
        assert depth * (length // 10) <= place <= (depth + 1) * (length // 10)
        prompt, answer, start = build_prompt(encoding, length, place, key, 'exact')
        text, n = encoding.decode(prompt[1:] + answer), len(prompt) + len(answer)
        assert prompt[0] == encoding.eot_token
        assert encoding.encode_ordinary(text) == prompt[1:] + answer
        assert text.startswith(TASK) and text.endswith(f'{QUESTION} {key}')
        assert text.replace(FILLER, '') == f'{TASK}{KEY.format(key=key)}{QUESTION} {key}'
        more = encoding.encode_ordinary(text.replace(QUESTION, FILLER + QUESTION))
        assert n <= length < 1 + len(more) <= n + filler + 3

        line = text.index('\nThe pass key is')
        # It starts in token `start`, which may hold the end of the text before it.
        assert len(encoding.decode(prompt[1:start])) <= line
        assert line < len(encoding.decode(prompt[1:start + 1]))
        at_the_end = text.count(FILLER, line) < 2
        assert place - filler <= start <= max(place, task + 1) or at_the_end


def test_keys_have_five_digits_and_follow_the_seed_as_the_released_code_draws_them():
    random, expected = np.random.RandomState(42), []
    for length, tenth in (200, 100), (100, 50):
        for depth in range(2):
            places = [random.randint(depth * tenth, (depth + 1) * tenth) for _ in range(3)]
            keys = [random.randint(10000, 100000) for _ in range(3)]
            expected += [(length, depth, *cell) for cell in zip(places, keys)]
    assert draw_cells([100, 200], 2, 3, seed=42) == expected


def test_papers_count_adds_up_the_pieces(encoding):
    length, place, line = 1024, 341, KEY.format(key=12345)
    task, filler, *others = (len(encoding.encode_ordinary(text))
                             for text in (TASK, FILLER, ' 12345', line, QUESTION))
    before = (place - task - 1) // filler
    after = (length - task - 2 - before * filler - sum(others)) // filler
    prompt, *_ = build_prompt(encoding, length, place, 12345, 'paper')
    expected = TASK + FILLER * before + line + FILLER * after + QUESTION
    assert encoding.decode(prompt[1:]) == expected


# ---------------------------------------------------------------------- as run

def arguments(tiny_run, out_dir, command=''):
    sizes = '--max_length=600 --n_lengths=2 --n_depths=3 --n_keys=2'
    return on(tiny_run, out_dir, f'{sizes} {command}')


@pytest.fixture(scope='module')
def whole(tiny_run, tmp_path_factory):
    out_dir = tmp_path_factory.mktemp('passkey')
    stage_here('passkey', *arguments(tiny_run, out_dir))
    return out_dir


def test_result_holds_every_answer_and_the_accuracies_that_follow_from_them(whole):
    result, accuracy = read(whole / 'passkey.json'), np.zeros((2, 3))
    columns, rows = result['answers']['columns'], result['answers']['rows']
    for row in (dict(zip(columns, row)) for row in rows):
        assert row['correct'] == (row['answer'] == f" {row['key']}")
        accuracy[row['length'] // 300 - 1, row['depth']] += row['correct'] / 2
    assert len(rows) == 2 * 3 * 2 and result['accuracy'] == accuracy.tolist()
    assert result['window'] == result['block_size'] == 32
    assert result['accuracy_inside'] is None  # every length was beyond L
    assert (whole / 'passkey.png').exists()


def test_a_cut_context_holds_the_end_of_a_prompt_and_the_answer(whole, tiny_run, monkeypatch):
    result, encoding, expected = read(whole / 'passkey.json'), get_tokenizer('bytes'), []
    for length, _, place, key in draw_cells([300, 600], 3, 2, seed=42):
        prompt, answer, _ = build_prompt(encoding, length, place, key, 'exact')
        seen = encoding.decode([*prompt, *answer][-300:])[:-len(f' {key}')]
        expected.append((length, str(key) in seen))

    def perfect_reader(model, prompts, n):
        keys = re.findall(r'\d{5}', encoding.decode(prompts[0]))
        return [encoding.encode_ordinary(f' {keys[0]}' if keys else '?')]

    monkeypatch.setattr(study, 'L', 300)
    monkeypatch.setattr(study, 'LENGTHS', [300, 600])
    monkeypatch.setattr(study, 'complete', perfect_reader)
    shares = [np.mean([found for length, found in expected if length == one]) for one in (300, 600)]
    assert study.found_when_cut(tiny_run, result) == shares
    assert shares[0] == 1 and 0 < shares[1] < 1


@pytest.mark.parametrize('ranks', [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stopped_run_goes_on_to_the_answers_of_an_unbroken_one(whole, tiny_run, tmp_path, ranks):
    path, odd = tmp_path / 'passkey.jsonl', []
    lines = (whole / 'passkey.jsonl').read_bytes().splitlines(keepends=True)
    for change in ({'correct': 'yes'}, {'length': None}, {'item': [3]}, {'item': 99}, {'item': -1}):
        odd.append(json.dumps(json.loads(lines[4]) | change))
    odd += ['{}', '{"item": 3}', '[]', 'null', '{"item": 11, "answer": "ä']  # the last as by a kill
    path.write_bytes(b''.join(lines[:4]) + '\n'.join(odd).encode()[:-1])
    (tmp_path / 'passkey.rank1.jsonl').write_bytes(lines[0] + lines[7])
    run = stage_here if ranks == 1 else functools.partial(stage, ranks=ranks)
    run('passkey', *arguments(tiny_run, tmp_path))
    one, other = (read(folder / 'passkey.json')['answers'] for folder in (tmp_path, whole))
    assert one == other
    n_lines = sum(path.read_bytes().count(b'\n') for path in tmp_path.glob('*.jsonl'))
    assert n_lines == 12 + 2 + 2  # none was done twice; two headers, and items 99 and -1

    line = mistake('passkey', *arguments(tiny_run, tmp_path, '--seed=1'))
    assert 'passkey.jsonl' in line and '(seed)' in line
    with written_elsewhere(path):
        line = mistake('passkey', *arguments(tiny_run, tmp_path))
    assert 'process 99 ' in line and 'passkey.jsonl' in line


def test_title_counts_what_the_scales_are_tuned_for_and_a_changed_file_is_refused(tiny, tiny_run,
                                                                                  tmp_path):
    scale = tmp_path / 'mine.json'
    save_scale(scale, tiny[1], {300: scale_set([[1.1] * 4] * 2)}, 'head')
    command = arguments(tiny_run, tmp_path, f'--scale={scale} --n_keys=1 --n_depths=1')
    stage_here('passkey', *command)
    result = read(tmp_path / 'passkey_mine.json')
    assert result['window'] == 300 and result['accuracy_inside'] == result['accuracy'][0][0]
    save_scale(scale, tiny[1], {300: scale_set([[1.2] * 4] * 2)}, 'head')  # tuned again
    assert '(scale)' in mistake('passkey', *command)
