"""A map keyed by the identity of Python objects, for C++ objects without a usable hash."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

_OWN_REFERENCES = 2
"""References to a key that only this map holds: one in the pair, one in the argument of getrefcount."""
_LOOKED_AT = 2


class IdentityMap(Generic[Key, Value]):
    """Maps objects to values by identity.

    The map holds a reference to each key, so that its identity stays unique. A key may keep a large tensor
    alive: the work of a collective operation holds what it sends. Therefore each new key removes the oldest
    ones that only the map still holds and that have finished. Of the others, those that only the map holds
    go when its size has doubled: the end of a message of gloo is not known, and a message that is removed
    early is not sent.

    Args:
        finished: whether a key is no longer needed by the one who has made it.
    """

    def __init__(self, finished: Callable[[Key], bool]) -> None:
        self._held: OrderedDict[int, tuple[Key, Value]] = OrderedDict()
        self._finished = finished
        self._next_cleanup = 16

    def __len__(self) -> int:
        return len(self._held)

    def keep(self, key: Key, value: Value) -> None:
        """Map ``key`` to ``value``."""
        self._forget_finished()
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

    def _forget_finished(self) -> None:
        """Look at the oldest keys, two for each new one: the map stays small at a constant cost."""
        for _ in range(min(_LOOKED_AT, len(self._held))):
            identity, pair = self._held.popitem(last=False)
            if sys.getrefcount(pair[0]) > _OWN_REFERENCES or not self._finished(pair[0]):
                self._held[identity] = pair  # it is looked at again after all others

    def _forget(self) -> None:
        """Remove unused keys. This runs only when the size has doubled, so its cost per key is constant."""
        self._held = OrderedDict(
            (identity, pair)
            for identity, pair in self._held.items()
            if sys.getrefcount(pair[0]) > _OWN_REFERENCES
        )
        self._next_cleanup = 16 + 2 * len(self._held)
