"""
What reads past L: NoPE, RoPE and ALiBi, each without and with a short convolution. Each model is
trained at L = 128 tokens, on a GPU at 512. Then it reads windows of up to 16L tokens. NoPE also
reads them with small vectors tuned at 8L, and RoPE with YaRN, without and with such vectors. Both
also read them after every weight was fine-tuned at 8L. Two more models are trained at 8L from their
second step on. A series is a text to train on and one to read, a number of tokens and a size of the
models.

$ python data/code/prepare.py
$ bash results/past_L/run.sh                    # measures what is missing
$ python -m results.past_L.table --work=False   # table and picture of what was measured

Each model and seed is one file, results/past_L/MODEL_SEED.json. Writes results/past_L/past_L.json
and .png. For another series than code, the folder is results/past_L/SERIES; run.sh names the text
that it needs.
"""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from configurator import configure
from demo import read
from lib import figures
from results import study

series = 'code'          # a key of SERIES
models: list[str] = []   # keys of MODELS; []: all
seeds: list[int] = []    # of SEEDS, to measure; []: all. The table shows all that are measured
work = True              # False: only show what was measured

SEEDS = [1337, 1338, 1339, 1340, 1341]  # of a series that has fewer: the first ones
# {model: (its title, arguments of train.py)}
MODELS = {
    'conv': ('NoPE + conv', '--short_conv=4'),
    'none': ('NoPE', ''),
    'rope': ('RoPE', '--position=rope'),
    'rope_conv': ('RoPE + conv', '--position=rope --short_conv=4'),
    'alibi': ('ALiBi', '--position=alibi'),
    'alibi_conv': ('ALiBi + conv', '--position=alibi --short_conv=4'),
    'conv_8L': ('NoPE + conv, trained at 8L', '--short_conv=4'),
    'rope_8L': ('RoPE, trained at 8L', '--position=rope'),
    'conv_A': ('NoPE + conv, only before attention', '--short_conv=4 --short_conv_at=A'),
    'conv_C': ('NoPE + conv, only before the MLP', '--short_conv=4 --short_conv_at=C'),
    'conv_2': ('NoPE + conv over two tokens', '--short_conv=2'),
}
SIX = dict.fromkeys(['conv', 'none', 'rope', 'rope_conv', 'alibi', 'alibi_conv'], 3)
# A model that is trained at 8L, and its twin. The gains of both are over the twin's cut context.
TWINS = {'conv_8L': 'conv', 'rope_8L': 'rope'}


@dataclass
class Series:
    title: str
    arguments: str  # of train.py
    seeds: dict     # {model: how many seeds}
    readings: tuple = ()  # keys of TITLES; (): all
    trained: str = ''     # the series whose trainings it reads; '': its own
    dataset: str = ''     # the text to read; '': the first one that it was trained on
    L: int = 128          # tokens in a training window
    tune: str = study.PRECISION  # more arguments of tune_scale.py
    read: str = study.PRECISION  # more arguments of eval_ppl.py and entropy.py


