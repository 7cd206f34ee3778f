"""
The picture of every stage, drawn only from the JSON that the stage wrote.

$ python plots.py out/demo/nope/eval_ppl.json               # draws eval_ppl.png beside it again
$ python plots.py out/a/entropy.json out/b/entropy.json     # both in one: entropy_and_entropy.png
$ python plots.py A.json B.json C.json --out=out/seeds.png  # results of one stage, as many as fit

A method has the same color in every picture. A dotted line marks L, the training length.
"""

import json
import math
import re
from itertools import cycle
from pathlib import Path

from configurator import UserError, configure

import numpy as np
from matplotlib import colormaps, rcParams
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

paths: list[str] = []        # JSON files of results; several of the same stage share one picture
out = ''                     # where that shared picture goes; '': beside the first file

# Names may hold a $, so none is read as mathematics.
rcParams.update({'text.parse_math': False, 'font.size': 9, 'axes.titlesize': 10,
                 'axes.titlepad': 16, 'figure.titlesize': 11, 'axes.grid': True, 'grid.alpha': 0.3,
                 'axes.spines.top': False, 'axes.spines.right': False, 'savefig.dpi': 110,
                 'savefig.bbox': 'tight', 'legend.frameon': False})

# The names of the position methods in pictures
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
    r'uniform|scale\d': ORANGE,
    r'as loaded|scale 1$': BLACK,
    r'head|scale|without': BLUE,  # an ablation of head scale is called "without ..."
    r'nope': BLACK,
    r'': GRAY,
}
BARS = {'gain_error': 'standard error of the difference from the cut context, by window',
        'standard_error': 'standard error of the mean over windows'}


# ----------------------------------------------------------------------------- names

def method_name(position):
    """The name in pictures of a position method, or of the methods of a model's layers."""
    return '/'.join(NAMES.get(name, name) for name in position.split(','))


def curve_name(result):
    """A result's position method and its label. The label says how the model was changed."""
    name = method_name(result['position_method'])
    name += ' + DAPE' * bool(result.get('dape_kernel'))
    name += ' + conv' * bool(result.get('short_conv'))
    return f"{name}, {result['label']}" if result['label'] else name


def run_name(result):
    """The curve's name and the folder of the checkpoint."""
    checkpoint = Path(result['checkpoint'])
    folder = checkpoint.parent if checkpoint.suffix == '.pt' else checkpoint
    return f"{curve_name(result)} ({'/'.join(folder.parts[-3:])})"


def about(results):
    return run_name(results[0]) if len(results) == 1 else f'{len(results)} results'


def color_of(name):
    return next(color for pattern, color in COLORS.items() if re.search(pattern, name, re.I))


def named(results):
    """(result, name, color) of each result. Equal names get the folder of the run behind them."""
    names = [curve_name(result) for result in results]
    for result, name in zip(results, names):
        yield result, run_name(result) if names.count(name) > 1 else name, color_of(name)


# ----------------------------------------------------------------------------- curves and axes

def panels(title, n, columns, width=6.8, height=3.8):
    """A figure of n panels, `columns` per row, and the list of their axes. It needs no display."""
    columns = min(n, columns)
    rows = math.ceil(n / columns)
    figure = Figure(figsize=(width * columns, height * rows), layout='constrained')
    figure.suptitle(title)
    return figure, [figure.add_subplot(rows, columns, i + 1) for i in range(n)]


def column(rows, key):
    """The numbers of a key, (rows,); nan where a row lacks it."""
    return np.array([row.get(key) for row in rows], float)


def curve(axis, x, y, name, color=None, **style):
    """
    Plot y against x, by default in the color of the name. Curves of one color have different
    dashes; curves of few points also have different markers. A y of None is not drawn.
    """
    color = color or color_of(name)
    before = sum(line.get_color() == color for line in axis.get_lines())
    style = {'lw': 1.6, 'ls': ['-', '--', ':', '-.'][before % 4]} | style
    if len(x) <= 12:
        style = {'marker': 'os^vDPX*'[before % 8], 'ms': 4} | style
    x, y = np.array(x), np.array(y, float)
    known = np.isfinite(y)
    if known.any():
        axis.plot(x[known], y[known], color=color, label=name, **style)


