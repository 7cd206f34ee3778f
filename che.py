"""
The Chomsky-hierarchy tasks: train on inputs of up to 40 symbols, test on 41 to 500. Table 6 of "DAPE V2"; the tasks are
those of Deletang et al. 2023 ("Neural Networks and the Chomsky Hierarchy"), training and test those of Ruoss et al. 2023
("Randomized Positional Encodings"). A sequence is the input and then as many `empty` tokens as the answer has symbols;
all answers are read at those slots in one pass. The papers' model is a bidirectional encoder of post-norm layers; ours is
the causal model of model.py, with as many layers, heads and about as many parameters, whose slots, as they come last,
see the whole input.

$ python che.py --max_iters=1000 --test_length=100 --eval_every=10 --n_test=128    # one task: 2 minutes on a CPU core
$ python che.py --tasks="['even_pairs','missing_duplicate']" --position=kerple --dape_kernel=3
$ python che.py --tasks=[] --position=kerple --max_iters=200000                    # all 14 tasks: a column of Table 6

A task goes on where it stopped, also for more steps. Tasks may run side by side as processes with one out_dir; then name
them all in one call for the table. Writes out_dir/TASK.pt and che[_LABEL].json and .png
"""

import difflib
import json
import math
import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from configurator import configure, settings
from model import ModelConfig, Transformer
from runtime import ROOT, Progress, new_figure, provenance, save_json, save_png, setup, whole_file

# what to run
tasks: list[str] = ['even_pairs']  # keys of TASKS; []: all of them
out_dir: str | None = None   # runs and results go there; None: out/che/METHOD, such as out/che/kerple_dape3
label = ''                   # name of the result
# model
position = 'none'            # none (NoPE), rope, logn, alibi, kerple, fire, t5, cope or xl
dape_kernel = 0              # DAPE on top of the position method: 1, 3, 5 ... keys wide; 0 for none
dape_width = 32              # channels between its two convolutions
n_layer = 5
n_head = 8
n_embd = 64
n_hidden = 176               # of SwiGLU: about the weights of the papers' 256 with ReLU
# training
train_length = 40            # longest input in training, in symbols; every step draws one length for its whole batch
batch_size = 128             # samples in a step, made anew for each
max_iters = 10000            # steps; 200000 in Table 6
learning_rate = 1e-3         # of Adam, after the warm-up
warmup_iters = 100           # linear from 0
grad_clip = 1.0              # global norm
eval_interval = 500          # steps between lines on screen; the run is saved at each
# test
test_length = 500            # longest input in the test
eval_every = 1               # step from one length to the next: 41, 42 ... 500; more for a short test
n_test = 512                 # samples at each length, in batches of 64
# machine
device = 'auto'              # auto, cpu, cuda, mps
seed = 1337                  # of initial weights and samples

# TASK.pt holds a run of these; the others may change from call to call
RUN_SETTINGS = ('position', 'dape_kernel', 'dape_width', 'n_layer', 'n_head', 'n_embd', 'n_hidden', 'train_length',
                'batch_size', 'learning_rate', 'warmup_iters', 'grad_clip', 'seed')
TEST_BATCH = 64  # accuracy is a mean over batches of this many samples


# ----------------------------------------------------------------------------- tasks
# each: rng, samples B, length n -> inputs (B, n), targets (B, m), symbols 0, 1 ...

END = 2  # ends an answer that may be shorter than its slots: stack_manipulation and binary_addition


def bits(rng, B, n):
    return rng.integers(0, 2, (B, n))


def even_pairs(rng, B, n):
    """Is the number of 01 and 10 in a binary string even (0) or odd (1)? 001110 -> 0: one of each."""
    x = bits(rng, B, n)
    return x, x[:, :1] ^ x[:, -1:]  # each such pair changes the symbol


def parity_check(rng, B, n):
    """Is the number of ones even (0) or odd (1)? 1010100 -> 1."""
    x = bits(rng, B, n)
    return x, x.sum(1, keepdims=True) % 2


