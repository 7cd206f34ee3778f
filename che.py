"""
Algorithmic tasks: train on inputs of up to 40 symbols, test on inputs of 41 to 500 symbols. Table 6
of "DAPE V2". The tasks are in lib/tasks.py. Training and test follow Ruoss et al. 2023, "Randomized
Positional Encodings".

A sequence is the input, then one empty token for each symbol of the answer. These empty tokens are
the slots. The model writes the answer at the slots in one pass. The papers' model is a
bidirectional encoder. Ours is the causal model of model.py, with equally many layers and heads and
about equally many weights. Its slots come last, so they see the whole input.

Recall and copy are not in Table 6, and they use no slots. Slots differ only by their positions, so
they would test counting. The model answers recall at the keys that are asked for, and it generates
copy symbol by symbol. reverse_string is in Table 6 and uses slots as there, so it tests counting,
too. All position methods see the same tokens, in one pass.

$ python che.py --tasks="['bucket_sort']" --max_iters=1000 --test_length=100 --eval_every=10
$ python che.py --tasks=[] --position=kerple --dape_kernel=3 --max_iters=200000  # Table 6, on a GPU
$ python che.py config/recall.py         # one model for two tasks, tested at 1 to 64 times L

Writes out_dir/TASK.pt, and che[_LABEL].json and .png. A task continues from its TASK.pt, also with
a larger max_iters
"""

import dataclasses
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import position as methods
from configurator import between, configure, settings
from lib import checkpoints, figures, plots
from lib.answers import OnlyWriter, note, paper_table, print_rows, progress_bar, result_path
from lib.checksums import load_whole
from lib.devices import setup
from lib.errors import UserError, fault_of
from lib.generate import require_positions
from lib.tasks import END, TASKS
from model import Transformer

# what to run
tasks: list[str] = ['even_pairs']  # keys of TASKS; []: Table 6's; recall+copy: one model for both
out_dir: str | None = None   # folder of runs and results; None: out/che/METHOD
label = ''                   # appended to the name of the result
# model; position.py declares the settings of single position methods
position = 'none'            # position method: none (NoPE), rope ...; a,b: layers alternate
n_layer = 5
n_head = 8
n_embd = 64
n_hidden = 176               # width of SwiGLU; about as many weights as the papers' 256 with ReLU
short_conv = 0               # tokens that each short convolution reads, such as 4; 0: none
short_conv_at = 'AC'         # A: before attention; C: before the MLP; AC: both
# training
train_length = 40            # longest input, in symbols; each step draws one length for its batch
batch_size = 128             # samples in a step; each step makes new samples
max_iters = 10000            # steps; 200000 in Table 6
learning_rate = 1e-3         # learning rate of Adam, constant after the warm-up
warmup_iters = 100           # steps in which the learning rate rises linearly from 0
grad_clip = 1.0              # largest global norm of the gradient; 0: no clipping
eval_interval = 500          # steps between lines on screen; each line also saves the run
# test
lengths: list[int] = []      # input lengths, at least one up to train_length and one past it; []:
                             # all lengths that test_length and eval_every give
test_length = 500            # longest input
eval_every = 1               # step from one input length to the next: 1 means 41, 42 ... 500
n_test = 512                 # samples of each length, in batches of 64
# machine
device = 'auto'              # auto, cpu, cuda, mps
seed = 1337                  # draws the initial weights and the samples

METHOD = dataclasses.asdict(methods.Settings())  # settings of position methods and their defaults
MODEL = (*METHOD, 'n_layer', 'n_head', 'n_embd', 'n_hidden', 'short_conv', 'short_conv_at')
TRAINING = 'train_length', 'batch_size', 'learning_rate', 'warmup_iters', 'grad_clip', 'seed'


