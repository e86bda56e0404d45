"""Ways to spread one training step over ranks."""

from dlo_lib.parallel.ddp import DDP
from dlo_lib.parallel.fsdp import FSDP
from dlo_lib.parallel.sync_batch_norm import SyncBatchNorm
from dlo_lib.parallel.zero import ShardedOptimizer
from dlo_lib.parallel.zero2 import ShardedDDP

__all__ = ["DDP", "FSDP", "ShardedDDP", "ShardedOptimizer", "SyncBatchNorm"]
