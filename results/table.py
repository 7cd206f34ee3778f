"""
Tables of many runs: the perplexity of each row by length. A row is a checkpoint that is read with a
softmax scale or with an extension of RoPE. The protocol of Table 2 of "Length Generalization of
Causal Transformers without Position Encoding" is sliding windows. That of Figure 2 of "DAPE V2" is
the last tokens of each length.

A table is a program, results/NAME/table.py. It has settings and rows. Run it as a module:

$ python -m results.extension_demo.table
$ torchrun --nproc_per_node=8 -m results.papers.table

Writes out_dir/eval_ppl_table[_LABEL].json and .png

A row is {'name': ..., 'init_from': FILE}. It may have 'position', 'scale', 'rope_scaling' and
'dataset', as in eval_ppl.py. It may have 'paper', the row of the paper's table to show next to it.
If 'scale' or 'rope_scaling' is a list, every candidate is measured, and the best at each length is
shown. Consecutive rows of one name are seeds of one model. Their mean and standard deviation are
shown. The gain of sliding windows, in nats, is over the same model with its context cut to L
tokens; see eval_ppl.py.
"""

import itertools
import json
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from configurator import between
from eval_ppl import PROTOCOLS, checked_stride, checked_tail, perplexity
from lib import plots
from lib.answers import OnlyWriter, paper_table, print_rows, result_path
from lib.checkpoints import Run, dataset_of, load_model
from lib.devices import setup
from lib.errors import UserError


@dataclass
class Settings:
    """The settings of every table except out_dir. A table may have other defaults."""
    dataset: str | None = None  # a folder of data/; None: each model's training data
    split: str = 'test'
    protocol: str = 'sliding'   # sliding windows, or tail (last tokens)
    lengths: list[int] | None = None  # window lengths in tokens; None: L to 8L of the first row
    rule: str = 'same'          # sliding windows: same, paper or classic; see eval_ppl.py
    stride: int | None = None   # tokens scored per sliding window; None: 256, or L/8 if L < 2048
    max_windows: int = 1024     # sliding: windows per length
    n_samples: int = 256        # tail: windows of the longest length, evenly spaced
    tail: int | None = None     # tail: tokens at the end of a length; None: 256, or L if L < 256
    batch_tokens: int = 16384   # tokens in one forward pass; lower it when memory runs out
    compile: bool = True        # torch.compile a model, if it reads enough for this to pay
    label: str = ''             # name of the result
    device: str = 'auto'        # auto, cpu, cuda, mps
    dtype: str = 'auto'         # auto, float32, bfloat16, float16


# {protocol: (name of the paper's table, its lengths)}
PAPER = {'sliding': ('nope_table2', ['2K', '4K', '8K', '16K']),
         'tail': ('dape_table9', [128, 256, 512, 1024, 2048, 4096, 8192])}


def paper_rows(protocol):
    """{name of a row: its perplexities} of the paper's table."""
    name, columns = PAPER[protocol]
    return {row: list(ppl.values())[:len(columns)] for row, ppl in paper_table(name).items()}


# ---------------------------------------------------------------------- measure

def candidates(row, key):
    """The values of a row for a key, to be measured one by one."""
    value = row.get(key)
    return value if isinstance(value, list) else [value]


def tuning_tokens(info, scale):
    """The number of tokens that the scales were tuned on, or the model was fine-tuned on."""
    if isinstance(scale, str):
        return json.loads(Path(scale).read_text(encoding='utf-8')).get('tuning_tokens', 0)
    settings = info['settings']
    if settings.get('init_from', 'scratch') == 'scratch':
        return 0
    return info['step'] * settings['batch_size'] * settings['block_size']


def evaluate_row(row, settings, lengths):
    """
    The row, and what was measured: the loss of each candidate at each length; at each length the
    lowest perplexity, its standard error in nats, and its candidate; and the candidate with the
    lowest mean loss over lengths.
    """
    tried = {}
    for scale, scaling in itertools.product(candidates(row, 'scale'),
                                            candidates(row, 'rope_scaling')):
        run = Run(settings | row | {'scale': scale, 'rope_scaling': scaling, 'label': ''})
        label = run.label or 'plain'
        if label in tried:
            raise UserError(f"two candidates of {row['name']} are called {label}. Rename a file.")
        tried[label] = PROTOCOLS[settings['protocol']](run, lengths)['rows']

    names = list(tried)
    losses = np.array([[r['loss'] for r in rows] for rows in tried.values()])
    errors = np.array([[r['standard_error'] for r in rows] for rows in tried.values()])
    best = losses.argmin(0)  # the candidate at each length
    rows = tried[names[0]]
    found = {key: rows[0][key] for key in ('windows', 'documents') if key in rows[0]}
    if len(tried) == 1 and 'delta_p' in rows[-1]:
        found['delta_p'] = [r.get('delta_p') for r in rows]
    if 'cut_loss' in rows[-1]:  # past L; take the candidate that is best when cut
        cut = [[r.get('cut_loss', np.nan) for r in rows] for rows in tried.values()]
        found['cut_loss'] = np.min(cut, axis=0)
        found['gain'] = found['cut_loss'] - losses.min(0)
    return row | found | {
        'position_method': run.model.config.position, 'block_size': run.L,
        'pretrained_length': run.model.config.L0,
        'checkpoint': run.info['path'], 'weights_digest': run.info['digest'],
        'tuning_tokens': tuning_tokens(run.info, scale),
        'ppl': np.array([perplexity(loss) for loss in losses.min(0)]),
        'standard_error': errors[best, np.arange(len(best))],
        'losses': dict(zip(names, losses)),
        'best': [names[i] for i in best],
        'best_single': names[losses.mean(1).argmin()]}


