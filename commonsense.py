"""
Seven multiple-choice tasks of common sense, zero-shot: Table 1 of "Length Generalization of Causal
Transformers without Position Encoding"; and tasks that write text, such as those of RULER. lm_eval
of EleutherAI asks the questions, by its own task files and on the data sets they name.

$ python commonsense.py --init_from=hf:AntNLP/TinyLlama-NoPE-1.1B --position=none --out_dir=out/hf
$ torchrun --nproc_per_node=8 commonsense.py --out_dir=out/nope_1b --tasks="['piqa']" --limit=100
$ python commonsense.py --tasks="['niah_single_1']" --read_length=4096 --tokenizer=gpt2   # of RULER

RULER needs `pip install lm_eval[ruler]`, and a Hugging Face tokenizer to count its tokens by.

A choice scores ln p of its tokens. acc: how often the right one scores best; acc_norm: each score
is first divided by the choice's number of characters; boolq and winogrande have acc alone. Text is
written greedily, for prompts of at most read_length tokens: one that had to be cut could not be
answered. Writes out_dir/commonsense[_LABEL].json
"""

from importlib.metadata import version

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from configurator import between, configure, settings
from lib.checkpoints import Run, RunSettings
from lib.errors import UserError
from lib.generate import complete, needs_equal_lengths, read_prompts
from lib.results import optional, paper_table, print_scores, progress_bar
from lib.tokens import start_token

try:
    from lm_eval.api.model import LM
except ImportError:
    LM = object  # main() says what is missing

# RULER's tasks whose prompts lm_eval 0.4.13 never ends making where the shortest one does not fit
# into read_length. By a BPE of 32,000 tokens, that of ruler_vt fitted into 1,024 and not into 768.
ENDLESS, SHORTEST = {'ruler', 'ruler_cwe', 'ruler_fwe', 'ruler_vt'}, 1024

# questions
tasks = ['arc_challenge', 'arc_easy', 'boolq', 'hellaswag', 'openbookqa', 'piqa', 'winogrande']
task_folder = ''             # more of lm_eval's task files, .yaml: your own, or of data you have
limit: int | None = None     # the first so many questions of each task; None: all
read_length: int | None = None  # tokens: of the prompts that RULER makes, and at most read; None: L
tokenizer = ''               # that RULER counts by: a Hugging Face name; '': init_from's, if one
add_bos = False              # start questions with the start token, which the paper did not
batch_size = 16              # questions read at once, each with all its choices


@torch.no_grad()
def score(model, batch, runtime):
    """
    batch: [(context, [continuation, ...])], lists of ids, none of them empty. Returns a row for
    each continuation: ln p in nats, and whether greedy decoding would give it.
    """
    contexts, choices = zip(*batch)
    continuations = [ids for of_one in choices for ids in of_one]
    targets = pad_sequence([torch.tensor(ids) for ids in continuations], batch_first=True)
    targets = targets.to(runtime.device)                        # (n, T)
    T = targets.shape[1]
    # A context is read once, into a cache that its continuations share.
    copies = torch.tensor([len(of_one) for of_one in choices], device=runtime.device)
    with runtime.autocast():
        logits, cache = read_prompts(model, contexts, T - 1, runtime.dtype)
        logits = logits.repeat_interleave(copies, dim=0)[:, None]
        if T > 1:
            cache.repeat(copies)
            logits = torch.cat((logits, model(targets[:, :-1], cache=cache)), dim=1)
    logits = logits.float()                                     # (n, T, V)
    log_p = (logits.gather(-1, targets[..., None])[..., 0] - logits.logsumexp(-1)).cpu()
    greedy = (logits.argmax(-1) == targets).cpu()
    scores = []
    for i, n in enumerate(map(len, continuations)):  # what is after them is padding
        scores.append((log_p[i, :n].sum().item(), greedy[i, :n].all().item()))
    return scores


