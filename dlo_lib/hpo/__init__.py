"""Hyperparameter search: what Optuna lacks or the course teaches, on Optuna's studies, samplers and storage."""

from dlo_lib.hpo.asha import Asha
from dlo_lib.hpo.bootstrap import Interval, bootstrap_difference, bootstrap_mean
from dlo_lib.hpo.dashboard import Dashboard
from dlo_lib.hpo.definition import Definition, Sampler
from dlo_lib.hpo.draw import draw_timeline, draw_trials
from dlo_lib.hpo.halving import Hyperband, SuccessiveHalving
from dlo_lib.hpo.plain import EveryTrial, Grid
from dlo_lib.hpo.population import PopulationBased
from dlo_lib.hpo.search import Objective, Search, Task
from dlo_lib.hpo.simulate import Simulation, simulate
from dlo_lib.hpo.table import Row, Step
from dlo_lib.hpo.workers import run_workers, take_part

__all__ = [
    "Asha",
    "Dashboard",
    "Definition",
    "EveryTrial",
    "Grid",
    "Hyperband",
    "Interval",
    "Objective",
    "PopulationBased",
    "Row",
    "Sampler",
    "Search",
    "Simulation",
    "Step",
    "SuccessiveHalving",
    "Task",
    "bootstrap_difference",
    "bootstrap_mean",
    "draw_timeline",
    "draw_trials",
    "run_workers",
    "simulate",
    "take_part",
]
