"""
The time of a training step without a short convolution, with it as model.py computes it, by shifted
sums, and with it as F.conv1d: at two shapes, each in a process of its own.

$ python -m results.past_L.steps    # 5 minutes on one core

Writes results/past_L/steps.json
"""

import subprocess
import sys
import time

import torch
import torch.nn.functional as F

import model as model_file
from configurator import configure, settings
from lib.answers import provenance, save_json
from lib.devices import setup
from model import ModelConfig, Transformer
from results.past_L.table import FOLDER

variant = ''   # set by the program itself: which one to measure, and at which of SHAPES
shape = ''

SIZES = dict(n_layer=4, n_head=8, n_kv_head=4)
SHAPES = {  # sequences, and the model
    '1.05M parameters, 16 x 128 tokens': (16, ModelConfig(
        vocab_size=1024, block_size=128, n_embd=128, n_hidden=384, **SIZES)),
    '16M parameters, 2 x 1024 tokens': (2, ModelConfig(
        vocab_size=4096, block_size=1024, n_embd=512, n_hidden=1408, **SIZES)),
}
VARIANTS = 'no convolution', 'shifted sums', 'F.conv1d'
STEPS = 12


def by_conv1d(self, x, cache=None):
    """ShortConv.forward() by PyTorch's convolution, without a cache."""
    padded = F.pad(x.transpose(1, 2), (len(self.w) - 1, 0))
    return x + F.conv1d(padded, self.w.flip(0).t()[:, None], groups=x.shape[-1]).transpose(1, 2)


def median_step():
    """Milliseconds of forward, backward and AdamW, compiled, on one thread."""
    torch.set_num_threads(1)
    B, config = SHAPES[shape]
    if variant != 'no convolution':
        config.short_conv = 4
    if variant == 'F.conv1d':
        model_file.ShortConv.forward = by_conv1d
    model = Transformer(config).init_weights()
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=True)
    compiled, seconds = torch.compile(model, dynamic=False), []
    tokens = torch.randint(config.vocab_size, (B, config.block_size + 1))
    for _ in range(STEPS + 1):
        began = time.perf_counter()
        compiled(tokens[:, :-1], tokens[:, 1:]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    return 1000 * sorted(seconds[1:])[STEPS // 2]  # the first one compiles


def main():
    runtime, began, found = setup('cpu', 'float32'), time.perf_counter(), {}
    if variant:
        print(median_step())
        return
    for name in SHAPES:
        found[name] = {}
        for kind in VARIANTS:
            command = [sys.executable, '-m', 'results.past_L.steps', f'--shape={name}',
                       f'--variant={kind}']
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[name][kind] = round(float(out), 1)
            print(name, kind, found[name][kind], 'ms', flush=True)
    result = {'stage': 'past_L_steps', 'milliseconds': found}
    save_json(FOLDER / 'steps.json', result | provenance(settings(globals()), runtime,
                                                         time.perf_counter() - began))


if __name__ == '__main__':
    configure(globals())
    main()
