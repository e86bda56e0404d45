"""`dlo`, the command line. Bad input gives one line on stderr and exit status 2.

``app`` holds the commands; ``course``, ``grade``, ``make``, ``jobs`` and ``doctor`` hold groups of commands;
``reports`` and ``workspace`` hold shared functions; ``machine`` shows the doctor's findings in lab 00. The
room imports all other rooms inside the commands, because `dlo --help` must not import torch or nbgrader.
"""

from __future__ import annotations

import sys

from dlo_lib.errors import EXIT_BAD_INPUT

OTHER_SYSTEMS = (
    "open the course in its container (Docker Desktop, VS Code, Codespaces) or use WSL2; "
    'README.md, "On macOS and Windows"'
)


def main() -> None:
    """Entry point of the `dlo` command."""
    if sys.platform != "linux":
        print(f"dlo: the labs run on Linux, and this is {sys.platform}: {OTHER_SYSTEMS}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    from dlo_lib.torch_version import exit_if_torch_too_old

    exit_if_torch_too_old("dlo")
    from dlo_lib.cli.app import app
    from dlo_lib.usage import leave_with

    leave_with(app, "dlo")
