"""Common packages are imported once, before the fork: they cost a submission neither time nor memory."""

from __future__ import annotations

import os

from dlo_lib.grading.lab.syntax import MAX_PARSED, imported_modules
from dlo_lib.grading.sandbox.host import Zygote
from dlo_lib.grading.sandbox.limits import descendants, tasks_of
from dlo_lib.grading.sandbox.remote_worker import deadline_after

INNER = """
def solve():
    import numpy, sympy
    from scipy import optimize
    import pandas as pd
    return float(sympy.Rational(1, 2)) + len(pd.DataFrame({"a": [1, 2]}))


def loaded(name):
    import sys
    return name in sys.modules
"""
CELL = {"id": "a", "own": True, "source": INNER}


def test_imports_in_functions_cost_a_rank_no_memory(sandbox: Zygote) -> None:
    imports = imported_modules([INNER])
    assert imports == ["numpy", "sympy", "scipy", "scipy.optimize", "pandas", "sys"]
    (rank,) = sandbox.ranks(1, imports)
    rank.ask(deadline_after(20), do="load", cells=[CELL])
    rank.expect_marks()
    before = rank.held_bytes()
    answer = rank.ask(deadline_after(20), do="call", name="solve", args=[], kwargs={})
    assert answer["value"] == 2.5
    # Imported in the rank, they cost 80 MiB. What remains is inherited pages that the imports and the call
    # overwrite: 0 to 6 MiB here, in steps of 2 MiB where the zygote's memory is in huge pages.
    assert rank.held_bytes() - before < 20 << 20
    rank.close()
    zygotes = [pid for pid in [sandbox.pid, *descendants(sandbox.pid)] if os.path.exists(f"/proc/{pid}")]
    assert all(len(tasks_of(pid)) == 1 for pid in zygotes)


def test_the_zygote_imports_only_common_packages(sandbox: Zygote) -> None:
    worker = sandbox.worker(imports=["this", "wsgiref.simple_server", "networkx", "numpy.no_such_module"])
    worker.ask(deadline_after(20), do="load", cells=[CELL])
    for name, common in (
        ("this", False),
        ("wsgiref.simple_server", False),
        ("networkx", True),
        ("pyarrow", False),
    ):
        answer = worker.ask(deadline_after(20), do="call", name="loaded", args=[name], kwargs={})
        assert answer["value"] is common, name
    worker.close()


def test_names_that_no_package_has_are_left_out() -> None:
    """A request to the zygote has a limit of 64 KiB, and one that is cut would end it."""
    long = [f"import {'a' * 101}", f"from sympy import {'b' * 100}", "import é"]
    assert imported_modules([*long, "import sympy"]) == ["sympy"]
    assert imported_modules(["import sympy\n" + "#" * MAX_PARSED]) == []


def test_text_that_is_no_python_imports_nothing() -> None:
    assert imported_modules(["%%time\nimport sympy\nsympy.solve?"]) == ["sympy"]
    assert imported_modules(["%%bash\nls -l", "from . import x", "\0", "(" * 10_000]) == []
