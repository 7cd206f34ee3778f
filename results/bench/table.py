"""
Time and memory of training steps, by context or by position method. The settings are those of
bench.py, and two more: --table= is growth, memory or time_cost, or only the word; --contexts= are
the lengths in tokens of growth and memory.

$ python -m results.bench.table growth --position=none --n_layer=1 --compile=False
$ python -m results.bench.table memory --like="['config/nope_1b.py']" --contexts=[4096,8192,18432]
$ python -m results.bench.table time_cost --like="['config/dape/125m.py']"   # Table 7 of DAPE V2

Writes out_dir/NAME.json. Without --name=, NAME is the table.
"""

import time

import torch

import bench
import position as methods
from bench import medians, new_model, only_scales, random_ids, timings, training_step
from configurator import between, configure, settings
from kernels import repeat_heads
from lib.answers import paper_table, print_rows
from lib.devices import keep_freed_memory
from results import study

# the two settings that bench.py does not have
bench.table = 'growth'       # growth, memory (of contexts) or time_cost; or only the word
bench.contexts = [1024 * 2 ** n for n in range(6)]  # tokens in a sequence


TABLE_7 = {  # {name in Table 7: (position, dape_kernel)}
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
    """Kerple with all scores at once. The code of DAPE V2 computes every method so."""

    def attend(self, q, k, v, i, j):
        weights = self.scores(q, k, i, j).softmax(-1, dtype=torch.float32).to(v.dtype)
        return weights @ repeat_heads(v, q.shape[1])


def step_and_forward(s, who, model):
    """A training step and an uncompiled forward pass on one sequence: {name: function}."""
    x = random_ids(s, 1, s.context)

    @torch.no_grad()
    def forward():
        with s.runtime.autocast():
            model(x, x)  # the loss of any targets
    return {f'{who} step': training_step(s, model, 1, s.context), f'{who} forward': forward}


def time_cost(s):
    """
    Table 7 of DAPE V2: the time of a training step and of a forward pass of each method on one
    sequence, and their ratios to DAPE 1x3-Kerple. Two models are in memory at a time. With AdamW
    they take at least 67 GB at 2.7B parameters and 165 GB at 6.7B.
    """
    width = {2560: '2.7B', 4096: '6.7B'}.get(s.n_embd, '350M')
    paper = {name: row[width] for name, row in paper_table('dape_table7').items()}
    dape = new_model(s, s.context, position='kerple', dape_kernel=3)
    dape, rows = step_and_forward(s, 'DAPE', dape), []
    for method, (kind, kernel) in TABLE_7.items():
        model = new_model(s, s.context, position=kind, dape_kernel=kernel)
        if 'whole' in method:
            for block in model.blocks:
                block.attn.position = WholeMatrix(model.config).to(s.runtime.device)
        seconds = medians(s, step_and_forward(s, 'own', model) | dape)
        rows.append({'method': method, 'seconds': seconds['own step'],
                     'ratio': seconds['own step'] / seconds['DAPE step'],
                     'paper_ratio': paper.get(method) and paper[method] / paper['DAPE 1x3-Kerple'],
                     'forward_seconds': seconds['own forward'],
                     'forward_ratio': seconds['own forward'] / seconds['DAPE forward']})
        print_rows(print, rows[-1:])
    return rows


def growth(s):
    """
    Time and memory of a step of head-scale tuning (ours) and of training, on one sequence of T
    tokens, with activations recomputed. Each limit has a part linear in T and a part quadratic in
    T. Memory does not count weights and optimizer.
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
    Peak memory of one head-scale step on one sequence of T tokens, with activations recomputed. It
    does not count the weights.
    """
    model, rows = only_scales(new_model(s, max(s.contexts)), s.runtime), []
    model.checkpoint_activations = True
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    keep_freed_memory(2 ** 25)  # a heap with holes would be too large for a small machine
    for T in s.contexts:
        began = time.perf_counter()
        peak = bench.peak_memory(training_step(s, model, 1, T), s.runtime)
        rows.append({'length': T, 'peak_memory': peak, 'per_token': peak / T, 'weights': weights,
                     'seconds': time.perf_counter() - began})
        print_rows(print, rows[-1:])
    return rows


TABLES = {'time_cost': time_cost, 'growth': growth, 'memory': memory}


def main(given):
    """given: the names of the settings that the user gave."""
    chosen = settings(vars(bench))
    between(chosen, 1, 'contexts')
    study.require_known([chosen['table']], TABLES)
    chosen['name'] = chosen['name'] or chosen['table']
    bench.run_works(chosen, given, {chosen['table']: TABLES[chosen['table']]})


if __name__ == '__main__':
    study.take_table(TABLES)
    bench.__doc__ = __doc__  # --help shows it
    main(configure(vars(bench), methods.Settings))
