"""
LongBench (Bai et al. 2024, arXiv:2308.14508) on a checkpoint with any softmax scale. The 16 tasks
and the beam search are those of Table 3 of "Length Generalization of Causal Transformers without
Position Encoding".

$ python data/longbench/prepare.py                             # the data; pip install ".[tasks]"
$ python longbench.py --init_from=hf:AntNLP/TinyLlama-NoPE-1.1B --position=none
$ torchrun --nproc_per_node=8 longbench.py --out_dir=out/nope_1b --tasks="['trec']" --max_samples=20

Two things differ from the benchmark's own code. This stage uses 5 beams, as in the paper; that code
is greedy. Here a prompt has at most as many tokens as the context minus the task's longest answer;
that code sets a length for each model.

Writes out_dir/longbench[_LABEL].json. Each answer is a line in the folder beside it,
longbench[_LABEL]/TASK/; a stopped run continues from there
"""

import json
import re
import string
from collections import Counter
from difflib import SequenceMatcher
from functools import partial

from configurator import ROOT, UserError, configure, settings

import rouge

from common import setup
from data import stable_hash
from generate import answer_all, complete, identity, store_column_major
from stage import open_model, print_rows, result_path, results_folder, write_result
from tokenizer import get_tokenizer, start_token

# which model, text and device
out_dir = 'out/demo/nope'    # folder of the run to read; results go there, too
init_from = 'last'           # last, best (of out_dir), a checkpoint file, a folder, hf:ORG/NAME
position: str | None = None  # position method; None: the checkpoint's
rope_scaling: str | None = None   # extension of RoPE, such as yarn:4; None: the checkpoint's
scale: float | str | None = None  # softmax scale: a number for all heads, or a scale file
label = ''                   # name of the result; '': named after the scale
device = 'auto'              # auto, cpu, cuda, mps
dtype = 'auto'               # auto, float32, bfloat16, float16
# prompts and answers
data = 'data/longbench'      # what data/longbench/prepare.py wrote: a folder of the project
tasks: list[str] = []        # names of tasks; empty: all 16
context: int | None = None   # tokens of prompt and longest answer together; None: the length that
                             # the scale file is tuned for, without a file block_size
beams = 5                    # sequences that beam search keeps; 1: greedy
batch_size = 4               # samples that are answered at once; of these, the model reads those
                             # together whose prompts have the same length, each with all its beams
max_samples: int | None = None  # number of samples of each task, the first ones; None: all


# ---------------------------------------------------------------------- metrics, each from 0 to 1

def bag_of_words(text):
    """{word: count}. Case, ASCII punctuation and articles are ignored."""
    text = text.lower().translate(str.maketrans('', '', string.punctuation))
    return Counter(re.sub(r'\b(a|an|the)\b', ' ', text).split())


def qa_f1(prediction, gold):
    """F1 of the two bags of words."""
    found, wanted = bag_of_words(prediction), bag_of_words(gold)
    words = found.total() + wanted.total()
    return 2 * (found & wanted).total() / max(1, words)


def rouge_l(prediction, gold):
    """
    ROUGE-L by the package `rouge`. If the package fails, as it does on an empty text and on a
    sentence of about a thousand words, the score is 0, as in the benchmark.
    """
    try:
        scores = rouge.Rouge(['rouge-l']).get_scores([prediction], [gold], avg=True)
    except (ValueError, RecursionError):
        return 0.0
    return scores['rouge-l']['f']


def classification(prediction, gold, classes):
    """
    1 / n if the prediction names n classes and gold is one of them, else 0. A class does not count
    if its name is part of gold's name.
    """
    named = [name for name in classes if name in prediction]
    # As in the benchmark, the loop removes a name from the list that it walks. So it skips the name
    # after it.
    for name in named:
        if name in gold and name != gold:
            named.remove(name)
    return 1 / len(named) if gold in named else 0.0


def number_share(prediction, gold):
    """The share of the prediction's numbers that equal gold's. gold: '12' or 'Paragraph 12'."""
    wanted, numbers = re.search(r'\d+', str(gold))[0], re.findall(r'\d+', prediction)
    return numbers.count(wanted) / max(1, len(numbers))


def code_similarity(prediction, gold):
    """
    Similarity of gold and the first line of the prediction that has no backtick, # or //, in whole
    percent as in the benchmark, whose package fuzzywuzzy computes it in the same way.
    """
    lines = prediction.lstrip('\n').split('\n')
    code = [line for line in lines if not re.search('`|#|//', line)]
    return round(100 * SequenceMatcher(None, code[0] if code else '', gold).ratio()) / 100


