"""Ranks: start several from a notebook (:func:`run_ranks`), or find out which one this process is (:func:`place`)."""

from dlo_lib.comm.detail import Explain
from dlo_lib.launch.explained import explained
from dlo_lib.launch.failure import DeadLock, RankFailure
from dlo_lib.launch.place import Place, init_process_group, place
from dlo_lib.launch.run import Results, run_ranks

__all__ = ["DeadLock", "Explain", "Place", "RankFailure", "Results", "explained", "init_process_group", "place", "run_ranks"]
