"""Tensor, pipeline, data, context and expert parallelism on one mesh of eight ranks train what one process
trains, over 4 steps with accumulation, activation checkpointing and clipping; one plan continues the
checkpoint of another. Drawn plans do the same, or are refused in one sentence.

`make combinations` runs all of ``CASES`` and more drawn plans.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.launch import run_ranks
from dlo_lib.parallel.context import ContextKind, SequencePlacement
from dlo_lib.parallel.mesh import DIMENSIONS
from dlo_lib.parallel.pipeline.table import ScheduleKind
from dlo_lib.parallel.plan import ParallelPlan, ZeroStage
from tests.parallel.combinations import (
    CASES,
    DENSE,
    MIXTURE,
    SINGLE,
    Attempt,
    Case,
    Differences,
    degrees_above_one,
    trained_alone,
    trained_in_turn,
)

CHOSEN = ["hsdp x tp and sp, ep", "pp x fsdp x cp, ep", "pp x ddp x cp, zb-h1", "pp x cp x tp, ep, fp32"]
"""The cases of `make test`: every pair of dimensions is together in one of them. Both dtypes, tied embeddings
without experts, and a checkpoint that a plan with other dimensions continues are among them."""

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


def test_every_pair_of_dimensions_is_in_a_case_of_every_run():
    pairs = {
        pair for name in CHOSEN for pair in itertools.combinations(degrees_above_one(CASES[name].plan), 2)
    }
    assert pairs == set(itertools.combinations((*DIMENSIONS, "ep"), 2))
    assert {CASES[name].setting for name in CHOSEN} == {DENSE, MIXTURE, SINGLE}


def test_combinations_train_what_one_process_trains(tmp_path, names):
    found = attempts([CASES[name] for name in names], 8, tmp_path)
    assert len(found) > len(names), "no checkpoint was continued"
    for attempt in found:
        assert not attempt.refusal
        assert_twin(attempt)
        what = "continued" if attempt.continued else "from the start"
        print(f"{name_of(attempt.case):36s} {what:14s} {attempt.differences}")


@st.composite
def choices(draw: st.DrawFn, ranks: int) -> dict[str, Any]:
    """The fields of plans of this number of ranks, also of plans that are refused."""
    degrees, left = {}, ranks
    for name in draw(st.permutations(DIMENSIONS)):
        degrees[name] = draw(st.sampled_from([size for size in (1, 2, 4, 8) if left % size == 0]))
        left //= degrees[name]
    degrees[name] *= left
    kind = draw(st.sampled_from(ContextKind))
    return degrees | {
        "ep": draw(st.sampled_from([1, 2, 4])),
        "sequence_parallel": draw(st.booleans()),
        "context_kind": kind,
        "context_inner": 2 if kind is ContextKind.COMBINED else None,
        "sequence_placement": draw(st.sampled_from(SequencePlacement)),
        "zero_stage": draw(st.sampled_from([None, None, *ZeroStage])),
        "schedule": draw(st.sampled_from([None, None, *ScheduleKind])),
    }


def assert_one_sentence(message: str) -> None:
    """A refusal is one line that says what to use."""
    assert "\n" not in message
    assert ": " in message
    assert any(word in message for word in ("use ", "give ", "leave ", "make ")), message


def test_drawn_plans_train_what_one_process_trains_or_are_refused(tmp_path_factory, request):
    every = request.config.getoption("--every-combination")
    drawn: list[dict[str, Any]] = []

    @hypothesis.settings(
        max_examples=200 if every else 25,
        derandomize=True,
        phases=[hypothesis.Phase.generate],
        database=None,
    )
    @hypothesis.given(chosen=choices(4))
    def draw(chosen: dict[str, Any]) -> None:
        drawn.append(chosen)

    draw()
    cases, refusals = [], []
    for chosen in drawn:
        try:
            cases.append(Case(ParallelPlan(**chosen).over(4), MIXTURE))
        except UserError as error:
            refusals.append(str(error))
    assert cases
    cases = list(dict.fromkeys(cases))[: len(cases) if every else 2]
    for first in range(0, len(cases), EACH):
        for attempt in attempts(cases[first : first + EACH], 4, tmp_path_factory.mktemp("drawn")):
            print(attempt.differences, attempt.refusal, attempt.case.plan)
            if attempt.refusal:
                refusals.append(attempt.refusal)
            else:
                assert_twin(attempt)
    assert refusals
    for message in refusals:
        assert_one_sentence(message)


@hypothesis.given(degrees=st.fixed_dictionaries({name: st.integers(-1, 6) for name in (*DIMENSIONS, "ep")}))
@hypothesis.settings(max_examples=100)
def test_degrees_fit_the_ranks_or_are_refused_in_one_sentence(degrees):
    try:
        made = ParallelPlan(**degrees, zero_stage=ZeroStage.PARAMETERS).over(12)
    except UserError as error:
        assert_one_sentence(str(error))
    else:
        sizes = [getattr(made, name) for name in DIMENSIONS]
        assert math.prod(sizes) == 12
        assert made.dp_shard * made.cp % made.ep == 0
