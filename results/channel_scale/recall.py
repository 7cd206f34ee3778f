"""
A scale per head, per channel and other small vectors on a task whose answers lie beyond L:
associative recall. NoPE models that learned it from inputs of up to L = 16 symbols are tuned on
inputs of 4L, all with the same samples, and answer inputs of L to 16L. The models learned to copy,
too: a copy of L symbols is 2L tokens, so attention was trained at up to 2L tokens, and a context is
cut to so many.

$ python -m results.channel_scale.recall   # 16 minutes of one core for a seed, 6 of them training

Goes on where it was stopped. Writes results/channel_scale/recall.json
"""

import time
from pathlib import Path

import numpy as np
import torch

import che
from configurator import configure, settings
from demo import read, run
from lib.answers import save_json
from lib.checksums import load_whole
from lib.devices import learning_rate_at, setup
from lib.errors import ROOT
from lib.plots import write_result
from results.channel_scale.table import over_seeds, show
from tune_scale import vectors_of

out_dir = 'out/channel_recall'   # SEED/ is a run of che.py, SEED.json what its model gave
seeds = [1337, 1338, 1339]
max_iters = 200                  # steps of tuning, each with 64 samples
n_test = 512                     # samples of each length

L = 16                           # the longest input of training, in symbols
LENGTHS = [L, 2 * L, 4 * L, 8 * L, 16 * L]  # in symbols, each of which is a token of recall
TASK = 'recall+copy'             # what the models have learned
TRAINING = ['config/recall.py', f'--train_length={L}']
# {what is tuned: {kind of vector, as in tune_scale.py: rate}}
TUNED = {
    'scale per head': {'scale': 0.1},
    'scale per head, rate 0.03': {'scale': 0.03},
    'scale per channel': {'channel': 0.03},
    'scale per channel, rate 0.1': {'channel': 0.1},
    'gains of attention norms': {'attn_norm': 0.01},
    'scale per head, gains of heads and norms': {'scale': 0.1, 'out': 0.02, 'norm': 0.01},
    'channel and all norms': {'channel': 0.03, 'norm': 0.01},
}
RATE = 1e-3  # of every weight


