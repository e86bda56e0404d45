"""Tensor, pipeline, data, context and expert parallelism on one mesh of eight ranks train what one process
trains, over 5 steps with accumulation, activation checkpointing and clipping; one plan continues the
checkpoint of another.

`make combinations` runs all of ``CASES``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dlo_lib.launch import run_ranks
from tests.parallel.combinations import (
    CASES,
    Attempt,
    Case,
    Differences,
    trained_alone,
    trained_in_turn,
)

CHOSEN = ["pp x fsdp x tp, ep", "fsdp x cp x tp, ep 4", "pp x cp x tp, ep, fp32"]
"""The cases of `make test`. Together they have every dimension, in shards and in copies, and both dtypes."""

EACH = 6
"""The number of cases in one launch of ranks, at most."""


def name_of(case: Case) -> str:
    return next((name for name, known in CASES.items() if known == case), str(case.plan))


def attempts(cases: list[Case], ranks: int, folder: Path) -> list[Attempt]:
    """The attempts of all cases on the rank with the largest differences; all ranks take the same turn."""
    twins = {setting: trained_alone(setting) for setting in dict.fromkeys(case.setting for case in cases)}
    by_rank = run_ranks(trained_in_turn, ranks, cases, twins, folder, timeout=900)
    for together in zip(*by_rank, strict=True):
        assert len({attempt.refusal for attempt in together}) == 1
    return [max(together, key=lambda attempt: attempt.differences.loss) for together in zip(*by_rank)]


def assert_twin(attempt: Attempt) -> None:
    found: Differences = attempt.differences
    single = attempt.case.setting.single
    assert found.loss < (1e-5 if single else 1e-10), attempt
    assert found.norm < (1e-4 if single else 1e-9), attempt
    assert found.weight < (1e-3 if single else 1e-8), attempt


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "names" in metafunc.fixturenames:
        every = list(CASES) if metafunc.config.getoption("--every-combination") else CHOSEN
        parts = [every[first : first + EACH] for first in range(0, len(every), EACH)]
        metafunc.parametrize("names", parts, ids=[f"{part[0]} and {len(part) - 1} more" for part in parts])


def test_combinations_train_what_one_process_trains(tmp_path, names):
    found = attempts([CASES[name] for name in names], 8, tmp_path)
    assert len(found) > len(names), "no checkpoint was continued"
    for attempt in found:
        assert not attempt.refusal
        assert_twin(attempt)
        what = "continued" if attempt.continued else "from the start"
        print(f"{name_of(attempt.case):36s} {what:14s} {attempt.differences}")
