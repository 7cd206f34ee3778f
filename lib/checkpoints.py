"""
Checkpoints: save, load, and open one for a stage.

A checkpoint is one file of tensors and plain values. It is read with weights_only=True, so opening
a stranger's file runs none of the stranger's code.
"""

import dataclasses
import functools
import hashlib
import os
import shutil
import time
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode

from lib import foreign, huggingface, plots
from lib.answers import AnswerLog, OnlyWriter, note, result_path, whole_file
from lib.checksums import load_whole
from lib.devices import compiled_for, setup
from lib.errors import UserError, as_user_error, fault_of, require_kinds
from lib.generate import require_positions, store_column_major
from lib.scales import apply_scale, identity, read_scale_file
from lib.tokenizers import require_tokenizer_kinds, tokenizer_digest, tokenizer_from_state
from lib.tokens import Windows
from model import VECTORS, ModelConfig, Transformer, matrices, small_vectors, vector_of
from position import defaults_of_unused


def weights_digest(state):
    """
    SHA-256 of a state dict: over the name, the shape and up to 4,096 evenly spaced values of each
    weight matrix. Small vectors (head scales, norms) are left out, so that a scale file still fits
    the checkpoint after they are tuned.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(state.items()):
        if weight.dim() >= 2 and not vector_of(name):
            n = weight.numel()
            places = torch.linspace(0, n - 1, min(n, 4096), dtype=torch.float64).long()
            values = weight.flatten()[places.to(weight.device)].float().cpu().numpy()
            digest.update(f'{name} {tuple(weight.shape)}'.encode() + values.tobytes())
    return digest.hexdigest()


# ---------------------------------------------------------------------- save

def checkpoint_state(model, tokenizer, step, weights, **more):
    """The entries of a checkpoint, as a dict. weights: the model's state dict, not sharded."""
    return {'model': weights, 'model_config': dataclasses.asdict(model.config),
            'tokenizer': tokenizer, 'digest': weights_digest(weights), 'step': step, **more}


def save(path, **state):
    """
    Write a checkpoint whole or not at all. After a kill or with a full disk, the previous file
    remains.
    """
    try:
        with whole_file(path) as part, open(part, 'wb') as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:  # torch turns a failed write into a RuntimeError
        raise OSError(f'could not write {path} ({error}); the previous file, if any, is '
                      'untouched. Is the disk full? Free some space and go on (train.py: with '
                      '--init_from=resume).') from error


def require_space(folder, n_bytes):
    """
    Raise UserError unless `folder` has room for checkpoints of n_bytes in total. They may replace
    the checkpoints that are there.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f'{folder} cannot be made ({error}). Choose another --out_dir=.') from error
    there = sum(file.stat().st_size for file in Path(folder).glob('*.pt*'))
    free = shutil.disk_usage(folder).free + there
    if free < n_bytes:
        raise UserError(f'checkpoints in {folder} need {n_bytes / 1e9:.2f} GB but {free / 1e9:.2f} '
                        'GB are free. Free some space or choose another out_dir.')


# ---------------------------------------------------------------------- load

def load(source, position=None):
    """
    Read a checkpoint into CPU memory. source: a checkpoint file, a Hugging Face folder or
    hf:ORG/NAME. The tensors of a checkpoint file are memory-mapped. Returns a dict of model,
    model_config, tokenizer, digest, step, settings and more. Raises UserError if the checkpoint is
    damaged or incomplete.
    """
    if str(source).startswith('hf:') or Path(source).is_dir():
        state = huggingface.load_folder(str(source), position)
        return state | {'digest': weights_digest(state['model'])}
    path = Path(source)
    if not path.is_file():
        raise UserError(f'{path} does not exist. Train that model first: run train.py with its '
                        'config. Or name another model.')
    advice = 'If a run has just replaced it, read it again. Or use best.pt or a kept step.'
    state = load_whole(path, advice)
    with fault_of(path, 'a checkpoint of this project', advice):
        config = whole_config(state)
    return state | {'model_config': dataclasses.asdict(config)}


def whole_config(state):
    """
    The ModelConfig of a checkpoint. Raises an error of MALFORMED if an entry that the stages read
    is missing or has the wrong type.
    """
    require_kinds(state, model=dict, model_config=dict, settings=dict, tokenizer=dict | None,
                  digest=str, step=int)
    model, config, settings = state['model'], state['model_config'], state['settings']
    require_kinds(model, **dict.fromkeys(model, torch.Tensor))
    require_kinds(config, **{name: kind for name, kind in huggingface.KINDS.items()
                             if name in config})  # settings that it lacks get their defaults
    require_kinds(settings, **dict.fromkeys(settings, str | int | float | list | None))
    require_kinds({'dataset': ''} | settings, dataset=str)
    if state['tokenizer'] is not None:
        require_tokenizer_kinds(state['tokenizer'])
    config = ModelConfig(**config | defaults_of_unused(config))
    # Each layer has at least one weight. A larger n_layer could fill the memory with layers.
    if config.n_layer > len(model) or state['step'] < 0:
        raise ValueError(f"n_layer={config.n_layer}, step={state['step']}")
    return config


def config_of(settings, **sizes):
    """The ModelConfig of a stage's settings. sizes: values that the settings do not have."""
    names = {field.name for field in dataclasses.fields(ModelConfig)}
    with as_user_error():
        return ModelConfig(**{name: settings[name] for name in names & set(settings)} | sizes)


