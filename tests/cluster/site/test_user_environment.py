"""``SBATCH_*`` of the user's shell never replaces what a job sets, and is shown where it adds something."""

from __future__ import annotations

import subprocess

import pytest

from dlo_lib import cluster
from dlo_lib.cluster.job import announcement
from dlo_lib.cluster.site import user_environment
from dlo_lib.cluster.slurm import commands

SCRIPT = """#!/usr/bin/env bash
#SBATCH --account=abc     # its account
#SBATCH --gres=gpu:2      # GPUs of a node
#SBATCH --cpus-per-task=4  # cores
#SBATCH --mem-per-cpu=1G  # memory
#SBATCH --output=/a/b     # output
#SBATCH --time=5          # limit
"""


@pytest.mark.parametrize(
    ("name", "stays"),
    [
        ("SBATCH_ACCOUNT", False),
        ("SBATCH_TIMELIMIT", False),
        ("SBATCH_OUTPUT", False),
        ("SBATCH_ERROR", False),
        ("SBATCH_GPUS", False),
        ("SBATCH_GPUS_PER_NODE", False),
        ("SBATCH_TRES_PER_TASK", False),
        ("SBATCH_CPUS_PER_GPU", False),
        ("SBATCH_MEM_PER_NODE", False),
        ("SBATCH_ARRAY_INX", False),
        ("SBATCH_WAIT", False),
        ("SBATCH_QOS", True),
        ("SBATCH_EXCLUSIVE", True),
        ("SBATCH_EXPORT", True),
        ("SLURM_CONF", True),
        ("HOME", True),
    ],
)
def test_a_variable_reaches_sbatch_unless_the_script_sets_its_option(name, stays):
    assert (name in user_environment.for_script({name: "x"}, SCRIPT)) is stays
    shown = user_environment.honoured({name: "x"}, SCRIPT)
    assert shown == ([f"{name}=x"] if stays and name.startswith("SBATCH_") else [])


def test_a_script_without_the_option_takes_the_variable():
    assert user_environment.honoured({"SBATCH_GPUS": "2", "SBATCH_DEBUG": "1"}, "#SBATCH --nodes=1\n") == [
        "SBATCH_GPUS=2"
    ]


@pytest.mark.parametrize(
    ("refusal", "certain"),
    [
        ("allocation failure: Requested reservation is invalid", True),
        ("allocation failure: Invalid account or account/partition combination specified", True),
        ("unrecognized option '--uenv=x'", True),
        ("allocation failure: Job violates accounting/QOS policy (job submit limit, ...)", False),
        ("allocation failure: Requested nodes are busy", False),
        ("allocation failure: Required node not available (down, drained or reserved)", False),
        ("allocation failure: Requested partition configuration not available now", False),
        ("allocation failure: Unable to contact slurm controller (connect failure)", False),
        ("", False),
    ],
)
def test_only_what_slurm_refuses_at_a_submission_is_called_a_refusal(refusal, certain):
    assert announcement.is_certain(refusal) is certain


def test_a_job_that_is_submitted_was_not_called_refused(jean_zay, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "expected_start", lambda script: ("", "Requested reservation is invalid"))
    job = cluster.submit(["true"], gpus=0, site="jean-zay-v100", account="abc", time=5)
    assert "refuse" not in capsys.readouterr().out
    job.cancel()


def test_the_options_in_a_script_of_the_user_do_not_apply(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work.sbatch").write_text("#!/bin/bash\n#SBATCH --time=9:00:00\necho\n")
    (tmp_path / "plain.sh").write_text("#!/bin/bash\n#SBATCHED\necho\n")
    asked = {"gpus": 0, "site": "jean-zay-v100", "account": "abc", "dry_run": True}
    cluster.submit("work.sbatch", **asked)
    assert "the #SBATCH lines of work.sbatch do not apply: give their options to submit()" in (
        capsys.readouterr().out
    )
    cluster.submit("plain.sh", **asked)
    assert "do not apply" not in capsys.readouterr().out


HOSTILE = {
    "SBATCH_ACCOUNT": "other",
    "SBATCH_TIMELIMIT": "99",
    "SBATCH_PARTITION": "gpu_p2",
    "SBATCH_OUTPUT": "/dev/null",
    "SBATCH_ERROR": "/dev/null",
    "SBATCH_JOB_NAME": "other",
    "SBATCH_ARRAY_INX": "0-3",
    "SBATCH_WAIT": "1",
    "SBATCH_EXPORT": "NONE",
    "SRUN_EXPORT_ENV": "NONE",
}


def work() -> str:
    return "done"


def test_a_job_is_what_its_call_asked_for_whatever_the_shell_sets(jean_zay, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DLO_POLL_S", "0.3")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ours.toml").write_text('extends = "jean-zay-v100"\npartition = "gpu_p13"\n')
    for name, value in HOSTILE.items():
        monkeypatch.setenv(name, value)
    job = cluster.submit(work, site=tmp_path / "ours.toml", account="abc", time=5)
    assert "options of your environment apply too: SBATCH_EXPORT=NONE\n" in capsys.readouterr().out
    number = str(job.record.turns[0].number)
    shown = subprocess.run(
        ["scontrol", "show", "job", number], capture_output=True, text=True, check=True
    ).stdout
    wanted = ("Account=abc@v100", "TimeLimit=00:05:00", "Partition=gpu_p13", f"JobName={job.name}")
    for part in (*wanted, f"StdOut={job.folder}/logs/0.out", f"StdErr={job.folder}/logs/0.out"):
        assert f"{part}\n" in shown.replace(" ", "\n"), part
    assert job.wait(timeout=600).result() == "done"


@pytest.mark.parametrize("locale", ["C.UTF-8", ""])
def test_a_job_has_the_locale_of_the_user(locale, jean_zay, tmp_path, monkeypatch):
    """sbatch runs with LC_ALL=C, because its errors are read."""
    monkeypatch.setenv("DLO_POLL_S", "0.3")
    monkeypatch.setenv("LC_ALL", locale)
    monkeypatch.chdir(tmp_path)
    command = ["bash", "-c", 'echo "<${LC_ALL:-}>"']
    job = cluster.submit(command, gpus=0, site="jean-zay-v100", account="abc", time=5).wait(timeout=600)
    assert f"<{locale}>" in job.logs()
