"""Ranks that live as long as the notebook: cells run on all of them, and their variables stay.

    %load_ext dlo_lib.live_ranks

    %%ranks 4
    x = torch.tensor(float(rank))
    dist.all_reduce(x)
    x

The notebook's side:

- ``magic``: ``%%ranks`` and ``%%rank``
- ``handle``: the object ``ranks`` of a notebook
- ``session``: starts ranks, sends them requests, and makes them usable again after a failure
- ``local_ranks``: its ranks on this machine
- ``devices``: where ranks compute
- ``view``: shows the output of all ranks
- ``transcript``: collects the output of one rank

In a rank:

- ``rank``: answers requests until the notebook ends
- ``rank_shell``: its IPython
- ``messages``: what the two sides say
- ``connections``: breaks a wait for other ranks

In a job of SLURM:

- ``slurm_job``: a job as ranks use it
- ``job_ranks``: its ranks in a session
- ``node_link``: the connections to its nodes
- ``node``: the process on a node
- ``packets``: what passes through srun

``launch`` forks the ranks, and ``comm.deadlock`` explains their deadlocks. Imports ``launch``, ``comm`` and
``cluster``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def load_ipython_extension(ipython: InteractiveShell) -> None:
    """Add ``%%ranks``, ``%%rank`` and the object ``ranks`` to a notebook."""
    from dlo_lib.live_ranks.magic import load

    load(ipython)


def unload_ipython_extension(ipython: InteractiveShell) -> None:
    """End the ranks, and remove what ``load_ipython_extension`` added."""
    from dlo_lib.live_ranks.magic import unload

    unload(ipython)
