"""
Seven multiple-choice tasks of common sense, zero-shot: Table 1 of "Length Generalization of Causal
Transformers without Position Encoding". EleutherAI's lm_eval asks the questions, by its own task
files and on the data sets they name.

$ python commonsense.py --init_from=hf:AntNLP/TinyLlama-NoPE-1.1B --position=none --out_dir=out/nope_hf
$ torchrun --nproc_per_node=8 commonsense.py --out_dir=out/nope_1b --tasks="['piqa']" --limit=100

A choice scores ln p of its tokens. acc: how often the right one scores best; acc_norm: each score
is first divided by the choice's number of characters; boolq and winogrande have acc alone. Writes
out_dir/commonsense[_LABEL].json
"""

import json
import math
import time
from importlib.metadata import version

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

import checkpoint
from configurator import at_least, configure, settings
from corpus import start_token, tokenizer_from_state
from runtime import ROOT, Progress, provenance, result_path, save_json, setup

try:
    from lm_eval.api.model import LM
except ImportError:
    LM = object  # main() says what is missing

# what to read
out_dir = 'out/demo/nope'    # the run to read; results go there too
init_from = 'last'           # last or best (of out_dir), a checkpoint file, a Hugging Face folder, or hf:ORG/NAME
position: str | None = None  # read the checkpoint with this position method; None: as it says
rope_scaling: str | None = None  # extend RoPE, such as yarn:4; None: as the checkpoint says
scale: float | str | None = None  # softmax scale: a number for all heads, or a scale file
# questions
tasks = ['arc_challenge', 'arc_easy', 'boolq', 'hellaswag', 'openbookqa', 'piqa', 'winogrande']  # of lm_eval
task_folder = ''             # more task files, .yaml in lm_eval's form: your own, or the seven with data you have
limit: int | None = None     # the first so many questions of each task; None: all
add_bos = False              # start each question with the start token, as a document in training; the paper did not
batch_size = 16              # questions read at once, each with all its choices
label = ''                   # name of the result; empty: the scale's
# machine
device = 'auto'              # auto, cpu, cuda, mps
dtype = 'auto'               # auto, float32, bfloat16, float16


@torch.no_grad()
def score(model, batch, runtime):
    """
    batch: [(context, [continuation, ...])], lists of ids, none of them empty. A context less its
    last token is read once, into a cache that its continuations share. Returns a row for each
    continuation: ln p in nats, and 1 if greedy decoding would give it, else 0.
    """
    def padded(rows):  # on the right, where a causal model cannot see it
        return pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], batch_first=True).to(runtime.device)

    shared = [0 if model.length_matters else len(context) - 1 for context, _ in batch]
    rows = [(context[n:], answer) for n, (context, answers) in zip(shared, batch) for answer in answers]
    ids, cache = padded([context + answer for context, answer in rows]), None
    with runtime.autocast():
        if max(shared):
            contexts = padded([context[:n] for n, (context, _) in zip(shared, batch)])
            cache = model.new_cache(len(batch), contexts.shape[1] + ids.shape[1] - 1, runtime.dtype)
            model.hidden(contexts, cache)
            cache.set_prompt_lengths(torch.tensor(shared, device=runtime.device))
            cache.repeat(torch.tensor([len(answers) for _, answers in batch], device=runtime.device))
        logits, targets = model(ids[:, :-1], cache=cache).float(), ids[:, 1:]           # (rows, T, V), (rows, T)
    log_p = logits.gather(-1, targets[..., None])[..., 0] - logits.logsumexp(-1)
    greedy, ends = logits.argmax(-1) == targets, [(len(c) - 1, len(c) - 1 + len(answer)) for c, answer in rows]
    return [(log_p[i, a:b].sum().item(), greedy[i, a:b].all().item()) for i, (a, b) in enumerate(ends)]