def draw_cut(axis, lengths, losses, name, color=GRAY):
    """The loss of a model whose context is cut to its last tokens, at some lengths."""
    curve(axis, lengths, losses, name, color, ls='--', lw=0.8, marker='x')


def running_mean(values):
    """Means of 8 neighboring bins, that is L / 2 positions. Apply it to the positions, too."""
    return values if len(values) <= 16 else np.convolve(values, np.ones(8) / 8, 'valid')


def legend(axis, values=False):
    """Name the curves right of a panel, in the order of their ends, perhaps with their values."""
    lines = [line for line in axis.get_lines() if not line.get_label().startswith('_')]
    lines.sort(key=lambda line: -line.get_ydata()[-1])
    names = [line.get_label() + f'  {line.get_ydata()[-1]:.4g}' * values for line in lines]
    axis.legend(lines, names, loc='center left', bbox_to_anchor=(1, 0.5))


def mark_length(axis, x, text):
    """Draw a dotted vertical line at x, with a text above the panel."""
    axis.axvline(x, color=BLACK, ls=':', lw=1.2)
    axis.annotate(text, (x, 1), (0, 3), xycoords=('data', 'axes fraction'), ha='center',
                  textcoords='offset points', fontsize=8)


def length_axis(axis, results, xlabel):
    """Make the x axis logarithmic and mark the L of each result."""
    axis.set_xscale('log', base=2)
    axis.xaxis.set_major_formatter('{x:g}')
    axis.set_xlabel(xlabel)
    for L in {result['block_size'] for result in results}:
        mark_length(axis, L, f'L = {L}')


def position_axis(axis, results, ylabel, title=''):
    """Finish a panel of curves by position: an x axis from L / 4 on, labels and names."""
    length_axis(axis, results, 'position (tokens)')
    axis.set(xlim=(min(result['block_size'] for result in results) / 4, None), ylabel=ylabel,
             title=title)
    legend(axis)


def draw_bound(axis, position):
    """Draw ln i, the entropy of equal weights on i positions. No head can exceed it."""
    curve(axis, position, np.log(position), 'upper bound ln i', BLACK, ls='--', lw=1)


def draw_loss_and_entropy(axes, curves, results):
    """Two panels, by position. curves: rows of (name, positions, losses, entropies, color)."""
    for name, position, loss, entropy, color in curves:
        curve(axes[0], running_mean(position), running_mean(loss), name, color)
        curve(axes[1], position, entropy, name, color)
    draw_bound(axes[1], max((row[1] for row in curves), key=max))
    position_axis(axes[0], results, 'loss (nats per token, running mean)', 'Loss')
    position_axis(axes[1], results, 'mean attention entropy (nats)', 'Entropy')


# ----------------------------------------------------------------------------- training

def draw_log(log_path, png_path):
    """Loss, validation loss and attention entropy by tokens read, of the log.jsonl of train.py."""
    rows = [json.loads(line) for line in Path(log_path).read_text().splitlines()]
    figure, [left, right] = panels(f'Training: {Path(log_path).parent}', 2, 2)
    for axis, key, name, color in ((left, 'loss', 'training', SKY),
                                   (left, 'val_loss', 'validation', BLUE),
                                   (right, 'entropy', 'validation', BLUE)):
        measured = [row for row in rows if key in row]
        curve(axis, column(measured, 'tokens') / 1e6, column(measured, key), name, color, lw=1)
    for axis, what in (left, 'loss (nats per token)'), (right, 'attention entropy (nats)'):
        axis.set(xlabel='tokens read (millions)', ylabel=what)
        legend(axis, values=True)
    figure.savefig(png_path)


# ----------------------------------------------------------------------------- scales

