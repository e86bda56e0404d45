"""Intake: from any notebook, the judge gets the source with the student's answers and added cells."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlo_lib.grading.judge.cells import Origin, rebuild_submission
from dlo_lib.grading.judge.intake import MAX_BYTES, Invalid, find_submission, open_notebook, read_notebook
from dlo_lib.grading.lab.source import CellKind, LabSource

Notebook = dict[str, Any]


def code(source: object, **more: object) -> Notebook:
    return {"cell_type": "code", "metadata": {}, "source": source, **more}


def test_the_reference_solution_stays_unchanged(small: LabSource, reference: Notebook) -> None:
    taken = rebuild_submission(reference, small)
    run = [cell for cell in small.cells if cell.kind in (CellKind.GIVEN, CellKind.SOLUTION)]
    assert [(cell.id, cell.source) for cell in taken.cells] == [(cell.id, cell.source) for cell in run]
    assert taken.attempted == set(small.questions)
    assert taken.warnings == ()


def test_demo_and_test_cells_are_not_run(small: LabSource, reference: Notebook) -> None:
    ids = {cell.id for cell in rebuild_submission(reference, small).cells}
    assert not ids & {"plot", "test_scale", "why"}


def test_the_order_of_cells_is_that_of_the_source(small: LabSource, reference: Notebook) -> None:
    shuffled = {**reference, "cells": random.Random(3).sample(reference["cells"], len(reference["cells"]))}
    expected = [cell.id for cell in rebuild_submission(reference, small).cells]
    assert [cell.id for cell in rebuild_submission(shuffled, small).cells] == expected


def test_added_cells_stay_behind_the_cell_above_them(small: LabSource, reference: Notebook) -> None:
    for place, name in ((8, "late"), (3, "early"), (0, "first")):
        reference["cells"].insert(place, code([f"{name} = ", "1"]))
    cells = rebuild_submission(reference, small).cells
    sources = [cell.source for cell in cells if cell.origin is Origin.EXTRA]
    assert sources == ["first = 1", "early = 1", "late = 1"]
    origins = [cell.origin for cell in rebuild_submission(reference, small).cells]
    assert origins[:4] == [Origin.EXTRA, Origin.GIVEN, Origin.ANSWER, Origin.EXTRA]


def test_an_edited_given_cell_is_replaced_with_a_warning(small: LabSource, reference: Notebook) -> None:
    reference["cells"][1]["source"] = "torch = None"
    taken = rebuild_submission(reference, small)
    assert "import torch" in taken.cells[0].source
    assert taken.warnings == ("given cell `setup` was edited: the source's is used",)


def test_an_answer_without_metadata_is_found_by_the_name_it_defines(small: LabSource) -> None:
    cells = [code("def quantise(x):\n    return 1, 2"), code("quiz = {}")]
    taken = rebuild_submission({"cells": cells}, small)
    assert taken.attempted == {"quantise", "quiz"}
    assert any("found by the names" in warning for warning in taken.warnings)


def test_a_lone_surrogate_is_replaced(small: LabSource) -> None:
    taken = rebuild_submission({"cells": [code("x = '\ud800'")]}, small)
    assert taken.cells[0].source == "x = '?'"


def test_spaces_at_line_ends_are_no_attempt(small: LabSource, reference: Notebook) -> None:
    released = {cell.id: cell.released for cell in small.cells if cell.kind is CellKind.SOLUTION}
    for cell in reference["cells"]:
        if cell["id"] in released:
            cell["source"] = released[cell["id"]].replace("\n", "  \n") + "\n\n"
    assert rebuild_submission(reference, small).attempted == set()


def test_uses_of_the_reference_are_seen_only_in_calls(small: LabSource) -> None:
    cells = [
        code('lab.use_reference("scale")'),
        code('# lab.use_reference("mean")\ntext = "lab.use_reference(\'quiz\')"'),
    ]
    assert rebuild_submission({"cells": cells}, small).references == {"scale"}


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
)
cells = st.dictionaries(
    st.sampled_from(["cell_type", "source", "metadata", "id", "outputs"]),
    anything | st.sampled_from(["code", "scale", "test_scale"]),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(cells | anything, max_size=6))
def test_no_list_of_cells_raises(small: LabSource, given_cells: list[Any]) -> None:
    taken = rebuild_submission({"cells": given_cells}, small)
    assert {cell.id for cell in taken.cells} >= {"setup", *small.questions}


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60) | anything.map(lambda value: json.dumps(value).encode()))
def test_files_raise_only_invalid(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "any.ipynb"
    file.write_bytes(data)
    try:
        assert isinstance(read_notebook(file)["cells"], list)
    except Invalid as reason:
        assert str(reason)  # noqa: PT017


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "small.ipynb")  # reading it would block
    with pytest.raises(Invalid, match="regular file"):
        read_notebook(tmp_path / "small.ipynb")


@pytest.mark.parametrize("linked", ["theirs", "theirs/91_small"])
def test_a_folder_that_is_a_link_to_a_classmates_is_not_followed(
    tmp_path: Path, reference: Notebook, linked: str
) -> None:
    (tmp_path / "mine" / "91_small").mkdir(parents=True)
    (tmp_path / "mine" / "91_small" / "small.ipynb").write_text(json.dumps(reference))
    (tmp_path / linked).parent.mkdir(exist_ok=True)
    (tmp_path / linked).symlink_to(tmp_path / linked.replace("theirs", "mine"))
    assert (tmp_path / "theirs" / "91_small" / "small.ipynb").is_file()
    with pytest.raises(Invalid, match="symlink"):
        find_submission(tmp_path / "theirs" / "91_small" / "small.ipynb", "91_small")


def test_a_file_in_another_encoding_says_how_to_save_it(tmp_path: Path) -> None:
    (tmp_path / "small.ipynb").write_bytes('{"cells": ["é"]}'.encode("latin-1"))
    with pytest.raises(Invalid, match="UTF-8"):
        read_notebook(tmp_path / "small.ipynb")


def test_only_a_notebook_of_this_lab_is_found(tmp_path: Path, reference: Notebook) -> None:
    (tmp_path / "another.ipynb").write_text(
        json.dumps({"cells": [], "metadata": {"dlo": {"lab": "92_other"}}})
    )
    (tmp_path / "broken.ipynb").write_text("{")
    with pytest.raises(Invalid, match="no notebook"):
        find_submission(tmp_path / "small.ipynb", "91_small")
    (tmp_path / "small-final.ipynb").write_text(json.dumps(reference))
    found, warnings = find_submission(tmp_path / "small.ipynb", "91_small")
    assert found.name == "small-final.ipynb"
    assert "keep the notebook's name" in warnings[0]


@pytest.mark.parametrize(
    "name", ["SMALL.IPYNB", "work/small.ipynb", "small.ipynb.txt", "small.json", "<b>é</b>.ipynb"]
)
def test_names_and_places_of_a_renamed_notebook(tmp_path: Path, reference: Notebook, name: str) -> None:
    (tmp_path / "huge.ipynb").touch()
    os.truncate(tmp_path / "huge.ipynb", 1 << 30)  # is not read, and does not hide the others
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(json.dumps(reference), encoding="utf-16")
    found, (warning,) = find_submission(tmp_path / "small.ipynb", "91_small")
    assert found == tmp_path / name
    assert "<" not in warning


def test_an_edited_copy_counts_if_the_named_notebook_is_untouched(
    tmp_path: Path,
    small: LabSource,
    reference: Notebook,
) -> None:
    (tmp_path / "small.ipynb").write_text(json.dumps({**reference, "cells": reference["cells"][:2]}))
    assert open_notebook(tmp_path / "small.ipynb", small)[0].attempted == set()
    (tmp_path / "small-Copy1.ipynb").write_text(json.dumps(reference))
    submission, (warning,) = open_notebook(tmp_path / "small.ipynb", small)
    assert submission.attempted == set(small.questions)
    assert warning.startswith("small-Copy1.ipynb was taken for small.ipynb")


def test_a_name_defined_in_an_added_cell_is_an_attempt(small: LabSource) -> None:
    released = [code(cell.released, id=cell.id) for cell in small.cells if cell.kind is CellKind.SOLUTION]
    own = code("if True:\n    pass\ndef quantise(x):\n    return x, x")
    cells = [*released, own, code("y = quantise(x)")]
    assert rebuild_submission({"cells": cells}, small).attempted == {"quantise"}


def test_added_cells_above_the_limit_are_left_out(small: LabSource, reference: Notebook) -> None:
    own = [code(f"x{number} = 1\n" * 100_000) for number in range(20)]
    taken = rebuild_submission({"cells": [*reference["cells"], *own]}, small)
    assert sum(len(cell.source) for cell in taken.cells) < 5 << 20
    assert taken.attempted == set(small.questions)
    assert "more than 1 MB" in taken.warnings[0]


READS_WITHIN_32_MIB = """
import resource, sys
from pathlib import Path
from dlo_lib.grading.judge import intake

