"""
When does a model begin to read past L? One NoPE model with the convolution is trained at a constant
learning rate. After 2M, 5M ... 40M tokens a branch leaves it, whose learning rate falls to 0 within
a fifth more of the tokens. Each branch is read: its gain at far repeats, untuned and with head
scales tuned at 8L, and how well each of its heads finds what to copy.

$ python data/code/prepare.py
$ python -m results.begin.table                 # hours of one core; it goes on if stopped
$ python -m results.begin.table --work=False    # table and picture of what was measured

Each branch is one file, results/begin/TOKENS_SEED.json. Writes results/begin/begin.json and .png
"""

import time
from functools import partial
from pathlib import Path

import torch

from configurator import configure
from demo import read
from lib import figures
from lib.checkpoints import open_model
from results import study

seeds = [1337]   # to measure; the table shows all that are measured
work = True      # False: only show what was measured

L = 128
TOKENS = [2, 5, 10, 20, 40]  # million
STEP_TOKENS = 2048           # of config/code.py
FOLDER = Path('results/begin')
COPY = 64                    # tokens of the random sequence that is repeated
SEQUENCES = 64
HOLD = 4                     # places that hold a token: as many as the convolution reads
GAPS = {'near': 0, 'far': 7 * L}  # random tokens between the sequence and its repetition


def steps_of(tokens):
    return round(tokens * 1e6 / STEP_TOKENS)


# ---------------------------------------------------------------------- one branch

@torch.inference_mode()
def copying(model, gap):
    """
    A random sequence, `gap` random tokens, and the sequence again. Returns its mean loss the first
    and the second time, in nats, and (n_layer, H) the share of its attention that each head gives,
    while the sequence is repeated, to the places that hold the token to copy: the token itself, and
    the next three, because the convolution puts it there, too.
    """
    ids = torch.randint(model.config.vocab_size, (SEQUENCES, COPY + gap),
                        generator=torch.Generator().manual_seed(0))
    ids = torch.cat((ids, ids[:, :COPY]), dim=1)
    i = torch.arange(COPY + gap, ids.shape[1] - 1)
    j = i[:, None] + 1 - COPY - gap + torch.arange(HOLD)  # the next token stands at the first one
    held = j <= i[:, None]

    def share_of_copied(layer, attention, q, k, place):
        rows = q[:, :, i]
        scores = attention.position.scores(rows, k, place.i[i], place.j)
        weights = attention.position.softmax(scores)
        found = weights.gather(-1, j.clamp(max=k.shape[2] - 1).expand(*weights.shape[:2], -1, -1))
        return (found * held).sum(-1).mean((0, 2))

    losses, shares = [], []
    for part in ids.split(8):
        with model.probe(share_of_copied) as seen:
            losses.append(model(part[:, :-1], part[:, 1:]))
        shares.append(torch.stack(seen))
    losses = torch.cat(losses)
    return {'first': losses[:, :COPY - 1].mean().item(),
            'second': losses[:, COPY + gap:].mean().item(),
            'share': torch.stack(shares).mean(0).tolist()}


def result_of(tokens, seed):
    """The content of the file of a branch. Trains the model and the branch as far as missing."""
    began, n = time.perf_counter(), steps_of(tokens)
    trunk, branch = (f'out/begin/{seed}/{name}' for name in ('trunk', f'branch_{tokens}M'))
    recipe = 'config/code.py --short_conv=4'
    study.train(trunk, f'{recipe} --min_lr=4e-3 --max_iters={steps_of(TOKENS[-1])} --seed={seed} '
                       f"--keep_steps=[{','.join(str(steps_of(one)) for one in TOKENS)}]")
    study.train(branch, f'{recipe} --init_from={trunk}/step_{n}.pt --max_iters={n // 5} '
                        f'--warmup_iters=20 --seed={seed + 1000}')
    scales = f'{branch}/scale_head_{8 * L}.json'
    study.made(scales, f'tune_scale.py --out_dir={branch} --target_length={8 * L} --max_iters=80 '
                       '--warmup_iters=10 --n_samples=32 --init_scale=1.0 --tune=scale:0.1 '
                       f'--min_scale=None {study.PRECISION}')
    readings = {}
    for name, how in ('untuned', ''), ('head', f'--scale={scales}'):
        found = study.evaluated(branch, 'repeat', name, f'--lengths=[{8 * L}] --gram=4 '
                                f'--targets=1000 {study.PRECISION} {how}')
        readings[name] = found['rows']
    losses = study.evaluated(branch, 'position', 'untuned',
                             f'--lengths=[{L},{8 * L}] {study.PRECISION}')
    model, _ = open_model(f'{branch}/last.pt')
    return {'tokens': tokens, 'seed': seed, 'text': losses['rows'], 'repeats': readings,
            'copying': {name: copying(model, gap) for name, gap in GAPS.items()},
            'head_scale': read(scales)['head_scale']} | study.made_with(losses, began)


