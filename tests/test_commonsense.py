"""
Likelihoods of choices against a plain pass for each, and a whole run through lm_eval.

$ python -m pytest tests/test_commonsense.py
"""

import json
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import mistake, near, on, random_model, read, stage_here

import commonsense
from lib.generate import complete
from lib.tokens import get_tokenizer

L = 32  # of the tiny models
BYTES = get_tokenizer('bytes')


def questions(model):
    """Nine contexts, each with two continuations and the greedy one, not neighbours."""
    random = np.random.default_rng(0)
    ids = [random.integers(0, 61, n).tolist() for n in random.integers(1, 20, 18)]
    contexts, others = ids[:9], [row[:6] for row in ids]
    return list(zip(contexts * 3, others + complete(model, contexts, 5)))


@torch.no_grad()
def alone(model, context, continuation):
    """ln p of a continuation, and whether greedy decoding gives it, from a pass over it alone."""
    ids, n = torch.tensor([context + continuation]), len(continuation)
    logits, targets = model(ids[:, :-1])[0, -n:], ids[0, -n:]
    log_p = logits.log_softmax(-1).gather(-1, targets[:, None])
    return log_p.sum().item(), bool((logits.argmax(-1) == targets).all())


# With dynamic NTK or random positions no contexts of other lengths can share a pass: both turn by
# the tokens that the pass will hold.
@pytest.mark.parametrize('changes', [
    {}, {'position': 'rope'}, {'position': 'alibi'}, {'position': 'logn'},
    {'position': 'rope', 'rope_scaling': 'dynamic_ntk:2', 'block_size': 8},
    {'position': 'rope', 'random_positions': 200}])
@torch.no_grad()
def test_scores_are_those_of_a_plain_pass_for_each_choice(cpu, changes, monkeypatch):
    model = random_model(**changes)
    monkeypatch.setattr(commonsense, 'batch_size', 4)
    pairs = questions(model)
    scores = commonsense.Harness(model, None, cpu).scores(pairs)
    near(scores, [alone(model, *pair) for pair in pairs], atol=1e-4)
    assert 0 < scores[:, 1].sum() < len(pairs)


@pytest.mark.parametrize('size', [1, 2, 100])
@torch.no_grad()
def test_batches_ranks_and_order_change_nothing(cpu, monkeypatch, size):
    class Rank(type(cpu)):
        def gather(self, rows, n):  # what this rank alone has
            return np.array(rows)

    model = random_model(position='rope')
    pairs = questions(model)
    whole = commonsense.Harness(model, None, cpu).scores(pairs)
    monkeypatch.setattr(commonsense, 'batch_size', size)
    one, two = (commonsense.Harness(model, None, Rank(cpu.device, cpu.dtype, rank, 2))
                .scores(pairs[::-1])[::-1] for rank in (0, 1))
    near(one + two, whole, atol=1e-4)
    assert (one.any(1) != two.any(1)).all()


@torch.no_grad()
def test_a_context_is_read_once_for_all_its_choices(cpu):
    model, read = random_model(), []
    model.embed.register_forward_hook(lambda module, ids, out: read.append(ids[0].numel()))
    pairs = [(list(range(20)), [i, i]) for i in range(5)]
    commonsense.Harness(model, None, cpu).scores(pairs)
    assert read == [19, 5 * 2]  # not 5 * 21


@pytest.mark.parametrize('add_bos, texts, ids, n_cut', [
    (False, ('ab ', 'c'), ([97, 98], [32, 99]), 0),            # The space is the choice's.
    (False, ('', 'c'), ([256], [99]), 0),                      # after end-of-text
    (True, ('ab', ' c'), ([256, 97, 98], [32, 99]), 0),
    (False, ('x' + 'y' * 99, 'abc'), ([121] * (L - 2), [97, 98, 99]), 1),
    (False, ('x', 'y' * 99), ([120], [121] * 99), 0)])         # A choice is never cut.
def test_texts_are_cut_into_question_and_choice(cpu, monkeypatch, add_bos, texts, ids, n_cut):
    monkeypatch.setattr(commonsense, 'add_bos', add_bos)
    harness = commonsense.Harness(random_model(vocab_size=257), BYTES, cpu)
    assert (harness.encode(*texts), harness.n_cut) == (ids, n_cut)
    theirs = SimpleNamespace(backend='causal', tok_encode=BYTES.encode_ordinary)
    api = pytest.importorskip('lm_eval.api.model').TemplateLM
    for texts in ('Question: a?\nAnswer:', ' b'), ('ends  ', 'b'), ('é ', 'ü'):
        found, expected = harness.encode(*texts), api._encode_pair(theirs, *texts)
        assert found == ([256] * add_bos + expected[0], expected[1])


