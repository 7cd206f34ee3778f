"""
Find the softmax scales that make a NoPE model trained at L = block_size read longer contexts.
Sections 2.4 and 3, Appendices A and B of "Length Generalization of Causal Transformers without
Position Encoding".

uniform: one scale for the whole model. The stage tries each candidate (UniformScale).
head:    one scale per head, tuned at target_length. All matrices stay frozen (HeadScale). Beyond
         the paper, --tune names what is tuned: scales per channel, gains of heads, norms; and
         --target_lengths tunes one set for each of several lengths.

$ python tune_scale.py --method=uniform              # run this first: head starts from its result
$ python tune_scale.py --target_length=640           # then run this: scale_head_640.json
$ python tune_scale.py --tune=channel --label=channel           # a scale per head and channel
$ python tune_scale.py --target_lengths=[256,512,1024]          # one set per length
$ torchrun --nproc_per_node=8 tune_scale.py config/tune_8k.py   # 704 scales of the 1.1B model

uniform writes out_dir/scale_uniform.json and scale_uniform_fit.json. head writes
scale_head_TARGET.json, or scale_sets.json for target_lengths. Each file but the fit also gets a
.png. The stages that use a model, such as eval_ppl.py, read such a file with --scale=FILE
"""

import json
import math
from pathlib import Path

import numpy as np
import torch

from configurator import between, configure, ignored_settings, settings
from lib.answers import bin_means, note, print_rows, progress_bar
from lib.checkpoints import Run, dataset_of
from lib.devices import compiled, learning_rate_at, note_long_warmup
from lib.errors import MALFORMED, UserError
from lib.losses import cut_curve, loss_and_entropy
from lib.scales import (
    READ_WITH,
    finite,
    install_sets,
    put_vectors,
    read_scale_file,
    save_scale,
    scale_entries,
)
from lib.tokens import Windows
from model import VECTORS

# which model, text and device
out_dir = 'out/demo/nope'    # folder of the run to read; results go there, too
init_from = 'last'           # last, best (of out_dir), a checkpoint file, a folder, hf:ORG/NAME
position: str | None = None  # position method; None: the checkpoint's
rope_scaling: str | None = None   # extension of RoPE, such as yarn:4; None: the checkpoint's
label = ''                   # appended to the names of the files that this stage writes
dataset: str | None = None   # a folder of data/; None: the text that the model was trained on
device = 'auto'              # auto, cpu, cuda, mps
dtype = 'auto'               # auto, float32, bfloat16, float16
# what to tune
method = 'head'              # uniform or head
target_length: int | None = None  # L', the context to extend to; None: 8L for uniform, 4L for head
target_lengths: list[int] = []  # head: tune a set per length; each starts from the set before it
tail = 64                    # the loss at T tokens is the mean over the last `tail` of them
# uniform: each candidate is used for the whole model
candidate_range: list[float] = [1.0, 2.4, 0.1]  # first, last, step, in units of 1/sqrt(D)
compare: list[str] = []      # more checkpoint files of the same run; each gets a fit (Figure 7)
# head: the recipe of Appendix A
tune = 'scale'               # keys of KINDS, such as scale,out,norm; KEY:RATE sets a learning rate
init_scale: float | str = 'uniform'  # a number, or uniform: the best one in scale_uniform.json
min_scale: float | None = 1.0   # tune=scale: least scale after each step, Eq. (6); None: no limit
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


# ---------------------------------------------------------------------- uniform

def fit_scale(position, best, L):
    """
    Least-squares fit of best = 1 + a ln(position / L) over the positions beyond L. The one free
    parameter is a. position, best: (n,). Returns a and R^2 = 1 - SS_res / SS_tot. R^2 is nan if
    all these values of `best` are equal. Source: Appendix B.
    """
    position, best = np.asarray(position, float), np.asarray(best, float)
    beyond = position > L
    x, y = np.log(position[beyond] / L), best[beyond]
    a = x @ (y - 1) / (x @ x)
    rest, spread = y - 1 - a * x, y - y.mean()
    return a, 1 - rest @ rest / (spread @ spread) if spread.any() else math.nan


