"""
Checkpoints and scale files: save, load, resume.

A checkpoint is one file of tensors and plain values, read with weights_only=True, so that opening a stranger's file
runs none of his code. A scale file is JSON that a person can read; it names the weights it was tuned for.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import torch

import huggingface
from corpus import Windows, tokenizer_digest
from model import ModelConfig, Transformer, matrices
from runtime import require_checksums, save_json, whole_file


def weights_digest(state):
    """
    SHA-256 over names, shapes and up to 4,096 evenly spaced values of each weight matrix in a state dict. Vectors
    (head scales, norms) are left out: tuning them must not change whose scale file it is.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(state.items()):
        if weight.dim() >= 2:
            spread = torch.linspace(0, weight.numel() - 1, min(weight.numel(), 4096), dtype=torch.float64)
            values = weight.flatten()[spread.long().to(weight.device)].float().cpu().numpy()
            digest.update(f'{name} {tuple(weight.shape)}'.encode() + values.tobytes())
    return digest.hexdigest()


def save(path, **state):
    """Write a checkpoint whole or not at all: a kill or a full disk leaves the file that was there before."""
    try:
        with whole_file(path) as part, open(part, 'wb') as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:  # torch turns a failed write into a RuntimeError
        raise OSError(f'could not write {path} ({error}); the file before it, if any, is untouched. '
                      'Is the disk full? Free some space and go on (train.py: with --init_from=resume).') from error


def require_space(folder, n_bytes):
    """Raise ValueError unless checkpoints of n_bytes in all have room in `folder`, where there may be some already."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free + sum(file.stat().st_size for file in Path(folder).glob('*.pt'))
    if free < n_bytes:
        raise ValueError(f'checkpoints in {folder} need {n_bytes / 1e9:.2f} GB but {free / 1e9:.2f} GB are free. '
                         'Free some space or choose another out_dir.')


def load(source, position=None, optimizer=True):
    """
    Read a checkpoint into CPU memory: a file of ours, its tensors mapped, or a Hugging Face folder or hf:ORG/NAME; for
    those see huggingface.py. Returns a dict of model, model_config, tokenizer, digest, step, settings and more.
    optimizer: False leaves out the optimizer's moments, which then cost no time to check.
    Raises ValueError if it is not whole.
    """
    if str(source).startswith('hf:') or Path(source).is_dir():
        state = huggingface.load_folder(str(source), position)
        return state | {'digest': weights_digest(state['model'])}
    path = Path(source)
    if not path.is_file():
        raise ValueError(f'{path} does not exist. Train that model first, by train.py with its config, or name another '
                         'with --out_dir= or --init_from=.')
    open(path, 'rb').close()  # an OSError, such as for permissions, says nothing of the content
    try:
        state = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
        missing = {'model', 'model_config', 'tokenizer', 'digest', 'step'} - set(state)
        held = sum(weight.numel() for weight in state.get('model', {}).values())
    except Exception as error:  # zip, unpickling and type errors alike: the file is not one of ours, or not whole
        raise ValueError(f'{path} is cut short or not a checkpoint of this project ({type(error).__name__}). '
                         'Use another one: best.pt, or a kept step.') from error
    if missing:
        raise ValueError(f"{path} is not a checkpoint of this project: it lacks {', '.join(sorted(missing))}.")
    if not optimizer:
        state.pop('optimizer', None)
    require_checksums(path, state, 'Use another one: best.pt, or a kept step.')
    try:
        # an older checkpoint lacks the settings that came later: they get their defaults
        config = ModelConfig(**state['model_config'])
    except (TypeError, ValueError) as error:
        raise ValueError(f'{path} has model settings that are not ours: {error}') from error
    if config.n_layer > len(state['model']) or config.least_params() > held:
        raise ValueError(f'{path} holds {held:,} weights, but its settings, such as '
                         f'n_layer={config.n_layer} and n_embd={config.n_embd}, call for '
                         f'{config.least_params():,} or more. Use another one.')
    return state | {'model_config': dataclasses.asdict(config)}


def require_weights(model, weights, source):
    """Raise ValueError unless weights are those of this model, no more and no less."""
    ours, theirs = ({name: tuple(weight.shape) for name, weight in w.items()} for w in (model.state_dict(), weights))
    if odd := sorted(name for name in ours | theirs if ours.get(name) != theirs.get(name)):
        has = f'{odd[0]} of shape {theirs[odd[0]]}' if odd[0] in theirs else f'no {odd[0]}'
        raise ValueError(f'{source} has {has}, so it was not trained with position {model.config.position}: methods '
                         'have weights of their own. Leave --position out.')


def cast_matrices(model, dtype):
    """Cast the matrices of a frozen model to the type of its activations, once, where autocast would at every use."""
    for p in matrices(model).values():
        p.data = p.data.to(dtype)
    return model


def load_model(init_from, out_dir, device, position=None, rope_scaling=None, dtype=torch.float32):
    """
    init_from: 'last' or 'best' (of out_dir), a checkpoint file, a Hugging Face folder or hf:ORG/NAME. position and
    rope_scaling: read it with another method than it says. dtype: that of the activations; half-precision weights of a
    Hugging Face file stay as they are if this is their type. Returns the model in eval mode, and the checkpoint's other
    entries: model_config, tokenizer, digest, step, settings, path ...
    """
    source = str(Path(out_dir, f'{init_from}.pt') if init_from in ('last', 'best') else init_from)
    if huggingface.is_foreign(source):
        if position is not None or rope_scaling is not None:
            raise ValueError(f'{source} is read through transformers: it takes no position or rope_scaling of ours.')
        model, state = huggingface.load_foreign(source, dtype)
        state |= {'digest': weights_digest(model.state_dict()), 'path': source}
        return model.to(device).eval().requires_grad_(False), state
    state = load(source, position, optimizer=False)
    config = state['model_config']
    if position is not None:
        config |= {'position': position} | ({'rope_scaling': ''} if position != 'rope' else {})
    if rope_scaling is not None:
        config['rope_scaling'] = rope_scaling
    weights = state.pop('model')
    if any(weight.dtype not in (dtype, torch.float32) for weight in weights.values()):
        weights = {name: weight.float() for name, weight in weights.items()}
    with torch.device('meta'):
        model = Transformer(ModelConfig(**config))
    require_weights(model, weights, source)
    model.load_state_dict(weights, assign=True)
    if model.config.tied:
        model.head.weight = model.embed.weight
    cast_matrices(model, dtype)
    return model.to(device).eval().requires_grad_(False), state | {'path': source}


def dataset_of(info, dataset):
    """The data set to read: the one that was asked for, or else the one that the checkpoint was trained on."""
    dataset = dataset or info['settings'].get('dataset')
    if not dataset:
        raise ValueError(f"{info['path']} does not say what it was trained on. Give a data set with --dataset=NAME.")
    return dataset


def require_tokenizer(info, tokenizer, dataset):
    """Raise ValueError unless a data set's tokenizer state encodes as that of the checkpoint `info` describes."""
    if tokenizer_digest(info['tokenizer']) != tokenizer_digest(tokenizer):
        raise ValueError(f"{info['path']} was trained with tokenizer {info['tokenizer']['name']}, but data set "
                         f"{dataset} has {tokenizer['name']}. Prepare the data with the checkpoint's tokenizer.")


