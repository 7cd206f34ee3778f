"""
What the stages share that read a trained model: open it with its softmax scales, write results.

A scale file is JSON with one set of small vectors, or several under `sets`. Each set is tuned for
texts of target_length tokens, and has an entry for each kind of vector: head_scale has a row of
n_head numbers for each layer, in units of 1 / sqrt(D). The file names the weights it was tuned for.
"""

import contextlib
import dataclasses
import json
import platform
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from configurator import ROOT, UserError

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from common import load_weights, model_config, read_checkpoint, save_json
from model import Transformer, small_vectors, vector_kind, vector_of
from position import unused_settings

BEGAN = time.perf_counter()


# ---------------------------------------------------------------------- open a model

def matrices(model):
    """
    {name: weight} of the matrices that may be in half precision. All other weights stay float32:
    small vectors, weights of position methods, convolutions, and the embedding, to which the
    output of every layer is added.
    """
    names = 'qkv.weight', 'out.weight', 'gate_up.weight', 'head.weight'
    return {name: p for name, p in model.named_parameters() if name.endswith(names)}


class Uninitialized(TorchFunctionMode):
    """
    Inside this mode torch.nn.init does nothing, because the weights will be loaded: on the device
    `meta` it would load the compiler, which takes a second.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, '__module__', '') == 'torch.nn.init':
            return kwargs['tensor']
        return function(*args, **(kwargs or {}))


def open_model(init_from, out_dir, runtime, position=None, rope_scaling=None, scale=None):
    """
    A trained model, frozen, with its softmax scales, and a dict about it: the other entries of the
    checkpoint, its path, and a label that says how it is read. init_from: last or best (of
    out_dir), a checkpoint file, a run's folder, a Hugging Face folder, hf:ORG/NAME. position,
    rope_scaling: instead of the checkpoint's. scale: see set_scale().
    """
    path = f'{out_dir}/{init_from}.pt' if init_from in ('last', 'best') else init_from
    if Path(path, 'last.pt').is_file():
        path = f'{path}/last.pt'
    if path.startswith('hf:') or path.endswith('.gguf') or Path(path).is_dir():
        from extras import convert
        info = convert.read(path, position, runtime.dtype)
    else:
        info = read_checkpoint(path)
    info.pop('optimizer', None)
    model, config, trained = info.pop('model'), info['model_config'], {}
    if isinstance(model, dict):
        trained = dataclasses.asdict(config)
        info['trained_position'] = config.position
        values = trained | {'position': position or config.position}
        values |= unused_settings(values)
        if rope_scaling is not None:
            values['rope_scaling'] = rope_scaling
        weights, info['model_config'] = model, model_config(values)
        with torch.device('meta'), Uninitialized():
            model = Transformer(info['model_config'])
        load_weights(model, weights, path, assign=True)
        if config.tied:
            model.head.weight = model.embed.weight
        half = matrices(model)
        for name, p in model.named_parameters():
            p.data = p.data.to(runtime.dtype if name in half else torch.float32)
    elif position or rope_scaling is not None or scale is not None:
        model.refuse()
    model = model.to(runtime.device).eval().requires_grad_(False)
    info['label'] = set_scale(model, scale, info, trained)
    return model, info


# ---------------------------------------------------------------------- softmax scales

def vectors_of_file(entry, path, model):
    """
    {parameter name: tensor} from a set of a scale file: for each kind of small vector a list with
    one row per layer, or {parameter name: row}. A kind that pretraining does not train and that the
    set lacks gets its neutral value.
    """
    vectors = {}
    for name, p in small_vectors(model).items():
        kind, one, layer = vector_kind(name), vector_of(name), name.split('.')[1]
        rows = entry.get(kind)
        if rows is None:
            if not one.pretrained:
                vectors[name] = torch.full((*p.shape[:-1], 1), one.neutral)
            continue
        row = rows[int(layer)] if isinstance(rows, list) else rows.get(name)
        if row is not None:
            vector = torch.tensor(row, dtype=torch.float32)
            vectors[name] = vector[:, None] if vector.dim() < p.dim() else vector
            if len(vectors[name]) != len(p) or not vector.isfinite().all():
                raise ValueError(f'{name} has the wrong shape, or a number that is not finite')
    if 'head_scale' not in entry:
        raise ValueError('head_scale is missing')
    return vectors


def read_scale_file(path, model, info):
    """
    The JSON of a scale file, and {length: {parameter name: tensor}}. Raises UserError if it was
    tuned for other weights, or for the same weights read with another position or rope_scaling.
    """
    try:
        data = json.loads(Path(path).read_text(encoding='utf-8'))
        sets = {one['target_length']: vectors_of_file(one, path, model)
                for one in data.get('sets', [data])}
        tuned = data['weights_digest'], data['position_method'], data['rope_scaling']
    except OSError as error:
        raise UserError(f'There is no scale file {path} ({error.strerror}). Make one with '
                        'tune_scale.py, or give a number.') from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f'{path} is not a scale file for this model ({error}). Make one with '
                        'tune_scale.py.') from error
    if tuned[0] != info['digest']:
        raise UserError(f"{path} was tuned for other weights than {info['path']}. Tune it again "
                        'for this checkpoint.')
    if tuned[1:] != (model.config.position, model.config.rope_scaling):
        raise UserError(f'{path} was tuned with --position={tuned[1]} --rope_scaling={tuned[2]}. '
                        'Give both.')
    return data, sets


def put_vectors(model, vectors):
    """Give a model's small vectors new values. vectors: {name: tensor}."""
    for name, vector in vectors.items():
        p = model.get_parameter(name)
        p.data = vector.to(p.device, copy=True)


