"""The course on disk: where it is, which labs it has, and what each lab's ``lab.toml`` says.

``labs/NN_name/`` is what students get: ``lab.toml``, ``checks/``, ``figures.py`` and modules, which are
edited there, and the notebook, which is built. ``solutions/NN_name/`` is what only an instructor has: the
text with the solutions, hidden checks and mutants. Cost: one small file read a lab.
"""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import dlo_lib
from dlo_lib.base.errors import UserError, unknown_name

LAB_FILE = "lab.toml"
GLOSSARY = "GLOSSARY.md"  # in labs/: the terms of all labs
REFERENCES_FILE = "references.json"
IN_GRADING_FILE = "in_grading.json"
QUIZ_ANSWERS_FILE = "quiz_answers.json"  # in labs/ and a kit, never in the exchange of a class
BUILT_FILES = (REFERENCES_FILE, IN_GRADING_FILE, QUIZ_ANSWERS_FILE)
"""Built in labs/, from the text of a lab and from its hidden checks."""
KEYS = (
    "number", "name", "title", "core", "minutes", "builds_on", "taught", "release", "load_seconds",
    "[steps.QUESTION] needs", "[reduced]",
    "[hints] QUESTION", "[quiz.QUESTION]",
)  # fmt: skip

Value = TypeVar("Value")


@dataclass(frozen=True)
class LabInfo:
    """What ``lab.toml`` says of a lab.

    Attributes:
        directory: the lab's folder and its name as an nbgrader assignment, such as ``13_dp_limit``.
        number, name, title: ``13``, ``dp_limit`` (also its notebook, ``dp_limit.ipynb``), and
            the title shown to people.
        core: part of the core path rather than elective.
        minutes: the working time to expect.
        builds_on: directories of the labs it takes up.
        taught: modules of dlo_lib that hold what the lab teaches, mounted away while its checks run.
        needs: question → earlier questions whose functions its solution calls.
        release: glob patterns, below the lab's folder, of data and modules that students get beside the
            notebook, ``checks/`` and ``figures.py``.
        load_seconds: computing time that all cells of a notebook together may take when the judge
            runs them, before any check.
        reduced: environment variables that make its notebook small, for tests.
        hints: question → its hints: a nudge, a pointer, a sketch.
        quiz: question of the quiz → its text under ``text``, and its options under their letters.
    """

    directory: str
    number: int
    name: str
    title: str
    core: bool
    minutes: int
    builds_on: tuple[str, ...] = ()
    taught: tuple[str, ...] = ()
    needs: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    release: tuple[str, ...] = ()
    load_seconds: int = 20
    reduced: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    hints: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    quiz: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def notebook(self) -> str:
        """File name of the lab's notebook."""
        return f"{self.name}.ipynb"

    def needed_by(self, question: str) -> tuple[str, ...]:
        """The questions that ``question`` needs, directly or not, each after those that it needs itself."""
        found: dict[str, None] = {}
        for step in self.needs.get(question, ()):
            found |= dict.fromkeys([*self.needed_by(step), step])
        return tuple(found)


def course_root() -> Path:
    """The folder that holds ``labs/``: ``$DLO_COURSE``, else the checkout of the course in whose folder this
    process is, else the checkout that dlo_lib is imported from.

    Raises:
        UserError: there is none.
    """
    chosen = os.environ.get("DLO_COURSE")
    root = Path(chosen).expanduser().resolve() if chosen else None
    root = root or checkout_of(Path()) or Path(dlo_lib.__file__).resolve().parents[1]
    if not (root / "labs").is_dir():
        raise UserError(f"no course in {root}: set DLO_COURSE to the folder that holds labs/")
    return root


def checkout_of(course: Path) -> Path | None:
    """The checkout that the folder of a course belongs to; None if ``course`` is no such folder.

    ``dlo course`` links ``solutions/`` of the folder to that of the checkout. The code in a checkout runs, so
    the folder must belong to this user, to root, or to a group of graders with this user.
    """
    link = course / "solutions"
    if not link.is_symlink() or not link.is_dir() or not (course / "nbgrader_config.py").is_file():
        return None
    state = course.stat()
    shared = bool(state.st_mode & stat.S_ISGID) and state.st_gid in os.getgroups()
    return link.resolve().parent if shared or state.st_uid in (os.geteuid(), 0) else None


def labs() -> list[LabInfo]:
    """The labs that students get, in order of their numbers: those whose notebook is built."""
    folder = course_root() / "labs"
    return [lab for lab in _labs_in(folder) if (folder / lab.directory / lab.notebook).is_file()]


def source_labs() -> list[LabInfo]:
    """The labs that have a folder in ``solutions/``, in order of their numbers; none in a
    student's installation."""
    root = course_root()
    return [lab for lab in _labs_in(root / "labs") if (root / "solutions" / lab.directory).is_dir()]


