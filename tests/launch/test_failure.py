"""The rank that caused the failure is named, whichever error arrived first."""

import pytest

from dlo_lib.comm.deadlock.exit_status import describe_exit
from dlo_lib.launch.failure import Ending, RankState, blame, is_communication_error, timed_out

GLOO = (
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:60135: "
    "Connection reset by peer"
)


def raised(
    rank: int, at: float, headline: str = "raised ValueError: no", is_consequence: bool = False
) -> RankState:
    return RankState(
        rank,
        Ending.RAISED,
        at,
        headline=headline,
        traceback=f"Traceback of {rank}\n",
        is_consequence=is_consequence,
    )


def died(rank: int, at: float, headline: str = "was killed by SIGSEGV") -> RankState:
    return RankState(rank, Ending.DIED, at, headline=headline)


def test_a_ranks_error_comes_before_an_earlier_broken_collective():
    failure = blame(
        [raised(0, 1.0, "raised RuntimeError: gloo", is_consequence=True), raised(1, 2.0), RankState(2)]
    )
    assert failure.rank == 1
    assert str(failure).splitlines() == [
        "rank 1 raised ValueError: no",
        "",
        "Traceback of 1",
        "",
        "rank 0 lost the connection as a consequence.",
        "rank 2 had not finished and was stopped.",
    ]


def test_a_death_comes_before_broken_collectives_that_were_reported_earlier():
    failure = blame([raised(0, 1.0, is_consequence=True), raised(2, 1.1, is_consequence=True), died(1, 1.2)])
    assert str(failure).splitlines() == [
        "rank 1 was killed by SIGSEGV",
        "ranks 0 and 2 lost the connection as a consequence.",
    ]


def test_of_two_errors_the_earlier_is_named_first():
    failure = blame([raised(0, 2.0, "raised KeyError: 'x'"), died(1, 1.0)])
    assert str(failure).splitlines() == ["rank 1 was killed by SIGSEGV", "rank 0 raised KeyError: 'x'"]


def test_a_gpu_that_does_not_exist_is_explained():
    gpu = "raised AcceleratorError: CUDA error: invalid device ordinal"
    assert "This machine has fewer GPUs than ranks" in str(blame([RankState(0), raised(1, 1.0, gpu)]))


def test_the_same_error_on_all_ranks_is_shown_once_for_the_lowest():
    failure = blame([raised(2, 1.0), raised(0, 1.1), raised(1, 1.2)])
    assert failure.rank == 0
    assert str(failure).endswith("Traceback of 0\n\nranks 0, 1 and 2 failed in the same way.")


def test_a_broken_collective_alone_is_shown_in_full():
    assert "Traceback of 1" in str(
        blame([RankState(0, Ending.RETURNED), raised(1, 1.0, is_consequence=True)])
    )


def test_after_a_time_out_the_stack_of_each_late_rank_is_shown():
    states = [RankState(0, Ending.RETURNED), RankState(1), RankState(2)]
    text = str(timed_out(states, 2.5, ["", "  File x, line 1", ""]))
    assert text.startswith(
        "timeout: ranks 1 and 2 had not finished after 2.5 s; rank 0 had\n\nrank 1 was here:\n"
        "  File x, line 1\n\nrank 2 was here:"
    )


@pytest.mark.parametrize(
    ("error", "broke"),
    [
        (RuntimeError(GLOO), True),
        (RuntimeError("NCCL error: remote process exited"), True),
        (ConnectionResetError("Connection reset by peer"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("the gloo backend is slow"), False),
    ],
)
def test_torchs_errors_of_a_lost_connection_are_recognised(error, broke):
    assert is_communication_error(error) is broke


def test_an_error_raised_from_a_broken_collective_counts_as_one():
    error = KeyError("step")
    error.__context__ = RuntimeError(GLOO)
    assert is_communication_error(error)
    error.__suppress_context__ = True  # raise ... from None: its context does not count
    assert not is_communication_error(error)


@pytest.mark.parametrize(
    ("status", "said"),  # as from os.waitpid: exit code << 8, or the signal, + 128 with a core dump
    [
        (3 << 8, "ended its process with status 3 before the function returned (os._exit?)"),
        (0, "ended its process with status 0 before the function returned (os._exit?)"),
        (9, "was killed by SIGKILL (out of memory?)"),
        (11 + 128, "was killed by SIGSEGV"),
        (35, "was killed by signal 35"),
    ],
)
def test_the_end_of_a_process_in_words(status, said):
    assert describe_exit(status) == said


def test_a_rank_that_could_not_be_forked_names_the_cure():
    assert "raise `ulimit -u`" in describe_exit(-11)