def fit_weights(model, weights, source):
    """
    The weights of a checkpoint, {name: tensor}, as the model loads them. A small vector that the
    checkpoint lacks gets its neutral value. The model's own small vectors take the checkpoint's
    shapes: one number per head, or one per channel. Raises UserError if a weight is missing, left
    over or of another shape.
    """
    # An expanded number takes no memory, whatever sizes a broken checkpoint claims.
    neutral = {name: torch.tensor(VECTORS[vector_of(name)].neutral).expand(p.shape)
               for name, p in small_vectors(model).items() if name not in weights}
    for kind in {vector_of(name) for name in neutral}:
        if VECTORS[kind].pretrained:
            note(f'{source} was trained without the vector {kind}, so it starts at '
                 f'{VECTORS[kind].neutral:g}')
    weights = neutral | weights
    for name, p in small_vectors(model).items():
        if p.dim() == 2 and weights[name].shape == (len(p), model.config.head_dim):
            p.data = p.new_empty(weights[name].shape)  # one number per channel
    ours = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    theirs = {name: tuple(weight.shape) for name, weight in weights.items()}
    wrong = {name for name in ours.keys() | theirs if ours.get(name) != theirs.get(name)}
    if wrong:
        name = min(wrong)
        raise UserError(f'{name} should have shape {ours.get(name)}, but in {source} it has '
                        f'{theirs.get(name)}. These are not the weights of a model with position '
                        f'{model.config.position}, or an unreleased version wrote them. Leave '
                        '--position out, or train the model again.')
    return weights | {name: vector.clone() for name, vector in neutral.items()}


def cast_matrices(model, dtype):
    """
    Cast a frozen model's matrices to dtype once. Otherwise autocast would cast them at each use.
    """
    for p in matrices(model).values():
        p.data = p.data.to(dtype)
    return model


class Uninitialized(TorchFunctionMode):
    """
    Inside this mode the functions of torch.nn.init do nothing, because the values of the weights
    will be loaded. On the meta device, to initialize would load the compiler, which takes a second.
    """
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, '__module__', '') == 'torch.nn.init':
            return kwargs['tensor']
        return function(*args, **(kwargs or {}))