def draw_uniform(*results):
    """
    Figure 2: loss and entropy with each scale, for the first result. Figure 7: the best scale at
    each position, and its fit, for all results.
    """
    figure, axes = panels(f'Uniform scales: {about(results)}', 3, 3, width=6)
    search, curves = results[0]['search'], []
    position, n = search['position'], len(search['candidates'])
    for i in np.unique(np.linspace(0, n - 1, 6).round().astype(int)):
        curves.append((f"scale {search['candidates'][i]:g}", position, search['loss'][i],
                       search['entropy'][i], colormaps['viridis'](i / n)))
    curve(axes[0], running_mean(position), running_mean(search['best_loss_by_position']),
          'best at each', BLACK, ls='--')
    cut = search['cut']
    draw_cut(axes[0], cut['position'], cut['loss'], f"context cut to {cut['context']}")
    draw_loss_and_entropy(axes, curves, results[:1])

    for (result, name, _), color in zip(named(results), cycle([ORANGE, BLUE, SKY, BLACK])):
        search, position = result['search'], np.array(result['search']['position'])
        axes[2].scatter(position, search['best_by_position'], s=4, color=color)
        beyond = position[position > result['block_size']]
        ln_s = np.log(beyond / result['block_size'])
        a, r2 = search['fit_a'], np.float64(search['fit_r2'])
        curve(axes[2], beyond, 1 + a * ln_s, f'{name}: a = {a:.3f}, R² = {r2:.2f}', color)
    curve(axes[2], beyond, (1 + 0.1 * ln_s) ** 2, 'YaRN: (1 + 0.1 ln(i / L))²', ls='--')
    position_axis(axes[2], results, 'best scale (1/√d)', 'Best scale and its fit, 1 + a ln(i / L)')
    return figure


def scatter_heads(axis, scales, entropy, layers, xlabel, at):
    """Figure 5: the scale of each head against its entropy. layers: what to call each layer."""
    n_layer, n_head = np.shape(entropy)
    points = axis.scatter(np.broadcast_to(scales, (n_layer, n_head)), np.array(entropy, float),
                          s=16, c=np.arange(n_layer).repeat(n_head))
    bar = axis.get_figure().colorbar(points, ax=axis, label='layer')
    bar.set_ticks(range(n_layer), labels=layers)
    axis.set(xlabel=xlabel, ylabel=f'entropy at position {at:.0f} (nats)',
             title='Scale and entropy of each head')


def draw_head(result):
    """
    Figures 4 and 5: loss and entropy by position, scale and entropy of heads; and the vectors that
    were tuned, as an image: head_scale, or another kind that `tune` names first.
    """
    sets = result.get('sets', [result])
    kind = re.match(r'\w+', result['settings']['tune']).group()
    kind = kind if kind in sets[-1] else 'head_scale'
    rows, entropy = sets[-1][kind], result['last_entropy']
    vectors = np.array(list(rows.values()) if isinstance(rows, dict) else rows, float)
    unit = f'{kind} (1/√d)' if kind == 'head_scale' else kind
    lengths = ', '.join(str(one['target_length']) for one in sets)
    figure, axes = panels(f'{kind} tuned at {lengths} tokens: {run_name(result)}', 4, 2, width=6.2)
    curves = [(name, result['position'], one['loss'], one['entropy'], None)
              for name, one in result['curves'].items()]
    cut = result['cut']
    draw_cut(axes[0], cut['position'], cut['loss'], f"context cut to {cut['context']}")
    draw_loss_and_entropy(axes, curves, [result])
    for axis in axes[:2]:
        mark_length(axis, sets[-1]['target_length'], 'tuned')

    of_heads = vectors.reshape(*vectors.shape[:2], -1).mean(2)
    if of_heads.shape[1] in (1, len(entropy[0])):
        scatter_heads(axes[2], of_heads, entropy, range(len(entropy)), unit,
                      result['curve_length'])
    image = axes[3].imshow(vectors.reshape(len(vectors), -1), aspect='auto', cmap='cividis')
    axes[3].set(xlabel='head' if vectors.shape[1:] == (len(entropy[0]),) else 'index in the vector',
                ylabel='vector' if isinstance(rows, dict) else 'layer', title=f'Tuned {kind}')
    axes[3].yaxis.get_major_locator().set_params(integer=True)
    axes[3].grid(False)
    figure.colorbar(image, ax=axes[3], label=unit)
    return figure


