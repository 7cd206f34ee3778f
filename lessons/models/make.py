"""
Makes the trained models of this folder: NoPE, RoPE, and NoPE with a short convolution, on Python
source by one recipe, and their softmax scales for 8L. The matrices are rounded to bfloat16, then
the scales are tuned. These models are for looking and for lessons, and seed 1338 of results/past_L.
A stopped run goes on where it was. To make a model again, first remove its files.

$ python data/code/prepare.py
$ python -m lessons.models.make     # 2.5 hours of one core
"""

import subprocess
import sys
from pathlib import Path

from configurator import ROOT

from common import read_checkpoint, save_checkpoint
from model import vector_kind

MODELS = {'none': '', 'rope': '--position=rope', 'conv': '--short_conv=4'}
UNIFORM = '--method=uniform --candidate_range=[0.6,2.4,0.1] --label=1024'
HEAD = ('--tune=head_scale:0.1 --init_scale=1.0 --min_scale=None --max_iters=80 '
        '--warmup_iters=10')
SCALES = {'none/scale_uniform_1024.json': UNIFORM, 'none/scale_head_1024.json': HEAD,
          'conv/scale_head_1024.json': HEAD}


def once(path, command):
    """Run a stage, unless the file is there that it writes last."""
    if not path.exists():
        subprocess.run([sys.executable, *command.split()], cwd=ROOT, check=True)


def main():
    folder = ROOT / 'lessons/models'
    for model, how in MODELS.items():
        run, target = ROOT / 'out/models' / model, folder / model / 'last.pt'
        resume = '--init_from=resume' if (run / 'last.pt').exists() else ''
        once(run / 'loss.png', f'train.py config/code.py {how} --seed=1338 --out_dir=out/models/'
                               f'{model} {resume}')
        if not target.exists():
            state = read_checkpoint(run / 'best.pt')
            weights = {name: p.bfloat16() if p.dim() == 2 and not vector_kind(name) else p
                       for name, p in state['model'].items()}
            kept = {name: state[name] for name in ('tokenizer', 'step', 'settings')}
            save_checkpoint(target, weights, state['model_config'], **kept)
    for name, how in SCALES.items():
        once(folder / name, f'tune_scale.py --out_dir=lessons/models/{Path(name).parent} '
                            f'--target_length=1024 --n_samples=32 --dtype=float32 {how}')


if __name__ == '__main__':
    main()
