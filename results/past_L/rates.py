"""
The learning rates of tuning. Each tuning and fine-tuning at 8L of seed 1337 is made with 0.3 times
its rates in results/past_L/table.py, with these rates, and with 3 times these rates. The best has
the lowest loss at 8L on the split val: the last 64 positions of 256 windows.

$ python data/code/prepare.py
$ python -m results.past_L.rates                 # 50 minutes of one core for a model
$ python -m results.past_L.rates --work=False    # the table of what was measured

A stopped run continues where it was. Writes results/past_L/rates.json
"""

import re

from configurator import configure
from results import study
from results.past_L.table import (
    FINETUNE,
    MODELS,
    TITLES,
    finetuned,
    lengths,
    train,
    tuned,
    tunings_of,
)

models = ['conv', 'rope', 'rope_conv', 'none']  # keys of MODELS in table.py
work = True  # False: only show what was measured

SEED = 1337
FACTORS = [0.3, 1, 3]
# A rate in the arguments of tune_scale.py and train.py.
RATE = re.compile(r'((?:scale|channel|norm):|(?:learning_rate|min_lr)=)([\d.e-]+)')


def times(arguments, factor):
    """The arguments with every rate times a factor."""
    if factor == 1:
        return arguments
    arguments = arguments.replace(',norm', ',norm:0.01')  # the default, written out
    return RATE.sub(lambda found: f'{found[1]}{factor * float(found[2]):g}', arguments)


def loss_of(run, name, how):
    """The loss at 8L on the split val."""
    arguments = f'--split=val --lengths=[{lengths()[3]}] {study.PRECISION} {how}'
    return study.evaluated(run, 'position', f'{name}_val', arguments)['rows'][0]['loss']


def rows_of(model):
    """A row for each tuning: its losses by factor. Trains and tunes what is missing."""
    run, _ = train(model, SEED)
    tunings, base = tunings_of(model)
    found = {}
    for factor in FACTORS:
        named = '' if factor == 1 else f'_{factor}'
        for name in ('yarn_head', 'yarn_vectors') if base else ('head', 'channel', 'vectors'):
            how = tuned(run, name + named, times(tunings[name], factor), base)
            found.setdefault(name, []).append(loss_of(run, name + named, how))
        name = 'yarn_weights' if base else 'weights'
        folder = finetuned(model, SEED, name + named, times(FINETUNE, factor))
        found.setdefault(name, []).append(loss_of(folder, name + named, ''))
    return [{'': f'{MODELS[model][0]}, {TITLES[name]}'} | dict(zip(map(str, FACTORS), losses))
            for name, losses in found.items()]


def collect():
    study.require_known(models, MODELS)
    rows = [row for model in models for row in rows_of(model)]
    return {'stage': 'past_L_rates', 'seed': SEED, 'rows': rows}


def print_result(result):
    study.print_table(result['rows'])


if __name__ == '__main__':
    configure(globals())
    study.show('results/past_L/rates', collect, print_result, globals())