def check_settings(chosen, runtime):
    """Raise UserError before anything is read if a setting is wrong. chosen: all settings."""
    between(chosen, 1, 'train_length', 'batch_size', 'max_iters', 'eval_interval', 'eval_every',
            'n_test')
    lengths, train_length = chosen['lengths'], chosen['train_length']
    if not lengths:
        between(chosen, train_length + 1, 'test_length')
    elif not 1 <= min(lengths) <= train_length < max(lengths):
        raise UserError(f'lengths is {lengths}; it must have a length up to train_length, '
                        f'{train_length}, and a length past it.')
    between(chosen, 0, 'learning_rate', 'warmup_iters', 'grad_clip')
    if runtime.world_size > 1:
        raise UserError('che.py runs on one device. Start it without torchrun. For several '
                        'devices, start one process per device, each with other --tasks= and '
                        'another --label=.')
    names = [name for mixture in chosen['tasks'] for name in mixture.split('+')]
    if not set(names) <= set(TASKS) or len(names) > len(set(names)):
        raise UserError(f"tasks is {chosen['tasks']}. Choose from {', '.join(TASKS)}, and no task "
                        'twice.')


# ---------------------------------------------------------------------- samples

def empty_token(mixture):
    """The smallest id that no input of these tasks uses. mixture: such as recall+copy."""
    return max(TASKS[name].n_in for name in mixture.split('+'))


def draw(name, rng, batch, length, empty):
    """
    New samples of a task: tokens (B, T) and answers (B, m). The model gives the answers at the last
    m tokens. Task.read says how.
    """
    task = TASKS[name]
    tokens, answers = map(torch.from_numpy, task.generate(rng, batch, length))
    n_slots = answers.shape[1]
    if task.read == 'slots':
        tokens = F.pad(tokens, (0, n_slots), value=empty)
    elif task.read == 'generated':
        tokens = torch.cat((F.pad(tokens, (0, 1), value=empty), answers[:, :-1]), dim=1)
    return tokens, answers


def loss_and_accuracy(model, name, rng, batch, length, empty):
    """
    Draw new samples of a task. Returns the mean cross-entropy of the answers in nats per symbol,
    the share of symbols that are right, and the share of whole answers that are right.
    """
    task = TASKS[name]
    tokens, targets = draw(name, rng, batch, length, empty)
    device = model.head.weight.device
    tokens, targets = tokens.to(device), targets.to(device)    # (B, T), (B, m)
    logits = model(tokens, tail=targets.shape[1])[..., :task.n_out]  # (B, m, n_out)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    right, counted = logits.argmax(-1) == targets, torch.ones_like(targets, dtype=torch.bool)
    if task.ends:  # zeros after END do not belong to the answer
        is_end = targets == END
        before_end = is_end.cumsum(1) == 0
        counted = before_end | is_end
    return loss, (right & counted).sum() / counted.sum(), (right | ~counted).all(1).float().mean()


# ---------------------------------------------------------------------- one run

@dataclass
class TaskRun:
    """A task, or several tasks that one model learns, with what is saved in TASK.pt."""
    names: list[str]
    empty: int         # id of the empty token
    model: Transformer
    state: dict        # content of TASK.pt; its settings are those of MODEL and TRAINING
    path: Path         # of TASK.pt
    lock: OnlyWriter   # keeps a second process from overwriting TASK.pt

    def save(self):
        checkpoints.save(self.path, **self.state)


def new_model(mixture, chosen):
    """
    A new model whose block_size holds the longest training input and its answer. chosen: all
    settings of this stage.
    """
    names, empty = mixture.split('+'), empty_token(mixture)

    def tokens_of(length):
        rng = np.random.default_rng(0)
        return max(draw(name, rng, 1, length, empty)[0].shape[1] for name in names)

    symbols = max(empty + 1, *(TASKS[name].n_out for name in names))
    config = checkpoints.config_of(chosen, vocab_size=symbols, n_kv_head=chosen['n_head'],
                                   block_size=tokens_of(chosen['train_length']))
    torch.manual_seed(chosen['seed'])  # the weights do not depend on earlier tasks
    model = Transformer(config).init_weights()
    require_positions(model, tokens_of(max(chosen['lengths'] or [chosen['test_length']])))
    return model


