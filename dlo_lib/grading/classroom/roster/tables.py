"""Write tables as CSV, without cells that a spreadsheet would run.

A spreadsheet reads a cell that begins with ``=``, ``+``, ``-`` or ``@`` as a formula, and students choose
their names and the names of their files. Such a cell gets an apostrophe in front (OWASP, "CSV Injection");
numbers stay unchanged. The same rows give the same bytes: UTF-8 without a byte order mark, which Moodle and
most programs read. In Excel, import the file (*Data → From Text/CSV*, 65001).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

STARTS_A_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def csv_text(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return ``header`` and ``rows`` as CSV with line feeds."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([[escape_formula(cell) for cell in row] for row in rows])
    return text.getvalue()


def escape_formula(cell: str) -> str:
    """Escape ``cell`` so that a spreadsheet shows it and does not run it.

    >>> escape_formula("=HYPERLINK(A1)"), escape_formula("-1.5"), escape_formula("Ada")
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
