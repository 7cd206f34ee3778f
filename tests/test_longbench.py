"""
LongBench: its metrics by hand and against the packages' answers, its prompts, and the stage as run.
The records here are made up; their fields are the benchmark's.

$ python -m pytest tests/test_longbench.py
"""

import json
import shutil
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from conftest import mistake, near, on, read, refuses, save_model, scale_set, stage_here

from lib.answers import paper_table
from lib.checkpoints import load_model
from lib.generate import Decoding, complete
from lib.scales import save_scale
from lib.tokenizers import get_tokenizer
from longbench import TASKS, prompt_ids, read_task, rouge_l, score

BYTES = get_tokenizer('bytes')
CLASSES = 'Date,Other location,Location,Other,b,ab,cab'.split(',')


# ---------------------------------------------------------------------- metrics

# task | prediction | gold | score | why
BY_HAND = r'''
hotpotqa | | Paris | 0
hotpotqa | Paris | | 0
hotpotqa | | | 0
hotpotqa | Paris | Paris | 1
hotpotqa | The answer: a cat! | cat | 2/3 | answer, cat: P 1/2, R 1
hotpotqa | the a an | the | 0 | nothing is left of either
hotpotqa | an anthem, theatre | anthem theatre | 1 | articles go only as whole words
hotpotqa | it's\n 3.14 | its 314 | 1 | punctuation is deleted, not made a space
hotpotqa | « Zürich » | zürich | 1/2 | only ASCII punctuation is deleted
hotpotqa | cat cat dog | cat dog dog | 2/3
hotpotqa | red car | blue / red car / red | 1 | the best of three answers
multi_news | w1 w2 w6 w7 w8. w1 w3 w8 w9 w5 | w1 w2 w3 w4 w5 | 8/13 | R 4/5, P 4/8, of a union
multi_news | the the the | the | 1 | distinct words
multi_news | The cat | the cat | 1/2 | no lower case
multi_news | cats | cat | 0 | no stems
multi_news | | a | 0
multi_news | a | | 0
multi_news | ... | a. | 0
lcc | | | 1
lcc | | x | 0
lcc | x | | 0
lcc | \n\nreturn x\nreturn y | return x | 1 | the first line stays
lcc | # a comment\n// another\n`x`\nreturn x | return x | 1
lcc | # only a comment | return x | 0
lcc | x = 1  # one\ny = 2 | y = 2 | 1 | any line with a # is passed over
lcc | # a\n\nreturn x | return x | 0 | an empty line is a line
lcc | abcd | bcde | 3/4 | 2 * 3 / 8
lcc | \t   return x | return x | 4/5 | 2 * 8 / 20
trec | it is a Date | Date | 1
trec | date | Date | 0
trec | | Date | 0
trec | Date or Location | Date | 1/2
trec | Location | Date | 0
trec | Other location | Other location | 1 | Other is part of gold's own name
trec | Date\nOther | Date | 1 | the first line counts
trec | cab | cab | 1/2 | of b, ab and cab, b is removed, so ab is skipped
passage_count | There are 12 paragraphs, or 13. | 12 | 1/2
passage_count | | 12 | 0
passage_count | twelve | 12 | 0
passage_count | 112 | 12 | 0
passage_count | 012 | 12 | 0
passage_count | 12.12 | 12 | 1
passage_count | 12 12 1 | 12 | 2/3
passage_retrieval_en | 7 | Paragraph 7 | 1
passage_retrieval_en | Paragraph 17 | Paragraph 7 | 0
samsum | He left. \nDialogue | He left | 4/5 | its words: he, left, and an empty one
triviaqa | \n\nred car\nQuestion: blue? | red car | 1
'''


@pytest.mark.parametrize('row', BY_HAND.strip().splitlines())
def test_metrics_by_hand(row, recwarn):
    row = [cell.strip().replace('\\n', '\n').replace('\\t', ' ') for cell in row.split('|')]
    task, prediction, gold, expected = row[:4]
    found = score(task, prediction, gold.split(' / '), CLASSES)
    assert found == pytest.approx(float(Fraction(expected)), abs=1e-7) and not recwarn


