"""The deadlock explainer: what each rank does, whether a rank can make progress, and an explanation if not.

The rows of the ranks:

- ``board``: one row per rank in shared memory
- ``rank_recorder``: a rank writes its row
- ``helper_threads``: what the other threads of a rank do

The decision and its words:

- ``stuck_ranks``: decides whether ranks can make progress, without torch or a clock
- ``reasons``: why ranks are stuck
- ``vocabulary``: how calls, ranks and groups are named
- ``explanation``: the whole message
- ``detail``: how detailed it is

The processes that look:

- ``watcher``: follows the rows
- ``node``: the process of a machine
- ``exchange``: the rows of other machines
- ``exit_status``: the end of a process in words

Imports ``comm.calls`` and ``comm.tracing``. Only ``rank_recorder`` imports torch.
"""
