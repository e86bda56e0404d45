"""The collector is as before after imports without it."""

import gc
import subprocess
import sys

import pytest

from dlo_lib.base.garbage import NEW_OBJECTS, collect_rarely, without_collector


def test_the_collector_is_off_inside_and_on_again_also_after_an_error():
    with pytest.raises(ImportError), without_collector():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with without_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_was_created_inside_is_old_and_can_still_be_collected():
    code = """if True:
        import gc, weakref
        from dlo_lib.base.garbage import without_collector

        class Node:
            def __init__(self):
                self.itself = self

        gc.collect()
        with without_collector():
            node = weakref.ref(Node())
            kept = [[] for _ in range(100_000)]
        assert gc.get_count()[0] < 1000, gc.get_count()
        gc.collect(0)
        assert node() is not None, "the young were looked at"
        gc.collect()
        assert node() is None
        gc.freeze()
        with without_collector():
            node = weakref.ref(Node())
        assert not any(thing is kept for thing in gc.get_objects()), "what is frozen stays so"
        gc.collect()
        assert node() is None
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_collector_that_looks_rarely_still_collects():
    before = gc.get_threshold()
    collections: list[int] = []

    def count(phase: str, about: dict[str, int]) -> None:
        collections.append(about["generation"])

    try:
        collect_rarely()
        gc.collect()
        gc.callbacks.append(count)
        kept = [[] for _ in range(NEW_OBJECTS // 2)]
        assert collections == []
        kept += [[] for _ in range(NEW_OBJECTS)]
        assert collections != []
    finally:
        gc.callbacks.remove(count)
        gc.set_threshold(*before)


def test_a_command_ends_without_a_last_collection():
    code = """if True:
        import atexit, gc
        atexit.register(lambda: print(len(gc.get_objects())))  # handlers run in reverse order
        from dlo_lib.base.garbage import collect_rarely
        collect_rarely()
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 10
