"""The parts that the sharded wrappers share: packing, reduction, exchange and clipping. They know no wrapper.

``buckets`` packs small tensors into messages. ``transport`` exchanges shards and reuses the buffers.
``grad_reduction`` reduce-scatters the gradients of a backward pass. ``clip`` clips gradients that are in
shards, and with ``sharded_grad`` PyTorch's own clipping and loss scaling do the same. ``elementwise`` tells
which optimisers may update shards. Imports
``backward_pass``.
"""

from dlo_lib.parallel.sharding import grad_functions  # noqa: F401 - defines the functions of gradients
