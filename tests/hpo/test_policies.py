"""The trials that each policy trains and their resources, for any order in which trials report."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest
import torch
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from dlo_lib.base.errors import UserError
from dlo_lib.hpo.asha import Asha
from dlo_lib.hpo.definition import Definition
from dlo_lib.hpo.fixed_budget import EveryTrial, Grid
from dlo_lib.hpo.halving import Hyperband, Rung, SuccessiveHalving, brackets, rungs
from dlo_lib.hpo.population import PopulationBased, explore
from dlo_lib.hpo.simulate import simulate
from dlo_lib.hpo.table import Begin, NoTask, Promote, TrialRow


def carried_out(policy, loss, workers=1, seed=0):
    """Return the final table; with several workers, trials take random times and report in a random order."""
    generator = random.Random(seed)
    took = [generator.uniform(0.5, 2) for _ in range(200)]
    return simulate(
        policy,
        loss,
        lambda table: {"x": generator.random()},
        workers=workers,
        cost=lambda row: 1 if workers == 1 else took[row.number],
    ).table


def by_x(row, resource):
    return row.params["x"]


def reached(table, resource):
    return sorted(row.number for row in table if resource in row.reports)


def best(table, count):
    return sorted(row.number for row in sorted(table, key=lambda row: row.params["x"])[:count])


@pytest.mark.parametrize("workers", [1, 3])
def test_every_trial_is_trained_to_the_end_once(workers):
    table = carried_out(EveryTrial(7, 5), by_x, workers=workers)
    assert [dict(row.reports) for row in table] == [{5: row.params["x"]} for row in table]
    assert len(table) == 7


def test_a_grid_has_every_combination_once():
    axes = {"x": (1, 2, 3), "y": ("a", "b"), "z": (0.5,)}
    table = carried_out(Grid(axes, 4), lambda row, _: row.params["x"], workers=2)
    assert [tuple(row.params.values()) for row in table] == list(itertools.product(*axes.values()))


def test_the_axes_of_a_grid_may_be_arrays_and_ranges():
    axes = {"x": np.linspace(0, 1, 3), "y": range(2), "z": [np.float32(0.5)], "u": torch.tensor([2, 3])}
    grid = Grid(axes, 4)
    assert grid.axes == {"x": [0.0, 0.5, 1.0], "y": [0, 1], "z": [0.5], "u": [2, 3]}
    space = {name: FloatDistribution(0, 3) for name in axes}
    definition = Definition(space, grid)
    assert Definition.from_json(definition.to_json()) == definition


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({}, "the grid has no axis: give a list of values for each hyperparameter"),
        ({"x": [], "lr": [1.0]}, "axis x of the grid has no values: give at least one"),
        ({"x": "abc", "lr": [1.0]}, "axis x of the grid is 'abc': give a list of values"),
        ({"x": np.array(3), "lr": [1.0]}, "axis x of the grid is 3: give a list of values"),
        ({"x": [1], "lt": [1.0]}, r'unknown axis of the grid "lt": did you mean lr\?'),
        ({"x": [1]}, "the grid has no axis for lr: add one with a single value"),
        (
            {"x": [1, 9], "lr": [1.0]},
            r"axis x of the grid has the value 9, which IntDistribution\(.*does not",
        ),
        ({"x": ["a"], "lr": [1.0]}, "axis x of the grid has the value 'a', which IntDistribution"),
    ],
)
def test_a_grid_that_does_not_fit_the_space_is_refused(axes, message):
    with pytest.raises(UserError, match=message):
        Definition({"x": IntDistribution(1, 3), "lr": FloatDistribution(0, 1)}, Grid(axes, 4))


def test_the_rungs_follow_the_formula():
    assert rungs(27, 1, 27, 3) == (Rung(27, 1), Rung(9, 3), Rung(3, 9), Rung(1, 27))
    assert rungs(10, 2, 9, 2) == (Rung(10, 2), Rung(5, 4), Rung(2, 8))
    assert rungs(2, 1, 100, 3) == (Rung(2, 1),)


def test_the_brackets_are_those_of_the_hyperband_paper():
    """Table 1 of the paper: R = 81, eta = 3."""
    assert brackets(81, 3) == (
        (Rung(81, 1), Rung(27, 3), Rung(9, 9), Rung(3, 27), Rung(1, 81)),
        (Rung(34, 3), Rung(11, 9), Rung(3, 27), Rung(1, 81)),
        (Rung(15, 9), Rung(5, 27), Rung(1, 81)),
        (Rung(8, 27), Rung(2, 81)),
        (Rung(5, 81),),
    )


@pytest.mark.parametrize("most", [1, 2, 7, 10, 26, 27, 100])
@pytest.mark.parametrize("eta", [2, 3, 4])
def test_brackets_end_at_the_largest_resource_and_never_go_below_one(most, eta):
    for bracket in brackets(most, eta):
        assert bracket[-1].resource == most
        assert all(rung.resource >= 1 and rung.trials >= 1 for rung in bracket)


@pytest.mark.parametrize("wrong", [(0, 1, 9, 3), (9, 0, 9, 3), (9, 10, 9, 3), (9, 1, 9, 1)])
def test_invalid_rungs_raise(wrong):
    with pytest.raises(UserError):
        rungs(*wrong)


@pytest.mark.parametrize("workers", [1, 4])
def test_successive_halving_keeps_exactly_the_best(workers):
    table = carried_out(SuccessiveHalving(18, 2, 18, 3), by_x, workers=workers)
    assert reached(table, 2) == list(range(18))
    assert reached(table, 6) == best(table, 6)
    assert reached(table, 18) == best(table, 2)
    assert sum(max(row.reports) for row in table) == 18 * 2 + 6 * 4 + 2 * 12


def test_a_rung_waits_for_its_slowest_trial():
    policy, rows = (
        SuccessiveHalving(2, 1, 2, 2),
        [TrialRow(0, {"x": 0.1}, 2, {1: 0.1}), TrialRow(1, {"x": 0.2}, 2, goal=1)],
    )
    assert policy.decide(rows) is NoTask.WAIT


def test_a_failed_trial_ranks_last_and_the_search_continues():
    table = carried_out(
        SuccessiveHalving(9, 1, 9, 3), lambda row, _: None if row.number % 2 else row.params["x"]
    )
    assert not any(row.reports for row in table if row.number % 2)
    assert len(reached(table, 9)) == 1
    assert all(row.failed for row in carried_out(SuccessiveHalving(9, 1, 9, 3), lambda row, _: None))


@pytest.mark.parametrize("workers", [1, 5])
def test_hyperband_carries_out_every_bracket(workers):
    table = carried_out(Hyperband(9, 3), by_x, workers=workers)
    for group, bracket in enumerate(brackets(9, 3)):
        rows = [row for row in table if row.group == group]
        for rung in bracket:
            assert len(reached(rows, rung.resource)) == rung.trials


@pytest.mark.parametrize("workers", [1, 4, 9])
@pytest.mark.parametrize("seed", range(3))
def test_asha_never_waits_while_a_trial_can_start(workers, seed):
    policy = Asha(20, 1, 9, 3)
    table = carried_out(policy, by_x, workers=workers, seed=seed)
    assert len(reached(table, 1)) == 20
    assert set(best(table, 6)) <= set(reached(table, 3)), "in the end the best third is promoted"
    assert set(best(table, 1)) <= set(reached(table, 9))
    busy = [TrialRow(n, {"x": 0.5}, 9, goal=1) for n in range(8)]
    assert isinstance(policy.decide(busy), Begin)


def test_asha_promotes_from_the_top_rung_first():
    low = [TrialRow(n, {}, 9, {1: n}) for n in range(6)]
    ready = [TrialRow(n, {}, 9, {1: -n, 3: n}) for n in range(6, 9)]
    assert Asha(20, 1, 9, 3).decide(low + ready) == Promote(6, 9)


def test_asha_promotes_before_the_rung_is_full():
    assert Asha(20, 1, 9, 3).decide([TrialRow(n, {}, 9, {1: -n}) for n in range(3)]) == Promote(2, 3)
    assert Asha(20, 1, 9, 3).decide([TrialRow(n, {}, 9, {1: -n}) for n in range(2)]) == Begin(1, 9)


def test_one_of_the_worst_members_copies_one_of_the_best():
    policy = PopulationBased(members=4, interval=5, generations=3, quantile=0.25)
    first = [TrialRow(n, {"x": n}, 5, {5: float(n)}, group=n) for n in range(4)]
    assert policy.decide(first) == Begin(10, 10, 0, {"x": 0}, parent=0)
    second = [*first, *(TrialRow(4 + n, {"x": n}, 10, goal=10, group=n) for n in range(3))]
    assert policy.decide(second) == Begin(10, 10, 3, {"x": 0}, parent=0, explore=True)


@pytest.mark.parametrize("workers", [1, 3])
def test_every_member_has_all_its_generations(workers):
    table = carried_out(PopulationBased(6, 2, 5), by_x, workers=workers)
    assert Counter(row.group for row in table) == dict.fromkeys(range(6), 5)
    assert sorted({row.until for row in table}) == [2, 4, 6, 8, 10]


def test_a_failed_member_continues_from_a_good_one():
    first = [TrialRow(0, {"x": 0}, 5, {5: 0.5}, group=0), TrialRow(1, {"x": 1}, 5, group=1, failed=True)]
    assert PopulationBased(2, 5, 2).decide([*first, TrialRow(2, {}, 10, goal=10)]) == Begin(
        10, 10, 1, {"x": 0}, parent=0, explore=True
    )


def test_exploring_stays_within_the_space_and_is_the_same_for_the_same_seed():
    space = {
        "lr": FloatDistribution(1e-4, 1e-1, log=True),
        "width": IntDistribution(8, 64, step=8),
        "depth": IntDistribution(1, 4),
        "kind": CategoricalDistribution(("relu", "gelu")),
    }
    params = {"lr": 0.01, "width": 32, "depth": 2, "kind": "relu"}
    drawn = [explore(params, space, seed) for seed in range(40)]
    assert drawn == [explore(params, space, seed) for seed in range(40)]
    assert {round(each["lr"], 6) for each in drawn} == {0.008, 0.012}
    assert {each["width"] for each in drawn} == {24, 40}
    assert {each["depth"] for each in drawn} == {1, 3}
    assert {each["kind"] for each in drawn} == {"relu", "gelu"}
    assert explore({**params, "lr": 0.1, "depth": 1}, space, 0)["lr"] <= 0.1


def test_a_simulation_counts_what_is_trained_and_who_waits():
    run = simulate(SuccessiveHalving(4, 1, 2, 2), by_x, lambda table: {"x": len(table)}, workers=2)
    assert run.cost == 4 * 1 + 2 * 1
    assert run.makespan == 3
    assert [(span.worker, span.trial, span.end) for span in run.spans] == [
        (0, 0, 1),
        (1, 1, 1),
        (0, 2, 2),
        (1, 3, 2),
        (0, 0, 3),
        (1, 1, 3),
    ]


def test_a_segment_of_a_population_is_trained_from_its_parents_end():
    run = simulate(PopulationBased(3, 5, 4), by_x, lambda table: {"x": len(table)})
    assert run.cost == 3 * 5 * 4
