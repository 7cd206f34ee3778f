"""
Scale files: softmax scales and other small vectors tuned for one length or several, as JSON that a
person can read.

A file holds one set of vectors, or under 'sets' several, each tuned for passes of its target_length
tokens. A set has an entry for each kind of vector, by its name in model.VECTORS: head_scale and
head_gain as a row of n_head numbers for each layer, or for a scale per channel n_head rows of
head_dim; others as {parameter: values}. The file names the weights that it was tuned for, and has a
digest of its own numbers.
"""

import difflib
import hashlib
import json
import math
import warnings
from pathlib import Path

import numpy as np
import torch

from lib.errors import UserError, fault_of
from lib.results import note, save_json
from model import VECTORS, small_vectors, vector_of

# What a scale file may have beside its vectors: the entries of any result, and tune_scale.py's own.
ENTRIES = set("""sets target_length method block_size position_method short_conv rope_scaling
    weights_digest numbers_digest stage dataset label trained_length checkpoint
    scale identity command settings commit versions device dtype seconds lengths
    best_by_length searches fit_a init_scale losses curve_length position curves cut
    samples last_entropy worse_than_start tuned_numbers tuning_tokens
    """.split())


# ---------------------------------------------------------------------- files

def vectors_to_json(vectors):
    """
    {parameter name: tensor} as the entries of a scale file, each number as short as float32 allows.
    Raises ValueError for a parameter that VECTORS does not list, which would be lost.
    """
    data = {}
    for name, vector in vectors.items():
        key = vector_of(name)
        if key is None:
            raise ValueError(f'{name} is not listed in VECTORS of model.py, so no scale file can '
                             'hold it. Add it there.')
        if vector.dim() > 1 and vector.shape[-1] == 1:  # a number for each head
            vector = vector[..., 0]
        text = vector.float().numpy(force=True).astype(str)
        data.setdefault(key, {})[name] = text.astype(float).tolist()
    for key, rows in data.items():
        if list(rows) == by_layer(key, len(rows)):
            data[key] = list(rows.values())
    return data


def by_layer(key, n_layer):
    """The names of a kind of vector that each layer's attention has."""
    return [f'blocks.{layer}.attn.{key}' for layer in range(n_layer)]


def vectors_from_json(data, path, model):
    """
    The inverse, for this model: {parameter name: float32 tensor}. A kind that pretraining leaves
    alone and the file lacks is neutral. Raises UserError for what does not fit.
    """
    known, vectors = small_vectors(model), {}
    for name, p in known.items():
        kind = VECTORS[vector_of(name)]
        if not kind.pretrained:
            vectors[name] = torch.full((*p.shape[:-1], 1), kind.neutral)
    data = dict(data)
    if 'channel_scale' in data:  # its name in older files
        data['head_scale'] = data.pop('channel_scale')
    for key in {'head_scale'} | data.keys() & VECTORS.keys():  # a set without scales is none
        rows = data[key]
        if isinstance(rows, list):
            names = by_layer(key, model.config.n_layer)
            if len(rows) != len(names):
                raise UserError(f'{key} in {path} has {len(rows)} layers; it must be a list of '
                                f'{len(names)}, as many as this model has.')
            rows = dict(zip(names, rows))
        if not rows:
            raise UserError(f'{key} in {path} is empty.')
        for name, values in rows.items():
            if name not in known or vector_of(name) != key:
                raise UserError(f'{key} in {path} has {name}, which this model does not have.')
            vectors[name] = vector_from(values, known[name], model.config.head_dim,
                                        f'{name} in {path}')
    return vectors


def vector_from(values, p, D, what):
    """The numbers of a file as a tensor for parameter p: one a head or channel, or p's shape."""
    if p.dim() == 1:
        return finite(values, p.shape, what)
    if np.ndim(values) < 2:
        return finite(values, p.shape[:1], what)[:, None]
    return finite(values, (len(p), D), what)


def finite(values, shape, what):
    """A float32 tensor of that shape. Raises UserError where it is another or not finite there."""
    try:
        numbers = np.array(values, dtype=object)  # which keeps "1.2" and true apart from numbers
        odd = any(type(number) not in (int, float) for number in numbers.flat)
        tensor = torch.from_numpy(numbers.astype(float)).float()
    except (TypeError, ValueError, OverflowError):
        odd, tensor = True, torch.empty(0)
    if odd or tensor.shape != shape or not tensor.isfinite().all():
        size = ' x '.join(map(str, shape))
        raise UserError(f'{what} must be {size} numbers that float32 can hold.')
    return tensor


def above_zero(scale, what):
    """Raises UserError unless all of a softmax scale, a number or a tensor, is above 0."""
    if torch.as_tensor(scale).min() <= 0:
        raise UserError(f'{what} must be above 0, as a softmax scale is.')


def numbers_digest(sets):
    """A SHA-256 of the sets of a scale file, lists of dicts as JSON has them."""
    return hashlib.sha256(json.dumps(sets, sort_keys=True).encode()).hexdigest()


def save_scale(path, *what, **more):
    """Write a scale file of scale_entries(*what) and more; returns what a reader gets."""
    return save_json(path, scale_entries(*what) | more)


