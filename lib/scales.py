"""
Scale files: JSON files of softmax scales and other small vectors, tuned for one or more lengths.

A file holds one set of vectors, or several under 'sets'. Each set is tuned for passes of
target_length tokens. A set has an entry for each kind of vector, under its name in model.VECTORS.
head_scale and head_gain have a row of n_head numbers for each layer; a scale per channel has n_head
rows of head_dim numbers for each layer. Other kinds are {parameter: values}. The file holds the
digest of the weights that it was tuned for, and a digest of its own numbers.
"""

import contextlib
import difflib
import hashlib
import json
import math
from pathlib import Path

import numpy as np
import torch

from lib.answers import note, save_json
from lib.errors import UserError, fault_of
from lib.tokenizers import tokenizer_digest
from model import VECTORS, small_vectors, vector_of

# Entries that a scale file may have besides its vectors: those of any result, and of tune_scale.py.
ENTRIES = set("""sets target_length method block_size position_method short_conv dape_kernel
    rope_scaling weights_digest numbers_digest stage dataset label pretrained_length checkpoint
    scale identity command settings commit versions device dtype seconds lengths
    best_by_length searches fit_a init_scale losses curve_length position curves cut
    samples last_entropy worse_than_start tuned_numbers tuning_tokens
    """.split())


# ---------------------------------------------------------------------- files

def vectors_to_json(vectors):
    """
    {parameter name: tensor} as the entries of a scale file. Each number has as few digits as
    float32 allows. Raises ValueError for a parameter that VECTORS does not list, because it would
    be lost.
    """
    data = {}
    for name, vector in vectors.items():
        key = vector_of(name)
        if key is None:
            raise ValueError(f'{name} is not listed in VECTORS of model.py, so no scale file can '
                             'hold it. Add it there.')
        if vector.dim() > 1 and vector.shape[-1] == 1:  # one number per head
            vector = vector[..., 0]
        text = vector.float().numpy(force=True).astype(str)
        data.setdefault(key, {})[name] = text.astype(float).tolist()
    for key, rows in data.items():
        if list(rows) == by_layer(key, len(rows)):
            data[key] = list(rows.values())
    return data


def by_layer(key, n_layer):
    """The parameter names of one kind of vector, one for each layer's attention."""
    return [f'blocks.{layer}.attn.{key}' for layer in range(n_layer)]


def vectors_from_json(data, path, model):
    """
    The inverse of vectors_to_json(): {parameter name: float32 tensor} for this model. A kind that
    the file lacks, and that pretraining does not train, gets its neutral value. Raises UserError
    for an entry that does not fit the model.
    """
    known, vectors = small_vectors(model), {}
    for name, p in known.items():
        kind = VECTORS[vector_of(name)]
        if not kind.pretrained:
            vectors[name] = torch.full((*p.shape[:-1], 1), kind.neutral)
    of_file = data.keys() & VECTORS.keys()
    for key in {'head_scale'} | of_file:  # each set must have scales
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
    """
    The numbers of a file as a tensor for parameter p. If p is a vector, they have its shape;
    otherwise there is one number per head, or one per channel.
    """
    if p.dim() == 1:
        return finite(values, p.shape, what)
    if np.ndim(values) < 2:
        return finite(values, p.shape[:1], what)[:, None]
    return finite(values, (len(p), D), what)


def finite(values, shape, what):
    """A float32 tensor of `shape`. Raises UserError for another shape or a number not finite."""
    try:
        numbers = np.array(values, dtype=object)  # object keeps "1.2" and true apart from numbers
        odd = any(type(number) not in (int, float) for number in numbers.flat)
        tensor = torch.from_numpy(numbers.astype(float)).float()
    except (TypeError, ValueError, OverflowError):
        odd, tensor = True, torch.empty(0)
    if odd or tensor.shape != shape or not tensor.isfinite().all():
        size = f"{' x '.join(map(str, shape))} numbers" if shape else 'a number'
        raise UserError(f'{what} must be {size} that float32 can hold.')
    return tensor


def above_zero(scale, what):
    """Raise UserError if a softmax scale, a number or a tensor, has a value of 0 or below."""
    if torch.as_tensor(scale).min() <= 0:
        raise UserError(f'{what} must be above 0, because it is a softmax scale.')


def numbers_digest(sets):
    """SHA-256 of the sets of a scale file. sets: a list of dicts, as read from JSON."""
    return hashlib.sha256(json.dumps(sets, sort_keys=True).encode()).hexdigest()


def save_scale(path, info, sets, method, by_length=False, **more):
    """Write scale_entries() and `more` to a scale file. Returns the dict as JSON reads it."""
    return save_json(path, scale_entries(info, sets, method, by_length) | more)


