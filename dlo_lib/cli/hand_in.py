"""Submit an assignment with nbgrader's classes and print the result as one line of JSON.

`dlo submit` runs it in another process, because nbgrader reads its configuration from the current folder,
which is the one that holds the student's labs. The Assignment List of JupyterLab makes the same calls.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def hand_in(assignment: str) -> dict[str, Any]:
    """Submit the folder ``assignment`` of the current folder.

    Returns:
        ``error``: why nbgrader refused, or "". ``released``: False if the exchange has no such assignment.
    """
    from jupyter_core.paths import jupyter_config_path
    from nbgrader.apps import NbGrader
    from nbgrader.auth import Authenticator
    from nbgrader.coursedir import CourseDirectory
    from nbgrader.exchange import ExchangeError, ExchangeFactory

    app = NbGrader()
    app.config_file_paths.append([os.getcwd(), *jupyter_config_path()])
    app.load_config_file()
    config = app.config
    config.CourseDirectory.assignment_id = assignment
    config.Exchange.path_includes_course = False
    course = CourseDirectory(config=config)
    submission = ExchangeFactory(config=config).Submit(
        coursedir=course, authenticator=Authenticator(config=config), config=config
    )
    try:
        submission.start()
    except (ExchangeError, OSError) as error:
        root = getattr(submission, "root", None)  # an exchange without folders has none
        released = root is None or has_assignment(Path(root), course.course_id, assignment)
        return {"released": released, "error": str(error)}
    return {"released": True, "error": ""}


def has_assignment(exchange: Path, course: str, assignment: str) -> bool:
    """Whether a course of this name is in the exchange and has released the assignment, as far as this user
    may look."""
    if not course:
        return False
    try:
        for folder in ("inbound", f"outbound/{assignment}"):
            os.stat(exchange / course / folder)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def main() -> None:
    """Submit the assignment that the first argument names."""
    real, sys.stdout = sys.stdout, sys.stderr  # nbgrader prints as well
    print(json.dumps(hand_in(sys.argv[1])), file=real)
