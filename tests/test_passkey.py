"""
Passkey prompts, counted token by token, and the stage as run.

$ python -m pytest tests/test_passkey.py
"""

import email.message
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, mistake, stage

from corpus import get_tokenizer, train_bpe
from passkey import FILLER, QUESTION, TASK, build_prompt, draw_places


@pytest.fixture(scope='module', params=['bytes', 'bpe'])
def encoding(request, tmp_path_factory):
    if request.param == 'bytes':
        return get_tokenizer('bytes')
    text = Path(email.message.__file__).read_text(encoding='utf-8')
    return train_bpe([text, TASK, FILLER * 3, QUESTION], 600, tmp_path_factory.mktemp('bpe') / 'small.tiktoken')


def lengths_of(encoding):
    return [300, 777, 2048] if encoding.name == 'bytes' else [160, 401, 1024]


def test_prompts_are_at_most_as_long_as_asked_and_within_one_filler_of_it(encoding):
    filler = len(encoding.encode_ordinary(FILLER))
    for length, _, place, key in draw_places(lengths_of(encoding), 5, 2, seed=1):
        prompt, answer, _ = build_prompt(encoding, length, place, key, 'exact')
        text = encoding.decode(prompt[1:] + answer)
        longer = len(encoding.encode_ordinary(text.replace(QUESTION, FILLER + QUESTION))) + 1  # a filler more
        assert len(prompt) + len(answer) <= length < longer <= len(prompt) + len(answer) + filler + 3
        assert prompt[0] == encoding.eot_token and [*encoding.encode_ordinary(text)] == prompt[1:] + answer
        assert text.startswith(TASK) and text.endswith(f'{QUESTION} {key}')
        assert text.replace(FILLER, '') == f'{TASK}\nThe pass key is {key}. Remember it. {key} is the pass key.\n' + (
            f'{QUESTION} {key}')