TASKS = {  # in the order of Table 3
    'narrativeqa': qa_f1, 'qasper': qa_f1, 'multifieldqa_en': qa_f1,
    'hotpotqa': qa_f1, '2wikimqa': qa_f1, 'musique': qa_f1,
    'gov_report': rouge_l, 'qmsum': rouge_l, 'multi_news': rouge_l,
    'trec': classification, 'triviaqa': qa_f1, 'samsum': rouge_l,
    'passage_count': number_share, 'passage_retrieval_en': number_share,
    'lcc': code_similarity, 'repobench-p': code_similarity,
}


def score(name, prediction, answers, classes=None):
    """
    The best score of a prediction over the answers, 0 to 1. classes: for trec, the names of all
    classes.
    """
    if name in ('trec', 'triviaqa', 'samsum'):  # The model may continue with more examples.
        prediction = prediction.lstrip('\n').split('\n')[0]
    more = [classes] if name == 'trec' else []
    return max([TASKS[name](prediction, gold, *more) for gold in answers], default=0.0)


# ---------------------------------------------------------------------- prompts

def read_task(folder, name):
    """
    The samples of a task, [(prompt, right answers)], the names of its classes, and the most tokens
    of an answer. The benchmark takes the classes of the last record.
    """
    def read(file):
        return (folder / file).read_text(encoding='utf-8')

    template = json.loads(read('dataset2prompt.json'))[name]
    longest = json.loads(read('dataset2maxlen.json'))[name]
    records = [json.loads(line) for line in read(f'{name}.jsonl').split('\n') if line]
    samples = [(template.format(**record), record['answers']) for record in records]
    return samples, records[-1]['all_classes'], longest


def prompt_ids(text, encoding, room):
    """The ids of a prompt, at most `room`. A longer prompt loses its middle."""
    def ids(text):
        return [start_token(encoding), *encoding.encode_ordinary(text)]

    prompt, half = ids(text), room // 2
    if len(prompt) > room:
        # [1:], because ids() puts the start token there again
        prompt = ids(encoding.decode(prompt[1:half]) + encoding.decode(prompt[-half:]))
    # The new ids of the halves can be more than before, for example if the cut splits a character.
    if len(prompt) > room:
        prompt = prompt[:half] + prompt[-half:]
    return prompt


def main(given):
    # {name: (samples, classes, most tokens of an answer)}
    chosen = {name: read_task(ROOT / data, name) for name in tasks or TASKS}
    runtime = setup(device, dtype)
    model, info = open_model(init_from, out_dir, runtime, position, rope_scaling, scale)
    store_column_major(model)
    encoding = get_tokenizer(info['tokenizer'])
    path = result_path(results_folder(out_dir, init_from, given), 'longbench', label, info)
    length, about_model = context or info['tuned_length'], identity(model, info)
    most = max(longest for _, _, longest in chosen.values())
    if length < most + 2:
        raise UserError(f'Answers of these tasks have up to {most} tokens, which leaves no room '
                        f'for a prompt in {length}. Set a longer --context=, or other --tasks=.')

    def answer(name, items):
        """Answer some samples of a task and score the answers."""
        samples, classes, longest = chosen[name]
        prompts = [prompt_ids(samples[i][0], encoding, length - longest) for i in items]
        ends, not_first = [encoding.eot_token], []
        if name == 'samsum':  # the benchmark's only exception: a summary is one line, not empty
            ends.append(encoding.encode_ordinary('\n')[-1])
            not_first = ends
        with runtime.autocast():
            written = complete(model, prompts, longest, ends, beams, not_first)
        rows = []
        for i, ids in zip(items, written):
            prediction, right = encoding.decode(ids), samples[i][1]
            rows.append({'prediction': prediction, 'answers': right,
                         'score': score(name, prediction, right, classes)})
        return rows

    rows = []
    for name, task in chosen.items():
        n = len(task[0][:max_samples])
        about = about_model, runtime.dtype, beams, length, stable_hash(task)
        sizes = [1] * n  # so that batches hold batch_size samples, not so many tokens
        answers = answer_all(f'{path}/{name}', about, sizes, batch_size, partial(answer, name),
                             runtime)
        mean = 100 * sum(row['score'] for row in answers) / n
        rows.append({'task': name, 'score': round(mean, 2), 'samples': n})
    average = sum(row['score'] for row in rows) / len(rows)
    print_rows(runtime.print, [*rows, {'task': 'average', 'score': average}])
    write_result(path, {'context': length, 'beams': beams, 'rows': rows, 'average': average},
                 settings(globals()), runtime, info)


if __name__ == '__main__':
    main(configure(globals()))
