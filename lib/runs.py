"""A training run on disk: its log, its checkpoints, and what is asked before it goes on."""

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
from lib.devices import unsharded
from lib.errors import UserError, as_user_error, fault_of, require_kinds
from lib.results import OnlyWriter, note, optional, read_lines, save_json, write_lines
from model import ModelConfig, Transformer
from position import Settings, unused_settings

# What a model keeps: its sizes, and the settings of its position method.
MODEL = ('n_layer', 'n_head', 'n_kv_head', 'n_embd', 'n_hidden', 'short_conv', 'short_conv_at',
         'block_size',
         *(field.name for field in dataclasses.fields(Settings)))

# ---------------------------------------------------------------------- before a run begins

def to_go_on(folder):
    """What goes wrong in here is the fault of a last.pt that no run can go on from."""
    return fault_of(Path(folder, 'last.pt'), 'what a run goes on from',
                    'Train into another --out_dir=; --init_from=FILE takes its weights.')


def require_same_data(folder, old, new):
    """Refuse to resume on other text. old, new: {source: checksum of its tokens}."""
    if old is None or None in new.values():
        note(f'{folder}/last.pt does not say which text it was trained on, or the data set has no '
             'checksums; it is taken to be the same')
        return
    changed = set(old.values()) ^ set(new.values())
    for name, checksum in (new | old).items():
        if checksum in changed:
            raise UserError(f'dataset {name} has other tokens now than when {folder}/last.pt was '
                            'trained, or was not part of it then. Prepare it as it was, or train '
                            'into another --out_dir=.')


def require_same_model(folder, old, new):
    """
    Refuse to resume with another model. Returns the names of other settings that changed. old, new:
    {setting: value}.
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
    The config of a model that is given, at another length and with what may change of its position
    method. Refuses any other setting that the user gave and that the model does not have.
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
    if new['rope_scaling'].isidentifier():  # yarn is yarn by the ratio of the lengths
        new['rope_scaling'] += f":{chosen['block_size'] / L:g}"
    with as_user_error():
        return ModelConfig(**new)


def model_to_train(windows, chosen, given, runtime):
    """
    The model: new, resumed, or started from another's weights. chosen: all settings; given: the
    names of those that the user gave. Returns the model, the checkpoint to resume from (or None),
    and the settings as they turned out.
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
            require_kinds({'data': {}} | state, data=dict | None, optimizer=dict, scaler=dict,
                          best_val_loss=int | float)
            sources = state.get('data') or {}  # an older run did not name them
            require_kinds(sources, **dict.fromkeys(sources, str | None))
    checkpoints.require_tokenizer(state | {'path': path}, windows.tokenizer_state,
                                  chosen['dataset'])
    began_with = state['settings'].get('init_from') if resumes else init_from
    old = state['model_config']
    if began_with == 'scratch':
        config = ModelConfig(**old)
    else:  # a model that was given has the sizes it has
        config = finetuned_config(old, chosen, given, path)
        kept = {name: getattr(config, name) for name in MODEL}
        shown = ' '.join(f'{name}={value}' for name, value in kept.items())
        runtime.print('the model is as in', path, shown)
        chosen = chosen | kept
    chosen = chosen | {'init_from': began_with}
    if resumes:
        require_same_data(out_dir, state.get('data'), windows.checksums)
        was = old | state['settings']  # older settings lack those of the model that came later
        for name in require_same_model(out_dir, was, chosen):
            runtime.print(f"resuming with {name} = {chosen[name]} (was {state['settings'][name]})")
    model = Transformer(config)
    model.load_state_dict(checkpoints.named_for(model, state['model'], path))
    return model, state if resumes else None, chosen


# ---------------------------------------------------------------------- while it goes on

def open_tracker(name, folder, settings):
    """
    The package trackio or wandb, with a run begun that has the folder's name; None for ''. Both
    have init(), log() and finish() alike.
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
    What a run leaves in its folder: log.jsonl, config.json and checkpoints; and what it sends to a
    tracker. No other process may write there at the same time. settings: as they turned out; more:
    entries of every checkpoint.
    """

    def __init__(self, folder, runtime, settings, tokens_per_step, tokenizer, **more):
        self.folder, self.runtime, self.settings = Path(folder), runtime, settings
        self.tokens_per_step, self.tokenizer, self.more = tokens_per_step, tokenizer, more
        self.pending = []  # losses of the latest steps, still on the device: reading stalls it
        self.log_path = self.folder / 'log.jsonl'
        self.tracker = None
        if runtime.is_main:
            self.tracker = open_tracker(settings.get('tracker'), folder, settings)
        self.lock = OnlyWriter(self.log_path, runtime.is_main)

    def begin(self, step):
        """Make the folder as it was at a step, 0 for a new run."""
        if not self.runtime.is_main:
            return
        save_json(self.folder / 'config.json', self.settings)
        rows = [row for row in read_lines(self.log_path, step=int, tokens=int)
                if 0 < row['step'] <= step]
        write_lines(self.log_path, rows)  # a kill may have left steps after the checkpoint
        n_lost = step - len({row['step'] for row in rows if 'loss' in row})
        if n_lost:
            note(f'{self.log_path} lacks {n_lost} of {step} steps, and so does loss.png; the run '
                 'itself lacks nothing')

    def log(self, step, **row):
        row = {'tokens': step * self.tokens_per_step} | row
        if self.runtime.is_main:
            with open(self.log_path, 'a') as file:
                file.write(json.dumps({'step': step} | row) + '\n')
            if self.tracker:
                self.tracker.log(row, step=step)

    def flush(self, step):
        """
        Write the pending losses to the log; stop if one is not finite, before any checkpoint is
        overwritten. Returns their mean.
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
        """Write a checkpoint, unless a weight is not finite. Call it on every rank."""
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
    """Tokens a second since the last line on screen, and the time that is left."""

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
            note('less than a third of the tokens/s before: does another process use this machine? '
                 'On a CPU its threads then wait for each other in loops; a run that is started '
                 'with GOMP_SPINCOUNT=10000 in the environment loses less.')
        minutes, s = divmod(int(seconds * (self.last_step - step)), 60)
        # Above 1 the ceiling was measured too low, as happens on a busy machine.
        share = self.flops / seconds / self.ceiling
        mfu = f'MFU {share:4.0%}  ' if share <= 1 else ''
        return (f'{self.tokens / seconds:9,.0f} tokens/s  {mfu}'
                f'{minutes // 60}:{minutes % 60:02d}:{s:02d} left')


class StopSignal:
    """
    SIGTERM or Ctrl-C while this is in use: finish the step, save, stop. Once more stops at once.
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
        """The signal that some rank got, or None. All ranks must ask at the same step."""
        if self.runtime.world_size == 1:
            return self.received
        received = [None] * self.runtime.world_size
        dist.all_gather_object(received, self.received)
        return next((one for one in received if one), None)
