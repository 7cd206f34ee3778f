"""
The pictures of the stages' results, drawn only from the JSON that a stage wrote.

$ python plots.py out/demo/nope/eval_ppl.json              # draws eval_ppl.png beside it again
$ python plots.py out/a/entropy.json out/b/entropy_x.json  # both in out/a/entropy_and_entropy_x.png

A dotted line marks L, the length of training.
"""

import json
import math
from pathlib import Path

from configurator import configure

import numpy as np
from cycler import cycler
from matplotlib import colormaps, rcParams
from matplotlib.figure import Figure

paths: list[str] = []        # JSON files of results; several of one stage share a picture, but for
                             # scales, maps and the demo

# Color-blind readers can distinguish these colors, by Okabe and Ito; then they come again, dashed.
COLORS = ['#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000', '#999999']
rcParams.update({'axes.prop_cycle': cycler(ls=['-', '--']) * cycler(color=COLORS),
                 'font.size': 9, 'axes.titlesize': 9, 'savefig.dpi': 110,
                 'text.parse_math': False})  # a name may hold a $

NAMES = {'none': 'NoPE', 'rope': 'RoPE', 'alibi': 'ALiBi'}  # others as their settings


# ---------------------------------------------------------------------- parts of a picture

def name_of(result):
    """
    A result's position method, and its file, whose name says how the model is read, and what.
    """
    name = NAMES.get(result['position_method'], result['position_method'])
    if result.get('dape_kernel'):
        name += ' + DAPE'
    if result.get('short_conv'):
        name += ' + conv'
    return f"{name} ({result['file']})"


def panels(title, n, columns=4):
    """A figure of n panels and the list of their axes. It needs no display."""
    columns = min(n, columns)
    rows = math.ceil(n / columns)
    figure = Figure(figsize=(5 * columns, 3.8 * rows), layout='constrained')
    figure.suptitle(title)
    return figure, [figure.add_subplot(rows, columns, i + 1) for i in range(n)]


def column(rows, key):
    """The numbers of a key, (rows,); nan where a row lacks it."""
    return np.array([row.get(key) for row in rows], float)


def finish(axis, results, ylabel, xlabel='position (tokens)'):
    """A logarithmic x axis with a line at each L, and labels."""
    for result in results:  # their name of L depends on the stage; old ones have only block_size
        L = (result.get('pretrained_length') or result.get('train_length') or result.get('L')
             or result['block_size'])
        axis.axvline(L, color='black', ls=':', label=f'L = {L}')
    axis.set_xscale('log', base=2)
    axis.xaxis.set_major_formatter('{x:g}')
    axis.set(xlabel=xlabel, ylabel=ylabel)
    axis.grid(alpha=0.3)


def smooth(position, loss):
    """
    The mean loss of the last 8 bins at each position, or of all if there are fewer. A bin is
    block_size / 16 positions.
    """
    n = min(8, len(position))
    return position[n - 1:], np.convolve(loss, np.ones(n) / n, 'valid')


def draw_cut(axis, result, color):
    """The loss of the model if it sees only the last L tokens, where the result has it."""
    if cut := result.get('cut'):
        axis.plot(cut['position'], cut['loss'], '.--', lw=0.8, color=color,
                  label=f"{name_of(result)}, only the last {cut['context']} tokens")


def save(figure, path):
    """Write a figure, with the names of all curves at its right."""
    curves = {}
    for axis in figure.axes:
        lines, names = axis.get_legend_handles_labels()
        curves |= zip(names, lines)
    if curves:
        figure.legend(curves.values(), curves.keys(), loc='upper left', bbox_to_anchor=(1, 0.95))
    figure.savefig(path, bbox_inches='tight')


# ---------------------------------------------------------------------- training

def draw_log(log_path, png_path):
    """Losses and attention entropy by tokens read, from the log.jsonl of train.py."""
    rows = [json.loads(line) for line in Path(log_path).read_text().splitlines()]
    figure, [axis] = panels(f'Training: {Path(log_path).parent}', 1)
    for key in 'loss', 'val_loss', 'entropy':
        measured = [row for row in rows if key in row]
        dots = '' if key == 'loss' else '.'  # there may be only one validation
        axis.plot(column(measured, 'tokens'), column(measured, key), marker=dots, label=key)
    axis.set(xlabel='tokens read', ylabel='loss per token, attention entropy (nats)')
    save(figure, png_path)


# ---------------------------------------------------------------------- scales

