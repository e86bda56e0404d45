"""Ranks that live as long as the notebook: cells run on all of them, and their variables stay.

    %load_ext dlo_lib.live_ranks

    %%ranks 4
    x = torch.tensor(float(rank))
    dist.all_reduce(x)
    x

``session`` starts ranks, sends them requests and makes them usable again after a deadlock, an error or an
interrupt; ``handle`` is the object ``ranks`` of a notebook; ``magic`` has ``%%ranks`` and ``%%rank``.
``rank`` and ``rank_shell`` run in a rank. ``transcript`` collects the output of a rank, and ``view`` shows
that of all. The ranks are forked, watched and explained by ``launch`` and ``comm.deadlock``.

Imports ``launch`` and ``comm``.
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
