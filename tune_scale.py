"""
Find the softmax scales that make a NoPE model read longer contexts than it was trained on.
Sections 2.4 and 3, Appendices A and B of "Length Generalization of Causal Transformers without
Position Encoding".

uniform: one scale for the whole model. The stage tries each candidate (UniformScale).
head:    one scale per head, tuned at target_length. All matrices stay frozen (HeadScale). Beyond
         the paper, --tune names what is tuned: scales per channel, gains of heads, norms; and
         --target_lengths tunes one set for each of several lengths.

$ python tune_scale.py --method=uniform              # run this first: head starts from its result
$ python tune_scale.py --target_length=640           # then run this: scale_head_640.json
$ python tune_scale.py --init_scale=1.0 --label=from_1          # ablation: from scales of 1
$ python tune_scale.py --min_scale=None --label=no_min          # ablation: without Eq. (6)
$ python tune_scale.py --tune=channel --label=channel           # a scale per head and channel
$ python tune_scale.py --target_lengths=[256,512,1024]          # one set per length
$ torchrun --nproc_per_node=8 tune_scale.py config/tune_8k.py   # 704 scales of the 1.1B model

uniform writes out_dir/scale_uniform.json and scale_uniform_fit.json. head writes
scale_head_TARGET.json, or scale_sets.json for target_lengths. Each file but the fit also gets a
.png. The stages that use a model, such as eval_ppl.py, read such a file with --scale=FILE
"""

import math

from configurator import UserError, configure, settings

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from common import can_compile, save_json, setup
from data import Windows
from model import VECTORS, small_vectors
from scales import read_scale_file, set_entry, way_of_reading
from stage import (
    cut_curve,
    open_model,
    print_rows,
    read_lengths,
    result_path,
    results_folder,
    write_result,
)

# which model, text and device
out_dir = 'out/demo/nope'    # folder of the run to read; results go there, too
init_from = 'last'           # last, best (of out_dir), a checkpoint file, a folder, hf:ORG/NAME
position: str | None = None  # position method; None: the checkpoint's
rope_scaling: str | None = None   # extension of RoPE, such as yarn:4; None: the checkpoint's
label = ''                   # ends the names of files; '': how the model is read, and text
dataset = ''                 # a folder of data/; '': the text that the model was trained on
device = 'auto'              # auto, cpu, cuda, mps
dtype = 'auto'               # auto, float32, bfloat16, float16
# what to tune
method = 'head'              # uniform or head
target_length: int | None = None  # L', the context to extend to; None: 8 times block_size for
                                  # uniform, 4 times for head
target_lengths: list[int] = []  # head: tune a set per length; each starts from the set before it
# uniform: each candidate is used for the whole model
candidate_range: list[float] = [1.0, 2.4, 0.1]  # first, last, step, in units of 1/sqrt(D)
n_samples = 128              # validation windows over which a loss is the mean
tail = 64                    # the loss at T tokens is the mean over the last `tail` of them
batch_tokens = 16384         # tokens per forward pass
# head: the recipe of Appendix A
tune = 'head_scale'          # head_scale, channel, head_gain, norm ..., several with commas;
                             # NAME:RATE sets a learning rate
init_scale: float | None = None  # None: the best one in scale_uniform.json, found on this text
min_scale: float | None = 1.0   # head_scale: least value after each step, Eq. (6); None: no limit
warmup_iters = 20            # steps in which the learning rate rises linearly
max_iters = 200              # steps; a cosine lowers the learning rate to a tenth of its peak
batch_size = 8               # sequences of target_length per step, all devices together
micro_batch_size = 8         # sequences per forward pass on one device; lower it to save memory
checkpoint_activations = False  # recompute activations in backward: less memory, more time
seed = 314                   # sets the order of the tuning data; pretraining uses another seed
compile = True               # torch.compile the step


# ---------------------------------------------------------------------- head

def vectors_to_tune(model):
    """
    What the setting `tune` names, as AdamW's groups of parameters. channel is head_scale with one
    number per channel of a head instead of one per head.
    """
    rates = VECTORS | {'channel': 0.03}
    for block in model.blocks:
        rates |= block.attn.position.vectors
    groups = []
    for part in tune.split(','):
        kind, _, rate = part.partition(':')
        if kind not in rates:
            raise UserError(f"tune has '{kind}', which this model does not have. Choose from "
                            f'{", ".join(rates)}.')
        vectors = small_vectors(model, 'head_scale' if kind == 'channel' else kind)
        groups.append({'kind': kind, 'params': [*vectors.values()],
                       'peak': float(rate or rates[kind])})
    return groups


