"""
Train a transformer on token files, without position encoding (NoPE) or with a position method.
Or fine-tune a trained model at another length. Sources: sections 4.1 and 4.2 of
"Length Generalization of Causal Transformers without Position Encoding"; the recipe of TinyLlama.

$ python train.py                                        # the demo model: 0.85M parameters, minutes
$ python train.py config/demo_rope.py                    # its twin with RoPE
$ python train.py --init_from=resume                     # resume out_dir; on a CPU bit for bit
$ python train.py config/finetune_demo.py config/yarn.py --out_dir=out/demo/rope_yarn
$ torchrun --nproc_per_node=8 train.py config/nope_1b.py # the paper's model on eight GPUs

Writes out_dir/last.pt, best.pt, step_N.pt, config.json, log.jsonl, loss.png
"""

import functools
import math
import sys
import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from configurator import between, configure, settings
from kernels import attention_entropy
from lib import checkpoints, plots
from lib.answers import note
from lib.devices import (
    Runtime,
    compiled,
    learning_rate_at,
    load_sharded,
    matmul_flops,
    note_long_warmup,
    setup,
    sharded,
    unsharded,
)
from lib.errors import UserError
from lib.runs import (
    MODEL,
    Recorder,
    Speed,
    StopSignal,
    checkpoint_to_start_from,
    last_saved,
    require_resumable,
    resume_errors,
    settings_to_resume,
    stopped_run,
)
from lib.tokens import Windows
from model import ModelConfig, Transformer
from position import Settings

# output
out_dir = 'out/demo/nope'    # folder for checkpoints, log and pictures
init_from = 'scratch'        # scratch; resume (out_dir/last.pt); or a model: FILE or hf:ORG/NAME
eval_interval = 500          # steps between validations; each validation also saves last.pt
eval_windows = 128           # windows in each validation, always the same ones
log_interval = 100           # steps between printed lines
tracker = ''                 # also send the log to trackio or wandb; '': neither
keep_steps: list[int] = []   # steps whose weights are kept as step_N.pt
# data
dataset = 'stdlib'           # a folder in data/, or a mixture: 'slimpajama:0.694,starcoder:0.306'
block_size = 128             # L: tokens in a training window
batch_size = 16              # sequences in one training step, over all devices
micro_batch_size = 16        # sequences in one pass on one device; lower it if memory runs out
# model; settings that only some position methods have, such as rope_base, stand in position.py
position = 'none'            # none (NoPE), rope ...: a key of METHODS; a,b: layers alternate
n_layer = 4
n_head = 8
n_kv_head = 4                # key/value heads; each is shared by n_head / n_kv_head query heads
n_embd = 128
n_hidden = 384               # inner width of SwiGLU
short_conv = 0               # tokens that each short convolution reads, such as 4; 0: none
short_conv_at = 'AC'         # A: before attention; C: before the MLP; AC: both
# optimizer
max_iters = 2200             # training steps
learning_rate = 2e-3         # peak learning rate
min_lr = 2e-4                # learning rate at the end of the cosine; usually a tenth of the peak
warmup_iters: float = 200    # steps of linear warmup; below 1: a share of max_iters
lr_decay_iters: int | None = None  # step at which the cosine ends; None: max_iters
weight_decay = 0.1           # on all weights but short convolutions; on norms too, as in TinyLlama
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0              # largest global norm of the gradients; 0: no clipping
# machine
device = 'auto'              # auto, cpu, cuda, cuda:1, mps
dtype = 'auto'               # type of activations; weights and optimizer stay float32
compile = True               # compile the model with torch.compile
fsdp = False                 # split the model over the ranks of torchrun
checkpoint_activations = False  # backward recomputes activations: less memory, more time
seed = 1337                  # seed of initial weights and data order

ENTROPY_WINDOWS = 4  # validation windows for attention entropy: it varies little between windows


