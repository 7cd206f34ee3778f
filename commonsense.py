"""
Seven multiple-choice tasks of common sense, zero-shot: Table 1 of "Length Generalization of Causal
Transformers without Position Encoding". The stage also runs tasks in which the model writes text,
such as RULER's. EleutherAI's package lm_eval asks the questions. Its task files name the data sets.

$ python commonsense.py --init_from=hf:AntNLP/TinyLlama-NoPE-1.1B --position=none --out_dir=out/hf
$ torchrun --nproc_per_node=8 commonsense.py --out_dir=out/nope_1b --tasks="['piqa']" --limit=100
$ python commonsense.py --tasks="['niah_single_1']" --read_length=4096 --tokenizer=gpt2   # of RULER

RULER needs `pip install lm_eval[ruler]`, and a Hugging Face tokenizer that counts its tokens.

The score of a choice is ln p of its tokens. acc: how often the right choice scores best. acc_norm:
the same after each score is divided by the choice's number of characters. boolq and winogrande have
only acc. The model writes text greedily. A prompt of more than read_length tokens is refused,
because nobody can answer a prompt that was cut.

Writes out_dir/commonsense[_LABEL].json
"""

import itertools
import random
from importlib.metadata import version

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from configurator import between, configure, settings
from lib.answers import optional, paper_table, print_scores, progress_bar
from lib.checkpoints import Run
from lib.errors import UserError
from lib.generate import Decoding, complete, read_prompts
from lib.scales import vectors_for
from lib.tokenizers import known_ids, start_token

try:
    from lm_eval.api.model import LM
except ImportError:
    LM = object  # main() says what is missing

# For these tasks of RULER, lm_eval 0.4.13 makes prompts forever if the shortest prompt is longer
# than read_length. With a BPE of 32,000 tokens, the shortest prompt of ruler_vt fits into 1,024
# tokens, but not into 768.
ENDLESS, SHORTEST = {'ruler', 'ruler_cwe', 'ruler_fwe', 'ruler_vt'}, 1024

# which model, text and device
out_dir = 'out/demo/nope'    # folder of the run to read; results go there, too
init_from = 'last'           # last, best (of out_dir), a checkpoint file, a folder, hf:ORG/NAME
position: str | None = None  # position method; None: the checkpoint's
rope_scaling: str | None = None   # extension of RoPE, such as yarn:4; None: the checkpoint's
scale: float | str | None = None  # softmax scale: a number for all heads, or a scale file
label = ''                   # name of the result; '': named after the scale
device = 'auto'              # auto, cpu, cuda, mps
dtype = 'auto'               # auto, float32, bfloat16, float16
# questions
tasks: list[str] = ['arc_challenge', 'arc_easy', 'boolq', 'hellaswag', 'openbookqa', 'piqa',
                    'winogrande']
task_folder = ''             # folder with more task files for lm_eval (.yaml), such as your own
limit: int | None = None     # number of questions of each task, the first ones; None: all
read_length: int | None = None  # longest text in tokens, and length of RULER's prompts; None: L
tokenizer = ''               # Hugging Face tokenizer that RULER counts with; '': init_from's
add_bos = False              # start questions with the start token; the paper does not
batch_size = 16              # questions that the model reads at once, each with all its choices


@torch.no_grad()
def choice_scores(model, batch, runtime):
    """
    batch: [(context, [continuation, ...])], lists of ids, none of them empty. Returns one row per
    continuation: its ln p in nats, and whether greedy decoding would write it.
    """
    contexts, choices = zip(*batch)
    continuations = [ids for of_one in choices for ids in of_one]
    targets = pad_sequence([torch.tensor(ids) for ids in continuations], batch_first=True)
    targets = targets.to(runtime.device)                        # (n, T)
    T = targets.shape[1]
    # Read each context once. Its continuations share the cache.
    copies = torch.tensor([len(of_one) for of_one in choices], device=runtime.device)
    total = max(map(len, contexts)) + T - 1
    with runtime.autocast(), vectors_for(model, total):
        logits, cache = read_prompts(model, contexts, T - 1, runtime.dtype)
        logits = logits.repeat_interleave(copies, dim=0)[:, None]
        if T > 1:
            cache.repeat(copies)
            logits = torch.cat((logits, model(targets[:, :-1], cache=cache)), dim=1)
    logits = logits.float()                                     # (n, T, V)
    log_p = (logits.gather(-1, targets[..., None])[..., 0] - logits.logsumexp(-1)).cpu()
    greedy = (logits.argmax(-1) == targets).cpu()
    scores = []
    for i, n in enumerate(map(len, continuations)):  # the rest of a row is padding
        scores.append((log_p[i, :n].sum().item(), greedy[i, :n].all().item()))
    return scores


