"""Distributes a training step over ranks: data, sharded, tensor, pipeline, context and expert parallelism.

ddp        copies of the model; gradients are averaged      zero       optimiser state and gradients in shards
fsdp       parameters in shards; units are gathered         pipeline   layers on different ranks
tensor     parts of every matrix on each rank               context    parts of sequences; attention exchanges
expert     experts on different ranks; tokens travel        sharding   reduction and exchange of shards

``plan`` (degrees and choices), ``parallelize`` (which applies a plan) and ``checkpoint`` use these rooms.
The rooms use ``mesh`` (the ranks), ``protocol`` (the interface of every wrapper), ``materialize`` (values of
parameters on the meta device), ``backward_pass`` and ``nested`` (tensors in arguments). A room imports
``sharding`` and the modules below it, but no other room. ``dlo_lib.parallel`` may import ``dlo_lib.models``
and ``dlo_lib.optim``.
"""

from dlo_lib.parallel.ddp import DDP
from dlo_lib.parallel.fsdp import FSDP
from dlo_lib.parallel.sync_batch_norm import SyncBatchNorm
from dlo_lib.parallel.zero import ShardedDDP, ShardedOptimizer

__all__ = ["DDP", "FSDP", "ShardedDDP", "ShardedOptimizer", "SyncBatchNorm"]
