"""A call for which a rank never waits is named; a wait in any of PyTorch's forms counts. Messages need
contiguous tensors, as with gloo.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlo_lib.grading.checks.contract import Check, Wrong, scenario
from dlo_lib.grading.checks.outcome import run_check
from dlo_lib.grading.notebook.local_student import LocalStudent


def exchange(wait: Callable[[dist.Work], object], forget: bool = False) -> Callable[[int], Tensor]:
    def exchanged(rank: int) -> Tensor:
        came = torch.zeros(4)
        receive = dist.irecv(came, 1 - rank)
        send = dist.isend(torch.full((4,), float(rank)), 1 - rank)
        wait(receive)
        if not forget:
            wait(send)
        return came

    return exchanged


def poll(work: dist.Work) -> None:
    while not work.is_completed():
        pass


WAITS = {
    "wait": lambda work: work.wait(),
    "future": lambda work: work.get_future().wait(),
    "poll": poll,
    "result": lambda work: work.result(),
}


@scenario
def runs(student, rank, world):
    return student.program(rank)


@pytest.mark.parametrize("how", WAITS)
def test_every_form_of_waiting_counts(how: str) -> None:
    run = LocalStudent({"program": exchange(WAITS[how])}, 60).ranks(runs, [{}] * 2)
    assert run.unwaited == ((), ())
    assert run.forgotten_wait() == ""


def test_a_send_without_a_wait_is_named_with_its_line() -> None:
    program = exchange(lambda work: work.wait(), forget=True)
    run = LocalStudent({"program": program}, 60).ranks(runs, [{}] * 2)
    assert [len(calls) for calls in run.unwaited] == [1, 1]
    assert "Rank 0 never waits for its send to rank 1 of float32[4] (test_unwaited.py, line" in (
        run.forgotten_wait()
    )


def test_a_wrong_result_names_the_wait_that_was_forgotten() -> None:
    def no_wait(rank: int) -> Tensor:
        total = torch.ones(3)
        dist.all_reduce(total.clone(), async_op=True)
        return total

    def compare(student, t):
        run = student.ranks(runs, [{}] * 2)
        for got in run.results:
            t.close(got, torch.full((3,), 2.0), "the sum")

    check = Check(compare, "sum", 1, 60, "compare", "The sum")
    outcome = run_check(check, LocalStudent({"program": no_wait}, 60), 0)
    assert "the sum is off by" in outcome.message
    assert ". Rank 0 never waits for its all_reduce" in outcome.message
    right = run_check(check, LocalStudent({"program": lambda rank: torch.full((3,), 2.0)}, 60), 0)
    assert right.passed


@pytest.mark.parametrize("side", ["send", "recv"])
def test_messages_need_contiguous_tensors_as_with_gloo(side: str) -> None:
    def program(rank: int) -> None:
        tensor = torch.zeros(2, 3)
        if (side == "send") == (rank == 0):
            tensor = tensor.t()
        if rank == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)

    with pytest.raises(Wrong, match=f"{side}: input tensor has to be contiguous"):
        LocalStudent({"program": program}, 60).ranks(runs, [{}] * 2)


@pytest.mark.parametrize("side", ["input", "output"])
def test_an_all_to_all_of_one_tensor_needs_contiguous_tensors_as_with_gloo(side: str) -> None:
    def program(rank: int) -> None:
        whole, strided = torch.zeros(4, 2), torch.zeros(2, 4).t()
        output, given = (whole, strided) if side == "input" else (strided, whole)
        dist.all_to_all_single(output, given)

    with pytest.raises(Wrong, match=r"all_to_all_single: .* contiguous: send tensor.contiguous\(\)"):
        LocalStudent({"program": program}, 60).ranks(runs, [{}] * 2)


@pytest.mark.parametrize(
    ("send", "words"),
    [
        ([1, 1, 1], "the number of sizes of the input of all_to_all_single is 3, .* group 2: give the group"),
        ([2, 2], "the input of all_to_all_single has 3 rows, and its sizes add up to 4: the third argument"),
    ],
)
def test_the_sizes_of_an_all_to_all_fit_its_group_and_its_rows(send: list[int], words: str) -> None:
    def program(rank: int) -> None:
        dist.all_to_all_single(torch.zeros(3), torch.zeros(3), [2, 1], send)

    with pytest.raises(Wrong, match=words):
        LocalStudent({"program": program}, 60).ranks(runs, [{}] * 2)


def test_collectives_accept_any_strides_as_with_gloo() -> None:
    def program(rank: int) -> Tensor:
        tensor = torch.arange(6.0).view(2, 3).t()
        dist.all_reduce(tensor)
        return tensor.contiguous()

    run = LocalStudent({"program": program}, 60).ranks(runs, [{}] * 2)
    for got in run.results:
        assert torch.equal(got, 2 * torch.arange(6.0).view(2, 3).t())
