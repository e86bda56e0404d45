"""A receipt: the SHA-256 of the submitted notebook, byte for byte.

Instructor and student each compute it from their own file (``dlo receipt NOTEBOOK`` or ``sha256sum``); equal
receipts mean equal files. It contains no name and no time, so it proves what was submitted, not by whom or
when.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from dlo_lib.base.errors import UserError
from dlo_lib.grading.classroom.roster.safe_files import Refused, read_regular
from dlo_lib.grading.judge.intake import MAX_BYTES


def digest(content: bytes) -> str:
    """Return the SHA-256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def receipt_of(notebook: str | Path) -> str:
    """Return the receipt of the file ``notebook``.

    Raises:
        UserError: it is not a file that can be submitted.
    """
    try:
        return digest(read_regular(Path(notebook), MAX_BYTES))
    except Refused as error:
        raise UserError(f"no receipt for {notebook}: {error}") from error