def check_settings(s, runtime):
    """Refuse wrong settings before work starts. s: {name: value}. Raises UserError."""
    between(s, 1, 'max_iters', 'eval_interval', 'log_interval', 'eval_windows', 'block_size',
            'lr_decay_iters', 'keep_steps')
    between(s, 1, 'batch_size', 'micro_batch_size', most=2 ** 24)
    between(s, 0, 'learning_rate', 'min_lr', 'warmup_iters', 'weight_decay', 'grad_clip')
    between(s, 0, 'beta1', 'beta2', most=1 - 1e-9)
    out_dir, batch_size, micro = s['out_dir'], s['batch_size'], s['micro_batch_size']
    if s['init_from'] != 'resume':
        kept = {path.name for path in Path(out_dir).glob('*.pt')}
        if kept:
            name, begin = min(kept), 'Choose'
            if 'last.pt' in kept:
                name, begin = 'last.pt', 'Resume it with --init_from=resume, choose'
            raise UserError(f'{out_dir} already holds a run ({name}). {begin} another --out_dir=, '
                            'or remove the run.')
    if s['min_lr'] > s['learning_rate']:
        raise UserError(f"min_lr {s['min_lr']} is above learning_rate {s['learning_rate']}. Lower "
                        '--min_lr=, for example to 0.')
    ranks = runtime.world_size
    if batch_size % (micro * ranks):
        advice = 'Choose another batch_size.'
        if batch_size % ranks == 0:
            advice = f'Set --micro_batch_size={math.gcd(micro, batch_size // ranks)}.'
        raise UserError(f'batch_size {batch_size} must be a multiple of micro_batch_size {micro} x '
                        f'{ranks} ranks. {advice}')
    if s['fsdp'] and ranks == 1:
        raise UserError('fsdp splits a model over several ranks, but there is only one. Start with '
                        'torchrun --nproc_per_node=N, or leave --fsdp=True out.')
    late = [step for step in s['keep_steps'] if step > s['max_iters']]
    if late:
        note(f"keep_steps has {late}, but the run ends at max_iters {s['max_iters']}")


# ---------------------------------------------------------------------- data

def rank_batch(windows, step, batch_size, runtime):
    """This rank's rows of the global batch: inputs and targets, each (rows, block_size)."""
    rows = slice(runtime.rank, None, runtime.world_size)
    tokens = torch.from_numpy(windows.batch(step, batch_size, rows))
    if runtime.device.type == 'cuda':  # copy while the GPU still computes the previous step
        tokens = tokens.pin_memory()
    tokens = tokens.to(runtime.device, non_blocking=True)
    return tokens[:, :-1], tokens[:, 1:]


# ---------------------------------------------------------------------- model

def starting_model(state, chosen, given, windows):
    """
    The model that a run begins with: a new one, that of the stopped run `state`, or that of the
    checkpoint init_from.
    """
    if chosen['init_from'] == 'scratch':
        config = checkpoints.config_of(chosen, vocab_size=windows.vocab_size)
        return Transformer(config).init_weights()
    if state:
        require_resumable(state, chosen, given, windows)
        config = ModelConfig(**state['model_config'])
    else:
        state, config = checkpoint_to_start_from(chosen, given, windows)
    model = Transformer(config)
    model.load_state_dict(checkpoints.fit_weights(model, state['model'], state['path']))
    return model


def place_model(model, fsdp, compile, runtime):
    """
    Put the model on its device. Returns (model, called). model holds the weights; fsdp shards them.
    called is the model that training calls: compiled, and inside DDP if there are several ranks.
    """
    if fsdp:
        model = sharded(model, runtime, compile)
        return model, model
    called = compiled(model.to(runtime.device), runtime, compile)
    if runtime.world_size > 1:
        # PyTorch 2.13 warns that this argument is old; 2.11 does not know the new one.
        warnings.filterwarnings('ignore', message='.*broadcast_buffers')
        device_ids = [runtime.device] if runtime.device.type == 'cuda' else None
        # The bucket view avoids a second copy of all gradients; see also train_step().
        called = DistributedDataParallel(called, gradient_as_bucket_view=True,
                                         broadcast_buffers=False, device_ids=device_ids)
    return model, called


