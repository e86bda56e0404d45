"""Pipeline parallelism: the layers are on different ranks, and micro-batches pass through them in the order
of a table.

``table`` defines the table and ``schedules`` creates tables. ``validate``, ``simulate`` and ``draw`` read
them, and ``runtime`` executes them with ``p2p`` and ``split_backward``. ``partition`` cuts a model into
stages, ``llama`` builds the stages of a Llama, and ``tied_embeddings`` sums the gradients of its ends.
Imports ``protocol``, ``sharding.clip`` and ``sharding.sharded_grad``.
"""
