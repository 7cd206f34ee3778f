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
from lib.generate import Decoding, complete, generate
from lib.tokenizers import get_tokenizer

L = 32  # of the tiny models
BYTES = get_tokenizer('bytes')


def harness(model, runtime, encoding=None, batch_size=16, add_bos=False):
    return commonsense.Harness(model, encoding, runtime, L, batch_size, add_bos)


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


# With dynamic NTK or random positions no contexts of other lengths can share a pass: both turn by
# the tokens that the pass will hold.
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


@pytest.mark.parametrize('add_bos, texts, ids, n_cut', [
    (False, ('ab ', 'c'), ([97, 98], [32, 99]), 0),            # The space is the choice's.
    (False, ('', 'c'), ([256], [99]), 0),                      # after end-of-text
    (True, ('ab', ' c'), ([256, 97, 98], [32, 99]), 0),
    (False, ('x' + 'y' * 99, 'abc'), ([121] * (L - 2), [97, 98, 99]), 1),
    (False, ('x', 'y' * 99), ([120], [121] * 99), 0)])         # A choice is never cut.
def test_texts_are_cut_into_question_and_choice(cpu, add_bos, texts, ids, n_cut):
    ours = harness(None, cpu, BYTES, add_bos=add_bos)
    assert (ours.encode(*texts), ours.n_cut) == (ids, n_cut)
    theirs = SimpleNamespace(backend='causal', tok_encode=BYTES.encode_ordinary)
    api = pytest.importorskip('lm_eval.api.model').TemplateLM
    for texts in ('Question: a?\nAnswer:', ' b'), ('ends  ', 'b'), ('é ', 'ü'):
        context, choice = api._encode_pair(theirs, *texts)
        assert ours.encode(*texts) == ([256] * add_bos + context, choice)


TASK = """
task: NAME
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
output_type: multiple_choice
test_split: test
doc_to_text: "Question: {{q}}\\nAnswer:"
doc_to_target: answer
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""


def write_task(folder, name, task, lines):
    data = folder / f'{name}.jsonl'
    data.write_text('\n'.join(map(json.dumps, lines)))
    (folder / f'{name}.yaml').write_text(task.replace('NAME', name).replace('FILE', str(data)))


@pytest.fixture
def tasks(monkeypatch):
    """lm_eval's tasks without its own, which take 10 s to find."""
    tasks = pytest.importorskip('lm_eval.tasks')
    few = partial(tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(tasks, 'TaskManager', few)
    return tasks


def test_a_whole_run_counts_as_a_plain_loop_does(tmp_path, tiny_run, tiny, tasks):
    words = ['if', 'self', 'return value', 'the', 'import everything here', 'a', 'def'] * 2
    model, lines, right, n_cut = tiny[0], [], np.zeros(2, int), 0
    model.head_scale = 1.3
    for i in range(25):
        choices, scores = words[i % 7:i % 7 + 2 + i % 3], []
        lines.append({'q': f'What is {i}?', 'choices': choices, 'answer': i % 2})
        for choice in choices:
            ids, n = list(f'Question: What is {i}?\nAnswer: {choice}'.encode()), len(choice)
            n_cut += len(ids) > L + 1  # Of the last token only its loss is wanted.
            log_p, _ = alone(model, ids[-L - 1:-n - 1], ids[-n - 1:])
            scores.append((log_p, log_p / n))  # acc, acc_norm
        right += np.argmax(scores, axis=0) == i % 2
    assert right[0] != right[1] and n_cut > 0  # or this shows little

    write_task(tmp_path, 'which_comes_after', TASK, lines * 2)
    stage_here('commonsense', *on(tiny_run, tmp_path, (
        f'--scale=1.3 --tasks=["which_comes_after"] --task_folder={tmp_path} --limit=25')))
    result = read(tmp_path / 'commonsense_scale1.3.json')
    task = result['tasks']['which_comes_after']
    assert (task['metric'], task['questions'], result['cut']) == ('acc_norm', 25, n_cut)
    assert task['score'] == result['average'] == pytest.approx(4 * right[1])


WRITING = """
task: NAME
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
output_type: generate_until
test_split: test
doc_to_text: "{{q}}"
doc_to_target: "{{answer}}"
generation_kwargs: {do_sample: false, max_gen_toks: MOST, until: ["ENDS"]}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.mark.parametrize('ends', ['e', 'nothing'])
def test_text_is_what_the_model_writes_up_to_the_string_that_ends_it(tmp_path, tiny_run, tiny,
                                                                     tasks, ends):
    """Two tasks at once, whose answers are of 9 and of 4 tokens; half of the answers are wrong."""
    model = tiny[0]
    model.head_scale = 1.3
    prompts = ['def f(self', 'import os', 'x', 'for i in range(', 'return ', 'class A:'] * 2
    for name, n_new in ('long', 9), ('short', 4):
        lines = []
        for i, prompt in enumerate(prompts):
            ids = list(generate(model, list(prompt.encode()), n_new, Decoding((BYTES.eot_token,))))
            text = bytes(ids).decode(errors='replace').split(ends)[0]
            lines.append({'q': prompt, 'answer': text + '!' * (i % 2)})
        assert ends == 'nothing' or any(len(line['answer']) < n_new for line in lines)
        task = WRITING.replace('MOST', str(n_new)).replace('ENDS', ends)
        write_task(tmp_path, name, task, lines)
    stage_here('commonsense', *on(tiny_run, tmp_path, (
        f'--scale=1.3 --tasks=["long","short"] --task_folder={tmp_path} --batch_size=5')))
    for row in read(tmp_path / 'commonsense_scale1.3.json')['tasks'].values():
        assert (row['metric'], row['score'], row['questions']) == ('exact_match', 50, 12)


def test_a_prompt_that_would_have_to_be_cut_is_refused(tmp_path, tiny_run, tasks):
    task = WRITING.replace('MOST', '3').replace('ENDS', 'e')
    write_task(tmp_path, 'wordy', task, [{'q': 'x' * 40, 'answer': ''}])
    arguments = on(tiny_run, tmp_path, f'--tasks=["wordy"] --task_folder={tmp_path}')
    line = mistake('commonsense', *arguments)
    assert 'wordy has 40 tokens' in line and f'read_length is {L}.' in line
    stage_here('commonsense', *arguments, '--read_length=40')  # not what is written after it
    assert read(tmp_path / 'commonsense.json')['read_length'] == 40


def test_rulers_score_is_that_of_the_length_asked_for():
    row = {'alias': 'niah', 'sample_len': 3, '4096,none': -1, '8192,none': 0.25,
           '8192_stderr,none': 'N/A'}
    measured = {'results': {'niah': row}, 'versions': {'niah': 1},
                'configs': {'niah': {'dataset_path': ''}}}
    found = commonsense.task_scores(measured, 8192)['niah']
    assert (found['score'], found['standard_error'], found['metric']) == (25, None, '8192')


def test_an_unknown_task_prompts_that_never_end_and_a_missing_package_are_named(tiny_run, tasks,
                                                                                monkeypatch):
    arguments = f'--out_dir={tiny_run}', '--device=cpu', '--tasks=["pika","ruler_vt"]'
    line = mistake('commonsense', *arguments, '--read_length=1023')
    assert 'read_length is 1023' in line and 'prompts of ruler_vt.' in line
    assert 'pika' in mistake('commonsense', *arguments, '--read_length=1024')
    monkeypatch.setitem(sys.modules, 'lm_eval.api.model', None)
    assert 'pip install lm_eval' in mistake('commonsense')
