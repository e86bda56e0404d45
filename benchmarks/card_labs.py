"""Runs the reference labs whose cells measure a GPU, without Jupyter, and keeps what each cell shows.

    python -m benchmarks.card_labs FOLDER [--lab NAME ...] [--limit 280] [--reduced]

Each lab runs in one process: the cells of its text, in order, in one namespace, beside a copy of what a
student gets. Cells that check answers are left out, because they judge in sandboxes. FOLDER/NAME has the
figures, FOLDER/NAME.json the seconds and the text of each cell with the machine, the date and the software.
FOLDER/NAME.toml has the texts as ``show_stored`` of ``labkit.stored_results`` reads them. A second run leaves
out the labs that are complete.

Exit status: 0, or 1 if a cell failed or a lab was not complete.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LABS = ("05_fused_kernels", "01_first_device", "02_profiler")
"""In the order of value: those whose answer is that of one GPU."""
SEVERAL_CARDS = (
    "15_fsdp",
    "16_fsdp_optimised",
    "19_tensor_parallel",
    "20_context_parallel",
    "21_expert_parallel",
)
"""Their measurements compare ranks, each of which needs its own GPU."""
SIZES = {
    "01_first_device": {"DLO_LARGEST": "8192", "DLO_CARD_GIB": "80"},
    "05_fused_kernels": {"DLO_ROWS": "16384"},
}
"""The sizes of a GPU: those of the notebooks are a CPU's, at which a GPU waits for Python."""
_HEADER = re.compile(r"^# %%(?P<kind> \[markdown\])?(?P<rest>.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Cell:
    """A cell of code: its id, its text and the number of its first line in the source of the lab."""

    name: str
    text: str
    line: int


def cells(source: str) -> list[Cell]:
    """Return the cells of code of a lab's text (py:percent), without those that check, ask a quiz or have
    sliders."""
    headers = list(_HEADER.finditer(source))
    found = []
    for header, following in zip(headers, [*headers[1:], None]):
        text = source[header.end() : following.start() if following else len(source)]
        name = re.search(r'\bid="([\w-]+)"|"grade_id": "([\w-]+)"', header["rest"])
        if header["kind"] or '"grade": true' in header["rest"] or name is None:
            continue
        if "lab.quiz()" in text or re.search(r"^explore\(", text, re.MULTILINE):
            continue
        found.append(Cell(name[1] or name[2], text, source.count("\n", 0, header.end()) + 1))
    return found


def run_cell(cell: Cell, namespace: dict[str, Any], figures: Path, file: str) -> tuple[str, bool]:
    """Run a cell as a notebook does; return what it shows, and whether it ran without an error.

    The value of the last line is shown too: of a figure, its alternative text, and the picture is saved as
    ``figures/CELL.png``.
    """
    source = "\n" * (cell.line - 1) + cell.text  # the lines of ``file``, where Triton reads a kernel's text
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        try:
            tree = ast.parse(source, file)
            last = tree.body[-1] if tree.body else None
            if not isinstance(last, ast.Expr):
                exec(compile(tree, file, "exec"), namespace)
            else:
                tree.body.pop()
                exec(compile(tree, file, "exec"), namespace)
                value = eval(compile(ast.Expression(last.value), file, "eval"), namespace)
                _show(value, figures / cell.name)
        except Exception:  # noqa: BLE001 - the other cells run
            print(traceback.format_exc(limit=-3))
            return shown.getvalue(), False
    return shown.getvalue(), True


def _show(value: Any, to: Path) -> None:
    if hasattr(value, "alternative_text"):
        to.parent.mkdir(parents=True, exist_ok=True)
        value.savefig(to.with_suffix(".png"), bbox_inches="tight", facecolor=value.get_facecolor())
        print(f"[figure: {value.alternative_text()}]")
    elif value is not None:
        print(repr(value))


def run_lab(name: str, folder: Path) -> int:
    """Run the lab in this process; write its cells; return the exit status."""
    import torch

    to = folder / f"{name}.json"
    here = folder / "cache" / name
    shutil.copytree(ROOT / "labs" / name, here, dirs_exist_ok=True)
    os.chdir(here)
    sys.path.insert(0, str(here))
    file = str(ROOT / "solutions" / name / f"{name}.py")
    # Ranks receive functions of the notebook by value, as those of __main__.
    notebook = ModuleType("__main__")
    sys.modules["__main__"] = notebook
    gpu = torch.cuda.is_available()
    shown: dict[str, dict[str, Any]] = {}
    found = {
        "lab": name,
        "machine": torch.cuda.get_device_name() if gpu else "a CPU",
        "date": time.strftime("%Y-%m-%d"),
        "software": f"torch {torch.__version__}" + (f", CUDA {torch.version.cuda}" if gpu else ""),
        "sizes": {key: os.environ[key] for key in SIZES.get(name, {}) if key in os.environ},
        "complete": False,
        "cells": shown,
    }
    failed = 0
    for cell in cells(Path(file).read_text(encoding="utf-8")):
        began = time.monotonic()
        text, right = run_cell(cell, notebook.__dict__, folder / name, file)
        failed += not right
        seconds = round(time.monotonic() - began, 1)
        shown[cell.name] = {"shows": text, "seconds": seconds, "failed": not right}
        to.write_text(json.dumps(found, indent=1), encoding="utf-8")
        if text:
            print(f"== {name}: {cell.name} ({seconds} s)\n{text}", flush=True)
    found["complete"] = not failed
    shows = {cell: each["shows"] for cell, each in shown.items() if each["shows"] and not each["failed"]}
    (folder / f"{name}.toml").write_text(as_toml(found, shows), encoding="utf-8")
    to.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return int(failed > 0)


def as_toml(found: Mapping[str, Any], shows: Mapping[str, str]) -> str:
    """Return what ``show_stored`` of ``dlo_lib.labkit.stored_results`` reads.

    Args:
        found: ``machine``, ``date`` and ``software``.
        shows: the text of each cell, by its id.
    """
    lines = [f"{key} = {json.dumps(found[key])}" for key in ("machine", "date", "software")]
    lines += ["", "[shows]"]
    for cell, text in shows.items():
        escaped = text.replace("\\", "\\\\").replace('"', '\\"')
        lines.append(f'{cell} = """\n{escaped}"""')
    return "\n".join(lines) + "\n"


def run_labs(folder: Path, names: list[str], limit: float, reduced: bool) -> int:
    """Run each lab in a process until the time is over; return the exit status."""
    end = time.monotonic() + limit
    lines = []
    for name in names:
        kept = folder / f"{name}.json"
        if kept.exists() and json.loads(kept.read_text(encoding="utf-8"))["complete"]:
            lines.append(f"{name}: complete before")
            continue
        left = end - time.monotonic()
        if left < 10:
            lines.append(f"{name}: no time left")
            continue
        sizes = _reduced(name) if reduced else SIZES.get(name, {})
        command = [sys.executable, "-m", "benchmarks.card_labs", str(folder), "--one", name]
        try:
            status = subprocess.run(
                command, cwd=ROOT, env={**os.environ, **sizes, "MPLBACKEND": "agg"}, timeout=left
            ).returncode
        except subprocess.TimeoutExpired:
            status = 124
        lines.append(f"{name}: " + {0: "complete", 124: "stopped at the limit"}.get(status, "cells failed"))
    print("need several cards, which this command does not measure: " + ", ".join(SEVERAL_CARDS))
    print("\n".join(lines))
    return int(any("complete" not in line for line in lines))


def _reduced(name: str) -> dict[str, str]:
    """Return the variables of the small sizes of a lab."""
    import tomllib

    text = (ROOT / "labs" / name / "lab.toml").read_text(encoding="utf-8")
    return {key: str(value) for key, value in tomllib.loads(text).get("reduced", {}).items()}


def main() -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(description="Run the labs that measure a GPU.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lab", action="append", choices=LABS, help="only this lab; may be repeated")
    parser.add_argument("--limit", type=float, default=280.0, metavar="SECONDS", help="of all labs")
    parser.add_argument("--reduced", action="store_true", help="the small sizes of the tests")
    parser.add_argument("--one", choices=LABS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.one:
        return run_lab(arguments.one, folder)
    return run_labs(folder, arguments.lab or list(LABS), arguments.limit, arguments.reduced)


if __name__ == "__main__":
    sys.exit(main())
