"""
LongBench: its metrics by hand and against the packages' answers, its prompts, and the stage as run.
The records here are made up; their fields are the benchmark's.

$ python -m pytest tests/test_longbench.py
"""

import json
import shutil
import sys
from fractions import Fraction

import pytest
from conftest import mistake, near, on, read, save_model, stage_here

from lib.answers import paper_table
from lib.checkpoints import load_model
from lib.generate import Decoding, complete
from lib.tokenizers import get_tokenizer
from longbench import TASKS, prompt_ids, rouge_l, score

BYTES = get_tokenizer('bytes')
CLASSES = ['Date', 'Other location', 'Location', 'Other']


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
    found = score(task, prediction, [gold], CLASSES)
    assert found == pytest.approx(float(Fraction(expected)), abs=1e-7) and not recwarn


def test_score_is_of_the_best_answer_and_skips_a_class_after_a_removed_one_as_the_benchmark():
    assert score('hotpotqa', 'red car', ['blue', 'red car', 'red']) == 1
    assert score('hotpotqa', 'red car', []) == 0
    assert score('trec', 'cab', ['cab'], ['b', 'ab', 'cab']) == 1 / 2
    assert score('trec', 'cab', ['cab'], ['b', 'cab', 'ab']) == 1


def test_rouge_l_is_0_past_some_990_calls_whatever_the_recursion_limit_and_depth():
    def at_depth(n, text):
        return rouge_l(text, text) if n == 0 else at_depth(n - 1, text)

    before = sys.getrecursionlimit()
    sys.setrecursionlimit(3000)  # as torch's compiler does
    try:
        for n_words, expected in ((900, 1), (1100, 0)):
            text = ' '.join(f'w{i}' for i in range(n_words))
            assert at_depth(200, text) == pytest.approx(expected, abs=1e-7)
        assert sys.getrecursionlimit() == 3000
    finally:
        sys.setrecursionlimit(before)


def test_tasks_are_those_of_table_3_and_their_plain_mean_is_the_papers_average():
    for row in paper_table('nope_table3').values():
        assert list(row) == ['avg', *TASKS]
        near(row['avg'], sum(row[task] for task in TASKS) / 16, atol=0.0501)  # one decimal


# ---------------------------------------------------------------------- prompts

def test_prompt_keeps_its_first_and_last_half_and_is_never_too_long():
    # An odd room leaves out one more.
    for room, kept in (11, b'0123456789'), (10, b'012356789'), (9, b'0126789'), (2, b'9'):
        assert prompt_ids('0123456789', BYTES, room) == ([256, *kept], 11)
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
                    'answers': ['Date', ''], 'all_classes': classes})


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
        how = Decoding(eos, beams=3, min_new_tokens=least)
        room, expected, n_cut = 60 - LONGEST[task], [], 0
        for i, record in enumerate(RECORDS):
            text = TEMPLATES[task].format(**record)
            ids = kept = [256, *text.encode()]
            if len(ids) > room:
                kept, n_cut = ids[:room // 2] + ids[-(room // 2):], n_cut + 1
            prediction = BYTES.decode(complete(model, [kept], LONGEST[task], how)[0])
            expected.append({
                'item': i, 'prediction': prediction, 'answers': record['answers'],
                'score': score(task, prediction, record['answers'], CLASSES),
                'prompt_tokens': len(ids)})
            assert task != 'samsum' or prediction and '\n' not in prediction
        assert rows_of(out_dir, task) == expected
        means.append(round(100 * sum(row['score'] for row in expected) / 5, 2))
        assert result['tasks'][task] == {
            'score': means[-1], 'samples': 5, 'cut': n_cut, 'max_prompt_tokens': room,
            'max_new_tokens': LONGEST[task]}

    names, ours, theirs = zip(*(line.split() for line in printed.splitlines()[-5:-1]))
    assert names == ('trec', 'samsum', 'lcc', 'average')  # in Table 3's order
    assert theirs == ('41.50', '3.50', '48.40', '31.13')
    assert [float(number) for number in ours] == [*means, result['average']]
    near(result['average'], sum(means) / 3, atol=0.006)


def test_more_samples_or_tasks_are_added_to_those_that_are_there(whole, run, command,
                                                                 tmp_path):
    rows = rows_of(whole[0], 'trec')
    for tasks, n in (('["trec"]', 2), ('["trec","lcc"]', 4), ('["trec"]', 3)):
        more = f'{command} --tasks={tasks} --max_samples={n}'
        stage_here('longbench', *on(run, tmp_path, more))
        expected = 100 * sum(row['score'] for row in rows[:n]) / n
        result = read(tmp_path / 'longbench.json')
        assert result['tasks']['trec']['score'] == round(expected, 2)
    assert rows_of(tmp_path, 'trec') == rows[:4]


def test_records_other_than_the_benchmarks_and_missing_packages_are_named(
        run, command, data, tmp_path, monkeypatch):
    shutil.copytree(data, tmp_path, dirs_exist_ok=True)
    for text, named in (('{"context": ""}', "KeyError: 'input'"), ('x', 'JSONDecodeError'),
                        ('', 'no samples'),
                        ('{"input": "", "answers": [7], "all_classes": null}', 'int')):
        (tmp_path / 'lcc.jsonl').write_text(text)
        more = f'{command} --data={tmp_path} --tasks=["lcc"]'
        message = mistake('longbench', *on(run, tmp_path, more))
        assert 'lcc of LongBench cannot' in message and named in message
    for task, module in ('lcc', 'fuzzywuzzy.fuzz'), ('samsum', 'rouge'):
        monkeypatch.setitem(sys.modules, module, None)
        message = mistake('longbench', *on(run, tmp_path, f'{command} --tasks=["{task}"]'))
        assert 'pip install ' + module.partition('.')[0] in message
    monkeypatch.undo()
    line = mistake('longbench', *on(run, tmp_path, f'{command} --context=13'))
    assert 'leaves samsum no room' in line
