"""
LongBench: its metrics by hand and against the packages' answers, its prompts, and the stage as run.
The records here are made up; their fields are the benchmark's.

$ python -m pytest tests/test_longbench.py
"""

import json
import subprocess
import sys

import pytest
from helpers_h1 import ROOT, here, mistake, stage

from lib.checkpoints import load_model
from lib.generate import complete
from lib.results import paper_table
from lib.tokens import get_tokenizer
from longbench import (
    TASKS,
    classification,
    code_similarity,
    number_share,
    prompt_ids,
    qa_f1,
    rouge_l,
    score,
)

pytest_plugins = ['helpers_h1']


# ---------------------------------------------------------------------- metrics

@pytest.mark.parametrize('prediction, gold, expected', [
    ('', 'Paris', 0), ('Paris', '', 0), ('', '', 0), ('Paris', 'Paris', 1),
    ('The answer: a cat!', 'cat', 2 / 3),            # answer, cat: P 1/2, R 1
    ('the a an', 'the', 0),                          # Nothing is left of either.
    ('THE  Cat\nsat', 'cat sat.', 1),
    ('an anthem, theatre', 'anthem theatre', 1),     # Articles go only as whole words.
    ("it's 3.14", 'its 314', 1),                     # Punctuation is deleted, not made a space.
    ('well-known', 'well known', 0), ('cat cat dog', 'cat dog dog', 2 / 3),
    ('« Zürich »', 'zürich', 1 / 2)])                # Only ASCII punctuation is deleted.
def test_qa_f1_by_hand(prediction, gold, expected):
    assert qa_f1(prediction, gold) == pytest.approx(expected)


@pytest.mark.parametrize('prediction, gold, expected', [
    # A union: w1 w2 w6 w7 w8 shares w1 w2, w1 w3 w8 w9 w5 shares w1 w3 w5: R 4/5, P 4/8.
    ('w1 w2 w6 w7 w8. w1 w3 w8 w9 w5', 'w1 w2 w3 w4 w5', 8 / 13),
    ('the the the', 'the', 1),                       # distinct words
    ('The cat', 'the cat', 1 / 2), ('cats', 'cat', 0),  # no lower case, no stems
    ('', 'a', 0), ('a', '', 0), ('...', 'a.', 0)])
def test_rouge_l_by_hand(prediction, gold, expected):
    assert rouge_l(prediction, gold) == pytest.approx(expected, abs=1e-7)


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


@pytest.mark.parametrize('prediction, gold, expected', [
    ('', '', 1), ('', 'x', 0), ('x', '', 0), ('return x', 'return x', 1),
    ('\n\nreturn x\nreturn y', 'return x', 1),                # The first line stays.
    ('# a comment\n// another\n`x`\nreturn x', 'return x', 1),
    ('# only a comment', 'return x', 0),
    ('x = 1  # one\ny = 2', 'y = 2', 1),                      # Any line with a # is passed over.
    ('# a\n\nreturn x', 'return x', 0),                       # An empty line is a line.
    ('abcd', 'bcde', 0.75), ('    return x', 'return x', 0.8)])  # 2 * 3 / 8; 2 * 8 / 20
def test_code_similarity_by_hand(prediction, gold, expected, recwarn):
    assert code_similarity(prediction, gold) == expected and not recwarn


@pytest.mark.parametrize('prediction, gold, expected', [
    ('it is a Date', 'Date', 1), ('date', 'Date', 0), ('', 'Date', 0),
    ('Date or Location', 'Date', 1 / 2), ('Location', 'Date', 0),
    ('Other location', 'Other location', 1)])                 # Other is part of gold's own name.
def test_classification_by_hand(prediction, gold, expected):
    classes = ['Date', 'Abbreviation', 'Other location', 'Location', 'Other']
    assert classification(prediction, gold, classes) == expected


def test_classification_skips_the_class_after_a_removed_one_as_the_benchmark_does():
    assert classification('cab', 'cab', ['b', 'ab', 'cab']) == 1 / 2
    assert classification('cab', 'cab', ['b', 'cab', 'ab']) == 1


@pytest.mark.parametrize('prediction, gold, expected', [
    ('There are 12 paragraphs, or 13.', '12', 1 / 2), ('', '12', 0), ('twelve', '12', 0),
    ('112', '12', 0), ('012', '12', 0), ('12.12', '12', 1), ('12 12 1', '12', 2 / 3),
    ('Paragraph 7', 'Paragraph 7', 1), ('7', 'Paragraph 7', 1), ('Paragraph 17', 'Paragraph 7', 0)])
def test_number_share_by_hand(prediction, gold, expected):
    assert number_share(prediction, gold) == expected


