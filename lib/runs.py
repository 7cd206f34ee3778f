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

from lib import checkpoints
from lib.answers import OnlyWriter, note, optional, read_lines, save_json, write_lines
from lib.devices import unsharded
from lib.errors import UserError, as_user_error, fault_of, require_kinds
from model import ModelConfig, Transformer
from position import Settings, unused_settings

# Settings that a resumed run may not change: the model's sizes, and those of its position method.
MODEL = ('n_layer', 'n_head', 'n_kv_head', 'n_embd', 'n_hidden', 'short_conv', 'short_conv_at',
         'block_size',
         *(field.name for field in dataclasses.fields(Settings)))

# ---------------------------------------------------------------------- before a run begins

def to_go_on(folder):
    """A context that turns an error into a UserError: no run can resume from this last.pt."""
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


def require_same_model(folder, old, new):
    """
    Refuse to resume with another model. Returns the names of the other settings that changed.
    old, new: {setting: value}.
    """
    changed = [name for name in new if name in old and old[name] != new[name]
               and name not in ('init_from', 'out_dir')]
    for name in changed:
        if name in MODEL:
            raise UserError(f'{name} is {new[name]} but {folder}/last.pt was trained with '
                            f'{old[name]}. Resume with --{name}={old[name]}, or train into another '
                            '--out_dir=.')
    return changed


def finetuned_config(old, chosen, given, path):
    """
    The ModelConfig for training a given model further. The length, the position method and
    rope_scaling may change. Refuses a different value for any other setting of the model. old: the
    model's config; chosen: {setting: value}; given: the names of the settings that the user gave.
    """
    may_change = {'position', 'rope_scaling', 'block_size'}
    for name in set(given) & set(MODEL) - may_change:
        if chosen[name] != old[name]:
            raise UserError(f'{name} is {chosen[name]}, but the model was trained with '
                            f'{old[name]}: {path}. Leave {name} out; the model keeps its own.')
    L = old['rope_length'] or old['block_size']
    new = old | {'block_size': chosen['block_size'], 'rope_length': L}
    new |= {name: chosen[name] for name in ('position', 'rope_scaling') if name in given}
    new |= {name: default for name, default in unused_settings(new).items() if name not in given}
    if new['rope_scaling'].isidentifier():  # a name alone: its factor is the ratio of the lengths
        new['rope_scaling'] += f":{chosen['block_size'] / L:g}"
    with as_user_error():
        return ModelConfig(**new)


def model_to_train(windows, chosen, given, runtime):
    """
    Make the model to train: new, resumed, or started from another model's weights. chosen: all
    settings; given: the names of the settings that the user gave. Returns the model, the checkpoint
    to resume from (or None), and the settings that the run uses.
    """
    out_dir, init_from = chosen['out_dir'], chosen['init_from']
    if init_from == 'scratch':
        config = checkpoints.config_of(chosen, vocab_size=windows.vocab_size)
        checkpoints.require_memory(config)
        return Transformer(config).init_weights(), None, chosen
    resumes = init_from == 'resume'
    path = Path(out_dir, 'last.pt') if resumes else init_from
    state = checkpoints.load(path, chosen['position'] if 'position' in given else None, resumes)
    if resumes:
        with to_go_on(out_dir):
            require_kinds(state, data=dict, optimizer=dict, scaler=dict, best_val_loss=int | float)
            require_kinds(state['data'], **dict.fromkeys(state['data'], str))
            require_kinds(state['settings'], init_from=str)
    checkpoints.require_tokenizer(state | {'path': path}, windows.tokenizer_state,
                                  chosen['dataset'])
    began_with = state['settings']['init_from'] if resumes else init_from
    old = state['model_config']
    if began_with == 'scratch':
        config = ModelConfig(**old)
    else:  # a given model keeps its own sizes
        config = finetuned_config(old, chosen, given, path)
        kept = {name: getattr(config, name) for name in MODEL}
        shown = ' '.join(f'{name}={value}' for name, value in kept.items())
        runtime.print('model settings are those of', path, shown)
        chosen = chosen | kept
    chosen = chosen | {'init_from': began_with}
    if resumes:
        require_same_data(out_dir, state['data'], windows.checksums)
        was = old | state['settings']  # a setting that the run lacks is the model's
        for name in require_same_model(out_dir, was, chosen):
            runtime.print(f"resuming with {name} = {chosen[name]} (was {state['settings'][name]})")
    model = Transformer(config)
    model.load_state_dict(checkpoints.weights_for(model, state['model'], path))
    return model, state if resumes else None, chosen


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
        self.log_path = self.folder / 'log.jsonl'
        self.tracker = None
        if runtime.is_main:
            self.tracker = open_tracker(settings['tracker'], folder, settings)
        self.lock = OnlyWriter(self.log_path, runtime.is_main)

    def begin(self, step):
        """Bring the folder to its state at a step; 0 for a new run."""
        if not self.runtime.is_main:
            return
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
        Write the pending losses to the log. Returns their mean. Raises UserError if a loss is not
        finite, so that no checkpoint is overwritten.
        """
        losses = torch.stack(self.pending).tolist() if self.pending else []
        self.pending.clear()
        for number, loss in enumerate(losses, start=step - len(losses) + 1):
            self.require_finite(loss, f'the loss became {loss} at step {number}')
            self.log(number, loss=loss)
        return sum(losses) / max(1, len(losses))

    def require_finite(self, value, what):
        if math.isfinite(value):
            return
        last_path, good = self.folder / 'last.pt', 'Start again'
        if last_path.exists():
            good = f'{last_path} holds the last good state: resume from it'
        raise UserError(f'{what}. {good} with a lower learning_rate or grad_clip.')

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
            os.write(2, b'\nfinishing this step, then saving; once more stops at once\n')

    def on_any_rank(self):
        """The signal that any rank received, or None. All ranks must call this at the same step."""
        if self.runtime.world_size == 1:
            return self.received
        received = [None] * self.runtime.world_size
        dist.all_gather_object(received, self.received)
        return next((one for one in received if one), None)
