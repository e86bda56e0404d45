"""One line of the report of `dlo doctor`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Diagnosis:
    """One line of the report.

    ``required``: the labs do not run without it. ``cure`` is empty if the check passes.
    """

    name: str
    ok: bool
    found: str
    cure: str = ""
    required: bool = False
