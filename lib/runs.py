"""A training run on disk: its log, its checkpoints, and the checks before it resumes."""

import dataclasses
import json
import math
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

import configurator
from lib import checkpoints
from lib.answers import OnlyWriter, note, optional, read_lines, save_json, write_lines
from lib.devices import unsharded
from lib.errors import UserError, as_user_error, fault_of, require_kinds
from lib.tokens import parse_part
from model import ModelConfig
from position import Settings, defaults_of_unused, settings_of

# Settings that a resumed run may not change: those of a ModelConfig that train.py has, too.
MODEL = [field.name for field in dataclasses.fields(ModelConfig)
         if field.name not in ('vocab_size', 'pretrained_length', 'tied', 'norm_eps')]

# Settings that a resumed run does not keep, because another machine may need others.
OF_MACHINE = {'out_dir', 'init_from', 'device', 'compile', 'fsdp', 'checkpoint_activations'}

# ---------------------------------------------------------------------- before a run begins

def resume_errors(folder):
    """A context that turns an error of a malformed last.pt into a UserError."""
    return fault_of(Path(folder, 'last.pt'), 'what a run goes on from',
                    'Train into another --out_dir=; --init_from=FILE starts from its weights.')


def require_same_data(folder, old, new):
    """Refuse to resume on different text. old, new: {source: checksum of its tokens}."""
    changed = set(old.values()) ^ set(new.values())
    for name, checksum in (new | old).items():
        if checksum in changed:
            raise UserError(f'dataset {name} has changed since {folder}/last.pt was trained, or '
                            'was added or left out since then. Prepare the data set as it was, or '
                            'train into another --out_dir=.')


def require_own_settings(own, chosen, given, path, may_change=()):
    """
    A trained model keeps its own settings. Refuse a setting that the user gave with another value.
    own: the model's settings; chosen: those of the run, {name: value}; given: the names of the
    settings that the user gave.
    """
    for name in MODEL:
        if name in given and name not in may_change and chosen[name] != own[name]:
            raise UserError(f'{name} is {chosen[name]!r}, but {path} was trained with '
                            f'{own[name]!r}. Leave {name} out, because the model keeps its own '
                            'settings.')


def scaling_with_factor(chosen, L):
    """The setting rope_scaling. A name without a factor gets the ratio of block_size and L."""
    scaling = chosen['rope_scaling']
    return f"{scaling}:{chosen['block_size'] / L:g}" if scaling.isidentifier() else scaling


def stopped_run(folder):
    """The checkpoint folder/last.pt, from which a stopped run resumes."""
    path = Path(folder, 'last.pt')
    state = checkpoints.load(path) | {'path': path}
    with resume_errors(folder):
        require_kinds(state, data=dict, optimizer=dict, scaler=dict, best_val_loss=int | float)
        require_kinds(state['data'], **dict.fromkeys(state['data'], str))
        require_kinds(state['settings'], init_from=str)
    return state


def settings_to_resume(state, scope, given):
    """
    The settings of a stopped run that its continuation keeps: all that the user did not set anew
    and that do not depend on the machine. scope: globals() of the stage; given: the names of the
    settings that the user gave.
    """
    kinds = {field.name: field.type for field in dataclasses.fields(Settings)}
    kinds |= configurator.annotations(scope)
    with resume_errors(state['path'].parent):
        return {name: configurator.fit(state['settings'][name], kinds.get(name, type(value)))
                for name, value in configurator.settings(scope).items()
                if name in state['settings'].keys() - OF_MACHINE - set(given)}


def require_resumable(state, chosen, given, windows):
    """
    Refuse to resume with another model, other text or another tokenizer, and print every other
    setting that has changed. state: of stopped_run(); windows: of the training text.
    """
    path, own, was = state['path'], state['model_config'], state['settings']
    if chosen['max_iters'] < state['step']:
        raise UserError(f"max_iters is {chosen['max_iters']}, but {path} has done {state['step']} "
                        'steps. Give a larger --max_iters=, or leave it out.')
    checkpoints.require_tokenizer(state, windows.tokenizer_state, chosen['dataset'])
    scaling = scaling_with_factor(chosen, own['pretrained_length'] or own['block_size'])
    require_own_settings(own, chosen | {'rope_scaling': scaling}, given, path)
    require_same_data(chosen['out_dir'], state['data'], windows.checksums)
    fixed = ['batch_size', 'seed']
    if not is_text_of(state, chosen['dataset'], windows):
        fixed.append('dataset')
    for name in fixed:
        if chosen[name] != was[name]:
            raise UserError(f'{name} is {chosen[name]}, but {path} was trained with {was[name]}. '
                            'Leave it out, because which text a step reads depends on it.')
    if 'keep_steps' in given:
        past = [step for step in chosen['keep_steps'] if step <= state['step']
                and not path.with_name(f'step_{step}.pt').exists()]
        if past:
            note(f"keep_steps has {past}, but the run is already at step {state['step']}")
    for name, value in chosen.items():
        if name not in {*MODEL, 'init_from', 'out_dir'} and value != was.get(name, value):
            note(f'resuming with {name} = {value} (was {was[name]})')


