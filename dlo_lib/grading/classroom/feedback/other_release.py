"""A submission that was checked on another release of PyTorch or Python than the one of the judge.

The judge runs the answers on the grader's releases. A function or a syntax that exists in one of the two
only, or behaves otherwise, makes the notebook and the judge disagree. ``lab.check`` writes its releases into
the metadata of its output, so that the feedback can name both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from dlo_lib.base.text import tr
from dlo_lib.base.torch_version import release

VERSION = re.compile(r"\d{1,3}\.\d{1,3}[\w.+-]{0,40}")
PROGRAMS = {"torch": "PyTorch", "python": "Python"}


def release_warnings(notebook: Mapping[str, Any], judged_on: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each program of which the checks of a notebook had another minor release than the
    judge.

    Args:
        notebook: the submitted notebook, as parsed JSON.
        judged_on: the judge's versions, such as {"torch": "2.13.0+cpu"}; a missing one is not compared.
    """
    for key, program in PROGRAMS.items():
        here = judged_on.get(key)
        there = dict.fromkeys(
            found for found in checked_on(notebook, key) if here and release(found) != release(here)
        )
        if there:
            yield tr(
                "The checks in the notebook ran on {program} {there}, the judge on {program} {here}: "
                "if a check differs, run the notebook on {program} {here}.",
                program=program,
                there=", ".join(there),
                here=here,
            )


def checked_on(notebook: Mapping[str, Any], key: str) -> Iterator[str]:
    """Yield the versions of the program ``key`` in the outputs of checks. They may be anything."""
    for cell in _list(notebook.get("cells")):
        for output in _list(_dict(cell).get("outputs")):
            version = _dict(_dict(_dict(output).get("metadata")).get("dlo")).get(key)
            if isinstance(version, str) and VERSION.fullmatch(version):
                yield version


def _dict(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
