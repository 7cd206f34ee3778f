"""
Algorithmic tasks: train on inputs of up to 40 symbols, test on inputs of 41 to 500 symbols. Table 6
of "DAPE V2". The tasks are in tasks.py. Training and test follow Ruoss et al. 2023, "Randomized
Positional Encodings".

A sequence is the input, then one empty token for each symbol of the answer. These empty tokens are
the slots. The model writes the answer at the slots in one pass. The papers' model is a
bidirectional encoder. Ours is the causal model of model.py, with equally many layers and heads and
about equally many weights. Its slots come last, so they see the whole input.

Recall, copy and flip_flop are not in Table 6. Recall and copy use no slots, because slots differ
only by their positions, so they would test counting. The model answers recall at the keys that are
asked for, and it generates copy symbol by symbol. reverse_string is in Table 6 and uses slots as
there, so it tests counting, too. All position methods see the same tokens, in one pass.

$ python -m extras.che --max_iters=1000 --test_length=100 --eval_every=10
$ python -m extras.che --tasks=[] --position=kerple --dape_kernel=3 --max_iters=200000  # Table 6
$ python -m extras.che config/recall.py  # one model for two tasks, tested at 1 to 64 times L

Writes out_dir/TASK.pt, and che[_LABEL].json and .png. A task continues from its TASK.pt, also with
a larger max_iters.
"""

import json
import math
import re
from dataclasses import fields
from pathlib import Path

from configurator import ROOT, UserError, configure, settings

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from common import load_weights, model_config, read_checkpoint, save_checkpoint, setup
from extras.tasks import END, TASKS
from model import ModelConfig, Transformer
from position import Settings
from stage import print_rows, write_result

# what to run
tasks: list[str] = ['even_pairs']  # names in tasks.py; []: Table 6's; recall+copy: one model learns
                             # both
out_dir = ''                 # folder of runs and results; '': out/che/METHOD
label = ''                   # appended to the name of the result
# model; settings that only some position methods have, such as rope_base, stand in position.py
position = 'none'            # none (NoPE), rope ...: a key of METHODS; a,b: layers alternate
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
lengths: list[int] = []      # lengths of inputs, some up to train_length and some past it; []: as
                             # test_length and eval_every say
test_length = 500            # longest input
eval_every = 1               # step from one length to the next: 1 means 1, 2 ... 40, 41, 42 ... 500
n_test = 512                 # samples of each length, in batches of 64
# machine
device = 'auto'              # auto, cpu, cuda, mps
seed = 1337                  # draws the initial weights and the samples

TABLE_6 = {'none': 'NoPE', 'rope': 'RoPE', 'xl': 'Relative', 'alibi': 'ALiBi',
           'kerple': 'Kerple', 'fire': 'FIRE'}  # names of the position methods
# A run that goes on may have other values of these settings.
MAY_CHANGE = {'tasks', 'out_dir', 'label', 'max_iters', 'eval_interval', 'lengths', 'test_length',
              'eval_every', 'n_test', 'device'}


# ---------------------------------------------------------------------- samples

def empty_token(names):
    """The smallest id that no input of these tasks uses."""
    return max(TASKS[name].n_in for name in names)


def draw(name, rng, batch, length, empty):
    """
    New samples of a task: tokens (B, T) and answers (B, m). The model gives the answers at the last
    m tokens. Task.read says how.
    """
    task = TASKS[name]
    tokens, answers = map(torch.from_numpy, task.generate(rng, batch, length))
    if task.read == 'slots':
        tokens = F.pad(tokens, (0, answers.shape[1]), value=empty)
    elif task.read == 'generated':
        tokens = torch.cat((F.pad(tokens, (0, 1), value=empty), answers[:, :-1]), dim=1)
    return tokens, answers


