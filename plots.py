"""
The picture of every stage, drawn only from the JSON that the stage wrote.

$ python plots.py out/demo/nope/eval_ppl.json              # draws eval_ppl.png beside it again
$ python plots.py out/a/entropy.json out/b/entropy_x.json  # both in out/a/entropy_and_entropy_x.png

A method has the same color in every picture. A dotted line marks L, the length of training.
"""

import json
import math
import re
from itertools import zip_longest
from pathlib import Path

from configurator import configure

import numpy as np
from matplotlib import colormaps, rcParams
from matplotlib.figure import Figure

paths: list[str] = []        # JSON files of results; several of one stage share a picture

# A name may hold a $, so no text is read as mathematics.
rcParams.update({'text.parse_math': False, 'font.size': 9, 'savefig.dpi': 110,
                 'savefig.bbox': 'tight', 'figure.constrained_layout.use': True})

# The names of the papers' position methods; others have those of their settings.
NAMES = {
    'none': 'NoPE',
    'rope': 'RoPE',
    'alibi': 'ALiBi',
    'kerple': 'Kerple',
    'fire': 'FIRE',
    't5': 'T5 bias',
    'cope': 'CoPE',
    'xl': 'Transformer-XL',
}

# {pattern: color}. A curve has the color of the first pattern that its name matches. The palettes
# are Okabe and Ito's and Paul Tol's, because color-blind readers can distinguish their colors.
BLUE = '#0072B2'
SKY = '#56B4E9'
GRAY = '#777777'
COLORS = {
    r'dape': '#AA4499',
    r'alibi': '#44AA99',
    r'kerple': '#117733',
    r'fire': '#CC6677',
    r'\bt5': '#661100',
    r'\bcope': '#6699CC',
    r'transformer-xl|relative': '#555555',
    r'dynamic': '#332288',
    r'ntk': '#999933',
    r'yarn': '#882255',
    r'\bpi': '#CC79A7',
    r'rope': '#D55E00',
    r'log-?n': '#888888',
    r'every weight|full_': '#009E73',
    r'\bconv\b.*scale': '#117733',
    r'\bconv\b': '#EE3377',
    r'norm|vectors|\bout\b': SKY,
    r'uniform|scale\d': '#E69F00',
    r'as loaded|scale 1$': '#000000',
    r'head|scale|without': BLUE,  # an ablation of head scale is called "without ..."
    r'nope': '#000000',
    r'': GRAY,
}

BOUND = 'upper bound: ln i'  # the entropy of equal weights on i positions


# ----------------------------------------------------------------------------- names and colors

class Entry(dict):
    """An object of a JSON file: entry.loss is entry['loss'], or None if it lacks that."""
    __getattr__ = dict.get


def name_of(result):
    """A result's position method, its label, which says how the model was changed, and its run."""
    name = '/'.join(NAMES.get(name, name) for name in result.position_method.split(','))
    name += ' + DAPE' * bool(result.dape_kernel) + ' + conv' * bool(result.short_conv)
    name += f', {result.label}' * bool(result.label)
    return f"{name} ({'/'.join(Path(result.checkpoint).parts[-3:])})"


def color_of(name):
    for pattern, color in COLORS.items():
        if re.search(pattern, name.split(' (')[0], re.IGNORECASE):
            return color


# ----------------------------------------------------------------------------- panels and curves

def panels(title, n, columns=4, width=7):
    """A figure of n panels and the list of their axes. It needs no display."""
    columns = min(n, columns)
    rows = math.ceil(n / columns)
    figure = Figure(figsize=(width * columns, 3.8 * rows))
    figure.suptitle(title)
    return figure, [figure.add_subplot(rows, columns, i + 1) for i in range(n)]


def column(rows, key):
    """The numbers of a key, (rows,); nan where a row lacks it."""
    return np.array([row.get(key) for row in rows], float)


def curve(axis, x, y, name, color=None, width=1.5, error=None):
    """Plot y by x in the color of the name. Curves of one color have different dashes."""
    color = color or color_of(name)
    before = sum(line.get_color() == color for line in axis.lines)
    axis.errorbar(x, y, error, color=color, label=name, lw=width, capsize=3,
                  ls='- -- -. :'.split()[before % 4], marker='.' * (len(x) <= 12))


