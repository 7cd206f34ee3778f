"""
The code that all pictures share: colors, named curves, and axes.

In every picture, a method has the same color, and a curve has its name at its right end. A dotted
line marks L, the training length of the model.
"""

import math
import re
from pathlib import Path

import numpy as np

from lib.answers import whole_file

# The names of the position methods in pictures.
NAMES = {
    'none': 'NoPE',
    'logn': 'NoPE with log-n queries',
    'ssmax': 'SSMax',
    'logbeta': 'Log-beta',
    'llama4': "Llama 4's temperature",
    'adaptive': 'Adaptive temperature',
    'rope': 'RoPE',
    'alibi': 'ALiBi',
    'nape': 'NAPE',
    'nape_ssmax': 'NAPE with SSMax',
    'window': 'Window and sinks',
    'sink': 'Sink logit',
    'kerple': 'Kerple',
    'fire': 'FIRE',
    't5': 'T5 bias',
    'cope': 'CoPE',
    'xl': 'Transformer-XL',
}

# {pattern: color}. A curve has the color of the first pattern that its name matches. The palettes
# are Okabe and Ito's and Paul Tol's, because color-blind readers can distinguish their colors.
BLACK = '#000000'
BLUE = '#0072B2'
ORANGE = '#E69F00'
SKY = '#56B4E9'
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
    r'uniform|scale\d': ORANGE,
    r'as loaded|scale 1$': BLACK,
    r'head|scale|without': BLUE,  # an ablation of head scale is called "without ..."
    r'nope': BLACK,
    r'': '#777777',
}
DASHES = ['-', '--', ':', '-.']
MARKERS = 'os^vDPX*'  # for curves of few points
MOST = 8  # the most rows of a table that one panel shows

STYLE = {'font.size': 9, 'axes.titlesize': 10, 'axes.titlepad': 16, 'figure.titlesize': 11,
         'axes.grid': True, 'grid.alpha': 0.3, 'axes.spines.top': False,
         'axes.spines.right': False}


# ----------------------------------------------------------------------------- figures

def panels(title, n, columns, width=6.8, height=3.8):
    """A figure of n panels, `columns` per row, and the list of their axes. It needs no display."""
    import matplotlib
    from matplotlib.figure import Figure
    matplotlib.rcParams.update(STYLE)
    columns = min(n, columns)
    rows = math.ceil(n / columns)
    figure = Figure(figsize=(width * columns, height * rows), layout='constrained')
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08)
    figure.suptitle(title[:1].upper() + title[1:])
    return figure, [figure.add_subplot(rows, columns, i + 1) for i in range(n)]


def save(figure, path):
    """Write a figure, whole or not at all."""
    with whole_file(path) as part:
        figure.savefig(part, format='png', dpi=110, bbox_inches='tight')


def method_name(position):
    """The name in pictures of a position method, or of the methods of a model's layers."""
    return '/'.join(NAMES.get(name, name) for name in position.split(','))


def curve_name(result):
    """A result's position method and its label. The label says how the model was changed."""
    name = method_name(result['position_method'])
    if result.get('dape_kernel'):
        name += ' + DAPE'
    if result.get('short_conv'):
        name += ' + short convolution'
    return f"{name}, {result['label']}" if result['label'] else name


def run_name(result):
    """The name of a result's run: the curve's name and the folder of the checkpoint."""
    checkpoint = Path(result['checkpoint'])
    folder = checkpoint.parent if checkpoint.suffix == '.pt' else checkpoint
    return f"{curve_name(result)} ({'/'.join(folder.parts[-3:])})"


# ----------------------------------------------------------------------------- curves

def color_of(name):
    for pattern, color in COLORS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return color


def named_lines(axis):
    """The curves of a panel. Other lines have names that matplotlib begins with an underscore."""
    return [line for line in axis.get_lines() if not line.get_label().startswith('_')]


def curve(axis, x, y, name, error=None, color=None, **style):
    """
    Plot y against x in the color of the name. Curves of one color have different dashes; curves of
    few points also have different markers. error: half the length of each error bar. A y of None is
    not drawn.
    """
    color = color or color_of(name)
    before = sum(line.get_color() == color for line in named_lines(axis))
    style = {'lw': 1.6, 'ls': DASHES[before % len(DASHES)]} | style
    if len(x) <= 12:
        style = {'marker': MARKERS[before % len(MARKERS)], 'ms': 4} | style
    y = np.array(y, float)
    axis.plot(x, y, color=color, label=name, **style)
    if error is not None:
        axis.errorbar(x, y, np.array(error, float), fmt='none', ecolor=color)


def running_mean(values):
    """
    Means of 8 neighboring values, for a smoother curve. Apply it to the positions, too. A value
    covers L / 16 positions, so 8 values cover L / 2.
    """
    if len(values) <= 16:
        return values
    return np.convolve(np.array(values, float), np.ones(8) / 8, 'valid')


