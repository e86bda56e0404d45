"""A new lab that proves itself green: the files of ``template/``, with one example question.

The example question is there to be replaced. It has what every question needs: text, a solution, checks that
compare all ranks with a twin, traffic, a nudge, hidden checks, hints, a quiz, mutants, and a figure.
"""

from __future__ import annotations

import re
from pathlib import Path

from dlo_lib.base.errors import UserError
from dlo_lib.base.files import write_text
from dlo_lib.base.text import tr
from dlo_lib.grading.lab.course import LAB_FILE, course_root, given_folder, source_labs
from dlo_lib.grading.lab.release import home_of

TEMPLATE = Path(__file__).parent / "template"
NAME = re.compile(r"(\d{2})_([a-z][a-z0-9_]*)")
MINUTES = 60


def new_lab(directory: str, title: str = "") -> Path:
    """Write ``solutions/NN_name`` and ``labs/NN_name``, and return the first.

    Args:
        directory: the lab's name with its number, such as ``30_my_lab``.
        title: shown to people; made of the name unless given.

    Raises:
        UserError: the name has another form, its number or name is taken, or the course has no solutions;
            then nothing was written.
    """
    match = NAME.fullmatch(directory)
    if match is None:
        raise UserError(
            tr(
                "{directory!r} is no name of a lab: give two digits and a lower-case name, such as 30_my_lab",
                directory=directory,
            )
        )
    number, name = int(match[1]), match[2]
    solutions = course_root() / "solutions"
    if not solutions.is_dir():
        raise UserError(
            tr(
                "no solutions in {folder}: a lab is made in an instructor's copy of the course",
                folder=course_root(),
            )
        )
    for lab in source_labs():
        if number == lab.number or name == lab.name:
            raise UserError(tr("{lab} is there already: choose another number and name", lab=lab.directory))
    folder = solutions / directory
    given = given_folder(folder)
    if found := next((place for place in (folder, given) if place.exists()), None):
        raise UserError(tr("{folder} is there already: choose another name, or remove it", folder=found))
    title = title or name.replace("_", " ").capitalize()
    values = {
        "number": number,
        "name": name,
        "title": title.replace("\\", "").replace('"', "'"),
        "minutes": MINUTES,
    }
    texts = _rendered(directory, values)
    for path, text in texts.items():
        place = home_of(folder, path)
        place.parent.mkdir(parents=True, exist_ok=True)
        write_text(place, text)
    return folder


def _rendered(directory: str, values: dict[str, object]) -> dict[str, str]:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATE), undefined=StrictUndefined, keep_trailing_newline=True
    )
    names = sorted(path.relative_to(TEMPLATE).as_posix() for path in TEMPLATE.rglob("*.j2"))
    texts = {name.removesuffix(".j2"): environment.get_template(name).render(values) for name in names}
    texts[f"{directory}.py"] = texts.pop("lab.py")
    # lab.toml last: with it the lab exists
    return dict(sorted(texts.items(), key=lambda item: item[0] == LAB_FILE))
