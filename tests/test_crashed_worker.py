"""The scheduler of tests/conftest.py where the process of a test dies: the other tests run, once each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import WholeFiles

FIRST = ["tests/a.py::test_first", "tests/a.py::test_dies", "tests/a.py::test_last"]
SECOND = ["tests/b.py::test_first", "tests/b.py::test_dies", "tests/b.py::test_last"]


class Node:
    """A process of pytest-xdist that notes the tests which it gets."""

    def __init__(self) -> None:
        self.shutting_down = False
        self.sent: list[int] = []
        self.gateway = SimpleNamespace(id="gw0")

    def send_runtest_some(self, indices: list[int]) -> None:
        self.sent += indices

    def shutdown(self) -> None:
        self.shutting_down = True


@pytest.fixture
def scheduler() -> WholeFiles:
    """A scheduler of two nodes, each of which has a file and has ended its first test."""
    option = SimpleNamespace(loadscopereorder=False)
    config: Any = SimpleNamespace(option=option, getvalue=lambda name: ["popen", "popen"])
    made = WholeFiles(config, None)
    for _ in range(2):
        node = Node()
        made.add_node(node)
        made.add_node_collection(node, FIRST + SECOND)
    made.schedule()
    for node, tests in zip(made.nodes, (FIRST, SECOND)):
        made.mark_test_complete(node, (FIRST + SECOND).index(tests[0]))
    return made


def replaced(scheduler: WholeFiles) -> Node:
    node = Node()
    scheduler.add_node(node)
    return node


def test_the_test_that_ends_its_process_is_named_and_does_not_run_again(scheduler: WholeFiles) -> None:
    assert scheduler.remove_node(scheduler.nodes[0]) == FIRST[1]
    node = replaced(scheduler)
    scheduler.add_node_collection(node, FIRST + SECOND)
    scheduler.schedule()
    assert node.sent == [2], "only the test after it"


def test_two_processes_may_die_before_the_first_is_replaced(scheduler: WholeFiles) -> None:
    assert [scheduler.remove_node(node) for node in scheduler.nodes] == [FIRST[1], SECOND[1]]
    first, second = replaced(scheduler), replaced(scheduler)
    scheduler.add_node_collection(first, FIRST + SECOND)
    scheduler.schedule()  # the second has not collected yet
    scheduler.add_node_collection(second, FIRST + SECOND)
    scheduler.schedule()
    assert sorted(first.sent + second.sent) == [2, 5]


def test_a_process_that_ends_after_its_tests_returns_none(scheduler: WholeFiles) -> None:
    node = scheduler.nodes[0]
    for index in (1, 2):
        scheduler.mark_test_complete(node, index)
    assert scheduler.remove_node(node) is None
    assert not scheduler.workqueue
