"""
Seven multiple-choice tasks of common sense, zero-shot: Table 1 of "Length Generalization of Causal
Transformers without Position Encoding". EleutherAI's package lm_eval asks the questions, and the
stage runs its other tasks, too, such as RULER's. Its task files name the data sets.

$ python -m extras.commonsense --init_from=hf:AntNLP/TinyLlama-NoPE-1.1B --position=none
$ torchrun --nproc_per_node=8 -m extras.commonsense --tasks="['piqa']" --limit=100
$ python -m extras.commonsense --tasks="['niah_single_1']" --read_length=4096 --tokenizer=gpt2

The last one is of RULER, which needs `pip install lm_eval[ruler]`, a Hugging Face tokenizer that
counts its tokens, and for ruler_vt, ruler_cwe and ruler_fwe a read_length of 1,024 or more: with
less, lm_eval never finishes the prompts.

The score of a choice is ln p of its tokens. acc: how often the right choice scores best. acc_norm:
the same after each score is divided by the choice's number of characters. boolq and winogrande have
only acc. Text is written greedily. Of a question of more than read_length tokens the model reads
the end; a prompt of that length is refused, because nobody can answer a prompt that was cut.

Writes out_dir/commonsense[_LABEL].json, with every metric as lm_eval reports it. The answers are in
.jsonl files beside it, from which a stopped run continues.
"""

import itertools
import json
from operator import itemgetter

from configurator import ROOT, UserError, configure, settings

import numpy as np
import torch

from common import setup
from data import stable_hash
from generate import answer_all, complete, identity
from stage import open_model, print_rows, result_path, results_folder, write_result
from tokenizer import get_tokenizer, start_token

try:
    from lm_eval import simple_evaluate, utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
except ImportError as error:
    raise UserError('Commonsense tasks need lm_eval: pip install ".[tasks]"') from error

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
batch_tokens = 16384         # tokens in one forward pass; lower it when memory runs out


class Harness(TemplateLM):
    """
    Our model with lm_eval's interface. Every rank gets all requests and reads its share. path: of
    the files of answers; about: what answers depend on; length: as read_length.
    """

    eot_token_id = None

    def __init__(self, model, encoding, runtime, path, about, length):
        super().__init__()
        self.model, self.encoding, self.runtime = model, encoding, runtime
        self.path, self.about, self.length = path, about, length
        self.eot_token_id = start_token(encoding)  # stands before a text without a question
        self.n_cut = 0                             # questions that lost their start

    def tok_encode(self, string, add_special_tokens=None, **_):
        start = [self.eot_token_id] if add_bos and add_special_tokens is None else []
        return start + self.encoding.encode_ordinary(string)

    def ask(self, kind, questions, alike, answer):
        """
        answer_all() for questions, [(ids, tokens that follow)]. answer(ids, follow) gets some for
        which alike(question) is the same, and returns a dict for each.
        """
        def size(i):
            return len(questions[i][0]) + questions[i][1]

        @torch.no_grad()
        def answer_items(items):
            rows, some = [], [questions[order[item]] for item in items]
            for _, group in itertools.groupby(some, alike):
                with self.runtime.autocast():
                    rows += answer(*zip(*group))
            return rows

        order = sorted(range(len(questions)), key=lambda i: (-size(i), questions[i][1]))
        rows = answer_all(f'{self.path}_{kind}', self.about | {'questions': stable_hash(questions)},
                          [*map(size, order)], batch_tokens, answer_items, self.runtime)
        rows = dict(zip(order, rows))
        return [rows[i] for i in range(len(questions))]

    def _loglikelihood_tokens(self, requests, kind='choices', **_):
        """
        requests: [(texts, ids of the context, ids of the continuation)]. Returns of each the
        continuation's ln p, and whether greedy decoding would write it.
        """
        questions = []
        for texts, context, continuation in requests:
            if not continuation:
                raise UserError(f'of {texts}, the second has no token of its own. Put a space '
                                'between them: set target_delimiter in the task.')
            ids, n = (context or [self.eot_token_id]) + continuation, len(continuation)
            questions.append((ids[-max(n, self.length) - 1:], n))
            self.n_cut += len(questions[-1][0]) < len(ids)

        def answer(ids, follow):
            idx, n = torch.tensor(ids, device=self.runtime.device), follow[0]
            log_p = self.model(idx[:, :-1], tail=n).float().log_softmax(-1)
            targets = idx[:, -n:, None]
            greedy = (log_p.argmax(-1, keepdim=True) == targets).all(1)
            log_p = log_p.gather(-1, targets).sum(1)                       # (B, 1)
            return [{'log_p': one.item(), 'greedy': its.item()} for one, its in zip(log_p, greedy)]

        def shape(question):  # texts of one shape share a pass
            return len(question[0]), question[1]

        rows = self.ask(kind, questions, shape, answer)
        return [(row['log_p'], row['greedy']) for row in rows]

    def loglikelihood_rolling(self, requests, **_):
        """ln p of each text, read in windows of read_length tokens."""
        windows, owners = [], []
        for number, request in enumerate(requests):
            ids = self.encoding.encode_ordinary(request.args[0])
            for window in utils.get_rolling_token_windows(ids, self.eot_token_id, self.length, 1):
                windows.append((request.args, *utils.make_disjoint_window(window)))
                owners.append(number)
        log_p = [one for one, _ in self._loglikelihood_tokens(windows, 'windows')]
        return np.bincount(owners, log_p, len(requests)).tolist()

    def generate_until(self, requests, **_):
        """The greedy text after each prompt, up to the first string that ends it."""
        prompts, ends = [], []
        for request in requests:
            ids = self.tok_encode(request.args[0]) or [self.eot_token_id]
            how = normalize_gen_kwargs(request.args[1], 256)
            if len(ids) > self.length:
                raise UserError(f'a prompt of {request.task_name} has {len(ids)} tokens, but '
                                f'read_length is {self.length}. Raise it, or leave that task out.')
            prompts.append((ids, how['max_gen_toks']))
            ends.append(how['until'])

        def answer(ids, follow):
            written = complete(self.model, ids, follow[0], [self.encoding.eot_token])
            return [{'text': self.encoding.decode(new)} for new in written]

        texts = []
        for row, until in zip(self.ask('texts', prompts, itemgetter(1), answer), ends):
            for end in until:
                row['text'] = row['text'].partition(end)[0]
            texts.append(row['text'])
        return texts