def cycle_navigation(rng, B, n):
    """Where on a circle of 5 does a walk from 0 end? 0, 1, 2: a step back, none, a step on. 20222 -> 3."""
    x = rng.integers(0, 3, (B, n))
    return x, (x - 1).sum(1, keepdims=True) % 5


def modular_arithmetic_simple(rng, B, n):
    """Value mod 5 of digits with + - * (5, 6, 7) between them, products first; an even n is one less. 1+2*3 -> 2."""
    digits, operators = rng.integers(0, 5, (B, (n + 1) // 2)), rng.integers(5, 8, (B, (n - 1) // 2))
    x = np.empty((B, digits.shape[1] + operators.shape[1]), np.int64)
    x[:, ::2], x[:, 1::2] = digits, operators
    total, product = np.zeros(B, np.int64), digits[:, 0]  # sum of the products before, and the one not yet ended
    for operator, digit in zip(operators.T, digits.T[1:]):
        times = operator == 7
        total = np.where(times, total, total + product) % 5
        product = np.where(times, product * digit, np.where(operator == 6, -digit, digit)) % 5
    return x, ((total + product) % 5)[:, None]


def stack_manipulation(rng, B, n):
    """
    A stack, its top last, then what is done to it: pop, push 0, push 1 (2, 3, 4); an empty stack stays empty. What is
    left, its top first, then the end symbol and zeros. 0110 422 -> 1102 0000.
    """
    height = rng.integers(1, max(2, n), B)                                    # n - 1 at most; of one symbol 1
    x = np.where(np.arange(n) < height[:, None], bits(rng, B, n), rng.integers(2, 5, (B, n)))
    stack, height, row = np.zeros((B, n), np.int64), np.zeros(B, np.int64), np.arange(B)
    for symbol in x.T:  # the stack at the start is pushed, too
        push = symbol != 2
        stack[row[push], height[push]] = symbol[push] % 3                     # 3 is 0, 4 is 1
        height = np.where(push, height + 1, np.maximum(height - 1, 0))
    return x, ended(np.take_along_axis(stack, (height[:, None] - 1 - np.arange(n)).clip(0), axis=1), height)


def ended(answers, length):
    """Answers (B, n), each of its own length (B,), with the end symbol after it and then zeros: (B, n + 1)."""
    slot, length = np.arange(answers.shape[1] + 1), length[:, None]
    return np.where(slot < length, np.pad(answers, ((0, 0), (0, 1))), np.where(slot == length, END, 0))


def reverse_string(rng, B, n):
    """A binary string backwards. 1101 -> 1011."""
    x = bits(rng, B, n)
    return x, x[:, ::-1].copy()


def expression(draw, n, operators):
    """
    A random expression of n symbols with a bracket around each operation, and its value mod 5. Of up to four symbols:
    1, -1, (1) or (-1). draw(k) is uniform in 0 ... k - 1, and called at most n times.
    """
    if n <= 4:
        digit = draw(5)
        text = '-' * (n % 2 == 0) + str(digit)
        return f'({text})' if n > 2 else text, digit if n % 2 else -digit % 5
    n_left = 1 + draw(n - 4)
    left, a = expression(draw, n_left, operators)
    right, b = expression(draw, n - 3 - n_left, operators)
    operator = operators[draw(len(operators))]
    value = a + b if operator == '+' else a - b if operator == '-' else a * b
    return f'({left}{operator}{right})', value % 5


def draws(rng, B, n):
    """For each of B samples, a draw() of expression() for n calls: much faster than a call of numpy each."""
    for row in rng.random((B, n)).tolist():
        yield lambda k, row=iter(row): int(next(row) * k)


def symbols(texts, alphabet):
    """Texts of one length, (B, n): each character's place in the alphabet."""
    place = np.zeros(128, np.int64)
    place[list(alphabet.encode())] = range(len(alphabet))
    return place[np.frombuffer(''.join(texts).encode(), np.uint8)].reshape(len(texts), -1)


def modular_arithmetic(rng, B, n):
    """Value mod 5 of an expression in brackets, of + - *. ((-2)*(4-1)) -> 4."""
    pairs = [expression(draw, n, '+-*') for draw in draws(rng, B, n)]  # a grammar: one sample after the other
    texts, values = zip(*pairs)
    return symbols(texts, '01234+-*()'), np.array(values)[:, None]


def solve_equation(rng, B, n):
    """Which digit is x, mod 5, in an equation of + and -? (x-(-4))=2 -> 3. For n < 3, zeros and answer 0."""
    if n < 3:
        return np.zeros((B, n), np.int64), np.zeros((B, 1), np.int64)
    texts, answers = [], []
    for draw in draws(rng, B, n):
        text, value = expression(draw, n - 2, '+-')
        at = draw(n - 2)
        while not text[at].isdigit():  # from there the next digit, from the end on to the start
            at = (at + 1) % (n - 2)
        texts.append(f'{text[:at]}x{text[at + 1:]}={value}')
        answers.append(int(text[at]))
    return symbols(texts, '01234+-()x='), np.array(answers)[:, None]


def duplicate_string(rng, B, n):
    """A binary string twice. 101 -> 101101."""
    x = bits(rng, B, n)
    return x, np.tile(x, 2)


def missing_duplicate(rng, B, n):
    """
    A binary string twice, in which one symbol is hidden (2): which? 01100210 -> 1. An odd n ends in a padding symbol
    (3); for n = 1, the symbol 1 and answer 1.
    """
    if n == 1:
        return np.ones((B, 1), np.int64), np.ones((B, 1), np.int64)
    x = np.pad(np.tile(bits(rng, B, n // 2), 2), ((0, 0), (0, n % 2)), constant_values=3)
    at = rng.integers(0, n // 2 * 2, (B, 1))
    answer = np.take_along_axis(x, at, axis=1)
    np.put_along_axis(x, at, 2, axis=1)
    return x, answer


def odds_first(rng, B, n):
    """The symbols at odd places, counted from 0, then those at even ones. 00110101 -> 01110100."""
    x = bits(rng, B, n)
    return x, np.concatenate((x[:, 1::2], x[:, ::2]), axis=1)


def binary_addition(rng, B, n):
    """
    Sum of two numbers above 0, all with the lowest bit first, 2 between them; the end symbol, then zeros. 001 2 01101
    (4 + 22) -> 010112 0000. For n < 3 one number below 2^n - 1, without its zeros at the end.
    """
    draw = random.Random(int(rng.integers(2 ** 63)))  # Python's: its integers have any length, and so one by one
    texts, sums = [], []
    for first in rng.integers(1, max(2, n - 1), B).tolist():
        if n < 3:
            numbers, widths = [draw.randrange(2 ** n - 1)], [n]
        else:
            widths = [first, n - 1 - first]
            numbers = [draw.randrange(1, 2 ** width) for width in widths]
        texts.append('2'.join(f'{number:0{width}b}'[::-1] for number, width in zip(numbers, widths)))
        sums.append(f'{sum(numbers):b}'[::-1])
    lengths = np.array([len(text) for text in sums])
    return symbols(texts, '012'), ended(symbols([text.ljust(n, '0') for text in sums], '01'), lengths)


def compute_sqrt(rng, B, n):
    """The whole part of the square root of a number above 0, both with the highest bit first. 100101 -> 110: of 37, 6."""
    draw = random.Random(int(rng.integers(2 ** 63)))
    numbers = [draw.randrange(1, 2 ** n) for _ in range(B)]
    roots = [f'{math.isqrt(number):0{(n + 1) // 2}b}' for number in numbers]
    return symbols([f'{number:0{n}b}' for number in numbers], '01'), symbols(roots, '01')


def bucket_sort(rng, B, n):
    """A string of five symbols, sorted. 421302214 -> 011222344."""
    x = rng.integers(0, 5, (B, n))
    return x, np.sort(x, axis=1)


# name: function, level (regular, deterministic context-free, context-sensitive), sizes of the input's and the output's
# alphabet, accuracy by chance as Table 6 has it; in Table 6's order
TASKS = {
    'even_pairs': (even_pairs, 'R', 2, 2, 0.5),
    'modular_arithmetic_simple': (modular_arithmetic_simple, 'R', 9, 5, 0.2),  # 9: the papers' has a blank, never used
    'parity_check': (parity_check, 'R', 2, 2, 0.5),
    'cycle_navigation': (cycle_navigation, 'R', 3, 5, 0.2),
    'stack_manipulation': (stack_manipulation, 'DCF', 5, 3, 0.5),
    'reverse_string': (reverse_string, 'DCF', 2, 2, 0.5),
    'modular_arithmetic': (modular_arithmetic, 'DCF', 11, 5, 0.2),             # 11: one is never used
    'solve_equation': (solve_equation, 'DCF', 11, 5, 0.2),
    'duplicate_string': (duplicate_string, 'CS', 2, 2, 0.5),
    'missing_duplicate': (missing_duplicate, 'CS', 4, 2, 0.5),
    'odds_first': (odds_first, 'CS', 2, 2, 0.5),
    'binary_addition': (binary_addition, 'CS', 3, 3, 0.5),
    'compute_sqrt': (compute_sqrt, 'CS', 2, 2, 0.5),
    'bucket_sort': (bucket_sort, 'CS', 5, 5, 0.2),
}


def sample(task, rng, batch, length):
    """Random samples of a task: inputs (batch, n) and targets (batch, m), int64. rng: a numpy Generator."""
    return TASKS[task][0](rng, batch, length)


def generator(seed, use, task, number):
    """The random numbers of a training step or of a test length: a function of these alone."""
    return np.random.default_rng([seed, *f'{use} {task}'.encode(), number])


def read_answers(model, task, rng, batch, length):
    """
    One pass over new samples of a task. Returns logits (batch, m, output symbols), targets (batch, m), and which of
    them count for accuracy, (batch, m): all, or those up to and including the end symbol.
    """
    inputs, targets = sample(task, rng, batch, length)
    tokens = np.pad(inputs, ((0, 0), (0, targets.shape[1])), constant_values=TASKS[task][2])  # empty slots
    tokens, targets = (torch.from_numpy(x).to(model.head.weight.device) for x in (tokens, targets))
    logits = model(tokens, last=targets.shape[1])[..., :TASKS[task][3]]
    if task not in ('stack_manipulation', 'binary_addition'):
        return logits, targets, torch.ones_like(targets, dtype=torch.bool)
    end = (targets == END).int()
    return logits, targets, end.cumsum(1) - end == 0


def accuracy(logits, targets, counts):
    """Share of the symbols that count which are right, as a tensor."""
    return (logits.argmax(-1) == targets)[counts].float().mean()


# ----------------------------------------------------------------------------- training and test

def new_model(task, device):
    """A model with a task's alphabet, the same whatever was trained before."""
    n_slots = sum(x.shape[1] for x in sample(task, np.random.default_rng(0), 1, train_length))
    torch.manual_seed(seed)
    return Transformer(ModelConfig(vocab_size=max(TASKS[task][2] + 1, TASKS[task][3]), block_size=n_slots,
                                   n_layer=n_layer, n_head=n_head, n_kv_head=n_head, n_embd=n_embd, n_hidden=n_hidden,
                                   position=position, dape_kernel=dape_kernel,
                                   dape_width=dape_width)).init_weights().to(device)


def read_run(path, run_settings):
    """What TASK.pt holds, or None where there is none. Raises ValueError for a run of other settings, or longer."""
    if not path.exists():
        return None
    try:
        run = torch.load(path, map_location='cpu', weights_only=True)
        changed = [name for name in RUN_SETTINGS if run['settings'][name] != run_settings[name]]
    except Exception as error:  # zip, unpickling and key errors alike
        raise ValueError(f'{path} is cut short or not a run of che.py ({type(error).__name__}). Remove it.') from error
    if changed:
        values = ', '.join(f"{name} {run['settings'][name]}, not {run_settings[name]}" for name in changed)
        raise ValueError(f'{path} is a run of other settings ({values}). Choose another --out_dir=, or remove it.')
    if run['step'] > max_iters:
        raise ValueError(f'{path} has been trained for {run["step"]} steps, more than max_iters {max_iters}. Raise '
                         'max_iters, choose another --out_dir=, or remove it.')
    return run


def save_run(path, run):
    with whole_file(path) as part:
        torch.save(run, part)


def train(task, model, run, path, runtime):
    """Train up to max_iters steps from where `run` is, which is brought up to date and saved every eval_interval."""
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(weights, lr=learning_rate, fused=runtime.device.type in ('cpu', 'cuda'))
    if 'optimizer' in run:
        optimizer.load_state_dict(run['optimizer'])
    progress, recent, first = Progress(max_iters - run['step'], task), [], run['step']
    for step in range(first, max_iters):
        optimizer.param_groups[0]['lr'] = learning_rate * min(1.0, (step + 1) / max(1, warmup_iters))
        rng = generator(seed, 'train', task, step)
        length = int(rng.integers(1, train_length + 1))
        logits, targets, counts = read_answers(model, task, rng, batch_size, length)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent.append(torch.stack((loss.detach(), accuracy(logits, targets, counts))))
        progress.update(step + 1 - first)
        if (step + 1) % eval_interval == 0 or step + 1 == max_iters:
            mean_loss, share = torch.stack(recent).mean(0).tolist()
            if not math.isfinite(mean_loss):
                raise ValueError(f'{task}: the loss became {mean_loss} before step {step + 1}; {path}, if there, holds '
                                 'the last good state. Lower learning_rate.')
            print(f'{task}: step {step + 1:6d}  loss {mean_loss:.4f}  accuracy {share:.1%}', flush=True)
            run |= {'step': step + 1, 'model': model.state_dict(), 'optimizer': optimizer.state_dict(), 'test': {}}
            save_run(path, run)
            recent = []


@torch.no_grad()
def test(task, model, run, path, lengths):
    """Accuracy at each length: {length: mean over batches}, each length's samples its own. Goes on with run['test']."""
    done = run['test'].setdefault(n_test, {})
    progress, todo = Progress(len(lengths), f'{task}, test'), [length for length in lengths if length not in done]
    for i, length in enumerate(todo):
        rng = generator(seed, 'test', task, length)
        sizes = [min(TEST_BATCH, n_test - start) for start in range(0, n_test, TEST_BATCH)]
        shares = [accuracy(*read_answers(model, task, rng, size, length)) for size in sizes]
        done[length] = torch.stack(shares).double().mean().item()
        progress.update(len(lengths) - len(todo) + i + 1, f'length {length}')
        if i % 20 == 0 or i + 1 == len(todo):
            save_run(path, run)
    return {length: done[length] for length in lengths}


# ----------------------------------------------------------------------------- result

def paper_column(position, dape_kernel):
    """The name of Table 6's column for a method, also where it has none."""
    name = {'none': 'NoPE', 'rope': 'RoPE', 'xl': 'Relative', 'alibi': 'ALiBi', 'kerple': 'Kerple',
            'fire': 'FIRE'}.get(position, position)
    return f'DAPE 1x{dape_kernel} {name}' if dape_kernel else name


def summarize(task, by_length, column):
    """A row of the result: accuracy at the lengths of training and past them, from {length: accuracy}."""
    table = json.loads((ROOT / 'results/papers.json').read_text())['dape_table6']
    paper = dict(zip(table['columns'], table['rows'][task])).get(column)
    inside, outside = ([a for n, a in by_length.items() if (n <= train_length) == short] for short in (True, False))
    return {'level': TASKS[task][1], 'inside': float(np.mean(inside)), 'outside': float(np.mean(outside)),
            'chance': TASKS[task][4], 'paper': None if paper is None else paper / 100,
            'accuracy': list(by_length.values())}


def draw(result, path):
    """Accuracy by length, a panel a task; from the result's JSON alone."""
    columns = min(4, len(result['tasks']))
    rows = -(-len(result['tasks']) // columns)
    figure, axes = new_figure(rows, columns, width=max(2.8, 6.4 / columns), height=2.4)
    axes = np.atleast_1d(axes).flatten()
    for axis, (task, row) in zip(axes, result['tasks'].items()):
        axis.plot(result['lengths'], np.multiply(row['accuracy'], 100), color='#1f4e9c', lw=1)
        axis.axhline(100 * row['chance'], color='#999999', ls='--', lw=1)
        axis.axvline(result['train_length'], color='black', ls=':', lw=1)
        axis.set(title=f"{task.replace('_', ' ')}: {row['outside']:.1%}", ylim=(-3, 103))
    for axis in axes[len(result['tasks']):]:
        axis.set_visible(False)
    figure.suptitle(f"{result['method']}, past {result['train_length']} symbols (dotted); dashed: chance", fontsize=11)
    figure.supxlabel('length of the input (symbols)', fontsize=10)
    figure.supylabel('accuracy (%)', fontsize=10)
    save_png(figure, path)


def check_settings():
    """Everything that can be refused before work starts. Returns the tasks to run."""
    for name in ('train_length', 'batch_size', 'max_iters', 'eval_interval', 'eval_every', 'n_test'):
        if globals()[name] < 1:
            raise ValueError(f'{name} is {globals()[name]}; it must be at least 1.')
    if seed < 0:
        raise ValueError(f'seed is {seed}; it must be 0 or more.')
    if test_length <= train_length:
        raise ValueError(f'test_length {test_length} must be more than train_length {train_length}.')
    for task in tasks:
        if task not in TASKS:
            near = difflib.get_close_matches(task, TASKS, n=1)
            advice = f"Did you mean '{near[0]}'?" if near else f"Choose from: {', '.join(TASKS)}."
            raise ValueError(f"tasks names '{task}', which is unknown. {advice}")
    return [task for task in TASKS if task in tasks or not tasks]


def main():
    began, names, runtime = time.perf_counter(), check_settings(), setup(device, 'float32', seed)
    if runtime.world_size > 1:
        raise ValueError('che.py runs on one device. Start a process for some of the tasks on each instead of torchrun.')
    folder = Path(out_dir or f"out/che/{position}{f'_dape{dape_kernel}' * bool(dape_kernel)}")
    run_settings = {name: value for name, value in settings(globals()).items() if name in RUN_SETTINGS}
    runs = {task: read_run(folder / f'{task}.pt', run_settings) for task in names}
    lengths = [*range(1, train_length + 1, eval_every), *range(train_length + 1, test_length + 1, eval_every)]
    rows, column = {}, paper_column(position, dape_kernel)
    for task in names:
        model, path = new_model(task, runtime.device), folder / f'{task}.pt'
        run = runs.pop(task) or {'step': 0, 'settings': run_settings}
        if 'model' in run:
            model.load_state_dict(run['model'])
        print(f"{task}: {column}, {model.n_params():,} parameters, steps {run['step']} to {max_iters} into {path}")
        train(task, model, run, path, runtime)
        rows[task] = summarize(task, test(task, model.eval(), run, path, lengths), column)

    print(f"accuracy (%)                     to {train_length:3d}  {train_length + 1} to {test_length}  "
          f'Table 6, {column}   chance')
    for task, row in rows.items():
        paper = '-' if row['paper'] is None else f"{100 * row['paper']:.2f}"
        print(f"{row['level']:4} {task:26} {100 * row['inside']:8.2f} {100 * row['outside']:10.2f} "
              f"{paper:>{len(column) + 9}} {100 * row['chance']:8.0f}")
    stem = folder / f"che{'_' * bool(label)}{label}"
    result = {'stage': 'che', 'label': label, 'method': column, 'train_length': train_length, 'max_iters': max_iters,
              'lengths': lengths, 'tasks': rows} | provenance(settings(globals()), runtime, time.perf_counter() - began)
    save_json(f'{stem}.json', result)
    draw(json.loads(Path(f'{stem}.json').read_text()), f'{stem}.png')
    print(f'wrote {stem}.json and .png')
    runtime.close()


if __name__ == '__main__':
    configure(globals())
    main()