class Harness(LM):
    """
    Our model with lm_eval's interface. Every rank gets all requests and reads its share.
    read_length, batch_size, add_bos: as the settings.
    """

    def __init__(self, model, encoding, runtime, read_length, batch_size, add_bos):
        super().__init__()
        self.model, self.encoding, self.runtime = model, encoding, runtime
        self.read_length, self.batch_size, self.add_bos = read_length, batch_size, add_bos
        self.n_cut = 0  # choices whose question was cut

    def scores(self, pairs):
        """
        pairs: [(context, continuation)], lists of ids. Returns (len(pairs), 2): a row of
        choice_scores() for each pair, in the order of pairs.
        """
        alone, groups = self.model.needs_equal_lengths, {}
        for i, (context, _) in enumerate(pairs):
            groups.setdefault(i if alone else tuple(context), []).append(i)
        # Read the longest contexts first: if memory is too small, the run fails at once.
        longest_first = sorted(groups.values(), key=lambda group: -len(pairs[group[0]][0]))
        todo, size = self.runtime.shard(longest_first), 1 if alone else self.batch_size
        rows = np.zeros((len(pairs), 2))
        with progress_bar(len(todo), 'questions', self.runtime.is_main) as bar:
            for start in range(0, len(todo), size):
                some = todo[start:start + size]
                batch = [(pairs[group[0]][0], [pairs[i][1] for i in group]) for group in some]
                numbers = [i for group in some for i in group]
                rows[numbers] = choice_scores(self.model, batch, self.runtime)
                bar.update(len(some))
        # Add up the ranks, because each row is zero on all ranks but one.
        return self.runtime.gather([rows], self.runtime.world_size).sum(0)

    def started(self, ids):
        """A text's ids. The start token comes first if add_bos is set or the text is empty."""
        return [start_token(self.encoding), *ids] if self.add_bos or not ids else ids

    def encode(self, context, continuation):
        """
        Ids of the context and of the continuation. As in lm_eval's models, spaces between them
        belong to the continuation. Of more than read_length tokens, only the last ones are kept.
        """
        context_ids = self.encoding.encode_ordinary(context.rstrip())
        after = self.encoding.encode_ordinary(context + continuation)[len(context_ids):]
        if not after:
            raise UserError(f'{continuation!r} has no token of its own: the tokenizer joins it to '
                            f'the end of the question {context[-40:]!r}. Put a space between them: '
                            'set target_delimiter in the task.')
        before = self.started(context_ids)
        n_over = max(0, len(before) + len(after) - 1 - self.read_length)
        kept = before[n_over:] or before[-1:]  # One token of the context always stays.
        self.n_cut += len(kept) < len(before)
        return kept, after

    def loglikelihood(self, requests, disable_tqdm=False):
        pairs = [self.encode(*request.args) for request in requests]
        return [(log_p, bool(greedy)) for log_p, greedy in self.scores(pairs).tolist()]

    def prompt(self, request):
        """The ids of a prompt. Raises UserError if it has more than read_length tokens."""
        ids = self.started(self.encoding.encode_ordinary(request.args[0]))
        if len(ids) > self.read_length:
            raise UserError(f'a prompt of {request.task_name} has {len(ids)} tokens, but '
                            f'read_length is {self.read_length}. Raise --read_length=, or leave '
                            'that task out.')
        return ids

    def generate_until(self, requests, disable_tqdm=False):
        """The greedy text after each prompt, up to the first string that ends it."""
        from lm_eval.models.utils import normalize_gen_kwargs
        prompts, rows = [self.prompt(request) for request in requests], []
        # A task may name these limits in several ways. max_gen_toks: tokens; until: strings.
        limits = [normalize_gen_kwargs(request.args[1], 256) for request in requests]
        most = max(limit['max_gen_toks'] for limit in limits)
        how = Decoding((self.encoding.eot_token,), self.runtime.dtype)
        todo = self.runtime.shard([*zip(prompts, limits)])
        with progress_bar(len(todo), 'prompts', self.runtime.is_main) as bar:
            for n_new, group in itertools.groupby(todo, lambda one: one[1]['max_gen_toks']):
                batches = [prompt for prompt, _ in group]
                for start in range(0, len(batches), self.batch_size):
                    batch = batches[start:start + self.batch_size]
                    with self.runtime.autocast():
                        written = complete(self.model, batch, n_new, how)
                    rows += [ids + [-1] * (most - len(ids)) for ids in written]
                    bar.update(len(written))
        texts = []
        for row, limit in zip(self.runtime.gather(rows, len(requests)), limits):
            ids = row[row >= 0].astype(int).tolist()
            text = self.encoding.decode(known_ids(self.encoding, ids))
            for end in limit['until']:
                text = text.partition(end)[0]
            texts.append(text)
        return texts

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        raise UserError('commonsense.py scores choices and writes text. Leave out tasks that score '
                        'a whole text, and use eval_ppl.py for them.')


