"""
The algorithmic tasks of the Chomsky hierarchy: random inputs, and their answers.

A generator takes numpy's random generator, a number of samples B and a length n. It returns inputs
(B, n) and answers (B, m), as int64 symbols counted from 0. The tasks before recall() are those of
Deletang et al. 2023, "Neural Networks and the Chomsky Hierarchy". Their alphabets are those of
Ruoss et al. 2023, "Randomized Positional Encodings". In a docstring, INPUT -> ANSWER is an example.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


def random_bits(rng, B, n):
    return rng.integers(0, 2, (B, n))


def values_of(texts):
    """The value mod 5 of each expression, by Python's own arithmetic: (B, 1)."""
    return np.array([[eval(text) % 5] for text in texts])


# ---------------------------------------------------------------------- regular

def even_pairs(rng, B, n):
    """
    Is the number of pairs 01 and 10 in a binary string even (0) or odd (1)? 001110 -> 0, because
    there is one of each.
    """
    x = random_bits(rng, B, n)
    # Each such pair changes the symbol, so their number is odd if the first and last bits differ.
    return x, x[:, :1] ^ x[:, -1:]


def modular_arithmetic_simple(rng, B, n):
    """
    The value mod 5 of digits with + - * (5, 6, 7) between them, products first. 1+2*3 -> 2. If n is
    even, the input has n - 1 symbols.
    """
    n_digits = (n + 1) // 2
    x = np.empty((B, 2 * n_digits - 1), np.int64)
    x[:, ::2] = rng.integers(0, 5, (B, n_digits))
    x[:, 1::2] = rng.integers(5, 8, (B, n_digits - 1))
    texts = [''.join('01234+-*'[symbol] for symbol in row) for row in x]
    return x, values_of(texts)


def parity_check(rng, B, n):
    """Is the number of ones even (0) or odd (1)? 1010100 -> 1."""
    x = random_bits(rng, B, n)
    return x, x.sum(1, keepdims=True) % 2


def cycle_navigation(rng, B, n):
    """
    Where does a walk from place 0 on a circle of five places end? Symbol 0 is a step back, 1 is no
    step, 2 is a step forward. 20222 -> 3.
    """
    x = rng.integers(0, 3, (B, n))
    return x, (x - 1).sum(1, keepdims=True) % 5


# ---------------------------------------------------------------------- deterministic context-free

END = 2  # the end of an answer whose length varies; zeros follow


def ended(text, n):
    """A text of up to n characters, END, and zeros: n + 1 characters."""
    return f'{text}{END}'.ljust(n + 1, '0')


def symbols_of(texts, alphabet):
    """The index in the alphabet of each character: (B, n) from B texts of n characters."""
    return np.array([[alphabet.index(character) for character in text] for text in texts])


def stack_manipulation(rng, B, n):
    """
    What is left on a stack after some orders? The input is the stack, top last, then the orders: 2
    pops, 3 pushes 0, 4 pushes 1. The answer is the stack, top first, then END.
    0110422 -> 11020000.
    """
    height = rng.integers(1, max(2, n), (B, 1))
    bits, orders = random_bits(rng, B, n), rng.integers(2, 5, (B, n))
    x = np.where(np.arange(n) < height, bits, orders)

    answers = []
    for row in x.tolist():
        stack = ''  # the input's own stack is pushed, too: its 0 and 1 act like the orders 3 and 4
        for symbol in row:
            stack = stack[:-1] if symbol == 2 else stack + str(symbol % 3)
        answers.append(ended(stack[::-1], n))
    return x, symbols_of(answers, '012')


def reverse_string(rng, B, n):
    """A binary string backwards. 1101 -> 1011."""
    x = random_bits(rng, B, n)
    return x, x[:, ::-1].copy()  # copied, because PyTorch does not accept a reversed view


