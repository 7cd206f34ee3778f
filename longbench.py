"""
LongBench (Bai et al. 2024, arXiv:2308.14508) on a checkpoint with any softmax scale: Table 3 of "Length Generalization
of Causal Transformers without Position Encoding", 16 tasks, beam search.

$ python data/longbench/prepare.py                                 # the data
$ python longbench.py --out_dir=out/nope_1b --tasks="['trec']" --max_samples=20
$ torchrun --nproc_per_node=8 longbench.py --init_from=hf:AntNLP/TinyLlama-NoPE-1.1B --position=none --paper='NoPE 2K'

A run that was stopped goes on where it was when it is started again. The end of text is never fed before a prompt (the
benchmark's own code feeds what the tokenizer puts there), and 5 beams are the paper's (the benchmark's code is greedy).
Writes out_dir/longbench[_LABEL].json and .png, and out_dir/longbench[_LABEL]/TASK.jsonl, a line per sample
"""

import contextlib
import difflib
import hashlib
import json
import re
import string
import time
from collections import Counter
from pathlib import Path

import numpy as np

import checkpoint
from configurator import configure, settings
from corpus import tokenizer_from_state
from generate import complete
from runtime import ROOT, Progress, new_figure, provenance, save_json, save_png, setup, write_text

out_dir = 'out/demo/nope'    # the run to read; results go there too
init_from = 'last'           # last or best (of out_dir), a checkpoint file, a Hugging Face folder, or hf:ORG/NAME
position: str | None = None  # read the checkpoint with this position method; None: as it says
rope_scaling: str | None = None  # extend RoPE, such as yarn:4; None: as the checkpoint says
scale: float | str | None = None  # softmax scale: a number for all heads, or a scale file
data = 'data/longbench'      # the folder that data/longbench/prepare.py wrote
tasks: list[str] = []        # some of the 16; empty: all
context: int | None = None   # tokens of prompt and answer together; None: L. The prompt gets context - the task's answer
beams = 5                    # sequences kept in beam search; 1: greedy
batch_size = 4               # samples generated together, each with all its beams
max_samples: int | None = None  # the first so many of each task; None: all
paper = ''                   # a row of Table 3 to print beside, such as 'NoPE 2K'
label = ''                   # name of the result; empty: the scale's
device = 'auto'              # auto, cpu, cuda, mps
dtype = 'auto'               # auto, float32, bfloat16, float16
seed = 1337                  # beam search draws nothing


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
    """The words of a longest common subsequence of two lists, a set, and the steps of the way back through its table."""
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
    ROUGE-L as the package `rouge` 1.0.1 has it: sentences end at '.', words at white space; the words that any sentence
    of one shares with any of the other, in order, over the distinct words of each. Google's rouge_score differs.
    """
    both = [[sentence.split() or [''] for sentence in text.split('.') if sentence] for text in (prediction, gold)]
    if not all(both):
        return 0.0
    shared = set()
    for reference in both[1]:
        for sentence in both[0]:
            words, steps = common_words(reference, sentence)
            if steps > 985:  # the package recurses at each step, and LongBench counts its RecursionError as 0
                return 0.0
            shared |= words
    precision, recall = (len(shared) / len({word for words in text for word in words}) for text in both)
    return 2 * precision * recall / (precision + recall + 1e-8)


def classification(prediction, gold, classes):
    """1 / the number of classes named in the prediction, if gold is among them; parts of gold's name do not count."""
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
    Similarity of gold and the prediction's first line without a backtick, # or //, in whole percent as fuzzywuzzy has
    it with difflib; with python-Levenshtein it can differ by a point.
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


def score(task, prediction, record):
    """The best score of a prediction over the answers of its record, 0 to 1."""
    if task in ('trec', 'triviaqa', 'samsum'):  # else the model goes on with further examples
        prediction = prediction.lstrip('\n').split('\n')[0]
    metric = TASKS[task][1]
    more = [record['all_classes']] if metric is classification else []
    return max(metric(prediction, answer, *more) for answer in record['answers'])


# ----------------------------------------------------------------------------- prompts

