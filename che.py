"""
The Chomsky-hierarchy tasks: train on inputs of up to 40 symbols, test on 41 to 500. Table 6 of "DAPE V2"; tasks of
Deletang et al. 2023, "Neural Networks and the Chomsky Hierarchy", training and test of Ruoss et al. 2023, "Randomized
Positional Encodings". A sequence is the input, then an `empty` token for each symbol of the answer, which is read at
those slots in one pass. The papers' model is a bidirectional encoder; ours is the causal model of model.py, with as
many layers and heads and about as many weights: its slots stand last, and so see the whole input.

$ python che.py --tasks="['even_pairs','bucket_sort']" --max_iters=1000 --test_length=100 --eval_every=10    # small
$ python che.py --tasks=[] --position=kerple --dape_kernel=3 --max_iters=200000   # a column of Table 6, on a GPU

Writes out_dir/TASK.pt, from where a task goes on, also to more steps, and che[_LABEL].json and .png
"""

import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from lib import checkpoints
from configurator import at_least, configure, settings
from model import ModelConfig, Transformer
from runtime import (
    ROOT,
    Progress,
    lock_file,
    new_figure,
    provenance,
    read_json,
    require_checksums,
    result_path,
    save_json,
    save_png,
    setup,
    unlock_file,
)

# what to run
tasks: list[str] = ['even_pairs']  # keys of TASKS; []: all
out_dir: str | None = None   # runs and results go there; None: out/che/METHOD, such as out/che/kerple_dape3
label = ''                   # name of the result
compare: list[str] = []      # che.json of other methods, to stand beside this one in the table
# model
position = 'none'            # none (NoPE), rope, logn, alibi, kerple, fire, t5, cope or xl
dape_kernel = 0              # DAPE on top of the position method: 1, 3, 5 ... keys wide; 0 for none
dape_width = 32              # channels between its two convolutions
n_layer = 5
n_head = 8
n_embd = 64
n_hidden = 176               # of SwiGLU: about the weights of the papers' 256 with ReLU
# training
train_length = 40            # longest input, in symbols; each step draws one length for its whole batch
batch_size = 128             # samples in a step, made anew for each
max_iters = 10000            # steps; 200000 in Table 6
learning_rate = 1e-3         # of Adam, constant after the warm-up
warmup_iters = 100           # linear from 0
grad_clip = 1.0              # global norm; 0 for none
eval_interval = 500          # steps between lines on screen; the run is saved at each
# test
test_length = 500            # longest input
eval_every = 1               # step from one length to the next: 41, 42 ... 500
n_test = 512                 # samples of each length, in batches of 64
# machine
device = 'auto'              # auto, cpu, cuda, mps
seed = 1337                  # of initial weights and samples

MODEL_SETTINGS = 'position', 'dape_kernel', 'dape_width', 'n_layer', 'n_head', 'n_embd', 'n_hidden'
RUN_SETTINGS = (*MODEL_SETTINGS, 'train_length', 'batch_size', 'learning_rate', 'warmup_iters', 'grad_clip',
                'seed')  # they stay the same in an out_dir


# ----------------------- tasks: random generator, B samples, length n -> inputs (B, n), targets (B, m), symbols from 0

def even_pairs(rng, B, n):
    """Is the number of 01 and 10 in a binary string even (0) or odd (1)? 001110 -> 0: there is one of each."""
    return (x := rng.integers(0, 2, (B, n))), x[:, :1] ^ x[:, -1:]  # each such pair changes the symbol


def modular_arithmetic_simple(rng, B, n):
    """Digits with + - * (5, 6, 7) between them, mod 5, products first; an even n is one less. 1+2*3 -> 2."""
    x = np.zeros((B, n - (n % 2 == 0)), np.int64)
    x[:, ::2], x[:, 1::2] = rng.integers(0, 5, x[:, ::2].shape), rng.integers(5, 8, x[:, 1::2].shape)
    total, term = 0, x[:, 0]  # term: the product that is not yet in the sum
    for operator, digit in zip(x.T[1::2], x.T[2::2]):
        total = np.where(operator == 7, total, total + term)
        term = np.choose(operator - 5, (digit, -digit, term * digit)) % 5
    return x, (total + term)[:, None] % 5


def parity_check(rng, B, n):
    """Is the number of ones even (0) or odd (1)? 1010100 -> 1."""
    return (x := rng.integers(0, 2, (B, n))), x.sum(1, keepdims=True) % 2