def merge_seeds(rows):
    """
    Merge consecutive rows of one name into one row: the mean of their perplexities, `sd`, the
    standard deviation, and `runs`, all of them. Its other entries are those of the first row.
    """
    merged = []
    for _, group in itertools.groupby(rows, key=lambda row: row['name']):
        runs = list(group)
        if len(runs) == 1:
            merged += runs
            continue
        ppl = np.array([run['ppl'] for run in runs])
        row = runs[0] | {'ppl': ppl.mean(0), 'sd': ppl.std(0, ddof=1), 'runs': runs}
        for key in ('checkpoint', 'weights_digest', 'standard_error'):
            del row[key]  # these describe a single run
        for key in ('delta_p', 'cut_loss', 'gain'):
            if all(key in run for run in runs):
                row[key] = np.array([run[key] for run in runs], float).mean(0)
            else:
                row.pop(key, None)  # a row with candidates has no delta_p
        if 'gain' in row:
            row['gain_sd'] = np.std([run['gain'] for run in runs], axis=0, ddof=1)
        merged.append(row)
    return merged


# ---------------------------------------------------------------------- print

def ppl_text(ppl, digits):
    return f'{ppl:.{digits}f}' if ppl < 1000 else '>10^3'


def line_of(row, paper, s):
    """{heading: text} of a row. paper: the paper's perplexities to show next to it."""
    tokens = row['tuning_tokens']
    line = {'row': row['name'], 'tokens': f'{tokens / 1e6:.1f}M' if tokens else '-'}
    for i, T in enumerate(s.lengths):
        line[str(T)] = ppl_text(row['ppl'][i], 2)
        if 'sd' in row and row['ppl'][i] < 1000:
            line[str(T)] += f" ± {row['sd'][i]:.2f}"
    for T, ppl in zip(PAPER[s.protocol][1], paper):
        line[f'paper: {T}'] = ppl_text(ppl, 1)
    if 'delta_p' in row:
        line[f'Delta P at {s.lengths[-1]}'] = f"{row['delta_p'][-1]:+.2f}"
    if 'gain' in row:
        line[f'own gain at {s.lengths[-1]}'] = f"{row['gain'][-1]:+.3f}"
        if 'gain_sd' in row:
            line[f'own gain at {s.lengths[-1]}'] += f" ± {row['gain_sd'][-1]:.3f}"
    if len(row['losses']) > 1:
        line['best'] = ', '.join(row['best'])
    return line


# ---------------------------------------------------------------------- the whole table

def rows_of_seeds(folder, name, run, seeds=(1337, 1338, 1339), scale_file=None, **more):
    """A row for each seed of a run, FOLDER/SEED/RUN. more: further entries of each."""
    rows = []
    for seed in seeds:
        row = {'name': name, 'init_from': f'{folder}/{seed}/{run}/last.pt'}
        if scale_file:
            row['scale'] = f'{folder}/{seed}/{run}/{scale_file}'
        rows.append(row | more)
    return rows


def rows_there(rows, runtime):
    """The rows whose checkpoint and scale file exist; a line says which are left out."""
    there = []
    for row in rows:
        files = [row['init_from'], *candidates(row, 'scale')]
        files = [file for file in files if str(file).endswith(('.pt', '.json'))]
        missing = [file for file in files if not Path(file).exists()]
        if missing:
            runtime.print(f"{row['name']} is left out: {missing[0]} does not exist")
        else:
            there.append(row)
    if not there:
        raise UserError('no row of the table has its files. The first lines of its program say how '
                        'to make them.')
    return there


def run_table(settings, rows):
    """Measure, print and write a table. settings: {name: value} of Settings, and out_dir."""
    began, s = time.perf_counter(), SimpleNamespace(**settings)
    if s.protocol not in PAPER:
        raise UserError(f"protocol is '{s.protocol}'. Choose {' or '.join(PAPER)}.")
    between(settings, 1, 'lengths', 'max_windows', 'n_samples', 'tail', 'batch_tokens')
    runtime = setup(s.device, s.dtype)
    rows, path = rows_there(rows, runtime), result_path(s.out_dir, 'eval_ppl_table', s.label)
    only = OnlyWriter(f'{path}.json', runtime.is_main)
    first = rows[0]
    info = load_model(first['init_from'], s.out_dir, 'cpu', first.get('position'))[1]
    L, data_name = info['model_config']['block_size'], first.get('dataset') or s.dataset
    s.lengths = sorted(s.lengths or [L, 2 * L, 4 * L, 8 * L])
    if s.protocol == 'sliding':
        s.stride = checked_stride(s.stride, L, s.lengths)
        how = {'rule': s.rule, 'stride': s.stride}
    else:
        s.tail = checked_tail(s.tail, L, s.lengths)
        how = {'tail': s.tail}

    s.position, s.dtype = None, str(runtime.dtype).removeprefix('torch.')
    rows = merge_seeds([evaluate_row(row, vars(s), s.lengths) for row in rows])
    paper = paper_rows(s.protocol)
    print_rows(runtime.print, [line_of(row, paper.get(row.get('paper'), []), s) for row in rows])
    result = {'stage': 'eval_ppl', 'protocol': s.protocol, 'label': s.label, 'block_size': L,
              'dataset': dataset_of(info, data_name), 'split': s.split, **how,
              'lengths': s.lengths, 'rows': rows}
    plots.write_result(path, result, settings, runtime, began)
    only.close()
    runtime.close()
