"""
Likelihoods of choices against a plain pass for each, and a whole run through lm_eval.

$ python -m pytest tests/test_commonsense.py
"""

import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import near, on, random_model, read, refuses, stage, stage_here

import commonsense
from lib.generate import Decoding, complete, generate
from lib.tokenizers import get_tokenizer

L = 32  # of the tiny models
BYTES = get_tokenizer('bytes')


def harness(model, runtime, batch_size=16, add_bos=False):
    return commonsense.Harness(model, BYTES, runtime, L, batch_size, add_bos)


def questions(model):
    """Nine contexts, each with two continuations and the greedy one, not neighbours."""
    random = np.random.default_rng(0)
    ids = [random.integers(0, 61, n).tolist() for n in random.integers(1, 20, 18)]
    return list(zip(ids[:9] * 3, [row[:6] for row in ids] + complete(model, ids[:9], 5)))


@torch.no_grad()
def alone(model, context, continuation):
    """ln p of a continuation, and whether greedy decoding gives it, from a pass over it alone."""
    ids, n = torch.tensor([context + continuation]), len(continuation)
    logits = model(ids[:, :-1])[0, -n:]
    log_p = -model(ids[:, :-1], ids[:, -n:]).sum()
    return log_p.item(), bool((logits.argmax(-1) == ids[0, -n:]).all())


# With dynamic NTK or random positions, contexts of different lengths cannot share a pass, because
# both depend on the number of tokens that the pass will hold.
@pytest.mark.parametrize('size', [2, 100])
@pytest.mark.parametrize('changes', [
    {}, {'position': 'rope'}, {'position': 'alibi'}, {'position': 'logn'},
    {'position': 'rope', 'rope_scaling': 'dynamic_ntk:2', 'block_size': 8},
    {'position': 'rope', 'random_positions': 200}])
@torch.no_grad()
def test_scores_of_two_ranks_are_those_of_a_plain_pass_for_each_choice(cpu, changes, size):
    class Rank(type(cpu)):
        def gather(self, rows, n):  # what this rank alone has
            return np.array(rows)

    model = random_model(**changes)
    pairs = questions(model)
    one, two = (harness(model, Rank(cpu.device, cpu.dtype, rank, 2), batch_size=size).scores(pairs)
                for rank in (0, 1))
    near(one + two, [alone(model, *pair) for pair in pairs], atol=1e-4)
    assert (one.any(1) != two.any(1)).all()
    assert 0 < (one + two)[:, 1].sum() < len(pairs)


@torch.no_grad()
def test_a_context_is_read_once_for_all_its_choices(cpu):
    model, read = random_model(), []
    model.embed.register_forward_hook(lambda module, ids, out: read.append(ids[0].numel()))
    pairs = [(list(range(20)), [i, i]) for i in range(5)]
    harness(model, cpu).scores(pairs)
    assert read == [20, 5 * 1]  # not 5 * 21


@pytest.mark.parametrize('add_bos', [False, True])
def test_a_text_becomes_question_and_choice_as_in_lm_eval(cpu, add_bos):
    api = pytest.importorskip('lm_eval.api.model').TemplateLM
    theirs = SimpleNamespace(backend='causal', tok_encode=BYTES.encode_ordinary)
    for texts in ('Question: a?\nAnswer:', ' b'), ('ends  ', 'b'), ('é ', 'ü'):
        context, choice = api._encode_pair(theirs, *texts)
        found = harness(None, cpu, add_bos=add_bos).encode(*texts)
        assert found == ([256] * add_bos + context, choice)


def test_a_question_that_is_too_long_loses_its_start_and_a_choice_is_never_cut(cpu,
                                                                              other_tokenizer):
    ours = harness(None, cpu)
    assert ours.encode('', 'c') == ([256], [99])  # after end-of-text
    assert ours.encode('x', 'y' * 99) == ([120], [121] * 99)
    assert ours.n_cut == 0
    assert ours.encode('x' + 'y' * 99, 'abc') == ([121] * (L - 2), [97, 98, 99])
    assert ours.n_cut == 1
    th = get_tokenizer(str(other_tokenizer.parent / 'th.tiktoken'))
    joins = commonsense.Harness(None, th, cpu, L, 16, False)
    refuses("'h' has no token of its own", joins.encode, 't', 'h')
    wordy = SimpleNamespace(args=['x' * 33], task_name='wordy')  # which the model would write on
    refuses('wordy has 33 tokens, but read_length is 32.', ours.prompt, wordy)


