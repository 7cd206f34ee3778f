"""
The time of a training step of each model of the scoreboard, as a multiple of NoPE's. Both models
take turns in 20 rounds.

$ python -m results.scoreboard.steps    # half an hour of two cores

A stopped run continues where it was. Results of another machine or version are measured again. To
measure again on this machine, remove the file.
Writes results/scoreboard/SIZE_steps.json, which results/scoreboard/table.py reads
"""

import ast
import time
from pathlib import Path
from types import SimpleNamespace

import bench
import train
from configurator import configure, run_config, settings
from demo import read
from lib.answers import provenance, save_json
from lib.devices import setup
from lib.tokens import open_tokens
from position import Settings
from results import study
from results.scoreboard.table import ROWS, SIZES

size = 'small'               # a key of SIZES
device = 'auto'              # auto, cpu, cuda
dtype = 'float32'            # auto, float32, bfloat16; config/scoreboard.py trains in float32


def changes_of(row):
    """The settings of a row's model, {name: value}."""
    known, changes = settings(vars(bench)) | vars(Settings()), {}
    for argument in row.train.split():
        name, text = argument.removeprefix('--').split('=')
        changes[name] = text if isinstance(known[name], str) else ast.literal_eval(text)
    return changes


def main():
    study.require_known([size], SIZES)
    began, runtime = time.perf_counter(), setup(device, dtype, 1337)
    config = settings(vars(train)) | run_config(SIZES[size].config)
    sizes = {name: config[name] for name in bench.MODEL if name in config}
    sizes['vocab_size'] = open_tokens(config['dataset'], 'train').meta['vocab_size']
    s = SimpleNamespace(**settings(vars(bench)) | sizes | {'rounds': 20, 'runtime': runtime})

    def step(**changes):
        model = bench.new_model(s, s.block_size, **{'position': 'none'} | changes)
        return bench.training_step(s, model, config['batch_size'], s.block_size)

    path, ratios = Path(f'results/scoreboard/{size}_steps.json'), {}
    found, here = read(path) if path.exists() else {}, provenance({}, runtime, 0)
    if all(found.get(key) == here[key] for key in ('device', 'dtype', 'versions')):
        ratios = found['ratios']
    for key, row in ROWS.items():
        if row.model != key or row.init or size not in row.sizes or key in ratios:
            continue
        seconds = bench.medians(s, {'NoPE': step(), 'row': step(**changes_of(row))})
        ratios[key] = seconds['row'] / seconds['NoPE']
        print(f'{row.title:26}{ratios[key]:6.2f} of a step of NoPE', flush=True)
        seconds = time.perf_counter() - began
        save_json(path, {'ratios': ratios} | provenance(settings(globals()), runtime, seconds))


if __name__ == '__main__':
    configure(globals())
    main()
