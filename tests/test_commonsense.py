"""
Likelihoods of choices against a plain pass for each, and whole runs through lm_eval.

$ python -m pytest tests/test_commonsense.py
"""

import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import near, on, random_model, read, stage

from generate import complete
from tokenizer import get_tokenizer

tasks = pytest.importorskip('lm_eval.tasks')
from extras import commonsense  # noqa: E402, needs lm_eval

L = 32  # of the tiny models
BYTES = get_tokenizer('bytes')


def harness(model, runtime, folder):
    return commonsense.Harness(model, BYTES, runtime, folder / 'answers', {}, L)


@torch.no_grad()
def alone(model, context, continuation):
    """ln p of a continuation, and whether greedy decoding gives it, from a pass over it alone."""
    ids, n = torch.tensor([context + continuation]), len(continuation)
    logits = model(ids[:, :-1])[0, -n:]
    log_p = -model(ids[:, :-1], ids[:, -n:]).sum()
    return log_p.item(), bool((logits.argmax(-1) == ids[0, -n:]).all())


# With random positions, scores depend on the number of tokens that a pass holds.
@pytest.mark.parametrize('changes', [{}, {'position': 'rope_random'}])
def test_scores_are_those_of_a_plain_pass_for_each_choice(cpu, changes, tmp_path, monkeypatch):
    monkeypatch.setattr(commonsense, 'batch_tokens', 60)
    model, random = random_model(**changes), np.random.default_rng(0)
    ids = [random.integers(0, 61, n).tolist() for n in random.integers(1, 20, 18)]
    pairs = list(zip(ids[:9] * 3, [row[:6] for row in ids] + complete(model, ids[:9], 5)))
    found = harness(model, cpu, tmp_path)._loglikelihood_tokens([('', *pair) for pair in pairs])
    near(found, [alone(model, *pair) for pair in pairs], atol=1e-4)
    assert 0 < sum(greedy for _, greedy in found) < len(pairs)


def test_a_question_that_is_too_long_loses_its_start_and_a_choice_is_never_cut(cpu, tmp_path):
    model = random_model(vocab_size=257)
    ours = harness(model, cpu, tmp_path)
    texts = ('', 'c'), ('x', 'y' * 99), ('x' + 'y' * 99, 'abc')
    found = ours.loglikelihood([SimpleNamespace(args=pair) for pair in texts])
    near(found, [alone(model, *pair) for pair in (
        ([256], [99]), ([120], [121] * 99), ([121] * (L - 2), [97, 98, 99]))], atol=1e-3)
    assert ours.n_cut == 1
    with pytest.raises(SystemExit, match='no token of its own'):
        ours._loglikelihood_tokens([('th', [116], [])])
    wordy = SimpleNamespace(args=('x' * 33, {}), task_name='wordy')  # the model would write on
    with pytest.raises(SystemExit, match='wordy has 33 tokens, but read_length is 32'):
        ours.generate_until([wordy])
    with pytest.raises(SystemExit, match=r'wordy measures .* eval_ppl\.py'):
        ours.loglikelihood_rolling([wordy])


def test_a_text_ends_before_the_first_string_that_its_task_names(cpu, tmp_path):
    model = random_model(vocab_size=257)
    texts = [BYTES.decode(complete(model, [[120]], n, [BYTES.eot_token])[0]) for n in (9, 4)]
    asked = [('x', {'until': ['never', texts[0][5]], 'max_new_tokens': 9}),
             ('x', {'until': 'never', 'max_gen_toks': 4})]
    found = harness(model, cpu, tmp_path).generate_until([
        SimpleNamespace(args=one) for one in asked])
    assert found == [texts[0].partition(texts[0][5])[0], texts[1]]


TASK = """
task: piqa
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
doc_to_text: "{{q}}"
output_type: multiple_choice
doc_to_target: answer
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""


def test_a_run_prints_the_metrics_of_lm_eval_and_the_average_of_table_1(
        tmp_path, tiny_run, tiny, monkeypatch):
    # without lm_eval's own tasks, which take 10 s to find
    monkeypatch.setattr(tasks, 'TaskManager', partial(tasks.TaskManager, include_defaults=False))
    model, choices, lines = tiny[0], ['if', 'self', 'return value'], []
    for i, q in enumerate(['def f(self', 'import os', 'x', 'for i in range(']):
        log_p = [alone(model, list(q.encode()), list(f' {one}'.encode()))[0] for one in choices]
        best = np.argmax(np.divide(log_p, [len(one) for one in choices])).item()
        lines.append({'q': q, 'choices': choices, 'answer': (best + i % 2) % 3})  # half are wrong

    (tmp_path / 'data.json').write_text('\n'.join(map(json.dumps, lines * 2)))
    (tmp_path / 'piqa.yaml').write_text(TASK.replace('FILE', str(tmp_path / 'data.json')))
    out = stage('extras.commonsense', *on(
        tiny_run, tmp_path, f'--tasks=["piqa"] --task_folder={tmp_path} --limit=4'))
    piqa = read(tmp_path / 'commonsense.json')['tasks']['piqa']
    assert piqa['acc_norm,none'] == 0.5
    near(piqa['acc_norm_stderr,none'], 0.5 / 3 ** 0.5, rtol=1e-6)
    assert '|acc_norm|' in out and 'average of 1 of the 7 tasks of Table 1: 50.0%' in out