def open_windows(info, dataset, split, length):
    """Windows of dataset_of(info, dataset) to read with that model. Raises ValueError if its tokenizer is another."""
    windows = Windows(dataset_of(info, dataset), split, length)
    require_tokenizer(info, windows.tokenizer_state, windows.dataset)
    return windows


def model_state(model, tokenizer, step, weights=None, **more):
    """The entries of a checkpoint that every stage reads. weights: the model's state dict, where it is sharded."""
    weights = model.state_dict() if weights is None else weights
    return {'model': weights, 'model_config': dataclasses.asdict(model.config), 'tokenizer': tokenizer,
            'digest': weights_digest(weights), 'step': step, **more}


# ----------------------------------------------------------------------------- scale files

# A scale file holds one set of vectors, or under 'sets' several, each tuned for passes of its target_length tokens:
# head_scale and head_gain, (n_layer, n_head), and norm, {parameter: values}. The model takes them by parameter name.

def vectors_to_json(vectors):
    """{parameter name: tensor} as the entries of a scale file."""
    rows = {name: [round(x, 6) for x in vector.tolist()] for name, vector in vectors.items()}
    heads = {kind: [row for name, row in rows.items() if name.endswith(kind)] for kind in ('head_scale', 'head_gain')}
    norms = {name: row for name, row in rows.items() if 'norm' in name}
    return {key: value for key, value in (heads | {'norm': norms}).items() if value}


def to_float32(numbers, what):
    """Numbers as a float32 tensor. Raises ValueError, naming `what`, where one is not finite."""
    tensor = torch.as_tensor(numbers, dtype=torch.float32)
    if not tensor.isfinite().all():
        raise ValueError(f'{what} must be finite in float32, below 3.4e38. Give smaller numbers.')
    return tensor


