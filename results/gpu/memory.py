"""
GPU memory of a training step, estimated without a GPU, and what fits.

$ python -m results.gpu.memory    # needs PyTorch's CUDA build, no GPU; a minute on one core

Exact: weights, gradients and the two Adam moments, 16 bytes a parameter; and `kept`, what a forward
pass keeps for backward, counted as autograd keeps it, on tensors without numbers. An estimate: what
backward needs besides, taken as what one layer keeps when it is computed again, and the logits and
their gradients in half precision. Not counted: what Inductor's graphs keep less, workspaces of
kernels and NCCL, and what the allocator loses, for all of which a tenth of the GPU is left free.
Writes results/gpu/memory.json.
"""

import dataclasses
from pathlib import Path

import torch
from torch.autograd.graph import saved_tensors_hooks

from configurator import run_config
from lib.answers import save_json
from model import ModelConfig, Transformer
from results.gpu.fake import fake_gpu

MODELS = {  # configs, and what is changed
    '1.1B': (['config/nope_1b.py'], {}),
    '1.1B, recomputed': (['config/nope_1b.py'], {'checkpoint_activations': True}),
    '350M': (['config/dape/125m.py', 'config/dape/350m.py'], {}),
    '350M DAPE 1x3-Kerple': (['config/dape/125m.py', 'config/dape/350m.py'],
                             {'position': 'kerple', 'dape_kernel': 3}),
    '125M': (['config/dape/125m.py'], {}),
    '125M DAPE 1x3-Kerple': (['config/dape/125m.py'], {'position': 'kerple', 'dape_kernel': 3}),
}
GPUS = 24, 40, 80   # GiB
BATCHES = 1, 2, 4, 8, 16, 32, 64


def kept_bytes(model, B, T):
    """Bytes that a forward pass of B windows of T tokens keeps for backward, weights left out."""
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    kept = {}

    def keep(x):
        kept[x.untyped_storage()._cdata] = x  # several may be views of the same memory
        return x

    x = torch.empty(B, T, dtype=torch.long, device='cuda')
    with saved_tensors_hooks(keep, lambda x: x), torch.autocast('cuda', torch.bfloat16):
        loss = model(x, x).mean()
    del loss
    return sum(x.untyped_storage().nbytes() for key, x in kept.items() if key not in own)


def estimate(settings, B):
    """Bytes of a training step on B windows: {what: bytes}. settings: of a config of train.py."""
    names = {field.name for field in dataclasses.fields(ModelConfig)} & settings.keys()
    config = {'vocab_size': settings['vocab_size']} | {name: settings[name] for name in names}
    T, n_layer, kept = config['block_size'], config['n_layer'], {}
    recomputed = settings.get('checkpoint_activations', False)
    # All layers keep the same: so models of one and of two say what one of n_layer keeps.
    for n in 1, 2:
        with torch.device('cuda'):
            model = Transformer(ModelConfig(**config | {'n_layer': n}))
        for checkpoint_activations in {recomputed, False}:
            model.checkpoint_activations = checkpoint_activations
            kept[n, checkpoint_activations] = kept_bytes(model, B, T)
    layer = kept[2, recomputed] - kept[1, recomputed]
    with torch.device('meta'):
        n_params = Transformer(ModelConfig(**config)).n_params()
    backward = (kept[2, False] - kept[1, False] if recomputed else 0)
    return {'parameters': n_params, 'state': 16 * n_params,
            'kept': kept[1, recomputed] + (n_layer - 1) * layer,
            'backward': backward + 2 * 2 * B * T * config['vocab_size']}


def total(row):
    return row['state'] + row['kept'] + row['backward']


def main():
    rows = []
    print(f"{'':22} {'state':>7}" + ''.join(f'{B:>8}' for B in BATCHES) + '   GB with that '
          'micro_batch_size; largest one in ' + ', '.join(map(str, GPUS)) + ' GB')
    for name, (configs, changes) in MODELS.items():
        settings = {'vocab_size': 32000 if 'nope' in configs[0] else 50257, 'position': 'none'}
        for config in configs:
            settings |= run_config(config)
        settings |= changes
        with fake_gpu('flash'):
            by_batch = {B: estimate(settings, B) for B in BATCHES}
        fits = {gpu: max((B for B in BATCHES if total(by_batch[B]) < 0.9 * gpu * 2 ** 30),
                         default=None) for gpu in GPUS}
        rows.append({'model': name, 'configs': configs, 'changes': changes, 'fits': fits,
                     'of_micro_batch_size': by_batch})
        print(f"{name:22} {by_batch[1]['state'] / 1e9:7.1f}"
              + ''.join(f'{total(row) / 1e9:8.1f}' for row in by_batch.values())
              + '   ' + ', '.join(str(fits[gpu] or 'none') for gpu in GPUS), flush=True)
    save_json(Path('results/gpu/memory.json'),
              {'torch': torch.__version__, 'bytes': rows})


if __name__ == '__main__':
    main()
