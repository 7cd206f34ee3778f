"""
Train a transformer without position encoding (NoPE), or a twin with another position method, on token files; fine-tune
one at another length. Sections 4.1 and 4.2 of "Length Generalization of Causal Transformers without Position
Encoding"; the recipe is TinyLlama's.

$ python train.py                                        # the demo model: 0.85M parameters on a laptop, minutes
$ python train.py config/demo_rope.py                    # its twin with RoPE
$ python train.py --init_from=resume                     # go on after a stop: to the last bit as if never stopped
$ python train.py config/finetune_demo.py config/yarn.py --out_dir=out/demo/rope_yarn
$ torchrun --nproc_per_node=8 train.py config/nope_1b.py # the paper's model on eight GPUs

Writes out_dir/last.pt, best.pt, step_N.pt, config.json, log.jsonl, loss.png
"""

import json
import math
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

import checkpoint
from configurator import at_least, configure, settings
from corpus import Windows
from model import ModelConfig, Transformer, matrices
from runtime import (
    clock,
    compiled,
    learning_rate_at,
    load_sharded,
    lock_file,
    matmul_flops,
    new_figure,
    note,
    require_memory,
    save_json,
    save_png,
    setup,
    sharded,
    unlock_file,
    unsharded,
    write_text,
)

# output
out_dir = 'out/demo/nope'    # checkpoints, log and pictures go here
init_from = 'scratch'        # scratch, resume (out_dir/last.pt), or the model to start from: a file, hf:ORG/NAME
eval_interval = 500          # steps between validations; last.pt is saved at each
eval_windows = 128           # validation windows read at each, the same ones every time
log_interval = 100           # steps between lines on screen
keep_steps: list[int] = []   # steps whose checkpoint is kept as step_N.pt; Figure 7 compares two
# data
dataset = 'stdlib'           # a folder of data/, or a mixture by weight: 'slimpajama:0.694,starcoder:0.306'
block_size = 128             # L, the training context in tokens
batch_size = 16              # sequences in the global batch of one step, over all devices
micro_batch_size = 16        # sequences at once on one device; lower it when memory runs out
# model
position: str | None = None  # none (NoPE), rope, logn, alibi, kerple, fire, t5, cope or xl; None: none, or init_from's
rope_scaling: str | None = None  # extend RoPE: pi, ntk, dynamic_ntk or yarn, by block_size / L of init_from; or yarn:4
n_layer = 4
n_head = 8
n_kv_head = 4                # key/value heads, each shared by n_head / n_kv_head query heads
n_embd = 128
n_hidden = 384               # inner width of SwiGLU
rope_base = 10000.0          # of position='rope'
dape_kernel = 0              # DAPE on top of the position method: 1, 3, 5 ... keys wide; 0 for none
dape_width = 32              # channels between its two convolutions
dape_residual = True         # add the bias itself too: Eq. (3) of DAPE V2, not (2)
dape_cheat = False           # let DAPE see later keys (section 4.5): to show what a leak looks like, of no other use
# optimizer
max_iters = 2200             # steps
learning_rate = 2e-3         # peak
min_lr = 2e-4                # at the end of the cosine; a tenth of the peak is the rule of thumb
warmup_iters: float = 200    # linear from 0; below 1: that share of max_iters
lr_decay_iters: int | None = None  # length of the cosine in steps; None: max_iters
weight_decay = 0.1           # on every weight, norms included, as TinyLlama
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0              # global norm; 0 for none
# machine
device = 'auto'              # auto, cpu, cuda, cuda:1, mps
dtype = 'auto'               # of activations: auto, float32, bfloat16, float16; weights and optimizer stay float32
compile = True               # torch.compile the model
fsdp = False                 # under torchrun: split the model over the ranks, for one that a device cannot hold
checkpoint_activations = False  # recompute activations in backward: less memory, a third more time
seed = 1337                  # of initial weights and data order

MODEL_SETTINGS = ('position', 'rope_scaling', 'rope_base', 'dape_kernel', 'dape_width', 'dape_residual', 'dape_cheat',
                  'n_layer', 'n_head', 'n_kv_head', 'n_embd', 'n_hidden', 'block_size')


