"""Tables that leave the course as CSV: quoted by the rules of CSV, and no cell that a spreadsheet would run.

A spreadsheet takes a cell that begins with ``=``, ``+``, ``-`` or ``@`` for a formula, and a student chooses their own name and the names
of their files. Such a cell gets an apostrophe in front (OWASP, "CSV Injection"); numbers are left alone. The same rows give the same bytes:
UTF-8 without a byte order mark, which Moodle and every program reads; Excel wants to be told (*Data → From Text/CSV*, 65001).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

STARTS_A_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def csv_text(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """``header`` and ``rows`` as CSV with line feeds."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([[guarded(cell) for cell in row] for row in rows])
    return text.getvalue()


def guarded(cell: str) -> str:
    """``cell`` as a spreadsheet shows it and does not run it.

    >>> guarded("=HYPERLINK(A1)"), guarded("-1.5"), guarded("Ada")
    ("'=HYPERLINK(A1)", '-1.5', 'Ada')
    """
    if not cell.lstrip(" ").startswith(STARTS_A_FORMULA) or _is_number(cell):
        return cell
    return f"'{cell}"


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return cell == cell.strip()