# A GPU tunes for seconds, and would compile for longer.
GPU_TUNE, GPU_READ = '--dtype=bfloat16 --micro_batch_size=4 --compile=False', '--dtype=bfloat16'
SERIES = {
    'code': Series('Python source, 1.05M parameters', '',
                   SIX | {'conv': 5, 'conv_8L': 1, 'rope_8L': 1}),
    'books': Series('books, 1.05M parameters, 10M tokens', '--dataset=books_1024', SIX,
                    ('untuned', 'head', 'vectors', 'yarn', 'yarn_vectors')),
    'books_40M': Series('books, 1.05M parameters, 40M tokens',
                        '--dataset=books_1024 --max_iters=19532',
                        {'conv': 1, 'none': 1, 'rope': 1}, ('untuned', 'head', 'vectors', 'yarn')),
    'tokens_40M': Series('Python source, 1.05M parameters, 40M tokens', '--max_iters=19532',
                         {'conv': 1, 'none': 1, 'rope': 1},
                         ('untuned', 'head', 'vectors', 'yarn', 'yarn_vectors')),
    'parts': Series('Python source, parts of the convolution', '',
                    {'conv_A': 1, 'conv_C': 1, 'conv_2': 1}, ('untuned', 'head')),
    'code_on_books': Series('trained on Python source, read on books', '', {'conv': 3, 'rope': 1},
                            ('untuned', 'head', 'yarn'), 'code', 'books_code'),
    'mix': Series('half Python source, half books, 10M tokens, read on Python source',
                  '--dataset=code:0.5,books_code:0.5', {'conv': 3}, ('untuned', 'head', 'yarn')),
    'mix_on_books': Series('half Python source, half books, 10M tokens, read on books', '',
                           {'conv': 3}, ('untuned', 'head', 'yarn'), 'mix', 'books_code'),
    'mix_20M': Series('half Python source, half books, 20M tokens, read on Python source',
                      '--dataset=code:0.5,books_code:0.5 --max_iters=9766', {'conv': 5},
                      ('untuned', 'head', 'yarn')),
    'mix_20M_on_books': Series('half Python source, half books, 20M tokens, read on books', '',
                               {'conv': 5}, ('untuned', 'head', 'yarn'), 'mix_20M', 'books_code'),
    'mix_5M': Series('half Python source, half books, 5M parameters, read on Python source',
                     '--dataset=code:0.5,books_code:0.5 --max_iters=9766 --n_layer=6 --n_embd=256 '
                     '--n_hidden=704 --dtype=bfloat16', {'conv': 3}, ('untuned', 'head')),
    'mix_5M_on_books': Series('half Python source, half books, 5M parameters, read on books',
                              '', {'conv': 3}, ('untuned', 'head'), 'mix_5M', 'books_code'),
    'size_5M': Series('Python source, 5M parameters', '--n_layer=6 --n_embd=256 --n_hidden=704',
                      {'conv': 3, 'none': 1, 'rope': 1}, ('untuned', 'head', 'vectors', 'yarn')),
    # On a GPU, with L = 512.
    'code_86M': Series('Python source, 86M parameters',
                       'config/dape/125m.py --dataset=code --dtype=bfloat16 --batch_size=16 '
                       '--micro_batch_size=16 --max_iters=2500 --learning_rate=1e-3 --min_lr=0.0 '
                       '--warmup_iters=100 --eval_interval=1250', {'conv': 3, 'none': 1, 'rope': 1},
                       ('untuned', 'head', 'yarn'), L=512, tune=GPU_TUNE, read=GPU_READ),
    'books_32M': Series('books, 32M parameters',
                        'config/books_gpu.py --dtype=bfloat16 --micro_batch_size=32 '
                        '--max_iters=1000 --eval_interval=500', {'conv': 1, 'none': 1, 'rope': 1},
                        ('untuned', 'head', 'yarn'), L=512, tune=GPU_TUNE, read=GPU_READ),
}
AT_8L = '--block_size=1024 --batch_size=2 --micro_batch_size=2'  # as many tokens as at L
# Tune every weight, with as many windows as the vectors. The rate is a quarter of pretraining's
# peak, as in config/finetune_8k.py.
FINETUNE = ('--block_size=1024 --batch_size=8 --micro_batch_size=8 --max_iters=80 '
            '--warmup_iters=10 --learning_rate=1e-3 --min_lr=1e-4 --weight_decay=0.0')
