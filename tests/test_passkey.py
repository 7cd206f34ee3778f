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
from conftest import mistake, on, read, refuses, scale_set, stage, stage_here, written_elsewhere

from lib.scales import save_scale
from lib.tokenizers import get_tokenizer, train_bpe
from passkey import FILLER, KEY, QUESTION, TASK, build_prompt, draw_cells
from results.channel_scale import passkey as study

BYTES = get_tokenizer('bytes')


@pytest.fixture(scope='module', params=['bytes', 'bpe'])
def encoding(request, tmp_path_factory):
    if request.param == 'bytes':
        return BYTES
    text = Path(email.message.__file__).read_text(encoding='utf-8')
    path = tmp_path_factory.mktemp('bpe') / 'small.tiktoken'
    return train_bpe([text, TASK, FILLER * 3, QUESTION], 600, path)


def test_a_tokenizer_in_which_the_answer_changes_the_prompt_is_refused(tmp_path):
    """A BPE without a pre-tokenizer merges the end of the question with the space after it."""
    tokenizers = pytest.importorskip('tokenizers')
    vocab = {token: i for i, token in enumerate(['</s>', '\n', *map(chr, range(32, 127)), 's '])}
    merging = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [('s', ' ')]))
    merging.decoder = tokenizers.decoders.Fuse()
    merging.add_special_tokens(['</s>'])
    merging.save(str(tmp_path / 'tokenizer.json'))
    refuses('changes the tokens of the text before it', build_prompt,
            get_tokenizer(str(tmp_path / 'tokenizer.json')), 900, 0, 12345, 'exact')


def test_prompts_fill_the_length_asked_and_hold_the_key_at_the_place_asked(encoding):
    """Both are at most one filler short."""
    lengths = [300, 777, 2048] if encoding.name == 'bytes' else [160, 401, 1024]
    filler, task = (len(encoding.encode_ordinary(text)) for text in (FILLER, TASK))
    for length, _, place, key in draw_cells(lengths, 10, 2, seed=1):
        prompt, answer, start = build_prompt(encoding, length, place, key, 'exact')
        ids = prompt + answer
        text = encoding.decode(ids[1:])
        assert ids == [encoding.eot_token, *encoding.encode_ordinary(text)]
        line, end = KEY.format(key=key), f'{QUESTION} {key}'
        assert text.replace(FILLER, '') == TASK + line + end
        more = encoding.encode_ordinary(text.replace(QUESTION, FILLER + QUESTION))
        assert len(ids) <= length < 1 + len(more)

        # The key line starts in token `start`, which may hold the end of the text before it.
        before, after = text.split(line)
        ahead, up_to_start = (len(encoding.decode(prompt[1:end])) for end in (start, start + 1))
        assert ahead <= len(before) < up_to_start
        assert place - filler <= start <= max(place, task + 1) or after.count(FILLER) < 2
        assert before.startswith(TASK) and after.endswith(end)


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
    assert result['window'] == 32 and result['accuracy_inside'] is None  # all lengths exceed L
    assert (whole / 'passkey.png').exists()


def test_accuracies_stand_at_their_lengths(tiny_run, tmp_path, monkeypatch):
    def reads_300_tokens(model, prompts, n, how):
        keys = [re.search(r'\d{5}', BYTES.decode(prompt))[0] for prompt in prompts]
        return [BYTES.encode_ordinary(f' {key}' if len(prompt) <= 300 else ' ?????')
                for prompt, key in zip(prompts, keys)]

    monkeypatch.setattr('lib.generate.complete', reads_300_tokens)
    stage_here('passkey', *arguments(tiny_run, tmp_path))
    assert read(tmp_path / 'passkey.json')['accuracy'] == [[1, 1, 1], [0, 0, 0]]
    assert '(dtype)' in mistake('passkey', *arguments(tiny_run, tmp_path, '--dtype=bfloat16'))
    assert '(seed)' in mistake('passkey', *arguments(tiny_run, tmp_path, '--seed=7'))


def test_a_cut_context_holds_the_end_of_a_prompt_and_the_answer(whole, tiny_run, monkeypatch):
    def perfect_reader(model, prompts, n):
        keys = re.findall(r'\d{5}', BYTES.decode(prompts[0]))
        return [BYTES.encode_ordinary(f' {keys[0]}' if keys else '?')]

    for name, value in {'L': 300, 'LENGTHS': [300, 600], 'complete': perfect_reader}.items():
        monkeypatch.setattr(study, name, value)
    found = {300: [], 600: []}
    for length, _, place, key in draw_cells(found, 3, 2, seed=42):
        prompt, answer, _ = build_prompt(BYTES, length, place, key, 'exact')
        seen = BYTES.decode([*prompt, *answer][-300:-len(answer)])
        found[length].append(str(key) in seen)
    inside, beyond = study.found_when_cut(tiny_run, read(whole / 'passkey.json'))
    assert inside == np.mean(found[300]) == 1 and 0 < beyond == np.mean(found[600]) < 1


@pytest.mark.parametrize('ranks', [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stopped_run_goes_on_to_the_answers_of_an_unbroken_one(whole, tiny_run, tmp_path, ranks):
    path, odd = tmp_path / 'passkey.jsonl', []
    lines = (whole / 'passkey.jsonl').read_bytes().splitlines(keepends=True)
    for change in {'correct': 'yes'}, {'length': None}, {'item': [3]}, {'item': 99}, {'item': -1}:
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

    with written_elsewhere(path):
        line = mistake('passkey', *arguments(tiny_run, tmp_path))
    assert 'process 99 ' in line and 'passkey.jsonl' in line


def test_scales_set_what_is_inside_and_answers_of_a_changed_file_are_refused(tiny, tiny_run,
                                                                             tmp_path):
    scale = tmp_path / 'mine.json'
    save_scale(scale, tiny[1], {300: scale_set([[1.1] * 4] * 2)}, 'head')
    command = arguments(tiny_run, tmp_path, f'--scale={scale} --n_keys=1 --n_depths=1')
    stage_here('passkey', *command)
    result = read(tmp_path / 'passkey_mine.json')
    assert result['window'] == 300 and result['accuracy_inside'] == result['accuracy'][0][0]
    save_scale(scale, tiny[1], {300: scale_set([[1.2] * 4] * 2)}, 'head')  # tuned again
    assert '(scale)' in mistake('passkey', *command)