def rank_batch(windows, step, batch_size, runtime):
    """This rank's rows of the global batch: inputs and targets, each (batch_size / ranks, block_size)."""
    rows = slice(runtime.rank, None, runtime.world_size)
    tokens = torch.from_numpy(windows.batch(step, batch_size, rows))
    if runtime.device.type == 'cuda':  # copied while the GPU still computes the step before
        tokens = tokens.pin_memory().to(runtime.device, non_blocking=True)
    else:
        tokens = tokens.to(runtime.device)
    return tokens[:, :-1], tokens[:, 1:]


def draw_loss(log_path, png_path):
    """Training and validation loss against tokens, from log.jsonl alone."""
    rows = [json.loads(line) for line in Path(log_path).read_text().splitlines()]
    train = [(r['tokens'] / 1e6, r['loss']) for r in rows if 'loss' in r]
    val = [(r['tokens'] / 1e6, r['val_loss']) for r in rows if 'val_loss' in r]
    figure, axis = new_figure()
    if train:
        axis.plot(*zip(*train), color='#b0c4de', lw=0.8, label='training, each step')
    if val:
        axis.plot(*zip(*val), color='#1f4e9c', marker='o', ms=3, label='validation')
    axis.set(xlabel='tokens read (millions)', ylabel='loss (nats per token)', title='Loss')
    axis.legend()
    save_png(figure, png_path)


