"""ZeRO stages 1 and 2: every rank holds the whole parameters. Stage 1 shards the optimiser state, stage 2
also the gradients.

``flat_params`` assigns the parameters to ranks, ``optimizer`` is stage 1, ``sharded_ddp`` is stage 2, and
``state_dict`` converts the state to the format of an unsharded optimiser. Imports ``sharding`` and
``backward_pass``.
"""

from dlo_lib.parallel.zero.optimizer import ShardedOptimizer
from dlo_lib.parallel.zero.sharded_ddp import ShardedDDP

__all__ = ["ShardedDDP", "ShardedOptimizer"]
