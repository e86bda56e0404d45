"""Answers to labs 10 and 15 that avoid the work: right results from another source, messages with other
numbers, tables for the sizes that a check uses, memory that is freed only while it is measured.

Each is judged with the reference solution's other steps. It earns what its right values earn, and no more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlo_lib.grading.judge.judge import judge_answer
from dlo_lib.grading.judge.lab_zygote import zygote_for
from dlo_lib.grading.lab.source import LabSource, read_lab
from dlo_lib.grading.sandbox.host import Zygote

ROOT = Path(__file__).parents[3]
TRICK = re.compile(r"^# %% (\w+) (\{[^\n]*\})\n(.*?)(?=^# %% |\Z)", re.MULTILINE | re.DOTALL)
TRICKS = [
    (file.stem, title, json.loads(header), text.strip())
    for file in sorted((ROOT / "tests/grading/tricks").glob("*.py"))
    for title, header, text in TRICK.findall(file.read_text(encoding="utf-8"))
]


@pytest.fixture(scope="module")
def labs() -> Iterator[dict[str, tuple[LabSource, Zygote]]]:
    started: dict[str, tuple[LabSource, Zygote]] = {}
    yield started
    for _, zygote in started.values():
        zygote.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("directory", "title", "known", "answer"), TRICKS, ids=[f"{lab}-{title}" for lab, title, *_ in TRICKS]
)
def test_a_trick_earns_only_its_right_values(
    labs: dict[str, tuple[LabSource, Zygote]], directory: str, title: str, known: dict, answer: str
) -> None:
    if directory not in labs:
        lab = read_lab(ROOT / "solutions" / directory)
        labs[directory] = lab, zygote_for(lab)
    lab, zygote = labs[directory]
    report = judge_answer(lab, known["question"], answer, zygote)
    said = {check.name: check.message for check in report.checks}
    assert sum(check.points for check in report.checks) == known["earns"], said