# ----------------------------------------------------------------------------- perplexity

def bars_of(results):
    """The key of the error that the pictures of eval_ppl.py show: paired where there is a gain."""
    return max(BARS, key=lambda key: any(key in row for one in results for row in one['rows']))


def draw_rows(axis, result, name, color, bars, height=lambda loss: loss):
    """
    The error bars of a result's rows, and its losses with the context cut to L, which at L cuts
    nothing. height: of a loss. Returns the highest end of each bar.
    """
    rows, L = result['rows'], result['pretrained_length']
    length, loss, error = (column(rows, key) for key in ('length', 'loss', bars))
    y, low, high = height(loss), height(loss - error), height(loss + error)
    axis.errorbar(length, y, (y - low, high - y), fmt='.', color=color, capsize=2)
    if any('cut_loss' in row for row in rows):
        cut = np.where(length == L, loss, column(rows, 'cut_loss'))
        draw_cut(axis, length, height(cut), f'{name}, context cut to {L}', color)
    return np.fmax(high, y)


def draw_ppl(*results):
    """Perplexity by window length."""
    first, bars = results[0], bars_of(results)
    figure, [axis] = panels(f"Perplexity on {first['dataset']}, {first['protocol']}: "
                            f'{about(results)}\nbars: {BARS[bars]}', 1, 1)
    ppl, tops = [], []
    for result, name, color in named(results):
        rows = result['rows']
        curve(axis, column(rows, 'length'), column(rows, 'ppl'), name, color)
        ppl.extend(column(rows, 'ppl'))
        tops.extend(draw_rows(axis, result, name, color, bars, np.exp))
    shown = np.array(tops)[np.array(ppl) < 20 * np.nanmin(ppl)]  # else all but one would be flat
    axis.set(yscale='log', ylabel='perplexity')
    axis.set_ylim(top=min(axis.get_ylim()[1], 1.05 * shown.max()))
    axis.yaxis.set_major_formatter(LogFormatter())
    axis.yaxis.set_minor_formatter(LogFormatter())
    length_axis(axis, results, 'window length (tokens)')
    legend(axis, values=True)
    return figure


def draw_positions(*results):
    """Loss by position, and with its error over the tail of each length."""
    bars = bars_of(results)
    figure, [axis] = panels(f"Loss on {results[0]['dataset']}: {about(results)}\ndots: mean of the "
                            f"last {results[0]['tail']} positions; bars: {BARS[bars]}", 1, 1)
    for result, name, color in named(results):
        curve(axis, result['position'], result['loss'], name, color, lw=0.8)
        draw_rows(axis, result, name, color, bars)
    position_axis(axis, results, 'loss (nats per token)')
    return figure


def draw_gains(axis, names, gains, errors, **style):
    """Bars of the gain from text more than L tokens back, one for each name."""
    axis.barh(np.arange(len(names)), gains, xerr=errors, ecolor=GRAY, **style)
    axis.axvline(0, color=BLACK, lw=1)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlabel('gain over seeing only the last L tokens (nats per token, ± standard error)')


def draw_repeats(*results):
    """The gain at far repeats, and at the controls."""
    figure, axes = panels(f'Gain where text repeats: {about(results)}', len(results), 2)
    for axis, (result, name, color) in zip(axes, named(results)):
        rows = result['rows']
        draw_gains(axis, [row['kind'] for row in rows], column(rows, 'gain'),
                   column(rows, 'gain_error'), color=color)
        axis.set_title(f"{name}, L = {result['pretrained_length']}")
    return figure


# ----------------------------------------------------------------------------- attention

