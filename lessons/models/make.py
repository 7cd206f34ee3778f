"""
Makes the trained models of this folder: NoPE, RoPE, and NoPE with a short convolution, on Python
source by one recipe, and their softmax scales for 8L. The matrices are rounded to bfloat16, then
the scales are tuned. These models are for looking and for lessons: one seed, and no result rests on
them.

$ python data/code/prepare.py
$ python -m lessons.models.make     # 2.5 hours of one core; a stopped training goes on
"""

import shutil
from pathlib import Path

import torch

from configurator import configure
from lib.checkpoints import save, weights_digest
from model import vector_of
from results import study
from results.past_L.table import MODELS, TUNINGS

seed = 1338
out_dir = 'out/models'    # the runs; those of results/past_L are the same, in out/past_L/SEED

SCALES = {'none': ('uniform', 'head'), 'rope': (), 'conv': ('head',)}


def save_rounded(run, path):
    """Write the best weights of a run, with its matrices in bfloat16."""
    state = torch.load(run / 'best.pt', weights_only=True)
    weights = {name: p.bfloat16() if p.dim() == 2 and not vector_of(name) else p
               for name, p in state['model'].items()}
    save(path, **state | {'model': weights, 'digest': weights_digest(weights)})


def main():
    folder = Path('lessons/models')
    for model, names in SCALES.items():
        run, checkpoint = Path(out_dir, model), folder / model / 'last.pt'
        study.train(run, f'config/code.py {MODELS[model][1]} --seed={seed}')
        save_rounded(run, checkpoint)
        for name in names:
            study.run(f'tune_scale.py --init_from={checkpoint} --out_dir={run}/scales '
                      f'--label={name} {TUNINGS[name].format(far=1024)} {study.PRECISION}')
            kind = 'uniform' if name == 'uniform' else 'head_1024'
            shutil.copy(run / f'scales/scale_{kind}_{name}.json',
                        checkpoint.with_name(f'scale_{kind}.json'))


if __name__ == '__main__':
    configure(globals())
    main()
