"""Pipeline parallelism: the layers are on different ranks, and micro-batches pass through them in the order
of a table.

The table, which decides the order of all actions:

- ``table``: the actions of each rank
- ``schedules``: creates the tables of the literature
- ``validate``: every dependency is respected, and there is no deadlock
- ``simulate``: makespan, bubble and memory for given costs
- ``draw``: a table as a figure
- ``bar_number``: the number in a bar of the figure

Its execution:

- ``runtime``: the pipeline as a model, and its ``train_step``
- ``step_runner``: the loop that executes a row of the table
- ``p2p``: the messages between stages
- ``split_backward``: the backward of linear layers in two parts
- ``action_times``: the measured times of a step's actions

The stages:

- ``partition``: cuts a model into stages so that the slowest is as fast as possible
- ``llama``: builds the stages of a Llama
- ``tied_embeddings``: sums the gradients of the two ends of a Llama

Imports ``protocol``, ``materialize``, ``sharding``, ``dlo_lib.models`` and ``dlo_lib.optim``.
"""
