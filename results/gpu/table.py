"""
What results/gpu/run.sh has measured so far.

$ python -m results.gpu.table

A share of the limit is that of bench.py: what the arithmetic alone would take at the rate of a
large matrix product, measured there. For training also the usual convention: 6 FLOP for each weight
but the embedding's and 12 x layers x width x T for attention, a token, over what the GPU's data
sheet promises in bfloat16.
"""

import json
from pathlib import Path

import torch

from configurator import configure
from model import ModelConfig, Transformer

out_dir = 'results/gpu'      # what run.sh has written

SHEET = {'H100': 989e12, 'H200': 989e12, 'A100': 312e12}  # dense bfloat16 FLOP/s, of the SXM cards


def usual_flops(settings, T):
    """FLOP of a training step a token by the usual convention. settings: bench.py's."""
    sizes = {name: value for name, value in settings.items()
             if name in ModelConfig.__dataclass_fields__}
    with torch.device('meta'):
        model = Transformer(ModelConfig(block_size=T, **sizes))
    c = model.config
    weights = model.n_params() - model.embed.weight.numel()
    return 6 * weights + 12 * c.n_layer * c.n_embd * T


def lines(path):
    """A line of text for each figure of one of bench.py's results."""
    result = json.loads(path.read_text())
    if result.get('stage') != 'bench':
        return
    peak = next((rate for name, rate in SHEET.items() if name in result['device']), None)
    rows = []
    for found in result['results'].values():
        rows += found if isinstance(found, list) else [found]
    for row in rows:
        if 'task' not in row:  # of the table time_cost
            yield (f"{row['method']:28} step         {row['seconds'] * 1e3:10.1f} ms, "
                   f"{row['ratio']:.2f} of DAPE 1x3-Kerple's")
            continue
        for who in row['limit_seconds']:
            speed = row[who]['tokens_per_second']
            line = (f"{row['task']:28} {who:12} {row[who]['seconds'] * 1e3:10.1f} ms "
                    f"{speed:12,.0f} tokens/s {row[who]['of_limit']:5.0%} of the limit")
            if row['task'] == 'training step':
                rate = speed * usual_flops(result['settings'], result['settings']['context'])
                line += f', {rate / 1e12:.4g} TFLOP/s by 6P'
                line += f' = {rate / peak:.0%} of the data sheet' if peak else ''
            yield line


def main():
    for path in sorted(Path(out_dir).glob('*.json')):
        for line in lines(path):
            print(f'{path.stem:18} {line}')


if __name__ == '__main__':
    configure(globals())
    main()