class Harness(LM):
    """A model of ours as lm_eval calls it. Every rank is given all requests and reads its share."""

    def __init__(self, model, encoding, runtime):
        super().__init__()
        self.model, self.encoding, self.runtime, self.n_cut = model, encoding, runtime, 0

    def scores(self, pairs):
        """
        pairs: [(context, continuation)], lists of ids. Returns (len(pairs), 2), the rows of
        score(), in order.
        """
        alone, groups, rows = self.model.length_matters, {}, np.zeros((len(pairs), 2))
        for i, (context, _) in enumerate(pairs):
            groups.setdefault(i if alone else tuple(context), []).append(i)
        groups = self.runtime.mine(sorted(groups.values(), key=lambda group: -len(pairs[group[0]][0])))
        progress, size = Progress(len(groups), 'questions', self.runtime.is_main), 1 if alone else batch_size
        for start in range(0, len(groups), size):
            group = groups[start:start + size]
            batch = [(pairs[members[0]][0], [pairs[i][1] for i in members]) for members in group]
            rows[sum(group, [])] = score(self.model, batch, self.runtime)
            progress.update(start + len(group))
        return self.runtime.gather([rows], self.runtime.world_size).sum(0)  # other ranks have zeros for these rows

    def encode(self, context, continuation):
        """
        As lm_eval's models: spaces in between are the continuation's; of more than L tokens the
        last L are read.
        """
        before = self.encoding.encode_ordinary(context.rstrip())
        after = self.encoding.encode_ordinary(context + continuation)[len(before):]
        before = [start_token(self.encoding)] * (add_bos or not before) + before
        n_over = min(len(before) + len(after) - 1 - self.model.config.block_size, len(before) - 1)
        self.n_cut += n_over > 0
        return before[max(0, n_over):], after

    def loglikelihood(self, requests, disable_tqdm=False):
        pairs = [self.encode(*request.args) for request in requests]
        return [(log_p, bool(greedy)) for log_p, greedy in self.scores(pairs).tolist()]

    def generate_until(self, requests, disable_tqdm=False):
        raise ValueError('commonsense.py scores choices. Leave out tasks that write text or score a whole one.')

    loglikelihood_rolling = generate_until


def load_tasks():
    """[lm_eval's Task] of the tasks, their data downloaded."""
    from lm_eval.tasks import TaskManager
    try:
        return list(TaskManager(include_path=task_folder or None).load(tasks)['tasks'].values())
    except Exception as error:  # of a name, the network, the data, the task's code: they share no class
        raise ValueError(f'lm_eval could not load {tasks} ({type(error).__name__}: {str(error)[:200]}). Check the '
                         'names, connect once, or give --task_folder= with task files that name local data.') from error


def print_table(result):
    """
    The scores in the layout of Table 1, and the paper's; an average only over tasks that a row has.
    """
    paper = json.loads((ROOT / 'results/papers.json').read_text())['nope_table1']
    rows = {f"{result['position_method']} {result['label']}": {n: t['score'] for n, t in result['tasks'].items()}}
    rows |= {f'paper: {name}': dict(zip(paper['columns'], row)) for name, row in paper['rows'].items()}
    print(f'{"":24}' + ''.join(f'{name:>14}' for name in (*result['tasks'], 'average')))
    for name, row in rows.items():
        values = [row.get(task, math.nan) for task in result['tasks']]
        print(f'{name:24}' + ''.join(f'{x:14.1f}' for x in (*values, sum(values) / len(values))).replace('nan', '  -'))


def main():
    began, runtime = time.perf_counter(), setup(device, dtype)
    if LM is object:
        raise ValueError('This needs the optional package lm_eval. Run: pip install lm_eval')
    if not tasks:
        raise ValueError('tasks is empty. Name one at least.')
    at_least(1, globals(), 'batch_size', 'limit')
    model, info = checkpoint.load_model(init_from, out_dir, runtime.device, position, rope_scaling, runtime.dtype)
    scale_label = checkpoint.apply_scale(model, scale, info)
    from lm_eval import simple_evaluate
    harness, name = Harness(model, tokenizer_from_state(info['tokenizer']), runtime), label or scale_label
    measured = simple_evaluate(harness, tasks=load_tasks(), num_fewshot=0, limit=limit, log_samples=False)
    if runtime.is_main:
        scores = {}
        for task, row in measured['results'].items():
            metric = 'acc_norm' if 'acc_norm,none' in row else 'acc'
            scores[task] = {'score': 100 * row[f'{metric},none'], 'standard_error': 100 * row[f'{metric}_stderr,none'],
                            'metric': metric, 'questions': row['sample_len'], 'version': measured['versions'][task],
                            'dataset': measured['configs'][task]['dataset_path']}
        result = {'stage': 'commonsense', 'label': name, 'position_method': model.config.position, 'add_bos': add_bos,
                  'lm_eval': version('lm_eval'), 'checkpoint': info['path'], 'weights_digest': info['digest'],
                  'scale': scale, 'tasks': scores, 'cut': harness.n_cut,
                  'average': sum(row['score'] for row in scores.values()) / len(scores)}
        print_table(result)
        path = result_path(out_dir, 'commonsense', name) + '.json'
        save_json(path, result | provenance(settings(globals()), runtime, time.perf_counter() - began))
        print(f'wrote {path}')
    runtime.close()


if __name__ == '__main__':
    configure(globals())
    main()