TASK = """
task: NAME
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
doc_to_text: "{{q}}"
"""
CHOICE = """
output_type: multiple_choice
doc_to_target: answer
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
WRITING = """
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {do_sample: false, max_gen_toks: MOST, until: [e]}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture
def tasks(monkeypatch):
    """lm_eval's tasks without its own, which take 10 s to find."""
    tasks = pytest.importorskip('lm_eval.tasks')
    few = partial(tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(tasks, 'TaskManager', few)


def test_a_run_scores_choices_and_writes_text_as_a_plain_loop_does(tmp_path, tiny_run, tiny, tasks):
    """Half of the answers are wrong. Some texts end early, at an `e`."""
    model, length, n_cut, lines = tiny[0], 36, 0, {'choice': [], '9': [], '4': []}
    model.head_scale = 1.3
    questions = ['def f(self', 'import os', 'x', 'for i in range(', 'return ', 'class A:']
    words = ['if', 'self', 'return value', 'the', 'import everything here', 'a', 'def'] * 2
    for i in range(24):
        question, choices, scores = questions[i // 2 % 6], words[i % 7:i % 7 + 2 + i % 3], []
        for choice in choices:
            ids, n = list(f'{question} {choice}'.encode()), len(choice)
            n_cut += len(ids) > length + 1  # The last token is only predicted.
            log_p, _ = alone(model, ids[-length - 1:-n - 1], ids[-n - 1:])
            scores.append(log_p / n)  # acc_norm
        answer = (np.argmax(scores).item() + i % 2) % len(choices)
        lines['choice'].append({'q': question, 'choices': choices, 'answer': answer})
        for n_new in 9, 4:
            how = Decoding((BYTES.eot_token,))
            ids = list(generate(model, list(question.encode()), n_new, how))
            text = bytes(ids).decode(errors='replace').split('e')[0]
            lines[str(n_new)].append({'q': question, 'answer': text + '!' * (i % 2)})
    assert {len(line['answer']) < 4 for line in lines['4']} == {True, False} and n_cut

    for name, rows in lines.items():
        data, task = tmp_path / f'{name}.jsonl', CHOICE if name == 'choice' else WRITING
        data.write_text('\n'.join(map(json.dumps, rows * 2)))
        task = f'{TASK}{task}'.replace('NAME', f'my_{name}').replace('FILE', str(data))
        (tmp_path / f'{name}.yaml').write_text(task.replace('MOST', name))
    stage_here('commonsense', *on(tiny_run, tmp_path, (
        f'--scale=1.3 --tasks=["my_choice","my_9","my_4"] --task_folder={tmp_path} --limit=24 '
        f'--read_length={length} --batch_size=5')))
    result = read(tmp_path / 'commonsense_scale1.3.json')
    assert (result['average'], result['choices_cut']) == (50, n_cut)
    assert [(row['metric'], row['score'], row['questions'])
            for row in result['tasks'].values()] == [
        ('acc_norm', 50, 24), ('exact_match', 50, 24), ('exact_match', 50, 24)]


DRAWN = """
task: drawn
custom_dataset: !function drawn.documents
test_split: test
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}]
"""
DOCUMENTS = """
import random
import numpy
from datasets import Dataset

def documents(**_):
    return {'test': Dataset.from_list([
        {'q': f'{random.random()} {numpy.random.rand()}', 'choices': ['self', 'return'],
         'answer': i % 2} for i in range(12)])}
"""


@pytest.fixture
def drawn(tmp_path):
    """A folder with a task that draws its questions, as RULER's tasks do."""
    (tmp_path / 'drawn.yaml').write_text(DRAWN)
    (tmp_path / 'drawn.py').write_text(DOCUMENTS)
    return tmp_path


def test_every_run_draws_the_same_questions(drawn, tasks):
    def questions():
        [task] = commonsense.load_tasks(['drawn'], str(drawn), {})
        return [task.doc_to_text(doc) for doc in task.test_docs()]

    assert len(set(questions())) == 12 and questions() == questions()


@pytest.mark.slow
def test_two_ranks_write_the_result_of_one(drawn, tiny_run, tasks):
    options = f'--tasks=["drawn"] --task_folder={drawn} --batch_size=5 --label='
    stage_here('commonsense', *on(tiny_run, drawn, f'{options}one'))
    stage('commonsense', *on(tiny_run, drawn, f'{options}two'), ranks=2)
    one, two = (read(drawn / f'commonsense_{ranks}.json')['tasks'] for ranks in ('one', 'two'))
    assert one == two and one['drawn']['questions'] == 12 and one['drawn']['dataset'] is None


@pytest.mark.parametrize('how', [{'until': ['e'], 'max_gen_toks': 9},
                                 {'until': 'e', 'max_new_tokens': 9}])
def test_a_task_names_the_limits_of_a_text_in_any_of_lm_evals_ways(cpu, how):
    pytest.importorskip('lm_eval')
    model, prompt = random_model(vocab_size=257), 'x'
    ids = complete(model, [[120]], 9, Decoding((BYTES.eot_token,)))[0]
    end = chr(ids[5])
    asked = SimpleNamespace(args=[prompt, how | {'until': end if how['until'] == 'e' else [end]}],
                            task_name='')
    [text] = harness(model, cpu).generate_until([asked])
    assert text == BYTES.decode(ids).partition(end)[0]


def test_rulers_score_is_that_of_the_length_asked_for():
    row = {'sample_len': 3, '4096,none': -1, '8192,none': 0.25, '8192_stderr,none': 'N/A'}
    measured = {'results': {'niah': row}, 'versions': {'niah': 1},
                'configs': {'niah': {'dataset_path': ''}}}
    found = commonsense.task_scores(measured, 8192)['niah']
    assert (found['score'], found['standard_error'], found['metric']) == (25, None, '8192')
    row['8192_stderr,none'] = 0.02
    assert commonsense.task_scores(measured, 8192)['niah']['standard_error'] == 2


def test_an_unknown_task_is_named(tasks):
    refuses('pika', commonsense.load_tasks, ['pika'], '', {})
