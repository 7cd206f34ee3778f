"""
Checkpoints: save, load, and open one for a stage.

A checkpoint is one file of tensors and plain values, read with weights_only=True, so that opening a
stranger's file runs none of his code.
"""

import dataclasses
import functools
import hashlib
import os
import re
import shutil
import time
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode

from lib import huggingface, plots
from lib.checksums import load_whole
from lib.devices import setup
from lib.errors import UserError, as_user_error, fault_of, require_kinds
from lib.generate import require_positions, store_column_major
from lib.results import AnswerLog, OnlyWriter, note, result_path, whole_file
from lib.scales import apply_scale, identity
from lib.tokens import (
    Windows,
    require_tokenizer_kinds,
    tokenizer_digest,
    tokenizer_from_state,
)
from model import VECTORS, ModelConfig, Transformer, matrices, small_vectors, vector_of
from position import unused_settings


def old_name(name):
    """The name that a weight has in checkpoints older than position.py's methods as modules."""
    name = re.sub(r'position\.(first|second)\.', r'dape.\1.', name)
    name = re.sub(r'position\.(method\.)?(e|u|v|W\.weight)$', r'content.\2', name)
    return re.sub(r'position\.(method\.)?', 'bias.', name)


def weights_digest(state):
    """
    SHA-256 over old names, shapes and up to 4,096 evenly spaced values of each weight matrix in a
    state dict. Small vectors (head scales, norms) are left out: tuning them must not change whose
    scale file it is.
    """
    digest = hashlib.sha256()
    for name, weight in sorted((old_name(name), weight) for name, weight in state.items()):
        if weight.dim() >= 2 and not vector_of(name):
            n = weight.numel()
            places = torch.linspace(0, n - 1, min(n, 4096), dtype=torch.float64).long()
            values = weight.flatten()[places.to(weight.device)].float().cpu().numpy()
            digest.update(f'{name} {tuple(weight.shape)}'.encode() + values.tobytes())
    return digest.hexdigest()


# ---------------------------------------------------------------------- save

def checkpoint_state(model, tokenizer, step, weights=None, **more):
    """What every checkpoint holds. weights: the model's state dict, where it is sharded."""
    weights = model.state_dict() if weights is None else weights
    return {'model': weights, 'model_config': dataclasses.asdict(model.config),
            'tokenizer': tokenizer, 'digest': weights_digest(weights), 'step': step, **more}


def save(path, **state):
    """Write a checkpoint whole or not at all: a kill or a full disk leaves the file before it."""
    try:
        with whole_file(path) as part, open(part, 'wb') as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:  # torch turns a failed write into a RuntimeError
        raise OSError(f'could not write {path} ({error}); the file before it, if any, is '
                      'untouched. Is the disk full? Free some space and go on (train.py: with '
                      '--init_from=resume).') from error


def require_space(folder, n_bytes):
    """Raise UserError unless checkpoints of n_bytes in all have room in `folder`."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    there = sum(file.stat().st_size for file in Path(folder).glob('*.pt*'))
    free = shutil.disk_usage(folder).free + there
    if free < n_bytes:
        raise UserError(f'checkpoints in {folder} need {n_bytes / 1e9:.2f} GB but {free / 1e9:.2f} '
                        'GB are free. Free some space or choose another out_dir.')


# ---------------------------------------------------------------------- load

def load(source, position=None, optimizer=True):
    """
    Read a checkpoint into CPU memory: a file of ours, its tensors mapped, or a Hugging Face folder
    or hf:ORG/NAME. Returns a dict of model, model_config, tokenizer, digest, step, settings and
    more. optimizer: False leaves out the optimizer's moments, which then cost no time to check.
    Raises UserError if it is not whole.
    """
    if str(source).startswith('hf:') or Path(source).is_dir():
        state = huggingface.load_folder(str(source), position)
        return state | {'digest': weights_digest(state['model'])}
    path = Path(source)
    if not path.is_file():
        raise UserError(f'{path} does not exist. Train that model first, by train.py with its '
                        'config, or name another with --out_dir= or --init_from=.')
    advice = 'Read it again if a run has just replaced it, or use best.pt or a kept step.'
    state = load_whole(path, advice, without=() if optimizer else ('optimizer',))
    with fault_of(path, 'a checkpoint of this project', advice):
        config = whole_config(state)
    return state | {'model_config': dataclasses.asdict(config)}


def whole_config(state):
    """
    The ModelConfig of a checkpoint. Raises an error of MALFORMED unless all that stages read is
    there, each entry of its type.
    """
    require_kinds(state, model=dict, model_config=dict, settings=dict, tokenizer=dict | None,
                  digest=str, step=int)
    model, config, settings = state['model'], state['model_config'], state['settings']
    require_kinds(model, **dict.fromkeys(model, torch.Tensor))
    require_kinds(config, **{name: kind for name, kind in huggingface.KINDS.items()
                             if name in config})  # an older one lacks some
    require_kinds(settings, **dict.fromkeys(settings, str | int | float | list | None))
    require_kinds({'dataset': ''} | settings, dataset=str)
    if state['tokenizer'] is not None:
        require_tokenizer_kinds(state['tokenizer'])
    config = ModelConfig(**config | unused_settings(config))
    if config.n_layer > len(model) or state['step'] < 0:  # layers without end would be made
        raise ValueError(f"n_layer={config.n_layer}, step={state['step']}")
    return config


def config_of(settings, **sizes):
    """The ModelConfig that a stage's settings describe; sizes: what they leave out."""
    names = {field.name for field in dataclasses.fields(ModelConfig)}
    with as_user_error():
        return ModelConfig(**{name: settings[name] for name in names & set(settings)} | sizes)


