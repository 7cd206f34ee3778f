"""
How far do small transformers read, and what helps? Three models read Python source: NoPE, its twin
with RoPE, and NoPE with a convolution over four tokens. Softmax scales are tuned for windows of the
length that they read. The demo draws their loss by position, and what they gain from text more than
L tokens back. To save time, only the model with the convolution, which must learn to copy, is
trained for 4,000 steps; the other two fail past L after fewer. results/past_L trains all alike.

$ make look     # = python demo.py config/look.py: reads with the trained models of lessons/models
$ make demo     # = python demo.py: trains and tunes them first; 10 minutes on two cores

The stages that train and tune run as commands, which can also be run alone. Started again, the demo
goes on where it was stopped. Writes out_dir/report.json and .png
"""

import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from configurator import ROOT, UserError, configure, settings

import numpy as np
import torch

from common import setup
from data import Windows
from repeats import cut_target_losses, find_targets, ratio_over_windows
from scales import set_scale
from stage import cut_losses, open_model, print_rows, write_result
from tokenizer import get_tokenizer, library_files

out_dir = 'out/demo_code'    # folder of the report; the trained models go there, too
models = ''                  # folder of trained models, to read Python's standard library with;
                             # '': train them in out_dir, and read the split test of data/code
lengths: list[int] = [128, 256, 512]  # where to look at the loss, from L on; the last is that of
                             # the windows, and the scales are tuned for it
n_samples = 40               # windows to read
targets = 400                # far repeats to score
train_args = ''              # more settings for train.py, such as '--seed=1338 --n_layer=2'

TRAIN = 'train.py config/code.py --batch_size=8 --micro_batch_size=8'
UNIFORM = 'tune_scale.py --n_samples=32 --method=uniform --candidate_range=[0.6,2.4,0.1]'
HEADS = ('tune_scale.py --tune=head_scale:0.1 --init_scale=1.0 --min_scale=None '
         '--max_iters=60 --warmup_iters=10')
READINGS = {  # {folder of a model: {title: the scales that it is read with}}
    'none': {'NoPE': None, 'NoPE, best uniform scale': 'scale_uniform',
             'NoPE, head scales': 'scale_head'},
    'rope': {'RoPE': None},
    'conv': {'NoPE + conv': None, 'NoPE + conv, head scales': 'scale_head'},
}
GRAM = 4             # this many tokens before a far repeat occurred before
TAIL = 64            # the loss at T is the mean over this many positions before T
BATCH_TOKENS = 8192  # in one forward pass


# ---------------------------------------------------------------------- train and tune

def lanes():
    """
    Two lists of (file, command that writes it); loss.png is the last file that a training writes.
    The lists run side by side with half of the cores each, because models this small use two cores
    badly: one after the other takes 18 % longer.
    """
    T = lengths[-1]
    return [
        [('conv/loss.png', f'{TRAIN} --short_conv=4 --max_iters=4000 {train_args}'),
         (f'conv/scale_head_{T}.json', f'{HEADS} --target_length={T}')],
        [('none/loss.png', f'{TRAIN} --max_iters=2400 {train_args}'),
         (f'none/scale_uniform_{T}.json', f'{UNIFORM} --target_length={T} --label={T}'),
         (f'none/scale_head_{T}.json', f'{HEADS} --target_length={T}'),
         ('rope/loss.png', f'{TRAIN} --position=rope --max_iters=1200 {train_args}')],
    ]


