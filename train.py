"""
Train a transformer on token files, without position encoding (NoPE) or with a position method.
Or fine-tune a trained model at another length. Sources: sections 4.1 and 4.2 of
"Length Generalization of Causal Transformers without Position Encoding"; the recipe of TinyLlama.

$ python train.py                                        # the demo model: 0.85M parameters, minutes
$ python train.py config/demo_rope.py                    # its twin with RoPE
$ python train.py --init_from=resume                     # resume out_dir; on a CPU bit for bit
$ python train.py config/finetune_demo.py config/yarn.py --out_dir=out/demo/rope_yarn
$ torchrun --nproc_per_node=8 train.py config/nope_1b.py # the paper's model on eight GPUs

Writes out_dir/last.pt, best.pt, config.json, log.jsonl, loss.png
"""

import datetime
import importlib
import json
import math
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

from configurator import UserError, configure, settings

import filelock
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from common import (
    can_compile,
    load_weights,
    model_config,
    read_checkpoint,
    read_model,
    save_checkpoint,
    setup,
)
from data import Windows
from model import ModelConfig, Transformer
from position import Settings, unused_settings

# output
out_dir = 'out/demo/nope'    # folder for checkpoints, log and pictures
init_from = 'scratch'        # scratch; resume (out_dir/last.pt); or a model: a checkpoint file, a
                             # folder, hf:ORG/NAME
eval_interval = 500          # steps between validations; each validation also saves last.pt
eval_windows = 128           # windows in each validation, always the same ones
log_interval = 100           # steps between printed lines
tracker = ''                 # also send the log to trackio or wandb; '': neither
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

NAMES = {*settings(globals()), *Settings.__dataclass_fields__}  # of all settings
OF_MODEL = NAMES & ModelConfig.__dataclass_fields__.keys()
# A resumed run takes its settings from last.pt, except OF_MACHINE, which are those of this command.
# The user may give a new value to any setting that is not in OF_RUN.
OF_MACHINE = {'out_dir', 'device', 'compile'}
OF_RUN = {'dataset', 'batch_size', 'seed', 'eval_windows', 'beta1', 'beta2', 'weight_decay',
          *OF_MODEL}
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)  # tensors, not shards of FSDP


# ---------------------------------------------------------------------- where a run begins

def resume(given):
    """
    The checkpoint of the stopped run in out_dir. Its settings become this run's, but for those of
    the machine and those that the user gave. Refuses to change what the run cannot change.
    """
    start = read_checkpoint(f'{out_dir}/last.pt')
    for name, value in start['settings'].items():
        if name not in OF_MACHINE | given:
            globals()[name] = value
        elif name in OF_RUN and globals()[name] != value:
            raise UserError(f'{name} is {globals()[name]!r}, but {out_dir} was trained with '
                            f'{value!r}. Leave it out.')
    return start


def fine_tune(given):
    """
    The trained model to begin from. Its sizes, position method and text become settings, but for
    those that the user gave.
    """
    global dataset, rope_scaling
    start = read_model(init_from, position if 'position' in given else None)
    if not isinstance(start['model'], dict):
        start['model'].refuse()  # a model that transformers runs cannot be trained here
    config = start['model_config']
    for name in OF_MODEL - given:
        globals()[name] = getattr(config, name)
    if 'dataset' not in given:
        dataset = start['settings'].get('dataset', dataset)
    if rope_scaling and ':' not in rope_scaling:  # 'yarn': stretch L to block_size
        rope_scaling += f':{block_size / config.pretrained_length:g}'
    # If the user chose another position method, it may not have the settings of the model's.
    for name, default in unused_settings(globals()).items():
        if name not in given:
            globals()[name] = default
    return start