def require_memory(config):
    """Raise UserError if the weights of a new model are more than this machine's memory holds."""
    if not hasattr(os, 'sysconf'):  # on Windows
        return
    memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    ranks = int(os.environ.get('LOCAL_WORLD_SIZE', 1))  # torchrun's: each makes the whole model
    c = config
    layer = c.n_embd * (2 * c.n_embd + 3 * c.n_hidden)  # at least
    needed = 4 * ranks * (c.n_layer * layer + c.vocab_size * c.n_embd)
    if needed > memory:
        raise UserError(f'a model of n_layer={config.n_layer}, n_embd={config.n_embd}, '
                        f'n_hidden={config.n_hidden} takes {needed / 1e9:,.2f} GB of memory, but '
                        f'this machine has {memory / 1e9:,.2f} GB. Choose a smaller one.')


def named_for(model, weights, source):
    """
    Weights under the names that this model gives them. Raises UserError unless they are its own, no
    more and no less.
    """
    ours = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    names = {old_name(name): name for name in ours}
    weights = {names.get(name, name): weight for name, weight in weights.items()}
    for name, p in small_vectors(model).items():
        vector = weights.get(name)
        if vector is None:  # it came later than the checkpoint
            vector = torch.full(p.shape, VECTORS[vector_of(name)].neutral)
        if p.dim() == 2 and vector.dim() == 1:  # as head scales once were
            vector = vector[:, None]
        if p.dim() == 2 and vector.shape == (len(p), model.config.head_dim):
            p.data = p.new_empty(vector.shape)  # one number for each channel
        weights[name] = vector
    ours = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    theirs = {name: tuple(weight.shape) for name, weight in weights.items()}
    for name, _ in sorted(ours.items() ^ theirs.items()):
        raise UserError(f'{name} should have shape {ours.get(name)}, and in {source} it has '
                        f'{theirs.get(name)}: that was not trained with position '
                        f'{model.config.position}, as methods have weights of their own. Leave '
                        '--position out.')
    return weights


def cast_matrices(model, dtype):
    """Cast a frozen model's matrices once to the type that autocast would give them at each use."""
    for p in matrices(model).values():
        p.data = p.data.to(dtype)
    return model


class Uninitialised(TorchFunctionMode):
    """
    Weights whose values will be loaded are not initialised first. On the meta device that would
    load the compiler, for one second.
    """
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, '__module__', '') == 'torch.nn.init':
            return kwargs['tensor']
        return function(*args, **(kwargs or {}))


def load_model(init_from, out_dir, device, position=None, rope_scaling=None, dtype=torch.float32):
    """
    init_from: 'last' or 'best' (of out_dir), a checkpoint file, a Hugging Face folder or
    hf:ORG/NAME. position, rope_scaling: read it with another method than it says. dtype: that of
    the activations. Returns the model in eval mode, and the checkpoint's other entries:
    model_config, tokenizer, digest, step, settings, path ...
    """
    source = str(Path(out_dir, f'{init_from}.pt') if init_from in ('last', 'best') else init_from)
    if huggingface.is_foreign(source):
        if position is not None or rope_scaling is not None:
            raise UserError(f'{source} is read through transformers: it takes no position or '
                            'rope_scaling of ours.')
        model, state = huggingface.load_foreign(source, dtype)
        state |= {'digest': weights_digest(model.state_dict()), 'path': source}
        return model.to(device).eval().requires_grad_(False), state

    state = load(source, position, optimizer=False)
    config = state['model_config']
    if position is not None:
        config |= {'position': position}
        config |= unused_settings(config)
    if rope_scaling is not None:
        config |= {'rope_scaling': rope_scaling}
    with as_user_error(), torch.device('meta'), Uninitialised():
        model = Transformer(ModelConfig(**config))
    weights = named_for(model, state.pop('model'), source)
    weights = {name: weight if weight.dtype == dtype else weight.float()
               for name, weight in weights.items()}
    model.load_state_dict(weights, assign=True)
    if model.config.tied:
        model.head.weight = model.embed.weight
    cast_matrices(model, dtype)
    return model.to(device).eval().requires_grad_(False), state | {'path': source}


