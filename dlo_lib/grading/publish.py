"""Handing a proved lab out through nbgrader: its release is generated from the source and put into the exchange."""

from __future__ import annotations

import os
from pathlib import Path

from nbgrader.apps.api import NbGraderAPI
from nbgrader.utils import capture_log, notebook_hash, temp_attrs

from dlo_lib.errors import UserError
from dlo_lib.grading.batch import run_step
from dlo_lib.grading.course import LabInfo
from dlo_lib.grading.nbgrader_course import CONFIG_FILE
from dlo_lib.grading.source import build_notebook, source_folder
from dlo_lib.text import tr


def place_in_exchange(course: NbGraderAPI, lab: LabInfo) -> Path:
    """Where students fetch ``lab`` from."""
    return _exchange_root(course) / course.coursedir.course_id / "outbound" / lab.directory


def page_in_exchange(course: NbGraderAPI, lab: LabInfo, secret: str) -> Path:
    """Where the student whose submission holds ``secret`` fetches the page about it from."""
    return _exchange_root(course) / course.coursedir.course_id / "feedback" / f"{notebook_hash(secret=secret, notebook_id=lab.name)}.html"


def check_exchange(course: NbGraderAPI) -> None:
    """Raises:
    UserError: the exchange is not there and cannot be made, or cannot be written to."""
    root = _exchange_root(course)
    nearest = next(folder for folder in (root, *root.parents) if folder.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
        config = Path(course.coursedir.root) / CONFIG_FILE
        cure = tr("set c.Exchange.root in {config} to a folder that you and your students can write to", config=config)
        raise UserError(tr("the exchange {folder} cannot be written: {cure}", folder=root, cure=cure))


def check_unpublished(course: NbGraderAPI, lab: LabInfo) -> None:
    """Raises:
    UserError: students can fetch the lab already."""
    if (place := place_in_exchange(course, lab)).exists():
        raise UserError(tr("{lab} is released already, in {folder}: --again replaces it", lab=lab.directory, folder=place))


def publish(course: NbGraderAPI, lab: LabInfo, again: bool = False) -> Path:
    """Generate the release of ``lab`` and put it into the exchange; returns the folder there.

    Args:
        again: replace what students fetch now. Work that they have begun is never touched.

    Raises:
        UserError: it is released already, or a step of nbgrader's failed; its log is named.
    """
    if not again:
        check_unpublished(course, lab)
    build_notebook(source_folder(lab))
    run_step(course, "generate", course.generate_assignment(lab.directory))
    with temp_attrs(course.coursedir, assignment_id=lab.directory):
        exchange = course.exchange.ReleaseAssignment(
            coursedir=course.coursedir, authenticator=course.authenticator, parent=course, force=again
        )
        run_step(course, "release", capture_log(exchange))
    return place_in_exchange(course, lab)


def _exchange_root(course: NbGraderAPI) -> Path:
    exchange = course.exchange.ReleaseAssignment(coursedir=course.coursedir, authenticator=course.authenticator, parent=course)
    return Path(exchange.root)
