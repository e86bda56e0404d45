"""The time of a submission is read in every form in which nbgrader writes it, and no zone is guessed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from dlo_lib.grading.classroom.collect.arrivals import from_exchange
from dlo_lib.grading.classroom.gradebook.nbgrader_course import open_course
from dlo_lib.grading.classroom.gradebook.submission_copy import staged_copy
from dlo_lib.grading.lab.course import find_lab, source_labs
from dlo_lib.grading.lab.times import UnknownZone, utc_time
from tests.grading.small_class import LAB


@pytest.mark.parametrize(
    ("text", "zone", "hour"),
    [
        ("2026-07-01 12:00:00.000001 UTC", "UTC", 12),
        ("2026-07-01 12:00:00", "Europe/Paris", 12),
        ("2026-07-01T12:00:00Z", "UTC", 12),
        ("2026-07-01 12:00:00 +0200", "UTC", 10),
        ("2026-07-01 12:00:00.5 +02:00", "UTC", 10),
        ("2026-07-01 12:00:00 -0330", "UTC", 15.5),
        ("2026-07-01 12:00:00 Europe/Paris", "UTC", 10),
        ("2026-07-01 12:00:00.123 CEST", "Europe/Paris", 10),
        ("2026-01-01 12:00:00 CET", "Europe/Paris", 11),
    ],
)
def test_a_time_is_read_in_its_zone(text: str, zone: str, hour: float) -> None:
    found = utc_time(text, zone).replace(microsecond=0)
    assert found - found.replace(hour=0, minute=0) == timedelta(hours=hour)


@pytest.mark.parametrize(
    ("name", "zone"), [("CEST", "UTC"), ("EDT", "Europe/Paris"), ("CET", "Europe/Paris")]
)
def test_an_abbreviation_that_the_exchange_does_not_use_then_is_refused(name: str, zone: str) -> None:
    with pytest.raises(UnknownZone, match=f"the time zone {name} is not known"):
        utc_time(f"2026-07-01 12:00:00 {name}", zone)  # in July, Paris has CEST and not CET


@pytest.mark.parametrize(
    "text",
    [
        "",
        "yesterday",
        "2026-13-01 12:00:00 UTC",
        "12:00",
        "2026-07-01",
        "9999-12-31 23:59:59 -1400",
        "0001-01-01 00:00:00 +1400",
        "2026-07-01 12:00:00 +9900",
    ],
)
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        utc_time(text)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("2026-07-01 12:00:00.000000 CEST", ""),
        ("2026-07-01 12:00:00 +0200", ""),
        ("2026-07-01 12:00:00 EDT", "the time zone EDT is not known"),
    ],
)
def test_an_exchange_in_another_zone_is_read_in_summer(course: Path, name: str, said: str) -> None:
    with open(course / "nbgrader_config.py", "a", encoding="utf-8") as config:
        config.write('\nc.Exchange.timezone = "Europe/Paris"\n')
    place = course.parent / "exchange" / "dlo" / "inbound" / f"ada+{LAB}+{name}+nonce"
    place.mkdir()
    (place / "small.ipynb").write_text("{}")
    (arrival,) = from_exchange(open_course(course), find_lab(LAB, source_labs()))
    assert arrival.submitted == (None if said else datetime(2026, 7, 1, 10))
    assert arrival.refused.startswith(said)
    assert bool(arrival.refused) == bool(said)


def test_a_time_in_the_future_is_noted(course: Path) -> None:
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    place = (
        course.parent / "exchange" / "dlo" / "inbound" / f"ada+{LAB}+{tomorrow:%Y-%m-%d %H:%M:%S} UTC+nonce"
    )
    place.mkdir()
    (place / "small.ipynb").write_text("{}")
    (arrival,) = from_exchange(open_course(course), find_lab(LAB, source_labs()))
    assert arrival.notes == ("the time that it states is in the future",)


@pytest.mark.parametrize(
    ("written", "staged"),
    [("2026-07-01 12:00:00 +0200", "2026-07-01 10:00:00.000000 UTC"), ("2026-07-01 12:00:00 EDT", None)],
)
def test_nbgrader_gets_the_time_in_utc(tmp_path: Path, written: str, staged: str | None) -> None:
    """nbgrader's parser takes +0200 for 200 seconds, and EDT for UTC."""
    notebook = tmp_path / "lab" / "small.ipynb"
    notebook.parent.mkdir()
    for file in (notebook, tmp_path / "rebuilt.ipynb"):
        file.write_text("{}")
    (notebook.parent / "timestamp.txt").write_text(written)
    with staged_copy("ada", notebook, tmp_path / "rebuilt.ipynb") as folder:
        copy = folder / "ada" / "lab" / "timestamp.txt"
        assert (copy.read_text() if copy.exists() else None) == staged