def vectors_from_json(data, path, info):
    """The inverse: {parameter name: float32 tensor}. Raises ValueError for what does not fit the model of `info`."""
    c = info['model_config']
    shape, vectors = (c['n_layer'], c['n_head']), {}
    for kind in ('head_scale', 'head_gain'):
        try:
            rows = np.array(data.get(kind, np.ones(shape)), dtype=float)
        except (TypeError, ValueError, OverflowError):
            rows = np.zeros(0)
        if rows.shape != shape:
            raise ValueError(f'{kind} in {path} must be {shape[0]} rows of {shape[1]} numbers.')
        # they may be below 0, where nothing constrained the tuning
        rows = to_float32(rows, f'{kind} in {path}')
        vectors |= {f'blocks.{i}.attn.{kind}': row for i, row in enumerate(rows)}
    names = {'norm.weight', *(f'blocks.{i}.{n}_norm.weight' for i in range(c['n_layer']) for n in ('attn', 'mlp'))}
    norms = data.get('norm', {})
    if not isinstance(norms, dict):
        raise ValueError(f'norm in {path} must be lists of numbers, each by the name of a weight.')
    for name, values in norms.items():
        try:
            vector = to_float32(values, f'norm {name} in {path}')
        except (TypeError, RuntimeError) as error:
            raise ValueError(f'norm in {path} must be lists of numbers, each by the name of a weight.') from error
        if name not in names or vector.shape != (c['n_embd'],):
            raise ValueError(f'norm in {path} has {name} of {vector.numel()} numbers, which this model does not have.')
        vectors[name] = vector
    return vectors


def save_scale(path, info, sets, method, by_length=False, **more):
    """
    Write a scale file; returns what a reader gets. sets: {L': vectors by parameter name}, L' being the context in
    tokens that they are for; info: from load_model(). One set is for every pass, unless by_length: then it too leaves
    those of L tokens alone.
    """
    c = info['model_config']
    sets = [{'target_length': length} | vectors_to_json(vectors) for length, vectors in sets.items()]
    sets = {'sets': sets} if by_length or len(sets) > 1 else sets[0]
    return save_json(path, {'method': method, 'block_size': c['block_size'], 'position_method': c['position'],
                            'rope_scaling': c['rope_scaling'], 'weights_digest': info['digest'], **sets, **more})


def read_scale_file(path, info):
    """
    Read a scale file of the model that `info` (from load_model()) describes. Returns its JSON and {L': vectors}. Raises
    ValueError for another model's.
    """
    try:
        data = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise ValueError(f"scale file {path} does not exist. Make one with tune_scale.py, or give a number.") from None
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f'{path} is not a scale file: {error}.') from None
    sets = data.get('sets', [data]) if isinstance(data, dict) else []
    whole = isinstance(sets, list) and sets and 'weights_digest' in data
    whole = whole and isinstance(data.get('tuning_tokens', 0), int | float)
    for one in sets if whole else []:
        whole = whole and isinstance(one, dict) and 'head_scale' in one
        whole = whole and type(one.get('target_length')) is int
    if not whole:
        raise ValueError(f'{path} is not a scale file: it needs head_scale, weights_digest and target_length.')
    sets = {one['target_length']: vectors_from_json(one, path, info) for one in sets}
    if data['weights_digest'] != info['digest']:
        raise ValueError(f"{path} was tuned for other weights than {info['path']}. Tune it again for this checkpoint.")
    for setting, tuned_as in (('position', data.get('position_method')), ('rope_scaling', data.get('rope_scaling'))):
        read_as = info['model_config'][setting]
        if tuned_as not in (read_as, None):
            raise ValueError(f"{path} was tuned with {setting} '{tuned_as}', but {info['path']} is read with "
                             f"'{read_as}'. Add --{setting}={tuned_as}.")
    return data, sets


def identity(model, scale, info):
    """What a model's answers depend on, its scale file by content: for the header of a file of answers."""
    digest = hashlib.sha256(Path(scale).read_bytes()).hexdigest() if isinstance(scale, str) else scale
    return {'weights_digest': info['digest'], 'position': model.config.position,
            'rope_scaling': model.config.rope_scaling, 'scale': digest}


def apply_scale(model, scale, info):
    """
    Set the model's softmax scales from a stage's --scale: None (as trained), a number for all heads, or a scale file.
    Of a file with several sets the model takes, in each pass, the one for the tokens that the pass will hold, and up to
    L its own. Returns the label of the result: '', 'scale1.2' or the file's name, after the extension of RoPE if any.
    """
    label = [model.config.rope_scaling.replace(':', '')] if model.config.rope_scaling else []
    if isinstance(scale, str):
        data, sets = read_scale_file(scale, info)
        label.append(Path(scale).stem)
        if 'sets' in data:
            base = {name: model.get_parameter(name).clone() for vectors in sets.values() for name in vectors}
            sets = {length: {name: vector.to(base[name].device) for name, vector in vectors.items()}
                    for length, vectors in sets.items()}
            L = model.config.block_size
            model.sets = {L: base} | {length: vectors for length, vectors in sets.items() if length > L}
        else:
            model.load_state_dict(*sets.values(), strict=False)
    elif scale is not None:
        number = to_float32(scale, f'scale is {scale}; it')
        if number <= 0:
            raise ValueError(f'scale is {scale}; a softmax scale must be above 0.')
        own = model.head_scale
        if not (own == 1).all() and int(os.environ.get('RANK', 0)) == 0:  # once, not on every rank
            print(f"{info['path']} has head scales of its own, {own.min():.3f} to {own.max():.3f}; "
                  f'scale {scale:g} takes their place', flush=True)
        model.head_scale = number
        label.append(f'scale{scale:g}')
    return '_'.join(label)
