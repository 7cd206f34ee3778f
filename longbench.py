"""
LongBench (Bai et al. 2024, arXiv:2308.14508) on a checkpoint with any softmax scale: Table 3 of
"Length Generalization of Causal Transformers without Position Encoding", 16 tasks, beam search.

$ python data/longbench/prepare.py                                 # the data
$ torchrun --nproc_per_node=8 longbench.py --out_dir=out/nope_1b --tasks="['trec']" --max_samples=20
$ python longbench.py --init_from=hf:AntNLP/TinyLlama-NoPE-1.1B --position=none --paper='NoPE 2K' --out_dir=out/nope_hf

Unlike the benchmark's own code: 5 beams, as in the paper, where that code is greedy; and a prompt
may have the context less the task's longest answer, where that code has a length for each model.

Writes out_dir/longbench[_LABEL].json, and out_dir/longbench[_LABEL]/TASK.jsonl, a line a sample,
from where a stopped run goes on
"""

import difflib
import hashlib
import json
import re
import string
import time
from collections import Counter
from pathlib import Path

import checkpoint
from configurator import at_least, configure, settings
from corpus import start_token, tokenizer_from_state
from generate import complete
from runtime import ROOT, Answers, provenance, result_path, save_json, setup

# what to read
out_dir = 'out/demo/nope'    # the run to read; results go there too
init_from = 'last'           # last or best (of out_dir), a checkpoint file, a Hugging Face folder, or hf:ORG/NAME
position: str | None = None  # read the checkpoint with this position method; None: as it says
rope_scaling: str | None = None  # extend RoPE, such as yarn:4; None: as the checkpoint says
scale: float | str | None = None  # softmax scale: a number for all heads, or a scale file
# prompts and answers
data = 'data/longbench'      # the folder that data/longbench/prepare.py wrote
tasks: list[str] = []        # some of the 16; empty: all
context: int | None = None   # tokens of prompt and longest answer together; None: L
beams = 5                    # sequences kept in beam search; 1: greedy
batch_size = 4               # samples read at once, each with all its beams
max_samples: int | None = None  # the first so many of each task; None: all
paper = ''                   # a row of Table 3 to print beside, such as 'NoPE 2K'
label = ''                   # name of the result; empty: the scale's
# machine
device = 'auto'              # auto, cpu, cuda, mps
dtype = 'auto'               # auto, float32, bfloat16, float16


# ----------------------------------------------------------------------------- metrics, each from 0 to 1

def qa_f1(prediction, gold):
    """F1 of the two bags of words, without case, ASCII punctuation and articles."""
    words = []
    for text in (prediction, gold):
        text = ''.join(char for char in text.lower() if char not in string.punctuation)
        words.append(Counter(re.sub(r'\b(a|an|the)\b', ' ', text).split()))
    common = (words[0] & words[1]).total()
    return 2 * common / (words[0].total() + words[1].total()) if common else 0.0


def common_words(x, y):
    """
    The set of words of a longest common subsequence of two lists, and the steps back through its
    table.
    """
    table = [[0] * (len(y) + 1)]
    for word in x:
        above, row = table[-1], [0]
        for j, other in enumerate(y):
            row.append(above[j] + 1 if word == other else max(above[j + 1], row[j]))
        table.append(row)
    i, j, words, steps = len(x), len(y), set(), 0
    while i and j:
        steps += 1
        if x[i - 1] == y[j - 1]:
            words.add(x[i - 1])
            i, j = i - 1, j - 1
        elif table[i - 1][j] > table[i][j - 1]:  # of several longest, the one that the package `rouge` finds
            i -= 1
        else:
            j -= 1
    return words, steps


def rouge_l(prediction, gold):
    """
    ROUGE-L as the package `rouge` 1.0.1 has it: sentences end at '.', words at white space; the
    words that any sentence of one shares with any of the other, in order, over the distinct words
    of each. Google's rouge_score differs.
    """
    both = [[sentence.split() or [''] for sentence in text.split('.') if sentence] for text in (prediction, gold)]
    if not all(both):
        return 0.0
    shared = set()
    for reference in both[1]:
        for sentence in both[0]:
            words, steps = common_words(reference, sentence)
            if steps > 990:  # the package recurses at each step, and LongBench counts its RecursionError as 0
                return 0.0
            shared |= words
    precision, recall = (len(shared) / len({word for words in text for word in words}) for text in both)
    return 2 * precision * recall / (precision + recall + 1e-8)


