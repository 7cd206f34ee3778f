"""
How far do small transformers read, and what helps? Three models read Python source: NoPE, its twin
with RoPE, and NoPE with a convolution over four tokens. Softmax scales are tuned for windows of the
length that they read. The demo draws their loss by position, and what they gain from text more than
L tokens back.

$ make look     # = python demo.py config/look.py: reads with the trained models of lessons/models
$ make demo     # = python demo.py: trains and tunes them first; 15 minutes on two cores

The stages that train and tune run as commands, which can also be run alone, two models side by
side. Started again, the demo goes on where it was stopped. Writes out_dir/report.json and .png
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path

from configurator import ROOT, UserError, configure, settings

import numpy as np
import torch

from common import setup
from data import Windows
from eval_ppl import gain_of, summary
from repeats import cut_target_losses, find_targets, row_of
from stage import cut_losses, losses_by_position, open_model, print_rows, set_scale, write_result
from tokenizer import get_tokenizer, library_files

out_dir = 'out/demo_code'    # folder of the report; the trained models go there, too
models = ''                  # folder of trained models, to read Python's standard library with;
                             # '': train them in out_dir, and read the split test of data/code
lengths: list[int] = [128, 256, 512]  # where to look at the loss, from L on; the last is that of
                             # the windows, and the scales are tuned for it
n_samples = 40               # windows to read
targets = 400                # far repeats to score
train_args = ''              # more settings for train.py, such as '--seed=1338 --n_layer=2'

# {model: its name, settings of train.py, and the scales that it gets}. NoPE with the convolution
# needs the most steps until it reads past L.
MODELS = {
    'none': ('NoPE', '--max_iters=3000', ['uniform', 'head']),
    'rope': ('RoPE', '--position=rope --max_iters=1500', []),
    'conv': ('NoPE + conv', '--short_conv=4 --max_iters=4500', ['head']),
}
# {scales: their name, and settings of tune_scale.py}
SCALES = {
    'uniform': ('best uniform scale', '--method=uniform --candidate_range=[0.6,2.4,0.1]'),
    'head': ('head scales', '--tune=head_scale:0.1 --init_scale=1.0 --min_scale=None '
                            '--max_iters=60 --warmup_iters=10'),
}
GRAM = 4             # this many tokens before a far repeat occurred before
TAIL = 64            # the loss at T is the mean over this many positions before T
BATCH_TOKENS = 8192  # in one forward pass


# ---------------------------------------------------------------------- train and tune

def run(lane, command):
    """Run a stage as a user would. Each line that is printed begins with the lane's name."""
    print(f'{lane:>5} | $ python {command}', flush=True)
    stage, *arguments = command.split()
    child = subprocess.Popen([sys.executable, ROOT / stage, *arguments], text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    for line in child.stdout:
        print(f'{lane:>5} | {line}', end='', flush=True)
    if child.wait():
        raise UserError(f'python {command} failed. Its message is above.')


def scale_file(model, scales):
    """The path of a model's scales. scales: uniform or head."""
    name = f'head_{lengths[-1]}' if scales == 'head' else scales
    return Path(models or out_dir, model, f'scale_{name}.json')


def train_and_tune(model):
    """Run the stages of a model, but those that have finished before."""
    folder, (_, settings_of_model, kinds) = Path(out_dir, model), MODELS[model]
    if not (folder / 'loss.png').exists():  # train.py draws it last
        resume = '--init_from=resume' if (folder / 'last.pt').exists() else ''
        run(model, f'train.py config/code.py {settings_of_model} --batch_size=8 '
                   f'--micro_batch_size=8 --out_dir={folder} {train_args} {resume}')
    for scales in kinds:
        if not scale_file(model, scales).exists():
            run(model, f'tune_scale.py --out_dir={folder} --target_length={lengths[-1]} '
                       f'--n_samples=32 {SCALES[scales][1]}')


# ---------------------------------------------------------------------- read

def text_to_read(info):
    """The windows that all models read, (n, T + 1) ids, and where they are from."""
    T = lengths[-1]
    if not models:
        data = Windows(info['settings']['dataset'], 'test', T, info=info)
        return data.evenly_spaced(n_samples), f"{data.dataset} ({data.meta.get('source')}), test"
    encoded = map(get_tokenizer(info['tokenizer']).encode_ordinary, library_files().values())
    long = (ids for ids in encoded if len(ids) > T)
    middles = [ids[(len(ids) - T - 1) // 2:][:T + 1] for ids in islice(long, n_samples)]
    return np.array(middles), 'the standard library'


def main():
    if not models:
        threads = max(1, torch.get_num_threads() // 2)
        os.environ |= {'OMP_NUM_THREADS': str(threads), 'PYTHONUNBUFFERED': '1'}  # of the stages
        if not (ROOT / 'data/code/meta.json').exists():
            run('data', 'data/code/prepare.py')
        with ThreadPoolExecutor(2) as pool:  # after Ctrl-C it waits, because train.py saves
            list(pool.map(train_and_tune, reversed(MODELS)))

    runtime = setup('cpu', 'float32')
    opened = {name: open_model(f'{models or out_dir}/{name}', '', runtime) for name in MODELS}
    samples, source = text_to_read(opened['none'][1])
    L = opened['none'][0].config.pretrained_length
    window, t, _, _, n_found = find_targets(samples, L, GRAM, targets)
    readings, rows, differences, before = {}, [], [], None
    for name, (model, info) in opened.items():
        # The baseline is the untuned model, if it sees only the last L tokens.
        cut = {n: cut_losses(model, samples, n, TAIL, BATCH_TOKENS, runtime) for n in lengths[1:]}
        far_cut = cut_target_losses(model, samples, window, t, BATCH_TOKENS, runtime)
        for scales in ['', *MODELS[name][2]]:
            title = MODELS[name][0]
            if scales:
                title += f', {SCALES[scales][0]}'
                set_scale(model, scale_file(name, scales), info)
            losses = runtime.over_windows(samples, BATCH_TOKENS, partial(losses_by_position, model),
                                          title)
            at = {}
            for n in lengths:
                own = losses[:, n - TAIL:n].mean(1)
                at[n] = summary(own) | (gain_of(own, cut[n]) if n in cut else {})
            if scales:  # against the reading before: with the scales above, or as trained
                gained = gain_of(own, before)
                differences.append({'a': rows[-1][''], 'b': title, 'difference': gained['gain'],
                                    'standard_error': gained['gain_error']})
            before = own
            curve = [losses[:, max(0, n - TAIL):n].mean() for n in range(1, lengths[-1] + 1)]
            far = row_of('far repeats', t > 0, window, losses[window, t - 1], far_cut)
            scale = [model.head_scale.min().item(), model.head_scale.max().item()]
            readings[title] = {'at': at, 'scale': scale, 'curve': curve, 'far': far}
            rows.append({'': title, **{f'at {n}': row['loss'] for n, row in at.items()},
                         'gain': far['gain'], '±': far['gain_error'], 'least scale': scale[0],
                         'largest': scale[1]})

    print(f'\n{len(samples)} windows of {source}. Loss in nats per token, mean of {TAIL} positions '
          f'before each length. Gain at {len(t)} far repeats, over the untuned model with only the '
          f'last {L} tokens.\n')
    print_rows(print, rows)
    report = {'L': L, 'lengths': lengths, 'tail': TAIL, 'source': source, 'windows': len(samples),
              'far_found': n_found, 'far_targets': len(t), 'readings': readings,
              'differences': differences}
    write_result(f'{out_dir}/report', report, settings(globals()), runtime)


if __name__ == '__main__':
    configure(globals())
    main()
