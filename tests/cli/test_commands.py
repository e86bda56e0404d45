"""The commands as a person runs them: what they print, and one line with the cure for what is wrong."""

import json
import socket

import pytest

from dlo_lib.cli.doctor import Finding, examine, verdict
from dlo_lib.cli.workspace import own_notebook
from dlo_lib.errors import UserError
from dlo_lib.grading.progress import read_progress


def one_line(process) -> str:
    """The single line on stderr of a command that was refused."""
    assert process.returncode == 2, process.stderr
    (line,) = process.stderr.strip().splitlines()
    return line


def test_labs_are_listed_for_people_and_for_programs(course, dlo):
    progress = read_progress("91_small")
    progress.earned["scale"] = 1.0
    progress.save()
    (lab,) = json.loads(dlo("labs", "--json").stdout)
    assert lab["directory"] == "91_small"
    assert lab["earned"] == 1.0
    assert lab["state"] == "started"
    assert lab["points"] > 1
    shown = dlo("labs").stdout
    assert "A small lab for the tests of grading" in shown
    assert "elective" in shown


def test_an_unknown_lab_offers_the_nearest(course, dlo):
    assert one_line(dlo("check", "91_smal")) == 'dlo: unknown lab "91_smal": did you mean 91_small? Known: 91_small'


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("grad", "No such command 'grad'. Did you mean 'grade'?"),
        ("grade", "Missing argument 'lab'"),
        ("grade small --jobs 0", "Invalid value for '--jobs': Input should be greater than or equal to 1"),
        ("export small --to excel", "Invalid value for '--to': 'excel' is not one of 'moodle', 'csv'"),
    ],
)  # fmt: skip
def test_what_no_command_knows_is_one_line(course, dlo, command, says):
    line = one_line(dlo(*command.split()))
    assert line.removesuffix(f"; dlo {command.split()[0]} --help lists what there is") == f"dlo: {says}"


def test_no_command_at_all_shows_the_help(course, dlo):
    process = dlo()
    assert process.returncode == 2
    assert "Optimised and distributed deep learning" in process.stdout + process.stderr
    assert dlo("--help").returncode == 0


def test_a_lab_without_a_copy_says_how_to_get_one(course, dlo):
    assert "you have no copy of 91_small yet: `dlo lab` makes one in" in one_line(dlo("check", "small"))


def test_a_notebook_beside_one_is_found_first(course, tmp_path, monkeypatch):
    here = tmp_path / "fetched" / "91_small"
    here.mkdir(parents=True)
    (here / "small.ipynb").write_text("{}")
    monkeypatch.chdir(here)
    assert own_notebook("91") == here / "small.ipynb"
    monkeypatch.chdir(here.parent)
    assert own_notebook("91") == here / "small.ipynb"


def test_a_port_in_use_is_refused_before_anything_is_copied(course, dlo, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = one_line(dlo("lab", "--no-browser", "--port", str(port)))
    assert line.startswith(f"dlo: port {port} is in use: use --port ")


def test_a_missing_notebook_is_refused(course, dlo, tmp_path):
    assert "no notebook at" in one_line(dlo("check", "small", "--notebook", str(tmp_path / "none.ipynb")))


def test_grading_outside_a_course_is_refused(course, dlo, tmp_path):
    one_line(dlo("grade", "small", "--course", str(tmp_path)))


def test_the_doctor_finds_what_the_labs_need():
    findings = {finding.name: finding for finding in examine()}
    assert all(findings[name].ok for name in ("python", "torch", "jupyter", "ranks", "disk"))
    assert all(finding.cure for finding in findings.values() if not finding.ok)
    verdict(list(findings.values()))


def test_the_doctor_refuses_only_what_is_required():
    verdict([Finding("gpu", False, "none", "nothing to do")])
    with pytest.raises(UserError, match="see the cure for torch above"):
        verdict([Finding("torch", False, "none", "pip install torch", required=True)])


def test_the_doctor_prints_json(dlo):
    assert {"python", "torch", "gpu", "slurm", "sandbox", "port"} <= {entry["name"] for entry in json.loads(dlo("doctor", "--json").stdout)}