def draw_entropy(*results):
    """
    Figure 1: loss and mean entropy by position. For tuned scales also Figure 5, with the rank
    correlation ρ of scale and entropy in each layer.
    """
    scaled = [result for result in results if 'spearman' in result]
    figure, axes = panels(f'Attention entropy: {about(results)}', 2 + len(scaled), 3, width=6)
    curves = []
    for result, name, color in named(results):
        curves.append((name, result['position'], result['loss'], result['mean_entropy'], color))
        if 'cut' in result:
            cut = result['cut']
            draw_cut(axes[0], cut['position'], cut['loss'],
                     f"{name}, context cut to {cut['context']}", color)
    draw_loss_and_entropy(axes, curves, results)
    for axis, result in zip(axes[2:], scaled):
        layers = [f'{layer}: ρ = {np.float64(rho):.2f}'
                  for layer, rho in enumerate(result['spearman'])]
        scatter_heads(axis, result['head_scale'], np.array(result['entropy'])[:, :, -1], layers,
                      'head_scale (1/√d)', result['position'][-1])
    return figure


def draw_heads(result):
    """Figures 3 and 10-12: the entropy of every head by position, one panel per layer."""
    layers, position = np.array(result['entropy'], float), result['position']
    title = f'Attention entropy of each head, a thin line each: {run_name(result)}'
    figure, axes = panels(title, len(layers), 4, width=4.2, height=3)
    for layer, (axis, heads) in enumerate(zip(axes, layers)):
        axis.plot(position, heads.T, color=SKY, lw=0.7)
        curve(axis, position, heads.mean(0), 'mean', BLUE)
        draw_bound(axis, position)
        position_axis(axis, [result], 'entropy (nats)', f'layer {layer}')
    return figure


def draw_maps(result):
    """The score maps of one head: a row of panels per length, a column per part of the scores."""
    rows, parts, L = result['lengths'], list(result['lengths'][0]['maps']), result['block_size']
    title = f"Layer {result['layer']}, head {result['head']}: {run_name(result)}"
    figure, axes = panels(title, len(rows) * len(parts), len(parts), width=3.6, height=3.2)
    for i, part in enumerate(parts):
        of_part = axes[i::len(parts)]
        values = np.concatenate([line for row in rows for line in row['maps'][part]])
        colors = {'norm': 'linear', 'clim': np.percentile(values, [1, 99])}
        if part == 'attention':  # the same colors in every picture, so that models can be compared
            colors = {'norm': 'log', 'clim': (1e-4, 1)}
        for axis, row in zip(of_part, rows):
            T, lines = row['length'], row['maps'][part]
            cells = np.full((len(lines), len(lines)), np.nan)  # later keys stay white
            cells[np.tril_indices(len(lines))] = np.concatenate(lines)
            image = axis.imshow(cells.clip(colors['clim'][0]), extent=(0, T, T, 0), **colors)
            axis.set(xlabel='key (tokens)', ylabel='query (tokens)', title=f'{part}, {T} tokens')
            if part == 'attention':
                share = row['first_key'][result['layer']][result['head']]
                axis.set_title(f'{part}, {T} tokens\n{share:.1%} on the first key')
            axis.grid(False)
            if L <= T:
                mark_length(axis, L, f'L = {L}')
        figure.colorbar(image, ax=of_part, location='bottom', label='mean of a cell',
                        format='{x:g}')
    return figure


# ----------------------------------------------------------------------------- tasks

def draw_passkey(*results):
    """Figure 6: accuracy by the length of the prompt, a cell's right edge, and the key's depth."""
    figure, axes = panels('Passkey retrieval', len(results), 2)
    for axis, (result, name, _) in zip(axes, named(results)):
        lengths, accuracy = result['lengths'], np.array(result['accuracy'], float)
        depths = np.linspace(0, 100, result['n_depths'] + 1)
        image = axis.pcolormesh([0, *lengths], depths, accuracy.T, vmin=0, vmax=1, cmap='cividis')
        axis.set(xlabel='length of the prompt (tokens)', ylabel='depth of the key (%)',
                 title=f'{name}: {accuracy.mean():.1%} of all')
        axis.invert_yaxis()
        axis.grid(False)
        for length, what in {result['window']: 'window', result['block_size']: 'L'}.items():
            if length <= lengths[-1]:
                mark_length(axis, length, f'{what} = {length}')
        figure.colorbar(image, ax=axis, label='accuracy')
    return figure


