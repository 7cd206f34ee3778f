"""
Likelihoods of choices against a plain forward pass for each, and a whole run through lm_eval where it is installed.

$ python -m pytest tests/test_commonsense.py
"""

import json
import runpy
import sys
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import ROOT, mistake, plain_losses, random_model

import commonsense
from checkpoint import load_model
from corpus import get_tokenizer
from generate import complete

L = 32  # of the tiny models


def random_pairs(n=9, choices=3, seed=0, vocab_size=61):
    """Contexts of 1 to 20 ids, each with some continuations of 1 to 6; those of one context are not neighbours."""
    random = np.random.default_rng(seed)
    contexts = [random.integers(0, vocab_size, random.integers(1, 21)).tolist() for _ in range(n)]
    return [(context, random.integers(0, vocab_size, random.integers(1, 7)).tolist())
            for _ in range(choices) for context in contexts]


def plain(model, context, continuation):
    """ln p of a continuation, and whether each of its tokens is the likeliest, from a pass over this text alone."""
    ids = torch.tensor([context + continuation])
    logits = model(ids[:, :-1])[0, -len(continuation):]
    chosen = logits.log_softmax(-1).gather(-1, ids[0, -len(continuation):, None])
    return chosen.sum().item(), float((logits.argmax(-1) == ids[0, -len(continuation):]).all())


def requests(*arguments):
    return [SimpleNamespace(args=one) for one in arguments]


# the last two cannot share a pass: position depends on the tokens it will hold
@pytest.mark.parametrize('changes', [{}, {'position': 'rope'}, {'position': 'alibi'}, {'position': 'logn'},
                                     {'position': 'rope', 'rope_scaling': 'yarn:4'},
                                     {'position': 'rope', 'rope_scaling': 'dynamic_ntk:2', 'block_size': 8}])
@torch.no_grad()
def test_scores_are_those_of_a_plain_pass_for_each_choice(cpu, changes, monkeypatch):
    model, pairs = random_model(**changes), random_pairs()
    monkeypatch.setattr(commonsense, 'batch_size', 4)
    scores = commonsense.Harness(model, None, cpu).scores(pairs)
    assert np.abs(scores - [plain(model, *pair) for pair in pairs]).max() < 1e-4
    if not changes.get('rope_scaling'):
        twice = [plain_losses(model, torch.tensor([c + a]))[0, -len(a):].sum().item() for c, a in pairs]
        assert np.abs(scores[:, 0] + twice).max() < 1e-3


@torch.no_grad()
def test_batches_ranks_and_order_change_nothing(cpu, monkeypatch):
    model, pairs = random_model(position='rope'), random_pairs()
    harness = commonsense.Harness(model, None, cpu)
    one = harness.scores(pairs)
    for size in (1, 2, 100):
        monkeypatch.setattr(commonsense, 'batch_size', size)
        order = np.random.default_rng(size).permutation(len(pairs))
        assert np.abs(harness.scores([pairs[i] for i in order]) - one[order]).max() < 1e-4

    class Rank(type(cpu)):
        def gather(self, rows, n):  # what this rank alone has
            return np.array(rows)

    runtimes = [Rank(cpu.device, cpu.dtype, rank, world_size=2) for rank in (0, 1)]
    shares = [commonsense.Harness(model, None, runtime).scores(pairs) for runtime in runtimes]
    assert np.abs(sum(shares) - one).max() < 1e-4
    assert not (shares[0].any(1) & shares[1].any(1)).any() and all(share.any() for share in shares)


@torch.no_grad()
def test_a_context_is_read_once_for_all_its_choices(cpu):
    model, context = random_model(), list(range(20))
    read = []
    model.embed.register_forward_hook(lambda module, inputs, output: read.append(inputs[0].numel()))
    commonsense.Harness(model, None, cpu).scores([(context, [i, i]) for i in range(5)])
    assert read == [19, 5 * 2]  # not 5 * 21


@torch.no_grad()
def test_the_flag_is_true_for_what_greedy_decoding_gives_and_only_then(cpu):
    model, contexts = random_model(), [context for context, _ in random_pairs(6, 1)]
    answers = complete(model, contexts, 5)
    harness = commonsense.Harness(model, None, cpu)
    assert harness.scores(list(zip(contexts, answers)))[:, 1].tolist() == [1] * 6
    for place in (0, 4):
        wrong = [[*a[:place], (a[place] + 1) % 61, *a[place + 1:]] for a in answers]
        assert harness.scores(list(zip(contexts, wrong)))[:, 1].tolist() == [0] * 6


