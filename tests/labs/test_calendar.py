"""The calendar of the five-day class has every core lab, enough time for each, and breaks. The README's
table lists the labs."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from dlo_lib.grading.lab.course import course_root, source_labs

ROW = re.compile(r"^\| (\d\d):(\d\d) \| (\d\d):(\d\d) \| (.+?) \|$", re.MULTILINE)
LONGEST_WITHOUT_BREAK = 120  # minutes


def days() -> list[list[tuple[int, int, str]]]:
    """Return the rows of each day: minutes from midnight at its start and its end, and what happens."""
    text = (course_root() / "solutions" / "CALENDAR.md").read_text(encoding="utf-8")
    return [
        [(60 * int(a) + int(b), 60 * int(c) + int(d), what) for a, b, c, d, what in ROW.findall(day)]
        for day in text.split("\n## ")[1:]
    ]


def test_there_are_five_days_without_gaps():
    assert len(days()) == 5
    for day in days():
        assert all(begin < end for begin, end, _ in day)
        assert [end for _, end, _ in day[:-1]] == [begin for begin, _, _ in day[1:]]


def test_there_are_breaks():
    for day in days():
        since = day[0][0]
        for begin, end, what in day:
            if what in ("Break", "Lunch"):
                since = end
            assert end - since <= LONGEST_WITHOUT_BREAK, f"{what} ends {end - since} min after {begin}"


@pytest.mark.parametrize("lab", source_labs(), ids=lambda lab: lab.directory)
def test_a_lab_has_the_time_that_it_takes(lab):
    given = Counter[int]()
    for day in days():
        for begin, end, what in day:
            if found := re.match(r"Lab (\d\d)", what):
                given[int(found[1])] += end - begin
    if lab.core or lab.number in given:
        assert given[lab.number] >= lab.minutes


def test_the_readme_lists_each_lab_with_its_title_and_its_minutes():
    text = (course_root() / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| (\d\d) \| (.+) \| (\d+) \|$", text, re.MULTILINE)
    assert listed == [(f"{lab.number:02}", lab.title, str(lab.minutes)) for lab in source_labs()]
