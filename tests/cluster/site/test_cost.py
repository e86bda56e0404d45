"""What a job may cost is shown before it is submitted; what it has used is read from the accounting."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest

from dlo_lib import cluster
from dlo_lib.cluster.site import cost
from dlo_lib.cluster.site.description import site
from dlo_lib.cluster.site.request import allocate, make_request
from dlo_lib.cluster.slurm import accounting, commands
from dlo_lib.cluster.slurm.answers import JobMark
from dlo_lib.hardware import gpu


def test_the_estimate_is_the_limit_times_the_gpus():
    want = allocate(site("jean-zay-a100"), make_request("2:00:00", gpus=16, account="abc"))
    kwh = 16 * 2 * gpu("a100-80").watts / 1000
    assert cost.estimate(want, 1) == (
        f"16 GPUs for at most 2 h: 32 GPU hours, at most {kwh:.3g} kWh for the GPUs"
    )
    assert cost.estimate(want, 3).startswith("3 elements with 16 GPUs for at most 2 h: 96 GPU hours")
    alone = allocate(site("jean-zay-h100"), make_request("30", gpus=0, cores=4, account="abc"))
    assert cost.estimate(alone, 1) == "4 cores for at most 30 min: 2 core hours"
    assert cost.estimate(replace(alone, cores=1), 2) == (
        "2 elements with 1 core for at most 30 min: 1 core hours"
    )


def test_energy_of_steps_that_overlap_is_not_added():
    rows = [
        ("7_0", 3600.0, 0.0),
        ("7_0.batch", 3600.0, 2e6),
        ("7_0.extern", 3600.0, 7.2e6),
        ("7_0.0", 1800.0, 3e6),
        ("7_0.1", 1800.0, 4e6),
        ("7_1", 1800.0, 0.0),
        ("7_1.0", 1800.0, 3.6e6),
    ]
    used = cost.usage(rows, gpus=4)
    assert (used.gpu_hours, used.joules) == (6.0, 10.8e6)
    assert str(used) == "used 6 GPU hours, 3 kWh measured"
    assert str(cost.usage(rows[:1], gpus=0)) == "used 1 hours without GPUs"
    assert cost.usage([], 1) is None


SACCT = """#!/bin/sh
[ "$*" = "-nP --duplicates -j 9,12 -o JobID,ElapsedRaw,ConsumedEnergyRaw,Comment,JobName" ] || exit 1
cat <<'END'
9|60||of mine dlo-9|renamed
9.batch|60|1200||batch
9.0|50|18446744073709551614||python
9_[3-4]|0||of mine dlo-9|renamed
9|30||of mine dlo-9|allocation
12|3600|0||mine
12.batch|3600|900000||batch
12.extern|3600|7200000||extern
12.0|3500|3600000||a|name
END
"""


def test_the_accounting_is_read_by_turn_and_step(tmp_path, monkeypatch):
    sacct = tmp_path / "sacct"
    sacct.write_text(SACCT)
    sacct.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(accounting, "config", lambda name: "accounting_storage/slurmdbd")
    rows = commands.used([9, 12])
    assert rows[:4] == [("9", 60, 0), ("9.batch", 60, 1200), ("9.0", 50, 0), ("9", 30, 0)]
    assert cost.usage(rows[:4], 1) == cost.JobUsage(90 / 3600, 1, 1200)
    both = cost.usage(rows, 2)
    assert both == cost.JobUsage(3690 / 3600, 2, 1200 + 7.2e6)
    assert str(both) == "used 2.05 GPU hours, 2 kWh measured"
    mine = JobMark("mine", comment="dlo-9")  # by its comment whatever its name, or by its unique name
    assert commands.used([9, 12], mine) == rows
    # SLURM has given the number 12 to another job.
    sacct.write_text(SACCT.replace("|mine\n12.", "|another-job\n12."))
    assert commands.used([9, 12], mine) == rows[:4]
    with pytest.raises(commands.NoAnswer, match="sacct does not answer: status 1"):
        commands.used([10])
    monkeypatch.setattr(accounting, "config", lambda name: "accounting_storage/none")
    assert commands.used([9, 12]) == []


@pytest.mark.parametrize("name", ["jean_zay", "elsewhere"])
def test_a_job_says_what_it_may_cost_and_what_it_has_used(
    name, request, other_site, tmp_path, monkeypatch, capsys
):
    request.getfixturevalue(name)
    monkeypatch.setenv("DLO_POLL_S", "0.3")
    monkeypatch.chdir(tmp_path)
    where = {"site": other_site} if name == "elsewhere" else {"site": "jean-zay-v100", "account": "abc"}
    capsys.readouterr()
    script = cluster.submit(["sleep", "2"], gpus=2, time=5, dry_run=True, **where)
    printed = capsys.readouterr().out
    assert "2 GPUs for at most 5 min: 0.167 GPU hours" in printed
    assert "; expected start 20" in printed
    assert cluster.jobs() == []
    job = cluster.submit(["sleep", "2"], gpus=2, time=5, **where)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith(f"{job.name}: 2 GPUs for at most 5 min")
    assert lines[-1] == f"submitted job {job.record.turns[0].number} ({job.name})"
    assert job.script == script
    cluster.submit(["sleep", "2"], gpus=2, time=5, **where)
    assert (
        f"found job {job.record.turns[0].number} ({job.name}), sub"
        in capsys.readouterr().out.splitlines()[-1]
    )
    job.wait(timeout=600)
    begun = time.monotonic()
    while (used := job.usage()) is None or used.hours * 3600 < 2:
        assert time.monotonic() - begun < 60, used
        time.sleep(0.3)
    assert used.gpus == 2
    assert str(used).startswith("used 0.00")


def test_a_dry_run_shows_why_slurm_would_refuse(jean_zay, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = {"site": "jean-zay-v100", "account": "abc", "time": 5}
    cluster.submit(["true"], reservation="does-not-exist", dry_run=True, **asked)
    assert "SLURM would refuse the job: " in capsys.readouterr().out


def test_a_controller_that_does_not_answer_gives_no_expected_start(other_site, tmp_path, monkeypatch, capsys):
    def silent(script: str) -> None:
        raise commands.NoAnswer("sbatch has not answered for 60 s")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "is_available", lambda: True)
    monkeypatch.setattr(commands, "expected_start", silent)
    monkeypatch.setattr(commands, "longest_time", lambda partitions: None)
    script = cluster.submit(["true"], gpus=2, site=other_site, time=5, dry_run=True)
    assert "#SBATCH --gres=gpu:2" in script
    assert "no expected start, because SLURM does not answer" in capsys.readouterr().out
