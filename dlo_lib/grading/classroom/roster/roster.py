"""The roster of a course, and its import from a table, which reports the changes first and is all or nothing.

The import removes no student, because grades refer to them; it names the students of the course that the
file lacks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from enum import Enum
from pathlib import Path

from nbgrader.api import Gradebook
from nbgrader.apps.api import NbGraderAPI
from sqlalchemy.exc import OperationalError

from dlo_lib.base.errors import UserError, nearest
from dlo_lib.base.text import tr
from dlo_lib.grading.classroom.roster.archive import fold_name
from dlo_lib.grading.classroom.roster.look_alikes import look_alikes
from dlo_lib.grading.classroom.roster.roster_table import Person, parse_roster


class Change(Enum):
    """The effect of an import on a student."""

    NEW = "new"
    CHANGED = "changed"
    SAME = "unchanged"
    ABSENT = "not in the file, stays"


@dataclass(frozen=True)
class Difference:
    """A line of the difference; ``what`` names the changed fields, old → new, and a person with a name that
    looks like this one.
    """

    change: Change
    person: Person
    what: str = ""


def read_roster(course: NbGraderAPI) -> list[Person]:
    """Return the students of a course, sorted by id."""
    with course.gradebook as gradebook:
        return sorted((_person(student) for student in gradebook.students), key=lambda person: person.id)


def unknown_student(student: str, roster: Iterable[str]) -> UserError:
    """Return the error for an unknown id, with the nearest ids of ``roster``."""
    near = nearest(student, roster)
    hint = (
        tr("did you mean {students}?", students=tr(" or ").join(near))
        if near
        else tr("`dlo roster import` enters students")
    )
    return UserError(
        tr('no student of the roster has the id "{student}": {hint}', student=student, hint=hint)
    )


def import_roster(course: NbGraderAPI, file: Path, dry_run: bool = False) -> list[Difference]:
    """Return the changes that importing ``file`` makes; unless ``dry_run``, make them, all or none.

    Raises:
        UserError: the file is unreadable, a line is wrong (each is named), or the gradebook is in use;
            nothing has changed.
    """
    given = parse_roster(file)
    known = {person.id: person for person in read_roster(course)}
    if mistaken := [
        tr("{id} differs only in case from {known}, who is in the course", id=person.id, known=other)
        for person in given
        for other in known
        if person.id not in known and fold_name(person.id) == fold_name(other)
    ]:
        raise UserError(f"{file}: {'; '.join(mistaken)}")
    differences = _say_look_alikes(
        [_difference(known.get(person.id), person) for person in given], [*known.values(), *given]
    )
    listed = {person.id for person in given}
    differences += [Difference(Change.ABSENT, person) for name, person in known.items() if name not in listed]
    if not dry_run:
        with course.gradebook as gradebook:
            _enter(
                gradebook,
                [line.person for line in differences if line.change in (Change.NEW, Change.CHANGED)],
            )
    return differences


def _difference(known: Person | None, given: Person) -> Difference:
    if known is None:
        return Difference(Change.NEW, given)
    changes, merged = [], {"id": given.id}
    for field in fields(given):
        old, new = getattr(known, field.name), getattr(given, field.name) or getattr(known, field.name)
        merged[field.name] = new
        if new != old:
            changes.append(f"{field.name}: {old or '-'} → {new}")
    return Difference(Change.CHANGED if changes else Change.SAME, Person(**merged), ", ".join(changes))


def _say_look_alikes(differences: Iterable[Difference], people: Iterable[Person]) -> list[Difference]:
    """Return ``differences``; one of a person whose id or name looks like another's names the other."""
    people = list(people)
    ids = look_alikes(dict.fromkeys(person.id for person in people))
    names = look_alikes(dict.fromkeys(_full_name(person) for person in people))
    said = []
    for line in differences:
        texts = [line.what] * bool(line.what)
        if (other := ids.get(line.person.id)) is not None:
            texts.append(tr("the id looks like {other}, with other letters", other=ascii(other)))
        if (other := names.get(_full_name(line.person))) is not None:
            texts.append(tr("the name looks like {other}, with other letters", other=ascii(other)))
        said.append(replace(line, what="; ".join(texts)))
    return said


def _full_name(person: Person) -> str:
    return f"{person.first_name} {person.last_name}".strip()


def _enter(gradebook: Gradebook, people: Iterable[Person]) -> None:
    """Write all students in one transaction; nbgrader's methods commit after each one."""
    from nbgrader.api import Student

    known = {student.id: student for student in gradebook.students}
    try:
        for person in people:
            given = {field.name: getattr(person, field.name) or None for field in fields(person)}
            given |= listed_name(person)
            if person.id in known:
                for name, value in given.items():
                    setattr(known[person.id], name, value)
            else:
                gradebook.db.add(Student(**given))
        gradebook.db.commit()
    except OperationalError as error:
        gradebook.db.rollback()
        cure = tr("wait until no process grades, and import again; nothing was changed")
        raise UserError(
            tr("the gradebook cannot be written ({reason}): {cure}", reason=error.orig, cure=cure)
        ) from error
    except BaseException:
        gradebook.db.rollback()
        raise


def listed_name(person: Person) -> dict[str, str]:
    """Return the names with which nbgrader stores this student.

    formgrader shows "last name, first name", and "None, None" for empty cells. Without a name, the id is the
    last name.
    """
    if person.first_name or person.last_name:
        return {"first_name": person.first_name, "last_name": person.last_name}
    return {"first_name": "", "last_name": person.id}


def _person(student: object) -> Person:
    person = Person(**{field.name: getattr(student, field.name) or "" for field in fields(Person)})
    unnamed = not person.first_name and person.last_name == person.id
    return replace(person, last_name="") if unnamed else person