def samples(name, seed, length, count):
    """Batches of 64 samples of recall, others for each name: tokens (64, length), answers."""
    for i in range(count // 64):
        rng = np.random.default_rng([seed, *name.encode(), length, i])
        yield che.draw('recall', rng, 64, length, che.empty_token(TASK))


def answer(model, tokens, n):
    """Logits (64, n, vocabulary) of the answers, read at the last n tokens."""
    return model(tokens, tail=n)


def answer_cut(model, tokens, n):
    """The same, each read in a context cut to the longest of training: block_size tokens."""
    T = model.config.block_size
    if tokens.shape[1] <= T:
        return answer(model, tokens, n)
    ends = tokens.shape[1] - n + 1 + torch.arange(n)
    contexts = tokens[:, ends[:, None] - T + torch.arange(T)]         # (64, n, T)
    return model(contexts.flatten(0, 1), tail=1).unflatten(0, (-1, n))[:, :, 0]


def share_held(seed, T):
    """The share of answers whose key and value stand in the last T tokens, at each of LENGTHS."""
    shares = []
    for length in LENGTHS:
        held = []
        for tokens, answers in samples('test', seed, length, n_test):
            n = answers.shape[1]
            asked = tokens[:, -n:]                                            # keys, (64, n)
            pair = (tokens[:, None] == asked[..., None]).int().argmax(-1)     # where a key is first
            ends = length - n + 1 + torch.arange(n)
            held.append((pair >= ends - T).float().mean())
        shares.append(torch.stack(held).mean().item())
    return shares


@torch.no_grad()
def share_right(model, seed, read_with=answer):
    """The share of answers that are right at each of LENGTHS."""
    shares = []
    for length in LENGTHS:
        right = [(read_with(model, tokens, answers.shape[1]).argmax(-1) == answers).float().mean()
                 for tokens, answers in samples('test', seed, length, n_test)]
        shares.append(torch.stack(right).mean().item())
    return shares


def loss_of(model, tokens, answers):
    logits = answer(model, tokens, answers.shape[1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten())


@torch.no_grad()
def best_uniform(model, seed):
    """The scale of the whole model, of 1.0, 1.1 ... 2.4, with the lowest loss at 4L."""
    losses = {}
    for scale in np.arange(10, 25) / 10:
        model.head_scale = float(scale)
        losses[scale] = sum(loss_of(model, *batch) for batch in samples('val', seed, 4 * L, 256))
    return float(min(losses, key=losses.get))


def tune(model, groups, seed, clamp=None):
    """Minimise the loss at 4L over groups of parameters, each with its rate, as tune_scale.py."""
    model.requires_grad_(False)
    parameters = [p.requires_grad_(True) for group in groups for p in group['params']]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for step, batch in enumerate(samples('tune', seed, 4 * L, 64 * max_iters)):
        for group in optimizer.param_groups:
            group['lr'] = learning_rate_at(step, group['rate'], 0.1 * group['rate'], 20, max_iters)
        loss_of(model, *batch).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        for p in clamp or ():
            p.data.clamp_(min=1.0)  # Eq. (6)
    return sum(p.numel() for p in parameters)


def measure(seed):
    """
    {what was tuned: the share of answers right at each of LENGTHS}, the scale, the numbers, and the
    cut context: its tokens and the share of answers that it holds. Trains what is not there yet.
    """
    folder = f'{out_dir}/{seed}'
    if not Path(folder, 'che.json').exists():
        run('che.py', *TRAINING, f'--seed={seed}', f'--out_dir={folder}')
    chosen = read(f'{folder}/che.json')['settings']
    weights = load_whole(Path(folder, f'{TASK}.pt'), 'Train it again.')['model']

    def trained():
        model = che.new_model(TASK, chosen)
        model.load_state_dict(weights)
        return model.eval()

    model = trained()
    cut = model.config.block_size
    found = {'nothing': share_right(model, seed),
             'nothing, context cut': share_right(model, seed, answer_cut)}
    scale = model.head_scale = best_uniform(model, seed)
    found['uniform scale'], numbers = share_right(model, seed), {}
    for name, rates in TUNED.items():
        model = trained()
        model.head_scale = scale
        if 'channel' in rates:
            model.head_scale = model.head_scale[..., None].expand(-1, -1, model.config.head_dim)
        groups = [{'params': list(vectors_of(model, [kind]).values()), 'rate': rate}
                  for kind, rate in rates.items()]
        clamp = groups[0]['params'] if 'scale' in rates else None
        numbers[name] = tune(model, groups, seed, clamp)
        found[name] = share_right(model, seed)
        print(seed, name, found[name], flush=True)
    model = trained()
    weights_of = [p for p in model.parameters() if p.requires_grad]  # all but scales and gains
    numbers['every weight'] = tune(model, [{'params': weights_of, 'rate': RATE}], seed)
    found['every weight'] = share_right(model, seed)
    return {'right': found, 'uniform_scale': scale, 'numbers': numbers, 'cut_tokens': cut,
            'held_by_cut': share_held(seed, cut)}


def main():
    began, runtime, found = time.perf_counter(), setup('cpu', 'float32'), []
    for seed in seeds:
        path = Path(out_dir, f'{seed}.json')
        if not path.exists():
            save_json(path, measure(seed))
        found.append(read(path))
    result = {'stage': 'channel_recall', 'block_size': L, 'target_length': 4 * L,
              'lengths': LENGTHS, 'seeds': seeds, 'numbers': found[0]['numbers'],
              'uniform_scale': [one['uniform_scale'] for one in found],
              'cut_tokens': found[0]['cut_tokens'],
              'held_by_cut': over_seeds([one['held_by_cut'] for one in found]),
              'right': {name: over_seeds([one['right'][name] for one in found])
                        for name in found[0]['right']}}
    print('share of answers right at', LENGTHS, 'when this was tuned at', 4 * L)
    for name, cell in result['right'].items():
        print(show(name, cell))
    print(show('held by the cut context', result['held_by_cut']))
    write_result(ROOT / 'results/channel_scale/recall', result, settings(globals()), runtime, began)


if __name__ == '__main__':
    configure(globals())
    main()
