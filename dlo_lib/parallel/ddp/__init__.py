"""Data parallelism: each rank holds a copy of the model, and the gradients are averaged, bucket by bucket,
during backward.

- ``wrapper``: the module that is called
- ``reducer``: averages the gradients of a backward pass; it decides when a bucket is sent
- ``grad_bucket``: one message
- ``comm_hooks``: how a bucket is summed: exactly, or rounded
- ``compressed_sums``: hooks that send less than the gradients
- ``join``: ranks with unequal numbers of batches
- ``static_graph``: steps that use the same parameters each time

Imports ``sharding``, ``backward_pass``, ``held_params``, ``nested`` and ``protocol``, and ``comm``.
"""

from dlo_lib.parallel.ddp.wrapper import DDP

__all__ = ["DDP"]
