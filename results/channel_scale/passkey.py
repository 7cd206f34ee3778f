"""
A scale per head, per channel and other small vectors on passkeys: NoPE models that find the key in
contexts of up to L = 256 tokens are tuned on documents of about 4L, all with the same tokens.

$ python -m results.channel_scale.passkey   # an hour of one core for a seed, half of it training

First the three lines of results/passkey_demo/run.sh that prepare data. Goes on where it was
stopped. Writes results/channel_scale/passkey.json
"""

import time
from pathlib import Path

import numpy as np

from configurator import configure, settings
from demo import read, run
from lib.checkpoints import open_model
from lib.devices import setup
from lib.errors import ROOT
from lib.generate import complete
from lib.plots import write_result
from passkey import build_prompt, draw_cells
from results.channel_scale.table import over_seeds, show

out_dir = 'out/passkey'      # SEED/nope is a model, SEED/whole the same with every weight tuned
seeds = [1337, 1338, 1339]

L = 256
LENGTHS = [L, 2 * L, 3 * L, 4 * L]
UNIFORM = 1.2                # the scale that all is tuned from
# {what is tuned: what tune_scale.py is given}
TUNED = {
    'scale per head, rate 0.01': '--tune=scale:0.01',
    'scale per channel': '--tune=channel',
    'scale per channel, rate 0.01': '--tune=channel:0.01',
    'gains of attention norms': '--tune=attn_norm',
    'scale per head, gains of heads and norms': '--tune=scale,out,norm',
}
LONG = ['--dataset=passkey_long', '--max_iters=60']
WHOLE = [*LONG, f'--block_size={4 * L}', '--batch_size=8', '--micro_batch_size=8',
         '--learning_rate=1e-3', '--min_lr=0', '--warmup_iters=6', '--weight_decay=0',
         '--eval_windows=16', '--seed=42']


def found_with(folder, label, *reading):
    """What passkey.py gives: 100 keys at each of LENGTHS."""
    path = Path(folder, f'passkey_{label}.json')
    if not path.exists():
        run('passkey.py', f'--out_dir={folder}', f'--label={label}', f'--max_length={4 * L}',
            f'--n_lengths={len(LENGTHS)}', *reading)
    return read(path)


def measure(seed):
    """{what was tuned: the share of keys found at each of LENGTHS}. Makes what is not there yet."""
    folder, whole = f'{out_dir}/{seed}/nope', f'{out_dir}/{seed}/whole'
    if not Path(folder, 'loss.png').exists():
        again = ['--init_from=resume'] if Path(folder, 'last.pt').exists() else []
        run('train.py', 'config/passkey_nope.py', f'--seed={seed}', f'--out_dir={folder}', *again)
    found = {'nothing': found_with(folder, 'study_none'),
             'uniform scale': found_with(folder, 'study_uniform', f'--scale={UNIFORM}')}
    for i, (name, arguments) in enumerate(TUNED.items()):
        label = f'study_{i}'
        file = Path(folder, f'scale_head_{4 * L}_{label}.json')
        if not file.exists():
            run('tune_scale.py', f'--out_dir={folder}', f'--target_length={4 * L}', *LONG,
                f'--init_scale={UNIFORM}', '--n_samples=4', f'--label={label}', *arguments.split())
        found[name] = found_with(folder, label, f'--scale={file}')
    if not Path(whole, 'loss.png').exists():
        run('train.py', *WHOLE, f'--init_from={folder}/last.pt', f'--out_dir={whole}')
    found['every weight'] = found_with(whole, 'study')
    shares = {name: np.mean(one['accuracy'], axis=1).tolist() for name, one in found.items()}
    return shares | {'nothing, context cut to L': found_when_cut(folder, found['nothing'])}


def found_when_cut(folder, whole):
    """
    The share of keys that the model finds at each of LENGTHS when it reads only the end of each
    prompt of `whole`, what passkey.py gave: L tokens with the answer.
    """
    model, encoding = open_model(f'{folder}/last.pt')
    asked = whole['settings']
    right = {length: [] for length in LENGTHS}
    for length, _, place, key in draw_cells(LENGTHS, asked['n_depths'], asked['n_keys'],
                                            asked['seed']):
        prompt, answer, _ = build_prompt(encoding, length, place, key, asked['protocol'])
        end = prompt[-(L - len(answer)):]
        right[length].append(complete(model, [end], len(answer))[0] == answer)
    return [np.mean(right[length]) for length in LENGTHS]


def main():
    began = time.perf_counter()
    each = [measure(seed) for seed in seeds]
    found = {name: over_seeds([one[name] for one in each]) for name in each[0]}
    print('share of keys found at', LENGTHS, 'when this was tuned at', 4 * L)
    for name, cell in found.items():
        print(show(name, cell))
    result = {'stage': 'channel_passkey', 'block_size': L, 'target_length': 4 * L,
              'lengths': LENGTHS, 'seeds': seeds, 'found': found}
    write_result(ROOT / 'results/channel_scale/passkey', result, settings(globals()),
                 setup('cpu', 'float32'), began)


if __name__ == '__main__':
    configure(globals())
    main()