def cycle_navigation(rng, B, n):
    """Where on a circle of five does a walk from 0 end? 0 is a step back, 1 none, 2 a step on. 20222 -> 3."""
    return (x := rng.integers(0, 3, (B, n))), (x - 1).sum(1, keepdims=True) % 5


def stack_manipulation(rng, B, n):
    """A stack, its top last, then 2 to pop, 3 or 4 to push 0 or 1: what is left, top first, 2. 0110422 -> 11020000."""
    given, place = rng.integers(1, max(2, n), B), np.arange(n + 1)
    x = np.where(place[:n] < given[:, None], rng.integers(0, 2, (B, n)), rng.integers(2, 5, (B, n)))
    stack, height = np.zeros((B, n + 1), np.int64), np.zeros(B, np.int64)
    for symbol in x.T:
        stack[np.arange(B), height] = symbol % 3  # a pop writes above the top, where nothing is read
        height = np.where(symbol == 2, np.maximum(height - 1, 0), height + 1)
    at = height[:, None] - 1 - place
    return x, np.where(at >= 0, np.take_along_axis(stack, at.clip(0), axis=1), 2 * (at == -1))


def reverse_string(rng, B, n):
    """A binary string backwards. 1101 -> 1011."""
    return (x := rng.integers(0, 2, (B, n))), x[:, ::-1].copy()


def expressions(rng, B, n, operators):
    """Random texts (B, n), each operation in brackets, and values mod 5 (B, 1); operators: 2 for + -, 3 for + - *.

    Symbols: five digits, the operators, two brackets. Up to n = 4 a text is 1, -1, (1) or (-1); a longer one is cut at
    an operator into two. All parts of all texts that are equally deep are written at once, and valued from the deepest.
    """
    x, values, levels = np.zeros(B * n, np.int64), np.zeros(B * n, np.int64), []  # one text after the other
    start, end = np.arange(B) * n, np.arange(B) * n + n - 1  # first and last symbols of the parts
    while start.size:
        size = end - start + 1
        x[start[size > 2]], x[end[size > 2]] = 5 + operators, 6 + operators
        short = size <= 4
        s, at, minus = start[short], (end - (size > 2))[short], size[short] % 2 == 0
        x[at], x[at[minus] - 1] = (digit := rng.integers(0, 5, at.size)), 6
        values[s] = np.where(minus, -digit, digit) % 5  # of a part, at its first symbol
        s, e = start[~short], end[~short]
        at, operator = rng.integers(s + 2, e - 1), rng.integers(0, operators, s.size)
        x[at] = 5 + operator
        levels.append((s, at, operator))
        start, end = np.concatenate((s + 1, at + 1)), np.concatenate((at - 1, e - 1))
    for s, at, operator in reversed(levels):
        left, right = values[s + 1], values[at + 1]
        values[s] = np.choose(operator, (left + right, left - right, left * right)) % 5
    return x.reshape(B, n), values[::n, None].copy()


def modular_arithmetic(rng, B, n):
    """The value of an expression in brackets of + - *, mod 5. ((-2)*(4-1)) -> 4."""
    return expressions(rng, B, n, 3)


def solve_equation(rng, B, n):
    """Which digit is x in an equation of + and -, mod 5? (x-(-4))=2 -> 3. For n < 3 all is zero."""
    if n < 3:
        return np.zeros((B, n), np.int64), np.zeros((B, 1), np.int64)
    x, value = expressions(rng, B, n - 2, 2)
    places = (rng.integers(0, n - 2, (B, 1)) + np.arange(n - 2)) % (n - 2)  # from a random one on, once round
    first = (np.take_along_axis(x, places, axis=1) < 5).argmax(1)[:, None]  # digit of these
    at = np.take_along_axis(places, first, axis=1)
    answer = np.take_along_axis(x, at, axis=1)
    np.put_along_axis(x, at, 9, axis=1)
    return np.concatenate((x, np.full((B, 1), 10), value), axis=1), answer


def duplicate_string(rng, B, n):
    """A binary string twice. 101 -> 101101."""
    return (x := rng.integers(0, 2, (B, n))), np.tile(x, 2)


