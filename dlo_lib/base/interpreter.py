"""Start Python for a process of the library, which must not import files of the user's folders.

``python -c`` and ``python -m`` look for modules in the current folder first, and ``python script.py`` in the
script's folder. A ``random.py`` or an ``html.py`` there would run instead of the standard module: a mistake
among students, and a way into the grader for a hostile submission.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import dlo_lib

LIBRARY = "DLO_LIBRARY"
"""Variable of a job: the folder of its copy of the library."""


def trusted_python(
    code: str,
    *arguments: str,
    unbuffered: bool = False,
    user_settings: bool = False,
    library_of_job: bool = False,
) -> list[str]:
    """Return the command that runs ``code`` with this process's installed modules and ``arguments`` in
    ``sys.argv[1:]``.

    The process ignores all ``PYTHON*`` variables (``python -I``), unless ``user_settings`` is True: a process
    that runs the user's code has their hash seed and their warnings.

    With ``library_of_job``, the process of a job imports the copy of the library that the job was submitted
    with, if there is one (``$DLO_LIBRARY``, see ``dlo_lib.cluster.code.library``), and so do its own
    processes.
    """
    begin = f"import sys; sys.path[:] = {module_path()!r}\n"
    if library_of_job:  # in place of the folder at the end
        begin += "import os\nsys.path[-1:] = [os.path.realpath(os.environ.get"
        begin += f"({LIBRARY!r}) or sys.path[-1])]\n"
    isolated = "-P" if user_settings else "-I"
    return [sys.executable, isolated, *(["-u"] if unbuffered else []), "-c", begin + code, *arguments]


def module_path() -> list[str]:
    """Return ``sys.path`` without the current folder and the folder of the running script, and with the
    folder of ``dlo_lib`` at its end."""
    home = str(Path(dlo_lib.__file__).resolve().parents[1])
    users = {"", current_folder(), home}
    if main := getattr(sys.modules.get("__main__"), "__file__", None):  # an installed one for `python -m`
        users |= {str(Path(main).resolve().parent)} - set(sysconfig.get_paths().values())
    return [*(entry for entry in sys.path if entry not in users), home]


def current_folder() -> str | None:
    """Return the current folder, or None if it has been removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None
