"""
HeadScale with a vector instead of a number: a softmax scale for each channel of each head, tuned at
4L beside other small vectors and every weight, all with the same tokens, on the NoPE models of
results/demo; and what the channels whose scale was raised have in common.

$ python -m results.demo.table            # first, for the models
$ python -m results.channel_scale.table   # 20 s and 1 minute of one core for a kind and a seed

Goes on where it was stopped. Writes results/channel_scale/channel_scale.json and .png
"""

import re
import time
from pathlib import Path

import numpy as np
import torch

from configurator import configure, settings
from demo import read, run
from entropy import spearman
from lib import plots
from lib.checkpoints import load_model, open_windows
from lib.devices import setup
from lib.errors import ROOT

out_dir = 'out/demo_seeds'   # SEED/nope is a model
seeds = [1337, 1338, 1339]
n_samples = 256              # test windows of 6L tokens behind each loss

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

def losses_of(folder, label, *reading):
    """{length: loss in nats, mean of the last 64 positions}, and those of the context cut to L."""
    path = Path(folder, f'eval_ppl_position_{label}.json')
    if not path.exists():
        lengths = f'--lengths={LENGTHS}'.replace(' ', '')
        run('eval_ppl.py', f'--out_dir={folder}', f'--label={label}', '--protocol=position',
            lengths, f'--n_samples={n_samples}', *reading)
    rows = read(path)['rows']
    return ({row['length']: row['loss'] for row in rows},
            {row['length']: row.get('cut_loss', row['loss']) for row in rows})


def measure(folder, seed):
    """{what was tuned: what losses_of() gives} of one model. Tunes what is not there yet."""
    target, found = 4 * L, {}
    found['NoPE'] = losses_of(folder, 'channel_study_none')
    found['NoPE, cut to L'] = found['NoPE'][1], found['NoPE'][1]
    uniform = read(f'{folder}/scale_uniform.json')
    best = dict(zip(uniform['lengths'], uniform['best_by_length']))[target]
    found['uniform scale'] = losses_of(folder, 'channel_study_uniform', f'--scale={best}')
    whole = str(Path(folder).with_name('whole'))
    if not Path(whole, 'loss.png').exists():
        run('train.py', 'config/finetune_demo.py', f'--init_from={folder}/last.pt',
            f'--out_dir={whole}', f'--learning_rate={RATE}', '--min_lr=0', f'--seed={seed}')
    found['every weight'] = losses_of(whole, 'channel_study_whole')
    for name, arguments in TUNED.items():
        # Files are named after the values given.
        label = '_'.join(['study', *re.findall(r'=(\S+)', arguments)]).replace(',', '_')
        file = f'{folder}/scale_head_{target}_{label}.json'
        if not Path(file).exists():
            run('tune_scale.py', f'--out_dir={folder}', f'--target_length={target}',
                f'--label={label}', '--max_iters=120', '--n_samples=16', *arguments.split())
        found[name] = losses_of(folder, f'channel_{label}', f'--scale={file}')
    return found


# ---------------------------------------------------------------------- what the channels share

def features(folder, n=8):
    """
    {name: (n_layer, H, D)} of the channels of a model as it was trained, from its weights and from
    n test windows of 4L tokens, of which the last L are queries. q_c k_c is the part of channel c
    of a score. Its lead: that part, weighted by attention to the last L keys alone, less the same
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
        k = k.repeat_interleave(H // k.shape[1], dim=1)              # (n, H, 4L, D)
        w_q, w_k, _ = block.attn.qkv.weight.detach().split(
            [width * D for width in block.attn.heads])
        q, first, near, far = q[:, :, 3 * L:], k[:, :, :L], k[:, :, 3 * L:], k[:, :, :3 * L]
        power = q.square().mean((0, 2))                              # (H, D)
        scores = q @ k.transpose(-1, -2) / D ** 0.5                  # (n, H, L, 4L)
        attended = [scores.masked_fill(~keys, -torch.inf).softmax(-1) @ k
                    for keys in (is_near, j <= i - L)]               # (n, H, L, D) each
        layers.append({
            'norm of its row of W_q': w_q.norm(dim=1).view(H, D),
            'norm of its row of W_k': w_k.norm(dim=1).view(-1, D).repeat_interleave(
                H // block.attn.heads[1], dim=0),
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
    """values: a number, or a list of as many, a seed each."""
    sd = np.std(values, axis=0, ddof=1) if len(values) > 1 else None
    return {'mean': np.mean(values, axis=0), 'sd': sd, 'each': values}


def show(name, cell, digits=3):
    line = f'{name:38}'
    for k, mean in enumerate(cell['mean']):
        line += f'{mean:10.{digits}f}'
        if cell['sd'] is not None:
            line += f" ± {cell['sd'][k]:.{digits}f}"
    return line


def main():
    began, runtime = time.perf_counter(), setup('cpu', 'float32')
    losses, shared, spread, drawn = [], [], [], {}
    for seed in seeds:
        folder = f'{out_dir}/{seed}/nope'
        losses.append(measure(folder, seed))
        tuned = read(f'{folder}/scale_head_{4 * L}_study_channel.json')
        scales, found = np.array(tuned['head_scale']), features(folder)
        shared.append(correlations(scales, found))
        spread.append([scales.mean(2).std(), scales.std(2).mean()])
        drawn = drawn or {'scale': scales} | found
    result = {
        'stage': 'channel_scale', 'block_size': L, 'target_length': 4 * L, 'lengths': LENGTHS,
        'seeds': seeds,
        'losses': {name: over_seeds([[one[name][0][T] for T in LENGTHS] for one in losses])
                   for name in losses[0]},
        'gains': {name: over_seeds([[one[name][1][T] - one[name][0][T] for T in LENGTHS]
                                    for one in losses]) for name in losses[0]},
        'spread': over_seeds(spread),
        'correlations': {name: over_seeds([one[name] for one in shared]) for name in shared[0]},
        'first_seed': drawn}
    print('loss at', LENGTHS, 'when this was tuned at', 4 * L)
    for name, cell in result['losses'].items():
        print(show(name, cell))
    print('gain at the same lengths over the cut context of the untuned model')
    cut = np.array(result['losses']['NoPE, cut to L']['each'])
    for name, cell in result['losses'].items():
        print(show(name, over_seeds(cut - cell['each'])))
    print('own gain, over the cut context of the same model with what was tuned')
    for name, cell in result['gains'].items():
        print(show(name, cell))
    print(show('\nstandard deviation of the scales: of the means of heads, within a head',
               result['spread'], 2))
    print('\nrank correlation, within a head, of scales and, in each layer:')
    for name, cell in result['correlations'].items():
        print(show(name, cell, 2))
    plots.write_result(ROOT / 'results/channel_scale/channel_scale', result, settings(globals()),
                       runtime, began)


if __name__ == '__main__':
    configure(globals())
    main()
