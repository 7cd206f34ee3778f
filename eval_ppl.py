"""
Perplexity of a checkpoint at and beyond its training length, with any softmax scale. Section 4.2 and Table 2 of
"Length Generalization of Causal Transformers without Position Encoding"; the last tokens of each length, and what a
longer context gains, as in Figures 1 to 6 and Table 1 of "DAPE V2".

$ python eval_ppl.py                                               # the demo model, sliding windows of L ... 8L
$ python eval_ppl.py --scale=out/demo/nope/scale_head_640.json     # the same with tuned scales
$ python eval_ppl.py --protocol=position                           # the loss at each position of windows of 8L
$ python eval_ppl.py --protocol=last                               # the last tokens of each length, and Delta P
$ python eval_ppl.py config/table_demo.py                          # several models and methods in Table 2's layout
$ torchrun --nproc_per_node=8 eval_ppl.py --out_dir=out/nope_1b --dataset=pg19 --rule=paper --max_windows=8192

Writes out_dir/eval_ppl[_LABEL].json and .png (other protocols: eval_ppl_PROTOCOL[_LABEL]; a table: eval_ppl_table)
"""

import itertools
import json
import math
import time
from pathlib import Path

import numpy as np
import torch

import checkpoint
from configurator import at_least, configure, settings
from corpus import documents, open_tokens
from runtime import (
    ROOT,
    Progress,
    bin_means,
    mark_length,
    method_name,
    new_figure,
    provenance,
    result_path,
    save_json,
    save_png,
    setup,
)

# what to read
out_dir = 'out/demo/nope'    # the run to read; results go there too
init_from = 'last'           # last or best (of out_dir), a checkpoint file, a Hugging Face folder, or hf:ORG/NAME
position: str | None = None  # read the checkpoint with this position method; None: as it says
rope_scaling: str | None = None  # extend RoPE, such as yarn:4; None: as the checkpoint says
scale: float | str | None = None  # softmax scale: a number for all heads, or a scale file
dataset: str | None = None   # a folder of data/; None: the one the model was trained on
split = 'test'
# how to read it
protocol = 'sliding'         # sliding windows by length, position (each of one pass), or last (tokens of each length)
lengths: list[int] | None = None  # window lengths in tokens; None: L, 2L, 4L and 8L
rule = 'same'                # sliding windows: same, paper or classic; see sliding_windows()
stride: int | None = None    # S, tokens scored per sliding window; None: 256, or L/8 where L < 2048
max_windows = 1024           # sliding: windows per length; rule same: evenly spaced over the split, else the first
n_samples = 256              # position, last: windows of the longest length, evenly spaced over the split
last: int | None = None      # position: "at T" is the mean loss of the last 64 positions before T; last: of 256, or L
batch_tokens = 16384         # tokens in one forward pass; lower it when memory runs out
label = ''                   # name of the result; empty: the scale's
# rows: {'name': ..., 'init_from': FILE, 'scale': ..., 'position': ..., 'rope_scaling': ..., 'dataset': ...,
# 'paper': row of Table 2}, all but the first two optional. A list of scales or extensions of RoPE is a grid, of which
# the best at each length is shown; rows of one name are seeds of a model: their mean and standard deviation are shown
table: list[dict] = []       # sliding, last: run these rows instead of the one model above
# machine
device = 'auto'              # auto, cpu, cuda, mps
dtype = 'auto'               # auto, float32, bfloat16, float16


def perplexity(loss):
    """exp of a loss in nats per token; of 700 where it is more, as a float holds no exp(710)."""
    return math.exp(min(loss, 700))


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
    if rule not in ('same', 'paper'):
        raise ValueError(f"rule is '{rule}'. Choose same, paper or classic.")
    first = start + (first_end if rule == 'same' else length)
    return [(hi - length, hi, stride) for hi in range(first, end, stride)]


