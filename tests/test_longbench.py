"""
LongBench: its metrics against the packages that the benchmark uses and by hand, its prompts, the stage as run, and how
its data is prepared. The records here are made up; their fields are the benchmark's.

$ python -m pytest tests/test_longbench.py
"""

import difflib
import hashlib
import json
import random
import runpy
import subprocess
import sys
import urllib.error
import warnings
import zipfile

import pytest
import torch
from conftest import ROOT, files_at_most, mistake, stage
from rouge import Rouge

import checkpoint
from corpus import get_tokenizer, tokenizer_from_state
from generate import complete
from longbench import TASKS, classification, code_similarity, count, prompt_ids, qa_f1, retrieval, rouge_l, score

with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # it asks for python-Levenshtein
    from fuzzywuzzy import fuzz


def here(name, *arguments):
    """Run NAME.py ARGUMENTS in this process, as importing torch again takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, 'argv', [f'{name}.py', *map(str, arguments)])
        patch.setattr(sys, 'excepthook', sys.excepthook)
        runpy.run_path(str(ROOT / f'{name}.py'), run_name='__main__')
    torch.use_deterministic_algorithms(False)  # runtime.setup() had set it


PREPARE = 'data/longbench/prepare'


# ----------------------------------------------------------------------------- metrics

@pytest.mark.parametrize('prediction, gold, expected', [
    ('', 'Paris', 0), ('Paris', '', 0), ('', '', 0), ('Paris', 'Paris', 1),
    ('The answer: a cat!', 'cat', 2 / 3),            # answer, cat: P 1/2, R 1
    ('the a an', 'the', 0),                          # nothing is left of either
    ('THE  Cat\nsat', 'cat sat.', 1),
    ('an anthem, theatre', 'anthem theatre', 1),     # articles only as whole words
    ("it's 3.14", 'its 314', 1),                     # punctuation is deleted, not replaced by a space
    ('well-known', 'well known', 0), ('cat cat dog', 'cat dog dog', 2 / 3),
    ('« Zürich »', 'zürich', 1 / 2),                 # only ASCII punctuation is deleted: 3 words
    ('a-b', 'b', 0), ('b a', 'b', 1)])               # 'a-b' becomes the word ab
def test_qa_f1_by_hand(prediction, gold, expected):
    assert qa_f1(prediction, gold) == pytest.approx(expected)


def package_rouge(prediction, gold):
    try:
        return Rouge().get_scores([prediction], [gold], avg=True)['rouge-l']['f']
    except (ValueError, RecursionError):
        return 0.0


def random_text(draw, words, n):
    return ''.join(draw.choice([f'{draw.choice(words)} '] * 12 + ['a', ' ', '\n', '. ', '.', '...'])
                   for _ in range(draw.randrange(n)))


def test_rouge_l_equals_the_package():
    draw, words = random.Random(0), ['a', 'b', 'c', 'The', 'the', 'x1', 'né', '日本', '3.5', "don't", 'e,']
    cases = [(random_text(draw, words[:n], n_max), random_text(draw, words[:n], n_max))
             for n in (2, 4, 11) for n_max in (3, 12, 60) for _ in range(60)]
    cases += [('', ''), ('', 'a'), ('a', ''), ('.', 'a'), ('...', 'a.'), (' ', 'a'), (' ', ' '), ('\n', '. .'),
              ('a b.', 'a b'), ('a b. c', 'c. b a'), ('x = 1\n  y = 2\n', 'x = 1 y = 2')]
    assert [rouge_l(*case) for case in cases] == [package_rouge(*case) for case in cases]
    scores = [rouge_l(*case) for case in cases]
    assert min(scores) == 0 and max(scores) > 0.99 and len({round(s, 6) for s in scores}) > 40


def test_rouge_l_by_hand():
    # the published example of a union: w1 w2 w6 w7 w8 shares w1 w2, w1 w3 w8 w9 w5 shares w1 w3 w5: 4 of 5 words
    r, p = 4 / 5, 4 / 8
    assert rouge_l('w1 w2 w6 w7 w8. w1 w3 w8 w9 w5', 'w1 w2 w3 w4 w5') == pytest.approx(2 * p * r / (p + r), abs=1e-7)
    assert rouge_l('the the the', 'the') == pytest.approx(1, abs=1e-7)  # distinct words
    assert rouge_l('The cat', 'the cat') == pytest.approx(1 / 2, abs=1e-7)  # no lower-casing
    assert rouge_l('cats', 'cat') == 0  # no stemming


@pytest.fixture
def recursion_limit():
    """Python's own, 1000: torch's compiler raises it where it has run before."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


