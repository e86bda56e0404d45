"""The small lab of the tests, a warm zygote for it, and its notebook."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dlo_lib.grading.environ import environment
from dlo_lib.grading.host import Zygote
from dlo_lib.grading.judge import judge_notebook, zygote_for
from dlo_lib.grading.report import Report
from dlo_lib.grading.source import LabSource, notebook_text, read_lab, source_notebook

SMALL = Path(__file__).parent / "small_course" / "solutions" / "91_small"


@pytest.fixture(scope="session")
def small() -> LabSource:
    """The small lab's source."""
    return read_lab(SMALL)


@pytest.fixture(scope="session")
def zygote(small: LabSource) -> Iterator[Zygote]:
    """One zygote for all tests, started by a process that has a secret in its environment."""
    with environment({"CLASS_SECRET": "tell nobody"}), zygote_for(small) as warm:
        yield warm


@pytest.fixture
def reference() -> dict[str, Any]:
    """The small lab's notebook with the solutions in, as parsed JSON: what a test alters before handing it in."""
    return json.loads(notebook_text(source_notebook(SMALL)))


@pytest.fixture
def judge(small: LabSource, zygote: Zygote, tmp_path: Path) -> Callable[..., Report]:
    """Hand in a notebook, given as parsed JSON or as text, and judge it."""

    def run(notebook: object, name: str = "small.ipynb", **settings: Any) -> Report:
        (tmp_path / name).write_text(notebook if isinstance(notebook, str) else json.dumps(notebook), encoding="utf-8")
        return judge_notebook(tmp_path / "small.ipynb", small, "secret", **{"zygote": zygote, **settings})

    return run
