"""Endless output, and output with terminal or page commands: it is counted, discarded, and has no effect."""

from __future__ import annotations

from pathlib import Path

from hostile.case import PLAIN, REST, Family, Notebook, cell, own_cell

LOUD = Family()
case = LOUD.case


@case("GRADED_WARN", PLAIN, "long output was cut", row="12")
def two_hundred_megabytes_of_output(notebook: Notebook, folder: Path) -> None:
    notebook["cells"].append(own_cell("for _ in range(200): print('x' * 10**6)"))


@case("GRADED_WARN", PLAIN, "ended the process: it was left out", row="12")
def endless_output(notebook: Notebook, folder: Path) -> None:
    notebook["cells"].append(own_cell("while True: print('x' * 1000)"))


@case("GRADED", PLAIN)
def binary_output_past_python(notebook: Notebook, folder: Path) -> None:
    text = (
        "import os\nfor fd in (0, 1, 2):\n    for _ in range(200): os.write(fd, bytes(range(256)) * 4096)\n"
    )
    notebook["cells"].append(own_cell(text + "print('\\x1b[2J\\x1b]0;owned\\x07\\0')"))


@case("GRADED_WARN", PLAIN, "long output was cut")
def children_that_print(notebook: Notebook, folder: Path) -> None:
    notebook["cells"].append(
        own_cell("!yes | head -c 1000000\nimport subprocess\nsubprocess.run(['seq', '100000'])")
    )


@case("GRADED", REST, "raised ValueError")
def messages_with_markup(notebook: Notebook, folder: Path) -> None:
    text = "[red]owned[/red] <script>alert(1)</script> \\x1b[31m {points} %s =cmd|' /C calc'!A0"
    cell(notebook, "scale")["source"] = f"def absmax_scale(x):\n    raise ValueError({text!r})"


@case("GRADED", PLAIN)
def two_dozen_figures(notebook: Notebook, folder: Path) -> None:
    text = "import matplotlib.pyplot as plt\nfor n in range(24): plt.figure(); plt.plot(range(n))\nplt.show()"
    notebook["cells"].append(own_cell(text))