def loss_and_accuracy(model, name, rng, batch, length, empty):
    """
    Draw new samples of a task. Returns the mean cross-entropy of the answers in nats per symbol,
    the share of symbols that are right, and the share of whole answers that are right.
    """
    tokens, targets = draw(name, rng, batch, length, empty)
    tokens, targets = (x.to(model.head.weight.device) for x in (tokens, targets))  # (B, T), (B, m)
    logits = model(tokens, tail=targets.shape[1])[..., :TASKS[name].n_out]         # (B, m, n_out)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    is_end = (targets == END) & TASKS[name].ends
    counted = is_end.cumsum(1) - is_end.int() == 0  # zeros after END do not belong to the answer
    right = logits.argmax(-1) == targets
    return loss, (right & counted).sum() / counted.sum(), (right | ~counted).all(1).float().mean()


# ---------------------------------------------------------------------- one run

def new_model(names):
    """A new model whose block_size holds the longest training input and its answer."""
    empty, rng = empty_token(names), np.random.default_rng(0)
    samples = [draw(name, rng, 1, train_length, empty)[0] for name in names]
    config = {one.name: globals()[one.name] for one in fields(ModelConfig)
              if one.name in globals()}
    config |= {'vocab_size': max(empty + 1, *(TASKS[name].n_out for name in names)),
               'n_kv_head': n_head, 'block_size': max(tokens.shape[1] for tokens in samples)}
    torch.manual_seed(seed)  # the weights do not depend on earlier tasks
    return Transformer(model_config(config)).init_weights()


def open_run(path, names):
    """
    A model, with the weights of TASK.pt if there is one, and what else TASK.pt holds: step,
    settings, test and optimizer. Refuses a file of other settings or of more steps.
    """
    model = new_model(names)
    chosen = {name: value for name, value in settings(globals()).items() if name not in MAY_CHANGE}
    if not path.exists():
        return model, {'step': 0, 'settings': chosen}
    state = read_checkpoint(path)
    others = dict(state['settings'].items() - chosen.items())
    if others or state['step'] > max_iters:
        raise UserError(f"{path} is a run of {state['step']} steps with {others or 'the same'} "
                        'settings. Choose another --out_dir=, or remove it.')
    load_weights(model, state['model'], path)
    return model, {name: state[name] for name in ('step', 'settings', 'test', 'optimizer')}


