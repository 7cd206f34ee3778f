"""
The paper's story on a laptop. The demo trains a NoPE model and its RoPE twin on the Python standard
library, finds the softmax scales that extend NoPE, and draws their gain. It prints the command of
each stage and runs it. You can also run each command yourself.

$ make demo

Writes out_dir/report.json and .png. results/demo/README.md lists the fields. The stages write their
files to out_dir/nope and out_dir/rope
"""

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from configurator import configure, settings
from lib import plots
from lib.answers import command, save_json
from lib.errors import ROOT

out_dir = 'out/demo'         # folder of both runs and of the report
max_iters = 2200             # training steps of each twin
tune_iters = 120             # tuning steps of each set of head scales
overshoot = 1.25             # scales for T tokens are tuned at this factor times T (paper: 1.125)
n_samples = 600              # test windows of 4L tokens; the table shows means over them
curve_samples = 64           # test windows of 8L tokens; the curves are means over them
train_args: list[str] = []   # more settings for train.py, such as ['--n_layer=2']
tune_args: list[str] = []    # more settings for tune_scale.py

AT = 'loss', 'standard_error', 'cut_loss', 'gain', 'gain_error'  # copied from eval_ppl.py's rows
TAIL = 64  # the loss at T is the mean over this many positions before T
TOLERANCE = 0.05  # in nats: reach ends where the loss exceeds its value at L by more than this
TUNED = {'head': 'scale', 'vectors': 'channel,norm'}  # {name in the report: value of --tune}


# ---------------------------------------------------------------------- run the stages

def run(stage, *arguments):
    """Print a stage's command and run it as a user would. If the stage fails, the demo ends."""
    print(f"\n$ python {' '.join([stage, *arguments])}", flush=True)
    child = subprocess.Popen([sys.executable, str(ROOT / stage), *arguments])
    try:
        child.wait()
    finally:  # after Ctrl-C, wait: the stage gets it, too, and train.py saves before it ends
        child.wait()
    if child.returncode:
        sys.exit(child.returncode)


def read(path):
    return json.loads(Path(path).read_text())


def train(folder, *arguments):
    """Train a twin, or resume its training if it was stopped."""
    resume = ['--init_from=resume'] if Path(folder, 'last.pt').exists() else []
    run('train.py', *arguments, f'--out_dir={folder}', *resume)


def tune(folder, lengths, overshoot, arguments, head_arguments):
    """
    Find scales and vectors for these lengths. arguments: of every tune_scale.py; head_arguments:
    more of those that tune by gradient. Returns {method: value of --scale}.
    """
    run('tune_scale.py', f'--out_dir={folder}', '--method=uniform', '--n_samples=32', *arguments)
    uniform = read(f'{folder}/scale_uniform.json')
    best = dict(zip(uniform['lengths'], uniform['best_by_length']))
    scales = {f'uniform {T}': best[T] for T in lengths}
    for (name, kinds), T in itertools.product(TUNED.items(), lengths):
        target = round(overshoot * T)
        run('tune_scale.py', f'--out_dir={folder}', f'--target_length={target}', f'--tune={kinds}',
            f'--label={name}', *head_arguments, *arguments)
        scales[f'{name} {T}'] = f'{folder}/scale_head_{target}_{name}.json'
    return scales


def model_arguments(folder, name, scale):
    """What the stages that measure a method are given: run, scale and label, and the label."""
    label = f"demo_{name.replace(' ', '_')}"
    arguments = [f'--out_dir={folder}', f'--label={label}']
    if scale is not None:
        arguments.append(f'--scale={scale}')
    return arguments, label


def losses_of(folder, name, scale, lengths, n_samples):
    """The result of eval_ppl.py for a method: its loss at each position."""
    arguments, label = model_arguments(folder, name, scale)
    run('eval_ppl.py', *arguments, '--protocol=position', f'--lengths={lengths}'.replace(' ', ''),
        f'--n_samples={n_samples}', f'--tail={TAIL}')
    return read(f'{folder}/eval_ppl_position_{label}.json')


def entropy_of(folder, name, scale, n_samples):
    """The result of entropy.py for a method."""
    arguments, label = model_arguments(folder, name, scale)
    run('entropy.py', *arguments, f'--n_samples={n_samples}')
    return read(f'{folder}/entropy_{label}.json')


# ---------------------------------------------------------------------- what they found

def reach(position, loss, L, limit):
    """The last position, from L on, before the loss exceeds the limit."""
    reached = L
    for i, value in zip(position, loss):
        if i > L and value > limit:
            break
        reached = max(L, round(i))
    return reached


def slope(position, entropy, low, high):
    """Slope of entropy against ln i by least squares, for low < i <= high: nats per e-fold."""
    inside = [low < i <= high for i in position]
    return np.polyfit(np.log(position)[inside], np.array(entropy)[inside], 1)[0]


def smooth(values, width):
    """The mean of each value and the width - 1 values before it, or of fewer at the start."""
    return [np.mean(values[max(0, end - width):end]) for end in range(1, len(values) + 1)]


def entry_of_method(losses, curves, scale, L):
    """
    The report's entry for one method. losses: from losses_of(); curves: from entropy_of(), or None;
    scale: the value of --scale.
    """
    at = {}
    for row in losses['rows']:
        at[str(row['length'])] = {key: row[key] for key in AT if key in row}
    position = losses['position']  # the middle of each bin
    width = round(TAIL / (position[1] - position[0]))  # TAIL in bins
    limit = at[str(L)]['loss'] + TOLERANCE
    scales = scale or 1.0
    if isinstance(scale, str):
        scales = read(scale)['head_scale']
    method = {'at': at, 'reach': reach(position, smooth(losses['loss'], width), L, limit),
              'scale': [np.min(scales), np.max(scales)]}
    if curves:
        method['loss_curve'] = smooth(curves['loss'], width)
        method['entropy_curve'] = curves['mean_entropy']
    return method


