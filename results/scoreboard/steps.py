"""
The time of a training step of each model of the scoreboard against NoPE's, apart from the
trainings: 20 rounds of a step of both.

$ python -m results.scoreboard.steps    # half an hour on two cores; goes on where it was stopped

Writes results/scoreboard/SIZE_steps.json, from where results/scoreboard/table.py takes it. One of
another machine or version is begun anew; remove one of this machine to measure again.
"""

import json
import time
from types import SimpleNamespace

import bench
import train
from configurator import configure, run_config, settings
from lib.answers import provenance, save_json
from lib.devices import setup
from lib.errors import ROOT, UserError
from lib.tokens import open_tokens
from position import Settings
from results.scoreboard.table import ROWS, SIZES

size = 'small'               # a key of SIZES
device = 'auto'              # auto, cpu, cuda
dtype = 'float32'            # auto, float32, bfloat16; the rows of 0.9M were trained in float32


def ratio(row, s):
    """Seconds of a training step of a row's model over those of NoPE's. s: as in bench.py."""
    names = [argument.removeprefix('--').split('=') for argument in row.train.split()]
    kinds = {name: type(value) for name, value in vars(Settings()).items()}
    changes = {name: kinds[name](value) for name, value in names}
    models = {'NoPE': bench.new_model(s, s.context, position='none'),
              'row': bench.new_model(s, s.context, **{'position': 'none'} | changes)}
    works = {name: bench.training_step(s, model, s.batch_size, s.context)
             for name, model in models.items()}
    seconds = bench.medians(s, works)
    return seconds['row'] / seconds['NoPE']


def main():
    if size not in SIZES:
        raise UserError(f"size is '{size}'. Choose from {', '.join(SIZES)}.")
    began = time.perf_counter()
    chosen = settings(vars(train)) | run_config(SIZES[size].config)
    sizes = {name: chosen[name] for name in bench.MODEL if name in chosen}
    runtime = setup(device, dtype, 1337)
    vocab_size = open_tokens(chosen['dataset'], 'train').meta['vocab_size']
    s = SimpleNamespace(**settings(vars(bench)) | sizes | {
        'context': chosen['block_size'], 'batch_size': chosen['batch_size'], 'rounds': 20,
        'vocab_size': vocab_size, 'runtime': runtime})
    path = ROOT / f'results/scoreboard/{size}_steps.json'
    found, ratios = json.loads(path.read_text()) if path.exists() else {}, {}
    here = provenance(settings(globals()), runtime, 0)
    if all(found.get(key) == here[key] for key in ('device', 'dtype', 'versions')):
        ratios = found['ratios']
    for key, row in ROWS.items():
        if row.model == key and not row.init and size in row.sizes and key not in ratios:
            ratios[key] = ratio(row, s)
            print(f'{row.title:26}{ratios[key]:6.2f} of a step of NoPE', flush=True)
            seconds = time.perf_counter() - began
            save_json(path, {'ratios': ratios} | provenance(settings(globals()), runtime, seconds))
    print(path, 'is whole')


if __name__ == '__main__':
    configure(globals())
    main()
