"""The module from which the ``nbgrader_config.py`` of a course imports its settings. Its name must not
change, because the files of existing courses contain it.

The settings are in :mod:`dlo_lib.grading.classroom.gradebook.nbgrader_course`.
"""

from __future__ import annotations

from dlo_lib.grading.classroom.gradebook.nbgrader_course import configure, configure_stock

__all__ = ["configure", "configure_stock"]