def classification(prediction, gold, classes):
    """
    1 / the number of classes named in the prediction, if gold is among them; parts of gold's name
    do not count.
    """
    named = [name for name in classes if name in prediction]
    for name in named:  # removed from the list that is walked, as in the benchmark: the next one is then passed over
        if name in gold and name != gold:
            named.remove(name)
    return 1 / len(named) if gold in named else 0.0


def count(prediction, gold):
    """The share of the numbers in the prediction that are gold."""
    numbers = re.findall(r'\d+', prediction)
    return numbers.count(str(gold)) / len(numbers) if numbers else 0.0


def retrieval(prediction, gold):
    """The same for a paragraph's number; gold: such as 'Paragraph 7'."""
    return count(prediction, re.search(r'Paragraph (\d+)', gold)[1])


def code_similarity(prediction, gold):
    """
    Similarity of gold and the prediction's first line without a backtick, # or //, in whole percent
    as fuzzywuzzy has it with difflib; with python-Levenshtein it can differ by a point.
    """
    lines = prediction.lstrip('\n').split('\n')
    line = next((line for line in lines if not any(mark in line for mark in ('`', '#', '//'))), '')
    if line == gold or not (line and gold):
        return float(line == gold)
    return round(100 * difflib.SequenceMatcher(None, line, gold).ratio()) / 100


TASKS = {  # in the order of Table 3: the name of its column, and the metric
    'narrativeqa': ('NQA', qa_f1), 'qasper': ('Qsp', qa_f1), 'multifieldqa_en': ('MulF', qa_f1),
    'hotpotqa': ('HpQA', qa_f1), '2wikimqa': ('2WQA', qa_f1), 'musique': ('Musq', qa_f1),
    'gov_report': ('GRpt', rouge_l), 'qmsum': ('QSum', rouge_l), 'multi_news': ('MulN', rouge_l),
    'trec': ('TREC', classification), 'triviaqa': ('TrQA', qa_f1), 'samsum': ('SSum', rouge_l),
    'passage_count': ('PsgC', count), 'passage_retrieval_en': ('PsgR', retrieval),
    'lcc': ('Lcc', code_similarity), 'repobench-p': ('Re-P', code_similarity),
}


def score(task, prediction, answers, classes=()):
    """
    The best score of a prediction over the answers, 0 to 1. classes: the names of all classes, for
    trec.
    """
    if task in ('trec', 'triviaqa', 'samsum'):  # else the model goes on with further examples
        prediction = prediction.lstrip('\n').split('\n')[0]
    metric = TASKS[task][1]
    more = [classes] if metric is classification else []
    return max((metric(prediction, answer, *more) for answer in answers), default=0.0)


# ----------------------------------------------------------------------------- prompts

def read_task(folder, task):
    """
    A task's most new tokens, its samples, each a prompt, answers and classes, and a digest of all
    of it. Raises ValueError for what is not as the benchmark has it.
    """
    try:
        text = (folder / f'{task}.jsonl').read_text(encoding='utf-8')
        template, max_new_tokens = (json.loads((folder / f'dataset2{kind}.json').read_text(encoding='utf-8'))[task]
                                    for kind in ('prompt', 'maxlen'))
        records = [json.loads(line) for line in text.split('\n') if line]
        classes = records[-1]['all_classes'] if task == 'trec' else []  # the benchmark takes the last row's for all
        samples = [(template.format(**record), record['answers'], classes) for record in records]
        if not samples:
            raise ValueError('no samples')
    except FileNotFoundError as error:
        raise ValueError(f'There is no {error.filename}. Run data/longbench/prepare.py or name --data=.') from None
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f'{task} in {folder} is not as in LongBench: {error!r}. Prepare it again.') from None
    digest = hashlib.sha256(f'{template}{max_new_tokens}{text}'.encode()).hexdigest()
    return max_new_tokens, samples[:max_samples], digest


def prompt_ids(text, encoding, room):
    """
    The ids of a prompt, its middle cut out where they are more than `room`, and how many they were.
    """
    def ids_of(text):
        return [start_token(encoding), *encoding.encode_ordinary(text)]

    whole = ids_of(text)
    if len(whole) <= room:
        return whole, len(whole)
    half = room // 2
    ids = ids_of(encoding.decode(whole[1:half]) + encoding.decode(whole[-half:]))
    # as text the halves may have more tokens than before, such as where the cut went through a
    # character
    return ids if len(ids) <= room else ids[:half] + ids[-half:], len(whole)


# ----------------------------------------------------------------------------- the stage