def draw_tasks(*results):
    """Accuracy by length, one panel per task of che.py. Dotted: of whole answers."""
    tasks = list(dict.fromkeys(task for result in results for task in result['tasks']))
    figure, axes = panels('Algorithmic tasks', len(tasks), 3, width=5, height=2.8)
    for axis, task in zip(axes, tasks):
        for result in results:
            L, name, row = result['train_length'], result['method'], result['tasks'].get(task)
            if row:
                curve(axis, result['lengths'], row['accuracy'], name)
                curve(axis, result['lengths'], row['exact'], f'{name}, whole answers', lw=1)
                axis.axhline(row['chance'], color=GRAY, ls='--', lw=1, label='chance')
        axis.set(ylim=(-0.03, 1.03), ylabel='accuracy', title=task.replace('_', ' '))
        length_axis(axis, [{'block_size': L}], 'length of the input (symbols)')
    legend(axes[-1])
    return figure


def draw_demo(result):
    """The demo's picture: the loss by position, and the gain at far repeats."""
    lengths, readings = result['lengths'], result['readings']
    L, T = lengths[0], lengths[-1]
    figure, [left, right] = panels(f"{result['windows']} windows of {result['source']}", 2, 2)
    for name, row in readings.items():
        curve(left, range(1, T + 1), row['curve'], name)
    cut = [row.get('cut_loss', row['loss']) for row in row['at'].values()]
    draw_cut(left, lengths, cut, f'{name}, context cut to L')
    position_axis(left, [{'block_size': L}], f"loss (nats per token, mean of {result['tail']})")
    far = [row['far'] for row in readings.values()]
    draw_gains(right, list(readings), column(far, 'gain'), column(far, 'gain_error'),
               color=[color_of(name) for name in readings])
    right.set_title(f'Where text repeats from more than L = {L} tokens back')
    return figure


# ----------------------------------------------------------------------------- any result

PICTURES = {
    'attention': draw_maps,
    'attention_maps': draw_maps,
    'che': draw_tasks,
    'demo': draw_demo,
    'entropy': draw_entropy,
    'eval_ppl position': draw_positions,
    'eval_ppl sliding': draw_ppl,
    'eval_ppl tail': draw_ppl,
    'passkey': draw_passkey,
    'repeats': draw_repeats,
    'tune_scale head': draw_head,
    'tune_scale uniform': draw_uniform,
}


def read(path):
    """A result, and the function that draws it, or None."""
    result = json.loads(Path(path).read_text(encoding='utf-8'))
    stage = result['stage']
    more = {'eval_ppl': 'protocol', 'tune_scale': 'method'}.get(stage)
    return result, PICTURES.get(f'{stage} {result[more]}' if more else stage)


def draw(path):
    """Draw the pictures of a stage's JSON beside it. Returns a list of their paths, or []."""
    path, drawn = Path(path), []
    result, picture = read(path)
    if picture:
        drawn.append(path.with_suffix('.png'))
        picture(result).savefig(drawn[0])
    if picture == draw_entropy:
        drawn.append(path.with_name(f"entropy_heads{path.stem.removeprefix('entropy')}.png"))
        draw_heads(result).savefig(drawn[1])
    return drawn


def main():
    results, pictures = zip(*map(read, paths))
    picture, *others = {*pictures}
    if not picture or others:
        raise UserError(f"Give results of one of these: {', '.join(PICTURES)}.")
    if len(paths) == 1:
        print('wrote', *draw(*paths))
        return
    if picture in (draw_demo, draw_head, draw_maps):
        raise UserError('These results have too many panels to share a picture: draw each alone.')
    stems = '_and_'.join(Path(path).stem for path in paths)
    png_path = out or Path(paths[0]).with_name(f'{stems}.png')
    picture(*results).savefig(png_path)
    print('wrote', png_path)


if __name__ == '__main__':
    configure(globals())
    main()
