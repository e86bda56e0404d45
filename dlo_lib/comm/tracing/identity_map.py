"""A map keyed by the identity of Python objects, for C++ objects without a usable hash."""

from __future__ import annotations

import sys
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

_OWN_REFERENCES = 2
"""References to a key that only this map holds: one in the pair, one in the argument of getrefcount."""


class IdentityMap(Generic[Key, Value]):
    """Maps objects to values by identity.

    The map holds a reference to each key, so that its identity stays unique. It removes keys that only the
    map still holds when its size has doubled.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[Key, Value]] = {}
        self._next_cleanup = 16

    def __len__(self) -> int:
        return len(self._held)

    def keep(self, key: Key, value: Value) -> None:
        """Map ``key`` to ``value``."""
        if len(self._held) >= self._next_cleanup:
            self._forget()
        self._held[id(key)] = (key, value)

    def get(self, key: Key) -> Value | None:
        """Return the value of ``key``; None if there is none."""
        found = self._held.get(id(key))
        return None if found is None else found[1]

    def drop(self, key: Key) -> None:
        """Remove ``key``, if it is in the map."""
        self._held.pop(id(key), None)

    def _forget(self) -> None:
        """Remove unused keys. This runs only when the size has doubled, so its cost per key is constant."""
        self._held = {
            identity: pair
            for identity, pair in self._held.items()
            if sys.getrefcount(pair[0]) > _OWN_REFERENCES
        }
        self._next_cleanup = 16 + 2 * len(self._held)
