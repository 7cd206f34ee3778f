"""
The picture of every stage. A picture is drawn only from the JSON of the stage.

$ python -m lib.plots FILE.json [FILE.json ...]   # draws FILE.png next to each file

write_result() draws the picture of the JSON that it wrote, and train.py calls draw_log(). The
programs in results/ draw the pictures of single studies. The code that pictures share is in
lib/figures.py.
"""

import json
import math
import sys
import time
from itertools import cycle
from pathlib import Path

import numpy as np

from lib.answers import provenance, save_json
from lib.errors import MALFORMED, UserError, report
from lib.figures import (
    BLACK,
    BLUE,
    MOST,
    ORANGE,
    SKY,
    color_of,
    curve,
    curve_name,
    draw_bound,
    draw_cut,
    draw_loss_and_entropy,
    label_ends,
    length_axis,
    mark_length,
    panels,
    position_axis,
    run_name,
    running_mean,
    save,
)

# ----------------------------------------------------------------------------- training

def draw_log(log_path, png_path):
    """
    Training loss, validation loss, and attention entropy if it was logged, by the number of tokens
    read. log_path: the log.jsonl of train.py.
    """
    log_path = Path(log_path)
    rows = [json.loads(line) for line in log_path.read_text().splitlines()]
    figure, [left, right] = panels(f"Training: {'/'.join(log_path.parts[-4:-1])}", 2, 2)
    for axis, key, name, color in ((left, 'loss', 'training', SKY),
                                   (left, 'val_loss', 'validation', BLUE),
                                   (right, 'entropy', 'validation', BLUE)):
        measured = [row for row in rows if key in row]
        curve(axis, [row['tokens'] / 1e6 for row in measured], [row[key] for row in measured],
              name, color=color, lw=1)
    for axis, what in (left, 'loss (nats per token)'), (right, 'attention entropy (nats)'):
        axis.set(xlabel='tokens read (millions)', ylabel=what)
        label_ends(axis, values=True)
    save(figure, png_path)


# ----------------------------------------------------------------------------- scales

def draw_uniform(result):
    """Figure 2: loss and entropy with each scale. Figure 7: the best scale at each position."""
    from matplotlib import colormaps
    L, searches = result['block_size'], result['searches']
    figure, axes = panels(f'Uniform scales: {run_name(result)}', 3, 3, width=6)
    search = next(iter(searches.values()))
    position = np.array(search['position'])  # the same in all searches

    measured = [i for i, entropy in enumerate(search['entropy']) if entropy is not None]
    curves = []
    for i in measured[::math.ceil(len(measured) / 6)]:  # at most six
        curves.append((f"scale {search['candidates'][i]:g}", position, search['loss'][i],
                       search['entropy'][i], colormaps['viridis'](i / len(search['loss']))))
    curve(axes[0], running_mean(position), running_mean(search['best_loss_by_position']),
          'best at each', color=BLACK, ls='--')
    draw_loss_and_entropy(axes, curves, L, cut=search['cut'])

    beyond = position[position > L]
    ln_s = np.log(beyond / L)
    for (name, search), color in zip(searches.items(), cycle([ORANGE, BLUE, SKY, BLACK])):
        axes[2].scatter(position, search['best_by_position'], s=4, color=color)
        name += f": a = {search['fit_a']:.3f}, R² = {np.float64(search['fit_r2']):.2f}"
        curve(axes[2], beyond, 1 + search['fit_a'] * ln_s, name, color=color)
    curve(axes[2], beyond, (1 + 0.1 * ln_s) ** 2, 'YaRN: (1 + 0.1 ln(i / L))²', ls='--')
    position_axis(axes[2], L, r'best scale ($1/\sqrt{d}$)', 'Best scale and fit, 1 + a ln(i / L)')
    return figure