def share_of_peak(step):
    """The share of its peak that a learning rate has: linear warm-up, then a cosine to a tenth."""
    if step < warmup_iters:
        return (step + 1) / warmup_iters
    share = (step - warmup_iters) / max(1, max_iters - warmup_iters)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share))


def tune_vectors(model, groups, data, runtime):
    """
    HeadScale (Appendix A): minimize the mean loss, Eq. (5), over a few numbers, with every matrix
    frozen. AdamW without weight decay; after each step no head_scale is below min_scale, Eq. (6).
    Gradients flow back through all layers, but none of a matrix is computed. groups: of
    vectors_to_tune(). Returns the loss of each step.
    """
    vectors = [p.requires_grad_(True) for group in groups for p in group['params']]
    # AdamW keeps what else is in a group: kind and peak
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    scaler = torch.amp.GradScaler(runtime.device.type, enabled=runtime.dtype == torch.float16)
    model.checkpoint_activations = checkpoint_activations
    net = torch.compile(model, dynamic=False) if can_compile(runtime, compile) else model
    rows_of_rank = slice(runtime.rank, None, runtime.world_size)
    losses = []
    bar = tqdm(range(max_iters), f'at {data.block_size}', disable=None if runtime.is_main else True)
    for step in bar:
        tokens = torch.from_numpy(data.batch(step, batch_size, rows_of_rank)).to(runtime.device)
        step_loss = torch.zeros((), device=runtime.device)
        for part in tokens.split(micro_batch_size):
            with runtime.autocast():
                loss = net(part[:, :-1], part[:, 1:]).mean() * len(part) / batch_size  # Eq. (5)
            scaler.scale(loss).backward()
            step_loss += loss.detach()
        if runtime.world_size > 1:  # so few numbers need no DistributedDataParallel
            for tensor in [step_loss, *(p.grad for p in vectors)]:
                dist.all_reduce(tensor)

        losses.append(step_loss.item())
        bar.set_postfix_str(f'loss {losses[-1]:.4f}', refresh=False)
        if not math.isfinite(losses[-1]):
            raise UserError(f'the loss became {losses[-1]} at step {step + 1}, so nothing was '
                            'written. Lower the learning rate in --tune=.')

        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(vectors, 1.0)  # the paper's code does, its text is silent
        for group in optimizer.param_groups:
            group['lr'] = share_of_peak(step) * group['peak']
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        for group in groups:
            if group['kind'] == 'head_scale' and min_scale is not None:
                for p in group['params']:
                    p.data.clamp_(min=min_scale)  # Eq. (6)
    model.requires_grad_(False)
    return losses


def first_scale(folder, length, model, info):
    """The initial scale of every head: a number, or the best uniform one, linear in ln T."""
    if init_scale is not None:
        return init_scale
    path = result_path(folder, 'scale_uniform', '', info, dataset)
    data, _ = read_scale_file(f'{path}.json', model, info)
    return float(np.interp(math.log(length), np.log(data['lengths']), data['best_by_length']))


def tune_heads(model, info, folder, text, runtime):
    """
    Tune at each length, from the values of the length before. Returns the path of the result, and
    the result: a scale file with the loss of each step.
    """
    c = model.config
    lengths = sorted(target_lengths) or [target_length or 4 * c.block_size]
    stem = 'scale_sets' if target_lengths else f'scale_head_{lengths[0]}'
    path = result_path(folder, stem, label, info, dataset)
    # to set model.head_scale sets all layers: it is a property of Transformer
    model.head_scale = start = first_scale(folder, lengths[0], model, info)
    if 'channel' in tune:
        model.head_scale = torch.full((c.n_layer, c.n_head, c.head_dim), start)
    groups = vectors_to_tune(model)
    # a scale file holds all head scales in any case
    kinds = {'head_scale', *(group['kind'] for group in groups)} - {'channel'}
    # All are opened first, because a text that is too short shall not end a tuning of hours.
    texts = [Windows(text, 'train', length, seed, info) for length in lengths]
    sets, losses = [], []
    for data in texts:
        losses += tune_vectors(model, groups, data, runtime)
        sets.append(set_entry(data.block_size, model, kinds))
    for group in groups:
        values = torch.cat([p.flatten() for p in group['params']])
        runtime.print(f"{group['kind']}: {len(values)} numbers from {values.min():.3f} to "
                      f'{values.max():.3f}')
    result = {'sets': sets} if target_lengths else sets[0]
    return path, result | {'init_scale': start, 'tuned': tune, 'losses': losses}


