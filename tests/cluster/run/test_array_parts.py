"""An array that is larger than SLURM allows is submitted in parts, and is still one job."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.cluster.run import array_parts, dependency, records, submissions, turns
from dlo_lib.cluster.run.array_parts import ArrayPart, parts_of
from dlo_lib.cluster.run.records import Record, Turn
from dlo_lib.cluster.script import template
from dlo_lib.cluster.script.template import JobScript
from dlo_lib.cluster.script.work import Once
from dlo_lib.cluster.site.description import Scheduler, site
from dlo_lib.cluster.site.request import allocate, make_request
from dlo_lib.cluster.slurm.states import ElementStatus, State


@pytest.mark.parametrize("most", [1, 2, 7, 11, 100])
def test_the_parts_have_each_element_once_and_small_indices(most):
    elements = [*range(0, 20), 33, 40]
    parts = parts_of(elements, most)
    assert [element for part in parts for element in part.elements] == elements
    assert all(0 <= element - part.first < most for part in parts for element in part.elements)


def test_the_words_of_a_part_share_the_limit_and_keep_the_output_of_each_element(tmp_path):
    folder = tmp_path / "50%"
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "12.out").write_text("earlier\n")
    script = "#SBATCH --array=0-24%4           # one job for each element of the sweep\n"
    assert array_parts.limit_of(script) == 4
    assert array_parts.limit_of("#SBATCH --array=0-24 # x\n") is None
    assert array_parts.words(folder, ArrayPart(0, (0, 1, 2, 5)), 1) == ["--array=0-2,5%1"]
    for _ in range(2):  # a second submission changes nothing
        assert array_parts.words(folder, ArrayPart(11, (11, 12, 20)), 4) == [
            "--array=0-1,9%4",
            f"--output={tmp_path}/50%%/logs/part-11/%a.out",
        ]
    (folder / "logs" / "part-11" / "9.out").write_text("of 20\n")
    assert (folder / "logs" / "20.out").read_text() == "of 20\n"
    assert (folder / "logs" / "12.out").read_text() == "earlier\n"
    assert not (folder / "logs" / "11.out").exists()
    assert array_parts.words(folder, ArrayPart(0, (0,)), None) == ["--array=0"]


def test_the_start_is_planned_for_an_array_that_slurm_allows():
    script = "#SBATCH --array=0-24%4  # x\n"
    assert array_parts.planned(script, range(25), 11) == "#SBATCH --array=0-10%4  # x\n"
    assert array_parts.planned(script, range(25), 25) == script


def test_the_script_of_a_part_runs_the_element_of_its_index(tmp_path):
    folder = tmp_path / "the job"
    elements = tuple(("--x", str(number)) for number in range(25))
    allocation = allocate(site("jean-zay-v100"), make_request("5", gpus=0, account="abc"))
    text = JobScript(
        "run", allocation, Once(("echo", "x")), elements=elements, folder=folder, python="python"
    ).text()
    environment = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7"}
    for token, first, index in (("a", 11, 4), ("b", 0, 4)):
        (folder / "turns" / token).mkdir(parents=True)
        if first:
            (folder / "turns" / token / "first").write_text(f"{first}\n")
        done = subprocess.run(
            ["bash", "-c", text, "job.sh", token],
            env={**environment, "SLURM_ARRAY_TASK_ID": str(index)},
            capture_output=True,
            text=True,
        )
        assert done.stdout == f"x --x {first + index}\n", done.stderr
        assert records.exit_code(folder, first + index) == 0
        assert (folder / "turns" / token / str(first + index)).exists()


def test_statuses_of_indices_become_those_of_elements():
    found = array_parts.by_element(11, {2: ElementStatus(2, State.RUNNING)})
    assert found == {13: ElementStatus(13, State.RUNNING)}


@pytest.mark.parametrize("ago", [1, 200])
def test_elements_whose_submitting_process_has_ended_are_not_forgotten(ago, tmp_path, monkeypatch):
    monkeypatch.setattr(turns, "statuses", lambda folder, record, turn: {
        element: ElementStatus(element, State.RUNNING) for element in turn.elements
    })  # fmt: skip
    begun = datetime.fromtimestamp(time.time() - ago, UTC).isoformat()
    parts = (Turn(7, tuple(range(11)), at=time.time() - ago),)
    record = Record("d" * 64, "run", "s", Scheduler.SLURM, 0, ({},) * 13, ("",) * 13, begun, turns=parts)
    found = turns.current(tmp_path, record)
    expected = (State.UNKNOWN, "it is being submitted") if ago == 1 else (State.LOST, "it was not submitted")
    assert [status.state for status in found[:11]] == [State.RUNNING] * 11
    assert all(status.state is expected[0] and status.reason.startswith(expected[1]) for status in found[11:])
    assert not any(status.is_final for status in found[11:])
    nothing = turns.current(tmp_path, replace(record, turns=()))
    assert [status.state for status in nothing] == [expected[0]] * 13


def test_elements_of_arrays_in_parts_are_not_joined():
    turns = (Turn(7, tuple(range(11))), Turn(8, (11, 12), first=11))
    record = Record("d" * 64, "run", "s", Scheduler.SLURM, 0, ({},) * 13, ("",) * 13, "", turns=turns)
    running = [ElementStatus(number, State.RUNNING) for number in range(13)]
    assert dependency.words("afterok", record, running)[0] == "--dependency=afterok:7:8"
    with pytest.raises(UserError, match="aftercorr joins elements of one array each"):
        dependency.words("aftercorr", record, running)


def test_the_file_with_the_first_element_is_the_one_that_the_script_reads():
    script = Path(template.__file__).parent / "templates" / "job.sh.j2"
    assert f"/turns/$1/{submissions.FIRST}" in script.read_text()
    assert os.path.basename(submissions.TURNS) == "turns"