def paired_differences(losses):
    """
    The difference in loss of each pair of methods at each length. losses: {method: {length: losses
    by window}}. All methods read the same windows.
    """
    pairs = []
    for T in losses['NoPE']:
        for a, b in itertools.combinations(losses, 2):
            rows = np.subtract(losses[a][T], losses[b][T])
            pairs.append({'length': int(T), 'a': a, 'b': b, 'difference': rows.mean(),
                          'standard_error': rows.std(ddof=1) / len(rows) ** 0.5})
    return pairs


def comparisons(methods, losses, position, L):
    """
    The report's entries that compare methods, and the slopes of NoPE's entropy. losses: as in
    paired_differences().
    """
    pairs, entropy = paired_differences(losses), methods['NoPE']['entropy_curve']
    at_L = {name: method['at'][str(L)]['loss'] for name, method in methods.items()}
    return {'paired_differences': pairs,
            'largest_standard_error': max(pair['standard_error'] for pair in pairs),
            'entropy_slope_before_L': slope(position, entropy, L / 2, L),
            'entropy_slope_past_L': slope(position, entropy, L, 2 * L),
            'gap_to_rope_at_L': at_L['NoPE'] - at_L['RoPE']}


def made_with(result, began):
    """The provenance of the report. result: of one stage, whose versions and device are copied."""
    same = {key: result[key] for key in ('commit', 'versions', 'device', 'dtype')}
    return {'command': command(), **same, 'seconds': round(time.perf_counter() - began, 1)}


def print_report(report, picture):
    print(f'\nLoss in nats per byte, mean of the last {TAIL} positions of {report["windows"]} test '
          f'windows; L = {report["block_size"]}')
    print(' ' * 22 + '        L       2L       4L  gain at 4L    reach   scales')
    for name, method in report['methods'].items():
        rows = list(method['at'].values())
        untuned = report['methods']['RoPE' if name == 'RoPE' else 'NoPE']
        gain = list(untuned['at'].values())[-1]['cut_loss'] - rows[-1]['loss']
        losses = ''.join(f'{row["loss"]:9.3f}' for row in rows) + f'{gain:12.3f}'
        low, high = method['scale']
        scales = f'{low:.2f} to {high:.2f}' if low < high else f'{low:.2f}'
        print(f'{name:22}{losses}{method["reach"]:9d}   {scales}')
    cut = ''.join(f'{row.get("cut_loss", row["loss"]):9.3f}'
                  for row in report['methods']['NoPE']['at'].values())
    print(f'{"NoPE, context cut to L":22}{cut}')
    print(f'\nlargest standard error of a paired difference: '
          f'{report["largest_standard_error"]:.4f} nats')
    print(f'entropy of NoPE per e-fold of context: {report["entropy_slope_before_L"]:.2f} nats '
          f'just before L, {report["entropy_slope_past_L"]:.2f} just past it')
    print(f'NoPE - RoPE at L: {report["gap_to_rope_at_L"]:+.3f} nats')
    print('\nfive seeds of this recipe, results/demo/seeds.json, mean ± standard deviation:')
    for row in read(ROOT / 'results/demo/seeds.json')['rows']:
        print(f"{row['method']:>14} at {row['length']}: {row['mean']:.3f} ± {row['sd']:.3f}, "
              f"gain {row['gain']:.3f}")
    print(f'{report["seconds"] / 60:.0f} minutes in all; the picture is {picture}')


def main():
    began, nope, rope = time.perf_counter(), f'{out_dir}/nope', f'{out_dir}/rope'
    run('data/stdlib/prepare.py')
    train(nope, f'--max_iters={max_iters}', *train_args)
    train(rope, 'config/demo_rope.py', f'--max_iters={max_iters}', *train_args)
    trained = read(f'{nope}/config.json')
    L = trained['block_size']
    lengths = [L, 2 * L, 4 * L]

    tuned = tune(nope, lengths[1:], overshoot, tune_args, [f'--max_iters={tune_iters}'])
    methods, by_window = {}, {}
    for name, scale in ({'NoPE': None} | tuned | {'RoPE': None}).items():
        folder, curves = rope if name == 'RoPE' else nope, None
        losses = losses_of(folder, name, scale, lengths, n_samples)
        if not name.endswith(f' {2 * L}'):  # the picture shows the methods for 4L
            curves = entropy_of(folder, name, scale, curve_samples)
        methods[name] = entry_of_method(losses, curves, scale, L)
        by_window[name] = losses['loss_at_by_window']

    uniform = read(f'{nope}/scale_uniform.json')
    search = next(iter(uniform['searches'].values()))
    report = {
        'block_size': L, 'target_length': 4 * L, 'lengths': lengths, 'windows': losses['samples'],
        'methods': methods, **comparisons(methods, by_window, curves['position'], L),
        'scale_fit': {key: search[key] for key in ('fit_a', 'fit_r2')},
        'seeds': {'train': trained['seed'], 'tune': uniform['settings']['seed']},
        'position': curves['position'], 'settings': settings(globals()), 'train_settings': trained,
        **made_with(losses, began)}
    report = save_json(f'{out_dir}/report.json', report)
    plots.draw(f'{out_dir}/report.json')
    print_report(report, f'{out_dir}/report.png')


if __name__ == '__main__':
    configure(globals())
    main()