TUNE = '--target_length={far} --max_iters=80 --warmup_iters=10 --n_samples=32 --init_scale=1.0'
# {what is tuned: arguments of tune_scale.py}, where {far} stands for 8L. The rate of head scales
# was chosen on seed 1337, split val. That of channel scales is the better of two in
# results/channel_scale.
TUNINGS = {
    'uniform': '--method=uniform --target_length={far} --n_samples=32 '
               '--candidate_range=[0.6,2.4,0.1]',
    'head': f'{TUNE} --tune=scale:0.1 --min_scale=None',
    'head_clamped': f'{TUNE} --tune=scale:0.1',
    'channel': f'{TUNE} --tune=channel:0.1',
    'vectors': f'{TUNE} --tune=channel:0.1,norm',
}
TITLES = {'untuned': 'untuned', 'uniform': 'uniform scale', 'head': 'head scales',
          'head_clamped': 'head scales, each at least 1', 'channel': 'channel scales',
          'vectors': 'channel scales and norms', 'weights': 'every weight fine-tuned',
          'yarn': 'YaRN, factor 8', 'yarn_head': 'YaRN and head scales',
          'yarn_vectors': 'YaRN, head scales (each at least 1) and norms',
          'yarn_weights': 'YaRN, every weight fine-tuned'}


# ---------------------------------------------------------------------- one model and seed

def is_read(name):
    return name in (SERIES[series].readings or TITLES)


def lengths():
    """L, 2L, 4L, 8L and 16L, in tokens."""
    return [SERIES[series].L * 2 ** n for n in range(5)]


def train(model, seed):
    """Train a model. Returns its folder, and the arguments that name its untuned model."""
    run, arguments = run_of(model, seed), f'{recipe(model)} --seed={seed}'
    if model not in TWINS:
        study.train(run, arguments)
        return run, ''
    # One step at L, so that the checkpoint says that the cut context is L.
    study.train(f'{run}_start', f'{arguments} --max_iters=1')
    study.train(run, f'{arguments} {AT_8L} --init_from={run}_start/last.pt')
    return run, f'--baseline={train(TWINS[model], seed)[0]}/last.pt'


def tunings_of(model):
    """{what is tuned: arguments of tune_scale.py}, and the arguments that extend the model."""
    if 'rope' not in model:
        return TUNINGS, ''
    # Scales per channel would break RoPE: the two channels of a pair need the same scale.
    return {'yarn_head': TUNINGS['head'],
            'yarn_vectors': TUNINGS['vectors'].replace('channel', 'scale')}, '--rope_scaling=yarn:8'


def tuned(run, name, arguments, base):
    """Tune a trained model, unless this is done. Returns the arguments that read it so."""
    far = lengths()[3]
    path = f'{run}/scale_{"uniform" if name == "uniform" else f"head_{far}"}_{name}.json'
    study.made(path, f'tune_scale.py --out_dir={run} --label={name} {arguments.format(far=far)} '
                     f'{SERIES[series].tune} {base}'.strip())
    return f'{base} --scale={path}'.strip()


def finetuned(model, seed, name, arguments=FINETUNE):
    """Tune every weight of a trained model, unless this is done. Returns the folder."""
    run = run_of(model, seed)
    study.train(f'{run}_{name}', f'{recipe(model)} {arguments} --seed={seed} --init_from={run}/'
                'last.pt' + (' --rope_scaling=yarn' if 'rope' in model else ''))
    return f'{run}_{name}'


def readings_of(model, seed):
    """
    {name: (folder, arguments of eval_ppl.py and entropy.py, arguments that name the untuned
    model)}. Trains the model, tunes its scales and fine-tunes it, as far as this is missing.
    """
    run, baseline = train(model, seed)
    readings = {'untuned': (run, '', baseline)}
    if 'alibi' in model or model in TWINS:
        return readings
    tunings, base = tunings_of(model)
    if base:
        readings['yarn'] = run, base, ''
    for name, arguments in tunings.items():
        if is_read(name):
            readings[name] = run, tuned(run, name, arguments, base), ''
    name = 'yarn_weights' if base else 'weights'
    if is_read(name):
        readings[name] = finetuned(model, seed, name), '', f'--baseline={run}/last.pt'
    return readings