def test_rouge_l_is_0_where_the_package_recurses_too_deep(recursion_limit):
    for n, fails in ((600, False), (1100, True)):
        text = ' '.join(f'w{i}' for i in range(n))
        assert rouge_l(text, text) == package_rouge(text, text) == (0 if fails else pytest.approx(1, abs=1e-7))


def test_code_similarity_of_one_line_equals_fuzzywuzzy(monkeypatch):
    monkeypatch.setattr(fuzz, 'SequenceMatcher', difflib.SequenceMatcher)  # also where Levenshtein is installed
    draw, seen = random.Random(1), set()
    for n in (1, 4, 12, 40, 300):  # from 200 characters on difflib leaves out frequent ones
        for _ in range(60):
            gold = ''.join(draw.choice('ab ()=_é日') for _ in range(draw.randrange(n)))
            line = ''.join(char if draw.random() < 0.7 else draw.choice('abc .') for char in gold) + 'x' * (n == 12)
            assert code_similarity(line, gold) == fuzz.ratio(line, gold) / 100
            seen.add(code_similarity(line, gold))
    assert {0, 1} < seen and len(seen) > 30


@pytest.mark.parametrize('prediction, gold, expected', [
    ('', '', 1), ('', 'x', 0), ('x', '', 0), ('return x', 'return x', 1),
    ('\n\nreturn x\nreturn y', 'return x', 1),                # leading line ends go, the first line stays
    ('# a comment\n// another\n`x`\nreturn x', 'return x', 1),
    ('# only a comment', 'return x', 0),
    ('x = 1  # one\ny = 2', 'y = 2', 1),                      # any line with a # is passed over
    ('# a\n\nreturn x', 'return x', 0),                       # an empty line is a line
    ('abcd', 'bcde', 0.75), ('    return x', 'return x', 0.8)])  # 2 * 3 / 8; 2 * 8 / 20
def test_code_similarity_by_hand(prediction, gold, expected):
    assert code_similarity(prediction, gold) == expected


def test_classification_by_hand():
    classes = ['Date', 'Expression abbreviated', 'Abbreviation', 'Other location', 'Location', 'Other']
    assert classification('Date', 'Date', classes) == 1
    assert classification('it is a Date', 'Date', classes) == 1
    assert classification('date', 'Date', classes) == classification('', 'Date', classes) == 0
    assert classification('Date or Location', 'Date', classes) == 1 / 2
    assert classification('Location', 'Date', classes) == 0
    assert classification('Other location', 'Other location', classes) == 1  # Other is part of the answer's own name
    # b and ab are both part of cab; b is removed, then ab is passed over
    assert classification('cab', 'cab', ['b', 'ab', 'cab']) == 1 / 2
    assert classification('cab', 'cab', ['b', 'cab', 'ab']) == 1


def test_count_and_retrieval_by_hand():
    assert count('There are 12 paragraphs, or 13.', '12') == 1 / 2 and count('12', '12') == 1
    assert count('', '12') == count('twelve', '12') == count('112', '12') == count('012', '12') == 0
    assert count('12.12', '12') == 1 and count('12 12 1', '12') == 2 / 3
    assert retrieval('Paragraph 7', 'Paragraph 7') == retrieval('7', 'Paragraph 7') == 1
    assert retrieval('Paragraph 17', 'Paragraph 7') == 0 and retrieval('7, 8, 9 and 10', 'Paragraph 7') == 1 / 4