def source_folder(lab: LabInfo) -> Path:
    """``solutions/NN_name`` of a lab.

    Raises:
        UserError: the course has no solutions, as in a student's installation.
    """
    folder = course_root() / "solutions" / lab.directory
    if not folder.is_dir():
        raise UserError(
            f"no source of {lab.directory} in {folder.parent}: this needs an instructor's copy of the course"
        )
    return folder


def given_folder(source: Path) -> Path:
    """``labs/NN_name``, what students get of the lab whose source is ``solutions/NN_name``."""
    return source.parents[1] / "labs" / source.name


def find_lab(name: str, among: Iterable[LabInfo] | None = None) -> LabInfo:
    """The lab called ``name``: its directory (``13_dp_limit``), number (``13``) or name
    (``dp_limit``), among all unless given.

    Raises:
        UserError: there is none; the nearest are named.
    """
    candidates = labs() if among is None else list(among)
    for lab in candidates:
        if name.lower() in (lab.directory, lab.name, str(lab.number), f"{lab.number:02d}"):
            return lab
    raise unknown_name("lab", name, [spelling for lab in candidates for spelling in _spellings(name, lab)])


def read_lab_info(folder: str | Path) -> LabInfo:
    """``lab.toml`` of a lab's folder.

    Raises:
        UserError: it is absent, not TOML, lacks a key, has an unknown one or one of the wrong type.
    """
    file = Path(folder) / LAB_FILE
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"no {LAB_FILE} in {folder}: give the folder of a lab, such as labs/13_dp_limit"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not valid TOML: {error}") from error
    steps = _take(file, table, "steps", dict, {})
    hints, quiz = _take(file, table, "hints", dict, {}), _take(file, table, "quiz", dict, {})
    number, name = _take(file, table, "number", int), _take(file, table, "name", str)
    info = LabInfo(
        directory=f"{number:02d}_{name}",
        number=number,
        name=name,
        title=_take(file, table, "title", str),
        core=_take(file, table, "core", bool),
        minutes=_take(file, table, "minutes", int),
        builds_on=_names(file, "builds_on", _take(file, table, "builds_on", list, [])),
        taught=_names(file, "taught", _take(file, table, "taught", list, [])),
        needs=MappingProxyType(
            {
                step: _names(file, f"steps.{step}", _take(file, row, "needs", list, []))
                for step, row in steps.items()
            }
        ),
        release=_names(file, "release", _take(file, table, "release", list, [])),
        load_seconds=_take(file, table, "load_seconds", int, 20),
        reduced=MappingProxyType(
            {name: str(value) for name, value in _take(file, table, "reduced", dict, {}).items()}
        ),
        hints=MappingProxyType(
            {step: _names(file, f"hints.{step}", values) for step, values in hints.items()}
        ),
        quiz=MappingProxyType({question: _quiz_row(file, question, row) for question, row in quiz.items()}),
    )
    if table:
        raise UserError(f"{file}: unknown key {sorted(table)[0]}: known are {', '.join(KEYS)}")
    return info


def read_course_lab(folder: Path) -> LabInfo:
    """``lab.toml`` of a folder of the course, which is called after the lab; a student's copy may
    lie in a folder of any name.

    Raises:
        UserError: as :func:`read_lab_info`, or the folder has another name.
    """
    info = read_lab_info(folder)
    if info.directory != folder.name:
        raise UserError(
            f"{folder / LAB_FILE}: number and name say {info.directory}, its folder {folder.name}: "
            "make them agree"
        )
    return info


def _labs_in(folder: Path) -> list[LabInfo]:
    return sorted(
        (read_course_lab(file.parent) for file in folder.glob(f"*/{LAB_FILE}")),
        key=lambda lab: (lab.number, lab.name),
    )


def _spellings(asked: str, lab: LabInfo) -> list[str]:
    # A short name is nearer to what was asked by a short name; a whole list of both would only be long.
    return [lab.name if not asked[:1].isdigit() else lab.directory]


def _take(file: Path, table: dict, key: str, kind: type[Value], default: Value | None = None) -> Value:
    value = table.pop(key, default)
    if value is None:
        raise UserError(f"{file}: {key} is missing")
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UserError(f"{file}: {key} must be of type {kind.__name__}, not {value!r}")
    return value


def _quiz_row(file: Path, question: str, row: object) -> Mapping[str, str]:
    if (
        not isinstance(row, dict)
        or "text" not in row
        or len(row) < 3
        or not all(isinstance(text, str) for text in row.values())
    ):
        raise UserError(f"{file}: quiz.{question} must have a text and at least two options, all strings")
    return MappingProxyType(row)


def _names(file: Path, key: str, values: object) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise UserError(f"{file}: {key} must be a list of strings, not {values!r}")
    return tuple(values)
