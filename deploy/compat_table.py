"""The page COMPATIBILITY.md: what `make compat` ran, lab by lab, for each pair of PyTorch and Python.

The results are kept in ``deploy/compat.json``. The page, the section of ``benchmarks/RESULTS.md`` and the
line in the README are written from it, so that a run of one pair replaces the results of that pair only.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD, PAGE, RESULTS, README = "deploy/compat.json", "COMPATIBILITY.md", "benchmarks/RESULTS.md", "README.md"
LABS = "labs"
OF_LABS = ("tests/labs/test_every_lab.py", "tests/labs/test_notebooks_run.py")
REFERENCE = "test_the_reference_scores_full_marks"
NOTEBOOK = "test_reference_notebook_runs"
NOT_RUN = "–"
HEADING = "## compat\n"
README_LINE = re.compile(r"^.*\[what was run\]\(COMPATIBILITY\.md\).*$", re.MULTILINE)

Record = dict[str, dict[str, Any]]
"""For each pair, such as "2.8.0/3.12": its releases, the results of its labs and rooms, its whole run."""


@dataclass(frozen=True)
class Run:
    """What pytest reported for one pair.

    Attributes:
        pair: such as "2.8.0/3.12".
        torch, python: the versions that ran, such as "2.8.0+cpu" and "3.12.1".
        packages: "pinned", or "newest".
        tests: the lines of ``--cpu-file``: ``test``, ``outcome`` and ``cpu``, in seconds.
        wall_s: seconds from the start to the end.
        whole: whether every lab and room was asked for.
    """

    pair: str
    torch: str
    python: str
    packages: str
    tests: list[dict[str, Any]]
    wall_s: float
    whole: bool


def add(record: Record, run: Run, rooms: Mapping[str, tuple[str, ...]]) -> None:
    """Put the results of a run into ``record``; those of another release of PyTorch or Python are dropped.

    ``rooms``: the files and folders of each room.
    """
    today = datetime.date.today().isoformat()
    releases = {"torch": run.torch, "python": run.python, "packages": run.packages}
    column = record.get(run.pair, {})
    if {name: column.get(name) for name in releases} != releases:
        column = {**releases, LABS: {}, "rooms": {}, "whole": None}
    record[run.pair] = column
    by_lab: dict[str, list[dict[str, Any]]] = {}
    by_room: dict[str, list[dict[str, Any]]] = {}
    for test in run.tests:
        file = test["test"].partition("::")[0]
        if file in OF_LABS and (lab := lab_of(test["test"])):  # the suite has tests of these files themselves
            by_lab.setdefault(lab, []).append(test)
        for room, places in rooms.items():
            if any(file == place or file.startswith(f"{place}/") for place in places):
                by_room.setdefault(room, []).append(test)
    for lab, tests in by_lab.items():
        column[LABS][lab] = {"date": today, **lab_result(lab, tests)}
    for room, tests in by_room.items():
        column["rooms"][room] = {"date": today, **counts(tests), "failures": failures(tests)}
    if run.whole:
        column["whole"] = {"date": today, "wall_s": round(run.wall_s), **counts(run.tests)}


def lab_of(test: str) -> str:
    """Return the lab of a test of the labs, such as 15_fsdp.

    >>> lab_of("tests/labs/test_every_lab.py::test_each_mutant_loses_its_points[15_fsdp-late]")
    '15_fsdp'
    """
    match = re.search(r"[\[-](\d\d_\w+)", test)
    return match[1] if match else ""


def lab_result(lab: str, tests: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the table shows of a lab: its points, the notebook, and the other proofs."""
    outcome = {NOTEBOOK: "", REFERENCE: ""}
    others = []
    for test in tests:
        name = test["test"].partition("::")[2].partition("[")[0]
        if name in outcome:
            outcome[name] = test["outcome"]
        else:
            others.append(test)
    return {
        "points": points_of(lab) if outcome[REFERENCE] == "passed" else None,
        "reference": outcome[REFERENCE],
        "notebook": outcome[NOTEBOOK],
        "others": len(others),
        "failures": failures(tests),
        "cpu_s": round(sum(test["cpu"] for test in tests)),
    }


