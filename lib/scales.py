"""
Scale files: softmax scales and other small vectors tuned for one length or several, as JSON that a
person can read.

A file holds one set of vectors, or under 'sets' several, each tuned for passes of its target_length
tokens: head_scale and head_gain, (n_layer, n_head), or for the first channel_scale, (n_layer,
n_head, head_dim); and norm, {parameter: values}. It names the weights that it was tuned for.
"""

import hashlib
import json
import math
import warnings
from pathlib import Path

import numpy as np
import torch

from lib.errors import UserError, fault_of
from lib.results import save_json

HEADS = 'head_scale', 'head_gain'


# ---------------------------------------------------------------------- files

def vectors_to_json(vectors):
    """{parameter name: tensor} as the entries of a scale file."""
    rows = {name: vector.double().numpy(force=True).round(6) for name, vector in vectors.items()}
    data = {kind: [row for name, row in rows.items() if name.endswith(kind)] for kind in HEADS}
    data['norm'] = {name: row for name, row in rows.items() if 'norm' in name}
    if np.ndim(data['head_scale']) == 3:
        data['channel_scale'] = data.pop('head_scale')
    return {kind: value for kind, value in data.items() if value}


def vectors_from_json(data, path, info):
    """The inverse: {parameter name: float32 tensor}. Raises UserError for what does not fit."""
    c, vectors = info['model_config'], {}
    data = {'head_gain': np.ones((c['n_layer'], c['n_head']))} | data
    for kind in HEADS:
        key, shape = kind, (c['n_layer'], c['n_head'])
        if kind == 'head_scale' and 'channel_scale' in data:
            key, shape = 'channel_scale', (*shape, c['n_embd'] // c['n_head'])
        rows = finite(data[key], shape, f'{key} in {path}')
        vectors |= {f'blocks.{layer}.attn.{kind}': row for layer, row in enumerate(rows)}
    names = {'norm.weight'}
    for layer in range(c['n_layer']):
        names |= {f'blocks.{layer}.attn_norm.weight', f'blocks.{layer}.mlp_norm.weight'}
    for name, values in data.get('norm', {}).items():
        if name not in names:
            raise UserError(f'norm in {path} has {name}, which this model does not have.')
        vectors[name] = finite(values, (c['n_embd'],), f'{name} in {path}')
    return vectors


def finite(values, shape, what):
    """A float32 tensor of that shape. Raises UserError where it is another or not finite there."""
    try:
        tensor = torch.from_numpy(np.array(values, dtype=float)).float()
    except (TypeError, ValueError, OverflowError):
        tensor = torch.empty(0)
    if tensor.shape != shape or not tensor.isfinite().all():
        size = ' x '.join(map(str, shape))
        raise UserError(f'{what} must be {size} numbers that float32 can hold.')
    return tensor


def save_scale(path, *what, **more):
    """Write a scale file of scale_entries(*what) and more; returns what a reader gets."""
    return save_json(path, scale_entries(*what) | more)


def scale_entries(info, sets, method, by_length=False):
    """
    What makes a result a scale file. sets: {L': vectors by parameter name}, L' being
    the context in tokens that they are for; info: of the checkpoint. One set is for every pass,
    unless by_length: then it too leaves those of L tokens alone.
    """
    c = info['model_config']
    sets = [{'target_length': T} | vectors_to_json(vectors) for T, vectors in sets.items()]
    sets = {'sets': sets} if by_length or len(sets) > 1 else sets[0]
    return sets | {
        'method': method, 'block_size': c['block_size'], 'position_method': c['position'],
        'rope_scaling': c['rope_scaling'], 'weights_digest': info['digest']}


def read_scale_file(path, info):
    """
    Read a scale file of the model that `info` describes. Returns its JSON and {L': vectors}. Raises
    UserError for another model's.
    """
    if not Path(path).is_file():
        raise UserError(f'scale file {path} does not exist. Make one with tune_scale.py, or give a '
                        'number.')
    with fault_of(path, 'a scale file, which has head_scale or channel_scale, weights_digest and '
                        'target_length', 'Make one with tune_scale.py.'):
        data = json.loads(Path(path).read_text(encoding='utf-8'))
        tuned_for, sets = data['weights_digest'], {}
        for one in data.get('sets', [data]):
            sets[one['target_length']] = vectors_from_json(one, path, info)
        if not sets or not all(isinstance(T, int) and T > 0 for T in sets):
            raise ValueError(f'target_length is {list(sets)}')
    if tuned_for != info['digest']:
        raise UserError(f"{path} was tuned for other weights than {info['path']}. Tune it again "
                        'for this checkpoint.')
    for setting, key in (('position', 'position_method'), ('rope_scaling', 'rope_scaling')):
        tuned_as, read_as = data.get(key), info['model_config'][setting]
        if tuned_as not in (read_as, None):
            raise UserError(f"{path} was tuned with {setting} '{tuned_as}', but {info['path']} is "
                            f"read with '{read_as}'. Add --{setting}={tuned_as}.")
    return data, sets


# ---------------------------------------------------------------------- in a model

def put_vectors(model, vectors):
    """Give parameters of a model new values: {name: tensor}, of one number a channel or a head."""
    for name, vector in vectors.items():
        p = model.get_parameter(name)
        p.data = vector.to(p.device, copy=True)


class ScaleSets:
    """
    Vectors for several lengths. Before each pass the one for the tokens that it will hold is put
    into the model: between two lengths linear in ln T, past the last that one; up to L, the model's
    own vectors.
    """

    def __init__(self, model, sets):
        names = {name for vectors in sets.values() for name in vectors}
        own = {name: model.get_parameter(name).clone() for name in names}
        for name, vector in next(iter(sets.values())).items():  # (H, D) where the sets are so
            own[name] = own[name].view(len(vector), *[-1] * (vector.dim() - 1)).expand_as(vector)
        put_vectors(model, own)
        L, self.model = model.config.block_size, model
        self.sets = {L: own}
        for length, vectors in sorted(sets.items()):
            if length > L:
                self.sets[length] = {name: x.to(own[name].device) for name, x in vectors.items()}
        model.scale_sets = self
        self.hook = model.register_forward_pre_hook(self.before_pass, with_kwargs=True)

    def before_pass(self, model, args, kwargs):
        cache = kwargs.get('cache')
        self.use(cache.max_length if cache is not None else args[0].shape[1])

    @torch.no_grad()
    def use(self, total):
        """Take the vectors for passes of `total` tokens."""
        lengths, sets = list(self.sets), list(self.sets.values())
        if total > lengths[-1]:
            warnings.warn(f'no scales for more than {lengths[-1]} tokens: those serve beyond, too',
                          stacklevel=2)
        place = np.interp(np.log(total), np.log(lengths), range(len(lengths)))  # 0.5: between two
        before, after = sets[math.floor(place)], sets[math.ceil(place)]
        for name, vector in before.items():
            self.model.get_parameter(name).copy_(torch.lerp(vector, after[name], place % 1))

    def remove(self):
        """Leave the model with the vectors it has now, whatever the length."""
        self.hook.remove()
        self.model.scale_sets = None


def apply_scale(model, scale, info, say=print):
    """
    Set the model's softmax scales from a stage's --scale: None (as trained), a number for all
    heads, a scale file, or, from Python, an array (n_layer, H) or (n_layer, H, D). Returns the
    label of the result: '', 'scale1.2', 'scales' or the file's name, after the extension of RoPE if
    any.
    """
    label = model.config.rope_scaling.replace(':', '')
    if scale is None:
        return label
    replaces = (model.head_scale != 1).any()
    if isinstance(scale, str | Path):
        name, (data, sets) = Path(scale).stem, read_scale_file(scale, info)
        if 'sets' in data:
            ScaleSets(model, sets)
        else:
            put_vectors(model, *sets.values())
    elif np.ndim(scale):
        c = model.config
        shape = c.n_layer, c.n_head, c.head_dim
        name = 'scales'
        model.head_scale = finite(np.asarray(scale), shape[:max(2, np.ndim(scale))], 'scale')
    else:
        name, number = f'scale{scale:g}', finite(scale, (), f'scale {scale}')
        if number <= 0:
            raise UserError(f'scale is {scale}; a softmax scale must be above 0.')
        model.head_scale = number
    if replaces:
        say(f'{name} replaces the head scales that the model had, which were not all 1')
    return f'{label}_{name}' if label else name


def identity(model, scale, info):
    """What a model's answers depend on; `scale`: a SHA-256 of its vectors and its scale file."""
    digest = hashlib.sha256(Path(scale).read_bytes() if isinstance(scale, str) else b'')
    for name, weight in model.state_dict().items():
        if weight.dim() < 2 or name.endswith('head_scale'):
            digest.update(weight.float().numpy(force=True).tobytes())
    return {'weights_digest': info['digest'], 'position': model.config.position,
            'rope_scaling': model.config.rope_scaling, 'scale': digest.hexdigest()}
