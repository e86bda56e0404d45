"""The map of the tap finds a work as long as the program has it, and keeps no other one."""

from __future__ import annotations

import weakref

from dlo_lib.comm.tracing.identity_map import IdentityMap


class Key:
    """Stands for a work, which has no usable hash."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, over: bool = True) -> None:
        self.over = over


def is_over(key: Key) -> bool:
    return key.over


def test_a_key_that_the_program_holds_is_found():
    found: IdentityMap[Key, int] = IdentityMap(is_over)
    keys = [Key() for _ in range(100)]
    for number, key in enumerate(keys):
        found.keep(key, number)
    assert [found.get(key) for key in keys] == list(range(100))
    found.drop(keys[3])
    assert found.get(keys[3]) is None
    assert found.get(Key()) is None


def test_a_key_that_only_the_map_holds_goes_with_the_next_ones():
    found: IdentityMap[Key, int] = IdentityMap(is_over)
    message = Key()
    gone = weakref.ref(message)
    found.keep(message, 0)
    del message
    assert gone() is not None
    found.keep(Key(), 1)
    assert gone() is None


def test_the_map_stays_small_beside_keys_that_the_program_holds():
    found: IdentityMap[Key, int] = IdentityMap(is_over)
    held = [Key() for _ in range(50)]
    for number, key in enumerate(held):
        found.keep(key, number)
    for number in range(1000):
        found.keep(Key(), number)
    assert len(found) <= 2 * len(held) + 2
    assert [found.get(key) for key in held] == list(range(50))


def test_a_key_that_is_not_over_stays_until_the_map_has_doubled():
    """A message of gloo that nothing holds any longer would not be sent."""
    found: IdentityMap[Key, int] = IdentityMap(is_over)
    message = Key(over=False)
    gone = weakref.ref(message)
    found.keep(message, 0)
    del message
    for number in range(10):
        found.keep(Key(), number)
    assert gone() is not None
    for number in range(40):
        found.keep(Key(over=False), number)
    assert gone() is None
