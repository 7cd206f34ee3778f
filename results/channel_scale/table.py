"""
HeadScale with a vector instead of a number: a softmax scale for each channel of each head, tuned at
4L beside other small vectors and every weight, all with the same tokens, on the NoPE models of
results/demo; and what the channels whose scale was raised have in common.

$ python -m results.demo.table            # first, for the models
$ python -m results.channel_scale.table   # 20 s and 1 minute of one core for a kind and a seed

Goes on where it was stopped. Writes results/channel_scale/channel_scale.json and .png
"""

import statistics
from pathlib import Path

import numpy as np
import torch

from configurator import configure
from demo import read, run
from entropy import spearman
from lib import plots
from lib.checkpoints import load_model, open_windows
from lib.errors import ROOT
from lib.results import save_json

out_dir = 'out/demo_seeds'   # SEED/nope is a model
seeds = [1337, 1338, 1339]
n_samples = 256              # test windows of 6L tokens behind each loss

L = 128
LENGTHS = [L, 2 * L, 4 * L, 6 * L]
RATE = 1e-3  # of every weight, the best of four in results/vectors_demo
# What is shown: --tune of tune_scale.py
TUNED = {
    'scale per head': 'scale',
    'scale per channel': 'channel',
    'gains of attention norms': 'attn_norm',
    'gains of all norms': 'norm',
    'channel and attention norms': 'channel,attn_norm',
    'channel and all norms': 'channel,norm',
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
    """{what was tuned: {length: loss}} of one model. Tunes what is not there yet."""
    target, found = 4 * L, {}
    found['nothing'], found['nothing, cut to L'] = losses_of(folder, 'channel_study_none')
    uniform = read(f'{folder}/scale_uniform.json')
    best = dict(zip(uniform['lengths'], uniform['best_by_length']))[target]
    found['uniform scale'], _ = losses_of(folder, 'channel_study_uniform', f'--scale={best}')
    for name, kinds in TUNED.items():
        label = f"study_{kinds.replace(',', '_')}"
        file = f'{folder}/scale_head_{target}_{label}.json'
        if not Path(file).exists():
            run('tune_scale.py', f'--out_dir={folder}', f'--target_length={target}',
                f'--tune={kinds}', f'--label={label}', '--max_iters=120', '--n_samples=16')
        found[name], _ = losses_of(folder, f'channel_{label}', f'--scale={file}')
    whole = str(Path(folder).with_name('whole'))
    if not Path(whole, 'loss.png').exists():
        run('train.py', 'config/finetune_demo.py', f'--init_from={folder}/last.pt',
            f'--out_dir={whole}', f'--learning_rate={RATE}', '--min_lr=0', f'--seed={seed}')
    found['every weight'], _ = losses_of(whole, 'channel_study_whole')
    return found


# ---------------------------------------------------------------------- what the channels share

def features(folder, n=8):
    """
    {name: (n_layer, H, D)} of the channels of a model as it was trained, from its weights and from
    n test windows of 4L tokens. Of a channel c, q_c k_c is its part of a score.
    """
    model, info = load_model('last', folder, 'cpu')
    windows = open_windows(info, None, 'test', 4 * L)
    inputs = torch.from_numpy(windows.evenly_spaced(n)[:, :-1]).long()
    H, D = model.config.n_head, model.config.head_dim
    with torch.no_grad(), model.probe(lambda layer, attention, q, k, place: (q, k)) as seen:
        model(inputs)
    layers = []
    for block, (q, k) in zip(model.blocks, seen):
        k = k.repeat_interleave(H // k.shape[1], dim=1)              # (n, H, 4L, D)
        w_q, w_k, _ = block.attn.qkv.weight.detach().split(
            [width * D for width in block.attn.heads])
        first, near, far = k[:, :, :L], k[:, :, 3 * L:], k[:, :, :3 * L]
        power = q[:, :, 3 * L:].square().mean((0, 2))                # (H, D), of the last queries
        layers.append({
            'norm of its row of W_q': w_q.norm(dim=1).view(H, D),
            'norm of its row of W_k': w_k.norm(dim=1).view(-1, D).repeat_interleave(
                H // block.attn.heads[1], dim=0),
            'variance of its part of far scores': power * far.var(dim=(0, 2)),
            'far variance over near': far.var(dim=(0, 2)) / near.var(dim=(0, 2)),
            'drift of its keys': ((near.mean((0, 2)) - first.mean((0, 2))).abs()
                                  / first.std(dim=(0, 2))),
        })
    return {name: torch.stack([layer[name] for layer in layers]).numpy() for name in layers[0]}


def correlations(scales, found):
    """Rank correlation of scales and each feature over the channels of a head: mean over heads."""
    means = {}
    for name, values in found.items():
        pairs = zip(scales.reshape(-1, scales.shape[-1]), values.reshape(-1, scales.shape[-1]))
        means[name] = np.mean([spearman(scale, value) for scale, value in pairs])
    return means


# ---------------------------------------------------------------------- all of it

def mean_and_sd(values):
    sd = statistics.stdev(values) if len(values) > 1 else None
    return {'mean': statistics.mean(values), 'sd': sd}


def main():
    losses, shared, last = [], [], {}
    for seed in seeds:
        folder = f'{out_dir}/{seed}/nope'
        losses.append(measure(folder, seed))
        tuned = read(f'{folder}/scale_head_{4 * L}_study_channel.json')
        last = {'channel_scale': np.array(tuned['channel_scale'])} | features(folder)
        shared.append(correlations(last['channel_scale'], features(folder)))
    result = {
        'stage': 'channel_scale', 'block_size': L, 'target_length': 4 * L, 'lengths': LENGTHS,
        'seeds': seeds,
        'losses': {name: {T: mean_and_sd([one[name][T] for one in losses]) for T in LENGTHS}
                   for name in losses[0]},
        'correlations': {name: mean_and_sd([one[name] for one in shared]) for name in shared[0]},
        'last_seed': last}
    print(f"{'tuned at 4L':30}" + ''.join(f'{T:>17}' for T in LENGTHS))
    for name, row in result['losses'].items():
        cells = [f"{cell['mean']:.3f} ± {cell['sd'] or 0:.3f}" for cell in row.values()]
        print(f'{name:30}' + ''.join(f'{cell:>17}' for cell in cells))
    print('rank correlation of a channel scale, within a head, with')
    for name, cell in result['correlations'].items():
        print(f"{name:38}{cell['mean']:+.2f} ± {cell['sd'] or 0:.2f}")
    path = ROOT / 'results/channel_scale/channel_scale.json'
    save_json(path, result)
    print('wrote', path, *plots.draw(path))


if __name__ == '__main__':
    configure(globals())
    main()
