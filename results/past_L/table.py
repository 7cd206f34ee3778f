"""
What reads past L: NoPE with a short convolution, plain NoPE and RoPE with YaRN on Python source.
Each is trained at L = 128 tokens and read in windows of 8L, untuned and with small vectors tuned at
8L.

$ python data/code/prepare.py
$ bash results/past_L/run.sh                    # whatever is not there yet
$ python -m results.past_L.table --work=False   # the table and the picture of what is there

What a model and seed gave is one file, results/past_L/MODEL_SEED.json, so a stopped run goes on
where it was. Started twice, two processes share the work.
Writes results/past_L/past_L.json and .png
"""

import statistics
import time
from pathlib import Path

from configurator import configure, settings
from demo import made_with, read, run
from lib import figures
from lib.answers import OnlyWriter, provenance, save_json
from lib.devices import setup
from lib.errors import UserError

models: list[str] = []   # keys of MODELS; []: all
seeds = [1337, 1338, 1339, 1340, 1341]  # a model may have fewer
work = True              # False: show what is there

L = 128
FOLDER = Path('results/past_L')
# {model: (its title, arguments of train.py, how many seeds)}
MODELS = {
    'conv': ('NoPE + conv', '--short_conv=4', 5),
    'none': ('NoPE', '', 3),
    'rope': ('RoPE', '--position=rope', 3),
}
TUNE = f'--target_length={8 * L} --max_iters=80 --warmup_iters=10 --n_samples=32 --init_scale=1.0'
# {what is tuned: arguments of tune_scale.py}. Rates were chosen on the split val of seed 1337.
TUNINGS = {
    'uniform': f'--method=uniform --target_length={8 * L} --n_samples=32 '
               '--candidate_range=[0.6,2.4,0.1]',
    'head': f'{TUNE} --tune=scale:0.1 --min_scale=None',
    'head_clamped': f'{TUNE} --tune=scale:0.1',
    'channel': f'{TUNE} --tune=channel:0.1',
    'vectors': f'{TUNE} --tune=channel:0.1,norm',
}
TITLES = {'untuned': 'untuned', 'uniform': 'uniform scale', 'head': 'head scales',
          'head_clamped': 'head scales, each at least 1', 'channel': 'channel scales',
          'vectors': 'channel scales and norms', 'yarn': 'YaRN, factor 8'}


# ---------------------------------------------------------------------- one model and seed

def readings_of(model, folder):
    """{name: arguments of eval_ppl.py}. Makes the scale files that are not there."""
    if model == 'rope':
        return {'untuned': '', 'yarn': '--rope_scaling=yarn:8'}
    readings = {'untuned': ''}
    for name, arguments in TUNINGS.items():
        kind = 'uniform' if name == 'uniform' else f'head_{8 * L}'
        path = Path(folder, f'scale_{kind}_{name}.json')
        if not path.exists():
            run('tune_scale.py', f'--out_dir={folder}', f'--label={name}', *arguments.split())
        readings[name] = f'--scale={path}'
    return readings


def measure(model, seed):
    """What the file of a model and seed holds. Trains and tunes what it needs."""
    began, folder = time.perf_counter(), f'out/past_L/{seed}/{model}'
    if not Path(folder, 'loss.png').exists():
        resume = ['--init_from=resume'] if Path(folder, 'last.pt').exists() else []
        run('train.py', 'config/code.py', *MODELS[model][1].split(), f'--seed={seed}',
            f'--out_dir={folder}', *resume)
    lengths = [L * 2 ** n for n in range(5)]
    protocols = {'position': [f'--lengths={lengths}'],
                 'repeat': [f'--lengths=[{8 * L}]', '--gram=4', '--targets=1000',
                            "--controls=['near','other']"]}
    found = {'model': model, 'seed': seed, 'train': MODELS[model][1], 'readings': {}}
    for name, arguments in readings_of(model, folder).items():
        common = [f'--out_dir={folder}', f'--label={name}', *arguments.split()]
        results = {}
        for protocol, more in protocols.items():
            path = Path(folder, f'eval_ppl_{protocol}_{name}.json')
            if not path.exists():
                run('eval_ppl.py', f'--protocol={protocol}', *more, *common)
            results[protocol] = read(path)
        found['readings'][name] = {
            'text': results['position']['rows'], 'repeats': results['repeat']['rows'],
            'share': results['repeat']['share'], 'copy_weight': results['repeat']['copy_weight']}
    return found | made_with(results['position'], began)


def file_of(model, seed):
    return FOLDER / f'{model}_{seed}.json'


def work_on(todo):
    """Measure these models and seeds, one after the other; leave out what another process does."""
    for model, seed in todo:
        folder = Path('out/past_L', str(seed))
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = OnlyWriter(folder / model)
        except UserError:
            continue
        if not file_of(model, seed).exists():
            save_json(file_of(model, seed), measure(model, seed))
        lock.close()


# ---------------------------------------------------------------------- the table

def over_seeds(values):
    sd = statistics.stdev(values) if len(values) > 1 else None
    return {'mean': statistics.mean(values), 'sd': sd, 'values': values}


