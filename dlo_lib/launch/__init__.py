"""Ranks: start several from a notebook (:func:`run_ranks`), or find out which one this process is (:func:`place`)."""

from dlo_lib.launch.failure import RankFailure
from dlo_lib.launch.place import Place, init_process_group, place
from dlo_lib.launch.run import run_ranks

__all__ = ["Place", "RankFailure", "init_process_group", "place", "run_ranks"]
