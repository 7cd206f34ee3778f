"""
Every picture of the project, drawn from the JSON of a stage alone.

$ python -m lib.plots FILE.json [FILE.json ...]   # draws FILE.png beside each

A stage calls draw(path) after it has written its JSON; train.py calls draw_log(). In every picture
a method has the same colour, a curve its name at its right end, and a dotted line stands at L, the
length that the model was trained at.
"""

import json
import re
import sys
from pathlib import Path

import numpy as np

from lib.errors import report

# What pictures call the position methods.
NAMES = {
    'none': 'NoPE',
    'logn': 'NoPE with log-n queries',
    'rope': 'RoPE',
    'alibi': 'ALiBi',
    'kerple': 'Kerple',
    'fire': 'FIRE',
    't5': 'T5 bias',
    'cope': 'CoPE',
    'xl': 'Transformer-XL',
}

# The colour of a curve is that of the first pattern found in its name. The palettes are those of
# Okabe and Ito and of Paul Tol, whose colours colour-blind readers can tell apart.
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
    r'norm|vectors|\bout\b': '#56B4E9',
    r'uniform|scale\d': '#E69F00',
    r'as loaded|scale 1$|bound': '#000000',
    r'head|scale|without': '#0072B2',  # the ablations of head scale are called "without ..."
    r'nope': '#000000',
}
DASHES = ['-', '--', ':', '-.']
MARKERS = ['o', 's', '^', 'v', 'D', 'P', 'X', '*']
MOST = 8  # curves in one panel

SIZES = {'font.size': 9, 'axes.titlesize': 10, 'axes.titlepad': 16, 'figure.titlesize': 11}
LOOK = {'axes.grid': True, 'grid.alpha': 0.3, 'axes.spines.top': False, 'axes.spines.right': False}


# ----------------------------------------------------------------------------- figures

def new_figure(title, rows=1, columns=1, width=6.8, height=3.8):
    """A figure for a file, for which no screen is needed, and its (rows, columns) axes."""
    import matplotlib
    from matplotlib.figure import Figure
    matplotlib.rcParams.update(SIZES | LOOK)
    figure = Figure(figsize=(width * columns, height * rows), layout='constrained')
    figure.suptitle(title)
    return figure, figure.subplots(rows, columns, squeeze=False)


