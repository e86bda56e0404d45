"""The bits that get through a covert channel are counted right."""

from __future__ import annotations

import pytest

from benchmarks.covert import errors, told

BITS = [1, 0, 1, 1, 0, 0, 1, 0]


def test_a_reader_knows_a_bit_by_the_side_of_the_median_in_either_direction() -> None:
    assert errors(BITS, [5.0 + bit for bit in BITS]) == 0
    assert errors(BITS, [5.0 - bit for bit in BITS]) == 0
    assert errors(BITS, [9.0, 1, 1, 9, 1, 9, 9, 1]) == 2
    assert errors(BITS, [9.0, 9, 1, 1, 9, 1, 9, 1]) == 4


def test_a_bit_that_is_always_or_never_wrong_tells_all_and_a_guess_tells_nothing() -> None:
    assert told(0.0) == told(1.0) == 1.0
    assert told(0.5) == 0.0
    assert told(0.11) == pytest.approx(0.5, abs=0.01)
