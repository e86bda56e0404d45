"""The commands as a user runs them: their output, and one line with the cure for each error."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dlo_lib import cli
from dlo_lib.base.errors import UserError
from dlo_lib.base.files import state_dir
from dlo_lib.cli import doctor, jupyter, make
from dlo_lib.cli.doctor import Diagnosis, examine, verdict
from dlo_lib.cli.workspace import own_notebook
from dlo_lib.grading.classroom.publish import demo_class as classroom
from dlo_lib.grading.lab.course import labs
from dlo_lib.grading.notebook.progress import read_progress
from dlo_lib.grading.sandbox import isolation


def one_line(process) -> str:
    """Return the single line on stderr of a failed command."""
    assert process.returncode == 2, process.stderr
    (line,) = process.stderr.strip().splitlines()
    return line


def test_labs_are_listed_as_a_table_and_as_json(course, dlo):
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


def test_an_unknown_lab_is_refused_with_the_nearest_name(course, dlo):
    assert (
        one_line(dlo("check", "91_smal"))
        == 'dlo: unknown lab "91_smal": did you mean 91_small? Known: 91_small'
    )


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("grad", "No such command 'grad'. Did you mean 'grade'?"),
        ("grade", "Missing argument 'lab'"),
        ("grade small --jobs 0", "Invalid value for '--jobs': Input should be greater than or equal to 1"),
        ("export small --to excel", "Invalid value for '--to': 'excel' is not one of 'moodle', 'csv'"),
    ],
)  # fmt: skip
def test_an_unknown_option_or_value_is_one_line(course, dlo, command, says):
    line = one_line(dlo(*command.split()))
    assert line.removesuffix(f"; dlo {command.split()[0]} --help lists the options") == f"dlo: {says}"


def test_without_a_command_the_help_is_shown(course, dlo):
    process = dlo()
    assert process.returncode == 2
    assert "Optimised and distributed deep learning" in process.stdout + process.stderr
    assert dlo("--help").returncode == 0


def test_a_lab_without_a_copy_is_refused_with_the_cure(course, dlo):
    assert "you have no copy of 91_small yet: `dlo lab` creates one in" in one_line(dlo("check", "small"))


def test_a_notebook_in_the_working_directory_is_found_first(course, tmp_path, monkeypatch):
    here = tmp_path / "fetched" / "91_small"
    here.mkdir(parents=True)
    (here / "small.ipynb").write_text("{}")
    monkeypatch.chdir(here)
    assert own_notebook("91") == here / "small.ipynb"
    monkeypatch.chdir(here.parent)
    assert own_notebook("91") == here / "small.ipynb"


def test_a_port_in_use_is_refused_before_the_copy(course, dlo, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = one_line(dlo("lab", "--no-browser", "--port", str(port)))
    assert line.startswith(f"dlo: port {port} is in use: use --port ")


def test_a_missing_notebook_is_refused(course, dlo, tmp_path):
    assert "no notebook at" in one_line(dlo("check", "small", "--notebook", str(tmp_path / "none.ipynb")))


def test_the_notebook_of_another_person_runs_only_in_a_sandbox(course, tmp_path, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr("dlo_lib.grading.judge.judge.visible_report", lambda path: ran.append(path))
    monkeypatch.setattr("dlo_lib.cli.reports.show_report", lambda report, console: True)
    monkeypatch.setattr(isolation, "find_isolation", lambda: isolation.FoundIsolation(None, ("no bwrap",)))
    monkeypatch.setenv("DLO_WORK", str(tmp_path / "mine"))
    mine, theirs = tmp_path / "mine" / "small.ipynb", tmp_path / "theirs" / "small.ipynb"
    for notebook in (mine, theirs):
        notebook.parent.mkdir()
        notebook.write_text("{}")

    def status(*arguments: str) -> object:
        monkeypatch.setattr(sys, "argv", ["dlo", "check", "small", "--notebook", *arguments])
        with pytest.raises(SystemExit) as left:
            cli.main()
        return left.value.code

    assert status(str(theirs)) == 2
    assert "cannot isolate submissions (no bwrap)" in capsys.readouterr().err
    assert not ran
    assert not status(str(theirs), "--unsafe")
    assert not status(str(mine))
    assert ran == [theirs, mine]


def test_grading_outside_a_course_is_refused(course, dlo, tmp_path):
    one_line(dlo("grade", "small", "--course", str(tmp_path)))


@pytest.fixture(scope="module")
def examined() -> list[Diagnosis]:
    return examine()


def test_the_doctor_finds_the_parts_that_the_labs_need(examined):
    findings = {finding.name: finding for finding in examined}
    assert all(findings[name].ok for name in ("python", "torch", "jupyter", "ranks", "disk"))
    assert all(finding.cure for finding in findings.values() if not finding.ok)
    verdict(list(findings.values()))


def test_the_doctor_fails_only_for_required_parts():
    verdict([Diagnosis("gpu", False, "none", "nothing to do")])
    with pytest.raises(UserError, match="see the cure for torch above"):
        verdict([Diagnosis("torch", False, "none", "pip install torch", required=True)])


def test_the_doctor_fails_in_a_course_that_cannot_be_graded_here(tmp_path, monkeypatch):
    absent = [Diagnosis("sandbox", False, "none", "apt-get install bubblewrap")]
    monkeypatch.chdir(tmp_path)
    assert doctor.can_grade(absent)  # a student needs no sandbox
    (tmp_path / "secret").write_text("s")
    assert not doctor.can_grade(absent)
    assert doctor.can_grade([Diagnosis("sandbox", True, "bubblewrap")])
    monkeypatch.setattr(doctor, "examine", lambda: absent)
    monkeypatch.setattr(sys, "argv", ["dlo", "doctor", "--json"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1


def test_the_doctor_sees_whether_students_can_read_the_course_or_its_solutions(tmp_path, monkeypatch):
    reachable = Path(tempfile.mkdtemp(prefix="dlo-test-doctor-"))
    try:
        reachable.chmod(0o755)
        (reachable / "checkout" / "solutions").mkdir(parents=True)
        course = reachable / "course"
        course.mkdir(mode=0o755)
        (course / "secret").write_text("s")
        (course / "solutions").symlink_to(reachable / "checkout" / "solutions")
        monkeypatch.chdir(course)
        assert "can read the course in" in doctor._course().found
        course.chmod(0o700)
        (reachable / "checkout" / "solutions").chmod(0o755)
        assert "can read" in doctor._course().found
        assert doctor._course().cure.endswith(f"chmod -R o= {reachable}/checkout/solutions")
        (reachable / "checkout" / "solutions").chmod(0o750)
        assert doctor._course().ok
    finally:
        shutil.rmtree(reachable)


def test_the_doctor_prints_json(examined, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda: examined)
    monkeypatch.setattr(sys, "argv", ["dlo", "doctor", "--json"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert not left.value.code
    assert {"python", "torch", "gpu", "slurm", "sandbox", "port"} <= {
        entry["name"] for entry in json.loads(capsys.readouterr().out)
    }


class GradedHere(Exception):
    """Raised at the start of grading."""


def test_a_classroom_without_a_sandbox_warns_and_grades_its_fictitious_students(
    course, dlo, tmp_path, monkeypatch, capsys
):
    chosen = []

    def begin(lab, folder, advance, options):
        chosen.append(options)
        raise GradedHere

    monkeypatch.setattr(classroom, "grade_lab", begin)
    monkeypatch.setattr(isolation.shutil, "which", lambda program: None)
    isolation.find_isolation.cache_clear()
    with pytest.raises(GradedHere):
        make.classroom("small")
    isolation.find_isolation.cache_clear()
    assert [options.unsafe for options in chosen] == [True]
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "NO SANDBOX here: the three fictitious students are graded without one; "
        "`dlo grade` refuses a real class" in said
    )
    assert "Cure: apt-get install bubblewrap" in said


def test_a_real_class_is_refused_without_a_sandbox(monkeypatch):
    monkeypatch.setattr(isolation.shutil, "which", lambda program: None)
    isolation.find_isolation.cache_clear()
    with pytest.raises(
        UserError, match="this host cannot isolate submissions .*: apt-get install bubblewrap"
    ):
        isolation.required_isolation()
    isolation.find_isolation.cache_clear()


@pytest.mark.parametrize("command", [("labs",), ("lab", "--no-browser"), ("classroom", "small")])
def test_a_state_folder_that_cannot_be_created_is_one_line(course, dlo, tmp_path, monkeypatch, command):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DLO_HOME", str(tmp_path / "file" / "home"))
    line = one_line(dlo(*command))
    assert line == (
        f"dlo: cannot create the folder {tmp_path}/file/home (Not a directory): "
        "set DLO_HOME to a folder of yours"
    )


def test_a_workspace_that_cannot_be_created_is_one_line(course, dlo, monkeypatch):
    monkeypatch.setenv("DLO_WORK", "/proc/labs")
    line = one_line(dlo("lab", "--no-browser"))
    assert line == (
        "dlo: cannot create the folder /proc/labs (No such file or directory): "
        "set DLO_WORK to a folder of yours"
    )


def test_jupyter_stores_its_files_in_the_state_folder_if_the_home_is_read_only(monkeypatch):
    assert jupyter._folders() == {}
    monkeypatch.setattr(jupyter.os, "access", lambda path, mode: False)
    folders = jupyter._folders()
    assert set(folders) >= {"JUPYTER_RUNTIME_DIR", "IPYTHONDIR"}
    assert all(Path(folder).is_relative_to(state_dir()) for folder in folders.values())


def test_other_systems_than_linux_are_refused_with_the_cure(monkeypatch, capsys):
    monkeypatch.setattr(cli.sys, "platform", "darwin")
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "this is darwin: open the course in its container" in line


def test_the_table_of_labs_breaks_no_word_in_80_columns(dlo):
    lines = subprocess.run(
        [sys.executable, "-c", "from dlo_lib.cli import main; main()", "labs"],
        env=dict(os.environ, COLUMNS="80"), capture_output=True, text=True, check=True, timeout=120,
    ).stdout  # fmt: skip
    words = set(lines.split())
    for lab in labs():
        assert {lab.directory, *lab.title.split()} <= words
    assert max(map(len, lines.splitlines())) <= 80


def test_slurm_without_a_cluster_is_reported_as_absent(tmp_path, monkeypatch):
    for program in ("sbatch", "scontrol"):
        (tmp_path / program).write_text(
            "#!/bin/sh\necho 'error: fetch_config: failed\n"
            "fatal: Could not establish a configuration source' >&2; exit 1\n"
        )
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = doctor._slurm()
    assert (found.ok, found.found) == (False, "sbatch is here, but this machine belongs to no cluster")


def test_slurm_that_does_not_answer_is_one_line_of_the_doctor(tmp_path, monkeypatch):
    for name, line in (("scontrol", "exit 0"), ("sbatch", "exec sleep 600")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(doctor, "_ANSWER_S", 0.2)
    found = doctor._slurm()
    assert (found.ok, found.found) == (False, "SLURM's commands do not answer")
    assert found.cure.startswith("check $SLURM_CONF")
