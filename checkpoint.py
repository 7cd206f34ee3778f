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

from corpus import tokenizer_digest
from model import ModelConfig, Transformer
from runtime import save_json, whole_file


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
                      'Is the disk full? Free some space and go on with --init_from=resume.') from error


def require_space(folder, n_bytes):
    """Raise ValueError unless the disk of `folder` has n_bytes free."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        raise ValueError(f'checkpoints in {folder} need {n_bytes / 1e9:.2f} GB but {free / 1e9:.2f} GB are free. '
                         'Free some space or choose another out_dir.')


def load(path):
    """Read a checkpoint into CPU memory, tensors mapped from the file. Raises ValueError if it is not whole."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f'{path} does not exist. Train it first (python train.py --out_dir={path.parent}), '
                         'or name a checkpoint with --init_from=.')
    try:
        state = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
        missing = {'model', 'model_config', 'tokenizer', 'digest', 'step'} - set(state)
    except Exception as error:  # zip, unpickling and type errors alike: the file is not one of ours, or not whole
        raise ValueError(f'{path} is cut short or not a checkpoint of this project ({type(error).__name__}). '
                         'Use another one: best.pt, or a kept step.') from error
    if missing:
        raise ValueError(f"{path} is not a checkpoint of this project: it lacks {', '.join(sorted(missing))}.")
    return state


def load_model(init_from, out_dir, device):
    """
    init_from: 'last' or 'best' (of out_dir), or a checkpoint file. Returns the model in eval mode, and the checkpoint's
    other entries: model_config, tokenizer, digest, step, settings ...
    """
    path = Path(out_dir, f'{init_from}.pt') if init_from in ('last', 'best') else Path(init_from)
    state = load(path)
    with torch.device('meta'):
        model = Transformer(ModelConfig(**state['model_config']))
    model.load_state_dict(state.pop('model'), assign=True)
    state.pop('optimizer', None)
    return model.to(device).eval().requires_grad_(False), state | {'path': str(path)}


def require_tokenizer(info, tokenizer, dataset):
    """Raise ValueError unless a data set's tokenizer state encodes as that of the checkpoint `info` describes."""
    if tokenizer_digest(info['tokenizer']) != tokenizer_digest(tokenizer):
        raise ValueError(f"{info['path']} was trained with tokenizer {info['tokenizer']['name']}, but data set "
                         f"{dataset} has {tokenizer['name']}. Prepare the data with the checkpoint's tokenizer.")


def model_state(model, tokenizer, step, **more):
    """The entries of a checkpoint that every stage reads."""
    weights = model.state_dict()
    return {'model': weights, 'model_config': dataclasses.asdict(model.config), 'tokenizer': tokenizer,
            'digest': weights_digest(weights), 'step': step, **more}


# ----------------------------------------------------------------------------- scale files

def save_scale(path, info, head_scale, method, target_length, **more):
    """
    Write a scale file. head_scale: (n_layer, n_head) in units of 1 / sqrt(D); info: from load_model().
    target_length: L', the context these scales are for, in tokens.
    """
    save_json(path, {'method': method, 'block_size': info['model_config']['block_size'],
                     'target_length': target_length, 'weights_digest': info['digest'],
                     'head_scale': [[round(float(s), 6) for s in row] for row in head_scale], **more})


def read_scale_file(path, info):
    """Read a scale file of the model that `info` (from load_model()) describes. Raises ValueError for another's."""
    try:
        data = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise ValueError(f"scale file {path} does not exist. Make one with tune_scale.py, or give a number.") from None
    except (ValueError, OSError) as error:
        raise ValueError(f'{path} is not a scale file: {error}.') from None
    if not isinstance(data, dict) or not {'head_scale', 'weights_digest', 'target_length'} <= set(data):
        raise ValueError(f'{path} is not a scale file: it needs head_scale, weights_digest and target_length.')
    shape = info['model_config']['n_layer'], info['model_config']['n_head']
    try:
        scales = np.array(data['head_scale'], dtype=float)
    except (TypeError, ValueError):
        scales = np.zeros(0)
    if scales.shape != shape or not (np.isfinite(scales) & (scales > 0)).all():
        raise ValueError(f'head_scale in {path} must be {shape[0]} rows of {shape[1]} numbers above 0.')
    if data['weights_digest'] != info['digest']:
        raise ValueError(f"{path} was tuned for other weights than {info['path']}. Tune it again for this checkpoint.")
    return data


def apply_scale(model, scale, info):
    """
    Set the model's softmax scales from a stage's --scale: None (as trained), a number for all heads, or a scale file.
    Returns the label of the result: '', 'scale1.2' or the file's name.
    """
    if scale is None:
        return ''
    if isinstance(scale, str):
        model.head_scale = read_scale_file(scale, info)['head_scale']
        return Path(scale).stem
    if scale <= 0:
        raise ValueError(f'scale is {scale}; a softmax scale must be above 0.')
    model.head_scale = scale
    return f'scale{scale:g}'