def run_task(model, encoding, task, source, length, answers, runtime):
    """
    Answer and score what answers does not hold yet. source: from read_task(); length: tokens of
    prompt and answer together. Returns the task's entry in the result, the same on every rank.
    """
    max_new_tokens, samples, _ = source
    room, eos, least = length - max_new_tokens, (encoding.eot_token,), 0
    if task == 'samsum':  # the benchmark's one exception: a summary is one line
        eos, least = (*eos, encoding.encode_ordinary('\n')[-1]), 1
    for batch in answers.batches(range(len(samples)), lambda i: 1, batch_size):
        prompts, lengths = zip(*(prompt_ids(samples[i][0], encoding, room) for i in batch))
        with runtime.autocast():
            new = complete(model, prompts, max_new_tokens, beams, eos, least, cache_dtype=runtime.dtype)
        for i, ids, prompt_tokens in zip(batch, new, lengths):
            prediction, (_, golds, classes) = encoding.decode(ids), samples[i]
            answers.add(i, prediction=prediction, answers=golds, score=score(task, prediction, golds, classes),
                        prompt_tokens=prompt_tokens)
    rows = [row for row in answers.finish() if row['item'] < len(samples)]  # there may be more, from a run on more
    return {'score': round(100 * sum(row['score'] for row in rows) / len(rows), 2), 'samples': len(rows),
            'cut': sum(row['prompt_tokens'] > room for row in rows), 'max_prompt_tokens': room,
            'max_new_tokens': max_new_tokens}


def print_table(result):
    """The scores in the layout of Table 3, and the paper's below."""
    rows = {f"{result['position_method']} {result['label']}".strip(): [v['score'] for v in result['tasks'].values()]}
    if result['paper']:
        rows[f'paper: {paper}'] = list(result['paper'].values())
    width = max(map(len, rows))
    print(f'{"":{width}}    avg' + ''.join(f'{TASKS[task][0]:>6}' for task in result['tasks']))
    for name, scores in rows.items():
        print(f'{name:{width}} {sum(scores) / len(scores):6.2f}' + ''.join(f'{x:6.1f}' for x in scores))


def main():
    began, runtime = time.perf_counter(), setup(device, dtype)
    table = json.loads((ROOT / 'results/papers.json').read_text())['nope_table3']
    if not set(tasks) <= set(TASKS):
        raise ValueError(f"tasks is {tasks}. Choose from: {', '.join(TASKS)}.")
    if paper and paper not in table['rows']:
        raise ValueError(f"Table 3 has no row '{paper}'. Choose from: {', '.join(table['rows'])}.")
    at_least(1, globals(), 'beams', 'batch_size', 'max_samples')
    folder = Path(data) if Path(data).is_dir() else ROOT / data
    sources = {task: read_task(folder, task) for task in TASKS if task in (tasks or TASKS)}
    model, info = checkpoint.load_model(init_from, out_dir, runtime.device, position, rope_scaling, runtime.dtype)
    scale_label = checkpoint.apply_scale(model, scale, info)
    encoding, length = tokenizer_from_state(info['tokenizer']), context or model.config.block_size
    for task, (max_new_tokens, *_) in sources.items():
        if length < max_new_tokens + 2:  # a first and a last token
            raise ValueError(f'A context of {length} tokens leaves {task} no room for a prompt: its answers have up to '
                             f'{max_new_tokens}. Set a longer --context=, or --tasks= without it.')

    name = label or scale_label
    stem = result_path(out_dir, 'longbench', name)
    made_with = checkpoint.identity(model, scale, info) | {'beams': beams, 'context': length,
                                                           'dtype': str(runtime.dtype)}
    answers = {task: Answers(f'{stem}/{task}.jsonl', made_with | {'data': sources[task][-1]}, runtime)
               for task in sources}
    scores = {task: run_task(model, encoding, task, sources[task], length, answers[task], runtime) for task in sources}
    if runtime.is_main:
        row = dict(zip(table['columns'], table['rows'].get(paper, [])))
        result = {'stage': 'longbench', 'label': name, 'position_method': model.config.position, 'context': length,
                  'block_size': model.config.block_size, 'beams': beams, 'checkpoint': info['path'],
                  'weights_digest': info['digest'], 'scale': scale, 'tasks': scores,
                  'average': round(sum(task['score'] for task in scores.values()) / len(scores), 2),
                  'paper': {task: row[task] for task in sources if row}}
        print_table(result)
        save_json(f'{stem}.json', result | provenance(settings(globals()), runtime, time.perf_counter() - began))
        print(f'wrote {stem}.json')
    runtime.close()


if __name__ == '__main__':
    configure(globals())
    main()
