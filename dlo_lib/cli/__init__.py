"""`dlo`, the command line: bad input is one line on stderr and exit status 2."""

from __future__ import annotations

import sys

from dlo_lib.errors import EXIT_BAD_INPUT, UserError


def main() -> None:
    """Entry point of the `dlo` command."""
    from dlo_lib.cli.app import app
    from dlo_lib.usage import run_app

    try:
        status = run_app(app, "dlo")
        sys.exit(status if isinstance(status, int) else 0)
    except UserError as error:
        print(f"dlo: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
