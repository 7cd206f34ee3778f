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


def way_of_reading(info):
    """What a scale file and a result say about a model: which weights, and how they were read."""
    config = info['model_config']
    return {'weights_digest': info['digest'], 'position_method': config.position,
            'rope_scaling': config.rope_scaling}


def set_entry(length, model, kinds):
    """A set of a scale file: all small vectors of a model that are of these kinds."""
    entry = {'target_length': length}
    for kind in sorted(kinds):
        vectors = small_vectors(model, kind)
        entry[kind] = {}
        for name, p in vectors.items():
            numbers = p.squeeze(-1).numpy(force=True)                 # (H,) instead of (H, 1)
            entry[kind][name] = numbers.astype(str).astype(float)     # no more digits than float32
    entry['head_scale'] = list(entry['head_scale'].values())  # by layer: a person edits these
    return entry


def read_set(entry, model):
    """{parameter name: tensor} from a set of a scale file."""
    numbers = {}
    for layer, row in enumerate(entry['head_scale']):
        numbers[f'blocks.{layer}.attn.head_scale'] = row
    # of all other kinds, names are stored with the numbers
    for kind in {vector_kind(name) for name in small_vectors(model)} - {'head_scale'}:
        numbers |= entry.get(kind, {})
    vectors = {}
    for name, row in numbers.items():
        p, vector = model.get_parameter(name), torch.tensor(row, dtype=torch.float32)
        # (C,), or with a row per head (H, 1), or (H, D) if it was tuned per channel
        vectors[name] = vector.reshape(p.shape if p.dim() == 1 else (len(p), -1))
    return vectors


def read_scale_file(path, model, info):
    """
    The JSON of a scale file, and its sets, {target_length: {parameter name: tensor}}. Raises
    UserError if it was tuned for other weights, or for these weights read in another way.
    """
    if not Path(path).is_file():
        raise UserError(f'There is no scale file {path}. Make one with tune_scale.py '
                        '(scale_uniform.json: --method=uniform, with the same --dataset=), or give '
                        'a number.')
    data = json.loads(Path(path).read_text(encoding='utf-8'))
    for name, value in way_of_reading(info).items():
        if data[name] != value:
            raise UserError(f"{path} was tuned with {name} '{data[name]}', and this model has "
                            f"'{value}'. Tune it again, or read the model in the same way.")
    entries = data.get('sets', [data])
    return data, {entry['target_length']: read_set(entry, model) for entry in entries}


def use_sets(model, sets):
    """
    Give a model sets for several lengths, {length: {parameter name: tensor}}:
    Transformer.take_set() then takes one for each pass. Up to block_size it is the model's own,
    unless there is a set for block_size itself.
    """
    device = model.norm.weight.device
    own = {name: model.get_parameter(name).detach().clone() for name in sets[max(sets)]}
    model.scale_sets = {model.config.block_size: own}
    for length, vectors in sorted(sets.items()):
        model.scale_sets[length] = {name: vector.to(device) for name, vector in vectors.items()}


def set_scale(model, scale, info):
    """
    Set the softmax scales of a model: a number for all heads, an array (n_layer, H) or (n_layer,
    H, D), a scale file, or None: as trained. A file with several sets gives each pass the set for
    its length; info['tuned_length'] becomes the longest one. Returns a name, such as scale1.2.
    """
    if scale is None:
        return ''
    if not isinstance(scale, str | Path):
        model.head_scale = scale
        return f'scale{scale:g}' if np.ndim(scale) == 0 else 'scales'
    data, sets = read_scale_file(scale, model, info)
    info['tuned_length'] = max(sets)
    if 'sets' in data:
        use_sets(model, sets)
    else:
        [vectors] = sets.values()
        for name, vector in vectors.items():
            p = model.get_parameter(name)
            p.data = vector.to(p.device)
    return Path(scale).stem