def points_of(lab: str) -> float:
    """Return the points of a lab."""
    from dlo_lib.grading.lab.course import find_lab, source_folder, source_labs
    from dlo_lib.grading.lab.source import read_lab

    return read_lab(source_folder(find_lab(lab, source_labs()))).points


def counts(tests: list[dict[str, Any]]) -> dict[str, int]:
    """Return how many tests had each outcome, and their CPU time in seconds."""
    outcomes = [test["outcome"] for test in tests]
    return {
        **{outcome: outcomes.count(outcome) for outcome in ("passed", "failed", "skipped")},
        "cpu_s": round(sum(test["cpu"] for test in tests)),
    }


def failures(tests: list[dict[str, Any]]) -> list[str]:
    """Return the names of the tests that failed."""
    return sorted(test["test"] for test in tests if test["outcome"] == "failed")


# -- the record and its page


def read_record(root: Path = ROOT) -> Record:
    """Return what was run before; empty if nothing was."""
    path = root / RECORD
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write(record: Record, root: Path = ROOT) -> None:
    """Write the record, the page, the section of the results and the line of the README."""
    from dlo_lib.base.files import write_text

    results = (root / RESULTS).read_text(encoding="utf-8")
    readme = (root / README).read_text(encoding="utf-8")
    texts = {
        RECORD: json.dumps(record, indent=1, sort_keys=True, ensure_ascii=False) + "\n",
        PAGE: page(record),
        RESULTS: with_section(results, section(record)),
        README: README_LINE.sub(lambda _: summary(record), readme),
    }
    for name, text in texts.items():
        write_text(root / name, text)


def ordered(record: Record) -> list[tuple[str, dict[str, Any]]]:
    """Return the pairs by release of PyTorch, then by Python."""
    return sorted(record.items(), key=lambda item: (numbers(item[1]["torch"]), numbers(item[1]["python"])))


def numbers(version: str) -> list[int]:
    """Return the numbers of a version, to sort by."""
    return [int(part) for part in re.findall(r"\d+", version.partition("+")[0])]


def page(record: Record) -> str:
    """Return COMPATIBILITY.md."""
    pairs = ordered(record)
    labs = sorted({lab for _, column in pairs for lab in column[LABS]})
    rooms = list(dict.fromkeys(room for _, column in pairs for room in column["rooms"]))
    text = [
        "# What was run on which PyTorch and Python\n",
        "`make compat` writes this page from what it ran. `make compat ARGS=2.8` replaces one column.\n",
        "A lab shows the points that its reference solution gets from the judge, how many other proofs "
        "passed (the untouched notebook and idle functions get no points, each mutant loses those that it "
        "must lose), and ✓ if its reference notebook passes all checks in a kernel. The packages are those "
        "of `constraints.txt`; in the column with the newest packages, each is the newest release that "
        "`pyproject.toml` allows.\n",
        table("lab", labs, pairs, lambda column, lab: lab_cell(column[LABS].get(lab))),
        "The tests of the library, of the judge and of the notebook:\n",
        table("tests", rooms, pairs, lambda column, room: room_cell(column["rooms"].get(room))),
    ]
    failed = [f"- {title(column)}: `{test}`" for _, column in pairs for test in failed_in(column)]
    if failed:
        text.append("Failed:\n\n" + "\n".join(failed) + "\n")
    return "\n".join(text)