def test_score_is_that_of_the_best_answer_and_of_the_first_line_in_the_tasks_with_examples():
    assert score('hotpotqa', 'red car', ['blue', 'red car', 'red']) == 1 and score('hotpotqa', 'red car', []) == 0
    for task, expected in (('triviaqa', 1), ('hotpotqa', 2 / 3)):
        assert score(task, '\n\nred car\nQuestion: blue?', ['red car']) == pytest.approx(expected)
    assert score('samsum', 'He left. \nDialogue', ['He left']) == pytest.approx(1 / (1 + 1 / 4))  # he, left, and ''
    assert score('trec', 'Date\nOther', ['Date'], ['Date', 'Other']) == 1
    assert score('passage_retrieval_en', 'Paragraph 2', ['Paragraph 2']) == 1
    assert score('lcc', 'x', ['x']) == score('passage_count', '3', ['3']) == 1


def test_tasks_are_those_of_table_3_and_their_plain_mean_is_the_papers_average():
    table = json.loads((ROOT / 'results/papers.json').read_text())['nope_table3']
    assert table['columns'] == ['avg', *TASKS] and len(table['rows']) == 11
    for row in table['rows'].values():
        assert len(row) == 17 and abs(sum(row[1:]) / 16 - row[0]) <= 0.0501  # both are printed with one decimal


# ----------------------------------------------------------------------------- prompts

def test_prompt_keeps_its_first_and_last_half_and_is_never_too_long():
    encoding = get_tokenizer('bytes')
    start = encoding.eot_token
    assert prompt_ids('0123456789', encoding, 11) == ([start, *b'0123456789'], 11)
    assert prompt_ids('0123456789', encoding, 10) == ([start, *b'012356789'], 11)
    assert prompt_ids('0123456789', encoding, 9) == ([start, *b'0126789'], 11)  # an odd number leaves one out
    assert prompt_ids('0123456789', encoding, 2) == ([start, *b'9'], 11)
    text = 'né日本語' * 20
    whole = [start, *text.encode()]
    for room in range(2, len(whole)):
        ids, n = prompt_ids(text, encoding, room)
        same = max(0, room // 2 - 3)  # cut through a character, its rest becomes U+FFFD, three bytes
        assert len(ids) <= room and n == len(whole)
        assert ids[:same] == whole[:same] and ids[len(ids) - same:] == whole[n - same:]


# ----------------------------------------------------------------------------- the stage

@pytest.fixture(scope='module')
def data(tmp_path_factory):
    """Five made-up records for each of three tasks."""
    folder, classes = tmp_path_factory.mktemp('data'), ['Date', 'Number', 'Place']
    records = {
        'trec': [{'input': f'Question: when {i}?\nType:', 'context': 'Question: who?\nType: Person\n' * (i + 1),
                  'answers': ['Date'], 'all_classes': classes if i == 4 else ['e']} for i in range(5)],
        'samsum': [{'input': 'Dialogue: hi\nSummary:', 'context': f'{i} greets {i}', 'answers': ['e e', 'They greet'],
                    'all_classes': None} for i in range(5)],
        'lcc': [{'input': '', 'context': f'import sys\nx{i} = {{"a": {i}}}\n', 'answers': ['    eee'],
                 'all_classes': None} for i in range(5)]}
    for task, rows in records.items():
        (folder / f'{task}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    (folder / 'dataset2prompt.json').write_text(json.dumps(
        {'trec': 'Name the type.\n{context}{input}', 'samsum': '{context}\n\n{input}', 'lcc': 'Go on.\n{context}'}))
    (folder / 'dataset2maxlen.json').write_text(json.dumps({'trec': 8, 'samsum': 12, 'lcc': 10}))
    return folder