def train(model, names, state, path):
    """
    Go on with a run up to max_iters steps. Its tasks take turns, one step each. TASK.pt is written
    every eval_interval steps.
    """
    weights = [p for p in model.parameters() if p.requires_grad]  # all but the head scales
    optimizer = torch.optim.Adam(weights, fused=True)
    if 'optimizer' in state:
        optimizer.load_state_dict(state['optimizer'])
    recent = []  # loss and accuracy of each step since the last line on screen
    model.train()
    for step in range(state['step'], max_iters):
        warmed_up = min(1.0, (step + 1) / max(1, warmup_iters))
        optimizer.param_groups[0]['lr'] = learning_rate * warmed_up
        name = names[step % len(names)]
        rng = np.random.default_rng([seed, *f'train {name}'.encode(), step])
        torch.manual_seed(seed + step)  # seeds random positions
        length = int(rng.integers(1, train_length + 1))
        loss, accuracy, _ = loss_and_accuracy(model, name, rng, batch_size, length,
                                              empty_token(names))
        loss.backward()
        if grad_clip:
            torch.nn.utils.clip_grad_norm_(weights, grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        recent.append(torch.stack((loss.detach(), accuracy)))

        if (step + 1) % eval_interval == 0 or step + 1 == max_iters:
            mean_loss, accuracy = torch.stack(recent).mean(0).tolist()
            if not math.isfinite(mean_loss):
                raise UserError(f'the loss became {mean_loss} by step {step + 1}. {path}, if it '
                                'exists, holds the last good state. Lower learning_rate.')
            print(f'{path.stem}: step {step + 1:6d}  loss {mean_loss:.4f}  '
                  f'accuracy {accuracy:.1%}', flush=True)
            recent = []
            state |= {'step': step + 1, 'optimizer': optimizer.state_dict(), 'test': {}}
            save_checkpoint(path, model.state_dict(), model.config, **state)


@torch.no_grad()
def accuracies(model, name, tested, empty, state, path):
    """
    The shares of symbols and of whole answers that are right, each (len(tested),). TASK.pt keeps
    them, so a stopped test continues at the next length.
    """
    done = state['test'].setdefault(f'{n_test} of {name}', {})
    model.eval()
    for length in tqdm(tested, f'{name}, test', disable=None):
        if length not in done:
            rng = np.random.default_rng([seed, *f'test {name}'.encode(), length])
            right = 0
            for start in range(0, n_test, 64):
                size = min(64, n_test - start)
                _, *shares = loss_and_accuracy(model, name, rng, size, length, empty)
                right += size * torch.stack(shares)
            done[length] = (right / n_test).tolist()
            save_checkpoint(path, model.state_dict(), model.config, **state)
    return np.array([done[length] for length in tested]).T


# ---------------------------------------------------------------------- results

def method_name():
    """Table 6's name of the position method with its DAPE, and settings that Table 6 has not."""
    defaults = vars(Settings()) | {'short_conv': 0}
    changed = {name: globals()[name] for name in defaults if globals()[name] != defaults[name]}
    method, kernel = changed.pop('position', 'none'), changed.pop('dape_kernel', 0)
    name = TABLE_6.get(method, method)
    name = f'DAPE 1x{kernel} {name}' if kernel else name
    return ', '.join([name, *(f'{setting} {value}' for setting, value in changed.items())])


def at(lengths):
    """The header of a mean over lengths, such as 'at 1, 40' or 'at 41, 42 ... 500'."""
    first = ', '.join(map(str, lengths[:2]))
    return f'at {first} ... {lengths[-1]}' if len(lengths) > 2 else f'at {first}'


def main():
    runtime, method = setup(device, 'float32', seed), method_name()
    folder = Path(out_dir or 'out/che/' + re.sub(r'\W+', '_', method.lower()))
    folder.mkdir(parents=True, exist_ok=True)
    table = json.loads((ROOT / 'results/papers/tables.json').read_text())['dape_table6']
    paper = {name: dict(zip(table['columns'], row)) for name, row in table['rows'].items()}
    if unknown := {*'+'.join(tasks or paper).split('+')} - {*TASKS}:
        raise UserError(f"tasks has {unknown}. Choose from {', '.join(TASKS)}.")
    tested = sorted(lengths) or [*range(1, train_length + 1, eval_every),
                                 *range(train_length + 1, test_length + 1, eval_every)]
    n = sum(length <= train_length for length in tested)
    if not 0 < n < len(tested):
        raise UserError(f'Test lengths up to train_length, {train_length}, and past it.')

    rows, found = [], {}
    for mixture in tasks or paper:
        names, path = mixture.split('+'), folder / f'{mixture}.pt'
        model, state = open_run(path, names)
        model.to(runtime.device)
        print(f"{mixture}: {method}, {model.n_params():,} parameters; steps {state['step']} to "
              f'{max_iters} into {path}')
        train(model, names, state, path)
        for name in names:
            right, exact = accuracies(model, name, tested, empty_token(names), state, path)
            row = {'inside': right[:n].mean(), 'outside': right[n:].mean(),
                   'chance': 1 / TASKS[name].n_out, 'paper': paper.get(name, {}).get(method)}
            found[name] = row | {'accuracy': right.tolist(), 'exact': exact.tolist()}
            rows.append({'task': name, 'chance': f"{row['chance']:.1%}",
                         at(tested[:n]): f"{row['inside']:.1%}",
                         at(tested[n:]): f"{row['outside']:.1%}"})
            if row['paper']:
                rows[-1]['Table 6'] = f"{row['paper']:.1f}%"
            if lengths:
                rows[-1] |= {str(length): f'{one:.1%}' for length, one in zip(tested, right)}

    print_rows(print, rows)
    path = folder / '_'.join(filter(None, ('che', label)))
    write_result(path, {'method': method, 'train_length': train_length, 'lengths': tested,
                        'tasks': found}, settings(globals()), runtime)


if __name__ == '__main__':
    # configure() adds the fields of position.Settings, such as rope_base, to this file's globals.
    configure(globals(), Settings)
    main()
