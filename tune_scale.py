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
from pathlib import Path

from configurator import UserError, configure, settings

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from common import bin_means, can_compile, compiled_to_read, learning_rate_at, save_json, setup
from data import Windows
from model import small_vectors, vector_kind, vector_of
from stage import (
    cut_curve,
    open_model,
    print_rows,
    put_vectors,
    read_scale_file,
    result_path,
    results_folder,
    use_sets,
    write_result,
)

# which model, text and device
out_dir = 'out/demo/nope'    # folder of the run to read; results go there, too
init_from = 'last'           # last, best (of out_dir), a checkpoint file, a folder, hf:ORG/NAME
position: str | None = None  # position method; None: the checkpoint's
rope_scaling: str | None = None   # extension of RoPE, such as yarn:4; None: the checkpoint's
label = ''                   # appended to the names of the files that this stage writes
dataset = ''                 # a folder of data/; '': the text that the model was trained on
device = 'auto'              # auto, cpu, cuda, mps
dtype = 'auto'               # auto, float32, bfloat16, float16
# what to tune
method = 'head'              # uniform or head
target_length: int | None = None  # L', the context to extend to; None: 8 times block_size for
                                  # uniform, 4 times for head
target_lengths: list[int] = []  # head: tune a set per length; each starts from the set before it
tail = 64                    # the loss at T tokens is the mean over the last `tail` of them
# uniform: each candidate is used for the whole model
candidate_range: list[float] = [1.0, 2.4, 0.1]  # first, last, step, in units of 1/sqrt(D)
# head: the recipe of Appendix A
tune = 'head_scale'          # head_scale, channel, head_gain, norm ..., several with commas;
                             # NAME:RATE sets a learning rate
init_scale: float | str = 'uniform'  # a number, or uniform: the best one in scale_uniform.json
min_scale: float | None = 1.0   # head_scale: least value after each step, Eq. (6); None: no limit
warmup_iters = 20            # steps in which the learning rate rises linearly
max_iters = 200              # steps; a cosine lowers the learning rate to a tenth of its peak
batch_size = 8               # sequences of target_length per step, all devices together
micro_batch_size = 8         # sequences per forward pass on one device; lower it to save memory
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0              # largest global norm of the gradient; 0: no clipping
checkpoint_activations = False  # recompute activations in backward: less memory, more time
seed = 314                   # sets the order of the tuning data; pretraining uses another seed
# how to measure, and the machine
n_samples = 128              # each curve is the mean over this many validation windows
batch_tokens = 16384         # tokens per forward pass of a measurement
compile = True               # torch.compile the tuning step, and the passes of a long search


# ---------------------------------------------------------------------- head

def vectors_to_tune(model):
    """
    [(kind, learning rate, {name: parameter})] of what the setting `tune` names. `channel` is
    head_scale with one number per channel of a head.
    """
    parts = []
    for part in tune.split(','):
        kind, _, rate = part.partition(':')
        name = 'head_scale' if kind == 'channel' else kind
        vectors = {key: p for key, p in small_vectors(model).items() if vector_kind(key) == name}
        if not vectors:
            known = dict.fromkeys(map(vector_kind, small_vectors(model)))
            raise UserError(f"tune has '{kind}', which this model does not have. Choose from "
                            f'channel, {", ".join(known)}.')
        default = 0.03 if kind == 'channel' else vector_of(next(iter(vectors))).rate
        parts.append((kind, float(rate or default), vectors))
    return parts


def tune_vectors(model, data, runtime):
    """
    HeadScale (Appendix A): minimize the mean loss, Eq. (5), over a few numbers, with every matrix
    frozen. AdamW without weight decay; linear warm-up, then a cosine to a tenth of the rate; after
    each step no head_scale is below min_scale, Eq. (6). Gradients flow back through all layers, but
    no gradient of a matrix is computed. Returns the loss of each step.
    """
    model.checkpoint_activations = checkpoint_activations
    groups = [{'params': [*parameters.values()], 'peak': rate, 'kind': kind}
              for kind, rate, parameters in vectors_to_tune(model)]
    vectors = [p.requires_grad_(True) for group in groups for p in group['params']]
    optimizer = torch.optim.AdamW(groups, betas=(beta1, beta2), weight_decay=0.0, fused=True)
    scaler = torch.amp.GradScaler(runtime.device.type, enabled=runtime.dtype == torch.float16)
    net = torch.compile(model, dynamic=False) if can_compile(runtime, compile) else model
    losses = []
    bar = tqdm(range(max_iters), f'at {data.block_size}', disable=None if runtime.is_main else True)
    for step in bar:
        share = learning_rate_at(step, 1.0, 0.1, warmup_iters, max_iters)
        for group in optimizer.param_groups:
            group['lr'] = share * group['peak']

        rows = slice(runtime.rank, None, runtime.world_size)
        tokens = torch.from_numpy(data.batch(step, batch_size, rows)).to(runtime.device)
        step_loss = torch.zeros((), device=runtime.device)
        for part in tokens.split(micro_batch_size):
            with runtime.autocast():
                loss = net(part[:, :-1], part[:, 1:]).mean() * len(part) / batch_size  # Eq. (5)
            scaler.scale(loss).backward()
            step_loss += loss.detach()
        if runtime.world_size > 1:  # so few numbers need no DistributedDataParallel
            for tensor in [step_loss, *(p.grad for p in vectors)]:
                dist.all_reduce(tensor)

        if grad_clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(vectors, grad_clip)
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
    if init_scale != 'uniform':
        return float(init_scale)
    path = f'{result_path(folder, "scale_uniform", "", info)}.json'
    if not Path(path).exists():
        raise UserError(f'{path} does not exist. Run tune_scale.py --method=uniform first, or give '
                        'a number, such as --init_scale=1.2.')
    data, _ = read_scale_file(path, model, info)
    return float(np.interp(math.log(length), np.log(data['lengths']), data['best_by_length']))


