"""The deadlock explainer: what each rank does, whether a rank can make progress, and an explanation if not.

Holds the board in shared memory, the recorder of one rank's row, the watcher of all rows and its process on a
node, the exchange between nodes, the decision (``stuck_ranks``, which needs neither torch nor a clock), and
the words of explanations.

Imports ``comm.calls`` and ``comm.tracing``. Only ``rank_recorder`` imports torch.
"""
