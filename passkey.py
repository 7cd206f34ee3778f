"""
Passkey retrieval: a five-digit key hidden at some depth of a long filler text, over lengths and depths. Section 4.3 and
Figures 6, 8, 9 of "Length Generalization of Causal Transformers without Position Encoding"; the task is Mohtashami and
Jaggi's (2023), the texts those of the released run_pass.py of AntNLP/nope_head_scale.

$ python passkey.py --out_dir=out/passkey/nope --max_length=1024 --n_lengths=8
$ torchrun --nproc_per_node=8 passkey.py --out_dir=out/nope_1b --scale=out/nope_1b/scale_head_8192.json

Writes out_dir/passkey[_LABEL].json and .png; what is answered so far is in .jsonl, from where a stopped run goes on
"""

import json
import time
from pathlib import Path

import numpy as np

import checkpoint
from configurator import at_least, configure, settings
from corpus import start_token, tokenizer_from_state
from generate import complete
from runtime import Answers, method_name, new_figure, provenance, result_path, save_json, save_png, setup

# what to read
out_dir = 'out/demo/nope'    # the run to read; results go there too
init_from = 'last'           # last or best (of out_dir), a checkpoint file, a Hugging Face folder, or hf:ORG/NAME
position: str | None = None  # read the checkpoint with this position method; None: as it says
rope_scaling: str | None = None  # extend RoPE, such as yarn:4; None: as the checkpoint says
scale: float | str | None = None  # softmax scale: a number for all heads, or a scale file
# prompts
max_length: int | None = None  # the longest, in tokens; None: twice the window
n_lengths = 16               # max_length / 16, 2 max_length / 16 ... max_length
n_depths = 10                # the key stands in the first tenth of the tokens, the second ...
n_keys = 10                  # prompts for each length and depth
window: int | None = None    # accuracy up to here goes into the title; None: what the scales are tuned for, or L
protocol = 'exact'           # fillers are counted on the whole prompt, or piece by piece as released: paper
batch_tokens = 32768         # tokens of prompts read at once
label = ''                   # name of the result; empty: the scale's
# machine
device = 'auto'              # auto, cpu, cuda, mps
dtype = 'auto'               # auto, float32, bfloat16, float16
seed = 42                    # of keys and their places

TASK = ('There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you '
        'about the important information there.\n')
FILLER = ' The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.'
KEY = '\nThe pass key is {key}. Remember it. {key} is the pass key.\n'
QUESTION = '\nWhat is the pass key? The pass key is'


def draw_places(lengths, n_depths, n_keys, seed):
    """
    [(length, depth, place, key), ...]: where in the tokens each five-digit key should stand. As the released code draws
    them: lengths from the longest, depths from the start, in each cell all places, then all keys.
    """
    random, cells = np.random.RandomState(seed), []
    for length in sorted(lengths, reverse=True):
        for depth in range(n_depths):
            tenth = length // n_depths
            places = random.randint(depth * tenth, (depth + 1) * tenth, size=n_keys)
            keys = random.randint(10000, 100000, size=n_keys)
            cells += [(length, depth, place, key) for place, key in zip(places.tolist(), keys.tolist())]
    return cells


