"""
A scale per head, per channel and other small vectors on passkeys. NoPE models that find the key in
contexts of up to L = 256 tokens are tuned on documents of about 4L, all with the same tokens.

$ python -m results.channel_scale.passkey   # an hour of one core for a seed, half of it training
$ python -m results.channel_scale.passkey --work=False   # the table of what was measured

First run the three lines of results/passkey_demo/run.sh that prepare data. A stopped run continues
where it was. Writes results/channel_scale/passkey.json
"""

import numpy as np

from configurator import configure
from lib.checkpoints import open_model
from lib.errors import ROOT
from lib.generate import complete
from passkey import build_prompt, draw_cells
from results import study
from results.channel_scale.table import over_seeds

out_dir = 'out/passkey'      # SEED/nope is a model, SEED/whole the same with every weight tuned
seeds = [1337, 1338, 1339]
work = True                  # False: only show what was measured

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
LONG = '--dataset=passkey_long --max_iters=60'
WHOLE = (f'{LONG} --block_size={4 * L} --batch_size=8 --micro_batch_size=8 --learning_rate=1e-3 '
         '--min_lr=0 --warmup_iters=6 --weight_decay=0 --eval_windows=16 --seed=42')


def keys_found(folder, label, reading=''):
    """The result of passkey.py: 100 keys at each of LENGTHS."""
    return study.made(f'{folder}/passkey_{label}.json',
                      f'passkey.py --out_dir={folder} --label={label} --max_length={4 * L} '
                      f'--n_lengths={len(LENGTHS)} {reading}')


def result_of(seed):
    """{what was tuned: the share of keys found at each of LENGTHS}. Makes what is missing."""
    folder, whole = f'{out_dir}/{seed}/nope', f'{out_dir}/{seed}/whole'
    study.train(folder, f'config/passkey_nope.py --seed={seed}')
    found = {'nothing': keys_found(folder, 'study_none'),
             'uniform scale': keys_found(folder, 'study_uniform', f'--scale={UNIFORM}')}
    for i, (name, arguments) in enumerate(TUNED.items()):
        path = f'{folder}/scale_head_{4 * L}_study_{i}.json'
        study.made(path, f'tune_scale.py --out_dir={folder} --target_length={4 * L} {LONG} '
                         f'--init_scale={UNIFORM} --n_samples=4 --label=study_{i} {arguments}')
        found[name] = keys_found(folder, f'study_{i}', f'--scale={path}')
    study.train(whole, f'{WHOLE} --init_from={folder}/last.pt')
    found['every weight'] = keys_found(whole, 'study')
    shares = {name: np.mean(one['accuracy'], axis=1).tolist() for name, one in found.items()}
    return shares | {'nothing, context cut to L': found_when_cut(folder, found['nothing'])}


def found_when_cut(folder, whole):
    """
    The share of keys found at each of LENGTHS when the model reads only the end of each prompt: L
    tokens with the answer. whole: the result of passkey.py for whole prompts.
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


def collect():
    """The result. Measures what is missing."""
    each = [result_of(seed) for seed in seeds]
    return {'stage': 'channel_passkey', 'block_size': L, 'target_length': 4 * L,
            'lengths': LENGTHS, 'seeds': seeds,
            'found': {name: over_seeds([one[name] for one in each]) for name in each[0]}}


def print_result(result):
    print('Share of keys found by length, tuned at', 4 * L)
    study.print_lists(result['found'], LENGTHS)


if __name__ == '__main__':
    configure(globals())
    study.show(ROOT / 'results/channel_scale/passkey', collect, print_result, globals())
