"""
What results/gpu/run.sh has measured so far.

$ python -m results.gpu.table

`of limit` compares with the rate of a large matrix product, which bench.py measures. For training
also TFLOP/s by the usual convention: 6 FLOP per token for each weight without the embedding, and
12 x layers x width x T for attention. `of sheet` compares them with the GPU's data sheet.
"""

from pathlib import Path

import torch

from configurator import configure
from demo import read
from lib.answers import print_rows
from lib.checkpoints import config_of
from model import Transformer

out_dir = 'results/gpu'      # the folder that run.sh writes to

SHEET = {'H100': 989e12, 'H200': 989e12, 'A100': 312e12}  # dense bfloat16 FLOP/s, of the SXM cards


def usual_flops(settings, T):
    """FLOP of a training step per token by the usual convention. settings: of bench.py."""
    config = config_of(settings, block_size=T)
    with torch.device('meta'):
        model = Transformer(config)
    weights = model.n_params() - model.embed.weight.numel()
    return 6 * weights + 12 * config.n_layer * config.n_embd * T


def rows_of(result):
    """A row for each time in a result of bench.py."""
    peak = next((rate for card, rate in SHEET.items() if card in result['device']), None)
    for found in result['results'].values():
        for one in found if isinstance(found, list) else [found]:
            for who in one.get('limit_seconds', ()):
                timed = one[who]
                row = {'task': one['task'], 'who': who, 'ms': 1000 * timed['seconds'],
                       'tokens/s': timed['tokens_per_second'], 'of limit': timed['of_limit']}
                if one['task'] == 'training step':
                    settings = result['settings']
                    flops = usual_flops(settings, settings['context']) * row['tokens/s']
                    row['TFLOP/s'] = flops / 1e12
                    if peak:
                        row['of sheet'] = flops / peak
                yield row
            if 'task' not in one:  # a row of the tables time_cost and memory
                yield one


def main():
    for path in sorted(Path(out_dir).glob('*.json')):
        result = read(path)
        if result.get('stage') == 'bench':
            print(f'\n{path.stem}')
            print_rows(print, list(rows_of(result)))


if __name__ == '__main__':
    configure(globals())
    main()