def read_state(path, wanted, max_iters):
    """
    The content of TASK.pt, or the state of a run without steps if there is no such file. Raises
    UserError if the file has other settings than `wanted`, or more steps than max_iters.
    """
    if not path.exists():
        return {'step': 0, 'settings': wanted, 'test': {}}
    state = load_whole(path, 'Remove it.')
    with fault_of(path, 'a run of che.py', 'Remove it.'):
        old = METHOD | state['settings']  # a setting of a method that it lacks had its default
        differences = [f'{name} {old[name]}, not {wanted[name]}' for name in wanted
                       if old[name] != wanted[name]]
        if state['step'] > max_iters:
            differences.append(f"step {state['step']}, not at most {max_iters}")
    if differences:
        raise UserError(f"{path} is from another run: {'; '.join(differences)}. Choose another "
                        '--out_dir=, or remove this file.')
    return state


def open_run(mixture, path, chosen, runtime):
    """The TaskRun of a mixture, with the weights of TASK.pt if there is one."""
    model = new_model(mixture, chosen)
    lock = OnlyWriter(path)
    wanted = {name: chosen[name] for name in (*MODEL, *TRAINING)}
    state = read_state(path, wanted, chosen['max_iters'])
    if 'model' in state:
        model.load_state_dict(checkpoints.fit_weights(model, state['model'], path))
    return TaskRun(mixture.split('+'), empty_token(mixture), model.to(runtime.device), state, path,
                   lock)


def train(run, max_iters, eval_interval):
    """
    Continue training up to max_iters steps. The tasks of the run take turns, one step each. Save
    the run every eval_interval steps.
    """
    model, state, recipe = run.model, run.state, run.state['settings']
    seed = recipe['seed']
    weights = [p for p in model.parameters() if p.requires_grad]  # all but the head scales
    optimizer = torch.optim.Adam(weights, fused=True)
    if 'optimizer' in state:
        optimizer.load_state_dict(state['optimizer'])
    recent = []  # loss and accuracy of each step since the last line on screen
    model.train()
    for step in range(state['step'], max_iters):
        warmed_up = min(1.0, (step + 1) / max(1, recipe['warmup_iters']))
        optimizer.param_groups[0]['lr'] = recipe['learning_rate'] * warmed_up
        name = run.names[step % len(run.names)]
        rng = np.random.default_rng([seed, *f'train {name}'.encode(), step])
        torch.manual_seed(seed + step)  # seeds random positions
        length = int(rng.integers(1, recipe['train_length'] + 1))
        loss, accuracy, _ = loss_and_accuracy(model, name, rng, recipe['batch_size'], length,
                                              run.empty)
        loss.backward()
        if recipe['grad_clip']:
            torch.nn.utils.clip_grad_norm_(weights, recipe['grad_clip'])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent.append(torch.stack((loss.detach(), accuracy)))

        if (step + 1) % eval_interval == 0 or step + 1 == max_iters:
            mean_loss, accuracy = torch.stack(recent).mean(0).tolist()
            recent = []
            if not math.isfinite(mean_loss):
                raise UserError(f'{run.path.stem}: the loss became {mean_loss} by step {step + 1}. '
                                'Lower learning_rate.')
            print(f'{run.path.stem}: step {step + 1:6d}  loss {mean_loss:.4f}  '
                  f'accuracy {accuracy:.1%}', flush=True)
            state |= {'step': step + 1, 'model': model.state_dict(),
                      'optimizer': optimizer.state_dict(), 'test': {}}
            run.save()


@torch.no_grad()
def test_accuracies(run, name, lengths, n_test):
    """
    The shares of symbols and of whole answers that are right: (len(lengths), 2). The run saves
    them, so a stopped test continues at the next length.
    """
    done = run.state['test'].setdefault(f'{n_test} of {name}', {})
    run.model.eval()
    with progress_bar(len(lengths), f'{name}, test') as bar:
        for length in lengths:
            if length not in done:
                seed = run.state['settings']['seed']
                rng = np.random.default_rng([seed, *f'test {name}'.encode(), length])
                right = 0
                for start in range(0, n_test, 64):
                    size = min(64, n_test - start)
                    _, *shares = loss_and_accuracy(run.model, name, rng, size, length, run.empty)
                    right += size * torch.stack(shares)
                done[length] = (right / n_test).tolist()
                run.save()
            bar.update()
    return np.array([done[length] for length in lengths])