def arguments(tiny_run, data, out_dir, *more):
    return [f'--init_from={tiny_run}/last.pt', f'--out_dir={out_dir}', f'--data={data}', '--device=cpu',
            '--dtype=float32', "--tasks=['trec','lcc','samsum']", '--context=60', '--beams=3', '--batch_size=2', *more]


@pytest.fixture(scope='module')
def whole(tiny_run, data, tmp_path_factory):
    out_dir = tmp_path_factory.mktemp('longbench')
    out, _ = stage('longbench', *arguments(tiny_run, data, out_dir, '--paper=NoPE 2K'))
    return out_dir, json.loads((out_dir / 'longbench.json').read_text()), out


def rows_of(out_dir, task):
    """The answers of a finished task, in order, all ranks' files together."""
    folder, lines = out_dir / 'longbench', []
    for path in (folder / f'{task}.jsonl', *folder.glob(f'{task}.rank*.jsonl')):
        lines += [json.loads(line) for line in path.read_text().splitlines()[1:]]
    return sorted(lines, key=lambda line: line['item'])


def test_predictions_are_beam_searches_on_the_filled_and_cut_prompts(whole, tiny_run, data):
    out_dir, result, _ = whole
    model, info = checkpoint.load_model(f'{tiny_run}/last.pt', None, 'cpu')
    encoding, prompts = tokenizer_from_state(info['tokenizer']), json.loads((data / 'dataset2prompt.json').read_text())
    for task, n_new, eos, least in (('trec', 8, (256,), 0), ('lcc', 10, (256,), 0), ('samsum', 12, (256, 10), 1)):
        records = [json.loads(line) for line in (data / f'{task}.jsonl').read_text().splitlines()]
        rows, room = rows_of(out_dir, task), 60 - n_new
        assert [row['item'] for row in rows] == [0, 1, 2, 3, 4]
        for record, row in zip(records, rows):
            text = prompts[task].replace('{context}', record['context']).replace('{input}', record['input'])
            ids = [encoding.eot_token, *text.encode()]
            kept = ids if len(ids) <= room else ids[:room // 2] + ids[-(room // 2):]
            assert row['prediction'] == encoding.decode(complete(model, [kept], n_new, 3, eos, least)[0])
            assert row['prompt_tokens'] == len(ids) and row['answers'] == record['answers']
            assert row['score'] == score(task, row['prediction'], record['answers'], ['Date', 'Number', 'Place'])
        mean = sum(row['score'] for row in rows) / 5
        cut = sum(row['prompt_tokens'] > room for row in rows)
        assert result['tasks'][task] == {'score': round(100 * mean, 2), 'samples': 5, 'cut': cut,
                                         'max_prompt_tokens': room, 'max_new_tokens': n_new}
    assert all('\n' not in row['prediction'] and row['prediction'] for row in rows_of(out_dir, 'samsum'))
    assert result['tasks']['trec']['cut'] == 5 and result['tasks']['samsum']['cut'] == 0


def test_table_shows_the_average_and_the_papers_row(whole):
    _, result, out = whole
    scores = {task: row['score'] for task, row in result['tasks'].items()}
    assert list(scores) == ['trec', 'samsum', 'lcc']  # Table 3's order, whatever was asked for
    assert result['average'] == round(sum(scores.values()) / 3, 2) and result['settings']['beams'] == 3
    head, ours, theirs = (line.split() for line in out.splitlines()[-4:-1])
    assert head == ['avg', 'TREC', 'SSum', 'Lcc']
    assert ours == ['none', f"{result['average']:.2f}", *(f'{x:.1f}' for x in scores.values())]
    assert theirs == ['paper:', 'NoPE', '2K', '31.13', '41.5', '3.5', '48.4']


def test_run_killed_and_two_ranks_give_the_answers_of_one_unbroken_run(whole, tiny_run, data, tmp_path):
    # killed in the third batch: four of trec's five answers are there
    kill = ('import os, runpy, signal, sys, generate\n'
            'real, calls = generate.complete, []\n'
            'def complete(*arguments, **more):\n'
            '    calls.append(1)\n'
            '    if len(calls) == 3: os.kill(os.getpid(), signal.SIGKILL)\n'
            '    return real(*arguments, **more)\n'
            'generate.complete = complete\n'
            'sys.argv[0] = "longbench.py"\n'
            'runpy.run_path("longbench.py", run_name="__main__")')
    command = [sys.executable, '-c', kill, *arguments(tiny_run, data, tmp_path)]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == -9
    path = tmp_path / 'longbench' / 'trec.jsonl'
    assert path.read_text().count('\n') == 5 and not (tmp_path / 'longbench.json').exists()
    with open(path, 'a') as file:
        file.write('{"item": 4, "predi')  # as a kill in the middle of a line would leave it
    stage('longbench', *arguments(tiny_run, data, tmp_path), ranks=2)
    result = json.loads((tmp_path / 'longbench.json').read_text())
    assert result['tasks'] == whole[1]['tasks']
    for task in result['tasks']:
        assert rows_of(tmp_path, task) == rows_of(whole[0], task)  # none was done twice
    message = mistake('longbench', *arguments(tiny_run, data, tmp_path, '--beams=2'))
    assert 'trec.jsonl holds answers of other settings (beams). Remove it' in message


def test_more_samples_or_tasks_are_added_to_those_that_are_there(whole, tiny_run, data, tmp_path):
    for tasks, n in (("['trec']", 2), ("['trec','lcc']", 4), ("['trec']", 3)):
        here('longbench', *arguments(tiny_run, data, tmp_path), f'--tasks={tasks}', f'--max_samples={n}')
        result = json.loads((tmp_path / 'longbench.json').read_text())
        rows = rows_of(whole[0], 'trec')[:n]
        assert result['tasks']['trec']['score'] == round(100 * sum(row['score'] for row in rows) / n, 2)
    assert rows_of(tmp_path, 'trec') == rows_of(whole[0], 'trec')[:4]


def test_mistakes_are_one_line_before_work_starts(tiny_run, data, tmp_path):
    def refused(*more):
        return mistake('longbench', *arguments(tiny_run, data, tmp_path, *more))

    assert "tasks is ['treck']. Choose from: narrativeqa, qasper" in refused("--tasks=['treck']")
    assert "Table 3 has no row 'NoPE'. Choose from: RoPE 2K" in refused('--paper=NoPE')
    assert 'beams is 0; it must be at least 1' in refused('--beams=0')
    assert 'must be at least 1' in refused('--max_samples=0')
    assert 'A context of 13 tokens leaves samsum no room' in refused('--context=13')
    assert 'qasper.jsonl. Run data/longbench/prepare.py' in refused("--tasks=['qasper']")
    assert 'There is no' in refused(f'--data={tmp_path}/nowhere')
    for name, text, message in (('lcc.jsonl', '{"input": ""}\n', "lcc in .* KeyError('context')"),
                                ('lcc.jsonl', 'x', 'lcc in .* JSONDecodeError'), ('lcc.jsonl', '', 'no samples')):
        folder = tmp_path / 'other'
        folder.mkdir(exist_ok=True)
        for path in data.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        (folder / name).write_text(text)
        assert message.split('.*')[-1].strip() in refused(f'--data={folder}')
    assert [path.name for path in tmp_path.iterdir()] == ['other']


# ----------------------------------------------------------------------------- the data

@pytest.fixture(scope='module')
def prepare_module():
    return runpy.run_path(str(ROOT / 'data/longbench/prepare.py'))


@pytest.fixture
def benchmark(tmp_path, prepare_module):
    """A folder with files named as the benchmark's, with one record a task."""
    folder = tmp_path / 'given'
    folder.mkdir()
    for task in prepare_module['ROWS']:
        (folder / f'{task}.jsonl').write_text('{"input": "' + task + '"}\n')
    for name in ('dataset2prompt.json', 'dataset2maxlen.json'):
        (folder / name).write_text('{}')
    return folder


def test_prepare_takes_the_16_tasks_of_the_stage(prepare_module):
    assert list(prepare_module['ROWS']) == list(TASKS) and sum(prepare_module['ROWS'].values()) == 3750


def test_files_of_a_folder_are_copied_with_a_note_where_they_are_others(benchmark, tmp_path, capsys):
    here(PREPARE, benchmark, f'--out_dir={tmp_path}/out')
    said = capsys.readouterr().out
    assert 'note: dataset2prompt.json is not the file' in said and 'trec.jsonl has 1 rows, in the benchmark 200' in said
    assert {path.name: path.read_bytes() for path in (tmp_path / 'out').iterdir()} == {
        path.name: path.read_bytes() for path in benchmark.iterdir()}


def test_tasks_may_come_in_data_zip(benchmark, tmp_path, capsys):
    with zipfile.ZipFile(benchmark / 'data.zip', 'w') as archive:
        for path in benchmark.glob('*.jsonl'):
            archive.write(path, f'data/{path.name}')
            path.unlink()
    here(PREPARE, benchmark, f'--out_dir={tmp_path}/out')
    assert 'note: data.zip is not the file' in capsys.readouterr().out
    assert (tmp_path / 'out' / 'lcc.jsonl').read_text() == '{"input": "lcc"}\n'
    assert len(list((tmp_path / 'out').iterdir())) == 18
    whole = (benchmark / 'data.zip').read_bytes()
    (benchmark / 'data.zip').write_bytes(whole[:len(whole) // 2])
    with pytest.raises(ValueError, match='data.zip is not whole'):
        here(PREPARE, benchmark, f'--out_dir={tmp_path}/none')
    assert not (tmp_path / 'none').exists()


def test_nothing_is_written_where_a_file_is_missing_or_broken_or_the_disk_full(benchmark, tmp_path):
    out = f'--out_dir={tmp_path}/none'
    with pytest.raises(ValueError, match='Name the one folder'):
        here(PREPARE, benchmark, benchmark, out)
    rows = '{"input": "x"}\n' * 1000
    (benchmark / 'repobench-p.jsonl').write_text(rows)
    with files_at_most(10_000), pytest.raises(OSError):  # as on a full disk
        here(PREPARE, benchmark, out)
    assert list((tmp_path / 'none').iterdir()) == []
    (benchmark / 'lcc.jsonl').write_text('{"input": ')
    with pytest.raises(ValueError, match='lcc.jsonl is not JSON'):
        here(PREPARE, benchmark, out)
    (benchmark / 'lcc.jsonl').unlink()
    (benchmark / 'dataset2maxlen.json').unlink()
    with pytest.raises(ValueError, match=f'{benchmark} lacks dataset2maxlen.json, lcc.jsonl.'):
        here(PREPARE, benchmark, out)
    assert list((tmp_path / 'none').iterdir()) == []


def test_without_network_one_line_says_which_files_to_put_where(prepare_module, monkeypatch):
    def no_network(*_, **__):
        raise urllib.error.URLError('no network')
    monkeypatch.setattr('urllib.request.urlopen', no_network)
    with pytest.raises(ValueError, match=r'no network.*Put dataset2prompt.json and dataset2maxlen.json from https.*'
                                         r'prepare.py FOLDER'):
        prepare_module['download']()


def test_downloads_with_another_digest_are_refused(prepare_module):
    digest = hashlib.sha256(b'{"trec": 64}').hexdigest()
    with pytest.raises(ValueError, match=f'dataset2maxlen.json has sha256 {digest}, not 72966'):
        prepare_module['unpack']({'dataset2maxlen.json': b'{"trec": 64}'}, must_match=True)
