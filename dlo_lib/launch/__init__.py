"""Ranks: start several from a notebook (:func:`run_ranks`), or find this process's rank (:func:`place`).

``run`` and ``client`` are the caller's side, ``server`` forks ranks, ``rank`` runs one of them, ``values``
packs functions and results. ``failure`` selects the rank that failed first, ``explainer`` watches ranks of
torchrun and srun. Imports ``comm``.
"""

from dlo_lib.comm.deadlock.detail import Explain
from dlo_lib.launch.explainer import explained
from dlo_lib.launch.failure import DeadLock, RankFailure
from dlo_lib.launch.place import Place, init_process_group, place
from dlo_lib.launch.run import Results, run_ranks

__all__ = [
    "DeadLock",
    "Explain",
    "Place",
    "RankFailure",
    "Results",
    "explained",
    "init_process_group",
    "place",
    "run_ranks",
]
