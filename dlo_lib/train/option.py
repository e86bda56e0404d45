"""What an option of a training run has beside its value."""

from __future__ import annotations

import enum
from dataclasses import dataclass


@dataclass(frozen=True)
class Option:
    """The metadata of a field: its help, whether a resumed run must have the same value, a second option
    name, and the possible values if the type does not give them.
    """

    help: str
    same_on_resume: bool = True
    also: str | None = None
    choices: tuple[str, ...] = ()


class Auto(enum.Enum):
    """The value of an option that the run finds itself."""

    AUTO = "auto"
