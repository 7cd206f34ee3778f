"""
What a user sees of an error that nothing caught: one line for what he can mend, the whole traceback for a bug.
"""

import os
import signal
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def report(kind, error, trace):
    """
    A sys.excepthook. One line: an OSError, or a ValueError that a `raise` of this project gave its message. Under
    torchrun the first rank of a node says it, and others only what is theirs alone.
    """
    last = traceback.extract_tb(trace)[-1]  # where it was raised; a ValueError out of a library or C code is a bug
    inside = Path(last.filename).is_relative_to(ROOT) and 'site-packages' not in last.filename  # a .venv lies in ROOT
    ours = inside and last.line.startswith('raise ')
    if kind.__name__ == 'OutOfMemoryError':  # torch's, by its name: importing torch takes seconds
        error = ('out of GPU memory. Lower micro_batch_size, batch_tokens or batch_size, or set '
                 '--checkpoint_activations=True, as the stage has them; see --help.')
    elif kind is KeyboardInterrupt:
        error = 'interrupted'
    elif not (issubclass(kind, OSError) or kind is ValueError and ours):
        return sys.__excepthook__(kind, error, trace)
    if int(os.environ.get('LOCAL_RANK', 0)):  # torchrun, which looks ten times a second, ends it once the first failed
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(2)
    print(f"{Path(sys.argv[0]).name}: {' '.join(str(error).split())}", file=sys.stderr)