def finish(axis, results, ylabel, title='', xlabel='position (tokens)'):
    """A logarithmic x axis with a line at each L, labels, and the names of the curves."""
    for L in {result.block_size or result.train_length or result.L for result in results}:
        axis.axvline(L, color='black', ls=':', label=f'L = {L}')
    axis.set_xscale('log', base=2)
    axis.xaxis.set_major_formatter('{x:g}')
    axis.set(xlabel=xlabel, ylabel=ylabel, title=title)
    axis.grid(alpha=0.3)
    axis.legend(loc='center left', bbox_to_anchor=(1, 0.5))


def draw_both(axes, curves, results):
    """
    Loss, as a mean over 8 bins, that is L / 2 positions, and entropy by position, in two panels.
    curves: rows of (name, positions, losses, entropies), or with a color.
    """
    for name, position, loss, entropy, *color in curves:
        smooth = [np.convolve(bins, np.ones(8) / 8, 'valid') for bins in (position, loss)]
        curve(axes[0], *smooth, name, *color)
        curve(axes[1], position, entropy, name, *color)
    for result in results:
        cut = (result.search or result).cut
        if cut:
            curve(axes[0], cut.position, cut.loss, f'{name_of(result)}, cut to {cut.context}',
                  width=0.8)
    curve(axes[1], position, np.log(position), BOUND, width=0.8)
    finish(axes[0], results, 'loss (nats per token, running mean)')
    finish(axes[1], results, 'mean attention entropy (nats)')


# ----------------------------------------------------------------------------- training

def draw_log(log_path, png_path):
    """Losses and attention entropy by tokens read, from the log.jsonl of train.py."""
    rows = [json.loads(line) for line in Path(log_path).read_text().splitlines()]
    figure, [axis] = panels(f'Training: {Path(log_path).parent}', 1)
    for key, color in ('loss', SKY), ('val_loss', BLUE), ('entropy', GRAY):
        measured = [row for row in rows if key in row]
        curve(axis, column(measured, 'tokens'), column(measured, key), key, color)
    axis.set(xlabel='tokens read', ylabel='loss per token, attention entropy (nats)')
    axis.legend()
    figure.savefig(png_path)


# ----------------------------------------------------------------------------- scales

def draw_uniform(*results):
    """
    Figure 2: loss and entropy with each scale, for the first result. Figure 7: the best scale at
    each position and its fit, for all results.
    """
    figure, axes = panels(f'Uniform scales of {name_of(results[0])}', 3)
    search = results[0].search
    curves, scales = [], search.candidates
    for i, entropy in enumerate(search.entropy):
        if entropy:  # it is measured for six scales
            curves.append((f'scale {scales[i]:g}', search.position, search.loss[i], entropy,
                           colormaps['viridis'](i / len(scales))))
    draw_both(axes, curves, results[:1])
    for i, result in enumerate(results):
        search, position = result.search, np.array(result.search.position)
        fit = 1 + search.fit_a * np.log(position / result.block_size).clip(0)
        axes[2].plot(position, search.best_by_position, '.', ms=3, color=f'C{i}')
        curve(axes[2], position, fit, f'{name_of(result)}\na = {search.fit_a:.3f}, '
              f'R² = {search.fit_r2}', f'C{i}')
    finish(axes[2], results, 'best scale (1/√d)',
           'Best scale at position i, and its fit beyond L, 1 + a ln(i / L)')
    return figure


def scatter_heads(axis, scales, entropy, title=''):
    """Figure 5: the scale of each head against its entropy."""
    points = axis.scatter(scales, entropy, c=np.indices(np.shape(scales))[0])
    axis.figure.colorbar(points, ax=axis, label='layer', ticks=range(len(scales)))
    axis.set(xlabel='head_scale (1/√d)', ylabel='entropy at the end (nats)', title=title)