def panels(title, n, columns, **size):
    """A figure of n panels, `columns` in a row. Returns the figure and a list of n axes."""
    columns = min(n, columns)
    figure, axes = new_figure(title, -(-n // columns), columns, **size)
    for axis in axes.flat[n:]:
        axis.set_visible(False)
    return figure, list(axes.flat[:n])


def save(figure, path):
    """Write the figure, whole or not at all."""
    from lib.results import whole_file
    with whole_file(path) as part:
        figure.savefig(part, format='png', dpi=120)


def curve_name(result):
    """The position method of a result, and its label, which says how it was changed."""
    name = NAMES.get(result['position_method'], result['position_method'])
    if result.get('dape_kernel'):
        name += ' + DAPE'
    if result.get('rope_scaling'):
        name += ' ' + result['rope_scaling']
    label = result.get('label') or result.get('settings', {}).get('label')
    return f'{name}, {label}' if label else name


def run_name(result):
    """Which run a result is of: method, label and the folder of its checkpoint."""
    checkpoint = Path(result['checkpoint'])
    folder = checkpoint.parent if checkpoint.suffix == '.pt' else checkpoint
    return f"{curve_name(result)} ({'/'.join(folder.parts[-3:])})"


# ----------------------------------------------------------------------------- curves

def color_of(name):
    for pattern, color in COLORS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return color
    return '#555555'


def named_lines(axis):
    """The curves of a panel that have a name; matplotlib begins the labels of others with _."""
    return [line for line in axis.get_lines() if not line.get_label().startswith('_')]


def curve(axis, x, y, name, error=None, color=None, **style):
    """
    Plot y against x, in the colour of its name. Curves of one colour differ by dashes, and where
    points are few by markers. y and error, the half of a bar's length, may hold None.
    """
    color = color or color_of(name)
    before = sum(line.get_color() == color for line in named_lines(axis))
    style = {'lw': 1.6, 'ls': DASHES[before % len(DASHES)]} | style
    if len(x) <= 12:
        style |= {'marker': MARKERS[before % len(MARKERS)], 'ms': 4}
    y = np.array(y, float)
    axis.plot(x, y, color=color, label=name, **style)
    if error is not None:
        axis.errorbar(x, y, np.array(error, float), fmt='none', ecolor=color)


def running_mean(values, bins=8):
    """
    Means of `bins` neighbours, for a smoother curve; positions go through it, too. Bins are of
    L / 16 positions, so 8 of them are L / 2.
    """
    values = np.array(values, float)
    if len(values) <= 2 * bins:
        return values
    return np.convolve(values, np.ones(bins) / bins, 'valid')


def number(value):
    return f'{value:,.0f}' if 1000 <= value < 1e6 else f'{value:.3g}'


def spread(heights, gap):
    """Sorted heights between 0 and 1, moved until neighbours are at least `gap` apart."""
    heights = list(heights)
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + gap)
    limit = 1.0
    for i in reversed(range(len(heights))):
        heights[i] = min(heights[i], limit)
        limit = heights[i] - gap
    return heights


def label_ends(axis, values=False):
    """
    Write each curve's name at its right end, with a thin line between them, which has the curve's
    dashes. values: write where it ends, too. Points above the picture become arrows at its edge,
    and the name says how high the curve goes.
    """
    axis.set_xlim(axis.get_xlim())
    low, top = axis.set_ylim(axis.get_ylim())
    to_share = axis.transData + axis.transAxes.inverted()  # from data to shares of the panel
    ends = []
    for line in named_lines(axis):
        x, y = line.get_data()
        x, y = np.array(x)[np.isfinite(y)], y[np.isfinite(y)]
        if len(y) == 0:
            continue
        text = line.get_label()
        if values:
            text += f'  {number(y[-1])}'
        outside = y > top
        if outside.any():
            text += f' (up to {number(y.max())} ↑)'
            axis.plot(x[outside], np.ones(outside.sum()), '^', color=line.get_color(), ms=6,
                      transform=axis.get_xaxis_transform(), clip_on=False)
        right, height = to_share.transform((x[-1], min(y[-1], top)))
        ends.append((height, right, text, line))
    ends.sort(key=lambda end: end[0])

    rows = max([text.count('\n') for _, _, text, _ in ends], default=0) + 1
    gap = 0.16 * rows / axis.get_figure().get_figheight() * axis.get_gridspec().nrows
    places = spread([height for height, _, _, _ in ends], gap * 1.3)
    for place, (height, right, text, line) in zip(places, ends):
        leader = {'arrowstyle': '-', 'color': line.get_color(), 'ls': line.get_linestyle()}
        axis.annotate(text, (right, height), (1.07, place), xycoords='axes fraction',
                      textcoords='axes fraction', va='center', arrowprops=leader | {'shrinkA': 1})


def mark_length(axis, length, name='L'):
    """A dotted line at the training length or another, with its name above the panel."""
    axis.axvline(length, color='black', ls=':', lw=1)
    axis.annotate(f'{name} = {length}', (length, 1), (0, 3), xycoords=('data', 'axes fraction'),
                  textcoords='offset points', ha='center', fontsize=8)


def length_axis(axis, lengths, L):
    """A logarithmic axis of lengths or positions, with a plain number at each that has room."""
    axis.set_xscale('log')
    ticks = []
    for length in sorted(lengths):
        if not ticks or length > 1.2 * ticks[-1]:
            ticks.append(length)
    axis.set_xticks(ticks, [f'{tick:g}' for tick in ticks])
    axis.minorticks_off()
    mark_length(axis, L)


def finish_positions(axis, L, ylabel, title='', unit='tokens'):
    """What curves by position share: a logarithmic axis from L / 4 on, and names at their ends."""
    last = max([L, *(line.get_xdata()[-1] for line in named_lines(axis))])
    first = min(L, min(line.get_xdata()[-1] for line in named_lines(axis))) / 4
    lengths = [L * 2.0 ** power for power in range(-2, 30)]
    length_axis(axis, [T for T in lengths if first <= T <= 1.1 * last], L)
    axis.set(xlim=(first, last), xlabel=f'position ({unit})', ylabel=ylabel, title=title)
    label_ends(axis)


# ----------------------------------------------------------------------------- training

def draw_log(log_path, png_path):
    """Training and validation loss against tokens, from the lines of train.py's log.jsonl."""
    log_path = Path(log_path)
    rows = [json.loads(line) for line in log_path.read_text().splitlines()]
    figure, [[axis]] = new_figure(f"Training: {'/'.join(log_path.parts[-4:-1])}")
    for key, name, color in (('loss', 'training', '#56B4E9'), ('val_loss', 'validation', '#000000')):
        kept = [row for row in rows if key in row]
        if kept:
            tokens = [row['tokens'] / 1e6 for row in kept]
            curve(axis, tokens, [row[key] for row in kept], name, color=color, lw=1)
    axis.set(xlabel='tokens read (millions)', ylabel='loss (nats per token)')
    label_ends(axis, values=True)
    save(figure, png_path)


# ----------------------------------------------------------------------------- scales

def draw_uniform(result, path):
    """
    Figure 2: loss and entropy by position under up to six of the candidates. Figure 7: the best
    scale at each position, and its fit.
    """
    from matplotlib import colormaps
    L, searches = result['block_size'], result['searches']
    figure, axes = panels(f'Uniform scales: {run_name(result)}', 3, 3, width=6)
    search = next(iter(searches.values()))
    position = np.array(search['position'])  # the same in all searches

    measured = [i for i, entropy in enumerate(search['entropy']) if entropy is not None]
    shown = np.unique(np.linspace(0, len(measured) - 1, 6).round().astype(int))
    for share, i in zip(np.linspace(0, 0.9, len(shown)), [measured[k] for k in shown]):
        name, color = f"scale {search['candidates'][i]:g}", colormaps['viridis'](share)
        loss = running_mean(search['loss'][i])
        curve(axes[0], running_mean(position), loss, name, color=color)
        curve(axes[1], position, search['entropy'][i], name, color=color)
    best = running_mean(search['best_loss_by_position'])
    curve(axes[0], running_mean(position), best, 'best scale\nat each position', color='black',
          ls='--')
    finish_positions(axes[0], L, 'loss (nats per token, running mean)', 'Loss (Figure 2)')
    finish_positions(axes[1], L, 'mean attention entropy (nats)', 'Entropy (Figure 2)')

    beyond = position[position > L]
    s = beyond / L
    for color, (name, search) in zip(['#E69F00', '#0072B2', '#009E73', '#CC79A7'] * 2,
                                     searches.items()):
        axes[2].plot(position, search['best_by_position'], '.', ms=4, color=color)
        fit = f"{name}:\n1 {search['fit_a']:+.3f} ln s"
        if search['fit_r2'] is not None:
            fit += f", R² {search['fit_r2']:.2f}"
        curve(axes[2], beyond, 1 + search['fit_a'] * np.log(s), fit, color=color)
    curve(axes[2], beyond, (1 + 0.1 * np.log(s)) ** 2, 'YaRN:\n(1 + 0.1 ln s)²', ls='--')
    finish_positions(axes[2], L, r'best scale ($1/\sqrt{d}$)', 'Best scale, s = i / L (Figure 7)')
    save(figure, path)


def scatter_heads(axis, scales, entropy, layers, unit, position):
    """Figure 5: the scale of each head against its entropy. layers: the name of each layer."""
    from matplotlib import colormaps
    n_layer, n_head = np.shape(scales)
    colors = colormaps['viridis'].resampled(n_layer)
    points = axis.scatter(scales, entropy, c=np.arange(n_layer).repeat(n_head), s=16, cmap=colors,
                          vmin=-0.5, vmax=n_layer - 0.5)
    bar = axis.get_figure().colorbar(points, ax=axis, label='layer')
    bar.set_ticks(range(n_layer), labels=layers)
    axis.set(xlabel=r'scale ($1/\sqrt{d}$)', title='Scale and entropy of each head (Figure 5)',
             ylabel=f'entropy at position {position:.0f} ({unit})')


def draw_head(result, path):
    """Figure 4: loss and entropy by position. Figure 5, and the tuned scales of all heads."""
    last = result['sets'][-1] if 'sets' in result else result
    L, target = result['block_size'], last['target_length']
    scales = np.array(last['head_scale'], float)
    title = f'Head scales tuned at {target} tokens: {run_name(result)}'
    figure, ((left, right), (below, heat)) = new_figure(title, 2, 2, width=6.2, height=3.6)
    position = result['position']
    for name, measured in result['curves'].items():
        curve(left, running_mean(position), running_mean(measured['loss']), name)
        curve(right, position, measured['entropy'], name)
    finish_positions(left, L, 'loss (nats per token, running mean)', 'Loss (Figure 4)')
    finish_positions(right, L, 'mean attention entropy (nats)', 'Entropy (Figure 4)')
    for axis in (left, right):
        mark_length(axis, target, 'tuned')

    layers = range(len(scales))
    scatter_heads(below, scales, np.array(result['last_entropy'], float), layers, 'nats',
                  result['curve_length'])
    image = heat.imshow(scales, aspect='auto', cmap='cividis')
    heat.set(xlabel='head', ylabel='layer', title='Tuned scales')
    heat.grid(False)
    figure.colorbar(image, ax=heat, label=r'scale ($1/\sqrt{d}$)')
    save(figure, path)


# ----------------------------------------------------------------------------- perplexity

def families(rows):
    """{title: rows} of the panels of a table: all in one, or in families of at most MOST rows."""
    if len(rows) <= MOST:
        return {'': rows}
    found = {'NoPE and its scales': [], 'RoPE and its extensions': [], 'Other methods': []}
    for row in rows:
        if 'nope' in row['name'].lower():
            found['NoPE and its scales'].append(row)
        elif 'rope' in row['name'].lower():
            found['RoPE and its extensions'].append(row)
        else:
            found['Other methods'].append(row)
    result = {}
    for family, members in found.items():
        n = -(-len(members) // MOST)
        for part in range(n):
            size = -(-len(members) // n)
            title = f'{family}, {part + 1} of {n}' if n > 1 else family
            result[title] = members[part * size:(part + 1) * size]
    return result


def ppl_axis(axis, every):
    """A logarithmic axis with plain numbers. What explodes, past 20 times the least, leaves it."""
    from matplotlib.ticker import MaxNLocator
    low, high = min(every), min(max(every), 20 * min(every))
    margin = np.clip((high / low) ** 0.1, 1.01, 1.1)
    low, high = low / margin, high * margin
    ticks = [t for t in (1, 1.5, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 200, 500, 1000)
             if low < t < high]
    if len(ticks) < 4:
        ticks = [t for t in MaxNLocator(6).tick_values(low, high) if low < t < high]
    axis.set(yscale='log', ylabel='perplexity')
    axis.set_yticks(ticks, [f'{tick:g}' for tick in ticks])
    axis.minorticks_off()
    axis.set_ylim(low, high)


def draw_ppl(result, path):
    """Perplexity by window length, of one model or of each row of a table."""
    rows, about = result['rows'], run_name(result)
    if 'name' in rows[0]:
        about = ' '.join([result['settings']['out_dir'], result['label']])
    else:
        one = {key: [row.get(key) for row in rows] for key in rows[0]}
        rows = [one | {'name': curve_name(result)}]
    windows = 'sliding windows'
    if result['protocol'] == 'last':
        windows = f"the last {result['last']} tokens"
    title = f"Perplexity on {Path(result['dataset']).name}, {windows}: {about}"
    seeds = max(len(row.get('runs', [])) for row in rows)
    if seeds:
        title += f'\nerror bars: standard deviation of {seeds} seeds, where a method has them'

    every = [ppl for row in rows for ppl in row['ppl'] if ppl is not None]
    groups = families(rows)
    figure, axes = panels(title, len(groups), 2, width=7.6)
    for axis, (family, members) in zip(axes, groups.items()):
        for row in members:
            error = row.get('sd')
            if 'standard_error' in row:  # of the loss, whose exponential is the perplexity
                error = np.array(row['standard_error'], float) * np.array(row['ppl'], float)
            curve(axis, result['lengths'], row['ppl'], row['name'], error)
        if every:
            ppl_axis(axis, every)
        length_axis(axis, result['lengths'], result['block_size'])
        axis.set(xlabel='window length (tokens)', title=family)
        label_ends(axis, values=True)
    save(figure, path)


def draw_positions(result, path):
    """Loss by position, and its standard error over windows at the lengths that were asked for."""
    rows, L = result['rows'], result['block_size']
    title = f"Loss on {Path(result['dataset']).name}: {run_name(result)}"
    figure, [[axis]] = new_figure(title)
    curve(axis, result['position'], result['loss'], 'each position', color='#56B4E9', lw=1)
    curve(axis, [row['length'] for row in rows], [row['loss'] for row in rows],
          f"mean of the last {result['last']}\n± one standard error",
          [row['standard_error'] for row in rows], color='black', ls='none')
    finish_positions(axis, L, 'loss (nats per token)')
    save(figure, path)


# ----------------------------------------------------------------------------- attention

def draw_entropy(result, path):
    """
    Figure 1: loss and mean entropy by position. Figure 5, for tuned scales. Then Figures 3 and
    10-12, the entropy of each head, in a file of its own.
    """
    L, unit = result['block_size'], result['unit']
    tuned = 'spearman' in result
    figure, axes = panels(f'Attention entropy: {run_name(result)}', 2 + tuned, 3, width=6)
    for one in [result, *result['compare']]:
        name = curve_name(one)
        curve(axes[0], running_mean(one['position']), running_mean(one['loss']), name)
        curve(axes[1], one['position'], one['mean_entropy'], name)
    draw_bound(axes[1], result)
    finish_positions(axes[0], L, 'loss (nats per token, running mean)', 'Loss')
    finish_positions(axes[1], L, f'attention entropy ({unit})', 'Mean attention entropy')
    if tuned:
        layers = []
        for layer, value in enumerate(result['spearman']):
            layers.append(f'{layer}' if value is None else f'{layer}: {value:+.2f}')
        scatter_heads(axes[2], result['head_scale'], np.array(result['entropy'], float)[..., -1],
                      layers, unit, result['position'][-1])
    save(figure, path)
    draw_heads(result, heads_path(path))


def draw_bound(axis, result):
    """The upper bound of entropy at position i, ln i nats, which equal weights reach."""
    bound = 'ln i' if result['unit'] == 'nats' else 'log2 i'
    curve(axis, result['position'], result['bound'], f'upper bound {bound}', ls='--', lw=1)


def heads_path(path):
    """entropy_LABEL.png has its heads in entropy_heads_LABEL.png."""
    if path.name.startswith('entropy'):
        return path.with_name(f'entropy_heads{path.name.removeprefix("entropy")}')
    return path.with_name(f'{path.stem}_heads.png')


def draw_heads(result, path):
    """Figures 3 and 10-12: the entropy of every head by position, a panel a layer."""
    layers = np.array(result['entropy'], float)
    title = f'Attention entropy of each head: {run_name(result)}'
    figure, axes = panels(title, len(layers), 4, width=4.6, height=2.8)
    for layer, (axis, heads) in enumerate(zip(axes, layers)):
        axis.plot(result['position'], heads.T, color='#56B4E9', lw=0.7)
        curve(axis, result['position'], heads.mean(0), 'mean', color='#0072B2')
        draw_bound(axis, result)
        axis.set_ylim(0, 1.03 * max(result['bound']))
        finish_positions(axis, result['block_size'], f"entropy ({result['unit']})",
                         f'layer {layer}')
    save(figure, path)


def draw_maps(result, path):
    """
    A row of panels for each length, a column with one colour scale for each part of the attention;
    keys that come later stay white, and a dotted line stands at L.
    """
    rows, parts = result['lengths'], list(result['lengths'][0]['maps'])
    layer, head = result['layer'], result['head']
    title = f'Layer {layer}, head {head}: {run_name(result)}'
    figure, axes = new_figure(title, len(rows), len(parts), width=3.6, height=3.2)
    for part, column in zip(parts, axes.T):
        # Attention spans powers of ten. Its colours mean the same in all pictures, so that two
        # models can be compared.
        norm, low, high, what = 'log', 1e-4, 1, 'share of a cell'
        if part != 'attention':
            values = [value for row in rows for line in row['maps'][part] for value in line]
            norm, what = 'linear', 'mean of a cell'
            low, high = np.percentile(values, [1, 99])
        for axis, row in zip(column, rows):
            image = draw_map(axis, row['maps'][part], row['length'], result['block_size'],
                             norm=norm, clim=(low, high))
            name = f"{part}, {row['length']} tokens"
            if part == 'attention':
                name += f"\n{row['first_key'][layer][head]:.1%} on the first key"
            axis.set_title(name, pad=4)
        figure.colorbar(image, ax=column, location='bottom', label=what)
    save(figure, path)


def draw_map(axis, lines, T, L, norm, clim):
    """One map. lines: one for each row of queries, of the cells up to the query itself."""
    cells = np.full((len(lines), len(lines)), np.nan)
    for i, line in enumerate(lines):
        cells[i, :len(line)] = line
    image = axis.imshow(cells.clip(min=clim[0]), norm=norm, clim=clim, extent=(0, T, T, 0),
                        cmap='viridis', interpolation='nearest')
    end = min(L, T)
    axis.plot([0, end], [end, end], color='black', ls=':', lw=1)
    axis.annotate(f'L = {L}', (end, end), (3, 0), textcoords='offset points', fontsize=8)
    axis.grid(False)
    axis.set(xlabel='key', ylabel='query')
    return image


# ----------------------------------------------------------------------------- tasks

def draw_passkey(result, path):
    """Figure 6: accuracy by the length of the prompt and the depth of the key."""
    title, lengths, L = f'Passkey: {run_name(result)}', result['lengths'], result['block_size']
    if result['accuracy_inside'] is not None:
        title += f"\n{result['accuracy_inside']:.0%} right up to {result['window']} tokens"
    figure, [[axis]] = new_figure(title, width=7.5)
    image = axis.imshow(np.array(result['accuracy'], float).T, vmin=0, vmax=1, cmap='cividis',
                        aspect='auto')
    axis.set_xticks(range(len(lengths)), lengths, rotation=45, ha='right')
    depths = [f"{depth / result['n_depths']:.0%}" for depth in range(result['n_depths'])]
    axis.set_yticks(range(len(depths)), depths)
    axis.set(xlabel='length of the prompt (tokens)', ylabel='depth of the key')
    axis.grid(False)
    named = {L: 'L', result['window']: 'L' if result['window'] == L else 'window'}
    for length, name in named.items():
        if lengths[0] <= length < lengths[-1]:
            # Columns are equally wide, and a line stands at the right edge of its column.
            where = np.interp(length, lengths, range(len(lengths))) + 0.5
            axis.axvline(where, color='white', ls=':', lw=2)
            axis.annotate(f'{name} = {length}', (where, 1), (0, 3), ha='center', fontsize=8,
                          xycoords=('data', 'axes fraction'), textcoords='offset points')
    figure.colorbar(image, ax=axis, label='accuracy')
    save(figure, path)


def draw_tasks(result, path):
    """Accuracy by length, a panel a task of che.py."""
    title = f"Algorithmic tasks: {result['method']}"
    if result['label']:
        title += f", {result['label']}"
    L, lengths = result['train_length'], result['lengths']
    figure, axes = panels(title, len(result['tasks']), 3, width=5.4, height=2.8)
    for axis, (task, row) in zip(axes, result['tasks'].items()):
        accuracy = 100 * np.array(row['accuracy'], float)
        curve(axis, lengths, accuracy, result['method'])
        chance = np.full(len(lengths), 100 * row['chance'])
        curve(axis, lengths, chance, 'chance', color='#888888', ls='--', lw=1, marker='')
        axis.set(ylim=(-3, 103), xlabel='length of the input (symbols)', ylabel='accuracy (%)',
                 title=f"{task.replace('_', ' ')}: {row['outside']:.1%} past L")
        mark_length(axis, L)
        label_ends(axis)
    save(figure, path)


# ----------------------------------------------------------------------------- demo

def draw_report(result, path):
    """The picture of the demo: loss and entropy by position, of NoPE, its scales, and RoPE."""
    L, target, methods = result['block_size'], result['target_length'], result['methods']
    uniform, head = methods[f'uniform {target}'], methods[f'head {target}']
    low, high = head['scale']
    shown = {
        'NoPE': methods['NoPE'],
        f"NoPE, uniform\nscale {uniform['scale'][0]:g}": uniform,
        f'NoPE, head scales\n{low:.2f} to {high:.2f}': head,
        'RoPE': methods['RoPE'],
    }
    figure, axes = panels(f"{result['settings']['out_dir']}: one NoPE model and its RoPE "
                          'twin', 2, 2)
    left, right = axes
    for name, method in shown.items():
        curve(left, result['position'], method['loss_curve'], name, lw=2)
        curve(right, result['position'], method['entropy_curve'], name, lw=2)
        at = {int(length): row for length, row in method['at'].items()}
        left.errorbar(list(at), [row['loss'] for row in at.values()],
                      [row['standard_error'] for row in at.values()], fmt='.', color=color_of(name))
    draw_bound(right, result | {'unit': 'nats', 'bound': np.log(result['position'])})
    right.set_ylim(bottom=0)
    finish_positions(left, L, 'log-perplexity (nats per byte)',
                     'Past its training length L, a NoPE model fails ...', 'bytes')
    finish_positions(right, L, 'mean attention entropy (nats)',
                     '... because its attention spreads; scaling refocuses it', 'bytes')
    save(figure, path)


# ----------------------------------------------------------------------------- any result

PICTURES = {
    'attention': draw_maps,
    'che': draw_tasks,
    'entropy': draw_entropy,
    'eval_ppl last': draw_ppl,
    'eval_ppl position': draw_positions,
    'eval_ppl sliding': draw_ppl,
    'passkey': draw_passkey,
    'report': draw_report,
    'tune_scale head': draw_head,
    'tune_scale uniform': draw_uniform,
}


def kind_of(result):
    """The key in PICTURES of a result: its stage, and where a stage has several pictures, more."""
    if 'paired_differences' in result:
        return 'report'
    kind = str(result.get('stage'))
    more = {'eval_ppl': 'protocol', 'tune_scale': 'method'}.get(kind)
    return f'{kind} {result[more]}' if more else kind


def draw(path):
    """
    Draw the picture of a stage's JSON beside it. Returns the paths written, none where a stage has
    no picture.
    """
    path = Path(path)
    result = json.loads(path.read_text(encoding='utf-8'))
    kind, picture = kind_of(result), path.with_suffix('.png')
    if kind not in PICTURES:
        return []
    PICTURES[kind](result, picture)
    return [picture]


def main():
    sys.excepthook = report
    if not sys.argv[1:]:
        raise ValueError('Give the JSON files to draw: python -m lib.plots FILE.json ...')
    for path in sys.argv[1:]:
        if not draw(path):
            raise ValueError(f"{path} has no picture. Stages with one: {', '.join(PICTURES)}.")
        print(f"wrote {Path(path).with_suffix('.png')}")


if __name__ == '__main__':
    main()