def read_task(folder, task):
    """{template, max_new_tokens, records, digest of them all} of a task. Raises ValueError for what is not LongBench."""
    try:
        text = (folder / f'{task}.jsonl').read_text(encoding='utf-8')
        config = [json.loads((folder / f'dataset2{kind}.json').read_text(encoding='utf-8'))[task]
                  for kind in ('prompt', 'maxlen')]
        records = [json.loads(line) for line in text.split('\n') if line]
    except FileNotFoundError as error:
        raise ValueError(f'There is no {error.filename}. Run python data/longbench/prepare.py, or set --data.') from None
    except (KeyError, ValueError) as error:
        raise ValueError(f'{task} in {folder} is not as the benchmark has it ({error}). Prepare the data again.') from None
    needed = {'input', 'context', 'answers'} | ({'all_classes'} if TASKS[task][1] is classification else set())
    if not records or not all(needed <= set(record) and record['answers'] for record in records):
        raise ValueError(f'{folder}/{task}.jsonl has no records, or some without {", ".join(sorted(needed))}.')
    if 'all_classes' in needed:  # the benchmark reads one list, the last, for all
        records = [record | {'all_classes': records[-1]['all_classes']} for record in records]
    digest = hashlib.sha256(f'{config}{text}'.encode()).hexdigest()
    return {'template': config[0], 'max_new_tokens': config[1], 'records': records, 'digest': digest}


def prompt_ids(text, encoding, room):
    """The ids of a prompt, its middle cut out where they are more than `room`, and how many they were."""
    whole = encoding.encode_ordinary(text)
    if len(whole) <= room:
        return whole, len(whole)
    half = room // 2
    ids = encoding.encode_ordinary(encoding.decode(whole[:half]) + encoding.decode(whole[-half:]))
    # as text the halves may have more tokens than before, such as where the cut went through a character
    return ids if len(ids) <= room else ids[:half] + ids[-half:], len(whole)


# ----------------------------------------------------------------------------- predictions on disk

def require_same(folder, made_with):
    """Raise ValueError if predictions in folder were made with other settings. made_with: {task: settings}."""
    path = folder / 'made_with.json'
    before = json.loads(path.read_text()) if path.is_file() else {}
    for task in made_with.keys() & before.keys():
        for key, value in made_with[task].items():
            if before[task][key] != value:
                raise ValueError(f'{folder}/{task}.jsonl was made with {key} {before[task][key]}, not {value}. Name '
                                 'this run with --label=, or remove that folder.')
    return before | made_with


def read_lines(folder, task):
    """The predictions that there are, of all ranks and of earlier runs: {index of the sample: line}."""
    lines = {}
    for path in (folder / f'{task}.jsonl', *sorted(folder.glob(f'{task}.rank*.jsonl'))):
        for text in path.read_text().split('\n') if path.is_file() else ():
            with contextlib.suppress(ValueError):  # of a line that a kill cut short, and of an empty one
                line = json.loads(text)
                lines[line['index']] = line
    return lines


def run_task(model, encoding, task, source, window, folder, runtime):
    """
    Predict and score the samples of a task that are not in folder yet. source: from read_task(). Returns for every
    sample its score, 0 to 1, and the tokens of its whole prompt: (n, 2), the same on every rank.
    """
    records, n_new = source['records'][:max_samples], source['max_new_tokens']
    lines, mine = read_lines(folder, task), runtime.mine(range(len(records)))
    batches = [mine[i:i + batch_size] for i in range(0, len(mine), batch_size)]
    batches = [batch for batch in batches if not set(batch) <= lines.keys()]  # the same as in a run without a stop
    if lines:
        runtime.print(f'{task}: {len(lines.keys() & set(range(len(records))))} of {len(records)} samples were there')
    eos, n_least = (encoding.eot_token,), 0
    if task == 'samsum':  # the benchmark's own exception: a summary is one line
        eos, n_least = (*eos, encoding.encode_ordinary('\n')[-1]), 1
    progress = Progress(len(batches), task, runtime.is_main)
    with open(folder / f'{task}.rank{runtime.rank}.jsonl', 'a', encoding='utf-8') as file:
        for done, batch in enumerate(batches, 1):
            prompts = [prompt_ids(source['template'].format(**records[i]), encoding, window - n_new) for i in batch]
            with runtime.autocast():
                new = complete(model, [ids for ids, _ in prompts], n_new, beams, eos, n_least)
            for i, ids, (_, n_tokens) in zip(batch, new, prompts):
                prediction = encoding.decode(ids)
                lines[i] = {'index': i, 'prediction': prediction, 'answers': records[i]['answers'],
                            'score': score(task, prediction, records[i]), 'prompt_tokens': n_tokens}
                file.write(f'\n{json.dumps(lines[i])}')  # the line end comes first: it also ends one that was cut short
            file.flush()
            progress.update(done)
    rows = runtime.gather([(lines[i]['score'], lines[i]['prompt_tokens']) for i in mine], len(records))
    if runtime.is_main:
        lines = read_lines(folder, task)
        write_text(folder / f'{task}.jsonl', ''.join(f'{json.dumps(lines[i])}\n' for i in sorted(lines)))
        for path in folder.glob(f'{task}.rank*.jsonl'):
            path.unlink()
    return rows


# ----------------------------------------------------------------------------- results