def candidates(candidate_range):
    """The scales of candidate_range, [first, last, step]. Raises UserError if it is not a range."""
    finite(candidate_range, (3,), f'candidate_range {candidate_range}')
    first, end, step = candidate_range
    if not 0 < first < end <= first + 10_000 * step or min(first, step) < 1e-6:
        raise UserError(f'candidate_range is {candidate_range}; give first, last and step, such as '
                        '[1.0, 2.0, 0.1], with 0 < first < last, at most 10,000 steps, and a first '
                        'and a step of at least 1e-6.')
    n = math.floor((end - first) / step + 1e-6)
    return [round(first + i * step, 6) for i in range(n + 1)]


def losses_with(run, scale, samples, called, with_entropy):
    """
    Give every head this scale, and read the samples. Returns the mean loss at each position, (T,),
    and the mean entropy in bins of L / 16 positions, or None. An entropy costs as much as a loss.
    """
    run.model.head_scale = scale
    batch_tokens, label = run.settings['batch_tokens'], f'scale {scale:.2f}'
    if not with_entropy:
        return run.runtime.over_windows(samples, batch_tokens, called, label).mean(0), None
    losses, of_heads = loss_and_entropy(run.model, samples, run.L // 16, batch_tokens, run.runtime,
                                        label)
    return losses, of_heads.mean((0, 1))


