"""Find names that a person cannot tell from each other, because one has a Cyrillic letter for a Latin one.

Each name is reduced to what it looks like: a letter that looks like a Latin one becomes that one, before case
and composition are removed. The table has the letters of Cyrillic, Greek and Armenian that look like Latin
ones in most fonts, from Unicode's ``confusables.txt`` (UTS 39); the digits 0 and 1 count as o and l.
"""

from __future__ import annotations

from collections.abc import Iterable

from dlo_lib.grading.classroom.roster.archive import fold_name

_LOOKS_LIKE = str.maketrans(
    "АВЕЅІЈКМНОРСТУХ" "аеѕіјорсухһԁԛԝӏ" "ΑΒΕΖΗΙΚΜΝΟΡΤΥΧ" "αοινρυκγχ" "օսհո" "ıɑɡ",
    "ABESIJKMHOPCTYX" "aesijopcyxhdqwl" "ABEZHIKMNOPTYX" "aoivpukyx" "ouhn" "iag",
)  # fmt: skip
_DIGITS = str.maketrans("01", "ol")


def look(name: str) -> str:
    """Return what ``name`` looks like; a reader takes two names with the same look for one.

    >>> look("аda") == look("ada"), look("ada") == look("adà")
    (True, False)
    """
    return fold_name(name.translate(_LOOKS_LIKE)).translate(_DIGITS)


def look_alikes(names: Iterable[str]) -> dict[str, str]:
    """Return the names that look like another one of ``names``, each with that one.

    Names that differ only in case or composition, which other rules refuse, are not among them.
    """
    first: dict[str, str] = {}
    found = {}
    for name in names:
        other = first.setdefault(look(name), name)
        if fold_name(other) != fold_name(name):
            found[name] = other
            found.setdefault(other, name)
    return found
