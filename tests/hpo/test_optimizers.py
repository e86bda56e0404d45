"""A search chooses the optimiser by its name."""

from __future__ import annotations

from pathlib import Path

import pytest
from optuna.distributions import FloatDistribution

from dlo_lib.base.errors import UserError
from dlo_lib.hpo import Definition, EveryTrial, Grid, PopulationBased, Sampler, Search, Task
from dlo_lib.hpo.optimizers import optimizer_names
from dlo_lib.optim.registry import OPTIMIZERS
from dlo_lib.train import TrainConfig, train


def test_a_search_trains_with_the_optimizers_that_it_chooses(tmp_path: Path):
    names = ("adamw", "sgd-momentum", "adam")
    definition = Definition({"optimizer": optimizer_names(*names)}, Grid({"optimizer": names}, 1))
    assert Definition.from_json(definition.to_json()) == definition

    def objective(task: Task) -> float:
        small = {"data": "arithmetic", "seq": 8, "batch": 1, "steps": 1}
        result = train(TrainConfig(**small, out=tmp_path / str(task.trial), **task.params))
        assert result.loss is not None
        return result.loss

    search = Search.make(tmp_path / "search.journal", definition)
    search.work(objective)
    assert [row.params["optimizer"] for row in search.table() if row.reports] == list(names)


@pytest.mark.parametrize("sampler", Sampler)
def test_every_sampler_draws_names_of_the_registry(sampler: Sampler):
    space = {"optimizer": optimizer_names(), "lr": FloatDistribution(1e-4, 1, log=True)}
    drawn = Definition(space, EveryTrial(3, 1), sampler).propose([])
    assert drawn["optimizer"] in OPTIMIZERS


def test_wrong_choices_are_refused():
    with pytest.raises(UserError, match='unknown optimizer "adamv": did you mean adam or adamw'):
        optimizer_names("adamw", "adamv")
    assert set(optimizer_names().choices) == set(OPTIMIZERS) - {"adamw-in-backward"}
    with pytest.raises(UserError, match="cannot choose the optimizer.*use Asha or Hyperband"):
        Definition({"optimizer": optimizer_names()}, PopulationBased(4, 1, 2))
