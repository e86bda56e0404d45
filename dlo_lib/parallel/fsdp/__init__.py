"""Fully sharded data parallelism (ZeRO stage 3): each rank stores shards of the parameters, and a unit of the
model is gathered only while it computes.

What a step enters:

- ``fsdp``: the wrapper: it cuts the model into units, and connects the parts below
- ``unit_schedule``: decides when a unit is gathered and freed, in forward and in backward
- ``param_group``: the operations of one unit: all-gather, freeing, and the gradients for the reduce-scatter
- ``held_shards``: compares the module with what was wrapped
- ``dtensors``: the step of the optimiser, and the state as ``DTensor``s for PyTorch's checkpoints

A step also enters files beside this room: ``held_params`` and ``nested`` (the tensors in arguments and
results) in forward; ``sharding.transport`` (the exchange) in both; ``sharding.grad_reduction``, which decides
when gradients are reduced, ``backward_pass`` (the end of backward) and ``sharding.sharded_grad`` in backward.

What is built before a step, or used between steps:

- ``wrap``: cuts a model into units
- ``param``: one parameter of a unit, and what all units share
- ``absent_param``: what the model's code finds in place of a sharded parameter
- ``direct_calls``: calls that do not pass through the wrapper
- ``state_dict``: the state in the format of the unsharded module
- ``deferred_init``: a model that is built without storage

Imports ``sharding``, ``backward_pass``, ``held_params``, ``materialize``, ``mesh``, ``nested`` and
``protocol``.
"""

from dlo_lib.parallel.fsdp.fsdp import FSDP

__all__ = ["FSDP"]
