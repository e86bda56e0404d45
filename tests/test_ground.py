"""The lowest modules: one-line errors, files that are complete or absent, translated messages."""

import subprocess
import sys
import threading

import pytest

from dlo_lib.base import text
from dlo_lib.base.errors import UserError, unknown_name
from dlo_lib.base.files import state_dir, write_aside, write_text


def test_an_unknown_name_offers_the_nearest():
    message = str(unknown_name("GPU", "a100-8", ["a100-80", "a100-40", "v100-16"]))
    assert message == (
        'unknown GPU "a100-8": did you mean a100-80 or a100-40 or v100-16? Known: a100-40, a100-80, v100-16'
    )


def test_a_name_without_similar_ones_lists_the_known_names():
    assert str(unknown_name("lab", "zzz", ["13_dp_limit"])) == 'unknown lab "zzz": Known: 13_dp_limit'


def test_a_file_is_replaced_only_when_it_is_whole(tmp_path):
    target = tmp_path / "grades.csv"
    write_text(target, "before")
    with pytest.raises(ZeroDivisionError), write_aside(target) as aside:
        aside.write_text("half")
        raise ZeroDivisionError
    assert target.read_text() == "before"
    assert list(tmp_path.iterdir()) == [target], "no temporary file is left"


def test_folders_are_made_and_readers_see_old_or_new(tmp_path):
    target = tmp_path / "a" / "b" / "state.json"
    write_text(target, "0" * 10_000)
    seen, stop = set(), threading.Event()

    def read() -> None:
        while not stop.is_set():
            seen.add(target.read_text())

    reader = threading.Thread(target=read)
    reader.start()
    for digit in range(10):
        write_text(target, str(digit) * 10_000)
    stop.set()
    reader.join()
    assert seen <= {str(digit) * 10_000 for digit in range(10)}


def test_a_full_disk_is_one_line_and_changes_nothing(tiny_disk):
    target = tiny_disk / "metrics.json"
    write_text(target, "small")
    with pytest.raises(
        UserError, match="no space left to write .*metrics.json: free some space or choose another folder"
    ):
        write_text(target, "x" * 2_000_000)
    assert target.read_text() == "small"
    assert [path.name for path in tiny_disk.iterdir()] == ["metrics.json"]


def test_dlo_home_sets_the_state_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DLO_HOME", str(tmp_path / "mine"))
    assert state_dir() == tmp_path / "mine"
    assert state_dir().is_dir()
    monkeypatch.delenv("DLO_HOME")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert state_dir() == tmp_path / "xdg" / "dlo"


def test_a_translation_is_placed_beside_the_english_text(tmp_path, monkeypatch):
    (tmp_path / "locale").mkdir()
    (tmp_path / "locale" / "fr.toml").write_text(
        '[messages]\n"rank {rank} waits" = "le rang {rank} attend"\n'
    )
    monkeypatch.setattr(text, "__file__", str(tmp_path / "text.py"))
    text._catalogue.cache_clear()
    assert text.tr("rank {rank} waits", rank=1) == "rank 1 waits"
    monkeypatch.setenv("DLO_LANG", "fr_FR.UTF-8")
    assert text.tr("rank {rank} waits", rank=1) == "le rang 1 attend"
    assert text.tr("not translated: {x}", x=2) == "not translated: 2"
    text._catalogue.cache_clear()


def test_importing_the_library_is_light():
    """`dlo --help` must not wait for torch."""
    code = (
        "import sys, dlo_lib, dlo_lib.base.errors, dlo_lib.base.files, dlo_lib.base.text, dlo_lib.cli.app; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        # The kernel of each student: 55 MB that only the side of the author and the grader needs.
        (
            "dlo_lib.grading.notebook.lab",
            "nbgrader nbformat jupytext sqlalchemy requests torch._dynamo sympy",
        ),
        # The formgrader of each course, and the Hub's services: PyTorch is 200 MB.
        ("dlo_lib.grading.classroom.gradebook.nbgrader_course", "torch alembic"),
        # The commands of an instructor: torch takes 2 s of CPU time. The service that they start imports it,
        # and starts its zygote before.
        ("dlo_lib.grading.classroom.gradebook.batch", "torch"),
        ("dlo_lib.grading.classroom.collect.collection", "torch"),
        ("dlo_lib.grading.classroom.feedback.feedback", "torch"),
        ("dlo_lib.grading.classroom.similar.similarity", "torch"),
        ("dlo_lib.grading.judge.array", "torch"),
        ("dlo_lib.grading.judge.server", "torch"),
        ("dlo_lib.hub.membership", "torch"),
        ("dlo_lib.cli.hub_probe", "torch"),
    ],
)
def test_what_a_long_process_does_not_import(module: str, heavy: str) -> None:
    code = f"import sys, {module}; sys.exit(' '.join(set({heavy.split()!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == ""
