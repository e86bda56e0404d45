"""Distributes a training step over ranks: data, sharded, tensor, pipeline, context and expert parallelism.

What a user writes, and what applies it:

- ``plan``: the degrees and choices of a distribution
- ``mesh``: the ranks, with a named dimension for each form of parallelism
- ``parallelize``: applies a plan in six steps
- ``protocol``: the interface of every wrapper

The forms of parallelism:

- ``ddp``: copies of the model; gradients are averaged
- ``zero``: optimiser state and gradients in shards
- ``fsdp``: parameters in shards; units are gathered
- ``tensor``: parts of every matrix on each rank
- ``pipeline``: layers on different ranks
- ``context``: parts of sequences; attention exchanges
- ``expert``: experts on different ranks; tokens travel
- ``sync_batch_norm``: batch normalisation over the batches of all ranks

What they share:

- ``sharding``: reduction and exchange of shards
- ``backward_pass``: the begin and the end of a backward pass
- ``owned_params``: an optimiser of whole parameters, for ranks that hold parts
- ``whole_norms``: norms of whole parameters, for ranks that hold parts
- ``nested``: the tensors in arguments and results
- ``held_params``: whether a module still has the parameters that its wrapper knows
- ``materialize``: values of parameters on the meta device
- ``grad_scaler``: loss scaling of sharded gradients
- ``compile``: ``torch.compile`` of each block
- ``checkpoint``: sharded checkpoints
- ``flat_part``: a range of a tensor, described to PyTorch's checkpoints

A form imports ``sharding`` and modules of this folder, but no other form. The modules of this folder
import ``models`` and ``optim``.
"""

from dlo_lib.parallel.ddp import DDP
from dlo_lib.parallel.fsdp import FSDP
from dlo_lib.parallel.sync_batch_norm import SyncBatchNorm
from dlo_lib.parallel.zero import ShardedDDP, ShardedOptimizer

__all__ = ["DDP", "FSDP", "ShardedDDP", "ShardedOptimizer", "SyncBatchNorm"]
