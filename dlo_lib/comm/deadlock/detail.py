"""How detailed the explanation of a deadlock is."""

from __future__ import annotations

import enum
import os

from dlo_lib.base.errors import unknown_name

VARIABLE = "DLO_EXPLAIN"


class Explain(enum.Enum):
    """What the deadlock explainer prints."""

    OFF = "off"
    """Nothing, and it does not watch the ranks. Use it only to measure the cost of the explainer."""
    TABLE = "table"
    """The cause, and a table of what each rank does."""
    STACKS = "stacks"
    """The table, and the Python stack of each rank."""

    @classmethod
    def from_environment(cls) -> Explain:
        """Return the value of ``$DLO_EXPLAIN``; ``TABLE`` if the variable is not set.

        Raises:
            UserError: the variable has another value.
        """
        name = os.environ.get(VARIABLE) or cls.TABLE.value
        try:
            return cls(name)
        except ValueError:
            raise unknown_name(VARIABLE, name, [kind.value for kind in cls]) from None