def test_score_is_of_the_best_answer_and_in_tasks_with_examples_of_the_first_line():
    assert score('hotpotqa', 'red car', ['blue', 'red car', 'red']) == 1
    assert score('hotpotqa', 'red car', []) == 0
    for task, expected in (('triviaqa', 1), ('hotpotqa', 2 / 3)):
        text = '\n\nred car\nQuestion: blue?'
        assert score(task, text, ['red car']) == pytest.approx(expected)
    # The words are he, left, and an empty one after the full stop.
    assert score('samsum', 'He left. \nDialogue', ['He left']) == pytest.approx(1 / (1 + 1 / 4))
    assert score('trec', 'Date\nOther', ['Date'], ['Date', 'Other']) == 1


def test_tasks_are_those_of_table_3_and_their_plain_mean_is_the_papers_average():
    table = paper_table('nope_table3')
    for row in table.values():
        assert list(row) == ['avg', *TASKS]
        mean = sum(row[task] for task in TASKS) / 16
        assert abs(mean - row['avg']) <= 0.0501  # Both are printed with one decimal.


# ---------------------------------------------------------------------- prompts

def test_prompt_keeps_its_first_and_last_half_and_is_never_too_long():
    encoding = get_tokenizer('bytes')
    start = encoding.eot_token
    # An odd room leaves out one more.
    for room, kept in ((11, b'0123456789'), (10, b'012356789'), (9, b'0126789'), (2, b'9')):
        assert prompt_ids('0123456789', encoding, room) == ([start, *kept], 11)
    text = 'né日本語' * 20
    whole = [start, *text.encode()]
    for room in range(2, len(whole)):
        ids, n = prompt_ids(text, encoding, room)
        same = max(0, room // 2 - 3)  # The rest of a cut character becomes U+FFFD, three bytes.
        assert len(ids) <= room and n == len(whole)
        assert ids[:same] == whole[:same] and ids[len(ids) - same:] == whole[n - same:]


# ---------------------------------------------------------------------- the stage

CLASSES = ['Date', 'Number', 'Place']
TEMPLATES = {'trec': 'Name the type.\n{context}{input}', 'samsum': '{context}\n\n{input}',
             'lcc': 'Go on.\n{context}'}
LONGEST = {'trec': 8, 'samsum': 12, 'lcc': 10}


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    """Five made-up records for each of three tasks."""
    folder, records = tmp_path_factory.mktemp('data'), {task: [] for task in TEMPLATES}
    for i in range(5):
        records['trec'].append({
            'input': f'Question: when {i}?\nType:', 'answers': ['Date'],
            'context': 'Question: who?\nType: Person\n' * (i + 1),
            'all_classes': CLASSES if i == 4 else ['e']})
        records['samsum'].append({
            'input': 'Dialogue: hi\nSummary:', 'answers': ['e e', 'They greet'],
            'context': f'{i} greets {i}', 'all_classes': None})
        records['lcc'].append({
            'input': '', 'context': f'import sys\nx{i} = {{"a": {i}}}\n',
            'answers': ['    eee'], 'all_classes': None})
    for task, rows in records.items():
        (folder / f'{task}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    (folder / 'dataset2prompt.json').write_text(json.dumps(TEMPLATES))
    (folder / 'dataset2maxlen.json').write_text(json.dumps(LONGEST))
    return folder


@pytest.fixture(scope='module')
def arguments(tiny_run, data):
    return [f'--init_from={tiny_run}/last.pt', f'--data={data}', '--device=cpu', '--dtype=float32',
            "--tasks=['trec','lcc','samsum']", '--context=60', '--beams=3', '--batch_size=2']


@pytest.fixture(scope='module')
def whole(arguments, tmp_path_factory):
    """out_dir of a run in one go, and what it printed."""
    out_dir = tmp_path_factory.mktemp('longbench')
    return out_dir, stage('longbench', *arguments, f'--out_dir={out_dir}', '--paper=NoPE 2K')


def result_of(out_dir):
    return json.loads((out_dir / 'longbench.json').read_text())


def rows_of(out_dir, task):
    """The answers of a finished task, in order, those of all ranks together."""
    rows = []
    for path in (out_dir / 'longbench').glob(f'{task}.*jsonl'):
        rows += [json.loads(line) for line in path.read_text().splitlines()[1:]]
    return sorted(rows, key=lambda row: row['item'])


@pytest.mark.parametrize('task, eos, least', [
    ('trec', (256,), 0), ('lcc', (256,), 0), ('samsum', (256, 10), 1)])
def test_predictions_are_beam_searches_on_the_filled_and_cut_prompts(
        whole, tiny_run, data, task, eos, least):
    model, _ = load_model(f'{tiny_run}/last.pt', None, 'cpu')
    encoding, rows, n_new = get_tokenizer('bytes'), rows_of(whole[0], task), LONGEST[task]
    records, room = (data / f'{task}.jsonl').read_text().splitlines(), 60 - n_new
    assert [row['item'] for row in rows] == [0, 1, 2, 3, 4]
    for record, row in zip(map(json.loads, records), rows):
        text = TEMPLATES[task].replace('{context}', record['context'])
        ids = [256, *text.replace('{input}', record['input']).encode()]
        kept = ids if len(ids) <= room else ids[:room // 2] + ids[-(room // 2):]
        [new] = complete(model, [kept], n_new, 3, eos, least)
        assert row == {
            'item': row['item'], 'prediction': encoding.decode(new), 'answers': record['answers'],
            'prompt_tokens': len(ids), 'score': score(task, row['prediction'], record['answers'],
                                                      CLASSES)}
        assert task != 'samsum' or row['prediction'] and '\n' not in row['prediction']
    assert result_of(whole[0])['tasks'][task] == {
        'score': round(100 * sum(row['score'] for row in rows) / 5, 2), 'samples': 5,
        'cut': {'trec': 5, 'lcc': 0, 'samsum': 0}[task],
        'max_prompt_tokens': room, 'max_new_tokens': n_new}


def test_table_shows_the_average_and_the_papers_row(whole):
    result, lines = result_of(whole[0]), whole[1].splitlines()[-6:-1]
    assert lines[0].split() == ['here', 'NoPE', '2K']
    scores = [row['score'] for row in result['tasks'].values()]
    assert result['average'] == round(sum(scores) / 3, 2) and max(scores) > 0
    shown = [line.split() for line in lines[1:]]
    # The order is Table 3's, whatever was asked for.
    assert [name for name, *_ in shown] == ['trec', 'samsum', 'lcc', 'average']
    ours, theirs = ([float(row[i]) for row in shown] for i in (1, 2))
    assert ours == pytest.approx([*scores, result['average']], abs=0.006)
    assert theirs == [41.5, 3.5, 48.4, 31.13]


KILL = '''
import os, runpy, signal, sys, lib.generate
real, calls = lib.generate.complete, []
def complete(*arguments):
    calls.append(1)
    if len(calls) == 3: os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments)
lib.generate.complete = complete
sys.argv[0] = "longbench.py"
runpy.run_path("longbench.py", run_name="__main__")
'''


def test_run_killed_and_two_ranks_give_the_answers_of_one_unbroken_run(whole, arguments, tmp_path):
    # It is killed in the third batch, when four of trec's five answers are there.
    arguments = [*arguments, f'--out_dir={tmp_path}']
    run = subprocess.run([sys.executable, '-c', KILL, *arguments], cwd=ROOT, capture_output=True)
    path = tmp_path / 'longbench' / 'trec.jsonl'
    assert run.returncode == -9 and path.read_text().count('\n') == 5
    with open(path, 'a') as file:
        file.write('{"item": 4, "predi')  # as a kill in the middle of a line would leave it
    stage('longbench', *arguments, ranks=2)
    assert result_of(tmp_path)['tasks'] == result_of(whole[0])['tasks']
    for task in TEMPLATES:
        assert rows_of(tmp_path, task) == rows_of(whole[0], task)  # None was done twice.
    message = mistake('longbench', *arguments, '--beams=2')
    assert 'trec.jsonl holds answers of other settings (beams)' in message


def test_more_samples_or_tasks_are_added_to_those_that_are_there(whole, arguments, tmp_path):
    rows = rows_of(whole[0], 'trec')
    for tasks, n in (("['trec']", 2), ("['trec','lcc']", 4), ("['trec']", 3)):
        here('longbench', *arguments, f'--out_dir={tmp_path}', f'--tasks={tasks}',
             f'--max_samples={n}')
        expected = 100 * sum(row['score'] for row in rows[:n]) / n
        assert result_of(tmp_path)['tasks']['trec']['score'] == round(expected, 2)
    assert rows_of(tmp_path, 'trec') == rows[:4]


@pytest.mark.parametrize('argument, says', [
    ("--tasks=['treck']", 'narrativeqa, qasper'), ('--paper=NoPE', 'RoPE 2K'),
    ('--beams=0', 'beams is 0'), ('--max_samples=0', 'max_samples is 0'),
    ('--context=13', 'leaves samsum no room'), ("--tasks=['qasper']", 'qasper.jsonl'),
    ('--data=nowhere', 'trec.jsonl')])
def test_mistakes_are_one_line_before_work_starts(arguments, tmp_path, argument, says):
    assert says in mistake('longbench', *arguments, f'--out_dir={tmp_path}', argument)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('text, says', [
    ('{"input": ""}\n', "KeyError: 'context'"), ('x', 'JSONDecodeError'), ('', 'no samples'),
    ('{"context": "", "answers": [7], "all_classes": null}', 'int')])
def test_records_other_than_the_benchmarks_are_refused(arguments, data, tmp_path, text, says):
    for path in data.glob('*.json'):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / 'lcc.jsonl').write_text(text)
    message = mistake('longbench', *arguments, f'--data={tmp_path}', "--tasks=['lcc']")
    assert message.startswith('lcc in') and says in message


@pytest.mark.parametrize('task, package', [('lcc', 'fuzzywuzzy.fuzz'), ('samsum', 'rouge')])
def test_a_missing_package_is_named_before_work_starts(arguments, monkeypatch, task, package):
    monkeypatch.setitem(sys.modules, package, None)
    name = package.partition('.')[0]
    assert f'pip install {name}' in mistake('longbench', *arguments, f"--tasks=['{task}']")
