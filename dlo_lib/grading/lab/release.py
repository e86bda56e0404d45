"""What students get: the files of ``labs/NN_name/``, by an allow-list.

``lab.toml``, ``checks/``, ``figures.py`` and the files that ``lab.toml`` lists under ``release`` are edited
there. ``dlo build`` writes the others from ``solutions/NN_name/``: the notebook, ``references.json``,
``in_grading.json`` (what grading adds to the visible checks) and ``quiz_answers.json`` (not in the exchange
of a class). The notebook passes through the steps of nbgrader (solutions cleared, cells locked, checksums),
so that ``nbgrader generate_assignment`` on the notebook with solutions gives the same bytes. A release
contains nothing else, even if the folder does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path

from nbformat import NotebookNode
from nbgrader.preprocessors import (
    CheckCellMetadata,
    ClearOutput,
    ComputeChecksums,
    LockCells,
    NbGraderPreprocessor,
)

from dlo_lib.base.errors import UserError
from dlo_lib.base.files import write_aside
from dlo_lib.base.text import tr
from dlo_lib.grading.lab.clear_solutions import ClearLabSolutions
from dlo_lib.grading.lab.course import (
    BUILT_FILES,
    IN_GRADING_FILE,
    LAB_FILE,
    QUIZ_ANSWERS_FILE,
    REFERENCES_FILE,
    LabInfo,
    course_root,
    find_lab,
    given_folder,
    source_labs,
)
from dlo_lib.grading.lab.declared import CHECKS_FOLDER, check_modules, declared_hidden
from dlo_lib.grading.lab.quiz_answers import quiz_answers_text
from dlo_lib.grading.lab.references import references_text
from dlo_lib.grading.lab.source import (
    notebook_text,
    read_lab,
    source_folder,
    source_notebook,
    text_source,
)
from dlo_lib.grading.lab.text_rules import check_faults, width_faults

CURE = "run `make labs`"
FIGURES = "figures.py"
NEVER = ("hidden.py", "mutants.py", "INSTRUCTOR.md")
LEFT_BY_TOOLS = ("__pycache__", ".ipynb_checkpoints")
RELEASE_STEPS = (LockCells, ClearLabSolutions, ClearOutput, CheckCellMetadata, ComputeChecksums)


def release_notebook(folder: Path) -> NotebookNode:
    """The notebook that students get of the lab in ``folder`` (``solutions/NN_name``)."""
    notebook = source_notebook(folder)
    resources: dict = {}
    for step in RELEASE_STEPS:
        notebook, resources = step().preprocess(notebook, resources)
    return notebook


def released_files(lab: LabInfo) -> dict[str, bytes]:
    """All files of a release of the lab: path below ``labs/NN_name/`` → content. A pure function of the files
    that are edited.

    Raises:
        UserError: the source breaks a rule of the layout, lacks a file, or would release
            what students must not have.
    """
    return _files(lab, release_notebook)


def given_files(lab: LabInfo, given: Path) -> list[str]:
    """Paths of the files of a release that are edited in ``given``, which is ``labs/NN_name``.

    Raises:
        UserError: as :func:`imported_files`, or there are no checks.
    """
    checks = [f"{CHECKS_FOLDER}/{name}.py" for name in check_modules(given)]
    return [LAB_FILE, *checks, *imported_files(lab, given)]


def _files(lab: LabInfo, make_notebook: Callable[[Path], NotebookNode]) -> dict[str, bytes]:
    """What is built of the lab, with the notebook that ``make_notebook`` makes of the source folder, and what
    is edited in ``labs/NN_name/``."""
    folder = source_folder(lab)
    given = given_folder(folder)
    source = read_lab(folder)
    if wide := width_faults(source):
        raise UserError(f"{text_source(folder)}: {wide[0]}")
    if unreadable := check_faults(source):
        raise UserError(f"{given}: {unreadable[0]}")
    built = {
        lab.notebook: notebook_text(make_notebook(folder)),
        REFERENCES_FILE: references_text(source),
        IN_GRADING_FILE: in_grading_text(folder),
        QUIZ_ANSWERS_FILE: quiz_answers_text(folder),
    }
    return {name: text.encode() for name, text in built.items()} | {
        name: (given / name).read_bytes() for name in given_files(lab, given)
    }


def home_of(source: Path, name: str) -> Path:
    """Where the file ``name`` of a lab is edited: in ``source``, which is ``solutions/NN_name``, what only an
    instructor has; in ``labs/NN_name`` the rest."""
    of_instructor = name in (*NEVER, text_source(source).name)
    return (source if of_instructor else given_folder(source)) / name


def write_release(lab: LabInfo, folder: Path) -> None:
    """Write the released files of ``lab`` below ``folder``, for example to run its notebook there.

    Raises:
        UserError: as :func:`released_files`; then nothing was written.
    """
    for name, content in released_files(lab).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def release_lab(lab: LabInfo) -> Path:
    """Write what is built in ``labs/NN_name/``.

    Raises:
        UserError: as :func:`released_files`, or a file is in the wrong folder; then nothing was written.
    """
    files = released_files(lab)
    target = given_folder(source_folder(lab))
    if misplaced := misplaced_files(lab, files):
        raise UserError(misplaced[0])
    for name in (lab.notebook, *BUILT_FILES):
        if not (target / name).is_file() or (target / name).read_bytes() != files[name]:
            with write_aside(target / name) as aside:
                aside.write_bytes(files[name])
    return target


def misplaced_files(lab: LabInfo, released: Collection[str]) -> list[str]:
    """The files in a folder of the lab that do not belong there, one line each with the cure: in ``labs/``
    what is not in ``released``, in ``solutions/`` what students get."""
    source = source_folder(lab)
    given = given_folder(source)
    extra = sorted(present_files(given) - set(released))
    lines = [
        tr(
            "{file} is not part of the release: list it under release in {toml}, or move it to {source}",
            file=given / name,
            toml=LAB_FILE,
            source=source,
        )
        for name in extra
    ]
    for name in sorted(present_files(source)):
        if name in (lab.notebook, *BUILT_FILES):
            lines.append(tr("{file} is built in {given} now: remove it", file=source / name, given=given))
        elif name in released or name == LAB_FILE or name.startswith(f"{CHECKS_FOLDER}/"):
            lines.append(
                tr(
                    "{file} is in the wrong folder: students get it, so move it to {given}",
                    file=source / name,
                    given=given,
                )
            )
    return lines


def write_source(lab: LabInfo, folder: Path) -> None:
    """Write the notebook with solutions and the other files of a release into ``folder``: nbgrader makes its
    release of them. What else is there is removed.

    Raises:
        UserError: as :func:`released_files`; then nothing was written.
    """
    files = _files(lab, source_notebook)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with write_aside(folder / name) as aside:
            aside.write_bytes(content)
    for name in present_files(folder) - files.keys():
        (folder / name).unlink()


def in_grading_text(folder: Path) -> str:
    """The content of ``in_grading.json``: question → title and points of each hidden check of the lab in
    ``folder``. The verdict of ``lab.check`` names them."""
    later: dict[str, list[tuple[str, float]]] = {}
    for check in declared_hidden(folder):
        later.setdefault(check.question, []).append((check.title, check.points))
    return json.dumps(later, indent=1, ensure_ascii=False) + "\n"


def check_in_step(lab: LabInfo) -> list[str]:
    """What differs between ``labs/NN_name/`` and what would be built there, and the files in a wrong folder,
    one line each with the cure; empty when the lab is in step."""
    files = released_files(lab)
    target = given_folder(source_folder(lab))
    present = present_files(target)
    lines = misplaced_files(lab, files)
    lines += [f"{target / name} is missing: {CURE}" for name in files.keys() - present]
    lines += [
        f"{target / name} differs from its source: {CURE}"
        for name in files.keys() & present
        if (target / name).read_bytes() != files[name]
    ]
    return sorted(lines)


def check_course_in_step() -> list[str]:
    """:func:`check_in_step` of every lab, and the folders of ``labs/`` that have no source."""
    known = source_labs()
    sourced = {lab.directory for lab in known}
    orphans = [
        folder
        for folder in sorted((course_root() / "labs").iterdir())
        if folder.is_dir() and folder.name not in sourced
    ]
    lines = [
        f"{folder} has no source in solutions/: remove it, or bring its source back" for folder in orphans
    ]
    return [line for lab in known for line in check_in_step(lab)] + lines


def imported_files(lab: LabInfo, folder: Path) -> list[str]:
    """Paths, below the lab's folder, of the modules and the data that the cells of its notebook use.

    Raises:
        UserError: a pattern under ``release`` matches nothing, or a file that must never be released.
    """
    paths = [folder / FIGURES] if (folder / FIGURES).is_file() else []
    for pattern in lab.release:
        found = [path for path in sorted(folder.glob(pattern)) if path.is_file()]
        if not found:
            raise UserError(f"{folder / LAB_FILE}: nothing matches {pattern!r} under release")
        paths += found
    for path in paths:
        parts = path.relative_to(folder).parts
        if (
            parts[0] in NEVER
            or path.name == text_source(folder).name
            or path.suffix == ".ipynb"
            or set(parts) & set(LEFT_BY_TOOLS)
        ):
            raise UserError(
                f"{folder / LAB_FILE}: {path.relative_to(folder)} must never be released: "
                "narrow the patterns under release"
            )
    return [path.relative_to(folder).as_posix() for path in paths]


def present_files(folder: Path) -> set[str]:
    """Paths of the files below ``folder``, without what tools leave behind."""
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return {path.as_posix() for path in files if not set(path.parts) & set(LEFT_BY_TOOLS)}


class RefuseLeaks(NbGraderPreprocessor):
    """The last step of ``nbgrader generate_assignment``: fail, so that nbgrader removes the release, when it
    holds a file it must not.

    nbgrader copies whatever lies beside the notebook; its list of names to ignore is only
    as good as its last entry.
    """

    def preprocess(self, nb: NotebookNode, resources: dict) -> tuple[NotebookNode, dict]:
        """Compare the release's folder with the allow-list; the notebook itself passes unchanged."""
        assignment = resources["nbgrader"]["assignment"]
        course = self.parent.parent.coursedir
        folder = Path(course.format_path(course.release_directory, ".", assignment))
        if extra := sorted(
            present_files(folder) - released_files(find_lab(assignment, source_labs())).keys()
        ):
            raise UserError(
                f"the release of {assignment} would hold {extra[0]}: "
                f"list it under release in {LAB_FILE}, or move it away"
            )
        return nb, resources