def run(name, command):
    """Run a stage as a user would. Each line that it prints begins with a name."""
    print(f'{name} | $ python {command}', flush=True)
    stage, *arguments = command.split()
    child = subprocess.Popen([sys.executable, '-u', ROOT / stage, *arguments], text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    for line in child.stdout:
        print(f'{name} | {line}', end='', flush=True)
    if child.wait():
        raise UserError(f'python {command} failed. Its message is above.')


def run_lane(lane):
    """Run the commands of a lane whose files are not there. A training that was stopped goes on."""
    for file, command in lane:
        folder = Path(out_dir, file).parent
        if 'train.py' in command and (folder / 'last.pt').exists():
            command += ' --init_from=resume'
        if not Path(out_dir, file).exists():
            run(folder.name, f'{command} --out_dir={folder}')


def train_and_tune():
    """Prepare the text, and run the lanes."""
    args = Path(out_dir, 'train_args.txt')  # of the models that are there
    if args.exists() and args.read_text() != train_args:
        raise UserError(f'{out_dir} is for other train_args. Choose another --out_dir=.')
    args.parent.mkdir(parents=True, exist_ok=True)
    args.write_text(train_args)
    if not (ROOT / 'data/code/meta.json').exists():
        run('data', 'data/code/prepare.py')
    os.environ['OMP_NUM_THREADS'] = str(max(1, torch.get_num_threads() // 2))  # of the commands
    with ThreadPoolExecutor() as pool:  # after Ctrl-C it waits, because train.py saves
        list(pool.map(run_lane, lanes()))


# ---------------------------------------------------------------------- read

def text_to_read(info):
    """
    The windows that all models read, (n, T + 1) ids, where they are from, and how many reach into
    another document.
    """
    T, encoding = lengths[-1], get_tokenizer(info['tokenizer'])
    if not models:
        data = Windows(info['settings']['dataset'], 'test', T, info=info)
        return data.evenly_spaced(n_samples), f'data/{data.dataset}, test', data.crossing
    files = map(encoding.encode_ordinary, library_files().values())
    long = itertools.islice((ids for ids in files if len(ids) > T), n_samples)
    middles = [ids[(len(ids) - T - 1) // 2:][:T + 1] for ids in long]
    return np.array(middles), 'the standard library', 0


def main():
    if not models:
        train_and_tune()
    runtime, folder, T = setup('cpu', 'float32'), models or out_dir, lengths[-1]
    model, info = open_model(f'{folder}/none', '', runtime)
    L = model.config.pretrained_length
    samples, source, crossing = text_to_read(info)
    window, t, *_ = find_targets(samples, L, GRAM, targets)
    readings, rows = {}, []
    for name, titles in READINGS.items():
        model, info = open_model(f'{folder}/{name}', '', runtime)
        # without scales, the baseline of all readings of this model
        cut = [cut_losses(model, samples, n, TAIL, BATCH_TOKENS, runtime).mean() for n in lengths]
        far_cut = cut_target_losses(model, samples, window, t, BATCH_TOKENS, runtime)
        for title, scale in titles.items():
            if scale:
                set_scale(model, f'{folder}/{name}/{scale}_{T}.json', info)
            losses = runtime.over_windows(samples, BATCH_TOKENS, model, title)
            curve = [losses[:, max(0, n - TAIL):n].mean() for n in range(1, T + 1)]
            at = {n: {'loss': curve[n - 1], 'cut_loss': cut_loss}
                  for n, cut_loss in zip(lengths, cut)}
            gains = far_cut - losses[window, t - 1]  # token t is predicted at position t - 1
            gain, error = ratio_over_windows(gains, np.ones(len(t)), window)
            readings[title] = {'at': at, 'curve': curve, 'far': {'gain': gain, 'gain_error': error}}
            rows.append({'': title, **{f'loss at {n}': at[n]['loss'] for n in lengths},
                         'gain': gain, '±': error})

    print(f'\n{len(samples)} windows of {source}. Loss: nats per token, mean of the last {TAIL} '
          f'tokens at each length.\nGain: at {len(t)} tokens where text repeats from more than {L} '
          'tokens back, how much lower the loss is\nthan that of the untuned model that sees only '
          f'the last {L} tokens.\n')
    print_rows(print, rows)
    write_result(f'{out_dir}/report', {
        'L': L, 'lengths': lengths, 'tail': TAIL, 'source': source, 'windows': len(samples),
        'crossing': crossing, 'readings': readings}, settings(globals()), runtime)


if __name__ == '__main__':
    configure(globals())
    main()