def table(what: str, rows: list[str], pairs: list[tuple[str, dict[str, Any]]], cell: Any) -> str:
    """Return a table with a row for each lab or room, and a column for each pair."""
    lines = [
        "| " + " | ".join([what, *(title(column) for _, column in pairs)]) + " |",
        "|---|" + "---|" * len(pairs),
        "| run on | " + " | ".join(dates(column, what == "lab") for _, column in pairs) + " |",
    ]
    lines += ["| " + " | ".join([row, *(cell(column, row) for _, column in pairs)]) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def title(column: dict[str, Any]) -> str:
    """Return the heading of a column."""
    newest = ", newest packages" if column["packages"] == "newest" else ""
    return f"{column['torch']}, Python {column['python']}{newest}"


def dates(column: dict[str, Any], of_labs: bool) -> str:
    """Return the day on which a column was run, or the first and the last one."""
    found = sorted({cell["date"] for cell in column[LABS if of_labs else "rooms"].values()})
    return " – ".join(dict.fromkeys([found[0], found[-1]])) if found else NOT_RUN


def lab_cell(result: dict[str, Any] | None) -> str:
    """Return the cell of a lab."""
    if result is None:
        return NOT_RUN
    points = f"{result['points'] or 0:g}"
    parts = [{"passed": f"{points} of {points}", "failed": "refused"}.get(result["reference"], NOT_RUN)]
    failed = sum(not re.search(f"{REFERENCE}|{NOTEBOOK}", test) for test in result["failures"])
    if result["others"]:
        parts.append(
            f"{failed} of {result['others']} proofs fail" if failed else f"{result['others']} proofs"
        )
    parts.append({"passed": "✓", "failed": "notebook fails"}.get(result["notebook"], "notebook not run"))
    return ", ".join(parts)


def room_cell(result: dict[str, Any] | None) -> str:
    """Return the cell of a room."""
    if result is None:
        return NOT_RUN
    failed = f"**{result['failed']} failed**, " if result["failed"] else ""
    skipped = f", {result['skipped']} skipped" if result["skipped"] else ""
    return f"{failed}{result['passed']} passed{skipped}"


def failed_in(column: dict[str, Any]) -> list[str]:
    """Return the tests of a pair that failed."""
    cells = [*column[LABS].values(), *column["rooms"].values()]
    return sorted({test for cell in cells for test in cell["failures"]})


def marks(column: dict[str, Any]) -> tuple[int, int]:
    """Return how many labs passed all their proofs and the notebook, and how many of them ran with both."""
    cells = column[LABS].values()
    ran = [cell for cell in cells if cell["reference"] and cell["notebook"]]
    return sum(not cell["failures"] for cell in ran), len(ran)


def section(record: Record) -> str:
    """Return the section of benchmarks/RESULTS.md."""
    lines = [
        HEADING,
        "`make compat` writes this section; [the page](../COMPATIBILITY.md) has it lab by lab. CPU time is "
        "the sum of the tests. A wall time is shown where all labs and rooms of a pair ran in one call.\n",
        "| PyTorch | Python | packages | run on | labs with full marks | tests of the rooms | CPU | wall |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for _, column in ordered(record):
        rooms, labs, whole = column["rooms"].values(), column[LABS], column["whole"]
        days = sorted({cell["date"] for cell in [*rooms, *labs.values()]})
        total = {name: sum(room[name] for room in rooms) for name in ("passed", "failed", "skipped", "cpu_s")}
        cpu = total["cpu_s"] + sum(lab["cpu_s"] for lab in labs.values())
        cells = [
            column["torch"],
            column["python"],
            column["packages"],
            " – ".join(dict.fromkeys([days[0], days[-1]])) if days else NOT_RUN,
            "{} of {}".format(*marks(column)) if marks(column)[1] else NOT_RUN,
            room_cell(total) if rooms else NOT_RUN,
            f"{cpu / 60:.0f} min",
            f"{whole['wall_s'] / 60:.0f} min, {whole['date']}" if whole else NOT_RUN,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def with_section(results: str, text: str) -> str:
    """Return RESULTS.md with its section replaced, or with one at its end."""
    before, found, after = results.partition(f"\n{HEADING}")
    if not found:
        return results.rstrip("\n") + "\n\n" + text
    end = re.search(r"^## ", after, re.MULTILINE)
    return before + "\n" + text + ("\n" + after[end.start() :] if end else "")


def summary(record: Record) -> str:
    """Return the line of the README. It tells how many labs are still to be run with a pair."""
    found = {short(column): marks(column) for _, column in ordered(record)}
    every = len({lab for column in record.values() for lab in column[LABS]})
    alike: dict[str, list[str]] = {}
    for name, (full, ran) in found.items():
        left = f" ({every - ran} still to run)" if ran < every else ""
        if ran:
            alike.setdefault(f"{full} of {ran}{left}", []).append(name)
    pairs = "".join(f"{result} on {', '.join(names)}; " for result, names in alike.items())
    return f"Labs with full marks, by PyTorch/Python: {pairs}see [what was run](COMPATIBILITY.md)."


def short(column: dict[str, Any]) -> str:
    """Return a column's releases, such as "2.8/3.12"."""
    return "/".join(".".join(map(str, numbers(column[name])[:2])) for name in ("torch", "python"))