def use_sets(model, sets):
    """
    Give a model sets for several lengths, {length: {name: tensor}}: Transformer.take_set() then
    takes one for each pass. Up to block_size it is the model's own.
    """
    L, last = model.config.block_size, sets[max(sets)]
    own = {name: model.get_parameter(name).detach().clone() for name in last}
    sets = {L: own} | {n: sets[n] for n in sorted(sets) if n > L}
    model.scale_sets = {n: {name: vector.to(own[name].device).expand_as(last[name])
                            for name, vector in one.items()} for n, one in sets.items()}


def set_scale(model, scale, info, trained=None):
    """
    Set the softmax scales of a model: a number for all heads, an array (n_layer, H) or (n_layer,
    H, D), a scale file, or None: as trained. A file with sets for several lengths gives each pass
    the set for its length, and passes of up to block_size tokens the model's own. Returns a label
    that says how the model is read, such as yarn4_scale1.2.
    """
    label = []
    if trained:
        c = model.config
        label = [c.position.replace(',', '_')] if c.position != trained['position'] else []
        label += [c.rope_scaling.replace(':', '')] if c.rope_scaling else []
    if scale is None:
        return '_'.join(label)
    if isinstance(scale, str | Path):
        data, sets = read_scale_file(scale, model, info)
        if 'sets' in data:
            use_sets(model, sets)
        else:
            put_vectors(model, *sets.values())
        label.append(Path(scale).stem)
    else:
        if not torch.as_tensor(scale).min() > 0:
            raise UserError(f'scale is {scale}; a softmax scale must be above 0.')
        model.head_scale = scale
        label.append(f'scale{scale:g}' if np.ndim(scale) == 0 else 'scales')
    return '_'.join(label)


# ---------------------------------------------------------------------- losses

def losses_by_position(model, inputs, targets):
    """
    The loss of each target in nats, (B, T). inputs, targets: (B, T) ids. With scale sets, each
    position is read by the shortest pass that contains it; without them one pass reads all.
    """
    T, losses, first = inputs.shape[1], [], 0
    for end in [*(n for n in getattr(model, 'scale_sets', ()) if n < T), T]:
        losses.append(model(inputs[:, :end], targets[:, first:end]))
        first = end
    return torch.cat(losses, dim=1)


