"""Several processes that work on one search. They share only its journal file.

    run_workers("lr.journal", objective, workers=4)                      on this machine
    submit(take_part, {"path": "lr.journal", "objective": objective},
           gpus=1,                                                       as a job array (dlo_lib.cluster)
           sweep={"worker": range(16)})

A worker can join at any time. The trial of a killed worker goes to another worker.
"""

from __future__ import annotations

from pathlib import Path

from dlo_lib.hpo.search import Objective, Search
from dlo_lib.launch import run_ranks


def take_part(path: str | Path, objective: Objective, worker: int = 0) -> int:
    """Work on the search at ``path`` until it is complete; return the number of tasks that this worker has
    run.

    ``worker`` is unused; it only distinguishes the elements of a job array.

    Raises:
        UserError: there is no search at ``path``.
    """
    return Search.join(path).work(objective)


def run_workers(path: str | Path, objective: Objective, workers: int) -> list[int]:
    """Work on the search at ``path`` with several processes of this machine; return the number of tasks of
    each.

    The processes end with the caller. ``objective`` is sent as ``run_ranks`` sends functions, so it may be
    defined in a notebook.

    Raises:
        UserError: there is no search at ``path``.
        RankFailure: an objective raised an exception. The other workers are stopped; their tasks go to later
            workers.
    """
    Search.join(path).leave()
    return list(run_ranks(take_part, workers, str(Path(path).absolute()), objective))
