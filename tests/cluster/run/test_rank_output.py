"""The output of jobs: by rank, from its end, its first error, and who was killed, in little memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.base.rank_failures import FailureReport, record_failure
from dlo_lib.cluster.run import causes, records
from dlo_lib.cluster.run.rank_output import (
    RankLabels,
    appearing,
    first_error,
    killed_rank,
    output,
    pieces,
)
from dlo_lib.cluster.slurm.states import ElementStatus, State

LABELLED = "0: a\n 1: b\n10: c\nslurmstepd: error\n 1: d\n"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "0.out"


@pytest.mark.parametrize("lines", [None, 10])
def test_the_output_of_a_rank_is_found_in_that_of_all(lines, log):
    def of(text: str, rank: int, labels: RankLabels) -> str:
        log.write_text(text)
        return output(log, lines, labels.line_of(rank))

    assert [of(LABELLED, rank, RankLabels()) for rank in (0, 1, 10)] == ["a\n", "b\nd\n", "c\n"]
    of_nodes = "0: [default0]:a\n0: [default1]:b\n1: [default0]:c\n1: [default1]:d\n"
    launchers = RankLabels(per_node=2)
    assert [of(of_nodes, rank, launchers) for rank in range(4)] == ["a\n", "b\n", "c\n", "d\n"]
    assert of("[rank1]:x\n[rank0]:y\n", 1, RankLabels(per_node=2, tasks=False)) == "x\n"
    assert [of("one\n", rank, RankLabels(tasks=False)) for rank in (0, 1)] == ["one\n", ""]
    with pytest.raises(UserError, match="rank is -1"):
        RankLabels().line_of(-1)


@pytest.mark.parametrize("block", [1, 3, 7, 10_000])
@pytest.mark.parametrize("text", ["", "one", "a\nb\n", "a\r\nb\rc\n\n\nend", "né\n" * 9 + "ü"])
def test_the_last_lines_are_those_of_the_whole_output(block, text, log, monkeypatch):
    monkeypatch.setattr("dlo_lib.cluster.run.rank_output._BLOCK", block)
    log.write_bytes(text.encode())
    whole = log.read_text()
    assert output(log) == whole
    assert "".join(pieces(log)) == text
    for count in (1, 2, 5, 100):
        assert output(log, count) == "".join(whole.splitlines(keepends=True)[-count:])


def test_a_large_log_is_not_read_into_memory(log):
    with log.open("w") as file:
        for number in range(40):
            file.write(f"1: step {number}\n" * 2**16)
        file.write(OUTPUT)
    assert log.stat().st_size > 25 * 2**20
    tracemalloc.start()
    try:
        assert output(log, 20).endswith("ChildFailedError:\n")
        assert first_error(log) == ERROR
        assert killed_rank(log, names_ranks=True) == ""
        assert sum(map(len, pieces(log))) > 25 * 2**20
        assert next(appearing(log, lambda: True, lambda: 0.0)).startswith("1: step 0\n")
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


def test_a_letter_at_the_border_of_two_pieces_is_whole(log, monkeypatch):
    monkeypatch.setattr("dlo_lib.cluster.run.rank_output._BLOCK", 3)
    log.write_text("aéüö")
    assert "".join(appearing(log, lambda: True, lambda: 0.0)) == "aéüö"


OUTPUT = """\
0: [default0]:[rank0]: Traceback (most recent call last):
1: [default0]:[rank1]: Traceback (most recent call last):
0: [default0]:[rank0]:   File "train.py", line 12, in <module>
1: [default0]:[rank1]:   File "train.py", line 9, in <module>
0: [default0]:[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer
1: [default0]:[rank1]:     raise ValueError("a bad batch")
1: [default0]:[rank1]: ValueError: a bad batch
1: Traceback (most recent call last):
1:   File "<frozen runpy>", line 198, in _run_module_as_main
1: torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""
ERROR = """\
Traceback (most recent call last):
  File "train.py", line 9, in <module>
    raise ValueError("a bad batch")
ValueError: a bad batch"""


def test_the_first_error_in_an_output_is_none_of_a_broken_connection_and_none_of_a_launcher(log):
    def of(text: str) -> str:
        log.write_text(text)
        return first_error(log)

    assert first_error(log) == ""
    assert of(OUTPUT) == of(OUTPUT.replace("[default0]:", "")) == ERROR
    assert of(OUTPUT.replace("1: [default0]:[rank1]:", "[rank1]:")) == ERROR
    assert of("step 1\n" * 9 + OUTPUT) == ERROR
    assert of("".join(line for line in OUTPUT.splitlines(True) if "rank1" not in line)) == ""
    assert of("0: a line\n") == of("") == ""


ENDED = """\
srun: launch/slurm: _step_signal: Terminating StepId=53.0
0: slurmstepd-v1: error: *** STEP 53.0 ON v1 CANCELLED AT 2026-11-27T05:29:01 ***
srun: error: v1: task 0: Terminated
srun: Force Terminated StepId=53.0
"""


@pytest.mark.parametrize(
    ("told", "code", "reason"),
    [
        ("v1: task 1: Killed", 143, "rank 1 was killed by SIGKILL (out of memory?)"),
        ("v2: tasks 4-7: Out Of Memory", 137, "rank 4 was killed: out of memory"),
        ("v1: task 1: Segmentation fault (core dumped)", 139, "rank 1 was killed by SIGSEGV"),
        ("v1: task 1: Exited with exit code 1", 143, ""),
        ("v1: task 1: Killed", 1, ""),
    ],
)
def test_a_rank_that_a_signal_has_ended_is_named(told, code, reason, tmp_path):
    """As SLURM 22.05 writes it: the rank itself cannot record anything, and srun ends the others."""
    (tmp_path / "logs").mkdir()
    earlier = f"srun: error: v1: task 7: Bus error\n{ENDED}"
    (tmp_path / "logs" / "0.out").write_text(f"{earlier}0: step 1\nsrun: error: {told}\n{ENDED}")
    failed = ElementStatus(0, State.FAILED, exit_code=code)
    assert causes.with_cause(tmp_path, failed).reason == reason
    (tmp_path / records.SCRIPT).write_text("srun python -m torch.distributed.run program.py\n")
    if reason.startswith("rank 1 was killed by SIGKILL"):
        told = causes.with_cause(tmp_path, failed).reason
        assert told == "a launcher of ranks was killed by SIGKILL (out of memory?)"


def test_a_killed_rank_is_the_cause_of_broken_connections(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "0.out").write_text(f"srun: error: v1: task 1: Killed\n{ENDED}")
    failed = ElementStatus(0, State.FAILED, exit_code=143)
    run = tmp_path / causes.RANKS / "0" / "run"
    record_failure(run, FailureReport(0, "lost the connection", is_consequence=True))
    assert causes.with_cause(tmp_path, failed).reason == "rank 1 was killed by SIGKILL (out of memory?)"
    record_failure(run, FailureReport(2, "raised ValueError: a bad batch"))
    assert causes.with_cause(tmp_path, failed).reason == "rank 2 raised ValueError: a bad batch"


def test_a_killed_process_without_srun_is_named_too(tmp_path):
    killed = ElementStatus(0, State.FAILED, exit_code=137)
    assert (
        causes.with_cause(tmp_path, killed).reason == "a process of it was killed by SIGKILL (out of memory?)"
    )
