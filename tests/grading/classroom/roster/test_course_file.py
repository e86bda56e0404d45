"""The course file: due dates in a stated zone, extensions, the rule for late work; each fault is one line."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.grading.classroom.gradebook.deadlines import Deadlines
from dlo_lib.grading.classroom.roster.course_file import FILE, Amount, CourseFile, Duration, read_course_file

LAB = "13_dp_limit"


@pytest.fixture
def read(tmp_path: Path):
    def from_text(text: str) -> CourseFile:
        (tmp_path / FILE).write_text(text, encoding="utf-8")
        return read_course_file(tmp_path)

    return from_text


def deadlines(file: CourseFile) -> Deadlines:
    return Deadlines(file, LAB, file.of(LAB).due)


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text)


def test_a_course_without_a_file_has_no_rule(tmp_path: Path) -> None:
    file = read_course_file(tmp_path)
    assert not file.exists
    assert not file.rule(LAB).has_penalty
    assert not file.rule(LAB).replaces
    assert file.quiz_explain == "after due"


@pytest.mark.parametrize(
    ("due", "moment"),
    [
        ("2026-11-30T18:00:00", "2026-11-30T17:00"),
        ("2026-07-01T18:00:00", "2026-07-01T16:00"),
        ("2026-11-30T18:00:00+05:30", "2026-11-30T12:30"),
        ("2026-11-30T18:00:00Z", "2026-11-30T18:00"),
        ("2026-11-30 18:00:00", "2026-11-30T17:00"),
        ("2026-11-30", "2026-11-30T23:00"),  # the end of that day in Paris
        ('"2026-11-30T18:00+01:00"', "2026-11-30T17:00"),
        ('"2026-11-30"', "2026-11-30T23:00"),
    ],
)
def test_a_due_date_is_read_in_its_zone(read, due: str, moment: str) -> None:
    file = read(f'timezone = "Europe/Paris"\n[labs.13]\ndue = {due}\n')
    assert file.of(LAB).due == utc(moment).replace(tzinfo=UTC)


def test_the_rule_of_a_lab_replaces_keys_of_the_rule_of_all_labs(read) -> None:
    file = read(
        '[late]\nper_day = "10 %"\nat_most = "50 %"\ngrace = "15 minutes"\n[labs.13.late]\nper_day = 2\n'
    )
    assert file.rule(LAB).per_day == Amount(2.0)
    assert file.rule(LAB).at_most == Amount(50.0, percent=True)
    assert file.rule("10_collectives").per_day == Amount(10.0, percent=True)
    assert file.rule("10_collectives").grace == Duration(seconds=900)


def test_each_student_has_an_own_due_date(read) -> None:
    found = deadlines(
        read(
            'timezone = "Europe/Paris"\n[labs.13]\ndue = 2026-10-24T18:00:00\n'
            'extensions = { ada = 2026-10-27T12:00:00, blaise = "2 days", chloe = "36 hours" }\n'
        )
    )
    # The clocks go back on 25 October: two days later it is 18:00 again, 36 hours later it is 05:00.
    assert found.of("dan") == utc("2026-10-24T16:00+00:00")
    assert found.of("ada") == utc("2026-10-27T11:00+00:00") == found.last
    assert found.of("blaise") == utc("2026-10-26T17:00+00:00")
    assert found.of("chloe") == utc("2026-10-26T04:00+00:00")


@pytest.mark.parametrize(
    ("submitted", "days", "penalty"),
    [
        ("2026-10-24T16:00", 0, 0),
        ("2026-10-24T16:15", 0, 0),  # within the grace
        ("2026-10-24T16:16", 1, 2),
        ("2026-10-25T17:00", 1, 2),  # 25 hours later it is 18:00 of the next day
        ("2026-10-25T17:01", 2, 4),
        ("2026-10-28T17:00", 4, 8),
        ("2026-10-29T17:00", 5, 9),  # at most 45 %
        ("2026-10-31T17:00", 7, 9),
        ("2026-10-31T17:01", 8, 15),  # closed: no points
    ],
)
def test_a_penalty_counts_the_days_of_the_calendar(read, submitted: str, days: int, penalty: float) -> None:
    found = deadlines(
        read(
            'timezone = "Europe/Paris"\n[late]\nper_day = "10 %"\nat_most = "45 %"\ngrace = "15 min"\n'
            'closed_after = "7 days"\n[labs.13]\ndue = 2026-10-24T18:00:00\n'
        )
    )
    assert found.days_late("ada", utc(submitted)) == days
    assert found.penalty("ada", utc(submitted), 15.0, 20.0) == penalty
    assert found.penalty("ada", utc(submitted), 1.0, 20.0) == min(1, penalty)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[late", "is not TOML"),
        ("timezone = 'Paris'", "timezone is 'Paris': write a name of the IANA database"),
        ("timezone = 1", "timezone is 1: write"),
        ("time_zone = 'UTC'", "unknown key time_zone: did you mean timezone?"),
        ("[late]\nperday = 1", "unknown key late.perday: did you mean per_day?"),
        (
            "[late]\nper_day = '10'",
            "late.per_day is '10': write a number of points such as 1",
        ),
        ("[late]\nper_day = '110 %'", "late.per_day is '110 %'"),
        ("[late]\nper_day = -1", "late.per_day is -1"),
        ("[late]\nper_day = true", "late.per_day is True"),
        ("[late]\nper_day = nan", "late.per_day is nan"),
        ("[late]\ngrace = 15", 'late.grace is 15: write a duration such as "15 minutes"'),
        ("[late]\nreplaces = 'no'", "late.replaces is 'no': write true | false"),
        ("late = 1", "late is 1: write a table, [late]"),
        ("[quiz]\nexplain = 'soon'", 'quiz.explain is \'soon\': write "at once" | "after due" | "never"'),
        ("[labs.99]\ndue = 2026-11-30", 'labs.99: unknown lab "99"'),
        ("[labs.13]\n[labs.dp_limit]", "13_dp_limit has two tables: remove one"),
        ("[labs.13]\ndue = 2026-11-30T18:00:00", "labs.13.due has no time zone: add timezone = "),
        (
            "[labs.13]\ndue = 'tomorrow'",
            "labs.13.due is 'tomorrow': write a time such as 2026-11-30T",
        ),
        ("[labs.13]\ndue = 18:00:00", "labs.13.due is 18:00:00: write a time"),
        (
            "timezone = 'Europe/Paris'\n[labs.13]\ndue = 2027-03-28T02:30:00",
            "2027-03-28 02:30:00 does not exist in Europe/Paris, because the clocks change: write "
            "2027-03-28T02:30:00+01:00 or 2027-03-28T02:30:00+02:00",
        ),
        (
            "timezone = 'Europe/Paris'\n[labs.13]\ndue = 2026-10-25T02:30:00",
            "exists twice in Europe/Paris, because the clocks change: write "
            "2026-10-25T02:30:00+02:00 or 2026-10-25T02:30:00+01:00",
        ),
        (
            "[labs.13]\ndue = 2026-11-30T18:00:00Z\nextensions = { ada = 2026-11-29T18:00:00Z }",
            "labs.13.extensions.ada ends before the due date",
        ),
        (
            "[labs.13]\nextensions = { ada = 'two days' }",
            "labs.13.extensions.ada is 'two days': write a",
        ),
        ("[labs.13]\nextensions = { ada = '2 dags' }", 'or a duration such as "2 days"'),
    ],
)
def test_a_fault_is_one_line_with_the_cure(read, tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UserError) as refusal:
        read(text)
    message = str(refusal.value)
    assert said in message
    assert message.startswith(str(tmp_path / FILE))
    assert "\n" not in message