def load_model(init_from, out_dir, device, position=None, rope_scaling=None, dtype=torch.float32):
    """
    A trained model in eval mode, and the checkpoint's other entries: model_config, tokenizer,
    digest, step, settings, path ... init_from: 'last' or 'best' (of out_dir), a checkpoint file, a
    Hugging Face folder or hf:ORG/NAME. position, rope_scaling: use these instead of the
    checkpoint's. dtype: of the activations.
    """
    source = str(Path(out_dir, f'{init_from}.pt') if init_from in ('last', 'best') else init_from)
    if huggingface.is_foreign(source):
        if position is not None or rope_scaling is not None:
            raise UserError(f'{source} is read through transformers, so it takes no position or '
                            'rope_scaling. Leave both out.')
        model, state = foreign.load_foreign(source, dtype)
        state |= {'digest': weights_digest(model.state_dict()), 'path': source}
        return model.to(device).eval().requires_grad_(False), state

    state = load(source, position)
    state.pop('optimizer', None)  # only a resumed run reads it
    config = state['model_config']
    state['trained_position'] = config['position']
    if position is not None:
        config |= {'position': position}
        config |= defaults_of_unused(config)
    if rope_scaling is not None:
        config |= {'rope_scaling': rope_scaling}
    with as_user_error(), torch.device('meta'), Uninitialized():
        model = Transformer(ModelConfig(**config))
    weights = fit_weights(model, state.pop('model'), source)
    kept = matrices(model)
    weights = {name: weight if name in kept and weight.dtype == dtype else weight.float()
               for name, weight in weights.items()}
    model.load_state_dict(weights, assign=True)
    model.share_weights()
    cast_matrices(model, dtype)
    return model.to(device).eval().requires_grad_(False), state | {'path': source}


def open_model(path, scale=None, position=None):
    """
    A trained model and its tokenizer, for a notebook or your own program. The model is on the CPU,
    in float32. path: a checkpoint file, a Hugging Face folder or hf:ORG/NAME. scale: a number for
    all heads, an array (n_layer, H) or (n_layer, H, D), or a scale file. position: the method that
    the model was trained with, if a folder does not name it. model.info holds the checkpoint's
    other entries; apply_scale() and save_scale() need it.

    import torch, kernels, lib.generate, lib.checkpoints
    model, text = lib.checkpoints.open_model('lessons/demo.pt', scale=1.3)
    ids = torch.tensor([text.encode_ordinary(open('model.py').read()[:513])])
    losses = model(ids[:, :-1], ids[:, 1:])                    # nats, (1, 512)
    with model.probe(kernels.attention_entropy) as entropy: model(ids)  # of each layer, (1, H, 513)
    print(text.decode(lib.generate.complete(model, ids.tolist(), 50)[0]))
    """
    model, info = load_model(path, '', 'cpu', position)
    model.info = info
    apply_scale(model, scale, info)
    return model, tokenizer_from_state(info['tokenizer'])


def require_tokenizer(info, tokenizer, dataset):
    """
    Raise UserError unless a data set and the checkpoint `info` have the same tokenizer. If the
    checkpoint has none, the data set's must fit into the model's vocabulary.
    """
    if info['tokenizer'] is None:
        note(f"{info['path']} has no tokenizer, so the tokenizer of data set {dataset} is used")
        if tokenizer_from_state(tokenizer).n_vocab > info['model_config']['vocab_size']:
            raise UserError(f"data set {dataset} has more tokens in its vocabulary than "
                            f"{info['path']}. Prepare it with the model's own tokenizer.")
        return
    if tokenizer_digest(info['tokenizer']) != tokenizer_digest(tokenizer):
        raise UserError(f"{info['path']} was trained with tokenizer {info['tokenizer']['name']}, "
                        f"but data set {dataset} has {tokenizer['name']}. Name another data set, "
                        "or prepare this one with the checkpoint's tokenizer, which for an "
                        'exported folder is --tokenizer=FOLDER/tokenizer.json.')


def dataset_of(info, wanted=None):
    """The data set to read: `wanted`, or the one that the checkpoint was trained on."""
    name = wanted or info['settings'].get('dataset')
    if not name:
        raise UserError(f"{info['path']} does not name the data set that it was trained on. Give "
                        'one with --dataset=NAME.')
    return name


