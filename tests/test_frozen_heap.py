"""The garbage collector does not look at what all tests share, and still collects what a test creates."""

from __future__ import annotations

import gc
import sys
import weakref


class Node:
    def __init__(self) -> None:
        self.itself = self


def test_what_was_there_before_this_file_is_frozen():
    assert gc.isenabled()
    seen = {id(thing) for thing in gc.get_objects()}
    assert id(vars(sys.modules["pytest"])) not in seen
    assert gc.get_freeze_count() > 10 * len(seen)


def test_garbage_of_a_test_is_collected():
    node = weakref.ref(Node())
    gc.collect()
    assert node() is None