def is_text_of(state, dataset, windows):
    """
    True if a checkpoint was trained on this dataset: on parts with the same checksums and weights,
    in this order. A folder may have moved, so names do not count, unless the checkpoint has no
    checksums.
    """
    was, checksums = state['settings'].get('dataset'), state.get('data')
    if not was or not checksums:
        return was == dataset
    return weighted_texts(was, checksums) == weighted_texts(dataset, windows.checksums)


def weighted_texts(dataset, checksums):
    """[(checksum, weight), ...] of the parts of a dataset, in order. checksums: {part: checksum}"""
    return [(checksums[name], weight) for name, weight in map(parse_part, dataset.split(','))]


def last_saved(folder):
    """What changes with each save of folder/last.pt; None if there is none."""
    path = Path(folder, 'last.pt')
    return path.stat().st_mtime_ns if path.exists() else None


def checkpoint_to_start_from(chosen, given, windows):
    """
    The checkpoint init_from, whose weights a new run starts from, with the ModelConfig for this
    run. The length, the position method with its settings, rope_scaling and random positions may
    change; everything else stays the model's own.
    """
    path = chosen['init_from']
    position = chosen['position'] if 'position' in given else None
    state = checkpoints.load(path, position) | {'path': path}
    checkpoints.require_tokenizer(state, windows.tokenizer_state, chosen['dataset'])
    own, may_change = state['model_config'], {'position', 'rope_scaling', 'block_size',
                                              'random_positions'}
    if position:  # the settings of methods that the model did not have
        may_change |= settings_of(position) - settings_of(own['position'])
    require_own_settings(own, chosen, given, path, may_change)
    if 'block_size' not in given and chosen['block_size'] != own['block_size']:
        raise UserError(f"{path} was trained at {own['block_size']} tokens, and without "
                        f"--block_size= this run would train it at {chosen['block_size']}. Give "
                        'the length that you want.')
    L = own['pretrained_length'] or own['block_size']
    new = own | {'block_size': chosen['block_size'], 'pretrained_length': L}
    new |= {name: chosen[name] for name in may_change & {*given}}
    if 'rope_scaling' in given:
        new['rope_scaling'] = scaling_with_factor(chosen, L)
    new |= {name: default for name, default in defaults_of_unused(new).items() if name not in given}
    with as_user_error():
        config = ModelConfig(**new)
    was = state['settings']
    if (all(was.get(name) == chosen[name] for name in ('seed', 'block_size', 'batch_size'))
            and is_text_of(state, chosen['dataset'], windows)):
        note(f'this run reads the same text in the same order as {path} did; another --seed= reads '
             'it in another order')
    note(f'starting from {path}, with '
         + ' '.join(f'{name}={getattr(config, name)}' for name in MODEL))
    return state, config


# ---------------------------------------------------------------------- during a run

def open_tracker(name, folder, settings):
    """
    Start a run in trackio or wandb, named after the folder. Returns the package, or None for ''.
    Both packages have the same init(), log() and finish().
    """
    if not name:
        return None
    if name not in ('trackio', 'wandb'):
        raise UserError(f"tracker is '{name}'. Choose trackio or wandb, or leave it out.")
    package = optional(name)
    package.init(project='nope-length', name=str(folder), config=settings)
    return package


