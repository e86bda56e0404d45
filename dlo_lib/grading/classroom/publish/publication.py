"""Publish a proved lab through nbgrader: generate its release from the source and put it into the
exchange.
"""

from __future__ import annotations

import os
from pathlib import Path

from nbgrader.apps.api import NbGraderAPI
from nbgrader.utils import capture_log, notebook_hash, temp_attrs

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr
from dlo_lib.grading.classroom.gradebook.nbgrader_course import CONFIG_FILE
from dlo_lib.grading.classroom.gradebook.nbgrader_steps import run_step
from dlo_lib.grading.classroom.roster.course_access import keep_entries
from dlo_lib.grading.lab.course import REFERENCES_FILE, LabInfo
from dlo_lib.grading.lab.release import write_source


def place_in_exchange(course: NbGraderAPI, lab: LabInfo) -> Path:
    """Return the folder of the exchange from which students fetch ``lab``."""
    return _exchange_root(course) / course.coursedir.course_id / "outbound" / lab.directory


def page_in_exchange(course: NbGraderAPI, lab: LabInfo, secret: str) -> Path:
    """Return the file of the exchange from which the student with this submission ``secret`` fetches
    feedback.
    """
    return (
        _exchange_root(course)
        / course.coursedir.course_id
        / "feedback"
        / f"{notebook_hash(secret=secret, notebook_id=lab.name)}.html"
    )


def check_exchange(course: NbGraderAPI) -> None:
    """Check that the exchange can be written to.

    Raises:
        UserError: it does not exist and cannot be created, or is not writable.
    """
    root = _exchange_root(course)
    nearest = next(folder for folder in (root, *root.parents) if folder.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
        config = Path(course.coursedir.root) / CONFIG_FILE
        cure = tr(
            "set c.Exchange.root in {config} to a folder that you and your students can write to",
            config=config,
        )
        raise UserError(tr("the exchange {folder} cannot be written: {cure}", folder=root, cure=cure))


def check_writable(course: NbGraderAPI) -> None:
    """Check that a release can write what it writes besides the exchange.

    Raises:
        UserError: the folder of the course is not writable.
    """
    folder = Path(course.coursedir.root)
    if not os.access(folder, os.W_OK):
        raise UserError(
            tr(
                "{folder} cannot be written, and a release writes the notebook there: "
                "work in a course folder of this account",
                folder=folder,
            )
        )


def check_unpublished(course: NbGraderAPI, lab: LabInfo) -> None:
    """Check that the lab is not released.

    Raises:
        UserError: students can already fetch the lab.
    """
    if (place := place_in_exchange(course, lab)).exists():
        raise UserError(
            tr("{lab} is released already, in {folder}: --again replaces it", lab=lab.directory, folder=place)
        )


def publish(
    course: NbGraderAPI,
    lab: LabInfo,
    again: bool = False,
    with_references: bool = True,
) -> Path:
    """Generate the release of ``lab`` and put it into the exchange; return the folder there.

    Args:
        again: replace the release that students fetch. Their work stays unchanged.
        with_references: release ``references.json``, which ``lab.use_reference`` reads.

    Raises:
        UserError: the lab is already released, or a step of nbgrader failed; the message names the log.
    """
    if not again:
        check_unpublished(course, lab)
    fill_source(course, lab)
    ignored = [*course.coursedir.ignore, *([] if with_references else [REFERENCES_FILE])]
    with temp_attrs(course.coursedir, ignore=ignored):
        run_step(course, "generate", course.generate_assignment(lab.directory))
    with temp_attrs(course.coursedir, assignment_id=lab.directory):
        exchange = course.exchange.ReleaseAssignment(
            coursedir=course.coursedir, authenticator=course.authenticator, parent=course, force=again
        )
        run_step(course, "release", capture_log(exchange))
    keep_entries(_exchange_root(course))
    keep_entries(place_in_exchange(course, lab).parents[1] / "inbound")
    return place_in_exchange(course, lab)


def fill_source(course: NbGraderAPI, lab: LabInfo) -> Path:
    """Write the lab's folder below ``source/`` of the course, of which nbgrader makes a release; return it.

    Raises:
        UserError: as :func:`dlo_lib.grading.lab.release.write_source`.
    """
    folder = Path(course.coursedir.format_path(course.coursedir.source_directory, ".", lab.directory))
    write_source(lab, folder)
    return folder


def _exchange_root(course: NbGraderAPI) -> Path:
    exchange = course.exchange.ReleaseAssignment(
        coursedir=course.coursedir, authenticator=course.authenticator, parent=course
    )
    return Path(exchange.root)
