"""
Five seeds of the byte models, the defaults of train.py: NoPE, the best uniform scale, head scales
and vectors at 2L and 4L, on 600 test windows.

$ python -m results.demo_bytes.table   # 1 hour on 2 CPU cores; start it in two shells for two cores

Each seed is one file, out_dir/SEED/losses.json. When all five are there, writes
results/demo_bytes/seeds.json
"""

import itertools
import time
from functools import partial
from pathlib import Path

from configurator import configure
from demo import read
from lib.errors import ROOT
from results import study

out_dir = 'out/demo_seeds'
SEEDS = [1337, 1338, 1339, 1340, 1341]
seeds = SEEDS
FAMILIES = 'NoPE', 'uniform', 'head', 'vectors'  # in the order of their losses, highest first
TUNED = {'head': 'scale', 'vectors': 'channel,norm'}  # {name: value of --tune}


def tune(folder, lengths):
    """Find scales and vectors for these lengths. Returns {method: value of --scale}."""
    study.run(f'tune_scale.py --out_dir={folder} --method=uniform --n_samples=32 '
              f'{study.PRECISION}')
    uniform = read(f'{folder}/scale_uniform.json')
    best = dict(zip(uniform['lengths'], uniform['best_by_length']))
    scales = {f'uniform {T}': best[T] for T in lengths}
    for (name, kinds), T in itertools.product(TUNED.items(), lengths):
        target = round(1.25 * T)
        study.run(f'tune_scale.py --out_dir={folder} --target_length={target} --tune={kinds} '
                  f'--label={name} --max_iters=120 {study.PRECISION}')
        scales[f'{name} {T}'] = f'{folder}/scale_head_{target}_{name}.json'
    return scales


def result_of(seed):
    """
    The losses of one training, {method: {length: loss, cut_loss and gain in nats}}, and how they
    were made.
    """
    began, folder = time.perf_counter(), f'{out_dir}/{seed}/nope'
    study.train(folder, f'--max_iters=2200 --seed={seed}')
    L = read(f'{folder}/config.json')['block_size']
    lengths, found = [L, 2 * L, 4 * L], {}
    for name, scale in ({'NoPE': None} | tune(folder, lengths[1:])).items():
        chosen = '' if scale is None else f'--scale={scale}'
        result = study.evaluated(
            folder, 'position', name.replace(' ', '_'),
            f"--lengths=[{','.join(map(str, lengths))}] --n_samples=600 --tail=64 "
            f'{study.PRECISION} {chosen}')
        found[name] = {row['length']: {key: row[key] for key in ('loss', 'cut_loss', 'gain')
                                       if key in row} for row in result['rows']}
    return {'methods': found} | study.made_with(result, began)


def numbers(methods, family, T):
    """
    The loss at T, the gain over the cut context of untuned NoPE, and the gain over the method's own
    cut context. Methods other than NoPE are those made for T.
    """
    row = methods[family if family in ('NoPE', 'cut') else f'{family} {T}'][T]
    return {'mean': row['loss'], 'gain': methods['cut'][T]['loss'] - row['loss'],
            'own_gain': row.get('gain', 0)}


def rows_of(found):
    """The means and standard deviations over seeds. found: {seed: methods}."""
    lengths, rows = list(next(iter(found.values()))['NoPE']), []
    for T in lengths:
        for family in (*FAMILIES, 'cut') if T != lengths[0] else ('NoPE',):
            each = [numbers(methods, family, T) for methods in found.values()]
            row = {'length': int(T), 'method': family}
            for name in each[0]:
                cell = study.over_seeds([one[name] for one in each])
                row[name], row[f'{name}_sd' if name != 'mean' else 'sd'] = cell.values()
            rows.append(row)
    return rows


def in_order(methods):
    """Whether one seed has the losses of FAMILIES ."""
    columns = [[numbers(methods, family, T)['mean'] for family in FAMILIES]
               for T in list(methods['NoPE'])[1:]]
    return all(column == sorted(column, reverse=True) for column in columns)


def main():
    began = time.perf_counter()
    study.measure_units({Path(out_dir, str(seed), 'losses.json'):
                         (f'{out_dir}/{seed}/demo', partial(result_of, seed)) for seed in seeds})
    files = {str(seed): Path(out_dir, str(seed), 'losses.json') for seed in SEEDS}
    runs = {seed: read(path) for seed, path in files.items() if path.exists()}
    found = {seed: run['methods'] for seed, run in runs.items()}
    for methods in found.values():
        methods['cut'] = {T: {'loss': row.get('cut_loss', row['loss'])}
                          for T, row in methods['NoPE'].items()}
    rows, order = rows_of(found), {seed: in_order(methods) for seed, methods in found.items()}
    study.print_table(rows)
    print('in order:', order)
    if len(found) < len(SEEDS):
        print('results/demo_bytes/seeds.json is written once there are', len(SEEDS))
        return
    study.write(ROOT / 'results/demo_bytes/seeds', {'seeds': runs, 'rows': rows, 'in_order': order},
                globals(), began)


if __name__ == '__main__':
    configure(globals())
    main()
