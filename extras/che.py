"""
Algorithmic tasks: train on inputs of up to 40 symbols, test on inputs of up to 500. Table 6 of
"DAPE V2". The tasks are in tasks.py. Lengths, steps and accuracy are those of Ruoss et al. 2023,
"Randomized Positional Encodings".

A sequence is the input, then one empty token for each symbol of the answer. These empty tokens are
the slots. The model writes the answer at the slots in one pass. The model of Ruoss et al. is a
bidirectional encoder with dropout; the code of DAPE V2 for this table is not public. Ours is the
causal model of model.py, with equally many layers and heads and about equally many weights. Its
slots come last, so they see the whole input.

Recall and copy are not in Table 6. They use no slots, because slots differ only by their positions,
so they would test counting. The model answers recall at the keys that are asked for, and each
symbol of copy after the right ones before it. reverse_string is in Table 6 and uses slots as there,
so it tests counting, too. All position methods see the same tokens, in one pass.

$ python -m extras.che --max_iters=1000 --lengths=[20,40,60,80,100]
$ python -m extras.che --tasks=[] --position=kerple --dape_kernel=3 --max_iters=200000  # Table 6
$ python -m extras.che config/recall.py  # one model for two tasks, tested at 1 to 64 times L

Writes out_dir/TASK.pt when a task is trained, and in the end che[_LABEL].json and .png. A task
whose TASK.pt is there is only tested, so a stopped command goes on at the task where it stopped.
"""

from pathlib import Path

from configurator import UserError, configure, settings

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
tasks: list[str] = ['even_pairs']  # names in tasks.py; []: all; recall+copy: one model learns both
out_dir = ''                 # folder of runs and results; '': out/che/METHOD
label = ''                   # appended to the name of the result
# model; settings that only some position methods have, such as rope_base, stand in position.py
position = 'none'            # none (NoPE), rope ...: a key of METHODS; a,b: layers alternate
n_layer = 5
n_head = 8
n_embd = 64
n_hidden = 176               # width of SwiGLU; about as many weights as the papers' 256 with ReLU
dape_kernel = 0              # DAPE on top of the method: 1, 3, 5 ... keys wide; 0: no DAPE
short_conv = 0               # tokens that each short convolution reads, such as 4; 0: none
# training
train_length = 40            # longest input, in symbols; each step draws one length for its batch
batch_size = 128             # samples in a step; each step makes new samples
max_iters = 10000            # steps; 200000 in Table 6
learning_rate = 1e-3         # learning rate of Adam, constant after the warm-up
warmup_iters = 100           # steps in which the learning rate rises linearly from 0
grad_clip = 1.0              # largest global norm of the gradient; 0: no clipping
eval_interval = 500          # steps between lines on screen
# test
lengths: list[int] = []      # lengths of inputs, in symbols; []: 1, 2 ... 500, as in Table 6
n_test = 512                 # samples of each length, in batches of 64
# machine
device = 'auto'              # auto, cpu, cuda, mps
seed = 1337                  # draws the initial weights and the samples

# The settings that a trained model does not depend on. TASK.pt is for all values of these.
NOT_OF_TRAINING = {'tasks', 'out_dir', 'label', 'eval_interval', 'lengths', 'n_test', 'device'}


def draw(name, rng, batch, length, empty):
    """
    New samples of a task: tokens (B, T) and answers (B, m). The model gives the answers at the last
    m tokens. Task.read says how. empty: the id of the empty token.
    """
    task = TASKS[name]
    tokens, answers = map(torch.from_numpy, task.generate(rng, batch, length))
    if task.read == 'slots':
        tokens = F.pad(tokens, (0, answers.shape[1]), value=empty)
    elif task.read == 'generated':
        tokens = torch.cat((F.pad(tokens, (0, 1), value=empty), answers[:, :-1]), dim=1)
    return tokens, answers


def loss_and_accuracy(logits, answers, ends):
    """
    The mean cross-entropy of answers in nats per symbol, and the share of symbols that are right.
    logits: (B, m, symbols); answers: (B, m); ends: True if they have an END; the zeros after it do
    not belong to the answer.
    """
    loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten())
    is_end = (answers == END) & ends
    counted = is_end.cumsum(1) - is_end.int() == 0  # True up to END, where none stands before
    right = logits.argmax(-1) == answers
    return loss, (right & counted).sum() / counted.sum()


def answer(model, name, rng, batch, length):
    """The loss and the accuracy of a model on new samples of a task: see loss_and_accuracy()."""
    samples = draw(name, rng, batch, length, empty=model.config.vocab_size - 1)
    tokens, answers = (ids.to(model.head.weight.device) for ids in samples)
    logits = model(tokens, tail=answers.shape[1])[..., :TASKS[name].n_out]
    return loss_and_accuracy(logits, answers, TASKS[name].ends)


