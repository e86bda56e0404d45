"""An update of the course never overwrites the notebooks of a student."""

import json

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.cli.workspace import fresh_copy, update_workspace, work_dir


def own():
    return work_dir() / "91_small"


def test_the_first_start_copies_the_labs(course):
    (update,) = update_workspace()
    assert update.kept == ()
    released = course / "labs" / "91_small"
    assert {file.name for file in own().iterdir()} == {file.name for file in released.iterdir()}
    assert (own() / "small.ipynb").read_bytes() == (released / "small.ipynb").read_bytes()


def test_the_work_of_a_student_survives_every_later_start(course):
    update_workspace()
    (own() / "small.ipynb").write_text("my work")
    (own() / "notes.txt").write_text("my notes")
    for _ in range(2):
        (update,) = update_workspace()
        assert update.kept == ()
    assert (own() / "small.ipynb").read_text() == "my work"
    assert (own() / "notes.txt").read_text() == "my notes"


def test_a_newer_release_replaces_only_an_unchanged_notebook(course):
    update_workspace()
    released = course / "labs" / "91_small" / "small.ipynb"
    notebook = json.loads(released.read_text())
    notebook["metadata"]["edition"] = 2
    released.write_text(json.dumps(notebook))
    update_workspace()
    assert json.loads((own() / "small.ipynb").read_text())["metadata"]["edition"] == 2

    (own() / "small.ipynb").write_text("my work")
    notebook["metadata"]["edition"] = 3
    released.write_text(json.dumps(notebook))
    (update,) = update_workspace()
    assert update.kept == ("small.ipynb",)
    assert (own() / "small.ipynb").read_text() == "my work"


def test_checks_are_always_updated(course):
    update_workspace()
    (own() / "checks" / "questions.py").write_text("# all is well")
    update_workspace()
    assert (own() / "checks" / "questions.py").read_text() == (
        course / "labs" / "91_small" / "checks" / "questions.py"
    ).read_text()


def test_a_fresh_copy_keeps_the_earlier_one_beside_it(course):
    with pytest.raises(UserError, match="no copy of 91_small yet: `dlo lab` creates one"):
        fresh_copy("91")
    update_workspace()
    released = (course / "labs" / "91_small" / "small.ipynb").read_bytes()
    for work in ("my work", "my other work"):
        (own() / "small.ipynb").write_text(work)
        notebook, kept = fresh_copy("91")
        assert notebook == own() / "small.ipynb"
        assert notebook.read_bytes() == released
        assert kept.read_text() == work
    assert len(list(own().glob("small_*.ipynb"))) == 2
    (update,) = update_workspace()
    assert update.kept == ()  # the fresh copy counts as unchanged
