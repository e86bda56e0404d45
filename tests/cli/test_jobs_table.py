"""`dlo jobs`: the jobs that a user asks for, in 80 columns, also while SLURM is down."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from dlo_lib.cluster.run import records, turns
from dlo_lib.cluster.run.records import Record, Turn
from dlo_lib.cluster.site.description import Scheduler
from dlo_lib.cluster.slurm import commands as slurm
from dlo_lib.cluster.slurm.states import ElementStatus, State
from tests.cli.in_process import Dlo, commands

Recorded = Callable[..., Path]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Dlo:
    monkeypatch.setenv("COLUMNS", "80")
    return commands(monkeypatch, capsys)


@pytest.fixture
def recorded() -> Recorded:
    """Record a job that has ended, or that SLURM still knows."""

    def record(
        name: str,
        state: State = State.COMPLETED,
        settings: tuple[dict, ...] = ({},),
        hours_ago: float = 0.0,
        over: bool = True,
        reason: str = "",
    ) -> Path:
        number = len(records.folders()) + 1
        digest = f"{number:x}" * 16
        folder = records.jobs_dir() / digest
        folder.mkdir()
        statuses = tuple(
            ElementStatus(one, state, reason, elapsed=f"0:{one:02d}") for one in range(len(settings))
        )
        submitted = (datetime.now(UTC) - timedelta(hours=hours_ago)).isoformat(timespec="microseconds")
        turn = Turn(1_234_560 + number, tuple(range(len(settings))), cluster="here")
        outs = tuple(str(folder / "out" / str(one)) for one in range(len(settings)))
        records.write(
            folder,
            Record(
                digest,
                name,
                "jean-zay-v100",
                Scheduler.SLURM,
                4,
                settings,
                outs,
                submitted,
                turns=(turn,),
                over=statuses if over else None,
            ),
        )
        (folder / records.SCRIPT).write_text(
            "arguments=(--model tiny --steps 200 --resume --checkpoint-minutes 10)\n"
        )
        return folder

    return record


def names(shown: str) -> list[str]:
    return [line.split()[1] for line in shown.splitlines()[1:] if not line.startswith(" ")]


def test_the_table_fits_a_terminal_of_80_columns(here: Dlo, recorded: Recorded) -> None:
    sweep = tuple(
        {"lr": lr, "seed": seed, "model": "tiny"} for lr in (1e-3, 3e-4, 1e-4) for seed in range(12)
    )
    recorded("a-search-with-a-long-name-for-its-jobs", State.OUT_OF_MEMORY, sweep)
    recorded("train")
    lines = here("jobs").out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["job", "name", "GPUs", "number", "submitted", "state", "elapsed", "settings"]
    assert "lr=0.001" in lines[1]
    assert "0:35" in lines[1], "the longest of its elements"
    assert "--model" in lines[-1]
    (_, train) = json.loads(here("jobs", "list", "--json").out)
    assert (train["elapsed"], train["settings"], train["numbers"]) == ("0:00", [{}], [1_234_562])


def test_the_time_of_a_submission_is_in_the_zone_of_slurms_times(
    here: Dlo, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    folder = recorded("train")
    text = (folder / records.RECORD).read_text()
    record = json.loads(text) | {"submitted": "2026-11-27T23:30:00.000000+00:00"}
    (folder / records.RECORD).write_text(json.dumps(record))
    monkeypatch.setenv("TZ", "Europe/Paris")
    time.tzset()
    try:
        assert "11-28 00:30" in here("jobs").out
    finally:
        monkeypatch.undo()
        time.tzset()


def test_jobs_are_chosen_by_state_by_number_and_by_time(here: Dlo, recorded: Recorded) -> None:
    recorded("old", State.FAILED, hours_ago=50)
    recorded("middle", State.COMPLETED, hours_ago=5)
    recorded("new", State.FAILED, hours_ago=1)
    recorded("newest", State.OUT_OF_MEMORY)
    assert names(here("jobs").out) == ["old", "middle", "new", "newest"]
    assert names(here("jobs", "--state", "failed").out) == ["old", "new"]
    assert names(here("jobs", "-s", "failed", "-s", "out-of-memory", "--last", "2").out) == ["new", "newest"]
    assert names(here("jobs", "list", "--last", "1").out) == ["newest"]
    assert names(here("jobs", "--since", "2d").out) == ["middle", "new", "newest"]
    tomorrow = (datetime.now() + timedelta(days=1)).date().isoformat()
    assert here("jobs", "--since", tomorrow).out.startswith("no such job: leave out")
    assert names(here("jobs", "--since", "2020-01-31T12:00").out) == ["old", "middle", "new", "newest"]
    for words, says in (
        (("--since", "yesterday"), "dlo: --since is yesterday: write a day (2026-11-20)"),
        (("--state", "faild"), 'dlo: unknown state "faild": did you mean failed?'),
    ):
        refused = here("jobs", *words)
        assert refused.status == 2
        assert refused.err.startswith(says)


def test_ended_jobs_are_listed_while_slurm_is_down(
    here: Dlo, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded("ended", State.FAILED, reason="rank 1 raised ValueError: a bad batch")
    recorded("runs", over=False)
    (records.jobs_dir() / "broken").mkdir()
    (records.jobs_dir() / "broken" / records.RECORD).write_text("{")

    def silent(*arguments: object, **named: object) -> None:
        raise slurm.NoAnswer("squeue has not answered for 60 s")

    monkeypatch.setattr(slurm, "cluster_name", lambda: "here")
    monkeypatch.setattr(slurm, "queue", silent)
    monkeypatch.setattr(turns, "_of_slurm", silent)
    shown = here("jobs")
    assert shown.status == 0
    ended, runs, *reasons = shown.out.splitlines()[1:]
    assert " failed " in ended
    assert " unknown " in runs
    assert reasons == [
        "11111111: rank 1 raised ValueError: a bad batch",
        "22222222: squeue has not answered for 60 s",
    ]
    assert f"remove the folder {records.jobs_dir() / 'broken'}" in shown.err


def test_the_output_of_one_rank(here: Dlo, recorded: Recorded) -> None:
    folder = recorded("train")
    (folder / records.SCRIPT).write_text('srun --label python -m dlo_lib.train "${arguments[@]}"\n')
    (folder / "logs").mkdir()
    (folder / "logs" / "0.out").write_text("0: a\n1: b\n1: c\n0: d\n")
    assert here("jobs", "logs", "train", "--rank", "1").out == "b\nc\n"
    assert here("jobs", "logs", "train", "--rank", "0", "-n", "1").out == "d\n"
    assert here("jobs", "logs", "train").out == "0: a\n1: b\n1: c\n0: d\n"
    refused = here("jobs", "logs", "train", "--follow", "--rank", "1")
    assert refused.status == 2
    assert "leave out --rank" in refused.err
