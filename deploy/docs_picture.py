#!/usr/bin/env python3
"""Make the picture of a check for the first page: `.venv/bin/python deploy/docs_picture.py`.

A copy of a lab runs with a plausible wrong answer, and headless Chromium takes a picture of the answer and of
the message below its check. Nothing in the picture is drawn by hand. Run it on an idle machine, because the
picture shows the time of the check.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "check.png"
LAB, NOTEBOOK = "14_zero", "zero.ipynb"
BROWSER = shutil.which("chromium")
COLOURS = 48
SETUP, GIVEN, ANSWER, CHECK = "setup", "pieces", "stage1", "test_stage1"
WRONG = '''\
class ShardedOptimizer:
    """An optimiser whose state is divided over the ranks."""

    def __init__(self, parameters, make_optimizer):
        self.optimizer = make_optimizer(list(parameters))

    def step(self):
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()
'''
ANSWERS = {GIVEN: f'lab.use_reference("{GIVEN}")', ANSWER: WRONG}
"""The text of cells. Students have this file too: no answer is in it."""


def executed(folder: Path) -> nbformat.NotebookNode:
    """Return the notebook of the lab with the answer and its check only, run in a copy of the lab."""
    lab = folder / LAB
    shutil.copytree(ROOT / "labs" / LAB, lab)
    notebook = nbformat.read(lab / NOTEBOOK, as_version=4)
    cells = {cell.id: cell for cell in notebook.cells}
    notebook.cells = [cells[name] for name in (SETUP, GIVEN, ANSWER, CHECK)]
    for name, text in ANSWERS.items():
        cells[name].source = text
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(lab)}}).execute()
    notebook.cells = [cells[ANSWER], cells[CHECK]]
    return notebook


def photograph(page: Path) -> None:
    """Save the picture of the cells on a page."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        view = browser.new_page(viewport={"width": 860, "height": 900}, device_scale_factor=1.5)
        view.goto(page.as_uri(), wait_until="commit")
        picture = Image.open(io.BytesIO(view.locator("main").screenshot()))
        picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(TARGET, optimize=True)
        browser.close()


def main() -> int:
    """Make the picture; return the exit status."""
    if BROWSER is None:
        print("docs_picture: no chromium here: apt-get install chromium", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        notebook = executed(Path(folder))
        body, _ = HTMLExporter(template_name="lab").from_notebook_node(notebook)
        page = Path(folder) / "page.html"
        page.write_text(body, encoding="utf-8")
        photograph(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