def scale_entries(info, sets, method, by_length=False):
    """
    What makes a result a scale file. sets: {L': vectors by parameter name}, L' being the context in
    tokens that they are for; info: of the checkpoint. A single set is used for every pass. With
    by_length, a single set is also unused for passes of up to L tokens.
    """
    c = info['model_config']
    sets = [{'target_length': T} | vectors_to_json(vectors) for T, vectors in sets.items()]
    digest = numbers_digest(sets)
    sets = {'sets': sets} if by_length or len(sets) > 1 else sets[0]
    return sets | {
        'method': method, 'block_size': c['block_size'], 'position_method': c['position'],
        'rope_scaling': c['rope_scaling'], 'weights_digest': info['digest'],
        'numbers_digest': digest}


def sets_of(data, path):
    """
    The sets of a scale file, dicts with target_length. Raises UserError for an entry that no scale
    file has.
    """
    kinds = {*VECTORS, 'channel_scale', 'target_length'}
    for name in data:
        if name not in ENTRIES | kinds:
            near = difflib.get_close_matches(name, kinds, n=1)
            advice = f"Did you mean '{near[0]}'?" if near else 'Remove it.'
            raise UserError(f"{path} has '{name}', which no scale file has. {advice}")
    sets = data['sets'] if 'sets' in data else [{key: data[key] for key in data.keys() & kinds}]
    for name in {name for one in sets for name in one} - kinds:
        raise UserError(f"{path} has '{name}' in a set, which no scale file has. Remove it.")
    return sets


def read_scale_file(path, model, info):
    """
    Read a scale file of a model, of which `info` is what its checkpoint says. Returns its JSON and
    {L': vectors}. Raises UserError for another model's.
    """
    if not Path(path).is_file():
        raise UserError(f'scale file {path} does not exist. Make one with tune_scale.py, or give a '
                        'number.')
    with fault_of(path, 'a scale file, which has head_scale, weights_digest and target_length',
                  'Make one with tune_scale.py.'):
        data = json.loads(Path(path).read_text(encoding='utf-8'))
        found, sets = sets_of(data, path), {}
        require_same_weights(data, path, info)
        for one in found:
            sets[one['target_length']] = vectors_from_json(one, path, model)
        if not sets or not all(type(T) is int and T > 0 for T in sets):
            raise ValueError(f'target_length is {list(sets)}')
    if data.get('numbers_digest', numbers_digest(found)) != numbers_digest(found):
        note(f'{path} was changed after it was tuned; its numbers are used as they are now')
        for vectors in sets.values():  # tuning may end below 0, a person's number may not
            for name, scale in vectors.items():
                if name.endswith('head_scale'):
                    above_zero(scale, f'{name} in {path}')
    return data, sets


def require_same_weights(data, path, info):
    """Refuse a scale file of other weights, or of a model that was read in another way."""
    if data['weights_digest'] != info['digest']:
        raise UserError(f"{path} was tuned for other weights than {info['path']}. Tune it again "
                        'for this checkpoint.')
    for setting, key in (('position', 'position_method'), ('rope_scaling', 'rope_scaling')):
        tuned_as, read_as = data.get(key), info['model_config'][setting]
        if tuned_as not in (read_as, None):
            raise UserError(f"{path} was tuned with {setting} '{tuned_as}', but {info['path']} is "
                            f"read with '{read_as}'. Add --{setting}={tuned_as}.")


# ---------------------------------------------------------------------- in a model

def put_vectors(model, vectors):
    """Give small vectors of a model new values, {name: tensor}."""
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
            own[name] = own[name].expand_as(vector)
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


def remove_sets(model):
    """Take away the scale sets that a model has, which would replace other scales in each pass."""
    if model.scale_sets:
        model.scale_sets.remove()


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
        name, (data, sets) = Path(scale).stem, read_scale_file(scale, model, info)
        remove_sets(model)
        if 'sets' in data:
            ScaleSets(model, sets)
        else:
            put_vectors(model, *sets.values())
    elif np.ndim(scale):
        c = model.config
        shape = c.n_layer, c.n_head, c.head_dim
        name = 'scales'
        scales = finite(np.asarray(scale), shape[:max(2, np.ndim(scale))], 'scale')
        remove_sets(model)
        model.head_scale = scales
    else:
        name, number = f'scale{scale:g}', finite(scale, (), f'scale {scale}')
        above_zero(number, f'scale {scale}')
        remove_sets(model)
        model.head_scale = number
    if replaces:
        say(f'{name} replaces the head scales that the model had, which were not all 1')
    return f'{label}_{name}' if label else name


def identity(model, scale, info):
    """What a model's answers depend on; `scale`: a SHA-256 of its vectors and its scale file."""
    digest = hashlib.sha256(Path(scale).read_bytes() if isinstance(scale, str) else b'')
    for name, weight in model.state_dict().items():
        if weight.dim() < 2 or vector_of(name):
            digest.update(weight.float().numpy(force=True).tobytes())
    return {'weights_digest': info['digest'], 'position': model.config.position,
            'rope_scaling': model.config.rope_scaling, 'scale': digest.hexdigest()}
