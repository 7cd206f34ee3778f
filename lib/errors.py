"""
What a user sees of an error that nothing caught: one line for what he can mend, the whole traceback
for a bug.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What goes wrong where JSON from outside is read and taken apart; deep nesting is a RecursionError.
MALFORMED = ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError


class UserError(ValueError):
    """
    Something that a user can mend. Its text says what was wrong, with the value, and what to do.
    """


@contextlib.contextmanager
def as_user_error():
    """
    A ValueError of model.py or position.py in here is the user's: of a setting or a file of his.
    """
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error


@contextlib.contextmanager
def fault_of(path, what, advice):
    """
    What goes wrong in here is the fault of a file that is taken apart: `what` it is not, and the
    advice, are said to the user.
    """
    try:
        yield
    except UserError:
        raise
    except MALFORMED as error:
        raise UserError(f'{path} is not {what} ({type(error).__name__}: {error}). '
                        f'{advice}') from error


def require_kinds(data, /, **kinds):
    """
    Raise an error of MALFORMED unless `data` is a dict that has each name of `kinds`, {name: type},
    and of that type.
    """
    for name, kind in kinds.items():
        if not isinstance(data[name], kind):
            raise TypeError(f'{name} is {type(data[name]).__name__}')


def report(kind, error, trace):
    """
    A sys.excepthook. Under torchrun the first rank of a node prints what all ranks met, and the
    others only what is theirs alone.
    """
    if kind.__name__ == 'OutOfMemoryError':  # torch's, by its name: importing torch takes seconds
        error = ('out of GPU memory. Lower micro_batch_size, batch_tokens or batch_size, or set '
                 '--checkpoint_activations=True, as the stage has them; see --help.')
    elif kind is KeyboardInterrupt:
        error = 'interrupted'
    elif not issubclass(kind, (UserError, OSError)):
        return sys.__excepthook__(kind, error, trace)
    if int(os.environ.get('LOCAL_RANK', 0)):
        # torchrun, which looks ten times a second, ends this rank once the first has failed.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(10)  # a busy machine takes seconds to end the first
    print(f"{Path(sys.argv[0]).name}: {' '.join(str(error).split())}", file=sys.stderr)
