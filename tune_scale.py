"""
Find the softmax scales that make a NoPE model trained at L = block_size read longer contexts. Sections 2.4 and 3,
Appendices A and B of "Length Generalization of Causal Transformers without Position Encoding".

uniform: one scale for the whole model, by trying each candidate (UniformScale).
head:    one scale per head, tuned at target_length while every weight stays frozen (HeadScale). Beyond the paper, it
         can tune other small vectors too (tune), and one set for each of several lengths (target_lengths).

$ python tune_scale.py --method=uniform              # the demo model, first this: its best scale is where head starts
$ python tune_scale.py --method=head                 # then this
$ python tune_scale.py --target_lengths=[256,512,1024]             # one set per length, used by the context at hand
$ torchrun --nproc_per_node=8 tune_scale.py config/tune_8k.py      # the paper's 704 scales of the 1.1B model

Writes out_dir/scale_uniform.json, scale_uniform_fit.json; scale_head_TARGET.json; or scale_sets.json; and a .png. Every
stage takes such a file as --scale=FILE
"""

import math
import time
from pathlib import Path

import numpy as np
import torch

import checkpoint
from configurator import at_least, configure, settings
from corpus import Windows
from runtime import (
    Progress,
    bin_means,
    compiled,
    learning_rate_at,
    new_figure,
    provenance,
    result_path,
    running_mean,
    save_png,
    setup,
)

# what to tune
out_dir = 'out/demo/nope'    # the run to read; the scale file goes there too
init_from = 'last'           # last or best (of out_dir), a checkpoint file, a Hugging Face folder, or hf:ORG/NAME
position: str | None = None  # read the checkpoint with this position method; None: as it says
rope_scaling: str | None = None  # extend RoPE, such as yarn:4; None: as the checkpoint says
method = 'head'              # uniform or head
target_length: int | None = None  # L', tokens to extend to; None: 8L for uniform, 4L for head. May exceed what is used
target_lengths: list[int] = []  # head: tune a set of scales for each of these, each from the one before
dataset: str | None = None   # a folder of data/; None: the one the model was trained on
label = ''                   # appended to the names of the files written
# uniform: candidates, each tried at every position
candidate_range: list[float] = [1.0, 2.4, 0.1]  # first, last, step, in units of 1/sqrt(d); the paper's step is 0.01
compare: list[str] = []      # other checkpoint files of the run, fitted in the same picture (Figure 7)
last = 64                    # the best scale for length T is the best over the last so many positions before T
# head: the recipe of Appendix A
tune = 'scale'               # scale (the paper's), out (a gain per head), norm (the norms' gains), or scale,out,norm
init_scale: float | str = 'uniform'  # where every head starts: a number, or uniform (the best of scale_uniform.json)
min_scale: float | None = 1.0   # concentration constraint, Eq. (6): clamped after every step; None: no constraint
learning_rate = 0.1          # of scales, in units of 1/sqrt(d); the paper uses 0.05 or 0.1
gain_learning_rate = 0.02    # of tune=out
norm_learning_rate = 0.01    # of tune=norm
warmup_iters = 20            # linear from 0
max_iters = 200              # steps; the rate falls to a tenth of its peak on a cosine
batch_size = 8               # sequences of target_length in one step, over all devices
micro_batch_size = 8         # sequences at once on one device; lower it when memory runs out
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0              # global norm; 0 for none
checkpoint_activations = False  # recompute activations in backward: less memory for long targets
seed = 314                   # of the tuning data's order: another than pretraining's
# machine
n_samples = 128              # validation windows behind each curve
batch_tokens = 16384         # tokens in one forward pass of a measurement
device = 'auto'              # auto, cpu, cuda, mps
dtype = 'auto'               # auto, float32, bfloat16, float16
compile = True               # torch.compile the tuning step


