"""
Time and memory of training steps against the context and the position method, with the sizes and
settings of bench.py.

$ python -m results.bench.table growth --position=none --n_layer=1 --compile=False
$ python -m results.bench.table memory --like="['config/nope_1b.py']" --contexts=[4096,8192,18432]
$ python -m results.bench.table time_cost --like="['config/dape/125m.py']"   # Table 7 of DAPE V2

Writes out_dir/NAME.json; the name is the table's where none is given
"""

import json
import math
import sys
import time

import torch

import bench
import position as methods
from bench import medians, new_model, only_scales, random_ids, timings, training_step
from configurator import between, configure, settings
from kernels import repeat_heads
from lib.devices import keep_freed_memory
from lib.errors import ROOT, UserError

globals().update(settings(vars(bench)))  # its settings are this program's, too
table = 'growth'             # growth, memory (of contexts) or time_cost; or the word alone
contexts = [1024, 2048, 4096, 8192, 16384, 32768]  # tokens in a sequence

TABLE_7 = {  # its names, and ours for method and DAPE's kernel
    'RoPE': ('rope', 0),
    'T5': ('t5', 0),
    'ALiBi': ('alibi', 0),
    'Kerple': ('kerple', 0),
    'FIRE': ('fire', 0),
    'CoPE': ('cope', 0),
    'DAPE-Kerple': ('kerple', 1),
    'DAPE 1x3-Kerple': ('kerple', 3),
    'Kerple, whole matrix': ('kerple', 0),
}


class WholeMatrix(methods.Kerple):
    """Kerple with all scores at once, as the code of DAPE V2 computes every method."""

    def attend(self, q, k, v, i, j):
        weights = self.scores(q, k, i, j).softmax(-1, dtype=torch.float32).to(v.dtype)
        return weights @ repeat_heads(v, q.shape[1])


def step_and_forward(s, model):
    """A training step and an uncompiled forward pass on one sequence."""
    x = random_ids(s, 1, s.context)

    @torch.no_grad()
    def forward():
        with s.runtime.autocast():
            model(x, x)  # the loss, of whatever targets
    return training_step(s, model, 1, s.context), forward


def time_cost(s):
    """
    Table 7 of DAPE V2: a training step and a forward pass of each method, and their ratios to DAPE
    1x3-Kerple's.
    """
    paper = json.loads((ROOT / 'results/papers/tables.json').read_text())['dape_table7']
    column = {2560: 1, 4096: 2}.get(s.n_embd, 0)  # by width: 2.7B, 6.7B; beside all others 350M
    whole = paper['rows']['DAPE 1x3-Kerple'][column]
    dape = new_model(s, s.context, position='kerple', dape_kernel=3)
    dape_step, dape_forward = step_and_forward(s, dape)
    rows = []
    print(f'a training step on one sequence of {s.context}, and its ratio to DAPE 1x3-Kerple')
    print(f"{'':24} {'ms':>8} {'ratio':>16} {'in the paper':>14} {'of a forward':>12}")
    for method, (kind, kernel) in TABLE_7.items():  # two models at a time
        model = new_model(s, s.context, position=kind, dape_kernel=kernel)
        if 'whole' in method:
            for block in model.blocks:
                block.attn.position = WholeMatrix(model.config).to(s.runtime.device)
        step, forward = step_and_forward(s, model)
        seconds = medians(s, {'step': step, 'forward': forward, 'DAPE step': dape_step,
                              'DAPE forward': dape_forward})
        row = {'method': method, 'seconds': seconds['step'],
               'ratio': seconds['step'] / seconds['DAPE step'], 'paper_ratio': None,
               'forward_seconds': seconds['forward'],
               'forward_ratio': seconds['forward'] / seconds['DAPE forward']}
        if method in paper['rows']:
            row['paper_ratio'] = paper['rows'][method][column] / whole
        rows.append(row)
        print(f"{method:24} {row['seconds'] * 1e3:8.1f} {row['ratio']:16.2f} "
              f"{row['paper_ratio'] or math.nan:14.2f} {row['forward_ratio']:12.2f}")
    return rows


def growth(s):
    """
    Time and memory of steps on one sequence of T tokens, of head-scale tuning (ours) and of
    training, activations recomputed: linear and quadratic in T, as the arithmetic of their limits
    says. Memory is beyond weights and optimizer.
    """
    model = new_model(s, max(s.contexts))
    tuned, rows = only_scales(new_model(s, max(s.contexts)), s.runtime), []
    tuned.checkpoint_activations = model.checkpoint_activations = True
    for T in s.contexts:
        works = {'ours': training_step(s, tuned, 1, T), 'whole step': training_step(s, model, 1, T)}
        linear, quadratic = bench.step_limits(s, model, T, T, forwards=2)
        limits = {who: seconds + quadratic for who, seconds in linear.items()}
        result = timings(s, f'head-scale step, T = {T}', works, T, limits)
        rows.append(result | {'linear_seconds': linear, 'quadratic_seconds': quadratic})
    return rows


def memory(s):
    """
    Peak memory of a head-scale step on one sequence of T tokens, activations recomputed, beyond the
    weights. One call.
    """
    model, rows = only_scales(new_model(s, max(s.contexts)), s.runtime), []
    model.checkpoint_activations = True
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    keep_freed_memory(2 ** 25)  # a heap with holes would be too large for a small machine
    print(f'head-scale step of {model.n_params():,} parameters, weights of {weights / 1e9:.2f} GB')
    for T in s.contexts:
        began = time.perf_counter()
        peak = bench.peak_memory(training_step(s, model, 1, T), s.runtime)
        rows.append({'length': T, 'peak_memory': peak, 'per_token': peak / T, 'weights': weights,
                     'seconds': time.perf_counter() - began})
        print(f'{T:8,d} tokens {peak / 1e9:8.2f} GB {peak / T / 1e3:8.1f} kB a token', flush=True)
    return rows


TABLES = {'time_cost': time_cost, 'growth': growth, 'memory': memory}


def main(given=()):
    """given: the names of the settings that the user gave."""
    if table not in TABLES:
        raise UserError(f"table is '{table}'. Choose {', '.join(TABLES)}.")
    between(globals(), 1, 'contexts')
    chosen = settings(globals())
    chosen['name'] = chosen['name'] or table
    bench.run_works(chosen, given, {table: TABLES[table]})


if __name__ == '__main__':
    for i, argument in enumerate(sys.argv):
        if argument in TABLES:
            sys.argv[i] = f'--table={argument}'
    main(configure(globals(), methods.Settings))