def measure(model, samples, runtime):
    """
    Over the samples, in nats: the curves of a picture (loss and entropy in bins of block_size / 16
    positions), the loss by position, (T,), and the entropy of each head in the last bin.
    """
    from entropy import entropy_and_loss  # a stage of its own, needed only for pictures
    width = model.config.block_size // 16
    heads, losses = entropy_and_loss(model, samples, width, batch_tokens, runtime)
    curves = {'loss': bin_means(losses, width)[1], 'entropy': heads.mean((0, 1))}
    return curves, losses, heads[..., -1]


def tune_heads(model, info, folder, lengths, name, runtime):
    """Tune at each length, from the values of the length before. Returns the sets and a result."""
    start = first_scale(folder, lengths[0], model, info)
    samples = Windows(name, 'val', lengths[-1], info=info).evenly_spaced(n_samples)
    cut = cut_curve(model, samples, tail, batch_tokens, runtime)
    curves, rows = {}, []

    def measure_as(what):
        curves[what], losses, last_entropy = measure(model, samples, runtime)
        rows.append({'scales': what, 'mean loss': losses.mean()})
        return last_entropy

    measure_as('as loaded')
    parts = vectors_to_tune(model)
    # A scale file holds the head scales in any case.
    saved = {key: p for key, p in small_vectors(model).items() if vector_kind(key) == 'head_scale'}
    for _, _, vectors in parts:
        saved |= vectors
    original = {key: p.clone() for key, p in saved.items()}
    model.head_scale = start
    if 'channel' in [kind for kind, _, _ in parts]:
        model.head_scale = model.head_scale[..., None].expand(-1, -1, model.config.head_dim)
    measure_as(f'uniform {start:.2f}')

    sets, losses = {}, []
    n_tuned = sum(p.numel() for _, _, vectors in parts for p in vectors.values())
    for length in lengths:
        runtime.print(f'tuning {n_tuned} numbers on windows of {length} tokens '
                      f'({max_iters * batch_size * length:,} tokens in all)')
        losses += tune_vectors(model, Windows(name, 'train', length, seed, info), runtime)
        sets[length] = {key: p.detach().clone() for key, p in saved.items()}
    for kind, _, vectors in parts:
        values = torch.cat([p.flatten() for p in vectors.values()])
        runtime.print(f'{kind} {values.min():.3f} to {values.max():.3f}, mean {values.mean():.3f}')
    if target_lengths:  # measured as other stages will read them
        put_vectors(model, original)
        use_sets(model, sets)
    last_entropy = measure_as(tune)
    print_rows(runtime.print, rows)
    return sets, {'init_scale': start, 'losses': losses, 'curve_length': lengths[-1],
                  'position': bin_means(range(lengths[-1]), model.config.block_size // 16)[0],
                  'curves': curves, 'cut': cut, 'samples': len(samples), 'tuned': tune,
                  'last_entropy': last_entropy, 'tuned_numbers': n_tuned,
                  'tuning_tokens': max_iters * batch_size * sum(lengths)}


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


def search_uniform(model, info, T, name, runtime):
    """
    Read windows of T tokens with each candidate scale. Returns the best scale at each length and a
    result: the loss in bins of block_size / 16 positions with each candidate, the best candidate
    per bin and per length, the fit of Appendix B, and the loss of the model as loaded with only the
    last L tokens. The picture shows the entropy of six candidates.
    """
    first, last, step = candidate_range
    n = math.floor((last - first) / step + 1e-6)
    scales = [round(first + i * step, 6) for i in range(n + 1)]
    plotted = np.linspace(0, n, 6).round().astype(int)
    block_size = model.config.block_size
    samples = Windows(name, 'val', T, info=info).evenly_spaced(n_samples)
    net = compiled_to_read(model, runtime, compile, len(samples) * len(scales), T)
    cut = cut_curve(model, samples, tail, batch_tokens, runtime)
    lengths = cut['position']  # block_size, twice as many, four times ... T
    own, loss, entropy, at_length = model.head_scale, [], [], []
    for i, scale in enumerate(scales):
        model.head_scale, curves = scale, {}
        if i in plotted:
            curves, losses, _ = measure(model, samples, runtime)
        else:
            losses = runtime.over_windows(samples, batch_tokens, net, f'scale {scale}').mean(0)
        position, binned = bin_means(losses, block_size // 16)
        loss.append(binned)
        entropy.append(curves.get('entropy'))
        at_length.append([losses[max(0, n - tail):n].mean() for n in lengths])
    model.head_scale = own

    loss, at_length, scales = np.array(loss), np.array(at_length), np.array(scales)
    best, best_at_length = scales[loss.argmin(0)], scales[at_length.argmin(0)]
    a, r2 = fit_scale(position, best, block_size)
    rows = zip(lengths, best_at_length, at_length.min(0), at_length[0], cut['loss'])
    print_rows(runtime.print, [
        {'length': n, 'best scale': scale, 'loss': lowest, f'with scale {scales[0]}': with_first,
         f'only the last {cut["context"]}': of_cut}
        for n, scale, lowest, with_first, of_cut in rows])
    runtime.print(f'scale = 1 + {a:.4f} ln(i / {block_size}), R2 {r2:.4f}')
    return best_at_length, {
        'lengths': lengths, 'best_by_length': best_at_length, 'fit_a': a, 'search': {
            'position': position, 'candidates': scales.tolist(), 'loss': loss, 'entropy': entropy,
            'best_by_position': best, 'best_loss_by_position': loss.min(0), 'fit_a': a,
            'fit_r2': r2, 'loss_at_length': at_length, 'cut': cut, 'samples': len(samples)}}


# ---------------------------------------------------------------------- scale files

def set_entry(length, vectors):
    """
    A set of a scale file: for each kind of vector a list with one row per layer, or {parameter
    name: row} if a layer has none or several. Numbers have as few digits as float32 allows.
    """
    entry = {}
    for name, vector in vectors.items():
        vector = vector[:, 0] if vector.dim() > 1 and vector.shape[1] == 1 else vector
        row = vector.float().numpy(force=True).astype(str).astype(float).tolist()
        entry.setdefault(vector_kind(name), {})[name] = row
    for kind, rows in entry.items():
        if [name.split('.')[1] for name in rows] == [str(layer) for layer in range(len(rows))]:
            entry[kind] = list(rows.values())
    return {'target_length': length} | entry


def same_scale(length, scale, config):
    """A set with the same scale for every head."""
    return {'target_length': length, 'head_scale': [[scale] * config.n_head] * config.n_layer}


def main(given):
    runtime = setup(device, dtype, seed)
    model, info = open_model(init_from, out_dir, runtime, position, rope_scaling)
    folder, config = results_folder(out_dir, init_from, given), model.config
    name = dataset or info['settings'].get('dataset', '')
    lengths = [target_length or (8 if method == 'uniform' else 4) * config.block_size]
    lengths = sorted(target_lengths) or lengths
    least = config.block_size + (method == 'uniform' or bool(target_lengths))
    if target_lengths and (target_length or method == 'uniform'):
        raise UserError('target_lengths is for --method=head, without target_length.')
    if method not in ('uniform', 'head') or min(lengths) < least:
        raise UserError(f'method is {method}, for {min(lengths)} tokens. Give uniform or head, and '
                        f'at least {least} tokens.')
    if batch_size % runtime.world_size:
        raise UserError(f'batch_size {batch_size} must be a multiple of the '
                        f'{runtime.world_size} ranks.')
    about = {'method': method, 'dataset': name, 'position_method': config.position,
             'rope_scaling': config.rope_scaling, 'weights_digest': info['digest']}
    if method == 'uniform':
        path = result_path(folder, 'scale_uniform', label, info)
        best, result = search_uniform(model, info, lengths[0], name, runtime)
        entry = same_scale(lengths[0], float(best[-1]), config)
        # The fit as a scale file, with one uniform scale per length
        fit = [same_scale(n, 1 + result['fit_a'] * math.log(n / config.block_size), config)
               for n in result['lengths'] if n > config.block_size]
        if runtime.is_main:
            save_json(f'{path}_fit.json', about | {'sets': fit, 'fit_a': result['fit_a']})
    else:
        stem = 'scale_sets' if target_lengths else f'scale_head_{lengths[0]}'
        path = result_path(folder, stem, label, info)
        sets, result = tune_heads(model, info, folder, lengths, name, runtime)
        entries = [set_entry(length, vectors) for length, vectors in sets.items()]
        entry = {'sets': entries} if target_lengths else entries[0]
    write_result(path, about | entry | result, settings(globals()), runtime, info)


if __name__ == '__main__':
    main(configure(globals()))