def draw_head(result):
    """
    Figures 4 and 5: loss and entropy by position, scale and entropy of heads. And as an image the
    vectors that `tune` names first, such as head_scale.
    """
    tuned = (result.sets or [result])[-1]
    kind = re.match(r'\w+', result.settings.tune)[0]
    kind = kind if tuned.get(kind) else 'head_scale'
    rows, scales = tuned[kind], np.array(tuned.head_scale)
    vectors = np.array([*rows.values()] if isinstance(rows, dict) else rows)
    figure, axes = panels(f'Tuned at {tuned.target_length} tokens: {name_of(result)}', 4, 2)
    draw_both(axes, [(name, result.position, one.loss, one.entropy)
                     for name, one in result.curves.items()], [result])
    scatter_heads(axes[2], scales.mean(tuple(range(2, scales.ndim))), result.last_entropy)
    image = axes[3].imshow(vectors.reshape(len(vectors), -1), aspect='auto')
    axes[3].set(xlabel='head, or channel', ylabel='layer, or vector', yticks=range(len(vectors)))
    figure.colorbar(image, ax=axes[3], label=f'{kind} (scales in 1/√d)')
    return figure


# ----------------------------------------------------------------------------- perplexity

def draw_ppl(*results):
    """Perplexity by window length or position, also of the model that sees only the last L."""
    error, of = 'gain_error', 'of the difference from the context cut to L, over the same windows'
    if error not in results[0].rows[-1]:
        error, of = 'standard_error', 'over windows'
    figure, [axis] = panels(f'{results[0].dataset}, protocol {results[0].protocol}\n'
                            f'bars: standard error {of}', 1, width=10)
    for result in results:
        name, rows = name_of(result), result.rows
        lengths = column(rows, 'length')
        curve(axis, lengths, column(rows, 'loss'), name, error=column(rows, error))
        if 'cut_loss' in rows[-1]:
            curve(axis, lengths, column(rows, 'cut_loss'),
                  f'{name}, cut to {result.pretrained_length}', width=0.8)
        if result.position:
            curve(axis, result.position, result.loss, f'{name}, each position', width=0.5)
    axis.yaxis.set_major_formatter(lambda loss, _: f'{math.exp(loss):.3g}')
    finish(axis, results, 'perplexity', '', 'tokens')
    return figure


def draw_gain(axis, name, row):
    """A bar: what a model gains where text repeats from more than L tokens back."""
    axis.barh(name, row.gain, xerr=row.gain_error, color=color_of(name), ecolor=GRAY)
    axis.yaxis.set_inverted(True)
    axis.set(title='Where text repeats from more than L tokens back',
             xlabel='gain over the last L tokens alone (nats per token, ± standard error)')


def draw_repeats(*results):
    """The gain at far repeats and at the controls."""
    figure, [axis] = panels('', 1)
    for result in results:
        for row in result.rows:
            draw_gain(axis, f'{name_of(result)}: {row.kind}', row)
    return figure


# ----------------------------------------------------------------------------- attention

def draw_entropy(*results):
    """Figure 1: loss and mean entropy by position. For tuned scales also Figure 5."""
    scaled = [result for result in results if result.spearman]
    figure, axes = panels('Attention entropy', 2 + len(scaled))
    draw_both(axes, [(name_of(result), result.position, result.loss, result.mean_entropy)
                     for result in results], results)
    for axis, result in zip(axes[2:], scaled):
        scatter_heads(axis, result.head_scale, np.array(result.entropy)[..., -1],
                      f'Rank correlation by layer: {np.array(result.spearman, float).round(2)}')
    return figure


def draw_heads(result):
    """Figures 3 and 10-12: the entropy of every head by position, one panel per layer."""
    layers, position = np.array(result.entropy), result.position
    figure, axes = panels(f'Attention entropy of each head: {name_of(result)}', len(layers))
    for i, (axis, heads) in enumerate(zip(axes, layers)):
        axis.plot(position, heads.T, color=SKY, lw=0.7)
        curve(axis, position, heads.mean(0), 'mean of heads')
        curve(axis, position, np.log(position), BOUND, width=0.8)
        finish(axis, [result], 'entropy (nats)', f'layer {i}')
    return figure


