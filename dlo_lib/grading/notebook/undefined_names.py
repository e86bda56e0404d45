"""Names that an error reports as not defined, because their cell has not run since the kernel started."""

from __future__ import annotations

import re
from collections.abc import Iterable

from dlo_lib.launch.failure import RankFailure

_ON_A_RANK = re.compile(r"^\s*NameError: name '(\w+)' is not defined", re.MULTILINE)
_IN_A_VERDICT = re.compile(r"\bNameError: name '(\w+)' is not defined")


def undefined_name(error: BaseException) -> str:
    """Return the name that ``error``, raised in a cell or on a rank, reports as not defined; "" if none."""
    if type(error) is NameError:
        return str(error.name or "")
    found = _ON_A_RANK.search(str(error)) if isinstance(error, RankFailure) else None
    return found.group(1) if found else ""


def undefined_in(messages: Iterable[str]) -> list[str]:
    """Return the names that the messages of a verdict report as not defined."""
    return [name for message in messages for name in _IN_A_VERDICT.findall(message)]
