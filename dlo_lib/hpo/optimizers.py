"""The optimiser as a hyperparameter: a search chooses its name.

    space = {"optimizer": optimizer_names("adamw", "sgd"), "lr": FloatDistribution(1e-5, 1, log=True)}

The objective gives the name to ``TrainConfig(optimizer=...)``. Good learning rates differ between optimisers
by orders of magnitude: the range of ``lr`` must contain those of all of them, or each gets a search.
The policy ``PopulationBased`` cannot choose a name, because it continues the checkpoint of another trial.
"""

from __future__ import annotations

from optuna.distributions import CategoricalDistribution

from dlo_lib.optim.registry import OPTIMIZERS, optimizer_entry


def optimizer_names(*names: str) -> CategoricalDistribution:
    """Return the distribution of the name of the optimiser.

    Args:
        names: the names to choose from; without names, all optimisers except those that update in the
            backward.

    Raises:
        UserError: there is no such optimiser.
    """
    for name in names:
        optimizer_entry(name)
    every = [name for name, entry in OPTIMIZERS.items() if not entry.in_backward]
    return CategoricalDistribution(names or every)