def draw_uniform(result):
    """Loss with up to six of the scales; Figure 7: the best scale at each position."""
    result = result | result['search']  # beside `search` it is a scale file
    position, candidates = np.array(result['position']), result['candidates']
    figure, [left, right] = panels(f'Uniform scales of {name_of(result)}', 2)
    for i in range(0, len(candidates), math.ceil(len(candidates) / 6)):
        left.plot(*smooth(position, result['loss'][i]), label=f'scale {candidates[i]:g}',
                  color=colormaps['viridis'](i / len(candidates)))
    draw_cut(left, result, 'C0')
    finish(left, [result], 'loss (nats per token, running mean)')
    fit = 1 + result['fit_a'] * np.log(position / result['block_size']).clip(0)
    right.plot(position, fit, label=f"fit, a = {result['fit_a']:.3f}")
    right.plot(position, result['best_by_position'], '.', ms=3, color='C0')
    right.set_title('best scale, and its fit 1 + a ln(i / L)')
    finish(right, [result], 'best scale (1/√d)')
    return figure


def draw_head(result):
    """The loss of each tuning step, and what was tuned: a row per vector, a column per number."""
    tuned = result.get('sets', [result])[-1]
    kinds = [part.partition(':')[0] for part in result['tuned'].split(',')]
    title = f"Tuned at {tuned['target_length']} tokens (scales in 1/√d): {name_of(result)}"
    figure, [left, *others] = panels(title, 1 + len(kinds))
    left.plot(result['losses'])
    left.set(xlabel='step', ylabel='loss of a batch (nats per token)')
    for axis, kind in zip(others, kinds):
        vectors = tuned['head_scale' if kind == 'channel' else kind]
        rows = np.array([*vectors.values()] if isinstance(vectors, dict) else vectors)
        image = axis.imshow(rows.reshape(len(rows), -1), aspect='auto')
        axis.set(title=kind, xlabel='head, or channel', ylabel='layer, or vector')
        axis.locator_params(integer=True)
        figure.colorbar(image)
    return figure


# ---------------------------------------------------------------------- what a model reads

def draw_ppl(*results):
    """The loss, the logarithm of the perplexity, by window length or position."""
    figure, [axis] = panels(f"{results[0]['dataset']}, protocol {results[0]['protocol']}", 1)
    for result in results:
        rows = result['rows']
        if 'name' in rows[0]:  # a table of several models, with a list of perplexities each
            for row in rows:
                axis.plot(result['lengths'], np.log(row['ppl']), marker='.', label=row['name'])
            continue
        lengths = column(rows, 'length')
        [line] = axis.plot(lengths, column(rows, 'loss'), marker='.', label=name_of(result))
        if 'position' in result:  # the loss at each position joins the dots
            line.set(linestyle='', marker='o')
            axis.plot(result['position'], result['loss'], lw=1, ls='-', color=line.get_color())
        if 'cut_loss' in rows[-1]:
            axis.errorbar(lengths, column(rows, 'cut_loss'), column(rows, 'gain_error'),
                          fmt='.--', lw=0.8, capsize=3, color=line.get_color(),
                          label=f"each, only the last {result['pretrained_length']} tokens\n"
                                '(± standard error of the difference)')
    finish(axis, results, 'loss (nats per token)', xlabel='tokens')
    return figure


def draw_entropy(*results):
    """Figure 1: loss and mean entropy. For one result also Figures 3 and 10-12: each head's."""
    first = results[0]
    layers = first['entropy'] if len(results) == 1 else []  # a panel for each
    figure, [left, middle, *others] = panels('Attention entropy', 2 + len(layers))
    for i, result in enumerate(results):
        left.plot(*smooth(result['position'], result['loss']), label=name_of(result))
        draw_cut(left, result, f'C{i}')
        middle.plot(result['position'], result['mean_entropy'], label=name_of(result))
    finish(left, results, 'loss (nats per token, running mean)')
    middle.set_title('mean of all heads')
    for i, heads in enumerate(layers):
        others[i].plot(first['position'], np.transpose(heads), color='C0', ls='-', lw=0.7)
        others[i].set_title(f'the heads of layer {i}')
    for axis in middle, *others:
        axis.plot(first['position'], first['bound'], color='gray', lw=0.8, ls='-',
                  label='upper bound: ln i')
        finish(axis, results, 'entropy of attention (nats)')
    return figure


