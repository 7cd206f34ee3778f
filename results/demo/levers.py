"""
What saves time in the demo: each lever is timed with it and without it.

$ python -m results.demo.levers    # 10 minutes on 2 cores that have nothing else to do

Writes results/demo/levers.json
"""

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event

import demo
from configurator import configure
from results import study

steps = 600                # of each training
windows = [40, 160, 640]   # of the readings, by make look's models


def training(folder, *arguments):
    return ['train.py', 'config/code.py', '--batch_size=8', '--micro_batch_size=8',
            f'--max_iters={steps}', f'--out_dir={folder}', *arguments]


def tuning(folder):
    return ['tune_scale.py', f'--out_dir={folder}', f'--target_length={demo.target_length}',
            '--n_samples=32', '--tune=scale:0.1', '--init_scale=1.0', '--min_scale=None',
            f'--max_iters={demo.tune_iters}', '--warmup_iters=10']


def seconds_of(stages, lanes):
    """Seconds to run stages: in two lanes side by side, a thread each, or in one of two threads."""
    began, size = time.perf_counter(), len(stages) // lanes
    parts = [stages[i:i + size] for i in range(0, len(stages), size)]
    run_one = partial(demo.run_lane, threads=2 // lanes, failed=Event())
    with ThreadPoolExecutor(lanes) as pool:
        list(pool.map(run_one, ('first', 'second'), parts))
    return round(time.perf_counter() - began, 1)


def main():
    began, rows = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as top:
        twins = [f'{top}/{name}' for name in 'abcd']
        rows += [
            {'what': f'two trainings of {steps} steps',
             'side by side, a thread each': seconds_of([training(one) for one in twins[:2]], 2),
             'one after the other, two threads': seconds_of(
                 [training(one) for one in twins[2:]], 1)},
            {'what': f'two tunings of {demo.tune_iters} steps',
             'side by side, a thread each': seconds_of([tuning(one) for one in twins[:2]], 2),
             'one after the other, two threads': seconds_of(
                 [tuning(one) for one in twins[2:]], 1)},
            {'what': f'two trainings of {steps} steps, not compiled',
             'side by side, a thread each': seconds_of(
                 [training(f'{one}_eager', '--compile=False') for one in twins[:2]], 2)}]
    demo.models, demo.target_length = 'lessons/models', 1024
    for n in windows:
        demo.n_samples, start = n, time.perf_counter()
        text = demo.text_to_read()
        found, _ = demo.read_all(text)
        pair = min(demo.differences(found), key=lambda one: one['difference'])
        rows.append({'what': f'reading {len(text.windows)} windows of 1,024 tokens',
                     'seconds': round(time.perf_counter() - start, 1),
                     'smallest difference': pair['difference'],
                     'its standard error': pair['standard_error']})
    study.print_table(rows, digits=3)
    study.write('results/demo/levers', {'stage': 'demo_levers', 'rows': rows}, globals(), began)


if __name__ == '__main__':
    configure(globals())
    main()
