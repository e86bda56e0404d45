"""``dlo-hub-server [course]`` starts the server of a user, or of a course, on a JupyterHub.

A user's server first updates the copy of the labs, as `dlo lab` does, and opens lab 00. The server of a
course opens formgrader in the folder of the course. The Hub sets the variables of both
(``dlo_lib.hub.rights``).
"""

from __future__ import annotations

import os
import sys

from dlo_lib.base.errors import EXIT_BAD_INPUT, UserError
from dlo_lib.cli.jupyter import HIDDEN_FILES, start_url
from dlo_lib.cli.private import close_copies
from dlo_lib.cli.workspace import update_workspace, work_dir

SINGLE_USER = [sys.executable, "-m", "dlo_lib.hub.single_user"]


def user_options() -> list[str]:
    """Update the user's labs and return the options of a server on them."""
    update_workspace()
    close_copies(os.environ)
    folder = work_dir()
    os.chdir(folder)  # the Assignment List looks for fetched labs in the current folder
    return [
        f"--ServerApp.root_dir={folder}",
        f"--ServerApp.default_url={start_url(folder)}",
        f"--ContentsManager.hide_globs={list(HIDDEN_FILES)!r}",
    ]


def course_options() -> list[str]:
    """Return the options of the server in the folder of a course."""
    return [f"--ServerApp.root_dir={os.getcwd()}", "--ServerApp.default_url=/lab?formgrader=true"]


def main() -> None:
    """Replace this process by JupyterHub's server for one user; further arguments are passed on."""
    arguments = sys.argv[1:]
    of_course = arguments[:1] == ["course"]
    try:
        options = course_options() if of_course else user_options()
    except UserError as error:
        print(f"hub_server: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    sys.stdout.flush()
    os.execv(sys.executable, [*SINGLE_USER, *options, *arguments[of_course:]])


if __name__ == "__main__":
    main()
