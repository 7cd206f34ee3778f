"""
How far do small transformers read, and what helps? The demo trains three models on Python source:
NoPE, its twin with RoPE, and NoPE with a convolution over four tokens. It tunes softmax scales for
windows of 4L tokens. Then the models read text that they were not trained on, and the demo draws
their loss by position and what they gain from text more than L tokens back.

$ make look     # reads with the trained models of lessons/models
$ make demo     # trains the models first

The demo prints the commands of the stages that train and tune, and runs them side by side. Each of
them can also be run alone. Writes out_dir/report.json and .png; results/demo/README.md lists the
fields.
"""

import contextlib
import json
import os
import shlex
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event

import numpy as np
import torch

import train
import tune_scale
from configurator import between, configure, settings
from data.stdlib.prepare import library_files
from eval_ppl import gain_of, summary
from lib import checkpoints, plots
from lib.answers import OnlyWriter, progress_bar
from lib.checkpoints import open_model
from lib.devices import setup
from lib.errors import MALFORMED, ROOT, UserError, fault_of
from lib.losses import by_position, cut_losses, doubled_lengths
from lib.repeats import Targets, find_targets, losses_when_cut, repeat_summary
from lib.runs import MODEL, OF_MACHINE, is_text_of
from lib.tokenizers import tokenizer_from_state
from lib.tokens import Windows
from position import Settings

out_dir = 'out/demo_code'    # folder of the report; the trained models go there, too
models = ''                  # folder of trained models to read; '': train them in out_dir
text = ''                    # file to read; '': the split test of data/code or, with trained
                             # models, the standard library of the Python that runs this
target_length = 512          # tokens in a window; the scales are tuned for it
n_samples = 40               # windows to read
targets = 400                # far repeats to score
max_iters = 4500             # training steps of 8 sequences of NoPE with the convolution
tune_iters = 60              # tuning steps of head scales
train_args: list[str] = []   # more settings for train.py, such as ['--n_layer=2']
tune_args: list[str] = []    # more settings for tune_scale.py

# {model: (its arguments of train.py, its share of max_iters)}, in the order in which they begin
TRAIN = {'conv': (['--short_conv=4'], 1), 'none': ([], 2 / 3),
         'rope': (['--position=rope'], 1 / 3)}
# {what is read: (model, kind of its scales)}
READINGS = {'NoPE': ('none', ''), 'NoPE, best uniform scale': ('none', 'uniform'),
            'NoPE, head scales': ('none', 'head'), 'RoPE': ('rope', ''),
            'NoPE + conv': ('conv', ''), 'NoPE + conv, head scales': ('conv', 'head')}
GRAM = 4             # this many tokens before a far repeat occurred before
TAIL = 64            # the loss at T is the mean over this many positions before T
BATCH_TOKENS = 8192  # in one forward pass
CORES = torch.get_num_threads()  # that this process may use
LANES = min(2, CORES)            # models that are trained side by side


# ---------------------------------------------------------------------- run the stages

def run(stage, *arguments):
    """Print a stage's command and run it as a user would. If the stage fails, the demo ends."""
    print(f"\n$ python {' '.join([stage, *arguments])}", flush=True)
    child = subprocess.Popen([sys.executable, str(ROOT / stage), *arguments])
    try:
        child.wait()
    finally:  # after Ctrl-C, wait: the stage gets it, too, and train.py saves before it ends
        child.wait()
    if child.returncode:
        sys.exit(child.returncode)


