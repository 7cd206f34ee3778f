"""
HeadScale with a vector instead of a number: a softmax scale for each channel of each head. It is
tuned at 4L on the NoPE models of results/demo_bytes. Other small vectors and every weight are tuned
with the same tokens. A second question is what the channels with raised scales have in common.

$ python -m results.demo_bytes.table            # trains the models
$ python -m results.channel_scale.table   # 20 s and 1 minute of one core for a kind and a seed
$ python -m results.channel_scale.table --work=False   # table and picture of what was measured

A stopped run continues where it was. Writes results/channel_scale/channel_scale.json and .png
"""

import re
from pathlib import Path

import numpy as np
import torch

from configurator import configure
from demo import read
from entropy import spearman
from kernels import repeat_heads
from lib import figures
from lib.checkpoints import load_model, open_windows
from lib.errors import ROOT
from results import study

out_dir = 'out/demo_seeds'   # SEED/nope is a model
seeds = [1337, 1338, 1339]
n_samples = 256              # test windows of 6L tokens behind each loss
work = True                  # False: only show what was measured

L = 128
LENGTHS = [L, 2 * L, 4 * L, 6 * L]
RATE = 1e-3  # of every weight, the best of four in results/vectors_demo
# {what is shown: what tune_scale.py is given}
TUNED = {
    'scale per head': '--tune=scale',
    'scale per channel': '--tune=channel',
    'gains of attention norms': '--tune=attn_norm',
    'channel and all norms': '--tune=channel,norm',
    'gains of all norms': '--tune=norm',
    'channel and attention norms': '--tune=channel,attn_norm',
    'scale per head, rate 0.03': '--tune=scale:0.03',
    'scale per channel, rate 0.1': '--tune=channel:0.1',
}


# ---------------------------------------------------------------------- losses

def losses_of(folder, label, reading=''):
    """
    Two lists over LENGTHS: the loss in nats, a mean over the last 64 positions, and the loss with
    the context cut to L.
    """
    lengths = ','.join(map(str, LENGTHS))
    rows = study.evaluated(folder, 'position', label, f'--lengths=[{lengths}] '
                           f'--n_samples={n_samples} {study.PRECISION} {reading}')['rows']
    return [row['loss'] for row in rows], [row.get('cut_loss', row['loss']) for row in rows]


def result_of(folder, seed):
    """{what was tuned: losses_of() it} of one model. Tunes what is missing."""
    target, whole = 4 * L, Path(folder).with_name('whole')
    untuned = losses_of(folder, 'channel_study_none')
    uniform = read(f'{folder}/scale_uniform.json')
    best = dict(zip(uniform['lengths'], uniform['best_by_length']))[target]
    study.train(whole, f'config/finetune_demo.py --init_from={folder}/last.pt '
                       f'--learning_rate={RATE} --min_lr=0 --seed={seed}')
    found = {'NoPE': untuned, 'NoPE, cut to L': (untuned[1], untuned[1]),
             'uniform scale': losses_of(folder, 'channel_study_uniform', f'--scale={best}'),
             'every weight': losses_of(whole, 'channel_study_whole')}
    for name, arguments in TUNED.items():
        # The values of the arguments give the name of the file.
        label = '_'.join(['study', *re.findall(r'=(\S+)', arguments)]).replace(',', '_')
        path = f'{folder}/scale_head_{target}_{label}.json'
        study.made(path, f'tune_scale.py --out_dir={folder} --target_length={target} '
                         f'--label={label} --max_iters=120 --n_samples=16 '
                         f'{study.PRECISION} {arguments}')
        found[name] = losses_of(folder, f'channel_{label}', f'--scale={path}')
    return found


# ---------------------------------------------------------------------- what the channels share

