"""Idle ranks are released, and come back with the next cell."""

from __future__ import annotations

import os
import time

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.base.ranks_idle import RANKS_IDLE
from dlo_lib.launch import client
from dlo_lib.live_ranks.handle import Ranks


def wait_for_release(ranks: Ranks) -> None:
    deadline = time.monotonic() + 30
    while not ranks._notes:  # the last step of the release
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not ranks.world_size


@pytest.fixture
def ranks(notebook) -> Ranks:
    ranks = notebook.shell.user_ns["ranks"]
    ranks.idle_minutes = 20.0
    notebook.cell("%%ranks 2\nx = 1\nimport os")
    return ranks


def test_idle_ranks_are_released_with_their_server_and_come_back(notebook, ranks):
    pids = notebook.cell("ranks.pull('os.getpid()')").value
    ranks.idle_minutes = 0.2 / 60
    notebook.cell("%%ranks\npass")
    wait_for_release(ranks)
    assert client._server is None
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    ranks.idle_minutes = 20.0
    ran = notebook.cell("%%ranks 2\n'x' in globals()")
    note = "The ranks were released after 0.00333333 minutes without a cell, and their variables are lost."
    assert note in ran.text
    assert ran.by_rank() == {"ranks 0 and 1": "False"}
    assert "released" not in notebook.cell("%%ranks 2\n1").text


def test_a_cell_without_a_number_brings_released_ranks_back(notebook, ranks):
    ranks.idle_minutes = 0.2 / 60
    notebook.cell("%%ranks\npass")
    wait_for_release(ranks)
    ranks.idle_minutes = 20.0
    ran = notebook.cell("%%ranks\nworld_size")
    assert "The ranks were released" in ran.text
    assert ran.by_rank() == {"ranks 0 and 1": "2"}


def test_values_of_released_ranks_are_missed_in_a_sentence(notebook, ranks):
    ranks.idle_minutes = 0.2 / 60
    notebook.cell("%%ranks\npass")
    wait_for_release(ranks)
    ran = notebook.try_cell("ranks.pull('x')")
    assert ran.message == (
        "The ranks were released after 0.00333333 minutes without a cell, and their variables are lost. "
        "no ranks run: begin a cell with %%ranks 4"
    )


def test_a_cell_that_works_longer_than_the_limit_is_not_idle(notebook, ranks):
    ranks.idle_minutes = 0.2 / 60
    ran = notebook.cell("%%ranks\nimport time\ntime.sleep(1)\nx")
    assert ran.by_rank() == {"ranks 0 and 1": "1"}


def test_zero_keeps_idle_ranks(notebook, ranks):
    ranks.idle_minutes = 0
    notebook.cell("%%ranks\npass")
    assert ranks._timer is None
    assert notebook.cell("ranks.pull('x')").value == [1, 1]


def test_the_limit_is_read_from_the_environment(monkeypatch):
    monkeypatch.setenv(RANKS_IDLE, "7.5")
    assert Ranks({}).idle_minutes == 7.5
    for wrong in ("soon", "-1", "nan", "inf"):
        monkeypatch.setenv(RANKS_IDLE, wrong)
        with pytest.raises(UserError, match=f'{RANKS_IDLE} is "{wrong}": use a number of minutes'):
            Ranks({})
