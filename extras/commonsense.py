"""
Seven multiple-choice tasks of common sense, zero-shot: Table 1 of "Length Generalization of Causal
Transformers without Position Encoding", where RoPE averages 46.1% and NoPE 46.2%. EleutherAI's
package lm_eval asks the questions. Its task files name the data sets.

$ python -m extras.commonsense --init_from=hf:AntNLP/TinyLlama-NoPE-1.1B --position=none
$ torchrun --nproc_per_node=8 -m extras.commonsense --tasks="['piqa']" --limit=100

The stage runs lm_eval's other tasks, too; for those of RULER see extras/README.md.

The score of a choice is ln p of its tokens. acc: how often the right choice scores best. acc_norm:
the same after each score is divided by the choice's number of characters. Text is written greedily.
Of a question of more than read_length tokens the model reads the end; a longer prompt for text is
refused, because nobody can answer a prompt that was cut.

Needs pip install ".[hf,tasks]". Prints lm_eval's own table and writes every metric to
out_dir/commonsense[_LABEL].json. The answers are in folders beside it, from which a stopped run
continues.
"""

from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

from configurator import UserError, configure, settings

import numpy as np
import torch
from lm_eval import simple_evaluate, utils
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager

from common import setup
from data import stable_hash
from extras.hf_folder import write_tokenizer
from generate import answer_all, complete, identity
from stage import open_model, result_path, results_folder, write_result
from tokenizer import get_tokenizer, start_token

# The tasks of Table 1, and the metric that it has for each.
TABLE_1 = {'arc_challenge': 'acc_norm', 'arc_easy': 'acc_norm', 'boolq': 'acc',
           'hellaswag': 'acc_norm', 'openbookqa': 'acc_norm', 'piqa': 'acc_norm',
           'winogrande': 'acc'}

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
tasks: list[str] = []        # names of lm_eval; []: those of Table 1
task_folder = ''             # folder with more task files for lm_eval (.yaml), such as your own
limit: int | None = None     # number of questions of each task, the first ones; None: all
read_length: int | None = None  # longest text in tokens, and length of RULER's prompts; None:
                             # block_size
add_bos = False              # start questions with the start token
batch_tokens = 16384         # tokens in one forward pass, of texts of one length


class Harness(TemplateLM):
    """
    Our model with lm_eval's interface. Every rank gets all requests and reads its share. path: of
    the files of answers; about: what answers depend on; length: as read_length.
    """
    eot_token_id = None  # TemplateLM demands it in the class; __init__ sets that of the object

    def __init__(self, model, encoding, runtime, path, about, length):
        super().__init__()
        self.model, self.encoding, self.runtime = model, encoding, runtime
        self.path, self.about, self.length = path, about, length
        self.eot_token_id = start_token(encoding)  # stands before a text without a question
        self.n_cut = 0                             # choices whose question lost its start

    def tok_encode(self, string, add_special_tokens=None, **_):
        start = [self.eot_token_id] if add_bos and add_special_tokens is None else []
        return start + self.encoding.encode_ordinary(string)

    def ask(self, kind, questions, answer_group):
        """
        The answers to questions, [(ids, tokens that follow)], a dict each. answer_group(ids, n)
        answers those of one shape: lists of equally many ids, and n tokens follow each. kind: names
        the file of answers.

        Example: questions of 5, 9 and 5 ids, and 2 tokens follow each. The longest comes first, so
        the order is 1 0 2. answer_all() asks for items 0 1 2 of that order. answer_group() gets
        question 1, then 0 and 2 together. The answers return as 0 1 2.
        """
        def shape(question):
            return len(question[0]), question[1]

        order = sorted(range(len(questions)), key=lambda i: shape(questions[i]), reverse=True)
        sizes = [sum(shape(questions[i])) for i in order]

        def answer_items(items):
            rows = []
            for _, group in groupby([questions[order[item]] for item in items], shape):
                ids, follow = zip(*group)
                with self.runtime.autocast():
                    rows += answer_group(ids, follow[0])
            return rows

        about = self.about | {'questions': stable_hash(questions)}
        rows = answer_all(f'{self.path}_{kind}', about, sizes, batch_tokens, answer_items,
                          self.runtime)
        return [row for _, row in sorted(zip(order, rows))]  # as they were asked

    def _loglikelihood_tokens(self, requests, **_):
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
            # The model reads all but the last token. With length 4 and a choice of 2 tokens, it
            # reads 4 of the last 5: 3 of the context, 1 of the choice. A choice is never cut.
            questions.append((ids[-max(n, self.length) - 1:], n))
            self.n_cut += len(questions[-1][0]) < len(ids)

        def log_p_of_group(ids, n):
            idx = torch.tensor(ids, device=self.runtime.device)                # (B, T + 1)
            targets = idx[:, -n:, None]
            log_p = self.model(idx[:, :-1], tail=n).float().log_softmax(-1)    # (B, n, V)
            greedy = (log_p.argmax(-1, keepdim=True) == targets).all(1)        # (B, 1)
            log_p = log_p.gather(-1, targets).sum(1)
            return [{'log_p': one.item(), 'greedy': its.item()} for one, its in zip(log_p, greedy)]

        rows = self.ask('choices', questions, log_p_of_group)
        return [(row['log_p'], row['greedy']) for row in rows]

    def loglikelihood_rolling(self, requests, **_):
        raise UserError(f'{requests[0].task_name} measures the perplexity of texts, which '
                        'eval_ppl.py does. Leave that task out.')

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

        def text_of_group(ids, n):
            written = complete(self.model, ids, n, [self.encoding.eot_token])
            return [{'text': self.encoding.decode(new)} for new in written]

        rows = self.ask('texts', prompts, text_of_group)
        return [postprocess_generated_text(row['text'], until, None)
                for row, until in zip(rows, ends)]


def main(given):
    runtime = setup(device, dtype)
    model, info = open_model(init_from, out_dir, runtime, position, rope_scaling, scale)
    path = result_path(results_folder(out_dir, init_from, given), 'commonsense', label, info)
    encoding = get_tokenizer(info['tokenizer'])
    about = {'model': identity(model, info), 'dtype': str(runtime.dtype)}
    length = read_length or model.config.block_size
    harness = Harness(model, encoding, runtime, path, about, length)
    # RULER counts with a tokenizer in a folder. Not that of init_from: lm_eval would run its code.
    counts_with = TemporaryDirectory()
    write_tokenizer(Path(counts_with.name), info['tokenizer'])
    manager = TaskManager(include_path=task_folder or None, metadata={
        'tokenizer': counts_with.name, 'max_seq_lengths': [length]})
    measured = simple_evaluate(harness, tasks=tasks or [*TABLE_1], task_manager=manager,
                               num_fewshot=0, limit=limit, log_samples=False)
    if not runtime.is_main:
        return
    found = measured['results']  # {task: {'METRIC,FILTER': value}}
    print(utils.make_table(measured))
    shares = [found[task][f'{metric},none'] for task, metric in TABLE_1.items() if task in found]
    if shares:
        print(f'average of {len(shares)} of the 7 tasks of Table 1: {np.mean(shares):.1%}')
    print(f'{harness.n_cut} choices have, with their questions, more than {length} tokens and lost '
          'their start')
    write_result(path, {'read_length': length, 'choices_cut': harness.n_cut, 'tasks': found,
                        'lm_eval': measured['lm_eval_version'], 'questions': measured['n-samples']},
                 settings(globals()), runtime, info)


if __name__ == '__main__':
    main(configure(globals()))
