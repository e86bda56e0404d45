"""How the workers of a ``DataLoader`` start: by fork, on every supported Python.

Since Python 3.14, ``multiprocessing`` starts a process by *forkserver* and sends it the data set by pickle. A
class of a notebook cell, or one that a rank has received by value, has no file from which the new process
could import it: ``DataLoader(dataset, num_workers=2)`` fails. A forked worker inherits the data set.
"""

from __future__ import annotations

import multiprocessing


def start_workers_by_fork() -> None:
    """Make fork the default start method of this process, where Python has another default.

    A start method that the program has chosen stays. A later ``set_start_method`` needs ``force=True``.
    """
    default, *others = multiprocessing.get_all_start_methods()
    chosen = multiprocessing.get_start_method(allow_none=True)  # a lock or a queue chooses the default
    if "fork" in others and chosen in (None, default):
        multiprocessing.set_start_method("fork", force=True)
