"""
Passkey retrieval: the model must repeat a five-digit key that is hidden in a long filler text. The
stage measures accuracy by length of the text and by depth of the key. Section 4.3 and Figures 6, 8
and 9 of "Length Generalization of Causal Transformers without Position Encoding". The task is from
Mohtashami and Jaggi (2023). The texts are from the released run_pass.py of AntNLP/nope_head_scale.

$ python train.py config/passkey_nope.py                              # a model that finds passkeys
$ python passkey.py --out_dir=out/passkey/nope --max_length=1024 --n_lengths=8
$ python passkey.py --out_dir=out/nope_1b --scale=out/nope_1b/scale_head_8192.json

Writes out_dir/passkey[_LABEL].json and .png. The .jsonl beside them holds the answers so far; a
stopped run continues from it
"""

import bisect

from configurator import UserError, configure, settings

import numpy as np

from common import setup
from generate import answer_all, complete, identity, store_column_major
from scales import read_scale_file
from stage import (
    open_model,
    print_rows,
    result_path,
    results_folder,
    write_result,
)
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
# prompts
max_length: int | None = None  # longest prompt in tokens; None: twice the scales' target, or 2L
n_lengths = 16               # number of lengths, evenly spaced up to max_length
n_depths = 10                # number of equal parts of a prompt; the key stands in one of them
n_keys = 10                  # prompts for each length and depth
protocol = 'exact'           # exact: count tokens of the whole prompt; paper: of each piece alone
batch_tokens = 32768         # tokens of prompts that the model reads at once
seed = 42                    # draws the keys and their places

TASK = ('There is an important info hidden inside a lot of irrelevant text. Find it and memorize '
        'them. I will quiz you about the important information there.\n')
FILLER = (' The grass is green. The sky is blue. The sun is yellow. Here we go. '
          'There and back again.')
KEY = '\nThe pass key is {key}. Remember it. {key} is the pass key.\n'
QUESTION = '\nWhat is the pass key? The pass key is'


def draw_cells(lengths, n_depths, n_keys, seed):
    """
    [(length, depth, place, key), ...]. place: the index of the token at which the line with the key
    should begin. The draws have the order of the released code: from the longest length, from the
    smallest depth, and in each cell all places before all keys.
    """
    random, cells = np.random.RandomState(seed), []
    for length in sorted(lengths, reverse=True):
        part = length // n_depths
        for depth in range(n_depths):
            places = random.randint(depth * part, (depth + 1) * part, size=n_keys)
            keys = random.randint(10000, 100000, size=n_keys)
            for place, key in zip(places.tolist(), keys.tolist()):
                cells.append((length, depth, place, key))
    return cells


def most(n, fits):
    """The largest number that fits, at least 0. n: a first guess."""
    while n and not fits(n):
        n -= 1
    while fits(n + 1):
        n += 1
    return n