def scale_entries(info, sets, method, by_length=False):
    """
    The entries that make a result a scale file. sets: {L': vectors by parameter name}, where L' is
    the context in tokens that the vectors are for. info: of the checkpoint. A single set is used
    for every pass. With by_length, even a single set is not used for passes of up to L tokens.
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
    The sets of a scale file, as dicts with target_length. Raises UserError for an entry that does
    not belong in a scale file.
    """
    kinds = {*VECTORS, 'target_length'}
    for name in data:
        if name not in ENTRIES | kinds:
            near = difflib.get_close_matches(name, kinds, n=1)
            advice = f"Did you mean '{near[0]}'?" if near else 'Remove it.'
            raise UserError(f"{path} has '{name}', which does not belong in a scale file. {advice}")
    sets = data['sets'] if 'sets' in data else [{key: data[key] for key in data.keys() & kinds}]
    unknown = {name for one in sets for name in one} - kinds
    if unknown:
        name = min(unknown)
        raise UserError(f"{path} has '{name}' in a set, which does not belong in a scale file. "
                        'Remove it.')
    return sets


def read_scale_file(path, model, info):
    """
    Read a scale file for a model. info: of the model's checkpoint. Returns the file's JSON and
    {L': vectors}. Raises UserError if the file was tuned for another model.
    """
    if not Path(path).is_file():
        raise UserError(f'there is no scale file {path}. Make one with tune_scale.py, or give a '
                        'number.')
    with fault_of(path, 'a scale file, which has head_scale, weights_digest and target_length',
                  'Make one with tune_scale.py.'):
        data = json.loads(Path(path).read_text(encoding='utf-8'))
        if not {'head_scale', 'sets'} & data.keys():
            raise KeyError('head_scale')
        found, sets = sets_of(data, path), {}
        require_same_weights(data, path, info)
        for one in found:
            sets[one['target_length']] = vectors_from_json(one, path, model)
        if not sets or not all(type(T) is int and T > 0 for T in sets):
            raise ValueError(f'target_length is {list(sets)}')
        if len({tuple(sorted(vectors)) for vectors in sets.values()}) > 1:
            raise ValueError('its sets have different vectors')
        is_changed = data['numbers_digest'] != numbers_digest(found)
    if is_changed:
        note(f'{path} was changed after it was tuned; the changed numbers are used')
        for vectors in sets.values():  # tuning may end below 0, but a changed number may not
            for name, scale in vectors.items():
                if name.endswith('head_scale'):
                    above_zero(scale, f'{name} in {path}')
    return data, sets


# How a model is read: {setting: its entry in a scale file}
READ_WITH = {'position': 'position_method', 'rope_scaling': 'rope_scaling'}


def require_same_weights(data, path, info):
    """
    Refuse a scale file of other weights, or of the same weights with another position or
    rope_scaling.
    """
    if data['weights_digest'] != info['digest']:
        raise UserError(f"{path} was tuned for other weights than {info['path']}. Tune it again "
                        'for this checkpoint.')
    for setting, key in READ_WITH.items():
        tuned_as, read_as = data[key], info['model_config'][setting]
        if tuned_as != read_as:
            raise UserError(f"{path} was tuned with {setting} '{tuned_as}', but {info['path']} is "
                            f"read with '{read_as}'. Add --{setting}={tuned_as}.")


# ---------------------------------------------------------------------- in a model

def put_vectors(model, vectors):
    """Give a model's small vectors new values. vectors: {name: tensor}."""
    for name, vector in vectors.items():
        p = model.get_parameter(name)
        p.data = vector.to(p.device, copy=True)


def replace_vectors(model, vectors):
    """put_vectors(), until remove_scales() puts the old ones back."""
    model.replaced = {name: model.get_parameter(name).data for name in vectors}
    put_vectors(model, vectors)


def replace_scales(model, scales):
    """replace_vectors() for the softmax scales, (n_layer, H) or (n_layer, H, D)."""
    if scales.dim() == 2:
        scales = scales[..., None]
    replace_vectors(model, dict(zip(by_layer('head_scale', len(scales)), scales)))


def remove_scales(model):
    """
    Undo the last apply_scale() or install_sets(), if any. The model gets back the vectors that it
    had before.
    """
    put_vectors(model, model.replaced)
    model.replaced, model.scale_sets = {}, None