def repeats_of(reading, kind):
    """The row of a kind, such as 'all' or 'near, all', of far repeats."""
    return next(row for row in reading['repeats'] if row['kind'] == kind)


def collect():
    """A row for each model and reading: over seeds, losses by length and gains at far repeats."""
    rows = []
    for model, (title, _, n_seeds) in MODELS.items():
        runs = [read(file_of(model, seed)) for seed in seeds[:n_seeds]
                if file_of(model, seed).exists()]
        for name in runs[0]['readings'] if runs else ():
            found = [one['readings'][name] for one in runs]
            untuned = [one['readings']['untuned'] for one in runs]
            row = {'model': model, 'reading': name, 'title': f'{title}, {TITLES[name]}',
                   'seeds': [one['seed'] for one in runs]}
            for n, text in enumerate(found[0]['text']):
                T = text['length']
                row[f'loss at {T}'] = over_seeds([one['text'][n]['loss'] for one in found])
                if T > L:
                    cut = [one['text'][n]['cut_loss'] for one in untuned]
                    row[f'cut at {T}'] = over_seeds(cut)
                    row[f'gain at {T}'] = over_seeds([
                        loss - one['text'][n]['loss'] for loss, one in zip(cut, found)])
            for kind in 'all', 'same token', 'near, all', 'other document, all':
                of_kind = [repeats_of(one, kind) for one in found]
                row[f'gain, {kind}'] = over_seeds([one['gain'] for one in of_kind])
                row[f'errors, {kind}'] = [one['gain_error'] for one in of_kind]
            for key in 'loss', 'cut_loss', 'headroom', 'R':
                row[key] = over_seeds([repeats_of(one, 'all')[key] for one in found])
            rows.append(row)
    return rows


def cell(value):
    """A number over seeds, as the page has it."""
    if value['sd'] is None:
        return f"{value['mean']:.2f}"
    return f"{value['mean']:.2f} ± {value['sd']:.2f}"


def print_table(rows):
    """As Markdown, as the page has it."""
    columns = ['loss at 128', 'loss at 1024', 'gain at 1024', 'gain, all', 'R', 'gain, near, all',
               'gain, other document, all']
    print('| | seeds | ' + ' | '.join(columns) + ' |')
    print('|---' * (len(columns) + 2) + '|')
    for row in rows:
        cells = [row['title'], str(len(row['seeds'])), *(cell(row[name]) for name in columns)]
        print(f"| {' | '.join(cells)} |")


def draw(rows):
    """The loss by length, with the cut context; the gain at far repeats, with the control."""
    figure, (left, right) = figures.panels('Python source, L = 128 tokens, 1.05M parameters', 2, 2,
                                           height=4.4)
    lengths = [L * 2 ** n for n in range(5)]
    for row in rows:
        if row['reading'] in ('untuned', 'head', 'yarn'):
            losses = [row[f'loss at {T}']['mean'] for T in lengths]
            figures.curve(left, lengths, losses, row['title'])
            if row['reading'] == 'untuned':
                cut = [row['loss at 128'], *(row[f'cut at {T}'] for T in lengths[1:])]
                figures.draw_cut(left, lengths, [value['mean'] for value in cut],
                                 f"{MODELS[row['model']][0]}, context cut to L")
    figures.label_ends(left)
    figures.length_axis(left, lengths, L)
    left.set(ylabel='loss of the last 64 positions (nats)', title='All tokens')
    for n, row in enumerate(rows):
        for kind, color, name in (('all', figures.BLUE, 'the text itself'),
                                  ('other document, all', figures.ORANGE,
                                   "another document's text before the last L")):
            right.errorbar(row[f'gain, {kind}']['values'], [n] * len(row['seeds']),
                           xerr=row[f'errors, {kind}'], fmt='o', color=color, alpha=0.7,
                           label=name if n == 0 else None)
    right.axvline(0, color='black', linewidth=1)
    right.set_yticks(range(len(rows)), [row['title'] for row in rows])
    right.invert_yaxis()
    right.set(xlabel='gain over the context cut to L (nats, ± standard error over windows)',
              title='Far repeats, windows of 8L: one point a seed')
    right.legend(loc='upper center', bbox_to_anchor=(0.5, -0.15), ncols=2, frameon=False)
    figures.save(figure, FOLDER / 'past_L.png')


def main():
    began = time.perf_counter()
    for model in models:
        if model not in MODELS:
            raise UserError(f"'{model}' is not one of {', '.join(MODELS)}.")
    if work:
        work_on([(model, seed) for i, seed in enumerate(seeds) for model in models or MODELS
                 if i < MODELS[model][2]])
    rows = collect()
    print_table(rows)
    result = {'stage': 'past_L', 'L': L, 'rows': rows}
    seconds = time.perf_counter() - began
    save_json(FOLDER / 'past_L.json',
              result | provenance(settings(globals()), setup('cpu', 'float32'), seconds))
    if rows:
        draw(rows)


if __name__ == '__main__':
    configure(globals())
    main()
