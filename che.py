"""
The Chomsky-hierarchy tasks: train on inputs of up to 40 symbols, test on 41 to 500. Table 6 of "DAPE V2"; tasks of
Deletang et al. 2023 ("Neural Networks and the Chomsky Hierarchy"), training and test of Ruoss et al. 2023 ("Randomized
Positional Encodings"). A sequence is the input, then an `empty` token for each symbol of the answer, which is read at
those slots in one pass. The papers' model is a bidirectional encoder; ours is the causal model of model.py, with as many
layers and heads and about as many weights, whose slots see the whole input, as they come last.

$ python che.py --max_iters=1000 --test_length=100 --eval_every=10 --n_test=128    # one task, a small test
$ python che.py --tasks="['even_pairs','missing_duplicate']" --position=kerple --dape_kernel=3
$ python che.py --tasks=[] --position=kerple --max_iters=200000                    # a column of Table 6: on a GPU

A task goes on where it stopped, also to more steps. Writes out_dir/TASK.pt, and che[_LABEL].json and .png
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
tasks: list[str] = ['even_pairs']  # keys of TASKS; []: all
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
train_length = 40            # longest input, in symbols; each step draws one length for its whole batch
batch_size = 128             # samples in a step, made anew for each
max_iters = 10000            # steps; 200000 in Table 6
learning_rate = 1e-3         # of Adam, constant after the warm-up
warmup_iters = 100           # linear from 0
grad_clip = 1.0              # global norm
eval_interval = 500          # steps between lines on screen; the run is saved at each
# test
test_length = 500            # longest input
eval_every = 1               # step from one length to the next: 41, 42 ... 500
n_test = 512                 # samples of each length, in batches of 64
# machine
device = 'auto'              # auto, cpu, cuda, mps
seed = 1337                  # of initial weights and samples

RUN_SETTINGS = ('position', 'dape_kernel', 'dape_width', 'n_layer', 'n_head', 'n_embd', 'n_hidden', 'train_length',
                'batch_size', 'learning_rate', 'warmup_iters', 'grad_clip', 'seed')  # they stay the same in an out_dir


# ------------------------------------- tasks: rng, samples B, length n -> inputs (B, n), targets (B, m); symbols 0, 1 ...

def even_pairs(rng, B, n):
    """Is the number of 01 and 10 in a binary string even (0) or odd (1)? 001110 -> 0: there is one of each."""
    x = rng.integers(0, 2, (B, n))
    return x, x[:, :1] ^ x[:, -1:]  # each such pair changes the symbol


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
    x = rng.integers(0, 2, (B, n))
    return x, x.sum(1, keepdims=True) % 2


def cycle_navigation(rng, B, n):
    """Where on a circle of five does a walk from 0 end? 0 is a step back, 1 none, 2 a step on. 20222 -> 3."""
    x = rng.integers(0, 3, (B, n))
    return x, (x - 1).sum(1, keepdims=True) % 5


def stack_manipulation(rng, B, n):
    """
    A stack, its top last, then orders: 2 pop (nothing, where it is empty), 3 push 0, 4 push 1. The stack that they leave,
    its top first, the end symbol 2 and zeros. 0110 422 -> 110 2 0000.
    """
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
    x = rng.integers(0, 2, (B, n))
    return x, x[:, ::-1].copy()


def python_random(rng):
    """Python's generator, whose integers have any length, and which is faster than numpy's for one at a time."""
    return random.Random(int(rng.integers(2 ** 63)))


def symbols(texts, alphabet='012'):
    """Texts of one length as an array (B, n): the place of each character in the alphabet."""
    place = np.zeros(128, np.int64)
    place[list(alphabet.encode())] = range(len(alphabet))
    return place[np.frombuffer(''.join(texts).encode(), np.uint8)].reshape(len(texts), -1)


def expression(draw, n, operators):
    """A random text of n symbols, each operation in brackets, and its value mod 5; up to n = 4 it is 1, -1, (1), (-1)."""
    if n <= 4:
        digit = draw(5)
        text, value = (f'{digit}', digit) if n % 2 else (f'-{digit}', -digit % 5)
        return (text if n < 3 else f'({text})'), value
    n_left = draw(1, n - 3)
    (left, a), (right, b) = expression(draw, n_left, operators), expression(draw, n - 3 - n_left, operators)
    operator = operators[draw(len(operators))]
    return f'({left}{operator}{right})', {'+': a + b, '-': a - b, '*': a * b}[operator] % 5


def modular_arithmetic(rng, B, n):
    """The value of an expression in brackets of + - *, mod 5. ((-2)*(4-1)) -> 4."""
    draw = python_random(rng).randrange
    texts, values = zip(*(expression(draw, n, '+-*') for _ in range(B)))  # a grammar: one sample after the other
    return symbols(texts, '01234+-*()'), np.array(values)[:, None]


def solve_equation(rng, B, n):
    """Which digit is x in an equation of + and -, mod 5? (x-(-4))=2 -> 3. For n < 3 all is zero."""
    draw, texts, answers = python_random(rng).randrange, ['0' * n] * B, [0] * B
    for sample_ in range(B if n > 2 else 0):  # as above
        text, value = expression(draw, n - 2, '+-')
        at = draw(n - 2)
        while not text[at].isdigit():  # or else the next digit, after the end the first
            at = (at + 1) % (n - 2)
        texts[sample_], answers[sample_] = f'{text[:at]}x{text[at + 1:]}={value}', int(text[at])
    return symbols(texts, '01234+-()x='), np.array(answers)[:, None]


def duplicate_string(rng, B, n):
    """A binary string twice. 101 -> 101101."""
    x = rng.integers(0, 2, (B, n))
    return x, np.tile(x, 2)


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
    x = rng.integers(0, 2, (B, n))
    return x, np.concatenate((x[:, 1::2], x[:, ::2]), axis=1)


def binary_addition(rng, B, n):
    """
    The sum of two numbers above 0, each with its lowest bit first, 2 between them; then the end symbol 2 and zeros.
    001 2 01101 (4 + 22) -> 01011 2 0000. For n < 3 there is one number, from 0 to 2^n - 2.
    """
    draw, texts, sums = python_random(rng).randrange, [], []
    for _ in range(B):  # numbers too long for numpy
        first = draw(1, n - 1) if n > 2 else n
        widths = [first, n - 1 - first] if n > 2 else [n]
        numbers = [draw(1, 2 ** width) for width in widths] if n > 2 else [draw(2 ** n - 1)]
        texts.append('2'.join(f'{number:0{width}b}'[::-1] for number, width in zip(numbers, widths)))
        sums.append(f'2{sum(numbers):b}'[::-1].ljust(n + 1, '0'))
    return symbols(texts), symbols(sums)


def compute_sqrt(rng, B, n):
    """The square root of a number above 0, rounded down, both with the highest bit first. 100101 (37) -> 110 (6)."""
    draw = python_random(rng).randrange
    numbers = [draw(1, 2 ** n) for _ in range(B)]
    roots = [f'{math.isqrt(number):0{(n + 1) // 2}b}' for number in numbers]
    return symbols([f'{number:0{n}b}' for number in numbers]), symbols(roots)


def bucket_sort(rng, B, n):
    """A string of five symbols, sorted. 421302214 -> 011222344."""
    x = rng.integers(0, 5, (B, n))
    return x, np.sort(x, axis=1)


TASKS = {  # function, level (regular, deterministic context-free, context-sensitive), symbols of input and of output,
    'even_pairs': (even_pairs, 'R', 2, 2, 0.5),               # accuracy by chance as Table 6 has it; in its order
    'modular_arithmetic_simple': (modular_arithmetic_simple, 'R', 9, 5, 0.2),  # symbol 8, a blank, is never used
    'parity_check': (parity_check, 'R', 2, 2, 0.5),
    'cycle_navigation': (cycle_navigation, 'R', 3, 5, 0.2),
    'stack_manipulation': (stack_manipulation, 'DCF', 5, 3, 0.5),
    'reverse_string': (reverse_string, 'DCF', 2, 2, 0.5),
    'modular_arithmetic': (modular_arithmetic, 'DCF', 11, 5, 0.2),             # nor is 10
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


def counted(task, targets):
    """Which symbols of the answers count for accuracy, (B, m): all, or those up to and with the end symbol."""
    end = (targets == 2).int() * (task in ('stack_manipulation', 'binary_addition'))
    return end.cumsum(1) == end


# ----------------------------------------------------------------------------- training and test

def loss_and_accuracy(model, task, rng, batch, length):
    """On new samples: mean cross-entropy over all symbols of the answers, in nats; share of those that count right."""
    inputs, targets = sample(task, rng, batch, length)
    tokens = np.pad(inputs, ((0, 0), (0, targets.shape[1])), constant_values=TASKS[task][2])  # empty slots
    tokens, targets = (torch.from_numpy(x).to(model.head.weight.device) for x in (tokens, targets))
    logits = model(tokens, last=targets.shape[1])[..., :TASKS[task][3]]
    right = (logits.argmax(-1) == targets)[counted(task, targets)]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), right.float().mean()


def generator(use, task, number):
    """The random numbers of a training step, or of the test of a length: a function of these and the seed alone."""
    return np.random.default_rng([seed, *f'{use} {task}'.encode(), number])


def new_model(task, config, device):
    torch.manual_seed(seed)  # the same model, whatever was trained before
    n_in, n_out = TASKS[task][2:4]
    slots = sum(x.shape[1] for x in sample(task, np.random.default_rng(0), 1, train_length))
    return Transformer(ModelConfig(max(n_in + 1, n_out), slots, **config)).init_weights().to(device)


def read_run(path, run_settings):
    """What TASK.pt holds; where there is none, a run of no steps. Refuses a run of other settings or of more steps."""
    if not path.exists():
        return {'step': 0, 'settings': run_settings, 'test': {}}
    try:
        run = torch.load(path, map_location='cpu', weights_only=True)
        changed = [f'{name} {run["settings"][name]}, not {run_settings[name]}' for name in RUN_SETTINGS
                   if run['settings'][name] != run_settings[name]]
    except Exception as error:  # zip, unpickling and key errors alike
        raise ValueError(f'{path} is cut short or not a run of che.py ({type(error).__name__}). Remove it.') from error
    if run['step'] > max_iters:
        changed.append(f"{run['step']} steps, not at most {max_iters}")
    if changed:
        raise ValueError(f'{path} has other settings: {"; ".join(changed)}. Choose another --out_dir=, or remove it.')
    return run


def save_run(path, run):
    with whole_file(path) as part:
        torch.save(run, part)


def train(task, model, run, path):
    """Train up to max_iters steps from where `run` is; keep it up to date, and save it every eval_interval steps."""
    weights, recent = [p for p in model.parameters() if p.requires_grad], []
    optimizer = torch.optim.Adam(weights, fused=weights[0].device.type in ('cpu', 'cuda'))
    if run['step']:
        optimizer.load_state_dict(run['optimizer'])
    for step in range(run['step'], max_iters):
        optimizer.param_groups[0]['lr'] = learning_rate * min(1.0, (step + 1) / max(1, warmup_iters))
        rng = generator('train', task, step)
        loss, share = loss_and_accuracy(model, task, rng, batch_size, int(rng.integers(1, train_length + 1)))
        loss.backward()
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
            save_run(path, run)
            recent = []


@torch.no_grad()
def test(task, model, run, path, lengths):
    """{length: accuracy, a mean over batches of 64 samples}; kept in run['test'], from where a stopped test goes on."""
    done, progress = run['test'].setdefault(n_test, {}), Progress(len(lengths), f'{task}, test')
    for i, length in enumerate(lengths):
        if length not in done:
            rng, sizes = generator('test', task, length), [min(64, n_test - start) for start in range(0, n_test, 64)]
            shares = [loss_and_accuracy(model, task, rng, size, length)[1] for size in sizes]
            done[length] = torch.stack(shares).mean().item()
            progress.update(i + 1)
            if i % 20 == 0 or i + 1 == len(lengths):
                save_run(path, run)
    return {length: done[length] for length in lengths}


# ----------------------------------------------------------------------------- result

def method_name(position, dape_kernel):
    """As the columns of Table 6 are named."""
    names = {'none': 'NoPE', 'rope': 'RoPE', 'xl': 'Relative', 'alibi': 'ALiBi', 'kerple': 'Kerple', 'fire': 'FIRE'}
    return f'DAPE 1x{dape_kernel} ' * bool(dape_kernel) + names.get(position, position)


def draw(result, path):
    """Accuracy by length, a panel a task; from the result's JSON alone."""
    columns = min(4, len(result['tasks']))
    figure, axes = new_figure(-(-len(result['tasks']) // columns), columns, width=6.4 if columns < 2 else 3.2, height=2.6)
    axes = np.atleast_1d(axes).flatten()
    for axis, (task, row) in zip(axes, result['tasks'].items()):
        axis.plot(result['lengths'], np.multiply(row['accuracy'], 100), color='#1f4e9c', lw=1)
        axis.axhline(100 * row['chance'], color='#999999', ls='--', lw=1)
        axis.axvline(result['train_length'], color='black', ls=':', lw=1)
        axis.set(title=f"{task.replace('_', ' ')}: {row['outside']:.1%}", ylim=(-3, 103))
    for axis in axes[len(result['tasks']):]:
        axis.set_visible(False)
    figure.suptitle(f"{result['method']}: accuracy past {result['train_length']} symbols (dashed: by chance)", fontsize=11)
    figure.supxlabel('length of the input (symbols)', fontsize=10)
    figure.supylabel('accuracy (%)', fontsize=10)
    save_png(figure, path)


def check_settings():
    """Refuse before work starts what can be. Returns the tasks to run, in Table 6's order."""
    for name in ('train_length', 'batch_size', 'max_iters', 'eval_interval', 'eval_every', 'n_test'):
        if globals()[name] < 1:
            raise ValueError(f'{name} is {globals()[name]}; it must be at least 1.')
    if test_length <= train_length:
        raise ValueError(f'test_length {test_length} must be more than train_length {train_length}.')
    for task in tasks:
        if task not in TASKS:
            near = difflib.get_close_matches(task, TASKS, n=1)
            advice = f"Did you mean '{near[0]}'?" if near else f"Choose from {', '.join(TASKS)}."
            raise ValueError(f"tasks names '{task}', which is unknown. {advice}")
    return [task for task in TASKS if task in tasks or not tasks]


def main():
    began, names, runtime = time.perf_counter(), check_settings(), setup(device, 'float32', seed)
    folder = Path(out_dir or f"out/che/{position}{f'_dape{dape_kernel}' * bool(dape_kernel)}")
    run_settings = {name: value for name, value in settings(globals()).items() if name in RUN_SETTINGS}
    config = {name: run_settings[name] for name in RUN_SETTINGS[:7]} | {'n_kv_head': n_head}
    paths = {task: folder / f'{task}.pt' for task in names}
    runs = {task: read_run(path, run_settings) for task, path in paths.items()}
    lengths = [*range(1, train_length + 1, eval_every), *range(train_length + 1, test_length + 1, eval_every)]
    method, rows = method_name(position, dape_kernel), {}
    table = json.loads((ROOT / 'results/papers.json').read_text())['dape_table6']
    for task, run in runs.items():
        model = new_model(task, config, runtime.device)
        if run['step']:
            model.load_state_dict(run['model'])
        print(f"{task}: {method}, {model.n_params():,} parameters; steps {run['step']} to {max_iters} into {paths[task]}")
        train(task, model, run, paths[task])
        by_length = test(task, model, run, paths[task], lengths)
        inside, outside = (np.mean([by_length[n] for n in lengths if (n <= train_length) == short]) for short in (1, 0))
        rows[task] = {'level': TASKS[task][1], 'inside': inside, 'outside': outside, 'chance': TASKS[task][4],
                      'paper': dict(zip(table['columns'], table['rows'][task])).get(method),
                      'accuracy': [*by_length.values()]}

    print(f'{f"{method}, accuracy (%)":31} 1-{train_length}  {train_length + 1}-{test_length}   Table 6   chance')
    for task, row in rows.items():
        paper = '-' if row['paper'] is None else f"{row['paper']:.2f}"
        print(f"{row['level']:4}{task:25} {100 * row['inside']:6.2f} {100 * row['outside']:7.2f} {paper:>9} "
              f"{100 * row['chance']:8.0f}")
    stem = folder / f"che{'_' * bool(label)}{label}"
    result = {'stage': 'che', 'label': label, 'method': method, 'train_length': train_length, 'lengths': lengths,
              'tasks': rows} | provenance(settings(globals()), runtime, time.perf_counter() - began)
    save_json(f'{stem}.json', result)
    draw(json.loads(Path(f'{stem}.json').read_text()), f'{stem}.png')
    print(f'wrote {stem}.json and .png')
    runtime.close()


if __name__ == '__main__':
    configure(globals())
    main()