def only_run(folder):
    """A lock that this process holds while it lives, so that no other one trains in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / 'run.lock')
    try:
        lock.acquire(timeout=0.5)
    except filelock.Timeout:
        raise UserError(f'Another process trains in {folder}. Choose another --out_dir=.') from None
    return lock


# ---------------------------------------------------------------------- model and optimizer

def wrap(model, runtime):
    """The model that training calls: compiled, and with several ranks in DDP, or split by FSDP."""
    compiles = can_compile(runtime, compile)
    if fsdp:
        from torch.distributed.fsdp import fully_shard
        for block in model.blocks:
            if compiles:
                block.compile(dynamic=False)
            fully_shard(block)
        return fully_shard(model)
    net = torch.compile(model, dynamic=False) if compiles else model
    if runtime.world_size > 1:
        # The bucket view avoids a second copy of all gradients.
        net = DistributedDataParallel(net, gradient_as_bucket_view=True)
    return net


def new_optimizer(model):
    """
    AdamW over all trained weights. Short convolutions have no weight decay, because it would pull
    their few weights to 0, where the convolution does nothing.
    """
    decayed, convolutions = [], []
    for name, p in model.named_parameters():
        if name.endswith('conv.w'):
            convolutions.append(p)
        elif p.requires_grad:
            decayed.append(p)
    groups = [{'params': decayed}]
    if convolutions:
        groups.append({'params': convolutions, 'weight_decay': 0.0})
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2),
                             weight_decay=weight_decay, fused=True)


def learning_rate_at(step):
    """The learning rate of a step: linear warm-up, then a cosine from learning_rate to min_lr."""
    warmup = warmup_iters if warmup_iters >= 1 else round(warmup_iters * max_iters)
    if step < warmup:
        return learning_rate * (step + 1) / warmup
    share = min(1.0, (step - warmup) / max(1, (lr_decay_iters or max_iters) - warmup))
    least = min(min_lr, learning_rate)  # whoever lowers the peak may forget min_lr
    return least + (learning_rate - least) * 0.5 * (1 + math.cos(math.pi * share))


# ---------------------------------------------------------------------- a run

def validate(model, windows, runtime):
    """The mean loss on the windows, and the mean attention entropy on four of them, in nats."""
    from entropy import entropies, has_entropy  # as a stage it imports what training does not need

    def mean_entropy(inputs, targets):
        of_heads, _ = entropies(model, inputs, targets)      # (n_layer, B, H, T)
        return of_heads.mean((0, 2, 3))

    model.eval()
    # not the compiled net, which would compile again for batches of another size
    tokens = micro_batch_size * block_size
    measured = {'val_loss': float(runtime.over_windows(windows, tokens, model).mean())}
    if has_entropy(model):
        entropy = runtime.over_windows(windows[:4], tokens, mean_entropy)
        measured['entropy'] = float(entropy.mean())
    model.train()
    return measured


SIGNALS = []  # the numbers of the signals that this process got


def on_signal(number, frame):
    """Ctrl-C or SIGTERM: main() will save and end. A second one ends the process at once."""
    SIGNALS.append(number)
    signal.signal(number, signal.SIG_DFL)
    os.write(2, b'\nfinishing this step, then saving; once more stops at once\n')


def begin_log(folder, step, chosen):
    """
    Write config.json, and cut log.jsonl after a step: a killed run may have logged steps that its
    last checkpoint does not hold. Returns the tracker, or None.
    """
    (folder / 'config.json').write_text(json.dumps(chosen, indent=1) + '\n')
    (folder / 'loss.png').unlink(missing_ok=True)  # it means that the run has finished
    log = folder / 'log.jsonl'
    log.touch()
    whole = [line for line in log.read_text().splitlines(True) if line.endswith('\n')]
    log.write_text(''.join(line for line in whole if json.loads(line)['step'] <= step))
    if tracker:
        track = importlib.import_module(tracker)  # trackio and wandb share these functions
        track.init(project='nope-length', name=out_dir, config=chosen)
        return track


def main(given):
    """given: the names of the settings that the user gave."""
    folder, is_resumed = Path(out_dir), init_from == 'resume'
    # The first rank locks the folder before it reads last.pt. Others may leave RANK behind, too.
    if not dist.is_torchelastic_launched() or os.environ['RANK'] == '0':
        lock = only_run(folder)  # noqa: F841, held until the end
        if not is_resumed and any(folder.glob('*.pt')):
            raise UserError(f'{folder} already holds a run. Resume it with --init_from=resume, '
                            'choose another --out_dir=, or remove it.')
    start = None  # the checkpoint that the run begins from; None: from scratch
    if is_resumed:
        start = resume(given - {'init_from'})  # this, too, becomes what it was when the run began
    elif init_from != 'scratch':
        start = fine_tune(given)
    runtime = setup(device, dtype, seed)
    if batch_size % (micro_batch_size * runtime.world_size):
        raise UserError(f'batch_size {batch_size} must be a multiple of micro_batch_size '
                        f'{micro_batch_size} x {runtime.world_size} ranks.')
    chosen = {name: value for name, value in globals().items() if name in NAMES}
    chosen['dtype'] = str(runtime.dtype).removeprefix('torch.')  # what auto stands for

    # data
    data = Windows(dataset, 'train', block_size, seed, info=start)
    val_windows = Windows(dataset, 'val', block_size, info=start).evenly_spaced(eval_windows)
    if is_resumed and start['n_tokens'] != data.n_tokens:
        raise UserError(f'{dataset} has changed since the run began. Prepare it as it was.')

    # model and optimizer
    config = asdict(start['model_config']) if start else {'vocab_size': data.meta['vocab_size']}
    config |= {name: chosen[name] for name in OF_MODEL}
    model = Transformer(model_config(config)).init_weights()
    if start:
        load_weights(model, start['model'], start['path'])
    model.checkpoint_activations = checkpoint_activations
    model.to(runtime.device)
    # first wrap(), because FSDP replaces the parameters that the optimizer must hold
    net, optimizer = wrap(model, runtime), new_optimizer(model)
    scaler = torch.amp.GradScaler(runtime.device.type, enabled=runtime.dtype == torch.float16)
    step, best_val_loss = 0, math.inf
    if is_resumed:
        step, best_val_loss = start['step'], start['best_val_loss']
        set_optimizer_state_dict(model, optimizer, start['optimizer'], options=WHOLE)
        if start['scaler']:  # that of float32 or bfloat16 is empty
            scaler.load_state_dict(start['scaler'])
    start = None  # frees the file's copy of weights and optimizer

    # log and checkpoints
    track = begin_log(folder, step, chosen) if runtime.is_main else None

    def log(step, **row):
        row = {'step': step, 'tokens': step * batch_size * block_size, **row}
        if runtime.is_main:
            with open(folder / 'log.jsonl', 'a') as file:
                file.write(json.dumps(row) + '\n')
            if track:
                track.log(row, step=step)

    def save(name, step, **more):
        """Write a checkpoint. All ranks must call it, because FSDP collects the weights."""
        weights = get_model_state_dict(model, options=WHOLE)
        if runtime.is_main:
            if not all(weight.isfinite().all() for weight in weights.values()):
                raise UserError(f'a weight is not finite at step {step}. {folder}/last.pt holds '
                                'the last good state: resume from it with a lower learning_rate.')
            save_checkpoint(folder / name, weights, model.config, tokenizer=data.tokenizer,
                            step=step, settings=chosen, n_tokens=data.n_tokens,
                            best_val_loss=best_val_loss, **more)

    # loop
    runtime.print(f'{model.n_params():,} parameters, position={position} '
                  f'{model.config.rope_scaling}, {runtime.device.type}, {runtime.dtype}; training '
                  f'from step {step} to {max_iters}, {batch_size * block_size:,} tokens per step; '
                  f'writing to {out_dir}')
    rows_of_rank = slice(runtime.rank, None, runtime.world_size)
    for number in signal.SIGTERM, signal.SIGINT:
        signal.signal(number, on_signal)
    stops = False
    pending = []  # losses that are not logged yet
    timed_step, time_then, is_first = step, time.perf_counter(), True
    autocast = runtime.autocast()
    while step < max_iters and not stops:
        # the batch; on a GPU this runs, and copies, while the GPU still computes the last step
        tokens = torch.from_numpy(data.batch(step, batch_size, rows_of_rank))
        if runtime.device.type == 'cuda':
            tokens = tokens.pin_memory().to(runtime.device, non_blocking=True)
        else:  # on mps a copy could still read what is already freed (pytorch issue 189690)
            tokens = tokens.to(runtime.device)

        # forward and backward
        torch.manual_seed(seed + step)  # for methods that draw, such as rope_random
        step_loss = torch.zeros((), device=runtime.device)
        micro_batches = tokens.split(micro_batch_size)
        for i, part in enumerate(micro_batches):
            is_last = i + 1 == len(micro_batches)  # only then average gradients over the ranks
            if fsdp:
                net.set_requires_gradient_sync(is_last)
            else:
                net.require_backward_grad_sync = is_last  # only DDP reads it
            with autocast:
                loss = net(part[:, :-1], part[:, 1:]).mean() / len(micro_batches)
            scaler.scale(loss).backward()
            step_loss += loss.detach()

        # update
        lr = learning_rate_at(step)
        for group in optimizer.param_groups:
            group['lr'] = lr
        if grad_clip > 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        step += 1

        # what to do after this step
        is_log_step = step % log_interval == 0 or step == max_iters
        is_eval_step = step % eval_interval == 0 or step == max_iters
        pending.append(step_loss)  # still on the device, because to read it would wait for the step
        if runtime.world_size == 1:
            stops = bool(SIGNALS)
        elif is_log_step:  # ranks stop together; they ask seldom, because it waits for the GPU
            n_signals = torch.tensor(len(SIGNALS), device=runtime.device)
            dist.all_reduce(n_signals)
            stops = bool(n_signals)

        if is_log_step or is_eval_step or stops:
            losses, pending = torch.stack(pending), []
            if runtime.world_size > 1:
                dist.all_reduce(losses)
                losses /= runtime.world_size
            for at, loss in enumerate(losses.tolist(), step - len(losses) + 1):
                if not math.isfinite(loss):
                    raise UserError(f'the loss became {loss} at step {at}. {folder}/last.pt, if it '
                                    'exists, holds the last good state: resume from it with a '
                                    'lower learning_rate or grad_clip.')
                log(at, loss=loss, lr=learning_rate_at(at - 1))
            seconds = (time.perf_counter() - time_then) / (step - timed_step)
            left = datetime.timedelta(seconds=round(seconds * (max_iters - step)))
            runtime.print(f'step {step:6d}  loss {losses.mean():.4f}  '
                          f'lr {lr:.2e}  {batch_size * block_size / seconds:9,.0f} '
                          f'tokens/s  {left} left')
        if is_eval_step:
            measured = validate(model, val_windows, runtime)
            log(step, **measured)
            runtime.print(f"step {step:6d}  validation loss {measured['val_loss']:.4f}")
            if measured['val_loss'] < best_val_loss:
                best_val_loss = measured['val_loss']
                save('best.pt', step)
        # last.pt after the log and best.pt: a run killed before this resumes from the older one
        if is_eval_step or stops:
            save('last.pt', step, scaler=scaler.state_dict(),
                 optimizer=get_optimizer_state_dict(model, optimizer, options=WHOLE))
        # the clock starts again here, so that neither compilation nor validation is timed
        if is_log_step or is_eval_step or is_first:
            timed_step, time_then, is_first = step, time.perf_counter(), False

    if runtime.is_main and step >= max_iters:
        import plots
        plots.draw_log(folder / 'log.jsonl', folder / 'loss.png')
    if track:
        track.finish()
    if runtime.world_size > 1:
        dist.barrier()
        time.sleep(0.1)  # gloo's thread must end before, or DDP may wait for it forever
        dist.destroy_process_group()
    if step < max_iters:
        runtime.print(f'saved step {step}; go on with --out_dir={out_dir} --init_from=resume')
        # 128 + the signal, as a shell does; a rank that got no signal itself says SIGTERM
        sys.exit(128 + max(SIGNALS, default=signal.SIGTERM))


if __name__ == '__main__':
    # configure() adds the fields of position.Settings, such as rope_base, to this file's globals.
    main(configure(globals(), Settings))