def load_tasks(names, folder, metadata):
    """
    A list of lm_eval's Task, with data that lm_eval downloads or makes from the metadata. folder: a
    folder with more task files, or ''.
    """
    from lm_eval.tasks import TaskManager
    # Some tasks draw their data, such as RULER's. All ranks and runs must draw the same.
    random.seed(0)
    np.random.seed(0)
    manager = TaskManager(include_path=folder or None, metadata=metadata)
    try:
        return list(manager.load(names)['tasks'].values())
    except Exception as error:  # names, network, data and task code raise different classes
        raise UserError(f'lm_eval could not load {names} ({type(error).__name__}: '
                        f'{str(error)[:200]}). Check the names, connect once, or give '
                        '--task_folder= with task files that name local data.') from error


def task_scores(measured, length):
    """
    {task: row} from the results of lm_eval. A row holds the score in percent, its standard error,
    its metric and its data. RULER names its metric after the length of the prompts.
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
                        'dataset': measured['configs'][task].get('dataset_path')}
    return scores


def main():
    optional('lm_eval.api.model')
    if not tasks:
        raise UserError('tasks is empty. Name at least one task.')
    between(globals(), 1, 'batch_size', 'limit', 'read_length')
    run = Run(settings(globals()), 'commonsense', decodes=True)
    from lm_eval import simple_evaluate
    longest = read_length or run.L
    endless = sorted(ENDLESS & set(tasks))
    if endless and longest < SHORTEST:
        raise UserError(f'read_length is {longest}. lm_eval may then never finish the prompts of '
                        f"{', '.join(endless)}. Give --read_length={SHORTEST} or more, or leave "
                        'these tasks out.')

    harness = Harness(run.model, run.encoding, run.runtime, longest, batch_size, add_bos)
    source = init_from.removeprefix('hf:').partition('@')[0]
    metadata = {'tokenizer': tokenizer or source, 'max_seq_lengths': [longest]}
    loaded = load_tasks(tasks, task_folder, metadata)
    # What may be refused comes first, because lm_eval keeps nothing of what it measured before.
    if any(task.OUTPUT_TYPE == 'loglikelihood_rolling' for task in loaded):
        harness.loglikelihood_rolling([])
    names = [task.config.task for task in loaded]
    loaded.sort(key=lambda task: task.OUTPUT_TYPE != 'generate_until')
    measured = simple_evaluate(harness, tasks=loaded, num_fewshot=0, limit=limit, log_samples=False)
    if measured is None:  # lm_eval gives the results to the first rank only
        run.close()
        return
    rows = task_scores(measured, longest)
    rows = {name: rows[name] for name in names}
    scores = {task: row['score'] for task, row in rows.items()}
    print_scores(run.runtime.print, scores, paper_table('nope_table1'))
    run.write('commonsense', {
        'add_bos': add_bos, 'lm_eval': version('lm_eval'), 'tasks': rows, 'read_length': longest,
        'choices_cut': harness.n_cut, 'average': sum(scores.values()) / len(scores)})
    run.close()


if __name__ == '__main__':
    configure(globals())
    main()