# ---------------------------------------------------------------------- uniform

def fit_scale(position, best, L):
    """
    Least-squares fit of best = 1 + a ln(position / L) over the positions beyond L. The one free
    parameter is a. position, best: (n,). Returns a and R^2 = 1 - SS_res / SS_tot. R^2 is nan if
    all these values of `best` are equal. Source: Appendix B.
    """
    x, y = np.log(position[position > L] / L), best[position > L]
    a = float(x @ (y - 1) / (x @ x))
    rest = y - 1 - a * x
    return a, 1 - (rest ** 2).mean() / y.var() if len({*y}) > 1 else math.nan


def search_uniform(model, info, folder, text, runtime):
    """
    Find the uniform scale that is best at T tokens. Returns the path of the result, and the result:
    a scale file with that scale; the loss with each candidate, the best one at each position and
    length, and the loss of the model as loaded with only the last L tokens. Also writes the fit of
    Appendix B, as a scale file, too.
    """
    block_size = model.config.block_size
    path = result_path(folder, 'scale_uniform', label, info, dataset)
    T = target_length or 8 * block_size
    first, last, step = candidate_range
    scales = np.arange(first, last + 1e-6, step).round(6)  # with `last`, in spite of rounding
    data = Windows(text, 'val', T, info=info)
    samples = data.evenly_spaced(n_samples)
    cut = cut_curve(model, samples, tail, batch_tokens, runtime)
    lengths = cut['position']  # block_size, twice as many, four times ... T

    loss, loss_at_length = [], []  # (scales, bins) and (scales, lengths)
    for scale in scales:
        model.head_scale = scale
        position, binned, at_length = read_lengths(model, samples, lengths, tail, batch_tokens,
                                                   runtime)
        loss.append(binned)
        loss_at_length.append([losses.mean() for losses in at_length.values()])
    loss, loss_at_length = np.array(loss), np.array(loss_at_length)
    best_by_position, best_by_length = scales[loss.argmin(0)], scales[loss_at_length.argmin(0)]
    a, r2 = fit_scale(position, best_by_position, block_size)

    rows = []
    for i, n in enumerate(lengths):
        of_scales = loss_at_length[:, i]
        rows.append({'length': n, 'best scale': best_by_length[i], 'loss': of_scales.min(),
                     f'with scale {scales[0]}': of_scales[0],
                     f"only the last {cut['context']}": cut['loss'][i]})
    print_rows(runtime.print, rows)
    runtime.print(f'scale = 1 + {a:.4f} ln(i / {block_size}), R2 {r2:.4f}')
    if {*best_by_length[1:]} & {scales[0], scales[-1]}:
        runtime.print('A best scale lies at an end of --candidate_range: widen it, because beyond '
                      'it may be a better one.')

    sets = []  # the fit as a scale file: one scale for all heads at each length
    for n in lengths[1:]:
        model.head_scale = 1 + a * math.log(n / block_size)
        sets.append(set_entry(n, model, {'head_scale'}))
    if runtime.is_main:
        save_json(f'{path}_fit.json', way_of_reading(info) | {'sets': sets})
    search = {'candidates': scales, 'position': position, 'loss': loss,
              'best_by_position': best_by_position, 'loss_at_length': loss_at_length, 'fit_r2': r2,
              'cut': cut}
    model.head_scale = best_by_length[-1]
    return path, set_entry(T, model, {'head_scale'}) | {
        'lengths': lengths, 'best_by_length': best_by_length, 'fit_a': a,
        'crossing': data.crossing, 'search': search}


SEARCHES = {'uniform': search_uniform, 'head': tune_heads}


def main(given):
    runtime = setup(device, dtype, seed)
    model, info = open_model(init_from, out_dir, runtime, position, rope_scaling)
    if hasattr(model, 'refuse'):
        model.refuse()  # a model that transformers runs cannot be changed
    folder, text = results_folder(out_dir, init_from, given), dataset or info['dataset']
    path, result = SEARCHES[method](model, info, folder, text, runtime)
    result |= {'method': method, 'dataset': text}
    write_result(path, result, settings(globals()), runtime, info)


if __name__ == '__main__':
    main(configure(globals()))