# ---------------------------------------------------------------------- training

@dataclass
class TrainState:
    """What a training step needs: the model, the optimizer, the precision and the ranks."""
    model: torch.nn.Module       # holds the weights; fsdp shards them
    called: torch.nn.Module      # the model that training calls; see place_model()
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler  # scales the loss so that float16 can hold the gradients
    autocast: AbstractContextManager  # in which the loss is computed
    runtime: Runtime


def new_optimizer(model, settings):
    """
    AdamW over all trained weights. Short convolutions have no weight decay, because it would pull
    their few weights to 0, where the convolution does nothing.
    """
    weights, convolutions = [], []
    for name, p in model.named_parameters():
        if p.requires_grad:  # the head scales are frozen
            (convolutions if name.endswith('conv.w') else weights).append(p)
    groups = [{'params': weights}]
    if convolutions:
        groups.append({'params': convolutions, 'weight_decay': 0.0})
    return torch.optim.AdamW(groups, lr=settings['learning_rate'], fused=True,
                             betas=(settings['beta1'], settings['beta2']),
                             weight_decay=settings['weight_decay'])


def set_gradient_averaging(model, enabled):
    """
    Choose whether the next backward averages gradients over the ranks. Only the last micro-batch of
    a step needs this.
    """
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = enabled
    elif hasattr(model, 'set_requires_gradient_sync'):  # FSDP
        model.set_requires_gradient_sync(enabled)


def train_step(t, batch, fetch_next, micro_batch_size, grad_clip, seed=0):
    """
    One step on this rank's rows of the global batch, in micro-batches. t: a TrainState. The seed
    determines the random positions. Returns the loss, averaged over the ranks, and the next batch,
    which fetch_next() returns.
    """
    x, y = batch
    step_loss = torch.zeros((), device=x.device)
    parts = list(zip(x.split(micro_batch_size), y.split(micro_batch_size)))
    for i, (inputs, targets) in enumerate(parts):
        is_last = i + 1 == len(parts)
        set_gradient_averaging(t.called, is_last)
        torch.manual_seed(seed)  # all micro-batches draw the same random positions
        with t.autocast:
            loss = t.called(inputs, targets).mean() / len(parts)
        if is_last:  # the device still computes, so copying the next batch costs no time
            following = fetch_next()
        t.scaler.scale(loss).backward()
        step_loss += loss.detach()

    if grad_clip:
        t.scaler.unscale_(t.optimizer)
        torch.nn.utils.clip_grad_norm_(t.model.parameters(), grad_clip)
    t.scaler.step(t.optimizer)
    t.scaler.update()
    # DDP's gradients are views of its buckets. None would drop the views, and the next step's first
    # micro-batch would allocate gradients beside the buckets.
    t.optimizer.zero_grad(set_to_none=not isinstance(t.called, DistributedDataParallel))

    if t.runtime.world_size > 1:
        torch.distributed.all_reduce(step_loss)
        step_loss /= t.runtime.world_size
    return step_loss, following


def mean_over(windows, batch_tokens, runtime, measure):
    """Mean over all windows. measure(inputs, targets) returns one number per window."""
    n = len(windows)
    # Ranks that share a model (FSDP) run each pass together, so all need equally many windows.
    # Repeat the first windows until the number of windows is a multiple of the ranks.
    padded = windows.take(range(n + -n % runtime.world_size), axis=0, mode='wrap')
    # finite=False: validate() checks the numbers, and its message names the step.
    values = runtime.over_windows(padded, batch_tokens, measure, finite=False)
    return float(values[:n].mean())


