"""The messages for errors in a student's code."""

import errno

import pytest

from dlo_lib.grading.checks.faults import MAX_TEXT, fault_of


@pytest.mark.parametrize(
    "error",
    [
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
        RuntimeError("can't start new thread"),
    ],
)
def test_a_fork_bomb_has_started_too_many_processes(error: Exception) -> None:
    said = fault_of(error).message()
    assert said.startswith("your code started too many processes or threads (your code raised")


def test_other_errors_of_the_same_kinds_keep_their_message() -> None:
    for error in (BlockingIOError(errno.EINPROGRESS, "now"), RuntimeError("can't start")):
        assert fault_of(error).message().startswith(f"your code raised {type(error).__name__}: ")


def test_a_full_folder_of_an_answer_is_not_the_graders_disk() -> None:
    said = fault_of(OSError(errno.ENOSPC, "No space left on device")).message()
    assert said.startswith(
        "your code wrote more files than an answer may (your code raised OSError: [Errno 28]"
    )


def test_the_reason_of_a_compiler_is_not_cut_off() -> None:
    """A compiler writes its command first, and the reason 2,000 characters later."""
    command = "CppCompileError: C++ compile error Command: g++ " + "-D SOMETHING " * 200
    text = fault_of(
        RuntimeError(f"{command}\nx.cpp:4:10: fatal error: Python.h: No such file\n" + "x" * 500)
    ).text
    assert len(text) <= MAX_TEXT
    assert text.startswith("CppCompileError: C++ compile error Command: g++ -D")
    assert "… fatal error: Python.h: No such file" in text
    assert fault_of(RuntimeError("y" * 400)).text == "y" * MAX_TEXT
    assert fault_of(RuntimeError("error: near" + "y" * 400)).text.startswith("error: near")
    assert fault_of(RuntimeError("short, error: near")).text == "short, error: near"
