"""
LongBench (Bai et al. 2024, arXiv:2308.14508) on a checkpoint with any softmax scale. The 16 tasks
and the beam search are those of Table 3 of "Length Generalization of Causal Transformers without
Position Encoding".

$ python data/longbench/prepare.py                                 # the data
$ python longbench.py --out_dir=out/nope_1b --paper='NoPE 2K'      # also prints the paper's row
$ python longbench.py --init_from=hf:AntNLP/TinyLlama-NoPE-1.1B --position=none --out_dir=out/hf
$ torchrun --nproc_per_node=8 longbench.py --out_dir=out/nope_1b --tasks="['trec']" --max_samples=20

Two things differ from the benchmark's own code. This stage uses 5 beams, as in the paper; that code
is greedy. Here a prompt has at most as many tokens as the context minus the task's longest answer;
that code sets a length for each model.

Writes out_dir/longbench[_LABEL].json, and out_dir/longbench[_LABEL]/TASK.jsonl with one line per
sample. A stopped run continues from the .jsonl files
"""

import hashlib
import inspect
import json
import re
import string
import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from configurator import between, configure, settings
from lib.answers import optional, paper_table, print_scores
from lib.checkpoints import Run
from lib.errors import ROOT, UserError
from lib.generate import Decoding, complete
from lib.tokenizers import known_ids, start_token

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
data = 'data/longbench'      # the folder that data/longbench/prepare.py wrote
tasks: list[str] = []        # names of tasks; empty: all 16
context: int | None = None   # tokens of prompt and longest answer together; None: the length that
                             # the scale file is tuned for, without a file L
beams = 5                    # sequences that beam search keeps; 1: greedy
batch_size = 4               # samples that the model reads at once, each with all its beams
max_samples: int | None = None  # number of samples of each task, the first ones; None: all
paper = ''                   # row of Table 3 to print with the results, such as 'NoPE 2K'


# ---------------------------------------------------------------------- metrics, each from 0 to 1

def bag_of_words(text):
    """{word: count}. Case, ASCII punctuation and articles are ignored."""
    text = text.lower().translate(str.maketrans('', '', string.punctuation))
    return Counter(re.sub(r'\b(a|an|the)\b', ' ', text).split())


def qa_f1(prediction, gold):
    """F1 of the two bags of words."""
    ours, theirs = bag_of_words(prediction), bag_of_words(gold)
    words = ours.total() + theirs.total()
    return 2 * (ours & theirs).total() / max(1, words)


def rouge_l(prediction, gold):
    """
    ROUGE-L by the package `rouge`, as in the benchmark. If the package fails, the score is 0, also
    as in the benchmark. The package fails on an empty text, and on a text so long that the package
    recurses deeper than Python allows.
    """
    package, limit = optional('rouge'), sys.getrecursionlimit()
    # Python allows 1000 nested calls, and the benchmark calls the package from the third call. Give
    # the package the same depth here. The present limit may be higher, because torch's compiler
    # raises it.
    sys.setrecursionlimit(len(inspect.stack(0)) + 997)
    try:
        scores = package.Rouge(['rouge-l']).get_scores([prediction], [gold], avg=True)
    except (ValueError, RecursionError):
        return 0.0
    finally:
        sys.setrecursionlimit(limit)
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
    Similarity of gold and the first line of the prediction that has no backtick, # or //. The
    package `fuzzywuzzy` computes it. If python-Levenshtein is also installed, the similarity can
    differ by a point.
    """
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # The package recommends python-Levenshtein for speed.
        fuzz = optional('fuzzywuzzy.fuzz')
    lines = prediction.lstrip('\n').split('\n')
    code = [line for line in lines if not re.search('`|#|//', line)]
    return fuzz.ratio(code[0] if code else '', gold) / 100


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

@dataclass
class Task:
    name: str
    max_new_tokens: int
    samples: list[tuple[str, list[str]]]  # prompt, right answers
    classes: list[str] | None  # of a classification
    digest: str                # checksum of everything that is read from the files


def read_task(folder, name):
    """Read a Task. Raises UserError if the files differ from the benchmark's format."""
    def read(file):
        return (folder / file).read_text(encoding='utf-8')

    try:
        text = read(f'{name}.jsonl')
        template = json.loads(read('dataset2prompt.json'))[name]
        max_new_tokens = int(json.loads(read('dataset2maxlen.json'))[name])
        records = [json.loads(line) for line in text.split('\n') if line]
        samples = [(template.format(**record), record['answers']) for record in records]
        if not samples:
            raise ValueError('no samples')
        classes = records[-1]['all_classes']  # The benchmark uses the last record's.
        for _, answers in samples:
            score(name, 'any', answers, classes)  # Fail now if a sample cannot be scored.
    except UserError:  # The package of a metric is missing.
        raise
    except Exception as error:  # Files, JSON and fields fail in many ways.
        raise UserError(f'{name} of LongBench cannot be read in {folder} ({type(error).__name__}: '
                        f'{error}). Run data/longbench/prepare.py, or name its folder with '
                        '--data=.') from error
    digest = hashlib.sha256(f'{template}{max_new_tokens}{text}'.encode()).hexdigest()
    return Task(name, max_new_tokens, samples, classes, digest)