class ScaleSets:
    """
    Sets of vectors for several lengths. A pass of T tokens is read with the vectors for T. Up to L
    these are the model's own vectors. Between two lengths they are interpolated, linearly in ln T.
    Past the last length the last set is used. chosen_for() gives the model the vectors for a pass.
    Outside of it every vector is NaN, so that a pass without a choice cannot give a wrong number.
    """

    def __init__(self, model, sets):
        names = {name for vectors in sets.values() for name in vectors}
        own = {name: model.get_parameter(name).clone() for name in names}
        for name, vector in next(iter(sets.values())).items():  # (H, 1) or (H, D), as in sets
            own[name] = own[name].expand_as(vector)
        L, self.model = model.config.block_size, model
        self.sets = {L: own}
        for length, vectors in sorted(sets.items()):
            if length > L:
                self.sets[length] = {name: x.to(own[name].device) for name, x in vectors.items()}

    def vectors_at(self, total):
        """The vectors for passes of `total` tokens, {name: tensor}."""
        lengths, sets = list(self.sets), list(self.sets.values())
        if total > lengths[-1]:
            note(f'there are no scales for more than {lengths[-1]} tokens, so longer passes use '
                 'the scales of the longest')
        # A place of 0.5 is halfway between the first two sets.
        place = np.interp(np.log(total), np.log(lengths), range(len(lengths)))
        before, after = sets[math.floor(place)], sets[math.ceil(place)]
        return {name: torch.lerp(x, after[name], place % 1) for name, x in before.items()}

    @contextlib.contextmanager
    def chosen_for(self, total):
        """Inside the `with` block the model has the vectors for passes of `total` tokens."""
        before = {name: self.model.get_parameter(name).data for name in self.sets[min(self.sets)]}
        put_vectors(self.model, self.vectors_at(total))
        try:
            yield
        finally:
            put_vectors(self.model, before)


def install_sets(model, sets):
    """Give a model vectors for several lengths, {L': vectors}. Read it within vectors_for()."""
    remove_scales(model)
    model.scale_sets = ScaleSets(model, sets)
    replace_vectors(model, {name: torch.full_like(x, math.nan)
                            for name, x in model.scale_sets.vectors_at(1).items()})


def vectors_for(model, total):
    """
    A context for one pass, or for the passes of one cache, that will hold `total` tokens. A model
    with scale sets has the vectors for this length in it. Any other model is unchanged.
    """
    return model.scale_sets.chosen_for(total) if model.scale_sets else contextlib.nullcontext()


def method_label(config, info):
    """
    How a model is read other than it was trained: its position method, if that is another one, and
    the extension of RoPE, as in 'llama4' or 'yarn4'. info: of the model's checkpoint.
    """
    parts = [config.rope_scaling.replace(':', '')]
    if config.position != info.get('trained_position', config.position):
        parts.insert(0, config.position.replace(',', '_'))
    return '_'.join(filter(None, parts))


def apply_scale(model, scale, info, say=print):
    """
    Set the model's softmax scales from a stage's --scale. scale: None (as trained), a number for
    all heads, a scale file, or, from Python, an array (n_layer, H) or (n_layer, H, D). Returns the
    label of the result: '', 'scale1.2', 'scales' or the file's name. method_label() stands before
    it, as in 'yarn4_scale1.2'.
    """
    config, label = model.config, method_label(model.config, info)
    remove_scales(model)
    if scale is None:
        return label
    replaces = (model.head_scale != 1).any()
    if isinstance(scale, str | Path):
        name, (data, sets) = Path(scale).stem, read_scale_file(scale, model, info)
        if 'sets' in data:
            install_sets(model, sets)
        else:
            replace_vectors(model, *sets.values())
    elif np.ndim(scale):
        name, shape = 'scales', (config.n_layer, config.n_head, config.head_dim)
        scales = finite(np.asarray(scale), shape[:max(2, np.ndim(scale))], 'scale')
        replace_scales(model, scales)
    else:
        scale = np.asarray(scale).item()  # a number of Python, NumPy or PyTorch
        name, number = f'scale{scale:g}', finite(scale, (), f'scale {scale}')
        above_zero(number, f'scale {scale}')
        replace_scales(model, number.expand(config.n_layer, config.n_head))
    if replaces:
        say(f"{name} replaces the model's own head scales, which were not all 1")
    return f'{label}_{name}' if label else name


def identity(model, scale, info):
    """
    What a model's answers depend on, as a dict. Its entry 'scale' is a SHA-256 of the model's
    vectors and of the scale file, 'settings' one of the model's other settings and its tokenizer.
    scale: as in apply_scale().
    """
    digest = hashlib.sha256(Path(scale).read_bytes() if isinstance(scale, str | Path) else b'')
    with vectors_for(model, 1):  # the model's own vectors, if it has scale sets
        for name, weight in model.state_dict().items():
            if weight.dim() < 2 or vector_of(name):
                digest.update(weight.float().numpy(force=True).tobytes())
    tokenizer = info['tokenizer'] and tokenizer_digest(info['tokenizer'])
    rest = json.dumps([vars(model.config), tokenizer], sort_keys=True)
    return {'weights_digest': info['digest'], 'position': model.config.position,
            'rope_scaling': model.config.rope_scaling, 'scale': digest.hexdigest(),
            'settings': hashlib.sha256(rest.encode()).hexdigest()}