def test_key_stands_at_the_asked_place_or_less_than_a_filler_before(encoding):
    filler, task = len(encoding.encode_ordinary(FILLER)), len(encoding.encode_ordinary(TASK)) + 1
    for length, depth, place, key in draw_places(lengths_of(encoding)[1:], 10, 2, seed=2):
        assert depth * (length // 10) <= place < (depth + 1) * (length // 10)
        prompt, answer, start = build_prompt(encoding, length, place, key, 'exact')
        text = encoding.decode(prompt[1:])
        line = text.index('\nThe pass key is')
        assert len(encoding.decode(prompt[1:start])) <= line < len(encoding.decode(prompt[1:start + 1]))
        room = length - len(answer) - len(encoding.encode_ordinary(text[text.index('\nThe pass key is'):])) % filler
        after = start + 1  # the token that it starts in may hold the end of the text before it
        assert place - filler < after <= max(place, task) + 1 or place > room - 2 * filler  # or at the end


def test_keys_have_five_digits_and_places_and_keys_follow_the_seed_as_released():
    cells = draw_places([100, 200], 2, 3, seed=42)
    random = np.random.RandomState(42)
    expected = []
    for length, tenth in ((200, 100), (100, 50)):
        for depth in range(2):
            places = [random.randint(depth * tenth, (depth + 1) * tenth) for _ in range(3)]
            expected += [(length, depth, place, random.randint(10000, 100000)) for place in places]
    assert cells == expected and all(re.fullmatch(r'\d{5}', str(key)) for *_, key in cells)
    assert draw_places([100, 200], 2, 3, seed=43) != cells


def test_papers_count_adds_up_the_pieces(encoding):
    def n(text, first=0):
        return len(encoding.encode_ordinary(text)) + first
    length, place, key = lengths_of(encoding)[-1], lengths_of(encoding)[-1] // 3, 12345
    line = f'\nThe pass key is {key}. Remember it. {key} is the pass key.\n'
    budget = length - n(f' {key}')
    before = (place - n(TASK, 1)) // n(FILLER)
    after = (budget - n(TASK, 1) - before * n(FILLER) - n(line, 1) - n(QUESTION)) // n(FILLER)
    prompt, *_ = build_prompt(encoding, length, place, key, 'paper')
    assert encoding.decode(prompt[1:]) == TASK + FILLER * before + line + FILLER * after + QUESTION


def test_length_too_short_for_the_task_is_refused():
    with pytest.raises(ValueError, match='without filler has 248 tokens and its answer 6: the length 253 is too short'):
        build_prompt(get_tokenizer('bytes'), 253, 0, 12345, 'exact')
    assert len(build_prompt(get_tokenizer('bytes'), 254, 0, 12345, 'exact')[0]) == 248


def arguments(tiny_run, out_dir, *more):
    return [f'--init_from={tiny_run}/last.pt', f'--out_dir={out_dir}', '--device=cpu', '--dtype=float32',
            '--max_length=600', '--n_lengths=2', '--n_depths=3', '--n_keys=2', *more]


@pytest.fixture(scope='module')
def whole(tiny_run, tmp_path_factory):
    out_dir = tmp_path_factory.mktemp('passkey')
    out, _ = stage('passkey', *arguments(tiny_run, out_dir))
    return out_dir, json.loads((out_dir / 'passkey.json').read_text()), out


def test_result_holds_every_answer_and_the_accuracies_that_follow_from_them(whole):
    out_dir, result, out = whole
    rows = [dict(zip(result['answers']['columns'], row)) for row in result['answers']['rows']]
    assert [(row['length'], row['depth']) for row in rows] == [
        (length, depth) for length in (600, 300) for depth in range(3) for _ in range(2)]
    assert all(row['correct'] == (row['answer'] == f" {row['key']}") for row in rows)
    for i, length in enumerate((300, 600)):
        for depth in range(3):
            cell = [row['correct'] for row in rows if (row['length'], row['depth']) == (length, depth)]
            assert result['accuracy'][i][depth] == np.mean(cell)
    assert result['window'] == result['block_size'] == 32 and (out_dir / 'passkey.png').stat().st_size > 1000
    assert 'of all' in out


def test_run_killed_and_two_ranks_give_the_answers_of_one_unbroken_run(whole, tiny_run, tmp_path):
    command = [sys.executable, str(ROOT / 'passkey.py'), *arguments(tiny_run, tmp_path, '--batch_tokens=1')]
    process = subprocess.Popen(command, env=os.environ | {'OMP_NUM_THREADS': '1'}, stdout=subprocess.DEVNULL)
    path = tmp_path / 'passkey.jsonl'
    while not path.exists() or path.read_bytes().count(b'\n') < 4:
        assert process.poll() is None, 'ended too early'
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    n_before = path.read_bytes().count(b'\n') - 1
    assert n_before < 12
    with open(path, 'a') as file:
        file.write('{"item": 11, "len')  # as a kill in the middle of a line would leave it
    stage('passkey', *arguments(tiny_run, tmp_path), ranks=2)
    assert json.loads((tmp_path / 'passkey.json').read_text())['answers'] == whole[1]['answers']
    assert sum(len(p.read_text().splitlines()) - 1 for p in tmp_path.glob('*.jsonl')) == 12  # none was done twice
    # other places of a kill: in the first line, and inside a character
    path.write_bytes(path.read_bytes()[:20])
    other = next(tmp_path.glob('*.rank1.jsonl'))
    other.write_bytes(other.read_bytes() + '{"item": 11, "answer": "ä'.encode()[:-1])
    stage('passkey', *arguments(tiny_run, tmp_path))
    assert json.loads((tmp_path / 'passkey.json').read_text())['answers'] == whole[1]['answers']
    message = mistake('passkey', *arguments(tiny_run, tmp_path, '--seed=1'))
    assert 'passkey.jsonl holds answers of other settings (seed). Remove it' in message


def test_a_second_run_into_the_answers_of_a_living_one_is_refused(whole, tiny_run, tmp_path):
    command = [sys.executable, str(ROOT / 'passkey.py'), *arguments(tiny_run, tmp_path, '--batch_tokens=1')]
    first = subprocess.Popen(command, env=os.environ | {'OMP_NUM_THREADS': '1'}, stdout=subprocess.DEVNULL)
    path = tmp_path / 'passkey.jsonl'
    while not path.exists() or path.read_bytes().count(b'\n') < 4:
        assert first.poll() is None, 'ended too early'
        time.sleep(0.002)
    first.send_signal(signal.SIGSTOP)  # or it may end before the second comes
    line = mistake('passkey', *arguments(tiny_run, tmp_path))
    assert f'process {first.pid} ' in line and 'passkey.jsonl' in line
    first.send_signal(signal.SIGCONT)
    assert first.wait() == 0
    assert json.loads((tmp_path / 'passkey.json').read_text())['answers'] == whole[1]['answers']
    assert not list(tmp_path.glob('*.lock'))


def test_title_counts_what_the_scales_are_tuned_for(tiny_run, tmp_path):
    text = json.dumps({'method': 'head', 'target_length': 300, 'head_scale': [[1.1] * 4] * 2, 'weights_digest': ''})
    out, _ = stage('passkey', *arguments(tiny_run, tmp_path, '--n_keys=1', '--n_depths=1'))
    plain = json.loads((tmp_path / 'passkey.json').read_text())
    assert plain['accuracy_inside'] is None and 'up to' not in out  # every length was beyond L = 32
    (tmp_path / 'mine.json').write_text(text.replace('""', f'"{plain["weights_digest"]}"'))
    stage('passkey', *arguments(tiny_run, tmp_path, f'--scale={tmp_path}/mine.json', '--n_keys=1', '--n_depths=1'))
    result = json.loads((tmp_path / 'passkey_mine.json').read_text())
    assert result['window'] == 300 and result['accuracy_inside'] == result['accuracy'][0][0]
    (tmp_path / 'mine.json').write_text((tmp_path / 'mine.json').read_text().replace('1.1', '1.2'))  # tuned again
    message = mistake('passkey', *arguments(tiny_run, tmp_path, f'--scale={tmp_path}/mine.json', '--n_keys=1',
                                            '--n_depths=1'))
    assert 'holds answers of other settings (scale)' in message


def test_scales_that_differ_after_the_point_have_files_of_their_own(tiny_run, tmp_path):
    for scale in ('1.1', '1.2'):
        stage('passkey', *arguments(tiny_run, tmp_path, f'--scale={scale}', '--n_keys=1', '--n_depths=1'))
    assert {path.name for path in tmp_path.iterdir()} == {
        f'passkey_scale{scale}.{kind}' for scale in ('1.1', '1.2') for kind in ('json', 'jsonl', 'png')}


def test_mistakes_are_one_line(tiny_run, tmp_path):
    assert "protocol is 'other'" in mistake('passkey', *arguments(tiny_run, tmp_path, '--protocol=other'))
    message = mistake('passkey', *arguments(tiny_run, tmp_path, '--n_lengths=16'))
    assert 'too short. Raise max_length or lower n_lengths' in message
    assert not list(tmp_path.iterdir())