@torch.no_grad()
def score_windows(model, tokens, windows, batch_tokens, runtime, progress):
    """
    Sum of the losses of each window's scored tokens, in nats: (len(windows),) float64, in order, on every rank.
    tokens: (n,) array of ids; windows: from sliding_windows(). Logits are computed for scored tokens only.
    """
    mine, sums, done = runtime.mine(windows), [], 0
    for (n_tokens, n_scored), group in itertools.groupby(mine, key=lambda w: (w[1] - w[0], w[2])):
        group, size = list(group), max(1, batch_tokens // n_tokens)
        for i in range(0, len(group), size):
            batch = np.stack([tokens[lo:hi] for lo, hi, _ in group[i:i + size]]).astype(np.int64)
            batch = torch.from_numpy(batch).to(runtime.device)
            with runtime.autocast():
                # all tokens are read, as what a method does may depend on their number; nothing follows the last
                losses = model(batch, batch.roll(-1, 1)[:, -n_scored - 1:])[:, :-1]  # (B, n_scored)
            sums += losses.cpu().double().sum(1).tolist()
            done += len(batch)
            progress.update(done, f'windows of {n_tokens}')
    return runtime.gather(sums, len(windows))


def evaluate_sliding(model, data, lengths, stride, rule, max_windows, batch_tokens, runtime):
    """One row a length: perplexity, mean loss, and how many documents, windows and tokens it was measured on."""
    rows = []
    for length in lengths:
        windows = [(document, window) for document, (start, end) in enumerate(documents(data))
                   for window in sliding_windows(start, end, length, max(lengths), stride, rule)]
        n = min(max_windows, len(windows))
        among = len(windows) if rule == 'same' else n  # spread evenly over all of them, or over the first n: these
        windows = [windows[i * among // n] for i in range(n)]
        used, windows = len({document for document, _ in windows}), [window for _, window in windows]
        if not windows:
            raise ValueError(f'no document of the {split} split is longer than {max(lengths)} tokens. '
                             'Choose shorter lengths or other text.')
        progress = Progress(len(runtime.mine(windows)), f'length {length}', runtime.is_main)
        sums = score_windows(model, data.tokens, windows, batch_tokens, runtime, progress)
        n_scored = sum(n for _, _, n in windows)
        loss = sums.sum() / n_scored
        rows.append({'length': length, 'ppl': perplexity(loss), 'loss': loss, 'documents': used,
                     'windows': len(windows), 'scored_tokens': n_scored})
    return rows


def open_data(info, wanted):
    """The token file to read with the model of `info`: of a mixture, its first source."""
    name = checkpoint.dataset_of(info, wanted).split(',')[0].split(':')[0]
    data = open_tokens(name, split)
    checkpoint.require_tokenizer(info, data.tokenizer_state, name)
    return data


def rows_there(table, runtime):
    """The rows of a table whose checkpoint and scale file exist; a line says which are left out."""
    rows, keys, paper = [], ('scale', 'position', 'rope_scaling', 'dataset', 'paper'), paper_rows() if table else {}
    for row in table:
        if not {'name', 'init_from'} <= set(row) <= {'name', 'init_from', *keys}:
            raise ValueError(f"table has the row {row}. It needs name and init_from and may have {', '.join(keys)}.")
        if row.get('paper', '') not in ('', *paper):
            raise ValueError(f"table has the row {row['paper']} of the paper, which has: {', '.join(paper)}.")
        files = [row.get(key) for key in ('init_from', 'scale')]
        missing = [file for file in files if str(file).endswith(('.pt', '.json')) and not Path(file).exists()]
        if missing:
            runtime.print(f"{row['name']} is left out: {missing[0]} does not exist")
        else:
            rows.append(row)
    if table and not rows:
        raise ValueError('no row of the table has its files. The first line of its config says how to make them.')
    return rows


def evaluate_row(row, measure, runtime):
    """
    A row of the table, and for a grid each of its variants, by `measure(model, info, dataset)`. Returns the row with
    `ppl`, one a length (the least of the grid's), what gave them, `best`, and the single variant that is best in the
    mean of the losses, `best_single`.
    """
    grid = [row[key] if isinstance(row.get(key), list) else [row.get(key)] for key in ('scale', 'rope_scaling')]
    tried, tokens = {}, 0
    for one_scale, scaling in itertools.product(*grid):
        model, info = checkpoint.load_model(row['init_from'], out_dir, runtime.device, row.get('position'), scaling,
                                            runtime.dtype)
        label = checkpoint.apply_scale(model, one_scale, info)
        rows = measure(model, info, row.get('dataset') or dataset)
        tried[label or 'plain'] = [r['loss'] for r in rows]
        made = info['settings']
        if made.get('init_from', 'scratch') != 'scratch':
            tokens = info['step'] * made['batch_size'] * made['block_size']
        if isinstance(one_scale, str):
            tokens = json.loads(Path(one_scale).read_text()).get('tuning_tokens', 0)
    losses = np.array(list(tried.values()))
    names = np.array(list(tried))
    if len(tried) == 1 and 'delta_p' in rows[-1]:
        row = row | {'delta_p': [r.get('delta_p') for r in rows]}
    return row | {'tuning_tokens': tokens, 'ppl': np.exp(losses.min(0).clip(max=700)), 'losses': tried,
                  'best': names[losses.argmin(0)].tolist(), 'best_single': names[losses.mean(1).argmin()].item(),
                  'windows': rows[0]['windows']}


def merge_seeds(rows):
    """Rows of one name are seeds of one model: a row with the mean of their perplexities, `sd`, and all `runs`."""
    merged = []
    for _, group in itertools.groupby(rows, key=lambda row: row['name']):
        group = list(group)
        ppl, row = np.array([row['ppl'] for row in group]), group[0]
        if len(group) > 1:
            row = row | {'ppl': ppl.mean(0), 'sd': ppl.std(0, ddof=1), 'runs': group}
            delta_p = [one.get('delta_p') for one in group]
            if all(delta_p):
                row['delta_p'] = np.array(delta_p, float).mean(0)
            else:
                row.pop('delta_p', None)  # a grid has none
        merged.append(row)
    return merged


# the rows that a table is printed beside: Table 2 on PG19, or DAPE V2's Tables 4 and 9 on Books3
PAPER = {'sliding': ('nope_table2', ['2K', '4K', '8K', '16K']),
         'last': ('dape_table9', [128, 256, 512, 1024, 2048, 4096, 8192])}


def paper_rows():
    """{name of a row: its perplexities} of the paper."""
    return json.loads((ROOT / 'results/papers.json').read_text())[PAPER[protocol][0]]['rows']


def print_table(rows, sizes, runtime):
    """The rows by length, beside those of the paper that a row's `paper` names, or else its own name."""
    columns, paper = PAPER[protocol][1], paper_rows()
    width = max(len(row['name']) for row in rows)
    runtime.print(f'{"":{width}}     tokens' + ''.join(f'{T:>17}' for T in sizes) + '   paper:'
                  + ''.join(f'{T:>7}' for T in columns) + f"{f'   Delta P at {sizes[-1]}' * (protocol == 'last')}")
    for row in rows:
        cells = [f'{ppl:.2f}' if ppl < 1000 else '>10^3' for ppl in row['ppl']]
        if 'sd' in row:
            cells = [f'{cell} ± {sd:.2f}' for cell, sd in zip(cells, row['sd'])]
        theirs = ''.join(f'{ppl:7.1f}' if ppl < 1000 else '  >10^3'
                         for ppl in paper.get(row.get('paper', row['name']), [])[:len(columns)])
        note = f"   {', '.join(row['best'])}" if len(row['losses']) > 1 else ''
        if 'delta_p' in row:
            theirs = f"{theirs:{7 * len(columns)}}{row['delta_p'][-1]:+12.2f} {reading(row['delta_p'][-1])}"
        tokens = f"{row['tuning_tokens'] / 1e6:.1f}M" if row['tuning_tokens'] else '-'
        cells = ''.join(f'{cell:>17}' for cell in cells)
        runtime.print(f"{row['name']:{width}} {tokens:>10}{cells}         {theirs}{note}".rstrip())


def draw_table(result, path):
    """Perplexity against window length, a line a row; the legend in the order of the lines at the right edge."""
    figure, axis = new_figure(width=10.0, height=6.0)
    rows = sorted(result['rows'], key=lambda row: -row['ppl'][-1])
    for i, row in enumerate(rows):
        axis.plot(result['lengths'], row['ppl'], marker='os^vDP'[i % 6], ls=('-', '--', ':')[i % 3], color=f'C{i % 10}',
                  label=f"{row['ppl'][-1]:9,.2f}  {row['name']}")
    every = [ppl for row in rows for ppl in row['ppl']]
    length_axes(axis, result['lengths'], every)
    highest = min(max(every), 20 * min(every))  # what explodes leaves the picture
    margin = min(1.1, (highest / min(every)) ** 0.1)
    axis.set_ylim(min(every) / margin, highest * margin)
    mark_length(axis, result['block_size'])
    figure.legend(*axis.get_legend_handles_labels(), loc='outside right center',
                  title=f"perplexity at {result['lengths'][-1]}", handlelength=3.5)
    save_png(figure, path)


def length_axes(axis, lengths, ppl):
    """Logarithmic axes for perplexity by window length, with plain numbers at the ticks."""
    from matplotlib.ticker import MaxNLocator
    axis.set(xscale='log', yscale='log', xlabel='window length (tokens)', ylabel='perplexity')
    axis.set_xticks(lengths, [str(T) for T in lengths], minor=False)
    axis.minorticks_off()
    ticks = [t for t in (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 200, 500, 1000)
             if min(ppl) / 1.5 < t < max(ppl) * 1.5]
    if max(ppl) < 2 * min(ppl):  # too few of them would be in the picture
        ticks = MaxNLocator(8).tick_values(min(ppl), max(ppl))
    axis.set_yticks(ticks, [f'{t:g}' for t in ticks])


def evaluate_last(model, tokens, lengths, K, L, batch_tokens, runtime):
    """
    DAPE V2's protocol: one row a length T, the perplexity of the last K tokens of windows of T, the same K at every
    length; and for T > L its Eq. (6), Delta P = P(x[-L:], L) - P(x, L): how much better the last L tokens are read with
    all of x than alone. tokens: (n, max(lengths) + 1) ids.
    """
    def mean_losses(T):
        """Of the last K and of the last L tokens of windows of T."""
        def measure(inputs, targets):
            losses = model(inputs, targets[:, -max(K, L):])
            return torch.stack([losses[:, -K:].mean(1), losses[:, -L:].mean(1)], dim=1)
        return runtime.over_windows(tokens[:, -T - 1:], batch_tokens, measure, f'length {T}').mean(0)

    rows, alone = [], mean_losses(L)[1] if max(lengths) > L else None
    for T in lengths:
        loss, loss_of_L = mean_losses(T)
        row = {'length': T, 'ppl': perplexity(loss), 'loss': loss, 'windows': len(tokens),
               'scored_tokens': len(tokens) * min(K, T)}
        if T > L:
            row['ppl_alone'], row['ppl_with_all'] = perplexity(alone), perplexity(loss_of_L)
            row['delta_p'] = row['ppl_alone'] - row['ppl_with_all']
            row['reading'] = reading(row['delta_p'])
        rows.append(row)
    return rows


def reading(delta_p):
    return 'helps' if delta_p > 0 else 'hurts' if delta_p < 0 else 'makes no difference'


def draw(result, path):
    """Perplexity against window length, or loss against position; from the result's JSON alone."""
    L = result['block_size']
    figure, axis = new_figure()
    if result['protocol'] != 'position':
        rows = result['rows']
        axis.plot([r['length'] for r in rows], [r['ppl'] for r in rows], marker='o')
        length_axes(axis, [r['length'] for r in rows], [r['ppl'] for r in rows])
    else:
        axis.plot(result['position'], result['loss'])
        axis.set(xlabel='position (tokens)', ylabel='loss (nats per token)')
    mark_length(axis, L)
    axis.set_title(f"{method_name(result['position_method'])} {result['label']}".strip())
    save_png(figure, path)


def main():
    began, runtime = time.perf_counter(), setup(device, dtype)
    if protocol not in ('sliding', 'position', 'last'):
        raise ValueError(f"protocol is '{protocol}'. Choose sliding, position or last.")
    if table and protocol == 'position':
        raise ValueError('a table is of sliding or last windows. Run --protocol=position on one model at a time.')
    if table and (scale, position, rope_scaling) != (None, None, None):
        raise ValueError('a table has scale, position and rope_scaling in its rows. Leave them out, or the table.')
    at_least(1, globals(), 'lengths', 'max_windows', 'n_samples', 'last')
    rows = rows_there(table, runtime)
    first = {'init_from': init_from, 'position': position} | (rows[0] if rows else {})
    model, info = checkpoint.load_model(first['init_from'], out_dir, runtime.device, first['position'], rope_scaling,
                                        runtime.dtype)
    scale_label = checkpoint.apply_scale(model, scale, info)
    name = label or scale_label
    L, data_name = model.config.block_size, checkpoint.dataset_of(info, dataset)
    sizes = sorted(lengths or [L, 2 * L, 4 * L, 8 * L])
    result = {'stage': 'eval_ppl', 'protocol': protocol, 'label': name, 'position_method': model.config.position,
              'block_size': L, 'dataset': data_name, 'split': split, 'checkpoint': info['path'],
              'weights_digest': info['digest'], 'scale': scale}
    if protocol == 'sliding':
        S = min(256, L // 8) if stride is None else stride
        if not 0 < S < sizes[0]:
            raise ValueError(f'stride is {S}; it must be at least 1 and below the shortest length, {sizes[0]}.')
        result |= {'rule': rule, 'stride': S, 'lengths': sizes}

        def measure(model, info, wanted):
            return evaluate_sliding(model, open_data(info, wanted), sizes, S, rule, max_windows, batch_tokens, runtime)
    elif protocol == 'last':
        K = last or min(256, L)
        short = [T for T in sizes if T < K and T != L]  # L itself is the least that a model reads
        if short:
            raise ValueError(f'last is {K}, but lengths has {short[0]}, a window of fewer tokens. '
                             'Choose longer ones, or a smaller last.')
        result |= {'last': K, 'lengths': sizes}

        def measure(model, info, wanted):
            samples = checkpoint.open_windows(info, wanted, split, sizes[-1]).fixed(n_samples, spacing=K)
            return evaluate_last(model, samples, sizes, K, model.config.block_size, batch_tokens, runtime)

    if table:
        model = None  # each row reads its own
        result['rows'] = merge_seeds([evaluate_row(row, measure, runtime) for row in rows])
        print_table(result['rows'], sizes, runtime)
    elif protocol == 'sliding':
        result['rows'] = measure(model, info, dataset)
        runtime.print('  length        ppl      loss   windows   scored tokens   documents')
        for r in result['rows']:
            runtime.print(f"{r['length']:8d} {r['ppl']:10.3f} {r['loss']:9.4f} {r['windows']:9,d} "
                          f"{r['scored_tokens']:15,d} {r['documents']:11,d}")
    elif protocol == 'last':
        result['rows'] = measure(model, info, dataset)
        result['samples'] = result['rows'][0]['windows']
        runtime.print(f'  length   ppl of the last {K}    Delta P of the last {L}: the context before them')
        for r in result['rows']:
            delta = f"{r['delta_p']:+20.3f}   {r['reading']}" if 'delta_p' in r else ''
            runtime.print(f"{r['length']:8d} {r['ppl']:19.3f} {delta}")
    else:
        n_last = last or 64
        at_least(L // 16, {'lengths': sizes[-1]}, 'lengths')  # the width of a bin
        windows = checkpoint.open_windows(info, dataset, split, sizes[-1])
        samples = windows.fixed(n_samples, spacing=n_last)  # may overlap, but no token is scored twice at one length

        def by_position(inputs, targets):
            return torch.cat([model(inputs[:, :end], targets[:, :end])[:, first:]
                              for first, end in model.passes(inputs.shape[1])], dim=1)

        losses = runtime.over_windows(samples, batch_tokens, by_position, f'{sizes[-1]} positions')
        at = {T: losses[:, max(0, T - n_last):T].mean(1) for T in sizes}
        rows = [{'length': T, 'loss': v.mean(), 'standard_error': v.std(ddof=1) / len(v) ** 0.5,
                 'ppl': perplexity(v.mean()), 'windows': len(v), 'scored_tokens': len(v) * min(T, n_last)}
                for T, v in at.items()]
        runtime.print(f'  at T (last {n_last} positions)      loss    +-          ppl   windows')
        for r in rows:
            runtime.print(f"{r['length']:8d} {r['loss']:25.4f} {r['standard_error']:8.4f} {r['ppl']:10.3f} "
                          f"{r['windows']:9,d}")
        positions, binned = bin_means(losses.mean(0), L // 16)
        result |= {'rows': rows, 'last': n_last, 'samples': len(losses), 'scored_tokens': losses.size,
                   'position': positions, 'loss': binned, 'loss_at_by_window': {str(T): v for T, v in at.items()}}
    kind = 'table' if table else '' if protocol == 'sliding' else protocol
    stem = result_path(out_dir, 'eval_ppl', kind, name)
    if runtime.is_main:
        result |= provenance(settings(globals()), runtime, time.perf_counter() - began)
        (draw_table if table else draw)(save_json(f'{stem}.json', result), f'{stem}.png')
        print(f'wrote {stem}.json and .png')
    runtime.close()


if __name__ == '__main__':
    configure(globals())
    main()