class Harness(LM):
    """A model of ours as lm_eval calls it. Every rank is given all requests and reads its share."""

    def __init__(self, model, encoding, runtime):
        super().__init__()
        self.model, self.encoding, self.runtime, self.n_cut = model, encoding, runtime, 0
        self.read_length = read_length or model.config.block_size

    def scores(self, pairs):
        """
        pairs: [(context, continuation)], lists of ids. Returns (len(pairs), 2), the rows of
        score(), in order.
        """
        alone, groups = needs_equal_lengths(self.model), {}
        for i, (context, _) in enumerate(pairs):
            groups.setdefault(i if alone else tuple(context), []).append(i)
        # Longest first, so that what does not fit into memory fails at once.
        longest_first = sorted(groups.values(), key=lambda group: -len(pairs[group[0]][0]))
        todo, size = self.runtime.shard(longest_first), 1 if alone else batch_size
        rows = np.zeros((len(pairs), 2))
        with progress_bar(len(todo), 'questions', self.runtime.is_main) as bar:
            for start in range(0, len(todo), size):
                some = todo[start:start + size]
                batch = [(pairs[group[0]][0], [pairs[i][1] for i in group]) for group in some]
                rows[sum(some, [])] = score(self.model, batch, self.runtime)
                bar.update(len(some))
        # Each row is zero on every rank but one.
        return self.runtime.gather([rows], self.runtime.world_size).sum(0)

    def started(self, ids):
        """A text's ids, after the start token where that is asked for, or where it is empty."""
        return [start_token(self.encoding), *ids] if add_bos or not ids else ids

    def encode(self, context, continuation):
        """
        Ids of both, as lm_eval's models have them: spaces in between are the continuation's; of
        more than read_length tokens the last ones are read.
        """
        context_ids = self.encoding.encode_ordinary(context.rstrip())
        after = self.encoding.encode_ordinary(context + continuation)[len(context_ids):]
        before = self.started(context_ids)
        n_over = max(0, len(before) + len(after) - 1 - self.read_length)
        kept = before[n_over:] or before[-1:]  # One token of the context always stays.
        self.n_cut += len(kept) < len(before)
        return kept, after

    def loglikelihood(self, requests, disable_tqdm=False):
        pairs = [self.encode(*request.args) for request in requests]
        return [(log_p, bool(greedy)) for log_p, greedy in self.scores(pairs).tolist()]

    def prompt(self, request):
        """The ids of what a text is to continue. Raises UserError where they are too many."""
        ids = self.started(self.encoding.encode_ordinary(request.args[0]))
        if len(ids) > self.read_length:
            raise UserError(f'a prompt of {request.task_name} has {len(ids)} tokens, but '
                            f'read_length is {self.read_length}. Raise --read_length=, or leave '
                            'that task out.')
        return ids

    def generate_until(self, requests, disable_tqdm=False):
        """The likeliest text after each prompt, up to the first of the strings that end it."""
        prompts, rows = [self.prompt(request) for request in requests], []
        n_new = max(request.args[1].get('max_gen_toks', 256) for request in requests)
        todo = self.runtime.shard(prompts)
        with progress_bar(len(todo), 'prompts', self.runtime.is_main) as bar:
            for start in range(0, len(todo), batch_size):
                with self.runtime.autocast():
                    written = complete(self.model, todo[start:start + batch_size], n_new,
                                       eos=[self.encoding.eot_token],
                                       cache_dtype=self.runtime.dtype)
                rows += [ids + [-1] * (n_new - len(ids)) for ids in written]
                bar.update(len(written))
        texts = []
        for row, request in zip(self.runtime.gather(rows, len(requests)), requests):
            ids = row[row >= 0].astype(int).tolist()
            text = self.encoding.decode(ids[:request.args[1].get('max_gen_toks', 256)])
            for end in request.args[1].get('until', []):
                text = text.partition(end)[0]
            texts.append(text)
        return texts

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        raise UserError('commonsense.py scores choices and writes text. Leave out tasks that score '
                        'a whole text; eval_ppl.py does.')


def load_tasks(metadata):
    """[lm_eval's Task] of the tasks, their data downloaded, or made by the metadata."""
    from lm_eval.tasks import TaskManager
    manager = TaskManager(include_path=task_folder or None, metadata=metadata)
    try:
        return list(manager.load(tasks)['tasks'].values())
    except Exception as error:  # of names, the network, data or a task's code: they share no class
        raise UserError(f'lm_eval could not load {tasks} ({type(error).__name__}: '
                        f'{str(error)[:200]}). Check the names, connect once, or give '
                        '--task_folder= with task files that name local data.') from error


def task_scores(measured, length):
    """
    {task: its score in percent, and what it is of} from what lm_eval measured. RULER's score is
    named after the length of the prompts.
    """
    scores = {}
    for task, row in measured['results'].items():
        # lm_eval's names are METRIC,FILTER and METRIC_stderr,FILTER.
        values = {key.partition(',')[0]: value for key, value in row.items() if ',' in key}
        metric = next(name for name in ('acc_norm', 'acc', str(length), *values) if name in values)
        error = values[f'{metric}_stderr']
        scores[task] = {'score': 100 * values[metric],
                        'standard_error': 100 * error if error != 'N/A' else None,
                        'metric': metric, 'questions': row['sample_len'],
                        'version': measured['versions'][task],
                        'dataset': measured['configs'][task]['dataset_path']}
    return scores


def main():
    optional('lm_eval.api.model')
    if not tasks:
        raise UserError('tasks is empty. Name one at least.')
    between(globals(), 1, 'batch_size', 'limit', 'read_length')
    run = Run(settings(globals()), 'commonsense', decodes=True)
    from lm_eval import simple_evaluate
    harness = Harness(run.model, run.encoding, run.runtime)
    endless = sorted(ENDLESS & set(tasks))
    if endless and harness.read_length < SHORTEST:
        raise UserError(f'read_length is {harness.read_length}, for which lm_eval may never end '
                        f"making the prompts of {', '.join(endless)}. Give --read_length="
                        f'{SHORTEST} or more, or leave them out.')
    source = run.settings['init_from'].removeprefix('hf:').partition('@')[0]
    metadata = {'tokenizer': tokenizer or source,
                'max_seq_lengths': [harness.read_length]}
    measured = simple_evaluate(harness, tasks=load_tasks(metadata), num_fewshot=0, limit=limit,
                               log_samples=False)
    rows = task_scores(measured, harness.read_length)
    scores = {task: row['score'] for task, row in rows.items()}
    print_scores(run.runtime.print, scores, paper_table('nope_table1'))
    run.write('commonsense', {
        'add_bos': add_bos, 'lm_eval': version('lm_eval'), 'tasks': rows, 'cut': harness.n_cut,
        'read_length': harness.read_length, 'average': sum(scores.values()) / len(scores)})
    run.close()


if __name__ == '__main__':
    configure(globals(), RunSettings)
    main()
