"""
What the stages share that read a trained model: open it, read the last tokens with a short context,
write results.
"""

import dataclasses
import json
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from configurator import ROOT, UserError

import numpy as np
import torch

from common import load_weights, model_config, read_model, save_json
from model import Transformer
from position import unused_settings
from scales import set_scale, way_of_reading

# ---------------------------------------------------------------------- open a model

def matrices(model):
    """
    {name: weight} of the matrices that may be in half precision. All other weights stay float32:
    small vectors, weights of position methods, convolutions, and the embedding, to which the
    output of every layer is added.
    """
    names = 'qkv.weight', 'out.weight', 'gate_up.weight', 'head.weight'
    return {name: p for name, p in model.named_parameters() if name.endswith(names)}


def build_model(weights, trained, position, rope_scaling, path, dtype):
    """
    A Transformer with a checkpoint's weights, its matrices in this dtype. trained: the ModelConfig
    of the checkpoint. position, rope_scaling: instead of its own, unless None. path: for errors.
    """
    values = dataclasses.asdict(trained) | {'position': position or trained.position}
    values |= unused_settings(values)  # the defaults of what another position method lacks
    if rope_scaling is not None:
        values['rope_scaling'] = rope_scaling
    config = model_config(values)
    model = Transformer(config)
    load_weights(model, weights, path, assign=True)
    if config.tied:  # assign=True gave each its own
        model.head.weight = model.embed.weight
    model.float()
    for p in matrices(model).values():
        p.data = p.data.to(dtype)
    return model


def open_model(init_from, out_dir, runtime, position=None, rope_scaling=None, scale=None):
    """
    A trained model, frozen, with its softmax scales, and a dict about it.
    init_from: last or best (of out_dir), a checkpoint file, a run's folder, a Hugging Face folder,
    hf:ORG/NAME, or a .gguf file. position, rope_scaling: instead of the checkpoint's. scale: see
    set_scale().
    The dict has what the checkpoint holds beside the weights (model_config, settings, tokenizer,
    digest of the weights, step ...), and
        path              the file or folder
        label             how the model is read, such as yarn4_scale1.2
        dataset           the text that it was trained on, or ''
        trained_position  the position method that it was trained with
        tuned_length      the longest text in tokens that a scale file is tuned for; without a file
                          block_size
    """
    path = f'{out_dir}/{init_from}.pt' if init_from in ('last', 'best') else init_from
    info = read_model(path, position, runtime.dtype)
    model, trained = info.pop('model'), info['model_config']
    if isinstance(model, dict):  # weights of a Transformer
        model = build_model(model, trained, position, rope_scaling, info['path'], runtime.dtype)
        info |= {'model_config': model.config, 'trained_position': trained.position}
    elif position or rope_scaling is not None or scale is not None:
        model.refuse()  # a model that transformers runs cannot be changed
    model = model.to(runtime.device).eval().requires_grad_(False)
    info['dataset'] = info['settings'].get('dataset', '')
    info['tuned_length'] = model.config.block_size
    scales = set_scale(model, scale, info)
    names = position, model.config.rope_scaling.replace(':', ''), scales
    info['label'] = '_'.join(filter(None, names))
    return model, info


# ---------------------------------------------------------------------- losses