def build_prompt(encoding, length, place, key, protocol):
    """
    Returns the ids of a prompt, the ids of its answer, and the index of the token in which the key
    line starts. Prompt and answer have at most `length` tokens together. Raises UserError if they
    cannot be that short.
    exact: counts the tokens of the whole prompt. The prompt is at most one filler shorter than
           allowed, and the key line starts at most one filler before `place`.
    paper: tokenizes each piece alone and adds up the lengths. The length of the key line includes
           the start token of a text.
    """
    def ids(text):
        return [start_token(encoding), *encoding.encode_ordinary(text)]

    def prompt(before, after):
        return TASK + FILLER * before + line + FILLER * after + QUESTION

    line = KEY.format(key=key)
    pieces = TASK, line, FILLER, QUESTION, f'{QUESTION} {key}'
    task, key_line, filler, question, answered = [len(ids(text)) for text in pieces]
    filler, question, answered = filler - 1, question - 1, answered - 1  # without the start token
    budget = length - (answered - question)
    place = min(max(place, task), budget - key_line - question)
    before = max(0, (place - task) // filler)
    after = max(0, (budget - task - before * filler - key_line - question) // filler)
    if protocol == 'exact':  # the sums of the pieces are only a first guess
        before = most(before, lambda n: len(ids(TASK + FILLER * n)) <= place)
        after = most(after, lambda n: len(ids(prompt(before, n))) <= budget)
    text = prompt(before, after)
    prompt_ids, whole = ids(text), ids(f'{text} {key}')
    if len(prompt_ids) > budget:
        raise UserError(f'a prompt without filler has {len(ids(prompt(0, 0)))} tokens and its '
                        f'answer {length - budget}, so the length {length} is too short.')
    if whole[:len(prompt_ids)] != prompt_ids:
        raise UserError('in this tokenizer an answer changes the tokens of the text before it. '
                        'Choose a tokenizer that starts a token at each space.')

    # Count bytes, because the key line may change the last tokens before it. The key line starts in
    # the first token that ends after the last byte of the text before it.
    ahead = len((TASK + FILLER * before).encode())
    start = bisect.bisect(range(len(prompt_ids)), ahead,
                          key=lambda n: len(encoding.decode_bytes(prompt_ids[1:n + 1])))
    return prompt_ids, whole[len(prompt_ids):], start


def main(given):
    if protocol not in ('exact', 'paper'):
        raise UserError(f"protocol is '{protocol}'. Choose exact or paper.")
    runtime = setup(device, dtype)
    model, info = open_model(init_from, out_dir, runtime, position, rope_scaling, scale)
    store_column_major(model)
    encoding = get_tokenizer(info['tokenizer'])
    path = result_path(results_folder(out_dir, init_from, given), 'passkey', label, info)
    window = model.config.block_size
    if isinstance(scale, str):
        window = max(read_scale_file(scale, model, info)[1])  # the longest that it is tuned for
    longest = max_length or 2 * window
    lengths = [longest * i // n_lengths for i in range(1, n_lengths + 1)]
    build_prompt(encoding, lengths[0], 0, 99999, protocol)  # now, if this is too short
    cells = draw_cells(lengths, n_depths, n_keys, seed)

    def answer(items):
        """Ask the model for the keys of some cells."""
        rows, prompts = {}, {}
        for i in items:
            length, _, place, key = cells[i]
            prompts[i] = build_prompt(encoding, length, place, key, protocol)
        for n in {len(right) for _, right, _ in prompts.values()}:
            chosen = [i for i in items if len(prompts[i][1]) == n]
            with runtime.autocast():
                written = complete(model, [prompts[i][0] for i in chosen], n)
            for i, ids in zip(chosen, written):
                (length, depth, _, key), (prompt, right, start) = cells[i], prompts[i]
                rows[i] = {'length': length, 'depth': depth, 'key': key, 'key_at': start,
                           'tokens': len(prompt), 'answer': encoding.decode(ids),
                           'correct': ids == right}
        return [rows[i] for i in items]

    about = {'model': identity(model, info, scale), 'dtype': str(runtime.dtype), 'seed': seed,
             'protocol': protocol, 'lengths': lengths, 'n_depths': n_depths, 'n_keys': n_keys}
    rows = answer_all(path, about, [length for length, *_ in cells], batch_tokens, answer, runtime)

    correct = np.array([row['correct'] for row in rows], float)
    accuracy = correct.reshape(n_lengths, n_depths, n_keys)[::-1].mean(-1)
    inside = accuracy[np.array(lengths) <= window]
    print_rows(runtime.print, [{'length': length, 'accuracy': row.mean()}
                               for length, row in zip(lengths, accuracy)])
    runtime.print(f'of all {accuracy.mean():.1%}')
    write_result(path, {
        'window': window, 'lengths': lengths, 'n_depths': n_depths, 'accuracy': accuracy,
        'accuracy_inside': inside.mean() if len(inside) else None,
        'accuracy_of_all': accuracy.mean(),
        'answers': {'columns': list(rows[0]), 'rows': [list(row.values()) for row in rows]},
    }, settings(globals()), runtime, info)


if __name__ == '__main__':
    main(configure(globals()))
