"""Each reason for which SLURM lets a job wait has a sentence."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from dlo_lib.cluster.run.pending import explain, explanations
from dlo_lib.cluster.slurm.states import ElementStatus, State

LIBRARIES = sorted(Path("/usr/lib").glob("*/slurm*/libslurmfull.so"))
OF_THE_END = {  # not of a wait
    "None", "SystemFailure", "NonZeroExitCode", "RaisedSignal", "TimeLimit", "InactiveLimit", "OutOfMemory",
}  # fmt: skip


@pytest.fixture(scope="module")
def reasons() -> set[str]:
    """All reasons that the installed SLURM knows; it returns the number of one that it does not know."""
    if not LIBRARIES:
        pytest.skip("NOT TESTED HERE: SLURM's library is not installed")
    library = ctypes.CDLL(str(LIBRARIES[0]))
    name_of = next(
        getattr(library, name)
        for name in ("slurm_job_state_reason_string", "slurm_job_reason_string")
        if hasattr(library, name)
    )
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.c_uint32]
    names = {name_of(number).decode() for number in range(400)}
    return {name for name in names if not name.isdigit()}


def test_every_reason_of_the_installed_slurm_has_a_sentence(reasons: set[str]) -> None:
    assert len(reasons) > 150
    assert [name for name in sorted(reasons - OF_THE_END) if not explain(name)] == []


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ("Priority", "Other jobs come first"),
        ("QOSMaxGRESPerUser", "on the GPUs of one user is reached: it starts when your other jobs end"),
        (
            "QOSMaxWallDurationPerJobLimit",
            "more than the limit of the QOS on the time of one job",
        ),
        ("AssocGrpGRESMinutes", "on the hours of GPUs is reached: ask who manages the project"),
        ("AssocGrpCPURunMinutesLimit", "on the hours of cores is reached"),
        ("QOSMinGRES", "less than the least GPUs of the QOS"),
        ("MaxJobsPerAccount", "the running jobs of one account"),
        ("QOSMaxSubmitJobPerUserLimit", "the submitted jobs of one user"),
        ("ReqNodeNotAvail, UnavailableNodes:node[1-4]", "down, reserved or in maintenance"),
        ("ReqNodeNotAvail(Unavailable:node1)", "down, reserved or in maintenance"),
        ("SomethingNew", ""),
        ("", ""),
    ],
)
def test_sentences(reason: str, says: str) -> None:
    assert says in explain(reason)
    assert bool(explain(reason)) is bool(says)


def test_each_reason_of_a_wait_is_explained_once() -> None:
    statuses = [
        ElementStatus(0, State.RUNNING, "Priority"),
        *(ElementStatus(number, State.PENDING, "Resources") for number in (1, 2)),
        ElementStatus(3, State.PENDING, "SomethingNew"),
    ]
    assert explanations(statuses) == ["Resources: It is next, and waits until its nodes are free."]
