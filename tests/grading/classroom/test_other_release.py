"""The feedback names the release of the notebook's checks where the judge has another one."""

from __future__ import annotations

from typing import Any

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from dlo_lib.grading.checks.verdict import QuestionVerdict, show
from dlo_lib.grading.classroom.other_release import checked_on, release_warning


def notebook(*versions: Any) -> dict[str, Any]:
    outputs = [{"metadata": {"dlo": {"torch": version}}} for version in versions]
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
    said = release_warning(notebook(*checked), judged)
    assert bool(said) == bool(names)
    assert names in said


@pytest.mark.parametrize(
    "content",
    [
        {}, {"cells": 1}, {"cells": [None, {"outputs": 3}, {"outputs": [None, {"metadata": []}]}]},
        notebook("<b>2.8</b>", 2.8, None, "9" * 4000, "2", ["2.8"]),
    ],
)  # fmt: skip
def test_what_is_no_release_is_ignored(content):
    assert list(checked_on(content)) == []


def test_the_output_of_a_check_has_the_release():
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
    assert release_warning(made, "1.13.0")
    assert "torch" not in str(output.data)