def scatter_heads(axis, scales, entropy, layers, ylabel):
    """Figure 5: the scale of each head against its entropy. layers: what to call each layer."""
    n_layer, n_head = np.shape(scales)
    points = axis.scatter(scales, np.array(entropy, float), s=16,
                          c=np.arange(n_layer).repeat(n_head))
    bar = axis.get_figure().colorbar(points, ax=axis, label='layer')
    bar.set_ticks(range(n_layer), labels=layers)
    axis.set(xlabel=r'scale ($1/\sqrt{d}$)', ylabel=ylabel, title='Scale and entropy of each head')


def draw_head(result):
    """Figures 4 and 5: loss and entropy by position, scale and entropy of heads; tuned scales."""
    lengths = [one['target_length'] for one in result.get('sets', [result])]
    scales = np.array(result.get('sets', [result])[-1]['head_scale'], float)
    target, heads = lengths[-1], scales.reshape(*scales.shape[:2], -1).mean(2)
    title = f"Head scales tuned at {', '.join(map(str, lengths))} tokens: {run_name(result)}"
    figure, axes = panels(title, 4, 2, width=6.2, height=3.5)
    curves = []
    for name, measured in result['curves'].items():
        curves.append((name, result['position'], measured['loss'], measured['entropy'], None))
    draw_loss_and_entropy(axes, curves, result['block_size'], cut=result['cut'])
    for axis in axes[:2]:
        mark_length(axis, target, f'tuned at {target}', ha='right')  # right of it stand names
    scatter_heads(axes[2], heads, result['last_entropy'], range(len(scales)),
                  f"entropy at position {result['curve_length']} (nats)")
    image = axes[3].imshow(scales.reshape(len(scales), -1), aspect='auto', cmap='cividis')
    axes[3].set(xlabel='head' if scales.ndim == 2 else 'channel, the heads side by side',
                ylabel='layer', title='Tuned scales')
    axes[3].yaxis.get_major_locator().set_params(integer=True)
    axes[3].grid(False)
    figure.colorbar(image, ax=axes[3], label=r'scale ($1/\sqrt{d}$)')
    return figure


# ----------------------------------------------------------------------------- perplexity

def ppl_axis(axis, ppl):
    """A logarithmic axis with plain numbers. It cuts off values above 20 times the lowest."""
    from matplotlib.ticker import LogLocator, MaxNLocator
    low, high = min(ppl), min(max(ppl), 20 * min(ppl))
    margin = np.clip((high / low) ** 0.1, 1.01, 1.1)
    axis.set(yscale='log', ylim=(low / margin, high * margin), ylabel='perplexity')
    is_wide = high > 3 * low  # else powers of 10 and their multiples are too few ticks
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)) if is_wide else MaxNLocator(6))
    axis.yaxis.set_major_formatter('{x:g}')
    axis.minorticks_off()


def draw_ppl(result):
    """Perplexity by window length, of one model or of each row of a table."""
    rows = result['rows']
    if 'name' in rows[0]:
        about = f"{result['settings']['out_dir']} {result['label']}"
    else:
        about = run_name(result)
        columns = {key: [row.get(key) for row in rows] for key in rows[0] | rows[-1]}
        rows = [columns | {'name': curve_name(result)}]
    title = f"Perplexity on {Path(result['dataset']).name}, protocol {result['protocol']}: {about}"
    seeds = max(len(row.get('runs', [])) for row in rows)
    if seeds:
        title += f'\nbars: standard deviation over {seeds} seeds'
        if any('standard_error' in row for row in rows):
            title += ', or standard error over windows'

    every = [ppl for row in rows for ppl in (*row['ppl'], *cut_ppl(result, row))
             if ppl is not None]
    families = {}  # a table of few rows is one family
    for row in rows:
        method = next((name for name in ('NoPE', 'RoPE') if name in row['name']), 'other')
        families.setdefault(len(rows) > MOST and method, []).append(row)
    groups = []
    for members in families.values():
        parts = np.array_split(members, math.ceil(len(members) / MOST))
        groups += [(members[0], part) for part in parts]
    figure, axes = panels(title, len(groups), 2, width=7, height=3.2)
    for axis, (first, members) in zip(axes, groups):
        for row in members:
            error = row.get('sd')
            # The standard error is of the loss. Times the perplexity, it is of the perplexity.
            if 'standard_error' in row:
                error = np.array(row['standard_error'], float) * np.array(row['ppl'], float)
            curve(axis, result['lengths'], row['ppl'], row['name'], error)
        draw_cut(axis, result['lengths'], cut_ppl(result, first),
                 f"{first['name']}, cut to {(result | first)['pretrained_length']}")
        ppl_axis(axis, every or [1])
        length_axis(axis, result['lengths'], result['block_size'])
        axis.set(xlabel='window length (tokens)')
        label_ends(axis, values=True)
    return figure