def print_table(result, runtime):
    """The scores in the layout of Table 3, and the paper's below."""
    rows = {f"{result['position_method']} {result['label']}".strip(): {k: v['score'] for k, v in result['tasks'].items()}}
    if result['paper']:
        rows[f'paper: {paper}'] = result['paper']
    width = max(map(len, rows))
    runtime.print(f'{"":{width}}     avg' + ''.join(f'{TASKS[task][0]:>6}' for task in result['tasks']))
    for name, scores in rows.items():
        scores = [scores[task] for task in result['tasks']]
        runtime.print(f'{name:{width}}  {np.mean(scores):6.2f}' + ''.join(f'{x:6.1f}' for x in scores))


def draw(result, path):
    """A bar a task, the paper's beside it; from the result's JSON alone."""
    figure, axis = new_figure(width=9.0)
    place = np.arange(len(result['tasks']))
    axis.bar(place - 0.2, [task['score'] for task in result['tasks'].values()], 0.4, label='measured')
    if result['paper']:
        axis.bar(place + 0.2, list(result['paper'].values()), 0.4, label=f"paper: {result['paper_row']}")
    axis.set_xticks(place, result['tasks'], rotation=45, ha='right')
    axis.set(ylabel='score (%)', title=f"{result['position_method']} {result['label']}".strip())
    axis.legend()
    save_png(figure, path)


def main():
    began, runtime = time.perf_counter(), setup(device, dtype, seed)
    chosen, table = tasks or list(TASKS), json.loads((ROOT / 'results/papers.json').read_text())['nope_table3']
    if not set(chosen) <= set(TASKS):
        raise ValueError(f"tasks is {chosen}. Choose from: {', '.join(TASKS)}.")
    if paper and paper not in table['rows']:
        raise ValueError(f"Table 3 has no row '{paper}'. Choose from: {', '.join(table['rows'])}.")
    if min(beams, batch_size, max_samples or 1) < 1:
        raise ValueError(f'beams {beams}, batch_size {batch_size} and max_samples {max_samples} must be at least 1.')
    sources = {task: read_task(Path(data), task) for task in chosen}
    model, info = checkpoint.load_model(init_from, out_dir, runtime.device, position, rope_scaling, runtime.dtype)
    scale_label = checkpoint.apply_scale(model, scale, info)
    encoding, window = tokenizer_from_state(info['tokenizer']), context or model.config.block_size
    longest = max(sources, key=lambda task: sources[task]['max_new_tokens'])
    if window < sources[longest]['max_new_tokens'] + 2:
        raise ValueError(f"A context of {window} tokens leaves {longest} no room for a prompt: its answers take "
                         f"{sources[longest]['max_new_tokens']}. Set a longer --context=, or choose other --tasks=.")
    name = label or scale_label
    stem = '_'.join(part for part in ('longbench', name) if part)
    folder = Path(out_dir, stem)
    folder.mkdir(parents=True, exist_ok=True)
    made_with = {'weights_digest': info['digest'], 'position': model.config.position,
                 'rope_scaling': model.config.rope_scaling, 'context': window, 'beams': beams,
                 'dtype': str(runtime.dtype).removeprefix('torch.'), 'scale': scale if not isinstance(scale, str) else
                 hashlib.sha256(Path(scale).read_bytes()).hexdigest()}
    made_with = require_same(folder, {task: made_with | {'data': sources[task]['digest']} for task in chosen})
    if runtime.is_main:
        save_json(folder / 'made_with.json', made_with)
    result = {'stage': 'longbench', 'label': name, 'position_method': model.config.position,
              'block_size': model.config.block_size, 'context': window, 'beams': beams, 'checkpoint': info['path'],
              'weights_digest': info['digest'], 'scale': scale, 'tasks': {}, 'paper_row': paper,
              'paper': {task: table['rows'][paper][table['columns'].index(task)] for task in chosen} if paper else {}}
    for task, source in sources.items():
        rows = run_task(model, encoding, task, source, window, folder, runtime)
        room = window - source['max_new_tokens']
        result['tasks'][task] = {'score': round(100 * rows[:, 0].mean(), 2), 'samples': len(rows),
                                 'prompt_tokens': room, 'prompts_cut': int((rows[:, 1] > room).sum()),
                                 'max_new_tokens': source['max_new_tokens']}
    result['average'] = round(np.mean([task['score'] for task in result['tasks'].values()]), 2)
    print_table(result, runtime)
    if runtime.is_main:
        save_json(Path(out_dir, f'{stem}.json'), result | provenance(settings(globals()), runtime,
                                                                    time.perf_counter() - began))
        draw(result, Path(out_dir, f'{stem}.png'))
        print(f'wrote {Path(out_dir, stem)}.json and .png')
    runtime.close()


if __name__ == '__main__':
    configure(globals())
    main()
