"""The parts that the sharded wrappers share: packing, reduction, exchange and clipping. They know no wrapper.

From a gradient to its shard:

- ``buckets``: packs small tensors into messages
- ``transport``: exchanges shards, as collectives or point-to-point messages
- ``grad_reduction``: decides when the gradients of a backward pass are reduce-scattered

Gradients that are parts, and the functions that need the whole:

- ``sharded_grad``: gradients that know that they are parts
- ``operations``: what an operation does with such a gradient
- ``grad_functions``: PyTorch's norms, sums and overflow check over all ranks
- ``clip``: clipping by the global norm

Optimisers of parts:

- ``elementwise``: which optimisers may update a part
- ``held_parts``: optimisers of parameters that are parts

Imports ``backward_pass`` and ``dlo_lib.optim``.
"""

from dlo_lib.parallel.sharding import grad_functions  # noqa: F401 - defines the functions of gradients