def cut_windows(lo, hi, n, L):
    """
    How to read the last n tokens of the window tokens[lo:hi] with only the last L tokens as
    context: windows (lo, hi, tokens scored at the end) of at most L tokens that score at most
    L / 8 each.
    """
    stride = min(n, max(1, L // 8))
    return [(max(lo, end - L), end, min(stride, end - hi + n))
            for end in range(hi, hi - n, -stride)]


def cut_losses(model, samples, end, tail, batch_tokens, runtime):
    """
    The baseline of every model that reads past L: the mean loss of each sample over the last `tail`
    targets up to position `end`, (n,), if it sees only the last L tokens. samples: (n, T + 1) ids.
    """
    L, n_scored, total = model.config.pretrained_length, min(tail, end), 0
    for lo, hi, n in cut_windows(0, end, n_scored, L):
        total += runtime.over_windows(samples[:, lo:hi + 1], batch_tokens, lambda inputs, targets:
                                      model(inputs, targets[:, -n:]).sum(1))  # noqa: B023
    return total / n_scored


def cut_curve(model, samples, tail, batch_tokens, runtime):
    """cut_losses(), mean over the samples, at the lengths L, 2L, 4L ... and at their end."""
    L, T = model.config.block_size, samples.shape[1] - 1
    lengths = [L * 2 ** k for k in range(T.bit_length()) if L * 2 ** k < T] + [T]
    losses = [cut_losses(model, samples, n, tail, batch_tokens, runtime).mean() for n in lengths]
    return {'context': model.config.pretrained_length, 'position': lengths, 'loss': losses}


# ---------------------------------------------------------------------- results

def results_folder(out_dir, init_from, given):
    """
    Where the results of a model go: to out_dir, or if the model is from elsewhere and no out_dir
    was given, to out/PARENT-NAME. given: the names of the settings that the user gave.
    """
    if init_from in ('last', 'best') or 'out_dir' in given:
        return out_dir
    path = Path(init_from.removeprefix('hf:')).resolve().with_suffix('')
    path = path.parent if path.name == 'last' else path
    return f'out/{path.parent.name}-{path.name}'


def result_path(folder, stage, label, info):
    """
    The path FOLDER/STAGE[_LABEL] of a result, without a suffix. Raises UserError, before the work
    starts, if a result of other weights is there.
    """
    name = '_'.join(filter(None, (stage, label or info['label'])))
    if Path(name).name != name:
        raise UserError(f'label is {label}; it becomes part of a file name, so it has no slash.')
    path = Path(folder, name)
    Path(folder).mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        there = json.loads(Path(f'{path}.json').read_text(encoding='utf-8')).get('weights_digest')
        if there not in (None, info['digest']):
            raise UserError(f"{path}.json is a result of other weights than {info['path']}. Give "
                            'this one a --label=NAME, or another --out_dir=.')
    return str(path)


def write_result(path, result, chosen, runtime, info=None):
    """
    Write PATH.json, on the first rank, and its pictures. The file holds the result, how the model
    was read, and what is needed to measure it again. chosen: settings(globals()) of the stage.
    """
    if not runtime.is_main:
        return
    module, git = sys.modules['__main__'].__spec__, shutil.which('git')
    program = ['-m', module.name] if module else [Path(sys.argv[0]).name]
    about, commit = {'stage': Path(sys.argv[0]).stem, 'label': chosen.get('label', '')}, ''
    if git and (ROOT / '.git').exists():  # not that of a surrounding repository
        commit = subprocess.run([git, '-C', ROOT, 'describe', '--always', '--exclude=*',
                                 '--dirty= with changes'], capture_output=True, text=True).stdout
    if info:
        c = info['model_config']
        about |= {'label': about['label'] or info['label'], 'position_method': c.position,
                  'short_conv': c.short_conv, 'dape_kernel': c.dape_kernel,
                  'block_size': c.block_size, 'pretrained_length': c.pretrained_length,
                  'rope_scaling': c.rope_scaling, 'checkpoint': info['path'],
                  'weights_digest': info['digest'], 'scale': chosen.get('scale')}
    cuda = runtime.device.type == 'cuda'
    save_json(f'{path}.json', about | result | {
        'command': shlex.join(['python', *program, *sys.argv[1:]]), 'settings': chosen,
        'commit': commit.strip() or None, 'versions': {
            'python': platform.python_version(), 'torch': torch.__version__},
        'device': torch.cuda.get_device_name() if cuda else platform.machine(),
        'threads': torch.get_num_threads(), 'ranks': runtime.world_size,
        'dtype': str(runtime.dtype).removeprefix('torch.'),
        'seconds': round(time.perf_counter() - BEGAN, 1)})
    import plots  # matplotlib takes a second
    print('wrote', f'{path}.json', *plots.draw(f'{path}.json'))


def print_rows(say, rows):
    """Print rows, {column: number or text}, as a table. A cell is empty if its row lacks it."""
    names = dict.fromkeys(name for row in rows for name in row)
    table = [[name.replace('_', ' ') for name in names]]
    for row in rows:
        cells = [row.get(name, '') for name in names]
        table.append([f'{cell:.4f}' if isinstance(cell, float) else str(cell) for cell in cells])
    widths = [max(map(len, column)) for column in zip(*table)]
    for cells in table:
        say('  '.join(f'{cell:>{width}}' for cell, width in zip(cells, widths)))
