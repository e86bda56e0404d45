"""The training of a GPU's measurement, on a CPU: what it expects of each configuration."""

from __future__ import annotations

import pytest

from benchmarks.card_train import Case, _line, cases
from benchmarks.card_train_run import _expected
from dlo_lib.base.torch_compat import RELEASE
from dlo_lib.profiling import compiled_memory


@pytest.mark.skipif(
    RELEASE < compiled_memory.OLDEST,
    reason="NOT TESTED HERE: this release of PyTorch cannot compile while memory is recorded",
)
def test_the_memory_of_a_compiled_run_is_expected_too():
    eager, compiled = (_expected(Case("tiny", 16, compile=compile)) for compile in (False, True))
    assert 0 < compiled < eager
    assert _expected(Case("tiny", "auto", compile=True)) is None


def test_a_release_that_cannot_measure_it_trains_without_the_figure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled_memory, "RELEASE", (2, 9))
    assert _expected(Case("tiny", 2, compile=True)) is None


def test_configurations_have_their_own_names_and_a_line():
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names)
    row = {
        "name": "a", "tokens_per_second": 1000.4, "mfu": 0.5, "compile_seconds": 2.0, "expected_gib": 1.5,
        "sequences": 4, "peak_gib": 1.6, "loss": 3.25, "seconds": 9.0,
    }  # fmt: skip
    assert _line(row) == (
        "a: 1,000 tokens/s, MFU 50.0% with batch 4, 1.6 GiB (measure_memory 1.5), loss 3.250, "
        "compiled in 2.0 s, 9 s in all"
    )
    assert _line({"name": "a", "error": "status 1: no memory"}) == "a: status 1: no memory"