def search_uniform(run, windows, scales):
    """
    Try each candidate scale on the windows. Returns a dict: the loss in bins of L / 16 positions
    with each candidate, the best candidate per bin and per length, and the fit. For comparison it
    also holds the loss of the unchanged model in the cut context: the same tokens, scored in short
    windows (see eval_ppl.py). The entropy is None for candidates that the picture does not show.
    Restores the model's scales at the end.
    """
    s, model, L = run.settings, run.model, run.L
    loss, entropy, loss_at_length = [], [], []
    samples = windows.evenly_spaced(s['n_samples'])
    called = run.compiled_for(len(samples) * len(scales), windows.block_size)
    # The picture shows the entropy of evenly spaced candidates.
    plotted = np.linspace(0, len(scales) - 1, 6).round().astype(int)
    cut = cut_curve(model, samples, L, s['tail'], s['batch_tokens'], run.runtime)
    lengths = cut['position']  # L, 2L, 4L ... and the end of the windows
    original = copies(vectors_of(model, ['scale']))
    for i, scale in enumerate(scales):
        losses, mean_entropy = losses_with(run, scale, samples, called, i in plotted)
        position, binned = bin_means(losses, L // 16)
        loss.append(binned)
        entropy.append(mean_entropy)
        loss_at_length.append([losses[max(0, n - s['tail']):n].mean() for n in lengths])
    put_vectors(model, original)

    loss, loss_at_length, scales = np.array(loss), np.array(loss_at_length), np.array(scales)
    best = scales[loss.argmin(0)]  # per bin
    a, r2 = fit_scale(position, best, L)
    return {'position': position, 'candidates': scales.tolist(), 'loss': loss, 'entropy': entropy,
            'best_by_position': best, 'best_loss_by_position': loss.min(0), 'fit_a': a,
            'fit_r2': r2, 'lengths': lengths, 'loss_at_length': loss_at_length,
            'best_by_length': scales[loss_at_length.argmin(0)], 'cut': cut,
            'samples': len(samples)}


def search_all(run, target):
    """{name: result of search_uniform()}, for the run's checkpoint and for those in `compare`."""
    s, searches = run.settings, {}
    windows, scales = run.windows(target, 'val'), candidates(s['candidate_range'])
    others = [Run(s | {'init_from': path, 'dataset': windows.dataset})
              for path in s['compare'] if path != run.info['path']]
    for one in others:
        one.windows(target, 'val')  # raises UserError if this checkpoint has another tokenizer
        if one.L != run.L:
            raise UserError(f"compare has {one.info['path']}, which was trained at block_size "
                            f'{one.L}, not at {run.L}. Give checkpoints of the same run.')
    for one in [run, *others]:
        path = one.info['path']
        name = f"{Path(path).stem}, step {one.info['step']}"
        name = path if name in searches else name
        searches[name] = search_uniform(one, windows, scales)
    return searches


def run_uniform(run, target):
    """
    Search the best scale for the whole model. Returns {target: vectors} and the other entries of
    the scale file.
    """
    L, searches = run.L, search_all(run, target)
    search = next(iter(searches.values()))
    rows, best_scales = [], search['best_by_length']
    losses, cuts = search['loss_at_length'].T, search['cut']['loss']
    for T, best, of_length, cut in zip(search['lengths'], best_scales, losses, cuts):
        rows.append({'length': T, 'best scale': best, 'loss': of_length.min(),
                     f"with scale {search['candidates'][0]}": of_length[0],
                     f"as loaded, cut to {search['cut']['context']}": cut})
    print_rows(run.runtime.print, rows)
    for name, found in searches.items():
        run.runtime.print(f"{name}: scale = 1 + {found['fit_a']:.4f} ln(i / {L}), "
                          f"R2 {found['fit_r2']:.4f}")

    def same_for_all(scale):
        """Vectors with the same scale for every head."""
        own = vectors_of(run.model, ['scale'])
        return {name: torch.full((len(p), 1), scale) for name, p in own.items()}

    # Save the fit as a scale file with one set per length. Each set holds one uniform scale.
    a = search['fit_a']
    fitted = {T: same_for_all(1 + a * math.log(T / L)) for T in search['lengths'] if T > L}
    path = Path(f"{run.path('scale_uniform_fit')}.json")
    if 1 + a * math.log(target / L) <= 0:
        note(f'the fit falls to 0 at {target} tokens, so there is no {path}')
        path.unlink(missing_ok=True)  # that of an earlier search
    elif run.runtime.is_main:
        save_scale(path, run.info, fitted, 'uniform fit', by_length=True, fit_a=a)
        run.runtime.print(f'wrote {path}')
    more = {'lengths': search['lengths'], 'best_by_length': best_scales, 'searches': searches}
    return {target: same_for_all(best_scales[-1])}, more


# ---------------------------------------------------------------------- head

# What can be tuned: {kind: (ending of its parameters' names, learning rate)}. The kinds are the
# keys of VECTORS in model.py, two of them under other names, and two more. The paper tunes its
# scales at a rate of 0.05 or 0.1.
KINDS = {name: (vector.ending, vector.rate) for name, vector in VECTORS.items()}
KINDS['scale'] = KINDS.pop('head_scale')   # one scale per head, as in the paper
KINDS['out'] = KINDS.pop('head_gain')      # one gain on the output of each head
KINDS['channel'] = 'head_scale', 0.03      # one scale per channel of a head
KINDS['attn_norm'] = 'attn_norm.weight', 0.01  # the gains of the RMSNorms before attention


def rates_of(tune):
    """{kind: learning rate} from the setting `tune`, such as scale:0.05,norm."""
    rates = {}
    for part in tune.split(','):
        kind, _, rate = part.partition(':')
        if kind in rates:
            raise UserError(f"tune is '{tune}', which has {kind} twice. Leave one out.")
        try:
            rates[kind] = float(rate) if rate else KINDS[kind][1]
        except (KeyError, ValueError):
            rates[kind] = math.nan
        if not 0 <= rates[kind] < math.inf:
            raise UserError(f"tune is '{tune}', and its part '{part}' is wrong. Choose one or more "
                            f"of {', '.join(KINDS)}, such as scale,out,norm. Write scale:0.05 to "
                            'set a learning rate.')
    return rates


def vectors_of(model, kinds):
    """{name: parameter} of the small vectors that these KINDS tune."""
    endings = tuple(KINDS[kind][0] for kind in kinds)
    return {name: p for name, p in model.named_parameters() if name.endswith(endings)}


def copies(vectors):
    """A copy of {name: parameter}. Later changes of the model do not change the copy."""
    return {name: p.clone() for name, p in vectors.items()}


def first_scale(run, init_scale, target):
    """
    The initial scale of every head: the number init_scale, or the best uniform scale at `target`.
    Between measured lengths the best uniform scale is interpolated in ln T.
    """
    if init_scale != 'uniform':
        if isinstance(init_scale, str) or not 0 < init_scale < 1e30:
            raise UserError(f'init_scale is {init_scale}. Give a number above 0, or uniform.')
        return init_scale
    path = Path(run.settings['out_dir'], 'scale_uniform.json')
    if not path.exists():
        raise UserError(f'{path} does not exist. Run tune_scale.py --method=uniform first, or give '
                        'a number, such as --init_scale=1.2.')
    data, _ = read_scale_file(path, run.model, run.info)
    try:
        longest = max(data['lengths'])
        start = np.interp(math.log(target), np.log(data['lengths']), data['best_by_length'])
    except MALFORMED:
        raise UserError(f'{path} needs lengths and best_by_length, one number for each length. '
                        'Make it again with tune_scale.py --method=uniform.') from None
    if target > longest:
        note(f'{path} ends at {longest} tokens, so tuning for {target} starts from its last scale')
    return float(start)


def objective(model, inputs, targets):
    """What tuning minimizes, Eq. (5): the mean loss in nats. inputs, targets: (B, T) ids."""
    return model(inputs, targets).mean()


def tuning_step(forward, vectors, tokens, optimizer, scaler, s, runtime):
    """
    One step on this rank's share of the batch, (rows, T + 1) ids. forward: the compiled model;
    scaler: as in train_step() of train.py. Returns the objective over the batch of all ranks.
    """
    step_loss = torch.zeros((), device=runtime.device)
    for part in tokens.split(s['micro_batch_size']):
        with runtime.autocast():
            loss = objective(forward, part[:, :-1], part[:, 1:]) * len(part) / s['batch_size']
        scaler.scale(loss).backward()
        step_loss += loss.detach()
    if runtime.world_size > 1:  # so few numbers need no DistributedDataParallel
        for tensor in [step_loss, *(p.grad for p in vectors)]:
            torch.distributed.all_reduce(tensor)

    if s['grad_clip']:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(vectors, s['grad_clip'])
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return step_loss


def tune_vectors(model, windows, s, runtime):
    """
    HeadScale: minimize the objective over the vectors that `tune` names, from their present values.
    Returns the loss of each step. Gradients flow back through all layers, but they are computed
    only for the vectors, not for the matrices. s: the settings, {name: value}.
    """
    rates, groups = rates_of(s['tune']), []
    model.checkpoint_activations = s['checkpoint_activations']
    for kind, rate in rates.items():
        groups.append({'params': list(vectors_of(model, [kind]).values()), 'peak': rate})
    vectors = [p.requires_grad_(True) for group in groups for p in group['params']]
    optimizer = torch.optim.AdamW(groups, betas=(s['beta1'], s['beta2']), weight_decay=0.0,
                                  fused=True)
    scaler = torch.amp.GradScaler(runtime.device.type, enabled=runtime.dtype == torch.float16)
    forward, losses = compiled(model, runtime, s['compile']), []
    rows = slice(runtime.rank, None, runtime.world_size)  # this rank's share of each batch
    bar = progress_bar(s['max_iters'], f'tuning at {windows.block_size}', runtime.is_main)
    for step in range(s['max_iters']):
        share = learning_rate_at(step, 1.0, 0.1, s['warmup_iters'], s['max_iters'])  # of each peak
        for group in optimizer.param_groups:
            group['lr'] = share * group['peak']

        tokens = torch.from_numpy(windows.batch(step, s['batch_size'], rows)).to(runtime.device)
        step_loss = tuning_step(forward, vectors, tokens, optimizer, scaler, s, runtime)
        if s['min_scale'] is not None and 'scale' in rates:
            for p in vectors_of(model, ['scale']).values():  # Eq. (6)
                p.data.clamp_(min=s['min_scale'])

        # Copy both numbers at once, because the host waits for the device at each copy.
        loss, mean_scale = torch.stack([step_loss, model.head_scale.mean()]).tolist()
        losses.append(loss)
        if not math.isfinite(loss):
            raise UserError(f'the loss became {loss} at step {step + 1}; nothing was '
                            'written. Lower the learning rate in tune, or start from a uniform '
                            'scale.')
        bar.set_postfix_str(f'loss {loss:.4f}, mean scale {mean_scale:.3f}', refresh=False)
        bar.update()
    bar.close()
    model.requires_grad_(False)
    return losses


def curves_of(run, samples):
    """
    Means over the samples, in nats: the curves of the picture (loss and entropy by position), the
    loss over all positions, and the entropy of each head in the last bin of L / 16 positions,
    (n_layer, n_head).
    """
    width = run.L // 16
    loss, entropy = loss_and_entropy(run.model, samples, width, run.settings['batch_tokens'],
                                     run.runtime)
    curves = {'loss': bin_means(loss, width)[1], 'entropy': entropy.mean((0, 1))}
    return curves, float(loss.mean()), entropy[..., -1]


def tune_sets(run, target_sizes, to_save):
    """
    Tune the vectors at each length in turn, from the values of the length before. to_save: the
    parameters that the scale file will hold, {name: parameter}. Returns {length: vectors} and the
    losses of all steps.
    """
    s, sets, losses = run.settings, {}, []
    n_tuned = sum(p.numel() for p in vectors_of(run.model, rates_of(s['tune'])).values())
    for length in target_sizes:
        n_tokens = s['max_iters'] * s['batch_size'] * length
        run.runtime.print(f'tuning {n_tuned} numbers on windows of {length} tokens ({n_tokens:,} '
                          'tokens in all)')
        data = Windows(dataset_of(run.info, s['dataset']), 'train', length, s['seed'])
        losses += tune_vectors(run.model, data, s, run.runtime)
        sets[length] = copies(to_save)
    scales = torch.cat([vector.flatten() for name, vector in to_save.items()
                        if name.endswith('head_scale')])
    run.runtime.print(f'scales {scales.min():.3f} to {scales.max():.3f}, mean {scales.mean():.3f}')
    return sets, losses


def run_head(run, target_sizes):
    """
    Tune the vectors at each target length, and measure on the split val how much tuning gains.
    Returns {length: vectors} and the other entries of the scale file.
    """
    s, model, L, longest = run.settings, run.model, run.L, target_sizes[-1]
    # Do this first, because it fails if scale_uniform.json is missing.
    start = first_scale(run, s['init_scale'], target_sizes[0])
    tuned = rates_of(s['tune'])
    to_save = vectors_of(model, ['scale', *tuned])  # every scale file holds the scales
    original = copies(to_save)
    samples = run.windows(longest, 'val').evenly_spaced(s['n_samples'])
    cut = cut_curve(model, samples, L, s['tail'], s['batch_tokens'], run.runtime)

    # measure the model as loaded, and with the initial scale
    as_loaded, _, _ = curves_of(run, samples)
    model.head_scale = start
    if 'channel' in tuned:
        model.head_scale = model.head_scale[..., None].expand(-1, -1, model.config.head_dim)
    at_start, loss_before, _ = curves_of(run, samples)

    sets, losses = tune_sets(run, target_sizes, to_save)

    # measure the tuned model
    n_tuned = sum(p.numel() for p in vectors_of(model, tuned).values())
    if s['target_lengths']:
        # Put the original vectors back and install the tuned sets. Each pass then takes the set for
        # its length, as in the other stages.
        put_vectors(model, original)
        install_sets(model, sets)
    after_tuning, loss_after, last_entropy = curves_of(run, samples)
    is_worse = round(loss_after, 4) > round(loss_before, 4)  # not by rounding errors
    if is_worse:
        run.runtime.print(f'the validation loss rose from {loss_before:.4f} to {loss_after:.4f}: '
                          'the tuned vectors are worse than the initial ones. Lower the learning '
                          'rate in tune.')

    names = ', '.join(tuned)
    curves = {'as loaded': as_loaded, f'uniform {start:.2f}': at_start,
              'head scale' if names == 'scale' else names: after_tuning}
    more = {'init_scale': start, 'losses': losses, 'curve_length': longest,
            'position': bin_means(range(longest), L // 16)[0], 'curves': curves, 'cut': cut,
            'samples': len(samples), 'last_entropy': last_entropy,
            'worse_than_start': is_worse, 'tuned_numbers': n_tuned,
            'tuning_tokens': s['max_iters'] * s['batch_size'] * sum(target_sizes)}
    return sets, more


def check_settings(run, target_sizes):
    """Raise UserError before work starts if a setting is wrong."""
    s, model, L, ranks = run.settings, run.model, run.L, run.runtime.world_size
    if s['method'] not in ('uniform', 'head'):
        raise UserError(f"method is '{s['method']}'. Choose uniform or head.")
    is_uniform, several = s['method'] == 'uniform', bool(s['target_lengths'])
    least = L + 1 if several else L
    if is_uniform:  # then two bins of L / 16 positions have their middles past L: the fit needs two
        least = L + 3 * max(1, L // 16)
    elif s['compare']:
        raise UserError('compare is for --method=uniform only. Leave it out.')
    if several and is_uniform:
        raise UserError('target_lengths is for --method=head only. Leave it out.')
    if several and s['target_length']:
        raise UserError('target_lengths is given together with target_length. Leave one out.')
    if min(target_sizes) < least:
        name = 'target_lengths has' if several else 'target_length is'
        raise UserError(f'{name} {min(target_sizes)}. The least is {least} for a checkpoint that '
                        f'was trained at block_size {L}.')
    between(s, 1, 'target_length', 'batch_size', 'micro_batch_size', 'max_iters', 'n_samples',
            'tail', 'batch_tokens')
    between(s, 0, 'warmup_iters', 'grad_clip')
    between(s, 0, 'beta1', 'beta2', most=1 - 1e-9)
    between(s, -1e30, 'min_scale', most=1e30)
    kinds, named = rates_of(s['tune']), []
    for kind in kinds:
        of_kind = vectors_of(model, [kind])
        if not of_kind or set(of_kind) & set(named):
            raise UserError(f"tune is '{s['tune']}', and its part '{kind}' names parameters that "
                            'this model does not have, or that another part names, too. Leave '
                            'that part out.')
        named += of_kind
    if 'channel' in kinds and 'rope' in model.config.position:
        raise UserError("tune has 'channel', but this model uses RoPE, whose scores depend on "
                        'positions only through i - j. This holds only if both channels of a pair '
                        'have the same scale. A scale for each channel would break it. Use '
                        '--tune=scale.')
    if not is_uniform and s['batch_size'] % ranks:
        raise UserError(f"batch_size {s['batch_size']} must be a multiple of the {ranks} ranks.")


def require_same_method(path, info):
    """Refuse to overwrite a scale file that was tuned with another position or rope_scaling."""
    try:
        data = json.loads(Path(path).read_text(encoding='utf-8'))
        tuned_with = {setting: data[key] for setting, key in READ_WITH.items()}
    except (FileNotFoundError, *MALFORMED):
        return  # there is nothing to lose
    for setting, was in tuned_with.items():
        now = info['model_config'][setting]
        if was != now:
            raise UserError(f"{path} was tuned with {setting} '{was}', and would be lost: this "
                            f"model is read with '{now}'. Add --label=NAME to keep both.")


# {method: its settings that the other method does not have}
OWN_SETTINGS = {
    'uniform': {'candidate_range', 'compare'},
    'head': {'target_lengths', 'tune', 'init_scale', 'min_scale', 'warmup_iters', 'max_iters',
             'batch_size', 'micro_batch_size', 'beta1', 'beta2', 'grad_clip',
             'checkpoint_activations', 'seed'}}


def main(given=()):
    """given: names of the settings that the user set."""
    run = Run(settings(globals()))
    run.label = label  # Run would replace an empty label by the RoPE extension, such as yarn4
    _ = run.model.head_scale  # a model of the package transformers has none, and raises UserError
    target_sizes = [target_length or (8 if method == 'uniform' else 4) * run.L]
    if method == 'head' and target_lengths:
        target_sizes = sorted(set(target_lengths))
    check_settings(run, target_sizes)
    ignored = ignored_settings(given, OWN_SETTINGS, method)
    if ignored:
        note(f"method {method} does not read {', '.join(ignored)}")
    if method == 'head':
        note_long_warmup(warmup_iters, max_iters)
        if 'min_scale' in given and 'scale' not in rates_of(tune):
            note(f"min_scale is for tune=scale, but tune is '{tune}'")
    stem = 'scale_uniform'
    if method == 'head':
        stem = 'scale_sets' if target_lengths else f'scale_head_{target_sizes[-1]}'
    run.claim(stem)
    require_same_method(f'{run.path(stem)}.json', run.info)

    if method == 'uniform':
        sets, more = run_uniform(run, target_sizes[0])
    else:
        sets, more = run_head(run, target_sizes)
    run.write(stem, scale_entries(run.info, sets, method, stem == 'scale_sets') | more | {
        'stage': 'tune_scale', 'dataset': dataset_of(run.info, dataset)})
    run.close()


if __name__ == '__main__':
    main(configure(globals()))
