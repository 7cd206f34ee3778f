"""
The time of a training step without a short convolution, with it as model.py computes it, by shifted
sums, and with it as F.conv1d. The three models take turns, at two shapes.

$ OMP_NUM_THREADS=1 python -m results.past_L.steps    # 5 minutes on one core

Writes results/past_L/steps.json
"""

import time
from types import SimpleNamespace

import torch.nn.functional as F

import bench
from configurator import configure, settings
from lib.devices import setup
from model import ShortConv
from results import study

SIZES = dict(position='none', n_layer=4, n_head=8, n_kv_head=4)
SHAPES = {  # sequences, their tokens, and the model
    '1.05M parameters, 16 x 128 tokens': (16, 128, dict(
        vocab_size=1024, n_embd=128, n_hidden=384)),
    '16M parameters, 2 x 1024 tokens': (2, 1024, dict(
        vocab_size=4096, n_embd=512, n_hidden=1408)),
}
VARIANTS = {'no convolution': 0, 'shifted sums': 4, 'F.conv1d': 4}  # {name: short_conv}


class Conv1d(ShortConv):
    """ShortConv by PyTorch's convolution, without a cache."""

    def forward(self, x, cache=None):
        padded = F.pad(x.transpose(1, 2), (len(self.w) - 1, 0))
        return x + F.conv1d(padded, self.w.flip(0).t()[:, None], groups=x.shape[-1]).transpose(1, 2)


def milliseconds(B, T, sizes, runtime):
    """{variant: the median time of a step} on B sequences of T tokens."""
    s = SimpleNamespace(**settings(vars(bench)) | SIZES | sizes | {
        'rounds': 12, 'runtime': runtime})
    works = {}
    for name, short_conv in VARIANTS.items():
        model = bench.new_model(s, T, short_conv=short_conv)
        for module in model.modules():
            if name == 'F.conv1d' and isinstance(module, ShortConv):
                module.__class__ = Conv1d
        works[name] = bench.training_step(s, model, B, T)
    return {name: round(1000 * seconds, 1)
            for name, seconds in bench.medians(s, works).items()}


def main():
    began, runtime, found = time.perf_counter(), setup('cpu', 'float32'), {}
    for name, shape in SHAPES.items():
        found[name] = milliseconds(*shape, runtime)
        study.print_table([{'ms': name} | found[name]])
    study.write('results/past_L/steps', {'stage': 'past_L_steps', 'milliseconds': found}, globals(),
                began)


if __name__ == '__main__':
    configure(globals())
    main()
