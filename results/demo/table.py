"""
The demo's claim with five seeds: which reads 2L and 4L better, NoPE, the best uniform scale, head
scales, or vectors. Training, tuning and windows are those of demo.py, without its RoPE twin.

$ python -m results.demo.table             # 1 hour on 2 CPU cores; goes on where it was stopped
$ python -m results.demo.table --seeds=[1340]   # of some, in another shell

Writes out_dir/SEED/losses.json, and once all five are there results/demo/seeds.json
"""

import statistics
import time
from pathlib import Path

import demo
from configurator import configure, settings
from lib import plots
from lib.answers import save_json
from lib.devices import setup
from lib.errors import ROOT

out_dir = 'out/demo_seeds'
SEEDS = [1337, 1338, 1339, 1340, 1341]
seeds = SEEDS
FAMILIES = 'NoPE', 'uniform', 'head', 'vectors'  # in the order that the demo claims
NUMBERS = ('mean', 'sd'), ('gain', 'gain_sd'), ('own_gain', 'own_gain_sd')  # of a row, over seeds


def measure(seed, folder):
    """
    Of one training: {name of a method: {length: loss, cut_loss and gain in nats}}, and what it was
    made with.
    """
    began = time.perf_counter()
    if not Path(folder, 'loss.png').exists():
        demo.train(folder, f'--max_iters={demo.max_iters}', f'--seed={seed}')
    L = demo.read(f'{folder}/config.json')['block_size']
    lengths, found = [L, 2 * L, 4 * L], {}
    tuned = demo.tune(folder, lengths[1:], demo.overshoot, [], [f'--max_iters={demo.tune_iters}'])
    for name, scale in ({'NoPE': None} | tuned).items():
        result = demo.losses_of(folder, name, scale, lengths, demo.n_samples)
        found[name] = {row['length']: {key: row[key] for key in ('loss', 'cut_loss', 'gain')
                                       if key in row} for row in result['rows']}
    return {'methods': found} | demo.made_with(result, began)


def numbers(methods, family, T):
    """
    Of NoPE at T, also with its context cut to L, or of what was made for T: its loss, its gain over
    the cut context of untuned NoPE, and over its own.
    """
    row = methods[family if family in ('NoPE', 'cut') else f'{family} {T}'][T]
    return row['loss'], methods['cut'][T]['loss'] - row['loss'], row.get('gain', 0)


def mean_and_sd(values):
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None


def main():
    began = time.perf_counter()
    for seed in seeds:
        path = Path(out_dir, str(seed), 'losses.json')
        if not path.exists():
            save_json(path, measure(seed, str(path.parent / 'nope')))
    runs = {path.parent.name: demo.read(path)
            for path in sorted(Path(out_dir).glob('*/losses.json'))}
    found = {seed: run['methods'] for seed, run in runs.items()}
    for methods in found.values():
        methods['cut'] = {T: {'loss': row.get('cut_loss', row['loss'])}
                          for T, row in methods['NoPE'].items()}
    lengths = list(next(iter(found.values()))['NoPE'])
    rows = []
    for T in lengths:
        for family in (*FAMILIES, 'cut') if T != lengths[0] else ('NoPE',):
            row, each = {'length': int(T), 'method': family}, []
            for methods in found.values():
                each.append(numbers(methods, family, T))
            line = f'{T:>6} {family:8}'
            for (mean, sd), values in zip(NUMBERS, zip(*each)):
                row[mean], row[sd] = mean_and_sd(values)
                line += f'  {mean} {row[mean]:.3f} ± {row[sd] or 0:.3f}'
            rows.append(row)
            print(line)
    in_order = {}
    for seed, methods in found.items():
        columns = [[numbers(methods, family, T)[0] for family in FAMILIES] for T in lengths[1:]]
        in_order[seed] = all(column == sorted(column, reverse=True) for column in columns)
    print('in order:', in_order)
    if len(found) < len(SEEDS):
        print('results/demo/seeds.json is written once there are', len(SEEDS))
        return
    result = {'seeds': runs, 'rows': rows, 'in_order': in_order}
    plots.write_result(ROOT / 'results/demo/seeds', result, settings(globals()),
                       setup('cpu', 'float32'), began)


if __name__ == '__main__':
    configure(globals())
    main()