def cut_ppl(result, row):
    """A row's perplexity at each length with the context cut to L; None if it is not known."""
    lengths, L = result['lengths'], (result | row)['pretrained_length']
    measured = row.get('cut_loss', [])
    # By the rule `same` each length scores the same tokens. Windows of L that score no more than
    # L / 8 of them are the pieces of cut_windows().
    is_measured_at_L = result.get('rule') == 'same' and L in lengths
    if is_measured_at_L and (result.get('stride', 0) <= L // 8 or not measured):
        at_L = row['ppl'][lengths.index(L)]
        return [at_L if T >= L else None for T in lengths]
    return [None if loss is None else np.exp(loss) for loss in measured]


def draw_positions(result):
    """Loss by position, and at each requested length its standard error over windows."""
    title = f"Loss on {Path(result['dataset']).name}: {run_name(result)}\n" \
            f"dots: mean of the last {result['tail']} positions, with its standard error"
    figure, [axis] = panels(title, 1, 1)
    curve(axis, result['position'], result['loss'], 'bins of L / 16', color=SKY, lw=1)
    for row in result['rows']:
        axis.errorbar(row['length'], row['loss'], row['standard_error'], fmt='.', color=BLACK)
    lengths, cut = zip(*[(row['length'], row.get('cut_loss')) for row in result['rows']])
    draw_cut(axis, lengths, cut, f"context cut to {result['pretrained_length']}")
    position_axis(axis, result['block_size'], 'loss (nats per token)')
    return figure


# ----------------------------------------------------------------------------- attention

def draw_entropy(result):
    """
    Figure 1: loss and mean entropy by position. With tuned scales also Figure 5, with the rank
    correlation ρ of scale and entropy in each layer.
    """
    n = 3 if 'spearman' in result else 2
    others = len(result['compare'])
    what = f'{others + 1} runs' if others else run_name(result)
    figure, axes = panels(f'Attention entropy: {what}', n, n, width=6)
    curves = []
    for one in [*result['compare'], result]:
        curves.append((curve_name(one), one['position'], one['loss'], one['mean_entropy'], None))
    draw_loss_and_entropy(axes, curves, result['block_size'], result['unit'], result.get('cut'))
    if 'spearman' in result:
        layers = []
        for layer, rho in enumerate(np.array(result['spearman'], float)):
            layers.append(f'{layer}: ρ = {rho:.2f}')
        last = np.array(result['entropy'], float)[:, :, -1]
        scatter_heads(axes[2], result['head_scale'], last, layers,
                      f"entropy at position {result['position'][-1]:.0f} ({result['unit']})")
    return figure


def draw_heads(result):
    """Figures 3 and 10-12: the entropy of every head by position, one panel per layer."""
    layers, position = np.array(result['entropy'], float), result['position']
    title = f'Attention entropy of each head, a thin line each: {run_name(result)}'
    figure, axes = panels(title, len(layers), 4, width=4.2, height=3)
    for layer, (axis, heads) in enumerate(zip(axes, layers)):
        axis.plot(position, heads.T, color=SKY, lw=0.7)
        curve(axis, position, heads.mean(0), 'mean', color=BLUE)
        draw_bound(axis, position, result['unit'])
        axis.set_ylim(bottom=0)
        position_axis(axis, result['block_size'], f"entropy ({result['unit']})", f'layer {layer}')
    return figure


def draw_maps(result):
    """The score maps of one head: a row of panels per length, a column per part of the scores."""
    rows, parts = result['lengths'], list(result['lengths'][0]['maps'])
    title = f"Layer {result['layer']}, head {result['head']}: {run_name(result)}"
    figure, axes = panels(title, len(rows) * len(parts), len(parts), width=3.6, height=3.2)
    for i, part in enumerate(parts):
        column = axes[i::len(parts)]
        values = np.concatenate([line for row in rows for line in row['maps'][part]])
        colors = {'norm': 'linear', 'clim': np.percentile(values, [1, 99])}
        if part == 'attention':
            # Attention spans powers of ten. The color scale is the same in every picture, so that
            # two models can be compared.
            colors = {'norm': 'log', 'clim': (1e-4, 1)}
        for axis, row in zip(column, rows):
            T, lines = row['length'], row['maps'][part]
            cells = np.full((len(lines), len(lines)), np.nan)  # later keys stay white
            cells[np.tril_indices(len(lines))] = np.concatenate(lines)
            image = axis.imshow(cells.clip(colors['clim'][0]), extent=(0, T, T, 0), **colors)
            axis.set(xlabel='key', ylabel='query', title=f'{part}, {T} tokens')
            if part == 'attention':
                share = row['first_key'][result['layer']][result['head']]
                axis.set_title(f'{part}, {T} tokens\n{share:.1%} on the first key')
            axis.grid(False)
            if result['block_size'] <= T:
                mark_length(axis, result['block_size'], f"L = {result['block_size']}")
        figure.colorbar(image, ax=column, location='bottom', label='mean of a cell')
    return figure


# ----------------------------------------------------------------------------- tasks

def draw_passkey(result):
    """
    Figure 6: accuracy by the length of the prompt and the depth of the key. The right edge of a
    cell is the length.
    """
    lengths, n_depths, window = result['lengths'], result['n_depths'], result['window']
    inside = np.float64(result['accuracy_inside'])  # nan if all prompts are longer
    title = f'Passkey: {run_name(result)}'
    if np.isfinite(inside):
        title += f'\n{inside:.1%} right up to {window} tokens'
    figure, [axis] = panels(title, 1, 1)
    accuracy, depths = np.array(result['accuracy'], float).T, np.linspace(0, 1, n_depths + 1)
    image = axis.pcolormesh([0, *lengths], depths, accuracy, vmin=0, vmax=1, cmap='cividis')
    axis.set(xlabel='length of the prompt (tokens)', ylabel='depth of the key')
    axis.yaxis.set_major_formatter('{x:.0%}')
    axis.invert_yaxis()
    axis.grid(False)
    for length, name in {window: 'window', result['block_size']: 'L'}.items():
        if length < lengths[-1]:
            mark_length(axis, length, f'{name} = {length}', color='#D55E00')
    figure.colorbar(image, ax=axis, label='accuracy')
    return figure


def draw_tasks(result):
    """Accuracy by length, one panel per task of che.py."""
    of_many = any(row['exact'] != row['accuracy'] for row in result['tasks'].values())
    title = (f"Algorithmic tasks: {result['method']} {result['label']} "
             f"(dashed: chance{'; dotted: whole answers' if of_many else ''})")
    figure, axes = panels(title, len(result['tasks']), 3, width=5, height=2.8)
    for axis, (task, row) in zip(axes, result['tasks'].items()):
        accuracy = 100 * np.array(row['accuracy'], float)
        curve(axis, result['lengths'], accuracy, result['method'])
        exact = 100 * np.array(row['exact'], float)
        curve(axis, result['lengths'], exact, result['method'], ls=':', lw=1)
        axis.axhline(100 * row['chance'], color='#888888', ls='--', lw=1)
        axis.set(ylim=(-3, 103), xlabel='length of the input (symbols)', ylabel='accuracy (%)',
                 title=f"{task.replace('_', ' ')}: {row['outside']:.1%} past L")
        if result['lengths'][-1] > 16 * result['train_length']:
            length_axis(axis, result['lengths'], result['train_length'])
        else:
            mark_length(axis, result['train_length'], f"L = {result['train_length']}")
    return figure


def draw_demo(result):
    """The demo's picture: the loss by position, and the gain at far repeats."""
    lengths, readings = result['lengths'], result['readings']
    L, T = lengths[0], lengths[-1]
    title = f"{result['windows']} windows of {result['source']} ({result['settings']['out_dir']})"
    figure, [left, right] = panels(title, 2, 2)
    for title, row in readings.items():
        curve(left, range(1, T + 1), row['curve'], title)
    name, best = list(readings.items())[-1]
    cut = [row.get('cut_loss', row['loss']) for row in best['at'].values()]
    draw_cut(left, lengths, cut, f"{name.partition(',')[0]}, context cut to L")
    position_axis(left, L, 'loss (nats per token)', f'Loss, mean of {result["tail"]} positions')

    gains = [row['far']['gain'] for row in readings.values()]
    # An error is None in the JSON if all far repeats are in one window.
    errors = np.array([row['far']['gain_error'] for row in readings.values()], float)
    right.barh(list(readings), gains, xerr=errors, ecolor='#777777',
               color=[color_of(title) for title in readings])
    right.axvline(0, color=BLACK, lw=1)
    right.invert_yaxis()
    right.set(xlabel='gain over seeing only the last L tokens (nats per token, ± standard error)',
              title=f'Where text repeats from more than L = {L} tokens back')
    return figure


# ----------------------------------------------------------------------------- any result

PICTURES = {
    'attention': draw_maps,
    'che': draw_tasks,
    'demo': draw_demo,
    'entropy': draw_entropy,
    'eval_ppl position': draw_positions,
    'eval_ppl sliding': draw_ppl,
    'eval_ppl tail': draw_ppl,
    'passkey': draw_passkey,
    'tune_scale head': draw_head,
    'tune_scale uniform': draw_uniform,
}


def kind_of(result):
    """The key of a result in PICTURES: its stage, for some stages with the protocol or method."""
    stage = result.get('stage', '')
    parts = {'eval_ppl': 'protocol', 'tune_scale': 'method'}
    return f'{stage} {result[parts[stage]]}' if stage in parts else stage


def draw(path):
    """Draw the pictures of a stage's JSON next to it. Returns a list of their paths, or []."""
    path = Path(path)
    try:
        result = json.loads(path.read_text(encoding='utf-8'))
        kind = kind_of(result)
        figures = {path.with_suffix('.png'): PICTURES[kind]}
    except MALFORMED:  # the file is not a result, or the result has no picture
        return []
    if kind == 'entropy' and path.stem.startswith('entropy'):
        heads = path.stem.replace('entropy', 'entropy_heads', 1)
        figures[path.with_name(f'{heads}.png')] = draw_heads
    for png_path, draw_figure in figures.items():
        save(draw_figure(result), png_path)
    return list(figures)


def write_result(path, result, settings, runtime, began):
    """
    Write PATH.json and its pictures. The file holds the result and what is needed to measure it
    again. The first rank writes; the others return at once. began: time.perf_counter() at the
    start.
    """
    if runtime.is_main:
        seconds = time.perf_counter() - began
        save_json(f'{path}.json', result | provenance(settings, runtime, seconds))
        print('wrote', f'{path}.json', *draw(f'{path}.json'))


def main():
    sys.excepthook = report
    if not sys.argv[1:]:
        raise UserError('Give the results to draw: python -m lib.plots FILE.json [FILE.json ...]')
    for path in sys.argv[1:]:
        try:
            drawn = draw(path)
        except KeyError as key:
            raise UserError(f'{path} has no {key}. Measure it again.') from key
        if not drawn:
            raise UserError(f"{path} has no picture here. These have one: {', '.join(PICTURES)}. "
                            'A study draws its picture by its own program in results/.')
        print('wrote', *drawn)


if __name__ == '__main__':
    main()