def cut_windows(lo, hi, n, L):
    """
    How to read the last n tokens of the window tokens[lo:hi] with only the last L tokens as
    context: windows (lo, hi, tokens scored at the end) of at most L tokens that score at most
    L / 8 each. With L = 8, the last 3 tokens of tokens[0:20] are read by (12, 20, 1), (11, 19, 1)
    and (10, 18, 1).
    """
    stride, windows = max(1, L // 8), []
    for end in range(hi, hi - n, -stride):
        left = end - (hi - n)  # tokens that are still to be scored
        windows.append((max(lo, end - L), end, min(stride, left)))
    return windows


def cut_losses(model, samples, end, tail, batch_tokens, runtime):
    """
    The baseline of every model that reads past L: the mean loss of each sample over the last `tail`
    targets up to position `end`, (n,), if it sees only the last L tokens. samples: (n, T + 1) ids.
    """
    n_scored, total = min(tail, end), 0
    for lo, hi, n in cut_windows(0, end, n_scored, model.config.pretrained_length):
        total += runtime.over_windows(
            samples[:, lo:hi + 1], batch_tokens,
            # n=n: this loop's n, not that of the next round
            lambda inputs, targets, n=n: model(inputs, targets[:, -n:]).sum(1))
    return total / n_scored


def doublings(first, last):
    """The lengths first, twice as many, four times ... and last."""
    lengths = []
    while first < last:
        lengths.append(first)
        first *= 2
    return [*lengths, last]


def cut_curve(model, samples, tail, batch_tokens, runtime):
    """The mean of cut_losses() at block_size tokens, twice as many, four times ... and at T."""
    lengths = doublings(model.config.block_size, samples.shape[1] - 1)
    losses = [cut_losses(model, samples, n, tail, batch_tokens, runtime).mean() for n in lengths]
    return {'context': model.config.pretrained_length, 'position': lengths, 'loss': losses}


def bin_means(values, width):
    """
    Means over bins of `width` positions. values: (..., T), of numpy or torch. Returns the mean
    position of each bin, counted from 1, (bins,), and the means, (..., bins).
    """
    width = max(1, width)
    bins = values.shape[-1] // width
    means = values[..., :bins * width].reshape(*values.shape[:-1], bins, width).mean(-1)
    # bin 0 holds the positions 1 ... width, whose mean is (width + 1) / 2
    return np.arange(bins) * width + (width + 1) / 2, means


def read_lengths(model, samples, lengths, tail, batch_tokens, runtime):
    """
    Read the first n tokens of each sample, for each n in lengths. Returns the mean loss in bins of
    block_size / 16 positions, read at the longest length: the position of each bin, (bins,), and
    its loss; and the mean loss of each sample over the last `tail` tokens of each length,
    {n: (samples,)}. One pass of the longest length gives all, unless a token is read in another way
    when more tokens follow, as with scale sets and dynamic NTK: then each length has its own pass.
    """
    losses = {}
    for n in lengths if model.depends_on_length else [max(lengths)]:
        losses[n] = runtime.over_windows(samples[:, :n + 1], batch_tokens, model, f'{n} tokens')
    longest = losses[max(lengths)]
    position, binned = bin_means(longest.mean(0), model.config.block_size // 16)
    tails = {}
    for n in lengths:
        of_length = losses.get(n, longest)[:, :n]
        tails[n] = of_length[:, -tail:].mean(1)
    return position, binned, tails


# ---------------------------------------------------------------------- results

def results_folder(out_dir, init_from, given):
    """
    Where the results of a model go: to out_dir, or if the model is from elsewhere and no out_dir
    was given, to out/PARENT-NAME. given: the names of the settings that the user gave.
    """
    if init_from in ('last', 'best') or 'out_dir' in given:
        return out_dir
    name = init_from.removeprefix('hf:')
    for ending in '/last.pt', '.pt', '.gguf':
        name = name.removesuffix(ending)
    path = Path(name).resolve()
    return f'out/{path.parent.name}-{path.name}'


def result_path(folder, stage, label, info, dataset='', split='test'):
    """
    The path FOLDER/STAGE[_LABEL] of a result, without a suffix, in a folder that exists. Without a
    label the name says how the model is read, and which text, if it is not the model's own. Raises
    UserError, before the work starts, if a result of other weights is there.
    """
    of_text = Path(dataset).name if dataset != info['dataset'] else ''
    of_split = split if split != 'test' else ''
    parts = [stage, label] if label else [stage, info['label'], of_text, of_split]
    path = Path(folder, '_'.join(filter(None, parts)))
    path.parent.mkdir(parents=True, exist_ok=True)
    there = Path(f'{path}.json')
    if there.exists():
        digest = json.loads(there.read_text(encoding='utf-8')).get('weights_digest')
        if digest not in (None, info['digest']):
            raise UserError(f"{there} is a result of other weights than {info['path']}. Give this "
                            'one a --label=NAME, or another --out_dir=.')
    return str(path)


def commit():
    """The commit of the project's folder, and whether it has changes; '' without git."""
    if not shutil.which('git') or not (ROOT / '.git').exists():
        return ''
    describe = ['git', '-C', ROOT, 'describe', '--always', '--exclude=*', '--dirty= with changes']
    return subprocess.run(describe, capture_output=True, text=True).stdout.strip()


def write_result(path, result, chosen, runtime, info=None):
    """
    Write PATH.json, on the first rank, and its picture. The file holds how the model was read, the
    result, and what is needed to measure it again. chosen: settings(globals()) of the stage.
    """
    if not runtime.is_main:
        return
    data = {'stage': Path(sys.argv[0]).stem}
    if info:
        data |= {'checkpoint': info['path'], **way_of_reading(info)}
        for name in 'short_conv', 'dape_kernel', 'block_size', 'pretrained_length':
            data[name] = getattr(info['model_config'], name)
    data |= result
    module = sys.modules['__main__'].__spec__  # None unless the stage was run by python -m
    program = ['-m', module.name] if module else [Path(sys.argv[0]).name]
    is_cuda = runtime.device.type == 'cuda'
    data |= {'command': shlex.join(['python', *program, *sys.argv[1:]]), 'settings': chosen,
             'commit': commit(),
             'versions': {'python': platform.python_version(), 'torch': torch.__version__},
             'device': torch.cuda.get_device_name() if is_cuda else platform.machine(),
             'dtype': str(runtime.dtype).removeprefix('torch.')}
    save_json(f'{path}.json', data)
    import plots  # matplotlib takes a second
    print('wrote', f'{path}.json', *plots.draw(f'{path}.json'))
    if data.get('crossing'):
        print(f"{data['crossing']} of the windows reach into another document, because the text "
              'has too few documents that are long enough')


def print_rows(say, rows):
    """Print rows, {column: number or text}, as a table. A cell is empty if its row lacks it."""
    columns, lines = {}, [''] * (1 + len(rows))
    for row in rows:
        columns |= row
    for column in columns:
        cells = [column.replace('_', ' ')]
        for row in rows:
            cell = row.get(column, '')
            cells.append(f'{cell:.4f}' if isinstance(cell, float) else str(cell))
        width = max(map(len, cells))
        lines = [f'{line}  {cell:>{width}}' for line, cell in zip(lines, cells)]
    for line in lines:
        say(line[2:])
