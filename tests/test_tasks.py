"""
The algorithmic tasks against slow definitions.

$ python -m pytest tests/test_tasks.py
"""

import bisect

import numpy as np
import pytest

from extras.tasks import TASKS

# Each function returns the answer to the input x, by the statement of the task. Both are lists of
# symbols.


def text(x, alphabet='0123456789'):
    return ''.join(alphabet[symbol] for symbol in x)


def value(x, alphabet='01234+-*()'):
    return [eval(text(x, alphabet)) % 5]  # Python's own arithmetic, which puts products first


def stack(x):
    left = []
    for symbol in x:
        left = left[:-1] if symbol == 2 else [*left, {0: 0, 1: 1, 3: 0, 4: 1}[symbol]]
    return ([*reversed(left), 2] + [0] * len(x))[:len(x) + 1]


def unknown(x):
    left, right = text(x, '01234+-()x=').split('=')
    return [n for n in range(5) if eval(left.replace('x', str(n))) % 5 == int(right)]


def missing(x):
    if len(x) == 1:
        return [1]
    half = len(x) // 2
    return [(x[half:2 * half] + x[:half])[x.index(2)]]


def total(x):
    numbers = [int(part[::-1] or '0', 2) for part in text(x).split('2')]
    digits = f'{sum(numbers):b}'[::-1]
    return [*map(int, digits), 2] + [0] * (len(x) - len(digits))


def root(x):
    n_bits = (len(x) + 1) // 2
    above = bisect.bisect(range(2 ** n_bits), int(text(x), 2), key=lambda r: r * r)
    return [*map(int, f'{above - 1:0{n_bits}b}')]


def recalled(x):
    """Values are 0 ... 31, keys 32 ... 63; what is asked for are the keys that end the input."""
    pairs = {a: b for a, b in zip(x, x[1:]) if 32 <= a < 64 and b < 32}
    asked = x[-len(pairs):]
    assert len(pairs) == sum(symbol < 32 for symbol in x) and sorted(asked) == sorted(pairs)
    return [pairs[key] for key in asked]


SLOW = {
    'even_pairs': lambda x: [sum(a != b for a, b in zip(x, x[1:])) % 2],
    'modular_arithmetic_simple': lambda x: value(x, '01234+-*'),
    'parity_check': lambda x: [x.count(1) % 2],
    'cycle_navigation': lambda x: [(x.count(2) - x.count(0)) % 5],
    'stack_manipulation': stack,
    'reverse_string': lambda x: x[::-1],
    'modular_arithmetic': value,
    'solve_equation': unknown,
    'duplicate_string': lambda x: x + x,
    'missing_duplicate': missing,
    'odds_first': lambda x: x[1::2] + x[::2],
    'binary_addition': total,
    'compute_sqrt': root,
    'bucket_sort': sorted,
    'recall': recalled,
    'copy': lambda x: x,
}


@pytest.mark.parametrize('name', TASKS)
def test_answers_are_those_of_the_slow_definition_in_the_right_shape_and_alphabet(name):
    task, symbols = TASKS[name], set()
    for n in (*range(1, 10), 13, 20, 39, 40):
        inputs, answers = task.generate(np.random.default_rng(n), 50, n)
        n = max(3, n) if name in ('recall', 'solve_equation', 'binary_addition') else n
        n -= name == 'modular_arithmetic_simple' and n % 2 == 0
        assert inputs.shape == (50, n) and inputs.dtype == answers.dtype == np.int64
        assert 0 <= inputs.min() and inputs.max() < task.n_in
        symbols |= {*answers.flatten().tolist()}
        for x, y in zip(inputs.tolist(), answers.tolist()):
            assert y == SLOW[name](x), x
    assert symbols == {*range(task.n_out)}


def test_slow_definitions_give_the_answers_of_the_papers_examples():
    # of Ruoss et al. 2023; for odds_first what its code does, as its example has even places first
    for row in ('even_pairs 0101001 1', 'cycle_navigation 20100 3', 'compute_sqrt 100101 110',
                'modular_arithmetic_simple 071547362 0', 'stack_manipulation 0110422 11020000',
                'missing_duplicate 1011213 0', 'odds_first 00110101 01110100',
                'binary_addition 001201101 0101120000'):
        name, x, y = row.split()
        assert text(SLOW[name]([*map(int, x)])) == y, row
