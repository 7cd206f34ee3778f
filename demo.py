"""
The paper's story on a laptop: train a NoPE model and its RoPE twin on the Python standard library,
find the softmax scales that extend NoPE, and draw what they buy. It runs the stages by the commands
it prints; each works alone.

$ make demo

Writes out_dir/report.png, report.json (schema in the README), and what each stage writes in
out_dir/nope and /rope
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from configurator import configure, settings
from runtime import ROOT, clock, new_figure, save_json, save_png

out_dir = 'out/demo'
max_iters = 2200             # training steps of each twin
tune_iters = 120             # tuning steps of each set of head scales
overshoot = 1.25             # head scales for T tokens are tuned at this times T: Appendix A tunes at 18K for 16K
n_samples = 1700             # test windows of 4L tokens behind each number in the table
curve_samples = 96           # test windows of 8L tokens behind the curves in the picture
train_args: list[str] = []   # more settings for train.py, such as ['--n_layer=2']
tune_args: list[str] = []    # more settings for tune_scale.py

LAST = 64  # "at T" is the mean loss of the last so many positions before T


def run(stage, *arguments):
    """
    Run a stage as a user would, showing the command. Stops the demo with the stage's exit status if
    it fails.
    """
    print(f"\n$ python {' '.join([stage, *arguments])}", flush=True)
    child = subprocess.Popen([sys.executable, str(ROOT / stage), *arguments])
    try:
        child.wait()
    except KeyboardInterrupt:  # which the stage got, too: train.py saves first
        child.wait()
        raise
    if child.returncode:
        sys.exit(child.returncode)


def read(path):
    return json.loads(Path(path).read_text())


def reach(position, loss, L, at_L, tolerance=0.05):
    """
    The position up to which, from L on, the loss stays within `tolerance` nats of that at L. Bins
    as in the JSON.
    """
    reached = L
    for i, value in zip(position, loss):
        if i > L:
            if value > at_L + tolerance:
                break
            reached = round(i)
    return reached


def slope(position, entropy, low, high):
    """
    Least-squares slope of entropy against ln i, for positions low < i <= high: nats per e-fold of
    context.
    """
    position, entropy = np.array(position), np.array(entropy)
    inside = (position > low) & (position <= high)
    return float(np.polyfit(np.log(position[inside]), entropy[inside], 1)[0])


def smooth(values, width):
    """
    Mean of each value and the width - 1 before it (fewer at the start), as "at T" averages
    positions.
    """
    sums = np.cumsum([0.0, *values])
    i = np.arange(1, len(values) + 1)
    low = np.maximum(0, i - width)
    return (sums[i] - sums[low]) / (i - low)


def compare(results, curves, scales, L):
    """
    The numbers of the report. results, curves: name -> JSON of eval_ppl.py and entropy.py, each on
    the same windows. Returns methods, name -> numbers, and the paired differences of each two
    methods at each length.
    """
    methods = {}
    for name, result in results.items():
        at = {str(r['length']): {'loss': r['loss'], 'standard_error': r['standard_error']} for r in result['rows']}
        bin_width = result['position'][1] - result['position'][0]
        running = smooth(result['loss'], round(LAST / bin_width))
        methods[name] = {'at': at, 'reach': reach(result['position'], running, L, at[str(L)]['loss']),
                         'scale': scales[name]}
        if name in curves:
            loss, entropy = curves[name]['loss'], curves[name]['mean_entropy']
            methods[name] |= {'loss_curve': smooth(loss, round(LAST / bin_width)), 'entropy_curve': entropy}
    pairs, names = [], list(results)
    for T in results['NoPE']['loss_at_by_window']:
        for i, a in enumerate(names):
            for b in names[i + 1:]:
                rows = np.subtract(*(results[name]['loss_at_by_window'][T] for name in (a, b)))
                pairs.append({'length': int(T), 'a': a, 'b': b, 'difference': rows.mean(),
                              'standard_error': rows.std(ddof=1) / len(rows) ** 0.5})
    return methods, pairs


def draw(report, path):
    """The picture of the README, from report.json alone."""
    L, target = report['block_size'], report['target_length']
    colors = {'NoPE': '#7f7f7f', 'NoPE, uniform scale': '#e08214', 'NoPE, head scale': '#1f4e9c', 'RoPE': '#b2182b'}
    figure, (left, right) = new_figure(1, 2, width=5.8, height=4.2)
    for name, color in colors.items():
        key = {'NoPE, uniform scale': f'uniform {target}', 'NoPE, head scale': f'head {target}'}.get(name, name)
        method = report['methods'][key]
        text = name + (f" {method['scale'][0]:g}" if 'uniform' in name else '')
        text += f"s {method['scale'][0]:.2f} to {method['scale'][1]:.2f}" if 'head' in name else ''
        left.plot(report['position'], method['loss_curve'], color=color, lw=2, label=text)
        right.plot(report['position'], method['entropy_curve'], color=color, lw=2)
    left.set(ylabel='log-perplexity (nats per byte)', title='Past its training length L, a NoPE model fails ...')
    right.set(ylabel='mean attention entropy (nats)', title='... because its attention spreads; scaling refocuses it')
    right.plot(report['position'], np.log(report['position']), color='black', ls='--', lw=1)
    right.annotate('upper bound ln i', (4 * L, np.log(4 * L)), xytext=(-8, 8), textcoords='offset points', ha='right')
    for axis in (left, right):
        axis.set(xlabel='position i (bytes)', xscale='log', xlim=(L / 4, 8 * L))
        axis.set_xticks(ticks := [L // 4, L // 2, L, 2 * L, 4 * L, 8 * L], [str(t) for t in ticks])
        axis.minorticks_off()
        axis.axvline(L, color='black', ls=':', lw=1.2)
        axis.annotate(f' L = {L}', (L, 0.02), xycoords=('data', 'axes fraction'))
    left.margins(y=0.1)
    right.set_ylim(bottom=0)
    left.legend(loc='upper left', frameon=True, framealpha=1, edgecolor='none')
    save_png(figure, path)


def main():
    began, nope, rope = time.perf_counter(), f'{out_dir}/nope', f'{out_dir}/rope'
    run('data/stdlib/prepare.py')
    for folder, config in ((nope, []), (rope, ['config/demo_rope.py'])):
        resume = ['--init_from=resume'] if Path(folder, 'last.pt').exists() else []
        run('train.py', *config, f'--out_dir={folder}', f'--max_iters={max_iters}', *train_args, *resume)
    L = read(f'{nope}/config.json')['block_size']

    run('tune_scale.py', f'--out_dir={nope}', '--method=uniform', '--n_samples=32', *tune_args)
    tuned_at = {T: round(overshoot * T) for T in (2 * L, 4 * L)}
    for target in tuned_at.values():
        run('tune_scale.py', f'--out_dir={nope}', f'--target_length={target}', f'--max_iters={tune_iters}', *tune_args)
    uniform = read(f'{nope}/scale_uniform.json')
    best = dict(zip(uniform['lengths'], uniform['best_by_length']))

    results, curves, scales = {}, {}, {}
    for name, folder, scale, in_picture in (
            ('NoPE', nope, None, True),
            (f'uniform {2 * L}', nope, best[2 * L], False), (f'uniform {4 * L}', nope, best[4 * L], True),
            (f'head {2 * L}', nope, f'{nope}/scale_head_{tuned_at[2 * L]}.json', False),
            (f'head {4 * L}', nope, f'{nope}/scale_head_{tuned_at[4 * L]}.json', True),
            ('RoPE', rope, None, True)):
        common = [f'--out_dir={folder}', f'--label=demo_{name.replace(" ", "_")}']
        common += [] if scale is None else [f'--scale={scale}']
        run('eval_ppl.py', *common, '--protocol=position', f'--lengths=[{L},{2 * L},{4 * L}]',
            f'--n_samples={n_samples}', f'--last={LAST}')
        results[name] = read(f'{folder}/eval_ppl_position_demo_{name.replace(" ", "_")}.json')
        if in_picture:
            run('entropy.py', *common, f'--n_samples={curve_samples}')
            curves[name] = read(f'{folder}/entropy_demo_{name.replace(" ", "_")}.json')
        numbers = read(scale)['head_scale'] if isinstance(scale, str) else [scale or 1.0]
        scales[name] = [float(np.min(numbers)), float(np.max(numbers))]

    methods, pairs = compare(results, curves, scales, L)
    lengths, position = [L, 2 * L, 4 * L], curves['NoPE']['position']
    report = {
        'block_size': L, 'target_length': 4 * L, 'lengths': lengths, 'windows': results['NoPE']['samples'],
        'methods': methods, 'paired_differences': pairs,
        'largest_standard_error': max(p['standard_error'] for p in pairs),
        'entropy_slope_before_L': slope(position, methods['NoPE']['entropy_curve'], L / 2, L),
        'entropy_slope_past_L': slope(position, methods['NoPE']['entropy_curve'], L, 2 * L),
        'gap_to_rope_at_L': methods['NoPE']['at'][str(L)]['loss'] - methods['RoPE']['at'][str(L)]['loss'],
        'scale_fit': {key: next(iter(uniform['searches'].values()))[key] for key in ('fit_a', 'fit_r2')},
        'seeds': {'train': read(f'{nope}/config.json')['seed'], 'tune': uniform['settings']['seed']},
        'position': position, 'settings': settings(globals()), 'train_settings': read(f'{nope}/config.json'),
        'versions': results['NoPE']['versions'], 'device': results['NoPE']['device'],
        'seconds': round(time.perf_counter() - began, 1)}
    draw(save_json(f'{out_dir}/report.json', report), f'{out_dir}/report.png')

    print(f'\nLoss in nats per byte, mean of the last {LAST} positions of {report["windows"]} test windows; L = {L}')
    print(f'{"":22}' + ''.join(f'{f"{T // L}L" if T > L else "L":>9}' for T in lengths) + '    reach   scales')
    for name, method in methods.items():
        row = ''.join(f"{method['at'][str(T)]['loss']:9.3f}" for T in lengths)
        low, high = method['scale']
        text = f'{low:.2f}' + f' to {high:.2f}' * (high > low)
        print(f'{name:22}{row}{method["reach"]:9d}   {text}')
    print(f'\nlargest standard error of a paired difference: {report["largest_standard_error"]:.4f} nats')
    print(f'entropy of NoPE per e-fold of context: {report["entropy_slope_before_L"]:.2f} nats just before L, '
          f'{report["entropy_slope_past_L"]:.2f} just past it')
    print(f'NoPE - RoPE at L: {report["gap_to_rope_at_L"]:+.3f} nats')
    print(f'{clock(report["seconds"])} in all; the picture is {out_dir}/report.png')


if __name__ == '__main__':
    configure(globals())
    main()
