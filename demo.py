"""
How far do small transformers read, and what helps? Three models read Python source: NoPE, its twin
with RoPE, and NoPE with a convolution over four tokens. Softmax scales were tuned for windows of
the length that they read. The demo draws their loss by position, and what they gain from text more
than L tokens back.

$ make look     # = python demo.py config/look.py: reads with the trained models of lessons/models
$ make demo     # = bash results/past_L/demo.sh: trains and tunes them first, then python demo.py

Writes out_dir/report.json and .png
"""

import itertools

from configurator import configure, settings

import numpy as np

from common import setup
from data import Windows
from repeats import cut_target_losses, find_targets, ratio_over_windows
from scales import set_scale
from stage import cut_losses, open_model, print_rows, write_result
from tokenizer import get_tokenizer, library_files

out_dir = 'out/demo_code'    # folder of the report
models = 'out/demo_code'     # folder of the trained models
dataset = 'code'             # a folder of data/, whose split test is read; '': the middles of files
                             # of Python's standard library
lengths: list[int] = [128, 256, 512]  # where to look at the loss, from L on; the last is that of
                             # the windows, and of the files of scales
n_samples = 40               # windows to read
targets = 400                # far repeats to score

READINGS = {  # {folder of a model: {title: the scales that it is read with}}
    'none': {'NoPE': None, 'NoPE, best uniform scale': 'scale_uniform',
             'NoPE, head scales': 'scale_head'},
    'rope': {'RoPE': None},
    'conv': {'NoPE + conv': None, 'NoPE + conv, head scales': 'scale_head'},
}
GRAM = 4             # this many tokens before a far repeat occurred before
TAIL = 64            # the loss at T is the mean over this many positions before T
BATCH_TOKENS = 8192  # in one forward pass


def text_to_read(info):
    """
    The windows that all models read, (n, T + 1) ids, where they are from, and how many reach into
    another document.
    """
    T, encoding = lengths[-1], get_tokenizer(info['tokenizer'])
    if dataset:
        data = Windows(dataset, 'test', T, info=info)
        return data.evenly_spaced(n_samples), f'data/{data.dataset}, test', data.crossing
    files = map(encoding.encode_ordinary, library_files().values())
    long = itertools.islice((ids for ids in files if len(ids) > T), n_samples)
    # T + 1 tokens from the middle of each
    middles = [ids[(len(ids) - T - 1) // 2:][:T + 1] for ids in long]
    return np.array(middles), 'the standard library', 0


def main():
    runtime, T = setup('cpu', 'float32'), lengths[-1]
    model, info = open_model(f'{models}/none', '', runtime)
    L = model.config.pretrained_length
    samples, source, crossing = text_to_read(info)
    window, t, *_ = find_targets(samples, L, GRAM, targets)
    readings, rows = {}, []
    for name, titles in READINGS.items():
        model, info = open_model(f'{models}/{name}', '', runtime)
        # without scales, the baseline of all readings of this model
        cut = [cut_losses(model, samples, n, TAIL, BATCH_TOKENS, runtime).mean() for n in lengths]
        far_cut = cut_target_losses(model, samples, window, t, BATCH_TOKENS, runtime)
        for title, scale in titles.items():
            if scale:  # in place of the scales of the title before
                set_scale(model, f'{models}/{name}/{scale}_{T}.json', info)
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