def check_settings(runtime):
    """Everything that can be refused before work starts."""
    at_least(1, globals(), 'batch_size', 'micro_batch_size', 'max_iters', 'eval_interval', 'log_interval',
             'eval_windows', 'block_size')
    at_least(0, globals(), 'learning_rate', 'min_lr', 'warmup_iters', 'weight_decay', 'grad_clip')
    at_least(0, globals(), 'beta1', 'beta2', below=1)
    if init_from != 'resume' and Path(out_dir, 'last.pt').exists():
        raise ValueError(f'{out_dir} already holds a run (last.pt). Go on with --init_from=resume, choose another '
                         '--out_dir=, or remove it.')
    if batch_size % (micro_batch_size * runtime.world_size):
        fits = math.gcd(micro_batch_size, batch_size // runtime.world_size)
        raise ValueError(f'batch_size {batch_size} must be a multiple of micro_batch_size {micro_batch_size} x '
                         f'{runtime.world_size} ranks. '
                         + (f'Take --micro_batch_size={fits}.' if batch_size % runtime.world_size == 0 else
                            'Take another batch_size.'))
    if fsdp and runtime.world_size == 1:
        raise ValueError('fsdp splits a model over the ranks of torchrun. Start it with torchrun --nproc_per_node=N, '
                         'or without --fsdp=True.')


def resume_differences(old, new):
    """Refuse to resume into another model; return the names of other settings that changed since."""
    changed = [name for name in new if name in old and old[name] != new[name] and name not in ('init_from', 'out_dir')]
    for name in changed:
        if name in MODEL_SETTINGS:
            raise ValueError(f'{name} is {new[name]} but {out_dir}/last.pt was trained with {old[name]}. '
                             f'Resume with --{name}={old[name]}, or train into another --out_dir=.')
    return changed


def require_same_data(old, new):
    """
    Refuse to resume on other text. old, new: {source: checksum of its tokens}, None in checkpoints
    from before that was kept.
    """
    if old is None:
        note(f'{out_dir}/last.pt does not say which text it was trained on; '
             'it is taken to be the same')
        return
    for one, other in (new, old), (old, new):
        for name, checksum in one.items():
            if checksum not in other.values():
                last = f'{out_dir}/last.pt'
                raise ValueError(f'dataset {name} has other tokens now than when {last} was made, '
                                 'or was not part of it then. Prepare it as it was, or train into '
                                 f'another --out_dir= with --init_from={last}.')


def finetune_position(config):
    """What our settings change in the position method of a model that is given, whose config this is."""
    L = config['rope_length'] or config['block_size']
    change = {'position': position or config['position'], 'rope_length': L}
    if rope_scaling:
        change['rope_scaling'] = rope_scaling if ':' in rope_scaling else f'{rope_scaling}:{block_size / L:g}'
    elif rope_scaling == '' or change['position'] != 'rope':
        change['rope_scaling'] = ''
    return change


def require_own_settings(given, run_settings, config, path):
    """Refuse a setting that the user gave where the model in `path`, whose config this is, has another."""
    may_change = 'position', 'rope_scaling', 'block_size'
    for name in MODEL_SETTINGS:
        own = name in given and name not in may_change
        if own and run_settings[name] != config[name]:
            raise ValueError(f'{name} is {run_settings[name]}, but the model was trained with '
                             f'{config[name]}: {path}. Leave {name} out; the model keeps its own.')


def lines_until(log_path, step):
    """
    The lines of a log up to a step, since a kill may have left steps after the checkpoint. And the
    numbers of the lines that cannot be read, as a full disk or a kill leaves them.
    """
    kept, unreadable = [], []
    lines = log_path.read_bytes().splitlines() if log_path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            if json.loads(line)['step'] <= step:
                kept.append(line.decode())
        except (ValueError, LookupError, TypeError):  # no JSON, no step in it, or none that is a number
            unreadable.append(number)
    return kept, unreadable


def main(given=()):
    """given: the names of the settings that the user gave."""
    runtime = setup(device, dtype, seed)
    check_settings(runtime)
    run_settings = settings(globals())
    train_windows, val_windows = (Windows(dataset, split, block_size, seed, check=True)
                                  for split in ('train', 'val'))
    val_tokens = val_windows.fixed(eval_windows)
    n_val = len(val_tokens)
    if fsdp:  # its ranks go through each pass together: so many windows for each, some again
        val_tokens = val_tokens.take(range(n_val + -n_val % runtime.world_size), axis=0, mode='wrap')
    tokenizer = train_windows.tokenizer_state
    run_settings |= {'position': position or 'none', 'rope_scaling': rope_scaling or ''}

    # the model: new, resumed, or started from another's weights
    state = None
    if init_from == 'scratch':
        config = ModelConfig(vocab_size=train_windows.vocab_size, **{k: run_settings[k] for k in MODEL_SETTINGS})
        require_memory(4 * config.least_params(),  # in float32
                       f'a model of n_layer={n_layer}, n_embd={n_embd}, n_hidden={n_hidden}')
        model = Transformer(config).init_weights()
    else:
        path = Path(out_dir, 'last.pt') if init_from == 'resume' else init_from
        state = checkpoint.load(path, position, optimizer=init_from == 'resume')
        checkpoint.require_tokenizer(state | {'path': path}, tokenizer, dataset)
        if init_from == 'resume':
            run_settings['init_from'] = state['settings']['init_from']  # where the run began
        config = state['model_config'] | {'block_size': block_size}
        if run_settings['init_from'] != 'scratch':  # a model that was given has the sizes it has
            config |= finetune_position(state['model_config'])
            config = asdict(ModelConfig(**config))
            require_own_settings(given, run_settings, config, path)
            run_settings |= {name: config[name] for name in MODEL_SETTINGS}
            runtime.print('the model is as in', path, *(f'{name}={config[name]}' for name in MODEL_SETTINGS))
        if init_from == 'resume':
            require_same_data(state.get('data'), train_windows.checksums)
            for name in resume_differences(state['settings'], run_settings):
                runtime.print(f"resuming with {name} = {run_settings[name]} (was {state['settings'][name]})")
        model = Transformer(ModelConfig(**config))
        checkpoint.require_weights(model, state['model'], path)
        model.load_state_dict(state['model'])
    model.checkpoint_activations = checkpoint_activations

    raw_model = model
    if fsdp and model.config.position in ('t5', 'fire'):
        raise ValueError(f'fsdp cannot split position {model.config.position}: PyTorch shards neither a table that all '
                         'layers share nor a single number. Train it without --fsdp=True.')
    model = sharded(model, runtime, compile) if fsdp else model.to(runtime.device)
    weights = [p for p in model.parameters() if p.requires_grad]  # all but the head scales
    optimizer = torch.optim.AdamW(weights, lr=learning_rate, betas=(beta1, beta2), weight_decay=weight_decay,
                                  fused=runtime.device.type in ('cpu', 'cuda'))
    scaler = torch.amp.GradScaler(runtime.device.type, enabled=runtime.dtype == torch.float16)
    step, best_val_loss = 0, math.inf
    if init_from == 'resume':
        load_sharded(optimizer, state['optimizer'])
        if state['scaler']:  # empty where the run so far was not in float16
            scaler.load_state_dict(state['scaler'])
        step, best_val_loss = state['step'], state['best_val_loss']
    state = None  # the file's copy of weights and optimizer

    # 4 bytes each for a weight and its two Adam moments: last.pt and its successor while it is written; best.pt and
    # each kept step have the weights alone
    checkpoint.require_space(out_dir, 4 * model.n_params() * (2 * 3 + 1 + len(keep_steps)))
    log_path = Path(out_dir, 'log.jsonl')
    lock = lock_file(log_path, runtime)
    if runtime.is_main:
        save_json(Path(out_dir, 'config.json'), run_settings)
        for part in Path(out_dir).glob('*.pt.part'):  # a kill while writing left it
            part.unlink()
        lines, unreadable = lines_until(log_path, step if step else -1)
        write_text(log_path, ''.join(f'{line}\n' for line in lines))
        if unreadable:
            print(f'{log_path}: dropped what could not be read, line {", ".join(map(str, unreadable))}')

    if not fsdp:
        model = compiled(model, runtime, compile)
    if runtime.world_size > 1 and not fsdp:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True,  # or there are two copies of all gradients
                                        device_ids=[runtime.device] if runtime.device.type == 'cuda' else None)

    warmup = warmup_iters if warmup_iters >= 1 else round(warmup_iters * max_iters)
    n_micro = batch_size // (micro_batch_size * runtime.world_size)
    tokens_per_step = batch_size * block_size
    step_flops = 3 * sum(raw_model.flops_per_token(block_size)) * tokens_per_step  # backward costs two forwards
    ceiling = matmul_flops(runtime.device, runtime.dtype) * runtime.world_size
    runtime.print(f'{raw_model.n_params():,} parameters, position={raw_model.config.position}, {runtime.device.type}, '
                  f'{runtime.dtype}; steps {step} to {max_iters} of {tokens_per_step:,} tokens into {out_dir}')

    stop_signal = []  # filled by SIGTERM or Ctrl-C: finish the step, save, stop

    def on_signal(number, frame):
        stop_signal.append(signal.Signals(number).name)
        signal.signal(number, signal.SIG_DFL)
        if runtime.is_main:
            os.write(2, b'\nfinishing this step, then saving; once more stops at once\n')  # print() is not safe here

    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, on_signal)

    def write_log(**row):
        if runtime.is_main:
            with open(log_path, 'a') as file:
                file.write(json.dumps(row) + '\n')

    def save_checkpoint(name, **more):
        weights = unsharded(raw_model.state_dict())
        if runtime.is_main:
            checkpoint.save(Path(out_dir, name), **checkpoint.model_state(
                raw_model, tokenizer, step, weights, best_val_loss=best_val_loss,
                settings=run_settings, data=train_windows.checksums, **more))

    def stop_run(what):
        last_path = Path(out_dir, 'last.pt')
        good = f'{last_path} holds the last good state: resume from it' if last_path.exists() else 'Start again'
        raise ValueError(f'{what}. {good} with a lower learning_rate or grad_clip.')

    def save_last():
        finite = [weight.isfinite().all() for weight in weights]
        if not all(flag.full_tensor() if fsdp else flag for flag in finite):  # every rank must see every shard's
            stop_run(f'a weight became infinite or not a number at step {step}')
        save_checkpoint('last.pt', optimizer=unsharded(optimizer.state_dict()), scaler=scaler.state_dict())

    losses = []  # of the steps that are not in the log yet, still on the device: reading them would stall it

    def flush_losses():
        """Write pending losses to the log; stop if one is not finite, before any checkpoint is overwritten."""
        values = torch.stack(losses).tolist() if losses else []
        first = step - len(values) + 1
        for i, loss in enumerate(values):
            if not math.isfinite(loss):
                stop_run(f'the loss became {loss} at step {first + i}')
            write_log(step=first + i, tokens=(first + i) * tokens_per_step, loss=loss)
        losses.clear()
        return values

    clock_start, clock_step = time.perf_counter(), step
    x, y = rank_batch(train_windows, step, batch_size, runtime)
    while step < max_iters:
        lr = learning_rate_at(step, learning_rate, min_lr, warmup, lr_decay_iters or max_iters)
        for group in optimizer.param_groups:
            group['lr'] = lr
        step_loss = torch.zeros((), device=runtime.device)
        # cast once, where autocast would in each micro-batch; backward leads through the cast to the float32 weights
        half = {name: p.to(runtime.dtype) for name, p in matrices(model).items() if not fsdp}
        for i, (mx, my) in enumerate(zip(x.split(micro_batch_size), y.split(micro_batch_size))):
            if runtime.world_size > 1 and not fsdp:  # average gradients over ranks only once a step
                model.require_backward_grad_sync = i == n_micro - 1
            with runtime.autocast():
                loss = functional_call(model, half, (mx, my)).mean() / n_micro
            if i == n_micro - 1 and step + 1 < max_iters:
                x, y = rank_batch(train_windows, step + 1, batch_size, runtime)
            scaler.scale(loss).backward()
            step_loss += loss.detach()
        if grad_clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(weights, grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if runtime.world_size > 1:
            torch.distributed.all_reduce(step_loss)
            step_loss /= runtime.world_size
        losses.append(step_loss)

        if step % log_interval == 0 or step == max_iters:
            values = flush_losses()
            seconds = (time.perf_counter() - clock_start) / max(1, step - clock_step)  # a step, since the last line
            clock_start, clock_step = time.perf_counter(), step
            runtime.print(f'step {step:6d}  loss {sum(values) / len(values):.4f}  lr {lr:.2e}  '
                          f'{tokens_per_step / seconds:9,.0f} tokens/s  MFU {step_flops / seconds / ceiling:4.0%}  '
                          f'{clock(seconds * (max_iters - step))} left')

        if step % eval_interval == 0 or step == max_iters or step in keep_steps:
            flush_losses()
            val_losses = runtime.over_windows(val_tokens, micro_batch_size * block_size,
                                              lambda inputs, targets: raw_model(inputs, targets).mean(1),
                                              finite=False)  # what is not, stop_run() reports
            val_loss = float(val_losses[:n_val].mean())
            if not math.isfinite(val_loss):
                stop_run(f'the validation loss became {val_loss} at step {step}')
            write_log(step=step, tokens=step * tokens_per_step, val_loss=val_loss)
            runtime.print(f'step {step:6d}  validation loss {val_loss:.4f}  ppl {math.exp(min(val_loss, 700)):.2f}')
            if val_loss < best_val_loss:
                best_val_loss = val_loss
                save_checkpoint('best.pt')
            if step in keep_steps:
                save_checkpoint(f'step_{step}.pt')
            save_last()  # after the others: a run killed in between comes back here and writes them again
            clock_start, clock_step = time.perf_counter(), step

        stopping = stop_signal
        if runtime.world_size > 1:  # ranks must stop at the same step, so they ask each other: on GPUs, rarely
            signals = [[]] * runtime.world_size
            if step % log_interval == 0 or runtime.device.type == 'cpu':
                torch.distributed.all_gather_object(signals, stop_signal)
            stopping = sum(signals, [])
        if stopping and step < max_iters:
            flush_losses()
            save_last()
            runtime.print(f'{stopping[0]}: saved step {step}; go on with --init_from=resume')
            break

    if runtime.is_main and step >= max_iters:  # so where it stands the run is whole
        draw_loss(log_path, Path(out_dir, 'loss.png'))
    unlock_file(lock)
    runtime.close()
    if step < max_iters:  # as of a process that the signal ended: a script does not go on
        sys.exit(128 + signal.Signals[stopping[0]])


if __name__ == '__main__':
    main(configure(globals()))
