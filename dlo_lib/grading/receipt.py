"""A receipt: the SHA-256 of the notebook that was handed in, byte for byte.

Instructor and student compute it alone, from the file each has (`dlo receipt NOTEBOOK`, or `sha256sum`): when they agree, they speak of the
same work. No name and no time is in it, so it proves what was handed in, not by whom or when.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from dlo_lib.errors import UserError
from dlo_lib.grading.archive import Refused, read_regular
from dlo_lib.grading.intake import MAX_BYTES


def digest(content: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def receipt_of(notebook: str | Path) -> str:
    """The receipt of the file ``notebook``.

    Raises:
        UserError: it is not a file that can be handed in.
    """
    try:
        return digest(read_regular(Path(notebook), MAX_BYTES))
    except Refused as error:
        raise UserError(f"no receipt for {notebook}: {error}") from error
