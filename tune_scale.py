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
from scales import read_scale_file, set_entry
from stage import (
    bin_means,
    cut_curve,
    open_model,
    print_rows,
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
init_scale: float | str = 'uniform'  # a number, or the best one in a file of --method=uniform;
                             # uniform: scale_uniform.json of this text
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
    rates, groups = VECTORS | {'channel': 0.03}, []
    for block in model.blocks:
        rates |= block.attn.position.vectors
    for part in tune.split(','):
        kind, _, rate = part.partition(':')
        vectors = small_vectors(model, 'head_scale' if kind == 'channel' else kind)
        if not vectors:
            raise UserError(f"tune has '{kind}', which this model does not have. Choose from "
                            f'{", ".join(rates)}.')
        groups.append({'kind': kind, 'names': [*vectors], 'params': [*vectors.values()],
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
    # AdamW keeps what else is in a group: kind, names, peak
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

        for group in optimizer.param_groups:
            group['lr'] = share_of_peak(step) * group['peak']
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(vectors, 1.0)  # only in the paper's code
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        for group in optimizer.param_groups:
            if group['kind'] == 'head_scale' and min_scale is not None:
                for p in group['params']:
                    p.data.clamp_(min=min_scale)  # Eq. (6)

        losses.append(step_loss.item())
        if not math.isfinite(losses[-1]):
            raise UserError(f'the loss became {losses[-1]} at step {step + 1}, so nothing was '
                            'written. Lower the learning rate in --tune=.')
        bar.set_postfix_str(f'loss {losses[-1]:.4f}', refresh=False)
    model.requires_grad_(False)
    return losses


def first_scale(folder, length, model, info):
    """The initial scale of every head: a number, or the best uniform one, linear in ln T."""
    if isinstance(init_scale, float):
        return init_scale
    path = init_scale
    if path == 'uniform':
        path = f'{result_path(folder, "scale_uniform", "", info, dataset)}.json'
    data, _ = read_scale_file(path, model, info)
    if 'best_by_length' not in data:
        raise UserError(f'{path} is no scale_uniform.json. Name one, or give a number.')
    return float(np.interp(math.log(length), np.log(data['lengths']), data['best_by_length']))


def tune_heads(model, info, folder, lengths, name, runtime):
    """
    Tune at each length, from the values of the length before. Returns the sets, {length: vectors},
    and a result: the loss of each step.
    """
    start = first_scale(folder, lengths[0], model, info)
    groups = vectors_to_tune(model)
    saved = small_vectors(model, 'head_scale')  # a scale file holds them in any case
    for group in groups:
        saved |= zip(group['names'], group['params'])
    model.head_scale = start  # replaces p.data, so the parameters in groups and saved change, too
    if 'channel' in [group['kind'] for group in groups]:
        model.head_scale = model.head_scale[..., None].expand(-1, -1, model.config.head_dim)

    n_tuned = sum(p.numel() for group in groups for p in group['params'])
    runtime.print(f'tuning {n_tuned} numbers on {max_iters * batch_size * sum(lengths):,} tokens')
    texts = [Windows(name, 'train', length, seed, info) for length in lengths]
    sets, losses = {}, []
    for length, data in zip(lengths, texts):
        losses += tune_vectors(model, groups, data, runtime)
        sets[length] = {key: p.detach().clone() for key, p in saved.items()}
    for group in groups:
        values = torch.cat([p.flatten() for p in group['params']])
        if not values.isfinite().all():
            raise UserError(f"{group['kind']} is not finite. Lower its rate in --tune=.")
        runtime.print(f"{group['kind']} {values.min():.3f} to {values.max():.3f}, "
                      f'mean {values.mean():.3f}')
    return sets, {'init_scale': start, 'tuned': tune, 'losses': losses}


# ---------------------------------------------------------------------- uniform

def fit_scale(position, best, L):
    """
    Least-squares fit of best = 1 + a ln(position / L) over the positions beyond L. The one free
    parameter is a. position, best: (n,). Returns a and R^2 = 1 - SS_res / SS_tot. R^2 is nan if
    all these values of `best` are equal. Source: Appendix B.
    """
    position, best = np.asarray(position, float), np.asarray(best, float)
    x, y = np.log(position[position > L] / L), best[position > L]
    a = float(x @ (y - 1) / (x @ x))
    rest, spread = y - 1 - a * x, y - y.mean()
    return a, 1 - rest @ rest / (spread @ spread) if spread.any() else math.nan


def same_scale(length, scale, config):
    """A set of a scale file with the same scale for every head."""
    return {'target_length': length, 'head_scale': [[scale] * config.n_head] * config.n_layer}


def search_uniform(model, info, T, name, runtime):
    """
    Read windows of T tokens with each candidate scale. Returns the set of the scale that is best at
    T, and a result: the loss in bins of block_size / 16 positions with each candidate, the best
    candidate per bin and per length, the fit of Appendix B, and the loss of the model as loaded
    with only the last L tokens.
    """
    first, last, step = candidate_range
    scales = np.arange(first, last + 1e-6, step).round(6)  # with `last`, in spite of rounding
    block_size = model.config.block_size
    data = Windows(name, 'val', T, info=info)
    samples = data.evenly_spaced(n_samples)
    cut = cut_curve(model, samples, tail, batch_tokens, runtime)
    lengths = cut['position']  # block_size, twice as many, four times ... T
    loss, at_length = [], []
    for scale in scales:
        model.head_scale = scale
        whole = {}  # {length of a pass: losses by position}
        for n in lengths if model.depends_on_length else [T]:
            whole[n] = runtime.over_windows(samples[:, :n + 1], batch_tokens, model,
                                            f'scale {scale}').mean(0)
        position, binned = bin_means(whole[T], block_size // 16)
        loss.append(binned)
        at_length.append([whole.get(n, whole[T])[max(0, n - tail):n].mean() for n in lengths])

    loss, at_length = np.array(loss), np.array(at_length)
    best, best_at_length = scales[loss.argmin(0)], scales[at_length.argmin(0)]
    a, r2 = fit_scale(position, best, block_size)
    print_rows(runtime.print, [
        {'length': n, 'best scale': best_at_length[i], 'loss': at_length[:, i].min(),
         f'with scale {scales[0]}': at_length[0, i],
         f'only the last {cut["context"]}': cut['loss'][i]} for i, n in enumerate(lengths)])
    runtime.print(f'scale = 1 + {a:.4f} ln(i / {block_size}), R2 {r2:.4f}')
    if {*best_at_length[1:]} & {scales[0], scales[-1]}:
        runtime.print('A best scale lies at an end of --candidate_range: widen it, because beyond '
                      'it may be a better one.')
    search = {'candidates': scales, 'loss_at_length': at_length, 'position': position, 'loss': loss,
              'best_by_position': best, 'fit_r2': r2, 'cut': cut,
              'samples': len(samples)}
    return same_scale(T, float(best_at_length[-1]), model.config), {
        'lengths': lengths, 'best_by_length': best_at_length, 'fit_a': a,
        'crossing': data.crossing, 'search': search}


def main(given):
    if method not in ('uniform', 'head'):
        raise UserError(f"method is '{method}'. Choose uniform or head.")
    runtime = setup(device, dtype, seed)
    model, info = open_model(init_from, out_dir, runtime, position, rope_scaling)
    if hasattr(model, 'refuse'):
        model.refuse()  # a model that transformers runs cannot be changed
    folder, config = results_folder(out_dir, init_from, given), model.config
    name = dataset or info['dataset']
    T = target_length or (8 if method == 'uniform' else 4) * config.block_size
    lengths = sorted({*target_lengths}) or [T]
    least = config.block_size
    if method == 'uniform' or target_lengths:  # which need bins, or a set, past block_size
        least += max(2, least // 8)
    if lengths[0] < least:
        raise UserError(f'target_length is {lengths[0]}; the model was trained at '
                        f'{config.block_size} tokens. Give at least {least}.')
    if batch_size < runtime.world_size:
        raise UserError(f'batch_size {batch_size} is less than the {runtime.world_size} ranks.')
    read_as = {'method': method, 'dataset': name, 'position_method': config.position,
               'rope_scaling': config.rope_scaling, 'weights_digest': info['digest']}
    if method == 'uniform':
        path = result_path(folder, 'scale_uniform', label, info, dataset)
        entry, result = search_uniform(model, info, T, name, runtime)
        # The fit as a scale file, with one uniform scale for each length past block_size
        fit = [same_scale(n, 1 + result['fit_a'] * math.log(n / config.block_size), config)
               for n in result['lengths'][1:]]
        if runtime.is_main:
            save_json(f'{path}_fit.json', read_as | {'sets': fit, 'fit_a': result['fit_a']})
    else:
        stem = 'scale_sets' if target_lengths else f'scale_head_{T}'
        path = result_path(folder, stem, label, info, dataset)
        sets, result = tune_heads(model, info, folder, lengths, name, runtime)
        entries = [set_entry(length, vectors) for length, vectors in sets.items()]
        entry = {'sets': entries} if target_lengths else entries[0]
    write_result(path, read_as | entry | result, settings(globals()), runtime, info)


if __name__ == '__main__':
    main(configure(globals()))
