"""
Errors that a user sees: one line for a mistake that the user can fix, the whole traceback for a
bug.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The errors that malformed data from outside can cause. Deeply nested JSON is a RecursionError.
MALFORMED = ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError


class UserError(ValueError):
    """
    A mistake that the user can fix. The text says what was wrong, with the value, and what to do.
    """


@contextlib.contextmanager
def as_user_error():
    """
    A context that turns a ValueError of model.py or position.py into a UserError, because the
    user's setting or file caused it.
    """
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error


@contextlib.contextmanager
def fault_of(path, what, advice):
    """
    A context that turns an error of MALFORMED into a UserError, because a malformed file caused it.
    The message says that `path` is not `what`, then gives the advice.
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
    Raise an error of MALFORMED unless `data` is a dict that has each name of kinds, and its value
    has the right type. kinds: {name: type}.
    """
    for name, kind in kinds.items():
        if not isinstance(data[name], kind):
            raise TypeError(f'{name} is {type(data[name]).__name__}')


def report(kind, error, trace):
    """
    A sys.excepthook that prints a user's mistake as one line. Under torchrun, if all ranks of a
    node meet the same error, only the first rank prints it. Another rank prints only an error that
    the first does not meet.
    """
    if kind.__name__ == 'OutOfMemoryError':  # torch's class, by name: importing torch is slow
        error = ('out of GPU memory. Lower micro_batch_size, batch_tokens or batch_size, or set '
                 '--checkpoint_activations=True, as the stage has them; see --help.')
    elif kind is RuntimeError and "can't allocate memory" in str(error):
        error = f'out of memory. Use smaller sizes; see --help. ({error})'
    elif kind is KeyboardInterrupt:
        error = 'interrupted'
    elif not issubclass(kind, (UserError, OSError)):
        return sys.__excepthook__(kind, error, trace)
    if int(os.environ.get('LOCAL_RANK', 0)):
        # torchrun checks ten times a second. If the first rank fails, too, torchrun ends this rank
        # during the sleep. On a busy machine, the first rank takes seconds to end.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(10)
    print(f"{Path(sys.argv[0]).name}: {' '.join(str(error).split())}", file=sys.stderr)
