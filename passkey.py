"""
Passkey retrieval: the model must repeat a five-digit key that is hidden in a long filler text. The
stage measures accuracy by length of the text and by depth of the key. Section 4.3 and Figures 6, 8
and 9 of "Length Generalization of Causal Transformers without Position Encoding". The task is from
Mohtashami and Jaggi (2023). The texts are from the released run_pass.py of AntNLP/nope_head_scale.

$ python train.py config/passkey_nope.py                              # a model that finds passkeys
$ python passkey.py --out_dir=out/passkey/nope --max_length=1024 --n_lengths=8
$ python passkey.py --out_dir=out/nope_1b --scale=out/nope_1b/scale_head_8192.json

Writes out_dir/passkey[_LABEL].json and .png. Each answer is a line in the folder beside them,
passkey[_LABEL]/; a stopped run continues from there
"""

from configurator import UserError, configure, settings

import numpy as np

from common import setup
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
# prompts
max_length: int | None = None  # longest prompt in tokens; None: twice the scales' target, or 2L
n_lengths = 16               # number of lengths, evenly spaced up to max_length
n_depths = 10                # number of equal parts of a prompt; the key stands in one of them
n_keys = 10                  # prompts for each length and depth
hint = 0                     # tokens of the answer that end the prompt: 1 is the space, if that is
                             # a token. A model may know the key and yet begin with a word
batch_tokens = 32768         # tokens that the model reads at once, of prompts of one length
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


def build_prompt(encoding, length, place, key):
    """
    The ids of a prompt and of its answer. Together they have at most `length` tokens, and less than
    a filler would fit in. The key line starts at most one filler before `place`, but after the task
    and one filler, and early enough for the question. Raises UserError if the length is too short.
    The released code counts the tokens of each piece alone. A filler may have 25 tokens alone and
    24 after another, so its prompts are a few percent shorter.
    """
    def ids(text):
        return [start_token(encoding), *encoding.encode_ordinary(text)]

    def whole(before, after):
        """The ids with so many fillers before and after the key line; less than 0: none."""
        return ids(TASK + FILLER * before + line + FILLER * after + QUESTION + answer)

    line, answer = KEY.format(key=key), f' {key}'
    filler = len(ids(FILLER * 2)) - len(ids(FILLER))   # tokens of one that follows another
    # + 1, because each ids() counts a start token
    last = length - len(ids(line)) - len(ids(QUESTION + answer)) + 1  # latest start of the key line
    # If the task and one filler have 60 tokens and each further one 24, then before place 200 there
    # is room for (200 - 60) // 24 = 5 further ones.
    before = 1 + (min(place, last) - len(ids(TASK + FILLER))) // filler
    after = 1 + (length - len(whole(before, 1))) // filler
    prompt = whole(before, after)
    if len(prompt) > length:
        raise UserError(f'a prompt without filler and its answer have {len(whole(0, 0))} tokens, '
                        f'so the length {length} is too short. Give longer ones: a larger '
                        '--max_length=, or fewer --n_lengths=.')
    n_answer = len(ids(QUESTION + answer)) - len(ids(QUESTION))
    return prompt[:-n_answer], prompt[-n_answer:]


def main(given):
    runtime = setup(device, dtype)
    model, info = open_model(init_from, out_dir, runtime, position, rope_scaling, scale)
    store_column_major(model)
    encoding = get_tokenizer(info['tokenizer'])
    path = result_path(results_folder(out_dir, init_from, given), 'passkey', label, info)
    longest = max_length or 2 * info['tuned_length']
    lengths = [longest * i // n_lengths for i in range(1, n_lengths + 1)]
    build_prompt(encoding, lengths[0], 0, 99999)  # to learn now if this length is too short
    cells = draw_cells(lengths, n_depths, n_keys, seed)

    def answer(items):
        """Ask the model for the keys of some cells. items: their numbers in cells."""
        asked = [cells[i] for i in items]
        prompts, answers = [], []
        for length, _, place, key in asked:
            prompt, right = build_prompt(encoding, length, place, key)
            if encoding.decode(right[:hint]).strip():
                raise UserError(f'hint is {hint}, which gives a part of the key away.')
            prompts.append(prompt + right[:hint])
            answers.append(right[hint:])
        with runtime.autocast():
            written = complete(model, prompts, max(map(len, answers)))
        rows = []
        for (length, depth, _, key), right, ids in zip(asked, answers, written):
            ids = ids[:len(right)]
            rows.append({'length': length, 'depth': depth, 'key': key,
                         'answer': encoding.decode(ids), 'correct': ids == right})
        return rows

    about = identity(model, info), runtime.dtype, seed, lengths, n_depths, n_keys, hint
    sizes = [length for length, *_ in cells]
    rows = answer_all(path, about, sizes, batch_tokens, answer, runtime)

    correct = np.array([row['correct'] for row in rows], float)
    # [::-1], because the cells begin with the longest length
    accuracy = correct.reshape(n_lengths, n_depths, n_keys)[::-1].mean(-1)
    print_rows(runtime.print, [{'length': length, 'accuracy': row.mean()}
                               for length, row in zip(lengths, accuracy)])
    runtime.print(f'of all {accuracy.mean():.1%}')
    write_result(path, {'lengths': lengths, 'n_depths': n_depths, 'accuracy': accuracy,
                        'accuracy_of_all': accuracy.mean()}, settings(globals()), runtime, info)


if __name__ == '__main__':
    main(configure(globals()))