def missing_duplicate(rng, B, n):
    """A binary string twice, one symbol hidden (2): which? 01100210 -> 1. An odd n ends in a 3; n = 1 is 1 -> 1."""
    if n == 1:
        return np.ones((2, B, 1), np.int64)
    x = np.pad(np.tile(rng.integers(0, 2, (B, n // 2)), 2), ((0, 0), (0, n % 2)), constant_values=3)
    at = rng.integers(0, n // 2 * 2, (B, 1))
    answer = np.take_along_axis(x, at, axis=1)
    np.put_along_axis(x, at, 2, axis=1)
    return x, answer


def odds_first(rng, B, n):
    """The symbols at odd places, counted from 0, then those at even ones. 00110101 -> 01110100."""
    return (x := rng.integers(0, 2, (B, n))), np.concatenate((x[:, 1::2], x[:, ::2]), axis=1)


def random_bits(rng, B, n, refused):
    """Bits (B, n); rows for which refused(bits), booleans (B,), is true are drawn again."""
    x = rng.integers(0, 2, (B, n))
    while (again := refused(x)).any():
        x[again] = rng.integers(0, 2, (B, n))[again]
    return x


def to_numbers(x):
    """Bits (B, n), the lowest first, as Python's integers (B,), which may be longer than numpy's."""
    return x.astype(object) @ (1 << np.arange(x.shape[1]).astype(object))


def to_bits(numbers, n):
    """Python's integers (B,) as bits (B, n), the lowest first."""
    return (numbers[:, None] >> np.arange(n).astype(object) & 1).astype(np.int64)


def binary_addition(rng, B, n):
    """Sum of two numbers > 0 with a 2 between, lowest bits first (n < 3: of one). 001201101 -> 0101120000: 4 + 22."""
    place, at = np.arange(n + 1), rng.integers(1, n - 1, (B, 1)) if n > 2 else np.full((B, 1), n)  # of the 2
    first, second = place[:n] < at, place[:n] > at
    x = random_bits(rng, B, n, lambda x: ~((x * first).any(1) & (x * second).any(1)) if n > 2 else x.all(1))
    total = to_bits(to_numbers(x * first) + (to_numbers(x * second) >> at[:, 0].astype(object) + 1), n + 1)
    np.put_along_axis(total, np.max(total * (place + 1), axis=1, keepdims=True).clip(1), 2, axis=1)  # after the sum
    return np.where(place[:n] == at, 2, x), total


def compute_sqrt(rng, B, n):
    """The square root of a number above 0, rounded down, both with the highest bit first. 100101 (37) -> 110 (6)."""
    x = random_bits(rng, B, n, lambda x: ~x.any(1))
    roots = np.frompyfunc(math.isqrt, 1, 1)(to_numbers(x[:, ::-1]))
    return x, to_bits(roots, (n + 1) // 2)[:, ::-1].copy()


def bucket_sort(rng, B, n):
    """A string of five symbols, sorted. 421302214 -> 011222344."""
    return (x := rng.integers(0, 5, (B, n))), np.sort(x, axis=1)


# function, level (regular, deterministic context-free, context-sensitive), symbols of input, of output
TASKS = {task[0].__name__: task for task in (
    (even_pairs, 'R', 2, 2), (modular_arithmetic_simple, 'R', 9, 5), (parity_check, 'R', 2, 2),
    (cycle_navigation, 'R', 3, 5), (stack_manipulation, 'DCF', 5, 3), (reverse_string, 'DCF', 2, 2),
    (modular_arithmetic, 'DCF', 11, 5), (solve_equation, 'DCF', 11, 5), (duplicate_string, 'CS', 2, 2),
    (missing_duplicate, 'CS', 4, 2), (odds_first, 'CS', 2, 2), (binary_addition, 'CS', 3, 3),
    (compute_sqrt, 'CS', 2, 2), (bucket_sort, 'CS', 5, 5))}  # in the order of Table 6


def loss_and_accuracy(model, task, rng, batch, length):
    """On new samples: mean cross-entropy of the answers, in nats a symbol; share of symbols right, up to the end's."""
    make, _, empty, n_out = TASKS[task]  # symbols of the input are below `empty`
    inputs, targets = make(rng, batch, length)
    tokens = np.pad(inputs, ((0, 0), (0, targets.shape[1])), constant_values=empty)
    tokens, targets = (torch.from_numpy(x).to(model.head.weight.device) for x in (tokens, targets))
    logits = model(tokens, last=targets.shape[1])[..., :n_out]
    # answers of two tasks end in a 2, then zeros: what follows the 2, where cumsum is 1 but end is 0, does not count
    end = (targets == 2).int() * (task in ('stack_manipulation', 'binary_addition'))
    counts = end.cumsum(1) == end
    right = ((logits.argmax(-1) == targets) & counts).sum() / counts.sum()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), right


def read_run(path, run_settings):
    """What TASK.pt holds; where there is none, a run of no steps. Refuses a run of other settings or of more steps."""
    if not path.exists():
        return {'step': 0, 'settings': run_settings, 'test': {}}
    open(path, 'rb').close()  # raises OSError where the file may be whole but cannot be read
    try:
        run = torch.load(path, map_location='cpu', weights_only=True)
        changed = [f'{name} {run["settings"][name]}, not {run_settings[name]}' for name in RUN_SETTINGS
                   if run['settings'][name] != run_settings[name]]
        changed += [f'step {run["step"]}, not at most {max_iters}'] * (run['step'] > max_iters)
    except Exception as error:  # zip, unpickling and key errors alike
        raise ValueError(f'{path} is cut short or not a run of che.py ({type(error).__name__}). Remove it.') from error
    require_checksums(path, run, 'Remove it.')
    if changed:
        raise ValueError(f'{path} is another run: {"; ".join(changed)}. Choose another --out_dir=, or remove it.')
    return run


def train(task, model, run, path):
    """Train up to max_iters steps from where `run` is; keep it up to date, and save it every eval_interval steps."""
    weights, recent = [p for p in model.parameters() if p.requires_grad], []
    optimizer = torch.optim.Adam(weights, fused=weights[0].device.type in ('cpu', 'cuda'))
    optimizer.load_state_dict(run.get('optimizer', optimizer.state_dict()))
    for step in range(run['step'], max_iters):
        optimizer.param_groups[0]['lr'] = learning_rate * min(1.0, (step + 1) / max(1, warmup_iters))
        rng = np.random.default_rng([seed, *f'train {task}'.encode(), step])
        loss, share = loss_and_accuracy(model, task, rng, batch_size, int(rng.integers(1, train_length + 1)))
        loss.backward()
        if grad_clip:
            torch.nn.utils.clip_grad_norm_(weights, grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent.append(torch.stack((loss.detach(), share)))
        if (step + 1) % eval_interval == 0 or step + 1 == max_iters:
            mean_loss, share = torch.stack(recent).mean(0).tolist()
            if not math.isfinite(mean_loss):
                raise ValueError(f'{task}: the loss became {mean_loss} by step {step + 1}. Lower learning_rate.')
            print(f'{task}: step {step + 1:6d}  loss {mean_loss:.4f}  accuracy {share:.1%}', flush=True)
            run |= {'step': step + 1, 'model': model.state_dict(), 'optimizer': optimizer.state_dict(), 'test': {}}
            checkpoint.save(path, **run)
            recent = []


@torch.no_grad()
def test(task, model, run, path, lengths):
    """{length: accuracy, a mean over batches of 64 samples}; kept in run['test'], from where a stopped test goes on."""
    done, progress = run['test'].setdefault(n_test, {}), Progress(len(lengths), f'{task}, test')
    for i, length in enumerate(lengths):
        if length not in done:
            rng = np.random.default_rng([seed, *f'test {task}'.encode(), length])
            sizes = [min(64, n_test - start) for start in range(0, n_test, 64)]
            shares = [loss_and_accuracy(model, task, rng, size, length)[1] for size in sizes]
            done[length] = torch.stack(shares).mean().item()
            checkpoint.save(path, **run)
            progress.update(i + 1)
    return {length: done[length] for length in lengths}


def print_table(results):
    """Table 6's layout: a line a task; of each method the accuracy inside and past train_length, and the paper's."""
    names, lengths = '', ''
    for result in results:
        L, end = result['train_length'], max(result['lengths'])
        names += f"{result['method']:>28}"
        lengths += f"{f'1-{L}':>8}{f'{L + 1}-{end}':>10}   Table 6"
    print(f'{"accuracy (%)":29} chance{names}\n{"":36}{lengths}')
    for task, (_, level, _, n_out) in TASKS.items():
        cells, rows = '', [result['tasks'].get(task) for result in results]
        for row in rows:
            paper = f"{row['paper']:.2f}" if row and row['paper'] else '-'
            cells += f"{100 * row['inside']:8.2f}{100 * row['outside']:10.2f}{paper:>10}" if row else f"{'-':>28}"
        if any(rows):
            print(f'{level:4}{task:25} {100 / n_out:6.0f}{cells}')


def draw(result, path):
    """Accuracy by length, a panel a task; from the result's JSON alone."""
    columns = min(4, len(result['tasks']))
    figure, axes = new_figure(-(-len(result['tasks']) // columns), columns, width=6.4 / min(2, columns), height=2.6)
    for axis, (task, row) in zip(np.ravel(axes), result['tasks'].items()):
        axis.plot(result['lengths'], np.multiply(row['accuracy'], 100), color='#1f4e9c', lw=1)
        axis.axhline(100 * row['chance'], color='#999999', ls='--', lw=1)
        axis.axvline(result['train_length'], color='black', ls=':', lw=1)
        axis.set(title=f"{task.replace('_', ' ')}: {row['outside']:.1%} past {result['train_length']}", ylim=(-3, 103),
                 xlabel='length of the input (symbols)', ylabel='accuracy (%)')
    for axis in np.ravel(axes)[len(result['tasks']):]:
        axis.set_visible(False)
    figure.suptitle(f"{result['method']}; dashed: chance", fontsize=11)
    save_png(figure, path)


def main():
    began, runtime = time.perf_counter(), setup(device, 'float32', seed)
    at_least(1, globals(), 'train_length', 'batch_size', 'max_iters', 'eval_interval', 'eval_every', 'n_test')
    at_least(train_length + 1, globals(), 'test_length')
    at_least(0, globals(), 'learning_rate', 'warmup_iters', 'grad_clip')
    if runtime.world_size > 1:
        raise ValueError('che.py runs on one device: without torchrun. Start a process for some of the tasks on each.')
    if set(tasks) - set(TASKS):
        raise ValueError(f"{', '.join(set(tasks) - set(TASKS))}: no task of that name. Choose from {', '.join(TASKS)}.")
    others = [read_json(path, 'che') for path in compare]
    folder = Path(out_dir or f"out/che/{position}{f'_dape{dape_kernel}' * bool(dape_kernel)}")
    run_settings = {name: value for name, value in settings(globals()).items() if name in RUN_SETTINGS}
    runs = {name: read_run(folder / f'{name}.pt', run_settings) for name in TASKS if name in tasks or not tasks}
    lengths = [*range(1, train_length + 1, eval_every), *range(train_length + 1, test_length + 1, eval_every)]
    named = {'none': 'NoPE', 'rope': 'RoPE', 'xl': 'Relative', 'alibi': 'ALiBi', 'kerple': 'Kerple', 'fire': 'FIRE'}
    method = f'DAPE 1x{dape_kernel} ' * bool(dape_kernel) + named.get(position, position)  # as Table 6 calls it
    rows, table = {}, json.loads((ROOT / 'results/papers.json').read_text())['dape_table6']
    configs = {}  # all first, as a setting may be refused here
    for task in runs:
        make, _, n_in, n_out = TASKS[task]
        slots = sum(x.shape[1] for x in make(np.random.default_rng(0), 1, train_length))
        configs[task] = ModelConfig(max(n_in + 1, n_out), slots, n_kv_head=n_head,
                                    **{name: run_settings[name] for name in MODEL_SETTINGS})
    locks = [lock_file(folder / f'{task}.pt', runtime) for task in runs]
    for task, run in runs.items():
        _, level, _, n_out = TASKS[task]
        torch.manual_seed(seed)  # the same weights, whatever was trained before
        model = Transformer(configs[task])
        model.init_weights().load_state_dict(run.get('model', model.state_dict()))
        path = folder / f'{task}.pt'
        print(f"{task}: {method}, {model.n_params():,} parameters; steps {run['step']} to {max_iters} into {path}")
        train(task, model.to(runtime.device), run, path)
        by_length = test(task, model, run, path, lengths)
        inside, outside = (np.mean([by_length[n] for n in lengths if (n <= train_length) == short]) for short in (1, 0))
        rows[task] = {'level': level, 'inside': inside, 'outside': outside, 'chance': 1 / n_out,
                      'paper': dict(zip(table['columns'], table['rows'][task])).get(method),
                      'accuracy': [*by_length.values()]}
    stem = result_path(folder, 'che', label)
    result = {'stage': 'che', 'label': label, 'method': method, 'train_length': train_length, 'lengths': lengths,
              'tasks': rows} | provenance(settings(globals()), runtime, time.perf_counter() - began)
    print_table([result, *others])
    draw(save_json(f'{stem}.json', result), f'{stem}.png')
    for lock in locks:
        unlock_file(lock)
    print(f'wrote {stem}.json and .png')


if __name__ == '__main__':
    configure(globals())
    main()
