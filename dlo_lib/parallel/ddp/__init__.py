"""Data parallelism: each rank holds a copy of the model, and the gradients are averaged, bucket by bucket,
during backward.

``wrapper`` is the module that is called, ``reducer`` averages the gradients of a backward pass, and
``grad_bucket`` is the message. ``comm_hooks``, ``join`` and ``static_graph`` are extras. Imports
``sharding.buckets`` and ``backward_pass``.
"""

from dlo_lib.parallel.ddp.wrapper import DDP

__all__ = ["DDP"]