def expression(rng, n, operators):
    """
    A random expression of n characters with every operation in brackets, such as ((-2)*(4-1)). Up
    to four characters hold a digit: 1, -1, (1) or (-1). A longer expression is two expressions with
    an operator between them, in brackets.
    """
    if n <= 2:
        return '-' * (n - 1) + str(rng.integers(5))
    if n <= 4:
        return f'({expression(rng, n - 2, operators)})'
    n_left = rng.integers(1, n - 3)
    left = expression(rng, n_left, operators)
    right = expression(rng, n - 3 - n_left, operators)
    operator = operators[rng.integers(len(operators))]
    return f'({left}{operator}{right})'


def modular_arithmetic(rng, B, n):
    """The value mod 5 of an expression of 01234+-*(). ((-2)*(4-1)) -> 4."""
    texts = [expression(rng, n, '+-*') for _ in range(B)]
    return symbols_of(texts, '01234+-*()'), values_of(texts)


def solve_equation(rng, B, n):
    """
    Which digit is x in an equation mod 5 of 01234+-()x=? (x-(-4))=2 -> 3. If n < 3, n is 3.
    """
    n, equations, answers = max(3, n), [], []
    for _ in range(B):
        text = expression(rng, n - 2, '+-')
        place = rng.integers(n - 2)
        while not text[place].isdigit():  # find the next digit; after the end, go on from the start
            place = (place + 1) % (n - 2)
        equations.append(f'{text[:place]}x{text[place + 1:]}={eval(text) % 5}')
        answers.append([int(text[place])])
    return symbols_of(equations, '01234+-()x='), np.array(answers)


# ---------------------------------------------------------------------- context-sensitive

def duplicate_string(rng, B, n):
    """A binary string twice. 101 -> 101101."""
    x = random_bits(rng, B, n)
    return x, np.tile(x, 2)


def missing_duplicate(rng, B, n):
    """
    Which bit is hidden (2) in a binary string written twice? 01100210 -> 1. If n is odd, the last
    symbol is 3. If n = 1: 1 -> 1.
    """
    if n == 1:
        ones = np.ones((B, 1), np.int64)
        return ones, ones
    half = n // 2
    x = np.full((B, n), 3)
    x[:, :2 * half] = np.tile(random_bits(rng, B, half), 2)
    hidden = np.arange(B), rng.integers(0, 2 * half, B)
    answers = x[hidden]
    x[hidden] = 2
    return x, answers[:, None]


def odds_first(rng, B, n):
    """The symbols at odd places, then at even places, counted from 0. 00110101 -> 01110100."""
    x = random_bits(rng, B, n)
    return x, np.concatenate((x[:, 1::2], x[:, ::2]), axis=1)


def bits_above_zero(rng, n):
    """A str of n random bits that are not all 0."""
    bits = ''
    while '1' not in bits:
        bits = ''.join(map(str, random_bits(rng, 1, n)[0]))
    return bits


def binary_addition(rng, B, n):
    """
    The sum of two numbers above 0, then END. The input has a 2 between the numbers. All numbers
    have the lowest bit first. 001201101 -> 0101120000, which is 4 + 22. If n < 3, n is 3.
    """
    n, inputs, answers = max(3, n), [], []
    for _ in range(B):
        n_first = rng.integers(1, n - 1)
        first, second = bits_above_zero(rng, n_first), bits_above_zero(rng, n - 1 - n_first)
        total = int(first[::-1], 2) + int(second[::-1], 2)
        inputs.append(f'{first}2{second}')
        answers.append(ended(f'{total:b}'[::-1], n))
    return symbols_of(inputs, '012'), symbols_of(answers, '012')


def compute_sqrt(rng, B, n):
    """
    The square root of a number above 0, rounded down. Both have the highest bit first.
    100101 (37) -> 110 (6).
    """
    numbers = [bits_above_zero(rng, n) for _ in range(B)]
    roots = [math.isqrt(int(bits, 2)) for bits in numbers]
    texts = [f'{root:0{(n + 1) // 2}b}' for root in roots]
    return symbols_of(numbers, '01'), symbols_of(texts, '01')


def bucket_sort(rng, B, n):
    """A string of five symbols, sorted. 421302214 -> 011222344."""
    x = rng.integers(0, 5, (B, n))
    return x, np.sort(x, axis=1)