def main(given):
    runtime = setup(device, dtype)
    model, info = open_model(init_from, out_dir, runtime, position, rope_scaling, scale)
    path = result_path(results_folder(out_dir, init_from, given), 'commonsense', label, info)
    about = {'model': identity(model, info, scale), 'dtype': str(runtime.dtype)}
    length = read_length or model.config.block_size
    harness = Harness(model, get_tokenizer(info['tokenizer']), runtime, path, about, length)
    source = init_from.removeprefix('hf:').partition('@')[0]
    manager = TaskManager(include_path=task_folder or None, metadata={
        'tokenizer': tokenizer or source, 'max_seq_lengths': [length]})
    measured = simple_evaluate(harness, tasks=tasks, task_manager=manager, num_fewshot=0,
                               limit=limit, log_samples=False)
    if not runtime.is_main:
        return
    table = json.loads((ROOT / 'results/papers/tables.json').read_text())['nope_table1']
    columns = {'here': {}} | {f'paper, {name}': dict(zip(table['columns'], row))
                              for name, row in table['rows'].items()}
    found, rows = {}, []
    for task, row in measured['results'].items():
        # The names are METRIC,FILTER and METRIC_stderr,FILTER. -1: of a length that was not asked
        found[task] = {name: value for name, value in row.items()
                       if ',' in name and value not in (-1, 'N/A')}
        for name, value in found[task].items():
            if '_stderr,' not in name:
                rows.append({'task': task, 'metric': name, 'value': value, 'standard error':
                             found[task].get(name.replace(',', '_stderr,'), '')})
        if task in table['columns']:
            columns['here'][task] = 100 * row.get('acc_norm,none', row['acc,none'])
    print_rows(print, rows)
    if here := [*columns['here']]:
        for scores in columns.values():
            scores['average'] = np.mean([scores[task] for task in here])
        print_rows(print, [{'accuracy (%)': task} | {
            name: scores[task] for name, scores in columns.items()} for task in [*here, 'average']])
    print(f'{harness.n_cut} questions have more than {length} tokens and lost their start')
    write_result(path, {'read_length': length, 'choices_cut': harness.n_cut,
                        'tasks': found, 'accuracy': columns['here'],
                        'lm_eval': measured['lm_eval_version'], 'versions': measured['versions'],
                        'questions': measured['n-samples']}, settings(globals()), runtime, info)


if __name__ == '__main__':
    main(configure(globals()))