class Recorder:
    """
    Writes log.jsonl, config.json and the checkpoints to a run's folder, and sends the log to a
    tracker. No other process may write to the folder at the same time. settings: those that the run
    uses; more: entries of every checkpoint.
    """

    def __init__(self, folder, runtime, settings, tokens_per_step, tokenizer, **more):
        self.folder, self.runtime, self.settings = Path(folder), runtime, settings
        self.tokens_per_step, self.tokenizer, self.more = tokens_per_step, tokenizer, more
        self.pending = []  # latest losses, still on the device, because to read one stalls it
        self.unprinted = []  # losses in the log since the last printed line
        self.log_path = self.folder / 'log.jsonl'
        self.lock, self.tracker = OnlyWriter(self.log_path, runtime.is_main), None
        if runtime.is_main:
            self.tracker = open_tracker(settings['tracker'], folder, settings)

    def begin(self, step):
        """Bring the folder to its state at a step; 0 for a new run."""
        if not self.runtime.is_main:
            return
        # Who asks whether a run has finished looks for its picture; see finish() of train.py.
        (self.folder / 'loss.png').unlink(missing_ok=True)
        save_json(self.folder / 'config.json', self.settings)
        rows = [row for row in read_lines(self.log_path, step=int, tokens=int)
                if 0 < row['step'] <= step]
        write_lines(self.log_path, rows)  # a kill may have left steps after the checkpoint
        n_lost = step - len({row['step'] for row in rows if 'loss' in row})
        if n_lost:
            note(f'{self.log_path} lacks {n_lost} of {step} steps, so loss.png lacks them, too; '
                 'the model was trained on all steps')

    def log(self, step, **row):
        row = {'tokens': step * self.tokens_per_step} | row
        if self.runtime.is_main:
            with open(self.log_path, 'a') as file:
                file.write(json.dumps({'step': step} | row) + '\n')
            if self.tracker:
                self.tracker.log(row, step=step)

    def flush(self, step):
        """
        Write the pending losses to the log. Raises UserError if a loss is not finite, so that no
        checkpoint is overwritten.
        """
        losses = torch.stack(self.pending).tolist() if self.pending else []
        self.pending.clear()
        for number, loss in enumerate(losses, start=step - len(losses) + 1):
            self.require_finite(loss, f'the loss became {loss} at step {number}')
            self.log(number, loss=loss)
        self.unprinted += losses

    def mean_loss(self):
        """The mean of the losses since the last call."""
        losses, self.unprinted = self.unprinted, []
        return sum(losses) / len(losses)

    def require_finite(self, value, what):
        if math.isfinite(value):
            return
        last_path, good = self.folder / 'last.pt', 'Start again'
        if last_path.exists():
            good = f'{last_path} holds the last good state: resume from it'
        raise UserError(f'{what}. {good} with a lower learning_rate, or a grad_clip that is lower '
                        'and not 0.')

    def save(self, name, model, step, **more):
        """Write a checkpoint, or raise UserError if a weight is not finite. Call on every rank."""
        weights = unsharded(model.state_dict())
        if self.runtime.is_main:
            for weight_name, weight in weights.items():
                what = f'{weight_name} became infinite or not a number at step {step}'
                self.require_finite(float(weight.sum()), what)
            checkpoints.save(self.folder / name, **checkpoints.checkpoint_state(
                model, self.tokenizer, step, weights, settings=self.settings, **self.more, **more))

    def close(self):
        self.lock.close()
        if self.tracker:
            self.tracker.finish()


class Speed:
    """Measures tokens per second since the last printed line, and estimates the time left."""

    def __init__(self, step, last_step, tokens_per_step, flops_per_token, ceiling):
        self.last_step, self.tokens, self.ceiling = last_step, tokens_per_step, ceiling
        self.flops, self.fastest = flops_per_token * tokens_per_step, 0.0
        self.restart(step)

    def restart(self, step):
        self.step, self.time = step, time.perf_counter()

    def line(self, step):
        seconds = (time.perf_counter() - self.time) / max(1, step - self.step)
        self.restart(step)
        self.fastest = max(self.fastest, self.tokens / seconds)
        if self.tokens / seconds < self.fastest / 3:
            note('tokens/s fell below a third of the fastest so far: does another process use this '
                 "machine? On a CPU, the run's threads then wait for each other in loops. A run "
                 'that is started with GOMP_SPINCOUNT=10000 in the environment loses less.')
        minutes, s = divmod(int(seconds * (self.last_step - step)), 60)
        # A share above 1 means that the ceiling was measured too low, which a busy machine causes.
        share = self.flops / seconds / self.ceiling
        mfu = f'MFU {share:4.0%}  ' if share <= 1 else ''
        return (f'{self.tokens / seconds:9,.0f} tokens/s  {mfu}'
                f'{minutes // 60}:{minutes % 60:02d}:{s:02d} left')


class StopSignal:
    """
    Remembers SIGTERM or Ctrl-C, so that the run can finish the step, save and stop. A second signal
    stops the run at once.
    """

    def __init__(self, runtime):
        self.runtime, self.received = runtime, None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.on_signal)

    def on_signal(self, number, frame):
        self.received = signal.Signals(number)
        signal.signal(number, signal.SIG_DFL)
        if self.runtime.is_main:  # print() is not safe here
            os.write(2, b'\nfinishing this step (on several GPUs, those up to the next log line), '
                        b'then saving; once more stops at once\n')

    def on_any_rank(self, is_log_step):
        """
        The signal that any rank received, or None. All ranks must call this at the same step. On
        several GPUs to ask each other waits for the devices, so they ask only at log steps.
        """
        if self.runtime.world_size == 1:
            return self.received
        if self.runtime.device.type != 'cpu' and not is_log_step:
            return None
        received = [None] * self.runtime.world_size
        dist.all_gather_object(received, self.received)
        return next((one for one in received if one), None)
