"""
A scale per head, per channel and other small vectors on associative recall, a task whose answers
lie beyond L. NoPE models that learned it from inputs of up to L = 16 symbols are tuned on inputs of
4L, all with the same samples, and answer inputs of L to 16L. The models also learned to copy. A
copy of L symbols has 2L tokens, so attention was trained at up to 2L tokens, and a context is cut
to 2L tokens.

$ python -m results.channel_scale.recall   # 16 minutes of one core for a seed, 6 of them training
$ python -m results.channel_scale.recall --work=False   # the table of what was measured

A stopped run continues where it was. Writes results/channel_scale/recall.json
"""

from functools import partial
from pathlib import Path

import numpy as np
import torch

import che
from configurator import configure
from demo import read
from lib.checksums import load_whole
from lib.devices import learning_rate_at, setup
from lib.errors import ROOT
from results import study
from results.channel_scale.table import over_seeds
from tune_scale import vectors_of

out_dir = 'out/channel_recall'   # SEED/ is a run of che.py, SEED_STEPS_TESTS.json its result
seeds = [1337, 1338, 1339]
max_iters = 200                  # steps of tuning, each with 64 samples
n_test = 512                     # samples of each length
work = True                      # False: only show what was measured

L = 16                           # the longest input of training, in symbols
LENGTHS = [L, 2 * L, 4 * L, 8 * L, 16 * L]  # in symbols, each of which is a token of recall
TASK = 'recall+copy'             # what the models have learned
TRAINING = f'config/recall.py --train_length={L}'
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


def answer_cut(model, tokens, n):
    """
    Logits (64, n, vocabulary) of the answers at the last n tokens. Each is read in a context cut to
    block_size tokens, the longest of training.
    """
    T = model.config.block_size
    if tokens.shape[1] <= T:
        return model(tokens, tail=n)
    ends = tokens.shape[1] - n + 1 + torch.arange(n)
    contexts = tokens[:, ends[:, None] - T + torch.arange(T)]         # (64, n, T)
    return model(contexts.flatten(0, 1), tail=1).unflatten(0, (-1, n))[:, :, 0]


@torch.no_grad()
def shares(seed, judge, lengths=LENGTHS):
    """The share of test samples' answers for which judge(tokens, answers) is true, by length."""
    found = []
    for length in lengths:
        judged = [judge(*batch).float().mean() for batch in samples('test', seed, length, n_test)]
        found.append(torch.stack(judged).mean().item())
    return found


def share_right(model, seed, cut=False):
    """The share of answers that are right at each of LENGTHS."""
    def right(tokens, answers):
        n = answers.shape[1]
        logits = answer_cut(model, tokens, n) if cut else model(tokens, tail=n)
        return logits.argmax(-1) == answers
    return shares(seed, right)


def share_held(seed, T, lengths=LENGTHS):
    """The share of answers whose key and value are in the last T tokens, at each length."""
    def held(tokens, answers):
        n = answers.shape[1]
        pair = (tokens[:, None] == tokens[:, -n:, None]).int().argmax(-1)  # first place of each key
        return pair >= tokens.shape[1] - n + 1 + torch.arange(n) - T
    return shares(seed, held, lengths)


def loss_of(model, tokens, answers):
    logits = model(tokens, tail=answers.shape[1])
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
    """Minimize the loss at 4L over groups of parameters, each with its rate, as tune_scale.py."""
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


def trained(seed):
    """The model of a seed. Trains it if it is missing. che.py made it."""
    folder = f'{out_dir}/{seed}'
    result = study.made(f'{folder}/che_recall.json',
                        f'che.py {TRAINING} --seed={seed} --out_dir={folder}')
    model = che.new_model(TASK, result['settings'])
    model.load_state_dict(load_whole(Path(folder, f'{TASK}.pt'), 'Train it again.')['model'])
    return model.eval()


def tuned(seed, scale, rates):
    """A model with these kinds of vectors tuned, and how many numbers they hold."""
    model = trained(seed)
    model.head_scale = scale
    if 'channel' in rates:
        model.head_scale = model.head_scale[..., None].expand(-1, -1, model.config.head_dim)
    groups = [{'params': list(vectors_of(model, [kind]).values()), 'rate': rate}
              for kind, rate in rates.items()]
    clamp = vectors_of(model, ['scale']).values() if 'scale' in rates else None
    return model, tune(model, groups, seed, clamp)


def result_of(seed):
    """
    {what was tuned: the share of answers right at each of LENGTHS}, the uniform scale, how many
    numbers were tuned, the tokens of the cut context, and the share of answers that it holds.
    """
    model = trained(seed)
    cut = model.config.block_size
    found = {'nothing': share_right(model, seed),
             'nothing, context cut': share_right(model, seed, cut=True)}
    scale = model.head_scale = best_uniform(model, seed)
    found['uniform scale'], numbers = share_right(model, seed), {}
    for name, rates in TUNED.items():
        model, numbers[name] = tuned(seed, scale, rates)
        found[name] = share_right(model, seed)
        print(seed, name, found[name], flush=True)
    model = trained(seed)
    weights = [p for p in model.parameters() if p.requires_grad]  # all but scales and gains
    numbers['every weight'] = tune(model, [{'params': weights, 'rate': RATE}], seed)
    found['every weight'] = share_right(model, seed)
    return {'right': found, 'uniform_scale': scale, 'numbers': numbers, 'cut_tokens': cut,
            'held_by_cut': share_held(seed, cut)}


def collect():
    """The result. Measures what is missing."""
    setup('cpu', 'float32')
    units = {Path(out_dir, f'{seed}_{max_iters}_{n_test}.json'):
             (f'{out_dir}/{seed}', partial(result_of, seed)) for seed in seeds}
    study.measure_units(units)
    found = [read(path) for path in units]
    return {'stage': 'channel_recall', 'block_size': L, 'target_length': 4 * L,
            'lengths': LENGTHS, 'seeds': seeds, 'numbers': found[0]['numbers'],
            'uniform_scale': [one['uniform_scale'] for one in found],
            'cut_tokens': found[0]['cut_tokens'],
            'held_by_cut': over_seeds([one['held_by_cut'] for one in found]),
            'right': {name: over_seeds([one['right'][name] for one in found])
                      for name in found[0]['right']}}


def print_result(result):
    print('Share of answers right by length, tuned at', 4 * L)
    study.print_lists(result['right'] | {'held by the cut context': result['held_by_cut']}, LENGTHS)


if __name__ == '__main__':
    configure(globals())
    study.show(ROOT / 'results/channel_scale/recall', collect, print_result, globals())
