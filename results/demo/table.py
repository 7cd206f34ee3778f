"""
Five seeds of the demo: its losses and gains, and whether what it says holds in each of them.

$ python -m results.demo.table    # an hour on 2 cores

Writes results/demo/seeds.json once there are three.
"""

import time
from pathlib import Path

from configurator import configure
from demo import READINGS, read
from results import study

seeds = [1337, 1338, 1339, 1340, 1341]
work = True  # False: only show the seeds that are there


def report_of(seed):
    return Path(f'out/demo_seeds_code/{seed}/report.json')


def claims_of(report):
    """{claim: whether it holds}, for one seed."""
    rows, T = report['readings'], str(report['lengths'][-1])
    loss = {title: row['at'][T]['loss'] for title, row in rows.items()}
    harm = {title: -row['at'][T]['gain'] for title, row in rows.items() if 'gain' in row['at'][T]}
    far = {title: row['far']['gain'] for title, row in rows.items()}
    sure = {title: row['far']['gain'] / row['far']['gain_error'] for title, row in rows.items()}
    nope, uniform, heads, rope, conv, conv_heads = READINGS
    return {
        'NoPE and RoPE are better with the last L tokens alone': min(harm[nope], harm[rope]) > 0,
        'head scales lower the loss of NoPE, and more than the uniform scale':
            loss[heads] < min(loss[uniform], loss[nope]),
        'the convolution loses less past L than NoPE, its head scales and RoPE':
            harm[conv] < min(harm[nope], harm[heads], harm[rope]),
        'NoPE and RoPE lose at far repeats, with 3 standard errors':
            max(sure[nope], sure[heads], sure[rope]) < -3,
        'the convolution with head scales gains at far repeats, with 3 standard errors':
            sure[conv_heads] > 3,
        'head scales raise the gain of the convolution': far[conv_heads] > far[conv],
    }


def rows_of(reports):
    """A row for each reading: its losses by length, and its gain at far repeats, over seeds."""
    rows = []
    for title in READINGS:
        found = [report['readings'][title] for report in reports]
        row = {'': title}
        for T in found[0]['at']:
            row[f'loss at {T}'] = study.over_seeds([one['at'][T]['loss'] for one in found])
        rows.append(row | {'gain at far repeats': study.over_seeds([one['far']['gain']
                                                                   for one in found])})
    return rows


def main():
    began = time.perf_counter()
    for seed in seeds if work else []:
        folder = report_of(seed).parent
        study.made(report_of(seed), f"demo.py --out_dir={folder} --train_args=['--seed={seed}']")
    reports = {seed: read(report_of(seed)) for seed in seeds if report_of(seed).exists()}
    for report in reports.values():
        for reading in report['readings'].values():
            del reading['curve']
    if not reports:
        return print('No seed was measured yet.')
    rows = rows_of(list(reports.values()))
    holds = {seed: claims_of(report) for seed, report in reports.items()}
    study.print_table(rows, digits=2)
    for claim in next(iter(holds.values())):
        print(f"{claim}: {sum(one[claim] for one in holds.values())} of {len(holds)} seeds")
    if len(reports) >= 3:
        study.write('results/demo/seeds', {'stage': 'demo_seeds', 'rows': rows, 'claims': holds,
                                           'reports': reports}, globals(), began)


if __name__ == '__main__':
    configure(globals())
    main()
