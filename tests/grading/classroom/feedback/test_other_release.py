"""The feedback names the releases of the notebook's checks where the judge has other ones."""

from __future__ import annotations

from typing import Any

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from dlo_lib.grading.checks.verdict import QuestionVerdict, show
from dlo_lib.grading.classroom.feedback.other_release import checked_on, release_warnings


def notebook(*versions: Any, program: str = "torch") -> dict[str, Any]:
    outputs = [{"metadata": {"dlo": {program: version}}} for version in versions]
    return {"cells": [{"outputs": outputs}]}


@pytest.mark.parametrize(
    ("checked", "judged", "names"),
    [
        (["2.8.0+cu128"], "2.13.0+cpu", "PyTorch 2.8.0+cu128, the judge on PyTorch 2.13.0+cpu: "),
        (["2.13.0+cu130"], "2.13.1", ""),
        (["2.8.0", "2.8.0", "2.9.1", "2.13.0"], "2.13.0", "PyTorch 2.8.0, 2.9.1, the judge on"),
        (["2.8.0"], "", ""),
        ([], "2.13.0", ""),
    ],
)
def test_another_minor_release_is_named(checked, judged, names):
    said = list(release_warnings(notebook(*checked), {"torch": judged, "python": "3.11.2"}))
    assert len(said) == bool(names)
    assert names in "".join(said)


def test_another_python_is_named():
    """Python 3.14 accepts `except A, B:` and annotations without their imports; an older judge does not."""
    submitted = notebook("3.14.8", program="python")
    (said,) = release_warnings(submitted, {"torch": "2.13.0", "python": "3.11.2"})
    assert "ran on Python 3.14.8, the judge on Python 3.11.2: " in said
    assert not list(release_warnings(submitted, {"torch": "2.13.0", "python": "3.14.0"}))
    assert not list(release_warnings(submitted, {"torch": "2.13.0"}))


@pytest.mark.parametrize(
    "content",
    [
        {}, {"cells": 1}, {"cells": [None, {"outputs": 3}, {"outputs": [None, {"metadata": []}]}]},
        notebook("<b>2.8</b>", 2.8, None, "9" * 4000, "2", ["2.8"]),
    ],
)  # fmt: skip
def test_what_is_no_release_is_ignored(content):
    assert list(checked_on(content, "torch")) == []


def test_the_output_of_a_check_has_the_releases():
    InteractiveShell.instance()
    try:
        with capture_output() as captured:
            show(QuestionVerdict("q", (), frozenset(), 1).shown())
    finally:
        InteractiveShell.clear_instance()
    (output,) = captured.outputs
    cell = nbformat.v4.new_code_cell(
        outputs=[nbformat.v4.new_output("display_data", output.data, metadata=output.metadata)]
    )
    made = nbformat.v4.new_notebook(cells=[cell])
    nbformat.validate(made)
    assert len(list(release_warnings(made, {"torch": "1.13.0", "python": "3.0.0"}))) == 2
    assert "torch" not in str(output.data)