def build_prompt(encoding, length, place, key, protocol):
    """
    Ids of a prompt and of its answer, together at most `length` tokens, and the index of the token that the key line
    starts in. Raises ValueError if it cannot be that short.
    exact: the whole prompt, tokenized, is within one filler of the length, and the key line as near before `place`.
    paper: lengths of the pieces are added up, each tokenized alone, the key line's with the first token of a text.
    """
    def ids(text):
        return [start_token(encoding), *encoding.encode_ordinary(text)]

    line = KEY.format(key=key)
    answer = len(ids(f'{TASK}{line}{QUESTION} {key}')) - len(ids(TASK + line + QUESTION))
    budget, filler = length - answer, len(encoding.encode_ordinary(FILLER))
    task, question = len(ids(TASK)), len(encoding.encode_ordinary(QUESTION))
    place = min(max(place, task), budget - len(ids(line)) - question)
    before = max(0, (place - task) // filler)
    after = max(0, (budget - task - before * filler - len(ids(line)) - question) // filler)

    def prompt(before, after):
        return TASK + FILLER * before + line + FILLER * after + QUESTION

    if protocol == 'exact':  # the sums were a first guess
        while before and len(ids(TASK + FILLER * before)) > place:
            before -= 1
        while len(ids(TASK + FILLER * (before + 1))) <= place:
            before += 1
        while after and len(ids(prompt(before, after))) > budget:
            after -= 1
        while len(ids(prompt(before, after + 1))) <= budget:
            after += 1
    text = prompt(before, after)
    prompt_ids, whole = ids(text), ids(f'{text} {key}')
    if len(prompt_ids) > budget:
        raise ValueError(f'a prompt without filler has {len(ids(prompt(0, 0)))} tokens and its answer {answer}: the '
                         f'length {length} is too short. Raise max_length or lower n_lengths.')
    assert whole[:len(prompt_ids)] == prompt_ids, 'the answer changed the tokens of the prompt'
    ahead, start = TASK + FILLER * before, 1
    alone = ids(ahead)
    while start < len(alone) and prompt_ids[start] == alone[start]:  # the line may change the last tokens ahead of it
        start += 1
    while len(encoding.decode_bytes(prompt_ids[1:start + 1])) <= len(ahead.encode()):
        start += 1
    return prompt_ids, whole[len(prompt_ids):], start


def draw(result, path):
    """Figure 6: accuracy by length and depth; from the result's JSON alone."""
    figure, axis = new_figure(width=8.0, height=4.0)
    image = axis.imshow(np.array(result['accuracy']).T, vmin=0, vmax=1, cmap='RdYlGn', aspect='auto')
    lengths = result['lengths']
    axis.set_xticks(range(len(lengths)), [str(n) for n in lengths], rotation=45, ha='right')
    axis.set_yticks(range(result['n_depths']), [f'{d / result["n_depths"]:.0%}' for d in range(result['n_depths'])])
    axis.set(xlabel='length of the prompt (tokens)', ylabel='depth of the key')
    axis.grid(False)
    for T, style, name in ((result['block_size'], '-', 'L'), (result['window'], '--', 'window')):
        where = np.interp(T, lengths, range(len(lengths))) + 0.5
        if lengths[0] <= T < lengths[-1] and (name == 'L' or T != result['block_size']):
            axis.axvline(where, color='black', ls=style, lw=1.5)
            axis.annotate(f'{name} = {T}', (where, 1), xycoords=('data', 'axes fraction'), xytext=(3, 3),
                          textcoords='offset points', fontsize=8)
    name = f"{method_name(result['position_method'])} {result['label']}".strip()
    inside = result['accuracy_inside']
    axis.set_title(name + (f": {inside:.0%} up to {result['window']} tokens" if inside is not None else ''), pad=16)
    figure.colorbar(image, ax=axis, label='accuracy')
    save_png(figure, path)


def main():
    began, runtime = time.perf_counter(), setup(device, dtype, seed)
    if protocol not in ('exact', 'paper'):
        raise ValueError(f"protocol is '{protocol}'. Choose exact or paper.")
    at_least(1, globals(), 'max_length', 'n_lengths', 'n_depths', 'n_keys', 'window')
    model, info = checkpoint.load_model(init_from, out_dir, runtime.device, position, rope_scaling, runtime.dtype)
    scale_label = checkpoint.apply_scale(model, scale, info)
    name, L, encoding = label or scale_label, model.config.block_size, tokenizer_from_state(info['tokenizer'])
    tuned = json.loads(Path(scale).read_text()) if isinstance(scale, str) else {}
    reach = window or tuned.get('target_length') or max([L, *model.sets])
    longest = max_length or 2 * reach
    lengths = [longest * i // n_lengths for i in range(1, n_lengths + 1)]
    build_prompt(encoding, lengths[0], 0, 99999, protocol)  # if any cannot be made, this one cannot
    cells = draw_places(lengths, n_depths, n_keys, seed)

    stem = result_path(out_dir, 'passkey', name)
    made_with = checkpoint.identity(model, scale, info) | {
        'dtype': str(runtime.dtype), 'protocol': protocol, 'seed': seed, 'lengths': lengths, 'n_depths': n_depths,
        'n_keys': n_keys}
    answers = Answers(f'{stem}.jsonl', made_with, runtime)
    for batch in answers.batches(range(len(cells)), lambda i: cells[i][0], batch_tokens):
        prompts, wanted, starts = zip(*(build_prompt(encoding, length, place, key, protocol)
                                        for length, _, place, key in (cells[i] for i in batch)))
        with runtime.autocast():
            new = complete(model, prompts, max(map(len, wanted)), cache_dtype=runtime.dtype)
        for i, prompt, answer, start, ids in zip(batch, prompts, wanted, starts, new):
            length, depth, place, key = cells[i]
            answers.add(i, length=length, depth=depth, key=key, key_at=start, tokens=len(prompt),
                        answer=encoding.decode(ids[:len(answer)]), correct=ids[:len(answer)] == answer)
    rows = answers.finish()
    if runtime.is_main:
        accuracy = np.array([row['correct'] for row in rows], float).reshape(n_lengths, n_depths, n_keys)[::-1].mean(-1)
        inside = [row['correct'] for row in rows if row['length'] <= reach]
        result = {'stage': 'passkey', 'label': name, 'position_method': model.config.position, 'block_size': L,
                  'window': reach, 'lengths': lengths, 'n_depths': n_depths, 'accuracy': accuracy,
                  'accuracy_inside': float(np.mean(inside)) if inside else None, 'accuracy_of_all': accuracy.mean(),
                  'checkpoint': info['path'], 'weights_digest': info['digest'], 'scale': scale,
                  'answers': {'columns': list(rows[0]), 'rows': [list(row.values()) for row in rows]}}
        print('  length   accuracy')
        for length, row in zip(lengths, accuracy):
            print(f'{length:8d} {row.mean():10.0%}')
        up_to = f"up to {reach} tokens {result['accuracy_inside']:.1%}, " if inside else ''
        print(f"{up_to}of all {result['accuracy_of_all']:.1%}")
        result |= provenance(settings(globals()), runtime, time.perf_counter() - began)
        draw(save_json(f'{stem}.json', result), f'{stem}.png')
        print(f'wrote {stem}.json and .png')
    runtime.close()


if __name__ == '__main__':
    configure(globals())
    main()
