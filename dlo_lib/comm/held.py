"""What is known of objects of C++ that cannot be told apart by anything but the identity of their Python object."""

from __future__ import annotations

import sys
from typing import Generic, TypeVar

Thing = TypeVar("Thing")
Value = TypeVar("Value")

_ONLY_HERE = 2
"""References to a thing that nobody else holds: its pair's, and that of getrefcount's argument."""


class Held(Generic[Thing, Value]):
    """A value for each thing. A thing is kept alive, so that its identity stays its own, until nobody else has it, and a little longer."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Thing, Value]] = {}
        self._crowded = 16

    def __len__(self) -> int:
        return len(self._held)

    def keep(self, thing: Thing, value: Value) -> None:
        if len(self._held) >= self._crowded:
            self._forget()
        self._held[id(thing)] = (thing, value)

    def get(self, thing: Thing) -> Value | None:
        found = self._held.get(id(thing))
        return None if found is None else found[1]

    def drop(self, thing: Thing) -> None:
        self._held.pop(id(thing), None)

    def _forget(self) -> None:
        """Looked at in full only when they have doubled, so that keeping many costs little for each."""
        self._held = {key: pair for key, pair in self._held.items() if sys.getrefcount(pair[0]) > _ONLY_HERE}
        self._crowded = 16 + 2 * len(self._held)
