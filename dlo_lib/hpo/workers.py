"""Several processes on one search: they share nothing but its file.

    run_workers("lr.journal", objective, workers=4)                                         on this machine
    submit(take_part, {"path": "lr.journal", "objective": objective}, gpus=1,               as a job array (dlo_lib.cluster)
           sweep={"worker": range(16)})

Workers may come and go: one that joins later asks for what is left, one that is killed leaves its trial to the others.
"""

from __future__ import annotations

from pathlib import Path

from dlo_lib.hpo.search import Objective, Search
from dlo_lib.launch import run_ranks


def take_part(path: str | Path, objective: Objective, worker: int = 0) -> int:
    """Work on the search at ``path`` until nothing is left; returns how many tasks this worker has done. ``worker`` tells elements apart.

    Raises:
        UserError: there is no search at ``path``.
    """
    return Search.join(path).work(objective)


def run_workers(path: str | Path, objective: Objective, workers: int) -> list[int]:
    """Work on the search at ``path`` with so many processes of this machine; returns how many tasks each has done.

    They end with the caller. ``objective`` is sent as ``run_ranks`` sends functions: one that a notebook defines is good.

    Raises:
        UserError: there is no search at ``path``.
        RankFailure: an objective raised; the other workers are stopped, and what they trained is left to the next that ask.
    """
    Search.join(path).leave()
    return list(run_ranks(take_part, workers, str(Path(path).absolute()), objective))