intake.MAX_MEMORY = 32 << 20
before = resource.getrlimit(resource.RLIMIT_DATA)
try:
    intake.read_notebook(Path(sys.argv[1]))
except intake.Invalid as error:
    print(error)
assert resource.getrlimit(resource.RLIMIT_DATA) == before
"""


def test_a_file_that_needs_too_much_memory_is_refused_and_the_reader_survives(tmp_path: Path) -> None:
    """In a separate process, because one that has freed much memory can reuse it without a system call."""
    (tmp_path / "small.ipynb").write_text('{"cells": [' + '{"":0},' * 400_000 + "{}]}")
    program = [sys.executable, "-c", READS_WITHIN_32_MIB, str(tmp_path / "small.ipynb")]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert "far more memory than a notebook does" in done.stdout


def test_an_honest_notebook_of_the_largest_size_passes(tmp_path: Path) -> None:
    """Every character takes four bytes in memory, once in the text of the file and once in a cell."""
    text = "\N{GRINNING FACE}" + "x" * (MAX_BYTES - 100)
    (tmp_path / "small.ipynb").write_text(json.dumps({"cells": [text]}, ensure_ascii=False), encoding="utf-8")
    assert len(read_notebook(tmp_path / "small.ipynb")["cells"][0]) == len(text)