def number(value):
    return f'{value:,.0f}' if 1000 <= value < 1e6 else f'{value:#.3g}'.rstrip('.')


def spread(heights, gap):
    """Move sorted heights apart, evenly up and down, until neighbors differ by at least `gap`."""
    steps = gap * np.arange(len(heights))
    rest = heights - steps
    up = np.maximum.accumulate(rest)
    down = np.minimum.accumulate(rest[::-1])[::-1]
    return (up + down) / 2 + steps


def label_ends(axis, values=False, gap=0.065):
    """
    Write the name of each curve at its right end, with values=True also the curve's last value.
    Points above the panel become arrows at its edge; the name then includes the curve's maximum.
    gap: distance between names, as a share of the panel's height.
    """
    _, top = axis.set_ylim(axis.get_ylim())
    share_of_panel = axis.transData - axis.transAxes
    ends = []
    for line in named_lines(axis):
        points = line.get_xydata()
        points = points[np.isfinite(points[:, 1])]
        if len(points) == 0:
            continue
        text, highest = line.get_label(), points[:, 1].max()
        if highest > top:
            text += f'  ↑ up to {number(highest)}'
            outside = points[points[:, 1] > top, 0]
            axis.plot(outside, np.full(len(outside), top), '^', color=line.get_color(),
                      clip_on=False)
        elif values:
            text += f'  {number(points[-1, 1])}'
        right, height = share_of_panel.transform(points[-1])
        ends.append((min(height, 1), right, text, line))

    ends.sort(key=lambda end: end[0])
    heights = spread(np.array([end[0] for end in ends]), gap)
    for text_height, (height, right, text, line) in zip(heights, ends):
        leader = {'arrowstyle': '-', 'color': line.get_color(), 'ls': line.get_linestyle(),
                  'relpos': (0, 0.5)}
        axis.annotate(text, (right, height), (1.07, text_height), xycoords='axes fraction',
                      textcoords='axes fraction', va='center', arrowprops=leader)


def mark_length(axis, x, text, color='black', ha='center'):
    """Draw a dotted vertical line at x, with a text above the panel."""
    axis.axvline(x, color=color, ls=':', lw=1.2)
    axis.annotate(text, (x, 1), (0, 3), xycoords=('data', 'axes fraction'), ha=ha,
                  textcoords='offset points', fontsize=8)


def length_axis(axis, lengths, L):
    """Make the x axis logarithmic, with a plain number at each length, and mark L."""
    axis.set_xscale('log')
    axis.set_xticks(lengths, [f'{length:g}' for length in lengths])
    axis.minorticks_off()
    mark_length(axis, L, f'L = {L}')


def position_axis(axis, L, ylabel, title=''):
    """Finish a panel of curves by position: an x axis from L / 4 on, labels, and curve names."""
    last = max(line.get_xdata()[-1] for line in named_lines(axis))
    first = min(L, last) / 4
    ticks = [T for T in L * 2.0 ** np.arange(-12, 30) if first <= T <= 1.1 * last]
    length_axis(axis, ticks, L)
    axis.set(xlim=(first, max(L, last, ticks[-1])), xlabel='position (tokens)', ylabel=ylabel,
             title=title)
    label_ends(axis)


def draw_bound(axis, position, unit='nats'):
    """Draw log i, the entropy of equal weights on i positions. No head can exceed it."""
    bound = np.log(position) if unit == 'nats' else np.log2(position)
    curve(axis, position, bound, 'upper bound log i', color=BLACK, ls='--', lw=1)


def draw_cut(axis, lengths, losses, name):
    """Draw the loss of a model with its context cut to the last tokens. None is not drawn."""
    losses = np.array(losses, float)
    known = np.isfinite(losses)
    if known.any():
        curve(axis, np.array(lengths)[known], losses[known], name, color='#777777', ls='--', lw=1)


def draw_loss_and_entropy(axes, curves, L, unit='nats', cut=None):
    """
    Draw two panels: loss and entropy by position. curves: rows of (name, positions, losses,
    entropies, color); cut: the dict of lib.losses.cut_curve().
    """
    for name, position, loss, entropy, color in curves:
        curve(axes[0], running_mean(position), running_mean(loss), name, color=color)
        curve(axes[1], position, entropy, name, color=color)
    if cut:
        draw_cut(axes[0], cut['position'], cut['loss'], f"context cut to {cut['context']}")
    draw_bound(axes[1], position, unit)
    position_axis(axes[0], L, 'loss (nats per token, running mean)', 'Loss')
    position_axis(axes[1], L, f'mean attention entropy ({unit})', 'Entropy')