# ---------------------------------------------------------------------- retrieval

N_SYMBOLS = 32  # the alphabet of copy; recall has so many values, keys and noise symbols, each


def recall(rng, B, n):
    """
    Associative recall with many queries (Arora et al., arXiv:2312.04927). The input has pairs of a
    key and its value, surrounded by noise, then each key once, as a query. The answer is the values
    of the queries. With a and b as keys and dots as noise: .a7..b2.ba -> 27. There are n / 4 pairs,
    rounded down, but at least one and at most N_SYMBOLS, and as many queries. All keys of an input
    are different. If n < 3, n is 3. Symbols: values, then keys, then noise.
    """
    n = max(3, n)
    n_pairs = min(max(1, n // 4), N_SYMBOLS)
    keys = rng.random((B, N_SYMBOLS)).argsort(1)[:, :n_pairs]          # all different
    values = rng.integers(0, N_SYMBOLS, (B, n_pairs))
    order = rng.random((B, n_pairs)).argsort(1)                        # of the queries

    x = rng.integers(2 * N_SYMBOLS, 3 * N_SYMBOLS, (B, n))             # noise
    # Before the queries there are n - 2 n_pairs places, where a pair counts as one place. Choose
    # the places of the pairs, in order. With n = 10 and 2 pairs, places 1 and 4 of the 6 become
    # the starts 1 and 5.
    places = rng.random((B, n - 2 * n_pairs)).argsort(1)[:, :n_pairs]
    starts = np.sort(places, axis=1) + np.arange(n_pairs)
    np.put_along_axis(x, starts, N_SYMBOLS + keys, axis=1)
    np.put_along_axis(x, starts + 1, values, axis=1)
    x[:, -n_pairs:] = N_SYMBOLS + np.take_along_axis(keys, order, axis=1)
    return x, np.take_along_axis(values, order, axis=1)


def copy(rng, B, n):
    """The same string again, from an alphabet of N_SYMBOLS symbols. 7392 -> 7392."""
    x = rng.integers(0, N_SYMBOLS, (B, n))
    return x, x


# ---------------------------------------------------------------------- all of them

@dataclass
class Task:
    """
    A task. read: where the model answers. It always answers in one pass.
    'slots': at empty tokens after the input, one for each symbol of the answer.
    'queries': at the last symbols of the input.
    'generated': at an empty token after the input, then at the symbols of the right answer, each
    read to predict the next.
    """
    generate: Callable  # (rng, B, n) -> inputs, answers
    n_in: int           # size of the inputs' alphabet; a symbol may never occur, see TASKS
    n_out: int          # number of different symbols in the answers
    ends: bool = False  # True if the answers finish with END
    read: str = 'slots'


# In the order of Table 6 of "DAPE V2". Its levels: R, regular; DCF, deterministic context-free; CS,
# context-sensitive. The alphabets of the two modular_arithmetic tasks have a last symbol that never
# occurs, 8 and 10, as in the code of Deletang et al.
TASKS = {task.generate.__name__: task for task in (
    # R
    Task(even_pairs, 2, 2),
    Task(modular_arithmetic_simple, 9, 5),
    Task(parity_check, 2, 2),
    Task(cycle_navigation, 3, 5),
    # DCF
    Task(stack_manipulation, 5, 3, ends=True),
    Task(reverse_string, 2, 2),
    Task(modular_arithmetic, 11, 5),
    Task(solve_equation, 11, 5),
    # CS
    Task(duplicate_string, 2, 2),
    Task(missing_duplicate, 4, 2),
    Task(odds_first, 2, 2),
    Task(binary_addition, 3, 3, ends=True),
    Task(compute_sqrt, 2, 2),
    Task(bucket_sort, 5, 5),
    # tasks that Table 6 does not have
    Task(recall, 3 * N_SYMBOLS, N_SYMBOLS, read='queries'),
    Task(copy, N_SYMBOLS, N_SYMBOLS, read='generated'),
)}