TASK = """
task: which_comes_after
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
output_type: multiple_choice
test_split: test
doc_to_text: "Question: {{q}}\\nAnswer:"
doc_to_target: answer
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""


@pytest.fixture
def tasks(monkeypatch):
    """lm_eval's tasks without its own, which take 10 s to find."""
    tasks = pytest.importorskip('lm_eval.tasks')
    few = partial(tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(tasks, 'TaskManager', few)
    return tasks


def test_a_whole_run_counts_as_a_plain_loop_does(tmp_path, tiny_run, tiny, tasks):
    words = ['if', 'self', 'return value', 'the', 'import everything here', 'a', 'def'] * 2
    model = tiny[0]
    model.head_scale = 1.3
    lines, right, n_cut = [], np.zeros(2, int), 0
    for i in range(25):
        choices, scores = words[i % 7:i % 7 + 2 + i % 3], []
        lines.append(json.dumps({'q': f'What is {i}?', 'choices': choices, 'answer': i % 2}))
        for choice in choices:
            ids, n = list(f'Question: What is {i}?\nAnswer: {choice}'.encode()), len(choice)
            n_cut += len(ids) > L + 1  # Of the last token only its loss is wanted.
            log_p, _ = alone(model, ids[-L - 1:-n - 1], ids[-n - 1:])
            scores.append((log_p, log_p / n))  # acc, acc_norm
        right += np.argmax(scores, axis=0) == i % 2
    assert right[0] != right[1] and n_cut > 0  # or this shows little

    (tmp_path / 'data.jsonl').write_text('\n'.join(lines * 2))
    (tmp_path / 'task.yaml').write_text(TASK % (tmp_path / 'data.jsonl'))
    stage_here('commonsense', *on(tiny_run, tmp_path, (
        f'--scale=1.3 --tasks=["which_comes_after"] --task_folder={tmp_path} --limit=25')))
    result = read(tmp_path / 'commonsense_scale1.3.json')
    task = result['tasks']['which_comes_after']
    assert (task['metric'], task['questions'], result['cut']) == ('acc_norm', 25, n_cut)
    assert task['score'] == result['average'] == pytest.approx(4 * right[1])


WRITING = """
task: %s
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
output_type: generate_until
test_split: test
doc_to_text: "{{q}}"
doc_to_target: "{{answer}}"
generation_kwargs: {do_sample: false, max_gen_toks: %d, until: ["%s"]}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.mark.parametrize('ends', ['e', 'nothing'])
def test_text_is_what_the_model_writes_up_to_the_string_that_ends_it(tmp_path, tiny_run, tiny,
                                                                     tasks, ends):
    """Two tasks at once, whose answers are of 9 and of 4 tokens; half of the answers are wrong."""
    model = tiny[0]
    model.head_scale = 1.3
    prompts = ['def f(self', 'import os', 'x', 'for i in range(', 'return ', 'class A:'] * 2
    for name, n_new in (('long', 9), ('short', 4)):
        lines = []
        for i, prompt in enumerate(prompts):
            ids = list(prompt.encode())
            for _ in range(n_new):
                with torch.no_grad():
                    token = model(torch.tensor([ids]))[0, -1].argmax().item()
                if token == BYTES.eot_token:
                    break
                ids.append(token)
            text = bytes(ids[len(prompt):]).decode(errors='replace').split(ends)[0]
            lines.append(json.dumps({'q': prompt, 'answer': text + '!' * (i % 2)}))
        assert ends == 'nothing' or any(len(json.loads(line)['answer']) < n_new for line in lines)
        (tmp_path / f'{name}.jsonl').write_text('\n'.join(lines))
        (tmp_path / f'{name}.yaml').write_text(
            WRITING % (name, tmp_path / f'{name}.jsonl', n_new, ends))
    stage_here('commonsense', *on(tiny_run, tmp_path, (
        f'--scale=1.3 --tasks=["long","short"] --task_folder={tmp_path} --batch_size=5')))
    result = read(tmp_path / 'commonsense_scale1.3.json')
    for name in ('long', 'short'):
        row = result['tasks'][name]
        assert (row['metric'], row['score'], row['questions']) == ('exact_match', 50, 12)


def test_a_prompt_that_would_have_to_be_cut_is_refused(tmp_path, tiny_run, tasks):
    line = json.dumps({'q': 'x' * 40, 'answer': ''})
    (tmp_path / 'data.jsonl').write_text(line)
    (tmp_path / 'task.yaml').write_text(WRITING % ('wordy', tmp_path / 'data.jsonl', 3, 'e'))
    arguments = on(tiny_run, tmp_path, f'--tasks=["wordy"] --task_folder={tmp_path}')
    line = mistake('commonsense', *arguments)
    assert 'wordy has 40 tokens' in line and f'read_length is {L}.' in line
    stage_here('commonsense', *arguments, '--read_length=40')  # not what is written after it
    assert read(tmp_path / 'commonsense.json')['read_length'] == 40


def test_rulers_score_is_that_of_the_length_asked_for():
    row = {'alias': 'niah', 'sample_len': 3, '4096,none': -1, '4096_stderr,none': 'N/A',
           '8192,none': 0.25, '8192_stderr,none': 'N/A'}
    measured = {'results': {'niah': row}, 'versions': {'niah': 1}, 'configs': {
        'niah': {'dataset_path': ''}}}
    found = commonsense.task_scores(measured, 8192)['niah']
    assert (found['score'], found['standard_error'], found['metric']) == (25, None, '8192')


def test_an_unknown_task_and_a_missing_package_are_named(tiny_run, tasks, monkeypatch):
    assert 'pika' in mistake('commonsense', f'--out_dir={tiny_run}', '--device=cpu',
                             '--tasks=["pika"]')
    monkeypatch.setitem(sys.modules, 'lm_eval.api.model', None)
    assert 'pip install lm_eval' in mistake('commonsense')