# ---------------------------------------------------------------------- results

def method_names(chosen):
    """Table 6's name of the position method with its DAPE, and a short name for its folder."""
    folder, kernel = chosen['position'], chosen['dape_kernel']
    name = 'Relative' if folder == 'xl' else figures.method_name(folder)
    if kernel:
        name, folder = f'DAPE 1x{kernel} {name}', f'{folder}_dape{kernel}'
    if chosen['random_positions']:
        name, folder = f'{name}, random', f'{folder}_random'
    # Table 6 has no row for a method with other settings than these.
    plain = METHOD | {'short_conv': 0, 'short_conv_at': 'AC'}
    named = {'position', 'dape_kernel', 'random_positions'}
    for setting, value in plain.items():
        if setting not in named and chosen[setting] != value:
            name = f'{name}, {setting} {chosen[setting]}'
            folder = f'{folder}_{setting}_{chosen[setting]}'.replace(':', '')
    return name, folder


def entry_of_task(name, shares, n_inside, paper):
    """
    The result's entry for a task. shares: from test_accuracies(), one row per length. n_inside: the
    number of lengths up to train_length. paper: the accuracy in Table 6, or None.
    """
    accuracy, exact = shares.T
    return {'level': TASKS[name].level, 'inside': accuracy[:n_inside].mean(),
            'outside': accuracy[n_inside:].mean(), 'chance': TASKS[name].chance, 'paper': paper,
            'accuracy': accuracy.tolist(), 'exact': exact.tolist()}


def print_results(rows, train_length, tested, each_length):
    """
    Print mean accuracies in percent, up to train_length and past it. each_length: True to print the
    accuracies at each tested length, too.
    """
    table, by_length = [], []
    for name, row in rows.items():
        table.append({'level': row['level'], 'task': name, 'chance': 100 * row['chance'],
                      f'1-{train_length}': 100 * row['inside'],
                      f'{train_length + 1}-{tested[-1]}': 100 * row['outside'],
                      'Table 6': row['paper'] or '-'})
        for length, symbols, answers in zip(tested, row['accuracy'], row['exact']):
            by_length.append({'task': name, 'length': length, 'symbols right': 100 * symbols,
                              'whole answers right': 100 * answers})
    print_rows(print, table)
    if each_length:
        print_rows(print, by_length)


def main(given=()):
    """given: names of the settings that the user set."""
    began, runtime = time.perf_counter(), setup(device, 'float32', seed)
    chosen, paper = settings(globals()), paper_table('dape_table6')
    check_settings(chosen, runtime)
    ignored = sorted({'test_length', 'eval_every'} & {*given})
    if lengths and ignored:
        note(f"lengths names every length, so this run does not read {', '.join(ignored)}")
    method, short_name = method_names(chosen)
    folder = Path(out_dir or f'out/che/{short_name}')
    tested = sorted(lengths) or [*range(1, train_length + 1, eval_every),
                                 *range(train_length + 1, test_length + 1, eval_every)]

    # Open all tasks before training the first one, so that a mistake shows before work starts.
    runs = {}
    for mixture in tasks or paper:
        runs[mixture] = open_run(mixture, folder / f'{mixture}.pt', chosen, runtime)

    rows = {}
    for mixture, run in runs.items():
        print(f"{mixture}: {method}, {run.model.n_params():,} parameters; steps "
              f"{run.state['step']} to {max_iters} into {run.path}")
        train(run, max_iters, eval_interval)
        for name in run.names:
            shares = test_accuracies(run, name, tested, n_test)
            n_inside = sum(length <= train_length for length in tested)
            rows[name] = entry_of_task(name, shares, n_inside, paper.get(name, {}).get(method))
        run.lock.close()

    print_results(rows, train_length, tested, each_length=bool(lengths))
    result = {'stage': 'che', 'label': label, 'method': method, 'train_length': train_length,
              'lengths': tested, 'tasks': rows}
    plots.write_result(result_path(folder, 'che', label), result, chosen, runtime, began)


if __name__ == '__main__':
    main(configure(globals(), methods.Settings))
