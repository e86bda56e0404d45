"""Checks, the notebook's side of a lab, and grading. A notebook needs only ``from dlo_lib.grading import
Lab``; lab 00 also shows ``start_page``.

Each room imports only rooms to its right, and not its neighbour on the same floor::

    classroom -> judge -> sandbox, notebook -> switch -> lab -> checks

In reading order:

- ``checks``: write and run the checks of a lab
- ``lab``: a lab as files
- ``switch``: the collectives of judged ranks, and their real traffic
- ``sandbox``: processes that run a student's code
- ``notebook``: ``Lab``, the notebook's side
- ``judge``: judges a submitted notebook
- ``classroom``: a whole class
- ``nbgrader_course``: belongs to no room, because the configuration file of every course names it
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlo_lib.grading.notebook.lab import Lab
    from dlo_lib.grading.notebook.start_page import start_page

__all__ = ["Lab", "start_page"]


def __getattr__(name: str) -> Any:
    # Imported on first use, because it imports torch; commands that list labs do not need it.
    if name == "Lab":
        from dlo_lib.grading.notebook.lab import Lab

        return Lab
    if name == "start_page":
        from dlo_lib.grading.notebook.start_page import start_page

        return start_page
    raise AttributeError(name)