def open_windows(info, wanted, split, length):
    """
    Windows of dataset_of(info, wanted). Raises UserError if its tokenizer is not the checkpoint's.
    """
    windows = Windows(dataset_of(info, wanted), split, length)
    require_tokenizer(info, windows.tokenizer_state, windows.dataset)
    return windows


# ---------------------------------------------------------------------- open one for a stage

class Run:
    """
    The trained model that the settings of a stage describe, and the results that the stage writes.
    settings: of the stage, {name: value}. They include out_dir, init_from, position, rope_scaling,
    device and dtype. result: name parts of the result, as claim() takes them; none: claim nothing
    yet. decodes: True if the stage reads token by token; the weights are then stored in the order
    that is fast for this.
    """

    def __init__(self, settings, *result, decodes=False):
        self.settings, self.began = settings, time.perf_counter()
        self.runtime = setup(settings['device'], settings['dtype'], settings.get('seed', 1337))
        self.model, self.info = load_model(
            settings['init_from'], settings['out_dir'], self.runtime.device, settings['position'],
            settings['rope_scaling'], self.runtime.dtype)
        if decodes:
            store_column_major(self.model)
        self.scale = settings.get('scale')
        scale_label = apply_scale(self.model, self.scale, self.info, self.runtime.print)
        self.identity = identity(self.model, self.scale, self.info)
        self.label = settings.get('label') or scale_label
        self.L, self.claims = self.model.config.block_size, []
        if result:
            self.claim(*result)

    @functools.cached_property
    def encoding(self):
        return tokenizer_from_state(self.info['tokenizer'])

    def windows(self, length, split=None):
        """Windows of `length` tokens of the settings' data set. split: None takes the settings'."""
        split = split or self.settings['split']
        require_positions(self.model, length)
        return open_windows(self.info, self.settings['dataset'], split, length)

    def compiled_for(self, n, length):
        """The model, compiled if n windows of `length` tokens are enough work for this to pay."""
        return compiled_for(self.model, self.runtime, self.settings['compile'], n, length)

    def path(self, *kind):
        """The path OUT_DIR/KIND[_LABEL], without a suffix."""
        return result_path(self.settings['out_dir'], *kind, self.label)

    def reach(self):
        """The longest length in tokens that the scale file is tuned for; without a file L."""
        if not isinstance(self.scale, str):
            return self.L
        return max(read_scale_file(self.scale, self.model, self.info)[1])

    def claim(self, stage, *kind):
        """
        Reserve a result that write() will write. If two processes wrote it, one result would be
        lost. Raises UserError, before the work starts, if another process writes it or if the
        folder cannot be written.
        """
        path = self.path(stage, *kind)
        self.claims.append(OnlyWriter(f'{path}.json', self.runtime.is_main))

    def answers(self, path, kinds, **asked):
        """
        The AnswerLog PATH.jsonl. Its answers depend on the model, its scales, the dtype and
        `asked`. kinds: {name: type} of the entries of an answer.
        """
        settings = self.identity | {'dtype': str(self.runtime.dtype)} | asked
        return AnswerLog(f'{path}.jsonl', kinds, settings, self.runtime)

    def write(self, stage, result, *kind):
        """
        Write OUT_DIR/STAGE[_KIND][_LABEL].json and its picture. The file holds the result, what was
        measured, and what is needed to measure it again. A stage may write several results.
        """
        path = self.path(stage, *kind)
        what = {'stage': stage, 'label': self.label,
                'position_method': self.model.config.position,
                'short_conv': getattr(self.model.config, 'short_conv', 0),
                'dape_kernel': getattr(self.model.config, 'dape_kernel', 0), 'block_size': self.L,
                'pretrained_length': self.model.config.L0,
                'checkpoint': self.info['path'], 'weights_digest': self.info['digest'],
                'scale': self.scale, 'identity': self.identity}
        plots.write_result(path, what | result, self.settings, self.runtime, self.began)

    def close(self):
        """End the stage: free the results that it claimed. Call it on every rank."""
        for claim in self.claims:
            claim.close()
        self.runtime.close()
