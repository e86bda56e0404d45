"""The outputs that the text of a lab quotes, kept in ``outputs/NN_name.json`` and compared by nbval.

A cell has the tag ``nbval-check-output`` in its header if the text repeats its printed numbers, or says what
is true because of them. Its output, with times and measured sizes replaced by the rules of ``sanitize.cfg``,
is in the lab's file, under the id of the cell: one entry for each stream (``stdout``) and each displayed
object (``text/plain``), as lines. ``pytest --nbval-lax solutions/NN_name --write-outputs`` writes the file.
Its diff shows which numbers changed, and :func:`stale_numbers` where the text still has the old ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import nbformat

from dlo_lib.grading.lab.clear_solutions import CHECKED_TAG as TAG

STORED = Path(__file__).with_name("outputs")
RULES = Path(__file__).with_name("sanitize.cfg")
HEADER = re.compile(r'^# %% (?=.*\bid="([^"]+)").*$', re.MULTILINE)
NUMBER = re.compile(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?")

Outputs = dict[str, list[dict[str, list[str]]]]
"""Cell id → its outputs, each one name → lines."""


def tagged_cells(text: str) -> list[str]:
    """The ids of the cells with the tag in the text of a lab, in order."""
    return [found[1] for found in HEADER.finditer(text) if f'"{TAG}"' in found[0]]


def numbers(text: str) -> set[str]:
    """The numbers in ``text``, without the commas between thousands."""
    return {found.replace(",", "").rstrip(".") for found in NUMBER.findall(text)}


def prose(text: str) -> str:
    """The Markdown cells of the text of a lab."""
    cells = re.split(r"^# %%", text, flags=re.MULTILINE)
    return "\n".join(cell for cell in cells if cell.startswith(" [markdown]"))


def stored_outputs(lab: str) -> Outputs:
    """What is stored for the lab in the folder ``lab``; empty if there is no file."""
    file = STORED / f"{lab}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def write_outputs(lab: str, outputs: Outputs) -> None:
    """Store the outputs of a lab. Without a tagged cell it has no file."""
    file = STORED / f"{lab}.json"
    if outputs:
        STORED.mkdir(exist_ok=True)
        file.write_text(json.dumps(outputs, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    else:
        file.unlink(missing_ok=True)


def sanitized(text: str) -> str:
    """``text`` with what differs from run to run replaced, as nbval does it."""
    rules = RULES.read_text(encoding="utf-8")
    for pattern, replacement in re.findall(r"^regex: (.*)$\n^replace: (.*)$", rules, re.MULTILINE):
        text = re.sub(pattern, replacement, text)
    return text


def as_stored(outputs: Iterable[Mapping]) -> list[dict[str, list[str]]]:
    """The outputs of a cell that ran, in the form of the file: text only, sanitised."""
    entries = []
    for output in outputs:
        shown = {output["name"]: output["text"]} if "text" in output else output.get("data", {})
        entries += [
            {name: sanitized(text).split("\n")}
            for name, text in shown.items()
            if name in ("stdout", "stderr", "text/plain")
        ]
    return entries


def as_cell_outputs(entries: Iterable[Mapping[str, list[str]]]) -> list[nbformat.NotebookNode]:
    """The inverse of :func:`as_stored`: the outputs of a cell of a notebook."""
    made = []
    for entry in entries:
        for name, lines in entry.items():
            text = "\n".join(lines)
            made.append(
                nbformat.v4.new_output("display_data", {name: text})
                if "/" in name
                else nbformat.v4.new_output("stream", name=name, text=text)
            )
    return made


def faults_of_tags(lab: str, text: str) -> list[str]:
    """Where the tags of a lab's text and its file disagree, one sentence each with the cure."""
    tagged, stored = tagged_cells(text), stored_outputs(lab)
    write = f"run: pytest --nbval-lax solutions/{lab} --write-outputs"
    lines = [
        f"{lab}: no output is stored of the cell {each}: {write}" for each in tagged if each not in stored
    ]
    lines += [
        f"{lab}: {each} has an output in {STORED.name}/, and not the tag {TAG}: {write}"
        for each in stored
        if each not in tagged
    ]
    for each, entries in stored.items():
        shown = ["\n".join(part) for entry in entries for part in entry.values()]
        if [sanitized(text) for text in shown] != shown:
            lines.append(f"{lab}: the output of {each} is not as {RULES.name} makes it: {write}")
    return lines


def stale_numbers(lab: str, text: str, before: Outputs, after: Outputs) -> list[str]:
    """The numbers that an output had and has no more, and that the text still has, one line for each cell."""
    quoted = numbers(prose(text))
    lines = []
    for cell in before.keys() & after.keys():
        gone = (numbers(json.dumps(before[cell])) - numbers(json.dumps(after[cell]))) & quoted
        if gone:
            lines.append(
                f"{lab}: the output of {cell} has no {', '.join(sorted(gone))} any more: correct the text"
            )
    return sorted(lines)