def file_of(tokens, seed):
    return FOLDER / f'{tokens}M_{seed}.json'


# ---------------------------------------------------------------------- the table

def correlation(a, b):
    """Of two lists of lists of the same shape: over all numbers but those of the first layer."""
    both = torch.tensor([a[1:], b[1:]], dtype=torch.float64).flatten(1)
    return torch.corrcoef(both)[0, 1].item()


def row_of(result):
    repeats = {name: rows[0] for name, rows in result['repeats'].items()}
    near, far = result['copying']['near'], result['copying']['far']
    best = [max(map(max, one['share'])) for one in (near, far)]
    return {'tokens (M)': result['tokens'], 'seed': result['seed'],
            'loss at L': result['text'][0]['loss'], 'loss at 8L': result['text'][1]['loss'],
            'gain untuned': repeats['untuned']['gain'], 'error': repeats['untuned']['gain_error'],
            'gain head scales': repeats['head']['gain'],
            'copied loss near': near['second'], 'copied loss far': far['second'],
            'new loss': near['first'], 'best head near': best[0], 'best head far': best[1],
            'scale and share': correlation(result['head_scale'], far['share'])}


def draw(result):
    """Gain at far repeats and losses of copies by tokens; tuned scales by what a head copies."""
    figure, axes = figures.panels('NoPE + conv, L = 128 tokens, 1.05M parameters', 3, 3, height=4)
    gains, copies, heads = axes
    colors = {'gain untuned': figures.BLUE, 'gain head scales': figures.ORANGE,
              'new loss': '#777777', 'copied loss near': '#117733', 'copied loss far': '#AA4499'}
    for seed in sorted({row['seed'] for row in result['rows']}):
        rows = [row for row in result['rows'] if row['seed'] == seed]
        x = [row['tokens (M)'] for row in rows]
        for axis, kind in (gains, 'gain'), (copies, 'loss'):
            for name, color in colors.items():
                if kind not in name:
                    continue
                axis.plot(x, [row[name] for row in rows], 'o-', color=color,
                          label=name if seed == result['rows'][0]['seed'] else None)
    for axis in gains, copies:
        axis.set(xscale='log', xlabel='million tokens before the branch')
        axis.set_xticks(TOKENS, map(str, TOKENS))
        axis.minorticks_off()
        axis.legend(frameon=False)
    gains.axhline(0, color='black', linewidth=1)
    gains.set(ylabel='nats', title='Gain at far repeats, windows of 8L')
    copies.set(ylabel='nats', title='A random sequence and its repetition')
    last = result['last']
    for layer, points in enumerate(zip(last['share'], last['head_scale'])):
        heads.plot(*points, 'os^v'[layer], label=f'layer {layer}',
                   color=('#999999', figures.BLUE, figures.ORANGE, 'black')[layer])
    heads.legend(frameon=False)
    heads.set(xscale='log', xlabel='attention to the token to copy and the next three, far',
              ylabel='tuned scale', title=f"Heads after {last['tokens']}M tokens")
    return figure


def main():
    began = time.perf_counter()
    if work:
        study.measure_units({file_of(tokens, seed): (f'out/begin/{seed}/trunk',
                                                     partial(result_of, tokens, seed))
                             for seed in seeds for tokens in TOKENS})
    found = [read(path) for path in FOLDER.glob('*M_*.json')]
    found.sort(key=lambda one: (one['seed'], one['tokens']))
    rows = [row_of(one) for one in found]
    study.print_table(rows, digits=2)
    last = {'tokens': found[-1]['tokens'], 'share': found[-1]['copying']['far']['share'],
            'head_scale': found[-1]['head_scale']} if found else None
    study.write(FOLDER / 'begin', {'stage': 'begin', 'L': L, 'rows': rows, 'last': last}, globals(),
                began, rows and draw)


if __name__ == '__main__':
    configure(globals())
    main()