def features(folder, n=8):
    """
    {name: (n_layer, H, D)} of the channels of a model as it was trained, from its weights and from
    n test windows of 4L tokens, of which the last L are queries. q_c k_c is the part of channel c
    of a score. Its lead: that part, weighted by attention to only the last L keys, minus the same
    for the keys before them.
    """
    model, info = load_model('last', folder, 'cpu')
    windows = open_windows(info, None, 'test', 4 * L)
    inputs = torch.from_numpy(windows.evenly_spaced(n)[:, :-1]).long()
    H, D = model.config.n_head, model.config.head_dim
    with torch.no_grad(), model.probe(lambda layer, attention, q, k, place: (q, k)) as seen:
        model(inputs)
    layers, T = [], 4 * L
    i, j = torch.arange(3 * L, T)[:, None], torch.arange(T)          # the last queries, all keys
    is_near = (j <= i) & (j > i - L)
    for block, (q, k) in zip(model.blocks, seen):
        k = repeat_heads(k, H)                                       # (n, H, 4L, D)
        w_q, w_k, _ = block.attn.qkv.weight.detach().split(
            [width * D for width in block.attn.head_counts])
        q, first, near, far = q[:, :, 3 * L:], k[:, :, :L], k[:, :, 3 * L:], k[:, :, :3 * L]
        power = q.square().mean((0, 2))                              # (H, D)
        scores = q @ k.transpose(-1, -2) / D ** 0.5                  # (n, H, L, 4L)
        attended = [scores.masked_fill(~keys, -torch.inf).softmax(-1) @ k
                    for keys in (is_near, j <= i - L)]               # (n, H, L, D) each
        layers.append({
            'norm of its row of W_q': w_q.norm(dim=1).view(H, D),
            'norm of its row of W_k': w_k.norm(dim=1).view(-1, D).repeat_interleave(
                H // block.attn.head_counts[1], dim=0),
            'variance of its part of far scores': power * far.var(dim=(0, 2)),
            'far variance over near': far.var(dim=(0, 2)) / near.var(dim=(0, 2)),
            'drift of its keys': ((near.mean((0, 2)) - first.mean((0, 2))).abs()
                                  / first.std(dim=(0, 2))),
            'lead of near keys over far ones': (q * (attended[0] - attended[1])).mean((0, 2)),
        })
    return {name: torch.stack([layer[name] for layer in layers]).numpy() for name in layers[0]}


def correlations(scales, found):
    """
    {feature: (n_layer,)}: its rank correlation with the scales over the channels of a head, a mean
    over the heads of a layer.
    """
    means = {}
    for name, values in found.items():
        means[name] = [np.mean([spearman(*head) for head in zip(*layer)])
                       for layer in zip(scales, values)]
    return means


# ---------------------------------------------------------------------- all of it

def over_seeds(values):
    """values: a list of numbers per seed."""
    return study.over_seeds(values) | {'each': values}


def collect():
    """The result. Measures what is missing."""
    losses, shared, spread, drawn = [], [], [], {}
    for seed in seeds:
        folder = f'{out_dir}/{seed}/nope'
        losses.append(result_of(folder, seed))
        tuned = read(f'{folder}/scale_head_{4 * L}_study_channel.json')
        scales, found = np.array(tuned['head_scale']), features(folder)
        shared.append(correlations(scales, found))
        spread.append([scales.mean(2).std(), scales.std(2).mean()])
        drawn = drawn or {'scale': scales} | found
    whole, gains = {}, {}
    for name in losses[0]:
        pairs = [one[name] for one in losses]
        whole[name] = over_seeds([loss for loss, _ in pairs])
        gains[name] = over_seeds([np.subtract(cut, loss).tolist() for loss, cut in pairs])
    return {
        'stage': 'channel_scale', 'block_size': L, 'target_length': 4 * L, 'lengths': LENGTHS,
        'seeds': seeds, 'losses': whole, 'gains': gains, 'spread': over_seeds(spread),
        'correlations': {name: over_seeds([one[name] for one in shared]) for name in shared[0]},
        'first_seed': drawn}


def print_result(result):
    losses = result['losses']
    cut = np.array(losses['NoPE, cut to L']['each'])
    gains = {name: study.over_seeds((cut - cell['each']).tolist()) for name, cell in losses.items()}
    print('Loss by length, tuned at', result['target_length'])
    study.print_lists(losses, LENGTHS)
    print('\nGain over the cut context of the untuned model')
    study.print_lists(gains, LENGTHS)
    print('\nOwn gain, over the cut context of the tuned model')
    study.print_lists(result['gains'], LENGTHS)
    print('\nStandard deviation of the scales')
    study.print_lists({'': result['spread']}, ['of the means of heads', 'within a head'], 2)
    print('\nRank correlation with the scales, within a head, by layer')
    layers = range(len(result['first_seed']['scale']))
    study.print_lists(result['correlations'], layers, 2)


SIX_COLORS = [figures.BLACK, figures.BLUE, figures.ORANGE, figures.SKY, '#117733', '#AA4499']


def draw(result):
    """The loss of each tuned model by length, and what the channel scales correlate with."""
    title = f"{len(result['seeds'])} NoPE models of bytes ({result['settings']['out_dir']}), " \
            f"tuned at {result['target_length']} tokens (bars: standard deviation)"
    figure, (left, right) = figures.panels(title, 2, 2)
    for name, row in list(result['losses'].items())[:figures.MOST]:
        figures.curve(left, LENGTHS, row['mean'], name, row['sd'])
    figures.length_axis(left, LENGTHS, L)
    left.set(xlabel='position (tokens)', ylabel='loss (nats per token)',
             title='Loss')
    layers = np.arange(len(next(iter(result['correlations'].values()))['mean']))
    for n, (name, row) in enumerate(result['correlations'].items()):  # side by side
        figures.curve(right, layers + 0.06 * n, row['mean'], name, row['sd'], SIX_COLORS[n])
    right.axhline(0, color=figures.BLACK, lw=1)
    right.set(xlabel='layer', xticks=layers, ylabel='rank correlation with the scale',
              title='Channels whose scale was raised')
    for axis in left, right:
        figures.label_ends(axis)
    return figure


if __name__ == '__main__':
    configure(globals())
    study.show(ROOT / 'results/channel_scale/channel_scale', collect, print_result, globals(), draw)