def validate(model, windows, batch_tokens, step, recorder, runtime):
    """Log the loss and the attention entropy, both in nats; print the loss. Returns the loss."""
    def losses(inputs, targets):
        return model(inputs, targets).mean(1)

    def entropies(inputs, targets):
        with model.probe(attention_entropy) as entropy:
            model(inputs, tail=1)
        return torch.stack(entropy).mean((0, 2, 3))  # over layers, heads and queries: (B,)

    model.eval()
    loss = mean_over(windows, batch_tokens, runtime, losses)
    entropy = mean_over(windows[:ENTROPY_WINDOWS], batch_tokens, runtime, entropies)
    model.train()
    recorder.require_finite(loss, f'the validation loss became {loss} at step {step}')
    recorder.require_finite(entropy, f'the attention entropy became {entropy} at step {step}')
    recorder.log(step, val_loss=loss, entropy=entropy)
    runtime.print(f'step {step:6d}  validation loss {loss:.4f}  ppl {math.exp(min(loss, 700)):.2f}')
    return loss


def validate_and_save(recorder, t, windows, batch_tokens, step, best_val_loss, keep):
    """
    Validate, and write the checkpoints of a step. keep: also write step_N.pt. Returns the lowest
    validation loss so far.
    """
    # Log the pending losses before validation. This raises an error if one of them is not finite,
    # so that no checkpoint is overwritten.
    recorder.flush(step)
    val_loss = validate(t.model, windows, batch_tokens, step, recorder, t.runtime)
    if best_val_loss == math.inf:  # so that there is no best.pt without a last.pt to go on from
        save_last(recorder, t, step, best_val_loss)
    if val_loss < best_val_loss:
        best_val_loss = val_loss
        recorder.save('best.pt', t.model, step, best_val_loss=best_val_loss)
    if keep:
        recorder.save(f'step_{step}.pt', t.model, step, best_val_loss=best_val_loss)
    # Save last.pt last. If the run is killed between two saves, the old last.pt is still there. The
    # resumed run repeats the steps since then and saves all files again.
    save_last(recorder, t, step, best_val_loss)
    return best_val_loss


def save_last(recorder, t, step, best_val_loss):
    """Write last.pt. A resumed run starts from it."""
    recorder.flush(step)
    recorder.save('last.pt', t.model, step, best_val_loss=best_val_loss,
                  scaler=t.scaler.state_dict(), optimizer=unsharded(t.optimizer.state_dict()))


def finish(recorder, stopped_by, runtime):
    """End a run. A finished run gets its picture. A stopped run exits with its signal's code."""
    if runtime.is_main and not stopped_by:  # drawn last: if loss.png exists, the run has finished
        plots.draw_log(recorder.log_path, Path(recorder.folder, 'loss.png'))
    recorder.close()
    runtime.close()
    if stopped_by:  # exit as the signal would have, so that a calling shell script also stops
        sys.exit(128 + stopped_by)


