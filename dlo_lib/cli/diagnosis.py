"""One line of the report of `dlo doctor`."""

from __future__ import annotations

from dataclasses import dataclass

from dlo_lib.base.text import tr


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


def fault(name: str, cure: str, text: str, /, **values: object) -> Diagnosis:
    """A fault with which the labs do not run. ``text`` is translated and filled in with ``values``."""
    return Diagnosis(name, False, tr(text, **values), cure, required=True)


def passed(name: str, text: str, /, **values: object) -> Diagnosis:
    """A check that passes."""
    return Diagnosis(name, True, tr(text, **values))