def run_lane(name, stages, threads, failed):
    """
    Run stages one after the other. Each line of their output begins with the lane's name. failed:
    an event; once a stage of any lane fails, no other begins. Returns {command: seconds}.
    """
    seconds = {}
    environment = os.environ | {'OMP_NUM_THREADS': str(threads), 'PYTHONUNBUFFERED': '1'}
    for stage, *arguments in stages:
        if failed.is_set():
            break
        began, line = time.perf_counter(), f"python {' '.join([stage, *arguments])}"
        print(f'{name:>5} | $ {line}', flush=True)
        child = subprocess.Popen([sys.executable, str(ROOT / stage), *arguments], text=True,
                                 stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
        for output in child.stdout:
            print(f'{name:>5} | {output}', end='', flush=True)
        if child.wait():
            failed.set()
            raise UserError(f'{line} failed. Its message is above.')
        seconds[line] = round(time.perf_counter() - began, 1)
    return seconds


def read(path):
    """The JSON of a file that this project wrote."""
    with fault_of(path, 'a whole JSON file', 'Remove it, so that it is made again.'):
        result = json.loads(Path(path).read_text(encoding='utf-8'))
        if not isinstance(result, dict):
            raise TypeError(f'it holds a {type(result).__name__}')
    return result


def is_made(path, arguments):
    """
    Whether the JSON of a stage is there, was written by this command, and is newer than the model
    and the files that the command names.
    """
    values = [argument.partition('=')[2] for argument in arguments]
    sources = [Path(value) for value in values if value.endswith(('.json', '.pt'))]
    sources += [Path(value, 'last.pt') for value in values]
    path, made = Path(path), ['python', *arguments]
    return (path.exists()
            # Older files hold the command without the quotes that a shell needs.
            and read(path).get('command') in (shlex.join(made), ' '.join(made))
            and all(source.stat().st_mtime <= path.stat().st_mtime
                    for source in sources if source.is_file()))


def training_settings(arguments):
    """Of train.py with these arguments: {name: value}, and the names of those that they give."""
    scope = dict(vars(train))
    given = configure(scope, Settings, arguments)
    return settings(scope), given


def require_trained_with(folder, arguments):
    """
    Raise UserError if the run in a folder was trained with other settings than these arguments of
    train.py give, or on a text or from a checkpoint that has changed since.
    """
    advice = 'Remove the folder, or choose another --out_dir=.'
    trained, (wanted, given) = read(Path(folder, 'config.json')), training_settings(arguments)
    base, start = trained.get('init_from', 'scratch'), Path(wanted['init_from'])
    if Path(base).resolve() != start.resolve():
        raise UserError(f'{folder} was trained from {base}, not from {start}. {advice}')
    if start.is_file() and start.stat().st_mtime > Path(folder, 'loss.png').stat().st_mtime:
        raise UserError(f'{start} is newer than {folder}, which was trained from it. {advice}')
    ignored = OF_MACHINE | {'log_interval', 'tracker', 'micro_batch_size', 'dataset'}
    if base != 'scratch':  # the sizes are those of the checkpoint
        ignored |= set(MODEL) - given
    for name, value in wanted.items():
        # config.json of an older version may lack a setting.
        if name not in ignored and not is_value(trained.get(name, value), value):
            raise UserError(f'{folder} was trained with {name}={trained[name]}, not with {value}. '
                            f'{advice}')
    # The folder of a text may have moved, so compare what the texts hold.
    text = Windows(wanted['dataset'], 'train', wanted['block_size'])
    if not is_text_of(checkpoints.load(Path(folder, 'last.pt')), wanted['dataset'], text):
        raise UserError(f"{folder} was trained on {trained['dataset']}, which is another text than "
                        f"{wanted['dataset']} is now. {advice}")


def scale_file(model, kind):
    """The path of a model's tuned scales. kind: uniform or head."""
    name = 'uniform' if kind == 'uniform' else f'head_{target_length}'
    return f'{models or out_dir}/{model}/scale_{name}.json'


def is_value(trained, wanted):
    """Whether a run that wanted this value of a setting has the value that it was trained with."""
    # auto became a dtype, yarn became yarn:8
    return wanted in (trained, 'auto') or str(trained).startswith(f'{wanted}:')


def training(model):
    """
    The stage that trains a model, or resumes its training: a list of one, or of none. Raises
    UserError if the model was trained with other settings, such as max_iters.
    """
    folder, (arguments, share) = Path(out_dir, model), TRAIN[model]
    arguments = ['config/code.py', *arguments, '--batch_size=8', '--micro_batch_size=8',
                 f'--max_iters={max(1, round(share * max_iters))}', *train_args]
    if (folder / 'loss.png').exists():  # train.py draws it last
        require_trained_with(folder, arguments)
        return []
    resume = ['--init_from=resume'] if (folder / 'last.pt').exists() else []
    return [['train.py', *arguments, f'--out_dir={folder}', *resume]]


def tunings(model):
    """The stages that find the softmax scales of a model, as far as they are missing."""
    how = {'uniform': ['--method=uniform', '--candidate_range=[0.6,2.4,0.1]'],
           'head': ['--tune=scale:0.1', '--init_scale=1.0', '--min_scale=None',
                    f'--max_iters={tune_iters}', '--warmup_iters=10']}
    stages = {kind: ['tune_scale.py', f'--out_dir={out_dir}/{model}', '--n_samples=32',
                     f'--target_length={target_length}', *how[kind], *tune_args]
              for name, kind in READINGS.values() if name == model and kind}
    return [stage for kind, stage in stages.items() if not is_made(scale_file(model, kind), stage)]


def train_and_tune():
    """
    Train and tune the models, two at a time, each with half of the cores, or on one core one after
    the other. Returns {command: seconds}.
    """
    lanes = {model: training(model) + tunings(model) for model in TRAIN}
    steps = sum(steps_of(model, stage) for model, stages in lanes.items() for stage in stages)
    if steps:
        print(f'Training and tuning take about {minutes_for(steps)} minutes on this machine.',
              flush=True)
    run_one = partial(run_lane, threads=CORES // LANES, failed=Event())
    with ThreadPoolExecutor(LANES) as pool:  # after Ctrl-C this waits: train.py saves first
        found = pool.map(run_one, lanes, lanes.values())
        return {command: seconds for lane in found for command, seconds in lane.items()}


# ---------------------------------------------------------------------- read

@dataclass
class Text:
    """What the models read. L: their training length; far: the far repeats in the windows."""
    source: str
    windows: np.ndarray  # (n, target_length + 1) ids
    L: int
    far: Targets

    def lengths(self):
        """L, 2L, 4L ... and the length of the windows."""
        return doubled_lengths(self.L, self.windows.shape[1] - 1)


def windows_of_files(texts, tokenizer):
    """A window from the middle of each text that is long enough, at most n_samples. Returns ids."""
    windows, size = [], target_length + 1
    for one in texts:
        ids = tokenizer.encode_ordinary(one)
        first = (len(ids) - size) // 2
        if first >= 0:
            windows.append(ids[first:first + size])
        if len(windows) == n_samples:
            break
    if len(windows) < 2:
        raise UserError(f'the text has {len(windows)} windows of {size} tokens; the demo needs at '
                        'least 2. Give a longer --text=.')
    return np.array(windows)


def text_to_read():
    """The windows that all models read, and the far repeats in them."""
    if models:
        model, tokenizer = open_model(f'{models}/none/last.pt')
        L = model.config.L0
    else:
        s, _ = training_settings(['config/code.py', *train_args])
        dataset, L = s['dataset'], s['block_size']
        tokenizer = tokenizer_from_state(Windows(dataset, 'train', L).tokenizer_state)
    if target_length < 4 * L:
        raise UserError(f'target_length is {target_length}; it must be at least 4L = {4 * L}, so '
                        'that there are far repeats.')
    if text:
        with fault_of(text, 'text in UTF-8', 'Name another file.'):
            content = Path(text).read_text(encoding='utf-8')
        size = 4 * target_length  # characters; a token has 2.5 on average
        pieces = [content[i:i + size] for i in range(0, len(content), size)]
        source, windows = text, windows_of_files(pieces, tokenizer)
    elif models:
        files = library_files(Path(sysconfig.get_paths()['stdlib']))
        source, windows = 'the standard library', windows_of_files(files.values(), tokenizer)
    else:
        windows = Windows(dataset, 'test', target_length)
        # Without a network data/code is another text; see data/code/prepare.py.
        kind = windows.data.meta.get('report', {}).get('source', '')
        source = f'{dataset} ({kind}), test' if kind else f'{dataset}, test'
        windows = windows.evenly_spaced(n_samples)
    return Text(source, windows, L, find_targets(windows, L, GRAM, targets))


@torch.inference_mode()
def losses_of(read_text, runtime, model, kind):
    """The losses of a reading, (n, T), and its smallest and largest softmax scale."""
    scale = scale_file(model, kind) if kind else None
    opened, _ = open_model(f'{models or out_dir}/{model}/last.pt', scale)
    losses = runtime.over_windows(
        read_text.windows, BATCH_TOKENS,
        lambda inputs, after: by_position(opened, inputs, after)[0])
    return losses, [x.item() for x in opened.head_scale.aminmax()]


@torch.inference_mode()
def cut_losses_of(read_text, runtime, model):
    """With the context cut to L: the losses at each length, {T: (n,)}, and at the far repeats."""
    opened, _ = open_model(f'{models or out_dir}/{model}/last.pt')
    lengths = read_text.lengths()[1:] if model == 'conv' else read_text.lengths()[-1:]
    at = {T: cut_losses(opened, read_text.windows, T, TAIL, BATCH_TOKENS, runtime)
          for T in lengths}  # the picture shows all lengths for one model, to save time
    return at, losses_when_cut(opened, read_text.windows, read_text.far, BATCH_TOKENS, runtime)


def read_all(read_text):
    """
    Read with every model and scale, on all cores. Returns {title: result of losses_of()} and
    {model: result of cut_losses_of()}.
    """
    runtime, tasks = setup('cpu', 'float32'), {}
    for title, reading in READINGS.items():
        tasks[title] = partial(losses_of, read_text, runtime, *reading)
    for model in TRAIN:
        tasks[f'{model}, cut'] = partial(cut_losses_of, read_text, runtime, model)
    torch.set_num_threads(1)  # of each task
    with (progress_bar(len(tasks), f'reading {len(read_text.windows)} windows') as bar,
          ThreadPoolExecutor(CORES) as pool):
        started = {name: pool.submit(task) for name, task in tasks.items()}
        try:
            for each in as_completed(started.values()):
                each.result()  # raises what the task raised
                bar.update()
        finally:  # after Ctrl-C, begin no other task
            pool.shutdown(wait=False, cancel_futures=True)
    found = {name: each.result() for name, each in started.items()}
    return ({title: found[title] for title in READINGS},
            {model: found[f'{model}, cut'] for model in TRAIN})


# ---------------------------------------------------------------------- what they found

def smooth(values, width):
    """The mean of each value and the width - 1 values before it, or of fewer at the start."""
    return [np.mean(values[max(0, end - width):end]) for end in range(1, len(values) + 1)]


def entry_of(read_text, losses, scales, cut):
    """The report's entry of one reading. losses, scales: from losses_of(); cut: cut_losses_of()."""
    cut_at, cut_far = cut
    entry = {'at': {}, 'scale': scales, 'curve': smooth(losses.mean(0), TAIL)}
    for T in read_text.lengths():
        of_windows = losses[:, T - TAIL:T].mean(1)
        entry['at'][T] = summary(of_windows)
        if T in cut_at:
            entry['at'][T] |= gain_of(of_windows, cut_at[T])
    far = read_text.far
    entry['far'] = repeat_summary(far.window, losses[far.window, far.t - 1], cut_far)
    return entry


def differences(found):
    """How much lower the loss of each scaled reading is than that of the one before it, at T."""
    titles, T = list(found), target_length
    pairs = []
    for a, b in zip(titles, titles[1:]):
        if READINGS[b][1]:
            rows = [found[title][0][:, T - TAIL:T].mean(1) for title in (a, b)]
            gained = summary(rows[0] - rows[1])
            pairs.append({'a': a, 'b': b, 'difference': gained['loss'],
                          'standard_error': gained['standard_error']})
    return pairs


def sentences(report):
    """What the report shows, in five lines."""
    L, T, rows = report['L'], report['lengths'][-1], report['readings']
    cut = {title: f"{row['at'][T]['cut_loss']:.2f}" for title, row in rows.items()}
    nope, uniform, heads, rope, conv, conv_heads = rows

    def loss(title, length=T):
        return f"{rows[title]['at'][length]['loss']:.2f}"

    def gain(title):
        row = rows[title]['far']
        return f"{row['gain']:+.2f} ± {row['gain_error']:.2f}"

    sure = rows[conv_heads]['far']['gain'] > 3 * rows[conv_heads]['far']['gain_error']
    return [
        f'1. At L = {L} tokens, the length of training, the loss of NoPE is {loss(nope, L)} nats '
        f'per token, of RoPE {loss(rope, L)}, of NoPE with the convolution {loss(conv, L)}.',
        f'2. At {T} tokens it is {loss(nope)} for NoPE and {loss(rope)} for RoPE. With only the '
        f'last L tokens it is {cut[nope]} and {cut[rope]}.',
        f'3. With the best softmax scale for the whole model NoPE has {loss(uniform)} there, with '
        f'one for each head {loss(heads)}.',
        f'4. NoPE with the convolution has {loss(conv)} at {T} tokens, with a scale for each head '
        f'{loss(conv_heads)}, with only the last L tokens {cut[conv]}.',
        '5. Where text repeats from more than L tokens back, the gain over the last L tokens is, '
        f'in nats per token: {gain(nope)} of NoPE, {gain(heads)} with head scales, {gain(rope)} of '
        f'RoPE, {gain(conv)} of the convolution, {gain(conv_heads)} with head scales: it '
        + ('reads past L.' if sure else 'is not sure to read past L.'),
    ]


def print_report(report):
    lengths = report['lengths']
    print(f"\n{report['windows']} windows of {report['source']}. Loss in nats per token, mean of "
          f"{TAIL} positions before each length. Gain at {report['far_targets']} far repeats, over "
          f'the untuned model with only the last {lengths[0]} tokens.\n')
    head = ''.join(f'{f"at {T}":>9}' for T in lengths)
    print(f'{"":26}{head}{"gain":>9}   scales')
    for title, row in report['readings'].items():
        losses = ''.join(f"{at['loss']:9.3f}" for at in row['at'].values())
        low, high = row['scale']
        scales = f'{low:.2f} to {high:.2f}' if low < high else f'{low:.2f}'
        print(f"{title:26}{losses}{row['far']['gain']:+9.3f}   {scales}")
    print('', *sentences(report), '', sep='\n')


def steps_of(model, stage):
    """How many training steps take as long as a stage."""
    if stage[0] == 'train.py':
        return max_iters * TRAIN[model][1]
    # a step of tuning is as long as 8 of training
    return 8 * tune_iters if f'--max_iters={tune_iters}' in stage else 0


def minutes_for(steps):
    """About how long so many training steps take here, from a trial of a few seconds."""
    torch.set_num_threads(CORES // LANES)
    model, _ = open_model(ROOT / 'lessons/models/conv/last.pt')
    model.requires_grad_(True)
    ids, seconds = torch.randint(model.config.vocab_size, (8, 129)), []
    for _ in range(8):
        began = time.perf_counter()
        model(ids[:, :-1], ids[:, 1:]).mean().backward()
        seconds.append(time.perf_counter() - began)
    # The trial is not compiled. What compiled steps save is about what compiling takes.
    return round(min(seconds) * steps / LANES / 60)


def require_files(given):
    """Refuse, before any work, settings, a text or scales that are wrong or not there."""
    ignored = sorted({'train_args', 'tune_args', 'max_iters', 'tune_iters'} & {*given})
    if models and ignored:
        raise UserError(f'{ignored[0]} is for training and tuning, but models is {models}. Leave '
                        'one of the two out.')
    if text and not Path(text).is_file():
        raise UserError(f"text is '{text}', which is not a file. Give a text file.")
    if not models:
        training_settings(train_args)  # refuses what train.py does not have
        configure(dict(vars(tune_scale)), None, tune_args)
    for model, kind in READINGS.values() if models else ():
        if not Path(models, model, 'last.pt').is_file():
            raise UserError(f'{models}/{model}/last.pt does not exist. Choose another --models=.')
        path = scale_file(model, kind)
        if kind and not (Path(path).exists() and read(path)['target_length'] == target_length):
            raise UserError(f'{path} does not exist, or is not tuned for {target_length} tokens. '
                            'Choose another --target_length=, or tune it with tune_scale.py.')


def main(given=()):
    """given: names of the settings that the user set."""
    global models
    began, seconds = time.perf_counter(), {}
    if models and not Path(models).is_dir():  # started from another folder
        models = str(ROOT / models)
    with contextlib.suppress(FileNotFoundError, *MALFORMED):  # of an earlier, stopped start
        seconds = {**read(f'{out_dir}/report.json')['seconds_by_part']}
    only = OnlyWriter(f'{out_dir}/report.json')
    require_files(given)
    between(globals(), 1, 'target_length', 'targets', 'max_iters', 'tune_iters')
    between(globals(), 2, 'n_samples', why='the standard errors are over windows')
    if not models:
        run('data/code/prepare.py')
    read_text = text_to_read()
    if read_text.L < TAIL:
        raise UserError(f'the models have L = {read_text.L}; it must be at least {TAIL}, because '
                        'losses are means over so many positions.')
    if not models:
        seconds |= train_and_tune()
    start = time.perf_counter()
    found, cut = read_all(read_text)
    seconds['reading'] = round(time.perf_counter() - start, 1)
    readings = {title: entry_of(read_text, *found[title], cut[model])
                for title, (model, _) in READINGS.items()}
    report = {'stage': 'demo', 'L': read_text.L, 'lengths': read_text.lengths(), 'tail': TAIL,
              'source': read_text.source, 'windows': len(read_text.windows),
              'far_found': read_text.far.found, 'far_targets': len(read_text.far.t),
              'readings': readings, 'differences': differences(found),
              'seconds_by_part': seconds}
    print_report(report)
    plots.write_result(f'{out_dir}/report', report, settings(globals()), setup('cpu', 'float32'),
                       began)
    only.close()
    if models:
        steps = max_iters * sum(share for _, share in TRAIN.values()) + 2 * 8 * tune_iters
        print(f'Now train your own: make demo (about {minutes_for(steps)} minutes here)')


if __name__ == '__main__':
    main(configure(globals()))