def main(given=()):
    """given: names of the settings that the user set."""
    state, saved = None, last_saved(out_dir)
    if init_from == 'resume':  # what the user did not set stays as it was
        state = stopped_run(out_dir)
        globals().update(settings_to_resume(state, globals(), given))
    runtime = setup(device, dtype, seed)
    # Record the dtype that `auto` chose, because another machine may choose a different one on
    # resume.
    chosen = settings(globals()) | {'dtype': str(runtime.dtype).removeprefix('torch.')}
    check_settings(chosen, runtime)

    # data
    windows = Windows(dataset, 'train', block_size, seed, check=runtime.is_main)
    val_windows = Windows(dataset, 'val', block_size, seed, check=runtime.is_main)
    val_windows = val_windows.evenly_spaced(eval_windows)

    # model
    model = starting_model(state, chosen, given, windows)
    model.checkpoint_activations = checkpoint_activations
    if state:
        chosen['init_from'] = state['settings']['init_from']
    chosen |= {name: getattr(model.config, name) for name in MODEL}
    # A weight takes 4 bytes, each of its two Adam moments 4 more. last.pt holds all three, and
    # the old last.pt stays until the new one is written. best.pt and step_N.pt hold only weights.
    copies = 2 * 3 + 1 + len(keep_steps)
    checkpoints.require_space(out_dir, 4 * model.n_params() * copies)
    tokens_per_step = batch_size * block_size
    recorder = Recorder(out_dir, runtime, chosen, tokens_per_step, windows.tokenizer_state,
                        data=windows.checksums)
    if last_saved(out_dir) != saved:  # while this process did not yet hold the recorder's lock
        raise UserError(f'another process has just saved {out_dir}/last.pt. Start again.')
    model, called = place_model(model, fsdp, compile, runtime)

    # optimizer
    optimizer = new_optimizer(model, chosen)
    scaler = torch.amp.GradScaler(runtime.device.type, enabled=runtime.dtype == torch.float16)
    step, best_val_loss = 0, math.inf
    if state:
        step, best_val_loss = state['step'], state['best_val_loss']
        with resume_errors(out_dir):
            load_sharded(optimizer, state['optimizer'])
            if state['scaler']:  # empty if the run so far did not use float16
                scaler.load_state_dict(state['scaler'])
    state = None  # free the file's copy of weights and optimizer
    warmup = warmup_iters if warmup_iters >= 1 else round(warmup_iters * max_iters)
    note_long_warmup(warmup, max_iters)
    t = TrainState(model, called, optimizer, scaler, runtime.autocast(), runtime)

    recorder.begin(step)  # write config.json, and drop the log lines after this step
    runtime.print(f"{model.n_params():,} parameters, position={chosen['position']}, "
                  f'{runtime.device.type}, {runtime.dtype}; training from step {step} to '
                  f'{max_iters}, {tokens_per_step:,} tokens per step; writing to {out_dir}')

    # loop
    flops = 3 * sum(model.flops_per_token(block_size))  # backward costs as much as two forwards
    # FLOP/s that all devices can reach. MFU is the share of it that training reaches.
    peak_flops = matmul_flops(runtime.device, runtime.dtype) * runtime.world_size
    speed = Speed(step, max_iters, tokens_per_step, flops, peak_flops)
    stop, stopped_by = StopSignal(runtime), None
    first_step = step
    batch = rank_batch(windows, step, batch_size, runtime)
    while step < max_iters and not stopped_by:
        lr = learning_rate_at(step, learning_rate, min_lr, warmup, lr_decay_iters or max_iters)
        for group in optimizer.param_groups:
            group['lr'] = lr
        fetch_next = functools.partial(rank_batch, windows, step + 1, batch_size, runtime)
        loss, batch = train_step(t, batch, fetch_next, micro_batch_size, grad_clip, seed + step)
        recorder.pending.append(loss)
        step += 1

        if step % log_interval == 0 or step == max_iters:
            recorder.flush(step)  # writes the pending losses to the log
            runtime.print(f'step {step:6d}  loss {recorder.mean_loss():.4f}  lr {lr:.2e}  '
                          f'{speed.line(step)}')

        if step % eval_interval == 0 or step == max_iters or step in keep_steps:
            best_val_loss = validate_and_save(
                recorder, t, val_windows, micro_batch_size * block_size, step, best_val_loss,
                step in keep_steps)
            speed.restart(step)  # leave validation and saving out of the tokens per second
        if step == first_step + 1:
            speed.restart(step)  # the first step compiles

        if step < max_iters:
            stopped_by = stop.on_any_rank(step % log_interval == 0)

    if stopped_by:
        save_last(recorder, t, step, best_val_loss)
        runtime.print(f'{stopped_by.name}: saved step {step}; resume with '
                      f'--out_dir={out_dir} --init_from=resume')
    finish(recorder, stopped_by, runtime)


if __name__ == '__main__':
    # configure() adds the fields of position.Settings, such as rope_base, to this file's globals.
    # It returns the names of the settings that the user gave.
    main(configure(globals(), Settings))
