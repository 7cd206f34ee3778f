"""
Perplexity of a checkpoint at and beyond its training length, with any softmax scale. Section 4.2 and Table 2 of
"Length Generalization of Causal Transformers without Position Encoding".

$ python eval_ppl.py                                               # the demo model, sliding windows of L ... 8L
$ python eval_ppl.py --scale=out/demo/nope/scale_head_640.json     # the same with tuned scales
$ python eval_ppl.py --protocol=position                           # the loss at each position of windows of 8L
$ torchrun --nproc_per_node=8 eval_ppl.py --out_dir=out/nope_1b --dataset=pg19 --rule=paper --max_windows=8192

Writes out_dir/eval_ppl[_LABEL].json and .png (protocol position: eval_ppl_position[_LABEL])
"""

import math
import time
from itertools import groupby
from pathlib import Path

import numpy as np
import torch

import checkpoint
from configurator import configure, settings
from corpus import Windows, documents, open_tokens
from runtime import Progress, bin_means, new_figure, provenance, save_json, save_png, setup

# what to read
out_dir = 'out/demo/nope'    # the run to read; results go there too
init_from = 'last'           # last or best (of out_dir), or a checkpoint file
scale: float | str | None = None  # softmax scale: a number for all heads, or a scale file
dataset: str | None = None   # a folder of data/; None: the one the model was trained on
split = 'test'
# how to read it
protocol = 'sliding'         # sliding (perplexity by window length) or position (loss at each position of one pass)
lengths: list[int] | None = None  # window lengths in tokens; None: L, 2L, 4L and 8L
rule = 'same'                # sliding windows: same, paper or classic; see sliding_windows()
stride: int | None = None    # S, tokens scored per sliding window; None: 256, or L/8 where L < 2048
max_windows = 1024           # sliding: windows per length, the first of the split; 8192 x 256 are the paper's 2M tokens
n_samples = 256              # position: windows of the longest length, evenly spaced over the split
last = 64                    # position: "at T" is the mean loss of the last so many positions before T
batch_tokens = 16384         # tokens in one forward pass; lower it when memory runs out
label = ''                   # name of the result; empty: the scale's
# machine
device = 'auto'              # auto, cpu, cuda, mps
dtype = 'auto'               # auto, float32, bfloat16, float16
seed = 1337


def sliding_windows(start, end, length, first_end, stride, rule):
    """
    The windows of one document, tokens[start:end]: a list of (lo, hi, n). A window reads tokens[lo:hi], `length` of
    them, and scores its last n; it moves on by `stride`.
    same:    windows end at start + first_end, + stride ... before end. first_end is the longest length compared, so
             every length scores the same tokens, and the comparison is the context and nothing else.
    paper:   windows end at start + length, + stride ... before end: the released code, where each length scores its
             own tokens (run_ppl.py of AntNLP/nope_head_scale). The first length - stride tokens are never scored.
    classic: every token but the first scored once, the first window whole (Press et al. 2022, with this stride).
    """
    if rule == 'classic':
        if end - start < 2:
            return []
        hi = min(start + length, end)
        windows = [(start, hi, hi - start - 1)]
        while hi < end:
            hi, before = min(hi + stride, end), hi
            windows.append((hi - length, hi, hi - before))
        return windows
    first = start + (first_end if rule == 'same' else length)
    return [(hi - length, hi, stride) for hi in range(first, end, stride)]


