"""Ranks: starting them from a notebook, and finding one's place when a launcher has started them."""

from dlo_lib.launch.failure import RankFailure
from dlo_lib.launch.place import Place, init_process_group, place
from dlo_lib.launch.ranks import run_ranks

__all__ = ["Place", "RankFailure", "init_process_group", "place", "run_ranks"]
