"""ZeRO stages 1 and 2: every rank holds the whole parameters. Stage 1 shards the optimiser state, stage 2
also the gradients.

- ``optimizer``: stage 1
- ``flat_params``: assigns the parameters to ranks
- ``sharded_ddp``: stage 2
- ``state_dict``: converts the state to the format of an unsharded optimiser

Imports ``sharding``, ``backward_pass``, ``held_params`` and ``protocol``.
"""

from dlo_lib.parallel.zero.optimizer import ShardedOptimizer
from dlo_lib.parallel.zero.sharded_ddp import ShardedDDP

__all__ = ["ShardedDDP", "ShardedOptimizer"]