def prompt_ids(text, encoding, room):
    """
    Returns at most `room` ids of a prompt, and the number of ids before the cut. A longer prompt
    loses its middle.
    """
    def ids(text):
        return [start_token(encoding), *encoding.encode_ordinary(text)]

    whole = cut = ids(text)
    half = room // 2
    if len(whole) > room:
        cut = ids(encoding.decode(whole[1:half]) + encoding.decode(whole[-half:]))
    # The new ids of the halves can be more than before, for example if the cut splits a character.
    if len(cut) > room:
        cut = cut[:half] + cut[-half:]
    return cut, len(whole)


# ---------------------------------------------------------------------- the stage

KINDS = {'prediction': str, 'score': int | float, 'prompt_tokens': int}  # of an answer


def answer_task(run, task, answers, context, beams, batch_size):
    """
    Answer and score the samples that have no answer yet. answers: an AnswerLog; context: tokens of
    prompt and answer together. Returns the task's entry in the result, the same on every rank.
    """
    encoding, n, room = run.encoding, len(task.samples), context - task.max_new_tokens
    eos, min_new_tokens = [encoding.eot_token], 0
    if task.name == 'samsum':  # the benchmark's only exception: a summary is one line
        eos.append(encoding.encode_ordinary('\n')[-1])
        min_new_tokens = 1
    how = Decoding(tuple(eos), run.runtime.dtype, beams=beams, min_new_tokens=min_new_tokens)
    for batch in answers.batches(range(n), lambda i: 1, batch_size):
        texts, golds = zip(*[task.samples[i] for i in batch])
        prompts, lengths = zip(*[prompt_ids(text, encoding, room) for text in texts])
        with run.runtime.autocast():
            new = complete(run.model, prompts, task.max_new_tokens, how)
        for i, ids, gold, prompt_tokens in zip(batch, new, golds, lengths):
            prediction = encoding.decode(known_ids(encoding, ids))
            answers.add(i, prediction=prediction, answers=gold,
                        score=score(task.name, prediction, gold, task.classes),
                        prompt_tokens=prompt_tokens)
    rows = answers.finish()
    return {'score': round(100 * sum(row['score'] for row in rows) / n, 2), 'samples': n,
            'cut': sum(row['prompt_tokens'] > room for row in rows),
            'max_prompt_tokens': room, 'max_new_tokens': task.max_new_tokens}


def main():
    table = paper_table('nope_table3')
    if not set(tasks) <= set(TASKS):
        raise UserError(f"tasks is {tasks}. Choose from: {', '.join(TASKS)}.")
    if paper and paper not in table:
        raise UserError(f"Table 3 has no row '{paper}'. Choose from: {', '.join(table)}.")
    between(globals(), 1, 'beams', 'batch_size', 'max_samples', 'context')
    folder = Path(data) if Path(data).is_dir() else ROOT / data
    chosen = [read_task(folder, name) for name in TASKS if name in (tasks or TASKS)]
    run = Run(settings(globals()), 'longbench', decodes=True)
    length = context or run.reach()
    for task in chosen:
        if length < task.max_new_tokens + 2:  # a prompt has at least a first and a last token
            raise UserError(f'A context of {length} tokens leaves {task.name} no room for a '
                            f'prompt, because its answers have up to {task.max_new_tokens} tokens. '
                            'Set a longer --context=, or leave this task out of --tasks=.')

    # Open all files of answers first: one with other settings is refused before the work starts.
    logs = [run.answers(f"{run.path('longbench')}/{task.name}", KINDS, beams=beams, context=length,
                        data=task.digest) for task in chosen]
    results = {}
    for task, answers in zip(chosen, logs):
        task.samples = task.samples[:max_samples]
        results[task.name] = answer_task(run, task, answers, length, beams, batch_size)
    scores = {name: result['score'] for name, result in results.items()}
    theirs = {paper: {name: table[paper][name] for name in scores}} if paper else {}
    print_scores(run.runtime.print, scores, theirs)
    average = round(sum(scores.values()) / len(scores), 2)
    run.write('longbench', {'context': length, 'beams': beams, 'tasks': results,
                            'average': average, 'paper': theirs.get(paper, {})})
    run.close()


if __name__ == '__main__':
    configure(globals())
    main()