def test_rouge_l_is_0_past_some_990_calls_whatever_the_recursion_limit_and_depth():
    def at_depth(n, n_words):
        text = ' '.join(f'w{i}' for i in range(n_words))
        return at_depth(n - 1, n_words) if n else rouge_l(text, text)

    before = sys.getrecursionlimit()
    sys.setrecursionlimit(3000)  # as torch's compiler does
    try:
        near([at_depth(200, 900), at_depth(200, 1100)], [1, 0], atol=1e-7)
        assert sys.getrecursionlimit() == 3000
    finally:
        sys.setrecursionlimit(before)


def test_tasks_are_those_of_table_3_and_their_plain_mean_is_the_papers_average():
    for row in paper_table('nope_table3').values():
        assert list(row) == ['avg', *TASKS]
        near(row['avg'], sum(row[task] for task in TASKS) / 16, atol=0.0501)  # one decimal


# ---------------------------------------------------------------------- prompts

def test_prompt_keeps_its_first_and_last_half_and_is_never_too_long():
    assert prompt_ids('0123456789', BYTES, 9) == ([256, *b'0126789'], 11)  # of 9, 4 and 4
    text = 'né日本語' * 20
    whole = [256, *text.encode()]
    for room in range(2, len(whole)):
        ids, n = prompt_ids(text, BYTES, room)
        same = max(0, room // 2 - 3)  # The rest of a cut character becomes U+FFFD, three bytes.
        assert len(ids) <= room and n == len(whole)
        assert ids[:same] == whole[:same] and ids[len(ids) - same:] == whole[n - same:]


# ---------------------------------------------------------------------- the stage

TEMPLATES = {'trec': 'Name the type.\n{context}{input}', 'samsum': '{context}', 'lcc': '{input}'}
LONGEST = {'trec': 8, 'samsum': 12, 'lcc': 10}
RECORDS = []
for i in range(5):
    classes = CLASSES if i == 4 else ['e']  # The last record's are those of all.
    RECORDS.append({'input': f'Question: when {i}?\nType:', 'context': 'Who?\nPerson\n' * (i + 1),
                    'answers': ['Date', ''][:i], 'all_classes': classes})


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp('data')
    for task in TEMPLATES:
        (folder / f'{task}.jsonl').write_text('\n'.join(map(json.dumps, RECORDS)))
    (folder / 'dataset2prompt.json').write_text(json.dumps(TEMPLATES))
    (folder / 'dataset2maxlen.json').write_text(json.dumps(LONGEST))
    return folder


@pytest.fixture(scope='module')
def run(tiny_run, tmp_path_factory):
    """A run like tiny_run, whose model writes ends of lines where that one writes spaces."""
    model, info = load_model('last', tiny_run, 'cpu')
    model.head.weight[[10, 32]] = model.head.weight[[32, 10]]
    folder = tmp_path_factory.mktemp('run')
    save_model(model, folder / 'last.pt', settings=info['settings'])
    return folder


@pytest.fixture(scope='module')
def command(data):
    """What all runs here share."""
    return (f'--data={data} --tasks=["trec","lcc","samsum"] --context=60 --beams=3 '
            '--batch_size=2 ')


@pytest.fixture(scope='module')
def whole(run, command, tmp_path_factory):
    """out_dir of a run in one go, and what it printed."""
    out_dir = tmp_path_factory.mktemp('longbench')
    return out_dir, stage_here('longbench', *on(run, out_dir, command), '--paper=NoPE 2K')


def rows_of(out_dir, task):
    """The answers of a task, in the order in which they were written."""
    lines = (out_dir / f'longbench/{task}.jsonl').read_text().splitlines()
    return [json.loads(line) for line in lines[1:]]


def test_predictions_are_beam_searches_on_the_filled_and_cut_prompts(whole, run):
    (out_dir, printed), (model, _) = whole, load_model('last', run, 'cpu')
    result, means = read(out_dir / 'longbench.json'), []
    for task, eos, least in ('trec', (256,), 0), ('samsum', (256, 10), 1), ('lcc', (256,), 0):
        room, expected = 60 - LONGEST[task], []
        for i, record in enumerate(RECORDS):
            prompt, n = prompt_ids(TEMPLATES[task].format(**record), BYTES, room)
            how = Decoding(eos, beams=3, min_new_tokens=least)
            prediction = BYTES.decode(complete(model, [prompt], LONGEST[task], how)[0])
            expected.append({
                'item': i, 'prediction': prediction, 'answers': record['answers'],
                'score': score(task, prediction, record['answers'], CLASSES), 'prompt_tokens': n})
            assert task != 'samsum' or prediction and '\n' not in prediction
        assert rows_of(out_dir, task) == expected
        means.append(round(100 * np.mean([row['score'] for row in expected]), 2))
        assert result['tasks'][task] == {
            'score': means[-1], 'samples': 5, 'max_prompt_tokens': room,
            'cut': sum(row['prompt_tokens'] > room for row in expected),
            'max_new_tokens': LONGEST[task]}

    names, ours, theirs = zip(*(line.split() for line in printed.splitlines()[-5:-1]))
    assert names == ('trec', 'samsum', 'lcc', 'average')  # in Table 3's order
    assert theirs == ('41.50', '3.50', '48.40', '31.13')
    assert [float(number) for number in ours] == [*means, result['average']]


def test_more_samples_or_tasks_are_added_to_those_that_are_there(whole, run, command, tmp_path):
    rows = rows_of(whole[0], 'trec')
    for tasks, n in ('["trec"]', 2), ('["trec","lcc"]', 4), ('["trec"]', 3):
        more = f'{command} --tasks={tasks} --max_samples={n}'
        stage_here('longbench', *on(run, tmp_path, more))
        found = read(tmp_path / 'longbench.json')['tasks']['trec']['score']
        near(found, 100 * np.mean([row['score'] for row in rows[:n]]), atol=0.005)
    assert rows_of(tmp_path, 'trec') == rows[:4]
    for name, value in ('beams', 1), ('context', 61):
        line = mistake('longbench', *on(run, tmp_path, f'{command} --{name}={value}'))
        assert f'({name})' in line


def test_answers_to_other_records_are_refused(run, command, data, tmp_path):
    other = shutil.copytree(data, tmp_path / 'data')
    more = on(run, tmp_path, f'{command} --data={other} --tasks=["trec"] --max_samples=1')
    stage_here('longbench', *more)
    path = other / 'trec.jsonl'
    path.write_text(path.read_text().replace('Who?', 'Why?'))
    assert '(data)' in mistake('longbench', *more)
    stage_here('longbench', *on(run, tmp_path, f'{command} --tasks=["lcc"] --max_samples=1'))
    (tmp_path / 'longbench/trec.jsonl').unlink()
    both = f'{command} --tasks=["trec","lcc"] --beams=1'
    assert 'lcc.jsonl' in mistake('longbench', *on(run, tmp_path, both))
    path = tmp_path / 'longbench/trec.jsonl'  # no answer was made
    assert not path.exists() or not rows_of(tmp_path, 'trec')


def test_the_context_is_the_length_that_the_scale_file_is_tuned_for(run, data, tmp_path):
    model, info = load_model('last', run, 'cpu')
    scale, heads = tmp_path / 'mine.json', model.head_scale
    save_scale(scale, info, {70: scale_set(torch.full_like(heads, 1.1).tolist())}, 'head')
    command = f'--data={data} --tasks=["trec"] --beams=1 --max_samples=1 --scale={scale}'
    stage_here('longbench', *on(run, tmp_path, command))
    result = read(tmp_path / 'longbench_mine.json')
    assert result['context'] == 70
    assert result['tasks']['trec']['max_prompt_tokens'] == 70 - LONGEST['trec']


def test_a_context_without_room_for_a_prompt_is_refused(run, command, tmp_path):
    line = mistake('longbench', *on(run, tmp_path, f'{command} --context=13'))
    assert 'leaves samsum no room' in line


@pytest.mark.parametrize('text, named', [
    ('{"context": ""}', "KeyError: 'input'"), ('x', 'JSONDecodeError'), ('', 'no samples'),
    ('{"input": "", "answers": [7], "all_classes": null}', 'TypeError')])
def test_records_other_than_the_benchmarks_are_refused(data, tmp_path, text, named):
    shutil.copytree(data, tmp_path, dirs_exist_ok=True)
    (tmp_path / 'lcc.jsonl').write_text(text)
    refuses(named, read_task, tmp_path, 'lcc')