@torch.no_grad()
def score_windows(model, tokens, windows, batch_tokens, runtime, progress):
    """
    Sum of the losses of each window's scored tokens, in nats: (len(windows),) float64, in order, on every rank.
    tokens: (n,) array of ids; windows: from sliding_windows(). Logits are computed for scored tokens only.
    """
    mine, sums, done = runtime.mine(windows), [], 0
    for (n_tokens, n_scored), group in groupby(mine, key=lambda w: (w[1] - w[0], w[2])):
        group, size = list(group), max(1, batch_tokens // n_tokens)
        for i in range(0, len(group), size):
            batch = np.stack([tokens[lo:hi] for lo, hi, _ in group[i:i + size]]).astype(np.int64)
            batch = torch.from_numpy(batch).to(runtime.device)
            with runtime.autocast():
                losses = model(batch[:, :-1], batch[:, -n_scored:])  # (B, n_scored)
            sums += losses.cpu().double().sum(1).tolist()
            done += len(batch)
            progress.update(done, f'windows of {n_tokens}')
    return runtime.gather(sums, len(windows))


def evaluate_sliding(model, data, lengths, stride, rule, max_windows, batch_tokens, runtime):
    """One row a length: perplexity, mean loss, and how many documents, windows and tokens it was measured on."""
    rows = []
    for length in lengths:
        windows, used = [], 0
        for start, end in documents(data):
            mine = sliding_windows(start, end, length, max(lengths), stride, rule)[:max_windows - len(windows)]
            windows += mine
            used += bool(mine)
            if len(windows) == max_windows:
                break
        if not windows:
            raise ValueError(f'no document of the {split} split is longer than {max(lengths)} tokens. '
                             'Choose shorter lengths or other text.')
        progress = Progress(len(runtime.mine(windows)), f'length {length}', runtime.is_main)
        sums = score_windows(model, data.tokens, windows, batch_tokens, runtime, progress)
        n_scored = sum(n for _, _, n in windows)
        loss = sums.sum() / n_scored
        rows.append({'length': length, 'ppl': math.exp(min(loss, 700)), 'loss': loss, 'documents': used,
                     'windows': len(windows), 'scored_tokens': n_scored})
    return rows


def draw(result, path):
    """Perplexity against window length, or loss against position; from the result's JSON alone."""
    L = result['block_size']
    figure, axis = new_figure()
    if result['protocol'] == 'sliding':
        rows = result['rows']
        axis.plot([r['length'] for r in rows], [r['ppl'] for r in rows], marker='o')
        axis.set(xscale='log', yscale='log', xlabel='window length (tokens)', ylabel='perplexity')
        axis.set_xticks([r['length'] for r in rows], [str(r['length']) for r in rows], minor=False)
        axis.minorticks_off()
        low, high = min(r['ppl'] for r in rows), max(r['ppl'] for r in rows)
        ticks = [t for t in (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 200, 500, 1000) if low / 1.5 < t < high * 1.5]
        axis.set_yticks(ticks, [str(t) for t in ticks])
    else:
        axis.plot(result['position'], result['loss'])
        axis.set(xlabel='position (tokens)', ylabel='loss (nats per token)')
    axis.axvline(L, color='black', ls=':', lw=1)
    axis.annotate(f' L = {L}', (L, 1), xycoords=('data', 'axes fraction'), va='top', fontsize=8)
    axis.set_title(f"{result['position_method']} {result['label']}".strip())
    save_png(figure, path)


def main():
    began, runtime = time.perf_counter(), setup(device, dtype, seed)
    model, info = checkpoint.load_model(init_from, out_dir, runtime.device)
    name = label or checkpoint.apply_scale(model, scale, info)
    if label:
        checkpoint.apply_scale(model, scale, info)
    L, data_name = model.config.block_size, dataset or info['settings']['dataset']
    sizes = sorted(lengths or [L, 2 * L, 4 * L, 8 * L])
    result = {'stage': 'eval_ppl', 'protocol': protocol, 'label': name, 'position_method': model.config.position,
              'block_size': L, 'dataset': data_name, 'split': split, 'checkpoint': info['path'],
              'weights_digest': info['digest'], 'scale': scale}
    if protocol == 'sliding':
        S = min(256, L // 8) if stride is None else stride
        if rule not in ('same', 'paper', 'classic'):
            raise ValueError(f"rule is '{rule}'. Choose same, paper or classic.")
        if not 0 < S < sizes[0]:
            raise ValueError(f'stride is {S}; it must be at least 1 and below the shortest length, {sizes[0]}.')
        data = open_tokens(data_name.split(',')[0].split(':')[0], split)
        checkpoint.require_tokenizer(info, data.tokenizer_state, data_name)
        rows = evaluate_sliding(model, data, sizes, S, rule, max_windows, batch_tokens, runtime)
        runtime.print('  length        ppl      loss   windows   scored tokens   documents')
        for r in rows:
            runtime.print(f"{r['length']:8d} {r['ppl']:10.3f} {r['loss']:9.4f} {r['windows']:9,d} "
                          f"{r['scored_tokens']:15,d} {r['documents']:11,d}")
        result |= {'rule': rule, 'stride': S, 'rows': rows}
    elif protocol == 'position':
        windows = Windows(data_name, split, sizes[-1], seed)
        checkpoint.require_tokenizer(info, windows.tokenizer_state, data_name)
        samples = windows.fixed(n_samples, spacing=last)  # may overlap, but no token is scored twice at one length
        losses = runtime.over_windows(samples, batch_tokens, model, f'{sizes[-1]} positions')
        at = {T: losses[:, max(0, T - last):T].mean(1) for T in sizes}
        rows = [{'length': T, 'loss': v.mean(), 'standard_error': v.std(ddof=1) / len(v) ** 0.5,
                 'ppl': math.exp(v.mean()), 'windows': len(v), 'scored_tokens': len(v) * min(T, last)}
                for T, v in at.items()]
        runtime.print(f'  at T (last {last} positions)      loss    +-          ppl   windows')
        for r in rows:
            runtime.print(f"{r['length']:8d} {r['loss']:25.4f} {r['standard_error']:8.4f} {r['ppl']:10.3f} "
                          f"{r['windows']:9,d}")
        positions, binned = bin_means(losses.mean(0), L // 16)
        result |= {'rows': rows, 'last': last, 'samples': len(losses), 'scored_tokens': losses.size,
                   'position': positions, 'loss': binned, 'loss_at_by_window': {str(T): v for T, v in at.items()}}
    else:
        raise ValueError(f"protocol is '{protocol}'. Choose sliding or position.")
    stem = '_'.join(part for part in ('eval_ppl', 'position' * (protocol == 'position'), name) if part)
    if runtime.is_main:
        result |= provenance(settings(globals()), runtime, time.perf_counter() - began)
        save_json(Path(out_dir, f'{stem}.json'), result)
        draw(result, Path(out_dir, f'{stem}.png'))
        print(f'wrote {Path(out_dir, stem)}.json and .png')
    runtime.close()


if __name__ == '__main__':
    configure(globals())
    main()
