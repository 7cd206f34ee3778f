"""
LongBench: its metrics by hand, its prompts, and the stage as run on records that are made up.

$ python -m pytest tests/test_longbench.py
"""

import json
from fractions import Fraction

import pytest
from conftest import mistake, near, on, read, stage

from generate import complete
from longbench import prompt_ids, rouge_l, score
from tokenizer import get_tokenizer

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
def test_metrics_by_hand(row):
    task, prediction, gold, expected, *_ = [
        cell.strip().replace('\\n', '\n').replace('\\t', ' ') for cell in row.split('|')]
    near(score(task, prediction, gold.split(' / '), CLASSES), Fraction(expected), atol=1e-7)


def test_rouge_l_is_0_where_the_package_fails():
    assert rouge_l(' '.join(map(str, range(9999))), '0') == 0  # it recurses too deep


# ---------------------------------------------------------------------- prompts

def test_a_prompt_keeps_its_first_and_last_half_and_is_never_too_long():
    assert prompt_ids('0123456789', BYTES, 9) == [256, *b'0126789']  # of 9, 4 and 4
    for room in range(2, 90):  # may cut a character, whose rest becomes U+FFFD, three bytes
        assert room - 2 < len(prompt_ids('né日本語' * 20, BYTES, room)) <= room


# ---------------------------------------------------------------------- as run

TEMPLATES = {'trec': 'Name the type.\n{context}{input}', 'samsum': '{context}', 'lcc': '{input}'}
LONGEST = {'trec': 8, 'samsum': 12, 'lcc': 10}
RECORDS = [{'input': f'When {i}?', 'context': 'Who?\nPerson\n' * 2 * i, 'answers': answers,
            'all_classes': CLASSES} for i, answers in enumerate(([], ['Date'], ['Dat', 'x']))]


def test_a_run_asks_each_prompt_once_and_scores_the_answers(tiny_run, tmp_path, monkeypatch):
    def says_date(model, prompts, *how):
        complete(model, prompts, *how)
        asked.append((prompts, *how))
        return [[*b'Date\nx']] * len(prompts)

    def expected(records):
        for task, *how in ('trec', [256], 3, []), ('samsum', [256, 10], 3, [256, 10]), (
                'lcc', [256], 3, []):
            texts = [TEMPLATES[task].format(**record) for record in records]
            n = LONGEST[task]
            yield [prompt_ids(text, BYTES, 60 - n) for text in texts], n, *how

    monkeypatch.setattr('generate.complete', says_date)
    for task in TEMPLATES:
        (tmp_path / f'{task}.jsonl').write_text('\n'.join(map(json.dumps, RECORDS)))
    (tmp_path / 'dataset2prompt.json').write_text(json.dumps(TEMPLATES))
    (tmp_path / 'dataset2maxlen.json').write_text(json.dumps(LONGEST))
    asked, command = [], on(tiny_run, tmp_path, '--tasks=["trec","samsum","lcc"] --beams=3 '
                            f'--batch_size=2 --context=60 --data={tmp_path}')
    stage('longbench', *command, '--max_samples=2')
    printed = stage('longbench', *command)
    assert asked == [*expected(RECORDS[:2]), *expected(RECORDS[2:])]
    # Date is a class; its word is not Dat; of 4 + 3 letters 2 * 3 are shared, which is 0.86.
    rows = read(tmp_path / 'longbench.json')['rows']
    assert [row['score'] for row in rows] == [33.33, 33.33, 62.0] and '42.8867' in printed
    assert 'no room for a prompt' in mistake('longbench', *command, '--context=13')
