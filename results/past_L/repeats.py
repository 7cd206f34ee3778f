"""
How often a text repeats itself. In windows of L and of 8L tokens of the split train: the share of
tokens that follow a repeat, four tokens that also stand earlier in the window, and the share that
copying predicts, because the token after the latest earlier place is the same. A model can learn to
copy only where its training windows hold repeats.

$ python -m results.past_L.repeats    # 10 s; run.sh says how to prepare the texts

Writes results/past_L/repeats.json
"""

import time

import numpy as np

from configurator import configure
from lib.repeats import last_repeats
from lib.tokens import Windows
from results import study
from results.past_L.table import SERIES

datasets = ['code', 'books_1024', 'books_code']  # folders of data/
n_tokens = 2 ** 20  # to look at, of each text and length
GRAM = 4


def shares(dataset, T):
    """The shares of tokens that follow a repeat, and that copying predicts, in windows of T."""
    samples = Windows(dataset, 'train', T).batch(0, n_tokens // T)
    places = last_repeats(samples, GRAM)
    follows = places >= 0
    window, t = np.nonzero(follows)
    same = samples[window, t] == samples[window, places[window, t]]
    among = follows[:, GRAM:].size  # the first tokens of a window cannot follow a repeat
    return {'repeats': len(t) / among, 'copied': int(same.sum()) / among}


def main():
    began, rows = time.perf_counter(), []
    for dataset in datasets:
        for T in SERIES['code'].L, 8 * SERIES['code'].L:
            rows.append({'dataset': dataset, 'length': T} | shares(dataset, T))
    study.print_table(rows, digits=4)
    study.write('results/past_L/repeats', {'stage': 'past_L_repeats', 'rows': rows}, globals(),
                began)


if __name__ == '__main__':
    configure(globals())
    main()
