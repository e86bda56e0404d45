"""Ranks: start several from a notebook (:func:`run_ranks`), or find this process's rank (:func:`place`).

The caller's side:

- ``run``: ``run_ranks``
- ``client``: starts the warm server, and requests ranks
- ``supervisor``: the output, messages and ends of working ranks
- ``values``: functions and results that are sent

The processes:

- ``seed``: a process that has imported torch, and forks warm servers
- ``server``: the warm server, which forks the ranks
- ``meeting``: where the ranks of a group meet
- ``rank``: one rank
- ``output``: its output as lines

Failures:

- ``failure``: selects the rank that failed first
- ``frames``: stacks that name the cell

Ranks that others start:

- ``place``: the rank of this process, from torchrun or SLURM
- ``explainer``: watches such ranks

Imports ``comm``.
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