def draw_maps(result):
    """The score maps of one head: a row of panels per length, a column per part of the scores."""
    L, lengths = result['block_size'], result['lengths']
    columns = len(lengths[0]['maps'])
    figure, axes = panels(f"Layer {result['layer']}, head {result['head']}: {name_of(result)}. "
                          f"Red: trained at {L}", columns * len(lengths), columns)
    axes = iter(axes)
    for row in lengths:
        for part, rows in row['maps'].items():
            cells = np.full((len(rows), len(rows)), np.nan)  # nan is white: keys after the query
            for r, numbers in enumerate(rows):
                cells[r, :len(numbers)] = numbers
            axis = next(axes)
            image = axis.imshow(cells, extent=(0, row['length'], row['length'], 0))
            title = f'{part}, mean of a cell'
            if part == 'attention':  # the same colors in all pictures, so that models compare
                image.set(norm='log', clim=(1e-4, 1))
                title = f"attention to {math.ceil(row['length'] / len(rows))} keys a cell"
            axis.axvline(L, color='red', ls=':')
            axis.set(xlabel='key (tokens)', ylabel='query (tokens)', title=title)
            figure.colorbar(image, format='{x:g}')
    return figure


# ---------------------------------------------------------------------- tasks

def draw_passkey(*results):
    """Figure 6: accuracy by the length of the prompt, a cell's right edge, and the key's depth."""
    figure, axes = panels('Passkey retrieval', len(results))
    for axis, result in zip(axes, results):
        image = axis.imshow(np.transpose(result['accuracy']), aspect='auto', clim=(0, 1),
                            extent=(0, result['lengths'][-1], 100, 0))
        axis.axvline(result['block_size'], color='red', ls=':')
        axis.set(xlabel=f"length of the prompt (tokens; red: trained at {result['block_size']})",
                 ylabel='depth of the key (%)', title=name_of(result))
        axis.locator_params(axis='x', nbins=5)
        figure.colorbar(image, label='accuracy')
    return figure


def draw_tasks(*results):
    """Accuracy by length, one panel per task of che.py."""
    tasks = results[0]['tasks']
    figure, axes = panels('Algorithmic tasks', len(tasks))
    for axis, task in zip(axes, tasks):
        for result in results:
            row = result['tasks'][task]
            axis.plot(result['lengths'], row['accuracy'], marker='.',
                      label=f"{result['method']} ({result['file']})")
        axis.set_title(task)
        finish(axis, results, f"accuracy (chance: {row['chance']:.3g})",
               'length of the input (symbols)')
    return figure


def draw_demo(result):
    """The loss by position, and the gain at far repeats."""
    figure, [left, right] = panels(f"{result['windows']} windows of {result['source']}", 2)
    tail, T = result['tail'], result['lengths'][-1]
    for name, reading in result['readings'].items():  # the names of the bars name the curves, too
        [line] = left.plot(range(tail, T + 1), reading['curve'][tail - 1:])
        right.barh(name, reading['far']['gain'], xerr=reading['far']['gain_error'],
                   color=line.get_color(), ecolor='gray')
        if ',' not in name:  # the baseline is the same with scales
            left.plot(result['lengths'], column(reading['at'].values(), 'cut_loss'), '.--', lw=0.8,
                      color=line.get_color(), label=f'{name}, only the last L tokens')
    finish(left, [result], f'loss (nats per token, mean of {tail})')
    right.invert_yaxis()
    right.set(xlabel='gain (nats per token, ± standard error)',
              title='Gain over the last L tokens, at far repeats')
    return figure


# ---------------------------------------------------------------------- any result

PICTURES = {
    'attention': draw_maps,
    'che': draw_tasks,
    'demo': draw_demo,
    'entropy': draw_entropy,
    'eval_ppl': draw_ppl,
    'head': draw_head,
    'passkey': draw_passkey,
    'uniform': draw_uniform,
}


def draw(*files):
    """
    Draw the picture of results of one stage beside the first JSON: A.png, or A_and_B.png. Returns
    [its path], or [] if the stage has no picture.
    """
    results = [json.loads(Path(file).read_text(encoding='utf-8')) | {'file': file}
               for file in files]
    stage = results[0].get('stage')
    kind = results[0]['method'] if stage == 'tune_scale' else stage
    if kind not in PICTURES:
        return []
    name = '_and_'.join(Path(file).stem for file in files)[:200]  # a name has at most 255 bytes
    path = Path(files[0]).with_name(f'{name}.png')
    save(PICTURES[kind](*results), path)
    return [path]


if __name__ == '__main__':
    configure(globals())
    print('wrote', *draw(*paths) or ['nothing: this stage has no picture'])