def curves(model, windows, n_samples, batch_tokens, runtime, label=None):
    """
    Loss and attention entropy by position, and the entropy of each head at the end of the window.
    Returns loss (T,) and mean entropy (T,) in nats, means over samples (and heads), and entropy (n_layer, n_head) of
    the last L / 64 positions. In half precision q and k are rounded before their entropy is taken:
    close enough for the pictures of this stage; entropy.py measures in float32.
    """
    tail = max(1, model.config.block_size // 64)

    def measure(inputs, targets):
        losses, entropy = model.losses_and_entropy(inputs, targets)       # (B, T), (n_layer, B, H, T)
        heads = entropy[..., -tail:].mean(-1).transpose(0, 1).flatten(1)  # (B, n_layer * H)
        return torch.cat((losses, entropy.mean((0, 2)), heads), dim=1)

    T = windows.block_size
    rows = runtime.over_windows(windows.fixed(n_samples), batch_tokens, measure, label).mean(0)
    return rows[:T], rows[T:2 * T], rows[2 * T:].reshape(-1, model.config.n_head)


# ----------------------------------------------------------------------------- uniform

def fit_scale(position, best, L):
    """
    Least-squares fit of best = 1 + a ln(position / L) over positions beyond L: Appendix B, one free parameter.
    position, best: (n,). Returns a and R^2 = 1 - SS_res / SS_tot (nan where all of `best` is one value).
    """
    position, best = np.asarray(position, float), np.asarray(best, float)
    beyond = position > L
    x, y = np.log(position[beyond] / L), best[beyond]
    a = (x * (y - 1)).sum() / (x * x).sum()
    total = ((y - y.mean()) ** 2).sum()
    return a, 1 - ((y - 1 - a * x) ** 2).sum() / total if total else math.nan


def shown_candidates(n):
    """Indices of the up to six of n candidates whose curves are drawn."""
    return sorted(set(np.linspace(0, n - 1, 6).round().astype(int).tolist()))


def search_uniform(model, windows, scales, L, runtime):
    """
    Loss by position under each candidate, and entropy, which costs as much again, under those that are drawn (None for
    the others); the best candidate per position and per length; the fit.
    """
    loss, entropy, at = [], [], []
    T = windows.block_size
    lengths = sorted({T, *(L * 2 ** i for i in range(int(math.log2(T / L)) + 1))})
    for i, scale in enumerate(scales):
        model.head_scale, label = scale, f'scale {scale:.2f}'
        if i in shown_candidates(len(scales)):
            by_position, mean_entropy, _ = curves(model, windows, n_samples, batch_tokens, runtime, label)
            entropy.append(bin_means(mean_entropy, L // 16)[1])
        else:
            by_position = runtime.over_windows(windows.fixed(n_samples), batch_tokens, model, label).mean(0)
            entropy.append(None)
        position, binned = bin_means(by_position, L // 16)
        loss.append(binned)
        at.append([by_position[max(0, n - last):n].mean() for n in lengths])
    loss, at = np.array(loss), np.array(at)  # (scales, bins), (scales, lengths)
    best = np.array(scales)[loss.argmin(0)]  # per position
    a, r2 = fit_scale(position, best, L)
    return {'position': position, 'candidates': scales, 'loss': loss, 'entropy': entropy,
            'best_by_position': best, 'best_loss_by_position': loss.min(0), 'fit_a': a, 'fit_r2': r2,
            'lengths': lengths, 'loss_at_length': at, 'best_by_length': np.array(scales)[at.argmin(0)]}


def draw_uniform(result, path):
    """Figure 2: loss and entropy by position for some candidates. Figure 7: best scale per position and its fit."""
    L, searches = result['block_size'], result['searches']
    figure, axes = new_figure(1, 3, width=5.2)
    search = next(iter(searches.values()))
    position = np.array(search['position'])  # of all searches
    beyond = position > L
    ln_s = np.log(position[beyond] / L)
    for rank, i in enumerate(shown_candidates(len(search['candidates']))):
        style = {'color': plt_color('viridis', rank / 6), 'label': f"{search['candidates'][i]:g}"}
        axes[0].plot(running_mean(position), running_mean(search['loss'][i]), **style)
        axes[1].plot(position, search['entropy'][i], **style)
    best = running_mean(search['best_loss_by_position'])
    axes[0].plot(running_mean(position), best, color='black', ls='--', lw=1, label='the best')
    axes[0].set(ylabel='loss (nats per token)', title='Loss under uniform scales (Figure 2)')
    axes[1].set(ylabel='mean attention entropy (nats)', title='Entropy under uniform scales (Figure 2)')
    for axis in axes[:2]:
        axis.legend(title=r'scale ($1/\sqrt{d}$)', ncols=2)
    for rank, (name, search) in enumerate(searches.items()):
        sign = '-' if search['fit_a'] < 0 else '+'
        axes[2].plot(position, search['best_by_position'], '.', ms=3, color=f'C{rank}', label=f'{name}: best scale')
        axes[2].plot(position[beyond], 1 + search['fit_a'] * ln_s, color=f'C{rank}',
                     label=f"1 {sign} {abs(search['fit_a']):.3f} ln s,  R² = {search['fit_r2'] or math.nan:.3f}")
    axes[2].plot(position[beyond], (1 + 0.1 * ln_s) ** 2, color='grey', ls='--', label='YaRN: (1 + 0.1 ln s)²')
    axes[2].set(ylabel=r'best scale ($1/\sqrt{d}$)', title='Best scale per position, s = i / L (Figure 7)')
    axes[2].legend()
    for axis in axes:
        axis.set_xlabel('position i (tokens)')
        axis.axvline(L, color='black', ls=':', lw=1)
    save_png(figure, path)


def plt_color(cmap, share):
    from matplotlib import colormaps
    return colormaps[cmap](share)


# ----------------------------------------------------------------------------- head

def first_scale(init_scale, folder, info, target_length):
    """The initial scale of every head: a number, or the best of a uniform file for target_length (in ln T between)."""
    if not isinstance(init_scale, str) and init_scale > 0:
        return init_scale
    if init_scale != 'uniform':
        raise ValueError(f"init_scale is '{init_scale}'. Give a number above 0, or uniform.")
    path = Path(folder, 'scale_uniform.json')
    if not path.exists():
        raise ValueError(f'{path} does not exist. Run tune_scale.py --method=uniform first, or give --init_scale=1.2.')
    data, _ = checkpoint.read_scale_file(path, info)
    try:
        lengths, scales = (np.array(data[key], float) for key in ('lengths', 'best_by_length'))
        whole = lengths.shape == scales.shape == (len(lengths),) and min(*lengths, *scales) > 0
    except (LookupError, TypeError, ValueError):
        whole = False
    if not whole:
        raise ValueError(f'{path} needs lengths and best_by_length, a number above 0 for each. '
                         'Make it again, with tune_scale.py --method=uniform.')
    if target_length > max(lengths):
        print(f"{path} ends at {max(data['lengths'])} tokens: tuning for {target_length} starts from its last scale")
    return float(np.interp(math.log(target_length), np.log(lengths), scales))


def vectors_to_tune(model):
    """{name: (parameter, learning rate)} of the vectors that `tune` names."""
    kinds = {'scale': ('head_scale', learning_rate), 'out': ('head_gain', gain_learning_rate),
             'norm': ('norm.weight', norm_learning_rate)}
    unknown = set(tune.split(',')) - set(kinds)
    if unknown:
        raise ValueError(f"tune is '{tune}'. Choose scale, out, norm, or several of them: scale,out,norm.")
    return {name: (p, rate) for name, p in model.named_parameters()
            for ending, rate in [kinds[kind] for kind in tune.split(',')] if name.endswith(ending)}


def tune_vectors(model, windows, runtime):
    """
    HeadScale, Eq. (5): minimise the loss over the scales alone, from where they stand. Returns the losses, in nats.
    No gradient is computed for any matrix; only attention's backward and the products on its way remain.
    """
    model.checkpoint_activations = checkpoint_activations
    vectors = vectors_to_tune(model)
    parameters = [p.requires_grad_(True) for p, _ in vectors.values()]
    optimizer = torch.optim.AdamW([{'params': [p], 'peak': rate} for p, rate in vectors.values()], betas=(beta1, beta2),
                                  weight_decay=0.0, fused=runtime.device.type in ('cpu', 'cuda'))
    scaler = torch.amp.GradScaler(runtime.device.type, enabled=runtime.dtype == torch.float16)
    forward = compiled(model, runtime, compile)
    progress, losses = Progress(max_iters, f'tuning at {windows.block_size}', runtime.is_main), []
    rows = slice(runtime.rank, None, runtime.world_size)  # this rank's share of each batch
    for step in range(max_iters):
        for group in optimizer.param_groups:
            group['lr'] = learning_rate_at(step, group['peak'], 0.1 * group['peak'], warmup_iters, max_iters)
        tokens = torch.from_numpy(windows.batch(step, batch_size, rows)).to(runtime.device)
        step_loss = torch.zeros((), device=runtime.device)
        for micro in tokens.split(micro_batch_size):
            with runtime.autocast():
                loss = forward(micro[:, :-1], micro[:, 1:]).mean() * len(micro) / batch_size
            scaler.scale(loss).backward()
            step_loss += loss.detach()
        if runtime.world_size > 1:  # n_layer x n_head numbers: a plain sum over ranks will do
            for tensor in [step_loss, *(p.grad for p in parameters)]:
                torch.distributed.all_reduce(tensor)
        if grad_clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if min_scale is not None:  # Eq. (6), on the float32 scales the next step starts from
            model.head_scale = model.head_scale.clamp(min=min_scale)
        losses.append(step_loss.item())  # a step takes so long that this wait does not count
        if not math.isfinite(losses[-1]):
            raise ValueError(f'the loss became {losses[-1]} at step {step + 1}; nothing was written. '
                             'Lower learning_rate, or start from a uniform scale.')
        progress.update(step + 1, f'loss {losses[-1]:.4f}  mean scale {model.head_scale.mean():.3f}')
    model.requires_grad_(False)
    return losses


def draw_head(result, path):
    """Figure 4: loss and entropy, uniform against head scale. Figure 5: scale against entropy. And the scales."""
    last = result['sets'][-1] if 'sets' in result else result
    L, target, scales = result['block_size'], last['target_length'], np.array(last['head_scale'])
    figure, axes = new_figure(2, 2, width=6.0, height=3.8)
    for rank, (name, curve) in enumerate(result['curves'].items()):
        style = {'color': ('#999999', '#e08214', '#1f4e9c')[rank], 'label': name}
        axes[0, 0].plot(running_mean(result['position']), running_mean(curve['loss']), **style)
        axes[0, 1].plot(result['position'], curve['entropy'], **style)
    axes[0, 0].set(xlabel=f'position (tokens); dotted: L = {L} and the tuned length {target}',
                   ylabel='loss (nats per token)', title='Loss by position (Figure 4)')
    axes[0, 1].set(xlabel='position (tokens)', ylabel='mean attention entropy (nats)',
                   title='Entropy by position (Figure 4)')
    for axis in axes[0]:
        axis.legend()
        axis.axvline(L, color='black', ls=':', lw=1)
        axis.axvline(target, color='black', ls=':', lw=1)
    n_layer, n_head = scales.shape
    for layer, (x, y) in enumerate(zip(scales, result['last_entropy'])):
        if n_layer <= 8 or layer % 3 == 1:  # the paper shows layers 1, 4, 7 ... 19 of 22
            color = plt_color('viridis', layer / max(1, n_layer - 1))
            axes[1, 0].scatter(x, y, s=18, color=color, label=f'layer {layer}')
    axes[1, 0].set(xlabel=r'tuned scale ($1/\sqrt{d}$)', ylabel=f'entropy at position {result["curve_length"]} (nats)',
                   title='Scale and entropy of each head (Figure 5)')
    axes[1, 0].legend(fontsize=8)
    image = axes[1, 1].imshow(scales, aspect='auto', cmap='magma')
    axes[1, 1].set(xlabel='head', ylabel='layer', title=f'Tuned scales, {scales.min():.2f} to {scales.max():.2f}')
    axes[1, 1].grid(False)
    axes[1, 1].set_yticks(range(0, n_layer, max(1, n_layer // 11)))
    axes[1, 1].set_xticks(range(0, n_head, max(1, n_head // 8)))
    figure.colorbar(image, ax=axes[1, 1])
    save_png(figure, path)


# ----------------------------------------------------------------------------- main

def main():
    began, runtime = time.perf_counter(), setup(device, dtype, seed)
    reading = runtime.device, position, rope_scaling, runtime.dtype
    model, info = checkpoint.load_model(init_from, out_dir, *reading)
    _ = model.head_scale  # a model that is read through transformers has none, and says so
    L, data_name = model.config.block_size, checkpoint.dataset_of(info, dataset)
    goals = sorted(set(target_lengths)) if method == 'head' else []
    target = goals[-1] if goals else target_length or (8 if method == 'uniform' else 4) * L
    shortest = goals[0] if goals else target
    if shortest < L or shortest == L and (goals or method == 'uniform'):  # both need positions beyond L
        raise ValueError(f'target_length is {shortest} but the checkpoint was trained at block_size {L}. Choose a '
                         'longer one.')
    if method not in ('uniform', 'head'):
        raise ValueError(f"method is '{method}'. Choose uniform or head.")
    at_least(1, globals(), 'batch_size', 'micro_batch_size', 'max_iters', 'n_samples', 'last', 'target_length')
    at_least(0, globals(), 'learning_rate', 'gain_learning_rate', 'norm_learning_rate', 'warmup_iters', 'grad_clip')
    at_least(0, globals(), 'beta1', 'beta2', below=1)
    for name in ('init_scale', 'min_scale', 'candidate_range'):
        value = globals()[name]
        if isinstance(value, (float, list)):
            checkpoint.to_float32(value, f'{name} is {value}; it')
    if method == 'head' and batch_size % runtime.world_size:
        raise ValueError(f'batch_size {batch_size} must be a multiple of the {runtime.world_size} ranks.')
    val = checkpoint.open_windows(info, dataset, 'val', target)
    more = {'stage': 'tune_scale', 'dataset': data_name, 'checkpoint': info['path']}

    if method == 'uniform':
        if len(candidate_range) != 3 or min(candidate_range) <= 0 or candidate_range[0] >= candidate_range[1]:
            raise ValueError(f'candidate_range is {candidate_range}; give first, last and step, as [1.0, 2.0, 0.1].')
        first, end, step = candidate_range
        if (end - first) / step > 10_000:
            raise ValueError(f'candidate_range is {candidate_range}, more than 10,000 candidates, '
                             'each of which is measured. Give a larger step.')
        scales = [round(first + i * step, 6) for i in range(round((end - first) / step) + 1)]
        searches = {}
        for path in [info['path'], *compare]:
            ours = path == info['path']  # read already
            other, other_info = (model, info) if ours else checkpoint.load_model(path, out_dir, *reading)
            name = f"{Path(path).stem}, step {other_info['step']}"
            searches[path if name in searches else name] = search_uniform(other, val, scales, L, runtime)
        search = next(iter(searches.values()))
        runtime.print('  length   best scale      loss   with scale 1')
        for i, length in enumerate(search['lengths']):
            column = search['loss_at_length'][:, i]
            plain = f'{column[scales.index(1.0)]:9.4f}' if 1.0 in scales else ''
            runtime.print(f"{length:8d} {search['best_by_length'][i]:12.2f} {column.min():9.4f}      {plain}")
        for name, fitted in searches.items():
            runtime.print(f"{name}: scale = 1 + {fitted['fit_a']:.4f} ln(i / {L}), R2 {fitted['fit_r2']:.4f}")
        model.head_scale = search['best_by_length'][-1]
        sets = {target: {name: p for name, p in model.named_parameters() if name.endswith('head_scale')}}
        more |= {'lengths': search['lengths'], 'best_by_length': search['best_by_length'], 'searches': searches}
        a = search['fit_a']  # the fit as a file of sets, in which each context gets its own uniform scale
        fitted = {T: {name: torch.full_like(p, 1 + a * math.log(T / L)) for name, p in sets[target].items()}
                  for T in search['lengths'] if T > L}
        if runtime.is_main and fitted:
            path = result_path(out_dir, 'scale_uniform_fit', label)
            checkpoint.save_scale(f'{path}.json', info, fitted, 'uniform fit', by_length=True, fit_a=a)
        stem, draw = 'scale_uniform', draw_uniform
    else:
        tuned = {name: p for name, (p, _) in vectors_to_tune(model).items()}
        tuned |= {name: p for name, p in model.named_parameters() if name.endswith('head_scale')}  # in every file
        base = {name: p.clone() for name, p in tuned.items()}  # as the model is; start: with the uniform scale
        model.head_scale = begin = first_scale(init_scale, out_dir, info, goals[0] if goals else target)
        start, sets, losses = {name: p.clone() for name, p in tuned.items()}, {}, []
        for length in goals or [target]:
            runtime.print(f'{sum(p.numel() for p in tuned.values())} numbers, on windows of {length} tokens '
                          f'({max_iters * batch_size * length:,} tokens in all)')
            losses += tune_vectors(model, Windows(data_name, 'train', length, seed), runtime)
            sets[length] = {name: p.clone() for name, p in tuned.items()}
        scales, measured, mean_losses = model.head_scale, {}, []
        tuned_name = 'head scale' if tune == 'scale' else tune.replace(',', ', ')
        for name, vectors in (('as loaded', base), (f'uniform {begin:.2f}', start), (tuned_name, sets[target])):
            model.load_state_dict(vectors, strict=False)
            model.sets = {L: base} | sets if goals and name == tuned_name else {}
            loss, entropy, last_entropy = curves(model, val, n_samples, batch_tokens, runtime)
            mean_losses.append(float(loss.mean()))
            where, loss = bin_means(loss, L // 16)
            measured[name] = {'loss': loss, 'entropy': bin_means(entropy, L // 16)[1]}
        runtime.print(f'scales {scales.min():.3f} to {scales.max():.3f}, mean {scales.mean():.3f}')
        _, before, after = mean_losses
        if after > before:
            runtime.print(f'the validation loss rose from {before:.4f} to {after:.4f}: what was tuned '
                          'is worse than its start. Lower learning_rate.')
        more |= {'init_scale': begin, 'losses': losses, 'curve_length': target, 'position': where,
                 'curves': measured, 'last_entropy': last_entropy, 'worse_than_start': after > before}
        more['tuning_tokens'] = max_iters * batch_size * sum(goals or [target])
        stem, draw = 'scale_sets' if goals else f'scale_head_{target}', draw_head

    if runtime.is_main:
        path = result_path(out_dir, stem, label)
        more |= provenance(settings(globals()), runtime, time.perf_counter() - began)
        draw(checkpoint.save_scale(f'{path}.json', info, sets, method, by_length=bool(goals), **more), f'{path}.png')
        print(f'wrote {path}.json and .png')
    runtime.close()


if __name__ == '__main__':
    configure(globals())
    main()