def test_texts_are_cut_into_question_and_choice(cpu, monkeypatch):
    model, encoding = random_model(vocab_size=257), get_tokenizer('bytes')
    harness = commonsense.Harness(model, encoding, cpu)
    assert harness.encode('ab ', 'c') == ([97, 98], [32, 99])  # the space is the choice's
    assert harness.encode('', 'c') == ([256], [99])            # after end-of-text
    monkeypatch.setattr(commonsense, 'add_bos', True)
    assert harness.encode('ab', ' c') == ([256, 97, 98], [32, 99])
    assert harness.n_cut == 0
    monkeypatch.setattr(commonsense, 'add_bos', False)
    context, choice = harness.encode('x' + 'y' * 99, 'abc')
    assert (len(context + choice) - 1, choice, harness.n_cut) == (L, [97, 98, 99], 1)
    context, choice = harness.encode('x', 'y' * 99)
    assert (context, len(choice)) == ([120], 99)  # a choice is never cut


def test_lm_eval_cuts_texts_as_we_do(cpu):
    api = pytest.importorskip('lm_eval.api.model')
    encoding = get_tokenizer('bytes')
    theirs = SimpleNamespace(backend='causal', tok_encode=encoding.encode_ordinary)
    harness = commonsense.Harness(random_model(vocab_size=257, block_size=512), encoding, cpu)
    for pair in ('Question: a?\nAnswer:', ' b c'), ('ends in spaces  ', 'b'), ('é ', 'ü'):
        assert harness.encode(*pair) == api.TemplateLM._encode_pair(theirs, *pair)


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


@torch.no_grad()
def test_a_whole_run_counts_as_a_plain_loop_does(tmp_path, tiny_run, cpu, monkeypatch, capsys):
    tasks = pytest.importorskip('lm_eval.tasks')
    monkeypatch.setattr(tasks, 'TaskManager', partial(tasks.TaskManager, include_defaults=False))  # which take 10 s
    words = 'if', 'self', 'return value', 'the', 'import everything here', 'a', 'def'
    questions = [{'q': f'What is {i}?', 'choices': [words[(i + k) % 7] for k in range(2 + i % 3)], 'answer': i % 2}
                 for i in range(30)]
    (tmp_path / 'data.jsonl').write_text('\n'.join(map(json.dumps, questions)))
    (tmp_path / 'task.yaml').write_text(TASK % (tmp_path / 'data.jsonl'))
    monkeypatch.setattr(sys, 'argv', [
        'commonsense.py', f'--out_dir={tmp_path}', f'--init_from={tiny_run}/last.pt', '--scale=1.3', '--device=cpu',
        '--dtype=float32', "--tasks=['which_comes_after']", f'--task_folder={tmp_path}', '--limit=25'])
    monkeypatch.setattr(sys, 'excepthook', sys.excepthook)
    try:
        runpy.run_path(str(ROOT / 'commonsense.py'), run_name='__main__')
    finally:
        torch.use_deterministic_algorithms(False)
    result = json.loads((tmp_path / 'commonsense_scale1.3.json').read_text())

    model, _ = load_model('last', tiny_run, cpu.device)
    right = {'acc': 0, 'acc_norm': 0}
    for question in questions[:25]:
        log_p = []
        for choice in question['choices']:
            ids = f"Question: {question['q']}\nAnswer: {choice}".encode()[-L - 1:]
            scale = np.full((2, 4), 1.3)
            log_p.append(-plain_losses(model, torch.tensor([list(ids)]), scale)[0, -len(choice) - 1:].sum().item())
        right['acc'] += np.argmax(log_p) == question['answer']
        right['acc_norm'] += np.argmax(np.divide(log_p, list(map(len, question['choices'])))) == question['answer']
    assert right['acc'] != right['acc_norm']  # or this shows little
    task = result['tasks']['which_comes_after']
    assert (task['metric'], task['questions']) == ('acc_norm', 25)
    assert task['score'] == result['average'] == pytest.approx(4 * right['acc_norm'])
    texts = [f"Question: {question['q']}\nAnswer: {c}" for question in questions[:25] for c in question['choices']]
    assert result['cut'] == sum(len(text) > L + 1 for text in texts) > 0  # of the last token only its loss is wanted
    table = capsys.readouterr().out
    assert 'which_comes_after' in table and f'{task["score"]:.1f}' in table and 'paper: NoPE' in table


def test_mistakes_are_one_line(tiny_run, monkeypatch):
    run = f'--out_dir={tiny_run}', '--device=cpu'
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, 'lm_eval.api.model', None)
        assert 'pip install lm_eval' in mistake('commonsense', *run)
    tasks = pytest.importorskip('lm_eval.tasks')

    assert 'limit is 0' in mistake('commonsense', *run, '--limit=0')
    monkeypatch.setattr(tasks, 'TaskManager', partial(tasks.TaskManager, include_defaults=False))
    assert 'pika' in (line := mistake('commonsense', *run, "--tasks=['pika']")) and 'Check the names' in line
    monkeypatch.setattr(tasks.TaskManager.func, 'load', Mock(side_effect=ConnectionError('no route')))
    assert 'no route' in (line := mistake('commonsense', *run, "--tasks=['piqa']")) and '--task_folder=' in line