def open_model(path, scale=None, position=None):
    """
    A trained model for a notebook or a program of one's own, on the CPU in float32, and its
    tokenizer. path: a checkpoint file, a Hugging Face folder or hf:ORG/NAME; scale: a number for
    all heads, an array (n_layer, H) or (n_layer, H, D), or a scale file; position: as it was
    trained, where a folder does not say so. model.info is the checkpoint's other entries, which
    apply_scale() and save_scale() take.

    model, text = open_model('lessons/demo.pt', scale=1.3)
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
    Raise UserError unless a data set's tokenizer encodes as that of the checkpoint `info`, which
    may have come without one.
    """
    if info['tokenizer'] is None:
        note(f"{info['path']} has no tokenizer; that of data set {dataset} is taken to be its own")
        if tokenizer_from_state(tokenizer).n_vocab > info['model_config']['vocab_size']:
            raise UserError(f"data set {dataset} has more tokens than {info['path']} knows. "
                            "Prepare it with the model's own tokenizer.")
        return
    if tokenizer_digest(info['tokenizer']) != tokenizer_digest(tokenizer):
        raise UserError(f"{info['path']} was trained with tokenizer {info['tokenizer']['name']}, "
                        f"but data set {dataset} has {tokenizer['name']}. Prepare the data with "
                        "the checkpoint's tokenizer.")


def dataset_of(info, wanted=None):
    """The data set to read: the one asked for, or the one that the checkpoint was trained on."""
    name = wanted or info['settings'].get('dataset')
    if not name:
        raise UserError(f"{info['path']} does not say what it was trained on. Give a data set with "
                        '--dataset=NAME.')
    return name


def open_windows(info, wanted, split, length):
    """Windows of dataset_of(info, wanted). Raises UserError if its tokenizer is another."""
    windows = Windows(dataset_of(info, wanted), split, length)
    require_tokenizer(info, windows.tokenizer_state, windows.dataset)
    return windows


# ---------------------------------------------------------------------- open one for a stage

@dataclasses.dataclass
class ModelSettings:
    """The settings of every stage that reads a trained model."""
    out_dir: str = 'out/demo/nope'    # the run to read; results go there too
    init_from: str = 'last'           # last or best (of out_dir), a checkpoint file, hf:ORG/NAME
    position: str | None = None       # read it with this position method; None: as it says
    rope_scaling: str | None = None   # extend RoPE, such as yarn:4; None: as it says
    device: str = 'auto'              # auto, cpu, cuda, mps
    dtype: str = 'auto'               # auto, float32, bfloat16, float16


@dataclasses.dataclass
class RunSettings(ModelSettings):
    """The settings of every stage that measures one, with any softmax scale."""
    scale: float | str | None = None  # softmax scale: a number for all heads, or a scale file
    label: str = ''                   # name of the result; empty: the scale's


@dataclasses.dataclass
class TextSettings(RunSettings):
    """The settings of every stage that measures one on text."""
    dataset: str | None = None        # a folder of data/; None: the one it was trained on
    split: str = 'test'


class Run:
    """
    A trained model as the settings of a stage ask for it, and the results that it writes.
    settings: the stage's, {name: value}, with those of RunSettings; result: what it will be called,
    as write() takes it, to claim() it; decodes: the stage reads token by token, so its weights are
    stored for that.
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
        self.L, self.claims = self.model.config.block_size, {}
        if result:
            self.claim(*result)

    @functools.cached_property
    def encoding(self):
        return tokenizer_from_state(self.info['tokenizer'])

    def windows(self, length, split=None):
        """Windows of the data set and the split that the settings name."""
        split = split or self.settings['split']
        require_positions(self.model, length)
        return open_windows(self.info, self.settings['dataset'], split, length)

    def path(self, *kind):
        """OUT_DIR/KIND[_LABEL], without a suffix."""
        return result_path(self.settings['out_dir'], *kind, self.label)

    def claim(self, stage, *kind):
        """
        Keep other processes from a result that write() will write, as one of two would be lost. A
        folder that cannot be written is met here, before the work.
        """
        path = self.path(stage, *kind)
        self.claims[path] = OnlyWriter(f'{path}.json', self.runtime.is_main)

    def answers(self, path, kinds, **asked):
        """
        Answers in PATH.jsonl, which depend on the model, its scales and what was asked. kinds:
        {name: type} of what one holds.
        """
        settings = self.identity | {'dtype': str(self.runtime.dtype)} | asked
        return AnswerLog(f'{path}.jsonl', kinds, settings, self.runtime)

    def write(self, stage, result, *kind):
        """
        Write OUT_DIR/STAGE[_KIND][_LABEL].json: the result, what was measured, and what is needed
        to measure it again; and its picture. A stage may write several results.
        """
        path = self.path(stage, *kind)
        what = {'stage': stage, 'label': self.label,
                'position_method': self.model.config.position,
                'short_conv': getattr(self.model.config, 'short_conv', 0), 'block_size': self.L,
                'trained_length': self.model.config.trained_length,
                'checkpoint': self.info['path'], 'weights_digest': self.info['digest'],
                'scale': self.scale, 'identity': self.identity}
        plots.write_result(path, what | result, self.settings, self.runtime, self.began)
        if path in self.claims:
            self.claims.pop(path).close()

    def close(self):
        """The end of the stage, on every rank."""
        self.runtime.close()