def result_of(model, seed):
    """The content of the file of a model and seed. Trains and tunes what is missing."""
    began, readings, text, far = time.perf_counter(), {}, SERIES[series].dataset, lengths()[3]
    for name, (run, how, baseline) in readings_of(model, seed).items():
        label = f'{name}_{text}' if text else name
        how += f' {SERIES[series].read} --dataset={text}' if text else f' {SERIES[series].read}'
        losses = study.evaluated(run, 'position', label,
                                 f"--lengths=[{','.join(map(str, lengths()))}] {how}")
        repeats = study.evaluated(run, 'repeat', label,
                                  f'--lengths=[{far}] --gram=4 --targets=1000 '
                                  f"--controls=['near','other','token'] {how} {baseline}")
        spread = study.made(f'{run}/entropy_{label}.json',
                            f'entropy.py --out_dir={run} --label={label} '
                            f'--length={far} {how}')['mean_entropy']
        readings[name] = {'text': losses['rows'], 'repeats': repeats['rows'],
                          'share': repeats['share'], 'copy_weight': repeats['copy_weight'],
                          # of the last bin up to T; a bin has a sixteenth of block_size positions
                          'entropy': [spread[len(spread) * T // far - 1]
                                      for T in lengths()[:-1]]}
    return {'model': model, 'seed': seed, 'train': recipe(model),
            'readings': readings} | study.made_with(losses, began)


def recipe(model):
    """The arguments of train.py for a model, without its length and seed."""
    return f'config/code.py {MODELS[model][1]} {SERIES[trained()].arguments}'.strip()


def trained():
    """The series that has the trainings."""
    return SERIES[series].trained or series


def folder(of, series):
    """Where the results of a series stand, or, of 'out', its trainings."""
    return Path(of, 'past_L', '' if series == 'code' else series)


def run_of(model, seed):
    """The folder of a training."""
    return str(folder('out', trained()) / str(seed) / model)


def file_of(model, seed):
    return folder('results', series) / f'{model}_{seed}.json'


def seeds_of(model):
    return SEEDS[:SERIES[series].seeds.get(model, 0)]


# ---------------------------------------------------------------------- the table

def over_seeds(values):
    return study.over_seeds(values) | {'values': values}


def of_kind(readings, kind):
    """Of each reading the row of a kind of far repeats, such as 'all' or 'near, all'."""
    return [row for one in readings for row in one.get('repeats', ()) if row['kind'] == kind]


def row_of(model, name, runs, twins):
    """
    Over seeds: losses by length, and gains at far repeats, of a model that is read one way. Its
    gains over all tokens are relative to the cut context of its twins.
    """
    found = [one['readings'][name] for one in runs]
    row = {'model': model, 'reading': name, 'title': f'{MODELS[model][0]}, {TITLES[name]}',
           'seeds': [one['seed'] for one in runs]}
    for n, T in enumerate(lengths()):
        losses = [one['text'][n]['loss'] for one in found]
        row[f'loss at {T}'] = over_seeds(losses)
        if n > 0:
            cut = [one['readings']['untuned']['text'][n]['cut_loss'] for one in twins]
            row[f'cut at {T}'] = over_seeds(cut)
            row[f'gain at {T}'] = over_seeds([a - b for a, b in zip(cut, losses)])
    kinds = ['all', 'same token', 'near, all', 'other document, all', 'other token, all']
    for kind in [*kinds, *(f'{T + 1} to {2 * T} back' for T in lengths()[:3])]:
        repeats = of_kind(found, kind)
        if len(repeats) < len(found):
            continue  # an older or unfinished file lacks this kind
        row[f'gain, {kind}'] = over_seeds([one['gain'] for one in repeats])
        row[f'errors, {kind}'] = [one['gain_error'] for one in repeats]
    if all('entropy' in one for one in found):
        row['entropy'] = over_seeds([one['entropy'] for one in found])
    if 'gain, all' in row:
        for key in 'loss', 'cut_loss', 'headroom', 'R', 'own_gain':
            row[key] = over_seeds([one[key] for one in of_kind(found, 'all')])
        row['headroom, near'] = over_seeds([one['headroom'] for one in of_kind(found, 'near, all')])
    return row


def collect():
    """A row for each model and reading."""
    rows = []
    for model in MODELS:
        files = [(file_of(model, seed), file_of(TWINS.get(model, model), seed))
                 for seed in seeds_of(model)]
        found = [(read(own), read(twin)) for own, twin in files if own.exists() and twin.exists()]
        for name in TITLES:  # an older file has fewer readings
            those = [pair for pair in found if name in pair[0]['readings']]
            if those:
                rows.append(row_of(model, name, *zip(*those)))
    return rows


def print_table(rows):
    """As the page has it."""
    L, *_, far, _ = sorted(int(key.split()[-1]) for key in rows[0] if key.startswith('loss at '))
    columns = [f'loss at {L}', f'loss at {far}', f'gain at {far}', 'gain, all', 'R',
               'headroom, near', 'gain, other document, all']
    study.print_table([{'': row['title'], 'seeds': len(row['seeds'])}
                       | {name: row.get(name) for name in columns} for row in rows], digits=2)


def draw(result):
    """Loss by length, with the cut context. Gain at far repeats, with the control."""
    rows, sizes = result['rows'], lengths()
    height = max(4.4, 0.27 * len(rows))
    figure, (left, right) = figures.panels(f'{SERIES[series].title}, L = {sizes[0]} tokens', 2, 2,
                                           height=height)
    # The cut contexts of all models would hide the curves of a series that has many.
    cuts = {row['model'] for row in rows}
    cuts = cuts if len(cuts) == 1 else {'conv', 'none', 'rope'}
    drawn = [row for row in rows if row['reading'] in ('untuned', 'head', 'vectors', 'yarn')]
    for row in drawn:
        losses = [row[f'loss at {T}']['mean'] for T in sizes]
        figures.curve(left, sizes, losses, row['title'])
        if row['reading'] == 'untuned' and row['model'] in cuts:
            cut = [losses[0], *(row[f'cut at {T}']['mean'] for T in sizes[1:])]
            figures.draw_cut(left, sizes, cut, f"{MODELS[row['model']][0]}, context cut to L")
    left.set_ylim(top=min(left.get_ylim()[1], 7))  # higher losses would press the others together
    figures.label_ends(left, gap=0.24 / height)
    figures.length_axis(left, sizes, sizes[0])
    left.set(xlabel='tokens in the window', ylabel='loss of the last 64 positions (nats)',
             title='All tokens (means over seeds)' if drawn == rows else
             'All tokens (means over seeds; some rows are left out)')
    shown = [row for row in rows if 'gain, all' in row]
    for n, row in enumerate(shown):
        for kind, color, name in (('all', figures.BLUE, 'the text itself'),
                                  ('other document, all', figures.ORANGE,
                                   "another document's text before the last L")):
            if f'gain, {kind}' not in row:
                continue
            right.errorbar(row[f'gain, {kind}']['values'], [n] * len(row['seeds']),
                           xerr=row[f'errors, {kind}'], fmt='o', color=color, alpha=0.7,
                           label=name if n == 0 else None)
    right.axvline(0, color='black', linewidth=1)
    right.set_yticks(range(len(shown)), [row['title'] for row in shown])
    right.invert_yaxis()
    right.set(xlabel='gain over the context cut to L (nats, ± standard error over windows)',
              title='Far repeats, windows of 8L: one point a seed')
    right.legend(loc='upper center', bbox_to_anchor=(0.5, -0.15), ncols=2, frameon=False)
    return figure


def main():
    began = time.perf_counter()
    study.require_known([series], SERIES)
    study.require_known(models, MODELS)
    study.require_known(seeds, SEEDS)
    if work:
        study.measure_units({file_of(model, seed): (run_of(TWINS.get(model, model), seed),
                                                    partial(result_of, model, seed))
                             for seed in seeds or SEEDS for model in models or MODELS
                             if seed in seeds_of(model)})
    rows = collect()
    print_table(rows)
    result = {'stage': 'past_L', 'L': lengths()[0], 'rows': rows}
    study.write(folder('results', series) / 'past_L', result, globals(), began, rows and draw)


if __name__ == '__main__':
    configure(globals())
    main()
