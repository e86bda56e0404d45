"""What commands of graders and students print while they run, at Ctrl-C, and for a place that is closed."""

from __future__ import annotations

import io
from pathlib import Path
from unittest.mock import Mock

import pytest
import typer
from rich.console import Console

from dlo_lib.base.errors import UserError
from dlo_lib.base.files import write_text
from dlo_lib.base.text import span
from dlo_lib.cli.grade import _continued
from dlo_lib.cli.out import require_writable, writing
from dlo_lib.cli.reports import progress_bar, show_report
from dlo_lib.grading.judge.report import GRADED, GRADED_WARN, Report


@pytest.mark.parametrize(
    ("course", "again"),
    [
        (Path(), "`dlo grade 13_x --resume` continues"),
        (Path("c"), "`dlo grade 13_x --resume --course c` cont"),
    ],
)
def test_an_interrupted_grading_names_the_command_that_continues_it(
    course: Path, again: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as end, _continued(lambda: 3, "13_x", course):
        raise KeyboardInterrupt
    assert end.value.exit_code == 130
    said = capsys.readouterr().err
    assert said.startswith("interrupted; 3 rows of this run are stored: ")
    assert again in said


def test_a_bar_without_a_known_number_of_steps_has_no_count() -> None:
    terminal = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
    with progress_bar(terminal) as bar:
        task = bar.add_task("grading 13_x: proving", total=None)
        assert "?" not in str(bar.columns[2](bar.tasks[0]))
        bar.update(task, total=20, completed=3)
        assert "3/20" in str(bar.columns[2](bar.tasks[0]))


@pytest.mark.parametrize("status", [GRADED, GRADED_WARN])
def test_a_check_of_a_student_is_not_titled_as_graded(status: str) -> None:
    terminal = Console(record=True, width=100, file=io.StringIO())
    show_report(Report("13_x", status, {}), terminal)
    shown = terminal.export_text()
    assert "13_x: visible checks" in shown
    assert "GRADED" not in shown


@pytest.mark.parametrize(
    ("name", "reason"), [("folder", "it is a folder"), ("file/grades.csv", "is no folder")]
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, name: str, reason: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=reason) as refusal:
        require_writable(tmp_path / name)
    assert str(refusal.value).endswith("choose another file with --out")
    require_writable(tmp_path / "new" / "grades.csv")


def test_a_closed_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *given: False)  # root may write everywhere
    with pytest.raises(UserError, match="you may not write to "):
        require_writable(tmp_path / "grades.csv")
    with (
        pytest.raises(UserError, match=r"cannot write .* \(Permission denied\): choose another"),
        writing(tmp_path),
    ):
        raise PermissionError(13, "Permission denied")
    (tmp_path / "grades.csv").mkdir()
    with pytest.raises(UserError, match="Is a directory"), writing(tmp_path / "grades.csv"):
        write_text(tmp_path / "grades.csv", "")


@pytest.mark.parametrize(
    ("milliseconds", "shown"),
    [(0, "0 ms"), (999, "999 ms"), (1000, "1.0 s"), (59_949, "59.9 s"), (59_960, "1 min 0 s"),
     (61_515, "1 min 2 s"), (3_725_000, "1 h 2 min")],
)  # fmt: skip
def test_a_span_of_time_has_the_unit_that_a_reader_expects(milliseconds: float, shown: str) -> None:
    assert span(milliseconds) == shown


def test_the_bar_says_what_is_judged_before_the_first_row() -> None:
    from dlo_lib.cli.grade import _Running

    bar = Mock()
    _Running(bar, 1, "grading 13_x")({})
    assert bar.update.call_args.kwargs["description"].startswith("grading 13_x: proving")
