"""A submission that was checked on another release of PyTorch than the one of the judge.

The judge runs the answers on the grader's PyTorch. A function that exists, or behaves otherwise, in one of
the two releases only makes the notebook and the judge disagree. ``lab.check`` writes its release into the
metadata of its output, so that the feedback can name both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from dlo_lib.text import tr
from dlo_lib.torch_version import release

VERSION = re.compile(r"\d{1,3}\.\d{1,3}[\w.+-]{0,40}")


def release_warning(notebook: Mapping[str, Any], judged_on: str) -> str:
    """Return a sentence if the checks of a notebook ran on another minor release than the judge; else "".

    Args:
        notebook: the submitted notebook, as parsed JSON.
        judged_on: the judge's version of PyTorch, such as "2.13.0+cpu"; "" if it is not known.
    """
    if not judged_on:
        return ""
    others = dict.fromkeys(found for found in checked_on(notebook) if release(found) != release(judged_on))
    if not others:
        return ""
    return tr(
        "The checks in the notebook ran on PyTorch {there}, the judge on PyTorch {here}: "
        "if a check differs, run the notebook on PyTorch {here}.",
        there=", ".join(others),
        here=judged_on,
    )


def checked_on(notebook: Mapping[str, Any]) -> Iterator[str]:
    """Yield the versions of PyTorch in the outputs of checks. A student can write anything there."""
    for cell in _list(notebook.get("cells")):
        for output in _list(_dict(cell).get("outputs")):
            version = _dict(_dict(_dict(output).get("metadata")).get("dlo")).get("torch")
            if isinstance(version, str) and VERSION.fullmatch(version):
                yield version


def _dict(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