def new_model(names):
    """
    A new model for some tasks. Its last token is the empty one, which no input has; its block_size
    holds the longest training input and its answer.
    """
    empty, rng = max(TASKS[name].n_in for name in names), np.random.default_rng(0)
    # Draw a sample of each task to measure its length, because a task may round lengths.
    longest = [draw(name, rng, 1, train_length, empty)[0].shape[1] for name in names]
    config = {key: value for key, value in settings(globals()).items()
              if key in ModelConfig.__dataclass_fields__}
    config |= {'vocab_size': empty + 1, 'n_kv_head': n_head, 'block_size': max(longest)}
    torch.manual_seed(seed)  # the weights do not depend on earlier tasks
    return Transformer(model_config(config)).init_weights()


def train(model, names):
    """Train a model on tasks that take turns, one step each."""
    weights = [p for p in model.parameters() if p.requires_grad]  # all but the head scales
    optimizer = torch.optim.Adam(weights, fused=True)
    recent = []  # loss and accuracy of each step since the last line on screen
    for step in range(max_iters):
        warmed_up = min(1.0, (step + 1) / max(1, warmup_iters))
        optimizer.param_groups[0]['lr'] = learning_rate * warmed_up
        name = names[step % len(names)]
        # A seed may be a list of numbers. With the bytes of a text in it, each task draws others.
        rng = np.random.default_rng([seed, *f'train {name}'.encode(), step])
        torch.manual_seed(seed + step)  # seeds random positions
        length = int(rng.integers(1, train_length + 1))
        loss, accuracy = answer(model, name, rng, batch_size, length)
        loss.backward()
        if grad_clip > 0:
            torch.nn.utils.clip_grad_norm_(weights, grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        recent.append(torch.stack((loss.detach(), accuracy)))

        if (step + 1) % eval_interval == 0 or step + 1 == max_iters:
            mean_loss, mean_accuracy = torch.stack(recent).mean(0).tolist()
            if not np.isfinite(mean_loss):
                raise UserError(f'the loss became {mean_loss} by step {step + 1}. Lower '
                                'learning_rate.')
            print(f'step {step + 1:6d}  loss {mean_loss:.4f}  accuracy {mean_accuracy:.1%}',
                  flush=True)
            recent = []


def trained_model(path, names, runtime):
    """The model in TASK.pt; if there is none, train it first."""
    model = new_model(names).to(runtime.device)
    if not path.exists():
        train(model, names)
        save_checkpoint(path, model.state_dict(), model.config, step=max_iters,
                        settings=settings(globals()))
    state = read_checkpoint(path)
    for key, value in state['settings'].items():
        if key not in NOT_OF_TRAINING and value != globals().get(key, value):
            raise UserError(f'{path} was trained with --{key}={value}. Choose another --out_dir=, '
                            'or remove it.')
    load_weights(model, state['model'], path)
    return model.eval()


@torch.no_grad()
def accuracies(model, name, tested):
    """The share of symbols that are right, (len(tested),)."""
    shares = np.zeros(len(tested))
    for i, length in enumerate(tqdm(tested, f'{name}, test', disable=None)):
        rng = np.random.default_rng([seed, *f'test {name}'.encode(), length])
        for start in range(0, n_test, 64):
            size = min(64, n_test - start)
            _, right = answer(model, name, rng, size, length)
            shares[i] += right.item() * size / n_test
    return shares


def method_name():
    """The name of the model in the result and of its folder, such as kerple+dape3 or NoPE+conv."""
    name = position.replace('none', 'NoPE')
    if dape_kernel:
        name += f'+dape{dape_kernel}'
    return name + '+conv' if short_conv else name


def main():
    runtime, method = setup(device, 'float32', seed), method_name()
    folder = Path(out_dir or f'out/che/{method}')
    folder.mkdir(parents=True, exist_ok=True)
    tested = sorted(lengths) or [*range(1, 501)]
    is_inside = np.array(tested) <= train_length

    rows, found = [], {}
    for mixture in tasks or TASKS:
        names, path = mixture.split('+'), folder / f'{mixture}.pt'
        print(f'{mixture}: {method}, {path}')
        model = trained_model(path, names, runtime)
        for name in names:
            right = accuracies(model, name, tested)
            inside, outside = right[is_inside].mean(), right[~is_inside].mean()
            chance = 1 / TASKS[name].n_out
            # a task may be learned alone and in a mixture
            found[name if name not in found else f'{mixture}: {name}'] = {
                'inside': inside, 'outside': outside, 'chance': chance, 'accuracy': right}
            rows.append({'task': name, 'chance': f'{chance:.1%}',
                         f'up to {train_length}': f'{inside:.1%}', 'longer': f'{outside:.1%}'})

    print_rows(print, rows)
    result = {'method': method, 'train_length': train_length, 'lengths': tested, 'tasks': found}
    write_result(folder / f'che_{label}'.strip('_'), result, settings(globals()), runtime)


if __name__ == '__main__':
    # configure() adds the fields of position.Settings, such as rope_base, to this file's globals.
    configure(globals(), Settings)
    main()
