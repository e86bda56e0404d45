"""How long ranks, and the server that forks them, are kept without work. On a Hub, they hold the memory of a
student who reads.
"""

from __future__ import annotations

import os

from dlo_lib.base.errors import UserError

RANKS_IDLE = "DLO_RANKS_IDLE_MINUTES"
DEFAULT = 20.0


def idle_minutes() -> float:
    """Return ``$DLO_RANKS_IDLE_MINUTES``, or 20; 0 keeps them.

    Raises:
        UserError: the variable is no such number.
    """
    text = os.environ.get(RANKS_IDLE, "")
    try:
        minutes = float(text or DEFAULT)
    except ValueError:
        minutes = -1.0
    if not 0 <= minutes < float("inf"):
        raise UserError(f'{RANKS_IDLE} is "{text}": use a number of minutes, or 0 to keep idle ranks')
    return minutes
