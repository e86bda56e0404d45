"""The collector is as before after imports without it."""

import gc

import pytest

from dlo_lib.base.garbage import without_collector


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
