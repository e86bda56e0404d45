"""Temporary environment variables are removed afterwards, also after an exception."""

from __future__ import annotations

import os

import pytest

from dlo_lib.grading.judge.environment import environment


def test_previous_values_are_restored_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLO_TEST_OLD", "old")
    monkeypatch.delenv("DLO_TEST_NEW", raising=False)
    with pytest.raises(ZeroDivisionError), environment({"DLO_TEST_OLD": "1", "DLO_TEST_NEW": "2"}):
        assert (os.environ["DLO_TEST_OLD"], os.environ["DLO_TEST_NEW"]) == ("1", "2")
        raise ZeroDivisionError
    assert os.environ["DLO_TEST_OLD"] == "old"
    assert "DLO_TEST_NEW" not in os.environ
