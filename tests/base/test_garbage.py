"""The collector is as before after imports without it."""

import gc

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
