"""The tags of the labs' texts and the stored outputs belong together, and nbval fails one that is wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dlo_lib.grading.lab.course import LabInfo, source_folder, source_labs
from dlo_lib.grading.lab.source import text_source
from tests.labs import quoted_outputs
from tests.labs.quoted_outputs import (
    STORED,
    TAG,
    as_cell_outputs,
    as_stored,
    faults_of_tags,
    numbers,
    sanitized,
    stale_numbers,
    tagged_cells,
)

SMALL = Path(__file__).parents[1] / "grading" / "small_course"
CELLS = f"""# %% [markdown] id="text"
# It moves 1,024 bytes, 8 for each of 128 elements.

# %% id="show" tags=["demo", "{TAG}"]
print(1)

# %% tags=["demo"] id="other"
print(2)
"""


@pytest.mark.parametrize("lab", source_labs(), ids=lambda lab: lab.directory)
def test_each_tagged_cell_has_a_stored_output(lab: LabInfo) -> None:
    text = text_source(source_folder(lab)).read_text(encoding="utf-8")
    assert faults_of_tags(lab.directory, text) == []


def test_each_stored_file_is_that_of_a_lab() -> None:
    assert {file.stem for file in STORED.glob("*")} <= {lab.directory for lab in source_labs()}


def test_a_tag_without_output_and_an_output_without_tag_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quoted_outputs, "STORED", tmp_path)
    assert tagged_cells(CELLS) == ["show"]
    (fault,) = faults_of_tags("91_small", CELLS)
    assert "no output is stored of the cell show: run: pytest" in fault
    quoted_outputs.write_outputs("91_small", {"show": [{"stdout": ["12.5 ms"]}], "other": []})
    faults = faults_of_tags("91_small", CELLS)
    assert [TAG in fault or "sanitize.cfg" in fault for fault in faults] == [True, True]
    quoted_outputs.write_outputs("91_small", {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a table  9.87 ms  3 lines", "a table 10.2 s 3 lines"),
        ("chain 25.5 ms, one kernel 20.0 ms: 1.3 times", "chain 31 ms, one kernel 8 ms: 3.9 times"),
        ("waits in all_reduce  3 on world  0.3 s\n", "waits in all_reduce  3 on world  12.0 s\n"),
        ("Checked 2026-11-27 15:57:22 UTC.", "Checked 2027-01-02 05:07:02 UTC."),
    ],
)
def test_times_are_replaced(one: str, other: str) -> None:
    assert sanitized(one) == sanitized(other) == sanitized(sanitized(one))


def test_other_numbers_are_not() -> None:
    text = "47.9 GiB of state, 1,024 operations, 53.5 times 2, 3 samples"
    assert sanitized(text) == text


def test_outputs_are_stored_as_text_and_come_back() -> None:
    made = as_cell_outputs([{"stdout": ["a", "b", ""]}, {"text/plain": ["3.0"]}])
    assert [output.output_type for output in made] == ["stream", "display_data"]
    assert as_stored(made) == [{"stdout": ["a", "b", ""]}, {"text/plain": ["3.0"]}]
    assert as_stored([{"data": {"image/png": "...", "text/html": "<b>"}}]) == []


def test_a_number_that_the_text_still_has_is_named_when_the_output_changes() -> None:
    assert numbers("1,024 bytes, 8. Then 3.5 and x2") == {"1024", "8", "3.5"}
    before = {"show": [{"stdout": ["1,024 bytes moved by 16 programs"]}]}
    after = {"show": [{"stdout": ["2,048 bytes moved by 32 programs"]}]}
    (line,) = stale_numbers("91_small", CELLS, before, after)
    assert "the output of show has no 1024 any more" in line
    assert stale_numbers("91_small", CELLS, before, before) == []


RUN = """
import sys, pytest
from pathlib import Path
from tests.labs import quoted_outputs
quoted_outputs.STORED = Path(sys.argv[1])
options = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--nbval-lax", sys.argv[2]]
compared = pytest.main([*options, "-x"])
written = pytest.main([*options, "--write-outputs"])
print(repr(compared), repr(written))
"""
DEMOS = f"""# %% [markdown] id="sizes_text"
# The state of a model takes 48.0 GiB.

# %% id="timed" tags=["demo", "{TAG}"]
import time
print(f"4 ranks took {{time.process_time():.1f}} s")

# %% id="sizes" tags=["demo", "{TAG}"]
print("47.9 GiB")

"""


def test_nbval_fails_a_stored_output_that_is_wrong_and_write_outputs_corrects_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nbval", reason="NOT TESTED HERE: nbval, which is not installed")
    course = shutil.copytree(SMALL, tmp_path / "course")
    text = course / "solutions" / "91_small" / "91_small.py"
    exercises, _, _ = text.read_text(encoding="utf-8").partition('# %% id="plot"')
    text.write_text(DEMOS + exercises, encoding="utf-8")
    shutil.copy(SMALL.parents[2] / "solutions" / "conftest.py", course / "solutions")
    stored = tmp_path / "stored" / "91_small.json"
    stored.parent.mkdir()
    before = {"timed": [{"stdout": ["4 ranks took <time>", ""]}], "sizes": [{"stdout": ["48.0 GiB", ""]}]}
    stored.write_text(json.dumps(before), encoding="utf-8")
    monkeypatch.setenv("DLO_COURSE", str(course))
    monkeypatch.setenv("PYTHONPATH", str(SMALL.parents[2]), prepend=os.pathsep)
    for name in ("CI", "BUILD_NUMBER"):  # pytest repeats whole messages in its summary where they are set
        monkeypatch.delenv(name, raising=False)

    command = [sys.executable, "-c", RUN, str(stored.parent), str(text.parent)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    said = done.stdout + done.stderr
    assert said.splitlines()[-1] == "<ExitCode.TESTS_FAILED: 1> <ExitCode.OK: 0>", said
    compared, _, written = said.partition("1 failed, 1 passed in")
    assert compared.count("Cell outputs differ") == 1, said
    assert "'48.0 GiB\\n' == '47.9 GiB\\n'" in compared, said
    assert "91_small: the output of sizes has no 48.0 any more: correct the text" in written
    after = json.loads(stored.read_text(encoding="utf-8"))
    assert after == before | {"sizes": [{"stdout": ["47.9 GiB", ""]}]}
