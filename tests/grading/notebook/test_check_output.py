"""The output of a check is short in the notebook, below the verdict, and whole in a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlo_lib.grading.notebook.check_output import CHARACTERS, LINES, CheckOutput


def test_short_output_is_shown_whole_and_makes_no_file(tmp_path: Path) -> None:
    output = CheckOutput(tmp_path / "out.txt")
    print("one", "two", file=output)
    assert output.shown() == "one two\n"
    assert not (tmp_path / "out.txt").exists()


@pytest.mark.parametrize("together", [False, True])
def test_many_lines_are_counted_and_stored(tmp_path: Path, together: bool) -> None:
    output = CheckOutput(tmp_path / "state" / "out.txt")
    lines = [f"line {number}\n" for number in range(70_000)]
    for text in ["".join(lines)] if together else lines:
        output.write(text)
    shown = output.shown().splitlines()
    assert shown[:LINES] == [line.rstrip() for line in lines[:LINES]]
    assert shown[LINES:] == [f"… 69,950 more lines, all of them in {tmp_path / 'state' / 'out.txt'}"]
    assert (tmp_path / "state" / "out.txt").read_text() == "".join(lines)


def test_one_long_line_is_cut(tmp_path: Path) -> None:
    output = CheckOutput(tmp_path / "out.txt")
    for _ in range(1000):
        output.write("x" * 1000)
    assert len(output.shown()) < CHARACTERS + 200
    assert (tmp_path / "out.txt").stat().st_size == 1_000_000
