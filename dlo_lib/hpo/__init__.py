"""Hyperparameter search on Optuna's studies, samplers and storage.

The search:

- ``definition``: a search as data
- ``search``: runs the trials of a definition with a policy
- ``table``: the table of a search, and the decisions of a policy
- ``journal``: the one file that stores a search
- ``lease``: marks a worker as alive
- ``workers``: several processes of one search
- ``optimizers``: the optimiser as a hyperparameter

Policies:

- ``fixed_budget``: every trial to the same resource
- ``halving``: successive halving and Hyperband
- ``asha``: the asynchronous form
- ``population``: population-based training

Algorithms written out in full:

- ``gaussian_process``: regression
- ``expected_improvement``: the amount by which a point is expected to improve
- ``expected_improvement_sampler``: the same as a sampler of Optuna
- ``bootstrap``: confidence intervals

Views:

- ``simulate``: a search in memory
- ``draw``: figures of a search
- ``dashboard``: Optuna's dashboard in a notebook

The room imports ``launch``, and ``optimizers`` imports ``optim``.
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
