"""Fully sharded data parallelism (ZeRO stage 3): each rank stores shards of the parameters, and a unit of the
model is gathered only while it computes.

A step involves three files: ``fsdp`` (the wrapper, which decides when), ``param_group`` (the operations of
one unit) and ``sharding.grad_reduction`` (the backward pass). ``wrap`` cuts a model into units.
``held_shards`` compares the module with what was wrapped. ``absent_param`` stands for a sharded parameter.
``state_dict``, ``dtensors`` (for PyTorch's distributed checkpoints) and ``deferred_init`` are extras. Imports
``sharding``, ``backward_pass``, ``held_params`` and ``nested``.
"""

from dlo_lib.parallel.fsdp.fsdp import FSDP

__all__ = ["FSDP"]
