"""A command under any locale."""

import os
import subprocess
import sys

SAYS = """
import typer
from dlo_lib.base.usage import leave_with
app = typer.Typer()
app.command()(lambda: print("3 proofs\\u2026 \\u2713"))
leave_with(app, "says")
"""


def test_a_character_that_the_locale_cannot_encode_ends_no_command():
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", SAYS], env=os.environ | ascii_only, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"3 proofs? ?\n", b"")
