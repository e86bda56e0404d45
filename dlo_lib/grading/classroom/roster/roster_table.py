"""The table of a roster: its columns, its lines, and what is wrong with them.

A table has a header and one line per student. Columns are recognised by the names that nbgrader, Moodle
(English, French, German, Spanish, Italian) and spreadsheets use; only the id is required, and columns that
are not recognised are named.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr
from dlo_lib.grading.classroom.roster.archive import fold_name

# nbgrader uses ids in paths, patterns and commands. An id with one of these characters would name other
# folders, be split in two, or be read as an option (-) or, in a table, as a formula (= @).
UNFIT = re.compile(r"[/\\+*?\[\]{}\x00-\x1f\x7f]|\s|^[.=@-]")
LONGEST = 128  # characters, the limit of nbgrader's columns
MOST_BYTES = 20 << 20
SEPARATORS = ",;\t|"
COLUMNS = {
    "id": (
        "id",
        "student_id",
        "student",
        "username",
        "user name",
        "login",
        "nom d'utilisateur",
        "identifiant",
        "anmeldename",
        "benutzername",
        "nutzername",
        "nombre de usuario",
        "nome utente",
    ),
    "first_name": (
        "first_name",
        "first name",
        "firstname",
        "given name",
        "prénom",
        "vorname",
        "nombre",
        "nome",
    ),
    "last_name": (
        "last_name",
        "last name",
        "lastname",
        "surname",
        "family name",
        "nom",
        "nom de famille",
        "nachname",
        "apellido(s)",
        "apellidos",
        "cognome",
    ),
    "email": (
        "email",
        "email address",
        "e-mail",
        "mail",
        "adresse de courriel",
        "courriel",
        "adresse e-mail",
        "e-mail-adresse",
        "dirección de correo",
        "dirección email",
        "correo electrónico",
        "indirizzo email",
    ),
    "lms_user_id": (
        "lms_user_id",
        "user id",
        "id number",
        "idnumber",
        "numéro d'identification",
        "id-nummer",
        "número de id",
        "codice identificativo",
    ),
}


@dataclass(frozen=True)
class Person:
    """A student; unknown values are empty."""

    id: str
    first_name: str = ""
    last_name: str = ""
    email: str = ""
    lms_user_id: str = ""

    @property
    def names(self) -> set[str]:
        """The spellings of the full name, reduced to words."""
        return {
            normalise_name(f"{self.first_name} {self.last_name}"),
            normalise_name(f"{self.last_name} {self.first_name}"),
        } - {""}


def parse_roster(file: Path) -> list[Person]:
    """Return the students of a table, in its order.

    The file is UTF-8, with or without a byte order mark, or UTF-16 with one; the separator is , ; tab or |.

    Raises:
        UserError: the file is unreadable, has no column of ids, or has wrong lines; each is named by its
            number.
    """
    text = _text(file)
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise UserError(tr("{file} is empty: it needs a header and one line per student", file=file))
    reader = csv.reader(io.StringIO(text), delimiter=max(SEPARATORS, key=lines[0].count), strict=True)
    try:
        header = next(row for row in reader if any(cell.strip() for cell in row))
        places = _places(file, header)
        people: list[Person] = []
        mistakes: list[str] = []
        seen: dict[str, tuple[int, str]] = {}
        before = reader.line_num
        for row in reader:
            number, before = before + 1, reader.line_num
            if not any(cell.strip() for cell in row):
                continue
            if len(row) != len(header):
                mistakes.append(
                    tr(
                        "line {line} has {got} cells, the header has {want}",
                        line=number,
                        got=len(row),
                        want=len(header),
                    )
                )
                continue
            person = Person(**{name: row[place].strip() for name, place in places.items()})
            if reason := _wrong(person, seen):
                mistakes.append(tr("line {line}: {reason}", line=number, reason=reason))
                continue
            seen[fold_name(person.id)] = (number, person.id)
            people.append(person)
    except csv.Error as error:
        raise UserError(
            tr(
                "{file}, line {line}: not a CSV line ({reason})",
                file=file,
                line=reader.line_num,
                reason=error,
            )
        ) from error
    if mistakes:
        shown = "; ".join(mistakes[:20]) + (
            tr("; and {number} more", number=len(mistakes) - 20) if len(mistakes) > 20 else ""
        )
        raise UserError(tr("{file}: {mistakes}. Nothing was imported", file=file, mistakes=shown))
    return people


def unread_columns(file: Path) -> list[str]:
    """Return the columns of a table of which the roster reads nothing, such as a name in another language."""
    lines = [line for line in _text(file).splitlines() if line.strip()]
    if not lines:
        return []
    separator = max(SEPARATORS, key=lines[0].count)
    header = next(csv.reader([lines[0]], delimiter=separator))
    places = set(_places(file, header).values())
    return [name.strip() for place, name in enumerate(header) if place not in places and name.strip()]


def id_fault(student: str) -> str | None:
    """Return the reason why ``student`` cannot be an id, or None."""
    if not student:
        return tr("no id")
    if len(student) > LONGEST or len(student.encode("utf-8", "replace")) > 200:
        return tr("the id is too long")
    if found := UNFIT.search(student):
        return tr(
            "the id {id} has {character}, which an id cannot have there",
            id=repr(student),
            character=repr(found[0]),
        )
    return None


def normalise_name(name: str) -> str:
    """Reduce a full name to its words, without regard to case, composition of characters and punctuation."""
    return " ".join(re.findall(r"\w+", fold_name(name).replace("_", " ")))


def _wrong(person: Person, seen: Mapping[str, tuple[int, str]]) -> str | None:
    if reason := id_fault(person.id):
        return reason
    if (before := seen.get(fold_name(person.id))) is not None:
        line, spelling = before
        return tr("the id {id} is that of line {line}", id=person.id, line=line) + (
            "" if spelling == person.id else f" ({spelling})"
        )
    long = [field.name for field in fields(person) if len(getattr(person, field.name)) > LONGEST]
    odd = [
        field.name
        for field in fields(person)
        if any(not c.isprintable() for c in getattr(person, field.name))
    ]
    if long or odd:
        return tr("{column} is too long, or has control characters", column=(long + odd)[0])
    return None


def _text(file: Path) -> str:
    try:
        raw = file.read_bytes() if file.stat().st_size <= MOST_BYTES else None
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from error
    if raw is None:
        raise UserError(tr("{file} is too large to be a roster", file=file))
    encoding = "utf-16" if raw.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        hint = tr("save it as UTF-8 (in Excel: CSV UTF-8), or convert it: iconv -f latin1 -t utf-8")
        raise UserError(
            tr("{file}, line {line} is not UTF-8: {cure}", file=file, line=line, cure=hint)
        ) from error


def _places(file: Path, header: list[str]) -> dict[str, int]:
    given = [" ".join(cell.split()).casefold().replace("’", "'") for cell in header]
    places: dict[str, int] = {}
    for name, spellings in COLUMNS.items():
        found = [place for place, cell in enumerate(given) if cell in spellings]
        if len(found) > 1:
            raise UserError(
                tr(
                    "{file}: two columns for {name}: {columns}",
                    file=file,
                    name=name,
                    columns=", ".join(header[p] for p in found),
                )
            )
        if found:
            places[name] = found[0]
    if "id" not in places:
        known = ", ".join(COLUMNS["id"][:4])
        raise UserError(
            tr(
                "{file}: no column of ids (call it {known}); there are: {columns}",
                file=file,
                known=known,
                columns=", ".join(header),
            )
        )
    return places
