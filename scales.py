"""
Softmax scales of a trained model, and the other small vectors that tune_scale.py tunes: give a
model those of a file, or write such a file.

A scale file is JSON that a person can read and edit. Of a model with two layers of three heads:

    {"weights_digest": "9f2c...", "position_method": "none", "rope_scaling": "",
     "target_length": 512,
     "head_scale": [[1.2, 1.0, 1.4], [1.1, 1.3, 1.0]],
     "norm": {"blocks.0.attn_norm.weight": [...], ...}}

The first line names the weights it was tuned for, and how they were read. head_scale has a row per
layer and a number per head, in units of 1 / sqrt(D); other kinds of small vectors may follow, by
parameter. Scale sets for several lengths stand in a list `sets`: each has a target_length and its
vectors.
"""

import json
from pathlib import Path

from configurator import UserError

import numpy as np
import torch

from model import small_vectors, vector_kind


def set_entry(length, vectors):
    """A set of a scale file. vectors: {parameter name: tensor}, with all head scales."""
    entry = {}
    for name, vector in vectors.items():
        is_column = vector.dim() == 2 and vector.shape[1] == 1     # one number per head
        numbers = (vector[:, 0] if is_column else vector).numpy(force=True)
        numbers = numbers.astype(str).astype(float)                # no more digits than float32 has
        entry.setdefault(vector_kind(name), {})[name] = numbers.tolist()
    entry['head_scale'] = list(entry['head_scale'].values())
    return {'target_length': length} | entry


def read_set(entry, model):
    """{parameter name: tensor} from a set of a scale file."""
    vectors = {}
    for name, p in small_vectors(model).items():
        # head_scale is a list with a row per layer, other kinds are {parameter: numbers}
        rows, layer = entry.get(vector_kind(name), {}), name.split('.')[1]  # blocks.LAYER.attn ...
        row = rows.get(name) if isinstance(rows, dict) else rows[int(layer)]
        if row is not None:
            vector = torch.tensor(row, dtype=torch.float32)
            if len(vector) != len(p) or not vector.isfinite().all():
                raise ValueError(f'{name} has the wrong length, or a number that is not finite')
            vectors[name] = vector[:, None] if vector.dim() < p.dim() else vector
    if not vectors:
        raise ValueError('it has no head_scale')
    return vectors


def read_scale_file(path, model, info):
    """
    The JSON of a scale file, and its sets, {target_length: {parameter name: tensor}}. Raises
    UserError if it was tuned for other weights, or for these weights read in another way.
    """
    try:
        data = json.loads(Path(path).read_text(encoding='utf-8'))
        sets = {entry['target_length']: read_set(entry, model)
                for entry in data.get('sets', [data])}
        digest, *read_as = (data[key] for key in ('weights_digest', 'position_method',
                                                  'rope_scaling'))
    except OSError as error:
        raise UserError(f'There is no scale file {path} ({error.strerror}). Make one with '
                        'tune_scale.py (scale_uniform.json: --method=uniform, with the same '
                        '--dataset=), or give a number.') from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f'{path} is not a scale file for this model ({error}). Make one with '
                        'tune_scale.py.') from error
    if digest != info['digest']:
        raise UserError(f"{path} was tuned for other weights than {info['path']}. Tune it again "
                        'for this checkpoint.')
    if read_as != [model.config.position, model.config.rope_scaling]:
        raise UserError(f'{path} was tuned with --position={read_as[0]} '
                        f'--rope_scaling={read_as[1]}. Give both.')
    return data, sets


def use_sets(model, sets):
    """
    Give a model sets for several lengths, {length: {parameter name: tensor}}:
    Transformer.take_set() then takes one for each pass. Up to block_size it is the model's own;
    sets for shorter texts are left out.
    """
    block_size, device = model.config.block_size, model.norm.weight.device
    own = {name: model.get_parameter(name).detach().clone() for name in sets[max(sets)]}
    model.scale_sets = {block_size: own}
    for length in sorted(sets):
        if length > block_size:
            vectors = {name: vector.to(device) for name, vector in sets[length].items()}
            model.scale_sets[length] = vectors


def set_scale(model, scale, info):
    """
    Set the softmax scales of a model: a number for all heads, an array (n_layer, H) or (n_layer,
    H, D), a scale file, or None: as trained. A file with several sets gives each pass the set for
    its length; info['tuned_length'] becomes the longest one. Returns a name, such as scale1.2.
    """
    if scale is None:
        return ''
    if isinstance(scale, str | Path):
        data, sets = read_scale_file(scale, model, info)
        info['tuned_length'] = max(sets)
        if 'sets' in data:
            use_sets(model, sets)
        else:
            [vectors] = sets.values()
            for name, vector in vectors.items():
                p = model.get_parameter(name)
                p.data = vector.to(p.device, copy=True)
        return Path(scale).stem
    if not torch.as_tensor(scale).min() > 0:
        raise UserError(f'scale is {scale}; a softmax scale must be above 0.')
    model.head_scale = scale
    return f'scale{scale:g}' if np.ndim(scale) == 0 else 'scales'
