"""Hyperparameter search on Optuna's studies, samplers and storage.

The room holds the policies that the course teaches (``halving``, ``asha``, ``population``, ``fixed_budget``)
and the parts that Optuna does not provide. ``search`` runs the trials of a ``definition`` with a policy. The
workers share the ``journal`` and hold a ``lease``. ``gaussian_process``, ``expected_improvement`` and
``bootstrap`` are written out in full; ``draw`` and ``simulate`` show searches. The room imports ``launch``.
"""

from dlo_lib.hpo.asha import Asha
from dlo_lib.hpo.bootstrap import Interval, bootstrap_difference, bootstrap_mean
from dlo_lib.hpo.dashboard import Dashboard
from dlo_lib.hpo.definition import Definition, Sampler
from dlo_lib.hpo.draw import draw_timeline, draw_trials
from dlo_lib.hpo.fixed_budget import EveryTrial, Grid
from dlo_lib.hpo.halving import Hyperband, SuccessiveHalving
from dlo_lib.hpo.population import PopulationBased
from dlo_lib.hpo.search import Objective, Search, Task
from dlo_lib.hpo.simulate import SimulatedSearch, simulate
from dlo_lib.hpo.table import NoTask, TrialRow
from dlo_lib.hpo.workers import run_workers, take_part

__all__ = [
    "Asha",
    "Dashboard",
    "Definition",
    "EveryTrial",
    "Grid",
    "Hyperband",
    "Interval",
    "NoTask",
    "Objective",
    "PopulationBased",
    "Sampler",
    "Search",
    "SimulatedSearch",
    "SuccessiveHalving",
    "Task",
    "TrialRow",
    "bootstrap_difference",
    "bootstrap_mean",
    "draw_timeline",
    "draw_trials",
    "run_workers",
    "simulate",
    "take_part",
]
