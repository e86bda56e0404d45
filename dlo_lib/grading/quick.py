"""A quicker start for processes of our own that read notebooks."""

from __future__ import annotations

import sys


def leave_grammars_out() -> None:
    """Let this process do without the grammars of international URLs, which jsonschema would build when it is first imported (1.2 s).

    No format of nbgrader's or nbformat's has such a URL. jsonschema does without the package that holds them where it is not installed.
    """
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
