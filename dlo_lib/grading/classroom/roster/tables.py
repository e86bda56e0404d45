"""Write tables as CSV, without cells that a spreadsheet would run.

A spreadsheet reads a cell that begins with ``=``, ``+``, ``-`` or ``@`` as a formula, some also if the
character is a wide one, and students choose their names and the names of their files. Such a cell gets an
apostrophe in front (OWASP, "CSV Injection"); numbers stay unchanged. A program whose separator is another one
splits a cell at it, so the same holds for what follows a semicolon, a tab, a bar or a new line in a cell.

The same rows give the same bytes: UTF-8 without a byte order mark, which Moodle and most programs read. In
Excel, import the file (*Data → From Text/CSV*, 65001).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence

STARTS_A_FORMULA = frozenset("=+-@")
SEPARATORS = re.compile("([;\t|\r\n])")  # of other tables than this one
QUOTED = re.compile('[,;\t|"\r\n]')


def csv_text(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return ``header`` and ``rows`` as CSV with line feeds.

    A cell with a separator of any program is quoted.
    """
    escaped = ([escape_formula(cell) for cell in row] for row in rows)
    return "".join(",".join(map(_quoted, row)) + "\n" for row in (header, *escaped))


def escape_formula(cell: str) -> str:
    """Escape ``cell`` so that a spreadsheet shows it and does not run it.

    >>> escape_formula("=HYPERLINK(A1)"), escape_formula("-1.5"), escape_formula("Ada;=1+1")
    ("'=HYPERLINK(A1)", '-1.5', "Ada;'=1+1")
    """
    begins = "'" if cell.startswith(("\t", "\r", "\n")) else ""
    return begins + "".join(f"'{part}" if _runs(part) else part for part in SEPARATORS.split(cell))


def _runs(part: str) -> bool:
    """Return whether a spreadsheet runs a cell with this text."""
    first = next((character for character in part if not _is_invisible(character)), "")
    return bool(STARTS_A_FORMULA & set(unicodedata.normalize("NFKC", first)[:1])) and not _is_number(part)


def _is_invisible(character: str) -> bool:
    """Return whether programs skip the character at the beginning of a cell: space, or of no width, or a
    quotation mark that they remove.
    """
    return character == '"' or character.isspace() or unicodedata.category(character) == "Cf"


def _quoted(cell: str) -> str:
    return '"{}"'.format(cell.replace('"', '""')) if QUOTED.search(cell) else cell


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return cell.isascii()
