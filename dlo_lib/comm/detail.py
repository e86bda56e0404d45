"""How much is said when no progress is possible."""

from __future__ import annotations

import enum
import os

from dlo_lib.errors import unknown_name

VARIABLE = "DLO_EXPLAIN"


class Explain(enum.Enum):
    """What the dead-lock explainer says."""

    OFF = "off"
    """Nothing, and it does not watch: only to measure what it costs."""
    TABLE = "table"
    """What is wrong, and what each rank does."""
    STACKS = "stacks"
    """The Python stack of each rank too."""

    @classmethod
    def from_environment(cls) -> Explain:
        """What ``$DLO_EXPLAIN`` asks for; the table when it asks for nothing.

        Raises:
            UserError: it is no such name.
        """
        name = os.environ.get(VARIABLE) or cls.TABLE.value
        try:
            return cls(name)
        except ValueError:
            raise unknown_name(VARIABLE, name, [kind.value for kind in cls]) from None