def draw_maps(result):
    """The score maps of one head: a row of panels per length, a column per part of the scores."""
    maps = [(row.length, *one) for row in result.lengths for one in row.maps.items()]
    figure, axes = panels(f'Layer {result.layer}, head {result.head}: {name_of(result)}',
                          len(maps), len(maps) // len(result.lengths), 4.5)
    for axis, (T, part, lines) in zip(axes, maps):
        cells = np.array([*zip_longest(*lines)], float).T  # later keys are nan, which is white
        image = axis.imshow(cells, extent=(0, T, T, 0))
        if part == 'attention':  # the same colors in every picture, so that models can be compared
            image.set(norm='log', clim=(1e-4, 1))
        axis.axvline(result.block_size, color='black', ls=':')
        axis.set(xlabel='key (tokens; dotted: L)', ylabel='query (tokens)')
        figure.colorbar(image, ax=axis, format='{x:g}', label=f'{part}, mean of a cell')
    return figure


# ----------------------------------------------------------------------------- tasks

def draw_passkey(*results):
    """Figure 6: accuracy by the length of the prompt, a cell's right edge, and the key's depth."""
    figure, axes = panels('Passkey retrieval', len(results))
    for axis, result in zip(axes, results):
        image = axis.imshow(np.transpose(result.accuracy), extent=(0, result.lengths[-1], 100, 0),
                            aspect='auto', clim=(0, 1))
        axis.axvline(result.block_size, color='red', ls=':')
        axis.set(xlabel='length of the prompt (tokens; dotted: L)', ylabel='depth of the key (%)',
                 title=name_of(result))
        figure.colorbar(image, ax=axis, label='accuracy')
    return figure


def draw_tasks(*results):
    """Accuracy by length, one panel per task of che.py."""
    figure, axes = panels('Algorithmic tasks', len(results[0].tasks))
    for axis, task in zip(axes, results[0].tasks):
        for result in results:
            row = result.tasks[task]
            curve(axis, result.lengths, row.accuracy, result.method)
            curve(axis, result.lengths, row.exact, f'{result.method}, whole answers', width=0.8)
        finish(axis, results, f'accuracy (chance: {row.chance:.3g})', task,
               'length of the input (symbols)')
    return figure


def draw_demo(result):
    """The loss by position, and the gain at far repeats."""
    tail, T = result.tail, result.lengths[-1]
    figure, [left, right] = panels(f'{result.windows} windows of {result.source}', 2)
    for name, row in result.readings.items():
        curve(left, range(tail, T + 1), row.curve[tail - 1:], name)
        draw_gain(right, name, row.far)
    model = name.partition(',')[0]  # of the last reading, as trained
    curve(left, result.lengths, column(row.at.values(), 'cut_loss'),
          f'{model}, only the last L tokens', width=0.8)
    finish(left, [result], f'loss (nats per token, mean of {tail})')
    return figure


# ----------------------------------------------------------------------------- any result

PICTURES = {
    'attention': draw_maps,
    'che': draw_tasks,
    'demo': draw_demo,
    'entropy': draw_entropy,
    'eval_ppl': draw_ppl,
    'head': draw_head,
    'passkey': draw_passkey,
    'repeats': draw_repeats,
    'uniform': draw_uniform,
}


def draw(*files):
    """
    Draw the picture of results of one stage beside the first JSON: A.png, or A_and_B.png. Returns
    the paths of the pictures, [] if the stage has none.
    """
    results = [json.loads(Path(file).read_text(), object_hook=Entry) for file in files]
    kind = results[0].method if results[0].stage == 'tune_scale' else results[0].stage
    if kind not in PICTURES:
        return []
    stems = [Path(file).stem for file in files]
    figures = {'_and_'.join(stems): PICTURES[kind](*results)}
    if kind == 'entropy':
        figures[stems[0].replace('entropy', 'entropy_heads')] = draw_heads(results[0])
    paths = [Path(files[0]).with_name(f'{name}.png') for name in figures]
    for path, figure in zip(paths, figures.values()):
        figure.savefig(path)
    return paths


if __name__ == '__main__':
    configure(globals())
    print('wrote', *draw(*paths) or ['nothing: this stage has no picture'])
